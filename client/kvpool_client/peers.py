"""Which other nodes' data ports can be used now, as far as this process knows.

Rules
  - A node that did not answer is avoided for a while: loads from it are misses at once, and stores ask for room
    elsewhere. Then one call goes first, as the probe of a breaker (breaker.py); an answer of whatever kind, a refusal
    too, and the node is as any other.
  - When a node that gave no answer begins to be avoided, it is reported to the Master, once. One that answers what
    nobody understands is avoided only: its own workers may well use it.
  - What is remembered is bounded: the node that failed longest ago is forgotten for one more.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from kvpool_client.breaker import Backoff, Breaker
from kvpool_client.clock import Clock

NODES_MAX: Final = 64
AVOID_FIRST_MS: Final = 500
AVOID_MAX_MS: Final = 10_000
"""The probe is a call of the engine's, which may wait as long as a connection may take."""
REPORTED: Final = ("peer_unreachable", "timed_out")


class Turn(NamedTuple):
    """One call's use of a node. probe: others wait for what becomes of it."""

    node_id: str
    probe: bool


class Peers:
    """Thread safe; nothing here waits. report: tells the Master of a node that could not be used, and why."""

    def __init__(
        self, clock: Clock, report: Callable[[str, str], object], spread: Callable[[], float] = random.random
    ) -> None:
        self._clock = clock
        self._report = report
        self._spread = spread
        self._lock = threading.Lock()
        self._silent: dict[str, Breaker] = {}
        self.breaks = 0
        """How often a node began to be avoided."""

    def waits(self, node_id: str) -> bool:
        """Is the node avoided now, its next probe not due or under way?"""
        with self._lock:
            breaker = self._silent.get(node_id)
            return breaker is not None and breaker.waits(self._clock.now_ms())

    def avoided(self) -> list[str]:
        """All nodes of which that is true."""
        with self._lock:
            now_ms = self._clock.now_ms()
            return [node_id for node_id, breaker in self._silent.items() if breaker.waits(now_ms)]

    def begin(self, node_id: str) -> Turn | None:
        """Before the node is used; None: it may not be. Whoever begins ends."""
        with self._lock:
            breaker = self._silent.get(node_id)
            if breaker is None:
                return Turn(node_id, probe=False)
            return Turn(node_id, probe=True) if breaker.take_probe(self._clock.now_ms()) else None

    def end(self, turn: Turn, silence: str) -> None:
        """After that. silence: why the node is to be avoided; empty: it answered."""
        with self._lock:
            if not silence:
                self._silent.pop(turn.node_id, None)
                return
            breaker = self._silent.get(turn.node_id)
            began = breaker is None
            if breaker is None:
                if len(self._silent) >= NODES_MAX:
                    del self._silent[next(iter(self._silent))]
                breaker = self._silent[turn.node_id] = Breaker(Backoff(AVOID_FIRST_MS, AVOID_MAX_MS))
                self.breaks += 1
            breaker.silent(self._clock.now_ms(), self._spread(), probe=turn.probe)
        if began and silence in REPORTED:
            self._report(turn.node_id, silence)
