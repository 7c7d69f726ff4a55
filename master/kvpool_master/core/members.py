"""Node clients come, live and go: their segments enter and leave the space.

Rules
  - A segment gets a handle that is unique within the epoch. A node that comes back with the same contents keeps its
    handles and all that the directory knows of it, whatever its incarnation; unless its inventory was not complete.
  - Who comes back is asked which of the writers are gone that were not heard of meanwhile.
  - The segments of a node that is not up, or closing at the end of a drain, are hidden. Those of a retired node stay
    hidden until their spans are taken apart.
  - Who drains is kept by name until it is undrained, over lives of the node and of the Master, and while it is away.
"""

from __future__ import annotations

from kvpool_master.core import messages as m
from kvpool_master.core.allocator import Allocator
from kvpool_master.core.clearing import Clearing
from kvpool_master.core.copies import Copies
from kvpool_master.core.drains import Drains
from kvpool_master.core.forest import Forest
from kvpool_master.core.liveness import Liveness, Node
from kvpool_master.core.memory import Memory
from kvpool_master.core.messages import BindSlab, Effect
from kvpool_master.core.placement import Placement
from kvpool_master.core.recovery import Recovery
from kvpool_master.core.segments import Segment, Space
from kvpool_master.core.settings import Settings
from kvpool_master.core.snapshot import PoolCounters
from kvpool_master.core.strays import Strays
from kvpool_master.core.writes import Writes
from kvpool_proto.errors import BadRequest, BadSegment, LimitReached, UnknownNode, UnknownSegment
from kvpool_proto.geometry import check_segment

NODE_NAME_CHARS_MAX = 255


