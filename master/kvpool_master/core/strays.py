"""Slots that somebody of a former life may still be writing: found WRITING by an inventory, no reservation knows them.

Rules
  - They come back when their worker's process is gone, at the latest quarantine_ms after they were told.
  - A worker that is not known (0) is waited for to the end of that time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool_master.core import extents as ex
from kvpool_master.core.segments import Segment, Space
from kvpool_master.core.settings import Settings


@dataclass(slots=True)
class _Stray:
    """The slots of one segment that one worker may be writing."""

    node: str
    end_ms: int
    rows: list[tuple[int, list[ex.Record]]] = field(default_factory=list[tuple[int, list[ex.Record]]])
    """(slot bytes, rows)."""


class Strays:
    """All of them."""

    def __init__(self, settings: Settings, space: Space) -> None:
        self._settings = settings
        self._space = space
        self._found: dict[tuple[int, int], _Stray] = {}
        """By segment and worker."""

    def __len__(self) -> int:
        return len(self._found)

    def add(self, segment: Segment, slot_bytes: int, first: int, slots: int, worker: int, now_ms: int) -> None:
        """Keep `slots` slots from being used."""
        end_ms = now_ms + self._settings.quarantine_ms
        stray = self._found.setdefault((segment.handle, worker), _Stray(segment.node, end_ms))
        row = (0, slots, segment.handle, first, 0, 1, 1, 0)
        stray.rows.append((slot_bytes, [row]))
        self._space.charge([row], slot_bytes, "quarantined_bytes", 1)

    def worker_gone(self, node: str, worker: int) -> None:
        """The process has ended: nothing of it is written any more."""
        for key, stray in list(self._found.items()):
            if key[1] == worker and stray.node == node:
                self._end(key)

    def sweep(self, now_ms: int) -> None:
        """Free what was long enough in quarantine."""
        for key, stray in list(self._found.items()):
            if stray.end_ms <= now_ms:
                self._end(key)

    def forget(self, handle: int) -> None:
        """The segment is gone."""
        for key in [key for key in self._found if key[0] == handle]:
            self._end(key)

    def workers(self, node: str) -> set[int]:
        """Who is waited for on a node."""
        return {worker for (_, worker), stray in self._found.items() if stray.node == node and worker}

    def rows(self) -> list[tuple[int, list[ex.Record]]]:
        """(slot bytes, rows) of all, for the cross-check."""
        return [held for stray in self._found.values() for held in stray.rows]

    def _end(self, key: tuple[int, int]) -> None:
        for slot_bytes, rows in self._found.pop(key).rows:
            self._space.charge(rows, slot_bytes, "quarantined_bytes", -1)
            self._space.give(rows, slot_bytes)
