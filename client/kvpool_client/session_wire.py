"""What the Master says, from the wire into the events of session.py.

Rules
  - Nothing is carried out here, and nothing believed that does not fit together: ProtocolError.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvpool_client.bypass import BYPASS_LOADS, BYPASS_LOOKUPS, BYPASS_STORES
from kvpool_client.session_messages import Clearing, Copy, Heard, Order, Registered, Tombstones
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.capability import KEY_BYTES, MAC_BYTES
from kvpool_proto.errors import ProtocolError
from kvpool_proto.namespace import NAMESPACE_ID_BYTES

SILENCE_MS_DEFAULT: Final = 5_000


def registered(reply: pb.RegisterReply, segments: int) -> Registered:
    """The answer to a registration of so many segments. Raises ProtocolError."""
    if len(reply.segment_handles) != segments or not reply.epoch:
        raise ProtocolError("the Master's answer does not fit the offer")
    if len(reply.capability_key) not in (0, KEY_BYTES):
        raise ProtocolError(f"the Master's key for capabilities has not {KEY_BYTES} bytes")
    return Registered(
        epoch=reply.epoch,
        handles=tuple(reply.segment_handles),
        silence_ms=reply.suspect_ms or SILENCE_MS_DEFAULT,
        tombstones=_tombstones(reply.tombstones),
        bypass=_bits(reply.bypass),
        key=reply.capability_key,
        master_ms=reply.master_ms,
        former_key_ms=reply.former_key_ms,
    )


def heard(message: pb.SessionDown) -> Heard:
    """A message on the session. Raises ProtocolError."""
    return Heard(
        epoch=message.epoch,
        orders=tuple(Order(order.segment, order.slab, order.slot_bytes) for order in message.bind_slabs),
        retired=message.retired,
        inventory=message.report_inventory,
        ask_workers=tuple(message.ask_workers),
        clearings=tuple(_clearing(order) for order in message.clear_slots),
        tombstones=_tombstones(message.tombstones),
        bypass=_bits(message.bypass) if message.HasField("bypass") else None,
        copies=tuple(_copy(order, message.epoch) for order in message.copy_slots),
        master_ms=message.master_ms,
    )


def _clearing(order: pb.ClearSlots) -> Clearing:
    if not len(order.first_slot) == len(order.slots) == len(order.stamp):
        raise ProtocolError("an order to clear slots has columns of different lengths")
    runs = tuple(zip(order.first_slot, order.slots, order.stamp, strict=True))
    return Clearing(order.order, order.segment, order.slot_bytes, runs)


def _copy(order: pb.CopySlots, epoch: int) -> Copy:
    source, parts = order.source, range(order.part_from, order.part_to)
    macs = dict(zip(source.part, source.mac, strict=False))
    fits = len(source.part) == len(source.mac) and len(order.namespace_id) == NAMESPACE_ID_BYTES
    fits = fits and list(source.segments) in ([], [order.from_segment])
    if not (fits and parts and order.blocks and order.part_bytes and order.from_stride >= len(parts)):
        raise ProtocolError("an order to copy slots does not fit together")
    if set(macs) != set(parts) or {len(mac) for mac in macs.values()} != {MAC_BYTES}:
        raise ProtocolError("an order to copy slots has not one capability for each part")
    return Copy(
        number=order.order,
        epoch=epoch,
        namespace=order.namespace_id,
        part_bytes=order.part_bytes,
        parts=parts,
        blocks=order.blocks,
        source=(source.node_id, source.data_address),
        from_segment=order.from_segment,
        from_slot=order.from_slot,
        from_stride=order.from_stride,
        from_stamp=order.from_stamp,
        macs=tuple(macs[part] for part in parts),
        valid_until_ms=order.valid_until_ms,
        segment=order.to_segment,
        slot=order.to_slot,
        stamp=order.stamp,
    )


def _tombstones(told: Iterable[pb.Tombstone]) -> Tombstones:
    return tuple((tombstone.namespace_id, tombstone.stamp) for tombstone in told)


def _bits(bypass: pb.Bypass) -> int:
    return bypass.lookups * BYPASS_LOOKUPS | bypass.loads * BYPASS_LOADS | bypass.stores * BYPASS_STORES
