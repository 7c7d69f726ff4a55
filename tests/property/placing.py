"""Judges where a reservation was placed, and why it was cut short."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_master.core.messages import Reason, Reserve, Reserved
from property.naive import Naive
from property.places import Place
from property.records import Cell, Keep, Ref, Reservation

if TYPE_CHECKING:
    from property.judge import Judge


def writable(model: Naive, name: str) -> bool:
    """The node takes writes."""
    return name in model.nodes and model.nodes[name].up and name not in model.draining


def takers(model: Naive, writer: str, avoid: tuple[str, ...]) -> set[str]:
    """The nodes that may take what a writer on that node, or on no known one, stores."""
    ready = {name for name in model.nodes if writable(model, name)}
    ports = {name for name in ready if model.nodes[name].port}
    return (ports if writer or ports else ready) - {*avoid} | (ready & {writer})


def check_place(judge: Judge, reservation: Reservation, part: int, place: Place) -> None:
    """A slot that was granted may be granted; what the model thought to be there is gone."""
    model, request = judge.model, reservation.request
    segment = model.segments.get(place[0])
    assert segment is not None, f"segment {place[0]} is not there"
    allowed = takers(model, reservation.node_of(part), request.avoid)
    assert segment.node in allowed, f"part {part} lies on {segment.node}, not on one of {sorted(allowed)}"
    check_free(judge, place, model.slot_bytes(request.namespace), f"part {part}")


def check_free(judge: Judge, place: Place, slot_bytes: int, what: str) -> None:
    """The slot may be given out: its slab is bound to that size, and nothing can be there any more."""
    model = judge.model
    slab = model.slab_of(place, slot_bytes)
    assert (slab.slot_bytes, slab.binding) == (slot_bytes, 0), f"slot {place} in a slab that is not bound: {slab}"
    other = model.held.get((place, slot_bytes))
    if other is not None:
        held = model.surely_held(other, judge.now_ms)
        assert not held, f"slot {place} granted to {what} while {other.keep.value} for part {other.part} of {other.ref}"
        model.forget(other)


def check_own_first(
    judge: Judge, command: Reserve, places: dict[tuple[int, int], tuple[Place, int]], owners: dict[int, int]
) -> None:
    """One part, and nothing was evicted: what lies elsewhere found no room on the writer's own node."""
    model = judge.model
    if command.part_to - command.part_from != 1 or judge.made_room:
        return
    slot_bytes = model.slot_bytes(command.namespace)
    for (index, _), (place, _) in places.items():
        own = command.nodes[owners[index]] if len(command.nodes) > 1 else "".join(command.nodes)
        if not own or model.segments[place[0]].node == own or not writable(model, own):
            continue
        for handle in model.nodes[own].handles:
            free = _free_slot(model, handle, slot_bytes)
            assert free is None or share_used(model, handle, slot_bytes), f"{place}, but {own} has slot {free}"


def _free_slot(model: Naive, handle: int, slot_bytes: int) -> Place | None:
    """A slot of a segment that is surely free."""
    for number, slab in enumerate(model.segments[handle].slabs):
        if slab.slot_bytes == slot_bytes and not slab.binding:
            for slot in model.slots(handle, number):
                if ((handle, slot), slot_bytes) not in model.held:
                    return handle, slot
    return None


# -- why a reservation was cut short -------------------------------------------------------------------


