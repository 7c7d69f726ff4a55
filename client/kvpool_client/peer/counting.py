"""What a data port did and refused: counts for metrics, lines for the log."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kvpool_client.clock import Clock
from kvpool_client.logs import Log

TOLD_MS: Final = 60_000
TOLD_MAX: Final = 1_024
"""Pairs of a peer and a reason that are remembered as told; while there are so many, no new one is told."""


@dataclass(slots=True)
class PeerCounts:
    """Since the start. Bytes are payload. refused: by reason, in lower case; misses are among them."""

    connections: int = 0
    blocks_read: int = 0
    bytes_read: int = 0
    blocks_written: int = 0
    bytes_written: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])


class Account:
    """Keeps the counts, and tells the log of refusals: of each peer and reason once in TOLD_MS. Thread safe."""

    def __init__(self, log: Log, clock: Clock) -> None:
        self.counts = PeerCounts()
        self._log = log
        self._now_ms: Callable[[], int] = clock.now_ms
        self._lock = threading.Lock()
        self._told: dict[tuple[str, str], int] = {}

    def connected(self) -> None:
        """A peer came."""
        with self._lock:
            self.counts.connections += 1

    def read(self, blocks: int, size_bytes: int) -> None:
        """So much was handed to a peer."""
        with self._lock:
            self.counts.blocks_read += blocks
            self.counts.bytes_read += size_bytes

    def written(self, blocks: int, size_bytes: int) -> None:
        """So much came from a peer and is committed."""
        with self._lock:
            self.counts.blocks_written += blocks
            self.counts.bytes_written += size_bytes

    def missed(self, reason: str) -> None:
        """Something was asked for that is not there any more: no line for that."""
        with self._lock:
            self.counts.refused[reason] += 1

    def refused(self, peer: str, reason: str, text: str) -> None:
        """A peer (its host) was not given what it asked for."""
        now_ms = self._now_ms()
        with self._lock:
            self.counts.refused[reason] += 1
            while self._told and now_ms - next(iter(self._told.values())) >= TOLD_MS:
                del self._told[next(iter(self._told))]
            tell = (peer, reason) not in self._told and len(self._told) < TOLD_MAX
            if tell:
                self._told[peer, reason] = now_ms
        if tell:
            self._log.warning("peer_refused", peer=peer, reason=reason, text=text)
