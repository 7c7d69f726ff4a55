"""The pages of a segment: huge ones, on which NUMA node, all there before the segment is offered.

Rules
  - Policies (NUMA, huge pages) are set before the first page is allocated.
  - Every page is allocated in the file and touched in our mapping. A file system that runs full says so here, as a
    StartError, and not as a SIGBUS later.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from kvpool_client.start_error import StartError
from kvpool_proto.geometry import PAGE_BYTES

HugePages = Literal["off", "try", "on"]
Bytes = npt.NDArray[np.uint8]

PIECE_BYTES: Final = 64 << 20
"""What one thread allocates and touches at a time."""

_SHMEM_SWITCH: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_MBIND: Final = {"x86_64": 237, "aarch64": 235, "riscv64": 235}
_MPOL_BIND: Final = 2


def file_system_of(directory: Path) -> str:
    """The type of the file system that holds `directory` ("tmpfs", "hugetlbfs", "ext4", ...); "" if unknown."""
    where = directory.resolve()
    best, kind = -1, ""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, found, *_ = line.split(" ")
        mounted = Path(point.encode().decode("unicode_escape"))
        if where.is_relative_to(mounted) and len(mounted.parts) >= best:
            best, kind = len(mounted.parts), found
    return kind


def check_huge_pages(directory: Path, huge_pages: HugePages, length_bytes: int) -> None:
    """Raise StartError if huge pages are demanded and cannot be had, or do not fit the file's length."""
    if file_system_of(directory) == "hugetlbfs":
        page_bytes = os.statvfs(directory).f_bsize
        if length_bytes % page_bytes:
            raise StartError(
                f"a segment file of {length_bytes} bytes is no multiple of the huge pages of {page_bytes} bytes in "
                f"{directory}: change segment_bytes or slab_bytes"
            )
    elif huge_pages == "on" and not _shmem_advice_works():
        raise StartError(
            f"huge_pages = on, but {directory} is no hugetlbfs and {_SHMEM_SWITCH} does not say advise: "
            "set segment_dir to a hugetlbfs mount, or huge_pages = try"
        )


def place(memory: Bytes, huge_pages: HugePages, numa_node: int) -> None:
    """Set the policies of a fresh mapping. Raises StartError when the NUMA node cannot be had."""
    if numa_node >= 0:
        _bind_to_node(memory, numa_node)
    if huge_pages != "off":
        # Refused on hugetlbfs, which has huge pages anyway; check_huge_pages has seen to "on".
        _libc().madvise(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(len(memory)), mmap.MADV_HUGEPAGE)


def allocate(fd: int, start: int, length: int) -> None:
    """See that every page of these bytes of the file is there; those that are stay as they are.

    Raises StartError when the file system has no room.
    """
    try:
        os.posix_fallocate(fd, start, length)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise StartError(f"no room for {length} bytes more ({error.strerror}): lower segment_bytes") from error
        raise


def populate(fd: int, memory: Bytes, threads: int, progress: Callable[[int], None]) -> None:
    """Allocate and touch every page. progress(bytes) is called from the threads; what it raises ends the work.

    Raises StartError when the file system has no room.
    """

    def one(start: int) -> None:
        """Populate the piece at byte `start`; raises StartError when there is no room."""
        length = min(PIECE_BYTES, len(memory) - start)
        allocate(fd, start, length)
        memory[start : start + length : PAGE_BYTES] = 0
        progress(length)

    pool = ThreadPoolExecutor(threads, thread_name_prefix="prefault")
    try:
        for _ in pool.map(one, range(0, len(memory), PIECE_BYTES)):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


def _shmem_advice_works() -> bool:
    """Whether shared memory gets huge pages by advice: the word in brackets is the one in force."""
    try:
        words = _SHMEM_SWITCH.read_text()
    except OSError:
        return False
    return any(f"[{word}]" in words for word in ("always", "within_size", "advise", "force"))


def _bind_to_node(memory: Bytes, numa_node: int) -> None:
    number = _MBIND.get(platform.machine())
    if number is None:
        raise StartError(f"numa_node = {numa_node}: not available on {platform.machine()}; set numa_node = -1")
    if not Path(f"/sys/devices/system/node/node{numa_node}").is_dir():
        raise StartError(f"numa_node = {numa_node}: this machine has no such node; set numa_node = -1")
    mask = (ctypes.c_ulong * 16)()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask[numa_node // bits] = 1 << numa_node % bits
    # The kernel takes the number of bits in the mask plus one.
    arguments = (memory.ctypes.data, len(memory), _MPOL_BIND, ctypes.addressof(mask), 16 * bits + 1, 0)
    if _libc().syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments)):
        why = os.strerror(ctypes.get_errno())
        raise StartError(f"numa_node = {numa_node}: mbind says {why}; set numa_node = -1")


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
