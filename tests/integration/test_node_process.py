"""The node client as a process of its own: signals, kills, errors at the start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.node_world import KEYS, SLOT, bound, gone, reported, until
from integration.nodes_double import WAIT_S, NodesDouble
from kvpool_client.config import NodeConfig
from kvpool_proto import pool_pb2 as pb


class Process:
    """`python -m kvpool_client` with its log lines."""

    def __init__(self, config: NodeConfig, *flags: str, **environment: str) -> None:
        argv = [sys.executable, "-m", "kvpool_client", "serve", "--master", config.master, "--node-id", "n1"]
        argv += ["--segment-dir", config.segment_dir, "--segment-bytes", "4MiB", "--slab-bytes", "1MiB"]
        argv += ["--socket-path", config.socket_path, "--http", "127.0.0.1:0", "--data-listen", "127.0.0.1:0"]
        argv += ["--plaintext", *flags]
        self.lines: list[str] = []
        self._process = subprocess.Popen(argv, stderr=-1, text=True, env={**os.environ, **environment})
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_line(self, word: str) -> str:
        return until(lambda: next((line for line in self.lines if word in line), None))

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill_if_alive(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self.ended()

    def ended(self) -> int:
        code = self._process.wait(WAIT_S)
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()
        return code

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.lines.append(line.rstrip())


Launch = Callable[..., Process]


@pytest.fixture
def launch(node_config: NodeConfig) -> Iterator[Launch]:
    processes: list[Process] = []

    def start(*flags: str, **environment: str) -> Process:
        processes.append(Process(node_config, *flags, **environment))
        return processes[-1]

    yield start
    for process in processes:
        process.kill_if_alive()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly(
    launch: Launch, node_config: NodeConfig, nodes_double: NodesDouble, number: int, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(WAIT_S)
        process = launch(NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert systemd.recv(100) == b"READY=1"
        line = process.wait_line("ready")
        assert f"socket={node_config.socket_path}" in line
        assert "state=serving" in line
        process.signal(number)
        assert systemd.recv(100) == b"STOPPING=1"
    assert process.ended() == 0
    assert not nodes_double.retired
    assert [path.name for path in Path(node_config.segment_dir).iterdir()] == ["kvpool-n1-0.seg"]
    assert not Path(node_config.socket_path).exists()


def test_a_service_manager_that_is_not_there_disturbs_nothing(
    launch: Launch, node_config: NodeConfig, nodes_double: NodesDouble, tmp_path: Path
) -> None:
    process = launch("--discard", NOTIFY_SOCKET=str(tmp_path / "nobody"))
    process.wait_line("ready")
    process.signal(signal.SIGTERM)
    assert process.ended() == 0
    assert len(nodes_double.retired) == 1
    assert not list(Path(node_config.segment_dir).iterdir())


WORKER = """
import sys, time
from kvpool_client.local_socket import LocalClient
from integration.node_world import store
welcome = LocalClient(sys.argv[1], 5).hello("worker")
for block in range(3):
    store(welcome.segments[0], 1 + block, block=block)
