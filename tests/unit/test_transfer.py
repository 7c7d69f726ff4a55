"""transfer.py and runs.py on a real segment: what is read is right or is not there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count as numbers
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_client.clock import Clock
from kvpool_client.devices.base import Bytes, Contiguous, Rows
from kvpool_client.devices.cpu import CpuDevice
from kvpool_client.gate import CopyGate
from kvpool_client.headers import COMMITTED, FREE, SLOT_HEADER, WRITING, checks_at, slot_checks
from kvpool_client.owned_segment import OwnedSegment, SegmentPlan
from kvpool_client.runs import Run, count, cut, extents_of, head, places_of, runs_of
from kvpool_client.segment import AttachedSegment
from kvpool_client.transfer import SAMPLE_EVERY, LocalEngine, PartCopy, Term, Verify
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import ProtocolError
from kvpool_proto.geometry import slots_per_slab
from kvpool_proto.namespace import NamespaceSpec

SLAB_BYTES = 256 << 10
SLABS = 32
HANDLE = 7
EPOCH = 40
DEVICE = CpuDevice()
STAMPS = numbers((EPOCH << 32) + 1)


@dataclass
class World:
    """A segment seen by its owner and by a worker, and a time that only tests move."""

    owner: OwnedSegment
    worker: AttachedSegment
    now_ms: int = 1_000

    @property
    def clock(self) -> Clock:
        return Clock(now_ms=lambda: self.now_ms)

    def term(self, deadline_ms: int = 2_000) -> Term:
        return Term(self.clock, deadline_ms, "time_over", EPOCH)

    def bind(self, slot_bytes: int) -> None:
        self.owner.identify(incarnation=1, epoch=EPOCH)
        for slab in range(SLABS):
            self.owner.bind_slab(slab, slot_bytes)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    plan = SegmentPlan(
        directory=tmp_path_factory.mktemp("segment"),
        node_id="n",
        index=0,
        size_bytes=SLABS * SLAB_BYTES,
        slab_bytes=SLAB_BYTES,
    )
    owner = OwnedSegment.create(plan, incarnation=1, prefault_threads=1, progress=lambda _: None)
    worker = AttachedSegment(owner.open_for_worker(1), HANDLE, plan.size_bytes, plan.slab_bytes)
    yield World(owner, worker)
    worker.close()
    owner.unlink()
    owner.close()


def spec_of(part_bytes: int, parts: int = 1) -> NamespaceSpec:
    return NamespaceSpec(model="m", dtype="uint8", block_tokens=16, part_bytes=part_bytes, parts=parts, key_bytes=12)


def chain_of(spec: NamespaceSpec, blocks: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(blocks * spec.key_bytes)


def run_at(world: World, blocks: int, slot: int = 0, first: int = 0) -> Run:
    return Run(first, blocks, world.worker, slot, 1, next(STAMPS))


def part_copy(spec: NamespaceSpec, chain: bytes, runs: list[Run], buffer: Any, part: int = 0) -> PartCopy:
    return PartCopy(spec, part, chain, runs, buffer)


def written(engine: LocalEngine, world: World, copies: Sequence[PartCopy]) -> list[int]:
    done, reason = engine.write(copies, world.term(), lambda _: "")
    assert reason == ""
    return done


@dataclass
class Spy:
    """A buffer that does something after each run it copied."""

    array: Bytes
    then: Callable[[], None]
    calls: list[int] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        return len(self.array)

    def gather(self, first: int, slots: Bytes) -> None:
        slots[:, : self.array.shape[1]] = self.array[first : first + len(slots)]
        self.calls.append(first)
        self.then()

    def scatter(self, first: int, slots: Bytes) -> None:
        self.array[first : first + len(slots)] = slots[:, : self.array.shape[1]]
        self.calls.append(first)
        self.then()

    def rows(self, first: int, blocks: int) -> Bytes | None:
        return None


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
    world: World,
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
    world.bind(spec.slot_bytes)
    chain = chain_of(spec, blocks, seed)
    extents = extents_of(draw.draw(extents_for(spec, blocks)))
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (parts, blocks, part_bytes), dtype=np.uint8)
    engine = LocalEngine(DEVICE, verify=verify, copy_threads=copy_threads, piece_bytes=piece_bytes)
    drawn: st.DrawFn = draw.draw

    def copies(layouts: list[Any], writable: bool) -> list[PartCopy]:
        found: list[PartCopy] = []
        for part, layout in enumerate(layouts):
            runs = runs_of(
                extents, part, {HANDLE: world.worker}, slot_bytes=spec.slot_bytes, first_block=0, blocks=blocks
            )
            found.append(part_copy(spec, chain, runs, DEVICE.bind(layout, part_bytes, writable=writable), part))
        return found

    sources = [layout_for(drawn, data[part], paged) for part in range(parts)]
    assert written(engine, world, copies(sources, False)) == [blocks] * parts

    targets = [layout_for(drawn, np.zeros_like(data[part]), paged) for part in range(parts)]
    copied = engine.read(copies(targets, True), world.term())
    engine.close()
    assert (copied.blocks, copied.reason, copied.bad) == (blocks, "", None)
    for part in range(parts):
        assert (data_of(targets[part]) == data[part]).all()


# -- bytes and headers that are not what they should be ------------------------------------------------

SPEC = spec_of(5000)
BLOCKS = 12


@dataclass
class Stored:
    """BLOCKS blocks in one run, read back in pieces of four blocks."""

    world: World
    chain: bytes
    run: Run
    data: npt.NDArray[np.uint8]
    engine: LocalEngine

    def read(self, **changes: Any) -> tuple[Any, npt.NDArray[np.uint8]]:
        target = np.zeros_like(self.data)
        buffer = changes.get("buffer") or DEVICE.bind(Contiguous(target), SPEC.part_bytes, writable=True)
        spec, part = changes.get("spec", SPEC), changes.get("part", 0)
        copy = part_copy(spec, changes.get("chain", self.chain), [self.run], buffer, part)
        return self.engine.read([copy], self.world.term()), target

    @property
    def headers(self) -> Any:
        return self.run.headers(SPEC.slot_bytes)

    def reseal(self) -> None:
        self.headers["check"][:] = checks_at(self.headers.copy(), places_of([self.run], SPEC.slot_bytes))


@pytest.fixture
def stored(world: World) -> Stored:
    world.bind(SPEC.slot_bytes)
    world.now_ms = 1_000
    chain = chain_of(SPEC, BLOCKS)
    data = np.random.default_rng(2).integers(0, 256, (BLOCKS, SPEC.part_bytes), dtype=np.uint8)
    engine = LocalEngine(DEVICE, piece_bytes=4 * SPEC.slot_bytes)
    run = run_at(world, BLOCKS, slot=3)
    buffer = DEVICE.bind(Contiguous(data), SPEC.part_bytes, writable=False)
    assert written(engine, world, [part_copy(SPEC, chain, [run], buffer)]) == [BLOCKS]
    return Stored(world, chain, run, data, engine)


def test_a_flipped_byte_ends_the_run(stored: Stored) -> None:
    stored.run.slots(SPEC.slot_bytes)[6, 4999] ^= 1
    copied, target = stored.read()
    assert (copied.blocks, copied.reason) == (6, "verify_failed")
    assert (target[:6] == stored.data[:6]).all()
    assert copied.bad == stored.run.sub(6, 1)
    assert not target[8:].any()  # the third piece was not begun


def test_padding_behind_the_part_does_not_count(stored: Stored) -> None:
    stored.run.slots(SPEC.slot_bytes)[6, 5000] ^= 1
    assert stored.read()[0].blocks == BLOCKS


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("state", WRITING, "stale_stamp"),
        ("state", FREE, "stale_stamp"),
        ("stamp", 5, "stale_stamp"),
        ("key", np.void(b"k" * 32), "wrong_block"),
        ("namespace", np.void(b"n" * 16), "wrong_block"),
        ("part", 1, "wrong_block"),
        ("length_bytes", 4999, "wrong_block"),
        ("key_bytes", 13, "wrong_block"),
        ("checksum", 0, "unverified"),
        ("checksum", 1, "verify_failed"),
    ],
)
def test_a_sound_header_of_something_else(stored: Stored, column: str, value: Any, reason: str) -> None:
    stored.headers[column][5:6] = value
    stored.reseal()
    copied, target = stored.read()
    assert (copied.blocks, copied.reason) == (5, reason)
    assert (copied.bad is not None) == (reason in ("wrong_block", "verify_failed"))
    assert (target[:5] == stored.data[:5]).all()


@pytest.mark.parametrize("column", ["part", "key", "namespace", "parent_key", "length_bytes", "checksum", "check"])
def test_a_torn_header(stored: Stored, column: str) -> None:
    field_bytes = stored.headers[column][5:6].copy().view(np.uint8)
    field_bytes[0] ^= 0x40
    stored.headers[column][5:6] = field_bytes.view(stored.headers[column].dtype)
    copied, _ = stored.read()
    assert (copied.blocks, copied.reason) == (5, "torn_header")


def test_a_header_that_was_moved_with_its_bytes(stored: Stored) -> None:
    slots = stored.run.slots(SPEC.slot_bytes)
    stored.headers[5:6], slots[5] = stored.headers[4:5].copy(), slots[4].copy()
    chain = bytearray(stored.chain)
    chain[5 * 12 : 6 * 12] = chain[4 * 12 : 5 * 12]
    copied, _ = stored.read(chain=bytes(chain))
    assert (copied.blocks, copied.reason) == (5, "torn_header")


def test_what_was_asked_for_is_compared(stored: Stored) -> None:
    other = bytearray(stored.chain)
    other[7 * 12] ^= 1
    assert stored.read(chain=bytes(other))[0].blocks == 7
    assert stored.read(part=1)[0].blocks == 0
    assert stored.read(spec=spec_of(4999))[0].blocks == 0


def test_a_slab_that_was_bound_anew(stored: Stored) -> None:
    stored.world.owner.bind_slab(0, SPEC.slot_bytes)
    assert stored.read()[0].reason == "stale_stamp"
    stored.world.owner.bind_slab(0, 4096)
    copied, target = stored.read()
    assert (copied.blocks, copied.reason) == (0, "slab_changed")
    assert not target.any()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda stored: stored.headers["stamp"].__setitem__(slice(2, 3), 9), "stale_stamp"),
        (lambda stored: stored.headers["state"].__setitem__(slice(2, 3), WRITING), "stale_stamp"),
        (lambda stored: stored.run.slots(SPEC.slot_bytes)[2].fill(0), "verify_failed"),
        (lambda stored: stored.world.owner.bind_slab(0, 4096), "slab_changed"),
    ],
)
def test_what_changes_during_the_copy_is_noticed(stored: Stored, change: Any, reason: str) -> None:
    target = np.zeros_like(stored.data)
    copied, _ = stored.read(buffer=Spy(target, lambda: change(stored)))
    assert copied.reason == reason
    assert copied.blocks == (0 if reason == "slab_changed" else 2)
    assert (target[:2] == stored.data[:2]).all()


def test_what_weaker_verification_sees(stored: Stored) -> None:
    stored.run.slots(SPEC.slot_bytes)[1:, 17] ^= 1
    stored.engine = LocalEngine(DEVICE, verify="off")
    assert stored.read()[0].blocks == BLOCKS
    stored.engine = LocalEngine(DEVICE, verify="sampled")
    copied, _ = stored.read()
    assert copied.reason == "verify_failed"
    assert 1 <= copied.blocks <= SAMPLE_EVERY


def test_stored_with_verify_off_is_read_by_who_asks_for_no_more(stored: Stored) -> None:
    off = LocalEngine(DEVICE, verify="off")
    buffer = DEVICE.bind(Contiguous(stored.data), SPEC.part_bytes, writable=False)
    written(off, stored.world, [part_copy(SPEC, stored.chain, [stored.run], buffer)])
    assert not stored.headers["checksum"].any()
    assert stored.read()[0].reason == "unverified"
    stored.engine = off
    assert stored.read()[0].blocks == BLOCKS


def test_the_shortest_part_counts(world: World) -> None:
    spec = spec_of(4096, parts=3)
    world.bind(spec.slot_bytes)
    chain = chain_of(spec, 10)
    data = np.random.default_rng(3).integers(0, 256, (3, 10, 4096), dtype=np.uint8)
    runs = [Run(0, 10, world.worker, part, 3, next(STAMPS)) for part in range(3)]
    engine = LocalEngine(DEVICE, piece_bytes=6 * 4096)
    bound = [DEVICE.bind(Contiguous(data[part]), 4096, writable=True) for part in range(3)]
    copies = [part_copy(spec, chain, [runs[part]], bound[part], part) for part in range(3)]
    written(engine, world, copies)
    runs[1].slots(4096)[7, 0] ^= 1
    runs[2].slots(4096)[8, 0] ^= 1
    copied = engine.read(copies, world.term())
    assert (copied.blocks, copied.reason) == (7, "verify_failed")
    assert copied.bad is not None
    assert copied.bad.slot == 7 * 3 + 1


# -- the order of a write, and its end -----------------------------------------------------------------


def test_a_write_marks_copies_and_commits_in_this_order(stored: Stored) -> None:
    seen: list[tuple[list[int], bool, bool]] = []
    run = stored.run._replace(stamp=next(STAMPS))

    def look() -> None:
        headers = run.headers(SPEC.slot_bytes)[:4]
        sound = headers["check"] == checks_at(headers.copy(), places_of([run.sub(0, 4)], SPEC.slot_bytes))
        seen.append((headers["state"].tolist(), bool((headers["stamp"] == run.stamp).all()), bool(sound.all())))

    spy = Spy(stored.data, look)
    engine = LocalEngine(DEVICE, piece_bytes=4 * SPEC.slot_bytes)
    written(engine, stored.world, [part_copy(SPEC, stored.chain, [run], spy)])
    assert spy.calls == [0, 4, 8]
    assert seen[0] == ([WRITING] * 4, True, True)
    assert seen[1] == seen[2] == ([COMMITTED] * 4, True, True)


def test_a_slot_that_is_spoiled_during_a_write_is_a_miss(stored: Stored) -> None:
    """A late writer's piece lands in our slots: the checksum is that of what we meant to store."""
    run = stored.run._replace(stamp=next(STAMPS))
    source = DEVICE.bind(Contiguous(stored.data), SPEC.part_bytes, writable=False)
    spy = Spy(stored.data, lambda: run.slots(SPEC.slot_bytes)[2].fill(0))
    spy.rows = source.rows  # type: ignore[method-assign]
    written(LocalEngine(DEVICE), stored.world, [part_copy(SPEC, stored.chain, [run], spy)])
    stored.run = run
    copied, _ = stored.read()
    assert (copied.blocks, copied.reason) == (2, "verify_failed")


