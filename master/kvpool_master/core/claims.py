"""Which slots of a segment an inventory has accounted for. Until it is complete, the others are neither free nor held.

Rules
  - Slabs are told first; their slots count as used until the end. Each slot is claimed once.
  - What the end finds unclaimed is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvpool_master.core.allocator import Allocator
from kvpool_proto.errors import BadRequest

Run = tuple[int, int, int]
"""First slot, blocks, stride."""


class Claims:
    """The claims of one segment. Raises BadRequest for what cannot be."""

    __slots__ = ("_allocator", "_tables", "told")

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._tables: dict[tuple[int, int], bytearray] = {}
        """By slot size and slab: a byte per slot, 1 when claimed."""
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
            if slot_bytes <= 0 or slot_bytes % 4096:
                raise BadRequest(f"slot_bytes = {slot_bytes}: a multiple of 4096")
            allocator.runs_of(slot_bytes)
        self.told = True
        allocator.adopt(bound)
        for slab, slot_bytes in bound.items():
            self._tables[slot_bytes, slab] = bytearray(allocator.runs_of(slot_bytes).per_slab)

    def claim(self, slot_bytes: int, runs: Sequence[Run], width: int = 1) -> None:
        """Of each run, `width` slots at first, first + stride, ..., `blocks` times, are accounted for: all or none."""
        known = self._allocator.per_size.get(slot_bytes)
        per_slab = known.per_slab if known is not None else 1
        claimed = 0
        try:
            for first, blocks, stride in runs:
                slab, start = divmod(first, per_slab)
                table = self._tables.get((slot_bytes, slab))
                end = start + (blocks - 1) * stride + width
                if table is None or not 0 < width <= stride or blocks < 1 or end > per_slab:
                    raise BadRequest(
                        f"{blocks} x {width} slots of {slot_bytes} bytes from {first}: not in a bound slab"
                    )
                if 1 in (table[start:end] if width == stride else _of(table, start, end, stride, width)):
                    raise BadRequest(f"a slot of {blocks} x {width} of {slot_bytes} bytes from {first} comes twice")
                _mark(table, start, end, stride, width, 1)
                claimed += 1
        except BadRequest:
            for first, blocks, stride in runs[:claimed]:
                slab, start = divmod(first, per_slab)
                table = self._tables[slot_bytes, slab]
                _mark(table, start, start + (blocks - 1) * stride + width, stride, width, 0)
            raise

    def unclaimed(self) -> Iterator[tuple[int, int, int]]:
        """(slot bytes, first slot, slots) of every run that was not claimed."""
        for (slot_bytes, slab), table in self._tables.items():
            base = slab * len(table)
            start = table.find(0)
            while start >= 0:
                end = table.find(1, start)
                end = len(table) if end < 0 else end
                yield slot_bytes, base + start, end - start
                start = table.find(0, end)

    def free_unclaimed(self) -> None:
        """No more is told: what was not claimed is free."""
        for slot_bytes, first, slots in self.unclaimed():
            self._allocator.runs_of(slot_bytes).give(first, slots)


def _of(table: bytearray, start: int, end: int, stride: int, width: int) -> bytes:
    return b"".join([table[at : at + width] for at in range(start, end, stride)])


def _mark(table: bytearray, start: int, end: int, stride: int, width: int, value: int) -> None:
    if width == stride:
        table[start:end] = bytes((value,)) * (end - start)
        return
    for at in range(start, end, stride):
        table[at : at + width] = bytes((value,)) * width
