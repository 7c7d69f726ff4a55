"""Further copies of blocks that the directory has complete: where they lie, who reads them, when they go.

Rules
  - A span's replicas are packed extents beside its own, with offsets in the span; they cover it or some of it, any
    number of times. Only parts that are complete have replicas. Pools without replicas pay nothing.
  - A lookup takes a replica on the asker's own node rather than the copy elsewhere, and one on a node that is up rather
    than a copy that is hidden.
  - Replicas follow their blocks: cut, joined, dropped with them. When the first copy is lost (node gone, bytes bad) a
    replica takes its place.
  - They go first: a segment that needs room drops its replicas before it evicts. Readers first: slots of replicas come
    back when the leases alive then have ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from itertools import pairwise

from kvpool_master.core import extents as ex
from kvpool_master.core.leases import LeaseTable
from kvpool_master.core.segments import Segment, Space
from kvpool_master.core.spans import Span


class Replicas:
    """All replicas of one forest. True while there are any."""

    def __init__(self, space: Space, leases: LeaseTable) -> None:
        self._space = space
        self._leases = leases
        self.of: dict[Span, bytes] = {}
        self._queues: dict[int, deque[Span]] = {}
        """By segment, spans with replicas there, oldest copy first; some have none any more."""

    def __bool__(self) -> bool:
        return bool(self.of)

    def add(self, span: Span, rows: list[ex.Record]) -> None:
        """The span has these copies, too; their segments are told."""
        if rows:
            packed = ex.ordered([*ex.records(self.of.get(span, b"")), *rows])
            self.of[span] = packed
            span.tree.replica_bytes += _bytes(rows, span.tree.slot_bytes)
            self._enlist(span, rows)

    def handles(self, span: Span, row: ex.Record) -> set[int]:
        """The segments in which replicas of some blocks of `row`, with all its parts, lie."""
        return {one[2] for one in ex.records(self.of.get(span, b"")) if _overlap(row, one)}

    def stretches(self, span: Span, row: ex.Record) -> list[ex.Record]:
        """The span's own run `row`, cut where replicas begin or end."""
        start, end = row[0], row[0] + row[1]
        inner = {
            at for one in ex.records(self.of.get(span, b"")) for at in (one[0], one[0] + one[1]) if start < at < end
        }
        return [_narrowed(row, low, high, row[4], row[5]) for low, high in pairwise(sorted({start, *inner, end}))]

    # -- the forest changes

    def cut(self, span: Span, head: Span, at: int) -> None:
        """The span was cut: `head` has its first `at` blocks."""
        packed = self.of.pop(span, b"")
        if packed:
            for owner, half in zip((head, span), ex.split(packed, at), strict=True):
                if half:
                    self.of[owner] = half
                    self._enlist(owner, ex.records(half))

    def joined(self, span: Span, child: Span, at: int) -> None:
        """The child's blocks are the span's from block `at` on."""
        packed = self.of.pop(child, b"")
        if packed:
            rows = [*ex.records(self.of.get(span, b"")), *ex.records(ex.shift(packed, at))]
            self.of[span] = ex.ordered(rows)
            self._enlist(span, rows)

    def drop(self, span: Span, mask: int, start: int = 0) -> list[ex.Record]:
        """Parts `mask` of the blocks from `start` on have no replicas any more; returns their extents."""
        packed = self.of.pop(span, b"")
        if not packed:
            return []
        head, tail = ex.split(packed, start) if start else (b"", packed)
        kept, gone = ex.without_parts(tail, mask)
        rows = [*ex.records(head), *ex.records(ex.shift(kept, start))]
        if rows:
            self.of[span] = ex.ordered(rows)
        span.tree.replica_bytes -= _bytes(gone, span.tree.slot_bytes)
        return gone

    def drop_in(self, span: Span, handle: int) -> list[ex.Record]:
        """The span has no replicas in a segment any more; returns their extents."""
        rows = [*ex.records(self.of.get(span, b""))]
        gone = [row for row in rows if row[2] == handle]
        if gone:
            self._keep(span, [row for row in rows if row[2] != handle], gone)
        return gone

    def drop_stamp(self, span: Span, at: int, stamp: int) -> list[ex.Record]:
        """Block `at` has no replica with that stamp any more; returns its extents."""
        kept: list[ex.Record] = []
        gone: list[ex.Record] = []
        for row in ex.records(self.of.get(span, b"")):
            end = row[0] + row[1]
            if row[7] != stamp or not row[0] <= at < end:
                kept.append(row)
                continue
            gone.append(_narrowed(row, at, at + 1, row[4], row[5]))
            for low, high in ((row[0], at), (at + 1, end)):
                if low < high:
                    kept.append(_narrowed(row, low, high, row[4], row[5]))
        if gone:
            self._keep(span, kept, gone)
        return gone

    def promotable(self, span: Span, row: ex.Record) -> tuple[int, int] | None:
        """Blocks [start, end) within `row`, the span's own, of which a readable replica has all parts; None: none."""
        for other in ex.records(self.of.get(span, b"")):
            start, end = max(row[0], other[0]), min(row[0] + row[1], other[0] + other[1])
            if start < end and other[4] <= row[4] and row[5] <= other[5] and self._stands(other):
                return start, end
        return None

    def promote(self, span: Span, row: ex.Record, stamp: int = 0) -> ex.Record:
        """Let a replica take the place of `row`, which is all of the span's blocks; returns the row that was replaced.

        stamp: of that replica, 0: of any that has all of it; the caller has seen that there is one.
        """
        rows = [*ex.records(self.of[span])]
        taken = next(
            other
            for other in rows
            if (other[0], other[1]) == (0, row[1])
            and other[4] <= row[4]
            and row[5] <= other[5]
            and (other[7] == stamp if stamp else self._stands(other))
        )
        rows.remove(taken)
        mask = (1 << row[5]) - (1 << row[4])
        rest, own = ex.without_parts(ex.pack(*taken), mask)
        self._keep(span, [*rows, *ex.records(rest)], own)
        span.extents = ex.ordered([*[one for one in ex.records(span.extents) if one != row], *own])
        self._space.enlist(span, b"".join([ex.pack(*one) for one in own]))
        span.queued = False  # the heaps of its new segments do not hold it yet
        return row

    # -- readers

    def choose(self, span: Span, packed: bytes, start: int, end: int, own: Collection[int]) -> bytes:
        """The extents of blocks [start, end) to hand out: own copies where there are, then what is not hidden.

        packed: the span's own extents, all of them, with offsets in the span. own: segments of the asker's node.
        """
        replicas = [row for row in ex.records(self.of.get(span, b"")) if row[0] < end and row[0] + row[1] > start]
        if not replicas:
            return packed
        hidden = self._space.hidden
        rows: list[ex.Record] = []
        todo = list(ex.records(packed))
        while todo:
            row = todo.pop()
            better = None
            if row[2] not in own:
                better = next((one for one in replicas if one[2] in own and _overlap(row, one)), None)
                if better is None and row[2] in hidden:
                    better = next((one for one in replicas if one[2] not in hidden and _overlap(row, one)), None)
            if better is None:
                rows.append(row)
                continue
            low, high = max(row[0], better[0]), min(row[0] + row[1], better[0] + better[1])
            rows.append(_narrowed(better, low, high, row[4], row[5]))
            if row[0] < low:
                todo.append(_narrowed(row, row[0], low, row[4], row[5]))
            if high < row[0] + row[1]:
                todo.append(_narrowed(row, high, row[0] + row[1], row[4], row[5]))
        return ex.ordered(rows)

    # -- room

    def evict(self, segment: Segment, slot_bytes: int, wanted: int, spans_max: int) -> int:
        """Drop replicas in a segment, oldest first, until `wanted` slots are given back; returns how many were."""
        queue = self._queues.get(segment.handle)
        given = 0
        while queue and given < wanted and spans_max > 0:
            spans_max -= 1
            span = queue.popleft()
            # Where a node that is gone has not been taken apart yet, its replicas are all that there is.
            if span.tree.slot_bytes != slot_bytes or not all(map(self._stands, ex.records(span.extents))):
                queue.append(span)
                continue
            rows = self.drop_in(span, segment.handle)
            given += sum(row[1] * (row[5] - row[4]) for row in rows)
            self._space.defer(rows, slot_bytes, self._leases.newest_number)
        self._space.settle_deferred(self._leases.oldest_number)
        return given

    def spans_in(self, handle: int) -> deque[Span]:
        """The spans with replicas in a segment, and some that had: the caller may take them out."""
        return self._queues.get(handle, deque())

    def forget(self, handle: int) -> None:
        """The segment is gone, and no span has anything there."""
        self._queues.pop(handle, None)

    def _keep(self, span: Span, kept: list[ex.Record], gone: list[ex.Record]) -> None:
        if kept:
            self.of[span] = ex.ordered(kept)
        else:
            del self.of[span]
        span.tree.replica_bytes -= _bytes(gone, span.tree.slot_bytes)

    def _enlist(self, span: Span, rows: Iterable[ex.Record]) -> None:
        for handle in {row[2] for row in rows}:
            queue = self._queues.setdefault(handle, deque())
            queue.append(span)
            if len(queue) > 2 * len(self.of) + 64:
                self._queues[handle] = deque(dict.fromkeys(one for one in queue if one in self.of))

    def _stands(self, row: ex.Record) -> bool:
        segment = self._space.segments.get(row[2])
        return segment is not None and not segment.retired


def _overlap(row: ex.Record, other: ex.Record) -> bool:
    """Whether `other` has all parts of `row` for some of its blocks."""
    blocks = row[0] < other[0] + other[1] and other[0] < row[0] + row[1]
    return blocks and other[4] <= row[4] and row[5] <= other[5]


def _narrowed(row: ex.Record, start: int, end: int, low: int, high: int) -> ex.Record:
    """Blocks [start, end) and parts [low, high) of a row."""
    offset, _, segment, first, part_from, _, stride, stamp = row
    return start, end - start, segment, first + (start - offset) * stride + low - part_from, low, high, stride, stamp


def _bytes(rows: Iterable[ex.Record], slot_bytes: int) -> int:
    return sum(row[1] * (row[5] - row[4]) for row in rows) * slot_bytes
