"""Where the blocks of a copy lie in another node's memory: addresses, worked out from where its segment files begin.

Rules
  - Columns with an element per block; work in Python grows with segments and transfers.
  - The layout of a file is geometry.py's. An address outside its file is a ProtocolError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvpool_client.headers import U64
from kvpool_client.peer.copies import PeerCopy
from kvpool_client.runs import I64
from kvpool_proto.capability import RUN, Table
from kvpool_proto.errors import ProtocolError, UnknownSegment
from kvpool_proto.geometry import (
    SLAB_RECORD_BYTES,
    SLOT_HEADER_BYTES,
    SUPERBLOCK_BYTES,
    check_segment,
    slabs_offset,
    slot_table_bytes,
    slots_per_slab,
)


class RemoteFile(NamedTuple):
    """A segment's file, mapped elsewhere. base: the address of its first byte there."""

    base: int
    size_bytes: int
    slab_bytes: int


class Transfer(NamedTuple):
    """Bytes to be read: two addresses, here and there."""

    local: int
    remote: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RemoteSlots:
    """first: the block of the layout. slot: its number in its segment. record, header, payload: addresses there."""

    first: I64
    slot: U64
    record: U64
    header: U64
    payload: U64

    def __len__(self) -> int:
        return len(self.first)

    def cut(self, start: int, stop: int) -> RemoteSlots:
        """Blocks start .. stop - 1."""
        where = slice(start, stop)
        return RemoteSlots(
            self.first[where], self.slot[where], self.record[where], self.header[where], self.payload[where]
        )


def segments_of(copy: PeerCopy) -> set[int]:
    """The handles of the segments in which its blocks lie."""
    rows, _ = _rows(copy)
    return set(rows["segment"].tolist())


def locate(copy: PeerCopy, files: Mapping[int, RemoteFile]) -> RemoteSlots:
    """The blocks of copy.runs, in order. files: by handle. Raises ProtocolError, SlotTooLarge, UnknownSegment."""
    rows, index = _rows(copy)
    slots = rows["first_slot"].astype(np.int64) + index * rows["stride"]
    record, header, payload = (np.empty(len(slots), dtype=np.uint64) for _ in range(3))
    for handle in set(rows["segment"].tolist()):
        if handle not in files:
            raise UnknownSegment(f"segment {handle} is not offered for direct reads")
        base, size_bytes, slab_bytes = files[handle]
        here = rows["segment"] == handle
        per_slab = slots_per_slab(slab_bytes, copy.slot_bytes)
        slab, place = np.divmod(slots[here], per_slab)
        slabs = check_segment(size_bytes, slab_bytes)
        if slab.max() >= slabs:
            raise ProtocolError(f"segment {handle} has {slabs} slabs, the answer names slab {slab.max()}")
        start = base + slabs_offset(slabs) + slab * slab_bytes
        record[here] = base + SUPERBLOCK_BYTES + slab * SLAB_RECORD_BYTES
        header[here] = start + place * SLOT_HEADER_BYTES
        payload[here] = start + slot_table_bytes(per_slab) + place * copy.slot_bytes
    firsts = np.concatenate([np.arange(run.first, run.first + run.blocks) for run in copy.runs])
    return RemoteSlots(firsts, slots.astype(np.uint64), record, header, payload)


def transfers_of(remote: U64, local: int, size_bytes: int, pitch_bytes: int, transfer_bytes: int) -> list[Transfer]:
    """Pieces of size_bytes each at `remote`, to stand pitch_bytes apart at `local`.

    Neighbours that stand so there as well go together, up to transfer_bytes at a time.
    """
    together = max(1, transfer_bytes // pitch_bytes)
    ends = [*(np.flatnonzero(np.diff(remote) != pitch_bytes) + 1).tolist(), len(remote)]
    found: list[Transfer] = []
    start = 0
    for end in ends:
        while start < end:
            pieces = min(together, end - start)
            length = (pieces - 1) * pitch_bytes + size_bytes
            found.append(Transfer(local + start * pitch_bytes, int(remote[start]), length))
            start += pieces
    return found


def _rows(copy: PeerCopy) -> tuple[Table, I64]:
    """Of each block: its row of the grant's table, and which block of that row it is. Raises ProtocolError."""
    table = np.frombuffer(copy.grant.table, dtype=RUN)
    lengths = table["blocks"].astype(np.int64)
    ends = np.cumsum(lengths)
    at = np.concatenate([np.arange(run.at, run.at + run.blocks) for run in copy.runs])
    if not len(ends) or at.min() < 0 or at.max() >= ends[-1]:
        raise ProtocolError("a copy names blocks that its grant does not have")
    row = np.searchsorted(ends, at, side="right")
    return table[row], at - (ends - lengths)[row]
