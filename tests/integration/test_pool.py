"""The whole pool: a Master, a node client and workers, each a process of its own."""

from __future__ import annotations

import mmap
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from integration.master_client import TIMEOUT_S, Client, until
from integration.pool_worker import PART_BYTES, SPEC, chain, pattern
from integration.processes import MasterProcess, NodeProcess
from kvpool_client import Contiguous, KVPool
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.security import PLAINTEXT

MIB = 1 << 20
WORKER = Path(__file__).with_name("pool_worker.py")
SIZES = ("--segment-bytes", str(32 * MIB), "--slab-bytes", str(4 * MIB), "--node-id", "stack")
FILES = ("kvpool-stack-0.seg",)
"""What a clean stop keeps."""


@dataclass
class Stack:
    """A running pool; its parts may be replaced by the test."""

    master: MasterProcess
    node: NodeProcess
    folder: Path
    kept: Sequence[str] = FILES

    def start_master(self) -> None:
        """The next life of the Master, at the same address."""
        self.master = MasterProcess(port=self.master.grpc_port, state_dir=self.master.state_dir)

    def start_node(self, *flags: str) -> None:
        """The next life of the node client."""
        self.kept = () if "--discard" in flags else FILES
        self.node = NodeProcess(self.master.address, self.folder, *SIZES, *flags)

    def files(self) -> tuple[str, ...]:
        """What lies in the folder of the segments."""
        return tuple(path.name for path in self.node.segments.iterdir())

    def command(self, verb: str, blocks: int, seed: int = 1) -> list[str]:
        words = [self.master.address, self.node.socket_path, verb, str(blocks), str(seed)]
        return [sys.executable, str(WORKER), *words]

    def work(self, verb: str, blocks: int, seed: int = 1) -> str:
        """Run a worker to its end; what it said."""
        done = subprocess.run(self.command(verb, blocks, seed), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def segment(self) -> pb.SegmentStatus:
        """The Master's view of the node's segment; the directory is sound."""
        client = Client(self.master)
        try:
            client.sound()
            status = client.admin.Status(pb.StatusRequest(), timeout=TIMEOUT_S)
            return status.nodes[0].segments[0] if status.nodes else pb.SegmentStatus()
        finally:
            client.close()


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    master = MasterProcess(state_dir=tmp_path / "state")
    running = Stack(master, NodeProcess(master.address, tmp_path, *SIZES), tmp_path)
    yield running
    assert running.node.stop() == 0
    assert running.files() == running.kept, "a clean stop keeps its file, unless told to discard it"
    assert running.master.stop() == 0


def test_what_one_process_stores_another_loads(stack: Stack) -> None:
    assert stack.work("load", 40) == "0 unknown_key True"
    assert stack.work("store", 40) == "40"
    assert stack.work("load", 40) == "40  True"
    assert stack.work("load", 60) == "40 unknown_key True"
    assert stack.work("store", 60) == "20"
    assert stack.work("load", 60) == "60  True"
    assert stack.work("load", 60, seed=2) == "0 unknown_key True"


def test_more_than_the_pool_holds_is_evicted_and_never_wrong(stack: Stack) -> None:
    for seed in range(12):
        assert stack.work("store", 60, seed) == "60"
    loaded = [stack.work("load", 60, seed).split() for seed in range(12)]
    assert all(words[-1] == "True" for words in loaded)
    assert loaded[-1][0] == "60"
    assert loaded[0][0] == "0"
    assert stack.segment().used_bytes <= 32 * MIB


def test_a_worker_killed_between_reserve_and_commit_leaves_nothing_held(stack: Stack) -> None:
    worker = subprocess.Popen(stack.command("die", 30), stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    with worker.stdout:
        assert worker.stdout.readline().strip() == "30"
        assert stack.segment().used_bytes > 0
        assert stack.work("store", 30) == "0 being_written"
        worker.kill()
        worker.wait(TIMEOUT_S)
    until(lambda: stack.segment().used_bytes == 0)
    assert stack.segment().quarantined_bytes == 0
    assert stack.work("store", 30) == "30"
    assert stack.work("load", 30) == "30  True"


def test_a_killed_master_is_a_miss_until_its_next_life_has_the_blocks_back(stack: Stack) -> None:
    data = [pattern(20, part, 1) for part in range(2)]
    with KVPool.connect(stack.master.address, stack.node.socket_path, timeout_ms=2_000, security=PLAINTEXT) as pool:
        space = pool.namespace(SPEC)
        assert space.store(chain(20, 1), [Contiguous(part) for part in data]).stored_blocks == 20
        stack.master.kill()
        assert space.lookup(chain(20, 1)).blocks == 0
        assert space.store(chain(20, 2), [Contiguous(part) for part in data]).stored_blocks == 0
        stack.start_master()
        until(lambda: space.peek(chain(20, 1)).blocks == 20)
        found = [np.zeros_like(part) for part in data]
        with space.lookup(chain(20, 1)) as hit:
            assert space.load(hit, [Contiguous(part) for part in found], part=range(2)).blocks == 20
        assert all(np.array_equal(a, b) for a, b in zip(found, data, strict=True))


def test_a_killed_node_client_is_a_miss_until_its_next_life_has_the_blocks_back(stack: Stack) -> None:
    assert stack.work("store", 20) == "20"
    stack.node.kill()
    until(lambda: stack.work("load", 20).split()[0] == "0")
    stack.start_node()
    assert stack.node.event("segment_opened")["adopted"]
    assert stack.work("load", 20) == "20  True"
    assert stack.work("store", 30) == "10"
    assert stack.work("load", 30) == "30  True"
    stack.segment()


@pytest.mark.parametrize("killed", [True, False])
def test_all_gone_at_once_and_everything_is_back(stack: Stack, killed: bool) -> None:
    assert stack.work("store", 20) == "20"
    for process in (stack.node, stack.master):
        assert (process.kill if killed else process.stop)() == (-signal.SIGKILL if killed else 0)
    assert stack.files() == FILES
    stack.start_master()
    stack.start_node()
    until(lambda: stack.work("load", 20) == "20  True")
    stack.segment()


def test_what_is_discarded_is_gone(stack: Stack) -> None:
    assert stack.work("store", 20) == "20"
    assert stack.node.stop() == 0
    stack.start_node("--discard")
    assert stack.work("load", 20) == "20  True"
    assert stack.node.stop() == 0
    assert stack.files() == ()
    stack.start_node("--discard")
    assert stack.work("load", 20) == "0 unknown_key True"


def test_bytes_that_rot_are_a_miss_and_then_replaced(stack: Stack) -> None:
    """The planted fault: one byte of one stored block changes under the readers."""
    assert stack.work("store", 20) == "20"
    rotten = pattern(20, 1, 1)[12].tobytes()
    with (
        (stack.node.segments / FILES[0]).open("r+b") as file,
        mmap.mmap(file.fileno(), 0) as memory,
    ):
        at = memory.find(rotten)
        memory[at + PART_BYTES // 2] ^= 1
    assert stack.work("load", 20) == "12 verify_failed True"
    until(lambda: stack.work("load", 20) == "12 hole True")
    assert stack.work("store", 20) == "1"
    assert stack.work("load", 20) == "20  True"


def test_the_example_of_the_readme(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_PLAINTEXT", "true")
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.+?)```", readme, re.DOTALL)
    code = code.replace("127.0.0.1:50051", stack.master.address).replace(
        "/run/kvpool/node.sock", stack.node.socket_path
    )
    names = {
        "chain": chain(4, 1),
        "blocks": np.arange(4 * 2 * MIB, dtype=np.uint32).astype(np.uint8).reshape(4, 2 * MIB),
        "destination": np.zeros((3, 2 * MIB), dtype=np.uint8),
        "in_hbm": 1,
    }
    exec(code, names)
    try:
        assert (names["stored"].stored_blocks, names["loaded"].blocks) == (4, 3)  # type: ignore[attr-defined]
        assert np.array_equal(names["destination"], names["blocks"][1:])  # type: ignore[index]
    finally:
        names["pool"].close()  # type: ignore[attr-defined]
