"""Judges Reserve, Commit and Abort: nothing is granted twice, and every slot given up comes back. See placing.py."""

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
from property import placing, sums
from property.naive import Naive
from property.places import Place, spread
from property.records import Block, Cell, Keep, Ref, Reservation

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
    """Its reservations are given up; what it had mapped is free, data ports may still write elsewhere."""
    for reservation in model.reservations.values():
        if not command.worker or reservation.worker != command.worker:
            continue
        parts = [part for part in reservation.granted if reservation.node_of(part) in ("", command.node)]
        model.give_up(reservation, parts, now_ms, word=False)
        for cell in [cell for part in parts for cell in reservation.open_cells(part)]:
            if cell.keep is Keep.QUARANTINE and model.holds(cell):
                model.forget(cell)
        model.end_if_over(reservation, "worker gone", now_ms)


def key_of(ident: bytes, share: int, shares: int) -> bytes:
    """Under what the model keeps a reservation, or a share of one."""
    return ident if shares == 1 else ident + bytes([share])


def shares_of(model: Naive, ident: bytes, share: int | None = None) -> list[Reservation]:
    """The reservations of an id, or of one of its shares; the undivided one counts as share 0."""
    found = [one for key, one in model.reservations.items() if key[: len(ident)] == ident]
    return [one for one in found if share is None or one.share == share]


def _remembered(model: Naive, reservation: Reservation, now_ms: int) -> bool:
    return not reservation.ended or now_ms < reservation.ended_ms + model.settings.remember_ms


# -- reserve -------------------------------------------------------------------------------------------


def _reserve(judge: Judge, command: Reserve, answer: Answer) -> None:
    model, now_ms = judge.model, judge.now_ms
    known = shares_of(model, command.reservation)
    early_ms = model.aborted_early.get(command.reservation)
    if isinstance(answer, KVPoolError):
        judge.sweep()
        if isinstance(answer, ForeignId):
            assert known
            assert any(one.request != command for one in known)
        else:
            assert isinstance(answer, ReservationEnded), answer
            over = any(one.ended or now_ms >= one.deadline_ms for one in known)
            assert over or early_ms is not None
        return
    assert isinstance(answer, Reserved)
    assert early_ms is None or now_ms >= early_ms + model.settings.remember_ms, "reserved although the abort came first"
    if known and _retried(judge, known, command, answer):
        return
    refs = model.refs(command.namespace, command.chain)
    assert 0 <= answer.answered <= len(refs)
    assert (answer.reason is Reason.NONE) == (answer.answered == len(refs)), answer
    states = _states(command, answer)
    owners = _owners(command, answer)
    places = spread(answer.extents)
    model.check_runs(command.namespace, answer.extents)
    assert set(places) == {at for at, state in states.items() if state is RunState.YOURS}
    assert (answer.write_ms > 0) == bool(places)
    assert answer.write_ms <= model.settings.write_max_ms
    _check_existing(judge, refs, states)
    if places:
        _grant(judge, command, answer, refs, places, owners)
        placing.check_own_first(judge, command, places, owners)
        sums.check_granted(judge, command.namespace)
    _link(model, command, refs[: answer.answered])
    if answer.answered < len(refs):
        placing.check_short(judge, command, answer, refs)


def _retried(judge: Judge, known: list[Reservation], command: Reserve, answer: Reserved) -> bool:
    """The answer to a retry, by any share; False: the core has forgotten the id and starts anew."""
    first = known[-1].reply
    same = (answer.answered, answer.runs, answer.extents) == (first.answered, first.runs, first.extents)
    stamps = {stamp for _, stamp in spread(answer.extents).values()}
    request = known[-1].request
    one = (request.namespace, request.chain, request.shares) == (command.namespace, command.chain, command.shares)
    dead = any(share.dead for share in known)
    if one and (same or (dead and stamps <= {share.stamp for share in known})):
        for share in known:
            if command.shares > 1 and share.share == command.share and not share.ended:
                share.worker = command.worker or share.worker
                share.nodes = command.nodes if len(command.nodes) == 1 else share.nodes
        return True
    for share in known:
        assert not _remembered(judge.model, share, judge.now_ms), "an id that is in use was answered anew"
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


