"""Slot tables, many headers at a time: what is committed, being written, or torn.

Rules
  - How slabs are bound is what their owner says, not the slab table, which workers can write.
  - Tables are copied, then judged. A header counts if its check agrees and its fields can be; zeros are free; all
    else is torn. Workers write all the while: what looks torn is looked at once more.
  - Tables of one slot size go together, up to ROWS: the cost of small slabs grows with their slots, and what numpy
    works on stays in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvpool_client.headers import (
    COMMITTED,
    FREE,
    PARENT_ROOT,
    PARENT_UNKNOWN,
    PEER_WRITER,
    SLOT_HEADER,
    U64,
    WRITING,
    Array,
    checks_at,
    life,
    places,
)
from kvpool_client.segment import SlabRecord
from kvpool_proto.geometry import SLOT_HEADER_BYTES
from kvpool_proto.keys import KEY_BYTES_MAX, KEY_BYTES_MIN
from kvpool_proto.namespace import PARTS_MAX

I64 = npt.NDArray[np.int64]

ROWS: Final = 16 << 10
"""Headers copied and judged together; more only where a single slab has more."""


class Tables(Protocol):
    """Slot tables as their owner knows them; OwnedSegment is one."""

    slabs: int

    def bound_to(self, slab: int) -> SlabRecord:
        """How the slab is bound."""
        ...

    def own_table(self, slab: int) -> Array:
        """Its slot table, SLOT_HEADER (slots,), a live view."""
        ...

    def mapped_workers(self) -> set[int]:
        """The workers that may write the tables."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """What the tables of some slabs of one slot size say.

    slab, slot: of each header; slots count through the segment. headers: SLOT_HEADER, a copy that lives until the
    next Found. committed, writing, torn: indexes of headers, rising; the others are free.
    """

    slot_bytes: int
    slab: I64
    slot: I64
    headers: Array
    committed: I64
    writing: I64
    torn: I64


def look(tables: Tables) -> Iterator[Found]:
    """All headers of all bound slabs. Raises SlabChanged if the segment is closed meanwhile."""
    scratch = np.empty(0, dtype=SLOT_HEADER)
    for group in _groups(tables):
        slots = group[0][1].slots
        rows = len(group) * slots
        if rows > len(scratch):
            scratch = np.empty(max(rows, ROWS), dtype=SLOT_HEADER)
        slab = np.repeat(np.array([slab for slab, _ in group]), slots)
        slot = slab * slots + np.tile(np.arange(slots), len(group))
        lives = np.array([life(record.generation, record.slot_bytes) for _, record in group], dtype=np.uint64)
        where = places(slot.view(np.uint64), np.repeat(lives, slots))
        found = _judge(tables, group, scratch[:rows], where, slab, slot)
        yield _judge(tables, group, scratch[:rows], where, slab, slot) if len(found.torn) else found


def words_of(headers: Array) -> U64:
    """The 64-bit words of headers, (n, 16), a view."""
    return headers.view(np.uint64).reshape(len(headers), SLOT_HEADER_BYTES // 8)


def _groups(tables: Tables) -> Iterator[list[tuple[int, SlabRecord]]]:
    """Bound slabs of one slot size whose tables have ROWS headers together, or one that has more."""
    by_size: dict[int, list[tuple[int, SlabRecord]]] = {}
    for slab in range(tables.slabs):
        record = tables.bound_to(slab)
        if record.slot_bytes:
            by_size.setdefault(record.slot_bytes, []).append((slab, record))
    for bound in by_size.values():
        at_once = max(1, ROWS // bound[0][1].slots)
        for start in range(0, len(bound), at_once):
            yield bound[start : start + at_once]


def _judge(
    tables: Tables, group: list[tuple[int, SlabRecord]], headers: Array, where: U64, slab: I64, slot: I64
) -> Found:
    raw = headers.view(np.uint8).reshape(len(group), -1)
    for row, (each, record) in enumerate(group):
        table = tables.own_table(each)
        raw[row] = table.view(np.uint8) if len(table) == record.slots else 0  # else it was bound anew meanwhile
    slot_bytes = group[0][1].slot_bytes
    state = headers["state"]
    agree = headers["check"] == checks_at(headers, where)
    used = agree & can_be(headers, slot_bytes)
    odd = np.flatnonzero(~used & ~(agree & (state == FREE)))
    return Found(
        slot_bytes=slot_bytes,
        slab=slab,
        slot=slot,
        headers=headers,
        committed=np.flatnonzero(used & (state == COMMITTED)),
        writing=np.flatnonzero(used & (state == WRITING)),
        torn=odd[words_of(headers[odd]).any(axis=1)],
    )


def can_be(headers: Array, slot_bytes: int) -> npt.NDArray[np.bool_]:
    """Which headers say something that a writer could mean."""
    kind, key_bytes = headers["parent_kind"], headers["key_bytes"]
    return (
        ((headers["state"] == COMMITTED) | (headers["state"] == WRITING))
        & (kind >= PARENT_ROOT)
        & (kind <= PARENT_UNKNOWN)
        & (key_bytes >= KEY_BYTES_MIN)
        & (key_bytes <= KEY_BYTES_MAX)
        & (headers["part"] < PARTS_MAX)
        & (headers["stamp"] > 0)
        & (headers["length_bytes"] <= slot_bytes)
        & (headers["worker_id"] <= PEER_WRITER)
    )
