"""Strands of namespaces that are not open: the Master has lost its memory of them, or never had it.

Rules
  - Their slots are held. They go into the directory when somebody opens the namespace, and are free unclaimed_ms after
    they came, or with their segment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvpool_master.core import extents as ex
from kvpool_master.core.messages import InventoryStrands
from kvpool_master.core.segments import Segment, Space
from kvpool_master.core.settings import Settings


@dataclass(slots=True)
class _Waiting:
    command: InventoryStrands
    end_ms: int


class Unclaimed:
    """All strands that wait."""

    def __init__(self, settings: Settings, space: Space) -> None:
        self._settings = settings
        self._space = space
        self._waiting: dict[bytes, list[_Waiting]] = {}
        """By namespace."""

    def add(self, command: InventoryStrands, now_ms: int) -> None:
        """Keep strands whose slots are claimed."""
        self._waiting.setdefault(command.namespace, []).append(_Waiting(command, now_ms + self._settings.unclaimed_ms))
        self._space.charge(rows_of(command), command.slot_bytes, "unclaimed_bytes", 1)

    def take(self, namespace: bytes) -> list[InventoryStrands]:
        """Somebody has opened the namespace: the strands are the caller's."""
        commands = [one.command for one in self._waiting.pop(namespace, ())]
        for command in commands:
            self._space.charge(rows_of(command), command.slot_bytes, "unclaimed_bytes", -1)
        return commands

    def expire(self, now_ms: int) -> None:
        """Free what has waited long enough."""
        if self._waiting:
            self._drop(lambda one: one.end_ms <= now_ms)

    def forget(self, segment: Segment) -> None:
        """The segment is gone."""
        if self._waiting:
            self._drop(lambda one: one.command.segment == segment.handle)

    def rows(self) -> list[tuple[int, list[ex.Record]]]:
        """(slot bytes, rows) of all, for the cross-check."""
        return [(one.command.slot_bytes, rows_of(one.command)) for waiting in self._waiting.values() for one in waiting]

    def _drop(self, over: Callable[[_Waiting], bool]) -> None:
        for namespace, waiting in list(self._waiting.items()):
            left = [one for one in waiting if not over(one)]
            for one in waiting:
                if over(one):
                    rows = rows_of(one.command)
                    self._space.charge(rows, one.command.slot_bytes, "unclaimed_bytes", -1)
                    self._space.give(rows, one.command.slot_bytes)
            if left:
                self._waiting[namespace] = left
            else:
                del self._waiting[namespace]


def rows_of(command: InventoryStrands, newest_stamp: int = 1 << 64) -> list[ex.Record]:
    """The extents of all strands, with stamps up to newest_stamp, as records whose offsets mean nothing."""
    low, high = command.part_from, command.part_to
    return [
        (0, blocks, command.segment, first, low, high, stride, stamp)
        for strand in command.strands
        for blocks, first, stride, stamp in strand.extents
        if stamp <= newest_stamp
    ]


def blocks_of(command: InventoryStrands) -> int:
    """How many blocks the strands have."""
    return sum(extent[0] for strand in command.strands for extent in strand.extents)
