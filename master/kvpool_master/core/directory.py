"""Finding one's way in the forest: matching a chain, and planning where a put would go. Reads, never changes.

Rules
  - Matching compares packed bytes. The search for a divergence compares whole prefixes, never single keys, so a
    chain that is not monotone cannot match past its first difference.
  - entry = root: a chain starts at the root. entry = any: it starts wherever its first key is known.
  - While a recovery indexes a tree with entry = root, its puts are planned as with entry = any: they may meet orphans.
  - A put follows the root, a key, or nobody knows what (an orphan chain). An orphan is joined when a chain shows
    what stands before it. A key seen after two different parents, twice in one chain, or in a place that would close
    a circle is a conflict: the put ends before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool_master.core.messages import Parent
from kvpool_master.core.spans import Span, Tree, key_numbers


@dataclass(slots=True)
class Walk:
    """What is known of a chain: blocks up to `matched` lie in `path`, whose first block would be chain block `base`.

    base is below 0 where the way begins within a span.
    """

    path: list[Span]
    base: int
    matched: int


def common_blocks(keys: bytes, chain: bytes, at: int, key_bytes: int) -> int:
    """How many leading blocks of `keys` stand in `chain` from byte `at` on."""
    most = min(len(keys), len(chain) - at)
    if keys.startswith(chain[at : at + most]):
        return most // key_bytes
    low, high = 0, most // key_bytes  # the first `low` blocks agree, not all of the first `high`
    while high - low > 1:
        middle = (low + high) // 2
        edge = low * key_bytes
        if keys[edge : middle * key_bytes] == chain[at + edge : at + middle * key_bytes]:
            low = middle
        else:
            high = middle
    return low


def locate(tree: Tree, key: bytes) -> tuple[Span, int] | None:
    """The span that holds `key` and the block's offset in it, by the index of entry = any."""
    assert tree.index is not None
    span = tree.index.get(int.from_bytes(key))
    if span is None:
        return None
    at = span.keys.find(key)
    while at % tree.key_bytes:
        at = span.keys.find(key, at + 1)
    return span, at // tree.key_bytes


