"""Virtual time and the order of all that happens: one heap of events, processes, and their threads as greenlets.

Rules
  - One real thread. A simulated thread runs until it waits; the next event is the earliest one, ties in order of birth.
  - Time passes only between events, and in `breathe`, where a running thread may lose the processor.
  - A process that is stopped does nothing: what is meant for it waits, in order, until it goes on. One that was killed
    never runs again; its greenlets are unwound at teardown, when nothing that they do counts any more.
  - What is random comes from `rng`, so that a seed decides everything.
  - A checker never raises where it looks: fail() notes the first failure, and run() raises it after the event.
"""

from __future__ import annotations

import heapq
import random
import traceback
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from greenlet import GreenletExit, getcurrent, greenlet

TRACE_EVENTS: Final = 100
MS: Final = 1_000
"""Microseconds in one."""


class SimulationFailure(AssertionError):
    """A checker's word, with the seed, the time and the last events."""


class Hub:
    """The scheduler of one world. options: of the command that replays it. verbose: print every noted event."""

    def __init__(self, seed: int, *, options: str = "", verbose: bool = False) -> None:
        self.seed = seed
        self._options = options
        self.rng = random.Random(seed)
        self.now_us = 0
        self.steps = 0
        self.digest = 0
        """Of all noted events: equal seeds give equal digests."""
        self.thread: Thread | None = None
        """The one that runs now; None: the hub itself, or an event."""
        self.breath_permille = 60
        self._verbose = verbose
        self._trace: deque[str] = deque(maxlen=TRACE_EVENTS)
        self._heap: list[tuple[int, int, Callable[[], object]]] = []
        self._born = 0
        self._failure: str | None = None
        self._greenlet = getcurrent()
        self.processes: list[Process] = []

    def at(self, delay_us: int, event: Callable[[], object]) -> None:
        """Let `event` happen delay_us from now."""
        self._born += 1
        heapq.heappush(self._heap, (self.now_us + max(delay_us, 0), self._born, event))

    def run(self, until_us: int, done: Callable[[], bool] = lambda: False) -> bool:
        """Let events happen until that time, or until done() after one. False: the time came first."""
        while self._heap and self._heap[0][0] <= until_us:
            self.now_us, _, event = heapq.heappop(self._heap)
            self.steps += 1
            event()
            if self._failure is not None:
                raise SimulationFailure(self._failure)
            if done():
                return True
        self.now_us = max(self.now_us, until_us)
        return done()

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        line = f"{self.now_us / 1e6:10.6f} {self.thread.label if self.thread else '':<14} {text}"
        self.digest = zlib.crc32(line.encode(), self.digest)
        self._trace.append(line)
        if self._verbose:
            print(line, flush=True)

    def fail(self, text: str) -> None:
        """A checker found something. The first word counts; run() raises it."""
        if self._failure is None:
            events = "\n".join(self._trace)
            self._failure = (
                f"{text}\nseed {self.seed}, {self.now_us / 1e6:.6f} s; replay, from tests/: "
                f"python -m simulation --seed {self.seed}{self._options} -v\n"
                f"the last {len(self._trace)} events:\n{events}"
            )

    @property
    def failed(self) -> bool:
        """Has a checker found something?"""
        return self._failure is not None

    def chance(self, permille: float) -> bool:
        """True so many times of a thousand."""
        return self.rng.random() * 1000 < permille

    def breathe(self) -> None:
        """A point where the running thread may lose the processor, mostly for less than a millisecond."""
        thread = self.thread
        if thread is None:
            return
        thread.process.must_live()
        if self.chance(self.breath_permille):
            kind = self.rng.random()
            longest_us = 300 if kind < 0.8 else 5 * MS if kind < 0.98 else 120 * MS
            self.sleep(self.rng.randrange(longest_us))

    def sleep(self, delay_us: int) -> None:
        """Let the running thread wait so long."""
        Waiter(self).wait(delay_us)

    def enter(self, thread: Thread) -> None:
        """Run a thread until it waits or ends."""
        self.thread = thread
        try:
            thread.greenlet.switch()
        finally:
            self.thread = None

    def leave(self) -> None:
        """Back to the hub, from the thread that waits."""
        self._greenlet.switch()

    def teardown(self) -> None:
        """End all processes and unwind all greenlets."""
        for process in self.processes:
            process.end("teardown")
        for process in self.processes:
            process.unwind()
        self._heap.clear()


