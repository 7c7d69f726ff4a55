"""What the kernel does for processes that are not processes here: locks that end with their owner.

Rules
  - The owner's lock on a segment file (flock) ends when the simulated process ends.
  - A worker's lock (OFD) ends when its last mapping of the file goes, or with its process. The mapping itself stays in
    this process until its views are gone; nobody of the dead writes through it any more.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Callable
from typing import Any

from kvpool_client import local_socket, locks
from kvpool_client.segment import AttachedSegment
from simulation.hub import Hub


class Kernel:
    """Watches the locks of one world. inode_of: of a mapping's file, by the object's id."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._try_own: Callable[[int], bool] = locks.try_own
        self._attach: type[AttachedSegment] = local_socket.AttachedSegment
        self.inodes: weakref.WeakKeyDictionary[AttachedSegment, int] = weakref.WeakKeyDictionary()

    def inode_of(self, segment: Any) -> int:
        """Of the file that a process maps, or owns."""
        known = self.inodes.get(segment)
        return os.fstat(segment._fd).st_ino if known is None else known

    def try_own(self, fd: int) -> bool:
        """locks.try_own, whose lock ends with the process that took it."""
        got = self._try_own(fd)
        if got and self._hub.thread is not None:
            kept = os.dup(fd)

            def let_go() -> None:
                """The process is no more."""
                fcntl.flock(kept, fcntl.LOCK_UN)
                os.close(kept)

            self._hub.thread.process.on_end.append(let_go)
        return got

    def attach(self, fd: int, *given: Any) -> AttachedSegment:
        """AttachedSegment, whose worker's lock ends with the mapping or with the process."""
        assert self._hub.thread is not None
        kept = os.dup(fd)
        try:
            segment = self._attach(fd, *given)
        except BaseException:
            os.close(kept)
            raise
        self.inodes[segment] = os.fstat(kept).st_ino
        mapped = segment.memory.base
        close = weakref.finalize(getattr(mapped, "obj", mapped), os.close, kept)

        def let_go() -> None:
            """The process is no more; its descriptors may live on here."""
            if close.alive:
                _unlock_all(kept)

        self._hub.thread.process.on_end.append(let_go)
        return segment


def _unlock_all(fd: int) -> None:
    whole = locks._FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, whole)
