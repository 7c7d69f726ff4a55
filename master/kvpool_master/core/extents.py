"""Packed extents: runs of contiguous slots, 32 bytes each, no object per run.

A record is (offset, blocks, segment, first slot, part from, part to, stride, stamp). `offset` counts blocks from
the start of the span that holds it, or of the chain in a reply. Block b of part p lies in slot
first + (b - offset) * stride + (p - part_from). `stride` is the number of parts that were placed side by side:
part_to - part_from, or more after some of them were given up. A span's records are ordered by
(part_from, offset) and cover each part that has room, without overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from struct import Struct
from typing import NamedTuple

RECORD = Struct("<IIIIHHHxxQ")
RECORD_BYTES = RECORD.size
pack = RECORD.pack
records = RECORD.iter_unpack
"""The records of packed extents as plain tuples: the cheapest way through them."""

_SEGMENT = itemgetter(2)

Record = tuple[int, int, int, int, int, int, int, int]


class Extent(NamedTuple):
    """One run; see the module's docstring."""

    offset: int
    blocks: int
    segment: int
    first_slot: int
    part_from: int
    part_to: int
    stride: int
    stamp: int


def extents(packed: bytes) -> list[Extent]:
    """The records as named tuples, for callers that are not on a hot path."""
    return [Extent(*record) for record in records(packed)]


def count(packed: bytes) -> int:
    """How many runs."""
    return len(packed) // RECORD_BYTES


def shift(packed: bytes, by: int) -> bytes:
    """The same runs with every offset moved by `by` blocks."""
    if by == 0 or not packed:
        return packed
    return b"".join([pack(offset + by, *rest) for offset, *rest in records(packed)])


def split(packed: bytes, at: int) -> tuple[bytes, bytes]:
    """The runs of the blocks before `at` and of those from `at` on, the latter's offsets counted from `at`."""
    head: list[bytes] = []
    tail: list[bytes] = []
    for offset, blocks, segment, first, low, high, stride, stamp in records(packed):
        if offset + blocks <= at:
            head.append(pack(offset, blocks, segment, first, low, high, stride, stamp))
        elif offset >= at:
            tail.append(pack(offset - at, blocks, segment, first, low, high, stride, stamp))
        else:
            keep = at - offset
            head.append(pack(offset, keep, segment, first, low, high, stride, stamp))
            tail.append(pack(0, blocks - keep, segment, first + keep * stride, low, high, stride, stamp))
    return b"".join(head), b"".join(tail)


def without_parts(packed: bytes, mask: int) -> tuple[bytes, list[Record]]:
    """The runs without the parts of `mask`, ordered, and the runs that were cut out."""
    kept: list[Record] = []
    cut: list[Record] = []
    for offset, blocks, segment, first, low, high, stride, stamp in records(packed):
        part = low
        while part < high:
            gone = mask >> part & 1
            end = part + 1
            while end < high and mask >> end & 1 == gone:
                end += 1
            row = (offset, blocks, segment, first + part - low, part, end, stride, stamp)
            (cut if gone else kept).append(row)
            part = end
    return ordered(kept), cut


def ordered(rows: list[Record]) -> bytes:
    """Records packed in the order of a span: by (part_from, offset)."""
    if len(rows) > 1:
        rows.sort(key=_place)
    return b"".join([pack(*row) for row in rows])


def _place(row: Record) -> tuple[int, int]:
    return row[4], row[0]


def segments(packed: bytes) -> set[int]:
    """The segments in which the runs lie."""
    return set(map(_SEGMENT, records(packed)))


def touches(packed: bytes, segments: set[int]) -> bool:
    """Whether any run lies in one of the segments."""
    return any(record[2] in segments for record in records(packed))


def join(head: bytes, tail: bytes, at: int, slab_slots: Callable[[int], int]) -> bytes:
    """The runs of two spans that become one, the second starting at block `at`; touching runs become one.

    slab_slots: slots per slab of a segment; runs on both sides of a slab border do not touch in memory.
    """
    rows: list[Record] = []
    for row in sorted([*records(head), *records(shift(tail, at))], key=_place):
        if rows and row[3] % slab_slots(row[2]):
            offset, blocks, segment, first, low, high, stride, stamp = rows[-1]
            if row[2:] == (segment, first + blocks * stride, low, high, stride, stamp) and row[0] == offset + blocks:
                rows[-1] = (offset, blocks + row[1], segment, first, low, high, stride, stamp)
                continue
        rows.append(row)
    return b"".join([pack(*row) for row in rows])
