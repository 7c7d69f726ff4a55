"""A double of grpc.aio's server, and an asyncio event loop on virtual time, for the Master's one thread.

The loop runs only when the hub lets it: something arrived, or a timer is due. What it runs takes no time.
"""

from __future__ import annotations

import asyncio
from asyncio import base_events
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import grpc

from simulation.hub import Hub, Process
from simulation.network import OK, Call, Status, Stream


class _NoSelector:
    def select(self, timeout: float | None) -> list[Any]:
        """There is nothing to wait for."""
        return []


class Loop(base_events.BaseEventLoop):
    """An event loop of one process. poke() lets it run soon."""

    def __init__(self, hub: Hub, process: Process) -> None:
        super().__init__()
        self._hub = hub
        self._process = process
        self._selector = _NoSelector()
        self._poked = False
        self._timer_us = 1 << 62

    def time(self) -> float:
        """Virtual seconds."""
        return self._hub.now_us / 1e6

    def poke(self) -> None:
        """Something is to be done now."""
        if not self._poked:
            self._poked = True
            self._hub.at(0, lambda: self._process.post(self.turn))

    def turn(self) -> None:
        """Run all that is ready, and see to the next timer."""
        self._poked = False
        self.call_soon(self.stop)
        self.run_forever()
        while self._ready:
            self.call_soon(self.stop)
            self.run_forever()
        if self._scheduled:
            due_us = int(self._scheduled[0].when() * 1e6) + 1
            if not self._hub.now_us < self._timer_us <= due_us:
                self._timer_us = due_us
                self._hub.at(due_us - self._hub.now_us, self.poke)

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class Aborted(Exception):
    """What abort() of a context raises: the RPC ends with this status."""

    def __init__(self, status: Status) -> None:
        super().__init__(status[1])
        self.status = status


class Context:
    """grpc.aio.ServicerContext: of one RPC."""

    def __init__(self, hub: Hub, deadline_us: int | None, write: Callable[[Any], object]) -> None:
        self._hub = hub
        self._deadline_us = deadline_us
        self._write = write

    def time_remaining(self) -> float | None:
        """See ServicerContext."""
        return None if self._deadline_us is None else (self._deadline_us - self._hub.now_us) / 1e6

    def peer(self) -> str:
        """See ServicerContext."""
        return "simulated"

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[Any, ...] = ()) -> None:
        """See ServicerContext."""
        raise Aborted((code, details, tuple(trailing_metadata)))

    async def write(self, message: Any) -> None:
        """See ServicerContext."""
        self._write(message)


class AioServer:
    """grpc.aio.Server, as far as the Master uses it. listening: from start() to stop()."""

    def __init__(self, hub: Hub, loop: Loop) -> None:
        self._hub = hub
        self._loop = loop
        self._services: list[Any] = []
        self._calls: dict[asyncio.Task[None], Call | Stream] = {}
        self._up: dict[Stream, Incoming] = {}
        self._of: dict[Stream, asyncio.Task[None]] = {}
        self.listening = False

    def add_generic_rpc_handlers(self, handlers: tuple[Any, ...]) -> None:
        """See grpc.aio.Server."""
        self._services += handlers

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """See grpc.aio.Server; the generic ones are the same."""

    def add_insecure_port(self, address: str) -> int:
        """See grpc.aio.Server."""
        return int(address.rpartition(":")[2])

    async def start(self) -> None:
        """See grpc.aio.Server."""
        self.listening = True

    async def stop(self, grace: float | None) -> None:
        """See grpc.aio.Server."""
        self.listening = False
        if self._calls and grace:
            await asyncio.wait(list(self._calls), timeout=grace)
        for task in list(self._calls):
            task.cancel()

    def call(self, call: Call) -> None:
        """A unary request arrived."""
        method = self._method(call.path)

        async def run() -> None:
            """Carry it out and answer."""
            context = Context(self._hub, None if call.deadline_us >= 1 << 62 else call.deadline_us, lambda _: None)
            try:
                reply = await method.unary_unary((method.request_deserializer or bytes)(call.payload), context)
            except Aborted as aborted:
                call.reply(aborted.status, b"")
            else:
                call.reply(OK, (method.response_serializer or bytes)(reply))

        self._start(run(), call)

    def stream(self, stream: Stream) -> None:
        """A stream was opened."""
        method = self._method(stream.path)
        pack = method.response_serializer
        incoming = self._up[stream] = Incoming(method.request_deserializer)
        context = Context(self._hub, None, lambda message: stream.down(pack(message)))

        async def run() -> None:
            """Serve it to its end."""
            try:
                if method.stream_stream is not None:
                    await method.stream_stream(incoming, context)
                else:
                    stream.down(pack(await method.stream_unary(incoming, context)))
            except Aborted as aborted:
                stream.finish(aborted.status)
            else:
                stream.finish(OK)
            finally:
                self._up.pop(stream, None)
                self._of.pop(stream, None)

        self._of[stream] = self._start(run(), stream)

    def message(self, stream: Stream, kind: str, message: bytes) -> None:
        """A message, or the end of the other side's messages, arrived on a stream."""
        incoming = self._up.get(stream)
        if incoming is not None:
            incoming.put(kind, message)
            self._loop.poke()

    def drop(self, stream: Stream) -> None:
        """The other side of the stream is gone."""
        task = self._of.get(stream)
        if task is not None:
            task.cancel()
            self._loop.poke()

    def die(self) -> list[Call | Stream]:
        """The process ends: the calls and streams whose connections break."""
        return list(self._calls.values())

    def _method(self, path: str) -> Any:
        details = SimpleNamespace(method=path, invocation_metadata=())
        return next(found for service in self._services if (found := service.service(details)) is not None)

    def _start(self, work: Any, of: Call | Stream) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._calls[task] = of
        task.add_done_callback(self._done)
        self._loop.poke()
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._calls[task]
        if not task.cancelled() and task.exception() is not None:
            self._hub.fail(f"an RPC of the Master raised {task.exception()!r}")


class Incoming:
    """The messages of a stream as a handler sees them."""

    def __init__(self, unpack: Callable[[bytes], Any]) -> None:
        self._unpack = unpack
        self._came: deque[tuple[str, bytes]] = deque()
        self._wake: asyncio.Event = asyncio.Event()

    def put(self, kind: str, message: bytes) -> None:
        """One more."""
        self._came.append((kind, message))
        self._wake.set()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        while not self._came:
            self._wake.clear()
            await self._wake.wait()
        kind, message = self._came[0]
        if kind == "end":
            raise StopAsyncIteration
        self._came.popleft()
        return self._unpack(message)