def walk(tree: Tree, chain: bytes, skip: int = 0) -> Walk:
    """Follow a chain as far as its blocks are known, holes included.

    With entry = root all is followed; with entry = any the way begins at block `skip`, wherever that is known, unless
    it is known to follow another block than the chain says.
    """
    key_bytes = tree.key_bytes
    size = len(chain)
    if tree.anywhere:
        at = skip * key_bytes
        found = locate(tree, chain[at : at + key_bytes]) if at < size else None
        if found is None or (skip and _before(*found) not in (b"", chain[at - key_bytes : at])):
            return Walk([], 0, 0)
        span, first = found
        keys = span.keys[first * key_bytes :]
    else:
        start = tree.root.child(chain[:key_bytes])
        if start is None:
            return Walk([], 0, 0)
        span, first, keys, at = start, 0, start.keys, 0
    base = at // key_bytes - first
    path: list[Span] = []
    while True:
        path.append(span)
        if not chain.startswith(keys, at):
            return Walk(path, base, at // key_bytes + common_blocks(keys, chain, at, key_bytes))
        at += len(keys)
        child = span.child(chain[at : at + key_bytes]) if span.children and at < size else None
        if child is None:
            return Walk(path, base, at // key_bytes)
        span = child
        keys = span.keys


def _before(span: Span, offset: int) -> bytes:
    """The key of the block before a block; empty at the root and at the head of an orphan."""
    key_bytes = span.tree.key_bytes
    if offset:
        return span.keys[(offset - 1) * key_bytes : offset * key_bytes]
    return span.parent.keys[-key_bytes:] if span.parent is not None else b""


@dataclass(slots=True)
class Region:
    """Consecutive blocks of a chain that lie in one span, or (span None) are new."""

    offset: int
    blocks: int
    span: Span | None
    start: int
    """First block within the span."""
    joins: bool = False
    """The span is an orphan that the block before, or the root, turns out to lead to."""
    share: int = 0
    """Who is to write it, where that is divided."""


@dataclass(slots=True)
class Plan:
    """Where the blocks of a put are or would go, front to back.

    after: what the first region follows: a span and the number of its blocks before (the root with 0), or None
    for an orphan. lead: a parent key that is not known itself; it becomes a hole at the head of the orphan.
    """

    regions: list[Region]
    after: tuple[Span, int] | None
    lead: bytes = b""
    conflict: bool = False


def plan_put(tree: Tree, parent: Parent | bytes, chain: bytes) -> Plan:
    """Plan a put of `chain` after `parent`; see Plan. With entry = root the parent must be the root."""
    if tree.index is None or tree.indexing:
        return _plan_from_root(tree, chain)
    return _plan_anywhere(tree, parent, chain)


def _plan_from_root(tree: Tree, chain: bytes) -> Plan:
    found = walk(tree, chain)
    regions: list[Region] = []
    offset = 0
    for span in found.path:
        blocks = min(span.blocks, found.matched - offset)
        regions.append(Region(offset, blocks, span, 0))
        offset += blocks
    total = len(chain) // tree.key_bytes
    if offset < total:
        regions.append(Region(offset, total - offset, None, 0))
    return Plan(regions, (tree.root, 0))


def _plan_anywhere(tree: Tree, parent: Parent | bytes, chain: bytes) -> Plan:
    assert tree.index is not None
    index = tree.index
    plan = Plan([], None)
    if parent is Parent.ROOT:
        plan.after = (tree.root, 0)
    elif isinstance(parent, bytes):
        found = locate(tree, parent)
        if found is None:
            plan.lead = parent
        else:
            plan.after = (found[0], found[1] + 1)
    numbers = list(key_numbers(chain, tree.key_bytes))
    total = _distinct_head(numbers, int.from_bytes(plan.lead) if plan.lead else -1)
    plan.conflict = total < len(numbers)
    if total and index.keys().isdisjoint(numbers):
        plan.regions.append(Region(0, total, None, 0))
        return plan
    known = list(map(index.__contains__, numbers[:total]))
    state = _Progress(plan.after, {_top(plan.after[0])} if plan.after else set(), bool(plan.after or plan.lead))
    at = 0
    while at < total:
        found = locate(tree, chain[at * tree.key_bytes : (at + 1) * tree.key_bytes])
        if found is None:
            end = known.index(True, at) if True in known[at:] else total
            plan.regions.append(Region(at, end - at, None, 0))
            state.node, state.placed = None, True
            at = end
            continue
        region = state.enter(tree, at, found)
        if region is None:
            plan.conflict = True
            break
        edge = region.start * tree.key_bytes
        region.blocks = common_blocks(found[0].keys[edge:], chain, at * tree.key_bytes, tree.key_bytes)
        region.blocks = min(region.blocks, total - at)
        plan.regions.append(region)
        at += region.blocks
        state.node = (found[0], region.start + region.blocks)
    return plan


def _distinct_head(numbers: list[int], lead: int) -> int:
    """How many leading keys are neither repeated nor the chain's own parent."""
    if len(set(numbers)) == len(numbers) and lead not in numbers:
        return len(numbers)
    seen = {lead}
    for place, number in enumerate(numbers):
        if number in seen:
            return place
        seen.add(number)
    return len(numbers)


def _top(span: Span) -> Span:
    """The head of the tree that a span stands in: the root itself, or a child of the orphans' root."""
    while span.parent is not None and span.parent is not span.tree.orphans:
        span = span.parent
    return span


@dataclass(slots=True)
class _Progress:
    """Where a plan stands: after block `node` (None: after new blocks, or nowhere yet), within trees `tops`."""

    node: tuple[Span, int] | None
    tops: set[Span]
    placed: bool
    """Whether something stands before the next block."""

    def enter(self, tree: Tree, at: int, found: tuple[Span, int]) -> Region | None:
        """The region that starts with a known block, or None if the block does not follow what is before it."""
        span, start = found
        if not self.placed:
            self.placed = True
            self.tops.add(_top(span))
            return Region(at, 0, span, start)
        if self.node is not None:
            before, end = self.node
            inside = span is before and start == end
            below = start == 0 and span.parent is before and end == before.blocks
            if inside or below:
                return Region(at, 0, span, start)
        if start == 0 and span.parent is tree.orphans and span not in self.tops:
            self.tops.add(span)
            return Region(at, 0, span, 0, joins=True)
        return None
