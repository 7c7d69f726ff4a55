"""Reserve: which blocks of a chain are missing, who gets them, and where.

Rules
  - The answer covers a head of the chain: it ends where room ends, at a conflict, or with the chain.
  - Of each part of each block: exists, being written by somebody else, or yours. Nothing is granted twice.
  - A reservation never waits. It may evict, never its own chain, and only where no slab can be bound instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby

from kvpool_master.core import extents as ex
from kvpool_master.core.directory import Plan, Region
from kvpool_master.core.evictor import Evictor
from kvpool_master.core.forest import Forest
from kvpool_master.core.graft import end_of, link, new_span, plan_alive
from kvpool_master.core.leases import Lease
from kvpool_master.core.liveness import Liveness
from kvpool_master.core.messages import Effect, Reason, Reserve, Reserved, Run, RunState
from kvpool_master.core.segments import Group, Segment, Space
from kvpool_master.core.settings import Settings
from kvpool_master.core.spans import Piece, Span, Tree
from kvpool_master.core.writes import Reservation, Writes, mark_of
from kvpool_proto.errors import ForeignId, ReservationEnded


@dataclass(slots=True)
class _Put:
    """One reserve in the making."""

    command: Reserve
    tree: Tree
    reservation: Reservation
    age: int
    pins: list[Lease] = field(default_factory=list[Lease])
    runs: list[Run] = field(default_factory=list[Run])
    extents: list[bytes] = field(default_factory=list[bytes])
    effects: list[Effect] = field(default_factory=list[Effect])
    answered: int = 0
    reason: Reason = Reason.NONE
    granted_bytes: int = 0


class Puts:
    """Grants room for puts."""

    def __init__(
        self,
        settings: Settings,
        epoch: int,
        space: Space,
        forest: Forest,
        evictor: Evictor,
        writes: Writes,
        liveness: Liveness,
    ) -> None:
        self._settings = settings
        self._evictor = evictor
        self._space = space
        self._forest = forest
        self._writes = writes
        self._liveness = liveness
        self.stamp = epoch << 32
        """The newest given out."""

    def reserve(self, command: Reserve, tree: Tree, now_ms: int) -> Reserved:
        """See messages.Reserve; the command has been checked."""
        known = self._retried(command, now_ms)
        if known is not None:
            return known
        counters = tree.counters
        counters.reserves += 1
        if len(self._writes.open) >= self._settings.reservations_max:
            return self._short(tree, Reserved(0, Reason.TOO_MANY_RESERVATIONS, (), b"", 0))
        plan = plan_alive(self._forest, tree, command.parent, command.chain)
        counters.conflicts += plan.conflict
        self.stamp += 1
        reservation = Reservation(command, tree, self.stamp)
        put = _Put(command, tree, reservation, self._forest.next_age())
        self._pin(put, plan)
        try:
            self._grant(put, plan)
        finally:
            for pin in put.pins:
                self._forest.settle(pin.unpin())
        if put.reason is Reason.NONE and plan.conflict:
            put.reason = Reason.CONFLICT
        write_ms = self._writes.start(reservation, put.granted_bytes, now_ms) if reservation.pieces else 0
        answer = Reserved(
            put.answered, put.reason, tuple(put.runs), b"".join(put.extents), write_ms, tuple(put.effects)
        )
        reservation.answer = answer
        return self._short(tree, answer)

    def _short(self, tree: Tree, answer: Reserved) -> Reserved:
        if answer.reason is not Reason.NONE:
            short = tree.counters.short_reserves
            short[answer.reason] = short.get(answer.reason, 0) + 1
        return answer

    def _retried(self, command: Reserve, now_ms: int) -> Reserved | None:
        ident = command.reservation
        known = self._writes.open.get(ident)
        if known is None:
            if self._writes.is_over(ident):
                raise ReservationEnded("the reservation was aborted, committed or has expired")
            return None
        if known.mark != mark_of(command):
            raise ForeignId("the id is that of another reservation")
        assert known.answer is not None
        return replace(known.answer, effects=(), write_ms=max(0, known.deadline_ms - now_ms))

    def _pin(self, put: _Put, plan: Plan) -> None:
        """Keep what is known of the chain from being evicted or dropped meanwhile."""
        held = [(region.span, region.start + region.blocks) for region in plan.regions if region.span is not None]
        if plan.after is not None and plan.after[0].parent is not None:
            held.append(plan.after)
        last = held if put.tree.index is not None else held[-1:]  # with an index they may lie in several trees
        for span, end in last:
            pin = Lease(b"", put.command.namespace, span, end)
            pin.pin()
            put.pins.append(pin)

    def _grant(self, put: _Put, plan: Plan) -> None:
        """Walk the plan front to back, granting what is missing, until room ends."""
        after = plan.after
        for region in plan.regions:
            if region.joins:
                assert region.span is not None
                link(end_of(self._forest, put.tree, after, plan.lead), region.span)
            if region.span is None:
                after = self._grant_new(put, region, after, plan.lead)
            else:
                after = self._grant_known(put, region)
            if put.reason is not Reason.NONE:
                return

    def _grant_new(
        self, put: _Put, region: Region, after: tuple[Span, int] | None, lead: bytes
    ) -> tuple[Span, int] | None:
        mask = put.reservation.mask
        blocks, rows = self._room(put, mask, region.blocks)
        if blocks == 0:
            return after
        tree = put.tree
        edge = region.offset * tree.key_bytes
        keys = put.command.chain[edge : edge + blocks * tree.key_bytes]
        span = new_span(end_of(self._forest, tree, after, lead), keys, put.age)
        self._give(put, span, region.offset, mask, rows)
        return span, blocks

    def _grant_known(self, put: _Put, region: Region) -> tuple[Span, int]:
        span = region.span
        assert span is not None
        asked = put.reservation.mask
        missing = asked & ~span.have & ~span.writing
        if not missing:
            self._answer(put, region.offset, region.blocks, span.have, missing)
            return span, region.start + region.blocks
        have = span.have
        blocks, rows = self._room(put, missing, region.blocks)
        if blocks == 0:
            return span, region.start
        span = self._forest.isolate(span, region.start, blocks)
        self._give(put, span, region.offset, missing, rows, have)
        return span, blocks

    def _give(self, put: _Put, span: Span, offset: int, mask: int, rows: list[ex.Record], have: int = 0) -> None:
        """The parts of `mask` of a whole span are the caller's to write, in `rows`."""
        reservation, blocks = put.reservation, span.blocks
        packed = ex.ordered(rows)
        span.extents = ex.ordered([*ex.records(span.extents), *rows]) if span.extents else packed
        self._space.enlist(span, packed)
        span.queued = False  # it may lie in other segments now, whose heaps do not hold it yet
        piece = Piece(reservation, span, blocks, mask)
        span.writers = [*(span.writers or ()), piece]
        reservation.pieces.append(piece)
        reservation.grant(mask, blocks)
        size = blocks * mask.bit_count() * put.tree.slot_bytes
        put.tree.bytes += size
        put.granted_bytes += size
        put.tree.counters.granted_blocks += blocks * mask.bit_count()
        put.extents.append(ex.shift(packed, offset))
        self._answer(put, offset, blocks, have, mask)

    def _answer(self, put: _Put, offset: int, blocks: int, have: int, yours: int) -> None:
        """Add the runs of blocks of one state; a run that goes on is made longer."""
        put.answered = offset + blocks
        low = put.command.part_from
        while low < put.command.part_to:
            state = _state(low, have, yours)
            high = low + 1
            while high < put.command.part_to and _state(high, have, yours) is state:
                high += 1
            last = put.runs[-1] if put.runs else None
            if (
                last
                and (last.part_from, last.part_to, last.state) == (low, high, state)
                and last.part_to - low == (put.command.part_to - put.command.part_from)
            ):
                put.runs[-1] = Run(last.offset, last.blocks + blocks, low, high, state)
            else:
                put.runs.append(Run(offset, blocks, low, high, state))
            low = high

    # -- room

    def _room(self, put: _Put, mask: int, blocks: int) -> tuple[int, list[ex.Record]]:
        """Slots for parts `mask` of up to `blocks` blocks; says why not for all, and has slabs bound for the rest."""
        slot_bytes = put.tree.slot_bytes
        groups = self._groups(put.reservation, mask, slot_bytes)
        got, rows, reason = self._space.allocate(groups, slot_bytes, blocks, put.reservation.stamp, self._evict)
        if got < blocks:
            put.reason = Reason.STARTING if reason is Reason.NO_NODE and self._starting(put, mask) else reason
        for low, high, segments in groups:
            missing = (blocks - got) * (high - low) if reason is not Reason.RESERVE_SHARE else 0
            for segment in segments:
                free = segment.allocator.runs_of(slot_bytes).free  # what is left is too scattered to be used
                put.effects += self._space.bind(segment, slot_bytes, free + missing if missing else 0)
                missing = max(0, missing - (segment.allocator.ready_slots(slot_bytes) - free))
        return got, rows

    def _evict(self, segment: Segment, slot_bytes: int, free_slots: int) -> None:
        self._evictor.evict(segment, slot_bytes, free_slots, self._settings.evict_inline_spans_max)

    def _groups(self, reservation: Reservation, mask: int, slot_bytes: int) -> list[Group]:
        """The parts of `mask` in runs that go to one node, each with that node's segments, emptiest first."""
        groups: list[Group] = []
        wanted = [part for part in reservation.parts if mask >> part & 1]
        # The number of a part less its place among those wanted is the same all along a run of neighbours.
        for (_, node), run in groupby(enumerate(wanted), lambda one: (one[1] - one[0], reservation.node_of(one[1]))):
            parts = [part for _, part in run]
            groups.append((parts[0], parts[-1] + 1, self._segments(node, slot_bytes)))
        return groups

    def _starting(self, put: _Put, mask: int) -> bool:
        """Whether some part found no node since segments are still closed after a start."""
        names = {put.reservation.node_of(part) for part in put.reservation.parts if mask >> part & 1}
        return any(segment.closed for name in names for segment in self._of_node(name))

    def _of_node(self, name: str) -> list[Segment]:
        """The segments of a node that is up, of all nodes for ""."""
        if name:
            node = self._liveness.nodes.get(name)
            return list(node.segments) if node is not None and node.up else []
        return [segment for node in self._liveness.nodes.values() if node.up for segment in node.segments]

    def _segments(self, name: str, slot_bytes: int) -> list[Segment]:
        """The open segments of a node that is up (of all nodes for ""), most room for the slot size first."""
        found = [one for one in self._of_node(name) if one.fits(slot_bytes) and not one.closed]
        if len(found) > 1:
            found.sort(key=lambda segment: (-segment.allocator.room_bytes(slot_bytes), segment.handle))
        return found


def _state(part: int, have: int, yours: int) -> RunState:
    if yours >> part & 1:
        return RunState.YOURS
    return RunState.EXISTS if have >> part & 1 else RunState.BEING_WRITTEN
