"""Segment files, mapped: what everybody can read of them, and how a worker attaches one.

Rules
  - Layout: geometry.py. What the file says about itself: headers.py. Making and changing it: owned_segment.py.
  - Runs never cross a slab border.
  - Views stay valid after close(): the mapping lives until the last of them is gone, and so do its locks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool_client.headers import (
    MAGIC,
    SLAB_RECORD,
    SLOT_HEADER,
    SUPERBLOCK,
    SUPERBLOCK_COPIES,
    VERSION,
    Array,
    record_check,
)
from kvpool_proto.errors import ProtocolError, SlabChanged
from kvpool_proto.geometry import (
    PAGE_BYTES,
    SLAB_RECORD_BYTES,
    SLOT_HEADER_BYTES,
    SUPERBLOCK_BYTES,
    check_segment,
    file_bytes,
    slabs_offset,
    slot_table_bytes,
    slots_per_slab,
)

_EPOCH_OFFSET: Final = 280
_BYPASS_OFFSET: Final = 320
assert SUPERBLOCK.fields is not None
assert SUPERBLOCK.fields["epoch"][1] == _EPOCH_OFFSET
assert SUPERBLOCK.fields["bypass"][1] == _BYPASS_OFFSET
_TORN_READS_MAX: Final = 100


@dataclass(frozen=True, slots=True)
class Superblock:
    """What the file says of itself. size_bytes: of the slabs. epoch: the highest that the node client obeys.

    contents: names what the slabs hold. bypass: what workers skip, bits of bypass.py.
    """

    node_id: str
    incarnation: int
    epoch: int
    size_bytes: int
    slab_bytes: int
    segment_index: int
    contents: int
    bypass: int


class SlabRecord(NamedTuple):
    """How a slab is bound. slot_bytes = slots = 0: it is not."""

    generation: int
    slot_bytes: int
    slots: int


def read_superblock(page: npt.NDArray[np.uint8]) -> Superblock:
    """What the first page of a segment file says (uint8, SUPERBLOCK_BYTES).

    Raises ProtocolError if no copy of the superblock is of this version and has a check that agrees.
    """
    why = ""
    for start in SUPERBLOCK_COPIES:
        block = page[start : start + SUPERBLOCK.itemsize].view(SUPERBLOCK)
        magic, version, node_id, *numbers = block[0].tolist()
        if record_check(block)[0] != block["check"][0]:
            why = "the superblock's check fails: not a segment file, or spoiled"
        elif magic != MAGIC or version != VERSION:
            why = f"magic {magic:#x} version {version}: not a segment file of version {VERSION}"
        else:
            return Superblock(node_id.rstrip(b"\0").decode(errors="replace"), *numbers[:7])
    raise ProtocolError(why)


class SegmentMap:
    """A segment file mapped shared, for reading and writing.

    memory: the whole file, uint8. slabs: how many. Nothing is checked but the length of the file; the descriptor
    stays the caller's. Raises BadSegment (geometry), ProtocolError (the file is too short), OSError.
    """

    def __init__(self, fd: int, size_bytes: int, slab_bytes: int) -> None:
        self.slabs = check_segment(size_bytes, slab_bytes)
        self.size_bytes = size_bytes
        self.slab_bytes = slab_bytes
        length = file_bytes(size_bytes, slab_bytes)
        if os.fstat(fd).st_size < length:
            raise ProtocolError(f"segment file of {os.fstat(fd).st_size} bytes, {length} are needed")
        self.memory: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, length), dtype=np.uint8)
        self._slabs_offset = slabs_offset(self.slabs)
        self._slots_per_slab: dict[int, int] = {}
        self._records: dict[int, tuple[bytes, SlabRecord]] = {}

    @property
    def superblock(self) -> Superblock:
        """What the superblock says now. Raises as read_superblock."""
        for _ in range(_TORN_READS_MAX):  # the owner may be writing it
            with contextlib.suppress(ProtocolError):
                return read_superblock(self._view(0, SUPERBLOCK_BYTES).copy())
        return read_superblock(self._view(0, SUPERBLOCK_BYTES).copy())

    def epoch(self) -> int:
        """The highest epoch that the node client obeys, read live from the superblock."""
        return int(self._epoch_word()[0])

    def bypass(self) -> int:
        """What workers skip now, bits of bypass.py, read live from the superblock."""
        return int(self._bypass_word()[0])

    def slab_record(self, slab: int) -> SlabRecord:
        """How the slab is bound now. Raises SlabChanged if its record's check fails, ProtocolError out of range."""
        if not 0 <= slab < self.slabs:
            raise ProtocolError(f"slab {slab}: the segment has {self.slabs}")
        start = SUPERBLOCK_BYTES + slab * SLAB_RECORD_BYTES
        raw = self._view(start, SLAB_RECORD_BYTES).tobytes()
        known = self._records.get(slab)
        if known is not None and known[0] == raw:
            return known[1]
        fields = np.frombuffer(raw, dtype=SLAB_RECORD)
        record = SlabRecord(int(fields["generation"][0]), int(fields["slot_bytes"][0]), int(fields["slots"][0]))
        sound = record_check(fields)[0] == fields["check"][0]
        if not sound or (record.slot_bytes and record.slots != self.slots_in_slab(record.slot_bytes)):
            raise SlabChanged(f"the record of slab {slab} is being written, or is spoiled")
        self._records[slab] = (raw, record)
        return record

    def generation(self, slab: int) -> int:
        """The slab's generation, which the checks of its slot headers cover. Raises as slab_record."""
        return self.slab_record(slab).generation

    def slab_of(self, slot: int, slot_bytes: int) -> int:
        """The slab in which a slot of slot_bytes lies. Raises ProtocolError for a size that does not fit a slab."""
        return slot // self._slots(slot_bytes)

    def table(self, slab: int) -> Array:
        """The slot table of a bound slab, SLOT_HEADER, a live view. Raises as slab_record; SlabChanged if unbound."""
        record = self.slab_record(slab)
        if not record.slot_bytes:
            raise SlabChanged(f"slab {slab} is not bound")
        start = self._slab_start(slab)
        return self._view(start, record.slots * SLOT_HEADER_BYTES).view(SLOT_HEADER)

    def headers(self, first_slot: int, n: int, slot_bytes: int) -> Array:
        """The headers of slots first_slot .. first_slot + n - 1: SLOT_HEADER (n,), a live, contiguous view.

        Raises SlabChanged unless the slab is bound to slot_bytes; ProtocolError if there is no such run.
        """
        slab, index, _ = self._place(first_slot, n, slot_bytes)
        start = self._slab_start(slab) + index * SLOT_HEADER_BYTES
        return self._view(start, n * SLOT_HEADER_BYTES).view(SLOT_HEADER)

    def slots(self, first_slot: int, n: int, slot_bytes: int) -> npt.NDArray[np.uint8]:
        """The bytes of the same slots: uint8 (n, slot_bytes), a live, contiguous view. Raises as headers."""
        slab, index, per_slab = self._place(first_slot, n, slot_bytes)
        start = self._slab_start(slab) + slot_table_bytes(per_slab) + index * slot_bytes
        return self._view(start, n * slot_bytes).reshape(n, slot_bytes)

    def slots_in_slab(self, slot_bytes: int) -> int:
        """How many slots of this size a slab has; 0 when not even one fits, or the size is none that we hand out."""
        slots = self._slots_per_slab.get(slot_bytes)
        if slots is None:
            fits = 0 < slot_bytes <= self.slab_bytes - PAGE_BYTES and slot_bytes % PAGE_BYTES == 0
            slots = self._slots_per_slab[slot_bytes] = slots_per_slab(self.slab_bytes, slot_bytes) if fits else 0
        return slots

    def close(self) -> None:
        """Unmap, as soon as the last view is gone. Never raises; all else raises SlabChanged then."""
        self.memory = np.empty(0, dtype=np.uint8)  # the views alone hold the mapping now

    def _slots(self, slot_bytes: int) -> int:
        slots = self.slots_in_slab(slot_bytes)
        if slots == 0:
            raise ProtocolError(f"no slot of {slot_bytes} bytes in a slab of {self.slab_bytes}")
        return slots

    def _place(self, first_slot: int, n: int, slot_bytes: int) -> tuple[int, int, int]:
        """(slab, slot in slab, slots per slab) of a run that exists and is bound as said."""
        per_slab = self._slots(slot_bytes)
        slab, index = divmod(first_slot, per_slab)
        if n < 1 or index + n > per_slab:
            raise ProtocolError(f"slots {first_slot} + {n}: a run stays in one slab of {per_slab} slots")
        bound = self.slab_record(slab).slot_bytes
        if bound != slot_bytes:
            raise SlabChanged(f"slab {slab} is bound to slots of {bound} bytes, not {slot_bytes}")
        return slab, index, per_slab

    def _view(self, start: int, size_bytes: int) -> npt.NDArray[np.uint8]:
        view = self.memory[start : start + size_bytes]
        if len(view) != size_bytes:
            raise SlabChanged("the segment is closed here")
        return view

    def _epoch_word(self) -> npt.NDArray[np.uint64]:
        return self._view(_EPOCH_OFFSET, 8).view(np.uint64)

    def _bypass_word(self) -> npt.NDArray[np.uint64]:
        return self._view(_BYPASS_OFFSET, 8).view(np.uint64)

    def _slab_start(self, slab: int) -> int:
        return self._slabs_offset + slab * self.slab_bytes


class AttachedSegment(SegmentMap):
    """A worker's mapping of a segment. handle: what extents of that epoch call it.

    Takes over `fd`, whatever happens, and closes it: the mapping keeps the file and the worker's lock alive.
    Raises ProtocolError if the file is not the segment described.
    """

    def __init__(self, fd: int, handle: int, size_bytes: int, slab_bytes: int, epoch: int = 0) -> None:
        try:
            super().__init__(fd, size_bytes, slab_bytes)
        finally:
            os.close(fd)  # the mapping has a duplicate of its own
        self.handle = handle
        self.epoch_of_handle = epoch
        try:
            found = self.superblock
            if (found.size_bytes, found.slab_bytes) != (size_bytes, slab_bytes):
                raise ProtocolError(f"the file has {found.size_bytes} bytes in slabs of {found.slab_bytes}")
        except BaseException:
            self.close()
            raise
