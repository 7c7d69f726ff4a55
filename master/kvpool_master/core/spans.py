"""Spans, the nodes of the directory's forest, and the only code that cuts and joins them.

Rules
  - A span is a run of consecutive blocks of one chain and is uniform: each part is missing, being written by one
    reservation, or complete. `have` has a bit for each complete part, `writers` the pieces being written. Neither:
    a hole, kept (keys, no bytes) while anything hangs below it or a lease ends in it.
  - A cut makes a new span of the head, so children, heap entries and later offsets stay with the tail; leases and
    pieces move with their blocks.
  - Ages never rise along a span: a request for a block is one for all before it. Along a span they are steps. A
    parent inherits the age of a child that goes.
  - `parent` is None for the two roots of a tree and for spans that are no longer part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain as flatten
from itertools import repeat
from struct import iter_unpack
from typing import TYPE_CHECKING

from kvpool_master.core import extents as ex
from kvpool_master.core.leases import Lease
from kvpool_master.core.snapshot import NamespaceCounters
from kvpool_proto.namespace import NamespaceSpec

if TYPE_CHECKING:
    from kvpool_master.core.eviction import Quota

FEW_CHILDREN = 8
"""Up to so many children are searched one by one: a tuple takes a fifth of a dict's memory."""
SPAN_BLOCKS_MAX = 4096
"""Spans are not joined beyond this: cutting a span copies its keys."""

Step = tuple[int, int]


class Tree:
    """One life of a namespace: its forest, from opening to the next purge."""

    __slots__ = (
        "alive",
        "anywhere",
        "blocks",
        "bytes",
        "counters",
        "full",
        "index",
        "indexing",
        "key_bytes",
        "namespace",
        "orphans",
        "part_bytes",
        "parts",
        "quota",
        "replica_bytes",
        "replicas",
        "root",
        "slot_bytes",
        "spans",
        "tenant",
    )

    def __init__(self, spec: NamespaceSpec, namespace: bytes, counters: NamespaceCounters) -> None:
        self.namespace = namespace
        self.counters = counters
        self.key_bytes = spec.key_bytes
        self.parts = spec.parts
        self.full = (1 << spec.parts) - 1
        self.part_bytes = spec.part_bytes
        self.slot_bytes = spec.slot_bytes
        self.anywhere = spec.entry == "any"
        """Chains may start anywhere."""
        self.index: dict[int, Span] | None = {} if self.anywhere else None
        """By key, where a block lies. With entry = root only while a recovery needs it; see reindex.py."""
        self.indexing = False
        """The index is being built, and is not to be relied on."""
        self.root = Span(self, None, b"", 0)
        self.orphans = Span(self, None, b"", 0)
        self.alive = True
        self.blocks = 0
        """Complete blocks."""
        self.bytes = 0
        """Slot bytes that the extents hold."""
        self.spans = 0
        self.tenant = spec.tenant
        self.quota: Quota | None = None
        """Of the tenant, if it has one."""
        self.replicas = spec.replicas
        """Copies wanted of each block."""
        self.replica_bytes = 0
        """Slot bytes that replicas hold."""

    def index_keys(self, keys: bytes, span: Span) -> None:
        """Let the index find `keys` in `span`; nothing where entry is root."""
        if self.index is not None:
            self.index.update(zip(key_numbers(keys, self.key_bytes), repeat(span)))

    def unindex_keys(self, keys: bytes) -> None:
        """Forget `keys`; some may not be in the index while it is being built."""
        if self.index is not None:
            for _ in map(self.index.pop, key_numbers(keys, self.key_bytes), repeat(None)):
                pass


def key_numbers(keys: bytes, key_bytes: int) -> Iterator[int]:
    """Packed keys as the integers that the index is keyed by (smaller than bytes objects)."""
    return map(int.from_bytes, flatten.from_iterable(iter_unpack(f"{key_bytes}s", keys)))


