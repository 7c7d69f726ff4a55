"""The node client's own segments: make the file or adopt it, bind slabs, clear slots, let workers in, remove it.

Rules
  - A file is allocated and touched in full before it is offered, and never truncated: no SIGBUS in a worker.
  - The owner keeps its own copy of generations and slot sizes: a worker that scribbles over the slab table spoils
    reads (misses), not the owner's account.
  - A slab is bound in this order: clear its slot table, barrier, write its record with the next generation.
  - The superblock stands in the file twice and is written one copy after the other: a process that dies in between
    leaves one that is whole. Its check covers all of it; the epoch and the bypass word of the copy that workers read
    live are each written by one store before that copy is, so that they are never read torn.
  - A dead owner's file is adopted as far as it can be verified: adoption.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvpool_client import locks, pages, segment_files
from kvpool_client.adoption import (
    Adoption,
    check_identity,
    new_contents,
    read_records,
    unfinished,
)
from kvpool_client.headers import (
    COMMITTED,
    MAGIC,
    PEER_WRITER,
    SLAB_RECORD,
    SLOT_HEADER,
    SUPERBLOCK,
    SUPERBLOCK_COPIES,
    VERSION,
    WRITING,
    Array,
    Barrier,
    record_check,
)
from kvpool_client.segment import SegmentMap, SlabRecord
from kvpool_proto.errors import ProtocolError, SlabChanged
from kvpool_proto.geometry import (
    SLAB_RECORD_BYTES,
    SLOT_HEADER_BYTES,
    SUPERBLOCK_BYTES,
    check_segment,
    file_bytes,
    slot_table_bytes,
)

NODE_ID_PATTERN = segment_files.NODE_ID_PATTERN


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPlan:
    """A segment to create. index: the node's own number for it. numa_node: -1 for anywhere."""

    directory: Path
    node_id: str
    index: int
    size_bytes: int
    slab_bytes: int
    huge_pages: pages.HugePages = "off"
    numa_node: int = -1

    @property
    def path(self) -> Path:
        """The file's path."""
        return self.directory / segment_files.name_of(self.node_id, self.index)


