"""Slots that are free when their node has cleared their headers: of blocks that went for good, and of remote writers.

Rules
  - Slots that may still be written through their node's data port: the node ends that first.
  - Readers first: an order is given when the leases alive at the time have ended, so that no leased read is spoilt.
  - An order names slots of one segment and the stamps that their headers show. It stands until the node has answered
    it, or until the segment is gone; a node that is away gets it when it is back. With the answer the slots are free.
  - A purge is told to all nodes in the same way, and needs no answer: it is remembered durably.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kvpool_master.core import extents as ex
from kvpool_master.core.leases import LeaseTable
from kvpool_master.core.messages import Bury, ClearSlots, Effect
from kvpool_master.core.segments import Space


class Clearing:
    """All orders, given and not yet given."""

    def __init__(self, space: Space, leases: LeaseTable) -> None:
        self._space = space
        self._leases = leases
        self._orders = 0
        self._waiting: deque[tuple[int, ClearSlots | Bury]] = deque()
        """(lease number that must end, order)."""
        self._rows: dict[int, list[ex.Record]] = {}
        """By order, the slots that it is about."""
        self._given: dict[int, ClearSlots] = {}

    def clear(self, rows: Iterable[ex.Record], slot_bytes: int) -> list[Effect]:
        """Have the headers of `rows`, which no span holds any more, cleared; returns what may be ordered now."""
        self.later(rows, slot_bytes)
        return self.due()

    def later(self, rows: Iterable[ex.Record], slot_bytes: int) -> None:
        """The same; it is ordered with the next Tick."""
        by_segment: dict[int, list[ex.Record]] = {}
        for row in rows:
            by_segment.setdefault(row[2], []).append(row)
        for handle, held in by_segment.items():
            segment = self._space.segments.get(handle)
            if segment is None:
                continue
            if segment.retired:  # no order reaches it any more
                self._space.give(held, slot_bytes)
                continue
            self._orders += 1
            order = ClearSlots(segment.node, self._orders, handle, slot_bytes, tuple(_runs(held)))
            self._rows[order.order] = held
            self._space.charge(held, slot_bytes, "deferred_bytes", 1)
            self._waiting.append((self._leases.newest_number, order))

    def bury(self, namespace: bytes, stamp: int) -> list[Effect]:
        """Have all headers of a namespace up to a stamp cleared; returns what may be ordered now."""
        self._waiting.append((self._leases.newest_number, Bury(namespace, stamp)))
        return self.due()

    def due(self) -> list[Effect]:
        """The orders that no lease holds up any more; they are given."""
        effects: list[Effect] = []
        while self._waiting and self._waiting[0][0] < self._leases.oldest_number:
            _, order = self._waiting.popleft()
            if isinstance(order, Bury):
                effects.append(order)
            elif order.order in self._rows:
                self._given[order.order] = order
                effects.append(order)
        return effects

    def waits(self, node: str) -> bool:
        """Whether an order for a node is held up by leases."""
        return any(
            isinstance(order, ClearSlots) and order.node == node and order.order in self._rows
            for _, order in self._waiting
        )

    def cleared(self, node: str, order: int) -> None:
        """The node has carried out an order."""
        told = self._given.get(order)
        if told is not None and told.node == node:
            self._end(told)

    def forget(self, handle: int) -> None:
        """The segment is gone."""
        for order in [*self._given.values(), *[order for _, order in self._waiting]]:
            if isinstance(order, ClearSlots) and order.segment == handle and order.order in self._rows:
                self._end(order)

    def pending(self, node: str) -> list[Effect]:
        """The orders that a node has not answered, once more."""
        return [told for told in self._given.values() if told.node == node]

    def rows(self) -> list[tuple[int, list[ex.Record]]]:
        """(slot bytes, rows) of all that waits, for the cross-check."""
        orders = [*self._given.values(), *[order for _, order in self._waiting if isinstance(order, ClearSlots)]]
        return [(order.slot_bytes, self._rows[order.order]) for order in orders if order.order in self._rows]

    def _end(self, order: ClearSlots) -> None:
        self._given.pop(order.order, None)
        held = self._rows.pop(order.order)
        self._space.charge(held, order.slot_bytes, "deferred_bytes", -1)
        self._space.give(held, order.slot_bytes)


def _runs(rows: Iterable[ex.Record]) -> Iterable[tuple[int, int, int]]:
    for _, blocks, _, first, low, high, stride, stamp in rows:
        if high - low == stride:
            yield first, blocks * stride, stamp
        else:
            for at in range(first, first + blocks * stride, stride):
                yield at, high - low, stamp
