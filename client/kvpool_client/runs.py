"""Where the blocks of a part lie: extents of the contract as runs of slots in attached segments.

Rules
  - A run never crosses a slab border and has one stamp; work in Python grows with runs, not with blocks.
  - What the Master answers is checked against the question before it becomes an address.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvpool_client.headers import SLOT_HEADER, U64, Array, life, places
from kvpool_client.segment import AttachedSegment
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import ProtocolError
from kvpool_proto.geometry import SLOT_HEADER_BYTES, slots_per_slab

I64 = npt.NDArray[np.int64]

_RAW_HEADER: Final = np.dtype((np.void, SLOT_HEADER_BYTES))


@dataclass(frozen=True, slots=True)
class Extents:
    """Runs of contiguous slots as columns of equal length; the fields are those of pool.proto."""

    offset: I64
    blocks: I64
    segment: I64
    first_slot: I64
    part_from: I64
    part_to: I64
    stamp: U64
    stride: I64

    def __len__(self) -> int:
        return len(self.offset)


def extents_of(message: pb.Extents) -> Extents:
    """The message's columns. Raises ProtocolError unless they are of equal length."""
    columns = Extents(
        offset=np.array(message.offset, dtype=np.int64),
        blocks=np.array(message.blocks, dtype=np.int64),
        segment=np.array(message.segment, dtype=np.int64),
        first_slot=np.array(message.first_slot, dtype=np.int64),
        part_from=np.array(message.part_from, dtype=np.int64),
        part_to=np.array(message.part_to, dtype=np.int64),
        stamp=np.array(message.stamp, dtype=np.uint64),
        stride=np.array(message.stride, dtype=np.int64),
    )
    if {len(getattr(columns, field.name)) for field in fields(columns)} != {len(columns)}:
        raise ProtocolError("extents have columns of different lengths")
    return columns


NO_EXTENTS = extents_of(pb.Extents())


class Run(NamedTuple):
    """Blocks first .. first + blocks - 1 of a layout, in slots slot, slot + stride, ... of one slab."""

    first: int
    blocks: int
    segment: AttachedSegment
    slot: int
    stride: int
    stamp: int

    def sub(self, start: int, blocks: int) -> Run:
        """`blocks` of its blocks from the start-th on."""
        return self._replace(first=self.first + start, blocks=blocks, slot=self.slot + start * self.stride)

    def headers(self, slot_bytes: int) -> Array:
        """A live view, SLOT_HEADER (blocks,). Raises SlabChanged, ProtocolError."""
        return self.segment.headers(self.slot, (self.blocks - 1) * self.stride + 1, slot_bytes)[:: self.stride]

    def slots(self, slot_bytes: int) -> npt.NDArray[np.uint8]:
        """A live view, uint8 (blocks, slot_bytes). Raises SlabChanged, ProtocolError."""
        return self.segment.slots(self.slot, (self.blocks - 1) * self.stride + 1, slot_bytes)[:: self.stride]


class Blocks(Protocol):
    """Any run of blocks of a layout."""

    @property
    def first(self) -> int:
        """The first block."""
        ...

    @property
    def blocks(self) -> int:
        """How many."""
        ...


class Row(NamedTuple):
    """Blocks first .. first + blocks - 1 of a layout, as far as an extent holds one part of them.

    slot, slot + stride, ... of the segment. extent: its number; skipped: how many of its blocks come before these.
    """

    first: int
    blocks: int
    segment: int
    slot: int
    stride: int
    stamp: int
    extent: int
    skipped: int = 0

    def sub(self, start: int, blocks: int) -> Row:
        """`blocks` of its blocks from the start-th on."""
        return self._replace(
            first=self.first + start,
            blocks=blocks,
            slot=self.slot + start * self.stride,
            skipped=self.skipped + start,
        )


