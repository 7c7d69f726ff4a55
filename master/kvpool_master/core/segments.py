"""Segments and the room in them: who holds which slots, and when slots come back.

Rules
  - A slot is free, held by an extent of a span, quarantined (given up without its writer's word) or deferred
    (hidden, waiting for the leases of its time to end). Only free slots are handed out.
  - A span is enlisted with every slab that its extents touch, so that a slab can be emptied and a node retired at
    the cost of what lies there. The lists are lazy: they hold every such span, and some that left since. What comes
    with an inventory is sorted into them afterwards, in slices.
  - `reserved_bytes` (granted, neither committed nor given up) and `quarantined_bytes` together stay within the
    segment's share for writers.
  - A segment that is hidden gives no hits. That of a retired node stays in the table, hidden, until no span lies in
    it any more; slots returned after that are forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvpool_master.core import extents as ex
from kvpool_master.core.allocator import Allocator
from kvpool_master.core.claims import Claims
from kvpool_master.core.messages import BindSlab, Effect
from kvpool_master.core.settings import Settings
from kvpool_master.core.spans import Span
from kvpool_proto.geometry import slot_table_bytes

Leaf = tuple[int, Span]
"""Heap entry: the age at which the span was queued, and the span."""

LIST_SLACK = 64
LIST_GROWTH = 2
"""A slab's list, or a heap of leaves, is swept when it has grown so many times, and by so many entries more."""


