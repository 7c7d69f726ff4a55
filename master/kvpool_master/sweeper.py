"""The only timer of the Master: one Tick of the core every tick_ms, and how late the loop runs."""

from __future__ import annotations

import asyncio

from kvpool_master.metrics import LATE_BOUNDS_S, Histogram
from kvpool_master.shell import Shell


class Sweeper:
    """Ticks until it is cancelled. late: seconds between when a Tick was due and when it ran."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._period_s = shell.config.tick_ms / 1000
        self.late = Histogram(LATE_BOUNDS_S)

    async def run(self) -> None:
        """Tick for ever."""
        while True:
            due_s = self._shell.clock.precise_s() + self._period_s
            await asyncio.sleep(self._period_s)
            self.tick(due_s)

    def tick(self, due_s: float) -> None:
        """One Tick that was due at `due_s` on the precise clock. Never raises."""
        self.late.observe(max(0.0, self._shell.clock.precise_s() - due_s))
        self._shell.tick()
