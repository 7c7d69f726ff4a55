"""Packed extents: runs of contiguous slots, 32 bytes each, no object per run.

A record is (offset, blocks, segment, first slot, part from, part to, stamp). `offset` counts blocks from the
start of the span that holds it, or of the chain in a reply. Block b of part p lies in slot
first + (b - offset) * (part_to - part_from) + (p - part_from). A span's records are ordered by
(part_from, offset) and cover each part that has room, without overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

RECORD = Struct("<IIIIIIQ")
RECORD_BYTES = RECORD.size
pack = RECORD.pack


class Extent(NamedTuple):
    """One run; see the module's docstring."""

    offset: int
    blocks: int
    segment: int
    first_slot: int
    part_from: int
    part_to: int
    stamp: int


def records(packed: bytes) -> Iterator[tuple[int, int, int, int, int, int, int]]:
    """The records as plain tuples, the cheapest way through them."""
    return RECORD.iter_unpack(packed)


def extents(packed: bytes) -> list[Extent]:
    """The records as named tuples, for callers that are not on a hot path."""
    return [Extent(*record) for record in RECORD.iter_unpack(packed)]


def count(packed: bytes) -> int:
    """How many runs."""
    return len(packed) // RECORD_BYTES


def shift(packed: bytes, by: int) -> bytes:
    """The same runs with every offset moved by `by` blocks."""
    if by == 0 or not packed:
        return packed
    return b"".join([pack(offset + by, *rest) for offset, *rest in RECORD.iter_unpack(packed)])


def split(packed: bytes, at: int) -> tuple[bytes, bytes]:
    """The runs of the blocks before `at` and of those from `at` on, the latter's offsets counted from `at`."""
    head: list[bytes] = []
    tail: list[bytes] = []
    for offset, blocks, segment, first, low, high, stamp in RECORD.iter_unpack(packed):
        if offset + blocks <= at:
            head.append(pack(offset, blocks, segment, first, low, high, stamp))
        elif offset >= at:
            tail.append(pack(offset - at, blocks, segment, first, low, high, stamp))
        else:
            keep = at - offset
            head.append(pack(offset, keep, segment, first, low, high, stamp))
            tail.append(pack(0, blocks - keep, segment, first + keep * (high - low), low, high, stamp))
    return b"".join(head), b"".join(tail)


def order(packed: bytes) -> bytes:
    """The same runs, ordered by (part_from, offset)."""
    rows = sorted(RECORD.iter_unpack(packed), key=lambda row: (row[4], row[0]))
    return b"".join([pack(*row) for row in rows])


def segments_of(packed: bytes) -> set[int]:
    """The segments that the runs lie in."""
    return {record[2] for record in RECORD.iter_unpack(packed)}
