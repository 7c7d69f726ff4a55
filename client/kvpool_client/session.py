"""The node client's session with the Master, pure: events in, instructions out.

Rules
  - No I/O, no clock, no randomness: `now_ms` is an argument, jitter a number in an event.
  - registration.py does what comes back, in order, and reports how it went as the next event.
  - Only the highest epoch seen is obeyed; what a lower one says is ignored.
  - The Master has forgotten our contents when it retired us, does not know us, gives us other handles, or is another
    life of itself (epoch). Then all slab tables are cleared and we start again as a new incarnation. While this
    lasts we are fenced: no order is carried out.
  - A dropped connection alone changes nothing: the same incarnation registers again and keeps its contents.

  state     what it waits for                      leaves to
  joining   Registered, Failed, Due (try again)    serving, fenced, stopped (Refused), draining (Stop)
  serving   Heard, HeartbeatOk, Failed, Forgotten  joining, fenced, stopped (Refused), draining (Stop)
  fenced    Cleared                                joining, draining (Stop)
  draining  Left                                   stopped
  stopped   nothing
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final

BACKOFF_FIRST_MS: Final = 100
HISTORY_MAX: Final = 32


class State(Enum):
    """Where the node client stands with the Master."""

    JOINING = "joining"
    SERVING = "serving"
    FENCED = "fenced"
    DRAINING = "draining"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Order:
    """Bind a slab of the segment with this handle."""

    segment: int
    slab: int
    slot_bytes: int


# -- events --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Due:
    """The time that wake_ms() named has come (or start)."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The Master took us in. silence_ms: how long it may say nothing before we ask whether it is there."""

    epoch: int
    handles: tuple[int, ...]
    silence_ms: int


@dataclass(frozen=True, slots=True)
class Heard:
    """A message on the session."""

    epoch: int
    orders: tuple[Order, ...] = ()
    retired: bool = False


@dataclass(frozen=True, slots=True)
class HeartbeatOk:
    """The Master answered when asked whether it is there."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Registering or the session failed: not reached, broken, or refused for now. jitter: in [0, 1)."""

    why: str
    jitter: float


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The Master answers, but does not know us."""


@dataclass(frozen=True, slots=True)
class Refused:
    """For good: superseded by a newer life of this node, or the offer breaks a rule."""

    why: str


@dataclass(frozen=True, slots=True)
class Cleared:
    """All tables are cleared; this is the new incarnation."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The operator wants us to leave."""


@dataclass(frozen=True, slots=True)
class Left:
    """Retiring is done, or given up."""


Event = Due | Registered | Heard | HeartbeatOk | Failed | Forgotten | Refused | Cleared | Stop | Left


# -- instructions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """Register this incarnation -> Registered, Failed, Refused."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Let workers in: the handles are good."""

    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Open the stream of heartbeats -> Heard, Failed, Forgotten, Refused."""


@dataclass(frozen=True, slots=True)
class CloseSession:
    """End the stream; nothing that it still says counts."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask whether the Master is there -> HeartbeatOk, Failed."""


