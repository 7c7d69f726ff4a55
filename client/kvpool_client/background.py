"""Small duties that nobody waits for: releases, complaints about bad blocks, late aborts.

Rules
  - The queue is bounded; what does not fit is dropped, for every duty has somebody else as its last resort: leases
    and reservations expire, a bad block is met again.
  - One daemon thread, started by the first duty. A duty's KVPoolError ends with it; any other error is a bug: it ends
    the thread, and the next duty starts another. `idle` is done when nothing else is to do, at most every IDLE_S, once
    it was asked for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from kvpool_proto.errors import KVPoolError

DUTIES_MAX: Final = 256
IDLE_S: Final = 1.0


class Background:
    """Does duties in order, one at a time."""

    def __init__(self, idle: Callable[[], object] = lambda: None) -> None:
        self._idle = idle
        self._idle_wanted = False
        self._changed = threading.Condition()
        self._duties: deque[Callable[[], object]] = deque()
        self._busy = self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, duty: Callable[[], object]) -> bool:
        """Queue a duty. False: dropped, the queue is full or closed, or there is no room for a thread."""
        with self._changed:
            if self._closed or len(self._duties) >= DUTIES_MAX or not self._start():
                return False
            self._duties.append(duty)
            self._changed.notify_all()
            return True

    def want_idle(self) -> None:
        """Let `idle` be done, within about IDLE_S if nothing else is to do. Cheap to ask for again and again."""
        if self._idle_wanted:
            return
        with self._changed:
            if not self._closed and self._start():
                self._idle_wanted = True
                self._changed.notify_all()

    def _start(self) -> bool:
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name="kvpool-background", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the engine is out of threads, or ending
                return False
            self._thread = thread
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was queued is done. False: not within the time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._duties and not self._busy, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Do what is queued, within the time; take no more. The thread ends after the duty it is at."""
        self.flush(timeout_s)
        with self._changed:
            self._closed = True
            self._duties.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._duties or self._closed or self._idle_wanted)
                if not self._duties and not self._closed:
                    self._changed.wait_for(lambda: self._duties or self._closed, IDLE_S)
                if self._closed:
                    return
                if self._duties:
                    duty = self._duties.popleft()
                else:
                    duty, self._idle_wanted = self._idle, False
                self._busy = True
            try:
                duty()
            except KVPoolError:
                continue  # see the rules: somebody else is the last resort
