"""A node's segments, offered to the mooncake engines of other nodes' workers. Whoever reaches its ports reads them all.

Rules
  - See mooncake_package.py: there are no capabilities, tenants or quotas here.
  - Over TCP a mapping of its own, read-only, is offered: a stranger's write fails, ours go on through other mappings.
  - What is offered stays mapped until close(); reads under way then fail.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

from kvpool_client.engines.mooncake_package import TCP, Transfers, start
from kvpool_client.owned_segment import OwnedSegment
from kvpool_client.start_error import StartError


class MooncakeExport:
    """host: as other nodes reach this one. Raises StartError."""

    def __init__(self, host: str, protocol: str = TCP, package: Transfers | None = None) -> None:
        self._transfers = package or start(host, protocol)
        self._writable = protocol != TCP
        self._mappings: dict[int, npt.NDArray[np.uint8]] = {}
        self.server = f"{host}:{self._transfers.get_rpc_port()}"
        """What readers call it."""

    def offer(self, segment: OwnedSegment) -> int:
        """Let peers read the segment; the address of its file's first byte, by which they name it.

        Raises StartError, OSError.
        """
        fd = os.open(segment.plan.path, os.O_RDWR if self._writable else os.O_RDONLY)
        try:
            access = mmap.PROT_READ | mmap.PROT_WRITE if self._writable else mmap.PROT_READ
            mapping = np.frombuffer(mmap.mmap(fd, 0, prot=access), dtype=np.uint8)
        finally:
            os.close(fd)
        base = mapping.ctypes.data
        if self._transfers.register_memory(base, len(mapping)):
            raise StartError(f"mooncake: {segment.plan.path} cannot be registered; its log says why")
        self._mappings[base] = mapping
        return base

    def close(self) -> None:
        """Offer nothing any more."""
        for base in list(self._mappings):
            self._transfers.unregister_memory(base)
            del self._mappings[base]
