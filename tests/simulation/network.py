"""The network between the machines and the Master, below gRPC: calls and streams that are slow, lost or broken.

Rules
  - A call may be lost, delayed, overtaken by others, carried out twice, or lose its reply; its caller hears of it by
    its deadline. A stream keeps its order; it breaks whole, for both sides.
  - While a machine is cut off, everything from and to it waits. Connections that are cut off for KEEPALIVE_US break.
  - A process that ends closes its connections, and the other side hears of it, unless it is cut off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import grpc

from simulation.hub import MS, Hub, Process

if TYPE_CHECKING:
    from simulation.master_process import MasterProcess

KEEPALIVE_US: Final = 10_000 * MS
AGAIN_US: Final = 100 * MS
"""A call that waits for a connection tries so often."""

Status = tuple[grpc.StatusCode, str, tuple[Any, ...]]
"""Code, details, trailing metadata."""
OK: Final[Status] = (grpc.StatusCode.OK, "", ())


def unavailable(why: str) -> Status:
    """What gRPC says when a connection breaks or cannot be made."""
    return (grpc.StatusCode.UNAVAILABLE, why, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """How bad the network is, in permille of the messages."""

    lost: int = 8
    reply_lost: int = 8
    twice: int = 12
    slow: int = 30
    very_slow: int = 4


class Network:
    """All connections of a world. `listener`: the Master that has the port now."""

    def __init__(self, hub: Hub, manners: Manners) -> None:
        self.hub = hub
        self.manners = manners
        self.listener: MasterProcess | None = None
        self.cut: set[str] = set()
        self.streams: list[Stream] = []
        self._held: dict[str, list[Callable[[], None]]] = {}

    def delay_us(self) -> int:
        """How long one message takes."""
        rng, manners = self.hub.rng, self.manners
        if self.hub.chance(manners.very_slow):
            return rng.randrange(50 * MS, 3_000 * MS)
        if self.hub.chance(manners.slow):
            return rng.randrange(2 * MS, 60 * MS)
        return rng.randrange(150, 800)

    def carry(self, machine: str, arrive: Callable[[], None], delay_us: int | None = None) -> None:
        """Let `arrive` happen at the other side of the machine's link, after its delay, or when it is mended."""

        def arrived() -> None:
            """It is there, unless the link is cut."""
            if machine in self.cut:
                self.hold(machine, lambda: self.carry(machine, arrive))
            else:
                arrive()

        self.hub.at(self.delay_us() if delay_us is None else delay_us, arrived)

    def hold(self, machine: str, again: Callable[[], None]) -> None:
        """Do something when the machine is reached again."""
        self._held.setdefault(machine, []).append(again)

    def cut_off(self, machine: str) -> None:
        """Partition the machine from the Master."""
        if machine not in self.cut:
            self.cut.add(machine)
            self.hub.note(f"{machine} is cut off")
            since_us = self.hub.now_us
            self.hub.at(KEEPALIVE_US, lambda: self._keepalive(machine, since_us))

    def mend(self, machine: str) -> None:
        """End the partition: what waited arrives; some connections are found broken."""
        if machine in self.cut:
            self.cut.discard(machine)
            self.hub.note(f"{machine} is reached again")
            if self.hub.chance(300):
                self.break_streams(machine, "connection reset")
            for again in self._held.pop(machine, []):
                again()

    def break_streams(self, machine: str, why: str) -> None:
        """Both sides of all streams of the machine find their connection broken, each in its time."""
        for stream in [one for one in self.streams if one.process.machine == machine]:
            stream.broken(why)

    def _keepalive(self, machine: str, since_us: int) -> None:
        if machine in self.cut and self.hub.now_us - since_us >= KEEPALIVE_US:
            self.break_streams(machine, "keepalive timeout")


