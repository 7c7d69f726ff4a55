"""Where what is written goes: which nodes, which segments, and the slots there.

Rules
  - The writer's own node first. Where that takes no more, or has no segment: by choice of two. Two nodes are drawn, by
    capacity, and the one with the larger share of room takes a run of about spread_run_bytes; then the next two.
    (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 1996.)
  - Room before eviction: what finds a free slot anywhere evicts nothing. Where all is full the writer's own node evicts
    first, then a chosen one.
  - Never to a node that is suspect, draining or avoided by the writer; to another node than the writer's only where
    that has a data port (in a pool without data ports: anywhere, for a writer of which nobody knows where it is).
  - A node that joined empty is drawn less at first (ramp_ms), so that it is not all the world's.
  - Draws are a function of the reservation's stamp and how many went before: no clock, no state.
  - The cost grows with the runs, not with blocks or nodes: weights are added up when nodes change, not per choice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import accumulate

from kvpool_master.core import extents as ex
from kvpool_master.core.liveness import Liveness, Node
from kvpool_master.core.messages import Reason
from kvpool_master.core.segments import Segment, Space
from kvpool_master.core.settings import Settings

CHOICES_MAX = 8
"""Nodes without room that one wish meets before it is content with what it got."""
RAMP_STEPS = 8
"""In so many steps a node that joined empty gets its full weight."""

Evict = Callable[[Segment, int, int], None]
"""Evict (segment, slot bytes, slots wanted)."""


@dataclass(frozen=True, slots=True)
class Group:
    """Parts [low, high) that one process writes. node: where it is, "" for nowhere known."""

    low: int
    high: int
    node: str


@dataclass(slots=True)
class Wish:
    """Slots of one size for up to `blocks` blocks, under one stamp. avoid: nodes that the writer cannot use."""

    slot_bytes: int
    blocks: int
    stamp: int
    avoid: Collection[str] = ()
    asked: dict[Group, list[Segment]] = field(default_factory=dict[Group, list[Segment]])
    """By group, the segments that were asked for slots."""


@dataclass(slots=True)
class _Fill:
    """What a group has got so far of a wish."""

    wish: Wish
    group: Group
    wanted: int
    got: int = 0
    rows: list[ex.Record] = field(default_factory=list[ex.Record])
    no_slots: bool = False
    """Some segment had fewer slots than its share for writers admits."""
    can_bind: bool = False
    draws: int = 0

    @property
    def asked(self) -> list[Segment]:
        """The segments that were asked."""
        return self.wish.asked.setdefault(self.group, [])


class Placement:
    """Chooses nodes, takes slots. now_ms is set by the pool before each command."""

    def __init__(self, settings: Settings, space: Space, liveness: Liveness) -> None:
        self._settings = settings
        self._space = space
        self._liveness = liveness
        self.now_ms = 0
        self._tables: dict[tuple[int, bool], tuple[list[Node], list[int]]] = {}
        """By slot size and whether a data port is needed: nodes, and their weights added up."""
        self._step = 0

    def changed(self) -> None:
        """Nodes came, went, or changed their state: weights are added up anew when needed."""
        self._tables.clear()

    def tick(self) -> None:
        """Weights of nodes on their ramp move with time."""
        step = self.now_ms * RAMP_STEPS // max(1, self._settings.ramp_ms)
        if step != self._step and any(node.ramp_until_ms for node in self._liveness.nodes.values()):
            for node in self._liveness.nodes.values():
                if node.ramp_until_ms <= self.now_ms:
                    node.ramp_until_ms = 0
            self.changed()
        self._step = step

    # -- slots

    def allocate(self, groups: list[Group], wish: Wish, evict: Evict) -> tuple[int, list[ex.Record], Reason]:
        """Room for the first m of the blocks in every group: (m, rows with offsets from 0, why not all)."""
        rows: list[ex.Record] = []
        reason = Reason.NONE
        blocks = wish.blocks
        for group in groups:
            fill = _Fill(wish, group, blocks)
            why = self._fill(fill, evict)
            rows += fill.rows
            if fill.got < blocks:
                blocks, reason = fill.got, why
        if reason is not Reason.NONE:
            rows, back = self._cut_back(rows, blocks, wish.slot_bytes)
            self._space.charge(back, wish.slot_bytes, "reserved_bytes", -1)
        return blocks, rows, reason

    def take_elsewhere(self, wish: Wish, parts: tuple[int, int], node: str = "") -> list[ex.Record]:
        """Slots for a copy on `node`, or on one chosen that is not avoided; nothing is evicted. They count as reserved.

        One run at most, of fewer blocks than wished for if need be; none where there is no room.
        """
        fill = _Fill(wish, Group(*parts, node), wish.blocks)
        for _ in range(CHOICES_MAX):
            found = self._liveness.nodes.get(node) if node else self._choose(fill, wish.avoid, needs_port=True)
            if found is None:
                return []
            for segment in self._open_segments(found, wish.slot_bytes):
                self._take(fill, segment, wish.blocks, None)
                whole = bool(fill.rows) and fill.rows[0][4:6] == parts  # a copy has all parts in one run
                kept, back = fill.rows[:whole], fill.rows[whole:]
                self._space.give(back, wish.slot_bytes)
                self._space.charge(back, wish.slot_bytes, "reserved_bytes", -1)
                if kept:
                    return kept
                fill.rows, fill.got = [], 0
            if node:
                return []
        return []

    def own(self, name: str, slot_bytes: int) -> list[Segment]:
        """The open segments of a node that takes writes, most room first."""
        node = self._liveness.nodes.get(name)
        return self._open_segments(node, slot_bytes) if node is not None and node.writable else []

    def room_elsewhere(self, segment: Segment) -> bool:
        """Whether some other node that takes others' writes is below its low watermark."""
        low = self._settings.watermark_low_permille
        for node in self._liveness.nodes.values():
            if node.writable and node.data_address and node.name != segment.node:
                for one in node.segments:
                    if not one.closed and one.allocator.used_bytes() * 1000 < one.allocator.size_bytes * low:
                        return True
        return False

    def _fill(self, fill: _Fill, evict: Evict) -> Reason:
        """Take slots until the wish is fulfilled; returns why it is not."""
        for evicting in (None, evict):
            self._turn(fill, self.own(fill.group.node, fill.wish.slot_bytes), fill.wanted, evicting)
            if fill.got < fill.wanted and fill.can_bind:
                return Reason.SLAB_PENDING  # rather than evict, or write to another node
            self._spread(fill, evicting)
            if fill.got == fill.wanted:
                return Reason.NONE
            if fill.can_bind:
                return Reason.SLAB_PENDING
            if not fill.no_slots:
                return Reason.RESERVE_SHARE if fill.asked else Reason.NO_NODE
        return Reason.NO_SPACE

    def _spread(self, fill: _Fill, evicting: Evict | None) -> None:
        """Go on with nodes that are chosen, a long run on each."""
        wish, group = fill.wish, fill.group
        run = max(1, self._settings.spread_run_bytes // (wish.slot_bytes * (group.high - group.low)))
        full = {*wish.avoid, group.node}
        needs_port = bool(group.node or self._table(wish.slot_bytes, True)[0])
        if len(self._table(wish.slot_bytes, needs_port)[0]) == 1:
            run = fill.wanted  # nothing to choose
        misses = 0
        while fill.got < fill.wanted and misses < CHOICES_MAX:
            node = self._choose(fill, full, needs_port=needs_port)
            if node is None:
                return
            before = fill.got
            limit = min(run, fill.wanted - fill.got)
            self._turn(fill, self._open_segments(node, wish.slot_bytes), limit, evicting)
            if fill.got - before < limit:
                full.add(node.name)
                misses += 1

    def _turn(self, fill: _Fill, segments: list[Segment], blocks: int, evicting: Evict | None) -> None:
        """Take slots for up to `blocks` blocks from the segments of one node."""
        end = min(fill.wanted, fill.got + blocks)
        short = False
        for segment in segments:
            if segment not in fill.asked:
                fill.asked.append(segment)
            short |= self._take(fill, segment, end - fill.got, evicting)
            if fill.got == end:
                return
        if short:
            fill.no_slots = True
            fill.can_bind |= any(segment.allocator.can_bind(fill.wish.slot_bytes) for segment in segments)

    def _take(self, fill: _Fill, segment: Segment, blocks: int, evicting: Evict | None) -> bool:
        """Take slots for up to `blocks` blocks from a segment; True if it lacked slots, not its share for writers."""
        slot_bytes, low, high = fill.wish.slot_bytes, fill.group.low, fill.group.high
        wanted = min(blocks, self._writable_blocks(segment, slot_bytes, high - low))
        if evicting is not None and wanted:
            evicting(segment, slot_bytes, wanted * (high - low))
        more, found = self._place(segment, slot_bytes, wanted, low, high, fill.wish.stamp)
        self._space.charge(found, slot_bytes, "reserved_bytes", 1)
        fill.rows += [(row[0] + fill.got, *row[1:]) for row in found] if fill.got else found
        fill.got += more
        return more < wanted

    def _cut_back(self, rows: list[ex.Record], blocks: int, slot_bytes: int) -> tuple[list[ex.Record], list[ex.Record]]:
        """Keep the rows of the first `blocks`, return the others' slots: (kept, returned)."""
        head, tail = ex.split(b"".join([ex.pack(*row) for row in rows]), blocks)
        back = list(ex.records(tail))
        self._space.give(back, slot_bytes)
        return list(ex.records(head)), back

    def _writable_blocks(self, segment: Segment, slot_bytes: int, width: int) -> int:
        """How many blocks of `width` parts the segment's share for writers still admits."""
        share = segment.allocator.size_bytes * self._settings.reserve_share_permille // 1000
        left = share - segment.reserved_bytes - segment.quarantined_bytes
        return max(0, left // (slot_bytes * width))

    def _place(
        self, segment: Segment, slot_bytes: int, blocks: int, low: int, high: int, stamp: int
    ) -> tuple[int, list[ex.Record]]:
        """Take runs for up to `blocks`, parts side by side; where no run holds all parts of a block, in halves."""
        width = high - low
        runs = segment.allocator.runs_of(slot_bytes)
        rows: list[ex.Record] = []
        got = 0
        while got < blocks:
            run = runs.take((blocks - got) * width, width)
            if run is None:
                break
            rows.append((got, run[1] // width, segment.handle, run[0], low, high, width, stamp))
            got += run[1] // width
        if got or width == 1 or not blocks:
            return got, rows
        middle = low + width // 2
        left_got, left = self._place(segment, slot_bytes, blocks, low, middle, stamp)
        right_got, right = self._place(segment, slot_bytes, left_got, middle, high, stamp)
        if right_got < left_got:
            left, _ = self._cut_back(left, right_got, slot_bytes)
        return right_got, left + right

    # -- nodes

    def _choose(self, fill: _Fill, without: Collection[str], *, needs_port: bool) -> Node | None:
        """The better of two nodes drawn by capacity, none of `without`; None if there is none."""
        slot_bytes = fill.wish.slot_bytes
        nodes, sums = self._table(slot_bytes, needs_port)
        first: Node | None = None
        for _ in range(2 * CHOICES_MAX):
            if not sums:
                break
            fill.draws += 1
            drawn = nodes[bisect_right(sums, _scattered(fill.wish.stamp + (fill.draws << 40)) % sums[-1])]
            if drawn.name in without:
                continue
            if first is None:
                first = drawn
                continue
            return first if _room_share(first, slot_bytes) >= _room_share(drawn, slot_bytes) else drawn
        if first is None:  # few are left: take the first there is
            first = next((node for node in nodes if node.name not in without), None)
        return first

    def _table(self, slot_bytes: int, needs_port: bool) -> tuple[list[Node], list[int]]:
        table = self._tables.get((slot_bytes, needs_port))
        if table is None:
            weights = [
                (node, weight)
                for node in self._liveness.nodes.values()
                if node.writable
                and (node.data_address or not needs_port)
                and (weight := self._weight(node, slot_bytes))
            ]
            table = [node for node, _ in weights], list(accumulate(weight for _, weight in weights))
            self._tables[slot_bytes, needs_port] = table
        return table

    def _weight(self, node: Node, slot_bytes: int) -> int:
        """Capacity in MiB, less on the ramp; 0 if no segment takes such slots."""
        size = sum(one.allocator.size_bytes for one in node.segments if one.fits(slot_bytes) and not one.closed)
        left_ms = node.ramp_until_ms - self.now_ms
        if left_ms > 0:
            done = RAMP_STEPS - left_ms * RAMP_STEPS // self._settings.ramp_ms
            size = size * max(1, done) // (RAMP_STEPS + 1)
        return max(1, size >> 20) if size else 0

    @staticmethod
    def _open_segments(node: Node, slot_bytes: int) -> list[Segment]:
        """The open segments of a node, most room for the slot size first."""
        found = [one for one in node.segments if one.fits(slot_bytes) and not one.closed]
        if len(found) > 1:
            found.sort(key=lambda segment: (-segment.allocator.room_bytes(slot_bytes), segment.handle))
        return found


def _room_share(node: Node, slot_bytes: int) -> float:
    """Which part of a node's segments slots of a size could still take."""
    room, size = 0, 1
    for segment in node.segments:
        size += segment.allocator.size_bytes
        if not segment.closed:
            room += segment.allocator.room_bytes(slot_bytes)
    return room / size


def _scattered(number: int) -> int:
    """A number that looks random (splitmix64: Steele, Lea and Flood, 2014)."""
    mixed = (number * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return mixed ^ mixed >> 31
