"""transfer.py on a real segment: what is written is read, and the order and the end of a write."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_client.devices.base import Contiguous, Rows
from kvpool_client.headers import COMMITTED, WRITING, checks_at
from kvpool_client.runs import Run, extents_of, mapped, places_of, rows_of
from kvpool_client.transfer import Copied, LocalEngine, PartCopy, Term, Verify
from kvpool_client.transfer_engine import Written
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.namespace import NamespaceSpec
from unit.transfer_world import (
    BLOCKS,
    DEVICE,
    EPOCH,
    HANDLE,
    SPEC,
    STAMPS,
    WRITER,
    Spy,
    Stored,
    World,
    chain_of,
    part_copy,
    run_at,
    spec_of,
    written,
)

# -- round trips ---------------------------------------------------------------------------------------


def layout_for(draw: st.DrawFn, data: npt.NDArray[np.uint8], paged: bool) -> Any:
    """The same blocks as one array, or as rows of several tensors in another order."""
    if not paged:
        return Contiguous(data)
    blocks, part_bytes = data.shape
    cuts = sorted({0, part_bytes, *draw(st.lists(st.integers(0, part_bytes), max_size=3))})
    ids = np.array(draw(st.permutations(range(blocks + 2))))[:blocks]
    tensors: list[npt.NDArray[np.uint8]] = []
    for low, high in pairwise(cuts):
        tensor = np.zeros((blocks + 2, high - low), dtype=np.uint8)
        tensor[ids] = data[:, low:high]
        tensors.append(tensor)
    return Rows(tensors, ids)


def data_of(layout: Any) -> npt.NDArray[np.uint8]:
    if isinstance(layout, Contiguous):
        return layout.array
    return np.concatenate([tensor[layout.row_ids] for tensor in layout.tensors], axis=1)


@st.composite
def extents_for(draw: st.DrawFn, spec: NamespaceSpec, blocks: int) -> pb.Extents:
    """All parts of `blocks` blocks, somewhere: split anywhere, across slabs too, side by side or not, with strides."""
    message = pb.Extents()
    borders = sorted({0, spec.parts, *draw(st.lists(st.integers(0, spec.parts), max_size=2))})
    place = draw(st.integers(0, 40))
    for low, high in pairwise(borders):
        offset = 0
        while offset < blocks:
            stride = high - low + draw(st.integers(0, 2))
            length = min(draw(st.integers(1, 6)), blocks - offset)
            for column, value in (
                (message.offset, offset),
                (message.blocks, length),
                (message.segment, HANDLE),
                (message.first_slot, place),
                (message.part_from, low),
                (message.part_to, high),
                (message.stamp, next(STAMPS)),
                (message.stride, stride),
            ):
                column.append(value)
            offset += length
            place += length * stride + draw(st.integers(0, 2))
    return message


@settings(max_examples=120, deadline=None)
@given(
    draw=st.data(),
    part_bytes=st.sampled_from([1, 100, 4096, 5000, 12288]),
    parts=st.integers(1, 3),
    blocks=st.integers(1, 14),
    paged=st.booleans(),
    piece_bytes=st.sampled_from([1, 40_000, 1 << 20]),
    verify=st.sampled_from(["full", "sampled", "off"]),
    copy_threads=st.sampled_from([1, 1, 2]),
    seed=st.integers(0, 1 << 31),
)
def test_round_trip(
    segment_world: World,
    draw: Any,
    part_bytes: int,
    parts: int,
    blocks: int,
    paged: bool,
    piece_bytes: int,
    verify: Verify,
    copy_threads: int,
    seed: int,
) -> None:
    spec = spec_of(part_bytes, parts)
    segment_world.bind(spec.slot_bytes)
    chain = chain_of(spec, blocks, seed)
    extents = extents_of(draw.draw(extents_for(spec, blocks)))
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (parts, blocks, part_bytes), dtype=np.uint8)
    engine = LocalEngine(DEVICE, verify=verify, copy_threads=copy_threads, piece_bytes=piece_bytes)
    drawn: st.DrawFn = draw.draw

    def copies(layouts: list[Any], writable: bool) -> list[PartCopy]:
        found: list[PartCopy] = []
        for part, layout in enumerate(layouts):
            rows = rows_of(extents, part, first_block=0, blocks=blocks)
            runs = mapped(rows, {HANDLE: segment_world.worker}, spec.slot_bytes)
            found.append(part_copy(spec, chain, runs, DEVICE.bind(layout, part_bytes, writable=writable), part))
        return found

    sources = [layout_for(drawn, data[part], paged) for part in range(parts)]
    assert written(engine, segment_world, copies(sources, False)) == [blocks] * parts

    targets = [layout_for(drawn, np.zeros_like(data[part]), paged) for part in range(parts)]
    copied = engine.read(copies(targets, True), segment_world.term())
    engine.close()
    assert copied == [Copied(blocks)] * parts
    for part in range(parts):
        assert (data_of(targets[part]) == data[part]).all()


def test_the_shortest_part_counts(segment_world: World) -> None:
    spec = spec_of(4096, parts=3)
    segment_world.bind(spec.slot_bytes)
    chain = chain_of(spec, 10)
    data = np.random.default_rng(3).integers(0, 256, (3, 10, 4096), dtype=np.uint8)
    runs = [Run(0, 10, segment_world.worker, part, 3, next(STAMPS)) for part in range(3)]
    engine = LocalEngine(DEVICE, piece_bytes=6 * 4096)
    bound = [DEVICE.bind(Contiguous(data[part]), 4096, writable=True) for part in range(3)]
    copies = [part_copy(spec, chain, [runs[part]], bound[part], part) for part in range(3)]
    written(engine, segment_world, copies)
    runs[1].slots(4096)[7, 0] ^= 1
    runs[2].slots(4096)[8, 0] ^= 1
    first, second, third = engine.read(copies, segment_world.term())
    assert (second.blocks, second.reason) == (7, "verify_failed")
    assert second.bad is not None
    assert second.bad.slot == 7 * 3 + 1
    assert (first, third) == (Copied(8), Copied(7))  # the third's bad block is not wanted any more


@settings(max_examples=60, deadline=None)
@given(
    draw=st.data(),
    held=st.lists(st.sets(st.integers(0, 29), min_size=1), min_size=1, max_size=3),
    piece_blocks=st.integers(1, 9),
)
def test_copies_of_some_blocks_each(segment_world: World, draw: Any, held: list[set[int]], piece_blocks: int) -> None:
    """The rest lies elsewhere: gaps between the runs, and other blocks in each part. One bad block ends all."""
    spec = spec_of(4096, parts=len(held))
    segment_world.bind(spec.slot_bytes)
    chain = chain_of(spec, 30)
    data = np.random.default_rng(5).integers(0, 256, (len(held), 30, 4096), dtype=np.uint8)
    engine = LocalEngine(DEVICE, piece_bytes=piece_blocks * len(held) * 4096)
    runs = [
        [Run(block, 1, segment_world.worker, 31 * part + block, 1, next(STAMPS)) for block in sorted(some)]
        for part, some in enumerate(held)
    ]

    def copies(arrays: Any, writable: bool) -> list[PartCopy]:
        bound = [DEVICE.bind(Contiguous(array), 4096, writable=writable) for array in arrays]
        return [part_copy(spec, chain, some, bound[part], part) for part, some in enumerate(runs)]

    assert written(engine, segment_world, copies(data, False)) == [len(some) for some in held]
    assert engine.read(copies(np.zeros_like(data), True), segment_world.term()) == [Copied(len(some)) for some in held]

    part = draw.draw(st.integers(0, len(held) - 1))
    bad = draw.draw(st.sampled_from(runs[part]))
    bad.slots(4096)[0, 9] ^= 1
    target = np.zeros_like(data)
    found = engine.read(copies(target, True), segment_world.term())
    assert (found[part].reason, found[part].bad) == ("verify_failed", bad)
    for one, some, got, want in zip(found, held, target, data, strict=True):
        assert one.blocks >= len([block for block in some if block < bad.first])
        there = sorted(some)[: one.blocks]
        assert (got[there] == want[there]).all()
        assert not got[[block for block in some if block // piece_blocks > bad.first // piece_blocks]].any()


# -- the order of a write, and its end -----------------------------------------------------------------


def test_a_write_marks_copies_and_commits_in_this_order(stored_run: Stored) -> None:
    seen: list[tuple[list[int], bool, bool]] = []
    run = stored_run.run._replace(stamp=next(STAMPS))

    def look() -> None:
        headers = run.headers(SPEC.slot_bytes)[:4]
        sound = headers["check"] == checks_at(headers.copy(), places_of([run.sub(0, 4)], SPEC.slot_bytes))
        ours = (headers["stamp"] == run.stamp) & (headers["worker_id"] == WRITER)
        seen.append((headers["state"].tolist(), bool(ours.all()), bool(sound.all())))

    spy = Spy(stored_run.data, look)
    engine = LocalEngine(DEVICE, piece_bytes=4 * SPEC.slot_bytes)
    written(engine, stored_run.world, [part_copy(SPEC, stored_run.chain, [run], spy, worker_id=WRITER)])
    assert spy.calls == [0, 4, 8]
    assert seen[0] == ([WRITING] * 4, True, True)
    assert seen[1] == seen[2] == ([COMMITTED] * 4, True, True)
    stored_run.run = run
    assert stored_run.read()[0].blocks == BLOCKS  # readers do not ask who wrote


def test_a_slot_that_is_spoiled_during_a_write_is_a_miss(stored_run: Stored) -> None:
    """A late writer's piece lands in our slots: the checksum is that of what we meant to store."""
    run = stored_run.run._replace(stamp=next(STAMPS))
    source = DEVICE.bind(Contiguous(stored_run.data), SPEC.part_bytes, writable=False)
    spy = Spy(stored_run.data, lambda: run.slots(SPEC.slot_bytes)[2].fill(0))
    spy.rows = source.rows  # type: ignore[method-assign]
    written(LocalEngine(DEVICE), stored_run.world, [part_copy(SPEC, stored_run.chain, [run], spy)])
    stored_run.run = run
    copied, _ = stored_run.read()
    assert (copied.blocks, copied.reason) == (2, "verify_failed")


