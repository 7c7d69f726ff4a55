"""Eviction carried out: when, in which segment, of which slot size. Who goes first is eviction.py's word.

Rules
  - Ahead of need, in bounded steps, from the high watermark down to the low one, unless another node has room for what
    comes; inline for a reservation that finds no slot. Replicas first, then whole leaf spans, or the last step of one.
  - A pass that frees less than was wanted says what held it up.
  - A slot size that wants a slab gets one from a size whose blocks have been idle more than twice as long.
"""

from __future__ import annotations

from kvpool_master.core.eviction import Pass, is_leaf, keep_blocks, oldest_age
from kvpool_master.core.forest import Forest
from kvpool_master.core.segments import Segment
from kvpool_master.core.settings import Settings
from kvpool_master.core.snapshot import PoolCounters
from kvpool_master.core.spans import Span


class Evictor:
    """Evicts from the segments of one forest."""

    def __init__(self, settings: Settings, forest: Forest, counters: PoolCounters) -> None:
        self._settings = settings
        self._forest = forest
        self._counters = counters

    def evict(self, segment: Segment, slot_bytes: int, free_slots: int, spans_max: int) -> None:
        """Evict leaves of one slot size, oldest first, until that many slots are free in the segment."""
        runs = segment.allocator.runs_of(slot_bytes)
        if self._forest.replicas and runs.free < free_slots:
            free_slots -= self._forest.replicas.evict(segment, slot_bytes, free_slots - runs.free, spans_max)
        leaves = Pass(segment.leaves.setdefault(slot_bytes, []), segment)
        self._counters.evict_passes += 1
        for _ in range(spans_max):
            if runs.free >= free_slots:
                break
            span = leaves.next_leaf()
            if span is None:
                break
            needed = -(-(free_slots - runs.free) // span.tree.parts)
            self._forest.trim(span, keep_blocks(span, needed))
        leaves.end()
        if runs.free < free_slots:
            self._blocked(leaves.blocked or "step_limit")
        if len(segment.leaves) > 1 and self._rival(segment, slot_bytes) is not None:
            segment.starved.add(slot_bytes)

    def _blocked(self, why: str) -> None:
        self._counters.evict_blocked[why] = self._counters.evict_blocked.get(why, 0) + 1

    def evict_ahead(self, segment: Segment) -> None:
        """Above the high watermark, evict down to the low one, a bounded step at a time, oldest slot size first."""
        size = segment.allocator.size_bytes
        used = segment.allocator.used_bytes()
        low = size * self._settings.watermark_low_permille // 1000
        if used * 1000 > size * self._settings.watermark_high_permille:
            segment.evicting = True
        elif used <= low:
            segment.evicting = False
        if not segment.evicting:
            return
        ages = [(age, slot) for slot in segment.leaves if (age := oldest_age(segment, slot)) is not None]
        if not ages:
            self._blocked("no_leaf")
            return
        slot_bytes = min(ages)[1]
        wanted = segment.allocator.runs_of(slot_bytes).free + -(-(used - low) // slot_bytes)
        self.evict(segment, slot_bytes, wanted, self._settings.evict_step_spans_max)

    def empty_a_slab(self, segment: Segment, slot_bytes: int) -> None:
        """For a slot size that wants a slab: evict what lies in one of another size, if that is much older.

        Takes the slab with the fewest spans; with a span go the blocks that follow it. What leases or writers hold
        stays.
        """
        rival = self._rival(segment, slot_bytes)
        if rival is None:
            return
        runs = segment.allocator.runs_of(rival)
        if not runs.slabs:
            return
        if self._forest.replicas:
            self._forest.replicas.evict(segment, rival, runs.per_slab, self._settings.evict_step_spans_max)
        slab = min(sorted(runs.slabs), key=lambda number: len(segment.slab_spans.get(number, ())))
        for span in segment.slab_spans.get(slab, [])[: self._settings.evict_step_spans_max]:
            if segment.holds(span, slab):
                self._evict_below(span)

    def _rival(self, segment: Segment, slot_bytes: int) -> int | None:
        """The other slot size whose oldest leaf has been idle more than twice as long as the own oldest one."""
        ages = {size: age for size in segment.leaves if (age := oldest_age(segment, size)) is not None}
        own = ages.pop(slot_bytes, None)
        if not ages:
            return None
        rival = min(ages, key=lambda size: (ages[size], size))
        if own is not None and self._forest.idle_ms(ages[rival]) <= 2 * self._forest.idle_ms(own):
            return None
        return rival

    def _evict_below(self, span: Span) -> None:
        path = [span]
        while path:
            top = path[-1]
            if top.parent is None:
                path.pop()
            elif top.children:
                path.append(next(iter(top.kids())))
            elif is_leaf(top) and not top.leases:
                self._forest.trim(top, 0)
            else:
                self._blocked("leased" if top.leases else "being_written")
                return