def test_a_newer_epoch_stops_a_write_before_its_next_piece(stored: Stored) -> None:
    run = run_at(stored.world, BLOCKS, slot=3)
    spy = Spy(stored.data, lambda: stored.world.owner.identify(incarnation=1, epoch=EPOCH + 1))
    done, reason = stored.engine.write([part_copy(SPEC, stored.chain, [run], spy)], stored.world.term(), lambda _: "")
    assert (done, reason, spy.calls) == ([4], "stale_epoch", [0])
    assert (run.headers(SPEC.slot_bytes)["stamp"][4:] != run.stamp).all()


def test_a_deadline_stops_copies_before_their_next_piece(stored: Stored) -> None:
    def late() -> None:
        stored.world.now_ms = 2_000

    spy = Spy(np.zeros_like(stored.data), late)
    copied, _ = stored.read(buffer=spy)
    assert (copied.blocks, copied.reason, spy.calls) == (4, "time_over", [0])
    stored.world.now_ms = 1_000
    spy = Spy(stored.data, late)
    copy = part_copy(SPEC, stored.chain, [run_at(stored.world, BLOCKS, slot=3)], spy)
    assert stored.engine.write([copy], stored.world.term(), lambda _: "") == ([4], "time_over")
    assert stored.read()[0].blocks == 0  # too late for anything


