"""Which node clients are connected, and the orders on their way to them.

Rules
  - A node has at most one open session: a newer one ends the older, and so does a new registration.
  - An order stays here until the node answers it, so that a session opened later gets what the former one lost. What
    is never answered (tombstones, the switch, questions) is told on every session.
  - Of orders about the same thing only the newest stands: a slab's size, the inventory, the switch, the probe. An order
    that was answered is never sent again: binding a slab twice would clear what was written between.
  - An order to clear slots ends the order to copy into them: the core has given that copy up.
  - A registration starts with nothing: the core says again what it still wants. A node that lets more than ORDERS_MAX
    orders wait loses its session and gets them anew by registering.
  - Nothing here knows gRPC or the core; who ends a session says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvpool_master.core.messages import (
    AskInventory,
    AskWorkers,
    BindSlab,
    Bury,
    ClearSlots,
    CopySlots,
    Effect,
    ProbeAnswered,
    ProbeNode,
    Remember,
    Retire,
    SlabBound,
    SlotsCleared,
    SlotsCopied,
)
from kvpool_proto.errors import KVPoolError, LimitReached, StaleIncarnation

ORDERS_MAX = 65_536
"""Unanswered orders of one node."""
ROWS_PER_MESSAGE = 4_096
"""Some 100 KB of orders: far below any message limit. An order counts as one row, and one for each run or part."""
TIME_TOLD_MS = 10_000
"""A node that is heard is told our time at least so often: capabilities end by it."""


class SetBypass(NamedTuple):
    """The switch as it is from now on."""

    bits: int


Order = BindSlab | ClearSlots | CopySlots | AskInventory | AskWorkers | ProbeNode | Bury | SetBypass


def _about(order: Order) -> Hashable:
    match order:
        case BindSlab():
            return BindSlab, order.segment, order.slab
        case ClearSlots() | CopySlots():
            return type(order), order.order
        case Bury():
            return Bury, order.namespace
        case _:
            return type(order)


def _rows(order: Order) -> int:
    match order:
        case ClearSlots():
            return 1 + len(order.runs)
        case CopySlots():
            return 1 + order.source[5] - order.source[4]
        case _:
            return 1


class Session:
    """One open stream of one incarnation. `ended` is set for good; `error` says why if it was not in order.

    told_ms: when our time was told last; set by who tells.
    """

    __slots__ = ("_unsent", "_wake", "ended", "error", "incarnation", "node", "retired", "told_ms")

    def __init__(self, node: str, incarnation: int, unsent: Iterable[Order]) -> None:
        self.node = node
        self.incarnation = incarnation
        self.ended = False
        self.retired = False
        self.error: KVPoolError | None = None
        self.told_ms = 0
        self._unsent = list(unsent)
        self._wake = asyncio.Event()
        self._wake.set()

    def send(self, order: Order) -> None:
        """Let next() return it."""
        self._unsent.append(order)
        self._wake.set()

    def heard(self, now_ms: int) -> None:
        """The node is there: let next() return, if only for the time to be told."""
        if now_ms - self.told_ms >= TIME_TOLD_MS:
            self._wake.set()

    def end(self, error: KVPoolError | None = None, *, retired: bool = False) -> None:
        """Let next() return None. The first word counts."""
        if not self.ended:
            self.ended, self.error, self.retired = True, error, retired
            self._wake.set()

    async def next(self) -> list[Order] | None:
        """The next orders to send, of at most ROWS_PER_MESSAGE rows or one order; None once the session has ended.

        None at all when it is only time to tell the time.
        """
        await self._wake.wait()
        if self.ended:
            return None
        count, rows = 0, 0
        for order in self._unsent:
            rows += _rows(order)
            if count and rows > ROWS_PER_MESSAGE:
                break
            count += 1
        orders, self._unsent = self._unsent[:count], self._unsent[count:]
        if not self._unsent:
            self._wake.clear()
        return orders


@dataclass(slots=True)
class _Node:
    incarnation: int
    unanswered: dict[Hashable, Order] = field(default_factory=dict[Hashable, Order])
    copies: dict[int, int] = field(default_factory=dict[int, int])
    """Of these, stamp -> number of orders to copy."""
    session: Session | None = None


class Sessions:
    """All nodes that registered and were not retired since."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._awaited: dict[tuple[str, int], asyncio.Future[None]] = {}

    @property
    def open_sessions(self) -> int:
        """How many nodes are connected."""
        return sum(node.session is not None for node in self._nodes.values())

    def registered(self, name: str, incarnation: int) -> None:
        """The core took the node in: its former session and orders are void."""
        known = self._nodes.get(name)
        if known is not None and known.session is not None:
            newer = known.incarnation != incarnation
            known.session.end(StaleIncarnation(f"node {name!r} registered anew") if newer else None)
        self._nodes[name] = _Node(incarnation)

    def open(self, name: str, incarnation: int) -> Session:
        """A session of an incarnation that the core accepts. It starts with all that was not answered."""
        node = self._nodes.get(name)
        if node is None or node.incarnation != incarnation:
            node = self._nodes[name] = _Node(incarnation)
        if node.session is not None:
            node.session.end()
        node.session = Session(name, incarnation, node.unanswered.values())
        return node.session

    def closed(self, session: Session) -> bool:
        """The stream is over. True if it was the node's session, so that the node is now without one."""
        node = self._nodes.get(session.node)
        if node is None or node.session is not session:
            return False
        node.session = None
        return True

    def bound(self, told: SlabBound) -> None:
        """The node bound a slab as it was told."""
        node = self._nodes.get(told.node)
        if node is not None:
            about = BindSlab, told.segment, told.slab
            order = node.unanswered.get(about)
            if isinstance(order, BindSlab) and order.slot_bytes == told.slot_bytes:
                del node.unanswered[about]

    def cleared(self, told: SlotsCleared) -> None:
        """The node cleared the slots that it was told to clear."""
        node = self._nodes.get(told.node)
        if node is not None:
            node.unanswered.pop((ClearSlots, told.order), None)
        awaited = self._awaited.pop((told.node, told.order), None)
        if awaited is not None and not awaited.done():
            awaited.set_result(None)

    def copied(self, told: SlotsCopied) -> None:
        """The node has done what it could of a copy."""
        node = self._nodes.get(told.node)
        order = node.unanswered.pop((CopySlots, told.order), None) if node is not None else None
        if node is not None and isinstance(order, CopySlots):
            node.copies.pop(order.stamp, None)

    def probed(self, told: ProbeAnswered) -> None:
        """The node answered a probe."""
        node = self._nodes.get(told.node)
        order = node.unanswered.get(ProbeNode) if node is not None else None
        if node is not None and isinstance(order, ProbeNode) and order.number == told.number:
            del node.unanswered[ProbeNode]

    def reported(self, name: str) -> None:
        """The inventory that the node was asked for is complete."""
        node = self._nodes.get(name)
        if node is not None:
            node.unanswered.pop(AskInventory, None)

    async def settled(self, orders: Sequence[ClearSlots], timeout_s: float) -> set[str]:
        """Wait until the nodes have carried out these orders; returns those that have not within timeout_s."""
        loop = asyncio.get_running_loop()
        waits = {loop.create_future(): (order.node, order.order) for order in orders}
        if not waits:
            return set()
        self._awaited |= {about: wait for wait, about in waits.items()}
        try:
            _, late = await asyncio.wait(waits, timeout=timeout_s)
        finally:
            for about in waits.values():
                self._awaited.pop(about, None)
        return {waits[wait][0] for wait in late}

    def carry_out(self, effects: Iterable[Effect]) -> None:
        """Hand orders to their nodes; end the sessions of nodes that were given up."""
        for effect in effects:
            if isinstance(effect, Remember):
                continue
            if isinstance(effect, Bury):
                self.tell_all(effect)
                continue
            node = self._nodes.get(effect.node)
            if node is None:
                continue
            if isinstance(effect, Retire):
                if node.incarnation == effect.incarnation:
                    if node.session is not None:
                        node.session.end(retired=True)
                    del self._nodes[effect.node]
            elif not isinstance(effect, AskInventory) or node.incarnation == effect.incarnation:
                self._order(node, effect)

    def tell_all(self, order: Bury | SetBypass) -> int:
        """Tell every node, now or with its next session; returns how many are connected."""
        for node in self._nodes.values():
            self._order(node, order)
        return self.open_sessions

    def retired(self, name: str, incarnation: int) -> None:
        """The node left by its own word."""
        self.carry_out((Retire(name, incarnation),))

    def end_all(self) -> None:
        """The Master stops."""
        for node in self._nodes.values():
            if node.session is not None:
                node.session.end()

    def forget_all(self, why: KVPoolError) -> None:
        """The core forgot all nodes."""
        for node in self._nodes.values():
            if node.session is not None:
                node.session.end(why)
        self._nodes.clear()

    def _order(self, node: _Node, order: Order) -> None:
        if isinstance(order, CopySlots):
            node.copies[order.stamp] = order.order
        elif isinstance(order, ClearSlots) and node.copies:
            for _, _, stamp in order.runs:
                node.unanswered.pop((CopySlots, node.copies.pop(stamp, 0)), None)
        node.unanswered[_about(order)] = order
        if len(node.unanswered) > ORDERS_MAX:
            node.unanswered.clear()
            node.copies.clear()
            if node.session is not None:
                node.session.end(LimitReached(f"more than {ORDERS_MAX} orders wait for an answer"))
        elif node.session is not None:
            node.session.send(order)