class Segment:
    """One segment: its allocator, its leaves in order of age, the spans in each slab."""

    __slots__ = (
        "_slab_spans_max",
        "allocator",
        "claims",
        "closed",
        "deferred_bytes",
        "evicting",
        "handle",
        "index",
        "leaves",
        "leaves_max",
        "node",
        "quarantined_bytes",
        "quiet_until_ms",
        "reserved_bytes",
        "retired",
        "slab_spans",
        "starved",
        "unclaimed_bytes",
        "unsorted",
    )

    def __init__(self, handle: int, index: int, node: str, allocator: Allocator) -> None:
        self.handle = handle
        self.index = index
        self.node = node
        self.allocator = allocator
        self.leaves: dict[int, list[Leaf]] = {}
        """Per slot size: a lazy heap of spans that may be leaves; see eviction.py."""
        self.leaves_max: dict[int, int] = {}
        """Per slot size: the length at which the heap is swept."""
        self.slab_spans: dict[int, list[Span]] = {}
        """Per slab: every span that has slots there, and some that had."""
        self._slab_spans_max: dict[int, int] = {}
        self.unsorted: list[Span] = []
        """Spans that came with an inventory and are not in the lists of their slabs yet; see sort()."""
        self.starved: set[int] = set()
        """Slot sizes that wanted a slab and found none, since the last Tick."""
        self.evicting = False
        """Above the high watermark, and not yet below the low one."""
        self.reserved_bytes = 0
        self.quarantined_bytes = 0
        self.deferred_bytes = 0
        self.unclaimed_bytes = 0
        """Blocks of namespaces that nobody has opened yet."""
        self.claims: Claims | None = None
        """While its inventory is awaited or arrives: what was told so far."""
        self.quiet_until_ms = 0
        """Until then leases and reservations of a former life may be alive."""
        self.closed = False
        """No reservation, no eviction, no binding: its inventory is not complete, or it has to be quiet."""
        self.retired = False

    def fits(self, slot_bytes: int) -> bool:
        """Whether a slab holds a slot of that size at all."""
        return slot_bytes + slot_table_bytes(1) <= self.allocator.slab_bytes

    def note(self, slab: int, span: Span) -> None:
        """Remember that a span has slots in a slab; what no longer has is swept out now and then."""
        spans = self.slab_spans.setdefault(slab, [])
        spans.append(span)
        if len(spans) > self._slab_spans_max.get(slab, LIST_SLACK):
            spans[:] = dict.fromkeys([one for one in spans if self.holds(one, slab)])
            self._slab_spans_max[slab] = LIST_GROWTH * len(spans) + LIST_SLACK

    def sort(self, spans_max: int) -> int:
        """Put up to so many unsorted spans into the lists of their slabs; returns how many."""
        done = 0
        while self.unsorted and done < spans_max:
            span = self.unsorted.pop()
            done += 1
            if span.parent is not None:
                per_slab = self.allocator.runs_of(span.tree.slot_bytes).per_slab
                for slab in {row[3] // per_slab for row in ex.records(span.extents) if row[2] == self.handle}:
                    self.note(slab, span)
        return done

    def holds(self, span: Span, slab: int) -> bool:
        """Whether a span that is part of a tree has slots in a slab."""
        if span.parent is None:
            return False
        per_slab = self.allocator.runs_of(span.tree.slot_bytes).per_slab
        first, end, handle = slab * per_slab, (slab + 1) * per_slab, self.handle
        for row in ex.records(span.extents):  # noqa: SIM110 - half the time of any()
            if first <= row[3] < end and row[2] == handle:
                return True
        return False


class Space:
    """All segments, and the slots that wait to come back."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.segments: dict[int, Segment] = {}
        self.hidden: set[int] = set()
        """Handles of segments whose node is not up or is gone."""
        self._deferred: deque[tuple[int, int, list[ex.Record]]] = deque()
        """(lease number that must end, slot bytes, rows), in order of lease number."""

    # -- spans and slabs

    def slab_slots(self, slot_bytes: int, handle: int) -> int:
        """Slots of a size per slab of a segment."""
        return self.segments[handle].allocator.runs_of(slot_bytes).per_slab

    def enlist(self, span: Span, packed: bytes) -> None:
        """Note the span in every slab that the extents `packed`, which are its own by now, touch."""
        slot_bytes = span.tree.slot_bytes
        for handle in ex.segments(packed):
            segment = self.segments.get(handle)
            if segment is None:
                continue
            if segment.claims is not None:
                segment.unsorted.append(span)
                continue
            per_slab = segment.allocator.runs_of(slot_bytes).per_slab
            for slab in {row[3] // per_slab for row in ex.records(packed) if row[2] == handle}:
                segment.note(slab, span)

    # -- slots come back

    def give(self, rows: Iterable[ex.Record], slot_bytes: int) -> None:
        """Return the slots of `rows` to their segments."""
        for _, blocks, handle, first, low, high, stride, _ in rows:
            segment = self.segments.get(handle)
            if segment is None:
                continue
            runs = segment.allocator.runs_of(slot_bytes)
            width = high - low
            if width == stride:
                runs.give(first, blocks * stride)
            else:  # parts were given up one by one: their slots lie apart
                for start in range(first, first + blocks * stride, stride):
                    runs.give(start, width)

    def charge(self, rows: Iterable[ex.Record], slot_bytes: int, field: str, sign: int) -> None:
        """Add the bytes of `rows` to a counter of their segments, or with sign = -1 take them off."""
        for row in rows:
            segment = self.segments.get(row[2])
            if segment is not None:
                size = row[1] * (row[5] - row[4]) * slot_bytes
                setattr(segment, field, getattr(segment, field) + sign * size)

    def defer(self, rows: list[ex.Record], slot_bytes: int, number: int) -> None:
        """Return the slots when no lease up to `number` is alive."""
        if rows:
            self.charge(rows, slot_bytes, "deferred_bytes", 1)
            self._deferred.append((number, slot_bytes, rows))

    def settle_deferred(self, oldest_lease: int) -> None:
        """Return what no lease that is still alive can read."""
        while self._deferred and self._deferred[0][0] < oldest_lease:
            _, slot_bytes, rows = self._deferred.popleft()
            self.charge(rows, slot_bytes, "deferred_bytes", -1)
            self.give(rows, slot_bytes)

    def deferred_rows(self) -> list[tuple[int, list[ex.Record]]]:
        """(slot bytes, rows) of all that waits, for the cross-check."""
        return [(slot_bytes, rows) for _, slot_bytes, rows in self._deferred]

    def settle_starved(self, segment: Segment) -> list[Effect]:
        """Bind a slab that was emptied for a slot size that wanted one; the wish is over either way."""
        effects: list[Effect] = []
        for slot_bytes in sorted(segment.starved):
            effects += self.bind(segment, slot_bytes, segment.allocator.ready_slots(slot_bytes) + 1)
        segment.starved.clear()
        return effects

    # -- slabs are bound

    def bind(self, segment: Segment, slot_bytes: int, wanted_slots: int) -> list[Effect]:
        """Bind slabs until `wanted_slots` are free or coming, and unbound ones up to the share kept ahead."""
        if segment.closed:
            return []
        allocator = segment.allocator
        runs = allocator.runs_of(slot_bytes)
        ready = allocator.ready_slots(slot_bytes)
        ahead = allocator.size_bytes * self._settings.bind_ahead_permille // 1000 // slot_bytes
        effects: list[Effect] = []
        while ready < max(wanted_slots, ahead, 1):
            slab = allocator.start_binding(slot_bytes, rebind=ready < wanted_slots)
            if slab is None:
                if ready < wanted_slots:
                    segment.starved.add(slot_bytes)
                break
            effects.append(BindSlab(segment.node, segment.handle, slab, slot_bytes))
            ready += runs.per_slab
        return effects