def rows_of(extents: Extents, part: int, *, first_block: int, blocks: int) -> list[Row]:
    """The extents of one part, in chain order, with chain block first_block as block 0 of the layout.

    Raises ProtocolError if they overlap or leave [first_block, first_block + blocks).
    """
    index = np.flatnonzero((extents.part_from <= part) & (part < extents.part_to))
    index = index[np.argsort(extents.offset[index], kind="stable")]
    columns = (
        extents.offset[index] - first_block,
        extents.blocks[index],
        extents.segment[index],
        extents.first_slot[index] + part - extents.part_from[index],
        extents.stride[index],
        extents.stamp[index],
        index,
    )
    rows = [Row(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    end = 0
    for row in rows:
        if row.first < end or row.blocks < 1 or row.first + row.blocks > blocks or row.stride < 1:
            raise ProtocolError(f"extents of part {part} overlap, or leave the {blocks} blocks asked for")
        end = row.first + row.blocks
    return rows


def within(rows: Sequence[Row], spans: Sequence[tuple[int, int]]) -> list[Row]:
    """What of the rows lies in `spans`: block ranges [start, end), in order and disjoint, as the rows are."""
    found: list[Row] = []
    at = 0
    for row in rows:
        while at < len(spans) and spans[at][1] <= row.first:
            at += 1
        for start, end in spans[at:]:
            if start >= row.first + row.blocks:
                break
            low, high = max(start, row.first), min(end, row.first + row.blocks)
            found.append(row if high - low == row.blocks else row.sub(low - row.first, high - low))
    return found


def mapped(rows: Sequence[Row], segments: Mapping[int, AttachedSegment], slot_bytes: int) -> list[Run]:
    """The rows as runs of slots; rows whose slot numbers go on in the next slab are cut there.

    Raises KeyError for a segment that is not in `segments`, SlotTooLarge.
    """
    handles = {row.segment for row in rows}
    per_slab = {handle: slots_per_slab(segments[handle].slab_bytes, slot_bytes) for handle in handles}
    runs: list[Run] = []
    for row in rows:
        run = Run(row.first, row.blocks, segments[row.segment], row.slot, row.stride, row.stamp)
        slots = per_slab[row.segment]
        while (here := -(-(slots - run.slot % slots) // run.stride)) < run.blocks:
            runs.append(run.sub(0, here))
            run = run.sub(here, run.blocks - here)
        runs.append(run)
    return runs


def head(runs: Sequence[Run], blocks: int) -> list[Run]:
    """The runs of the first `blocks` of the blocks in `runs`."""
    kept: list[Run] = []
    for run in runs:
        if blocks <= 0:
            break
        kept.append(run if run.blocks <= blocks else run.sub(0, blocks))
        blocks -= run.blocks
    return kept


def cut(runs: Sequence[Run], blocks_max: int) -> list[list[Run]]:
    """The runs in groups of exactly blocks_max blocks each, but for the last; runs are cut where they must be."""
    groups: list[list[Run]] = []
    room = 0
    for run in runs:
        start = 0
        while start < run.blocks:
            if room == 0:
                groups.append([])
                room = blocks_max
            blocks = min(room, run.blocks - start)
            groups[-1].append(run.sub(start, blocks))
            start += blocks
            room -= blocks
    return groups


def windows(runs: Sequence[Run], size_blocks: int) -> dict[int, list[Run]]:
    """The runs by window: the n-th has the blocks from n * size_blocks on. Runs are cut where they must be."""
    found: dict[int, list[Run]] = {}
    for run in runs:
        start = 0
        while start < run.blocks:
            window, into = divmod(run.first + start, size_blocks)
            blocks = min(size_blocks - into, run.blocks - start)
            found.setdefault(window, []).append(run.sub(start, blocks))
            start += blocks
    return found


def before(runs: Sequence[Run], end: int) -> list[Run]:
    """The runs as far as they lie before block `end`; they are in order."""
    return [run if run.first + run.blocks <= end else run.sub(0, end - run.first) for run in runs if run.first < end]


def block_at(runs: Sequence[Blocks], index: int) -> int | None:
    """The number in the layout of the index-th block of `runs`; None: they have no more than that."""
    for run in runs:
        if index < run.blocks:
            return run.first + index
        index -= run.blocks
    return None


def count_before(runs: Iterable[Blocks], end: int) -> int:
    """How many of the blocks of `runs` lie before block `end`."""
    return sum(min(run.blocks, max(end - run.first, 0)) for run in runs)


def headers_of(runs: Sequence[Run], slot_bytes: int) -> Array:
    """A copy of the headers of all blocks, in order. Raises SlabChanged, ProtocolError."""
    found = np.empty(count(runs), dtype=SLOT_HEADER)
    raw = found.view(_RAW_HEADER)  # copied as they are: field by field is slow
    at = 0
    for run in runs:
        raw[at : at + run.blocks] = run.headers(slot_bytes).view(_RAW_HEADER)
        at += run.blocks
    return found


def put_headers(runs: Sequence[Run], headers: Array, slot_bytes: int) -> None:
    """Write `headers`, one per block, in order. Raises SlabChanged, ProtocolError."""
    raw = headers.view(_RAW_HEADER)
    at = 0
    for run in runs:
        run.headers(slot_bytes).view(_RAW_HEADER)[:] = raw[at : at + run.blocks]
        at += run.blocks


def places_of(runs: Sequence[Run], slot_bytes: int) -> U64:
    """What the place of every block's slot adds to its header's check (headers.places). Raises SlabChanged."""
    blocks = [run.blocks for run in runs]
    order = np.arange(sum(blocks), dtype=np.uint64)
    starts = np.cumsum([0, *blocks[:-1]]).astype(np.uint64)
    slots = (order - np.repeat(starts, blocks)) * np.repeat(_words([run.stride for run in runs]), blocks)
    slots += np.repeat(_words([run.slot for run in runs]), blocks)
    lives = [life(run.segment.generation(run.segment.slab_of(run.slot, slot_bytes)), slot_bytes) for run in runs]
    return places(slots, np.repeat(np.array(lives, dtype=np.uint64), blocks))


def stamps_of(runs: Sequence[Run]) -> U64:
    """The stamp of every block, in order."""
    return np.repeat(_words([run.stamp for run in runs]), [run.blocks for run in runs])


def count(runs: Iterable[Blocks]) -> int:
    """How many blocks."""
    return sum(run.blocks for run in runs)


def _words(values: Sequence[int]) -> U64:
    return np.array(values, dtype=np.uint64)
