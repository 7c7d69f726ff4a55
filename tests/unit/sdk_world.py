"""What SDK tests store: a namespace, chains, bytes; and a device that does something between pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool_client.devices.base import Bytes
from kvpool_client.devices.cpu import CpuDevice
from kvpool_proto.namespace import NamespaceSpec

PART_BYTES = 5000


def spec_of(**changes: Any) -> NamespaceSpec:
    given = {"model": "m", "dtype": "uint8", "block_tokens": 16, "part_bytes": PART_BYTES, "key_bytes": 12}
    return NamespaceSpec(**{**given, **changes})


def chain_of(blocks: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(blocks * 12)


def data_of(blocks: int, seed: int = 1) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (blocks, PART_BYTES), dtype=np.uint8)


def empty(blocks: int) -> npt.NDArray[np.uint8]:
    return np.zeros((blocks, PART_BYTES), dtype=np.uint8)


class Hooked(CpuDevice):
    """Does something after every run that it moved."""

    def __init__(self, then: Any) -> None:
        self.then = then

    def bind(self, layout: Any, part_bytes: int, *, writable: bool) -> Any:
        buffer, then = super().bind(layout, part_bytes, writable=writable), self.then

        class Buffer:
            blocks = buffer.blocks

            def gather(self, first: int, slots: Bytes) -> None:
                buffer.gather(first, slots)
                then()

            def scatter(self, first: int, slots: Bytes) -> None:
                buffer.scatter(first, slots)
                then()

            def rows(self, first: int, blocks: int) -> Bytes | None:
                return buffer.rows(first, blocks)

        return Buffer()
