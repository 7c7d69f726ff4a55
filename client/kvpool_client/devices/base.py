"""What a device does: move runs of blocks between an engine's buffers and slots of a segment.

Rules
  - A layout says how the blocks of one part lie in the engine's memory; its rows are the blocks of a call, in order.
  - The bytes of a slot are the pieces of the layout side by side; what lies behind them in the slot means nothing.
  - gather and scatter move a whole run at once, never block by block in Python, with the GIL released.
  - Both return when the bytes have been read from, or are in, the slots: only then can they be hashed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Rows:
    """Paged KV: block b's piece l is row row_ids[b] of tensors[l].

    tensors: arrays whose first dimension counts rows, each row contiguous; one per piece, in slot order.
    row_ids: integers (blocks,). For a load the rows must differ from each other.
    """

    tensors: Sequence[Any]
    row_ids: Any


@dataclass(frozen=True, slots=True)
class Contiguous:
    """Block b is row b of `array`: shape (blocks, ...), each row contiguous and part_bytes long."""

    array: Any


Layout = Rows | Contiguous


class Buffer(Protocol):
    """A layout that was checked and prepared for copies. Holds on to the engine's memory."""

    @property
    def blocks(self) -> int:
        """How many blocks the layout has room for."""
        ...

    def gather(self, first: int, slots: Bytes) -> None:
        """Copy blocks first, first + 1, ... into `slots`, uint8 (blocks, slot_bytes)."""
        ...

    def scatter(self, first: int, slots: Bytes) -> None:
        """Copy `slots` into blocks first, first + 1, ..."""
        ...

    def rows(self, first: int, blocks: int) -> Bytes | None:
        """These blocks themselves, uint8 (blocks, part_bytes), where they lie so in host memory; else None."""
        ...

    def pieces(self, first: int, blocks: int) -> list[memoryview] | None:
        """The bytes of these blocks where they lie, in the order of their slots, for system calls to move.

        A piece holds whole blocks, or whole pieces make up a block. None: they are not in host memory, or in pieces so
        short that gather and scatter are faster.
        """
        ...


class Device(Protocol):
    """One kind of memory, and the order of its copies against the engine's work."""

    def bind(self, layout: Layout, part_bytes: int, *, writable: bool) -> Buffer:
        """Prepare a layout. Raises ValueError, in words, for one that does not fit part_bytes or this device."""
        ...

    def wait_sources(self) -> None:
        """Return when what the engine computes into the sources of a store is done."""
        ...

    def publish(self) -> None:
        """Return when what was scattered is visible to whatever the engine starts next."""
        ...
