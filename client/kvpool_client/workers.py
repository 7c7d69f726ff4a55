"""Which workers map this node's segments.

Rules
  - A worker id is random, non-zero, below 2^62, and never given twice: it is also the place of the worker's lock.
  - A worker is gone when no segment carries its lock any more. Only the kernel says so; a closed connection is no sign.
  - Workers that a former life of the node client let in are found by their locks, and watched like the others.
  - The number of workers is bounded.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kvpool_client.headers import PEER_WRITER
from kvpool_client.locks import WORKER_ID_MAX
from kvpool_client.owned_segment import OwnedSegment
from kvpool_proto.errors import LimitReached

ADOPTED: Final = "adopted"
"""What a worker is called that was let in by a former life."""


@dataclass(frozen=True, slots=True)
class Attached:
    """fds: one per segment, the receiver's to pass on and close."""

    worker_id: int
    fds: list[int]


class Workers:
    """The table of attached workers. Thread-safe."""

    def __init__(self, segments: Sequence[OwnedSegment], workers_max: int) -> None:
        self._segments = segments
        self._workers_max = workers_max
        self._names = {worker_id: ADOPTED for each in segments for worker_id in each.mapped_workers()}
        self._lock = threading.Lock()
        self.gone_total = 0

    @property
    def attached(self) -> int:
        """How many workers there are, as of the last poll."""
        return len(self._names)

    def attach(self, name: str) -> Attached:
        """Open every segment for a new worker. Raises LimitReached, OSError (out of descriptors)."""
        fds: list[int] = []
        with self._lock:
            if len(self._names) >= self._workers_max:
                raise LimitReached(f"workers_max = {self._workers_max} workers are attached")
            worker_id = 1 + secrets.randbelow(WORKER_ID_MAX)
            try:
                # One by one: what is open when the next fails is closed below.
                fds.extend(segment.open_for_worker(worker_id) for segment in self._segments)
            except BaseException:
                for fd in fds:
                    os.close(fd)
                raise
            self._names[worker_id] = name
        return Attached(worker_id, fds)

    def poll(self) -> list[tuple[int, str]]:
        """Ask the kernel; answers (id, name) of those found gone now, once each."""
        with self._lock:
            gone = [(worker_id, self._names.pop(worker_id)) for worker_id in self.gone_of(list(self._names))]
            self.gone_total += len(gone)
        return gone

    def gone_of(self, ids: Iterable[int]) -> list[int]:
        """Those of `ids` that hold no lock on any segment, whoever let them in. PEER_WRITER is none of them."""
        return [
            worker_id
            for worker_id in ids
            if worker_id != PEER_WRITER
            and not (0 < worker_id <= WORKER_ID_MAX and any(each.held_by(worker_id) for each in self._segments))
        ]
