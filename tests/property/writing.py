"""Judges Reserve, Commit and Abort: nothing is granted twice, and every slot given up comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvpool_master.core.messages import (
    Abort,
    Aborted,
    Commit,
    Committed,
    Outcome,
    Reason,
    Reserve,
    Reserved,
    RunState,
    WorkerGone,
)
from kvpool_proto.errors import (
    CommitTooLarge,
    ForeignId,
    KVPoolError,
    PartOutOfRange,
    ReservationEnded,
    UnknownReservation,
)
from property.naive import Block, Cell, Keep, Naive, Place, Ref, Reservation, spread

if TYPE_CHECKING:
    from property.judge import Judge

Answer = Outcome | KVPoolError


def open_reservations(model: Naive, now_ms: int) -> tuple[int, int]:
    """Most and least that may be open."""
    unended = [reservation for reservation in model.reservations.values() if not reservation.ended]
    return len(unended), sum(now_ms < one.deadline_ms and not one.dead for one in unended)


def expire(model: Naive, now_ms: int) -> None:
    """A Tick has ended every reservation that is over."""
    for reservation in model.reservations.values():
        if not reservation.ended and now_ms >= reservation.deadline_ms:
            model.give_up(reservation, reservation.granted, now_ms, word=False)
            model.end_if_over(reservation, "expired", now_ms)
    for cell in [cell for cell in model.held.values() if cell.keep is Keep.QUARANTINE]:
        if now_ms >= cell.free_by_ms:
            cell.keep = Keep.LOOSE


def worker_gone(model: Naive, command: WorkerGone, now_ms: int) -> None:
    """Its reservations are given up, with its word as it were."""
    for reservation in model.reservations.values():
        request = reservation.request
        if command.worker and request.worker == command.worker and request.nodes == (command.node,):
            model.give_up(reservation, reservation.granted, now_ms, word=True)
            model.end_if_over(reservation, "worker gone", now_ms)


def _remembered(model: Naive, reservation: Reservation, now_ms: int) -> bool:
    return not reservation.ended or now_ms < reservation.ended_ms + model.settings.remember_ms


# -- reserve -------------------------------------------------------------------------------------------


def _reserve(judge: Judge, command: Reserve, answer: Answer) -> None:
    model, now_ms = judge.model, judge.now_ms
    known = model.reservations.get(command.reservation)
    early_ms = model.aborted_early.get(command.reservation)
    if isinstance(answer, KVPoolError):
        judge.sweep()
        if isinstance(answer, ForeignId):
            assert known is not None
            assert known.request != command
        else:
            assert isinstance(answer, ReservationEnded), answer
            over = known is not None and (known.ended or now_ms >= known.deadline_ms)
            assert over or early_ms is not None
        return
    assert isinstance(answer, Reserved)
    assert early_ms is None or now_ms >= early_ms + model.settings.remember_ms, "reserved although the abort came first"
    if known is not None and _retried(judge, known, command, answer):
        return
    refs = model.refs(command.namespace, command.chain)
    assert 0 <= answer.answered <= len(refs)
    assert (answer.reason is Reason.NONE) == (answer.answered == len(refs)), answer
    states = _states(command, answer)
    places = spread(answer.extents)
    model.check_runs(command.namespace, answer.extents)
    assert set(places) == {at for at, state in states.items() if state is RunState.YOURS}
    assert (answer.write_ms > 0) == bool(places)
    assert answer.write_ms <= model.settings.write_max_ms
    _check_existing(judge, refs, states)
    if places:
        _grant(judge, command, answer, refs, places)
    _link(model, command, refs[: answer.answered])
    if answer.answered < len(refs):
        _check_short(judge, command, answer, refs)


def _retried(judge: Judge, known: Reservation, command: Reserve, answer: Reserved) -> bool:
    """The answer to a retry; False: the core has forgotten the id and starts anew."""
    first = known.reply
    same = (answer.answered, answer.runs, answer.extents) == (first.answered, first.runs, first.extents)
    stamps = {stamp for _, stamp in spread(answer.extents).values()}
    one = (known.request.namespace, known.request.chain) == (command.namespace, command.chain)
    if one and (same or (known.dead and stamps <= {known.stamp})):
        return True
    assert not _remembered(judge.model, known, judge.now_ms), "an id that is in use was answered anew"
    return False


def _states(command: Reserve, answer: Reserved) -> dict[tuple[int, int], RunState]:
    states: dict[tuple[int, int], RunState] = {}
    order = [(run.offset, run.part_from) for run in answer.runs]
    assert order == sorted(order), "runs are out of order"
    for run in answer.runs:
        for block in range(run.offset, run.offset + run.blocks):
            for part in range(run.part_from, run.part_to):
                assert (block, part) not in states, "runs overlap"
                states[block, part] = run.state
    asked = {(block, part) for block in range(answer.answered) for part in range(command.part_from, command.part_to)}
    assert set(states) == asked, "runs do not cover what was answered"
    return states


def _check_existing(judge: Judge, refs: list[Ref], states: dict[tuple[int, int], RunState]) -> None:
    model, now_ms = judge.model, judge.now_ms
    for (index, part), state in states.items():
        block = model.blocks.get(refs[index])
        cell = block.parts[part] if block else None
        if cell is None:
            allowed = {RunState.YOURS}
        elif cell.keep is Keep.STORED:
            allowed = {RunState.EXISTS} if cell.sure else {RunState.EXISTS, RunState.YOURS}
        elif now_ms < model.reservations[cell.reservation].deadline_ms:
            allowed = {RunState.BEING_WRITTEN}
        else:
            allowed = {RunState.BEING_WRITTEN, RunState.YOURS}
        assert state in allowed, f"part {part} of {refs[index]} is {state.name}, not {allowed}"


def _grant(
    judge: Judge,
    command: Reserve,
    answer: Reserved,
    refs: list[Ref],
    places: dict[tuple[int, int], tuple[Place, int]],
) -> None:
    model, now_ms = judge.model, judge.now_ms
    stamps = {stamp for _, stamp in places.values()}
    assert len(stamps) == 1, "one reservation, one stamp"
    (stamp,) = stamps
    assert stamp > model.stamp, "stamps rise"
    model.stamp = stamp
    slot_bytes = model.slot_bytes(command.namespace)
    parts = range(command.part_from, command.part_to)
    granted: dict[int, list[Cell]] = {part: [] for part in parts}
    for (index, part), (place, _) in sorted(places.items()):
        _check_place(judge, command, part, place, slot_bytes)
        ref = refs[index]
        block = model.blocks.get(ref)
        if block is not None and (dropped := block.parts[part]) is not None:
            if dropped.keep is Keep.WRITING:
                model.quarantine(dropped, model.reservations[dropped.reservation].deadline_ms, now_ms)
            else:
                model.detach(dropped, Keep.LOOSE)
        block = model.blocks.setdefault(ref, Block(ref, [None] * model.specs[ref[0]].parts))
        cell = Cell(ref, part, place, stamp, slot_bytes, command.reservation)
        block.parts[part] = cell
        model.held[place, slot_bytes] = cell
        model.seen.add(ref)
        granted[part].append(cell)
    deadline_ms = now_ms + answer.write_ms
    written = dict.fromkeys(parts, 0)
    model.reservations[command.reservation] = Reservation(command, answer, deadline_ms, stamp, granted, written)


def _check_place(judge: Judge, command: Reserve, part: int, place: Place, slot_bytes: int) -> None:
    model = judge.model
    segment = model.segments.get(place[0])
    assert segment is not None, f"segment {place[0]} is not there"
    assert model.nodes[segment.node].up, f"granted on {segment.node}, which is not up"
    if command.nodes:
        named = command.nodes[part - command.part_from] if len(command.nodes) > 1 else command.nodes[0]
        assert segment.node == named, f"part {part} lies on {segment.node}, not on {named}"
    slab = model.slab_of(place, slot_bytes)
    assert (slab.slot_bytes, slab.binding) == (slot_bytes, 0), f"slot {place} in a slab that is not bound: {slab}"
    other = model.held.get((place, slot_bytes))
    if other is not None:
        held = model.surely_held(other, judge.now_ms)
        assert not held, f"slot {place} granted while {other.keep.value} for part {other.part} of {other.ref}"
        model.forget(other)


def _link(model: Naive, command: Reserve, refs: list[Ref]) -> None:
    if not refs or model.specs[command.namespace].entry == "root":
        return
    if isinstance(command.parent, bytes):
        model.link(refs[0], (command.namespace, command.parent))
    for one, following in pairwise(refs):
        model.link(following, one)


# -- why a reservation was cut short -------------------------------------------------------------------


def _check_short(judge: Judge, command: Reserve, answer: Reserved, refs: list[Ref]) -> None:
    model = judge.model
    up = [node for node in model.nodes.values() if node.up]
    ups = [model.segments[handle] for node in up for handle in node.handles]
    if answer.reason is Reason.CONFLICT:
        assert model.contradicted(refs[answer.answered]), "a conflict that no chain has caused"
    elif answer.reason is Reason.NODE_AWAY:
        assert len(up) < len(model.nodes)
    elif answer.reason is Reason.NO_NODE:
        assert not up or any(name not in model.nodes or not model.nodes[name].up for name in command.nodes)
    elif answer.reason is Reason.SLAB_PENDING:
        assert any(slab.binding for segment in ups for slab in segment.slabs), "no slab is being bound"
    elif answer.reason is Reason.TOO_MANY_RESERVATIONS:
        assert open_reservations(model, judge.now_ms)[0] >= model.settings.reservations_max
    elif answer.reason is Reason.RESERVE_SHARE:
        block_bytes = model.slot_bytes(command.namespace) * (command.part_to - command.part_from)
        assert any(_share_used(model, handle, block_bytes) for handle in model.segments), "no share is used up"
    elif answer.reason is Reason.UNKNOWN_KEY:
        assert answer.answered == 0, "only the parent may be unknown"
        assert isinstance(command.parent, bytes)
        assert (command.namespace, command.parent) not in judge.visible
    else:
        assert answer.reason is Reason.NO_SPACE, answer.reason
        if not command.nodes and command.part_to - command.part_from == 1 and len(up) == len(model.nodes):
            _check_no_space(judge, command, refs)


def _share_used(model: Naive, handle: int, room_bytes: int) -> bool:
    """So many bytes more may pass what writers may hold of a segment."""
    segment = model.segments[handle]
    held = [cell for cell in model.held.values() if cell.place[0] == handle]
    open_bytes = sum(cell.slot_bytes for cell in held if cell.keep in (Keep.WRITING, Keep.QUARANTINE))
    share = model.settings.reserve_share_permille * len(segment.slabs) * segment.slab_bytes // 1000
    return open_bytes + room_bytes > share


def _check_no_space(judge: Judge, command: Reserve, refs: list[Ref]) -> None:
    """One part, any node, all nodes up: nothing is free, and nothing may be evicted."""
    model = judge.model
    slot_bytes = model.slot_bytes(command.namespace)
    usable: set[tuple[int, int]] = set()
    for handle, segment in model.segments.items():
        if _share_used(model, handle, slot_bytes):
            continue
        for number, slab in enumerate(segment.slabs):
            cells = model.cells_in_slab(handle, number)
            assert cells or slab.binding, f"no space, but slab {number} of segment {handle} is empty"
            if slab.slot_bytes == slot_bytes and not slab.binding:
                assert len(cells) == len(model.slots(handle, number)), f"no space, but segment {handle} has a free slot"
                usable |= {cell.place for cell in cells}
    if model.settings.evict_inline_spans_max == 1 or any(spec.entry == "any" for spec in model.specs.values()):
        return  # the one eviction may have been made; what follows what is not always sure
    pinned = {cell for lease in model.leases.values() for cell in lease.pinned}
    inner = {before for ref in model.blocks for before in model.before(ref)}
    for ref, block in model.blocks.items():
        if ref in refs or ref in inner or not judge.sure(block):
            continue
        if not pinned & set(block.cells()) and usable & {cell.place for cell in block.cells()}:
            raise AssertionError(f"no space, but {ref} may be evicted")


# -- commit and abort ----------------------------------------------------------------------------------


def _commit(judge: Judge, command: Commit, answer: Answer) -> None:
    model, now_ms = judge.model, judge.now_ms
    known = model.reservations.get(command.reservation)
    if known is None:
        assert isinstance(answer, UnknownReservation), answer
        judge.sweep()
        return
    parts = range(command.part_from, command.part_to)
    if isinstance(answer, KVPoolError):
        _check_refused(judge, known, command, answer)
        if command.final and isinstance(answer, ReservationEnded):
            if now_ms >= known.deadline_ms:
                model.give_up(known, known.granted, now_ms, word=False)
                model.end_if_over(known, "expired", now_ms)
            _late_word(known, set(parts) & set(known.granted), now_ms)
        judge.sweep()
        return
    assert isinstance(answer, Committed), answer
    assert parts
    assert set(parts) <= set(known.granted), "parts that are not of this reservation"
    for part in parts:
        total = max(known.written[part], command.blocks)
        assert total <= len(known.granted[part]), "more committed than granted"
        assert total == known.written[part] or part not in known.closed, "committed after the end"
        for cell in known.open_cells(part)[: total - known.written[part]]:
            if model.holds(cell) and cell.keep is Keep.WRITING:
                cell.keep = Keep.STORED
                block = model.blocks[cell.ref]
                block.alone_since_ms = max(block.alone_since_ms, now_ms)
        known.written[part] = total
    if command.final:
        model.give_up(known, parts, now_ms, word=True)
    model.end_if_over(known, "done", now_ms)
    assert answer.blocks == min(known.written[part] for part in parts), answer
    assert 0 <= answer.lost <= answer.blocks
    judge.sweep()


def _check_refused(judge: Judge, known: Reservation, command: Commit, error: KVPoolError) -> None:
    parts = range(command.part_from, command.part_to)
    foreign = not parts or not set(parts) <= set(known.granted)
    limbo = judge.now_ms >= known.deadline_ms or known.dead
    if isinstance(error, PartOutOfRange):
        assert foreign
    elif isinstance(error, CommitTooLarge):
        assert any(command.blocks > len(known.granted.get(part, ())) for part in parts)
    elif isinstance(error, ReservationEnded):
        adds = any(command.blocks > known.written[part] for part in parts if part in known.written)
        assert limbo or (adds and (known.ended or known.closed & set(parts))), error
    else:
        assert isinstance(error, UnknownReservation), error
        assert limbo or not _remembered(judge.model, known, judge.now_ms), error


def _late_word(known: Reservation, parts: Iterable[int], now_ms: int) -> None:
    """The writer's word after the end: its slots may be free now, or wait for the quarantine if nobody remembers."""
    for part in parts:
        for cell in known.open_cells(part):
            cell.until_ms = min(cell.until_ms, now_ms)


def _abort(judge: Judge, command: Abort, answer: Answer) -> None:
    model, now_ms = judge.model, judge.now_ms
    known = model.reservations.get(command.reservation)
    if isinstance(answer, KVPoolError):
        assert isinstance(answer, PartOutOfRange), answer
        assert known is not None
        assert not set(range(command.part_from, command.part_to)) <= set(known.granted)
        judge.sweep()
        return
    assert isinstance(answer, Aborted)
    if known is None or not answer.aborted:
        assert not answer.aborted, "an unknown reservation was aborted"
        assert known is None or known.ended or known.dead or now_ms >= known.deadline_ms
        if known is None:
            model.aborted_early[command.reservation] = now_ms
    if known is not None:
        named = range(command.part_from, command.part_to) if command.part_to else known.granted
        parts = set(named) & set(known.granted)
        model.give_up(known, parts, now_ms, command.writer and answer.aborted)
        model.end_if_over(known, "aborted", now_ms)
        if command.writer and not answer.aborted:
            _late_word(known, parts, now_ms)
    judge.sweep()


JUDGES: dict[type, Callable[[Judge, Any, Any], None]] = {
    Reserve: _reserve,
    Commit: _commit,
    Abort: _abort,
}
