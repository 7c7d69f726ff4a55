"""Files that were removed on purpose, and what went with them: the blocks of which nothing lay elsewhere.

What a file takes with it is what the directory has on it alone when its node is given up. A Master that began after
the file was there and never heard of it had no such moment: then all that ever lay in the file may be gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool_master.core import extents as ex
from kvpool_master.core import invariants
from simulation.facts import keys_of

if TYPE_CHECKING:
    from simulation.world import World

Block = tuple[bytes, bytes]
"""Namespace and key."""


class Losses:
    """Of one world. Files are told apart by their inodes."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._held: dict[Block, set[int]] = {}
        """Files in which a part of a block was committed, ever."""
        self._discarded: dict[int, int] = {}
        """When each was given up."""
        self._alone: dict[int, set[Block]] = {}
        """By file, the blocks that lay nowhere else when its node was given up."""

    def committed(self, block: Block, inode: int) -> None:
        """A part of a block is in a file."""
        self._held.setdefault(block, set()).add(inode)

    def discarded(self, inode: int) -> None:
        """A file is to be removed, with whatever it holds."""
        self._discarded.setdefault(inode, self._world.hub.now_us)

    def forgetting(self, node: Any, handles: dict[int, int]) -> None:
        """The core is about to give up a node. handles: of its segments -> inodes."""
        core = self._world.core
        gone = {handle: inode for handle, inode in handles.items() if inode in self._discarded}
        unclaimed = any(row[2] in gone for _, rows in core.unclaimed.rows() for row in rows)
        if not gone or unclaimed or node.inventory is not None:
            return  # the directory does not know all that is there
        left = {handle for handle, one in core.space.segments.items() if not one.retired} - handles.keys()
        for inode in gone.values():
            self._alone.setdefault(inode, set())
        for namespace in core.namespaces.values():
            for span in invariants._spans(namespace.tree):
                rows = [*ex.records(span.extents), *ex.records(core.forest.replicas.of.get(span, b""))]
                if any(row[2] in gone for row in rows):
                    self._note(namespace.spec, span, rows, gone, left)

    def _note(self, spec: Any, span: Any, rows: list[ex.Record], gone: dict[int, int], left: set[int]) -> None:
        for number, key in enumerate(keys_of(span.keys, spec.key_bytes)):
            for part in range(spec.parts):
                where = {
                    row[2] for row in rows if row[0] <= number < row[0] + row[1] and row[4] <= part < row[5]
                }  # fmt: skip
                if where & gone.keys() and not where & left:
                    for handle in where & gone.keys():
                        self._alone[gone[handle]].add((spec.id, key))

    def excuse(self, block: Block) -> bool:
        """May it be gone with a file?"""
        for inode in self._held.get(block, ()):
            if inode in self._discarded and (inode not in self._alone or block in self._alone[inode]):
                return True
        return False
