"""Kernel locks say which workers are there: through stops, kills, and other lives of the owner."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvpool_client import locks
from kvpool_client.locks import WORKER_ID_MAX
from kvpool_client.owned_segment import SegmentPlan
from kvpool_client.workers import Workers
from unit.segment_world import adopt, create, opened, plan_in

HOLD = """
import mmap, os, sys
fd = int(sys.argv[1])
memory = mmap.mmap(fd, 0)
os.close(fd)  # the mapping alone holds the lock
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def plan(tmp_path: Path) -> SegmentPlan:
    return plan_in(tmp_path)


@contextmanager
def worker_process(fd: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that maps the file of `fd`, which it takes over, until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(fd)], pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    os.close(fd)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


@pytest.mark.parametrize("count", [0, 1, 2, 500])
def test_all_locks_are_found(tmp_path: Path, count: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    fd = os.open(path, os.O_RDWR)
    chosen = random.Random(count)
    edges = [1, 2, 3, WORKER_ID_MAX, WORKER_ID_MAX - 1, WORKER_ID_MAX >> 1]
    ids = {*edges, *(chosen.randint(1, WORKER_ID_MAX) for _ in range(count))} if count > 1 else {*edges[:count]}
    held = {worker_id: locks.open_for_worker(fd, worker_id) for worker_id in ids}
    assert locks.worker_ids(fd) == ids
    for worker_id in list(ids)[::2]:
        os.close(held.pop(worker_id))
    assert locks.worker_ids(fd) == set(held)
    for each in (*held.values(), fd):
        os.close(each)


def test_a_stopped_worker_is_there_a_killed_one_is_not(plan: SegmentPlan) -> None:
    with opened(create(plan)) as owned, worker_process(owned.open_for_worker(5)) as process:
        assert owned.mapped_workers() == {5}
        stop(process)
        assert (owned.mapped_workers(), owned.held_by(5)) == ({5}, True)
        process.kill()
        process.wait()
        assert (owned.mapped_workers(), owned.held_by(5)) == (set(), False)


def test_the_owners_next_life_finds_and_watches_a_stopped_worker(plan: SegmentPlan) -> None:
    former = create(plan)
    with worker_process(former.open_for_worker(5)) as process:
        stop(process)
        former.close()
        with opened(adopt(plan)) as segment:
            workers = Workers([segment], workers_max=4)
            fd = workers.attach("another").fds[0]
            assert (workers.attached, workers.gone_of([5]), workers.poll()) == (2, [], [])
            process.kill()
            process.wait()
            assert (workers.poll(), workers.gone_of([5])) == ([(5, "adopted")], [5])
            os.close(fd)


def test_a_worker_of_an_unlinked_file_is_still_told_from_its_successors(plan: SegmentPlan) -> None:
    former = create(plan)
    with worker_process(former.open_for_worker(5)):
        plan.path.unlink()
        former.close()
        with opened(adopt(plan)) as segment:
            assert segment.adoption.why == ""
            assert segment.mapped_workers() == set()
