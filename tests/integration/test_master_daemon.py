"""The Master as a process: what is wrong gets a clear answer, loses nothing and leaves the directory sound."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from integration.master_client import KEY_BYTES, SLAB_BYTES, SPEC, TIMEOUT_S, Client, Node, chain, refused, until
from integration.processes import MasterProcess
from kvpool_master.metrics import METRICS
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.convert import spec_to_message
from kvpool_proto.namespace import NamespaceSpec

SERVICES = ("kvpool.v1.Pool", "kvpool.v1.Nodes", "kvpool.v1.Admin")


@pytest.fixture(scope="module")
def process() -> Iterator[MasterProcess]:
    # No suspicion for want of heartbeats: these tests send none.
    with MasterProcess("--core-suspect-ms", "1h", "--core-retire-ms", "2h", "--message-bytes-max", "2MiB") as process:
        yield process
        assert process.stop() == 0
        assert not process.event("rpc_failed"), process.lines
        assert not process.event("tick_failed"), process.lines
        assert not process.event("library"), process.lines


@pytest.fixture
def client(process: MasterProcess) -> Iterator[Client]:
    client = Client(process)
    try:
        yield client
        client.sound()
    finally:
        client.close()


@pytest.fixture
def node(client: Client) -> Iterator[Node]:
    """A node with slabs bound for SPEC, gone again afterwards."""
    node = Node(client.nodes, "node-" + os.urandom(4).hex())
    client.open()
    node.bind()
    until(lambda: client.reserve(chain=chain(1)).reason != pb.REASON_SLAB_PENDING)
    yield node
    node.retire()


def test_a_block_is_stored_found_leased_and_released(client: Client, node: Node) -> None:
    keys, reservation, lease = chain(5, "story"), os.urandom(16), os.urandom(16)
    granted = client.reserve(chain=keys, reservation_id=reservation)
    assert granted.answered_blocks == 5
    assert granted.epoch == client.process.epoch
    assert sum(granted.extents.blocks) == 5
    assert client.lookup(chain=keys).reason == pb.REASON_BEING_WRITTEN
    assert client.commit(reservation, 5, final=True).committed_blocks == 5
    hit = client.lookup(chain=keys + chain(1), skip_blocks=1, lease_id=lease)
    assert (hit.hit_blocks, hit.reason) == (4, pb.REASON_UNKNOWN_KEY)
    assert hit.lease_ms > 0
    assert set(hit.extents.segment) == set(node.registered.segment_handles)
    assert client.pool.Renew(pb.RenewRequest(lease_id=lease), timeout=TIMEOUT_S).lease_ms > 0
    assert client.pool.Release(pb.ReleaseRequest(lease_ids=[lease]), timeout=TIMEOUT_S).released == 1
    status = client.admin.Status(pb.StatusRequest(), timeout=TIMEOUT_S)
    assert node.node_id in {held.node_id for held in status.nodes}
    assert SPEC.id in {held.namespace_id for held in status.namespaces}


def test_a_peek_leases_nothing(client: Client, node: Node) -> None:
    keys, reservation = chain(5, "peeked"), os.urandom(16)
    client.reserve(chain=keys, reservation_id=reservation)
    client.commit(reservation, 5, final=True)
    before = client.admin.Status(pb.StatusRequest(), timeout=TIMEOUT_S).leases
    request = pb.PeekRequest(namespace_id=SPEC.id, chain=keys)
    assert client.pool.Peek(request, timeout=TIMEOUT_S).hit_blocks == 5
    assert client.admin.Status(pb.StatusRequest(), timeout=TIMEOUT_S).leases == before


BAD_READS: dict[str, tuple[dict[str, Any], str]] = {
    "wrong key length": ({"chain": b"x" * 17}, "KEY_LENGTH"),
    "empty chain": ({"chain": b""}, "CHAIN_EMPTY"),
    "chain over the limit": ({"chain": bytes(65_537 * KEY_BYTES)}, "CHAIN_TOO_LONG"),
    "unknown namespace": ({"namespace_id": b"?" * 16}, "NAMESPACE_UNKNOWN"),
    "lease id too short": ({"lease_id": b"short"}, "ID_LENGTH"),
}
BAD_WRITES: dict[str, tuple[dict[str, Any], str]] = {
    "wrong key length": ({"chain": b"x" * 17}, "KEY_LENGTH"),
    "empty chain": ({"chain": b""}, "CHAIN_EMPTY"),
    "chain over the limit": ({"chain": bytes(65_537 * KEY_BYTES)}, "CHAIN_TOO_LONG"),
    "unknown namespace": ({"namespace_id": b"?" * 16}, "NAMESPACE_UNKNOWN"),
    "part out of range": ({"part_to": 3}, "PART_RANGE"),
    "no part": ({"part_from": 1, "part_to": 1}, "PART_RANGE"),
    "reservation id too short": ({"reservation_id": b"short"}, "ID_LENGTH"),
    "nothing said about the parent": ({"parent_kind": 0}, "BAD_REQUEST"),
    "a parent where entry is root": ({"parent_kind": pb.PARENT_KEY, "parent_key": b"p" * 16}, "BAD_REQUEST"),
}


@pytest.mark.parametrize("case", BAD_READS)
def test_bad_lookups(client: Client, case: str) -> None:
    changes, reason = BAD_READS[case]
    client.open()
    assert refused(lambda: client.lookup(**changes)).reason == reason


@pytest.mark.parametrize("case", BAD_WRITES)
def test_bad_reservations(client: Client, node: Node, case: str) -> None:
    changes, reason = BAD_WRITES[case]
    assert refused(lambda: client.reserve(**changes)).reason == reason


def test_bad_commits(client: Client, node: Node) -> None:
    keys, reservation = chain(4), os.urandom(16)
    client.reserve(chain=keys, reservation_id=reservation)
    assert refused(lambda: client.commit(reservation, 5)).reason == "COMMIT_TOO_LARGE"
    assert refused(lambda: client.commit(reservation, 1, part_to=3)).reason == "PART_RANGE"
    assert refused(lambda: client.commit(os.urandom(16), 1)).reason == "RESERVATION_UNKNOWN"
    assert client.commit(reservation, 2).committed_blocks == 2
    assert client.commit(reservation, 2).committed_blocks == 2
    assert client.commit(reservation, 2, final=True).committed_blocks == 2
    assert refused(lambda: client.commit(reservation, 3)).reason == "RESERVATION_ENDED"
    assert client.lookup(chain=keys).hit_blocks == 2


def test_a_worker_that_dies_between_reserve_and_commit(client: Client, node: Node) -> None:
    keys, reservation = chain(4), os.urandom(16)
    client.reserve(chain=keys, reservation_id=reservation, worker_id=7, nodes=[node.node_id])
    client.commit(reservation, 1, worker_id=7)
    node.report(workers_gone=[7])
    until(lambda: client.lookup(chain=keys).reason == pb.REASON_UNKNOWN_KEY)
    assert client.lookup(chain=keys).hit_blocks == 1
    assert refused(lambda: client.commit(reservation, 2, worker_id=7)).reason == "RESERVATION_ENDED"


def test_what_expires_is_refused_afterwards() -> None:
    short = ("--core-write-min-ms", "50ms", "--core-write-max-ms", "50ms", "--core-lease-min-ms", "50ms")
    short += ("--core-lease-max-ms", "50ms", "--tick-ms", "10ms")
    with MasterProcess(*short) as process:
        client = Client(process)
        node = Node(client.nodes, "a")
        client.open()
        node.bind()
        until(lambda: client.reserve(chain=chain(1)).reason != pb.REASON_SLAB_PENDING)
        keys, reservation, lease = chain(3), os.urandom(16), os.urandom(16)
        client.reserve(chain=keys, reservation_id=reservation)
        client.commit(reservation, 1)
        until(lambda: client.admin.Status(pb.StatusRequest()).reservations == 0)
        assert refused(lambda: client.commit(reservation, 2)).reason == "RESERVATION_ENDED"
        client.lookup(chain=keys, lease_id=lease)
        until(lambda: client.admin.Status(pb.StatusRequest()).leases == 0)
        assert refused(lambda: client.pool.Renew(pb.RenewRequest(lease_id=lease))).reason == "LEASE_UNKNOWN"
        client.sound()
        node.break_off()
        client.close()
        assert process.stop() == 0


def test_a_namespace_that_differs(client: Client) -> None:
    client.open()
    assert refused(lambda: client.open(replace(SPEC, entry="any"))).reason == "NAMESPACE_DIFFERS"
    request = pb.OpenNamespaceRequest(spec=spec_to_message(SPEC), namespace_id=b"?" * 16)
    assert refused(lambda: client.pool.OpenNamespace(request, timeout=TIMEOUT_S)).reason == "NAMESPACE_DIFFERS"
    assert refused(lambda: client.open(replace(SPEC, parts=0))).reason == "NAMESPACE_SPEC"


def test_foreign_ids(client: Client, node: Node) -> None:
    reservation = os.urandom(16)
    client.reserve(chain=chain(2), reservation_id=reservation)
    assert refused(lambda: client.reserve(chain=chain(2), reservation_id=reservation)).reason == "ID_FOREIGN"
    assert refused(lambda: client.pool.Renew(pb.RenewRequest(lease_id=b"l" * 16))).reason == "LEASE_UNKNOWN"
    aborted = client.pool.Abort(pb.AbortRequest(reservation_id=os.urandom(16), writer=True), timeout=TIMEOUT_S)
    assert not aborted.aborted


def test_an_abort_that_overtakes_its_reserve_is_remembered(client: Client, node: Node) -> None:
    reservation = os.urandom(16)
    client.pool.Abort(pb.AbortRequest(reservation_id=reservation), timeout=TIMEOUT_S)
    assert refused(lambda: client.reserve(reservation_id=reservation)).reason == "RESERVATION_ENDED"


@pytest.mark.parametrize(
    ("offer", "reason"),
    [
        (pb.SegmentOffer(size_bytes=0, slab_bytes=SLAB_BYTES), "SEGMENT_GEOMETRY"),
        (pb.SegmentOffer(size_bytes=SLAB_BYTES + 4096, slab_bytes=SLAB_BYTES), "SEGMENT_GEOMETRY"),
        (pb.SegmentOffer(size_bytes=SLAB_BYTES, slab_bytes=5000), "SEGMENT_GEOMETRY"),
    ],
)
def test_bad_segments(client: Client, offer: pb.SegmentOffer, reason: str) -> None:
    request = pb.RegisterRequest(node_id="bad", incarnation=1, segments=[offer])
    assert refused(lambda: client.nodes.Register(request, timeout=TIMEOUT_S)).reason == reason


def test_a_slot_that_fits_no_slab(client: Client, node: Node) -> None:
    large = NamespaceSpec(model="large", block_tokens=16, part_bytes=2 * SLAB_BYTES, dtype="float16")
    assert refused(lambda: client.open(large)).reason == "SLOT_TOO_LARGE"


def test_a_second_live_node_of_one_id_is_refused(client: Client, node: Node) -> None:
    assert refused(lambda: Node(client.nodes, node.node_id, 2)).reason == "NODE_ID_TAKEN"


def test_a_session_of_an_unknown_node_is_refused(client: Client) -> None:
    stream = client.nodes.Session(iter([pb.SessionUp(node_id="nobody", incarnation=1)]))
    assert refused(lambda: next(stream)).reason == "NODE_UNKNOWN"


def test_a_node_whose_session_breaks_is_hidden_at_once_and_back_with_the_next(client: Client, node: Node) -> None:
    keys, reservation = chain(3, "hidden"), os.urandom(16)
    client.reserve(chain=keys, reservation_id=reservation)
    client.commit(reservation, 3, final=True)
    node.break_off()
    until(lambda: client.lookup(chain=keys).reason == pb.REASON_NODE_AWAY)
    back = Node(client.nodes, node.node_id)
    until(lambda: client.lookup(chain=keys).hit_blocks == 3)
    assert back.registered.segment_handles == node.registered.segment_handles
    assert set(client.lookup(chain=keys).extents.segment) <= set(node.registered.segment_handles)
    back.break_off()


@pytest.mark.parametrize("port", ["grpc_port", "http_port"])
def test_random_bytes_and_half_requests_disturb_nobody(client: Client, node: Node, port: str) -> None:
    noise = random.Random(5)
    payloads = [noise.randbytes(n) for n in (1, 100, 4_000, 100_000)]
    payloads += [
        b"GET / HT",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 500,
        b"",
    ]
    for payload in payloads:
        with socket.create_connection(("127.0.0.1", getattr(client.process, port)), timeout=TIMEOUT_S) as raw:
            try:
                raw.sendall(payload)
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(65_536):
                    pass
            except OSError:
                pass  # cut off in the middle: that is an answer, too
    assert client.lookup().reason == pb.REASON_UNKNOWN_KEY
    assert client.get("/healthz") == (200, "alive\n")


@pytest.mark.parametrize("payload", [b"\x16\x03\x01\x02\x00", b"POST /metrics HTTP/1.1\r\n\r\n", b"GET /\r\n\r\n"])
def test_what_is_not_a_get_request_is_told_so(client: Client, payload: bytes) -> None:
    with socket.create_connection(("127.0.0.1", client.process.http_port), timeout=TIMEOUT_S) as raw:
        raw.sendall(payload)
        assert raw.recv(100).startswith(b"HTTP/1.1 400 ")


def test_a_header_without_end_is_cut_off(client: Client) -> None:
    with socket.create_connection(("127.0.0.1", client.process.http_port), timeout=TIMEOUT_S) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\nx: " + b"a" * 9_000)
        assert raw.recv(100).startswith(b"HTTP/1.1 400 ")


def test_a_message_over_the_limit(client: Client) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        client.lookup(chain=bytes(3 << 20))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused(lambda: client.lookup(chain=bytes(3 << 20))).reason == "MESSAGE_TOO_LARGE"


def test_a_client_that_goes_away_in_the_middle(client: Client, node: Node) -> None:
    for _ in range(20):
        other = Client(client.process)
        other.pool.Reserve.future(pb.ReserveRequest(namespace_id=SPEC.id, chain=chain(1)))
        other.nodes.Session(iter([pb.SessionUp(node_id="ghost", incarnation=1)]))
        other.close()
    assert client.lookup().reason == pb.REASON_UNKNOWN_KEY


def test_http(client: Client, node: Node) -> None:
    assert client.get("/readyz") == (200, "ready\n")
    assert client.get("/elsewhere")[0] == 404
    client.lookup()
    code, text = client.get("/metrics")
    assert code == 200
    exported = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert sorted(exported) == sorted(METRICS)
    assert 'kvpool_master_rpc_seconds_count{code="OK",method="Lookup"}' in text


def test_health_and_reflection(client: Client) -> None:
    health: Any = health_pb2_grpc.HealthStub(client.channel)
    for name in ("", *SERVICES):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = reflection.ServerReflectionInfo(iter([ask]), timeout=TIMEOUT_S)
    assert set(SERVICES) <= {service.name for service in answer.list_services_response.service}


@pytest.mark.parametrize("taken", ["listen", "http"])
def test_a_second_master_on_a_port_fails_with_one_line(process: MasterProcess, taken: str, tmp_path: Path) -> None:
    ports = {"listen": 0, "http": 0} | {taken: process.grpc_port if taken == "listen" else process.http_port}
    words = [word for name, port in ports.items() for word in (f"--{name}", f"127.0.0.1:{port}")]
    words += ["--state-dir", str(tmp_path), "--plaintext"]
    done = subprocess.run(
        [sys.executable, "-m", "kvpool_master", *words], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvpool-master: {taken} = 127.0.0.1:{ports[taken]}: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly_though_a_session_is_open(signal_number: signal.Signals) -> None:
    with MasterProcess("--drain-ms", "60s") as process:
        client = Client(process)
        node = Node(client.nodes, "a")
        assert not next(node.stream).retired
        process.process.send_signal(signal_number)
        assert process.process.wait(TIMEOUT_S) == 0
        assert list(node.stream) == []
        node.break_off()
        client.close()
    assert process.event("stopped"), process.lines


def test_a_service_manager_is_told_when_it_is_ready(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, pytest.MonkeyPatch.context() as patch:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(TIMEOUT_S)
        patch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with MasterProcess() as process:
            assert manager.recv(100) == b"READY=1"
            assert process.stop() == 0
            assert manager.recv(100) == b"STOPPING=1"
