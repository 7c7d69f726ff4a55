"""The way to the Master over TLS: vetted before it is used, again after new files, and never to a refused one."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvpool_client.channel import NotVetted, VettedChannel, generation_of, open_channel
from kvpool_client.clock import SYSTEM, Clock
from kvpool_client.master_client import MasterClient
from kvpool_proto import pool_pb2 as pb
from kvpool_proto import pool_pb2_grpc as pb_grpc
from kvpool_proto.errors import Unreachable
from kvpool_proto.tls import LOOK_MS, Tls
from unit.tls_world import Pki

TIMEOUT_S = 10.0
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100))


class Master:
    """A gRPC server with a certificate of `pki`; its port stays the same over its lives."""

    def __init__(self, pki: Pki) -> None:
        self.port = 0
        self.metadata: list[dict[str, str]] = []
        self.serve(pki)

    def serve(self, pki: Pki) -> None:
        files = [(pki.folder / file).read_bytes() for file in ("master.key", "master.pem", "ca.pem")]
        credentials = grpc.ssl_server_credentials([(files[0], files[1])], files[2], require_client_auth=True)
        self.server = grpc.server(ThreadPoolExecutor(4), options=(("grpc.so_reuseport", 0),))
        pb_grpc.add_PoolServicer_to_server(self, self.server)
        self.port = self.server.add_secure_port(f"127.0.0.1:{self.port}", credentials)
        self.server.start()

    def stop(self) -> None:
        self.server.stop(None).wait()

    def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseReply:
        self.metadata.append(dict(context.invocation_metadata()))
        return pb.ReleaseReply(released=len(request.lease_ids))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class World:
    """A Master, a worker's files, and a clock that a test moves on."""

    def __init__(self, folder: Path) -> None:
        self.pki = Pki(folder)
        for name in ("master", "worker"):
            self.pki.issue(name)
        self.token = self.pki.put("token", b"sesame\n", 0o600)
        self.ahead_ms = 0
        self.clock = Clock(now_ms=lambda: SYSTEM.now_ms() + self.ahead_ms)
        self.master = Master(self.pki)
        self.channels: list[Any] = []

    def tls(self, **changes: str) -> Tls:
        files = {"token_file": self.token} | changes
        return Tls(self.pki.security("worker", **files), lambda _: None, self.clock.now_ms)

    def channel(self, host: str = "127.0.0.1", **changes: str) -> Any:
        channel = open_channel(f"{host}:{self.master.port}", self.tls(**changes), OPTIONS, self.clock)
        self.channels.append(channel)
        return channel

    def later(self) -> None:
        """It is time to look at files, and to vet again."""
        self.ahead_ms += LOOK_MS

    def stop(self) -> None:
        for channel in self.channels:
            channel.close()
        self.master.stop()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "pki")
    yield world
    world.stop()


def release(channel: Any, **given: Any) -> pb.ReleaseReply:
    request = pb.ReleaseRequest(lease_ids=[b"x"])
    return pb_grpc.PoolStub(channel).Release(request, **{"timeout": TIMEOUT_S, **given})


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(NotVetted) as caught:
        call()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return caught.value.details()


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_first_call_waits_to_be_vetted_and_carries_the_token(world: World) -> None:
    channel = world.channel()
    assert release(channel).released == 1
    assert release(channel).released == 1
    assert [each["authorization"] for each in world.master.metadata] == ["Bearer sesame"] * 2
    assert generation_of(channel) == 1


def test_plain_text_is_grpcs_own_channel(world: World) -> None:
    channel = open_channel("127.0.0.1:1", None, OPTIONS, world.clock)
    assert isinstance(channel, grpc.Channel)
    assert generation_of(channel) == 0
    channel.close()


def test_a_call_without_time_does_not_wait(world: World) -> None:
    channel = world.channel()
    future = pb_grpc.PoolStub(channel).Release.future
    assert "no attempt yet" in refused(lambda: future(pb.ReleaseRequest(), timeout=TIMEOUT_S))
    until(lambda: generation_of(channel) == 1)
    assert future(pb.ReleaseRequest(), timeout=TIMEOUT_S).result() is not None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("revoked", "certificate revoked"),
        ("expired", "certificate has expired"),
        ("another CA", "unable to get local issuer|self.signed"),
        ("another name", "not valid for 'localhost'"),
        ("no list", "CRL has expired"),
    ],
)
def test_a_master_with_a_wrong_certificate_is_refused(world: World, tmp_path: Path, wrong: str, words: str) -> None:
    host, changes = "127.0.0.1", {}
    match wrong:
        case "revoked":
            world.pki.revoke("master")
        case "expired":
            world.pki.issue("master", days=-1)
        case "another CA":
            changes = {"ca": Pki(tmp_path / "other").path("ca.pem"), "crl": ""}
        case "another name":
            world.pki.issue("master", hosts=["127.0.0.1"])
            host = "localhost"
        case _:
            world.pki.revoke(days=-1)
    world.master.stop()
    world.master.serve(world.pki)
    channel = world.channel(host, **changes)
    for _ in range(2):
        text = refused(lambda: release(channel))
        assert re.search(words, text), text
        world.later()
    assert world.master.metadata == []


