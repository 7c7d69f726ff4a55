"""Inventories against an oracle that goes slot by slot: everything once, with the right parents, in a good order."""

from __future__ import annotations

from collections import Counter
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_client.headers import (
    COMMITTED,
    PARENT_KEY,
    PARENT_ROOT,
    PARENT_UNKNOWN,
    PEER_WRITER,
    WRITING,
    pack_keys,
)
from kvpool_client.inventory import CHUNK_BLOCKS_MAX, chunks, scan
from kvpool_client.slot_table import ROWS
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import SlabChanged
from unit.inventory_world import KEY_BYTES, M, N, Writer, check_order, expected, report, strands_in, told
from unit.segment_world import PER_SLAB, SLOT, MemoryTables, create, opened, plan_in, write_block

# -- what writers leave ---------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(0, 1 << 32))
def test_what_writers_left_is_told_once_and_parents_first(seed: int) -> None:
    tables = Writer(seed).write()
    found = report(tables)
    assert told(found) == expected(tables)
    check_order(found)
    assert [(chunk.slab, chunk.slot_bytes) for chunk in found[:1]] == [
        (list(range(tables.slabs)), [record.slot_bytes for record in tables.records])
    ]


SLOTS = st.none() | st.fixed_dictionaries(
    {
        "state": st.sampled_from([COMMITTED, COMMITTED, COMMITTED, WRITING]),
        "namespace": st.sampled_from([N, M]),
        "key": st.sampled_from([b"aaaaaaaa", b"bbbbbbbb", b"cccccccc", b"dddddddddddd"]),
        "parent_key": st.sampled_from([b"aaaaaaaa", b"bbbbbbbb", b"cccccccc", b"dddddddddddd"]),
        "parent_kind": st.sampled_from([PARENT_KEY, PARENT_KEY, PARENT_ROOT, PARENT_UNKNOWN]),
        "key_bytes": st.sampled_from([8, 8, 12]),
        "part": st.integers(0, 2),
        "stamp": st.integers(1, 2),
    }
)


