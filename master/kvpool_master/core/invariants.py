"""The cross-check of every index against every other. For tests, the simulation and the debug RPC.

What must hold at any moment between two commands stands in the assertions; each names what it found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvpool_master.core import extents as ex
from kvpool_master.core.eviction import is_leaf
from kvpool_master.core.segments import Segment
from kvpool_master.core.spans import Piece, Span, Tree, key_numbers

if TYPE_CHECKING:
    from kvpool_master.core.pool import Pool

_COUNTED = ("reserved", "quarantined", "deferred", "unclaimed")

Slots = dict[int, dict[int, list[tuple[int, int]]]]
"""Segment -> slot size -> runs held, as (first, slots)."""


def check_pool(pool: Pool) -> int:
    """Raise AssertionError on the first thing that does not hold. Returns the number of spans of live trees."""
    held: Slots = {}
    pending: list[Piece] = []
    live: list[Span] = []
    for namespace in pool.namespaces.values():
        spans = list(_spans(namespace.tree))
        live += spans
        _check_tree(namespace.tree, spans)
        for span in spans:
            _check_span(pool, span)
            pending += span.writers or ()
    dead = [span for tree in pool.forest.dead_trees() for span in _spans(tree)]
    for tree in pool.forest.dead_trees():
        assert not tree.alive
    for span in [*live, *dead]:
        _hold(held, ex.records(span.extents), span.tree.slot_bytes)
    _check_dead_stacks(pool, held)
    for slot_bytes, rows in _waiting(pool):
        _hold(held, iter(rows), slot_bytes)
    for reservation in pool.writes.quarantine.values():
        _hold(held, ex.records(reservation.quarantined), reservation.tree.slot_bytes)
    for copy in pool.copies.open.values():
        _hold(held, iter([copy.target]), copy.pin.span.tree.slot_bytes)
    for span, packed in pool.forest.replicas.of.items():
        _hold(held, ex.records(packed), span.tree.slot_bytes)
    for segment in pool.space.segments.values():
        _check_slots(segment, held.get(segment.handle, {}))
    _check_enlisted(pool, live)
    _check_heaps(pool, live)
    _check_leases(pool, live)
    _check_writes(pool, pending)
    _check_bytes(pool)
    _check_hidden(pool)
    _check_replicas(pool, {*live, *dead})
    _check_copies(pool)
    _check_quotas(pool, live)
    return len(live)


def _waiting(pool: Pool) -> Iterator[tuple[int, list[ex.Record]]]:
    """Rows that no span holds and that are not free: deferred, to be cleared, stray, unclaimed, not yet told."""
    yield from pool.space.deferred_rows()
    yield from pool.clearing.rows()
    yield from pool.strays.rows()
    yield from pool.unclaimed.rows()
    for segment in pool.space.segments.values():
        if segment.claims is not None:
            for slot_bytes, first, slots in segment.claims.unclaimed():
                yield slot_bytes, [(0, slots, segment.handle, first, 0, 1, 1, 0)]


def _spans(tree: Tree) -> Iterator[Span]:
    stack = [*tree.root.kids(), *tree.orphans.kids()]
    while stack:
        span = stack.pop()
        yield span
        stack += span.kids()


def _check_dead_stacks(pool: Pool, held: Slots) -> None:
    """Spans of a dead tree that is being taken apart wait on its stack, no longer below its roots."""
    for stack in pool.forest.dead_stacks():
        for top in stack:
            if top.parent is None and not top.keys:
                continue  # a root: its spans were counted with the tree
            todo = [top]
            while todo:
                span = todo.pop()
                _hold(held, ex.records(span.extents), span.tree.slot_bytes)
                todo += span.kids()


def _hold(held: Slots, rows: Iterator[ex.Record], slot_bytes: int) -> None:
    for _, blocks, segment, first, low, high, stride, _ in rows:
        runs = held.setdefault(segment, {}).setdefault(slot_bytes, [])
        if high - low == stride:
            runs.append((first, blocks * stride))
        else:
            runs += [(first + block * stride, high - low) for block in range(blocks)]


def _check_tree(tree: Tree, spans: list[Span]) -> None:
    assert tree.alive
    assert tree.spans == len(spans), (tree.spans, len(spans))
    assert tree.blocks == sum(span.blocks for span in spans if span.have == tree.full)
    held = sum(row[1] * (row[5] - row[4]) for span in spans for row in ex.records(span.extents))
    assert tree.bytes == held * tree.slot_bytes, (tree.bytes, held * tree.slot_bytes)
    for root in (tree.root, tree.orphans):
        assert root.parent is None and not root.keys and root.have == 0
        assert root.children is None or root.children
    if tree.index is None:
        assert not tree.orphans.children
        return
    if not tree.anywhere:  # equal keys in several places have one entry, or none
        for number, span in tree.index.items():
            assert span.parent is not None and number in set(key_numbers(span.keys, tree.key_bytes))
        return
    numbers = [(number, span) for span in spans for number in key_numbers(span.keys, tree.key_bytes)]
    assert len(numbers) == len(tree.index), "a key is in two spans, or the index holds one that is in none"
    assert all(tree.index[number] is span for number, span in numbers)


def _check_span(pool: Pool, span: Span) -> None:
    tree = span.tree
    assert span.keys and len(span.keys) % tree.key_bytes == 0
    parent = span.parent
    assert parent is not None and parent.child(span.first_key()) is span
    assert span.children is None or span.children
    steps = span.steps()
    assert steps[-1][0] == span.blocks
    assert [end for end, _ in steps] == sorted({end for end, _ in steps}), steps
    assert [age for _, age in steps] == sorted({age for _, age in steps}, reverse=True), steps
    writing = span.writing
    assert span.have & writing == 0 and (span.have | writing) & ~tree.full == 0
    assert sum(piece.mask.bit_count() for piece in span.writers or ()) == writing.bit_count()
    assert span.writers is None or span.writers
    cover: Counter[int] = Counter()
    last = (-1, -1)
    for row in ex.records(span.extents):
        assert (row[4], row[0]) > last and row[0] + row[1] <= span.blocks and row[4] < row[5] <= row[4] + row[6]
        last = (row[4], row[0])
        for part in range(row[4], row[5]):
            cover[part] += row[1]
    needed = span.have | writing
    assert all(cover[part] == span.blocks * (needed >> part & 1) for part in range(tree.parts)), (cover, needed)
    if not needed:
        assert span.children or span.leases, "a hole that nothing needs"
    if span.have not in (0, tree.full) and not span.writers:
        assert pool.forest.is_watched(span), "an incomplete span that nobody watches"


def _check_slots(segment: Segment, held: dict[int, list[tuple[int, int]]]) -> None:
    allocator = segment.allocator
    bound: set[int] = set()
    for slot_bytes, runs in allocator.per_size.items():
        assert not bound & runs.slabs
        bound |= runs.slabs
        free = runs.runs()
        assert runs.free == sum(length for _, length in free)
        edge = -1
        seen = 0
        for first, length in sorted([*free, *held.get(slot_bytes, [])]):
            assert first >= edge, f"slot {first} of segment {segment.handle} is held twice"
            edge = first + length
            seen += length
            assert first // runs.per_slab == (edge - 1) // runs.per_slab and first // runs.per_slab in runs.slabs
        assert seen == len(runs.slabs) * runs.per_slab, "slots are neither free nor held"
    assert all(size in allocator.per_size for size in held)
    waiting = set(allocator.unbound) | set(allocator.binding)
    assert not bound & waiting and len(bound) + len(waiting) == allocator.slabs


def _check_enlisted(pool: Pool, live: list[Span]) -> None:
    unsorted = {segment.handle: set(segment.unsorted) for segment in pool.space.segments.values()}
    for span in live:
        for row in ex.records(span.extents):
            segment = pool.space.segments.get(row[2])
            assert segment is not None, "an extent lies in a segment that is gone"
            slab = row[3] // segment.allocator.runs_of(span.tree.slot_bytes).per_slab
            listed = span in segment.slab_spans.get(slab, ()) or span in unsorted[row[2]]
            assert listed, "a span that its slab does not know"
            assert segment.holds(span, slab)


def _check_heaps(pool: Pool, live: list[Span]) -> None:
    queued: dict[int, set[Span]] = {
        segment.handle: {entry[1] for heap in segment.leaves.values() for entry in heap}
        for segment in pool.space.segments.values()
    }
    for span in live:
        if is_leaf(span):
            assert span.queued
            for row in ex.records(span.extents):
                assert span in queued[row[2]], "a leaf that no heap holds"


def _check_leases(pool: Pool, live: list[Span]) -> None:
    pinned = [lease for span in live for lease in span.leases or ()]
    in_live = [lease for lease in pool.leases if lease.span.tree.alive]
    in_live += [copy.pin for copy in pool.copies.open.values() if copy.pin.span.tree.alive]
    assert {id(lease) for lease in pinned} == {id(lease) for lease in in_live} and len(pinned) == len(in_live)
    for span in live:
        for lease in span.leases or ():
            assert lease.span is span and 0 < lease.end <= span.blocks


def _check_writes(pool: Pool, pending: list[Piece]) -> None:
    mine: list[Piece] = []
    for reservation in pool.writes.open.values():
        assert reservation.tree.alive
        for piece in reservation.pieces:
            assert piece.reservation is reservation and piece.blocks > 0 and (piece.mask or piece.lost)
            assert (piece.span is None) == (piece.mask == 0)
            if piece.span is not None:
                assert piece.blocks == piece.span.blocks and piece in (piece.span.writers or ())
                mine.append(piece)
        for part in range(reservation.mask.bit_length()):
            if reservation.mask >> part & 1 and not reservation.ended >> part & 1:
                left = sum(p.blocks for p in reservation.pieces if (p.mask | p.lost) >> part & 1)
                assert left + reservation.written(part) == reservation.granted_blocks(part)
    assert {id(piece) for piece in mine} == {id(piece) for piece in pending} and len(mine) == len(pending)


def _check_bytes(pool: Pool) -> None:
    counted: dict[str, Counter[int]] = {name: Counter() for name in _COUNTED}

    def count(name: str, rows: Iterator[ex.Record], slot_bytes: int) -> None:
        """Add the bytes of `rows` to what each segment has of that name."""
        for row in rows:
            counted[name][row[2]] += row[1] * (row[5] - row[4]) * slot_bytes

    for reservation in pool.writes.open.values():
        for piece in reservation.pieces:
            if piece.span is not None:
                rows = ex.without_parts(piece.span.extents, piece.mask)[1]
                count("reserved", iter(rows), reservation.tree.slot_bytes)
    for reservation in pool.writes.quarantine.values():
        assert reservation.quarantined
        count("quarantined", ex.records(reservation.quarantined), reservation.tree.slot_bytes)
    for copy in pool.copies.open.values():
        count("reserved", iter([copy.target]), copy.pin.span.tree.slot_bytes)
    for slot_bytes, rows in pool.strays.rows():
        count("quarantined", iter(rows), slot_bytes)
    for slot_bytes, rows in [*pool.space.deferred_rows(), *pool.clearing.rows()]:
        count("deferred", iter(rows), slot_bytes)
    for slot_bytes, rows in pool.unclaimed.rows():
        count("unclaimed", iter(rows), slot_bytes)
    for segment in pool.space.segments.values():
        found = [getattr(segment, f"{name}_bytes") for name in _COUNTED]
        assert found == [counted[name][segment.handle] for name in _COUNTED], found


def _check_hidden(pool: Pool) -> None:
    seen = {segment.handle for node in pool.liveness.nodes.values() if node.readable for segment in node.segments}
    assert pool.space.hidden == set(pool.space.segments) - seen
    for node in pool.liveness.nodes.values():
        assert node.draining == (node.name in pool.members.draining)
        assert node.draining or not (node.closing or node.drained)


def _check_replicas(pool: Pool, spans: set[Span]) -> None:
    replicas = pool.forest.replicas
    held: Counter[int] = Counter()
    unstacked = {id(tree) for tree in pool.forest.dead_trees()}
    for span, packed in replicas.of.items():
        assert packed and (span in spans or id(span.tree) in unstacked), "replicas of a span that is gone"
        for row in ex.records(packed):
            assert row[0] + row[1] <= span.blocks and row[4] < row[5] <= row[4] + row[6]
            assert ((1 << row[5]) - (1 << row[4])) & ~span.have == 0, "a replica of a part that is not complete"
            assert row[2] in pool.space.segments, "a replica in a segment that is gone"
            assert span in replicas.spans_in(row[2]), "a replica that its segment does not know"
            held[id(span.tree)] += row[1] * (row[5] - row[4]) * span.tree.slot_bytes
    for namespace in pool.namespaces.values():
        assert namespace.tree.replica_bytes == held[id(namespace.tree)]


def _check_copies(pool: Pool) -> None:
    busy: Counter[str] = Counter()
    for copy in pool.copies.open.values():
        busy.update((copy.node, copy.source_node))
        assert copy.source[1] == copy.target[1] and copy.source[4:6] == copy.target[4:6]
        assert copy.pin in (copy.pin.span.leases or ()), "a copy whose source is not pinned"
    assert busy == pool.copies.busy, (busy, pool.copies.busy)


def _check_quotas(pool: Pool, live: list[Span]) -> None:
    for span in live:
        assert span.tree.quota is pool.quotas.limits.get(span.tree.tenant)
        if span.queued and span.tree.quota is not None and is_leaf(span):
            assert any(entry[1] is span for entry in span.tree.quota.leaves), "a leaf that its tenant's heap lacks"
