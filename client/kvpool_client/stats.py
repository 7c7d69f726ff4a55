"""What a KVPool has done so far: counters, read as one frozen value."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from kvpool_proto import pool_pb2 as pb
from kvpool_proto.namespace import NamespaceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Totals since connect, over all namespaces and threads.

    Blocks count once however many parts were copied; bytes count every part; remote_*: those of them that lie on other
    nodes. *_breaks: how often the Master, the node client or another node was given up until it answers a probe.
    *_short: by reason ("unreachable", "stale_epoch", "bypassed", ...: answers.py), how many calls did less than they
    were asked for.
    """

    lookups: int = 0
    lookup_blocks: int = 0
    lookup_tokens: int = 0
    hit_blocks: int = 0
    hit_tokens: int = 0
    loads: int = 0
    loaded_blocks: int = 0
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    remote_loaded_bytes: int = 0
    load_seconds: float = 0.0
    stores: int = 0
    stored_blocks: int = 0
    stored_tokens: int = 0
    stored_bytes: int = 0
    remote_stored_bytes: int = 0
    store_seconds: float = 0.0
    existing_blocks: int = 0
    verify_failures: int = 0
    bad_blocks_confirmed: int = 0
    master_breaks: int = 0
    node_breaks: int = 0
    peer_breaks: int = 0
    lookups_short: Mapping[str, int]
    loads_short: Mapping[str, int]
    stores_short: Mapping[str, int]


_NUMBERS = tuple(field.name for field in fields(Stats) if not field.name.endswith("_short"))


class Counters:
    """Totals of a KVPool, and what of them was not told to the node client yet. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, float] = dict.fromkeys(_NUMBERS, 0)
        self._short: dict[str, Counter[str]] = {"lookups": Counter(), "loads": Counter(), "stores": Counter()}
        self._untold: dict[bytes, pb.NamespaceUse] = {}

    def called(self, call: str, spec: NamespaceSpec, reason: str, **amounts: float) -> None:
        """Count one call ("lookups", "loads", "stores") in a namespace; reason: why it did less than asked, if so.

        amounts: of Stats; those in blocks are counted in tokens as well.
        """
        tokens = {
            name.replace("_blocks", "_tokens"): amount * spec.block_tokens
            for name, amount in amounts.items()
            if name.endswith("_blocks")
        }
        with self._lock:
            self._totals[call] += 1
            for name, amount in [*tokens.items(), *amounts.items()]:
                if name in self._totals:
                    self._totals[name] += amount
            use = self._untold.get(spec.id)
            if use is None:
                use = pb.NamespaceUse(namespace_id=spec.id, model=spec.model, block_tokens=spec.block_tokens)
                self._untold[spec.id] = use
            if call == "lookups":
                use.lookups += 1
            for name, amount in amounts.items():
                seconds = name.endswith("_seconds")
                field = name.replace("_seconds", "_us") if seconds else name
                setattr(use, field, getattr(use, field) + int(amount * 1e6 if seconds else amount))
            if reason:
                self._short[call][reason] += 1
                use.short[f"{call.removesuffix('s')}/{reason}"] += 1

    def add(self, **amounts: float) -> None:
        """Count what the node client is not told of: amounts of Stats."""
        with self._lock:
            for name, amount in amounts.items():
                self._totals[name] += amount

    def take_untold(self) -> pb.LocalUse:
        """What was not told yet; it counts as told."""
        with self._lock:
            use, self._untold = pb.LocalUse(namespaces=self._untold.values()), {}
            return use

    def snapshot(self, **breaks: int) -> Stats:
        """The totals now. breaks: those of Stats, which the breakers count."""
        with self._lock:
            short = {f"{call}_short": MappingProxyType(dict(reasons)) for call, reasons in self._short.items()}
            return Stats(**{**self._totals, **breaks}, **short)  # pyright: ignore[reportArgumentType]
