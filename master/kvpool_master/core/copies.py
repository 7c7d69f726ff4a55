"""Blocks are copied from node to node: replicas that a namespace wants, hot runs to their readers, moves of a drain.

Rules
  - A copy is an order to the node that gets it: it pulls the run from the other's data port and says how many leading
    blocks are there and right. Until then nothing of it is known to lookups.
  - Room for copies is free room: nothing is evicted for them. A node carries out copies_per_node_max at a time, as
    source or as target; a run has copy_run_bytes_max at most.
  - The source is pinned meanwhile. With the answer the copy counts for those blocks only whose slots are still the ones
    that were copied; slots that are of no use, or were not answered for in copy_ms, are cleared by their node first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kvpool_master.core import extents as ex
from kvpool_master.core import messages as m
from kvpool_master.core.clearing import Clearing
from kvpool_master.core.forest import Forest
from kvpool_master.core.leases import Lease, LeaseTable
from kvpool_master.core.liveness import Liveness
from kvpool_master.core.messages import CopySlots, Effect
from kvpool_master.core.placement import Placement, Wish
from kvpool_master.core.segments import Segment, Space
from kvpool_master.core.settings import Settings
from kvpool_master.core.snapshot import PoolCounters
from kvpool_master.core.spans import Span

WANTED_PER_TICK = 64
"""Spans that want replicas and are looked at in one Tick."""
HOT_MAX = 4096
"""Pairs of span and reading node whose hits are counted."""
TRIES_MAX = 3
"""How often copying a span may fail before it is left as it is."""


@dataclass(slots=True)
class Copy:
    """One order that is not answered. source, target: records with offset 0, of the same parts and blocks."""

    order: int
    node: str
    source_node: str
    source: ex.Record
    target: ex.Record
    pin: Lease
    deadline_ms: int
    moves: bool

    @property
    def blocks(self) -> int:
        """How many."""
        return self.target[1]


class Copies:
    """All copies, and who wants more. next_stamp: see puts.py. now_ms is set by the pool before each command."""

    def __init__(
        self,
        settings: Settings,
        space: Space,
        forest: Forest,
        leases: LeaseTable,
        liveness: Liveness,
        placement: Placement,
        clearing: Clearing,
        counters: PoolCounters,
        next_stamp: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._space = space
        self._forest = forest
        self._leases = leases
        self._liveness = liveness
        self._placement = placement
        self._clearing = clearing
        self._counters = counters
        self._next_stamp = next_stamp
        self.now_ms = 0
        self.open: dict[int, Copy] = {}
        self._orders = 0
        self.busy: Counter[str] = Counter()
        """Copies by node, as source or as target."""
        self._hits: OrderedDict[tuple[Span, str], int] = OrderedDict()
        self._hot: list[tuple[Span, str]] = []
        self.moved: Callable[[Span, str, bool], None] = lambda span, node, failed: None
        """Told when a move is over: a span in which its blocks are, the node they were on, whether none was moved."""
        self._tries: dict[Span, int] = {}
        """Replicas of these spans failed so often."""

    # -- who wants copies

    def hit(self, path: Iterable[Span], node: str) -> None:
        """These spans were hit from a node; what is hot there and lies elsewhere is to be copied."""
        for span in path:
            if all(self._space.segments[row[2]].node == node for row in ex.records(span.extents)):
                continue
            count = self._hits.pop((span, node), 0) + 1
            if count >= self._settings.copy_hits_min:
                self._hot.append((span, node))
                continue
            self._hits[span, node] = count
            if len(self._hits) > HOT_MAX:
                self._hits.popitem(last=False)
        del self._hot[HOT_MAX:]

    # -- time

    def tick(self) -> list[Effect]:
        """Give up what is not answered, start what is wanted; returns the orders."""
        for copy in [one for one in self.open.values() if one.deadline_ms <= self.now_ms]:
            self._end(copy, 0)
        effects: list[Effect] = []
        hot, self._hot = self._hot, []
        for span, name in hot:
            node = self._liveness.nodes.get(name)
            if node is not None and node.writable:
                effects += self._replicate(span, node=name)
        for span in list(self._forest.wanted)[:WANTED_PER_TICK]:
            del self._forest.wanted[span]
            if span.parent is None or not span.tree.alive or span.have != span.tree.full:
                continue
            orders = self._replicate(span)
            effects += orders
            if not orders and self._lacking(span) is not None:
                self._forest.wanted[span] = None  # another time
        return effects

    def _replicate(self, span: Span, node: str = "") -> list[Effect]:
        """Start a replica of one run of a span that has none on `node`, or too few; none if that cannot be now."""
        if span.parent is None or not span.tree.alive:
            return []
        row = self._lacking(span, node)
        if row is None or span.have & mask_of(row) != mask_of(row):
            return []
        order = self.start(span, row, moves=False, avoid=self._holders(span, row), node=node)
        return [order] if order is not None else []

    def _lacking(self, span: Span, node: str = "") -> ex.Record | None:
        """A run of the span's own that wants another copy: on `node`, or on any other."""
        for row in ex.records(span.extents):
            for stretch in self._forest.replicas.stretches(span, row):
                holders = self._holders(span, stretch)
                if node not in holders if node else len(holders) < span.tree.replicas:
                    return stretch
        return None

    def _holders(self, span: Span, row: ex.Record) -> set[str]:
        """The nodes on which blocks of a run lie, or will."""
        found = {row[2], *self._forest.replicas.handles(span, row)}
        coming = [copy.target for copy in self.open.values() if copy.pin.span is span]
        found |= {target[2] for target in coming if target[4] <= row[4] and row[5] <= target[5]}
        return {self._space.segments[handle].node for handle in found if handle in self._space.segments}

    # -- one copy

    def start(
        self, span: Span, row: ex.Record, *, moves: bool, avoid: Collection[str], node: str = ""
    ) -> CopySlots | None:
        """Order a copy of the first blocks of a run, as many as one may have and find room; None: not now."""
        tree, source = span.tree, self._space.segments[row[2]]
        if source.retired or not self.may_have_more(source.node) or (node and not self.may_have_more(node)):
            return None
        holder = self._liveness.nodes.get(source.node)
        if holder is None or not holder.up or not holder.data_address:
            return None
        width = row[5] - row[4]
        blocks = min(row[1], max(1, self._settings.copy_run_bytes_max // (tree.slot_bytes * width)))
        busy = [name for name in self.busy if not self.may_have_more(name)]
        wish = Wish(tree.slot_bytes, blocks, self._next_stamp(), {*avoid, *busy})
        rows = self._placement.take_elsewhere(wish, (row[4], row[5]), node)
        if not rows:
            return None
        target = (0, *rows[0][1:])
        self._orders += 1
        pin = Lease(b"", tree.namespace, span, row[0] + target[1])
        pin.pin()
        name = self._space.segments[target[2]].node
        due_ms = self.now_ms + self._settings.copy_ms
        copy = Copy(self._orders, name, source.node, (0, target[1], *row[2:]), target, pin, due_ms, moves)
        self.open[copy.order] = copy
        self.busy.update((name, source.node))
        return CopySlots(
            name, copy.order, tree.namespace, tree.part_bytes, copy.source, target[2], target[3], target[7]
        )

    def may_have_more(self, name: str) -> bool:
        """Whether the node may carry out another copy."""
        return self.busy[name] < self._settings.copies_per_node_max

    def done(self, command: m.SlotsCopied) -> None:
        """See messages.SlotsCopied."""
        copy = self.open.get(command.order)
        if copy is not None and copy.node == command.node:
            self._end(copy, min(command.blocks, copy.blocks))

    def forget(self, segment: Segment) -> None:
        """The segment's node was given up: nothing is copied into it any more."""
        for copy in [one for one in self.open.values() if one.target[2] == segment.handle]:
            self._end(copy, 0)

    def _end(self, copy: Copy, good: int) -> None:
        """An order is over; its first `good` blocks are there."""
        del self.open[copy.order]
        for name in (copy.node, copy.source_node):
            self.busy[name] -= 1
            if self.busy[name] <= 0:
                del self.busy[name]
        pin = copy.pin
        slot_bytes = pin.span.tree.slot_bytes
        self._space.charge([copy.target], slot_bytes, "reserved_bytes", -1)
        self._counters.copies_failed += good < copy.blocks
        used = self._install(copy, good) if pin.span.tree.alive else []
        span = pin.unpin()
        self._forest.settle(span)
        unused = _without(copy.target, used)
        self._clearing.later(unused, slot_bytes)
        if copy.moves:
            self.moved(span, copy.source_node, not used)
        elif span.tree.replicas > 1:
            self._want_more(span, failed=not used)

    def _want_more(self, span: Span, *, failed: bool) -> None:
        """Look at a span again that may still lack replicas, unless making them has failed too often."""
        tries = self._tries.pop(span, 0) + failed
        if tries and tries < TRIES_MAX:
            self._tries[span] = tries
        if tries < TRIES_MAX:
            self._forest.wanted[span] = None
        if len(self._tries) > HOT_MAX:
            del self._tries[next(iter(self._tries))]

    def _install(self, copy: Copy, good: int) -> list[tuple[int, int]]:
        """Let the directory know of the blocks whose source still stands; returns which, (first, end) of the copy."""
        used: list[tuple[int, int]] = []
        for span, start, end, at in self._pieces(copy):
            rows: list[ex.Record] = []
            for row in ex.records(span.extents):
                low, high = max(start, row[0]), min(end, row[0] + row[1], start + good - at)
                if low < high and _same_slots(row, low, copy.source, at + low - start):
                    target = copy.target
                    first = target[3] + (at + low - start) * target[6]
                    rows.append((low, high - low, target[2], first, *target[4:]))
                    used.append((at + low - start, at + high - start))
            self._forest.replicas.add(span, rows)
        blocks = sum(end - start for start, end in used)
        if not copy.moves:
            self._counters.replicated_blocks += blocks
            return used
        self._counters.moved_blocks += blocks
        for start, end in used:
            self._switch(copy, start, end)
        return used

    def _switch(self, copy: Copy, start: int, end: int) -> None:
        """Let copied blocks [start, end) take their source's place, whose slots are free when nobody reads them."""
        for span, first, last, at in self._pieces(copy):
            low, high = max(first, first + start - at), min(last, first + end - at)
            if low < high:
                part = self._forest.isolate(span, low, high - low)
                place = (copy.source[2], *copy.source[4:6])
                row = next(one for one in ex.records(part.extents) if (one[2], *one[4:6]) == place)
                old = self._forest.replicas.promote(part, row, copy.target[7])
                self._space.defer([old], part.tree.slot_bytes, self._leases.newest_number)
                self._space.settle_deferred(self._leases.oldest_number)
                self._forest.changed(part)

    @staticmethod
    def _pieces(copy: Copy) -> list[tuple[Span, int, int, int]]:
        """Where the copied blocks are: (span, first block, end, which of the copy's the first is), deepest first."""
        found: list[tuple[Span, int, int, int]] = []
        span, end, left = copy.pin.span, copy.pin.end, copy.blocks
        while left and span.parent is not None:
            start = max(0, end - left)
            left -= end - start
            found.append((span, start, end, left))
            span = span.parent
            end = span.blocks
        return found


def mask_of(row: ex.Record) -> int:
    """The parts of a run."""
    return (1 << row[5]) - (1 << row[4])


def _same_slots(row: ex.Record, block: int, source: ex.Record, at: int) -> bool:
    """Whether a run, from its span's `block` on, still is the one that was copied, from the copy's `at` on."""
    same = (row[2], *row[4:]) == (source[2], *source[4:])
    return same and row[3] + (block - row[0]) * row[6] == source[3] + at * source[6]


def _without(target: ex.Record, used: list[tuple[int, int]]) -> list[ex.Record]:
    """The rows of a copy's target but for the blocks that are used."""
    rows: list[ex.Record] = []
    at = 0
    for start, end in [*sorted(used), (target[1], target[1])]:
        if at < start:
            rows.append((0, start - at, target[2], target[3] + at * target[6], *target[4:]))
        at = max(at, end)
    return rows
