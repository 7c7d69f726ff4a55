"""Judges copies between nodes and slots to be cleared: what is copied, what counts of it, where a block may be read.

A slot has the content that was written or copied there last: a cell. A block may lie in several cells; what a lookup
hands out must be one of them, and the one that counts changes only for a move or a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpool_master.core.messages import ClearSlots, CopySlots, Effect, Outcome, SlotsCleared, SlotsCopied
from kvpool_proto.errors import KVPoolError
from property import placing
from property.naive import Naive
from property.places import Place
from property.records import Block, Cell, Keep

if TYPE_CHECKING:
    from property.judge import Judge

Answer = Outcome | KVPoolError


@dataclass(eq=False, slots=True)
class Order:
    """A copy that is not answered. cells: by block, those that are copied and those that get the copy."""

    effect: CopySlots
    source_node: str
    cells: list[tuple[list[Cell], list[Cell]]]
    due_ms: int
    may_move: bool
    dead: bool = False
    """Its namespace was purged."""


# -- where a block may be read ---------------------------------------------------------------------------


def readable(model: Naive, cell: Cell) -> bool | None:
    """Whether lookups may hand out the slot; None: that depends (a node that drains may be closing)."""
    name = model.segments[cell.place[0]].node
    node = model.nodes[name]
    if not node.up or node.drained:
        return False
    return None if name in model.draining else True


def may_hide(model: Naive, block: Block) -> bool:
    """Some part may lie on nodes only that are not read now."""
    return any(
        not any(cell.sure and readable(model, cell) for cell in block.of(part)) for part in range(len(block.parts))
    )


def seen(judge: Judge, block: Block, part: int, place: Place, stamp: int, own: str = "") -> Cell:
    """A lookup by a reader on node `own` was given this slot for a part. Returns its cell."""
    model = judge.model
    cells = block.of(part)
    cell = next((one for one in cells if (one.place, one.stamp) == (place, stamp)), None)
    assert cell is not None, f"{block.ref}, part {part}: {place} holds something else"
    assert readable(model, cell) is not False, f"{block.ref} is read on a node that is away"
    cell.sure = True
    if cell is not cells[0] and readable(model, cells[0]) and model.segments[place[0]].node != own:
        assert cells[0].shaky, f"{block.ref}, part {part} is read in {place}, although {cells[0].place} is up"
        _swap(model, block, cells[0], cell)
    return cell


def _swap(model: Naive, block: Block, old: Cell, new: Cell) -> None:
    """Another copy is the one that counts."""
    if new in block.copies:
        block.copies.remove(new)
    block.parts[new.part] = new
    model.follow(old, new)
    block.copies.append(old)
    old.sure = False


# -- orders are given ------------------------------------------------------------------------------------


def ordered(judge: Judge, effects: Iterable[Effect]) -> None:
    """Judge the orders among the effects of a command, and keep them until they are answered."""
    for effect in effects:
        if isinstance(effect, ClearSlots):
            _to_clear(judge, effect)
        elif isinstance(effect, CopySlots):
            _to_copy(judge, effect)


def _to_clear(judge: Judge, effect: ClearSlots) -> None:
    model = judge.model
    if effect.order in judge.clears:
        assert judge.clears[effect.order] == effect, "an order that is repeated says the same"
        return
    assert model.segments[effect.segment].node == effect.node, "a segment of another node"
    judge.clears[effect.order] = effect
    for cell, stamp in _named(model, effect):
        assert cell is not None, f"nothing of stamp {stamp} is there to be cleared"
        assert cell.stamp == stamp, f"nothing of stamp {stamp} is there to be cleared"
        if cell.keep is Keep.WRITING:
            late = judge.now_ms >= model.reservations[cell.reservation].deadline_ms
            assert late, f"a slot is cleared while it is written: {cell}"
        block = model.blocks.get(cell.ref)
        stands = block is not None and cell.keep is Keep.STORED and cell in block.everything()
        assert not (stands and cell.sure), f"a slot is cleared that holds a part of a block: {cell}"
        model.detach(cell, Keep.CLEARING)


def _named(model: Naive, effect: ClearSlots) -> list[tuple[Cell | None, int]]:
    return [
        (model.held.get(((effect.segment, slot), effect.slot_bytes)), stamp)
        for first, slots, stamp in effect.runs
        for slot in range(first, first + slots)
    ]


def _to_copy(judge: Judge, effect: CopySlots) -> None:
    model, settings = judge.model, judge.model.settings
    offset, blocks, handle, first, low, high, stride, stamp = effect.source
    source, size, width = model.segments[handle].node, model.slot_bytes(effect.namespace), high - low
    assert offset == 0, effect
    assert blocks > 0, effect
    assert low < high, effect
    assert blocks == 1 or blocks * width * size <= settings.copy_run_bytes_max, f"a long run: {effect}"
    assert model.segments[effect.to_segment].node == effect.node != source, effect
    assert placing.writable(model, effect.node), f"{effect.node} takes no copies"
    assert model.nodes[source].up, f"{source} cannot be read by peers"
    assert model.nodes[source].port, f"{source} cannot be read by peers"
    assert effect.stamp > model.stamp, "stamps rise"
    model.stamp = effect.stamp
    cells: list[tuple[list[Cell], list[Cell]]] = []
    for block in range(blocks):
        at, to = first + block * stride - low, effect.to_slot + block * width - low
        sources = [_to_be_copied(model, (handle, at + part), part, size, stamp) for part in range(low, high)]
        (ref,) = {cell.ref for cell in sources}
        if cells and model.specs[ref[0]].entry == "root":
            assert next(model.before(ref), None) == cells[-1][0][0].ref, "blocks that do not follow each other"
        targets = [
            Cell(ref, part, (effect.to_segment, to + part), effect.stamp, size, b"", Keep.COPYING)
            for part in range(low, high)
        ]
        for target in targets:
            placing.check_free(judge, target.place, size, "a copy")
            model.held[target.place, size] = target
        cells.append((sources, targets))
    judge.copies[effect.order] = Order(
        effect, source, cells, judge.now_ms + settings.copy_ms, source in model.draining
    )  # fmt: skip
    for name in (source, effect.node):
        busy = [order for order in judge.copies.values() if name in (order.source_node, order.effect.node)]
        assert len(busy) <= settings.copies_per_node_max, f"{name} has {len(busy)} copies to make"


def _to_be_copied(model: Naive, place: Place, part: int, size: int, stamp: int) -> Cell:
    """The cell of a slot that is to be copied: it must be the one that counts of its part."""
    cell = model.held.get((place, size))
    assert cell is not None, f"{place} holds nothing"
    assert (cell.part, cell.stamp) == (part, stamp), f"{place} holds something else: {cell}"
    assert cell.keep is Keep.STORED, f"{place} is copied, but {cell.keep.value}"
    block = model.blocks[cell.ref]
    assert cell in block.everything(), f"{place} is copied, but holds nothing that counts"
    first = block.of(part)[0]
    if first is not cell:
        assert first.shaky or not first.sure, f"{place} is copied instead of {first.place}"
        _swap(model, block, first, cell)
    return cell


# -- orders are answered ---------------------------------------------------------------------------------


def expire(judge: Judge) -> None:
    """A Tick gives up the copies that were not answered in time."""
    for number, order in list(judge.copies.items()):
        if judge.now_ms >= order.due_ms:
            del judge.copies[number]
            for _, targets in order.cells:
                _unused(judge.model, targets)


def drop(judge: Judge, name: str) -> None:
    """A node is gone: nothing is copied to it, nothing is to be cleared on it."""
    judge.copies = {number: order for number, order in judge.copies.items() if order.effect.node != name}
    judge.clears = {number: order for number, order in judge.clears.items() if order.node != name}


def _unused(model: Naive, targets: list[Cell]) -> None:
    for target in targets:
        target.keep = Keep.CLEARING


def _copied(judge: Judge, command: SlotsCopied, answer: Answer) -> None:
    model = judge.model
    assert not isinstance(answer, KVPoolError), answer
    moved, replicated = judge.counted("moved_blocks"), judge.counted("replicated_blocks")
    order = judge.copies.get(command.order)
    if order is None or order.effect.node != command.node:
        assert not moved + replicated, "an answer to nothing that was asked counts"
        judge.sweep()
        return
    del judge.copies[command.order]
    assert not (moved and replicated)
    assert order.may_move or not moved, "moved, although its node does not drain"
    surely: list[tuple[list[Cell], list[Cell]]] = []
    perhaps: list[tuple[list[Cell], list[Cell]]] = []
    for index, (sources, targets) in enumerate(order.cells):
        stands = index < command.blocks and not order.dead and _stands(model, sources)
        if stands is False:
            _unused(model, targets)
        else:
            (surely if stands else perhaps).append((sources, targets))
    installed = moved + replicated
    assert len(surely) <= installed <= len(surely) + len(perhaps), f"{installed} blocks of {order.effect} count"
    for sources, targets in surely:
        _install(model, sources, targets, moves=moved > 0)
    for sources, targets in perhaps:
        if installed == len(surely):
            _unused(model, targets)
        elif installed == len(surely) + len(perhaps):
            _install(model, sources, targets, moves=moved > 0)
        else:
            _doubtful(model, sources, targets)
    judge.sweep()


def _stands(model: Naive, sources: list[Cell]) -> bool | None:
    """Whether the slots that were copied still are those that count; None: perhaps."""
    if sources[0].place[0] not in model.segments:
        return None  # its node was given up; who takes it apart may not have come by yet
    for cell in sources:
        block = model.blocks.get(cell.ref)
        if block is None or cell not in block.everything() or cell.keep is not Keep.STORED:
            return False
    firsts = [model.blocks[cell.ref].of(cell.part)[0] for cell in sources]
    if any(first is not cell and not first.shaky for first, cell in zip(firsts, sources, strict=True)):
        return False
    return True if all(first is cell and cell.sure for first, cell in zip(firsts, sources, strict=True)) else None


def _install(model: Naive, sources: list[Cell], targets: list[Cell], *, moves: bool) -> None:
    """The copies are there: they count instead of what was copied, or beside it."""
    for source, target in zip(sources, targets, strict=True):
        block = _block(model, target)
        target.keep = Keep.STORED
        first = block.parts[target.part]
        if first is None:
            block.parts[target.part] = target
        elif moves and first is source:
            _swap(model, block, source, target)
            model.detach(source, Keep.LOOSE)
        else:
            block.copies.append(target)


def _doubtful(model: Naive, sources: list[Cell], targets: list[Cell]) -> None:
    """The copies may be there."""
    for source, target in zip(sources, targets, strict=True):
        block = _block(model, target)
        target.keep, target.sure = Keep.STORED, False
        if block.parts[target.part] is None:
            block.parts[target.part] = target
        else:
            source.shaky, source.sure = True, False
            block.copies.append(target)


def _block(model: Naive, cell: Cell) -> Block:
    return model.blocks.setdefault(cell.ref, Block(cell.ref, [None] * model.specs[cell.ref[0]].parts))


def _cleared(judge: Judge, command: SlotsCleared, answer: Answer) -> None:
    assert not isinstance(answer, KVPoolError), answer
    order = judge.clears.get(command.order)
    if order is not None and order.node == command.node:
        del judge.clears[command.order]
        for cell, stamp in _named(judge.model, order):
            assert cell is not None, "used again"
            assert cell.keep is Keep.CLEARING, f"used again: {cell}"
            assert cell.stamp == stamp, f"used again: {cell}"
            judge.model.forget(cell)
    judge.sweep()


JUDGES: dict[type, Callable[[Judge, Any, Any], None]] = {
    SlotsCopied: _copied,
    SlotsCleared: _cleared,
}
