"""The only reading of time in this package.

Rules
  - Deadlines and liveness are told from a clock that runs through suspend and is never set (CLOCK_BOOTTIME).
  - Wall time is for people and for incarnations, never for a deadline.
  - Who needs time takes a Clock, so that a test can hand in its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


def _now_ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


@dataclass(frozen=True, slots=True)
class Clock:
    """now_ms: for deadlines. precise_s: for measuring how long something took. wall_s: seconds since 1970."""

    now_ms: Callable[[], int] = _now_ms
    precise_s: Callable[[], float] = time.perf_counter
    wall_s: Callable[[], float] = time.time


SYSTEM = Clock()


def new_incarnation(clock: Clock, former: int = 0) -> int:
    """A number for this life of a node client that is above those of its former lives: the wall's milliseconds."""
    return max(former + 1, int(clock.wall_s() * 1000))
