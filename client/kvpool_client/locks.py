"""Kernel locks on segment files: who owns a file, and which workers still map it.

Rules
  - The owner holds flock(LOCK_EX) on the file: a file whose lock can be had is a dead owner's.
  - A worker gets an open file description of its own, with a write lock (OFD) on the one byte at
    WORKER_LOCK_BASE + worker_id. The lock lives as long as that description: until the worker has closed the
    descriptor and unmapped the file, or is dead. SIGSTOP and a restart of the node client do not end it.
  - The byte is the id, so that whoever opens the file later finds the workers that are still there.
"""

from __future__ import annotations

import fcntl
import os
import struct
from typing import Final

WORKER_ID_MAX: Final = (1 << 62) - 1
WORKER_LOCK_BASE: Final = 1 << 62
"""Far beyond the data of any segment."""

_FLOCK: Final = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, len, pid


def try_own(fd: int) -> bool:
    """Take the owner's lock of the file. False: another live process has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def disown(fd: int) -> None:
    """Give up the owner's lock, whatever else keeps the open file description alive."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def open_for_worker(fd: int, worker_id: int) -> int:
    """A new descriptor, with an open file description of its own that holds the worker's lock; the caller closes it.

    Works for files that were unlinked. Raises OSError.
    """
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.fcntl(own, fcntl.F_OFD_SETLK, _worker_byte(fcntl.F_WRLCK, worker_id))
    except BaseException:
        os.close(own)
        raise
    return own


def worker_holds(fd: int, worker_id: int) -> bool:
    """True while the worker's lock exists. `fd` must be another open file description of the file."""
    answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _worker_byte(fcntl.F_WRLCK, worker_id))
    return _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK


def worker_ids(fd: int) -> set[int]:
    """The workers whose locks exist. `fd` must be another open file description of the file.

    The kernel answers with one lock of a range that is asked for; the ranges on both sides of it are asked for next.
    """
    found: set[int] = set()
    ranges = [(1, WORKER_ID_MAX)]
    while ranges:
        first, last = ranges.pop()
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, WORKER_LOCK_BASE + first, last - first + 1, 0)
        kind, _, start, length, _ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
        if kind == fcntl.F_UNLCK:
            continue
        worker_id = start - WORKER_LOCK_BASE
        end = worker_id + length - 1 if length else WORKER_ID_MAX  # 0: to the last byte that there can be
        if worker_id == end:
            found.add(worker_id)  # a wider one is no worker's, but hides what it covers
        ranges.extend(rest for rest in ((first, worker_id - 1), (end + 1, last)) if rest[0] <= rest[1])
    return found


def _worker_byte(kind: int, worker_id: int) -> bytes:
    assert 0 < worker_id <= WORKER_ID_MAX
    return _FLOCK.pack(kind, os.SEEK_SET, WORKER_LOCK_BASE + worker_id, 1, 0)
