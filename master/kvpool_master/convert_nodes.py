"""What node clients say and are told: messages of the contract to commands of the core, orders to messages.

Rules
  - No decision is taken here, but what does not fit together is refused: columns have equal lengths, sums agree.
  - Runs travel column by column: no Python step per block, and few per run.
  - Numbers of orders and inventories carry the epoch in their upper 32 bits on the wire, so that a late answer to a
    former life of the Master means nothing to this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvpool_master.convert import PARENTS, bypass_to_message, tombstones_to_message
from kvpool_master.core.messages import (
    AskInventory,
    AskWorkers,
    BindSlab,
    BlockBad,
    Bury,
    ClearSlots,
    Command,
    CopySlots,
    InventoryEnd,
    InventorySlabs,
    InventoryStrands,
    InventoryWriting,
    Parent,
    ProbeAnswered,
    ProbeNode,
    Register,
    SegmentOffer,
    SlabBound,
    SlotsCleared,
    SlotsCopied,
    Strand,
    WorkerGone,
)
from kvpool_master.grants import Grants
from kvpool_master.sessions import Order
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import BadRequest, StaleInventory

_NUMBER_BITS = 32
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1
COMMAND_BLOCKS = 1024


def register_from_message(request: pb.RegisterRequest) -> Register:
    """The command of a request."""
    offers = [
        SegmentOffer(offer.index, offer.size_bytes, offer.slab_bytes, offer.numa_node, offer.contents, offer.holds)
        for offer in request.segments
    ]
    return Register(request.node_id, request.incarnation, tuple(offers), request.epoch_seen, request.data_address)


def reports_from_message(node: str, incarnation: int, message: pb.SessionUp, epoch: int) -> Iterator[Command]:
    """What a node client reports beside being alive, in an order that frees before it takes."""
    for gone in message.workers_gone:
        yield WorkerGone(node, gone)
    for bad in message.bad_blocks:
        yield BlockBad(bad.namespace_id, bad.chain, bad.stamp)
    if message.probed:
        yield ProbeAnswered(node, incarnation, message.probed)
    for number in message.cleared:
        if number >> _NUMBER_BITS == epoch:
            yield SlotsCleared(node, incarnation, number & _NUMBER_MASK)
    for copied in message.copied:
        if copied.order >> _NUMBER_BITS == epoch:
            yield SlotsCopied(node, incarnation, copied.order & _NUMBER_MASK, copied.blocks)
    for bound in message.slabs_bound:
        yield SlabBound(node, incarnation, bound.segment, bound.slab, bound.slot_bytes)


def orders_to_message(orders: Sequence[Order], epoch: int, now_ms: int, grants: Grants, copy_ms: int) -> pb.SessionDown:
    """Orders of one node, as they go down its session. A copy whose source is gone is not told; the core gives it up.

    copy_ms: how long the rights to sources hold.
    """
    down = pb.SessionDown(epoch=epoch, master_ms=now_ms)
    for order in orders:
        match order:
            case BindSlab():
                down.bind_slabs.add(segment=order.segment, slab=order.slab, slot_bytes=order.slot_bytes)
            case ClearSlots():
                first_slot, slots, stamp = zip(*order.runs, strict=True) if order.runs else ((), (), ())
                down.clear_slots.add(
                    order=epoch << _NUMBER_BITS | order.order,
                    segment=order.segment,
                    slot_bytes=order.slot_bytes,
                    first_slot=first_slot,
                    slots=slots,
                    stamp=stamp,
                )
            case CopySlots():
                source = grants.source(order, now_ms + copy_ms)
                if source is not None:
                    down.copy_slots.append(_copy_to_message(order, epoch, source, now_ms + copy_ms))
            case ProbeNode():
                down.probe = order.number
            case AskInventory():
                down.report_inventory = epoch << _NUMBER_BITS | order.number
            case AskWorkers():
                del down.ask_workers[:]
                down.ask_workers.extend(order.workers)
            case Bury():
                down.tombstones.extend(tombstones_to_message([(order.namespace, order.stamp)]))
            case _:
                down.bypass.CopyFrom(bypass_to_message(order.bits))
    return down


def _copy_to_message(order: CopySlots, epoch: int, source: pb.Holder, valid_until_ms: int) -> pb.CopySlots:
    _, blocks, segment, first_slot, part_from, part_to, stride, stamp = order.source
    return pb.CopySlots(
        order=epoch << _NUMBER_BITS | order.order,
        namespace_id=order.namespace,
        part_bytes=order.part_bytes,
        part_from=part_from,
        part_to=part_to,
        blocks=blocks,
        from_segment=segment,
        from_slot=first_slot,
        from_stride=stride,
        from_stamp=stamp,
        source=source,
        valid_until_ms=valid_until_ms,
        to_segment=order.to_segment,
        to_slot=order.to_slot,
        stamp=order.stamp,
    )


def inventory_from_message(chunk: pb.InventoryChunk, epoch: int) -> Iterator[Command]:
    """The commands of a chunk, in order. Raises StaleInventory for a number of another epoch, BadRequest."""
    if chunk.number >> _NUMBER_BITS != epoch:
        raise StaleInventory(f"inventory {chunk.number} was not asked for under epoch {epoch}")
    number = chunk.number & _NUMBER_MASK
    of_node = (chunk.node_id, chunk.incarnation, number)
    if chunk.slab or chunk.slot_bytes or not (chunk.strands or chunk.writing or chunk.HasField("end")):
        yield InventorySlabs(*of_node, chunk.segment, tuple(_rows("slabs", chunk.slab, chunk.slot_bytes)))
    for message in chunk.strands:
        parts = (message.part_from, message.part_to)
        shape = (message.namespace_id, message.key_bytes, message.slot_bytes, *parts)
        strands = _strands(message)
        for some in _slices(strands, message.blocks):
            yield InventoryStrands(*of_node, chunk.segment, *shape, some)
    for writing in chunk.writing:
        runs = _rows("slots being written", writing.first_slot, writing.slots, writing.worker_id)
        yield InventoryWriting(*of_node, chunk.segment, writing.slot_bytes, tuple(runs))
    if chunk.HasField("end"):
        yield InventoryEnd(*of_node, chunk.end.blocks, chunk.end.slots_writing)


def _rows(of: str, *columns: Sequence[int]) -> list[tuple[Any, ...]]:
    """Columns as rows. Raises BadRequest unless they have one length."""
    try:
        return list(zip(*columns, strict=True))
    except ValueError as error:
        raise BadRequest(f"columns of {of} have {[len(column) for column in columns]} elements") from error


def _slices(strands: tuple[Strand, ...], blocks: Sequence[int]) -> Iterator[tuple[Strand, ...]]:
    """The strands in tuples of about COMMAND_BLOCKS blocks: one command holds up the others for a few ms."""
    start, size = 0, 0
    for at, more in enumerate(blocks):
        size += more
        if size >= COMMAND_BLOCKS:
            yield strands[start : at + 1]
            start, size = at + 1, 0
    if start < len(strands):
        yield strands[start:]


def _strands(message: pb.Strands) -> tuple[Strand, ...]:
    key_bytes = message.key_bytes
    shapes = _rows("strands", message.blocks, message.extents, message.parent_kind)
    extents = _rows("extents", message.extent_blocks, message.first_slot, message.stride, message.stamp)
    if sum(message.extents) != len(extents):
        raise BadRequest(f"strands of {sum(message.extents)} extents; {len(extents)} came")
    if sum(message.blocks) * key_bytes != len(message.keys) or len(shapes) * key_bytes != len(message.parent_keys):
        raise BadRequest(
            f"{len(shapes)} strands of {sum(message.blocks)} blocks, {key_bytes} bytes a key: {len(message.keys)} bytes"
            f" of keys and {len(message.parent_keys)} of parent keys came"
        )
    strands: list[Strand] = []
    keys, parent_keys = message.keys, message.parent_keys  # each access makes a copy
    key, extent = 0, 0
    for at, (blocks, count, kind) in enumerate(shapes):
        parent: Parent | bytes | None = PARENTS.get(kind)
        if kind == pb.PARENT_KEY:
            parent = parent_keys[at * key_bytes : (at + 1) * key_bytes]
        if parent is None:
            raise BadRequest(f"parent_kind = {kind}: root, key or unknown")
        rows = tuple(extents[extent : extent + count])
        strands.append(Strand(parent, keys[key : key + blocks * key_bytes], rows))
        key += blocks * key_bytes
        extent += count
    return tuple(strands)
