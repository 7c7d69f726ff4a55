"""peer/pool.py and peer/pull.py: connections that are kept, and blocks as they are."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvpool_client.clock import SYSTEM, Clock
from kvpool_client.peer import pool as pool_module
from kvpool_client.peer.pool import Connections
from kvpool_client.peer.pull import PeerPuller
from kvpool_client.transfer_engine import Copied, Written
from kvpool_proto.capability import READ
from kvpool_proto.errors import PeerBusy, PeerUnreachable, ProtocolError
from unit.peer_world import SPEC, WAIT_S, Case, hello, port, until

# -- connections ---------------------------------------------------------------------------------------


@pytest.fixture
def idle_clock() -> list[int]:
    return [0]


@pytest.fixture
def connections(idle_clock: list[int]) -> Iterator[Connections]:
    made = Connections(2_000, 2_000, None, Clock(now_ms=lambda: idle_clock[0]))
    yield made
    made.close()


def soon() -> float:
    return SYSTEM.precise_s() + WAIT_S


def test_connections_are_kept_and_closed_when_idle(
    peer_case: Case, connections: Connections, idle_clock: list[int]
) -> None:
    address, server = peer_case.peer.address, peer_case.peer.server
    with connections.use(address, soon()) as first, connections.use(address, soon()) as second:
        assert first is not second
    idle_clock[0] += pool_module.IDLE_MS - 1
    with connections.use(address, soon()) as again:
        assert again.reused
        assert again in (first, second)
    idle_clock[0] += 1
    with connections.use(address, soon()) as kept:
        assert kept is again
        until(lambda: server.open_connections == 1)
    with connections.use(address, soon(), fresh=True) as fresh:
        assert not fresh.reused


def test_there_is_a_limit_to_connections(
    peer_case: Case, connections: Connections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "CONNECTIONS_MAX", 2)
    address = peer_case.peer.address
    with (
        connections.use(address, soon()),
        connections.use(address, soon()),
        pytest.raises(PeerBusy),
        connections.use(address, soon()),
    ):
        pass
    with connections.use(address, soon(), fresh=True):
        until(lambda: peer_case.peer.server.open_connections == 2)


def test_closing_ends_what_is_under_way(peer_case: Case, connections: Connections) -> None:
    with pytest.raises((EOFError, OSError)), connections.use(peer_case.peer.address, soon()) as connection:
        (connections.close(), connection.take_go(1))
    with pytest.raises(PeerUnreachable), connections.use(peer_case.peer.address, soon()):
        pass


def test_an_engine_that_is_closed_misses(peer_case: Case) -> None:
    peer_case.engine.close()
    assert peer_case.read()[0] == Copied(0, "peer_unreachable")
    assert peer_case.write() == Written([0], "peer_unreachable")


# -- pulling -------------------------------------------------------------------------------------------


@pytest.fixture
def puller() -> Iterator[PeerPuller]:
    made = PeerPuller(connect_timeout_ms=2_000, io_timeout_ms=2_000, clock=SYSTEM)
    yield made
    made.close()


def test_blocks_are_pulled_with_their_headers(
    peer_case: Case, puller: PeerPuller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool_client.peer.pull.PULL_BYTES", 5 * SPEC.part_bytes)
    peer_case.write()
    into = np.zeros_like(peer_case.data)
    headers, why = puller.pull(peer_case.grant(READ), 1, [row.data for row in into[1:]])
    assert (why, headers.tobytes()) == ("", peer_case.headers[1:].copy().tobytes())
    assert np.array_equal(into[1:], peer_case.data[1:])
    peer_case.headers["stamp"][8] += 1
    headers, why = puller.pull(peer_case.grant(READ), 0, [row.data for row in into])
    assert (len(headers), why) == (8, "stale_stamp")
    headers, why = puller.pull(peer_case.grant(READ, key=b"x" * 32), 0, [row.data for row in into])
    assert (len(headers), why) == (0, "capability")


def test_a_pull_that_fails(peer_case: Case, puller: PeerPuller) -> None:
    into = [row.data for row in np.zeros_like(peer_case.data)]
    with pytest.raises(ProtocolError):
        puller.pull(replace(peer_case.grant(READ), address="x"), 0, into)

    def talk(sock: socket.socket) -> None:
        hello(sock)
        closing.set()
        sock.recv(1 << 16)
        sock.recv(1)

    closing = threading.Event()
    with port(talk) as address:
        thread = threading.Thread(target=lambda: (closing.wait(WAIT_S), puller.close()))
        thread.start()
        with pytest.raises(PeerUnreachable):
            puller.pull(replace(peer_case.grant(READ), address=address), 0, into)
        thread.join()
