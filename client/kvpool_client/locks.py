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


def _worker_byte(kind: int, worker_id: int) -> bytes:
    assert 0 < worker_id <= WORKER_ID_MAX
    return _FLOCK.pack(kind, os.SEEK_SET, WORKER_LOCK_BASE + worker_id, 1, 0)
