"""What all parts of the daemon share: the core, the time it is told, and who carries out its effects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from kvpool_master.clock import Clock
from kvpool_master.config import MasterConfig
from kvpool_master.core.messages import Command
from kvpool_master.core.snapshot import Snapshot
from kvpool_master.logs import Log
from kvpool_master.sessions import Sessions
from kvpool_proto.errors import Stopping


class Core(Protocol):
    """The part of core.pool.Pool that the daemon uses."""

    def apply(self, command: Command, now_ms: int) -> Any:
        """The outcome that messages.py names beside the command; KVPoolError if nothing was changed."""
        ...

    def snapshot(self, now_ms: int) -> Snapshot:
        """Counters and sizes."""
        ...

    def check_invariants(self) -> int:
        """Spans checked; AssertionError if an index is wrong."""
        ...


@dataclass(slots=True)
class Shell:
    """The running core. Used by one thread, never across an await, so every command is whole."""

    core: Core
    epoch: int
    config: MasterConfig
    clock: Clock
    log: Log
    sessions: Sessions = field(default_factory=Sessions)
    stopping: bool = False

    def apply(self, command: Command) -> Any:
        """The outcome of a command, its effects on their way. Raises what the core raises."""
        outcome = self.core.apply(command, self.clock.now_ms())
        effects = getattr(outcome, "effects", ())
        if effects:
            self.sessions.carry_out(effects)
        return outcome

    def snapshot(self) -> Snapshot:
        """The core as it is now."""
        return self.core.snapshot(self.clock.now_ms())

    def refuse_when_stopping(self) -> None:
        """Raise Stopping once the Master is on its way out: nothing new is leased, reserved or registered."""
        if self.stopping:
            raise Stopping("the Master is stopping")