class Piece:
    """Consecutive blocks of one span that a reservation writes. mask: parts pending, lost: those removed meanwhile."""

    __slots__ = ("blocks", "lost", "mask", "reservation", "span")

    def __init__(self, reservation: Writer, span: Span | None, blocks: int, mask: int, lost: int = 0) -> None:
        self.reservation = reservation
        self.span = span
        self.blocks = blocks
        self.mask = mask
        self.lost = lost


class Writer:
    """What a span knows of a reservation: its pieces in chain order."""

    __slots__ = ("pieces",)

    def __init__(self) -> None:
        self.pieces: list[Piece] = []


class Span:
    """See the module's docstring. Sizes are in blocks."""

    __slots__ = ("ages", "children", "extents", "have", "keys", "leases", "parent", "queued", "tree", "writers")

    def __init__(self, tree: Tree, parent: Span | None, keys: bytes, age: int) -> None:
        self.tree = tree
        self.parent = parent
        self.keys = keys
        self.ages: int | tuple[Step, ...] = age
        """One age for all blocks, or (end, age) of each run of blocks of one age."""
        self.children: tuple[Span, ...] | dict[bytes, Span] | None = None
        """Up to FEW_CHILDREN as a tuple, more as a dict by first key; None when there are none."""
        self.extents = b""
        self.have = 0
        self.writers: list[Piece] | None = None
        self.leases: list[Lease] | None = None
        self.queued = False
        """Whether a heap of leaves holds an entry for it."""

    def __lt__(self, other: Span) -> bool:
        return False  # heaps order spans by age alone; equal ages stay in the order of arrival

    @property
    def blocks(self) -> int:
        """How many blocks it has."""
        return len(self.keys) // self.tree.key_bytes

    @property
    def writing(self) -> int:
        """Mask of the parts being written."""
        mask = 0
        for piece in self.writers or ():
            mask |= piece.mask
        return mask

    def leased_blocks(self) -> int:
        """How many leading blocks leases that end here hold."""
        return max([lease.end for lease in self.leases]) if self.leases else 0

    def first_key(self) -> bytes:
        """The key of the first block."""
        return self.keys[: self.tree.key_bytes]

    # -- ages

    @property
    def age(self) -> int:
        """The age of the last block."""
        ages = self.ages
        return ages if isinstance(ages, int) else ages[-1][1]

    @property
    def front_age(self) -> int:
        """The age of the first block."""
        ages = self.ages
        return ages if isinstance(ages, int) else ages[0][1]

    def steps(self) -> tuple[Step, ...]:
        """(end, age) of every run of blocks of one age, front to back."""
        ages = self.ages
        return ((self.blocks, ages),) if isinstance(ages, int) else ages

    def set_steps(self, steps: list[Step]) -> None:
        """Take over steps whose ages may rise; the rule that they do not is restored by raising what is before."""
        kept: list[Step] = []
        newest = -1
        for end, age in reversed(steps):
            if age > newest:
                newest = age
                kept.append((end, age))
        kept.reverse()
        self.ages = kept[0][1] if len(kept) == 1 else tuple(kept)

    def touch(self, end: int, age: int) -> None:
        """Blocks [0, end) were asked for at `age`."""
        if isinstance(self.ages, int) and end == self.blocks:
            self.ages = max(self.ages, age)
            return
        steps: list[Step] = []
        start = 0
        for step_end, step_age in self.steps():
            if start < end < step_end:
                steps.append((end, max(age, step_age)))
            steps.append((step_end, max(age, step_age) if step_end <= end else step_age))
            start = step_end
        self.set_steps(steps)

    # -- children

    def child(self, key: bytes) -> Span | None:
        """The child whose first key is `key`."""
        children = self.children
        if children is None:
            return None
        if isinstance(children, dict):
            return children.get(key)
        for one in children:
            if one.keys.startswith(key):
                return one
        return None

    def kids(self) -> Iterable[Span]:
        """All children."""
        children = self.children
        return children.values() if isinstance(children, dict) else children or ()

    def attach(self, child: Span) -> None:
        """Hang `child` below the last block."""
        child.parent = self
        children = self.children
        if isinstance(children, dict):
            children[child.first_key()] = child
        elif len(children or ()) < FEW_CHILDREN:
            self.children = (*(children or ()), child)
        else:
            self.children = {one.first_key(): one for one in (*(children or ()), child)}

    def drop(self, child: Span) -> None:
        """Forget a child."""
        children = self.children
        if isinstance(children, dict):
            del children[child.first_key()]
            self.children = children or None
        else:
            self.children = tuple([one for one in children or () if one is not child]) or None

    def detach(self) -> Span:
        """Leave the parent, which inherits the age; returns it. The span holds nothing afterwards."""
        parent = self.parent
        assert parent is not None
        parent.drop(self)
        if parent.parent is not None and self.front_age > parent.age:
            parent.touch(parent.blocks, self.front_age)
        self.parent = None
        self.keys = b""
        return parent


