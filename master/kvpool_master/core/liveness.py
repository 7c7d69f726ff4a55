"""Nodes and their sessions: up -> suspect (hidden at once) -> retired.

Rules
  - A heartbeat makes a node up. Without one for suspect_ms, or when its session breaks, it is suspect; without one
    for retire_ms it is retired.
  - Two lives of one id: a newer incarnation replaces one that is suspect, never one that is up.
  - A Master that was late itself expires nobody for it: the deadlines move by the delay.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool_master.core.inventory import Inventory
from kvpool_master.core.messages import SegmentOffer
from kvpool_master.core.segments import Segment
from kvpool_master.core.settings import Settings
from kvpool_proto.errors import LimitReached, NodeIdTaken, StaleIncarnation, UnknownNode


@dataclass(slots=True)
class Node:
    """One node client's present life."""

    name: str
    incarnation: int
    offers: tuple[SegmentOffer, ...]
    segments: list[Segment]
    heartbeat_ms: int
    up: bool = True
    reason: str = "registered"
    inventory: Inventory | None = None
    """What it has still to report."""


class Liveness:
    """All nodes that are not retired."""

    def __init__(self, settings: Settings, start_ms: int) -> None:
        self._settings = settings
        self.nodes: dict[str, Node] = {}
        self._last_tick_ms = start_ms

    def check_newcomer(self, name: str, incarnation: int) -> Node | None:
        """The node that registers again or is replaced, None for a new one. Raises if it must not register."""
        node = self.nodes.get(name)
        if node is None:
            if len(self.nodes) >= self._settings.nodes_max:
                raise LimitReached(f"nodes_max = {self._settings.nodes_max} nodes are registered")
            return None
        if incarnation < node.incarnation:
            raise StaleIncarnation(f"node {name!r}: incarnation {node.incarnation} is registered, not {incarnation}")
        if incarnation > node.incarnation and node.up:
            raise NodeIdTaken(f"node id {name!r} is in use by a live node client (incarnation {node.incarnation})")
        return node

    def known(self, name: str, incarnation: int) -> Node:
        """The node of that name. Raises UnknownNode, or StaleIncarnation if another life is registered."""
        node = self.nodes.get(name)
        if node is None:
            raise UnknownNode(f"node {name!r} is not registered")
        if node.incarnation != incarnation:
            raise StaleIncarnation(f"node {name!r}: incarnation {node.incarnation} is registered, not {incarnation}")
        return node

    def tick(self, now_ms: int) -> int:
        """Note the time of a Tick; if it came too late, all deadlines are moved by the delay, which is returned."""
        last, self._last_tick_ms = self._last_tick_ms, now_ms
        if now_ms - last <= self._settings.stall_ms:
            return 0
        for node in self.nodes.values():
            node.heartbeat_ms = min(now_ms, node.heartbeat_ms + now_ms - last)
        return now_ms - last

    def suspects(self, now_ms: int) -> list[Node]:
        """Nodes that are up and have been silent for too long."""
        limit = now_ms - self._settings.suspect_ms
        return [node for node in self.nodes.values() if node.up and node.heartbeat_ms <= limit]

    def lost(self, now_ms: int) -> list[Node]:
        """Suspect nodes whose time is over."""
        limit = now_ms - self._settings.retire_ms
        return [node for node in self.nodes.values() if not node.up and node.heartbeat_ms <= limit]
