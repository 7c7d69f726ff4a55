"""runs.py: extents become runs, are cut, and name the places that header checks cover."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_client.headers import SLOT_HEADER, checks_at, slot_checks
from kvpool_client.runs import Run, count, cut, extents_of, head, mapped, places_of, rows_of
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import ProtocolError
from kvpool_proto.geometry import slots_per_slab
from unit.transfer_world import HANDLE, SLAB_BYTES, World


def test_runs_are_checked_against_the_question(segment_world: World) -> None:
    segment_world.bind(4096)
    whole = {"segment": [HANDLE] * 2, "first_slot": [0, 9], "stamp": [1, 2], "stride": [1, 1]}
    one = {"part_from": [0, 0], "part_to": [1, 1]}
    segments = {HANDLE: segment_world.worker}

    def runs(**columns: list[int]) -> list[Run]:
        extents = extents_of(pb.Extents(**whole, **columns))
        return mapped(rows_of(extents, 0, first_block=2, blocks=8), segments, 4096)

    assert [run[:2] for run in runs(offset=[6, 2], blocks=[4, 4], **one)] == [(0, 4), (4, 4)]
    assert runs(offset=[2, 6], blocks=[4, 4], part_from=[1, 1], part_to=[2, 2]) == []
    for offset, blocks in (([2, 5], [4, 4]), ([1, 6], [4, 4]), ([2, 6], [4, 5]), ([2, 6], [0, 4])):
        with pytest.raises(ProtocolError):
            runs(offset=offset, blocks=blocks, **one)
    with pytest.raises(ProtocolError, match="different lengths"):
        runs(offset=[2], blocks=[4, 4], **one)


def test_checks_are_those_of_headers_py(segment_world: World) -> None:
    """Of runs anywhere, with strides, in slabs of different generations, in one go."""
    segment_world.bind(4096)
    segment_world.owner.bind_slab(2, 4096)
    per_slab = slots_per_slab(SLAB_BYTES, 4096)
    runs = [
        Run(0, 5, segment_world.worker, 7, 1, 1),
        Run(5, 4, segment_world.worker, 2 * per_slab + 3, 3, 2),
        Run(9, 1, segment_world.worker, per_slab, 2, 3),
    ]
    rng = np.random.default_rng(4)
    headers = np.frombuffer(rng.bytes(10 * SLOT_HEADER.itemsize), dtype=SLOT_HEADER)
    want: list[int] = []
    for run in runs:
        generation = segment_world.worker.generation(run.slot // per_slab)
        for index in range(run.blocks):
            one = headers[run.first + index : run.first + index + 1].copy()
            want += slot_checks(one, run.slot + index * run.stride, generation, 4096).tolist()
    assert checks_at(headers, places_of(runs, 4096)).tolist() == want


@given(lengths=st.lists(st.integers(1, 9), max_size=8), size=st.integers(1, 12), blocks=st.integers(0, 80))
def test_cut_and_head_keep_every_block(segment_world: World, lengths: list[int], size: int, blocks: int) -> None:
    runs: list[Run] = []
    for length in lengths:
        runs.append(Run(count(runs), length, segment_world.worker, 100 * len(runs), 2, 1))
    every = [(run.first + i, run.slot + 2 * i) for run in runs for i in range(run.blocks)]
    groups = cut(runs, size)
    assert [(r.first + i, r.slot + 2 * i) for group in groups for r in group for i in range(r.blocks)] == every
    assert all(count(group) == size for group in groups[:-1])
    assert [(r.first + i, r.slot + 2 * i) for r in head(runs, blocks) for i in range(r.blocks)] == every[:blocks]
