"""A scripted core, and a Master around it on loopback: what goes in and out of the shell can be told exactly."""

from __future__ import annotations

import asyncio
import io
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
import uvloop

from kvpool_master.clock import SYSTEM, Clock
from kvpool_master.config import MasterConfig
from kvpool_master.core.liveness import Liveness
from kvpool_master.core.messages import Command, Done, Tick
from kvpool_master.core.settings import Settings
from kvpool_master.core.snapshot import PoolCounters, Snapshot
from kvpool_master.logs import Log
from kvpool_master.server import MasterServer
from kvpool_proto import pool_pb2 as pb
from kvpool_proto import pool_pb2_grpc as pb_grpc
from kvpool_proto.errors import KVPoolError
from kvpool_proto.status import from_rpc_error

EPOCH = 7
SCENE_S = 30.0
CLOCK = Clock(SYSTEM.now_ms, SYSTEM.precise_s, lambda: float(EPOCH))
"""The machine's, on the 1st of January 1970: the first epoch is EPOCH."""


class Stopped:
    """A clock that a test moves on, as it goes on while a process is stopped."""

    def __init__(self, ms: int = 1_000_000) -> None:
        self.ms = ms

    def clock(self) -> Clock:
        return Clock(lambda: self.ms, SYSTEM.precise_s, lambda: float(EPOCH))


def picture(**changes: Any) -> Snapshot:
    """A snapshot of an empty pool, with changes."""
    empty = Snapshot(
        epoch=EPOCH,
        namespaces=(),
        nodes=(),
        leases=0,
        reservations=0,
        ring_blocks=0,
        directory_bytes=0,
        counters=PoolCounters(),
    )
    return replace(empty, **changes)


class ScriptedCore:
    """Answers each type of command with what `answers` holds for it: a value, an error to raise, or a function."""

    def __init__(
        self, answers: dict[type, Any] | None = None, holders: dict[int, tuple[str, str]] | None = None
    ) -> None:
        self.answers = answers or {}
        self.commands: list[Command] = []
        self.picture = picture()
        self.reserved_anything = False
        self.grace_ms = 0
        self.liveness = Liveness(Settings(), 0)
        self.holders = holders or {}
        """Node and data address of a segment."""

    def apply(self, command: Command, now_ms: int) -> Any:
        if not isinstance(command, Tick):
            self.commands.append(command)
        answer = self.answers.get(type(command), Done())
        if isinstance(answer, Exception):
            raise answer
        return answer(command) if callable(answer) else answer

    def grace_left_ms(self, now_ms: int) -> int:
        return self.grace_ms

    def holder_of(self, handle: int) -> tuple[str, str]:
        return self.holders.get(handle, ("", ""))

    def snapshot(self, now_ms: int) -> Snapshot:
        return self.picture

    def check_invariants(self) -> int:
        return 3


class Calls:
    """A client of one Master: stubs, and the server itself to look into."""

    def __init__(self, server: MasterServer, log: io.StringIO, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.log = log
        self.channel = channel
        self.pool: Any = pb_grpc.PoolStub(channel)
        self.nodes: Any = pb_grpc.NodesStub(channel)
        self.admin: Any = pb_grpc.AdminStub(channel)


@asynccontextmanager
async def serving(core: Any, clock: Clock = CLOCK, **changes: Any) -> AsyncIterator[Calls]:
    """A Master around `core`, or around what a function makes as Pool is made, with `changes` to its configuration.

    Its state directory is its own unless one is given.
    """
    with tempfile.TemporaryDirectory() as state_dir:
        config = MasterConfig(
            listen="127.0.0.1:0", http="127.0.0.1:0", plaintext=True, drain_ms=1_000, state_dir=state_dir
        )
        text = io.StringIO()
        make_core = core if callable(core) else lambda *_: core
        log = Log("debug", True, clock, text)
        server = MasterServer(replace(config, **changes), log=log, clock=clock, make_core=make_core)
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
                yield Calls(server, text, channel)
        finally:
            await server.stop()


def play(scene: Callable[[], Awaitable[None]]) -> None:
    """Run a scene on the loop that the Master uses; a scene that hangs fails."""

    async def bounded() -> None:
        async with asyncio.timeout(SCENE_S):
            await scene()

    uvloop.run(bounded())


async def refused(call: Any) -> KVPoolError:
    """The error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


def untimed(down: pb.SessionDown) -> pb.SessionDown:
    """A message of a session without the Master's time, which each must tell."""
    assert down.master_ms > 0
    bare = pb.SessionDown()
    bare.CopyFrom(down)
    bare.ClearField("master_ms")
    return bare


async def until(condition: Callable[[], Any]) -> None:
    """Wait for an event on the loop, with a deadline."""
    deadline = time.monotonic() + SCENE_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0)
