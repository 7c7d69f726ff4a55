"""Host memory: numpy arrays and torch CPU tensors of any dtype. Also the fake of other devices.

How rows are copied was measured (AMD EPYC, glibc 2.36, one thread, rows of 16 to 128 KiB in 8 layers, GB/s; one
np.take of the same rows: 9 to 10):

  chosen: one take, or one indexed assignment, of equal elements for the whole run     9 to 10     9 to 10
  refused:                                                                           gather     scatter
    layer by layer, rows[ids] into or from the strided slots                          6          9, or 2.5 (*)
    the same through a staging buffer in the second-level cache                       6 to 7     -
    torch.index_select(out=strided) and index_copy_: needs torch and its threads      9 to 10    5
    ctypes.memmove in map(), a call per row                                           6.5 to 9   6.5 to 9, or 2.5 (*)
    preadv, process_vm_readv: the kernel copies page by page                          -          6 to 7
  (*) where a destination lies a few bytes behind its source modulo 4 KiB, as numpy's own arrays do to slots,
  processors take the loads of a longer copy for readers of the stores just made. Copies of up to 256 bytes load
  before they store, so scatter takes elements of that size. Gather takes long ones, 7 % faster, where rows allow it
  (not between 1 and 2 KiB, which take 1.5 times as long).

So all tensors of a layout are seen as one array of elements that spans them; the rows of a slot are indices into it.
Only elements that belong to the tensors are ever touched. Tensors that do not lie on a common grid of at least
ELEMENT_BYTES_MIN go layer by layer, which is slower and as right.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from kvpool_client.devices.base import Buffer, Bytes, Contiguous, Layout
from kvpool_proto.geometry import slot_bytes_for

ELEMENT_BYTES_MIN: Final = 64
ELEMENT_BYTES_SHORT: Final = 256
ELEMENT_BYTES_LONG: Final = (4096, 16384)
"""Least and most of a long element."""
PIECE_BYTES_MIN: Final = 8 << 10
"""Rows that are shorter are gathered and scattered around a system call, not listed for it."""

I64 = npt.NDArray[np.int64]


class CpuDevice:
    """Copies in the calling thread. There is nothing to wait for: host memory has no streams."""

    def bind(self, layout: Layout, part_bytes: int, *, writable: bool) -> Buffer:
        """See base.Device. Raises ValueError."""
        if isinstance(layout, Contiguous):
            view = byte_rows(layout.array, writable)
            if view.shape[1] != part_bytes:
                raise ValueError(f"a block of the array has {view.shape[1]} bytes, a part has {part_bytes}")
            return _Whole(view)
        views = [byte_rows(tensor, writable) for tensor in layout.tensors]
        if sum(view.shape[1] for view in views) != part_bytes:
            raise ValueError(f"a row of each tensor makes {sum(v.shape[1] for v in views)} bytes, a part {part_bytes}")
        ids = _row_ids(layout.row_ids, min(len(view) for view in views))
        slot_bytes = slot_bytes_for(part_bytes)
        grid = _element_bytes(views, slot_bytes, short=writable)
        return _Grid(views, ids, grid, slot_bytes) if grid >= ELEMENT_BYTES_MIN else _Layers(views, ids)

    def wait_sources(self) -> None:
        """See base.Device."""

    def publish(self) -> None:
        """See base.Device."""


def byte_rows(array: Any, writable: bool) -> Bytes:
    """The array's memory as uint8 (rows, bytes a row), without a copy. array: numpy, or a torch CPU tensor.

    Raises ValueError if it is neither, has no rows, rows that are not contiguous, or is read-only and must not be.
    """
    rows = cast(npt.NDArray[Any], array) if isinstance(array, np.ndarray) else _torch_rows(array)
    if rows.ndim == 0 or rows.size == 0 or rows.dtype.hasobject:
        raise ValueError(f"an array of shape {rows.shape} and dtype {rows.dtype} has no rows of bytes")
    flat = rows.reshape(len(rows), -1)
    if not np.may_share_memory(flat, rows) or not flat[0].flags.c_contiguous:
        raise ValueError(f"rows of an array of shape {rows.shape}, strides {rows.strides} are not contiguous")
    if writable and not flat.flags.writeable:
        raise ValueError("the destination is read-only")
    return flat.view(np.uint8)


def _torch_rows(tensor: Any) -> npt.NDArray[Any]:
    torch: Any = sys.modules.get("torch")  # whoever has a tensor has imported it
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{type(tensor).__name__} is neither a numpy array nor a torch tensor")
    if tensor.device.type != "cpu":
        raise ValueError(f"the tensor is on {tensor.device}, this device copies host memory")
    if tensor.dim() == 0 or tensor.numel() == 0:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has no rows")
    try:
        flat = tensor.detach().view(tensor.shape[0], -1)
        return flat.view(torch.uint8).numpy()
    except RuntimeError as error:
        raise ValueError(f"rows of a tensor of shape {tuple(tensor.shape)} are not contiguous") from error


def _row_ids(row_ids: Any, rows: int) -> I64:
    """The ids as int64 (blocks,), within the tensors: they become addresses. Raises ValueError."""
    ids = np.asarray(row_ids)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"row_ids of shape {ids.shape} and dtype {ids.dtype}: integers (blocks,)")
    if ids.size and not (ids.min() >= 0 and ids.max() < rows):
        raise ValueError(f"row_ids from {ids.min()} to {ids.max()}: the tensors have {rows} rows")
    return ids.astype(np.int64)  # a copy: the caller may go on with its own


def _address(view: Bytes) -> int:
    return int(view.__array_interface__["data"][0])


def _element_bytes(views: Sequence[Bytes], slot_bytes: int, *, short: bool) -> int:
    """The size of element in which all rows and slots begin and end, as measured to be best; 0: there is none."""
    first = _address(views[0])
    grid = math.gcd(ELEMENT_BYTES_LONG[1], slot_bytes)
    for view in views:
        step = view.strides[0] if len(view) > 1 else 0
        if step < 0:
            return 0
        grid = math.gcd(grid, _address(view) - first, view.shape[1], step)
    return math.gcd(grid, ELEMENT_BYTES_SHORT) if short or grid < ELEMENT_BYTES_LONG[0] else grid


class _Memory:
    """A range of this process's memory, for numpy to see as an array."""

    def __init__(self, address: int, elements: int, grid: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (elements,),
            "typestr": f"|V{grid}",
        }


