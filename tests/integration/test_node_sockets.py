"""What comes in at the sockets of a node client, Unix and HTTP, and what goes out as metrics."""

from __future__ import annotations

import random
import socket
import struct

import pytest

from integration.node_world import Make, get, gone, until
from integration.nodes_double import WAIT_S, NodesDouble
from kvpool_client.config import NodeConfig
from kvpool_client.daemon import NodeDaemon
from kvpool_client.local_socket import FRAME_BYTES_MAX, LocalClient
from kvpool_client.metrics import METRICS
from kvpool_client.session import State
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import Unreachable


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


def test_random_bytes_on_the_unix_socket(
    local_client: LocalClient, node_daemon: NodeDaemon, node_config: NodeConfig
) -> None:
    local_client.ping()
    dice = random.Random(1)
    answers: list[bytes] = []
    for size in (1, 3, 4, 5, 100, 5000):
        for _ in range(5):
            answers.append(talk(node_config.socket_path, dice.randbytes(size)))
            answers.append(talk(node_config.socket_path, struct.pack("<I", size) + dice.randbytes(size)))
    local_client.ping()
    reasons = {pb.LocalReply.FromString(answer[4:]).error_reason for answer in answers if answer}
    assert reasons == {"MESSAGE_TOO_LARGE", "PROTOCOL"}
    assert node_daemon.node.workers.attached == 0
    assert node_daemon.registration.state is State.SERVING


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack("<I", FRAME_BYTES_MAX + 1), "MESSAGE_TOO_LARGE"),
        (struct.pack("<I", 3) + b"\xff\xff\xff", "PROTOCOL"),
        (struct.pack("<I", 0), "PROTOCOL"),
        (frame(pb.LocalRequest(hello=pb.LocalHello(protocol=2))), "PROTOCOL"),
    ],
)
def test_frames_that_are_none_get_a_reason(
    local_client: LocalClient, node_config: NodeConfig, data: bytes, reason: str
) -> None:
    answer = talk(node_config.socket_path, data, half_close=False)
    assert pb.LocalReply.FromString(answer[4:]).error_reason == reason
    local_client.ping()


def test_a_worker_that_breaks_off_at_any_byte(
    local_client: LocalClient, nodes_double: NodesDouble, node_daemon: NodeDaemon, node_config: NodeConfig
) -> None:
    hello = frame(pb.LocalRequest(hello=pb.LocalHello(protocol=1, name="half")))
    for length in range(len(hello) + 1):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(node_config.socket_path)
            connection.sendall(hello[:length])
    local_client.ping()
    assert len(nodes_double.wait(lambda: gone(nodes_double))) == 1  # the hello that was whole
    assert node_daemon.node.workers.attached == 0


def test_half_a_frame_is_not_waited_for_for_ever(local_client: LocalClient, node_config: NodeConfig) -> None:
    assert talk(node_config.socket_path, b"\x05\0\0\0ab", half_close=False) == b""
    local_client.ping()


def test_a_known_worker_may_be_idle_a_stranger_may_not(make_daemon: Make, node_config: NodeConfig) -> None:
    make_daemon(local_timeout_ms=100)
    ping = frame(pb.LocalRequest(ping=pb.LocalPing()))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as known:
        known.settimeout(WAIT_S)
        known.connect(node_config.socket_path)
        known.sendall(ping)
        assert known.recv(100) == bytes(4)
        assert talk(node_config.socket_path, b"", half_close=False) == b""  # returns when the stranger's time is over
        known.sendall(ping)
        assert known.recv(100) == bytes(4)


def test_connections_are_bounded(make_daemon: Make, node_config: NodeConfig) -> None:
    daemon = make_daemon(connections_max=2)
    clients = [LocalClient(node_config.socket_path, 5) for _ in range(3)]
    for local in clients[:2]:
        local.ping()
    with pytest.raises(Unreachable):
        clients[2].ping()
    clients[0].close()
    until(lambda: "kvpool_client_local_connections 1.0" in get(daemon.http_port, "/metrics")[1])
    clients[2].ping()
    for local in clients:
        local.close()


def test_random_bytes_on_the_http_port(node_daemon: NodeDaemon) -> None:
    dice = random.Random(2)
    for data in [b"\x16\x03\x01", b"get / HTTP/1.1\r\n\r\n", b"A" * 20_000, *(dice.randbytes(300) for _ in range(20))]:
        with socket.create_connection(("127.0.0.1", node_daemon.http_port), timeout=10) as connection:
            connection.sendall(data)
            assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
    with socket.create_connection(("127.0.0.1", node_daemon.http_port), timeout=10) as connection:
        connection.sendall(b"GET /hea")
    assert get(node_daemon.http_port, "/healthz")[0] == 200
    assert get(node_daemon.http_port, "/")[0] == 404
    with socket.create_connection(("127.0.0.1", node_daemon.http_port), timeout=10) as connection:
        connection.sendall(b"POST /metrics HTTP/1.1\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 405 ")


def test_what_is_exported_is_what_is_listed(
    node_daemon: NodeDaemon, nodes_double: NodesDouble, local_client: LocalClient
) -> None:
    nodes_double.wait_heartbeats()
    use = pb.NamespaceUse(
        namespace_id=bytes(range(16)), model="m", block_tokens=16, lookups=1, lookup_blocks=9, hit_blocks=7,
        loaded_blocks=5, load_us=1_500_000, short={"load/verify_failed": 1}, verify_failures=1
    )  # fmt: skip
    for _ in range(2):
        local_client.report_use(pb.LocalUse(namespaces=[use]))
    host, port = node_daemon.node.data_address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert peer.recv(100)
    text = get(node_daemon.http_port, "/metrics")[1]
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
    assert 'kvpool_client_data_refused_total{reason="protocol"} 1.0' in text