class OwnedSegment(SegmentMap):
    """The node client's own segment. One thread at a time may change it; use open() or create().

    adoption: what became of the file that was there. former_incarnation, epoch_seen: what the adopted file says; 0
    for a new one.
    """

    def __init__(self, fd: int, plan: SegmentPlan) -> None:
        super().__init__(fd, plan.size_bytes, plan.slab_bytes)
        self.plan = plan
        self.adoption = Adoption()
        self.former_incarnation = 0
        self.epoch_seen = 0
        self._fd = fd
        self._barrier = Barrier()
        self._bound = [SlabRecord(0, 0, 0)] * self.slabs
        self._incarnation = 0
        self._epoch = 0
        self._contents = new_contents()
        self._bypass = 0

    @classmethod
    def open(
        cls, plan: SegmentPlan, *, incarnation: int, prefault_threads: int, progress: Callable[[int], None]
    ) -> OwnedSegment:
        """Adopt the plan's file if a dead owner left it and it is sound; else drop it, and create.

        The adopted file gets `incarnation`, or a higher one if it had one as high. Raises as create; StartError also
        if a live process holds the file.
        """
        check_segment(plan.size_bytes, plan.slab_bytes)
        why = ""
        fd = segment_files.take(plan.path)
        if fd is not None:
            try:
                return cls._adopt(fd, plan, incarnation)
            except ProtocolError as error:
                why = str(error)
                os.unlink(plan.path)  # those who have it mapped keep it
                os.close(fd)
            except BaseException:
                os.close(fd)
                raise
        segment = cls.create(plan, incarnation=incarnation, prefault_threads=prefault_threads, progress=progress)
        segment.adoption = Adoption(why=why)
        return segment

    @classmethod
    def create(
        cls, plan: SegmentPlan, *, incarnation: int, prefault_threads: int, progress: Callable[[int], None]
    ) -> OwnedSegment:
        """Make the file, lock it, allocate and touch every page, write its superblock.

        progress(bytes) is called from several threads as bytes are there; what it raises ends the creation and is
        raised. Nothing is left behind on an error. Raises BadSegment, StartError, OSError.
        """
        check_segment(plan.size_bytes, plan.slab_bytes)
        length = file_bytes(plan.size_bytes, plan.slab_bytes)
        pages.check_huge_pages(plan.directory, plan.huge_pages, length)
        fd = segment_files.make(plan.path)
        try:
            os.ftruncate(fd, length)
            segment = cls(fd, plan)
            pages.place(segment.memory, plan.huge_pages, plan.numa_node)
            pages.populate(fd, segment.memory, prefault_threads, progress)
            segment.identify(incarnation, epoch=0)
        except BaseException:
            os.unlink(plan.path)
            os.close(fd)
            raise
        return segment

    @property
    def slabs_bound(self) -> int:
        """How many slabs are bound to a slot size."""
        return sum(record.slot_bytes > 0 for record in self._bound)

    @property
    def holds(self) -> bool:
        """True when a slab is bound: there may be blocks in it."""
        return any(record.slot_bytes for record in self._bound)

    @property
    def contents(self) -> int:
        """The number of what the slabs hold, never 0: kept from life to life, new when something was lost."""
        return self._contents

    def bound_to(self, slab: int) -> SlabRecord:
        """How the slab is bound, by the owner's own account. Raises ProtocolError out of range."""
        if not 0 <= slab < self.slabs:
            raise ProtocolError(f"slab {slab}: the segment has {self.slabs}")
        return self._bound[slab]

    def own_table(self, slab: int) -> Array:
        """The slot table of a slab, by the owner's own account: SLOT_HEADER (slots,), a live view.

        Raises ProtocolError out of range, SlabChanged if the segment is closed.
        """
        slots = self.bound_to(slab).slots
        return self._view(self._slab_start(slab), slots * SLOT_HEADER_BYTES).view(SLOT_HEADER)

    # -- changes ---------------------------------------------------------------------------------------

    def identify(self, incarnation: int, epoch: int) -> None:
        """Write the superblock: whose life this is, and the highest epoch obeyed. Workers see it at once."""
        self._incarnation, self._epoch = incarnation, epoch
        self._write_superblock()

    def set_bypass(self, bits: int) -> None:
        """Write what workers skip (bits of bypass.py). They see it at once."""
        self._bypass = bits
        self._write_superblock()

    def bind_slab(self, slab: int, slot_bytes: int) -> int:
        """Clear the slab's slot table for slots of slot_bytes and raise its generation, which is returned.

        What the slab held is gone. Raises ProtocolError if there is no such slab or slot size.
        """
        generation = self.bound_to(slab).generation + 1
        slots = self._slots(slot_bytes)
        self._bind(slab, SlabRecord(generation, slot_bytes, slots), cleared_slots=slots)
        return generation

    def clear_slots(self, slot_bytes: int, runs: Iterable[tuple[int, int, int]]) -> int:
        """Clear the headers in runs of (first slot, slots, stamp) that show just that stamp and that no worker writes.

        What peers were writing is cleared too: see to it first that they do not any more. Slots of slabs that are not
        bound to this size hold nothing of it. Answers how many. Raises ProtocolError for a size or a run that cannot
        be: nothing was done then.
        """
        per_slab = self._slots(slot_bytes)
        wanted = list(runs)
        if any(first < 0 or slots < 1 or first + slots > per_slab * self.slabs for first, slots, _ in wanted):
            raise ProtocolError(f"a run outside the {per_slab * self.slabs} slots of {slot_bytes} bytes")
        cleared = 0
        for first, slots, stamp in wanted:
            for slab in range(first // per_slab, (first + slots - 1) // per_slab + 1):
                if self._bound[slab].slot_bytes == slot_bytes:
                    base = slab * per_slab
                    headers = self.own_table(slab)[max(0, first - base) : first + slots - base]
                    ours = (headers["state"] != WRITING) | (headers["worker_id"] == PEER_WRITER)
                    cleared += _clear(headers, (headers["stamp"] == stamp) & ours)
        self._barrier()
        return cleared

    def bury(self, namespace: bytes, stamp: int) -> int:
        """Clear the COMMITTED headers of a namespace with a stamp up to this one, everywhere. Answers how many."""
        cleared = 0
        for slab, record in enumerate(self._bound):
            if record.slot_bytes:
                headers = self.own_table(slab)
                dead = (headers["stamp"] <= stamp) & (headers["state"] == COMMITTED)
                cleared += _clear(headers, dead & (headers["namespace"] == np.void(namespace)))
        self._barrier()
        return cleared

    # -- workers and the file --------------------------------------------------------------------------

    def open_for_worker(self, worker_id: int) -> int:
        """A descriptor for one worker, under its lock (locks.py); the caller closes it.

        Raises OSError; SlabChanged, as the next two, if the segment is closed.
        """
        return locks.open_for_worker(self._open_fd(), worker_id)

    def held_by(self, worker_id: int) -> bool:
        """True while that worker has the segment open or mapped."""
        return locks.worker_holds(self._open_fd(), worker_id)

    def mapped_workers(self) -> set[int]:
        """The workers that have the segment open or mapped, let in by this life of the node client or a former one."""
        return locks.worker_ids(self._open_fd())

    def unlink(self) -> None:
        """Remove the file's name if it still means this file. Workers keep their mappings."""
        if segment_files.is_at(self._fd, self.plan.path):
            os.unlink(self.plan.path)

    def close(self) -> None:
        """Unmap and give up the owner's lock. Once only. Never raises."""
        super().close()
        fd, self._fd = self._fd, -1
        locks.disown(fd)  # views may keep the mapping, and with it a duplicate of the descriptor
        os.close(fd)

    @classmethod
    def _adopt(cls, fd: int, plan: SegmentPlan, incarnation: int) -> OwnedSegment:
        """The segment in a file that we hold the lock of. Raises ProtocolError if it is not the plan's."""
        length = file_bytes(plan.size_bytes, plan.slab_bytes)
        if os.fstat(fd).st_size != length:
            raise ProtocolError(f"it has {os.fstat(fd).st_size} bytes, not {length}")
        segment = cls(fd, plan)
        try:
            pages.allocate(fd, 0, SUPERBLOCK_BYTES)
            found = segment.superblock
            check_identity(found, plan.node_id, plan.index, plan.size_bytes, plan.slab_bytes)
            pages.check_huge_pages(plan.directory, plan.huge_pages, length)
            pages.place(segment.memory, plan.huge_pages, plan.numa_node)
            pages.allocate(fd, 0, length)
            segment.former_incarnation, segment.epoch_seen = found.incarnation, found.epoch
            segment._contents, segment._bypass = found.contents, found.bypass
            segment._incarnation, segment._epoch = max(incarnation, found.incarnation + 1), found.epoch
            segment._take_stock()
        except BaseException:
            SegmentMap.close(segment)
            raise
        return segment

    def _open_fd(self) -> int:
        if self._fd < 0:
            raise SlabChanged("the segment is closed here")
        return self._fd

    def _take_stock(self) -> None:
        """Check records and headers; drop what is unsound, under a new number of the contents."""
        self._bound, lost = read_records(self)
        torn, written = unfinished(self)
        if torn and self.mapped_workers():
            torn = []
        if lost or torn:
            self._contents = new_contents()
        self._write_superblock()
        for slab in lost:
            self._bind(slab, self._bound[slab], cleared_slots=0)
        dropped, writes = (sum(_clear(self.own_table(slab), slots) for slab, slots in some) for some in (torn, written))
        self._barrier()
        self.adoption = Adoption(kept=True, slots_dropped=dropped, slabs_dropped=len(lost), writes_dropped=writes)

    def _write_superblock(self) -> None:
        block = np.zeros(1, dtype=SUPERBLOCK)
        plan = self.plan
        block[0] = (
            MAGIC,
            VERSION,
            np.void(plan.node_id.encode().ljust(256, b"\0")),
            self._incarnation,
            self._epoch,
            plan.size_bytes,
            plan.slab_bytes,
            plan.index,
            self._contents,
            self._bypass,
            0,
        )
        block["check"] = record_check(block)
        for start in SUPERBLOCK_COPIES:
            if start == 0:  # the one that workers read live, a word in one store
                self._epoch_word()[0], self._bypass_word()[0] = self._epoch, self._bypass
                self._barrier()
            self._view(start, SUPERBLOCK.itemsize)[:] = block.view(np.uint8)
            self._barrier()

    def _bind(self, slab: int, record: SlabRecord, cleared_slots: int) -> None:
        start = self._slab_start(slab)
        self.memory[start : start + slot_table_bytes(cleared_slots)] = 0
        self._barrier()
        fields = np.zeros(1, dtype=SLAB_RECORD)
        fields["generation"], fields["slot_bytes"], fields["slots"] = record
        fields["check"] = record_check(fields)
        at = SUPERBLOCK_BYTES + slab * SLAB_RECORD_BYTES
        self.memory[at : at + SLAB_RECORD_BYTES] = fields.view(np.uint8)
        self._barrier()
        self._bound[slab] = record


def remove_leftovers(plans: Sequence[SegmentPlan]) -> list[tuple[Path, int]]:
    """Remove the files of this node id that none of `plans` wants; answers their paths and lengths.

    All plans are of one node and one directory. Raises StartError when a live process holds such a file.
    """
    wanted = {plan.path for plan in plans}
    removed: list[tuple[Path, int]] = []
    for path, node_id, _ in list(segment_files.named_like_segments(plans[0].directory)):
        if node_id != plans[0].node_id or path in wanted:
            continue
        fd = segment_files.take(path)
        if fd is not None:
            os.unlink(path)
            removed.append((path, os.fstat(fd).st_size))
            os.close(fd)
    return removed


def _clear(headers: Array, rows: Array) -> int:
    """Zero headers of a live table, given by a mask or by indexes. Answers how many."""
    which = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
    headers.view(np.uint8).reshape(-1, SLOT_HEADER_BYTES)[which] = 0
    return len(which)
