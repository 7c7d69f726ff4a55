"""Blocks that were removed for good: their slot headers must go before their slots come back.

Rules
  - An order names slots of one segment and the stamps that their headers show. It stands until the node has answered
    it, or until the segment is gone; a node that is away gets it when it is back.
  - After the answer the slots wait for the leases of the time, as all that was hidden does.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvpool_master.core import extents as ex
from kvpool_master.core.leases import LeaseTable
from kvpool_master.core.messages import ClearSlots, Effect
from kvpool_master.core.segments import Space

Runs = tuple[tuple[int, int, int], ...]


class Clearing:
    """All open orders."""

    def __init__(self, space: Space, leases: LeaseTable) -> None:
        self._space = space
        self._leases = leases
        self._orders = 0
        self._open: dict[int, tuple[ClearSlots, list[ex.Record]]] = {}

    def start(self, rows: Iterable[ex.Record], slot_bytes: int) -> list[Effect]:
        """Have the headers of `rows`, which no span holds any more, cleared: an order per segment."""
        by_segment: dict[int, list[ex.Record]] = {}
        for row in rows:
            by_segment.setdefault(row[2], []).append(row)
        effects: list[Effect] = []
        for handle, held in by_segment.items():
            segment = self._space.segments.get(handle)
            if segment is None:
                continue
            if segment.retired:  # no order reaches it any more
                self._space.give(held, slot_bytes)
                continue
            self._orders += 1
            order = ClearSlots(segment.node, self._orders, handle, slot_bytes, tuple(_runs(held)))
            self._open[order.order] = (order, held)
            self._space.charge(held, slot_bytes, "deferred_bytes", 1)
            effects.append(order)
        return effects

    def cleared(self, node: str, order: int) -> None:
        """The node has carried out an order."""
        known = self._open.get(order)
        if known is not None and known[0].node == node:
            del self._open[order]
            self._space.charge(known[1], known[0].slot_bytes, "deferred_bytes", -1)
            self._space.defer(known[1], known[0].slot_bytes, self._leases.newest_number)
            self._space.settle_deferred(self._leases.oldest_number)

    def forget(self, handle: int) -> None:
        """The segment is gone."""
        for order in [order for order, (told, _) in self._open.items() if told.segment == handle]:
            told, held = self._open.pop(order)
            self._space.charge(held, told.slot_bytes, "deferred_bytes", -1)
            self._space.give(held, told.slot_bytes)

    def pending(self, node: str) -> list[Effect]:
        """The orders that a node has not answered, once more."""
        return [told for told, _ in self._open.values() if told.node == node]

    def rows(self) -> list[tuple[int, list[ex.Record]]]:
        """(slot bytes, rows) of all that waits, for the cross-check."""
        return [(told.slot_bytes, held) for told, held in self._open.values()]


def _runs(rows: Iterable[ex.Record]) -> Iterable[tuple[int, int, int]]:
    for _, blocks, _, first, low, high, stride, stamp in rows:
        if high - low == stride:
            yield first, blocks * stride, stamp
        else:
            for at in range(first, first + blocks * stride, stride):
                yield at, high - low, stamp