def _owners(command: Reserve, answer: Reserved) -> dict[int, int]:
    """The share of each block that is the callers'. All of them, in order, are divided evenly, without a gap."""
    owners: dict[int, int] = {}
    for run in answer.runs:
        if run.state is RunState.YOURS:
            owners.update(dict.fromkeys(range(run.offset, run.offset + run.blocks), run.share))
        else:
            assert run.share == 0, "a run of nobody's is a share's"
    shares = [owners[block] for block in sorted(owners)]
    assert set(shares) <= set(range(command.shares)), "a share that nobody asked for"
    assert shares == sorted(shares), "the blocks of a share are not together"
    if answer.reason is Reason.NONE:
        even = [at * command.shares // len(shares) for at in range(len(shares))]
        assert shares == even, f"{shares} is not even"
    return owners


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
    owners: dict[int, int],
) -> None:
    model = judge.model
    parts = range(command.part_from, command.part_to)
    for key in [key for key in model.reservations if key[: len(command.reservation)] == command.reservation]:
        del model.reservations[key]
    for number in sorted(set(owners.values())):
        mine = {at: place for at, place in places.items() if owners[at[0]] == number}
        stamps = {stamp for _, stamp in mine.values()}
        assert len(stamps) == 1, "one reservation, one stamp"
        (stamp,) = stamps
        assert stamp > model.stamp, "stamps rise"
        model.stamp = stamp
        reservation = Reservation(
            command, answer, judge.now_ms + answer.write_ms, stamp, {part: [] for part in parts},
            dict.fromkeys(parts, 0), number, command.nodes, command.worker,
        )  # fmt: skip
        if command.shares > 1:
            reservation.nodes = command.nodes[number : number + 1] if len(command.nodes) > 1 else command.nodes
            reservation.worker = command.worker if number == command.share else 0
        key = key_of(command.reservation, number, command.shares)
        model.reservations[key] = reservation
        for (index, part), (place, _) in sorted(mine.items()):
            placing.check_place(judge, reservation, part, place)
            _put(judge, Cell(refs[index], part, place, stamp, model.slot_bytes(command.namespace), key))


def _put(judge: Judge, cell: Cell) -> None:
    """A part of a block is granted to a reservation."""
    model, ref = judge.model, cell.ref
    block = model.blocks.get(ref)
    if block is not None and (dropped := block.parts[cell.part]) is not None:
        for copy in block.of(cell.part)[1:]:
            model.detach(copy, Keep.LOOSE)
        if dropped.keep is Keep.WRITING:
            model.let_go(dropped, model.reservations[dropped.reservation].deadline_ms, judge.now_ms)
        else:
            model.detach(dropped, Keep.LOOSE)
    block = model.blocks.setdefault(ref, Block(ref, [None] * model.specs[ref[0]].parts))
    block.parts[cell.part] = cell
    model.held[cell.place, cell.slot_bytes] = cell
    model.seen.add(ref)
    model.reservations[cell.reservation].granted[cell.part].append(cell)


def _link(model: Naive, command: Reserve, refs: list[Ref]) -> None:
    if not refs or model.specs[command.namespace].entry == "root":
        return
    if isinstance(command.parent, bytes):
        model.link(refs[0], (command.namespace, command.parent))
    for one, following in pairwise(refs):
        model.link(following, one)


# -- commit and abort ----------------------------------------------------------------------------------


def _commit(judge: Judge, command: Commit, answer: Answer) -> None:
    model, now_ms = judge.model, judge.now_ms
    known = next(iter(shares_of(model, command.reservation, command.share)), None)
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
    known = shares_of(model, command.reservation, command.share if command.writer else None)
    if isinstance(answer, KVPoolError):
        assert isinstance(answer, PartOutOfRange), answer
        named = set(range(command.part_from, command.part_to))
        assert any(not named <= set(one.granted) for one in known)
        judge.sweep()
        return
    assert isinstance(answer, Aborted)
    if not known or not answer.aborted:
        assert not answer.aborted, "an unknown reservation was aborted"
        assert all(one.ended or one.dead or now_ms >= one.deadline_ms for one in known)
        if not known:
            model.aborted_early[command.reservation] = now_ms
    for one in known:
        named = range(command.part_from, command.part_to) if command.part_to else one.granted
        parts = set(named) & set(one.granted)
        model.give_up(one, parts, now_ms, command.writer and answer.aborted)
        model.end_if_over(one, "aborted", now_ms)
        if command.writer and not answer.aborted:
            _late_word(one, parts, now_ms)
    judge.sweep()


JUDGES: dict[type, Callable[[Judge, Any, Any], None]] = {
    Reserve: _reserve,
    Commit: _commit,
    Abort: _abort,
}