@settings(deadline=None)
@given(st.lists(SLOTS, max_size=24))
def test_whatever_headers_say_they_are_told_once(slots: list[dict[str, Any] | None]) -> None:
    """Also twice the same key, cycles of parents, and a key that is its own parent."""
    tables = MemoryTables([(4096, 8)] * 3)
    for at, fields in enumerate(slots):
        if fields is not None:
            tables.put(at // 8, at % 8, **fields)
    tables.seal()
    assert told(report(tables)) == expected(tables)


# -- how short it is ------------------------------------------------------------------------------------


def fill_chain(tables: MemoryTables, places: list[tuple[int, int]], parts: int = 1, stamp: int = 5) -> None:
    """A chain from the root whose block i has its first part at places[i] (slab, index)."""
    for block, (slab, index) in enumerate(places):
        for part in range(parts):
            tables.put(
                slab, index + part, key=b"%08d" % block, part=part, stamp=stamp, parent_key=b"%08d" % (block - 1),
                parent_kind=PARENT_KEY if block else PARENT_ROOT
            )  # fmt: skip


def shape_of(found: list[pb.InventoryChunk]) -> list[tuple[Any, ...]]:
    """Per Strands message: parts, blocks of strands, extents of strands, blocks of extents, strides."""
    return [
        (each.part_from, each.part_to, [*each.blocks], [*each.extents], [*each.extent_blocks], [*each.stride])
        for chunk in found
        for each in chunk.strands
    ]


def test_a_chain_over_slabs_is_one_strand_of_an_extent_a_slab() -> None:
    tables = MemoryTables([(4096, 10), (8192, 5), (4096, 10)])
    fill_chain(tables, [(2, index) for index in range(4, 10)] + [(0, index) for index in range(10)])
    tables.seal()
    assert shape_of(report(tables)) == [(0, 1, [16], [2], [6, 10], [1, 1])]


def test_parts_side_by_side_are_one_extent() -> None:
    tables = MemoryTables([(4096, 30)])
    fill_chain(tables, [(0, 3 * block + 1) for block in range(9)], parts=3)
    tables.seal()
    assert shape_of(report(tables)) == [(0, 3, [9], [1], [9], [3])]


def test_parts_given_up_leave_ranges_at_the_same_stride() -> None:
    tables = MemoryTables([(4096, 60)])
    fill_chain(tables, [(0, 6 * block) for block in range(10)], parts=6)
    for given_up in (0, 3):
        tables.tables[0][given_up::6] = np.zeros(1, dtype=tables.tables[0].dtype)
    tables.seal()
    assert sorted(shape_of(report(tables))) == [(1, 3, [10], [1], [10], [6]), (4, 6, [10], [1], [10], [6])]
    assert told(report(tables)) == expected(tables)


def test_an_odd_distance_costs_one_extent_not_two() -> None:
    tables = MemoryTables([(4096, 40)])
    fill_chain(tables, [(0, index) for index in (0, 1, 2, 10, 11, 12, 30, 31, 32)])
    tables.seal()
    assert shape_of(report(tables)) == [(0, 1, [9], [3], [3, 3, 3], [1, 1, 1])]


def test_one_of_two_followers_goes_on_the_strand_the_other_comes_after() -> None:
    tables = MemoryTables([(4096, 40)])
    fill_chain(tables, [(0, index) for index in range(4)])
    for index, key in ((10, b"left----"), (20, b"right---")):
        tables.put(0, index, key=key, parent_kind=PARENT_KEY, parent_key=b"%08d" % 3)
    tables.seal()
    found = report(tables)
    assert shape_of(found) == [(0, 1, [5, 1], [2, 1], [4, 1, 1], [1, 1, 1])]
    check_order(found)


# -- chunks --------------------------------------------------------------------------------------------


def long_chain(blocks: int, slots: int, shuffled: int) -> MemoryTables:
    """A chain over slabs of `slots` slots, 32 bytes a key, in runs of `shuffled` blocks that lie anywhere."""
    tables = MemoryTables([(4096, slots)] * -(-blocks // slots))
    table = np.concatenate(tables.tables)
    keys = pack_keys(np.random.default_rng(1).bytes(32 * blocks), 32)
    where = np.random.default_rng(2).permutation(blocks // shuffled)[:, None] * shuffled + np.arange(shuffled)
    rows = where.ravel()
    table["state"][rows], table["key_bytes"][rows], table["stamp"][rows] = COMMITTED, 32, 7
    table["namespace"][rows] = np.void(N)
    table["parent_kind"][rows], table["key"][rows] = PARENT_KEY, keys
    table["parent_key"][rows[1:]] = keys[:-1]
    table["parent_kind"][rows[0]] = PARENT_ROOT
    tables.tables = list(table.reshape(tables.slabs, slots))
    tables.seal()
    return tables


@pytest.mark.parametrize(("slots", "shuffled"), [(2 * ROWS, 2 * ROWS), (32, 1), (32, 4)])
def test_chunks_are_bounded_and_a_long_strand_goes_on_after_a_key(slots: int, shuffled: int) -> None:
    blocks = 2 * ROWS
    found = report(long_chain(blocks, slots, shuffled))
    sizes = [sum(sum(strands.blocks) for strands in chunk.strands) for chunk in found[1:]]
    assert sizes == [CHUNK_BLOCKS_MAX] * (blocks // CHUNK_BLOCKS_MAX)
    assert max(chunk.ByteSize() for chunk in found) < 512 << 10
    pieces = [slots for slots, _ in strands_in(found)]
    assert len(pieces) == len(sizes)
    assert [slots[0].parent_kind for slots in pieces] == [PARENT_ROOT, *[PARENT_KEY] * (len(pieces) - 1)]
    for before, after in pairwise(slot for slots in pieces for slot in slots):
        assert after.parent_key == before.key
    assert len({slot.slot for slots in pieces for slot in slots}) == blocks


def test_nothing_bound_is_nothing_told() -> None:
    assert report(MemoryTables([(0, 0)] * 3)) == []
    (only,) = report(MemoryTables([(0, 0), (4096, 8)]))
    assert ([*only.slab], [*only.slot_bytes]) == ([1], [4096])


# -- what is left out, what is being written -----------------------------------------------------------


def test_dead_stamps_are_left_out() -> None:
    tables = MemoryTables([(4096, 8)])
    for index, (namespace, stamp) in enumerate(((N, 4), (M, 4), (N, 5), (N, 6), (M, 6), (N, 1 << 63))):
        tables.put(0, index, namespace=namespace, stamp=stamp)
    tables.put(0, 7, namespace=N, stamp=4, state=WRITING, worker_id=9)
    tables.workers = {9}
    tables.seal()
    found = report(tables, {N: 5, b"x" * 16: 100})
    assert sorted(slot.slot for slot in told(found)) == [1, 3, 4, 5]
    assert [*found[-1].writing[0].first_slot] == [7], "its writer may still write"


def writing_in(found: list[pb.InventoryChunk]) -> list[tuple[int, int, int, int]]:
    return sorted(
        (each.slot_bytes, *run)
        for chunk in found
        for each in chunk.writing
        for run in zip(each.first_slot, each.slots, each.worker_id, strict=True)
    )


def test_slots_that_may_still_be_written_are_told() -> None:
    tables = MemoryTables([(4096, 10), (8192, 5), (4096, 10)], workers=[1, 2])
    writers = {(0, 0): 1, (0, 1): 1, (0, 2): 2, (0, 4): 3, (0, 5): 1, (0, 9): 1, (1, 0): 2, (2, 0): 1, (2, 1): 0}
    for (slab, index), worker in writers.items():
        tables.put(slab, index, state=WRITING, worker_id=worker)
    tables.put(2, 5, worker_id=1)
    tables.seal()
    tables.tables[2]["stamp"][5] += 1  # torn
    asked: Counter[int] = Counter()

    def alive(worker_id: int) -> bool:
        asked[worker_id] += 1
        return worker_id in (1, 2)

    found = report(tables, alive=alive)
    assert told(found) == []
    assert writing_in(found) == [
        (4096, 0, 2, 1), (4096, 2, 1, 2), (4096, 5, 1, 1), (4096, 9, 1, 1), (4096, 20, 1, 1), (4096, 21, 1, 0),
        (4096, 25, 1, 0), (8192, 5, 1, 2)
    ]  # fmt: skip
    assert asked == {1: 1, 2: 1, 3: 1}
    tables.workers = set()
    assert writing_in(report(tables, alive=alive)) == [], "nobody maps the segment"


@pytest.mark.parametrize("workers", [[], [1]])
def test_slots_that_peers_write_are_told_while_the_data_port_is_at_it(workers: list[int]) -> None:
    tables = MemoryTables([(4096, 10), (8192, 5)], workers=workers)
    for index in range(4):
        tables.put(0, index, state=WRITING, worker_id=PEER_WRITER)
    tables.put(0, 6, worker_id=PEER_WRITER)
    tables.put(0, 7, state=WRITING, worker_id=1)
    tables.put(0, 8, key=b"halfdone")
    tables.put(1, 0, state=WRITING, worker_id=PEER_WRITER)
    tables.seal()
    tables.tables[0]["stamp"][8] += 1  # torn: the data port writes its header just now
    found = list(chunks(scan(tables, {}, lambda worker_id: worker_id == 1, {1, 2, 6, 7, 8, 9})))
    assert [slot.slot for slot in told(found)] == [6]
    mine = [(4096, 7, 1, 1)] if workers else []
    assert writing_in(found) == [(4096, 1, 2, 0), *mine, (4096, 8, 1, 0)], "what was left behind is free"


def test_many_slots_being_written_go_in_several_chunks() -> None:
    slots = 2 * CHUNK_BLOCKS_MAX + 2
    tables = MemoryTables([(4096, slots)], workers=[1, 2])
    for index in range(slots):
        tables.put(0, index, state=WRITING, worker_id=1 + index % 2)
    tables.seal()
    found = report(tables)
    assert len(writing_in(found)) == slots
    assert [len(chunk.writing[0].slots) for chunk in found[1:]] == [CHUNK_BLOCKS_MAX, CHUNK_BLOCKS_MAX, 2]


def test_a_header_that_is_just_being_written_is_looked_at_again() -> None:
    class Busy(MemoryTables):
        looks = 0

        def own_table(self, slab: int) -> Any:
            self.looks += 1
            table = self.tables[slab].copy()
            if self.looks == 1:
                table["stamp"][3] += 1
            return table

    tables = Busy([(4096, 8)], workers=[1])
    for index in range(8):
        tables.put(0, index, key=b"%08d" % index)
    tables.seal()
    assert len(told(report(tables))) == 8


def test_a_slab_that_was_bound_anew_meanwhile_is_passed_over() -> None:
    tables = MemoryTables([(4096, 8), (4096, 8)])
    tables.put(0, 1, key=b"aaaaaaaa")
    tables.put(1, 1, key=b"bbbbbbbb")
    tables.seal()
    tables.tables[0] = tables.tables[0][:4]
    assert [slot.key for slot in told(report(tables))] == [b"bbbbbbbb"]


def test_a_real_segment(tmp_path: Path) -> None:
    with opened(create(plan_in(tmp_path))) as owned:
        for slab in (1, 3):
            owned.bind_slab(slab, SLOT)
            write_block(owned, slab * PER_SLAB + 2, b"x", key=b"%08d" % slab)
        owned.memory[4096 + 64] ^= 1  # a worker scribbles over the slab table: the owner knows better
        found = report(owned)
        assert ([*found[0].slab], [*found[0].slot_bytes]) == ([1, 3], [SLOT, SLOT])
        assert [slot.slot for slot in told(found)] == [PER_SLAB + 2, 3 * PER_SLAB + 2]
    with pytest.raises(SlabChanged, match="closed"):
        report(owned)


def test_strands_of_a_kind_share_a_message() -> None:
    tables = MemoryTables([(4096, 64)])
    for index in range(32):
        namespace = (N, M)[index % 2]
        tables.put(0, 2 * index, namespace=namespace, key_bytes=KEY_BYTES[namespace], key=b"%012d" % index)
    tables.seal()
    found = report(tables)
    assert [name for name, _ in groupby(each.namespace_id for _, each in strands_in(found))] in ([N, M], [M, N])
    assert len(shape_of(found)) == 2
