"""Reserve: which blocks of a chain are missing, who gets them, and where.

Rules
  - The answer covers a head of the chain: it ends where room ends, at a conflict, or with the chain.
  - Of each part of each block: exists, being written by somebody else, or yours. Nothing is granted twice.
  - A put in shares is one reservation a share, under one id: what is missing is divided into as many runs of blocks.
  - A tenant's quota is room like any other: its own oldest leaves go first, then the answer is short.
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
from kvpool_master.core.placement import Group, Placement, Wish
from kvpool_master.core.quotas import Quotas
from kvpool_master.core.reservation import Reservation, key_of, mark_of
from kvpool_master.core.segments import Segment, Space
from kvpool_master.core.settings import Settings
from kvpool_master.core.snapshot import PoolCounters
from kvpool_master.core.spans import Piece, Span, Tree
from kvpool_master.core.writes import Writes
from kvpool_proto.errors import ForeignId, ReservationEnded


@dataclass(slots=True)
class _Put:
    """One reserve in the making."""

    command: Reserve
    tree: Tree
    shares: list[Reservation]
    mask: int
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
        placement: Placement,
        quotas: Quotas,
        counters: PoolCounters,
    ) -> None:
        self._placement = placement
        self._quotas = quotas
        self._counters = counters
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
        if len(self._writes.open) + command.shares > self._settings.reservations_max:
            return self._short(tree, Reserved(0, Reason.TOO_MANY_RESERVATIONS, (), b"", 0))
        plan = plan_alive(self._forest, tree, command.parent, command.chain)
        counters.conflicts += plan.conflict
        shares = [Reservation(command, tree, self.next_stamp(), share) for share in range(command.shares)]
        put = _Put(command, tree, shares, shares[0].mask, self._forest.next_age())
        self._pin(put, plan)
        if command.shares > 1:
            plan.regions = _divided(plan.regions, put.mask, command.shares)
        try:
            self._grant(put, plan)
        finally:
            for pin in put.pins:
                self._forest.settle(pin.unpin())
        if put.reason is Reason.NONE and plan.conflict:
            put.reason = Reason.CONFLICT
        opened = [share for share in shares if share.pieces]
        write_ms = min([self._writes.start(share, put.granted_bytes, now_ms) for share in opened], default=0)
        answer = Reserved(
            put.answered, put.reason, tuple(put.runs), b"".join(put.extents), write_ms, tuple(put.effects)
        )
        for share in opened:
            share.answer = answer
        return self._short(tree, answer)

    def next_stamp(self) -> int:
        """A new stamp, above all before."""
        self.stamp += 1
        return self.stamp

    def _short(self, tree: Tree, answer: Reserved) -> Reserved:
        if answer.reason is not Reason.NONE:
            short = tree.counters.short_reserves
            short[answer.reason] = short.get(answer.reason, 0) + 1
        return answer

    def _retried(self, command: Reserve, now_ms: int) -> Reserved | None:
        keys = [key_of(command.reservation, share, command.shares) for share in range(command.shares)]
        known = next((found for key in keys if (found := self._writes.open.get(key)) is not None), None)
        if known is None:
            if any(self._writes.is_over(key) for key in (*keys, command.reservation)):
                raise ReservationEnded("the reservation was aborted, committed or has expired")
            if self._writes.open.get(command.reservation) or self._writes.open.get(key_of(command.reservation, 0, 2)):
                raise ForeignId("the id is that of a reservation with another number of shares")
            return None
        if known.mark != mark_of(command):
            raise ForeignId("the id is that of another reservation")
        own = self._writes.open.get(keys[command.share])
        if own is not None and command.shares > 1:
            own.introduce(command)
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
        mask, share = put.mask, put.shares[region.share]
        blocks, rows = self._room(put, share, mask, region.blocks)
        if blocks == 0:
            return after
        tree = put.tree
        edge = region.offset * tree.key_bytes
        keys = put.command.chain[edge : edge + blocks * tree.key_bytes]
        span = new_span(end_of(self._forest, tree, after, lead), keys, put.age)
        self._give(put, share, span, region.offset, mask, rows)
        return span, blocks

    def _grant_known(self, put: _Put, region: Region) -> tuple[Span, int]:
        span = region.span
        assert span is not None
        share = put.shares[region.share]
        missing = put.mask & ~span.have & ~span.writing
        if not missing:
            self._answer(put, region.offset, region.blocks, span.have, missing)
            return span, region.start + region.blocks
        have = span.have
        blocks, rows = self._room(put, share, missing, region.blocks)
        if blocks == 0:
            return span, region.start
        span = self._forest.isolate(span, region.start, blocks)
        self._give(put, share, span, region.offset, missing, rows, have)
        return span, blocks

    def _give(
        self, put: _Put, reservation: Reservation, span: Span, offset: int, mask: int, rows: list[ex.Record],
        have: int = 0,
    ) -> None:  # fmt: skip
        """The parts of `mask` of a whole span are a share's to write, in `rows`."""
        blocks = span.blocks
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
        self._answer(put, offset, blocks, have, mask, reservation.share)

    def _answer(self, put: _Put, offset: int, blocks: int, have: int, yours: int, share: int = 0) -> None:
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
                and (last.part_from, last.part_to, last.state, last.share) == (low, high, state, share)
                and last.part_to - low == (put.command.part_to - put.command.part_from)
            ):
                put.runs[-1] = Run(last.offset, last.blocks + blocks, low, high, state, share)
            else:
                put.runs.append(Run(offset, blocks, low, high, state, share))
            low = high

    # -- room

    def _room(self, put: _Put, share: Reservation, mask: int, blocks: int) -> tuple[int, list[ex.Record]]:
        """Slots for parts `mask` of up to `blocks` blocks; says why not for all, and has slabs bound for the rest."""
        slot_bytes = put.tree.slot_bytes
        most = min(blocks, self._quotas.blocks_left(put.tree, slot_bytes * mask.bit_count(), blocks))
        groups = self._groups(share, mask)
        wish = Wish(slot_bytes, most, share.stamp, put.command.avoid)
        got, rows, reason = self._placement.allocate(groups, wish, self._evict)
        if got < most:
            starting = reason is Reason.NO_NODE and self._starting(groups)
            put.reason = Reason.STARTING if starting else reason
        elif most < blocks:
            put.reason = Reason.OVER_QUOTA
        for group, asked in wish.asked.items():
            missing = (most - got) * (group.high - group.low) if reason is not Reason.RESERVE_SHARE else 0
            for segment in asked:
                free = segment.allocator.runs_of(slot_bytes).free  # what is left is too scattered to be used
                put.effects += self._space.bind(segment, slot_bytes, free + missing if missing else 0)
                missing = max(0, missing - (segment.allocator.ready_slots(slot_bytes) - free))
        for _, count, handle, _, low, high, _, _ in rows:
            if share.node_of(low) not in ("", self._space.segments[handle].node):
                self._counters.spilled_blocks += count * (high - low)
        return got, rows

    def _evict(self, segment: Segment, slot_bytes: int, free_slots: int) -> None:
        self._evictor.evict(segment, slot_bytes, free_slots, self._settings.evict_inline_spans_max)

    def _groups(self, reservation: Reservation, mask: int) -> list[Group]:
        """The parts of `mask` in runs that one node's process writes."""
        groups: list[Group] = []
        wanted = [part for part in reservation.parts if mask >> part & 1]
        # The number of a part less its place among those wanted is the same all along a run of neighbours.
        for (_, node), run in groupby(enumerate(wanted), lambda one: (one[1] - one[0], reservation.node_of(one[1]))):
            parts = [part for _, part in run]
            groups.append(Group(parts[0], parts[-1] + 1, node))
        return groups

    def _starting(self, groups: list[Group]) -> bool:
        """Whether some part found no node since segments are still closed after a start."""
        nodes = self._liveness.nodes
        named = [nodes.get(group.node) for group in groups] if all(group.node for group in groups) else nodes.values()
        return any(segment.closed for node in named if node and node.writable for segment in node.segments)


def _divided(regions: list[Region], mask: int, shares: int) -> list[Region]:
    """The regions, those with something to write cut where one share of all that is to be written meets the next."""
    missing = [not region.span or bool(mask & ~region.span.have & ~region.span.writing) for region in regions]
    total = sum(region.blocks for region, wanted in zip(regions, missing, strict=True) if wanted)
    found: list[Region] = []
    before = 0
    for region, wanted in zip(regions, missing, strict=True):
        if not wanted:
            found.append(region)
            continue
        at = 0
        while at < region.blocks:
            share = before * shares // total
            end = -(-(share + 1) * total // shares)  # of this share, among all that is to be written
            blocks = min(region.blocks - at, end - before)
            # What is granted of a known span is cut off its front, so that the rest begins where that ended.
            start = region.start if at == 0 else 0
            joins = region.joins and at == 0
            found.append(
                replace(region, offset=region.offset + at, blocks=blocks, start=start, joins=joins, share=share)
            )
            at += blocks
            before += blocks
    return found


def _state(part: int, have: int, yours: int) -> RunState:
    if yours >> part & 1:
        return RunState.YOURS
    return RunState.EXISTS if have >> part & 1 else RunState.BEING_WRITTEN
