"""peer/server.py and peer/serving.py: connections, whoever they come from and however they end."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool_client.clock import Clock
from kvpool_client.headers import WRITING
from kvpool_client.logs import Log
from kvpool_client.peer import wire
from kvpool_client.peer.connection import Connection, Hashing
from kvpool_client.peer.counting import TOLD_MAX, TOLD_MS, Account
from kvpool_client.peer.server import BUSY_MAX, PeerServer
from kvpool_client.peer.wire import Ask
from kvpool_client.start_error import StartError
from kvpool_client.transfer_engine import Written
from kvpool_proto.capability import READ, RUNS_MAX, WRITE
from kvpool_proto.errors import PeerBusy
from unit.peer_world import BLOCKS, SPEC, Case, PeerWorld, engine, until
from unit.transfer_world import World

IMPATIENT = {"io_timeout_ms": 150, "idle_timeout_ms": 300}


@pytest.fixture
def impatient(segment_world: World) -> Iterator[PeerWorld]:
    """Gives up on peers soon."""
    peer = PeerWorld(segment_world, **IMPATIENT)
    yield peer
    peer.close()


def ends(sock: socket.socket) -> bytes:
    """What still comes until the other side closes."""
    sock.settimeout(10)
    got = b""
    try:
        while some := sock.recv(1 << 16):
            got += some
    except ConnectionError:
        pass
    return got


def raw(peer: PeerWorld) -> socket.socket:
    return socket.create_connection(("127.0.0.1", peer.server.port))


# -- what costs its own connection only ----------------------------------------------------------------


def test_half_frames_at_every_byte(peer_case: Case) -> None:
    peer_case.write()
    grant, peer = peer_case.grant(READ), peer_case.peer
    whole = wire.pack_hello() + wire.pack_grant(0, grant) + wire.pack_ask(
        wire.ASK_READ, Ask(0, 0, 1, False, SPEC.part_bytes)
    )  # fmt: skip
    for length in range(len(whole)):
        with raw(peer) as sock:
            sock.sendall(whole[:length])
            sock.shutdown(socket.SHUT_WR)
            assert ends(sock) == (wire.pack_hello() if length >= len(wire.pack_hello()) else b"")
    until(lambda: peer.server.open_connections == 1)  # the engine's
    assert peer.refused == {}
    assert peer_case.read()[0].blocks == BLOCKS


def test_half_a_write_at_many_bytes(peer_case: Case) -> None:
    headers = wire.sealed(peer_case.told())
    whole = b"".join(
        [
            wire.pack_hello(),
            wire.pack_grant(0, peer_case.grant(WRITE)),
            wire.pack_ask(wire.ASK_WRITE, Ask(0, 0, BLOCKS, False, SPEC.part_bytes), headers),
            peer_case.data.tobytes(),
            bytes(8 * BLOCKS),
        ]
    )
    for length in range(0, len(whole), 997):
        with raw(peer_case.peer) as sock:
            sock.sendall(whole[:length])
            sock.shutdown(socket.SHUT_WR)
            ends(sock)
        until(lambda: peer_case.peer.host.writes.open == 0)
        assert peer_case.states() <= {0, WRITING}
    assert peer_case.write() == Written([BLOCKS])
    assert peer_case.read()[0].blocks == BLOCKS


@pytest.mark.parametrize(
    "told",
    [
        b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 100,
        b"\0" * 64,
        wire.HEAD.pack(wire.GRANT, 0, 1 << 20),
        wire.HEAD.pack(wire.HELLO, 0, (1 << 32) - 1),
        wire.pack_hello()[:16] + b"\xff\xff" + bytes(6),
        wire.pack_hello() + wire.pack_hello(),
        wire.pack_hello() + wire.HEAD.pack(wire.GRANT, 0, wire.BODY_BYTES_MAX[wire.GRANT] + 24),
        wire.pack_hello() + wire.HEAD.pack(wire.GRANT, 0, 100) + bytes(100),
        wire.pack_hello() + wire.HEAD.pack(wire.ASK_READ, 0, (1 << 32) - 1),
        wire.pack_hello() + wire.pack_ask(wire.ASK_READ, Ask(0, 0, 1 << 31, False, 1)),
        wire.pack_hello() + wire.pack_ask(wire.ASK_WRITE, Ask(0, 0, 9, False, 1), np.zeros(1, "V128")),
        wire.pack_hello() + wire.HEAD.pack(wire.ANSWER, 0, 0),
    ],
)
def test_what_is_no_frame_is_answered_and_ends_the_connection(peer_case: Case, told: bytes) -> None:
    with raw(peer_case.peer) as sock:
        sock.sendall(told)
        assert b"protocol" in ends(sock)
    assert peer_case.peer.refused == {"protocol": 1}
    assert peer_case.write() == Written([BLOCKS])


def test_a_table_that_is_too_long_is_not_even_read(peer_case: Case) -> None:
    with raw(peer_case.peer) as sock:
        size_bytes = 72 + 24 * (RUNS_MAX + 1)
        sock.sendall(wire.pack_hello() + wire.HEAD.pack(wire.GRANT, 0, size_bytes))
        assert b"protocol" in ends(sock)


def test_headers_that_were_damaged_on_their_way_are_not_written(peer_case: Case) -> None:
    connection = peer_case.peer.connection()
    headers = wire.sealed(peer_case.told())
    headers["key"][2] = np.void(b"damaged".ljust(32, b"\0"))
    frame = wire.pack_ask(wire.ASK_WRITE, Ask(0, 0, BLOCKS, True, SPEC.part_bytes), headers)
    connection.stream.send([wire.pack_grant(0, peer_case.grant(WRITE)), frame])
    assert connection.take_go(BLOCKS).reason == "protocol"
    connection.stream.close()
    assert peer_case.states() == {0}


def test_one_that_says_nothing_is_given_up(impatient: PeerWorld) -> None:
    with raw(impatient) as silent, raw(impatient) as half, raw(impatient) as idle:
        half.sendall(wire.pack_hello() + b"\x02\0")
        idle.sendall(wire.pack_hello())
        assert ends(silent) == b""
        assert ends(half) == wire.pack_hello()
        assert ends(idle) == wire.pack_hello()
    until(lambda: impatient.server.open_connections == 0)


def test_a_writer_that_stalls_is_given_up(peer_case: Case, impatient: PeerWorld) -> None:
    connection = impatient.connection()
    connection.ask_write(impatient.grant(SPEC, [peer_case.run], WRITE), 0, peer_case.told(), SPEC.part_bytes, True)
    assert connection.take_go(BLOCKS).go
    connection.stream.send([peer_case.data[:3].tobytes()])
    until(lambda: impatient.host.writes.open == 0)
    connection.stream.close()
    assert peer_case.states() == {WRITING}


def test_stop_ends_connections_and_writes(segment_world: World, peer_case: Case) -> None:
    peer = PeerWorld(segment_world)
    idle, writing = peer.connection(), peer.connection()
    writing.ask_write(peer.grant(SPEC, [peer_case.run], WRITE), 0, peer_case.told(), SPEC.part_bytes, True)
    assert writing.take_go(BLOCKS).go
    with raw(peer) as silent:
        peer.close()
        assert (peer.host.writes.open, peer.server.open_connections) == (0, 0)
        assert ends(silent) == b""
    for connection in (idle, writing):
        connection.stream.close()
    with pytest.raises(OSError, match="refused"):
        raw(peer)


def test_one_connection_too_many_is_told_so(segment_world: World, peer_case: Case) -> None:
    peer = PeerWorld(segment_world, connections_max=2)
    kept = [peer.connection() for _ in range(2)]
    with pytest.raises(PeerBusy, match="data_connections_max = 2"):
        peer.connection()
    assert peer.refused == {"peer_busy": 1}
    busy = Case(peer, peer_case.engine, peer_case.chain, peer_case.run, peer_case.data)
    assert busy.write() == Written([0], "peer_busy")
    silent = [raw(peer) for _ in range(BUSY_MAX)]
    with raw(peer) as one_more:
        assert ends(one_more) == b"", "closed at once"
    for sock in silent:
        sock.close()
    kept.pop().stream.close()
    until(lambda: peer.server.open_connections == 1)
    assert busy.write() == Written([BLOCKS])
    kept.pop().stream.close()
    peer_case.engine.close()
    peer.close()


def test_a_port_that_is_taken(peer_case: Case) -> None:
    peer = peer_case.peer
    with pytest.raises(StartError, match=f"data_listen = 127.0.0.1:{peer.server.port}: "):
        PeerServer(
            ("127.0.0.1", peer.server.port), peer.host, connections_max=1, io_timeout_ms=1, idle_timeout_ms=1,
            log=Log("error", False, Clock(), peer.log)
        )  # fmt: skip


# -- a reader that stalls ------------------------------------------------------------------------------


def stalled(peer: PeerWorld, case: Case, repeat: int) -> Connection:
    """Asks for all blocks again and again and reads nothing: the kernel's buffers fill up."""
    connection = peer.connection()
    connection.stream._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)  # pyright: ignore[reportPrivateUsage]
    grant = peer.grant(SPEC, [case.run], READ)
    for _ in range(repeat):
        connection.ask_read(grant, 0, BLOCKS, SPEC.part_bytes)
    return connection


