"""Segment files without a living owner: found, and removed if told to.

Rules
  - A clean stop keeps the file, and so does a crash: it is for the next life of the same node client. Only who knows
    that there will be none sweeps.
  - Files of other users, and what is only named like a segment, are not listed.
  - To look whether a file has an owner takes its lock for a moment: do not sweep while a node client starts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvpool_client import locks, segment_files
from kvpool_client.segment import read_superblock
from kvpool_client.start_error import StartError
from kvpool_proto.errors import ProtocolError
from kvpool_proto.geometry import SUPERBLOCK_BYTES


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """owned: a live process holds it. workers: how many have it mapped. sound: its superblock can be read."""

    path: Path
    node_id: str
    index: int
    length_bytes: int
    owned: bool
    workers: int
    sound: bool


def find(directory: Path) -> list[SegmentFile]:
    """The segment files of this user in a folder, in order of their names. Raises OSError for the folder."""
    files: list[SegmentFile] = []
    for path, node_id, index in segment_files.named_like_segments(directory):
        try:
            fd = segment_files.open_ours(path, os.O_RDWR)
        except StartError:
            continue  # gone meanwhile, or not ours
        try:
            files.append(
                SegmentFile(
                    path=path,
                    node_id=node_id,
                    index=index,
                    length_bytes=os.fstat(fd).st_size,
                    owned=not locks.try_own(fd),
                    workers=len(locks.worker_ids(fd)),
                    sound=_is_sound(fd),
                )
            )
        finally:
            os.close(fd)
    return files


def remove(file: SegmentFile) -> bool:
    """Remove the file, unless a live process holds it now or it is gone. True: removed. Raises OSError."""
    try:
        fd = segment_files.take(file.path)
    except StartError:
        return False
    if fd is None:
        return False
    try:
        os.unlink(file.path)
    finally:
        os.close(fd)
    return True


def _is_sound(fd: int) -> bool:
    page = os.pread(fd, SUPERBLOCK_BYTES, 0).ljust(SUPERBLOCK_BYTES, b"\0")
    try:
        read_superblock(np.frombuffer(page, dtype=np.uint8))
    except ProtocolError:
        return False
    return True