store(welcome.segments[0], 9, block=3, state=1, worker_id=welcome.worker_id)
print(welcome.worker_id, flush=True)
time.sleep(100)
"""


@pytest.fixture
def worker(node_config: NodeConfig) -> Iterator[Callable[[], tuple[subprocess.Popen[str], int]]]:
    """Starts a worker process that stores three blocks and is writing a fourth; its id."""
    processes: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], int]:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        argv = [sys.executable, "-c", WORKER, node_config.socket_path]
        processes.append(subprocess.Popen(argv, stdout=-1, text=True, env=environment))
        assert processes[-1].stdout is not None
        return processes[-1], int(processes[-1].stdout.readline())

    yield start
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def ready_with_a_slab(process: Process, master: NodesDouble) -> None:
    process.wait_line("ready")
    master.order(pb.BindSlab(segment=100, slab=0, slot_bytes=SLOT))
    master.wait(lambda: bound(master))


def writing(chunks: list[pb.InventoryChunk]) -> list[tuple[int, ...]]:
    return [(*w.first_slot, *w.slots, *w.worker_id) for chunk in chunks for w in chunk.writing]


@pytest.mark.parametrize("stopped", [False, True])
def test_the_next_life_adopts_what_a_killed_one_left(
    launch: Launch, nodes_double: NodesDouble, worker: Callable[[], tuple[subprocess.Popen[str], int]], stopped: bool
) -> None:
    """A worker lives through it, running or stopped, and its death afterwards is told."""
    first = launch()
    ready_with_a_slab(first, nodes_double)
    process, worker_id = worker()
    if stopped:
        process.send_signal(signal.SIGSTOP)
    first.signal(signal.SIGKILL)
    first.ended()
    second = launch()
    second.wait_line("ready")
    assert "adopted=true" in second.wait_line("segment_opened")
    former, again = nodes_double.registered
    assert again.incarnation > former.incarnation
    assert again.segments[0].contents == former.segments[0].contents
    assert (again.segments[0].holds, again.epoch_seen) == (True, 10)
    nodes_double.ask_inventory(1)
    chunks = nodes_double.wait(lambda: nodes_double.inventories.get(1))
    assert reported(chunks) == {b"".join(KEYS[:3]): [(100, 1, 3)]}
    assert writing(chunks) == [(9, 1, worker_id)]
    assert not gone(nodes_double)
    process.kill()
    nodes_double.wait(lambda: gone(nodes_double) == {worker_id})
    nodes_double.ask_inventory(2)
    assert writing(nodes_double.wait(lambda: nodes_double.inventories.get(2))) == []


def test_a_worker_that_died_with_the_node_client_is_told_when_asked(
    launch: Launch, nodes_double: NodesDouble, worker: Callable[[], tuple[subprocess.Popen[str], int]]
) -> None:
    first = launch()
    ready_with_a_slab(first, nodes_double)
    process, worker_id = worker()
    first.signal(signal.SIGKILL)
    first.ended()
    process.kill()
    process.wait()
    launch().wait_line("ready")
    nodes_double.send(pb.SessionDown(epoch=10, ask_workers=[worker_id]))
    nodes_double.wait(lambda: gone(nodes_double) == {worker_id})


def test_a_clean_stop_keeps_everything_for_the_next_life(
    launch: Launch, node_config: NodeConfig, nodes_double: NodesDouble, worker: Callable[[], object]
) -> None:
    first = launch()
    ready_with_a_slab(first, nodes_double)
    worker()
    first.signal(signal.SIGTERM)
    assert first.ended() == 0
    second = launch("--discard")
    second.wait_line("ready")
    nodes_double.ask_inventory(1)
    chunks = nodes_double.wait(lambda: nodes_double.inventories.get(1))
    assert chunks[-1].end.blocks == 3
    second.signal(signal.SIGTERM)
    assert second.ended() == 0
    assert not list(Path(node_config.segment_dir).iterdir())


def test_another_size_makes_the_file_anew(launch: Launch, nodes_double: NodesDouble) -> None:
    first = launch()
    ready_with_a_slab(first, nodes_double)
    first.signal(signal.SIGKILL)
    first.ended()
    second = launch("--segment-bytes", "2MiB")
    second.wait_line("ready")
    assert "adopted=false" in second.wait_line("segment_opened")
    former, again = nodes_double.registered
    assert again.segments[0].contents != former.segments[0].contents
    assert not again.segments[0].holds
    assert again.incarnation > former.incarnation


def test_two_of_one_id(launch: Launch) -> None:
    launch().wait_line("ready")
    second = launch()
    assert second.ended() == 1
    assert len(second.lines) == 1
    assert "belongs to a running node client" in second.lines[0]


def sweep(node_config: NodeConfig, *flags: str) -> list[list[str]]:
    argv = [sys.executable, "-m", "kvpool_client", "sweep", "--segment-dir", node_config.segment_dir, *flags]
    output = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=WAIT_S).stdout
    return [line.split() for line in output.splitlines()]


def test_sweeping_removes_what_nobody_owns(launch: Launch, node_config: NodeConfig, nodes_double: NodesDouble) -> None:
    assert sweep(node_config) == [["PATH", "NODE", "MIB", "OWNER", "WORKERS"]]
    process = launch()
    process.wait_line("ready")
    path = f"{node_config.segment_dir}/kvpool-n1-0.seg"
    assert sweep(node_config, "--remove")[1:] == [[path, "n1", "6", "alive", "0"]]
    process.signal(signal.SIGKILL)
    process.ended()
    assert sweep(node_config)[1:] == [[path, "n1", "6", "none", "0"]]
    assert Path(path).exists()
    assert sweep(node_config, "--remove")[1:] == [[path, "n1", "6", "removed", "0"]]
    assert not Path(path).exists()


def test_errors_at_the_start_are_one_line(launch: Launch) -> None:
    process = launch("--segment-bytes", "3MiB", "--slab-bytes", "2MiB")
    assert process.ended() == 1
    assert len(process.lines) == 1
    assert process.lines[0].startswith("kvpool-client: size_bytes = 3145728: a positive multiple")


def test_in_dev_shm(launch: Launch) -> None:
    node_id = f"test-{os.getpid()}"
    process = launch("--segment-dir", "/dev/shm", "--node-id", node_id, "--discard")
    process.wait_line("ready")
    assert Path(f"/dev/shm/kvpool-{node_id}-0.seg").exists()
    process.signal(signal.SIGTERM)
    assert process.ended() == 0
    assert not [path for path in Path("/dev/shm").iterdir() if node_id in path.name]
