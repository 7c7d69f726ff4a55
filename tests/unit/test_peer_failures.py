"""peer/engine.py when the other side, or the way there, does what it should not."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
import pytest

from kvpool_client.clock import SYSTEM
from kvpool_client.devices.base import Contiguous
from kvpool_client.headers import COMMITTED
from kvpool_client.peer import pool as pool_module
from kvpool_client.peer import wire
from kvpool_client.peer.stream import abort
from kvpool_client.peer.wire import Answer
from kvpool_client.transfer_engine import Copied, Term, Written
from kvpool_proto.capability import WRITE
from unit.peer_world import BLOCKS, HELLO_BYTES, SPEC, WAIT_S, Case, engine, hello, port, relayed, term, until
from unit.transfer_world import DEVICE, EPOCH


def at(case: Case, address: str, **changes: Any) -> tuple[Copied, Written]:
    """A read and a write of all blocks at that address."""
    return case.read(address=address, **changes)[0], case.write(address=address, **changes)


# -- a data port that lies -----------------------------------------------------------------------------

LIES = {
    "more blocks than asked for": wire.pack_answer(Answer(False, 5)),
    "nothing and no reason": wire.pack_answer(Answer(False, 0)),
    "no answer": b"\xff" * 64,
    "a long text": wire.HEAD.pack(wire.ANSWER, 60_000, 0),
    "a reason of its own": wire.pack_answer(Answer(False, 0, "free_beer")),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_lies_are_misses(peer_case: Case, lie: bytes) -> None:
    def talk(sock: socket.socket) -> None:
        hello(sock)
        sock.recv(1 << 16)
        sock.sendall(lie)
        while sock.recv(1 << 16):
            pass

    with port(talk) as address:
        copied, written = at(peer_case, address)
        peer_case.engine.close()
    assert (copied.blocks, copied.reason) == (0, "protocol")
    assert (written.blocks, written.reason) == ([0], "protocol")


@pytest.mark.parametrize("told", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", wire.pack_answer(Answer(True, 1))])
def test_what_does_not_speak_our_protocol(peer_case: Case, told: bytes) -> None:
    with port(lambda sock: (sock.recv(HELLO_BYTES), sock.sendall(told))) as address:
        copied, written = at(peer_case, address)
    reason = "protocol" if told else "peer_unreachable"
    assert (copied.reason, written.reason) == (reason, reason)
    assert written.confirmed, "nothing was asked"


def test_bytes_of_other_blocks_are_misses(peer_case: Case) -> None:
    """It sends headers that are right, and bytes that are not."""
    peer_case.write()
    headers = peer_case.headers[:4].copy().tobytes()

    def talk(sock: socket.socket) -> None:
        hello(sock)
        sock.recv(1 << 16)
        sock.sendall(wire.pack_answer(Answer(False, 4)) + headers + bytes(4 * SPEC.part_bytes) + headers)
        while sock.recv(1 << 16):
            pass

    with port(talk) as address:
        assert peer_case.read(address=address)[0] == Copied(0, "verify_failed")
        peer_case.engine.close()


def test_headers_that_change_meanwhile_are_misses(peer_case: Case) -> None:
    peer_case.write()
    before, after = peer_case.headers[:4].copy(), peer_case.headers[:4].copy()
    after["stamp"][2] += 1
    payload = peer_case.data[:4].tobytes()

    def talk(sock: socket.socket) -> None:
        hello(sock)
        sock.recv(1 << 16)
        sock.sendall(wire.pack_answer(Answer(False, 4)) + before.tobytes() + payload + after.tobytes())
        while sock.recv(1 << 16):
            pass

    with port(talk) as address:
        assert peer_case.read(address=address)[0] == Copied(2, "stale_stamp")
        peer_case.engine.close()


# -- a way that breaks ---------------------------------------------------------------------------------


def test_nobody_is_there(peer_case: Case) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    copied, written = at(peer_case, address)
    assert copied == Copied(0, "peer_unreachable")
    assert written == Written([0], "peer_unreachable", confirmed=True), "nothing was asked"


@pytest.mark.parametrize("address", ["", "nowhere", "host:port", "host:99999", ":5"])
def test_no_address_at_all(peer_case: Case, address: str) -> None:
    assert at(peer_case, address) == (Copied(0, "protocol"), Written([0], "protocol"))


def test_a_name_that_does_not_resolve(peer_case: Case) -> None:
    assert peer_case.read(address="nowhere.invalid:1")[0] == Copied(0, "peer_unreachable")


def test_a_name_that_takes_for_ever_to_resolve(peer_case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(pool_module.socket, "getaddrinfo", lambda *_, **__: go.wait(WAIT_S))
    impatient = Case(peer_case.peer, engine(connect_timeout_ms=50), b"x" * 400, peer_case.run, peer_case.data)
    for _ in range(pool_module.RESOLVING_MAX + 1):
        assert impatient.read(address="name:1", chain=peer_case.chain)[0] == Copied(0, "peer_unreachable")
    go.set()
    impatient.engine.close()


def test_names_are_resolved_for_every_connection(peer_case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = socket.getaddrinfo, []

    def resolve(host: str, *rest: Any, **named: Any) -> Any:
        asked.append(host)
        return real("127.0.0.1", *rest, **named)

    monkeypatch.setattr(pool_module.socket, "getaddrinfo", resolve)
    address = f"moving.example:{peer_case.peer.server.port}"
    assert peer_case.write(address=address) == Written([BLOCKS])
    assert peer_case.read(address=address)[0].blocks == BLOCKS
    assert asked == ["moving.example"], "a kept connection"
    peer_case.engine.close()
    peer_case.engine = engine()
    peer_case.read(address=address)
    assert len(asked) >= 2
    peer_case.engine.close()


def test_a_port_that_says_nothing(peer_case: Case) -> None:
    impatient = Case(
        peer_case.peer, engine(io_timeout_ms=50, connect_timeout_ms=100), peer_case.chain, peer_case.run, peer_case.data
    )
    with port(lambda sock: sock.recv(1 << 16) and sock.recv(1)) as address:
        copied, written = at(impatient, address)
        assert copied == Copied(0, "peer_unreachable")
        assert written == Written([0], "peer_unreachable", confirmed=True), "it never said hello"
        impatient.engine.close()


def test_a_port_that_stalls_after_hello(peer_case: Case) -> None:
    impatient = Case(peer_case.peer, engine(io_timeout_ms=50), peer_case.chain, peer_case.run, peer_case.data)

    def talk(sock: socket.socket) -> None:
        hello(sock)
        while sock.recv(1 << 16):
            pass

    with port(talk) as address:
        copied, written = at(impatient, address)
        assert copied == Copied(0, "peer_unreachable")
        assert written == Written([0], "peer_unreachable", confirmed=False)
        assert impatient.read(address=address, term=term(20))[0] == Copied(0, "time_over")
        assert impatient.write(address=address, term=term(20)) == Written([0], "time_over", confirmed=False)
        impatient.engine.close()


def test_a_call_whose_time_is_up_asks_nothing(peer_case: Case) -> None:
    assert peer_case.read(term=term(0))[0] == Copied(0, "time_over")
    assert peer_case.write(term=term(-5)) == Written([0], "time_over")
    ruled = Term(SYSTEM, SYSTEM.now_ms() + 5_000, "time_over", EPOCH, lambda: EPOCH + 1)
    assert peer_case.write(term=ruled) == Written([0], "stale_epoch")
    assert peer_case.states() == {0}


def test_a_connection_that_breaks_in_the_middle(peer_case: Case) -> None:
    peer_case.write()
    left = [5 * SPEC.part_bytes]

    def change(got: bytes, there: bool) -> bytes | None:
        if there:
            return got
        passed, left[0] = got[: max(left[0], 0)], left[0] - len(got)
        return passed or None

    with relayed(peer_case.peer, change) as relay:
        copied, target = peer_case.read(address=relay.address)
        peer_case.engine.close()
    assert copied == Copied(4, "peer_unreachable")
    assert np.array_equal(target[:4], peer_case.data[:4])


def test_a_write_whose_answer_is_lost_is_not_confirmed(peer_case: Case) -> None:
    answers = [0]

    def change(got: bytes, there: bool) -> bytes | None:
        answers[0] += not there
        return got if answers[0] < 3 else None  # hello, go

    with relayed(peer_case.peer, change) as relay:
        assert peer_case.write(address=relay.address) == Written([0], "peer_unreachable", confirmed=False)
        peer_case.engine.close()
    until(lambda: peer_case.peer.host.writes.open == 0)
    assert set(peer_case.headers["state"][:4].tolist()) == {COMMITTED}, "it arrived, but nobody heard so"


def test_a_kept_connection_that_died_is_replaced(peer_case: Case) -> None:
    """The peer closes at the moment of the next question, so that nobody could know before."""
    breaks = threading.Event()

    def change(got: bytes, there: bool) -> bytes | None:
        if there and breaks.is_set():
            breaks.clear()
            return None
        return got

    with relayed(peer_case.peer, change) as relay:
        assert peer_case.write(address=relay.address) == Written([BLOCKS])
        for _ in range(2):
            breaks.set()
            assert peer_case.read(address=relay.address)[0].blocks == BLOCKS
        breaks.set()
        assert peer_case.write(address=relay.address) == Written([BLOCKS]), "not yet told to go on: asked once more"
        assert relay.connections == 4
        peer_case.engine.close()


def test_a_fresh_connection_that_dies_is_not_tried_again(peer_case: Case) -> None:
    asked = [0]

    def talk(sock: socket.socket) -> None:
        hello(sock)
        asked[0] += 1
        sock.recv(1 << 16)

    with port(talk) as address:
        copied, written = at(peer_case, address)
    assert (copied.reason, written.reason, written.confirmed) == ("peer_unreachable", "peer_unreachable", False)
    assert asked == [2]


def test_a_connection_that_the_port_closed_is_not_used(peer_case: Case) -> None:
    assert peer_case.write() == Written([BLOCKS])
    for handle in list(peer_case.peer.server._handles):  # pyright: ignore[reportPrivateUsage]
        abort(handle)
    until(lambda: peer_case.peer.server.open_connections == 0)
    assert peer_case.read()[0].blocks == BLOCKS


# -- progress ------------------------------------------------------------------------------------------


def test_progress_is_told_and_may_stop_a_write(peer_case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool_client.peer.call.PROGRESS_BYTES", 5 * SPEC.slot_bytes)
    told: list[list[int]] = []

    def progress(written: list[int]) -> str:
        told.append(written)
        return "" if len(told) == 0 else "enough"

    copy = peer_case.peer.copy(
        SPEC, peer_case.chain, [peer_case.run],
        DEVICE.bind(Contiguous(peer_case.data), SPEC.part_bytes, writable=False), WRITE
    )  # fmt: skip
    written = peer_case.engine.write([copy], term(), progress)
    assert told == [[8]]
    assert (written.blocks[0] in (8, 12), written.reason in ("", "enough"), written.confirmed) == (True, True, True)
    assert np.array_equal(peer_case.slots[: written.blocks[0], : SPEC.part_bytes], peer_case.data[: written.blocks[0]])


def test_what_progress_raises_is_raised_when_nothing_is_under_way(
    peer_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool_client.peer.call.PROGRESS_BYTES", 1)

    def progress(written: list[int]) -> str:
        raise ZeroDivisionError

    made = engine(connections=2, piece_bytes=1)
    copy = peer_case.peer.copy(
        SPEC, peer_case.chain, [peer_case.run],
        DEVICE.bind(Contiguous(peer_case.data), SPEC.part_bytes, writable=False), WRITE
    )  # fmt: skip
    try:
        with pytest.raises(ZeroDivisionError):
            made.write([copy], term(), progress)
    finally:
        made.close()
    until(lambda: peer_case.peer.host.writes.open == 0)
