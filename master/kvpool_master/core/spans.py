"""Spans, the nodes of the directory's forest, and the only code that cuts and joins them.

Rules
  - A span is a run of consecutive blocks of one chain and is uniform: each part is missing, being written by one
    reservation, or complete. `have` has a bit for each complete part, `writers` the pieces being written. Neither:
    a hole, kept (keys, no bytes) while anything hangs below it or a lease ends in it.
  - A cut makes a new span of the head, so children, heap entries and later offsets stay with the tail; leases and
    pieces move with their blocks.
  - Ages never rise along a span: a request for a block is one for all before it. `age` is that of the last block,
    `steps` lists (end, age) of the runs of blocks before that were asked for later. A parent inherits the age of a
    child that goes.
  - `parent` is None for the two roots of a tree and for spans that are no longer part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain as flatten
from itertools import repeat
from struct import iter_unpack

from kvpool_master.core import extents as ex
from kvpool_master.core.leases import Lease
from kvpool_master.core.snapshot import NamespaceCounters
from kvpool_proto.namespace import NamespaceSpec

SPAN_BLOCKS_MAX = 4096
"""Spans are not joined beyond this: cutting a span copies its keys."""

Step = tuple[int, int]


class Tree:
    """One life of a namespace: its forest, from opening to the next purge."""

    __slots__ = (
        "alive",
        "blocks",
        "bytes",
        "counters",
        "full",
        "index",
        "key_bytes",
        "namespace",
        "orphans",
        "parts",
        "root",
        "slot_bytes",
        "spans",
    )

    def __init__(self, spec: NamespaceSpec, namespace: bytes, counters: NamespaceCounters) -> None:
        self.namespace = namespace
        self.counters = counters
        self.key_bytes = spec.key_bytes
        self.parts = spec.parts
        self.full = (1 << spec.parts) - 1
        self.slot_bytes = spec.slot_bytes
        self.index: dict[int, Span] | None = {} if spec.entry == "any" else None
        self.root = Span(self, None, b"", 0)
        self.orphans = Span(self, None, b"", 0)
        self.alive = True
        self.blocks = 0
        """Complete blocks."""
        self.bytes = 0
        """Slot bytes that the extents hold."""
        self.spans = 0

    def index_keys(self, keys: bytes, span: Span) -> None:
        """Let the index find `keys` in `span`; nothing where entry is root."""
        if self.index is not None:
            self.index.update(zip(key_numbers(keys, self.key_bytes), repeat(span)))

    def unindex_keys(self, keys: bytes) -> None:
        """Forget `keys`, each of which is in the index."""
        if self.index is not None:
            for _ in map(self.index.__delitem__, key_numbers(keys, self.key_bytes)):
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

    __slots__ = (
        "age",
        "children",
        "extents",
        "have",
        "keys",
        "leases",
        "parent",
        "queued",
        "steps",
        "tree",
        "writers",
    )

    def __init__(self, tree: Tree, parent: Span | None, keys: bytes, age: int) -> None:
        self.tree = tree
        self.parent = parent
        self.keys = keys
        self.age = age
        self.steps: tuple[Step, ...] | None = None
        self.children: dict[bytes, Span] | None = None
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
        return self.keys[: self.tree.key_bytes]

    def all_steps(self) -> list[Step]:
        """(end, age) of every run of blocks of one age, front to back."""
        return [*(self.steps or ()), (self.blocks, self.age)]

    def set_steps(self, steps: list[Step]) -> None:
        """Take over steps whose ages may rise; the rule that they do not is restored by raising what is before."""
        kept: list[Step] = []
        newest = -1
        for end, age in reversed(steps):
            if age > newest:
                newest = age
                kept.append((end, age))
        kept.reverse()
        self.age = kept.pop()[1]
        self.steps = tuple(kept) or None

    def touch(self, end: int, age: int) -> None:
        """Blocks [0, end) were asked for at `age`."""
        if end == self.blocks and age >= self.age and not self.steps:
            self.age = age
            return
        steps: list[Step] = []
        start = 0
        for step_end, step_age in self.all_steps():
            if start < end < step_end:
                steps.append((end, max(age, step_age)))
            steps.append((step_end, max(age, step_age) if step_end <= end else step_age))
            start = step_end
        self.set_steps(steps)

    def attach(self, child: Span) -> None:
        """Hang `child` below the last block."""
        if self.children is None:
            self.children = {}
        self.children[child.first_key()] = child
        child.parent = self

    def detach(self) -> Span:
        """Leave the parent, which inherits the age; returns it."""
        parent = self.parent
        assert parent is not None and parent.children is not None
        del parent.children[self.first_key()]
        if not parent.children:
            parent.children = None
        self.parent = None
        age = self.steps[0][1] if self.steps else self.age
        if parent.parent is not None and age > parent.age:
            parent.touch(parent.blocks, age)
        return parent


def cut(span: Span, at: int) -> Span:
    """Split `span` before block `at` (0 < at < blocks). Returns the head, a new span; `span` becomes the tail."""
    tree = span.tree
    edge = at * tree.key_bytes
    parent = span.parent
    assert parent is not None and parent.children is not None and 0 < edge < len(span.keys)
    head = Span(tree, parent, span.keys[:edge], 0)
    parent.children[head.first_key()] = head
    steps = span.all_steps()
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
    if span.parent is None or span.children is None or len(span.children) != 1:
        return False
    (child,) = span.children.values()
    full = span.tree.full
    return span.have == full == child.have and len(span.keys) + len(child.keys) <= SPAN_BLOCKS_MAX * span.tree.key_bytes


def join_child(span: Span) -> Span:
    """Take over the only child's blocks; see can_join. Returns the child, which is no longer part of the tree."""
    assert span.children is not None
    (child,) = span.children.values()
    at = span.blocks
    span.extents = ex.join(span.extents, child.extents, at)
    steps = [*span.all_steps(), *[(end + at, age) for end, age in child.all_steps()]]
    span.keys += child.keys
    span.set_steps(steps)
    span.children = child.children
    for grandchild in (span.children or {}).values():
        grandchild.parent = span
    for lease in child.leases or ():
        lease.span = span
        lease.end += at
    if child.leases:
        span.leases = [*(span.leases or ()), *child.leases]
    span.tree.index_keys(child.keys, span)
    span.tree.spans -= 1
    child.parent = child.children = child.leases = None
    child.extents = b""
    return child
