"""devices/cpu.py: buffers as pieces of memory for system calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpool_client.devices.base import Buffer, Contiguous, Layout, Rows
from kvpool_client.devices.cpu import PIECE_BYTES_MIN, CpuDevice

ROW = PIECE_BYTES_MIN
BLOCKS = 6


def bound(layout: Layout, part_bytes: int, writable: bool = True) -> Buffer:
    return CpuDevice().bind(layout, part_bytes, writable=writable)


def tensors(row_bytes: int, gap: int = 0) -> list[npt.NDArray[np.uint8]]:
    rng = np.random.default_rng(row_bytes + gap)
    return [rng.integers(0, 256, (9, row_bytes + gap), dtype=np.uint8)[:, :row_bytes] for _ in range(3)]


@pytest.mark.parametrize(("row_bytes", "gap"), [(ROW, 0), (ROW + 1, 0), (ROW, 64), (ROW, 3)])
def test_rows_block_by_block_and_piece_by_piece(row_bytes: int, gap: int) -> None:
    some = tensors(row_bytes, gap)
    ids = np.array([4, 0, 8, 2, 1, 7])
    buffer = bound(Rows(some, ids), 3 * row_bytes)
    pieces = buffer.pieces(1, 3)
    assert pieces is not None
    wanted = b"".join(tensor[row].tobytes() for row in ids[1:4] for tensor in some)
    assert (len(pieces), b"".join(pieces)) == (9, wanted)
    pieces[3][:] = bytes(row_bytes)
    assert not some[0][8].any(), "they are the engine's memory itself"
    assert some[1][8].any()


def test_contiguous_blocks_are_one_piece() -> None:
    array = np.arange(BLOCKS * 100, dtype=np.uint16).reshape(BLOCKS, 100)
    pieces = bound(Contiguous(array), 200).pieces(2, 3)
    assert pieces is not None
    assert (len(pieces), bytes(pieces[0])) == (1, array[2:5].tobytes())
    with_gaps: Any = np.zeros((BLOCKS, 300), dtype=np.uint8)[:, :200]
    pieces = bound(Contiguous(with_gaps), 200).pieces(2, 3)
    assert pieces is not None
    assert [len(piece) for piece in pieces] == [200] * 3


def test_short_rows_are_no_pieces() -> None:
    for row_bytes in (1, 64, ROW - 1):
        assert bound(Rows(tensors(row_bytes), np.arange(BLOCKS)), 3 * row_bytes).pieces(0, BLOCKS) is None


def test_sources_may_be_read_only() -> None:
    array = np.ones((BLOCKS, 100), dtype=np.uint8)
    array.flags.writeable = False
    pieces = bound(Contiguous(array), 100, writable=False).pieces(0, BLOCKS)
    assert pieces is not None
    assert pieces[0].readonly
