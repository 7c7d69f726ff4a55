"""Nodes lose what they hold by an operator's word, before they stop.

Rules
  - A draining node takes no writes. What it holds is moved (copies.py), newest blocks first, as long as there is room
    elsewhere: whoever asks for them next is elsewhere.
  - Writers at work are waited for, and what they wrote is moved, too. After a start a node is looked at when its
    inventory is complete and the graces of the former epoch are over.
  - What could not be moved is hidden at the end (closing), so that the leases on it run out: then the node is drained.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvpool_master.core import extents as ex
from kvpool_master.core.copies import TRIES_MAX, Copies, mask_of
from kvpool_master.core.leases import LeaseTable
from kvpool_master.core.liveness import Liveness, Node
from kvpool_master.core.messages import Effect
from kvpool_master.core.segments import Segment
from kvpool_master.core.settings import Settings
from kvpool_master.core.spans import Span


@dataclass(slots=True)
class _Drain:
    """slabs: not looked at yet. spans: to be moved, newest first. tries: failures by span."""

    slabs: list[tuple[Segment, int]]
    spans: list[tuple[int, int, Span]] = field(default_factory=list[tuple[int, int, Span]])
    tries: Counter[Span] = field(default_factory=Counter[Span])
    late: bool = False
    """Writers were at work when it was looked at: it has to be looked at again."""
    finished: bool = False
    barrier: int = 0
    """The newest lease when it was hidden."""


class Drains:
    """All drains of nodes that are there."""

    def __init__(self, settings: Settings, leases: LeaseTable, liveness: Liveness, copies: Copies) -> None:
        self._settings = settings
        self._leases = leases
        self._liveness = liveness
        self._copies = copies
        self._drains: dict[str, _Drain] = {}
        self._pushed = 0
        copies.moved = self._moved

    def drain(self, node: Node) -> None:
        """The node is to lose what it holds."""
        self._drains[node.name] = _Drain(_slabs(node))

    def undrain(self, node: Node) -> None:
        """It keeps what it holds."""
        self._drains.pop(node.name, None)

    def closes(self, node: Node) -> bool:
        """Whether nothing of a draining node is moved any more."""
        return self._drains[node.name].finished

    def closed(self, node: Node) -> None:
        """It is hidden from now on: the leases that are waited for are those of now."""
        self._drains[node.name].barrier = self._leases.newest_number

    def is_drained(self, node: Node) -> bool:
        """Whether nobody reads or writes what is left of a draining node that is hidden."""
        waiting = any(one.reserved_bytes or one.quarantined_bytes or one.deferred_bytes for one in node.segments)
        return not waiting and self._leases.oldest_number > self._drains[node.name].barrier

    def left(self, node: Node) -> int:
        """What a draining node still waits for: slots in use while it moves, then leases, at least 1; 0: nothing."""
        if node.drained:
            return 0
        drain = self._drains.get(node.name)
        if drain is None or not drain.finished:
            sizes = [one.allocator.per_size.items() for one in node.segments]
            return max(1, sum(len(runs.slabs) * runs.per_slab - runs.free for each in sizes for _, runs in each))
        return max(1, drain.barrier - self._leases.oldest_number + 1)

    def _scan(self, node: Node, drain: _Drain) -> None:
        """Look at some of the slabs of a draining node."""
        if not drain.slabs and drain.late and not any(one.reserved_bytes for one in node.segments):
            drain.slabs, drain.late = _slabs(node), False
        budget = self._settings.tick_spans_max
        while drain.slabs and budget > 0:
            segment, slab = drain.slabs[-1]
            budget -= 1 + segment.sort(budget)
            if segment.unsorted:
                return
            drain.slabs.pop()
            drain.late |= segment.reserved_bytes > 0
            for span in dict.fromkeys(segment.slab_spans.get(slab, ())):
                budget -= 1
                if segment.holds(span, slab) and span.tree.alive:
                    self._push(drain, span)

    def tick(self) -> list[Effect]:
        """Look further, and start moves; returns the orders."""
        effects: list[Effect] = []
        for name, drain in self._drains.items():
            node = self._liveness.nodes.get(name)
            if node is None or not node.up or any(one.closed for one in node.segments):
                continue  # what it holds is not all known yet, or a former epoch's leases and writers are at it
            if not drain.finished:
                self._scan(node, drain)
                effects += self._move(node, drain)
        return effects

    def _moved(self, span: Span, node: str, failed: bool) -> None:
        """A move is over; there may be more of the span to move."""
        drain = self._drains.get(node)
        if drain is not None:
            if failed:
                drain.tries[span] += 1
            self._push(drain, span)

    def _push(self, drain: _Drain, span: Span) -> None:
        self._pushed += 1
        heappush(drain.spans, (-span.age, self._pushed, span))

    def _move(self, node: Node, drain: _Drain) -> list[Effect]:
        """Start moves, newest blocks first, as far as the node may have more copies."""
        handles = {segment.handle for segment in node.segments}
        effects: list[Effect] = []
        while drain.spans and not drain.slabs and self._copies.busy[node.name] < self._settings.copies_per_node_max:
            span = heappop(drain.spans)[2]
            row = next((one for one in ex.records(span.extents) if one[2] in handles), None)
            if span.parent is None or not span.tree.alive or row is None or drain.tries[span] >= TRIES_MAX:
                continue
            if any(copy.moves and copy.pin.span is span for copy in self._copies.open.values()):
                continue  # a part of it is on its way; it is pushed again then
            if span.have & mask_of(row) != mask_of(row):
                drain.late = True  # somebody is writing it
                continue
            order = self._copies.start(span, row, moves=True, avoid=(node.name,))
            if order is None:
                if any(not self._copies.may_have_more(name) for name in self._copies.busy):
                    self._push(drain, span)  # whoever has room is at work
                else:
                    drain.spans.clear()  # there is no room anywhere
                break
            effects.append(order)
        if not (drain.spans or drain.slabs or drain.late or self._copies.busy[node.name]):
            drain.finished = True
        return effects


def _slabs(node: Node) -> list[tuple[Segment, int]]:
    return [(segment, slab) for segment in node.segments for slab in range(segment.allocator.slabs)]
