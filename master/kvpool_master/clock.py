"""The only reading of time in this package.

Rules
  - What the core is told comes from a clock that runs through suspend and is never set (CLOCK_BOOTTIME).
  - Wall time is for people and for the epoch, never for a deadline.
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
    """now_ms: the core's time. precise_s: for measuring how long something took. wall_s: seconds since 1970."""

    now_ms: Callable[[], int] = _now_ms
    precise_s: Callable[[], float] = time.perf_counter
    wall_s: Callable[[], float] = time.time


SYSTEM = Clock()
