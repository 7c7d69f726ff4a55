"""peer/engine.py against a real data port: what is written is read, whatever the layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_client.devices.base import Contiguous, Rows
from kvpool_client.runs import Row, extents_of, rows_of
from kvpool_client.transfer_engine import Verify, Written
from kvpool_proto.capability import READ, WRITE
from unit.peer_world import BLOCKS, Case, PeerWorld, engine, term
from unit.test_transfer import data_of, extents_for, layout_for
from unit.transfer_world import DEVICE, HANDLE, STAMPS, chain_of, spec_of

ROW = 12 << 10


@settings(max_examples=60, deadline=None)
@given(
    draw=st.data(),
    part_bytes=st.sampled_from([1, 100, 4096, 5000, 20_000]),
    parts=st.integers(1, 3),
    blocks=st.integers(1, 14),
    paged=st.booleans(),
    piece_bytes=st.sampled_from([1, 40_000, 1 << 20]),
    verify=st.sampled_from(["full", "sampled", "off"]),
    connections=st.integers(1, 3),
    seed=st.integers(0, 1 << 31),
)
def test_round_trip(
    peer_world: PeerWorld,
    draw: Any,
    part_bytes: int,
    parts: int,
    blocks: int,
    paged: bool,
    piece_bytes: int,
    verify: Verify,
    connections: int,
    seed: int,
) -> None:
    spec = spec_of(part_bytes, parts)
    peer_world.world.bind(spec.slot_bytes)
    chain = chain_of(spec, blocks, seed)
    extents = extents_of(draw.draw(extents_for(spec, blocks)))
    rows = [rows_of(extents, part, first_block=0, blocks=blocks) for part in range(parts)]
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (parts, blocks, part_bytes), dtype=np.uint8)
    sources = [layout_for(draw.draw, one, paged) for one in data]
    targets = [layout_for(draw.draw, np.zeros_like(one), paged) for one in data]
    made = engine(verify, connections, piece_bytes)
    try:
        copies = [
            peer_world.copy(spec, chain, some, DEVICE.bind(source, part_bytes, writable=False), WRITE, part)
            for part, (some, source) in enumerate(zip(rows, sources, strict=True))
        ]
        assert made.write(copies, term(), lambda _: "") == Written([blocks] * parts)
        copies = [
            peer_world.copy(spec, chain, some, DEVICE.bind(target, part_bytes, writable=True), part=part)
            for part, (some, target) in enumerate(zip(rows, targets, strict=True))
        ]
        found = made.read(copies, term())
    finally:
        made.close()
    assert [(copied.blocks, copied.reason) for copied in found] == [(blocks, "")] * parts
    assert all(np.array_equal(data_of(target), one) for target, one in zip(targets, data, strict=True))


def test_a_call_and_its_counts(peer_case: Case) -> None:
    case = peer_case
    before = case.peer.server.counts
    blocks, payload = before.blocks_written + BLOCKS, before.bytes_written + case.data.nbytes
    assert case.write() == Written([BLOCKS])
    assert (case.read()[0].blocks, case.peer.refused) == (BLOCKS, {})
    now = case.peer.server.counts
    assert (now.blocks_written, now.bytes_written) == (blocks, payload)


def test_gaps_in_a_copys_runs_are_not_touched(peer_case: Case) -> None:
    case = peer_case
    case.write()
    some = [case.run.sub(1, 3), case.run.sub(6, 2)]
    copied, target = case.read(runs=some)
    assert (copied.blocks, copied.reason) == (5, "")
    wanted = np.zeros_like(case.data)
    wanted[1:4], wanted[6:8] = case.data[1:4], case.data[6:8]
    assert np.array_equal(target, wanted)
    assert isinstance(some[0], Row)


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("connections", [1, 2])
def test_long_rows_go_straight_from_and_into_the_engines_memory(
    peer_world: PeerWorld, stride: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, blocks, rng = spec_of(4 * ROW), 9, np.random.default_rng(5)
    peer_world.world.bind(spec.slot_bytes)
    tensors, back = ([rng.integers(0, 256, (20, ROW), dtype=np.uint8) for _ in range(4)] for _ in range(2))
    sources, targets = rng.permutation(20)[:blocks], rng.permutation(20)[:blocks]
    runs = [Row(0, 2, HANDLE, 0, stride, next(STAMPS), 0), Row(2, 7, HANDLE, 9, stride, next(STAMPS), 0)]
    chain, made = chain_of(spec, blocks), engine(connections=connections, piece_bytes=3 * spec.slot_bytes)
    source = DEVICE.bind(Rows(tensors, sources), spec.part_bytes, writable=False)
    target = DEVICE.bind(Rows(back, targets), spec.part_bytes, writable=True)
    before = [tensor.copy() for tensor in back]
    for buffer in (source, target):
        for move in ("gather", "scatter"):
            monkeypatch.setattr(buffer, move, None)
    try:
        assert made.write([peer_world.copy(spec, chain, runs, source, WRITE)], term(), lambda _: "") == Written([9])
        assert made.read([peer_world.copy(spec, chain, runs, target)], term())[0].blocks == blocks
    finally:
        made.close()
    others = np.setdiff1d(np.arange(20), targets)
    for here, there, old in zip(tensors, back, before, strict=True):
        assert np.array_equal(there[targets], here[sources])
        assert np.array_equal(there[others], old[others])


@pytest.mark.parametrize("connections", [1, 2])
@pytest.mark.parametrize("piece_blocks", [2, 4, 100])
def test_a_part_that_ends_short_does_not_shorten_the_others_before_that_block(
    peer_world: PeerWorld, connections: int, piece_blocks: int
) -> None:
    spec, blocks = spec_of(5000, 3), 12
    peer_world.world.bind(spec.slot_bytes)
    data = np.random.default_rng(7).integers(0, 256, (3, blocks, 5000), dtype=np.uint8)
    back, chain = np.zeros_like(data), chain_of(spec, blocks)
    runs = [[Row(0, blocks, HANDLE, part, 3, next(STAMPS), 0)] for part in range(3)]
    made = engine(connections=connections, piece_bytes=piece_blocks * 5000)
    try:
        for whose, op in ((data, WRITE), (back, READ)):
            buffers = [DEVICE.bind(Contiguous(one), 5000, writable=True) for one in whose]
            copies = [
                peer_world.copy(spec, chain, runs[part], buffers[part], op, part) for part in range(3)
            ]  # fmt: skip
            if op == WRITE:
                assert made.write(copies, term(), lambda _: "") == Written([blocks] * 3)
                peer_world.world.worker.headers(1 + 3 * 5, 1, spec.slot_bytes)["stamp"] += 1  # block 5 of part 1
            else:
                found = made.read(copies, term())
    finally:
        made.close()
    assert (found[1].blocks, found[1].reason) == (5, "stale_stamp")
    for part in (0, 2):
        assert found[part].blocks >= 5
        assert found[part].reason == ""
        assert np.array_equal(back[part, : found[part].blocks], data[part, : found[part].blocks])