def check_short(judge: Judge, command: Reserve, answer: Reserved, refs: list[Ref]) -> None:
    """The reason that is given must hold."""
    model = judge.model
    writers = set(command.nodes) or {""}
    may = {name for writer in writers for name in takers(model, writer, command.avoid)}
    segments = [handle for name in may for handle in model.nodes[name].handles]
    block_bytes = model.slot_bytes(command.namespace) * (command.part_to - command.part_from)
    if answer.reason is Reason.CONFLICT:
        assert model.contradicted(refs[answer.answered]), "a conflict that no chain has caused"
    elif answer.reason is Reason.NO_NODE:
        assert any(not takers(model, writer, command.avoid) for writer in writers), "there is a node for each"
    elif answer.reason is Reason.SLAB_PENDING:
        slabs = [slab for handle in segments for slab in model.segments[handle].slabs]
        assert any(slab.binding for slab in slabs), "no slab is being bound"
    elif answer.reason is Reason.TOO_MANY_RESERVATIONS:
        unended = [one for one in model.reservations.values() if not one.ended]
        assert len(unended) + command.shares > model.settings.reservations_max
    elif answer.reason is Reason.RESERVE_SHARE:
        assert any(share_used(model, handle, block_bytes) for handle in segments), "no share is used up"
    elif answer.reason is Reason.UNKNOWN_KEY:
        assert answer.answered == 0, "only the parent may be unknown"
        assert isinstance(command.parent, bytes)
        assert (command.namespace, command.parent) not in judge.visible
    elif answer.reason is Reason.OVER_QUOTA:
        tenant = model.specs[command.namespace].tenant
        left = model.quotas[tenant] - judge.tenant_bytes(tenant)
        assert left < block_bytes, f"{left} bytes of the quota are left"
        namespaces = {ident for ident, spec in model.specs.items() if spec.tenant == tenant}
        check_nothing_to_evict(judge, refs, namespaces, None)
    else:
        assert answer.reason is Reason.NO_SPACE, answer.reason
        if command.part_to - command.part_from == 1 and len(writers) == 1:
            _check_no_space(judge, command, refs, segments)


def share_used(model: Naive, handle: int, room_bytes: int) -> bool:
    """So many bytes more may pass what writers may hold of a segment."""
    model.segments[handle]
    held = [cell for cell in model.held.values() if cell.place[0] == handle]
    keeps = (Keep.WRITING, Keep.QUARANTINE, Keep.COPYING)
    open_bytes = sum(cell.slot_bytes for cell in held if cell.keep in keeps)
    return open_bytes + room_bytes > model.settings.reserve_share_permille * _size(model, handle) // 1000


def _size(model: Naive, handle: int) -> int:
    return len(model.segments[handle].slabs) * model.segments[handle].slab_bytes


def _check_no_space(judge: Judge, command: Reserve, refs: list[Ref], segments: list[int]) -> None:
    """One part: in the segments that may take it nothing is free, and nothing may be evicted."""
    model = judge.model
    if judge.made_room:
        return  # what was evicted in one segment may have freed slots, or made leaves, in one that was asked before
    slot_bytes = model.slot_bytes(command.namespace)
    usable: set[Cell] = set()
    for handle in segments:
        if share_used(model, handle, slot_bytes):
            continue
        for number, slab in enumerate(model.segments[handle].slabs):
            cells = model.cells_in_slab(handle, number)
            assert cells or slab.binding, f"no space, but slab {number} of segment {handle} is empty"
            if slab.slot_bytes == slot_bytes and not slab.binding:
                assert len(cells) == len(model.slots(handle, number)), f"no space, but segment {handle} has a free slot"
                usable.update(cells)
    check_nothing_to_evict(judge, refs, set(model.specs), usable)


def check_nothing_to_evict(judge: Judge, refs: list[Ref], namespaces: set[bytes], usable: set[Cell] | None) -> None:
    """No leaf of these namespaces, and with a part in one of these slots, could have gone instead."""
    model = judge.model
    if model.settings.evict_inline_spans_max == 1 or any(spec.entry == "any" for spec in model.specs.values()):
        return  # the one eviction may have been made; what follows what is not always sure
    if judge.retiring:
        return  # what a node had that is gone may still stand behind
    pinned = {cell for lease in model.leases.values() for cell in lease.pinned}
    copied = {sources[0].ref for order in judge.copies.values() for sources, _ in order.cells}
    inner = {before for ref in model.blocks for before in model.before(ref)}
    for ref, block in model.blocks.items():
        if ref in refs or ref in inner or ref in copied or ref[0] not in namespaces or not judge.sure(block):
            continue
        if not pinned & set(block.cells()) and (usable is None or usable & set(block.cells())):
            raise AssertionError(f"{ref} may be evicted")
