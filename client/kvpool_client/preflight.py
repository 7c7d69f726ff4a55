"""Is there room for the segments? Asked before anything is allocated.

Rules
  - Measuring (I/O) is apart from judging (pure).
  - A refusal says what is needed, what is there, and which setting to change.
  - Memory counts only where the file lives in memory (tmpfs); hugetlbfs has set its memory apart already.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvpool_client.pages import file_system_of
from kvpool_client.start_error import StartError


@dataclass(frozen=True, slots=True)
class Room:
    """What is there, in bytes; None: not limited, or not to be known."""

    directory: str
    file_system_size_bytes: int | None
    file_system_free_bytes: int | None
    memory_available_bytes: int | None = None
    cgroup_free_bytes: int | None = None


def measure_room(directory: Path, root: Path = Path("/")) -> Room:
    """Measure. `root` holds proc/ and sys/. Raises StartError if the directory is not there."""
    try:
        found = os.statvfs(directory)
        kind = file_system_of(directory)
    except OSError as error:
        raise StartError(f"segment_dir = {directory}: {error.strerror}") from error
    if kind == "hugetlbfs":
        return Room(str(directory), *huge_page_bytes(root, found.f_bsize))
    # A tmpfs without a limit says that it has no blocks.
    size, free = (found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize) if found.f_blocks else (None, None)
    if kind != "tmpfs":
        return Room(str(directory), size, free)
    return Room(str(directory), size, free, memory_available_bytes(root), cgroup_free_bytes(root))


def check_room(needed_bytes: int, room: Room) -> None:
    """Raise StartError unless `needed_bytes` of segment files fit."""
    needs = f"the segments need {_mib(needed_bytes)}"
    if room.file_system_size_bytes is not None and needed_bytes > room.file_system_size_bytes:
        raise StartError(
            f"{needs}, but {room.directory} has only {_mib(room.file_system_size_bytes)} in all: lower segment_bytes, "
            "make it larger (docker: --shm-size; Kubernetes: emptyDir medium Memory; hugetlbfs: vm.nr_hugepages) or "
            "set segment_dir"
        )
    if room.file_system_free_bytes is not None and needed_bytes > room.file_system_free_bytes:
        raise StartError(
            f"{needs}, but {room.directory} has only {_mib(room.file_system_free_bytes)} free: lower segment_bytes, "
            "remove what else is there, or set segment_dir"
        )
    if room.memory_available_bytes is not None and needed_bytes > room.memory_available_bytes:
        raise StartError(
            f"{needs} of memory, but this machine has only {_mib(room.memory_available_bytes)} available "
            "(MemAvailable): lower segment_bytes"
        )
    if room.cgroup_free_bytes is not None and needed_bytes > room.cgroup_free_bytes:
        raise StartError(
            f"{needs} of memory, but the cgroup's limit leaves only {_mib(room.cgroup_free_bytes)}: lower "
            "segment_bytes, or raise the memory limit of the container or unit (MemoryMax=)"
        )


def huge_page_bytes(root: Path, page_bytes: int) -> tuple[int | None, int | None]:
    """Bytes in huge pages of that size: in all, and free. A hugetlbfs itself says nothing unless it has a limit."""
    folder = root / f"sys/kernel/mm/hugepages/hugepages-{page_bytes >> 10}kB"
    pages = (_number(folder / "nr_hugepages"), _number(folder / "free_hugepages"))
    total, free = (None if number is None else number * page_bytes for number in pages)
    return total, free


def memory_available_bytes(root: Path) -> int | None:
    """MemAvailable of /proc/meminfo."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def cgroup_free_bytes(root: Path) -> int | None:
    """What the memory limits of our cgroup and of those above it leave, the tightest; v2 and v1."""
    left = [
        limit - used + _stat(folder / "memory.stat", names[2])
        for folder, names in _memory_cgroups(root)
        if (limit := _number(folder / names[0])) is not None and (used := _number(folder / names[1])) is not None
    ]
    return max(0, min(left)) if left else None


def _memory_cgroups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Folders with a memory controller, from our own upwards, and the names of limit, usage and page cache there."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, where = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be that of the host, of which only the top is to be seen.
        parts = Path(where.lstrip("/")).parts
        for depth in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:depth]), names


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def _stat(path: Path, name: str) -> int:
    """One number of memory.stat; 0 when it is not told."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), 0)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):,.0f} MiB"
