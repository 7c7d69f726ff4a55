"""Which node clients are connected, and the orders on their way to them.

Rules
  - A node has at most one open session: a newer one ends the older, and so does a new registration.
  - An order stays here until the node answers it, so that a session opened later gets what the former one lost. An
    order that was answered is never sent again: binding a slab twice would clear what was written between.
  - Orders wait by slab, so there is at most one per slab; a node that lets more than ORDERS_MAX wait loses its
    session and asks again by registering.
  - Nothing here knows gRPC or the core; who ends a session says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvpool_master.core.messages import BindSlab, Effect, Retire, SlabBound
from kvpool_proto.errors import KVPoolError, LimitReached, StaleIncarnation

ORDERS_MAX = 65_536
"""Unanswered orders of one node."""
ORDERS_PER_MESSAGE = 4_096
"""Some 100 KB of orders: far below any message limit."""


class Session:
    """One open stream of one incarnation. `ended` is set for good; `error` says why if it was not in order."""

    __slots__ = ("_unsent", "_wake", "ended", "error", "incarnation", "node", "retired")

    def __init__(self, node: str, incarnation: int, unsent: Iterable[BindSlab]) -> None:
        self.node = node
        self.incarnation = incarnation
        self.ended = False
        self.retired = False
        self.error: KVPoolError | None = None
        self._unsent = list(unsent)
        self._wake = asyncio.Event()
        self._wake.set()

    def send(self, order: BindSlab) -> None:
        """Let next() return it."""
        self._unsent.append(order)
        self._wake.set()

    def end(self, error: KVPoolError | None = None, *, retired: bool = False) -> None:
        """Let next() return None. The first word counts."""
        if not self.ended:
            self.ended, self.error, self.retired = True, error, retired
            self._wake.set()

    async def next(self) -> list[BindSlab] | None:
        """The next orders to send, at most ORDERS_PER_MESSAGE; None once the session has ended."""
        await self._wake.wait()
        if self.ended:
            return None
        orders, self._unsent = self._unsent[:ORDERS_PER_MESSAGE], self._unsent[ORDERS_PER_MESSAGE:]
        if not self._unsent:
            self._wake.clear()
        return orders


@dataclass(slots=True)
class _Node:
    incarnation: int
    unanswered: dict[tuple[int, int], BindSlab] = field(default_factory=dict[tuple[int, int], BindSlab])
    session: Session | None = None


class Sessions:
    """All nodes that registered and were not retired since."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}

    @property
    def open_sessions(self) -> int:
        """How many nodes are connected."""
        return sum(node.session is not None for node in self._nodes.values())

    def registered(self, name: str, incarnation: int) -> None:
        """The node registered: it will open a new session. Orders to a former incarnation are void."""
        known = self._nodes.get(name)
        if known is not None and known.session is not None:
            newer = known.incarnation != incarnation
            known.session.end(StaleIncarnation(f"node {name!r} registered anew") if newer else None)
            known.session = None
        if known is None or known.incarnation != incarnation:
            self._nodes[name] = _Node(incarnation)

    def open(self, name: str, incarnation: int) -> Session:
        """A session of an incarnation that the core accepts. It starts with all unanswered orders."""
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

    def answered(self, bound: SlabBound) -> None:
        """The node did what it was told."""
        node = self._nodes.get(bound.node)
        if node is not None:
            order = node.unanswered.get((bound.segment, bound.slab))
            if order is not None and order.slot_bytes == bound.slot_bytes:
                del node.unanswered[bound.segment, bound.slab]

    def carry_out(self, effects: Iterable[Effect]) -> None:
        """Hand orders to their nodes; end the sessions of nodes that were given up."""
        for effect in effects:
            node = self._nodes.get(effect.node)
            if node is None:
                continue
            if isinstance(effect, BindSlab):
                self._order(node, effect)
            elif node.incarnation == effect.incarnation:
                if node.session is not None:
                    node.session.end(retired=True)
                del self._nodes[effect.node]

    def retired(self, name: str, incarnation: int) -> None:
        """The node left by its own word."""
        self.carry_out((Retire(name, incarnation),))

    def end_all(self) -> None:
        """The Master stops."""
        for node in self._nodes.values():
            if node.session is not None:
                node.session.end()

    def _order(self, node: _Node, order: BindSlab) -> None:
        node.unanswered[order.segment, order.slab] = order
        if len(node.unanswered) > ORDERS_MAX:
            node.unanswered.clear()
            if node.session is not None:
                node.session.end(LimitReached(f"more than {ORDERS_MAX} orders wait for an answer"))
        elif node.session is not None:
            node.session.send(order)
