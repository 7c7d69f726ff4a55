"""Who holds the extents of a reply, and the capabilities for them: against a slow and obvious way to the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_master.core import extents as ex
from kvpool_master.core.messages import CopySlots
from kvpool_master.grants import FEW_RUNS, ROW, Grants
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.capability import READ, RUN, WRITE, Op, make_mac, part_table

KEY = b"k" * 32
EPOCH = 7
UNTIL_MS = 1 << 40
NAMESPACE = b"n" * 16
HOLDERS = {
    1: ("a", "10.0.0.1:9502"),
    2: ("a", "10.0.0.1:9502"),
    3: ("b", "[2001:db8::2]:9502"),
    4: ("c", ""),
    5: ("", ""),
}


def grants() -> Grants:
    return Grants(KEY, EPOCH, lambda handle: HOLDERS[handle])


def slowly(op: Op, rows: Sequence[ex.Record], own: str) -> list[pb.Holder]:
    """Node by node, part by part, run by run."""
    holders: list[pb.Holder] = []
    for node, address in dict.fromkeys(HOLDERS[row[2]] for row in rows):
        there = [row for row in rows if HOLDERS[row[2]][0] == node]
        holder = pb.Holder(node_id=node, data_address=address, segments=dict.fromkeys(row[2] for row in there))
        for part in range(64 if node != own and address else 0):
            runs = [row for row in there if row[4] <= part < row[5]]
            if runs:
                table = part_table(
                    part,
                    segment=[row[2] for row in runs],
                    first_slot=[row[3] for row in runs],
                    blocks=[row[1] for row in runs],
                    stride=[row[6] for row in runs],
                    stamp=[row[7] for row in runs],
                    part_from=[row[4] for row in runs],
                )
                holder.part.append(part)
                holder.mac.append(make_mac(KEY, op, EPOCH, UNTIL_MS, NAMESPACE, part, table.tobytes()))
        if node:
            holders.append(holder)
    return holders


@st.composite
def runs(draw: st.DrawFn) -> ex.Record:
    low = draw(st.integers(0, 6))
    high = draw(st.integers(low + 1, 8))
    stride = draw(st.integers(high - low, 9))
    blocks, slot = draw(st.integers(1, 1 << 16)), draw(st.integers(0, 1 << 31))
    return (
        0,
        blocks,
        draw(st.sampled_from(sorted(HOLDERS))),
        slot,
        low,
        high,
        stride,
        draw(st.integers(0, (1 << 64) - 1)),
    )


@given(
    st.lists(runs(), min_size=1, max_size=3 * FEW_RUNS), st.sampled_from([READ, WRITE]), st.sampled_from(["", "a", "b"])
)
def test_holders_are_those_of_the_slow_way(rows: list[ex.Record], op: Op, own: str) -> None:
    packed = b"".join(ex.pack(*row) for row in rows)
    assert grants().holders(op, NAMESPACE, packed, UNTIL_MS, own) == slowly(op, rows, own)


def test_many_runs_are_granted_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(at, 2, 1 + at % 4, 10 * at, at % 3, 4, 4, EPOCH << 32 | at) for at in range(FEW_RUNS)]
    packed = b"".join(ex.pack(*row) for row in rows)
    one_by_one = grants().holders(READ, NAMESPACE, packed, UNTIL_MS)
    monkeypatch.setattr("kvpool_master.grants.FEW_RUNS", 0)
    assert grants().holders(READ, NAMESPACE, packed, UNTIL_MS) == one_by_one == slowly(READ, rows, "")


def test_what_is_on_the_askers_own_node_costs_no_capability() -> None:
    made = grants()
    packed = ex.pack(0, 5, 2, 8, 0, 2, 2, 9)
    assert made.holders(READ, NAMESPACE, packed, UNTIL_MS, "a") == [
        pb.Holder(node_id="a", data_address="10.0.0.1:9502", segments=[2])
    ]
    assert made.made == 0
    assert len(made.holders(READ, NAMESPACE, packed, UNTIL_MS, "b")[0].mac) == made.made == 2


def test_a_capability_is_for_one_operation_time_and_key() -> None:
    packed = ex.pack(0, 5, 1, 8, 0, 1, 1, 9)
    other_key = Grants(b"o" * 32, EPOCH, lambda handle: HOLDERS[handle])
    macs = {
        made.holders(op, NAMESPACE, packed, until_ms)[0].mac[0]
        for made, op, until_ms in (
            (grants(), READ, UNTIL_MS),
            (grants(), WRITE, UNTIL_MS),
            (grants(), READ, UNTIL_MS + 1),
            (other_key, READ, UNTIL_MS),
        )
    }
    assert len(macs) == 4


def test_the_source_of_a_copy_is_granted_for_exactly_its_run() -> None:
    source = (0, 3, 3, 40, 1, 3, 4, 77)
    order = CopySlots("a", 1, NAMESPACE, 4096, source, 1, 0, 78)
    assert grants().source(order, UNTIL_MS) == slowly(READ, [source], "")[0]
    gone = CopySlots("a", 1, NAMESPACE, 4096, (0, 3, 5, 40, 1, 3, 4, 77), 1, 0, 78)
    assert grants().source(gone, UNTIL_MS) is None


def test_the_columns_are_those_of_the_packed_extents_and_of_the_capability() -> None:
    record = tuple(range(1, 9))
    row = memoryview(ex.pack(*record))
    assert np.frombuffer(row, dtype=ROW)[0].item() == record
    assert RUN.itemsize == 24
