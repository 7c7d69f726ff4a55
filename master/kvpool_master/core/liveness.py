"""Nodes and their sessions: up -> suspect (hidden at once) -> retired; and draining, by an operator's word.

Rules
  - A heartbeat makes a node up. Without one for suspect_ms, or when its session breaks, it is suspect; without one
    for retire_ms it is retired.
  - Workers report nodes whose data port they cannot use. Reports of two hosts make a node suspect for all; one makes
    the Master ask the node's session, and silence makes it suspect. So it stays report_hold_ms, heartbeats or not, but
    nobody is retired for reports.
  - Two lives of one id: a newer incarnation replaces one that is suspect, never one that is up.
  - A Master that was late itself expires nobody for it: the deadlines move by the delay.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvpool_master.core.inventory import Inventory
from kvpool_master.core.messages import SegmentOffer
from kvpool_master.core.segments import Segment
from kvpool_master.core.settings import Settings
from kvpool_proto.errors import LimitReached, NodeIdTaken, StaleIncarnation, UnknownNode

REPORTERS_MAX = 64
"""Hosts whose reports of one node are kept."""


@dataclass(slots=True)
class Node:
    """One node client's present life."""

    name: str
    incarnation: int
    offers: tuple[SegmentOffer, ...]
    segments: list[Segment]
    heartbeat_ms: int
    data_address: str = ""
    ramp_until_ms: int = 0
    """It joined empty: until then it gets less of others' writes."""
    up: bool = True
    reason: str = "registered"
    inventory: Inventory | None = None
    """What it has still to report."""
    draining: bool = False
    closing: bool = False
    """Draining, and nothing is moved any more: hidden, so that the leases on what is left run out."""
    drained: bool = False
    reports: dict[str, int] = field(default_factory=dict[str, int])
    """By reporting host, when."""
    reported_until_ms: int = 0
    """Suspect until then, whatever its heartbeats say."""
    probe: tuple[int, int] | None = None
    """A question that is not answered: its number, and by when it has to be."""

    @property
    def readable(self) -> bool:
        """Whether lookups may hand out what it holds."""
        return self.up and not self.closing

    @property
    def writable(self) -> bool:
        """Whether reservations may be placed on it."""
        return self.up and not self.draining

    def state(self, now_ms: int) -> str:
        """For people: see NodeStatus in pool.proto."""
        if not self.up:
            return "suspect"
        if self.draining:
            return "drained" if self.drained else "draining"
        return "ramp" if now_ms < self.ramp_until_ms else "up"


class Liveness:
    """All nodes that are not retired."""

    def __init__(self, settings: Settings, start_ms: int) -> None:
        self._settings = settings
        self.nodes: dict[str, Node] = {}
        self._last_tick_ms = start_ms
        self._probes = 0

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

    def reported(self, node: Node, reporter: str, now_ms: int) -> tuple[str, int]:
        """A host could not use the node's data port: (why it is suspect now or "", the number of a probe or 0)."""
        since_ms = now_ms - self._settings.report_window_ms
        node.reports = {host: at for host, at in node.reports.items() if at > since_ms and host != reporter}
        if len(node.reports) < REPORTERS_MAX:
            node.reports[reporter] = now_ms
        if node.reported_until_ms > now_ms or len(node.reports) > 1:
            node.reported_until_ms = now_ms + self._settings.report_hold_ms
            hosts = ", ".join(sorted(host or "a host without a node" for host in node.reports))
            return f"reported by {hosts}", 0
        if not node.up or node.probe is not None:
            return "", 0
        self._probes += 1
        node.probe = self._probes, now_ms + self._settings.probe_ms
        return "", self._probes

    def tick(self, now_ms: int) -> int:
        """Note the time of a Tick; if it came too late, all deadlines are moved by the delay, which is returned."""
        last, self._last_tick_ms = self._last_tick_ms, now_ms
        delay_ms = now_ms - last
        if delay_ms <= self._settings.stall_ms:
            return 0
        for node in self.nodes.values():
            node.heartbeat_ms = min(now_ms, node.heartbeat_ms + delay_ms)
            if node.probe is not None:
                node.probe = node.probe[0], node.probe[1] + delay_ms
        return delay_ms

    def suspects(self, now_ms: int) -> list[Node]:
        """Nodes that are up and have been silent for too long."""
        limit = now_ms - self._settings.suspect_ms
        return [node for node in self.nodes.values() if node.up and node.heartbeat_ms <= limit]

    def unanswered(self, now_ms: int) -> list[Node]:
        """Nodes that were asked since somebody reported them, and did not answer in time; they are held suspect."""
        found = [node for node in self.nodes.values() if node.probe is not None and node.probe[1] <= now_ms]
        for node in found:
            node.probe = None
            node.reported_until_ms = now_ms + self._settings.report_hold_ms
        return found

    def lost(self, now_ms: int) -> list[Node]:
        """Suspect nodes whose time is over."""
        limit = now_ms - self._settings.retire_ms
        return [node for node in self.nodes.values() if not node.up and node.heartbeat_ms <= limit]