class Members:
    """Registration and the states of nodes."""

    def __init__(
        self,
        settings: Settings,
        space: Space,
        forest: Forest,
        liveness: Liveness,
        writes: Writes,
        strays: Strays,
        clearing: Clearing,
        recovery: Recovery,
        placement: Placement,
        copies: Copies,
        drains: Drains,
        counters: PoolCounters,
        memory: Memory,
    ) -> None:
        self._settings = settings
        self._space = space
        self._forest = forest
        self._liveness = liveness
        self._writes = writes
        self._strays = strays
        self._clearing = clearing
        self._recovery = recovery
        self._placement = placement
        self._copies = copies
        self._drains = drains
        self._counters = counters
        self._handles = 0
        self.draining = set(memory.draining)
        """Names of nodes that drain, whether they are there or not."""
        self._names = set(memory.nodes)
        """Of all that were ever members and were not given up since."""

    def register(self, command: m.Register, slot_sizes: set[int], now_ms: int) -> m.Registered:
        """See messages.Register. slot_sizes: those of the open namespaces, bound ahead in new segments."""
        slabs = self._check(command)
        node = self._liveness.check_newcomer(command.node, command.incarnation)
        if node is not None:
            same = _shapes(node.offers) == _shapes(command.segments)
            if node.incarnation == command.incarnation and not same:
                raise BadSegment(f"node {command.node!r}: other segments than this incarnation registered before")
            known = same and (node.incarnation == command.incarnation or all(one.contents for one in command.segments))
            if known and node.inventory is None:
                return self._keep(node, command, now_ms)
        effects: list[Effect] = [m.Remember(node=command.node)]
        if node is not None:
            self._forget(node)
        segments: list[Segment] = []
        for offer, count in zip(command.segments, slabs, strict=True):
            self._handles += 1
            segment = Segment(self._handles, offer.index, command.node, Allocator(count, offer.slab_bytes))
            segments.append(segment)
            self._space.segments[segment.handle] = segment
        node = Node(command.node, command.incarnation, command.segments, segments, now_ms, command.data_address)
        if not any(offer.holds for offer in command.segments):
            node.ramp_until_ms = now_ms + self._settings.ramp_ms
        self._liveness.nodes[node.name] = node
        self._names.add(node.name)
        self._set_drain(node, node.name in self.draining)
        self._recovery.joined(node, command, now_ms)
        self._placement.changed()
        for segment in segments:
            effects += self._bind_ahead(segment, slot_sizes)
        effects += self._recovery.ask(now_ms)
        return m.Registered(tuple(segment.handle for segment in segments), tuple(effects))

    def _keep(self, node: Node, command: m.Register, now_ms: int) -> m.Registered:
        """A node that is known is back."""
        if node.incarnation != command.incarnation:
            node.reports.clear()
            node.reported_until_ms, node.probe = 0, None
        node.incarnation, node.offers = command.incarnation, command.segments
        node.data_address = command.data_address
        self._placement.changed()
        self._up(node, now_ms)
        self._recovery.kept(node)
        effects = self._pending(node)
        workers = self._writes.workers(node.name) | self._strays.workers(node.name)
        if workers:
            effects.append(m.AskWorkers(node.name, tuple(sorted(workers))))
        return m.Registered(tuple(segment.handle for segment in node.segments), tuple(effects))

    def _bind_ahead(self, segment: Segment, slot_sizes: set[int]) -> list[Effect]:
        effects: list[Effect] = []
        for slot_bytes in sorted(slot_sizes):
            if segment.fits(slot_bytes):
                effects += self._space.bind(segment, slot_bytes, 0)
        return effects

    def _check(self, command: m.Register) -> list[int]:
        """The number of slabs of each segment offered. Raises on bad input."""
        if not 0 < len(command.node) <= NODE_NAME_CHARS_MAX:
            raise BadRequest(f"node_id has {len(command.node)} characters: 1 to {NODE_NAME_CHARS_MAX}")
        if command.incarnation <= 0:
            raise BadRequest(f"incarnation = {command.incarnation}: above 0")
        if not command.segments:
            raise BadSegment("no segment is offered")
        if len(command.segments) > self._settings.segments_per_node_max:
            raise LimitReached(f"segments_per_node_max = {self._settings.segments_per_node_max}")
        if len({offer.index for offer in command.segments}) != len(command.segments):
            raise BadSegment("two segments have the same index")
        return [check_segment(offer.size_bytes, offer.slab_bytes) for offer in command.segments]

    def _pending(self, node: Node) -> list[Effect]:
        """Orders that the node has not confirmed, once more."""
        orders: list[Effect] = [
            BindSlab(node.name, segment.handle, slab, slot_bytes)
            for segment in node.segments
            for slab, slot_bytes in segment.allocator.binding.items()
        ]
        return [*orders, *self._clearing.pending(node.name)]

    def _up(self, node: Node, now_ms: int) -> None:
        node.heartbeat_ms = now_ms
        if not node.up and node.reported_until_ms <= now_ms:
            node.up = True
            node.reason = "draining" if node.draining else "heartbeat"
            self._show(node)

    def _suspect(self, node: Node, reason: str) -> None:
        node.up = False
        node.reason = reason
        self._show(node)

    def _show(self, node: Node) -> None:
        """Let lookups and placement see the node as it is now."""
        handles = [segment.handle for segment in node.segments]
        if node.readable:
            self._space.hidden.difference_update(handles)
        else:
            self._space.hidden.update(handles)
        self._placement.changed()

    # -- reports and drains

    def report(self, command: m.ReportNode, now_ms: int) -> m.NodeReported:
        """See messages.ReportNode."""
        node = self._liveness.nodes.get(command.node)
        if node is None or command.reporter == node.name:
            return m.NodeReported(False)
        if command.reporter and command.reporter not in self._liveness.nodes:
            return m.NodeReported(not node.up)  # who is that?
        why, probe = self._liveness.reported(node, command.reporter, now_ms)
        if why and node.up:
            self._counters.nodes_reported += 1
            self._suspect(node, why)
        return m.NodeReported(not node.up, (m.ProbeNode(node.name, probe),) if probe else ())

    def probe_answered(self, command: m.ProbeAnswered) -> None:
        """See messages.ProbeAnswered."""
        node = self._liveness.known(command.node, command.incarnation)
        if node.probe is not None and node.probe[0] == command.number:
            node.probe = None

    def drain(self, command: m.Drain | m.Undrain) -> m.Done:
        """See messages.Drain, Undrain."""
        name, drains = command.node, isinstance(command, m.Drain)
        if name not in self._names and name not in self.draining:
            raise UnknownNode(f"node {name!r} was never registered, or was given up")
        if drains == (name in self.draining):
            return m.Done()
        (self.draining.add if drains else self.draining.discard)(name)
        node = self._liveness.nodes.get(name)
        if node is not None:
            self._set_drain(node, drains)
        return m.Done((m.Remember(draining=(name, drains)),))

    def _set_drain(self, node: Node, drains: bool) -> None:
        node.draining, node.closing, node.drained = drains, False, False
        if drains:
            self._drains.drain(node)
        else:
            self._drains.undrain(node)
        if node.up and (drains or node.reason == "draining"):
            node.reason = "draining" if drains else "undrained"
        self._show(node)

    def heartbeat(self, command: m.Heartbeat, now_ms: int) -> None:
        """See messages.Heartbeat."""
        self._up(self._liveness.known(command.node, command.incarnation), now_ms)

    def slab_bound(self, command: m.SlabBound) -> None:
        """See messages.SlabBound."""
        node = self._liveness.known(command.node, command.incarnation)
        for segment in node.segments:
            if segment.handle == command.segment:
                segment.allocator.finish_binding(command.slab, command.slot_bytes)
                return
        raise UnknownSegment(f"segment {command.segment} is not one of node {command.node!r}")

    def session_lost(self, command: m.SessionLost) -> None:
        """See messages.SessionLost."""
        node = self._liveness.nodes.get(command.node)
        if node is not None and node.incarnation == command.incarnation and node.up:
            self._suspect(node, "session lost")

    def leave(self, command: m.RetireNode) -> list[Effect]:
        """See messages.RetireNode."""
        node = self._liveness.nodes.get(command.node)
        if node is None or node.incarnation != command.incarnation:
            return []
        self._forget(node)
        return [self._given_up(node.name)]

    def _given_up(self, name: str) -> m.Remember:
        self._names.discard(name)
        return m.Remember(node_gone=name)

    def _forget(self, node: Node) -> None:
        """Forget a node; its segments are taken apart in slices."""
        del self._liveness.nodes[node.name]
        self._placement.changed()
        self._drains.undrain(node)
        for segment in node.segments:
            self._copies.forget(segment)
            self._recovery.gone(segment)
            self._strays.forget(segment.handle)
            self._clearing.forget(segment.handle)
            self._forest.retire(segment)

    def tick(self, slot_sizes: set[int], now_ms: int) -> list[Effect]:
        """Suspect the silent, retire the lost, open the segments whose grace is over."""
        effects: list[Effect] = []
        for node in self._liveness.suspects(now_ms):
            self._suspect(node, "no heartbeat")
        for node in self._liveness.unanswered(now_ms):
            self._counters.nodes_reported += 1
            self._suspect(node, "reported, and did not answer the Master")
        for node in self._liveness.nodes.values():
            if node.draining and self._drains.closes(node) and not node.closing:
                node.closing = True
                self._drains.closed(node)
                self._show(node)
            node.drained = node.closing and self._drains.is_drained(node)
            if node.drained and node.up:
                node.reason = "drained"
        for node in [*self._liveness.lost(now_ms), *self._recovery.overdue(now_ms)]:
            if node.name in self._liveness.nodes:
                self._forget(node)
                effects += [m.Retire(node.name, node.incarnation), self._given_up(node.name)]
        for segment in self._recovery.open_segments(now_ms):
            self._placement.changed()
            effects += self._bind_ahead(segment, slot_sizes)
        return effects


def _shapes(offers: tuple[m.SegmentOffer, ...]) -> list[tuple[int, ...]]:
    """What makes segments the same ones."""
    return [(one.index, one.size_bytes, one.slab_bytes, one.numa_node, one.contents) for one in offers]
