"""Indexes for trees with entry = root, for the time of a recovery: an inventory's blocks may follow any block.

Rules
  - An index of what is there already is built in slices. Until it is complete (`tree.indexing`), puts do without it
    and spans are not joined, so that none is passed over.
  - It goes when no inventory is awaited and no orphan is left in the tree.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvpool_master.core.spans import Span, Tree


class Reindex:
    """The indexes being built."""

    def __init__(self) -> None:
        self._todo: list[tuple[Tree, list[Span]]] = []

    @property
    def complete(self) -> bool:
        """Whether every tree that began has its whole index."""
        return not self._todo

    def begin(self, trees: Iterable[Tree]) -> None:
        """Start to index those trees that have no index."""
        for tree in trees:
            if tree.index is None:
                tree.index = {}
                stack = list(tree.root.kids())
                if stack:
                    tree.indexing = True
                    self._todo.append((tree, stack))

    def work(self, spans_max: int) -> None:
        """One slice."""
        while self._todo and spans_max > 0:
            tree, stack = self._todo[-1]
            while stack and tree.alive and spans_max > 0:
                span = stack.pop()
                if span.parent is not None:
                    spans_max -= 1
                    tree.index_keys(span.keys, span)
                    stack += span.kids()
            if not stack or not tree.alive:
                tree.indexing = False
                self._todo.pop()

    def end(self, trees: Iterable[Tree]) -> None:
        """Drop the indexes that nothing needs."""
        for tree in trees:
            if not tree.anywhere and tree.index is not None and not tree.orphans.children:
                tree.index = None
