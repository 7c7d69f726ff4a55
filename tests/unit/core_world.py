"""A small pool for unit tests of the core: one namespace, keys that are words, orders answered at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool_master.core import extents as ex
from kvpool_master.core import messages as m
from kvpool_master.core.memory import NO_MEMORY, Memory
from kvpool_master.core.pool import Pool
from kvpool_master.core.settings import Settings
from kvpool_proto.geometry import slab_bytes_for
from kvpool_proto.namespace import NamespaceSpec

KEY_BYTES = 8
PART_BYTES = 16384
QUICK: dict[str, Any] = {
    "lease_min_ms": 100,
    "lease_max_ms": 200,
    "lease_life_max_ms": 1_000,
    "write_min_ms": 100,
    "write_max_ms": 200,
    "quarantine_ms": 5_000,
    "incomplete_grace_ms": 300,
    "reserve_share_permille": 1000,
    "evict_ahead": False,
    "suspect_ms": 100_000,
    "retire_ms": 200_000,
    "stall_ms": 1 << 40,
    "remember_ms": 1_000,
}


def chain(words: Sequence[int] | str) -> bytes:
    """Keys of a chain: each key is a hash of the path to it would be; here, the path itself, folded."""
    number = 1
    keys: list[bytes] = []
    for word in words:
        number = (number * 257 + (ord(word) if isinstance(word, str) else word + 1)) % (1 << 61)
        keys.append(number.to_bytes(KEY_BYTES, "big"))
    return b"".join(keys)


class World:
    """A pool with one node `n` and one namespace; time moves only when told."""

    def __init__(
        self, *, slots: int = 64, slabs: int = 1, parts: int = 1, entry: str = "root", epoch: int = 1,
        replicas: int = 1, nodes: Sequence[str] = ("n",), memory: Memory = NO_MEMORY, **settings: Any,
    ) -> None:  # fmt: skip
        chosen: dict[str, Any] = {**QUICK, "bind_ahead_permille": 1000, **settings}
        self.pool = Pool(Settings(**chosen), epoch, memory)
        self.now = 0
        self.uncleared: list[m.ClearSlots] = []
        self.copies: list[m.CopySlots] = []
        """Orders that are not answered; see copied()."""
        self.clears = True
        """Whether nodes carry out ClearSlots at once."""
        self.slab_bytes = slab_bytes_for(slots, PART_BYTES)
        self.slabs = slabs
        self.parts = parts
        self.spec = NamespaceSpec(
            model="m",
            block_tokens=1,
            part_bytes=PART_BYTES,
            dtype="int8",
            key_bytes=KEY_BYTES,
            parts=parts,
            entry=entry,  # type: ignore[arg-type]
            replicas=replicas,
        )
        self.ports = len(nodes) > 1
        for name in nodes:
            self.register(name, 1)
        self.namespace: bytes = self.do(m.OpenNamespace(self.spec)).namespace

    def register(self, node: str, incarnation: int) -> Any:
        """A node with one segment joins; with a data port where there are several from the start."""
        offer = m.SegmentOffer(0, self.slabs * self.slab_bytes, self.slab_bytes)
        return self.do(m.Register(node, incarnation, (offer,), data_address=f"{node}:1" if self.ports else ""))

    def do(self, command: m.Command, after_ms: int = 0) -> Any:
        """Apply a command `after_ms` from now, confirm slabs, cross-check everything."""
        self.now += after_ms
        try:
            outcome = self.pool.apply(command, self.now)
        finally:
            self.pool.check_invariants()
        for effect in getattr(outcome, "effects", ()):
            if isinstance(effect, m.BindSlab):
                incarnation = self.pool.liveness.nodes[effect.node].incarnation
                self.do(m.SlabBound(effect.node, incarnation, effect.segment, effect.slab, effect.slot_bytes))
            if isinstance(effect, m.ClearSlots):
                self.uncleared.append(effect)
            if isinstance(effect, m.CopySlots):
                self.copies.append(effect)
        if self.clears:
            self.clear()
        return outcome

    def clear(self) -> None:
        """The nodes clear all headers that they were told to."""
        for order in self.uncleared:
            node = self.pool.liveness.nodes.get(order.node)
            if node is not None:
                self.pool.apply(m.SlotsCleared(order.node, node.incarnation, order.order), self.now)
        self.uncleared.clear()
        self.pool.check_invariants()

    def tick(self, after_ms: int = 0) -> m.Done:
        """Let time do its work."""
        return self.do(m.Tick(), after_ms)

    def copied(self, blocks: int = 1 << 30) -> int:
        """The nodes answer all orders to copy, each with so many blocks at most; how many orders."""
        orders, self.copies = self.copies, []
        for order in orders:
            node = self.pool.liveness.nodes.get(order.node)
            if node is not None:
                self.do(m.SlotsCopied(order.node, node.incarnation, order.order, min(blocks, order.source[1])))
        return len(orders)

    def settle(self, ticks: int = 50) -> None:
        """Let copies be made until no more are ordered."""
        idle = 0
        for _ in range(ticks):
            self.tick(after_ms=1)
            idle = 0 if self.copied() else idle + 1
            if idle > 2:
                return

    def nodes_of(self, keys: bytes, node: str = "") -> list[str]:
        """The node of each block (its first part) that a lookup from `node` is given; the lease is ended."""
        hit = self.do(m.Lookup(self.namespace, keys, 0, self.ident("where"), node))
        self.release("where")
        places = slots_of(hit.extents)
        self.now += 2_000  # the released id is forgotten
        self.tick()
        return [self.pool.space.segments[places[block, 0][0]].node for block in range(hit.blocks)]

    def state(self, node: str) -> Any:
        """How the pool sees a node."""
        return next(one for one in self.pool.snapshot(self.now).nodes if one.node == node)

    def ident(self, name: str) -> bytes:
        """A 16-byte id for a name."""
        return name.encode().ljust(16, b".")

    def reserve(self, name: str, keys: bytes, parts: tuple[int, int] | None = None, **more: Any) -> m.Reserved:
        """Reserve a chain; parts default to all, the parent to the root."""
        low, high = parts or (0, self.parts)
        parent = more.pop("parent", m.Parent.ROOT)
        return self.do(m.Reserve(self.namespace, self.ident(name), parent, keys, low, high, **more))

    def commit(
        self, name: str, blocks: int, parts: tuple[int, int] | None = None, *, final: bool = False, worker: int = 0
    ) -> m.Committed:
        """Commit a running total of some parts, by default all."""
        low, high = parts or (0, self.parts)
        return self.do(m.Commit(self.ident(name), low, high, blocks, final, worker))

    def put(self, keys: bytes, name: str = "", **more: Any) -> m.Reserved:
        """Store what is missing of a chain, all parts, at once."""
        name = name or f"put{self.now}-{len(self.pool.writes.ended)}"
        answer = self.reserve(name, keys, **more)
        granted = sum(run.blocks for run in answer.runs if run.state is m.RunState.YOURS and run.part_from == 0)
        if granted:
            self.commit(name, granted, final=True)
        return answer

    def lookup(self, keys: bytes, skip: int = 0, lease: str = "lease") -> m.Hit:
        """Look a chain up and lease what is there."""
        return self.do(m.Lookup(self.namespace, keys, skip, self.ident(lease)))

    def release(self, *leases: str) -> int:
        """End leases; how many were alive."""
        return self.do(m.Release(tuple(self.ident(lease) for lease in leases))).released

    def peek(self, keys: bytes, skip: int = 0, *, explain: bool = False) -> m.Peeked:
        """The question without its consequences."""
        return self.do(m.Peek(self.namespace, keys, skip, explain))

    def hit(self, keys: bytes, skip: int = 0) -> int:
        """How many blocks could be had now."""
        return self.peek(keys, skip).blocks

    @property
    def used_slots(self) -> int:
        """Slots that are not free, in all segments."""
        return sum(one.allocator.used_bytes() for one in self.pool.space.segments.values()) // PART_BYTES


def slots_of(packed: bytes) -> dict[tuple[int, int], tuple[int, int]]:
    """(block, part) -> (segment, slot) of packed extents."""
    return {
        (e.offset + block, part): (e.segment, e.first_slot + block * e.stride + part - e.part_from)
        for e in ex.extents(packed)
        for block in range(e.blocks)
        for part in range(e.part_from, e.part_to)
    }