def test_a_reader_that_stalls_is_given_up(peer_case: Case, impatient: PeerWorld) -> None:
    peer_case.write()
    connection = stalled(impatient, peer_case, 500)
    until(lambda: impatient.server.open_connections == 0)
    connection.stream.close()


def test_a_reader_that_stalls_gets_nothing_that_came_later(peer_case: Case) -> None:
    peer_case.write()
    repeat = 1_000
    connection = stalled(peer_case.peer, peer_case, repeat)
    counts = peer_case.peer.server.counts
    seen: list[int] = []

    def stuck() -> bool:
        seen.append(counts.blocks_read)
        return len(seen) > 200 and seen[-1] == seen[-200]

    until(stuck)
    peer_case.headers.view(np.uint8).reshape(BLOCKS, -1)[:] = 0
    peer_case.slots[:] = 0xAB
    served = 0
    into = np.zeros_like(peer_case.data)
    try:
        while True:
            arrived = connection.take_read(BLOCKS, SPEC.part_bytes, [into.reshape(-1).data], Hashing(0))
            if arrived.reason:
                break
            served += 1
    except (EOFError, OSError):
        pass
    assert 0 < served < repeat
    assert not (into == 0xAB).all(axis=1).any(), "not even a whole block"
    connection.stream.close()


