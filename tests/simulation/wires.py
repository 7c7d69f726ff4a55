"""TCP between machines as their kernels keep it: ends of connections, and the ways between them.

Rules
  - Bytes keep their order and come in chunks, each in its time. A sender has at most WINDOW_BYTES on their way, or
    unread at the other side.
  - A direction between two machines may be cut: what goes that way waits, acknowledgements of the other way too. Who
    ends, closes or resets is heard of in the same order as bytes.
  - A connection is made, and its bytes are taken in, by the kernel: also while a process is stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from simulation.hub import Hub, Process, Waiter
from simulation.network import Network

if TYPE_CHECKING:
    from simulation.sockets import Listener

WINDOW_BYTES: Final = 12 << 10
CHUNK_BYTES_MAX: Final = 3 << 10
FOR_EVER_US: Final = 1 << 62


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
        self.born = 0
        """How many ends there were so far."""
        self._processes: set[Process] = set()
        self._ends: list[End] = []

    def open(self, process: Process) -> End:
        """One end of a connection to be."""
        if process not in self._processes:
            self._processes.add(process)
            process.on_end.append(lambda: self._ended(process))
        self.born += 1
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
        self.number = wires.born
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
        waiter.wait(None if until_us >= FOR_EVER_US else max(0, until_us - self.wires.hub.now_us))

    @property
    def writable(self) -> bool:
        """Would sending not wait?"""
        return self.broken or self.shut or self.unread_there < WINDOW_BYTES

    @property
    def readable(self) -> bool:
        """Would receiving not wait?"""
        return bool(self.arrived) or self.broken or self.shut or self.ended
