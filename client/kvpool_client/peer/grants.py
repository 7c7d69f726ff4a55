"""Capabilities on one connection: by their numbers, and on the data port's side where their blocks lie.

Rules
  - Both ends keep the same few of them: what Numbered forgets on one side it forgets on the other.
  - The table of a capability is looked at whole when it is presented; its segments are found once. Where a piece lies
    costs work for its runs only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvpool_client.owned_segment import OwnedSegment
from kvpool_client.peer.copies import Grant
from kvpool_client.peer.wire import GRANT_RUNS_MAX, GRANTS_MAX
from kvpool_client.runs import Row, Run, mapped
from kvpool_proto.capability import RUN
from kvpool_proto.errors import KVPoolError, ProtocolError
from kvpool_proto.geometry import SLOT_NUMBER_MAX, slot_bytes_for

BLOCKS_MAX: Final = (1 << 32) - 1
"""Blocks of one table: they are counted in a u32."""

_T = TypeVar("_T")


class Numbered(Generic[_T]):
    """Capabilities, or what is kept of them, by number; the oldest go when there are too many or too long ones."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[_T, int]] = {}
        self._runs = 0

    def put(self, number: int, item: _T, runs: int) -> None:
        """A number that was used before means the new one."""
        self._forget(number)
        while self._kept and (len(self._kept) >= GRANTS_MAX or self._runs + runs > GRANT_RUNS_MAX):
            self._forget(next(iter(self._kept)))
        self._kept[number] = (item, runs)
        self._runs += runs

    def get(self, number: int) -> _T | None:
        """What has this number; None: nothing any more."""
        kept = self._kept.get(number)
        return None if kept is None else kept[0]

    def number_of(self, same: Callable[[_T], bool]) -> int | None:
        """The number of one that is the same; None: it is not kept."""
        return next((number for number, (item, _) in self._kept.items() if same(item)), None)

    def _forget(self, number: int) -> None:
        if number in self._kept:
            self._runs -= self._kept.pop(number)[1]


class Placed:
    """A capability that was checked, and where its blocks lie.

    segment_of: finds a segment by its handle. Raises what that raises, ProtocolError for a table that cannot be.
    """

    def __init__(self, grant: Grant, segment_of: Callable[[int], OwnedSegment]) -> None:
        self.grant = grant
        table: npt.NDArray[Any] = np.frombuffer(grant.table, dtype=RUN)
        blocks, first, stride = (table[name].astype(np.int64) for name in ("blocks", "first_slot", "stride"))
        last = first + (blocks - 1.0) * stride  # in floating point, where nothing wraps around
        if not len(table) or blocks.min() < 1 or stride.min() < 1 or last.max() > SLOT_NUMBER_MAX:
            raise ProtocolError("a capability whose table cannot be")
        self._table = table
        self._ends: npt.NDArray[np.int64] = np.cumsum(blocks)
        if self._ends[-1] > BLOCKS_MAX:
            raise ProtocolError("a capability for more blocks than can be counted")
        self._segments = {handle: segment_of(handle) for handle in np.unique(table["segment"]).tolist()}

    def runs(self, at: int, blocks: int, part_bytes: int) -> list[Run]:
        """The slots of the table's at-th block and those behind it; the first is block 0 of the runs.

        Raises ProtocolError for blocks that are not in the table, SlotTooLarge.
        """
        if at + blocks > self._ends[-1]:
            raise ProtocolError(f"blocks {at} + {blocks} of a capability for {self._ends[-1]}")
        low = int(np.searchsorted(self._ends, at, side="right"))
        high = int(np.searchsorted(self._ends, at + blocks, side="left"))
        rows: list[Row] = []
        done = 0
        skip = at - (int(self._ends[low - 1]) if low else 0)
        for segment, slot, length, stride, stamp in self._table[low : high + 1].tolist():
            here = min(length - skip, blocks - done)
            rows.append(Row(done, here, segment, slot + skip * stride, stride, stamp, 0))
            done, skip = done + here, 0
        segments = cast(Mapping[int, Any], self._segments)  # runs want no more of them than any mapping of one has
        return mapped(rows, segments, slot_bytes_for(part_bytes))


Presented = Numbered[Placed | KVPoolError]
"""On the data port's side. An error: what is wrong with the capability."""
