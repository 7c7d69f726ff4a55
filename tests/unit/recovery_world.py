"""What node files would hold of a pool, and a next life of the Master that hears of it: for tests of recovery."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvpool_master.core import extents as ex
from kvpool_master.core import messages as m
from kvpool_master.core.memory import Memory
from kvpool_master.core.pool import Pool
from kvpool_master.core.spans import Span, Tree
from unit.core_world import KEY_BYTES, World

CONTENTS = 77


@dataclass
class Held:
    """One strand in one segment, as a node would tell it."""

    namespace: bytes
    slot_bytes: int
    parts: tuple[int, int]
    strand: m.Strand


@dataclass
class File:
    """What one segment's file says."""

    slabs: tuple[tuple[int, int], ...] = ()
    held: list[Held] = field(default_factory=list[Held])
    writing: list[tuple[int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int]])
    """(slot bytes, first slot, slots, worker)."""


def files_of(pool: Pool) -> dict[str, File]:
    """The files of all nodes (one segment each), as they are when all committed blocks have their headers."""
    files: dict[str, File] = {}
    nodes: dict[int, str] = {}
    for node in pool.liveness.nodes.values():
        (segment,) = node.segments
        nodes[segment.handle] = node.name
        bound = [(slab, size) for size, runs in segment.allocator.per_size.items() for slab in sorted(runs.slabs)]
        files[node.name] = File(tuple(bound))
    for namespace in pool.namespaces.values():
        for span in _spans(namespace.tree):
            for handle, held in _strands(span):
                if handle in nodes:
                    files[nodes[handle]].held.append(held)
    return files


def _spans(tree: Tree) -> Iterator[Span]:
    stack = [*tree.root.kids(), *tree.orphans.kids()]
    while stack:
        span = stack.pop()
        yield span
        stack += span.kids()


def _parent(span: Span) -> m.Parent | bytes:
    assert span.parent is not None
    if span.parent.keys:
        return span.parent.keys[-span.tree.key_bytes :]
    return m.Parent.ROOT if span.parent is span.tree.root else m.Parent.UNKNOWN


def _strands(span: Span) -> Iterator[tuple[int, Held]]:
    tree = span.tree
    _, committed = ex.without_parts(span.extents, span.have)
    for offset, blocks, handle, first, low, high, stride, stamp in committed:
        edge = offset * tree.key_bytes
        parent = span.keys[edge - tree.key_bytes : edge] if offset else _parent(span)
        keys = span.keys[edge : edge + blocks * tree.key_bytes]
        strand = m.Strand(parent, keys, ((blocks, first, stride, stamp),))
        yield handle, Held(tree.namespace, tree.slot_bytes, (low, high), strand)


def segment_offer(world: World, *, contents: int = CONTENTS, holds: bool = True) -> m.SegmentOffer:
    """The world's segment, with contents."""
    return m.SegmentOffer(0, world.slabs * world.slab_bytes, world.slab_bytes, contents=contents, holds=holds)


def restart(world: World, memory: Memory | None = None, after_ms: int = 1_000) -> None:
    """A new life of the Master, an epoch later, that knows its namespaces and nodes; nobody has registered yet."""
    old = world.pool
    world.now += after_ms
    known = Memory(
        namespaces=tuple(one.spec for one in old.namespaces.values()),
        tombstones=tuple(old.tombstones.items()),
        nodes=tuple(old.liveness.nodes),
        grace_ms=max(old.settings.lease_max_ms, old.settings.write_max_ms),
    )
    world.pool = Pool(old.settings, old.epoch + 1, known if memory is None else memory, world.now)


def come_back(world: World, node: str = "n", incarnation: int = 1, **offer: Any) -> tuple[int, int]:
    """A node with contents registers at a Master that does not know it: (handle, inventory number or 0)."""
    command = m.Register(node, incarnation, (segment_offer(world, **offer),), epoch_seen=world.pool.epoch - 1)
    answer = world.do(command)
    asked = [effect.number for effect in answer.effects if isinstance(effect, m.AskInventory) and effect.node == node]
    return answer.handles[0], asked[0] if asked else 0


def report(
    world: World, file: File, handle: int, number: int, node: str = "n", incarnation: int = 1, *, end: bool = True
) -> list[m.Taken]:
    """A node's whole inventory, a message a strand; what became of each."""
    head = (node, incarnation, number)
    world.do(m.InventorySlabs(*head, handle, file.slabs))
    taken = [tell(world, held, handle, head) for held in file.held]
    for slot_bytes, first, slots, worker in file.writing:
        world.do(m.InventoryWriting(*head, handle, slot_bytes, ((first, slots, worker),)))
    if end:
        blocks = sum(blocks_of(held.strand) for held in file.held)
        world.do(m.InventoryEnd(*head, blocks, sum(run[2] for run in file.writing)))
    return taken


def tell(world: World, held: Held, handle: int, head: tuple[str, int, int]) -> m.Taken:
    """One strand of an inventory."""
    return world.do(
        m.InventoryStrands(
            *head, handle, held.namespace, KEY_BYTES, held.slot_bytes, held.parts[0], held.parts[1], (held.strand,)
        )
    )


def blocks_of(strand: m.Strand) -> int:
    """How many blocks a strand has."""
    return sum(extent[0] for extent in strand.extents)


def recover(world: World, order: Iterable[int] | None = None) -> None:
    """A Master's new life with node "n" back and all of its inventory told, its strands in that order."""
    file = files_of(world.pool)["n"]
    if order is not None:
        file.held = [file.held[at] for at in order]
    restart(world)
    report(world, file, *come_back(world))