class Process:
    """One process of the world.

    on_end: what the kernel does when it ends, however that happens. on_unwind: what the simulation does afterwards.
    """

    def __init__(self, hub: Hub, name: str, machine: str) -> None:
        self.hub = hub
        self.name = name
        self.machine = machine
        self.alive = True
        self.stopped = False
        self.stopped_us = 0
        """When it was stopped last."""
        self.on_end: list[Callable[[], object]] = []
        self.on_unwind: list[Callable[[], object]] = []
        self._inbox: deque[Callable[[], object]] = deque()
        self._threads: list[Thread] = []
        hub.processes.append(self)

    def must_live(self) -> None:
        """Raise GreenletExit in the threads of a process that has ended."""
        if not self.alive:
            raise GreenletExit

    def post(self, action: Callable[[], object]) -> None:
        """Do something in this process: now, when it goes on, or never."""
        if self.stopped:
            self._inbox.append(action)
        elif self.alive:
            action()

    def spawn(self, work: Callable[[], object], name: str) -> Thread:
        """Start a thread; it begins at an event of its own."""
        thread = Thread(self, work, name)
        if self.alive:
            self._threads.append(thread)
            self.hub.at(0, lambda: self.post(lambda: thread.finished or self.hub.enter(thread)))
        return thread

    def stop(self) -> None:
        """SIGSTOP."""
        if self.alive and not self.stopped:
            self.stopped, self.stopped_us = True, self.hub.now_us
            self.hub.note(f"{self.name} is stopped")

    def go_on(self) -> None:
        """SIGCONT: what waited happens, in order."""
        if self.stopped and self.alive:
            self.stopped = False
            self.hub.note(f"{self.name} goes on after {(self.hub.now_us - self.stopped_us) / 1e6:.3f} s")
            waiting, self._inbox = self._inbox, deque()
            while waiting:
                self.post(waiting.popleft())

    def end(self, how: str) -> None:
        """It is no more: by SIGKILL or by itself. The kernel takes back what it held."""
        if self.alive:
            self.alive = self.stopped = False
            self.hub.note(f"{self.name} ends: {how}")
            self._inbox.clear()
            for action in self.on_end:
                action()

    def unwind(self) -> None:
        """Let the frames of its threads go; the process has ended, so nothing that they do counts."""
        for action in self.on_unwind:
            action()
        for thread in self._threads:
            if not thread.finished and not thread.greenlet.dead:
                self.hub.thread = thread
                try:
                    thread.greenlet.throw(GreenletExit)
                except BaseException:  # whatever a dead process says
                    pass
                finally:
                    self.hub.thread = None
        self._threads.clear()


class Thread:
    """One thread of a process."""

    def __init__(self, process: Process, work: Callable[[], object], name: str) -> None:
        self.process = process
        self.label = f"{process.name}/{name}" if name else process.name
        self.finished = False
        self.waiters: list[Waiter] = []
        self.facts: dict[str, Any] = {}
        """What checkers remember of this thread."""
        self.greenlet = greenlet(lambda: self._main(work), parent=process.hub._greenlet)

    def _main(self, work: Callable[[], object]) -> None:
        hub = self.process.hub
        try:
            work()
        except GreenletExit:
            pass
        except BaseException as error:
            if self.process.alive:
                trace = "".join(traceback.format_exception(error))
                hub.fail(f"thread {self.label} died of {error!r}\n{trace}")
        finally:
            self.finished = True
            for waiter in self.waiters:
                waiter.fire()


class Waiter:
    """Something that the running thread waits for, once."""

    __slots__ = ("_hub", "_parked", "_thread", "done", "timed_out", "value")

    def __init__(self, hub: Hub) -> None:
        assert hub.thread is not None, "only a simulated thread can wait"
        self._hub = hub
        self._thread = hub.thread
        self._parked = False
        self.done = False
        self.timed_out = False
        self.value: Any = None

    def fire(self, value: object = None) -> None:
        """It has come: the thread goes on. Only the first time counts."""
        if not self.done:
            self.done, self.value = True, value
            if self._parked:
                self._hub.at(0, lambda: self._thread.process.post(self._resume))

    def wait(self, timeout_us: int | None = None) -> bool:
        """Wait for it; False: not within the time. Raises GreenletExit if the process ends meanwhile."""
        self._thread.process.must_live()
        if not self.done:
            if timeout_us is not None:
                self._hub.at(timeout_us, self._timeout)
            self._parked = True
            self._hub.leave()
            self._thread.process.must_live()
        return not self.timed_out

    def _timeout(self) -> None:
        if not self.done:
            self.timed_out = True
            self.fire()

    def _resume(self) -> None:
        if self._thread.process.alive:
            self._hub.enter(self._thread)
