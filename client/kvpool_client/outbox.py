"""What the Master has to be told: reports of this node that wait for the next message of the session.

Rules
  - Bounded: a block reported bad when too many wait is dropped (a reader will complain again).
  - A session that breaks may lose what was sent last. So the next one begins with all workers that went lately, and
    without answers to orders: the Master orders again what it saw no answer to.
  - Only the session opened last takes anything. What was asked on a session, and may be answered from another thread
    than ours, is answered on that session or not at all.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from kvpool_proto import pool_pb2 as pb

GONE_MAX: Final = 4096
BAD_MAX: Final = 256
BAD_BYTES_PER_MESSAGE: Final = 1 << 20
"""Chains are up to 1 MiB (local_socket.py); the Master takes messages of a few MiB."""


class Outbox:
    """Thread-safe."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._session = 0
        self._bound: deque[pb.SlabBound] = deque()
        self._cleared: deque[int] = deque()
        self._copied: deque[pb.SlotsCopied] = deque()
        self._probed = 0
        self._bad: deque[pb.BadBlock] = deque(maxlen=BAD_MAX)
        self._gone: deque[int] = deque(maxlen=GONE_MAX)
        self._gone_unsent: deque[int] = deque(maxlen=GONE_MAX)

    def slab_bound(self, bound: pb.SlabBound) -> None:
        """An order was carried out. At most one per order of the Master waits."""
        with self._wake:
            self._bound.append(bound)
            self._wake.notify_all()

    def slots_cleared(self, order: int) -> None:
        """The same for an order to clear slots, by its number."""
        with self._wake:
            self._cleared.append(order)
            self._wake.notify_all()

    def slots_copied(self, copied: pb.SlotsCopied, session: int) -> None:
        """An order to copy slots, given on that session, has ended."""
        with self._wake:
            if session == self._session:
                self._copied.append(copied)
                self._wake.notify_all()

    def probed(self, number: int, session: int) -> None:
        """The Master asks on that session whether we are there. The newest number stands."""
        with self._wake:
            if session == self._session:
                self._probed = number
                self._wake.notify_all()

    def block_bad(self, block: pb.BadBlock) -> None:
        """A block was found bad."""
        with self._wake:
            if len(self._bad) < BAD_MAX:
                self._bad.append(block)
                self._wake.notify_all()

    def worker_gone(self, worker_id: int) -> None:
        """A worker's lock is gone. May be said again."""
        with self._wake:
            if worker_id not in self._gone:
                self._gone.append(worker_id)
            self._gone_unsent.append(worker_id)
            self._wake.notify_all()

    def open(self) -> int:
        """A session begins; answers its number. The one before is over."""
        with self._wake:
            self._session += 1
            self._bound.clear()
            self._cleared.clear()
            self._copied.clear()
            self._probed = 0
            self._gone_unsent = self._gone.copy()
            self._wake.notify_all()
            return self._session

    def close(self) -> None:
        """The session is over."""
        with self._wake:
            self._session += 1
            self._wake.notify_all()

    def fill(self, message: pb.SessionUp, session: int, wait_s: float) -> bool:
        """Wait up to wait_s for something to say and put it into `message`. False: this session is over."""
        with self._wake:
            self._wake.wait_for(lambda: self._session != session or self._pending(), timeout=wait_s)
            if self._session != session:
                return False
            message.slabs_bound.extend(self._bound)
            self._bound.clear()
            message.cleared.extend(self._cleared)
            self._cleared.clear()
            message.copied.extend(self._copied)
            self._copied.clear()
            message.probed, self._probed = self._probed, 0
            message.workers_gone.extend(self._gone_unsent)
            self._gone_unsent.clear()
            size_bytes = 0
            while self._bad and size_bytes <= BAD_BYTES_PER_MESSAGE:
                size_bytes += len(self._bad[0].chain)
                message.bad_blocks.append(self._bad.popleft())
            return True

    def _pending(self) -> bool:
        return bool(self._bound or self._cleared or self._copied or self._probed or self._bad or self._gone_unsent)