class Call:
    """One unary call: from the process that asks to whatever Master listens, and back."""

    def __init__(
        self, network: Network, process: Process, path: str, payload: bytes, answer: Callable[[Status, bytes], object]
    ) -> None:
        self._network = network
        self.process = process
        self.path = path
        self.payload = payload
        self._answer = answer
        self.deadline_us = 1 << 62
        self.closed = False
        self._wait_for_ready = False

    def start(self, timeout_s: float | None, wait_for_ready: bool) -> None:
        """Send it. The answer comes once, in the process that asked, by the deadline."""
        hub, network = self._network.hub, self._network
        self._wait_for_ready = wait_for_ready
        if timeout_s is not None:
            self.deadline_us = hub.now_us + int(timeout_s * 1e6)
            late: Status = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ())
            hub.at(int(timeout_s * 1e6), lambda: self._close(late, b""))
        if hub.chance(network.manners.lost):
            hub.note(f"{self.path} is lost")
            if hub.chance(500):
                network.carry(self.process.machine, lambda: self._close(unavailable("connection reset"), b""))
            return
        network.carry(self.process.machine, self._arrive)
        if hub.chance(network.manners.twice):
            network.carry(self.process.machine, self._again, hub.rng.randrange(4_000 * MS))

    def reply(self, status: Status, payload: bytes) -> None:
        """The Master's answer, or the word that its connection broke, on its way back."""
        if self._network.hub.chance(self._network.manners.reply_lost):
            self._network.hub.note(f"the reply to {self.path} is lost")
            return
        self._network.carry(self.process.machine, lambda: self._close(status, payload))

    def _again(self) -> None:
        self._network.hub.note(f"{self.path} of {self.process.name} arrives again")
        self._arrive()

    def _arrive(self) -> None:
        hub, master = self._network.hub, self._network.listener
        if master is not None and master.listening:
            master.process.post(lambda: master.take_call(self))
        elif self._wait_for_ready and hub.now_us < self.deadline_us:
            hub.at(AGAIN_US, lambda: self._network.carry(self.process.machine, self._arrive))
        else:
            self.reply(unavailable("connection refused"), b"")

    def _close(self, status: Status, payload: bytes) -> None:
        if not self.closed:
            self.closed = True
            self.process.post(lambda: self._answer(status, payload))

    def cancel(self) -> None:
        """The caller wants no answer any more."""
        self._close((grpc.StatusCode.CANCELLED, "Locally cancelled", ()), b"")


class Stream:
    """One stream: messages up in order, messages down in order, then one status.

    hear(message) and ended(status) happen in the process that opened it; the Master's side is `far`, once it is there.
    """

    def __init__(
        self,
        network: Network,
        process: Process,
        path: str,
        hear: Callable[[bytes], object],
        ended: Callable[[Status], object],
    ) -> None:
        self._network = network
        self.process = process
        self.path = path
        self._hear = hear
        self._ended = ended
        self._over = False
        self._far_over = False
        self._last_us = {"up": 0, "down": 0}
        self._ways: dict[str, deque[Callable[[], object]]] = {"up": deque(), "down": deque()}
        self._early: list[tuple[str, bytes]] = []
        self.far: Any = None
        network.streams.append(self)
        process.on_end.append(self.cancel)

    def start(self) -> None:
        """Connect."""
        self._carry("up", self._arrive)

    def up(self, kind: str, message: bytes = b"") -> None:
        """Send a "message" to the Master, or the "end" of our side."""
        if not self._over:
            self._carry("up", lambda: self._to_far(kind, message))

    def down(self, message: bytes) -> None:
        """Send a message to the process that opened it."""
        self._carry("down", lambda: self._over or self.process.post(lambda: self._over or self._hear(message)))

    def finish(self, status: Status) -> None:
        """The Master's side is over."""
        self._far_over = True
        self._carry("down", lambda: self._end(status))

    def cancel(self) -> None:
        """The near side is over: the Master's side hears of it."""
        self.abandon((grpc.StatusCode.CANCELLED, "Locally cancelled", ()))

    def abandon(self, status: Status) -> None:
        """The near side ends with this status: the Master's side hears of it."""
        if not self._over:
            self._end(status)
            self._carry("up", self._cut_far)

    def broken(self, why: str) -> None:
        """The connection is gone; each side hears of it in its time."""
        self._network.hub.note(f"{self.path} of {self.process.name} breaks: {why}")
        self._network.hub.at(self._network.delay_us(), lambda: self._end(unavailable(why)))
        self._network.hub.at(self._network.delay_us(), self._cut_far)

    def _carry(self, way: str, arrive: Callable[[], object]) -> None:
        hub = self._network.hub
        due_us = max(hub.now_us + self._network.delay_us(), self._last_us[way] + 1)
        self._last_us[way] = due_us
        self._ways[way].append(arrive)
        hub.at(due_us - hub.now_us, lambda: self._next(way))

    def _next(self, way: str) -> None:
        """One more arrives: the first that was sent, also when the link was cut meanwhile."""
        machine, network = self.process.machine, self._network
        if machine in network.cut:
            network.hold(machine, lambda: network.hub.at(network.delay_us(), lambda: self._next(way)))
        else:
            self._ways[way].popleft()()

    def _arrive(self) -> None:
        master = self._network.listener
        if self._over:
            return
        if master is None or not master.listening:
            self._carry("down", lambda: self._end(unavailable("connection refused")))
            return
        self.far = master
        master.process.post(lambda: master.take_stream(self))

    def _to_far(self, kind: str, message: bytes) -> None:
        if self.far is not None and not self._far_over:
            far = self.far
            far.arrived(self, message)
            far.process.post(lambda: far.take_message(self, kind, message))

    def _cut_far(self) -> None:
        if self.far is not None and not self._far_over:
            self._far_over = True
            far = self.far
            far.process.post(lambda: far.drop_stream(self))

    def _end(self, status: Status) -> None:
        if not self._over:
            self._over = True
            if self in self._network.streams:
                self._network.streams.remove(self)
            self.process.post(lambda: self._ended(status))
