"""Node clients come, live and go: their segments enter and leave the space.

Rules
  - A segment gets a handle that is unique within the epoch. A node that comes back with the same contents keeps its
    handles and all that the directory knows of it, whatever its incarnation; unless its inventory was not complete.
  - Who comes back is asked which of the writers are gone that were not heard of meanwhile.
  - The segments of a node that is not up are hidden. Those of a retired node stay hidden until their spans are
    taken apart.
"""

from __future__ import annotations

from kvpool_master.core import messages as m
from kvpool_master.core.allocator import Allocator
from kvpool_master.core.clearing import Clearing
from kvpool_master.core.forest import Forest
from kvpool_master.core.liveness import Liveness, Node
from kvpool_master.core.messages import BindSlab, Effect
from kvpool_master.core.recovery import Recovery
from kvpool_master.core.segments import Segment, Space
from kvpool_master.core.settings import Settings
from kvpool_master.core.strays import Strays
from kvpool_master.core.writes import Writes
from kvpool_proto.errors import BadRequest, BadSegment, LimitReached, UnknownSegment
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
    ) -> None:
        self._settings = settings
        self._space = space
        self._forest = forest
        self._liveness = liveness
        self._writes = writes
        self._strays = strays
        self._clearing = clearing
        self._recovery = recovery
        self._handles = 0

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
        node = Node(command.node, command.incarnation, command.segments, segments, now_ms)
        self._liveness.nodes[node.name] = node
        self._recovery.joined(node, command, now_ms)
        for segment in segments:
            effects += self._bind_ahead(segment, slot_sizes)
        effects += self._recovery.ask(now_ms)
        return m.Registered(tuple(segment.handle for segment in segments), tuple(effects))

    def _keep(self, node: Node, command: m.Register, now_ms: int) -> m.Registered:
        """A node that is known is back."""
        node.incarnation, node.offers = command.incarnation, command.segments
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
        if not node.up:
            node.up = True
            node.reason = "heartbeat"
            for segment in node.segments:
                self._space.hidden.discard(segment.handle)

    def _suspect(self, node: Node, reason: str) -> None:
        node.up = False
        node.reason = reason
        self._space.hidden.update(segment.handle for segment in node.segments)

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
        return [m.Remember(node_gone=node.name)]

    def _forget(self, node: Node) -> None:
        """Forget a node; its segments are taken apart in slices."""
        del self._liveness.nodes[node.name]
        for segment in node.segments:
            self._recovery.gone(segment)
            self._strays.forget(segment.handle)
            self._clearing.forget(segment.handle)
            self._forest.retire(segment)

    def tick(self, slot_sizes: set[int], now_ms: int) -> list[Effect]:
        """Suspect the silent, retire the lost, open the segments whose grace is over."""
        effects: list[Effect] = []
        for node in self._liveness.suspects(now_ms):
            self._suspect(node, "no heartbeat")
        for node in [*self._liveness.lost(now_ms), *self._recovery.overdue(now_ms)]:
            if node.name in self._liveness.nodes:
                self._forget(node)
                effects += [m.Retire(node.name, node.incarnation), m.Remember(node_gone=node.name)]
        for segment in self._recovery.open_segments(now_ms):
            effects += self._bind_ahead(segment, slot_sizes)
        return effects


def _shapes(offers: tuple[m.SegmentOffer, ...]) -> list[tuple[int, ...]]:
    """What makes segments the same ones."""
    return [(one.index, one.size_bytes, one.slab_bytes, one.numa_node, one.contents) for one in offers]
