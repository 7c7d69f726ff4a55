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

from integration.node_world import until
from integration.nodes_double import WAIT_S, NodesDouble
from kvpool_client.config import NodeConfig
from kvpool_client.local_socket import LocalClient


class Process:
    """`python -m kvpool_client` with its log lines."""

    def __init__(self, config: NodeConfig, *flags: str, **environment: str) -> None:
        argv = [sys.executable, "-m", "kvpool_client", "serve", "--master", config.master, "--node-id", "n1"]
        argv += ["--segment-dir", config.segment_dir, "--segment-bytes", "4MiB", "--slab-bytes", "1MiB"]
        argv += ["--socket-path", config.socket_path, "--http", "127.0.0.1:0", *flags]
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
    assert len(nodes_double.retired) == 1
    assert not list(Path(node_config.segment_dir).iterdir())
    assert not Path(node_config.socket_path).exists()


def test_a_service_manager_that_is_not_there_disturbs_nothing(
    launch: Launch, node_config: NodeConfig, nodes_double: NodesDouble, tmp_path: Path
) -> None:
    process = launch(NOTIFY_SOCKET=str(tmp_path / "nobody"))
    process.wait_line("ready")
    process.signal(signal.SIGTERM)
    assert process.ended() == 0
    assert len(nodes_double.retired) == 1
    assert not list(Path(node_config.segment_dir).iterdir())


def test_what_a_killed_one_left_is_cleaned_up(
    launch: Launch, node_config: NodeConfig, nodes_double: NodesDouble
) -> None:
    first = launch()
    first.wait_line("ready")
    local = LocalClient(node_config.socket_path, 5)
    welcome = local.hello("w")
    first.signal(signal.SIGKILL)
    first.ended()
    assert len(list(Path(node_config.segment_dir).iterdir())) == 1
    welcome.segments[0].memory[-1] = 5
    second = launch()
    second.wait_line("stale_segment_removed")
    second.wait_line("ready")
    again = local.hello("w")
    assert again.incarnation > welcome.incarnation
    assert again.segments[0].memory[-1] == 0
    second.signal(signal.SIGTERM)
    assert second.ended() == 0
    assert not list(Path(node_config.segment_dir).iterdir())
    for segment in (*welcome.segments, *again.segments):
        segment.close()
    local.close()


def test_errors_at_the_start_are_one_line(launch: Launch) -> None:
    process = launch("--segment-bytes", "3MiB", "--slab-bytes", "2MiB")
    assert process.ended() == 1
    assert len(process.lines) == 1
    assert process.lines[0].startswith("kvpool-client: size_bytes = 3145728: a positive multiple")


def test_in_dev_shm(launch: Launch) -> None:
    node_id = f"test-{os.getpid()}"
    process = launch("--segment-dir", "/dev/shm", "--node-id", node_id)
    process.wait_line("ready")
    assert Path(f"/dev/shm/kvpool-{node_id}-0.seg").exists()
    process.signal(signal.SIGTERM)
    assert process.ended() == 0
    assert not [path for path in Path("/dev/shm").iterdir() if node_id in path.name]
