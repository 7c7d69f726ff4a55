"""The clocks of machines: each has its own boot time and its own rate; its wall clock is set now and then.

What the Master and the node clients take as clocks reads virtual time through these. Reading one is a point where a
client's thread may lose the processor.
"""

from __future__ import annotations

from typing import Final

from kvpool_client.clock import Clock as ClientClock
from kvpool_master.clock import Clock as MasterClock
from simulation.hub import Hub

WALL_START_S: Final = 1_800_000_000
RATE_PPM_MAX: Final = 20


class MachineClock:
    """The clocks of one machine. wall_step_s: how far the wall clock was set, added up."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._boot_us = hub.rng.randrange(10_000_000_000)
        self._rate_ppm = hub.rng.uniform(-RATE_PPM_MAX, RATE_PPM_MAX)
        self.wall_step_s = 0.0

    def now_ms(self) -> int:
        """Milliseconds since boot, without a breath: for checkers and logs."""
        return int(self._boot_us + self._hub.now_us * (1 + self._rate_ppm / 1e6)) // 1000

    def precise_s(self) -> float:
        """Seconds since boot."""
        return (self._boot_us + self._hub.now_us * (1 + self._rate_ppm / 1e6)) / 1e6

    def wall_s(self) -> float:
        """What the machine believes the date to be."""
        return WALL_START_S + self._hub.now_us / 1e6 + self.wall_step_s

    def of_client(self) -> ClientClock:
        """For workers and node clients."""
        return ClientClock(now_ms=self._breathing_ms, precise_s=self.precise_s, wall_s=self.wall_s)

    def of_master(self) -> MasterClock:
        """For the Master, whose one thread never waits while it carries out a command."""
        return MasterClock(now_ms=self.now_ms, precise_s=self.precise_s, wall_s=self.wall_s)

    def _breathing_ms(self) -> int:
        self._hub.breathe()
        return self.now_ms()
