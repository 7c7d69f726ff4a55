"""The node client's own segments: make the file, bind slabs, let workers in, remove it.

Rules
  - A file is allocated and touched in full before it is offered, and never truncated: no SIGBUS in a worker.
  - The owner keeps its own copy of generations and slot sizes: a worker that scribbles over the slab table spoils
    reads (misses), not the owner's account.
  - A slab is bound in this order: clear its slot table, barrier, write its record with the next generation.
  - A file whose lock can be had (locks.py) is a dead owner's; one whose lock is held is left alone.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kvpool_client import locks, pages
from kvpool_client.headers import MAGIC, SLAB_RECORD, SUPERBLOCK, VERSION, Barrier, record_check
from kvpool_client.segment import SegmentMap, SlabRecord
from kvpool_client.start_error import StartError
from kvpool_proto.errors import ProtocolError
from kvpool_proto.geometry import SLAB_RECORD_BYTES, SUPERBLOCK_BYTES, check_segment, file_bytes, slot_table_bytes

NODE_ID_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Node ids are parts of file names."""


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
        """The file's name, unique on this machine as long as node ids are."""
        return self.directory / f"kvpool-{self.node_id}-{self.index}.seg"


class OwnedSegment(SegmentMap):
    """The node client's own segment. One thread at a time may change it; use create()."""

    def __init__(self, fd: int, plan: SegmentPlan) -> None:
        super().__init__(fd, plan.size_bytes, plan.slab_bytes)
        self.plan = plan
        self._fd = fd
        self._barrier = Barrier()
        self._bound = [SlabRecord(0, 0, 0)] * self.slabs

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
        fd = _claim(plan)
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

    def bound_to(self, slab: int) -> SlabRecord:
        """How the slab is bound, by the owner's own account. Raises ProtocolError out of range."""
        if not 0 <= slab < self.slabs:
            raise ProtocolError(f"slab {slab}: the segment has {self.slabs}")
        return self._bound[slab]

    def identify(self, incarnation: int, epoch: int) -> None:
        """Write the superblock: whose life this is, and the highest epoch obeyed. Workers see it at once."""
        block = np.zeros(1, dtype=SUPERBLOCK)
        plan = self.plan
        identity = np.void(plan.node_id.encode().ljust(256, b"\0"))
        block[0] = (MAGIC, VERSION, identity, incarnation, epoch, plan.size_bytes, plan.slab_bytes, plan.index, 0, 0)
        block["check"] = record_check(block)
        self._epoch_word()[0] = epoch  # in one store: it is read without the check
        self._barrier()
        self.memory[: SUPERBLOCK.itemsize] = block.view(np.uint8)
        self._barrier()

    def bind_slab(self, slab: int, slot_bytes: int) -> int:
        """Clear the slab's slot table for slots of slot_bytes and raise its generation, which is returned.

        What the slab held is gone. Raises ProtocolError if there is no such slab or slot size.
        """
        generation = self.bound_to(slab).generation + 1
        slots = self._slots(slot_bytes)
        self._bind(slab, SlabRecord(generation, slot_bytes, slots), cleared_slots=slots)
        return generation

    def unbind_all(self) -> None:
        """Forget all contents: clear the tables of all bound slabs and raise their generations."""
        for slab, record in enumerate(self._bound):
            if record.slot_bytes:
                self._bind(slab, SlabRecord(record.generation + 1, 0, 0), cleared_slots=record.slots)

    def open_for_worker(self, worker_id: int) -> int:
        """A descriptor for one worker, under its lock (locks.py); the caller closes it. Raises OSError."""
        return locks.open_for_worker(self._fd, worker_id)

    def held_by(self, worker_id: int) -> bool:
        """True while that worker has the segment open or mapped."""
        return locks.worker_holds(self._fd, worker_id)

    def unlink(self) -> None:
        """Remove the file's name if it still means this file. Workers keep their mappings."""
        if _is_at(self._fd, self.plan.path):
            os.unlink(self.plan.path)

    def close(self) -> None:
        """Unmap and give up the owner's lock. Once only. Never raises."""
        super().close()
        os.close(self._fd)

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


def remove_stale(directory: Path, node_id: str) -> list[tuple[Path, int]]:
    """Remove the files that a former, dead node client of this id left; answers their paths and lengths.

    Raises StartError when a live process holds one. Adopting their contents will begin here.
    """
    ours = re.compile(rf"kvpool-{re.escape(node_id)}-\d+\.seg")
    removed: list[tuple[Path, int]] = []
    for path in sorted(directory.iterdir()):
        if not ours.fullmatch(path.name):
            continue
        fd = _open_ours(path, os.O_RDWR)
        try:
            _own(fd, path)
            if _is_at(fd, path):
                os.unlink(path)
                removed.append((path, os.fstat(fd).st_size))
        finally:
            os.close(fd)
    return removed


def _claim(plan: SegmentPlan) -> int:
    """Create the file, empty and locked; the descriptor is the caller's. Raises StartError."""
    fd = _open_ours(plan.path, os.O_RDWR | os.O_CREAT)
    try:
        _own(fd, plan.path)
        if os.fstat(fd).st_size or not _is_at(fd, plan.path):
            raise StartError(f"{plan.path} appeared meanwhile: is another node client of this id starting?")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_ours(path: Path, flags: int) -> int:
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StartError(f"cannot open {path}: {error.strerror}; see segment_dir") from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(fd)
        raise StartError(f"{path} is not a file of this user; remove it or change node_id")
    return fd


def _own(fd: int, path: Path) -> None:
    if not locks.try_own(fd):
        raise StartError(f"{path} belongs to a running node client: stop it, or give this one another node_id")


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False
