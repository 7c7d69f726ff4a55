"""The node client's session with the Master, pure: events in, instructions out (session_messages.py).

Rules
  - No I/O, no clock, no randomness: `now_ms` is an argument, jitter a number in an event.
  - registration.py does what comes back, in order, and reports how it went as the next event.
  - Only the highest epoch seen is obeyed, by any life of this node client; what a lower one says is ignored.
  - Contents and incarnation stay, whatever becomes of the Master or the connection. Each registration brings the
    handles that are good from then on: former ones, or new ones if the Master has forgotten us.
  - What the Master knows to be dead, and its switch, are carried out before workers are let in under its handles.
  - Orders count only on the session on which they came; an inventory that fails ends the session. Whether we are
    there is answered where it is asked (registration.py), and never waits for an order.
  - The key of an epoch's capabilities is known before the handles that they name.
  - A Master that sends us away is asked again at once, but from the second time in a row on with growing pauses. A
    session that lasted as long as the Master may be silent ends such a row.

  state     what it waits for                                     leaves to
  joining   Registered, Failed, Due (try again)                   serving, stopped (Refused, Stop), draining (Stop)
  serving   Heard, HeartbeatOk, Failed, Forgotten, InventoryDone, joining, stopped (Refused, Stop), draining (Stop)
            InventoryFailed, Due (silence)
  draining  Left                                                  stopped
  stopped   nothing
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final

from kvpool_client.session_messages import (
    Announce,
    AnswerWorkers,
    Bind,
    Bury,
    ClearSlots,
    CloseSession,
    CopySlots,
    Due,
    Event,
    Failed,
    Forgotten,
    Heard,
    HeartbeatOk,
    Instruction,
    InventoryDone,
    InventoryFailed,
    LearnKey,
    Left,
    ObeyEpoch,
    OpenSession,
    Probe,
    Refused,
    Register,
    Registered,
    ReportInventory,
    Retire,
    SetBypass,
    Stop,
    TellTime,
)

BACKOFF_FIRST_MS: Final = 100
HISTORY_MAX: Final = 32


class State(Enum):
    """Where the node client stands with the Master."""

    JOINING = "joining"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


class Session:
    """The state machine. `why` says, for people, what the last change was about.

    epoch: the highest that a former life of this node client obeyed; 0: none.
    """

    def __init__(self, incarnation: int, backoff_max_ms: int, epoch: int = 0) -> None:
        self.state = State.JOINING
        self.why = "starting"
        self.incarnation = incarnation
        self.epoch = epoch
        self.handles: tuple[int, ...] = ()
        self.failures = 0
        self.inventory = 0  # the number of the one on its way
        self._backoff_max_ms = backoff_max_ms
        self._silence_ms = 0
        self._since_ms = 0  # of the state
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
                self._become(State.STOPPED, "left", now_ms)
                return ()
            case State.DRAINING, _:
                return ()
            case _, Stop(False):
                self._become(State.STOPPED, "stopped", now_ms)
                return (CloseSession(),)
            case _, Stop(True):
                # Whether or not we know of it, the Master may have taken us in.
                self._become(State.DRAINING, "leaving for good", now_ms)
                return (CloseSession(), Retire(self.incarnation))
            case _, Refused(why):
                self._become(State.STOPPED, why, now_ms)
                return (CloseSession(),)
            case State.JOINING, _:
                return self._joining(event, now_ms)
            case State.SERVING, _:
                return self._serving(event, now_ms)

    def check(self) -> None:
        """Assert what must hold between events; a failure shows the last events."""
        held = (
            (self.state is not State.SERVING or (self.handles and self.epoch))
            and (self.state in (State.JOINING, State.SERVING) or self._wake_ms is None)
            and (self.state is State.SERVING or not self.inventory)
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
        self.handles = event.handles
        self._silence_ms = event.silence_ms
        obey = self._obey(event.epoch)
        self._become(State.SERVING, "registered", now_ms)
        self._wake_ms = now_ms + event.silence_ms
        bury = (Bury(event.tombstones),) if event.tombstones else ()
        learn = (LearnKey(event.epoch, event.key, event.master_ms, event.former_key_ms),) if event.key else ()
        return (*obey, *bury, SetBypass(event.bypass), *learn, Announce(event.handles), OpenSession())

    def _serving(self, event: Event, now_ms: int) -> tuple[Instruction, ...]:
        match event:
            case Heard(epoch) if epoch < self.epoch:
                return ()
            case Heard(epoch) if epoch > self.epoch:
                return (*self._obey(epoch), *self._again(f"epoch {epoch}: another life of the Master", now_ms))
            case Heard(retired=True):
                return self._again("the Master gave us up", now_ms)
            case Heard():
                self._wake_ms = now_ms + self._silence_ms
                return self._heard(event)
            case HeartbeatOk():
                self._wake_ms = now_ms + self._silence_ms
                return ()
            case Due():
                self._wake_ms = None
                return (Probe(),)
            case Failed(why, jitter):
                return self._broken(why, jitter, now_ms)
            case Forgotten():
                return self._again("the Master does not know us", now_ms)
            case InventoryDone(number) if number == self.inventory:
                self.inventory = 0
                return ()
            case InventoryFailed(number, why, jitter) if number == self.inventory:
                return self._broken(f"inventory {number}: {why}", jitter, now_ms)
            case _:
                return ()

    def _heard(self, event: Heard) -> tuple[Instruction, ...]:
        """What is dead first: an inventory must not tell of it."""
        instructions: list[Instruction] = []
        if event.master_ms:
            instructions.append(TellTime(event.epoch, event.master_ms))
        if event.tombstones:
            instructions.append(Bury(event.tombstones))
        if event.bypass is not None:
            instructions.append(SetBypass(event.bypass))
        if event.clearings:
            instructions.append(ClearSlots(event.clearings))
        if event.orders:
            instructions.append(Bind(event.orders))
        if event.copies:
            instructions.append(CopySlots(event.copies))
        if event.ask_workers:
            instructions.append(AnswerWorkers(event.ask_workers))
        if event.inventory > self.inventory:
            self.inventory = event.inventory
            instructions.append(ReportInventory(event.inventory))
        return tuple(instructions)

    def _broken(self, why: str, jitter: float, now_ms: int) -> tuple[Instruction, ...]:
        """The session is over; join again after a pause."""
        self._leave(why, now_ms)
        return (CloseSession(), *self._retry(why, jitter, now_ms))

    def _again(self, why: str, now_ms: int) -> tuple[Instruction, ...]:
        """The session is over, by the Master's word; join again, at once if this is the first time."""
        self._leave(why, now_ms)
        if self.failures:
            return (CloseSession(), *self._retry(why, 1.0, now_ms))
        self.failures = 1
        return (CloseSession(), Register(self.incarnation))

    def _leave(self, why: str, now_ms: int) -> None:
        if now_ms - self._since_ms >= self._silence_ms:
            self.failures = 0
        self._become(State.JOINING, why, now_ms)

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

    def _become(self, state: State, why: str, now_ms: int) -> None:
        self.state, self.why, self._since_ms, self._wake_ms, self.inventory = state, why, now_ms, None, 0
