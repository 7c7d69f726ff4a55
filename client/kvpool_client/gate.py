"""One piece of a copy at a time, loads before stores: the only lock around a copy.

Rules
  - A piece is bounded in bytes, so a load waits for at most one piece of a store.
  - A store goes when no load waits or copies. Its own deadline bounds how long it may be held up.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager


class CopyGate:
    """Admits one piece at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy = False
        self._loads_waiting = 0

    @contextmanager
    def load(self, timeout_s: float) -> Generator[bool, None, None]:
        """Enter with a piece of a load and leave at the end of the block. False: not admitted in time."""
        with self._changed:
            self._loads_waiting += 1
            admitted = self._changed.wait_for(lambda: not self._busy, max(timeout_s, 0))
            self._loads_waiting -= 1
            self._busy = self._busy or admitted
            if not admitted:
                self._changed.notify_all()  # a store may have waited for this load alone
        try:
            yield admitted
        finally:
            self._leave(admitted)

    @contextmanager
    def store(self, timeout_s: float) -> Generator[bool, None, None]:
        """The same for a piece of a store."""
        with self._changed:
            admitted = self._changed.wait_for(lambda: not (self._busy or self._loads_waiting), max(timeout_s, 0))
            self._busy = self._busy or admitted
        try:
            yield admitted
        finally:
            self._leave(admitted)

    def _leave(self, admitted: bool) -> None:
        if admitted:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
