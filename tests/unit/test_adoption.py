"""A dead owner's file: what is taken over, what is dropped, and what is left alone."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool_client.adoption import Adoption
from kvpool_client.headers import PEER_WRITER, SLAB_RECORD, SUPERBLOCK_COPIES, WRITING, record_check
from kvpool_client.owned_segment import OwnedSegment, SegmentPlan, remove_leftovers
from kvpool_client.start_error import StartError
from kvpool_client.workers import Workers
from kvpool_proto.errors import SlabChanged
from kvpool_proto.geometry import SLAB_RECORD_BYTES, SUPERBLOCK_BYTES, file_bytes
from unit.segment_world import PER_SLAB, SLAB, SLABS, SLOT, adopt, create, opened, plan_in, worker_of, write_block

KEPT = Adoption(kept=True)


@pytest.fixture
def plan(tmp_path: Path) -> SegmentPlan:
    return plan_in(tmp_path)


def filled(plan: SegmentPlan) -> OwnedSegment:
    """Slabs 0 and 2 bound, with two blocks each."""
    segment = create(plan)
    segment.identify(7, epoch=40)
    for slab in (0, 2):
        segment.bind_slab(slab, SLOT)
        for slot in (slab * PER_SLAB, slab * PER_SLAB + 3):
            write_block(segment, slot, b"block %d" % slot, stamp=1 + slot)
    return segment


def states(segment: OwnedSegment, slab: int) -> list[int]:
    return segment.table(slab)["state"].tolist()[:5]


# -- sound files ---------------------------------------------------------------------------------------


def test_a_sound_file_goes_on(plan: SegmentPlan) -> None:
    former = filled(plan)
    former.set_bypass(6)
    contents, before, inode = former.contents, former.memory.copy(), plan.path.stat().st_ino
    former.close()
    with opened(adopt(plan)) as segment:
        assert segment.adoption == KEPT
        assert plan.path.stat().st_ino == inode
        assert (segment.contents, segment.former_incarnation, segment.epoch_seen) == (contents, 7, 40)
        assert (segment.holds, segment.slabs_bound, segment.bypass()) == (True, 2, 6)
        said = segment.superblock
        assert (said.incarnation, said.epoch, said.contents, said.bypass) == (8, 40, contents, 6)
        assert np.array_equal(segment.memory[SUPERBLOCK_BYTES:], before[SUPERBLOCK_BYTES:])
        assert segment.bind_slab(0, SLOT) == 2, "generations go on"


def test_an_incarnation_never_falls(plan: SegmentPlan) -> None:
    former = create(plan)
    former.identify(1000, epoch=1)
    former.close()
    with opened(adopt(plan)) as segment:  # asks for 8
        assert (segment.former_incarnation, segment.superblock.incarnation) == (1000, 1001)


def test_no_file_is_made_anew(plan: SegmentPlan) -> None:
    with opened(adopt(plan)) as segment:
        assert segment.adoption == Adoption(kept=False, why="")
        assert (segment.holds, segment.former_incarnation, segment.epoch_seen) == (False, 0, 0)
        assert segment.contents != 0


def test_adoption_again_and_again_changes_nothing(plan: SegmentPlan) -> None:
    former = filled(plan)
    contents = former.contents
    former.close()
    for incarnation in (8, 9, 10):
        segment = adopt(plan)
        assert (segment.adoption, segment.contents, segment.superblock.incarnation) == (KEPT, contents, incarnation)
        segment.close()
    with opened(adopt(plan)) as segment:
        assert states(segment, 2) == [2, 0, 0, 2, 0]


def test_missing_pages_are_there_again(plan: SegmentPlan) -> None:
    filled(plan).close()
    fd = os.open(plan.path, os.O_RDWR)
    tail = os.pread(fd, SLAB, SLAB)
    os.ftruncate(fd, 2 * SLAB)
    os.pwrite(fd, tail, SLAB)
    os.ftruncate(fd, file_bytes(SLABS * SLAB, SLAB))
    os.close(fd)
    with opened(adopt(plan)):
        found = plan.path.stat()
        assert found.st_blocks * 512 >= found.st_size


# -- whole files that are dropped ----------------------------------------------------------------------


def spoil_superblocks(plan: SegmentPlan) -> None:
    with plan.path.open("r+b") as file:
        for start in SUPERBLOCK_COPIES:
            file.seek(start + 30)
            file.write(b"?")


def cut_short(plan: SegmentPlan) -> None:
    os.truncate(plan.path, 2 * SLAB)


def lengthen(plan: SegmentPlan) -> None:
    os.truncate(plan.path, file_bytes(SLABS * SLAB, SLAB) + 4096)


def empty(plan: SegmentPlan) -> None:
    os.truncate(plan.path, 0)


@pytest.mark.parametrize(
    ("damage", "why"),
    [(spoil_superblocks, "check fails"), (cut_short, "bytes, not"), (lengthen, "bytes, not"), (empty, "0 bytes, not")],
)
def test_a_file_that_cannot_be_ours_is_dropped_and_mappings_stay(plan: SegmentPlan, damage: Any, why: str) -> None:
    former = filled(plan)
    contents = former.contents
    former.close()
    fd = os.open(plan.path, os.O_RDWR)
    damage(plan)
    with opened(adopt(plan)) as segment:
        assert not segment.adoption.kept
        assert why in segment.adoption.why
        assert not segment.holds
        assert segment.contents != contents
        assert os.fstat(fd).st_nlink == 0, "another file: who has the former one mapped keeps it"
        assert segment.superblock.incarnation == 8
    os.close(fd)


@pytest.mark.parametrize(
    "changes", [{"node_id": "n2"}, {"index": 1}, {"slab_bytes": SLAB // 2, "size_bytes": SLABS * SLAB}]
)
def test_a_file_of_another_plan_is_dropped(plan: SegmentPlan, changes: dict[str, Any]) -> None:
    filled(plan).close()
    other = replace(plan, **changes)
    if other.path != plan.path:
        plan.path.rename(other.path)
    with opened(adopt(other)) as segment:
        assert not segment.adoption.kept
        assert "not segment" in segment.adoption.why or "bytes, not" in segment.adoption.why


@pytest.mark.parametrize("copy", SUPERBLOCK_COPIES)
def test_one_copy_of_the_superblock_is_enough(plan: SegmentPlan, copy: int) -> None:
    former = filled(plan)
    former.memory[copy + 10] ^= 1
    former.close()
    with opened(adopt(plan)) as segment:
        assert segment.adoption == KEPT
        assert segment.epoch() == segment.epoch_seen == 40
        segment.memory[SUPERBLOCK_COPIES[0] + 10] ^= 1  # both were written again
        assert segment.superblock.node_id == "n1"


# -- slabs ---------------------------------------------------------------------------------------------


def reseal(segment: OwnedSegment, slab: int, **fields: int) -> None:
    """A record that says something else, with a check that agrees."""
    start = SUPERBLOCK_BYTES + slab * SLAB_RECORD_BYTES
    record = segment.memory[start : start + SLAB_RECORD_BYTES].view(SLAB_RECORD)
    for name, value in fields.items():
        record[name] = value
    record["check"] = record_check(record.copy())


def spoil_record(segment: OwnedSegment) -> None:
    segment.memory[SUPERBLOCK_BYTES + 2 * SLAB_RECORD_BYTES] ^= 1


@pytest.mark.parametrize(
    "damage",
    [
        spoil_record,
        lambda segment: reseal(segment, 2, slots=PER_SLAB + 1),
        lambda segment: reseal(segment, 2, slot_bytes=SLAB, slots=0),
        lambda segment: reseal(segment, 2, slot_bytes=5000, slots=0),
        lambda segment: reseal(segment, 2, slot_bytes=0),
    ],
)
def test_a_slab_with_a_bad_record_holds_nothing_any_more(plan: SegmentPlan, damage: Any) -> None:
    former = filled(plan)
    contents = former.contents
    damage(former)
    former.close()
    segment = adopt(plan)
    assert segment.adoption == Adoption(kept=True, slabs_dropped=1)
    assert segment.contents not in (contents, 0)
    assert segment.superblock.contents == segment.contents
    assert (segment.slabs_bound, states(segment, 0)) == (1, [2, 0, 0, 2, 0])
    with pytest.raises(SlabChanged):
        segment.table(2)
    contents = segment.contents
    segment.close()
    with opened(adopt(plan)) as again:  # the loss is over
        assert (again.adoption, again.contents) == (KEPT, contents)
        generation = again.bind_slab(2, SLOT)
        assert generation > 1 << 62
        assert not again.table(2)["state"].any()


# -- slots ---------------------------------------------------------------------------------------------


def tear(segment: OwnedSegment, slot: int) -> None:
    segment.headers(slot, 1, SLOT).view(np.uint8)[40] ^= 1


def test_torn_headers_are_cleared(plan: SegmentPlan) -> None:
    former = filled(plan)
    contents = former.contents
    tear(former, 3)
    former.headers(5, 1, SLOT)["stamp"] = 9
    write_block(former, 2 * PER_SLAB, b"x", part=2000)  # sealed nonsense
    write_block(former, 2 * PER_SLAB + 1, b"x", length_bytes=SLOT + 1)
    former.close()
    with opened(adopt(plan)) as segment:
        assert segment.adoption == Adoption(kept=True, slots_dropped=4)
        assert (states(segment, 0), states(segment, 2)) == ([2, 0, 0, 0, 0], [0, 0, 0, 2, 0])
        assert not segment.table(0)[5].tobytes().strip(b"\0")
        assert segment.contents not in (contents, 0), "who counts on the slot has to ask anew"


def test_a_torn_header_under_a_live_worker_stays(plan: SegmentPlan) -> None:
    former = filled(plan)
    contents = former.contents
    worker = worker_of(former)
    tear(former, 3)
    before = former.table(0).copy()
    former.close()
    segment = adopt(plan)
    assert (segment.adoption, segment.contents) == (KEPT, contents)
    assert np.array_equal(segment.table(0), before)
    assert segment.mapped_workers() == {5}
    segment.close()
    worker.close()
    with opened(adopt(plan)) as segment:
        assert (segment.adoption.slots_dropped, segment.mapped_workers()) == (1, set())


def test_slots_being_written_stay(plan: SegmentPlan) -> None:
    former = filled(plan)
    write_block(former, 1, b"x", state=WRITING, worker_id=5)
    former.close()
    with opened(adopt(plan)) as segment:
        assert (segment.adoption, states(segment, 0)) == (KEPT, [2, 1, 0, 2, 0])


def test_what_peers_were_writing_is_cleared_and_what_they_wrote_stays(plan: SegmentPlan) -> None:
    former = filled(plan)
    contents = former.contents
    worker = worker_of(former)
    for slot in (1, 2, 2 * PER_SLAB + 4):
        write_block(former, slot, b"x", state=WRITING, worker_id=PEER_WRITER)
    write_block(former, 4, b"x", worker_id=PEER_WRITER)
    former.close()
    segment = adopt(plan)
    assert segment.adoption == Adoption(kept=True, writes_dropped=3)
    assert (states(segment, 0), states(segment, 2)) == ([2, 0, 0, 2, 2], [2, 0, 0, 2, 0])
    assert segment.contents == contents, "what was never confirmed is no loss"
    segment.close()
    worker.close()
    with opened(adopt(plan)) as again:
        assert again.adoption == KEPT


def test_workers_see_the_next_life_and_are_watched_by_it(plan: SegmentPlan) -> None:
    former = filled(plan)
    worker, gone = worker_of(former, 5), worker_of(former, 6)
    former.close()
    gone.close()
    with opened(adopt(plan)) as segment:
        assert worker.superblock.incarnation == 8
        workers = Workers([segment], workers_max=2)
        assert (workers.attached, workers.poll()) == (1, [])
        assert workers.gone_of([6, 5, 0, PEER_WRITER, 1 << 63]) == [6, 0, 1 << 63]
        segment.identify(9, epoch=41)
        assert worker.epoch() == 41
        worker.close()
        assert workers.poll() == [(5, "adopted")]
        assert (workers.poll(), workers.gone_total, workers.attached) == ([], 1, 0)


# -- owners and leftovers ------------------------------------------------------------------------------


def test_a_live_owner_keeps_its_file(plan: SegmentPlan) -> None:
    with opened(filled(plan)) as owned:
        before = owned.memory.copy()
        for start in (adopt, create):
            with pytest.raises(StartError, match="another node_id"):
                start(plan)
        with pytest.raises(StartError, match="another node_id"):
            remove_leftovers([replace(plan, index=1)])
        assert np.array_equal(owned.memory, before)
        assert plan.path.exists()


def test_a_closed_segment_has_no_owner_though_views_live(plan: SegmentPlan) -> None:
    former = filled(plan)
    table = former.table(0)
    former.close()
    with opened(adopt(plan)) as segment:
        assert segment.adoption == KEPT
        assert table["state"][0] == 2


def test_create_takes_no_file_over(plan: SegmentPlan) -> None:
    filled(plan).close()
    with pytest.raises(StartError, match="appeared meanwhile"):
        create(plan)
    with opened(adopt(plan)) as segment:
        assert segment.adoption == KEPT


def test_no_room_leaves_the_file_as_it_was(plan: SegmentPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    filled(plan).close()
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StartError, match="lower segment_bytes"):
            adopt(plan)
    with opened(adopt(plan)) as segment:
        assert (segment.adoption, segment.former_incarnation) == (KEPT, 7)


def test_leftovers_of_this_node_go(plan: SegmentPlan) -> None:
    spared = ["kvpool-n1-x-0.seg", "kvpool-n10-0.seg", "kvpool-n1-3.seg.bak", "kvpool-n1-0.seg", "kvpool-n1-1.seg"]
    for name in (*spared, "kvpool-n1-2.seg", "kvpool-n1-30.seg"):
        (plan.directory / name).write_bytes(b"12345")
    removed = remove_leftovers([plan, replace(plan, index=1)])
    assert removed == [(plan.directory / name, 5) for name in ("kvpool-n1-2.seg", "kvpool-n1-30.seg")]
    assert sorted(path.name for path in plan.directory.iterdir()) == sorted(spared)
