"""When to ask somebody who did not answer: a circuit breaker, for the Master, the node client, and each other node.

Rules
  - No answer opens it: from then on nobody waits for the peer. One caller at a time is told to send a probe, which
    nobody waits for either, at intervals that grow up to a bound. An answer, of whatever kind, closes it.
  - Intervals are spread at random (spread: in [0, 1)), so that many workers do not ask a peer that is back at once.
  - Pure; its owner locks.
"""

from __future__ import annotations

from typing import Final

BACKOFF_FIRST_MS: Final = 100
BACKOFF_MAX_MS: Final = 1_000


class Backoff:
    """Waiting times that double from first_ms up to max_ms, each half to one and a half times its length."""

    def __init__(self, first_ms: int = BACKOFF_FIRST_MS, max_ms: int = BACKOFF_MAX_MS) -> None:
        self._first_ms = first_ms
        self._max_ms = max_ms
        self._base_ms = first_ms

    def next_ms(self, spread: float) -> int:
        """How long to wait this time."""
        wait_ms = int(self._base_ms * (0.5 + spread))
        self._base_ms = min(2 * self._base_ms, self._max_ms)
        return wait_ms

    def reset(self) -> None:
        """Begin with first_ms again."""
        self._base_ms = self._first_ms


class Breaker:
    """Closed: calls may go. Open: they may not, and now and then a probe is due. opened: how often it opened so far."""

    def __init__(self, backoff: Backoff | None = None) -> None:
        self.open = False
        self.opened = 0
        self._backoff = backoff or Backoff()
        self._probe_at_ms = 0
        self._probing = False

    def answered(self) -> None:
        """The peer answered, be it with an error of its own."""
        self.open = self._probing = False
        self._backoff.reset()

    def silent(self, now_ms: int, spread: float, *, probe: bool) -> None:
        """A call, or the probe, got no answer. Calls that were under way when the breaker opened change nothing."""
        if self.open and not probe:
            return
        self.opened += not self.open
        self.open, self._probing = True, False
        self._probe_at_ms = now_ms + self._backoff.next_ms(spread)

    def waits(self, now_ms: int) -> bool:
        """Is it open, and nobody to probe now?"""
        return self.open and (self._probing or now_ms < self._probe_at_ms)

    def take_probe(self, now_ms: int) -> bool:
        """True for the one caller who is to probe now."""
        if not self.open or self.waits(now_ms):
            return False
        self._probing = True
        return True
