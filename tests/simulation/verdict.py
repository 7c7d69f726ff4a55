"""What must be true in the end, when everybody is well again and all is quiet.

Rules checked here
  - Every block whose store was answered as whole is found, unless the core said why it went, it was removed or purged
    by somebody, its file was discarded, or a writer that slept too long spoiled it.
  - Every block of the directory has its bytes, unless it was spoiled.
  - No lease, reservation, quarantine or deferred byte is left.
  - The pool works: on every node a fresh chain can be stored and read back (world.py asks for that).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import xxhash

from kvpool_client.headers import COMMITTED, slot_checks
from kvpool_master.core import extents as ex
from kvpool_master.core import invariants
from kvpool_master.core.messages import Peek, Reason
from kvpool_proto.namespace import NamespaceSpec
from simulation.facts import Place, bytes_of, keys_of, places_of

if TYPE_CHECKING:
    from simulation.world import World

EXCUSES = ("EVICTED", "INCOMPLETE", "REMOVED", "PURGED")


@dataclass(slots=True)
class Promise:
    """A block whose store was answered. chain: up to and with it.

    parts: part -> since when its store went on.
    """

    spec: NamespaceSpec
    chain: bytes
    parts: dict[int, int] = field(default_factory=dict)


class Promises:
    """All blocks that the pool said it has."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._made: dict[tuple[bytes, bytes], Promise] = {}
        self._removed: set[tuple[bytes, bytes]] = set()

    def stored(self, spec: NamespaceSpec, chain: bytes, parts: range, since_us: int) -> None:
        """A store of all these blocks was answered."""
        for block, key in enumerate(keys_of(chain, spec.key_bytes)):
            promise = self._made.setdefault((spec.id, key), Promise(spec, chain[: (block + 1) * spec.key_bytes]))
            for part in parts:
                promise.parts[part] = since_us

    def removing(self, namespace: bytes, keys: list[bytes]) -> None:
        """Somebody asked to remove them, and may or may not have been heard."""
        self._removed.update((namespace, key) for key in keys)

    def kept(self) -> None:
        """Fail unless every promise is kept or excused. The world is quiet."""
        world = self._world
        missing: set[tuple[bytes, bytes]] = set()
        promises = sorted(self._made.items(), key=lambda item: len(item[1].chain))
        for (namespace, key), promise in promises:
            if len(promise.parts) < promise.spec.parts:
                continue
            world.checkers.seen.add("promised blocks")
            found, reason = self._peek(promise)
            if found:
                world.checkers.seen.add("promises kept")
                continue
            missing.add((namespace, key))
            before = [(namespace, one) for one in keys_of(promise.chain, promise.spec.key_bytes)[:-1]]
            excuse = self._excuse((namespace, key), promise) or any(one in missing for one in before)
            if not excuse:
                last = world.checkers.left.get((namespace, key))
                world.hub.fail(
                    f"LOST: block {len(before)} of chain {promise.chain[-4:].hex()} of {promise.spec.model} was stored"
                    f" at {promise.parts}, and is gone: {reason.name}; the core said of it: {last}"
                )
                return

    def _peek(self, promise: Promise) -> tuple[bool, Reason]:
        spec, core = promise.spec, self._world.core
        skip = len(promise.chain) // spec.key_bytes - 1
        peeked = core.apply(Peek(spec.id, promise.chain, skip), core._now_ms)
        return peeked.blocks == 1, peeked.reason

    def _excuse(self, block: tuple[bytes, bytes], promise: Promise) -> str:
        """Why a block may be gone; empty: it may not."""
        checkers = self._world.checkers
        left = checkers.left.get(block, {})
        since_us = min(promise.parts.values())
        for reason in EXCUSES:
            if left.get(reason, -1) >= since_us:
                return reason.lower()
        if checkers.purged_us.get(block[0], -1) >= since_us:
            return "purged"  # perhaps while no Master knew of it
        if block in checkers.spoiled:
            return "spoiled"
        if block in self._removed:
            return "removed"
        if checkers.losses.excuse(block):
            return "discarded"
        return ""

    def sound(self) -> None:
        """Fail unless every block of the directory has its bytes in its slots, or was spoiled."""
        world = self._world
        for namespace in world.core.namespaces.values():
            for span in invariants._spans(namespace.tree):
                keys = keys_of(span.keys, namespace.spec.key_bytes)
                replicas = world.core.forest.replicas.of.get(span, b"")
                world.checkers.seen.add("replicas looked at in the end", len([*ex.records(replicas)]))
                for place in places_of(ex.records(span.extents + replicas)):
                    if world.core.space.segments[place.segment].retired:
                        continue  # its node is gone; it is about to be taken apart
                    block = (namespace.spec.id, keys[place.block])
                    wrong = self._wrong(namespace.spec, block[1], place) if span.have >> place.part & 1 else ""
                    world.checkers.seen.add("blocks looked at in the end")
                    if wrong and block not in world.checkers.spoiled:
                        world.hub.fail(f"NOT SOUND: the core has {place} of {namespace.spec.model}, but {wrong}")

    def _wrong(self, spec: NamespaceSpec, key: bytes, place: Place) -> str:
        segment = self._world.segment(place.segment)
        try:
            header = segment.headers(place.slot, 1, spec.slot_bytes).copy()
            payload = segment.slots(place.slot, 1, spec.slot_bytes)[0, : spec.part_bytes]
            generation = segment.generation(segment.slab_of(place.slot, spec.slot_bytes))
        except Exception as error:
            return f"its slot cannot be read: {error!r}"
        if header["check"][0] != slot_checks(header, place.slot, generation, spec.slot_bytes)[0]:
            return "its header is not sound"
        says = (int(header["state"][0]), int(header["stamp"][0]), header["key"][0].tobytes()[: spec.key_bytes])
        if says != (COMMITTED, place.stamp, key) or int(header["part"][0]) != place.part:
            return f"its header says {says}"
        if int(header["checksum"][0]) != xxhash.xxh3_64_intdigest(payload):
            return "its checksum is wrong"
        return "" if (payload == bytes_of(spec.id, key, place.part, spec.part_bytes)).all() else "its bytes are wrong"


def leaks(world: World) -> str:
    """What is still held in a pool that nobody uses; empty: nothing."""
    core = world.core
    held = {
        "leases": len(list(core.leases)),
        "reservations": len(core.writes.open),
        "quarantined reservations": len(core.writes.quarantine),
        "reserved bytes": sum(one.reserved_bytes for one in core.space.segments.values()),
        "quarantined bytes": sum(one.quarantined_bytes for one in core.space.segments.values()),
        "deferred bytes": sum(one.deferred_bytes for one in core.space.segments.values()),
        "copies": len(core.copies.open),
        "draining nodes": len(core.members.draining),
        "writes of peers": sum(node.daemon.node.writes.open for node in world.nodes.values()),
        "orders to copy": sum(node.daemon._copier.open_orders for node in world.nodes.values()),
    }
    held |= {
        f"bytes of {tenant} above its quota": max(0, core.quotas.used(tenant) - quota.limit_bytes)
        for tenant, quota in core.quotas.limits.items()
    }
    return ", ".join(f"{count} {what}" for what, count in held.items() if count)
