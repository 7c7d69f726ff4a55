"""What the Master says, from the wire into the events of session.py.

Rules
  - Nothing is carried out here, and nothing believed that does not fit together: ProtocolError.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvpool_client.bypass import BYPASS_LOADS, BYPASS_LOOKUPS, BYPASS_STORES
from kvpool_client.session_messages import Clearing, Heard, Order, Registered, Tombstones
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import ProtocolError

SILENCE_MS_DEFAULT: Final = 5_000


def registered(reply: pb.RegisterReply, segments: int) -> Registered:
    """The answer to a registration of so many segments. Raises ProtocolError."""
    if len(reply.segment_handles) != segments or not reply.epoch:
        raise ProtocolError("the Master's answer does not fit the offer")
    return Registered(
        epoch=reply.epoch,
        handles=tuple(reply.segment_handles),
        silence_ms=reply.suspect_ms or SILENCE_MS_DEFAULT,
        tombstones=_tombstones(reply.tombstones),
        bypass=_bits(reply.bypass),
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
    )


def _clearing(order: pb.ClearSlots) -> Clearing:
    if not len(order.first_slot) == len(order.slots) == len(order.stamp):
        raise ProtocolError("an order to clear slots has columns of different lengths")
    runs = tuple(zip(order.first_slot, order.slots, order.stamp, strict=True))
    return Clearing(order.order, order.segment, order.slot_bytes, runs)


def _tombstones(told: Iterable[pb.Tombstone]) -> Tombstones:
    return tuple((tombstone.namespace_id, tombstone.stamp) for tombstone in told)


def _bits(bypass: pb.Bypass) -> int:
    return bypass.lookups * BYPASS_LOOKUPS | bypass.loads * BYPASS_LOADS | bypass.stores * BYPASS_STORES
