"""Which unleased blocks go first. Ranks and answers; forest.py removes.

Rules
  - Leaf first: a block goes only when no cached block follows it, tail before head, never one that a lease holds or
    that an open reservation leans on. Blocks asked for longest ago go first (LRU over leaves).
  - Leaves wait in one lazy heap per segment and slot size, and in one of their tenant where that has a quota. A span is
    queued when it becomes a leaf; an entry whose span is none any more is dropped when met, one whose span was asked
    for since is queued again at its new age.
  - The leaves of a pass that are held by leases are handed back after it.
  - Within a leaf, the blocks of its last step go, or as many of them as are needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from kvpool_master.core import extents as ex
from kvpool_master.core.segments import LIST_GROWTH, LIST_SLACK, Leaf, Segment, Space
from kvpool_master.core.spans import Span


def is_leaf(span: Span) -> bool:
    """Whether the span's last block could be evicted if nothing leased it."""
    return bool(span.parent is not None and span.tree.alive and not span.children and not span.writers and span.have)


def queue_leaf(space: Space, span: Span) -> None:
    """Let the heaps of the segments where the span's bytes lie hold an entry for it."""
    if span.queued:
        return
    span.queued = True
    if span.tree.quota is not None:
        span.tree.quota.fill((span,))
    for handle in ex.segments(span.extents):
        segment = space.segments.get(handle)
        if segment is not None:
            heap = segment.leaves.setdefault(span.tree.slot_bytes, [])
            heappush(heap, (span.age, span))
            if len(heap) > segment.leaves_max.get(span.tree.slot_bytes, LIST_SLACK):
                sweep(heap)
                segment.leaves_max[span.tree.slot_bytes] = LIST_GROWTH * len(heap) + LIST_SLACK


def sweep(heap: list[Leaf]) -> None:
    """Drop entries that no longer tell the truth, and doubles."""
    leaves = {entry[1]: entry for entry in heap if is_leaf(entry[1])}
    for _, span in heap:
        span.queued = span in leaves
    heap[:] = leaves.values()
    heapify(heap)


class Quota:
    """What a tenant may hold, and a lazy heap of all its leaves."""

    __slots__ = ("_leaves_max", "leaves", "limit_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.leaves: list[Leaf] = []
        self._leaves_max = LIST_SLACK

    def fill(self, spans: Iterable[Span]) -> None:
        """Note spans that are queued as leaves. One is here while it is queued, leaf or not."""
        for span in spans:
            heappush(self.leaves, (span.age, span))
        if len(self.leaves) > self._leaves_max:
            self.leaves = list({entry[1]: entry for entry in self.leaves if entry[1].queued}.values())
            heapify(self.leaves)
            self._leaves_max = LIST_GROWTH * len(self.leaves) + LIST_SLACK


class Pass:
    """One pass over the leaves of a segment of one slot size, or of a tenant, oldest first."""

    __slots__ = ("_heap", "_held", "_here", "blocked")

    def __init__(self, heap: list[Leaf], segment: Segment | None = None) -> None:
        self._here = {segment.handle} if segment is not None else None
        self._heap = heap
        self._held: list[Leaf] = []
        self.blocked = ""
        """What kept the pass from finding a leaf: leased or no_leaf."""

    def next_leaf(self) -> Span | None:
        """The leaf whose last block was asked for longest ago and is not leased; it is no longer queued."""
        heap = self._heap
        while heap:
            entry = heappop(heap)
            age, span = entry
            if not is_leaf(span):
                span.queued = False
            elif self._here is not None and not ex.touches(span.extents, self._here):
                continue  # what it had here was cut off; the heaps of its other segments hold it
            elif age != span.age:
                heappush(heap, (span.age, span))
            elif span.leases and span.leased_blocks() == span.blocks:
                self._held.append(entry)
            else:
                span.queued = False
                return span
        self.blocked = "leased" if self._held else "no_leaf"
        return None

    def end(self) -> None:
        """Hand back the leaves that leases hold."""
        for entry in self._held:
            heappush(self._heap, entry)
        self._held.clear()


def keep_blocks(span: Span, needed: int) -> int:
    """How many leading blocks of a leaf stay when `needed` blocks are wanted: one step goes at most."""
    steps = span.steps()
    step = steps[-2][0] if len(steps) > 1 else 0
    return max(step, span.leased_blocks(), span.blocks - needed)


def oldest_age(segment: Segment, slot_bytes: int) -> int | None:
    """The age of the first leaf in the heap, perhaps idle: a hint for choosing between slot sizes."""
    heap = segment.leaves.get(slot_bytes)
    return heap[0][0] if heap else None
