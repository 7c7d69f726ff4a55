"""Judges Lookup, Peek, Release and Renew: what may be hit, what a lease holds, when it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvpool_master.core.messages import (
    Hit,
    Lookup,
    Outcome,
    Peek,
    Peeked,
    Reason,
    Release,
    Released,
    Renew,
    Renewed,
)
from kvpool_proto.errors import ForeignId, KVPoolError, UnknownLease
from property import copying
from property.naive import Naive
from property.places import Place, spread
from property.records import Block, Cell, Lease

if TYPE_CHECKING:
    from property.judge import Judge

Answer = Outcome | KVPoolError


def sure_leases(model: Naive, now_ms: int) -> int:
    """How many leases are surely alive."""
    return sum(now_ms < lease.deadline_ms and not lease.doubtful for lease in model.leases.values())


def expire(model: Naive, now_ms: int) -> None:
    """A Tick has ended every lease that is over."""
    model.leases = {key: lease for key, lease in model.leases.items() if now_ms < lease.deadline_ms}


def _run(judge: Judge, command: Lookup | Peek) -> tuple[int, int]:
    """Least and most blocks that may be hit, from what stood there one by one."""
    model = judge.model
    refs = model.refs(command.namespace, command.chain)
    least = most = 0
    certain = True
    for index in range(command.skip, len(refs)):
        ref = refs[index]
        if ref not in judge.visible:
            break
        if model.specs[ref[0]].entry == "any":
            previous = model.links.get(ref)
            if index > command.skip:
                if previous is not None and previous != refs[index - 1]:
                    break
                certain &= previous is not None
            certain &= not model.contradicted(ref)
        most += 1
        least += certain
    return least, most


def _check_hit(judge: Judge, command: Lookup | Peek, answer: Hit | Peeked) -> list[Cell]:
    model = judge.model
    refs = model.refs(command.namespace, command.chain)
    least, most = _run(judge, command)
    assert least <= answer.blocks <= most, f"{answer.blocks} blocks hit, {least}..{most} are there"
    asked = max(0, len(refs) - command.skip)
    assert (answer.reason is Reason.NONE) == (answer.blocks == asked), answer
    model.check_runs(command.namespace, answer.extents)
    places = spread(answer.extents)
    parts = range(model.specs[command.namespace].parts)
    indexes = range(command.skip, command.skip + answer.blocks)
    assert set(places) == {(index, part) for index in indexes for part in parts}, "the extents do not cover the hit"
    cells: list[Cell] = []
    for (index, part), (place, stamp) in places.items():
        block = model.blocks[refs[index]]
        node = command.node if isinstance(command, Lookup) else ""
        _check_own_copy(model, block, part, place, node)
        cells.append(copying.seen(judge, block, part, place, stamp, node))
    if answer.blocks < asked:
        _check_reason(judge, refs[command.skip + answer.blocks], answer.reason)
    return cells


def _check_own_copy(model: Naive, block: Block, part: int, place: Place, node: str) -> None:
    """Who has a copy on its own node is not sent elsewhere."""
    if node and model.segments[place[0]].node != node:
        for cell in block.of(part):
            own = cell.sure and model.segments[cell.place[0]].node == node and copying.readable(model, cell)
            assert not own, f"{place} was given to a reader on {node}, which has {cell.place}"


def _check_reason(judge: Judge, missing: tuple[bytes, bytes], reason: Reason) -> None:
    block = judge.model.blocks.get(missing)
    if block is None and not judge.unsettled:
        assert reason in (Reason.UNKNOWN_KEY, Reason.HOLE, Reason.CONFLICT), reason
    if reason is Reason.CONFLICT:
        assert judge.model.contradicted(missing), "a conflict that no chain has caused"
    if reason is Reason.NODE_AWAY:
        away = [name for name, node in judge.model.nodes.items() if not node.up or name in judge.model.draining]
        assert judge.unsettled or away


def _lookup(judge: Judge, command: Lookup, answer: Answer) -> None:
    model, now_ms = judge.model, judge.now_ms
    judge.sweep()
    old = model.leases.get(command.lease)
    asked = (command.namespace, command.chain, command.skip)
    if isinstance(answer, ForeignId):
        assert old is not None
        assert old.asked != asked
        return
    early_ms = model.released_early.get(command.lease)
    if isinstance(answer, UnknownLease):
        assert early_ms is not None, "refused although nobody released it"
        return
    assert isinstance(answer, Hit), answer
    if early_ms is not None and now_ms < early_ms + model.settings.remember_ms:
        assert not answer.lease_ms, "leased although the release came first"
    if old is not None and now_ms >= old.deadline_ms:
        old = None
    assert old is None or old.asked == asked or old.doubtful, "a foreign lease id"
    if answer.reason is Reason.TOO_MANY_LEASES:
        assert old is None
        assert len(model.leases) >= model.settings.leases_max
        assert not answer.blocks
        return
    cells = _check_hit(judge, command, answer)
    if old is None or answer.blocks:  # a retry that finds nothing leaves the first answer's lease as it is
        model.leases.pop(command.lease, None)
    if early_ms is not None and not answer.lease_ms:
        return
    model.released_early.pop(command.lease, None)
    assert (answer.lease_ms > 0) == (answer.blocks > 0), answer
    assert answer.lease_ms <= model.settings.lease_max_ms
    if answer.blocks:
        hit = model.refs(command.namespace, command.chain)[command.skip : command.skip + answer.blocks]
        held = [model.blocks[ref] for ref in {*hit, *model.before(hit[-1])} if ref in model.blocks]
        pinned = [cell for block in held for cell in block.everything()]
        if old is not None and not old.doubtful:
            cells, pinned = cells + old.hit, pinned + old.pinned
        lease = Lease(asked, now_ms, now_ms + answer.lease_ms, cells, pinned)
        model.leases[command.lease] = lease


def _peek(judge: Judge, command: Peek, answer: Answer) -> None:
    judge.sweep()
    assert isinstance(answer, Peeked), answer
    _check_hit(judge, command, answer)


def _release(judge: Judge, command: Release, answer: Answer) -> None:
    model = judge.model
    assert isinstance(answer, Released), answer
    judge.sweep()
    least = most = 0
    for key in set(command.leases):
        lease = model.leases.pop(key, None)
        if lease is None:
            model.released_early[key] = judge.now_ms
            continue
        most += 1
        least += judge.now_ms < lease.deadline_ms and not lease.doubtful
        if judge.now_ms >= lease.deadline_ms:  # over or not: it may be remembered
            model.released_early[key] = judge.now_ms - model.settings.remember_ms
    assert least <= answer.released <= most


def _renew(judge: Judge, command: Renew, answer: Answer) -> None:
    model, now_ms = judge.model, judge.now_ms
    judge.sweep()
    lease = model.leases.get(command.lease)
    if isinstance(answer, UnknownLease):
        assert lease is None or now_ms >= lease.deadline_ms or lease.doubtful
        model.leases.pop(command.lease, None)
        return
    assert isinstance(answer, Renewed), answer
    assert lease is not None, "an unknown lease was renewed"
    deadline_ms = now_ms + answer.lease_ms
    assert deadline_ms <= max(lease.born_ms + model.settings.lease_life_max_ms, now_ms)
    assert deadline_ms >= min(lease.deadline_ms, lease.born_ms + model.settings.lease_life_max_ms)
    lease.deadline_ms = deadline_ms


JUDGES: dict[type, Callable[[Judge, Any, Any], None]] = {
    Lookup: _lookup,
    Peek: _peek,
    Release: _release,
    Renew: _renew,
}
