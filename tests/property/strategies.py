"""The small world of the property tests: few keys, few slots, short times, so that everything collides.

A chain is written as a word over SYMBOLS ("aba") and stands for the packed keys of its prefixes. In namespaces
with hashed keys, equal keys mean equal prefixes, as the contract wants. "raw" takes the symbol itself as the key:
there the same key stands behind many prefixes, and only the whole prefix tells blocks apart. "wild" does the same
in a namespace that is entered anywhere: chains that contradict each other.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import NamedTuple

from hypothesis import strategies as st

from kvpool_master.core.settings import Settings
from kvpool_proto.geometry import SLAB_BYTES_MIN
from kvpool_proto.namespace import NamespaceSpec

SYMBOLS = "abc"
WORD_MAX = 10
WORDS_NEAR = 4
SLAB_BYTES = SLAB_BYTES_MIN
"""Holds 7 slots of 8 KiB or 3 of 16 KiB."""
NODES: tuple[str, ...] = ("n1", "n2")
WORKERS = (0, 7, 7, 8)

starts = st.sampled_from([0, 0, 0, 1, 2, 3])
"""Where a chain or a hit starts; mostly at the root."""


class Word(NamedTuple):
    """A word that grows out of an earlier one, so that chains meet: its head, less `drop` symbols, then `tail`.

    near: which of the last words; None: none, `tail` alone.
    """

    near: int | None
    drop: int
    tail: str

    def of(self, earlier: list[str]) -> str:
        """The word, at least one symbol, at most WORD_MAX."""
        head = ""
        if self.near is not None and earlier:
            head = earlier[-1 - self.near % min(len(earlier), WORDS_NEAR)]
            head = head[: len(head) - self.drop]
        return (head + self.tail or SYMBOLS[0])[:WORD_MAX]


words = st.builds(
    Word, st.none() | st.integers(0, WORDS_NEAR - 1), st.sampled_from([0, 0, 0, 1, 2, 3]), st.text(SYMBOLS, max_size=3)
)
long_words = st.builds(Word, st.none() | st.integers(0, WORDS_NEAR - 1), st.just(0), st.text("ab", max_size=8))
delays_ms = st.sampled_from([0, 1, 40, 90, 150, 250, 320, 450, 900, 1_100, 3_200])


@dataclass(frozen=True, slots=True)
class Kind:
    """A namespace of this world: its spec and how its keys come about."""

    spec: NamespaceSpec
    hashed: bool = True

    def chain(self, word: str, start: int = 0) -> bytes:
        """The packed keys of word[start:], each standing for all of the word before it."""
        size = self.spec.key_bytes
        if not self.hashed:
            return b"".join([symbol.encode().ljust(size, b".") for symbol in word[start:]])
        ends = range(start + 1, len(word) + 1)
        return b"".join([hashlib.blake2b(word[:end].encode(), digest_size=size).digest() for end in ends])


def _spec(model: str, **fields: object) -> NamespaceSpec:
    base = NamespaceSpec(model=model, block_tokens=16, part_bytes=8_000, dtype="uint8", key_bytes=8)
    return replace(base, **fields)  # type: ignore[arg-type]


KINDS = {
    "root": Kind(_spec("root")),
    "ranks": Kind(_spec("ranks", parts=3, part_bytes=16_384, key_bytes=16)),
    "raw": Kind(_spec("raw", parts=2), hashed=False),
    "any": Kind(_spec("any", entry="any")),
    "anyranks": Kind(_spec("anyranks", entry="any", parts=2, part_bytes=16_000, key_bytes=32)),
    "wild": Kind(_spec("wild", entry="any"), hashed=False),
}

BASE = Settings(
    chain_blocks_max=64,
    lease_min_ms=100,
    lease_max_ms=400,
    lease_life_max_ms=1_000,
    lease_bytes_per_ms=200,
    write_min_ms=200,
    write_max_ms=800,
    write_bytes_per_ms=200,
    reserve_share_permille=1_000,
    quarantine_ms=3_000,
    incomplete_grace_ms=300,
    remember_ms=1_000,
    heartbeat_ms=100,
    suspect_ms=500,
    retire_ms=2_500,
    stall_ms=1 << 40,
    tick_spans_max=4,
    evict_step_spans_max=2,
)
SETTINGS = {
    "base": BASE,
    "replay-like": replace(BASE, watermark_high_permille=1_000, watermark_low_permille=1_000, evict_ahead=False),
    "eager": replace(BASE, watermark_high_permille=500, watermark_low_permille=300, bind_ahead_permille=0),
    "narrow": replace(
        BASE, reserve_share_permille=500, leases_max=2, reservations_max=2, evict_inline_spans_max=1, stall_ms=400
    ),
}

# -- many nodes ------------------------------------------------------------------------------------------

MANY_NODES: tuple[str, ...] = ("n1", "n2", "n3")
TENANTS = ("a", "b")
QUOTAS_BYTES = (0, 4 * 8_192, 6 * 16_384, 1 << 30)

MANY_KINDS = {
    "plain": Kind(_spec("plain", tenant="a")),
    "twice": Kind(_spec("twice", tenant="a", replicas=2)),
    "ranks": Kind(_spec("ranks", tenant="b", parts=2)),
    "ranks twice": Kind(_spec("ranks twice", tenant="b", parts=2, part_bytes=16_000, replicas=2)),
    "any": Kind(_spec("any", tenant="b", entry="any")),
    "any twice": Kind(_spec("any twice", tenant="a", entry="any", replicas=2)),
}

_MANY = replace(
    BASE,
    spread_run_bytes=2 * 8_192,
    ramp_ms=700,
    copies_per_node_max=2,
    copy_run_bytes_max=3 * 8_192,
    copy_ms=600,
    report_window_ms=300,
    report_hold_ms=700,
    probe_ms=200,
)
MANY_SETTINGS = {
    "base": _MANY,
    "hits": replace(_MANY, copy_hits_min=2),
    "eager": replace(_MANY, watermark_high_permille=500, watermark_low_permille=300, bind_ahead_permille=0),
    "narrow": replace(_MANY, reserve_share_permille=500, evict_inline_spans_max=1, copies_per_node_max=1),
    "replay-like": replace(_MANY, watermark_high_permille=1_000, watermark_low_permille=1_000, evict_ahead=False),
}