@dataclass(frozen=True, slots=True)
class ObeyEpoch:
    """Write the epoch to the superblocks: writers of the former one stop."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Bind:
    """Carry out orders and report them as done."""

    orders: tuple[Order, ...]


@dataclass(frozen=True, slots=True)
class Clear:
    """Turn workers away, forget all contents -> Cleared."""


@dataclass(frozen=True, slots=True)
class Retire:
    """Tell the Master that this incarnation is gone, as far as it can be reached -> Left, if we are draining."""

    incarnation: int


Instruction = Register | Announce | OpenSession | CloseSession | Probe | ObeyEpoch | Bind | Clear | Retire


class Session:
    """The state machine. `why` says, for people, what the last change was about."""

    def __init__(self, incarnation: int, backoff_max_ms: int) -> None:
        self.state = State.JOINING
        self.why = "starting"
        self.incarnation = incarnation
        self.epoch = 0
        self.handles: tuple[int, ...] = ()
        self.failures = 0
        self._backoff_max_ms = backoff_max_ms
        self._silence_ms = 0
        self._wake_ms: int | None = 0
        self._history: deque[tuple[State, Event]] = deque(maxlen=HISTORY_MAX)

    def wake_ms(self) -> int | None:
        """When Due is wanted; None: never."""
        return self._wake_ms

    def apply(self, event: Event, now_ms: int) -> tuple[Instruction, ...]:
        """Take one event; answers what to do, in order. An event that comes too late for its state does nothing."""
        self._history.append((self.state, event))
        match self.state, event:
            case State.STOPPED, _:
                return ()
            case State.DRAINING, Left():
                self._become(State.STOPPED, "left")
                return ()
            case State.DRAINING, _:
                return ()
            case _, Stop():
                # Whether or not we know of it, the Master may have taken us in.
                self._become(State.DRAINING, "stopping")
                return (CloseSession(), Retire(self.incarnation))
            case _, Refused(why):
                self._become(State.STOPPED, why)
                return (CloseSession(),)
            case State.FENCED, Cleared(incarnation):
                return self._cleared(incarnation)
            case State.JOINING, _:
                return self._joining(event, now_ms)
            case State.SERVING, _:
                return self._serving(event, now_ms)
            case _:
                return ()

    def check(self) -> None:
        """Assert what must hold between events; a failure shows the last events."""
        held = (
            (self.state is not State.SERVING or (self.handles and self.epoch))
            and (self.state in (State.JOINING, State.SERVING) or self._wake_ms is None)
            and (self.state is not State.FENCED or not self.handles)
        )
        assert held, f"{self.state} after {list(self._history)}"

    def _joining(self, event: Event, now_ms: int) -> tuple[Instruction, ...]:
        match event:
            case Due():
                self._wake_ms = None
                return (Register(self.incarnation),)
            case Failed(why, jitter):
                return self._retry(why, jitter, now_ms)
            case Registered():
                return self._registered(event, now_ms)
            case _:
                return ()

    def _registered(self, event: Registered, now_ms: int) -> tuple[Instruction, ...]:
        if event.epoch < self.epoch:
            return self._retry(f"epoch {event.epoch} is over; {self.epoch} is obeyed", 1.0, now_ms)
        known = not self.handles or (event.epoch, event.handles) == (self.epoch, self.handles)
        obey = self._obey(event.epoch)
        if not known:
            # It registered this incarnation as new; it must not go on with contents that it does not know.
            return (*obey, *self._fence("the Master has forgotten our contents"))
        self.handles = event.handles
        self.failures = 0
        self._silence_ms = event.silence_ms
        self._become(State.SERVING, "registered")
        self._wake_ms = now_ms + event.silence_ms
        return (*obey, Announce(event.handles), OpenSession())

    def _serving(self, event: Event, now_ms: int) -> tuple[Instruction, ...]:
        match event:
            case Heard(epoch) if epoch < self.epoch:
                return ()
            case Heard(epoch) if epoch > self.epoch:
                obey = self._obey(epoch)
                return (*obey, CloseSession(), *self._fence(f"epoch {epoch}: another life of the Master"))
            case Heard(_, _, True):
                return (CloseSession(), *self._fence("the Master gave us up"))
            case Heard(_, orders, _):
                self._wake_ms = now_ms + self._silence_ms
                return (Bind(orders),) if orders else ()
            case HeartbeatOk():
                self._wake_ms = now_ms + self._silence_ms
                return ()
            case Due():
                self._wake_ms = None
                return (Probe(),)
            case Failed(why, jitter):
                self._become(State.JOINING, why)
                return (CloseSession(), *self._retry(why, jitter, now_ms))
            case Forgotten():
                return (CloseSession(), *self._fence("the Master does not know us"))
            case _:
                return ()

    def _cleared(self, incarnation: int) -> tuple[Instruction, ...]:
        assert incarnation > self.incarnation
        former, self.incarnation = self.incarnation, incarnation
        self._become(State.JOINING, "contents cleared")
        return (Retire(former), Register(incarnation))

    def _fence(self, why: str) -> tuple[Instruction, ...]:
        self._become(State.FENCED, why)
        self.handles = ()
        return (Clear(),)

    def _obey(self, epoch: int) -> tuple[Instruction, ...]:
        if epoch == self.epoch:
            return ()
        self.epoch = epoch
        return (ObeyEpoch(epoch),)

    def _retry(self, why: str, jitter: float, now_ms: int) -> tuple[Instruction, ...]:
        self.why = why
        ceiling_ms = min(self._backoff_max_ms, BACKOFF_FIRST_MS << min(self.failures, 16))
        self.failures += 1
        self._wake_ms = now_ms + int(ceiling_ms * (0.5 + jitter / 2))
        return ()

    def _become(self, state: State, why: str) -> None:
        self.state, self.why, self._wake_ms = state, why, None