def test_a_newer_epoch_stops_a_write_before_its_next_piece(stored_run: Stored) -> None:
    run = run_at(stored_run.world, BLOCKS, slot=3)
    spy = Spy(stored_run.data, lambda: stored_run.world.owner.identify(incarnation=1, epoch=EPOCH + 1))
    copy = part_copy(SPEC, stored_run.chain, [run], spy)
    done = stored_run.engine.write([copy], stored_run.world.term(), lambda _: "")
    assert (done, spy.calls) == (Written([4], "stale_epoch"), [0])
    assert (run.headers(SPEC.slot_bytes)["stamp"][4:] != run.stamp).all()


def test_a_newer_epoch_between_marks_and_payload_stops_a_write_with_its_marks(stored_run: Stored) -> None:
    """Whoever wrote the epoch scans after that: it finds the marks, and their slots stay as they were."""
    run, spy = run_at(stored_run.world, BLOCKS, slot=3), Spy(stored_run.data[::-1], lambda: None)
    real = stored_run.engine._barrier

    def order() -> None:
        real()
        stored_run.world.owner.identify(incarnation=1, epoch=EPOCH + 1)

    stored_run.engine._barrier = order  # type: ignore[assignment]
    copy = part_copy(SPEC, stored_run.chain, [run], spy, worker_id=WRITER)
    assert stored_run.engine.write([copy], stored_run.world.term(), lambda _: "") == Written([0], "stale_epoch")
    headers = run.headers(SPEC.slot_bytes)
    assert (headers["state"][:4].tolist(), spy.calls) == ([WRITING] * 4, [])
    assert (headers["stamp"][:4] == run.stamp).all()
    assert (headers["worker_id"][:4] == WRITER).all()
    assert (headers["state"][4:] == COMMITTED).all()
    assert (run.slots(SPEC.slot_bytes)[:, : SPEC.part_bytes] == stored_run.data).all()


