"""The node client, in this process and in one of its own, against a scripted Master on loopback."""

from __future__ import annotations

import io
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from integration.nodes_double import WAIT_S, NodesDouble
from kvpool_client.clock import SYSTEM
from kvpool_client.config import NodeConfig
from kvpool_client.daemon import Interrupted, NodeDaemon
from kvpool_client.headers import COMMITTED, slot_checks
from kvpool_client.local_socket import FRAME_BYTES_MAX, LocalClient
from kvpool_client.logs import Log
from kvpool_client.metrics import METRICS
from kvpool_client.segment import AttachedSegment
from kvpool_client.session import State
from kvpool_client.start_error import StartError
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import (
    BadSegment,
    LimitReached,
    MessageTooLarge,
    NodeIdTaken,
    ProtocolError,
    StaleIncarnation,
    UnknownNode,
    UnknownSegment,
    Unreachable,
)
from kvpool_proto.geometry import slots_per_slab

SLAB = 1 << 20
SLOT = 64 << 10

Make = Callable[..., NodeDaemon]


def until(what: Callable[[], Any]) -> Any:
    """Wait for something that happens in another thread or process and tells nobody."""
    end = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
    return found


@pytest.fixture
def master() -> Iterator[NodesDouble]:
    double = NodesDouble()
    yield double
    double.stop()


@pytest.fixture
def config(master: NodesDouble, tmp_path: Path) -> NodeConfig:
    (tmp_path / "shm").mkdir()
    return NodeConfig(
        master=master.address,
        node_id="n1",
        segment_dir=str(tmp_path / "shm"),
        segment_bytes=4 * SLAB,
        segments=2,
        slab_bytes=SLAB,
        socket_path=str(tmp_path / "node.sock"),
        http="127.0.0.1:0",
        local_timeout_ms=1_000,
        backoff_max_ms=100,
    )


@pytest.fixture
def make(config: NodeConfig) -> Iterator[Make]:
    """Starts node clients in this process; stops what is left of them."""
    daemons: list[NodeDaemon] = []

    def start(**changes: Any) -> NodeDaemon:
        daemon = NodeDaemon(replace(config, **changes), Log("debug", False, SYSTEM, io.StringIO()))
        daemon.start()
        daemons.append(daemon)
        return daemon

    yield start
    for daemon in daemons:
        daemon.stop()


@pytest.fixture
def daemon(make: Make) -> NodeDaemon:
    return make()


@pytest.fixture
def client(daemon: NodeDaemon, config: NodeConfig) -> Iterator[LocalClient]:
    local = LocalClient(config.socket_path, timeout_s=5)
    yield local
    local.close()


def bound(master: NodesDouble) -> list[pb.SlabBound]:
    return [slab for message in master.heard for slab in message.slabs_bound]


def gone(master: NodesDouble) -> set[int]:
    return {worker for message in master.heard for worker in message.workers_gone}


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


# -- life ----------------------------------------------------------------------------------------------


def test_offers_its_segments_beats_and_leaves_nothing_behind(
    make: Make, master: NodesDouble, config: NodeConfig
) -> None:
    daemon = make()
    (request,) = master.registered
    assert request.node_id == "n1"
    assert [(s.index, s.size_bytes, s.slab_bytes, s.numa_node) for s in request.segments] == [
        (0, 2 * SLAB, SLAB, -1),
        (1, 2 * SLAB, SLAB, -1),
    ]
    master.wait_heartbeats(3)
    assert get(daemon.http_port, "/readyz") == (200, "serving\n")
    assert len(list(Path(config.segment_dir).iterdir())) == 2
    daemon.stop()
    daemon.stop()
    assert [(r.node_id, r.incarnation) for r in master.retired] == [("n1", request.incarnation)]
    assert not list(Path(config.segment_dir).iterdir())
    assert not Path(config.socket_path).exists()


