"""master_client.py: calls to a Master that answers, refuses, hangs or is not there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from kvpool_client.breaker import BACKOFF_FIRST_MS
from kvpool_client.clock import SYSTEM, Clock
from kvpool_client.master_client import MasterClient
from kvpool_proto import pool_pb2 as pb
from kvpool_proto import pool_pb2_grpc as pb_grpc
from kvpool_proto.errors import DeadlinePassed, ProtocolError, UnknownLease, Unreachable
from kvpool_proto.status import CODES, DETAILS_KEY, trailing_metadata


class Scripted:
    """A Master of two methods. While `hang` is not set, Renew waits for it."""

    def __init__(self) -> None:
        self.server = grpc.server(ThreadPoolExecutor(4), options=(("grpc.so_reuseport", 0),))
        self.renewed: list[pb.RenewRequest] = []
        self.released = threading.Event()
        self.go = threading.Event()
        self.go.set()
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        methods = {name: getattr(self, name, None) for name in pb.DESCRIPTOR.services_by_name["Pool"].methods_by_name}
        pb_grpc.add_PoolServicer_to_server(type("Servicer", (), methods), self.server)
        self.server.start()

    def Renew(self, request: pb.RenewRequest, context: Any) -> pb.RenewReply:
        self.renewed.append(request)
        self.go.wait(30)
        if request.lease_id == b"garbage":
            context.set_trailing_metadata(((DETAILS_KEY, b"\xff"),))
            context.abort(grpc.StatusCode.UNAVAILABLE, "not ours")
        if request.lease_id == b"unknown":
            error = UnknownLease("no such lease")
            context.set_trailing_metadata(trailing_metadata(error))
            context.abort(CODES[error.code], str(error))
        return pb.RenewReply(lease_ms=7)

    def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseReply:
        self.released.set()
        return pb.ReleaseReply()


@pytest.fixture
def master() -> Iterator[Scripted]:
    master = Scripted()
    yield master
    master.go.set()
    master.server.stop(None).wait()


def renew(client: MasterClient, timeout_ms: int = 20_000, lease_id: bytes = b"x", **how: bool) -> int:
    request = pb.RenewRequest(lease_id=lease_id)
    return client.call(client.pool.Renew, request, SYSTEM.now_ms() + timeout_ms, **how).lease_ms


def test_answers_and_refusals(master: Scripted) -> None:
    client = MasterClient(f"127.0.0.1:{master.port}")
    assert renew(client) == 7
    with pytest.raises(UnknownLease, match="no such lease"):
        renew(client, lease_id=b"unknown")
    assert renew(client) == 7  # a refusal is an answer
    with pytest.raises(ProtocolError):
        renew(client, lease_id=b"garbage")
    assert (renew(client), client.breaks) == (7, 0)
    with pytest.raises(DeadlinePassed):
        renew(client, timeout_ms=0)
    assert renew(client) == 7
    client.close()
    with pytest.raises(Unreachable, match="closed"):
        renew(client)


def test_a_master_that_hangs_costs_one_deadline_and_is_found_again(master: Scripted) -> None:
    now_ms = [SYSTEM.now_ms()]
    client = MasterClient(f"127.0.0.1:{master.port}", Clock(now_ms=lambda: now_ms[0]), lambda: 0.5)
    master.go.clear()

    def ask(timeout_ms: int = 20_000, **how: bool) -> int:
        request = pb.RenewRequest(lease_id=b"x")
        return client.call(client.pool.Renew, request, now_ms[0] + timeout_ms, **how).lease_ms

    with pytest.raises(Unreachable, match="DEADLINE_EXCEEDED"):
        ask(timeout_ms=100)
    for _ in range(50):
        with pytest.raises(Unreachable, match="being probed"):
            ask()
    assert len(master.renewed) == 1
    master.go.set()
    assert not master.released.is_set()
    assert ask(patient=True) == 7  # whoever is not waited for may ask all the same, and closes the breaker
    assert ask() == 7
    master.go.clear()
    with pytest.raises(Unreachable, match="DEADLINE_EXCEEDED"):
        ask(timeout_ms=100)
    master.go.set()
    now_ms[0] += BACKOFF_FIRST_MS
    with pytest.raises(Unreachable, match="being probed"):
        ask()  # sends the probe, waits for nothing
    assert master.released.wait(20)
    end_s = time.perf_counter() + 20
    while True:
        try:
            assert ask() == 7
            break
        except Unreachable:
            assert time.perf_counter() < end_s
    assert client.breaks == 2
    client.close()


def test_a_master_that_is_not_there(master: Scripted) -> None:
    client = MasterClient("127.0.0.1:1")
    began_s = time.perf_counter()
    with pytest.raises(Unreachable, match="UNAVAILABLE"):
        renew(client, timeout_ms=10_000)
    for _ in range(100):
        with pytest.raises(Unreachable):
            renew(client, timeout_ms=10_000)
    assert time.perf_counter() - began_s < 5
    client.close()
    again = MasterClient("127.0.0.1:1")
    with pytest.raises(Unreachable):
        renew(again, timeout_ms=300, again=True)  # waits for a connection, within its deadline
    again.close()
