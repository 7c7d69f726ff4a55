"""Writes of peers that are in progress, and the stamps under which none may begin any more.

Rules
  - Two writes never touch the same slot at a time, whatever their stamps.
  - A stamp that was fenced is dead for good: slots given up come back to the Master only after that. Of the dead,
    DEAD_STAMPS_MAX are remembered, the oldest forgotten; what they allowed has long run out by then.
  - A fence does not wait for a peer: the writes under its stamps are made to end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from kvpool_proto.errors import PeerBusy, ReservationEnded

DEAD_STAMPS_MAX: Final = 65_536


@dataclass(frozen=True, slots=True)
class _Write:
    segment: Any
    slots: frozenset[int]
    stamp: int
    abort: Callable[[], object] | None


class PeerWrites:
    """Thread safe. Segments are told apart by identity."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: dict[int, _Write] = {}
        self._dead: dict[int, None] = {}
        self._number = 0

    @property
    def open(self) -> int:
        """How many are in progress."""
        return len(self._open)

    def begin(self, segment: Any, slots: Iterable[int], stamp: int, abort: Callable[[], object] | None = None) -> int:
        """A write of these slots begins; answers its token. abort: makes it end soon; must not wait.

        Raises PeerBusy if one of them is being written, ReservationEnded if the stamp is dead.
        """
        wanted = frozenset(slots)
        with self._changed:
            if stamp in self._dead:
                raise ReservationEnded(f"stamp {stamp} was given up")
            if any(one.segment is segment and not one.slots.isdisjoint(wanted) for one in self._open.values()):
                raise PeerBusy("the slots are being written")
            self._number += 1
            self._open[self._number] = _Write(segment, wanted, stamp, abort)
            return self._number

    def end(self, token: int) -> None:
        """The write is over, whatever became of it."""
        with self._changed:
            del self._open[token]
            self._changed.notify_all()

    @contextmanager
    def under(
        self, segment: Any, slots: Iterable[int], stamp: int, abort: Callable[[], object] | None = None
    ) -> Generator[None, None, None]:
        """begin() and end()."""
        token = self.begin(segment, slots, stamp, abort)
        try:
            yield
        finally:
            self.end(token)

    def fence(self, stamps: Iterable[int], timeout_s: float) -> bool:
        """No write under these stamps begins any more; those in progress are aborted. True when none is left."""
        dead = frozenset(stamps)
        with self._changed:
            for stamp in dead:
                self._dead.pop(stamp, None)
                self._dead[stamp] = None
            while len(self._dead) > DEAD_STAMPS_MAX:
                del self._dead[next(iter(self._dead))]
            aborts = [one.abort for one in self._under(dead) if one.abort is not None]
        for abort in aborts:
            abort()
        with self._changed:
            return self._changed.wait_for(lambda: not self._under(dead), timeout_s)

    def in_progress(self, segment: Any) -> set[int]:
        """The slots of a segment that are being written."""
        with self._changed:
            return {slot for one in self._open.values() if one.segment is segment for slot in one.slots}

    def _under(self, dead: frozenset[int]) -> list[_Write]:
        return [one for one in self._open.values() if one.stamp in dead]