def test_starts_without_a_master_and_finds_it_later(make: Make, config: NodeConfig, master: NodesDouble) -> None:
    master.stop()
    daemon = make(ready_wait_ms=0)
    assert get(daemon.http_port, "/readyz") == (503, "joining\n")
    assert get(daemon.http_port, "/healthz") == (200, "alive\n")
    with closing(LocalClient(config.socket_path, 5)) as local, pytest.raises(Unreachable, match="not registered"):
        local.hello("early")
    later = NodesDouble(port=master.port)
    later.wait(lambda: later.registered)
    assert daemon.registration.serving.wait(WAIT_S)
    daemon.stop()
    later.stop()


def test_two_of_one_id_on_one_machine(daemon: NodeDaemon, make: Make, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="another node_id"):
        make(socket_path=str(tmp_path / "other.sock"))
    with pytest.raises(StartError, match="another node client listens"):
        make(node_id="n2")
    assert len(list((tmp_path / "shm").iterdir())) == 2
    assert daemon.registration.state is State.SERVING


def test_a_start_that_fails_leaves_nothing_behind(
    make: Make, config: NodeConfig, master: NodesDouble, tmp_path: Path
) -> None:
    with pytest.raises(StartError, match="segment_bytes"):
        make(segment_bytes=1 << 50, slab_bytes=1 << 40)
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(StartError, match="http = "):
        make(http=f"127.0.0.1:{taken.getsockname()[1]}")
    with pytest.raises(StartError, match="the kernel takes 107"):
        make(socket_path=str(tmp_path / ("x" * 100) / "node.sock"))
    Path(config.socket_path).write_text("a file")
    with pytest.raises(StartError, match="not a socket"):
        make()
    Path(config.socket_path).unlink()
    master.refusal = BadSegment("too large for me")
    with pytest.raises(StartError, match="too large for me"):
        make()
    assert not list(Path(config.segment_dir).iterdir())
    assert not Path(config.socket_path).exists()


def test_a_signal_while_starting_ends_the_start(config: NodeConfig, master: NodesDouble) -> None:
    daemon = NodeDaemon(config, Log("info", False, SYSTEM, io.StringIO()))
    with pytest.raises(Interrupted):
        daemon.start(interrupted=lambda: True)
    assert not list(Path(config.segment_dir).iterdir())
    assert not master.registered
    daemon.stop()


def test_a_node_id_that_is_taken_is_asked_for_again(make: Make, master: NodesDouble) -> None:
    master.refusal = NodeIdTaken("n1 is up")
    daemon = make(ready_wait_ms=0)
    master.wait(lambda: len(master.registered) >= 2)
    master.refusal = None
    assert daemon.registration.serving.wait(WAIT_S)


def test_a_newer_life_ends_this_one(daemon: NodeDaemon, master: NodesDouble) -> None:
    master.break_session(StaleIncarnation("a newer one is registered"))
    until(lambda: daemon.failure)
    assert "INCARNATION_STALE" in (daemon.failure or "")


# -- the Master comes and goes -------------------------------------------------------------------------


def test_orders_are_carried_out_once(daemon: NodeDaemon, master: NodesDouble) -> None:
    order = pb.BindSlab(segment=101, slab=1, slot_bytes=SLOT)
    master.order(order)
    assert master.wait(lambda: bound(master)) == [pb.SlabBound(segment=101, slab=1, slot_bytes=SLOT, generation=1)]
    daemon.node.segments[1].table(1)["stamp"] = 5
    master.order(order)
    master.wait(lambda: len(bound(master)) == 2)
    assert daemon.node.segments[1].table(1)["stamp"].all()
    master.order(pb.BindSlab(segment=101, slab=1, slot_bytes=2 * SLOT))
    assert master.wait(lambda: bound(master)[2:])[0].generation == 2
    assert not daemon.node.segments[1].table(1)["stamp"].any()


