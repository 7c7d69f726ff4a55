"""Leaf-first LRU, one record a block: what the core's hit rates are compared with. Knows nothing of the core.

Among blocks without a cached child the one whose last request is oldest goes, deeper first. A request never
evicts its own chain and stores the head that fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

TRACES = Path(__file__).parents[1] / "data" / "traces"
TABLE = {
    "mooncake_conversation": {"1%": 5.2, "2%": 7.9, "5%": 19.6, "10%": 27.9, "20%": 34.5, "50%": 36.3},
    "mooncake_synthetic": {"1%": 3.8, "2%": 7.8, "5%": 15.7, "10%": 26.2, "20%": 39.3, "50%": 58.9},
    "lmcache_agents_128": {"10%": 89.8, "20%": 89.8, "50%": 89.9},
}
"""Hit rate in % by trace and capacity; what the project has to reach."""
POINTS_MAX = 0.5
"""How far the core may be off, in points of hit rate."""


@dataclass(slots=True)
class Block:
    """A cached block; parent is the id of the block before it."""

    parent: int | None
    depth: int
    asked_ms: int
    children: int = 0


class LeafLru:
    """A cache of `capacity` blocks."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.blocks: dict[int, Block] = {}
        self._leaves: list[tuple[int, int, int]] = []  # (last request, -depth, id); stale entries are skipped

    def request(self, ids: Sequence[int], now_ms: int) -> int:
        """Ask for a chain and store what is missing of it. Returns the blocks hit."""
        hits = 0
        while hits < len(ids) and ids[hits] in self.blocks:
            self.blocks[ids[hits]].asked_ms = now_ms
            hits += 1
        own = set(ids)
        stored = hits
        while stored < len(ids) and (len(self.blocks) < self.capacity or self._evict(own)):
            parent = ids[stored - 1] if stored else None
            self.blocks[ids[stored]] = Block(parent, stored + 1, now_ms)
            if parent is not None:
                self.blocks[parent].children += 1
            stored += 1
        if stored:
            self._push(ids[stored - 1])
        return hits

    def _evict(self, own: set[int]) -> bool:
        kept: list[tuple[int, int, int]] = []
        victim = None
        while self._leaves and victim is None:
            entry = heapq.heappop(self._leaves)
            block = self.blocks.get(entry[2])
            if block is None or block.children or block.asked_ms != entry[0]:
                continue
            if entry[2] in own:
                kept.append(entry)
            else:
                victim = entry[2]
        for entry in kept:
            heapq.heappush(self._leaves, entry)
        if victim is None:
            return False
        parent = self.blocks.pop(victim).parent
        if parent is not None:
            self.blocks[parent].children -= 1
            self._push(parent)
        return True

    def _push(self, block_id: int) -> None:
        block = self.blocks[block_id]
        if not block.children:
            heapq.heappush(self._leaves, (block.asked_ms, -block.depth, block_id))


def hit_rate(requests: Iterable[tuple[int, Sequence[int]]], capacity: int) -> float:
    """Leading runs of blocks present / all blocks asked, for requests of (time in ms, ids)."""
    cache = LeafLru(capacity)
    hits = asked = 0
    for now_ms, ids in requests:
        hits += cache.request(ids, now_ms)
        asked += len(ids)
    return hits / asked
