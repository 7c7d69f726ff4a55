"""Judges Purge, Remove and BlockBad: what must vanish, what may, what has to stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvpool_master.core.messages import BlockBad, GoneReason, Outcome, Purge, Purged, Remove, Removed
from kvpool_proto.errors import KVPoolError
from property.records import Block, Keep, Ref

if TYPE_CHECKING:
    from property.judge import Judge

Answer = Outcome | KVPoolError


def _purge(judge: Judge, command: Purge, answer: Answer) -> None:
    assert isinstance(answer, Purged)
    model = judge.model
    blocks = [block for ref, block in model.blocks.items() if ref[0] == command.namespace]
    stored = [block for block in blocks if block.stored()]
    assert sum(judge.sure(block) for block in stored) <= answer.blocks
    assert judge.unsettled or answer.blocks <= len(blocks)
    for reservation in model.reservations.values():
        if reservation.request.namespace == command.namespace and not reservation.ended:
            model.give_up(reservation, reservation.granted, judge.now_ms, word=False)
            model.end_if_over(reservation, "purged", judge.now_ms)
    for order in judge.copies.values():
        order.dead |= order.effect.namespace == command.namespace
    for block in blocks:
        for cell in [*block.copies, *block.cells()]:
            model.detach(cell, Keep.LOOSE)
    judge.unsettled = True
    judge.sweep()


def _remove(judge: Judge, command: Remove, answer: Answer) -> None:
    assert isinstance(answer, Removed)
    model = judge.model
    chain = model.refs(command.namespace, command.chain)
    refs = chain[command.skip :]
    blocks = [model.blocks[ref] for ref in refs if ref in model.blocks]
    must: set[Ref] = set()
    for index, ref in enumerate(refs):
        if index and model.specs[ref[0]].entry == "any" and model.links.get(ref) != refs[index - 1]:
            break
        if model.contradicted(ref) or (command.skip and not model.claims.get(ref, set()) <= {chain[command.skip - 1]}):
            break
        if ref in model.blocks and judge.sure(model.blocks[ref]):
            must.add(ref)
    for block in blocks:
        if not block.stored() and not model.written(block, judge.now_ms):
            _doubt(block)
    gone = judge.sweep(may=refs, must=must, reason=GoneReason.REMOVED)
    most = len(refs) if judge.unsettled else len(blocks)
    assert len(gone) <= answer.blocks <= most, f"removed {len(gone)}..{most}"


def _bad(judge: Judge, command: BlockBad, answer: Answer) -> None:
    assert isinstance(answer, Removed)
    model = judge.model
    ref = model.refs(command.namespace, command.chain)[-1]
    block = model.blocks.get(ref)
    bad = [cell for cell in block.everything() if cell.stamp == command.stamp] if block else []
    if block is None or not bad:
        judge.sweep()
        assert answer.blocks <= judge.unsettled
        return
    if not judge.sure(block) or model.contradicted(ref) or any(cell.shaky or not cell.sure for cell in bad):
        _doubt(block)
        judge.sweep()
        return
    replicas = all(cell in block.copies or len(block.of(cell.part)) > 1 for cell in bad)
    surely = all(any(one.sure for one in block.of(cell.part) if one is not cell) for cell in bad)
    for cell in sorted(bad, key=lambda cell: cell in block.cells()):
        model.detach(cell, Keep.LOOSE)
    block.alone_since_ms = judge.now_ms
    if not surely:
        _doubt(block)  # the core may keep the other parts for a grace, or hide the block as one
    judge.sweep()
    assert answer.blocks == 0 if surely else replicas or answer.blocks == 1


def _doubt(block: Block) -> None:
    """The core may have taken its committed parts along."""
    for cell in block.everything():
        if cell.keep is Keep.STORED:
            cell.sure = False


JUDGES: dict[type, Callable[[Judge, Any, Any], None]] = {
    Purge: _purge,
    Remove: _remove,
    BlockBad: _bad,
}
