"""Segment files by name: opened, locked, made, removed.

Rules
  - Only regular files of this user are touched, never what a link points to.
  - A file whose lock can be had (locks.py) is a dead owner's; one whose lock is held is left alone.
  - A name is removed only under the lock of the file that it means at that moment.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvpool_client import locks
from kvpool_client.start_error import StartError

NODE_ID_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Node ids are parts of file names."""
_NAME: Final = re.compile(rf"kvpool-({NODE_ID_PATTERN.pattern})-(\d+)\.seg")


def name_of(node_id: str, index: int) -> str:
    """The file's name, unique on this machine as long as node ids are."""
    return f"kvpool-{node_id}-{index}.seg"


def named_like_segments(directory: Path) -> Iterator[tuple[Path, str, int]]:
    """(path, node id, index) of everything in `directory` that is named like a segment file, in order of the names.

    Raises OSError.
    """
    for path in sorted(directory.iterdir()):
        if found := _NAME.fullmatch(path.name):
            yield path, found[1], int(found[2])


def make(path: Path) -> int:
    """Create the file, empty and locked; the descriptor is the caller's. Raises StartError."""
    fd = _own(path, os.O_RDWR | os.O_CREAT)
    if os.fstat(fd).st_size:
        os.close(fd)
        raise _appeared(path)
    return fd


def take(path: Path) -> int | None:
    """Lock the file that is there; the descriptor is the caller's. None: there is none.

    Raises StartError if a live process holds it, or it is none of ours.
    """
    try:
        path.lstat()
    except FileNotFoundError:
        return None
    return _own(path, os.O_RDWR)


def open_ours(path: Path, flags: int) -> int:
    """Open a file of this user; the descriptor is the caller's. Raises StartError for anything else."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise StartError(f"cannot open {path}: {error.strerror}; see segment_dir") from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(fd)
        raise StartError(f"{path} is not a file of this user; remove it or change node_id")
    return fd


def is_at(fd: int, path: Path) -> bool:
    """Whether the name still means the open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _own(path: Path, flags: int) -> int:
    fd = open_ours(path, flags)
    try:
        if not locks.try_own(fd):
            raise StartError(f"{path} belongs to a running node client: stop it, or give this one another node_id")
        if not is_at(fd, path):
            raise _appeared(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _appeared(path: Path) -> StartError:
    return StartError(f"{path} appeared meanwhile: is another node client of this id starting?")