def test_the_channel_trusts_that_one_certificate(world: World) -> None:
    """Nobody else of the same CA may take the Master's place between two attempts."""
    channel = world.channel()
    release(channel)
    world.master.stop()
    world.pki.issue("master")
    world.master.serve(world.pki)
    with pytest.raises(grpc.RpcError):  # by gRPC: it has not been vetted yet
        release(channel)
    assert len(world.master.metadata) == 1
    world.later()
    until(lambda: generation_of(channel) == 2)
    assert release(channel).released == 1


def test_a_master_that_is_revoked_loses_its_connections(world: World) -> None:
    channel = world.channel()
    release(channel)
    world.pki.revoke("master")
    world.later()
    assert "certificate revoked" in refused(lambda: release(channel))
    world.later()
    assert "certificate revoked" in refused(lambda: release(channel))
    assert len(world.master.metadata) == 1
    world.pki.revoke()
    world.later()
    assert release(channel).released == 1


def test_a_new_list_alone_leaves_the_connection(world: World) -> None:
    channel = world.channel()
    release(channel)
    world.pki.revoke("worker")
    world.later()
    release(channel)
    assert generation_of(channel) == 1


def test_a_new_token_goes_with_the_next_call(world: World) -> None:
    channel = world.channel()
    release(channel)
    world.pki.put("token", b"open\n", 0o600)
    world.later()
    release(channel)
    assert [each["authorization"] for each in world.master.metadata] == ["Bearer sesame", "Bearer open"]
    assert generation_of(channel) == 2


def test_files_that_do_not_fit_change_nothing(world: World) -> None:
    channel = world.channel()
    release(channel)
    world.pki.put("worker.key", b"nothing", 0o600)
    world.later()
    assert release(channel).released == 1
    assert generation_of(channel) == 1


def test_a_list_that_cannot_be_read_stops_all_calls(world: World) -> None:
    channel = world.channel()
    release(channel)
    (world.pki.folder / "crl.pem").unlink()
    world.later()
    assert "tls_crl" in refused(lambda: release(channel))
    world.pki.revoke()
    world.later()
    assert release(channel).released == 1


def test_a_master_that_refuses_us_is_told_so(world: World) -> None:
    world.pki.issue("worker", days=-1)
    assert refused(lambda: release(world.channel())) != ""
    assert world.master.metadata == []


def test_a_master_that_is_away_is_met_when_it_is_back(world: World) -> None:
    world.master.stop()
    channel = world.channel()
    assert "refused" in refused(lambda: release(channel)).lower()
    caught: list[Any] = []

    def patient() -> None:
        caught.append(release(channel, wait_for_ready=True))

    thread = threading.Thread(target=patient)
    thread.start()
    world.master.serve(world.pki)
    thread.join(TIMEOUT_S)
    assert [reply.released for reply in caught] == [1]


def test_a_silent_master_costs_a_call_its_deadline_only(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        channel = VettedChannel(f"127.0.0.1:{silent.getsockname()[1]}", world.tls(), OPTIONS, world.clock)
        began_ms = world.clock.now_ms()
        refused(lambda: release(channel, timeout=0.2))
        assert world.clock.now_ms() - began_ms >= 200
        channel.close()


def test_a_closed_channel_says_so(world: World) -> None:
    channel = world.channel()
    release(channel)
    channel.close()
    with pytest.raises(ValueError, match="closed channel"):
        release(channel)


def test_the_master_client_gives_up_on_a_refused_master_and_comes_back(world: World) -> None:
    world.pki.revoke("master")
    client = MasterClient(f"127.0.0.1:{world.master.port}", world.clock, lambda: 0.0, world.tls())
    call: Callable[[], Any] = lambda: client.call(  # noqa: E731
        client.pool.Release, pb.ReleaseRequest(), world.clock.now_ms() + 5_000
    )
    with pytest.raises(Unreachable, match="certificate revoked"):
        call()
    with pytest.raises(Unreachable, match="being probed"):
        call()
    world.pki.revoke()

    def answered() -> bool:
        world.later()
        try:
            call()
        except Unreachable:
            return False
        return True

    until(answered)
    client.close()
