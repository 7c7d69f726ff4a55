"""Finding segment files without a living owner, and removing just those."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvpool_client.owned_segment import SegmentPlan
from kvpool_client.sweep import find, remove
from unit.segment_world import create, opened, plan_in, worker_of


@pytest.fixture
def plan(tmp_path: Path) -> SegmentPlan:
    return plan_in(tmp_path)


def test_what_is_found(plan: SegmentPlan) -> None:
    create(replace(plan, node_id="n-2.x", index=12)).close()
    spoiled = plan.directory / "kvpool-a-0.seg"
    spoiled.write_bytes(b"x" * 5000)
    (plan.directory / "kvpool-b-0.seg").symlink_to(spoiled)
    (plan.directory / "kvpool-c-0.seg").mkdir()
    (plan.directory / "kvpool-d.seg").write_bytes(b"")
    (plan.directory / "kvpool-e-0.seg").write_bytes(b"")
    with opened(create(plan)) as owned:
        workers = [worker_of(owned, worker_id) for worker_id in (3, 4)]
        found = [(file.path.name, file.node_id, file.index, file.owned, file.workers) for file in find(plan.directory)]
        assert found == [
            ("kvpool-a-0.seg", "a", 0, False, 0),
            ("kvpool-e-0.seg", "e", 0, False, 0),
            ("kvpool-n-2.x-12.seg", "n-2.x", 12, False, 0),
            ("kvpool-n1-0.seg", "n1", 0, True, 2),
        ]
        sound = {file.node_id: (file.sound, file.length_bytes) for file in find(plan.directory)}
        length = plan.path.stat().st_size
        assert sound == {"a": (False, 5000), "e": (False, 0), "n-2.x": (True, length), "n1": (True, length)}
        for worker in workers:
            worker.close()


def test_only_files_without_an_owner_go(plan: SegmentPlan) -> None:
    create(replace(plan, node_id="n2")).close()
    owned = create(plan)
    dead, live = sorted(find(plan.directory), key=lambda file: file.owned)
    assert (remove(live), remove(dead), remove(dead)) == (False, True, False)
    assert [file.path for file in find(plan.directory)] == [plan.path]
    owned.close()
    assert remove(live), "what counts is the lock now"
    assert list(plan.directory.iterdir()) == []


def test_a_successor_under_the_same_name_is_spared(plan: SegmentPlan) -> None:
    create(plan).close()
    (dead,) = find(plan.directory)
    plan.path.unlink()
    with opened(create(plan)):
        assert not remove(dead)
        assert plan.path.exists()


def test_no_such_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        find(tmp_path / "nowhere")
