"""Segment files: geometry, views, binding, clearing, torn and spoiled metadata. Adoption: test_adoption.py."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvpool_client import pages
from kvpool_client.headers import PEER_WRITER, SUPERBLOCK_COPIES, WRITING
from kvpool_client.owned_segment import OwnedSegment, SegmentPlan
from kvpool_client.segment import AttachedSegment
from kvpool_client.start_error import StartError
from kvpool_proto.errors import BadSegment, ProtocolError, SlabChanged
from kvpool_proto.geometry import SUPERBLOCK_BYTES, file_bytes, slots_per_slab
from unit.segment_world import PER_SLAB, SLAB, SLOT, create, opened, plan_in, worker_of, write_block


@pytest.fixture
def plan(tmp_path: Path) -> SegmentPlan:
    return plan_in(tmp_path)


@pytest.fixture
def owned(plan: SegmentPlan) -> Iterator[OwnedSegment]:
    with opened(create(plan)) as segment:
        yield segment


@pytest.fixture
def attached(owned: OwnedSegment) -> Iterator[AttachedSegment]:
    segment = worker_of(owned)
    yield segment
    segment.close()


# -- making and attaching ------------------------------------------------------------------------------


def test_the_whole_file_is_there_before_it_is_offered(plan: SegmentPlan, owned: OwnedSegment) -> None:
    found = os.stat(plan.path)
    assert found.st_size == file_bytes(4 * SLAB, SLAB)
    assert found.st_blocks * 512 >= found.st_size
    assert found.st_mode & 0o777 == 0o600


def test_progress_counts_every_byte(plan: SegmentPlan) -> None:
    done: list[int] = []
    segment = OwnedSegment.create(plan, incarnation=1, prefault_threads=1, progress=done.append)
    segment.unlink()
    segment.close()
    assert sum(done) == file_bytes(4 * SLAB, SLAB)


def test_progress_may_end_the_creation_and_nothing_stays(plan: SegmentPlan) -> None:
    def enough(_: int) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError):
        OwnedSegment.create(plan, incarnation=1, prefault_threads=2, progress=enough)
    assert not plan.path.exists()
    create(plan).close()


def test_no_room_is_said_and_nothing_stays(plan: SegmentPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StartError, match=r"no room for .* lower segment_bytes"):
        create(plan)
    assert not plan.path.exists()


@pytest.mark.parametrize("size_bytes", [0, SLAB + 4096, -SLAB])
def test_bad_sizes_are_refused(plan: SegmentPlan, size_bytes: int) -> None:
    with pytest.raises(BadSegment):
        create(replace(plan, size_bytes=size_bytes))
    assert not plan.path.exists()


def test_what_the_superblock_says(attached: AttachedSegment, owned: OwnedSegment) -> None:
    owned.identify(8, epoch=1234)
    found = attached.superblock
    assert (found.node_id, found.incarnation, found.epoch, found.segment_index) == ("n1", 8, 1234, 0)
    assert (found.size_bytes, found.slab_bytes) == (4 * SLAB, SLAB)
    assert attached.epoch() == 1234
    owned.identify(8, epoch=1235)
    assert attached.epoch() == 1235


def test_attaching_something_else_is_refused(owned: OwnedSegment, tmp_path: Path) -> None:
    with pytest.raises(ProtocolError):
        AttachedSegment(owned.open_for_worker(1), 0, 2 * SLAB, SLAB)
    path = tmp_path / "other"
    path.write_bytes(bytes(file_bytes(SLAB, SLAB)))
    with pytest.raises(ProtocolError, match="magic"):
        AttachedSegment(os.open(path, os.O_RDWR), 0, SLAB, SLAB)
    path.write_bytes(b"short")
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(ProtocolError, match="5 bytes"):
        AttachedSegment(fd, 0, SLAB, SLAB)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_superblock_is_spoiled_only_if_both_copies_are(attached: AttachedSegment, owned: OwnedSegment) -> None:
    owned.identify(8, epoch=1234)
    said = attached.superblock
    for first, second in (SUPERBLOCK_COPIES, SUPERBLOCK_COPIES[::-1]):
        attached.memory[first + 100] ^= 1
        assert attached.superblock == said
        attached.memory[second + 20] ^= 1
        with pytest.raises(ProtocolError, match="check"):
            _ = attached.superblock
        owned.identify(8, epoch=1234)


def test_bypass_is_read_live_and_outlives_a_new_identity(attached: AttachedSegment, owned: OwnedSegment) -> None:
    contents = owned.contents
    owned.set_bypass(5)
    assert attached.bypass() == 5
    owned.identify(9, epoch=3)
    assert (attached.bypass(), attached.epoch()) == (5, 3)
    assert (attached.superblock.bypass, attached.superblock.contents) == (5, contents)


def test_close_with_views_around(owned: OwnedSegment) -> None:
    owned.bind_slab(0, SLOT)
    segment = AttachedSegment(owned.open_for_worker(9), 0, 4 * SLAB, SLAB)
    view = segment.slots(0, 2, SLOT)
    segment.close()
    segment.close()
    view[:] = 42
    assert owned.slots(0, 1, SLOT)[0, 0] == 42
    assert owned.held_by(9)
    for use in (lambda: segment.headers(0, 1, SLOT), segment.epoch, lambda: segment.superblock):
        with pytest.raises(SlabChanged, match="closed"):
            use()
    del view
    gc.collect()
    assert not owned.held_by(9)


# -- slabs ---------------------------------------------------------------------------------------------


def test_binding_clears_and_counts_generations(owned: OwnedSegment, attached: AttachedSegment) -> None:
    with pytest.raises(SlabChanged):
        attached.table(1)
    assert owned.bind_slab(1, SLOT) == 1
    assert attached.generation(1) == 1
    table = attached.table(1)
    assert len(table) == PER_SLAB
    table["stamp"] = 9
    assert owned.bind_slab(1, 2 * SLOT) == 2
    assert len(attached.table(1)) == slots_per_slab(SLAB, 2 * SLOT)
    assert not attached.table(1)["stamp"].any()
    assert attached.slab_record(0).slot_bytes == 0
    assert owned.slabs_bound == 1


def test_views_lie_where_the_geometry_says(owned: OwnedSegment, attached: AttachedSegment) -> None:
    owned.bind_slab(1, SLOT)
    first = PER_SLAB
    slots = attached.slots(first + 3, 2, SLOT)
    slots[:] = np.arange(2, dtype=np.uint8)[:, None] + 1
    start = (2 << 20) + SLAB + 4096 + 3 * SLOT
    assert attached.memory[start] == 1
    assert attached.memory[start + SLOT] == 2
    headers = attached.headers(first + 3, 2, SLOT)
    headers["stamp"] = [11, 12]
    assert attached.table(1)["stamp"].tolist()[3:5] == [11, 12]
    assert headers.flags.c_contiguous


def test_runs_stay_in_their_slab(owned: OwnedSegment, attached: AttachedSegment) -> None:
    for slab in range(4):
        owned.bind_slab(slab, SLOT)
    for first, n in ((PER_SLAB - 1, 2), (0, 0), (4 * PER_SLAB, 1), (-1, 1), (0, PER_SLAB + 1)):
        with pytest.raises(ProtocolError):
            attached.headers(first, n, SLOT)
        with pytest.raises(ProtocolError):
            attached.slots(first, n, SLOT)
    for slot_bytes in (0, -4096, 100, SLAB, 1 << 40):
        with pytest.raises(ProtocolError):
            attached.headers(0, 1, slot_bytes)
    assert len(attached.headers(0, PER_SLAB, SLOT)) == PER_SLAB


def test_another_slot_size_is_told(owned: OwnedSegment, attached: AttachedSegment) -> None:
    owned.bind_slab(0, SLOT)
    attached.headers(0, 1, SLOT)
    owned.bind_slab(0, 2 * SLOT)
    with pytest.raises(SlabChanged, match="131072"):
        attached.headers(0, 1, SLOT)


def test_a_spoiled_record_is_told_and_the_owner_keeps_its_account(
    owned: OwnedSegment, attached: AttachedSegment
) -> None:
    owned.bind_slab(0, SLOT)
    attached.memory[SUPERBLOCK_BYTES] ^= 0xFF
    with pytest.raises(SlabChanged):
        attached.headers(0, 1, SLOT)
    assert owned.bind_slab(0, SLOT) == 2
    assert attached.generation(0) == 2


@pytest.mark.parametrize(("slab", "slot_bytes"), [(4, SLOT), (-1, SLOT), (0, SLAB), (0, 0), (0, 5000)])
def test_impossible_bindings_are_refused(owned: OwnedSegment, slab: int, slot_bytes: int) -> None:
    with pytest.raises(ProtocolError):
        owned.bind_slab(slab, slot_bytes)
    assert owned.slabs_bound == 0


# -- clearing ------------------------------------------------------------------------------------------


def stamps(segment: OwnedSegment, slab: int) -> list[int]:
    return segment.table(slab)["stamp"].tolist()


def test_only_headers_that_show_the_stamp_are_cleared(owned: OwnedSegment) -> None:
    for slab in (0, 1):
        owned.bind_slab(slab, SLOT)
    last = PER_SLAB - 1
    for slot, stamp in ((0, 5), (1, 6), (2, 5), (last, 5), (PER_SLAB, 5), (PER_SLAB + 1, 5)):
        write_block(owned, slot, b"x", stamp=stamp)
    write_block(owned, 3, b"x", stamp=5, state=WRITING)
    for slot, stamp in ((4, 5), (6, 7)):
        write_block(owned, slot, b"x", stamp=stamp, state=WRITING, worker_id=PEER_WRITER)
    assert owned.clear_slots(SLOT, [(0, 7, 5), (last, 2, 5), (2 * PER_SLAB, PER_SLAB, 5)]) == 5
    assert stamps(owned, 0) == [0, 6, 0, 5, 0, 0, 7, *[0] * (PER_SLAB - 7)], "what a worker writes is left alone"
    assert stamps(owned, 1) == [0, 5, *[0] * (PER_SLAB - 2)]
    assert not owned.table(0)[0].tobytes().strip(b"\0")
    assert owned.clear_slots(SLOT, [(0, 4, 5)]) == 0
    assert owned.clear_slots(2 * SLOT, [(0, 2, 5)]) == 0, "the slab is bound to another size"


@pytest.mark.parametrize("run", [(-1, 2, 5), (0, 0, 5), (4 * PER_SLAB - 1, 2, 5)])
def test_runs_that_cannot_be_clear_nothing(owned: OwnedSegment, run: tuple[int, int, int]) -> None:
    owned.bind_slab(0, SLOT)
    write_block(owned, 0, b"x", stamp=5)
    with pytest.raises(ProtocolError):
        owned.clear_slots(SLOT, [(0, 1, 5), run])
    with pytest.raises(ProtocolError):
        owned.clear_slots(5000, [(0, 1, 5)])
    assert stamps(owned, 0)[0] == 5


def test_burying_spares_other_namespaces_newer_stamps_and_writers(owned: OwnedSegment) -> None:
    owned.bind_slab(0, SLOT)
    owned.bind_slab(3, SLOT)
    write_block(owned, 0, b"x", stamp=5)
    write_block(owned, 1, b"x", stamp=6)
    write_block(owned, 2, b"x", stamp=7)
    write_block(owned, 3, b"x", stamp=5, state=WRITING)
    write_block(owned, 4, b"x", stamp=5, namespace=b"n" * 15 + b"m")
    write_block(owned, 3 * PER_SLAB, b"x", stamp=1)
    assert owned.bury(b"n" * 16, 6) == 3
    assert stamps(owned, 0)[:5] == [0, 0, 7, 5, 5]
    assert stamps(owned, 3)[0] == 0
    assert owned.bury(b"n" * 16, 6) == 0


# -- owners and workers --------------------------------------------------------------------------------


def test_a_file_that_is_not_ours_is_left_alone(plan: SegmentPlan) -> None:
    target = plan.directory / "target"
    target.write_bytes(b"")
    plan.path.symlink_to(target)
    with pytest.raises(StartError, match="segment_dir"):
        create(plan)
    assert target.exists()


def test_unlink_spares_a_successor(plan: SegmentPlan) -> None:
    segment = create(plan)
    plan.path.unlink()
    plan.path.write_bytes(b"successor")
    segment.unlink()
    segment.close()
    assert plan.path.read_bytes() == b"successor"


def test_a_workers_lock_lives_as_long_as_its_mapping(owned: OwnedSegment) -> None:
    first = AttachedSegment(owned.open_for_worker(1), 0, 4 * SLAB, SLAB)
    second = AttachedSegment(owned.open_for_worker(2), 0, 4 * SLAB, SLAB)
    owned.unlink()
    third = AttachedSegment(owned.open_for_worker(3), 0, 4 * SLAB, SLAB)
    assert [owned.held_by(worker) for worker in (1, 2, 3, 4)] == [True, True, True, False]
    first.close()
    assert [owned.held_by(worker) for worker in (1, 2, 3, 4)] == [False, True, True, False]
    second.close()
    third.close()
    assert not any(owned.held_by(worker) for worker in (1, 2, 3, 4))


# -- huge pages and NUMA -------------------------------------------------------------------------------


def test_huge_pages_are_tried_or_refused_in_words(plan: SegmentPlan) -> None:
    segment = create(replace(plan, huge_pages="try"))
    segment.unlink()
    segment.close()
    if pages.file_system_of(plan.directory) not in ("tmpfs", "hugetlbfs"):
        with pytest.raises(StartError, match="huge_pages = try"):
            create(replace(plan, huge_pages="on"))


def test_a_numa_node_that_is_not_there_is_refused(plan: SegmentPlan) -> None:
    with pytest.raises(StartError, match="numa_node"):
        create(replace(plan, numa_node=1000))
    assert not plan.path.exists()


@pytest.mark.skipif(not Path("/sys/devices/system/node/node0").is_dir(), reason="no NUMA here")
def test_memory_can_be_bound_to_a_node(plan: SegmentPlan) -> None:
    try:
        segment = create(replace(plan, numa_node=0))
    except StartError as refused:
        assert "mbind says" in str(refused)  # noqa: PT017 - kernels without NUMA policies
        return
    segment.unlink()
    segment.close()