def test_progress_can_stop_a_write(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_client.transfer.PROGRESS_BYTES", 2 * SPEC.slot_bytes)
    told: list[list[int]] = []

    def progress(so_far: list[int]) -> str:
        told.append(list(so_far))
        return "enough" if so_far[0] == 8 else ""

    spy = Spy(stored.data, lambda: None)
    copy = part_copy(SPEC, stored.chain, [run_at(stored.world, BLOCKS, slot=3)], spy)
    assert stored.engine.write([copy], stored.world.term(), progress) == ([8], "enough")
    assert told == [[4], [8]]


# -- runs and the gate ---------------------------------------------------------------------------------


def test_runs_are_checked_against_the_question(world: World) -> None:
    world.bind(4096)
    whole = {"segment": [HANDLE] * 2, "first_slot": [0, 9], "stamp": [1, 2], "stride": [1, 1]}
    one = {"part_from": [0, 0], "part_to": [1, 1]}
    segments = {HANDLE: world.worker}

    def runs(**columns: list[int]) -> list[Run]:
        extents = extents_of(pb.Extents(**whole, **columns))
        return runs_of(extents, 0, segments, slot_bytes=4096, first_block=2, blocks=8)

    assert [run[:2] for run in runs(offset=[6, 2], blocks=[4, 4], **one)] == [(0, 4), (4, 4)]
    assert runs(offset=[2, 6], blocks=[4, 4], part_from=[1, 1], part_to=[2, 2]) == []
    for offset, blocks in (([2, 5], [4, 4]), ([1, 6], [4, 4]), ([2, 6], [4, 5]), ([2, 6], [0, 4])):
        with pytest.raises(ProtocolError):
            runs(offset=offset, blocks=blocks, **one)
    with pytest.raises(ProtocolError, match="different lengths"):
        runs(offset=[2], blocks=[4, 4], **one)


def test_checks_are_those_of_headers_py(world: World) -> None:
    """Of runs anywhere, with strides, in slabs of different generations, in one go."""
    world.bind(4096)
    world.owner.bind_slab(2, 4096)
    per_slab = slots_per_slab(SLAB_BYTES, 4096)
    runs = [
        Run(0, 5, world.worker, 7, 1, 1),
        Run(5, 4, world.worker, 2 * per_slab + 3, 3, 2),
        Run(9, 1, world.worker, per_slab, 2, 3),
    ]
    rng = np.random.default_rng(4)
    headers = np.frombuffer(rng.bytes(10 * SLOT_HEADER.itemsize), dtype=SLOT_HEADER)
    want: list[int] = []
    for run in runs:
        generation = world.worker.generation(run.slot // per_slab)
        for index in range(run.blocks):
            one = headers[run.first + index : run.first + index + 1].copy()
            want += slot_checks(one, run.slot + index * run.stride, generation, 4096).tolist()
    assert checks_at(headers, places_of(runs, 4096)).tolist() == want


@given(lengths=st.lists(st.integers(1, 9), max_size=8), size=st.integers(1, 12), blocks=st.integers(0, 80))
def test_cut_and_head_keep_every_block(world: World, lengths: list[int], size: int, blocks: int) -> None:
    runs: list[Run] = []
    for length in lengths:
        runs.append(Run(count(runs), length, world.worker, 100 * len(runs), 2, 1))
    every = [(run.first + i, run.slot + 2 * i) for run in runs for i in range(run.blocks)]
    groups = cut(runs, size)
    assert [(r.first + i, r.slot + 2 * i) for group in groups for r in group for i in range(r.blocks)] == every
    assert all(count(group) == size for group in groups[:-1])
    assert [(r.first + i, r.slot + 2 * i) for r in head(runs, blocks) for i in range(r.blocks)] == every[:blocks]


def test_a_load_goes_before_a_store_that_waited_longer() -> None:
    gate = CopyGate()
    order: list[str] = []
    waiting = threading.Event()

    def enter(kind: str, way: Callable[[float], Any]) -> None:
        waiting.set()
        with way(30.0) as admitted:
            assert admitted
            order.append(kind)

    threads: list[threading.Thread] = []
    with gate.store(0.0) as admitted:
        assert admitted
        for kind, way in (("store", gate.store), ("load", gate.load)):
            waiting.clear()
            threads.append(threading.Thread(target=enter, args=(kind, way)))
            threads[-1].start()
            assert waiting.wait(30.0)
        with gate.load(0.0) as refused:
            assert not refused
        while gate._loads_waiting == 0:  # the thread is past its event, on its way to the gate
            threading.Event().wait(0.001)
    for thread in threads:
        thread.join(30.0)
    assert order == ["load", "store"]
    with gate.store(0.0) as admitted:
        assert admitted