# -- TLS -----------------------------------------------------------------------------------------------


def test_over_tls(segment_world: World, peer_case: Case, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from kvpool_proto.tls import Tls
    from unit.tls_world import Pki

    pki = Pki(tmp_path / "pki")
    pki.issue("node")
    pki.issue("worker")
    stranger = Pki(tmp_path / "other")
    stranger.issue("worker")
    now_ms = Clock().now_ms
    here = Tls(pki.security("node"), print, now_ms)
    peer = PeerWorld(segment_world, wrap=here.wrap_server)
    try:
        made = engine(wrap=Tls(pki.security("worker"), print, now_ms).wrap_client, connections=2)
        case = Case(peer, made, peer_case.chain, peer_case.run, peer_case.data)
        assert case.write() == Written([BLOCKS])
        copied, target = case.read()
        assert (copied.blocks, np.array_equal(target, case.data)) == (BLOCKS, True)
        made.close()
        for security in (stranger.security("worker"), pki.security("worker", ca=stranger.path("ca.pem"), crl="")):
            made = engine(wrap=Tls(security, print, now_ms).wrap_client)
            case = Case(peer, made, peer_case.chain, peer_case.run, peer_case.data)
            assert case.read()[0].reason == "unauthenticated"
            made.close()
        plain = engine()
        assert Case(peer, plain, peer_case.chain, peer_case.run, peer_case.data).read()[0].reason == "peer_unreachable"
        plain.close()
        assert set(peer.refused) == {"unauthenticated"}
    finally:
        peer.close()
    made = engine(wrap=here.wrap_client)
    assert Case(peer_case.peer, made, peer_case.chain, peer_case.run, peer_case.data).read()[0].reason in (
        "unauthenticated",
        "peer_unreachable",
    ), "a data port that speaks plain"
    made.close()


def test_stop_during_a_tls_handshake(segment_world: World, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from kvpool_proto.tls import Tls
    from unit.tls_world import Pki

    pki = Pki(tmp_path)
    pki.issue("node")
    peer = PeerWorld(segment_world, wrap=Tls(pki.security("node"), print, Clock().now_ms).wrap_server)
    with raw(peer) as silent:
        silent.sendall(b"\x16\x03")
        stopping = threading.Thread(target=peer.close)
        stopping.start()
        stopping.join(2)
        assert not stopping.is_alive(), "it waits for nobody"


# -- what is told --------------------------------------------------------------------------------------


def test_each_peer_and_reason_is_told_once_a_minute() -> None:
    now_ms = [0]
    stream = io.StringIO()
    clock = Clock(now_ms=lambda: now_ms[0])
    account = Account(Log("debug", False, Clock(now_ms=lambda: now_ms[0] * 1_000), stream), clock)
    for peer, reason in (("a", "x"), ("a", "x"), ("b", "x"), ("a", "y"), ("b", "x")):
        now_ms[0] += 1
        account.refused(peer, reason, "words")
    assert stream.getvalue().count("peer_refused") == 3
    assert account.counts.refused == {"x": 4, "y": 1}
    now_ms[0] += TOLD_MS
    account.refused("a", "x", "words")
    assert stream.getvalue().count("peer_refused") == 4
    for number in range(TOLD_MAX + 5):
        now_ms[0] += 1
        account.refused(str(number), "z", "words")
    assert stream.getvalue().count("peer_refused") == 4 + TOLD_MAX - 1


def test_errors_of_ours_are_logged_and_end_the_connection(peer_case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(peer_case.peer.host.keyring, "check", broken)
    copied, _ = peer_case.read()
    assert copied.reason == "peer_unreachable"
    until(lambda: "peer_connection_failed" in peer_case.peer.log.getvalue())
