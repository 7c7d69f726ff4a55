"""Which slots of a segment an inventory has accounted for. Until it is complete, the others are neither free nor held.

Rules
  - Slabs are told first; their slots count as used until the end. Each slot is claimed once.
  - What the end finds unclaimed is free.
  - Arrays with a byte per slot: an inventory claims millions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvpool_master.core.allocator import Allocator
from kvpool_proto.errors import BadRequest
from kvpool_proto.geometry import PAGE_BYTES

_UNCLAIMED, _CLAIMED, _NOT_BOUND = 0, 1, 2
Run = tuple[int, int, int]
"""First slot, blocks, stride."""


class Claims:
    """The claims of one segment. Raises BadRequest for what cannot be."""

    __slots__ = ("_allocator", "_tables", "told")

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._tables: dict[int, npt.NDArray[np.uint8]] = {}
        """By slot size: the state of every slot of the segment, _NOT_BOUND in slabs of other sizes."""
        self.told = False
        """Whether the slabs were told."""

    def bind(self, slabs: Iterable[tuple[int, int]]) -> None:
        """The slabs are bound so: (slab, slot bytes), all slots used; the others are unbound."""
        if self.told:
            raise BadRequest("the slabs of the segment were told before")
        bound = dict(slabs)
        allocator = self._allocator
        if not all(0 <= slab < allocator.slabs for slab in bound):
            raise BadRequest(f"slabs of the inventory are outside [0, {allocator.slabs})")
        for slot_bytes in set(bound.values()):
            if slot_bytes <= 0 or slot_bytes % PAGE_BYTES:
                raise BadRequest(f"slot_bytes = {slot_bytes}: a multiple of {PAGE_BYTES}")
            allocator.runs_of(slot_bytes)
        self.told = True
        allocator.adopt(bound)
        for slot_bytes in set(bound.values()):
            per_slab = allocator.runs_of(slot_bytes).per_slab
            table = np.full((allocator.slabs, per_slab), _NOT_BOUND, dtype=np.uint8)
            table[[slab for slab, size in bound.items() if size == slot_bytes]] = _UNCLAIMED
            self._tables[slot_bytes] = table.reshape(-1)

    def claim(self, slot_bytes: int, runs: Sequence[Run], width: int = 1) -> None:
        """Of each run, `width` slots at first, first + stride, ..., `blocks` times, are accounted for: all or none."""
        if not runs:
            return
        table = self._tables.get(slot_bytes)
        first, blocks, stride = np.array(runs, dtype=np.int64).T
        if table is None or width < 1 or (blocks < 1).any() or (stride < width).any() or (first < 0).any():
            raise BadRequest(f"slots of {slot_bytes} bytes: no slab is bound so, or a run is none")
        per_slab = len(table) // self._allocator.slabs
        last = first + (blocks - 1) * stride + width - 1
        if (last >= len(table)).any() or (first // per_slab != last // per_slab).any():
            raise BadRequest(f"a run of slots of {slot_bytes} bytes does not lie in one slab")
        starts = np.repeat(first - stride * (np.cumsum(blocks) - blocks), blocks)
        slots = starts + np.repeat(stride, blocks) * np.arange(len(starts))
        if width > 1:
            slots = (slots[:, np.newaxis] + np.arange(width)).reshape(-1)
        ordered = np.sort(slots)
        if table[slots].any() or (ordered[1:] == ordered[:-1]).any():
            raise BadRequest(f"a slot of {slot_bytes} bytes comes twice, or its slab is bound otherwise")
        table[slots] = _CLAIMED

    def unclaimed(self) -> Iterator[tuple[int, int, int]]:
        """(slot bytes, first slot, slots) of every run that was not claimed; none crosses a slab's border."""
        for slot_bytes, table in self._tables.items():
            free = (table == _UNCLAIMED).reshape(self._allocator.slabs, -1)
            edges = np.zeros((len(free), free.shape[1] + 2), dtype=np.int8)
            edges[:, 1:-1] = free
            slab, start = np.nonzero(np.diff(edges, axis=1) == 1)
            _, end = np.nonzero(np.diff(edges, axis=1) == -1)
            first = slab * free.shape[1] + start
            for at, slots in zip(first.tolist(), (end - start).tolist(), strict=True):
                yield slot_bytes, at, slots

    def free_unclaimed(self) -> None:
        """No more is told: what was not claimed is free."""
        for slot_bytes, first, slots in self.unclaimed():
            self._allocator.runs_of(slot_bytes).give(first, slots)
