"""TCP between machines, below Python's sockets: what data ports and those who use them take for `socket` and `select`.

Rules
  - Bytes keep their order and come in chunks, each in its time. A sender has at most WINDOW_BYTES on their way, or
    unread at the other side.
  - A direction between two machines may be cut: what goes that way waits, acknowledgements of the other way too. Who
    ends, closes or resets is heard of in the same order as bytes.
  - A connection is made, and its bytes are taken in, by the kernel: also while a process is stopped. They get into its
    memory when it goes on.
  - Every chunk that is copied from or into memory is told to `before_copy` and `after_copy`, in the thread that copies.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Final

from simulation.hub import Hub, Process, Waiter
from simulation.network import Network

WINDOW_BYTES: Final = 12 << 10
CHUNK_BYTES_MAX: Final = 3 << 10
_TIMEVAL: Final = struct.Struct("@ll")
_FOR_EVER_US: Final = 1 << 62


class Wires:
    """All TCP connections of a world. cut: directions, (from, to), in which nothing arrives now."""

    def __init__(self, hub: Hub, network: Network) -> None:
        self.hub = hub
        self.network = network
        self.cut: set[tuple[str, str]] = set()
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.machines: dict[str, str] = {}
        """By host, as addresses name it."""
        self.before_copy: Callable[[], object] = lambda: None
        self.after_copy: Callable[[], object] = lambda: None
        self._processes: set[Process] = set()
        self._ends: list[End] = []

    def open(self, process: Process) -> End:
        """One end of a connection to be."""
        if process not in self._processes:
            self._processes.add(process)
            process.on_end.append(lambda: self._ended(process))
        end = End(self, process)
        self._ends = [one for one in self._ends if one.handles or one.way]
        self._ends.append(end)
        return end

    def cut_way(self, source: str, target: str) -> None:
        """Let nothing through from one machine to another."""
        if (source, target) not in self.cut:
            self.cut.add((source, target))
            self.hub.note(f"{source} -> {target} is cut")

    def mend_way(self, source: str, target: str) -> None:
        """What waited goes on."""
        if (source, target) in self.cut:
            self.cut.discard((source, target))
            self.hub.note(f"{source} -> {target} is mended")
            for end in list(self._ends):
                end.go_on()

    def reset(self, machine: str) -> None:
        """All connections of a machine break, for both sides."""
        self.hub.note(f"connections of {machine} are reset")
        for end in list(self._ends):
            if end.machine == machine and end.far is not None:
                end.far.break_off()
                end.break_off()

    def _ended(self, process: Process) -> None:
        for end in list(self._ends):
            if end.process is process and end.handles:
                end.handles = 0
                end.say_over()


class End:
    """One end of a connection, as the kernel keeps it. handles: descriptors that mean it; 0: it is closed."""

    def __init__(self, wires: Wires, process: Process) -> None:
        self.wires = wires
        self.process = process
        self.machine = process.machine
        self.far: End | None = None
        self.handles = 1
        self.arrived = bytearray()
        self.unread_there = 0
        """Bytes that were sent and that the other side has not taken, as far as we know."""
        self.connected = self.ended = self.broken = self.shut = False
        self._told = False
        self._waiters: list[Waiter] = []
        self.way: deque[tuple[int, str, Callable[[], object]]] = deque()
        """What is on its way: when it is due, to which machine, what happens there."""
        self._moving = False
        self._credit = 0

    def send(self, target: str, arrive: Callable[[], object]) -> None:
        """Let something happen at the other machine, after all that was sent before."""
        hub = self.wires.hub
        due_us = hub.now_us + self.wires.network.delay_us()
        if self.way:
            due_us = max(due_us, self.way[-1][0] + 1)
        self.way.append((due_us, target, arrive))
        self.go_on()

    def go_on(self) -> None:
        """Move what is on its way, unless the way is cut; and tell what was read."""
        if self.way and not self._moving and (self.machine, self.way[0][1]) not in self.wires.cut:
            self._moving = True
            self.wires.hub.at(self.way[0][0] - self.wires.hub.now_us, self._next)
        self._acknowledge(0)

    def _next(self) -> None:
        self._moving = False
        if (self.machine, self.way[0][1]) not in self.wires.cut:
            self.way.popleft()[2]()
        self.go_on()

    def take_in(self, data: bytes) -> None:
        """Bytes are here."""
        if self.handles and not self.shut:
            self.arrived += data
            self.changed()
        elif self.far is not None:  # nobody wants them: reset
            far = self.far
            self.send(far.machine, far.break_off)

    def read(self, piece: memoryview) -> int:
        """Give bytes that are here to their reader; some, or none."""
        size = min(len(piece), len(self.arrived), CHUNK_BYTES_MAX)
        piece[:size] = self.arrived[:size]
        del self.arrived[:size]
        self._acknowledge(size)
        return size

    def _acknowledge(self, size: int) -> None:
        self._credit += size
        if self._credit and self.far is not None and (self.machine, self.far.machine) not in self.wires.cut:
            self.far.unread_there -= self._credit
            self._credit = 0
            self.far.changed()

    def say_over(self) -> None:
        """Tell the other side, once, that nothing comes any more; that all is lost, if something was not read."""
        if self.far is not None and not self._told and not self.broken:
            self._told = True
            far = self.far
            self.send(far.machine, far.break_off if self.arrived else far.hear_end)
        self.changed()

    def hear_end(self) -> None:
        """The other side says no more."""
        self.ended = True
        self.changed()

    def break_off(self) -> None:
        """The connection is gone, and what was not read with it."""
        self.broken = True
        self.arrived.clear()
        self.changed()

    def changed(self) -> None:
        """Whoever waits looks again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.fire()

    def wait(self, until_us: int) -> None:
        """Until something has changed, or for that long."""
        waiter = Waiter(self.wires.hub)
        self._waiters.append(waiter)
        waiter.wait(None if until_us >= _FOR_EVER_US else max(0, until_us - self.wires.hub.now_us))

    @property
    def writable(self) -> bool:
        """Would sending not wait?"""
        return self.broken or self.shut or self.unread_there < WINDOW_BYTES

    @property
    def readable(self) -> bool:
        """Would receiving not wait?"""
        return bool(self.arrived) or self.broken or self.shut or self.ended


class Socket:
    """socket.socket: a descriptor of an End. wires: of the world, set in a subclass."""

    wires: ClassVar[Wires]

    def __init__(self, *_: object) -> None:
        assert self.wires.hub.thread is not None
        self._adopt(self.wires.open(self.wires.hub.thread.process))

    def _adopt(self, end: End) -> None:
        self.end = end
        self._closed = False
        self._timeout_us = _FOR_EVER_US
        self._receive_us = _FOR_EVER_US

    @classmethod
    def of(cls, end: End) -> Socket:
        """A descriptor of an end that is there."""
        made = cls.__new__(cls)
        made._adopt(end)
        return made

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
        self._timeout_us = _FOR_EVER_US if seconds is None else int(seconds * 1e6)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """See socket.socket."""
        if isinstance(value, bytes) and (level, option) == (socket.SOL_SOCKET, socket.SO_RCVTIMEO):
            seconds, part_us = _TIMEVAL.unpack(value)
            self._receive_us = seconds * 1_000_000 + part_us or _FOR_EVER_US

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