def test_impossible_orders_disturb_nothing(daemon: NodeDaemon, master: NodesDouble) -> None:
    master.order(
        pb.BindSlab(segment=999, slab=0, slot_bytes=SLOT),
        pb.BindSlab(segment=100, slab=9, slot_bytes=SLOT),
        pb.BindSlab(segment=100, slab=0, slot_bytes=SLAB),
        pb.BindSlab(segment=100, slab=0, slot_bytes=SLOT),
    )
    assert [slab.slab for slab in master.wait(lambda: bound(master))] == [0]
    assert daemon.registration.state is State.SERVING


def test_a_broken_session_keeps_the_contents(daemon: NodeDaemon, master: NodesDouble, client: LocalClient) -> None:
    welcome = client.hello("w")
    master.order(pb.BindSlab(segment=100, slab=0, slot_bytes=SLOT))
    master.wait(lambda: bound(master))
    master.break_session()
    master.wait(lambda: len(master.registered) == 2)
    assert master.registered[0] == master.registered[1]
    assert daemon.registration.serving.wait(WAIT_S)
    assert welcome.segments[0].slab_record(0).slot_bytes == SLOT
    for segment in welcome.segments:
        segment.close()


@pytest.mark.parametrize("how", ["retired", "unknown", "forgotten"])
def test_a_master_that_forgot_us_gets_a_new_incarnation_and_empty_segments(
    daemon: NodeDaemon, master: NodesDouble, client: LocalClient, how: str
) -> None:
    welcome = client.hello("w")
    segment = welcome.segments[0]
    master.order(pb.BindSlab(segment=100, slab=0, slot_bytes=SLOT))
    master.wait(lambda: bound(master))
    master.forget()
    if how == "retired":
        master.send(pb.SessionDown(epoch=10, retired=True))
    else:
        master.break_session(UnknownNode("n1") if how == "unknown" else None)
    until(lambda: daemon.node.incarnation > welcome.incarnation and daemon.registration.state is State.SERVING)
    assert segment.slab_record(0).slot_bytes == 0
    assert segment.superblock.incarnation == daemon.node.incarnation
    again = client.hello("w")
    assert again.incarnation == daemon.node.incarnation
    assert again.segments[0].handle > segment.handle
    for mapped in (*welcome.segments, *again.segments):
        mapped.close()


def test_another_life_of_the_master_is_obeyed_and_starts_empty(
    daemon: NodeDaemon, master: NodesDouble, client: LocalClient
) -> None:
    welcome = client.hello("w")
    segment = welcome.segments[0]
    assert (welcome.epoch, segment.epoch()) == (10, 10)
    master.order(pb.BindSlab(segment=100, slab=0, slot_bytes=SLOT))
    master.wait(lambda: bound(master))
    master.stop()
    until(lambda: daemon.registration.state is State.JOINING)
    second = NodesDouble(port=master.port, epoch=11)
    second.wait(lambda: len(second.registered) == 2)
    assert daemon.registration.serving.wait(WAIT_S)
    assert [r.incarnation for r in second.retired] == [welcome.incarnation]
    assert segment.epoch() == 11
    assert segment.slab_record(0).slot_bytes == 0
    second.stop()
    until(lambda: daemon.registration.state is State.JOINING)
    third = NodesDouble(port=master.port, epoch=9)
    third.wait(lambda: len(third.registered) >= 2)
    assert segment.epoch() == 11
    assert daemon.registration.state is State.JOINING
    daemon.stop()
    third.stop()
    for mapped in welcome.segments:
        mapped.close()


def test_a_silent_master_is_asked_before_it_is_given_up(make: Make) -> None:
    with_nothing_to_say = NodesDouble(suspect_ms=30)
    daemon = make(master=with_nothing_to_say.address)
    with_nothing_to_say.wait_heartbeats(10)
    assert daemon.registration.counts.failures == 0
    assert daemon.registration.counts.sessions_opened == 1
    daemon.stop()
    with_nothing_to_say.stop()


# -- workers -------------------------------------------------------------------------------------------

WORKER = """
import sys, time
from kvpool_client.local_socket import LocalClient
welcome = LocalClient(sys.argv[1], 5).hello("worker")
welcome.segments[0].memory[-1] = 17
print(welcome.worker_id, flush=True)
time.sleep(100)
"""


