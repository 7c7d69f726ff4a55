"""Blocks that go by an operator's word, or since their bytes are bad: out of sight at once, and for good.

Rules
  - What was taken out leaves a hole; its headers on the nodes are cleared (clearing.py), so that no inventory brings it
    back. Nodes that cannot be told yet are named.
  - Blocks being written are left alone. Of blocks with replicas only the bad copy goes.
"""

from __future__ import annotations

from kvpool_master.core import extents as ex
from kvpool_master.core import messages as m
from kvpool_master.core.clearing import Clearing
from kvpool_master.core.directory import walk
from kvpool_master.core.forest import Forest
from kvpool_master.core.liveness import Liveness
from kvpool_master.core.messages import GoneReason
from kvpool_master.core.segments import Space
from kvpool_master.core.spans import Span, Tree


class Removal:
    """Takes blocks out. tree: of the command's namespace, in which its chain is well formed."""

    def __init__(self, space: Space, forest: Forest, liveness: Liveness, clearing: Clearing) -> None:
        self._space = space
        self._forest = forest
        self._liveness = liveness
        self._clearing = clearing

    def remove(self, command: m.Remove, tree: Tree) -> m.Removed:
        """See messages."""
        found = walk(tree, command.chain, command.skip)
        base = found.base  # where in the chain the span's first block would stand
        todo: list[tuple[Span, int, int]] = []
        for span in found.path:
            low, high = max(0, command.skip - base), min(span.blocks, found.matched - base)
            base += span.blocks
            if low < high and span.have and not span.writers:
                todo.append((span, low, high - low))
        rows: list[ex.Record] = []
        for span, low, blocks in reversed(todo):
            rows += self._forest.take_out(self._forest.isolate(span, low, blocks), GoneReason.REMOVED)
        return self._removed(sum(blocks for _, _, blocks in todo), rows, tree)

    def _removed(self, blocks: int, rows: list[ex.Record], tree: Tree) -> m.Removed:
        """The headers of what was taken out must go; who cannot be told now is named."""
        nodes = sorted({self._space.segments[row[2]].node for row in rows})
        effects = self._clearing.clear(rows, tree.slot_bytes)
        away = tuple(name for name in nodes if self._clearing.waits(name) or not self._up(name))
        return m.Removed(blocks, away, tuple(effects))

    def _up(self, name: str) -> bool:
        node = self._liveness.nodes.get(name)
        return node is not None and node.up

    def block_bad(self, command: m.BlockBad, tree: Tree) -> m.Removed:
        """See messages."""
        total = len(command.chain) // tree.key_bytes
        found = walk(tree, command.chain, total - 1)
        if found.matched < total:
            return m.Removed(0)
        span = found.path[-1]
        at = total - 1 - found.base - sum([before.blocks for before in found.path[:-1]])
        here = [row for row in ex.records(span.extents) if row[0] <= at < row[0] + row[1]]
        own = next((row for row in here if row[7] == command.stamp), None)
        if own is None or not span.have or span.writers:
            return self._removed(0, self._forest.replicas.drop_stamp(span, at, command.stamp), tree)
        block = self._forest.isolate(span, at, 1)
        own = next(row for row in ex.records(block.extents) if row[7] == command.stamp)
        old = self._forest.replace(block, own)
        if old is None:
            return self._removed(1, self._forest.take_out(block, GoneReason.BAD_BYTES), tree)
        told = self._removed(0, [old], tree)
        rest = self.block_bad(command, tree)  # parts of the same stamp may lie in runs of their own
        return m.Removed(rest.blocks, (*told.nodes_away, *rest.nodes_away), (*told.effects, *rest.effects))
