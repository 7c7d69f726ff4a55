"""Blocks that an inventory brings back are put into the forest. No command enters here: recovery.py calls.

Rules
  - A strand is planned like a put. What is new is attached where its parent is, or as an orphan; missing parts of known
    blocks are filled in, also where somebody is writing them anew; parts that are there already are surplus: replicas
    where the namespace wants more on other nodes, else their slots are free.
  - Behind a conflict (a key seen after two different parents) all is surplus.
  - What lies on a retired node counts as lost at once, so that a copy that came back takes its place.
  - Ages: a stamp tells in which epoch a block was written, and in which order; so they are old, and in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate, repeat
from operator import itemgetter

from kvpool_master.core import extents as ex
from kvpool_master.core.directory import locate
from kvpool_master.core.forest import AGE_SHIFT, Forest
from kvpool_master.core.graft import end_of, link, new_span, plan_alive
from kvpool_master.core.messages import Parent, Strand
from kvpool_master.core.segments import Space
from kvpool_master.core.snapshot import PoolCounters
from kvpool_master.core.spans import Span, Tree, key_numbers
from kvpool_master.core.writes import Writes

_STAMP = itemgetter(3)


class Adopter:
    """Puts strands into trees that have an index."""

    def __init__(
        self, forest: Forest, space: Space, writes: Writes, counters: PoolCounters, epoch: int, start_ms: int
    ) -> None:
        self._forest = forest
        self._writes = writes
        self._space = space
        self._counters = counters
        self._epoch = epoch
        self._start_ms = start_ms

    def adopt(self, tree: Tree, handle: int, parts: tuple[int, int], strand: Strand) -> int:
        """Take what the directory lacks of a strand whose slots are claimed; returns how many blocks gave something."""
        low, high = parts
        mask = (1 << high) - (1 << low)
        offsets = accumulate(strand.extents, lambda offset, extent: offset + extent[0], initial=0)
        packed = b"".join(
            [
                ex.pack(offset, blocks, handle, first, low, high, stride, stamp)
                for offset, (blocks, first, stride, stamp) in zip(offsets, strand.extents, strict=False)
            ]
        )
        age = self._age(max(strand.extents, key=_STAMP)[3])
        span = self._all_new(tree, strand, age)
        if span is not None:
            self._fill(span, packed, mask, mask)
            self._forest.changed(span)
            return len(strand.keys) // tree.key_bytes
        return self._merge(tree, strand, packed, mask, age)

    def _all_new(self, tree: Tree, strand: Strand, age: int) -> Span | None:
        """A new span for a strand of which the directory knows no block: by far the most. None: it knows some."""
        index = tree.index
        assert index is not None
        after, lead = (tree.root, 0) if strand.parent is Parent.ROOT else None, b""
        if isinstance(strand.parent, bytes):
            found = locate(tree, strand.parent)
            after, lead = ((found[0], found[1] + 1), b"") if found is not None else (None, strand.parent)
        numbers = list(key_numbers(strand.keys, tree.key_bytes))
        if index.get(numbers[0]) is not None:
            return None
        span = Span(tree, None, strand.keys, age)
        known = len(index)
        owners = list(map(index.setdefault, numbers, repeat(span)))
        if len(index) - known < len(numbers) or (lead and index.get(int.from_bytes(lead)) is span):
            for number, owner in zip(numbers, owners, strict=True):
                if owner is span:
                    index.pop(number, None)
            return None
        end_of(self._forest, tree, after, lead).attach(span)
        tree.spans += 1
        return span

    def _merge(self, tree: Tree, strand: Strand, packed: bytes, mask: int, age: int) -> int:
        """Take what the directory lacks of a strand of which it knows some blocks."""
        offset = len(strand.keys) // tree.key_bytes
        plan = plan_alive(self._forest, tree, strand.parent, strand.keys)
        tree.counters.conflicts += plan.conflict
        after = plan.after
        changed: list[Span] = []
        end = taken = 0
        for region in plan.regions:
            if region.joins:
                assert region.span is not None
                link(end_of(self._forest, tree, after, plan.lead), region.span)
            end = region.offset + region.blocks
            here, packed = (packed, b"") if end == offset else ex.split(packed, region.blocks)
            span = region.span
            if span is None:
                keys = strand.keys[region.offset * tree.key_bytes : end * tree.key_bytes]
                span = new_span(end_of(self._forest, tree, after, plan.lead), keys, age)
            wanted = mask & ~span.have
            if wanted:
                if region.span is not None:
                    span = self._forest.isolate(span, region.start, region.blocks)
                    self._writes.displace(span, wanted)
                self._fill(span, here, mask, wanted)
                changed.append(span)
                taken += region.blocks
                after = (span, region.blocks)
            else:
                self._surplus(span, region.start, here)
                after = (span, region.start + region.blocks)
        self._space.give(ex.records(packed), tree.slot_bytes)
        for span in changed:
            if span.parent is not None and not span.writers:
                self._forest.changed(span)
        return taken

    def _surplus(self, span: Span, start: int, packed: bytes) -> None:
        """Copies of complete blocks, from the span's `start` on: replicas if they are wanted, else free slots."""
        tree = span.tree
        rows = [*ex.records(ex.shift(packed, start))]
        held = {row[2] for row in ex.records(span.extents)} | ex.segments(self._forest.replicas.of.get(span, b""))
        nodes = {self._space.segments[handle].node for handle in held}
        if rows and len(nodes) < tree.replicas and self._space.segments[rows[0][2]].node not in nodes:
            self._forest.replicas.add(span, rows)
        else:
            self._space.give(rows, tree.slot_bytes)

    def _fill(self, span: Span, packed: bytes, mask: int, wanted: int) -> None:
        """Parts of `wanted` are complete now; `packed` has those of `mask`, and what is not wanted of it is free."""
        tree = span.tree
        if wanted != mask:
            surplus, rows = ex.without_parts(packed, wanted)
            self._space.give(ex.records(surplus), tree.slot_bytes)
            packed = ex.ordered(rows)
        span.extents = ex.ordered([*ex.records(span.extents), *ex.records(packed)]) if span.extents else packed
        self._space.enlist(span, packed)
        span.queued = False  # it may lie in other segments now, whose heaps do not hold it yet
        tree.bytes += span.blocks * wanted.bit_count() * tree.slot_bytes
        if self._forest.complete(span, wanted):
            self._counters.recovered_blocks += span.blocks

    def _age(self, stamp: int) -> int:
        """As if its epoch had begun so many ms before ours as the epochs, which are seconds, are apart."""
        began_ms = max(0, self._start_ms - 1000 * (self._epoch - (stamp >> 32)))
        return min((began_ms << AGE_SHIFT) + (stamp & 0xFFFFFFFF), self._forest.next_age())


def alive(strand: Strand, dead: int, key_bytes: int) -> Iterator[tuple[Strand | None, int]]:
    """The parts of a strand with stamps above `dead`: (strand, blocks); (None, blocks) for what lies between them."""
    if min(strand.extents, key=_STAMP)[3] > dead:
        yield strand, len(strand.keys) // key_bytes
        return
    at = 0
    parent = strand.parent
    kept: list[tuple[int, int, int, int]] = []
    start = 0

    def cut(end: int) -> Iterable[tuple[Strand | None, int]]:
        """What was kept since `start`, up to block `end`."""
        if kept:
            yield Strand(parent, strand.keys[start * key_bytes : end * key_bytes], tuple(kept)), end - start

    for extent in strand.extents:
        if extent[3] > dead:
            kept.append(extent)
            at += extent[0]
            continue
        yield from cut(at)
        kept = []
        yield None, extent[0]
        at += extent[0]
        start = at
        parent = strand.keys[(at - 1) * key_bytes : at * key_bytes]
    yield from cut(at)
