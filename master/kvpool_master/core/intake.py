"""The messages of an inventory: each slot is claimed once, then what it holds goes where it belongs.

Rules
  - Only the inventory asked for last counts, and only while it arrives. One that breaks a rule has failed: nothing
    more of it is taken, and its node has to register again.
  - A segment without claims came empty and has been in use since: what an inventory says of it is passed over, since
    it may be older than what this Master gave out.
  - Dead stamps (a purge) and parts that the directory has already leave free slots behind.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from kvpool_master.core import messages as m
from kvpool_master.core.adopt import Adopter, alive
from kvpool_master.core.inventory import Inventory, InventoryState
from kvpool_master.core.liveness import Liveness, Node
from kvpool_master.core.segments import Segment, Space
from kvpool_master.core.snapshot import PoolCounters
from kvpool_master.core.spans import Tree
from kvpool_master.core.strays import Strays
from kvpool_master.core.unclaimed import Unclaimed, blocks_of, rows_of
from kvpool_proto.errors import BadRequest, StaleInventory, UnknownSegment
from kvpool_proto.keys import KEY_BYTES_MAX, KEY_BYTES_MIN
from kvpool_proto.namespace import NAMESPACE_ID_BYTES, PARTS_MAX

_Rows = m.InventorySlabs | m.InventoryStrands | m.InventoryWriting


class Intake:
    """Takes in what nodes report."""

    def __init__(
        self,
        space: Space,
        liveness: Liveness,
        strays: Strays,
        unclaimed: Unclaimed,
        adopter: Adopter,
        tombstones: dict[bytes, int],
        counters: PoolCounters,
    ) -> None:
        self._space = space
        self._liveness = liveness
        self._strays = strays
        self._unclaimed = unclaimed
        self._adopter = adopter
        self._tombstones = tombstones
        self._counters = counters

    def slabs(self, command: m.InventorySlabs, now_ms: int) -> None:
        """See messages.InventorySlabs."""
        inventory, segment = self._expected(command, now_ms)
        if segment.claims is not None:
            with _failing(inventory):
                segment.claims.bind(command.slabs)

    def strands(self, command: m.InventoryStrands, tree: Tree | None, now_ms: int) -> m.Taken:
        """See messages.InventoryStrands. tree: of the namespace, if it is open."""
        inventory, segment = self._expected(command, now_ms)
        with _failing(inventory):
            _check(command)
            if segment.claims is not None:
                extents = [extent for strand in command.strands for extent in strand.extents]
                runs = [(first, blocks, stride) for blocks, first, stride, _ in extents]
                segment.claims.claim(command.slot_bytes, runs, command.part_to - command.part_from)
        blocks = blocks_of(command)
        inventory.blocks += blocks
        if segment.claims is None:
            return m.Taken(0, blocks, 0)
        if tree is None:
            self._unclaimed.add(command, now_ms)
            self._counters.unclaimed_blocks += blocks
            return m.Taken(0, 0, blocks)
        taken = self.adopt(tree, command)
        return m.Taken(taken, blocks - taken, 0)

    def writing(self, command: m.InventoryWriting, now_ms: int) -> None:
        """See messages.InventoryWriting."""
        inventory, segment = self._expected(command, now_ms)
        with _failing(inventory):
            if segment.claims is not None:
                segment.claims.claim(command.slot_bytes, [(first, slots, 1) for first, slots, _ in command.runs])
        inventory.slots_writing += sum(slots for _, slots, _ in command.runs)
        if segment.claims is not None:
            for first, slots, worker in command.runs:
                self._strays.add(segment, command.slot_bytes, first, slots, worker, now_ms)

    def end(self, command: m.InventoryEnd, now_ms: int) -> None:
        """See messages.InventoryEnd: what was not claimed is free."""
        node, inventory = self._reporting(command, now_ms)
        with _failing(inventory):
            came = (inventory.blocks, inventory.slots_writing)
            if (command.blocks, command.slots_writing) != came:
                raise BadRequest(f"the inventory ends after {command.blocks, command.slots_writing}; {came} came")
            if any(segment.claims is not None and not segment.claims.told for segment in node.segments):
                raise BadRequest("the inventory ends, but the slabs of a segment were not told")
        node.inventory = None
        for segment in node.segments:
            if segment.claims is not None:
                segment.claims.free_unclaimed()
                segment.claims = None
        self._counters.inventories_completed += 1

    def adopt(self, tree: Tree, command: m.InventoryStrands) -> int:
        """Put strands whose slots are claimed into the directory; returns how many blocks it lacked."""
        if (tree.key_bytes, tree.slot_bytes) != (command.key_bytes, command.slot_bytes) or command.part_to > tree.parts:
            self._space.give(rows_of(command), command.slot_bytes)
            self._counters.surplus_blocks += blocks_of(command)
            return 0
        taken = 0
        parts = (command.part_from, command.part_to)
        dead = self._tombstones.get(command.namespace, 0)
        if not dead:
            for strand in command.strands:
                taken += self._adopter.adopt(tree, command.segment, parts, strand)
            self._counters.surplus_blocks += blocks_of(command) - taken
            return taken
        self._space.give(rows_of(command, dead), command.slot_bytes)
        for strand in command.strands:
            for piece, blocks in alive(strand, dead, tree.key_bytes):
                if piece is None:
                    self._counters.dead_blocks += blocks
                    continue
                got = self._adopter.adopt(tree, command.segment, parts, piece)
                self._counters.surplus_blocks += blocks - got
                taken += got
        return taken

    def _expected(self, command: _Rows, now_ms: int) -> tuple[Inventory, Segment]:
        node, inventory = self._reporting(command, now_ms)
        for segment in node.segments:
            if segment.handle == command.segment:
                return inventory, segment
        raise UnknownSegment(f"segment {command.segment} is not one of node {command.node!r}")

    def _reporting(self, command: _Rows | m.InventoryEnd, now_ms: int) -> tuple[Node, Inventory]:
        node = self._liveness.known(command.node, command.incarnation)
        inventory = node.inventory
        if inventory is None or inventory.number != command.number or inventory.state is not InventoryState.ARRIVING:
            raise StaleInventory(f"inventory {command.number} of node {node.name!r} is not the one that is awaited")
        inventory.moved_ms = now_ms
        return node, inventory


@contextmanager
def _failing(inventory: Inventory) -> Generator[None]:
    """An inventory that breaks a rule has failed."""
    try:
        yield
    except BadRequest:
        inventory.state = InventoryState.FAILED
        raise


def _check(command: m.InventoryStrands) -> None:
    """Raise BadRequest unless the strands are what they say."""
    key_bytes = command.key_bytes
    if not KEY_BYTES_MIN <= key_bytes <= KEY_BYTES_MAX or len(command.namespace) != NAMESPACE_ID_BYTES:
        raise BadRequest(f"key_bytes = {key_bytes}, a namespace id of {len(command.namespace)} bytes")
    if not 0 <= command.part_from < command.part_to <= PARTS_MAX:
        raise BadRequest(f"parts [{command.part_from}, {command.part_to}): within [0, {PARTS_MAX})")
    for parent, keys, extents in command.strands:
        if isinstance(parent, bytes) and len(parent) != key_bytes:
            raise BadRequest(f"a parent key of {len(parent)} bytes: key_bytes = {key_bytes}")
        if not extents or sum([blocks for blocks, _, _, _ in extents]) * key_bytes != len(keys):
            raise BadRequest("a strand's keys are not those of its extents")
        if min([stamp for _, _, _, stamp in extents]) <= 0:
            raise BadRequest("a stamp is not above 0")
