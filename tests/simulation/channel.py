"""A double of grpc's client side: a channel that the generated stubs take, on the simulated network."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from simulation.hub import Hub, Process, Waiter
from simulation.network import Call, Network, Status, Stream


class SimRpcError(grpc.RpcError):
    """What a call raises, and a stream when it ends badly."""

    def __init__(self, status: Status) -> None:
        super().__init__(f"{status[0].name}: {status[1]}")
        self._status = status

    def code(self) -> grpc.StatusCode:
        """See grpc.Call."""
        return self._status[0]

    def details(self) -> str:
        """See grpc.Call."""
        return self._status[1]

    def trailing_metadata(self) -> tuple[Any, ...]:
        """See grpc.Call."""
        return self._status[2]


class Future:
    """What multicallables return as grpc.Future: the outcome of one call."""

    def __init__(self, hub: Hub, process: Process, cancel: Callable[[], object]) -> None:
        self._hub = hub
        self._process = process
        self._cancel = cancel
        self._status: Status | None = None
        self._reply: Any = None
        self._waiters: list[Waiter] = []
        self._callbacks: list[Callable[[Any], object]] = []

    def settle(self, status: Status, reply: Any) -> None:
        """It is over."""
        self._status, self._reply = status, reply
        for waiter in self._waiters:
            waiter.fire()
        for callback in self._callbacks:
            self._process.spawn(lambda callback=callback: callback(self), "callback")

    def cancel(self) -> bool:
        """See grpc.Future."""
        self._cancel()
        return True

    def cancelled(self) -> bool:
        """See grpc.Future."""
        return self._status is not None and self._status[0] is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        """See grpc.Future."""
        return self._status is not None

    def exception(self, timeout: float | None = None) -> SimRpcError | None:
        """See grpc.Future."""
        self._wait(timeout)
        assert self._status is not None
        if self.cancelled():
            raise grpc.FutureCancelledError
        return None if self._status[0] is grpc.StatusCode.OK else SimRpcError(self._status)

    def result(self, timeout: float | None = None) -> Any:
        """See grpc.Future."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._reply

    def code(self) -> grpc.StatusCode:
        """See grpc.Call."""
        self._wait(None)
        assert self._status is not None
        return self._status[0]

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """See grpc.Future."""
        self._callbacks.append(callback)
        if self._status is not None:
            self._process.spawn(lambda: callback(self), "callback")

    def _wait(self, timeout: float | None) -> None:
        if self._status is None:
            waiter = Waiter(self._hub)
            self._waiters.append(waiter)
            if not waiter.wait(None if timeout is None else int(timeout * 1e6)):
                raise grpc.FutureTimeoutError


class StreamCall(Future):
    """A stream as the stub returns it: an iterator of replies that can be cancelled."""

    def __init__(
        self, channel: Channel, path: str, pack: Callable[[Any], bytes], unpack: Callable[[bytes], Any]
    ) -> None:
        self._stream = Stream(channel.network, channel.process, path, self._hear, self._ended)
        super().__init__(channel.network.hub, channel.process, self._stream.cancel)
        self._pack = pack
        self._unpack = unpack
        self._came: deque[Any] = deque()

    def feed(self, messages: Iterable[Any]) -> None:
        """Send what the caller's iterator gives, from a thread of gRPC's."""
        self._stream.start()
        self._process.spawn(lambda: self._send(messages), "stream")

    def __iter__(self) -> StreamCall:
        return self

    def __next__(self) -> Any:
        while not self._came:
            if self._status is not None:
                if self._status[0] is grpc.StatusCode.OK:
                    raise StopIteration
                raise SimRpcError(self._status)
            waiter = Waiter(self._hub)
            self._waiters.append(waiter)
            waiter.wait()
        return self._came.popleft()

    def is_active(self) -> bool:
        """See grpc.RpcContext."""
        return self._status is None

    def _send(self, messages: Iterable[Any]) -> None:
        try:
            for message in messages:
                if self._status is not None:
                    return
                self._stream.up("message", self._pack(message))
                self._hub.breathe()
        except Exception as error:
            self._hub.note("".join(traceback.format_exception(error)))
            self._stream.abandon((grpc.StatusCode.UNKNOWN, f"Exception iterating requests! {error!r}", ()))
        else:
            self._stream.up("end")

    def _hear(self, message: bytes) -> None:
        self._came.append(self._unpack(message))
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.fire()

    def _ended(self, status: Status) -> None:
        if status[0] is grpc.StatusCode.OK and self._came:
            self._reply = self._came[0]
        self.settle(status, self._reply)


class Channel:
    """grpc.Channel to whatever Master listens, of the process of the thread that makes it."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network = network
        self.process = process
        self._closed = False
        self._open: list[Future] = []

    def unary_unary(
        self, path: str, request_serializer: Any = bytes, response_deserializer: Any = bytes, **_: Any
    ) -> Any:
        """See grpc.Channel."""
        return _Unary(self, path, request_serializer, response_deserializer)

    def stream_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """See grpc.Channel."""

        def call(messages: Iterable[Any], **_: Any) -> StreamCall:
            """Open the stream."""
            self.must_be_open()
            opened = StreamCall(self, path, request_serializer, response_deserializer)
            self._open.append(opened)
            opened.feed(messages)
            return opened

        return call

    def stream_unary(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """See grpc.Channel."""
        return _StreamUnary(self.stream_stream(path, request_serializer, response_deserializer), self)

    def must_be_open(self) -> None:
        """Raise what grpc raises on a channel that was closed."""
        self.process.must_live()
        if self._closed:
            raise ValueError("Cannot invoke RPC on closed channel!")

    def keep(self, future: Future) -> None:
        """Cancel it when the channel is closed."""
        self._open = [one for one in self._open if not one.done()]
        self._open.append(future)

    def close(self) -> None:
        """See grpc.Channel: calls under way are cancelled."""
        self._closed = True
        for future in self._open:
            if not future.done():
                future.cancel()


class _Unary:
    def __init__(self, channel: Channel, path: str, pack: Any, unpack: Any) -> None:
        self._channel = channel
        self._path = path
        self._pack = pack
        self._unpack = unpack

    def __call__(self, request: Any, timeout: float | None = None, wait_for_ready: bool = False, **_: Any) -> Any:
        return self.future(request, timeout, wait_for_ready).result()

    def future(self, request: Any, timeout: float | None = None, wait_for_ready: bool = False, **_: Any) -> Future:
        """Start the call."""
        channel = self._channel
        channel.must_be_open()
        hub = channel.network.hub
        hub.breathe()
        call: Call

        def answer(status: Status, payload: bytes) -> None:
            """The call is over."""
            future.settle(status, self._unpack(payload) if status[0] is grpc.StatusCode.OK else None)

        call = Call(channel.network, channel.process, self._path, self._pack(request), answer)
        future = Future(hub, channel.process, call.cancel)
        channel.keep(future)
        call.start(timeout, wait_for_ready)
        return future


class _StreamUnary:
    def __init__(self, start: Callable[..., StreamCall], channel: Channel) -> None:
        self._start = start
        self._channel = channel

    def __call__(self, messages: Iterable[Any], timeout: float | None = None, **_: Any) -> Any:
        return self.future(messages, timeout).result()

    def future(self, messages: Iterable[Any], timeout: float | None = None, **_: Any) -> StreamCall:
        """Start the call."""
        call = self._start(messages)
        if timeout is not None:
            late: Status = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ())
            hub = self._channel.network.hub
            hub.at(int(timeout * 1e6), lambda: call._stream.abandon(late))
        return call