class _Whole:
    """Contiguous: numpy's own copy, a single memcpy where slots have no padding."""

    def __init__(self, view: Bytes) -> None:
        self._view = view
        self.blocks = len(view)

    def gather(self, first: int, slots: Bytes) -> None:
        """See base.Buffer."""
        np.copyto(slots[:, : self._view.shape[1]], self._view[first : first + len(slots)])

    def scatter(self, first: int, slots: Bytes) -> None:
        """See base.Buffer."""
        np.copyto(self._view[first : first + len(slots)], slots[:, : self._view.shape[1]])

    def rows(self, first: int, blocks: int) -> Bytes | None:
        """See base.Buffer."""
        return self._view[first : first + blocks]

    def pieces(self, first: int, blocks: int) -> list[memoryview] | None:
        """See base.Buffer."""
        rows = self._view[first : first + blocks]
        return [rows.reshape(-1).data] if rows.flags.c_contiguous else [row.data for row in rows]


class _Listed:
    """The rows of several tensors, one by one."""

    def __init__(self, views: Sequence[Bytes], ids: I64) -> None:
        self._views = views
        self._ids = ids
        self._short = min(view.shape[1] for view in views) < PIECE_BYTES_MIN

    def pieces(self, first: int, blocks: int) -> list[memoryview] | None:
        """See base.Buffer."""
        if self._short:
            return None
        return [view[row].data for row in self._ids[first : first + blocks].tolist() for view in self._views]


class _Layers:
    """Rows of any alignment, a step per layer."""

    def __init__(self, views: Sequence[Bytes], ids: I64) -> None:
        self._views = views
        self._ids = ids
        self._ends = np.cumsum([view.shape[1] for view in views]).tolist()
        self.blocks = len(ids)
        self.pieces = _Listed(views, ids).pieces

    def gather(self, first: int, slots: Bytes) -> None:
        """See base.Buffer."""
        ids = self._ids[first : first + len(slots)]
        for view, end in zip(self._views, self._ends, strict=True):
            slots[:, end - view.shape[1] : end] = view[ids]

    def scatter(self, first: int, slots: Bytes) -> None:
        """See base.Buffer."""
        ids = self._ids[first : first + len(slots)]
        for view, end in zip(self._views, self._ends, strict=True):
            view[ids] = slots[:, end - view.shape[1] : end]

    def rows(self, first: int, blocks: int) -> Bytes | None:
        """See base.Buffer."""
        return None


class _Grid:
    """Rows on a common grid: one step for a whole run, whatever the number of layers.

    Element c of block b's slot is element starts[c] + ids[b] * steps[c] of the span. Elements behind the part are
    padding, gathered from its first element so that the destination of take is contiguous.
    """

    def __init__(self, views: Sequence[Bytes], ids: I64, grid: int, slot_bytes: int) -> None:
        low = min(_address(view) for view in views)
        high = max(_address(view) + (len(view) - 1) * view.strides[0] + view.shape[1] for view in views)
        self._keep = views
        self._span = np.asarray(_Memory(low, (high - low) // grid, grid))
        lengths = [view.shape[1] // grid for view in views]
        self._elements = sum(lengths)
        starts = np.zeros(slot_bytes // grid, dtype=np.int64)
        steps = np.zeros_like(starts)
        end = 0
        for view, length in zip(views, lengths, strict=True):
            start, end = end, end + length
            starts[start:end] = np.arange(length) + (_address(view) - low) // grid
            steps[start:end] = view.strides[0] // grid
        starts[end:], steps[end:] = starts[0], steps[0]
        self._starts = starts
        self._steps: I64 = steps[:1] if (steps == steps[0]).all() else steps
        self._ids = ids[:, None]
        self.blocks = len(ids)
        self.pieces = _Listed(views, ids).pieces

    def _elements_of(self, first: int, blocks: int) -> I64:
        index = self._ids[first : first + blocks] * self._steps
        return index + self._starts

    def gather(self, first: int, slots: Bytes) -> None:
        """See base.Buffer."""
        index, elements = self._elements_of(first, len(slots)), slots.view(self._span.dtype)
        if slots.flags.c_contiguous:
            np.take(self._span, index, out=elements, mode="clip")  # "raise" would buffer the output
        else:  # several parts side by side
            elements[...] = self._span[index]

    def scatter(self, first: int, slots: Bytes) -> None:
        """See base.Buffer."""
        index, elements = self._elements_of(first, len(slots)), slots.view(self._span.dtype)
        self._span[index[:, : self._elements]] = elements[:, : self._elements]

    def rows(self, first: int, blocks: int) -> Bytes | None:
        """See base.Buffer."""
        return None
