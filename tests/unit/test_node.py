"""What a node says of handles and keys to the data port, and when it clears slots."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool_client.clock import SYSTEM
from kvpool_client.headers import PEER_WRITER, WRITING
from kvpool_client.logs import Log
from kvpool_client.node import Node
from kvpool_client.session_messages import Clearing
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import KVPoolError, UnknownSegment
from unit.segment_world import SLOT, create, opened, plan_in, write_block


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with opened(create(plan_in(tmp_path))) as one, opened(create(plan_in(tmp_path, 1))) as two:
        made = Node("n1", 7, [one, two], 8, Log("info", False, SYSTEM, io.StringIO()))
        made.obey(10)
        made.announce((3, 4))
        yield made


def test_handles_of_the_present_and_the_former_epoch_mean_segments(node: Node) -> None:
    one, two = node.segments
    assert (node.segment_of(10, 3), node.segment_of(10, 4)) == (one, two)
    for epoch, handle in ((10, 5), (9, 3), (11, 3)):
        with pytest.raises(UnknownSegment):
            node.segment_of(epoch, handle)
    node.obey(11)
    assert node.segment_of(10, 3) is one, "readers of the former epoch go on"
    node.announce((7, 3))
    assert (node.segment_of(10, 3), node.segment_of(11, 3), node.segment_of(11, 7)) == (one, two, one)
    node.obey(12)
    node.obey(13)  # that Master never took us in: the one before is still the former one
    node.announce((1, 2))
    assert (node.segment_of(11, 3), node.segment_of(13, 1)) == (two, one)
    with pytest.raises(UnknownSegment):
        node.segment_of(10, 3)


def test_a_master_that_forgot_us_gives_handles_anew(node: Node) -> None:
    node.announce((5, 6))
    assert node.segment_of(10, 5) is node.segments[0]
    with pytest.raises(UnknownSegment):
        node.segment_of(10, 3)


def cleared(node: Node) -> list[int]:
    message = pb.SessionUp()
    node.outbox.open()
    assert node.clear_slots(ORDER)
    assert node.outbox.fill(message, 1, 0)
    return [*message.cleared]


ORDER = Clearing(40, 3, SLOT, ((0, 3, 5),))


def test_slots_are_cleared_once_nothing_is_written_under_their_stamps(node: Node) -> None:
    segment = node.segments[0]
    segment.bind_slab(0, SLOT)
    write_block(segment, 0, b"x", stamp=5)
    write_block(segment, 1, b"x", stamp=5, state=WRITING, worker_id=PEER_WRITER)
    with node.writes.under(segment, [1], 5):
        assert not node.clear_slots(ORDER)
        assert segment.table(0)["stamp"].tolist()[:2] == [5, 5], "nothing was done"
        with pytest.raises(KVPoolError), node.writes.under(segment, [2], 5):
            raise AssertionError("a write began under a dead stamp")
    assert cleared(node) == [40]
    assert not segment.table(0)["state"].any()
    assert node.slots_cleared_total == 2
