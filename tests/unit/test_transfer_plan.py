"""transfer_plan.py and holders.py: which lane each block takes, and with what right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_client.devices.base import Contiguous
from kvpool_client.headers import COMMITTED, PEER_WRITER
from kvpool_client.holders import NO_HOLDERS, holders_of
from kvpool_client.runs import Row, count, extents_of, rows_of, within
from kvpool_client.transfer_plan import Origin, Plan, Source, Wanted, divide, not_mapped, reachable
from kvpool_master.core import extents as ex
from kvpool_master.grants import Grants
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.capability import READ, RUN, make_mac
from kvpool_proto.errors import ProtocolError
from unit.transfer_world import DEVICE, HANDLE, World, chain_of, spec_of

KEY = b"k" * 32
FAR = {20: ("m", "m:1"), 21: ("m", "m:1"), 30: ("k", "k:1"), 40: ("portless", ""), HANDLE: ("own", "own:1")}
SPEC = spec_of(5000, parts=2)
BLOCKS = 20


def extents(*rows: tuple[int, int, int, int, int, int]) -> pb.Extents:
    """(offset, blocks, segment, first slot, part from, part to) of each; stamps rise from 1."""
    message = pb.Extents()
    for stamp, (offset, blocks, segment, slot, low, high) in enumerate(rows, start=1):
        for column, value in (
            (message.offset, offset), (message.blocks, blocks), (message.segment, segment),
            (message.first_slot, slot), (message.part_from, low), (message.part_to, high),
            (message.stamp, stamp), (message.stride, high - low),
        ):  # fmt: skip
            column.append(value)
    return message


def packed(message: pb.Extents) -> bytes:
    columns = (message.offset, message.blocks, message.segment, message.first_slot, message.part_from, message.part_to)
    return b"".join([ex.pack(*row) for row in zip(*columns, message.stride, message.stamp, strict=True)])


def source(world: World, message: pb.Extents, asker: str = "own", silent: tuple[str, ...] = ()) -> Source:
    """As the Master answers a node `asker`; our segment is mapped."""
    holders = Grants(KEY, 40, lambda handle: FAR[handle]).holders(READ, SPEC.id, packed(message), 5_000, asker)
    return Source(
        extents_of(message),
        40,
        {HANDLE: world.worker},
        holders_of(holders, 5_000, asker),
        lambda node_id: node_id in silent,
    )


def plan_of(found: Source, parts: int = 1) -> Plan:
    buffer = DEVICE.bind(Contiguous(np.zeros((BLOCKS, 5000), dtype=np.uint8)), 5000, writable=True)
    wanted = [Wanted(part, buffer, rows_of(found.extents, part, first_block=0, blocks=BLOCKS)) for part in range(parts)]
    return divide(found, SPEC, READ, chain_of(SPEC, BLOCKS), wanted, Origin(worker_id=77))


MIXED = extents(
    (0, 4, HANDLE, 3, 0, 2), (4, 3, 20, 9, 0, 2), (7, 2, 30, 5, 0, 2), (9, 1, 21, 0, 0, 2), (10, 10, 20, 40, 0, 2)
)  # fmt: skip


def test_each_node_is_a_lane_with_the_right_the_master_gave(segment_world: World) -> None:
    segment_world.bind(SPEC.slot_bytes)
    plan = plan_of(source(segment_world, MIXED), parts=2)
    assert [(copy.part, [run[:2] for run in copy.runs]) for copy in plan.here] == [(0, [(0, 4)]), (1, [(0, 4)])]
    assert {node: [copy.grant.part for copy in copies] for node, copies in plan.peers.items()} == {
        "m": [0, 1],
        "k": [0, 1],
    }
    for node, copies in plan.peers.items():
        for copy in copies:
            grant = copy.grant
            assert (grant.node_id, grant.address, grant.epoch, grant.valid_until_ms) == (node, f"{node}:1", 40, 5_000)
            assert grant.mac == make_mac(KEY, READ, 40, 5_000, SPEC.id, grant.part, grant.table)
    second = plan.peers["m"][1]
    table = np.frombuffer(second.grant.table, dtype=RUN)
    assert table["first_slot"].tolist() == [10, 1, 41]
    assert [tuple(run) for run in second.runs] == [(4, 3, 0), (9, 1, 3), (10, 10, 4)]
    assert second.headers["stamp"].tolist() == [2] * 3 + [4] + [5] * 10
    assert second.headers["key"].tolist() == keys()[4:7] + keys()[9:20]
    assert (second.headers["part"] == 1).all()
    assert (second.headers["state"] == COMMITTED).all()
    assert (second.headers["worker_id"] == PEER_WRITER).all()
    assert (plan.here[0].headers["worker_id"] == 77).all()


def keys() -> list[bytes]:
    chain = chain_of(SPEC, BLOCKS)
    return [chain[at : at + 12].ljust(32, b"\0") for at in range(0, len(chain), 12)]


@pytest.mark.parametrize(
    ("asker", "silent", "reached", "reason"),
    [
        ("own", (), 20, ""),
        ("", (), 20, ""),  # what is mapped is ours, whatever the Master thought
        ("own", ("k",), 7, "peer_unreachable"),
        ("own", ("m", "k"), 4, "peer_unreachable"),
        ("m", (), 4, "segment_elsewhere"),  # asked from another node than we are on by now
    ],
)
def test_what_can_be_reached(
    segment_world: World, asker: str, silent: tuple[str, ...], reached: int, reason: str
) -> None:
    found = source(segment_world, MIXED, asker, silent)
    rows, why = reachable(found, 0, rows_of(found.extents, 0, first_block=0, blocks=BLOCKS))
    assert (count(rows), why) == (reached, reason)


def test_a_node_without_a_data_port_is_its_own_workers_only(segment_world: World) -> None:
    found = source(segment_world, extents((0, 2, 20, 0, 0, 1), (2, 2, 40, 0, 0, 1)))
    rows, why = reachable(found, 0, rows_of(found.extents, 0, first_block=0, blocks=BLOCKS))
    assert (count(rows), why) == (2, "no_data_port")


def test_a_node_is_asked_about_once_a_call(segment_world: World) -> None:
    """Whether it is avoided may change meanwhile: the plan stays one."""
    answers = [False, True]
    holders = {
        20: holders_of([pb.Holder(node_id="m", data_address="m:1", segments=[20], part=[0], mac=[b"m" * 16])], 1, "")
    }
    found = Source(extents_of(MIXED), 40, {}, holders[20], lambda _: answers.pop(0))
    assert found.place(20, 0) == found.place(20, 0) == holders[20].by_segment[20]
    assert found.place(99, 0) == "segment_elsewhere"
    assert found.place(20, 1) == "segment_elsewhere"  # no right to that part


def test_what_a_hello_may_bring(segment_world: World) -> None:
    message = extents((0, 4, HANDLE, 3, 0, 1), (0, 4, 40, 3, 1, 2), (4, 4, 20, 0, 0, 2))
    columns = extents_of(message)
    assert not_mapped(columns, range(2), NO_HOLDERS, {}) == {HANDLE, 40, 20}  # a Master that knows of one node
    assert not_mapped(columns, range(1), NO_HOLDERS, {HANDLE: segment_world.worker}) == {20}
    asked = [
        pb.Holder(node_id="own", segments=[HANDLE]),
        pb.Holder(node_id="portless", segments=[40]),
        pb.Holder(node_id="m", segments=[20], part=[0], mac=[b"m" * 16]),
    ]
    assert not_mapped(columns, range(2), holders_of(asked, 0, "own"), {}) == {HANDLE}
    assert not_mapped(columns, range(2), holders_of(asked, 0, "own"), {HANDLE: segment_world.worker}) == set()
    # Asked before we knew our node: whoever has no data port may be ours.
    assert not_mapped(columns, range(2), holders_of(asked, 0, ""), {}) == {HANDLE, 40}
    assert not_mapped(columns, range(1), holders_of(asked, 0, ""), {}) == {HANDLE}


@pytest.mark.parametrize(
    "holders",
    [
        [pb.Holder(node_id="m", segments=[1], part=[0])],
        [pb.Holder(node_id="m", segments=[1], part=[0], mac=[b"short"])],
        [pb.Holder(node_id="m", segments=[1]), pb.Holder(node_id="k", segments=[2, 1])],
    ],
)
def test_holders_that_cannot_be(holders: list[pb.Holder]) -> None:
    with pytest.raises(ProtocolError):
        holders_of(holders, 0, "")


@st.composite
def spans(draw: st.DrawFn) -> list[tuple[int, int]]:
    edges = sorted(draw(st.sets(st.integers(0, 40), max_size=12)))
    return list(zip(edges[::2], edges[1::2], strict=False))


@given(rows=spans(), wanted=spans(), stride=st.integers(1, 3))
def test_within_keeps_each_block_with_its_place(
    rows: list[tuple[int, int]], wanted: list[tuple[int, int]], stride: int
) -> None:
    every = [Row(low, high - low, 1, 100 * low, stride, 5, index) for index, (low, high) in enumerate(rows)]
    inside = {block for low, high in wanted for block in range(low, high)}

    def blocks(some: Any) -> list[tuple[int, ...]]:
        return [
            (row.first + i, row.slot + i * stride, row.extent, row.skipped + i)
            for row in some
            for i in range(row.blocks)
        ]

    assert blocks(within(every, wanted)) == [one for one in blocks(every) if one[0] in inside]
