"""The bounded memory of blocks that went, for explanations."""

from __future__ import annotations

from collections import deque

from kvpool_master.core.messages import Gone, GoneReason
from kvpool_master.core.spans import Span


class Ring:
    """A bounded memory of blocks that went: when, why, and how long nobody had asked for them."""

    def __init__(self, blocks_max: int) -> None:
        self._entries: deque[tuple[int, GoneReason, bytes, bytes, int, int]] = deque()
        self._blocks_max = blocks_max
        self.blocks = 0

    def add(self, span: Span, keys: bytes, reason: GoneReason, idle_ms: int, now_ms: int) -> None:
        """Remember `keys` of the span's namespace; the oldest memories go when there are too many."""
        tree = span.tree
        keys = keys[: self._blocks_max * tree.key_bytes]
        self._entries.append((now_ms, reason, tree.namespace, keys, tree.key_bytes, idle_ms))
        self.blocks += len(keys) // tree.key_bytes
        while self.blocks > self._blocks_max:
            entry = self._entries.popleft()
            self.blocks -= len(entry[3]) // entry[4]

    def find(self, namespace: bytes, key: bytes, now_ms: int) -> Gone | None:
        """The latest memory of a block, or None. Takes time linear in the ring: for explanations only."""
        for when_ms, reason, owner, keys, key_bytes, idle_ms in reversed(self._entries):
            if owner != namespace:
                continue
            at = keys.find(key)
            while at >= 0 and at % key_bytes:
                at = keys.find(key, at + 1)
            if at >= 0:
                return Gone(reason, now_ms - when_ms, idle_ms)
        return None