def worker_process(config: NodeConfig) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([sys.executable, "-c", WORKER, config.socket_path], stdout=-1, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_workers_death_is_told_and_only_its_death(
    daemon: NodeDaemon, master: NodesDouble, config: NodeConfig
) -> None:
    process, worker_id = worker_process(config)
    assert daemon.node.segments[0].memory[-1] == 17
    assert daemon.node.workers.attached == 1
    process.send_signal(signal.SIGSTOP)
    master.wait_heartbeats(5)
    assert not gone(master)
    process.kill()
    process.wait()
    assert master.wait(lambda: gone(master)) == {worker_id}
    master.break_session()
    master.wait(lambda: sum(worker_id in message.workers_gone for message in master.heard) == 2)
    assert process.stdout is not None
    process.stdout.close()


def test_the_connection_is_not_the_worker(daemon: NodeDaemon, master: NodesDouble, client: LocalClient) -> None:
    welcome = client.hello("w")
    client.close()
    master.wait_heartbeats(5)
    assert not gone(master)
    welcome.segments[0].close()
    master.wait_heartbeats(5)
    assert not gone(master)
    welcome.segments[1].close()
    assert master.wait(lambda: gone(master)) == {welcome.worker_id}


def test_workers_outlive_the_node_client(daemon: NodeDaemon, client: LocalClient) -> None:
    welcome = client.hello("w")
    daemon.stop()
    for segment in welcome.segments:
        segment.memory[-4096:] = 3
        assert segment.superblock.node_id == "n1"
        segment.close()
    with pytest.raises(Unreachable):
        client.ping()


def test_the_client_connects_again_by_itself(client: LocalClient, daemon: NodeDaemon, make: Make) -> None:
    client.ping()
    daemon.stop()
    make()
    client.ping()


def test_too_many_workers(make: Make, config: NodeConfig) -> None:
    make(workers_max=1)
    local = LocalClient(config.socket_path, 5)
    welcome = local.hello("one")
    with pytest.raises(LimitReached, match="workers_max = 1"):
        local.hello("two")
    for segment in welcome.segments:
        segment.close()
    local.close()


def test_ids_are_unique(client: LocalClient) -> None:
    welcomes = [client.hello("w") for _ in range(5)]
    assert len({welcome.worker_id for welcome in welcomes} - {0}) == 5
    for welcome in welcomes:
        for segment in welcome.segments:
            segment.close()


def store(segment: AttachedSegment, slot: int, payload: bytes) -> pb.BadBlock:
    segment.slots(slot, 1, SLOT)[0, : len(payload)] = np.frombuffer(payload, dtype=np.uint8)
    header = segment.headers(slot, 1, SLOT)
    header["state"], header["key_bytes"], header["stamp"], header["length_bytes"] = COMMITTED, 8, 77, len(payload)
    header["namespace"], header["key"] = np.void(b"n" * 16), np.void(b"keykey00".ljust(32, b"\0"))
    header["checksum"] = xxhash.xxh3_64_intdigest(payload)
    header["check"] = slot_checks(header, slot, segment.generation(segment.slab_of(slot, SLOT)), SLOT)
    return pb.BadBlock(namespace_id=b"n" * 16, chain=b"before00keykey00", stamp=77)


def test_only_really_bad_blocks_are_reported(daemon: NodeDaemon, master: NodesDouble, client: LocalClient) -> None:
    master.order(pb.BindSlab(segment=100, slab=1, slot_bytes=SLOT))
    master.wait(lambda: bound(master))
    welcome = client.hello("w")
    slot = slots_per_slab(SLAB, SLOT) + 1
    block = store(welcome.segments[0], slot, b"payload")
    assert client.report_bad(block, 100, slot, SLOT) is False
    welcome.segments[0].slots(slot, 1, SLOT)[0, 0] ^= 1
    assert client.report_bad(block, 100, slot, SLOT) is True
    assert master.wait(lambda: [bad for message in master.heard for bad in message.bad_blocks]) == [block]
    assert (daemon.node.blocks_checked_total, daemon.node.blocks_bad_total) == (2, 1)
    with pytest.raises(UnknownSegment):
        client.report_bad(block, 999, slot, SLOT)
    with pytest.raises(ProtocolError):
        client.report_bad(block, 100, 1 << 31, SLOT)
    with pytest.raises(ProtocolError):
        client.report_bad(pb.BadBlock(), 100, slot, SLOT)
    with pytest.raises(MessageTooLarge):
        client.report_bad(pb.BadBlock(namespace_id=b"n" * 16, chain=bytes(FRAME_BYTES_MAX)), 100, slot, SLOT)
    for segment in welcome.segments:
        segment.close()


# -- bad input -----------------------------------------------------------------------------------------


def talk(path: str, data: bytes, *, half_close: bool = True) -> bytes:
    """Send bytes, read until the other side closes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(WAIT_S)
        connection.connect(path)
        try:
            connection.sendall(data)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        except ConnectionError:
            return b""
        return answer


def frame(message: pb.LocalRequest) -> bytes:
    body = message.SerializeToString()
    return struct.pack("<I", len(body)) + body


def test_random_bytes_on_the_unix_socket(client: LocalClient, config: NodeConfig) -> None:
    client.ping()
    dice = random.Random(1)
    for size in (1, 3, 4, 5, 100, 5000):
        for _ in range(5):
            talk(config.socket_path, dice.randbytes(size))
            talk(config.socket_path, struct.pack("<I", size) + dice.randbytes(size))
    client.ping()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack("<I", FRAME_BYTES_MAX + 1), "MESSAGE_TOO_LARGE"),
        (struct.pack("<I", 3) + b"\xff\xff\xff", "PROTOCOL"),
        (struct.pack("<I", 0), "PROTOCOL"),
        (frame(pb.LocalRequest(hello=pb.LocalHello(protocol=2))), "PROTOCOL"),
    ],
)
def test_frames_that_are_none_get_a_reason(client: LocalClient, config: NodeConfig, data: bytes, reason: str) -> None:
    answer = talk(config.socket_path, data, half_close=False)
    assert pb.LocalReply.FromString(answer[4:]).error_reason == reason
    client.ping()


def test_a_worker_that_breaks_off_at_any_byte(client: LocalClient, daemon: NodeDaemon, config: NodeConfig) -> None:
    hello = frame(pb.LocalRequest(hello=pb.LocalHello(protocol=1, name="half")))
    for length in range(len(hello) + 1):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(config.socket_path)
            connection.sendall(hello[:length])
    client.ping()
    until(lambda: daemon.node.workers.attached == 0 and not daemon.node.workers.poll())


def test_half_a_frame_is_not_waited_for_for_ever(client: LocalClient, config: NodeConfig) -> None:
    assert talk(config.socket_path, b"\x05\0\0\0ab", half_close=False) == b""
    client.ping()


def test_a_known_worker_may_be_idle_a_stranger_may_not(make: Make, config: NodeConfig) -> None:
    make(local_timeout_ms=100)
    ping = frame(pb.LocalRequest(ping=pb.LocalPing()))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as known:
        known.settimeout(WAIT_S)
        known.connect(config.socket_path)
        known.sendall(ping)
        assert known.recv(100) == bytes(4)
        assert talk(config.socket_path, b"", half_close=False) == b""  # returns when the stranger's time is over
        known.sendall(ping)
        assert known.recv(100) == bytes(4)


def test_connections_are_bounded(make: Make, config: NodeConfig) -> None:
    daemon = make(connections_max=2)
    clients = [LocalClient(config.socket_path, 5) for _ in range(3)]
    for local in clients[:2]:
        local.ping()
    with pytest.raises(Unreachable):
        clients[2].ping()
    clients[0].close()
    until(lambda: "kvpool_client_local_connections 1.0" in get(daemon.http_port, "/metrics")[1])
    clients[2].ping()
    for local in clients:
        local.close()


def test_random_bytes_on_the_http_port(daemon: NodeDaemon) -> None:
    dice = random.Random(2)
    for data in [b"\x16\x03\x01", b"get / HTTP/1.1\r\n\r\n", b"A" * 20_000, *(dice.randbytes(300) for _ in range(20))]:
        with socket.create_connection(("127.0.0.1", daemon.http_port), timeout=10) as connection:
            connection.sendall(data)
            assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
    with socket.create_connection(("127.0.0.1", daemon.http_port), timeout=10) as connection:
        connection.sendall(b"GET /hea")
    assert get(daemon.http_port, "/healthz")[0] == 200
    assert get(daemon.http_port, "/")[0] == 404
    with socket.create_connection(("127.0.0.1", daemon.http_port), timeout=10) as connection:
        connection.sendall(b"POST /metrics HTTP/1.1\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 405 ")


def test_what_is_exported_is_what_is_listed(daemon: NodeDaemon, master: NodesDouble, client: LocalClient) -> None:
    master.wait_heartbeats()
    use = pb.NamespaceUse(
        namespace_id=bytes(range(16)), model="m", block_tokens=16, lookups=1, lookup_blocks=9, hit_blocks=7,
        loaded_blocks=5, load_us=1_500_000, short={"load/verify_failed": 1}, verify_failures=1
    )  # fmt: skip
    for _ in range(2):
        client.report_use(pb.LocalUse(namespaces=[use]))
    text = get(daemon.http_port, "/metrics")[1]
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert names == set(METRICS)
    assert 'kvpool_client_segment_bytes{segment="0"} 2.097152e+06' in text
    assert 'kvpool_client_session_state{state="serving"} 1.0' in text
    assert "kvpool_client_master_epoch 10.0" in text
    labels = '{model="m",namespace="00010203"}'
    assert f"kvpool_client_hit_blocks_total{labels} 14.0" in text
    assert f"kvpool_client_hit_tokens_total{labels} 224.0" in text
    assert f"kvpool_client_load_seconds_total{labels} 3.0" in text
    assert 'kvpool_client_short_calls_total{call="load",reason="verify_failed"} 2.0' in text


# -- a process of its own ------------------------------------------------------------------------------


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
def launch(config: NodeConfig) -> Iterator[Launch]:
    processes: list[Process] = []

    def start(*flags: str, **environment: str) -> Process:
        processes.append(Process(config, *flags, **environment))
        return processes[-1]

    yield start
    for process in processes:
        process.kill_if_alive()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly(
    launch: Launch, config: NodeConfig, master: NodesDouble, number: int, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(WAIT_S)
        process = launch(NOTIFY_SOCKET=str(tmp_path / "notify"))
        assert systemd.recv(100) == b"READY=1"
        line = process.wait_line("ready")
        assert f"socket={config.socket_path}" in line
        assert "state=serving" in line
        process.signal(number)
        assert systemd.recv(100) == b"STOPPING=1"
    assert process.ended() == 0
    assert len(master.retired) == 1
    assert not list(Path(config.segment_dir).iterdir())
    assert not Path(config.socket_path).exists()


def test_what_a_killed_one_left_is_cleaned_up(launch: Launch, config: NodeConfig, master: NodesDouble) -> None:
    first = launch()
    first.wait_line("ready")
    local = LocalClient(config.socket_path, 5)
    welcome = local.hello("w")
    first.signal(signal.SIGKILL)
    first.ended()
    assert len(list(Path(config.segment_dir).iterdir())) == 1
    welcome.segments[0].memory[-1] = 5
    second = launch()
    second.wait_line("stale_segment_removed")
    second.wait_line("ready")
    again = local.hello("w")
    assert again.incarnation > welcome.incarnation
    assert again.segments[0].memory[-1] == 0
    second.signal(signal.SIGTERM)
    assert second.ended() == 0
    assert not list(Path(config.segment_dir).iterdir())
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
