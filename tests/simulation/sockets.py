"""What data ports and those who use them take for `socket` and `select`: descriptors of the ends in wires.py.

Bytes get into a process's memory, and out of it, only while it runs. Every chunk that is copied so is told to
`before_copy` and `after_copy` of the wires, in the thread that copies.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Final

from simulation.hub import Waiter
from simulation.wires import CHUNK_BYTES_MAX, FOR_EVER_US, WINDOW_BYTES, End, Wires

_TIMEVAL: Final = struct.Struct("@ll")


class Socket:
    """socket.socket: a descriptor of an End. wires: of the world, set in a subclass."""

    wires: ClassVar[Wires]

    def __init__(self, *_: object) -> None:
        assert self.wires.hub.thread is not None
        self._adopt(self.wires.open(self.wires.hub.thread.process))

    def _adopt(self, end: End) -> None:
        self.end = end
        self._closed = False
        self._timeout_us = FOR_EVER_US
        self._receive_us = FOR_EVER_US

    @classmethod
    def of(cls, end: End) -> Socket:
        """A descriptor of an end that is there."""
        made = cls.__new__(cls)
        made._adopt(end)
        return made

    def __hash__(self) -> int:
        return self.end.number  # so that the order of a set is the same each time

    def dup(self) -> Socket:
        """See socket.socket."""
        self.end.handles += 1
        return type(self).of(self.end)

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def settimeout(self, seconds: float | None) -> None:
        """See socket.socket."""
        self._timeout_us = FOR_EVER_US if seconds is None else int(seconds * 1e6)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """See socket.socket."""
        if isinstance(value, bytes) and (level, option) == (socket.SOL_SOCKET, socket.SO_RCVTIMEO):
            seconds, part_us = _TIMEVAL.unpack(value)
            self._receive_us = seconds * 1_000_000 + part_us or FOR_EVER_US

    def getpeername(self) -> tuple[str, int]:
        """See socket.socket."""
        assert self.end.far is not None
        return self.end.far.machine, 0

    def connect(self, where: tuple[Any, ...]) -> None:
        """See socket.socket."""
        end, wires = self.end, self.wires
        host, port = where[:2]
        machine = wires.machines.get(host)
        if machine is None:
            raise OSError(errno.EHOSTUNREACH, "no route to host")
        end.send(machine, lambda: self._arrive((host, port), machine))
        until_us = wires.hub.now_us + self._timeout_us
        while not (end.connected or end.broken):
            if wires.hub.now_us >= until_us:
                raise TimeoutError("timed out")
            end.wait(until_us)
        if end.broken:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")

    def _arrive(self, where: tuple[str, int], machine: str) -> None:
        end, listener = self.end, self.wires.listeners.get(where)
        if not end.handles:
            return  # given up meanwhile
        if listener is None:
            self.wires.hub.at(self.wires.network.delay_us(), end.break_off)
            return
        far = self.wires.open(listener.process)
        far.far, end.far = end, far

        def connected() -> None:
            end.connected = True
            end.changed()

        far.connected = True
        far.send(end.machine, connected)
        listener.take_in(type(self).of(far))

    def sendmsg(self, pieces: Sequence[memoryview], _: object = (), flags: int = 0) -> int:
        """See socket.socket; never waits."""
        assert flags & socket.MSG_DONTWAIT
        end = self._usable()
        if end.broken:
            raise ConnectionResetError(errno.ECONNRESET, "connection reset by peer")
        if end.shut:
            raise BrokenPipeError(errno.EPIPE, "broken pipe")
        room = min(WINDOW_BYTES - end.unread_there, CHUNK_BYTES_MAX)
        if room <= 0:
            raise BlockingIOError(errno.EAGAIN, "would wait")
        data = bytearray()
        for piece in pieces:
            data += piece[: room - len(data)]
            if len(data) == room:
                break
        assert end.far is not None
        end.unread_there += len(data)
        end.send(end.far.machine, lambda far=end.far: far.take_in(bytes(data)))
        self.wires.after_copy()
        return len(data)

    def recv_into(self, piece: memoryview, _: int = 0, flags: int = 0) -> int:
        """See socket.socket."""
        return self.recvmsg_into([piece], 0, flags)[0]

    def recvmsg_into(self, pieces: Sequence[memoryview], _: int = 0, flags: int = 0) -> tuple[int, None, None, None]:
        """See socket.socket."""
        end, hub = self._usable(), self.wires.hub
        until_us = hub.now_us + self._receive_us
        rest = [piece for piece in pieces if len(piece)]
        got = 0
        while rest:
            if end.arrived:
                self.wires.before_copy()
                size = end.read(rest[0])
                got += size
                rest = [rest[0][size:], *rest[1:]] if size < len(rest[0]) else rest[1:]
                self.wires.after_copy()
                if not flags & socket.MSG_WAITALL:
                    break
            elif end.broken and not got:
                raise ConnectionResetError(errno.ECONNRESET, "connection reset by peer")
            elif end.readable:
                break
            elif hub.now_us >= until_us:
                if not got:
                    raise BlockingIOError(errno.EAGAIN, "nothing came")
                break
            else:
                end.wait(until_us)
        return got, None, None, None

    def shutdown(self, how: int) -> None:
        """See socket.socket."""
        if self._closed or self.end.far is None or self.end.broken:
            raise OSError(errno.ENOTCONN, "not connected")
        self.end.shut = True
        self.end.say_over()

    def close(self) -> None:
        """See socket.socket."""
        if not self._closed:
            self._closed = True
            self.end.handles -= 1
            if self.end.handles == 0:
                self.end.say_over()

    def _usable(self) -> End:
        self.end.process.must_live()
        if self._closed:
            raise OSError(errno.EBADF, "bad file descriptor")
        return self.end


class Listener:
    """A listening socket."""

    def __init__(self, wires: Wires, where: tuple[str, int]) -> None:
        assert wires.hub.thread is not None
        if where in wires.listeners:
            raise OSError(errno.EADDRINUSE, "address already in use")
        self.process = wires.hub.thread.process
        self._wires = wires
        self._where = where
        self._came: deque[Socket] = deque()
        self._waiter: Waiter | None = None
        self._shut = False
        wires.listeners[where] = self
        self.process.on_end.append(self.close)

    def getsockname(self) -> tuple[str, int]:
        """See socket.socket."""
        return self._where

    def take_in(self, connection: Socket) -> None:
        """The kernel has a connection for us."""
        self._came.append(connection)
        self._wake()

    def accept(self) -> tuple[Socket, tuple[str, int]]:
        """See socket.socket."""
        while not self._came:
            if self._shut:
                raise OSError(errno.EINVAL, "not listening")
            self._waiter = Waiter(self._wires.hub)
            self._waiter.wait()
        connection = self._came.popleft()
        return connection, connection.getpeername()

    def shutdown(self, how: int) -> None:
        """See socket.socket."""
        self._shut = True
        self._wake()

    def close(self) -> None:
        """See socket.socket."""
        if self._wires.listeners.get(self._where) is self:
            del self._wires.listeners[self._where]
        while self._came:
            self._came.popleft().close()

    def _wake(self) -> None:
        if self._waiter is not None:
            self._waiter.fire()


class Poll:
    """select.poll, of one socket."""

    def __init__(self) -> None:
        self._end: Any = None
        self._events = 0

    def register(self, sock: Socket, events: int) -> None:
        """See select.poll."""
        self._end, self._events = sock.end, events

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        """See select.poll."""
        hub = self._end.wires.hub
        until_us = hub.now_us + int(timeout_ms * 1000)
        while True:
            ready = self._events & select.POLLOUT and self._end.writable
            if ready or (self._events & select.POLLIN and self._end.readable):
                return [(0, self._events)]
            if hub.now_us >= until_us:
                return []
            self._end.wait(until_us)


def socket_double(wires: Wires) -> dict[str, Any]:
    """What stands in for names of the module `socket`."""

    def create_server(where: tuple[str, int], **_: object) -> Listener:
        """socket.create_server."""
        return Listener(wires, where)

    return {"socket": type("Socket", (Socket,), {"wires": wires}), "create_server": create_server}


def select_double() -> SimpleNamespace:
    """Stands in for the module `select`."""
    return SimpleNamespace(poll=Poll, POLLIN=select.POLLIN, POLLOUT=select.POLLOUT, POLLHUP=select.POLLHUP)