def test_what_this_process_heard_of_stops_a_write_too(stored_run: Stored) -> None:
    """The node client may hear of a new Master later than we do."""
    ruling = [EPOCH]
    spy = Spy(stored_run.data, lambda: ruling.append(EPOCH + 1))
    term = Term(stored_run.world.clock, 2_000, "time_over", EPOCH, lambda: ruling[-1])
    copy = part_copy(SPEC, stored_run.chain, [run_at(stored_run.world, BLOCKS, slot=3)], spy)
    assert stored_run.engine.write([copy], term, lambda _: "") == Written([4], "stale_epoch")


def test_a_piece_that_was_begun_in_time_leaves_no_marks(stored_run: Stored) -> None:
    run, spy = run_at(stored_run.world, BLOCKS, slot=3), Spy(stored_run.data, lambda: None)
    real = stored_run.engine._barrier

    def late() -> None:
        real()
        stored_run.world.now_ms = 2_000

    stored_run.engine._barrier = late  # type: ignore[assignment]
    copy = part_copy(SPEC, stored_run.chain, [run], spy)
    assert stored_run.engine.write([copy], stored_run.world.term(), lambda _: "") == Written([4], "time_over")
    assert (run.headers(SPEC.slot_bytes)["state"] == COMMITTED).all()