def cut(span: Span, at: int) -> Span:
    """Split `span` before block `at` (0 < at < blocks). Returns the head, a new span; `span` becomes the tail."""
    tree = span.tree
    edge = at * tree.key_bytes
    parent = span.parent
    assert parent is not None and 0 < edge < len(span.keys)
    head = Span(tree, parent, span.keys[:edge], 0)
    parent.drop(span)
    parent.attach(head)
    if isinstance(span.ages, int):
        head.ages = span.ages
    else:
        steps = span.ages
        head.set_steps([*[step for step in steps if step[0] < at], (at, next(a for e, a in steps if e >= at))])
        span.set_steps([(end - at, age) for end, age in steps if end > at])
    span.keys = span.keys[edge:]
    head.attach(span)
    head.have = span.have
    head.extents, span.extents = ex.split(span.extents, at)
    if span.leases:
        _cut_leases(span, head, at)
    for piece in span.writers or ():
        front = Piece(piece.reservation, head, at, piece.mask, piece.lost)
        pieces = piece.reservation.pieces
        pieces.insert(pieces.index(piece), front)
        piece.blocks -= at
        head.writers = [*(head.writers or ()), front]
    tree.index_keys(head.keys, head)
    tree.spans += 1
    return head


def _cut_leases(span: Span, head: Span, at: int) -> None:
    assert span.leases is not None
    ending = [lease for lease in span.leases if lease.end <= at]
    staying = [lease for lease in span.leases if lease.end > at]
    for lease in ending:
        lease.span = head
    for lease in staying:
        lease.end -= at
    head.leases = ending or None
    span.leases = staying or None


def can_join(span: Span) -> bool:
    """Whether `span` and its only child are alike and may become one."""
    if span.parent is None or not isinstance(span.children, tuple) or len(span.children) != 1 or span.tree.indexing:
        return False
    child = span.children[0]
    full = span.tree.full
    return span.have == full == child.have and len(span.keys) + len(child.keys) <= SPAN_BLOCKS_MAX * span.tree.key_bytes


def join_child(span: Span, slab_slots: Callable[[int], int]) -> None:
    """Take over the only child's blocks; see can_join. The child is no longer part of the tree.

    slab_slots: slots of the tree's size per slab of a segment.
    """
    assert isinstance(span.children, tuple)
    child = span.children[0]
    at = span.blocks
    span.extents = ex.join(span.extents, child.extents, at, slab_slots)
    steps = [*span.steps(), *[(end + at, age) for end, age in child.steps()]]
    span.keys += child.keys
    span.set_steps(steps)
    span.children = child.children
    for grandchild in span.kids():
        grandchild.parent = span
    for lease in child.leases or ():
        lease.span = span
        lease.end += at
    if child.leases:
        span.leases = [*(span.leases or ()), *child.leases]
    span.tree.index_keys(child.keys, span)
    span.tree.spans -= 1
    child.parent = child.children = child.leases = None
    child.extents = child.keys = b""
