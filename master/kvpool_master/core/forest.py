"""Changes to the forest that keep spans, space, index and heaps in step.

Rules
  - Bytes leave in one of three ways: evicted (free at once), hidden (free when the leases alive now have ended), or
    given up by a writer (writes.py). Whatever goes is remembered in the ring of the gone.
  - A hole stays while anything hangs below it or a lease ends in it; else it goes, and its parent is looked at.
  - Blocks that lack a part and have no writer are hidden after a grace.
  - A namespace that was purged and a node that was retired are taken apart in slices.
  - What is lost with a node, or since its bytes are bad, is lost only where no replica takes its place.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from heapq import heappop, heappush

from kvpool_master.core import extents as ex
from kvpool_master.core.eviction import queue_leaf
from kvpool_master.core.leases import LeaseTable
from kvpool_master.core.messages import GoneReason
from kvpool_master.core.replicas import Replicas
from kvpool_master.core.ring import Ring
from kvpool_master.core.segments import Segment, Space
from kvpool_master.core.settings import Settings
from kvpool_master.core.snapshot import PoolCounters
from kvpool_master.core.spans import Piece, Span, Tree, can_join, cut, join_child

AGE_SHIFT = 20
"""Ages are (now_ms << AGE_SHIFT) + n: unique and rising, and still a time."""


class Forest:
    """All trees and what their changes touch. `now_ms` is set by the pool before each command."""

    def __init__(self, settings: Settings, space: Space, leases: LeaseTable, counters: PoolCounters) -> None:
        self._settings = settings
        self._space = space
        self._leases = leases
        self._counters = counters
        self.ring = Ring(settings.gone_ring_blocks_max)
        self.replicas = Replicas(space, leases)
        self.wanted: dict[Span, None] = {}
        """Complete spans of namespaces that want replicas; see copies.py."""
        self.now_ms = 0
        self._age = 0
        self._incomplete: list[tuple[int, Span]] = []
        """When to look at a span that lacks a part; the latest time counts, see _watched."""
        self._watched: dict[Span, int] = {}
        self._dead: deque[tuple[int, Tree, list[Span]]] = deque()
        """Purged trees: lease number that must end first, tree, spans still to take apart."""
        self.retiring: deque[Segment] = deque()
        """Segments of retired nodes that spans still lie in."""

    def next_age(self) -> int:
        """A new age, above all before."""
        self._age = max(self._age + 1, self.now_ms << AGE_SHIFT)
        return self._age

    def idle_ms(self, age: int) -> int:
        """How long ago an age was."""
        return max(0, self.now_ms - (age >> AGE_SHIFT))

    # -- shape

    def cut(self, span: Span, at: int) -> Span:
        """Split before block `at`; returns the head, `span` becomes the tail."""
        head = cut(span, at)
        self._space.enlist(head, head.extents)
        if self.replicas:
            self.replicas.cut(span, head, at)
        if span in self.wanted:
            self.wanted[head] = None
        self._watch_incomplete(head)
        if not (span.have or span.writers or span.children or span.leases):
            self._drop(span)  # the leases that kept this hole ended in the head
        return head

    def isolate(self, span: Span, start: int, blocks: int) -> Span:
        """The span of exactly blocks [start, start + blocks) of `span`, cut out where necessary."""
        if start:
            self.cut(span, start)
        return self.cut(span, blocks) if blocks < span.blocks else span

    def join_around(self, span: Span) -> Span:
        """Make one span of a complete span and what is alike before and behind it; returns it."""
        parent = span.parent
        if parent is not None and can_join(parent):
            self._join(parent)
            span = parent
        if can_join(span):
            self._join(span)
        return span

    def _join(self, span: Span) -> None:
        (child,) = span.kids()
        packed = child.extents
        if self.replicas:
            self.replicas.joined(span, child, span.blocks)
        join_child(span, partial(self._space.slab_slots, span.tree.slot_bytes))
        self._space.enlist(span, packed)
        span.queued = False
        self.settle(span)

    def settle(self, span: Span) -> None:
        """Drop a hole that nothing needs, and its parents likewise; queue what has become a leaf."""
        while span.parent is not None and not span.children and not span.writers:
            if span.have:
                queue_leaf(self._space, span)
                return
            if span.leases:
                return
            span = self._drop(span)

    def _drop(self, hole: Span) -> Span:
        """Take a hole out of its tree; returns its parent."""
        hole.tree.unindex_keys(hole.keys)
        hole.tree.spans -= 1
        return hole.detach()

    # -- parts come and go

    def complete(self, span: Span, mask: int) -> bool:
        """Parts of `mask` are committed; True if the span has become visible."""
        span.have |= mask
        if span.have != span.tree.full:
            return False
        span.tree.blocks += span.blocks
        return True

    def strip(self, span: Span, mask: int) -> list[ex.Record]:
        """Take the extents of parts `mask` away, complete or not; returns them. The caller settles the span."""
        span.extents, rows = ex.without_parts(span.extents, mask)
        if span.have & mask:
            if span.have == span.tree.full:
                span.tree.blocks -= span.blocks
            span.have &= ~mask
        span.tree.bytes -= _bytes(rows, span.tree.slot_bytes)
        return rows

    def changed(self, span: Span) -> None:
        """Look at a span whose parts or writers have changed: join, watch, or drop it."""
        if span.have == span.tree.full:
            self.settle(span)
            span = self.join_around(span)
            if span.tree.replicas > 1:
                self.wanted[span] = None
        else:
            self._watch_incomplete(span)
            self.settle(span)

    def _watch_incomplete(self, span: Span) -> None:
        if span.have and span.have != span.tree.full and not span.writers:
            self._watched[span] = self.now_ms + self._settings.incomplete_grace_ms
            heappush(self._incomplete, (self._watched[span], span))

    def drop_incomplete(self) -> None:
        """Hide blocks that lack a part, have no writer, and whose grace is over."""
        heap = self._incomplete
        while heap and heap[0][0] <= self.now_ms:
            due_ms, span = heappop(heap)
            if self._watched.get(span) != due_ms:
                continue  # it had a writer since
            del self._watched[span]
            alive = span.parent is not None and span.tree.alive
            if alive and span.have and span.have != span.tree.full and not span.writers:
                self.hide(span, GoneReason.INCOMPLETE)

    def hide(self, span: Span, reason: GoneReason) -> None:
        """Make a hole of a span's complete parts; the slots come back when the leases alive now have ended."""
        self._space.defer(self.take_out(span, reason), span.tree.slot_bytes, self._leases.newest_number)
        self._space.settle_deferred(self._leases.oldest_number)

    def take_out(self, span: Span, reason: GoneReason) -> list[ex.Record]:
        """Make a hole of a span's complete parts; returns their extents, which nobody holds now."""
        self._forget(span, span.keys, reason, span.front_age)
        rows = self.replicas.drop(span, span.have)
        rows += self.strip(span, span.have)
        self.settle(span)
        return rows

    def _forget(self, span: Span, keys: bytes, reason: GoneReason, age: int) -> int:
        blocks = len(keys) // span.tree.key_bytes
        gone = span.tree.counters.gone_blocks
        gone[reason] = gone.get(reason, 0) + blocks
        self.ring.add(span, keys, reason, self.idle_ms(age), self.now_ms)
        return blocks

    def given_up(self, span: Span) -> None:
        """A writer left the span: remember it if nothing is left of its blocks."""
        if not span.have and not span.writers:
            self._forget(span, span.keys, GoneReason.WRITE_GIVEN_UP, span.age)

    # -- eviction

    def trim(self, span: Span, keep: int) -> None:
        """Evict a leaf's blocks from `keep` on."""
        tree = span.tree
        keys = span.keys[keep * tree.key_bytes :]
        blocks = self._forget(span, keys, GoneReason.EVICTED, span.age)
        self._counters.evicted(blocks, self.idle_ms(span.age))
        tail = span.extents
        span.extents, tail = ex.split(tail, keep) if keep else (b"", tail)
        rows = list(ex.records(tail))
        if span.have == tree.full:
            tree.blocks -= blocks
        tree.bytes -= _bytes(rows, tree.slot_bytes)
        rows += self.replicas.drop(span, tree.full, keep)
        tree.unindex_keys(keys)
        if keep:
            steps = span.steps()
            span.keys = span.keys[: keep * tree.key_bytes]
            if len(steps) > 1:
                starts = [0, *[end for end, _ in steps]]
                kept = [(min(end, keep), age) for (end, age), start in zip(steps, starts, strict=False) if start < keep]
                span.set_steps(kept)
            queue_leaf(self._space, span)
        else:
            tree.spans -= 1
            self.settle(span.detach())
        self._space.give(rows, tree.slot_bytes)

    def drop_below(self, root: Span, spans_max: int, reason: GoneReason) -> None:
        """Hide up to so many spans below `root`, leaves first; what is held up stays."""
        for top in list(root.kids()):
            path = [top]
            while path and spans_max > 0:
                span = path[-1]
                if span.parent is None:
                    path.pop()
                elif span.children:
                    path.append(next(iter(span.kids())))
                elif span.writers or span.leases or not span.have:
                    break
                else:
                    spans_max -= 1
                    self.hide(span, reason)

    # -- slices

    def bury(self, tree: Tree) -> int:
        """Take a tree out of sight; returns its complete blocks. Its slots come back in slices."""
        tree.alive = False
        self._dead.append((self._leases.newest_number, tree, [tree.root, tree.orphans]))
        gone = tree.counters.gone_blocks
        gone[GoneReason.PURGED] = gone.get(GoneReason.PURGED, 0) + tree.blocks
        return tree.blocks

    def retire(self, segment: Segment) -> None:
        """A segment's node is gone: hide it and let its spans lose their bytes there in slices."""
        segment.retired = True
        self._space.hidden.add(segment.handle)
        self.retiring.append(segment)

    def work(self, spans_max: int) -> None:
        """One slice of taking dead trees and retired segments apart."""
        while self._dead and spans_max > 0 and self._dead[0][0] < self._leases.oldest_number:
            spans_max = self._take_apart(self._dead[0][1], self._dead[0][2], spans_max)
            if not self._dead[0][2]:
                self._dead.popleft()
        spans_max = min(spans_max, self._settings.retire_spans_max)
        while self.retiring and spans_max > 0:
            segment = self.retiring[0]
            spans_max -= segment.sort(spans_max)
            replicated = self.replicas.spans_in(segment.handle)
            while replicated and spans_max > 0:
                spans_max -= 1
                self._lose_replicas(replicated.popleft(), segment)
            while segment.slab_spans and spans_max > 0:
                slab, spans = next(iter(segment.slab_spans.items()))
                if not spans:
                    del segment.slab_spans[slab]
                    continue
                spans_max -= 1
                span = spans.pop()
                if span.tree.alive and segment.holds(span, slab):
                    self._lose(span, segment)
                    if segment.holds(span, slab):
                        spans.append(span)
            if not (segment.slab_spans or segment.unsorted or self.replicas.spans_in(segment.handle)):
                self.replicas.forget(segment.handle)
                self.retiring.popleft()
                del self._space.segments[segment.handle]
                self._space.hidden.discard(segment.handle)

    def _take_apart(self, tree: Tree, stack: list[Span], spans_max: int) -> int:
        while stack and spans_max > 0:
            spans_max -= 1
            span = stack.pop()
            stack += span.kids()
            if span.keys:
                self.ring.add(span, span.keys, GoneReason.PURGED, self.idle_ms(span.age), self.now_ms)
            self._space.give([*ex.records(span.extents), *self.replicas.drop(span, tree.full)], tree.slot_bytes)
            span.parent = span.children = None
            span.extents = span.keys = b""
            span.have = 0
        return spans_max

    def lose_retired(self, span: Span) -> bool:
        """Let a span lose one run that lies in a retired segment; False if it has none. The span may be cut or go."""
        for segment in self.retiring:
            if ex.touches(span.extents, {segment.handle}):
                self._lose(span, segment)
                return True
        return False

    def _lose(self, span: Span, segment: Segment) -> None:
        """A span loses what it has in a retired segment."""
        row = next(row for row in ex.records(span.extents) if row[2] == segment.handle)
        old = self.replace(span, row)
        if old is not None:
            self._space.give([old], span.tree.slot_bytes)
            return
        part = self.isolate(span, row[0], row[1])
        mask = (1 << row[5]) - (1 << row[4])
        if part.have & mask:
            self._forget(part, part.keys, GoneReason.NODE_RETIRED, part.age)
        pending = part.writing & mask
        slot_bytes = part.tree.slot_bytes
        self._space.defer(self.replicas.drop(part, mask), slot_bytes, self._leases.newest_number)
        self._space.give(self.strip(part, mask & ~pending), slot_bytes)
        if pending:
            rows = self.strip(part, pending)
            self._space.charge(rows, slot_bytes, "reserved_bytes", -1)
            self._space.give(rows, slot_bytes)
            for piece in list(part.writers or ()):
                detach_piece(piece, pending & piece.mask, lost=True)
        self.changed(part)

    def _lose_replicas(self, span: Span, segment: Segment) -> None:
        """A span loses its replicas in a retired segment."""
        self._space.give(self.replicas.drop_in(span, segment.handle), span.tree.slot_bytes)
        if span.parent is not None and span.tree.alive and span.tree.replicas > 1:
            self.wanted[span] = None

    def replace(self, span: Span, row: ex.Record) -> ex.Record | None:
        """Let a replica take the place of `row`, or of some of its blocks, which are lost.

        Returns the run that was replaced, which nobody holds now; None: no replica has it. The span may be cut.
        """
        found = self.replicas.promotable(span, row)
        if found is None:
            return None
        part = self.isolate(span, found[0], found[1] - found[0])
        place = (row[2], row[4], row[5])
        own = next(one for one in ex.records(part.extents) if (one[2], one[4], one[5]) == place)
        old = self.replicas.promote(part, own)
        self.changed(part)
        return old

    # -- for the cross-check

    def dead_trees(self) -> list[Tree]:
        """Purged trees that still hold slots."""
        return [tree for _, tree, _ in self._dead]

    def dead_stacks(self) -> list[list[Span]]:
        """The spans that purged trees have still to take apart, each with all below it."""
        return [stack for _, _, stack in self._dead]

    def is_watched(self, span: Span) -> bool:
        """Whether the span will be looked at when the grace for incomplete blocks is over."""
        return span in self._watched


def detach_piece(piece: Piece, mask: int, *, lost: bool) -> None:
    """Parts of a piece are no longer pending: committed or given up, or `lost` before they were."""
    piece.mask &= ~mask
    if lost:
        piece.lost |= mask
    if piece.mask:
        return
    span = piece.span
    if span is not None:
        writers = [other for other in span.writers or () if other is not piece]
        span.writers = writers or None
        piece.span = None
    if not piece.lost:
        piece.reservation.pieces.remove(piece)


def _bytes(rows: list[ex.Record], slot_bytes: int) -> int:
    return sum([row[1] * (row[5] - row[4]) for row in rows]) * slot_bytes