def test_copies_go_on_when_the_engine_is_closed_meanwhile(stored_run: Stored) -> None:
    engine = LocalEngine(DEVICE, copy_threads=2, piece_bytes=4 * SPEC.slot_bytes)
    target = np.zeros_like(stored_run.data)
    closing = threading.Thread(target=engine.close)
    spy = Spy(target, lambda: None if closing.ident else closing.start())
    stored_run.engine = engine
    assert stored_run.read(buffer=spy)[0].blocks == BLOCKS
    closing.join(30.0)
    assert (target == stored_run.data).all()
    target[:] = 0
    assert stored_run.read(buffer=Spy(target, lambda: None))[0].blocks == BLOCKS
    assert (target == stored_run.data).all()


def test_a_deadline_stops_copies_before_their_next_piece(stored_run: Stored) -> None:
    def late() -> None:
        stored_run.world.now_ms = 2_000

    spy = Spy(np.zeros_like(stored_run.data), late)
    copied, _ = stored_run.read(buffer=spy)
    assert (copied.blocks, copied.reason, spy.calls) == (4, "time_over", [0])
    stored_run.world.now_ms = 1_000
    spy = Spy(stored_run.data, late)
    copy = part_copy(SPEC, stored_run.chain, [run_at(stored_run.world, BLOCKS, slot=3)], spy)
    assert stored_run.engine.write([copy], stored_run.world.term(), lambda _: "") == Written([4], "time_over")
    assert stored_run.read()[0].blocks == 0  # too late for anything


def test_progress_can_stop_a_write(stored_run: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_client.transfer.PROGRESS_BYTES", 2 * SPEC.slot_bytes)
    told: list[list[int]] = []

    def progress(so_far: list[int]) -> str:
        told.append(list(so_far))
        return "enough" if so_far[0] == 8 else ""

    spy = Spy(stored_run.data, lambda: None)
    copy = part_copy(SPEC, stored_run.chain, [run_at(stored_run.world, BLOCKS, slot=3)], spy)
    assert stored_run.engine.write([copy], stored_run.world.term(), progress) == Written([8], "enough")
    assert told == [[4], [8]]
