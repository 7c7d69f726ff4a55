"""What the Master says is taken only if it fits together; what it is told goes out on the session it belongs to."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool_client.outbox import Outbox
from kvpool_client.session_wire import heard, registered
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import ProtocolError


def copy_order(more_macs: tuple[tuple[int, bytes], ...] = (), **changes: Any) -> pb.SessionDown:
    source = pb.Holder(node_id="n2", data_address="b:1", segments=[9], part=[2, 1], mac=[b"2" * 16, b"1" * 16])
    order = pb.CopySlots(
        order=8, namespace_id=b"n" * 16, part_bytes=4096, part_from=1, part_to=3, blocks=3, from_segment=9,
        from_slot=4, from_stride=2, from_stamp=5, valid_until_ms=60, to_segment=3, to_slot=7, stamp=6
    )  # fmt: skip
    for part, mac in more_macs:
        source.part.append(part)
        source.mac.append(mac)
    order.source.CopyFrom(source)
    for name, value in changes.items():
        setattr(order, name, value)
    return pb.SessionDown(epoch=10, copy_slots=[order], master_ms=44)


def test_an_order_to_copy_is_read() -> None:
    event = heard(copy_order())
    (copy,) = event.copies
    assert event.master_ms == 44
    assert (copy.number, copy.epoch, copy.parts, copy.blocks) == (8, 10, range(1, 3), 3)
    assert copy.macs == (b"1" * 16, b"2" * 16), "in the order of the parts"
    assert (copy.source, copy.valid_until_ms) == (("n2", "b:1"), 60)
    assert (copy.from_segment, copy.from_slot, copy.from_stride, copy.from_stamp) == (9, 4, 2, 5)
    assert (copy.segment, copy.slot, copy.stamp) == (3, 7, 6)


@pytest.mark.parametrize(
    "changes",
    [
        {"namespace_id": b"short"},
        {"part_to": 1},
        {"part_to": 4, "from_stride": 3},
        {"blocks": 0},
        {"part_bytes": 0},
        {"from_stride": 1},
        {"from_segment": 8},
        {"more_macs": ((3, b"3" * 16),)},
        {"more_macs": ((1, b"short"),)},
    ],
)
def test_an_order_to_copy_that_does_not_fit_together_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        heard(copy_order(**changes))


def test_a_key_has_its_length_or_is_none() -> None:
    reply = pb.RegisterReply(epoch=10, segment_handles=[3], master_ms=5, former_key_ms=9, capability_key=b"k" * 32)
    taken_in = registered(reply, 1)
    assert (taken_in.key, taken_in.master_ms, taken_in.former_key_ms) == (b"k" * 32, 5, 9)
    reply.capability_key = b""
    assert registered(reply, 1).key == b""
    reply.capability_key = b"k" * 31
    with pytest.raises(ProtocolError, match="32 bytes"):
        registered(reply, 1)


def told(outbox: Outbox, session: int) -> pb.SessionUp:
    message = pb.SessionUp()
    assert outbox.fill(message, session, 0)
    return message


def test_the_newest_question_is_answered_once_and_only_on_its_session() -> None:
    outbox = Outbox()
    first = outbox.open()
    outbox.probed(1, first)
    outbox.probed(2, first)
    assert told(outbox, first).probed == 2
    assert told(outbox, first).probed == 0
    outbox.probed(3, first)
    second = outbox.open()
    outbox.probed(4, first)
    assert told(outbox, second).probed == 0


def test_a_copy_is_told_on_its_own_session_or_not_at_all() -> None:
    outbox = Outbox()
    first = outbox.open()
    done = pb.SlotsCopied(order=8, blocks=3)
    outbox.slots_copied(done, first)
    assert list(told(outbox, first).copied) == [done]
    assert not told(outbox, first).copied
    outbox.slots_copied(done, first)
    second = outbox.open()
    outbox.slots_copied(done, first)
    assert not told(outbox, second).copied
