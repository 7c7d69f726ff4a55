"""The Master's process: the real MasterServer with its real shell, services, sessions and core, on a simulated loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

from kvpool_master.config import MasterConfig
from kvpool_master.core.settings import Settings
from kvpool_master.logs import Log
from kvpool_master.server import MasterServer, StartError
from simulation.clocks import MachineClock
from simulation.hub import Hub, Process
from simulation.loop import AioServer, Loop
from simulation.network import Call, Network, Stream, unavailable

PORT: Final = 50051
TICK_MS: Final = 250
DRAIN_MS: Final = 1_000


class MasterProcess:
    """One life of the Master. state_dir: what outlives it."""

    def __init__(self, network: Network, clock: MachineClock, settings: Settings, state_dir: Path, log: Any) -> None:
        self.hub: Hub = network.hub
        self.born_us = network.hub.now_us
        self._network = network
        self.process = Process(self.hub, "master", "master")
        self.loop = Loop(self.hub, self.process)
        self.server: MasterServer | None = None
        self.grpc: AioServer | None = None
        self.beats_us: dict[str, int] = {}
        """When the last message of a node's session reached this machine, whether or not we were there to read it."""
        self._config = MasterConfig(
            listen=f"127.0.0.1:{PORT}",
            tick_ms=TICK_MS,
            drain_ms=DRAIN_MS,
            core=settings,
            state_dir=str(state_dir),
            plaintext=True,
        )
        self._clock = clock
        self._log = Log("info", False, clock.of_master(), log)
        self.process.on_end.append(self._ended)
        self.process.on_unwind.append(self._unwind)
        network.listener = self
        self._main = self.loop.create_task(self._life())
        self.loop.poke()

    @property
    def listening(self) -> bool:
        """Does it take connections?"""
        return self.process.alive and self.grpc is not None and self.grpc.listening

    @property
    def core(self) -> Any:
        """The running core; None before the start is done."""
        return None if self.server is None else self.server.shell.core

    def stop_cleanly(self) -> None:
        """SIGTERM."""
        if self.server is not None:
            ended = self.server.shell.ended
            self.process.post(lambda: (ended.set(), self.loop.poke()))

    def take_call(self, call: Call) -> None:
        """See AioServer.call."""
        if self.listening:
            assert self.grpc is not None
            self.grpc.call(call)
        else:
            call.reply(unavailable("connection refused"), b"")

    def take_stream(self, stream: Stream) -> None:
        """See AioServer.stream."""
        if self.listening:
            assert self.grpc is not None
            self.grpc.stream(stream)
        else:
            stream.finish(unavailable("connection refused"))

    def take_message(self, stream: Stream, kind: str, message: bytes) -> None:
        """See AioServer.message."""
        if self.grpc is not None:
            self.grpc.message(stream, kind, message)

    def drop_stream(self, stream: Stream) -> None:
        """See AioServer.drop."""
        if self.grpc is not None:
            self.grpc.drop(stream)

    def arrived(self, stream: Stream, message: bytes) -> None:
        """A message of a stream is in our socket."""
        if stream.path.endswith("/Session"):
            self.beats_us[stream.process.machine] = self.hub.now_us

    def make_grpc(self, **_: object) -> AioServer:
        """Stands in for grpc.aio.server."""
        self.grpc = AioServer(self.hub, self.loop)
        return self.grpc

    async def _life(self) -> None:
        try:
            self.server = server = MasterServer(self._config, log=self._log, clock=self._clock.of_master())
            await server.start()
        except StartError as error:
            self.hub.note(f"the Master does not start: {error}")
            self.process.end("not started")
            return
        self.hub.note(f"the Master serves, epoch {server.shell.epoch}")
        await server.shell.ended.wait()
        await server.stop()
        self.process.end(f"failed: {server.shell.failure}" if server.shell.failure else "stopped")

    def _ended(self) -> None:
        if self._network.listener is self:
            self._network.listener = None
        for open_one in self.grpc.die() if self.grpc is not None else ():
            if isinstance(open_one, Call):
                open_one.reply(unavailable("connection reset"), b"")
            else:
                open_one.finish(unavailable("connection reset"))

    def _unwind(self) -> None:
        """Let the frames of its tasks go; whatever they still do reaches nobody."""
        self.loop.set_exception_handler(lambda *_: None)
        for _ in range(3):  # what is cancelled may cancel others, and wait for them
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.turn()
        self.loop.close()
