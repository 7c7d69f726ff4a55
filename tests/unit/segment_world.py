"""Small segments for tests: a plan, a file, a worker's mapping, blocks as a writer leaves them; tables in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvpool_client.headers import COMMITTED, PARENT_ROOT, SLOT_HEADER, Array, slot_checks
from kvpool_client.owned_segment import OwnedSegment, SegmentPlan
from kvpool_client.segment import AttachedSegment, SegmentMap, SlabRecord
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.geometry import slots_per_slab

SLAB = 1 << 20
SLOT = 64 << 10
SLABS = 4
PER_SLAB = slots_per_slab(SLAB, SLOT)
NAMESPACE = b"n" * 16


def plan_in(directory: Path, index: int = 0) -> SegmentPlan:
    return SegmentPlan(directory=directory, node_id="n1", index=index, size_bytes=SLABS * SLAB, slab_bytes=SLAB)


def create(plan: SegmentPlan) -> OwnedSegment:
    return OwnedSegment.create(plan, incarnation=7, prefault_threads=2, progress=lambda _: None)


def adopt(plan: SegmentPlan) -> OwnedSegment:
    return OwnedSegment.open(plan, incarnation=8, prefault_threads=1, progress=lambda _: None)


def worker_of(owned: OwnedSegment, worker_id: int = 5) -> AttachedSegment:
    return AttachedSegment(owned.open_for_worker(worker_id), 3, owned.size_bytes, owned.slab_bytes)


@contextmanager
def opened(segment: OwnedSegment) -> Iterator[OwnedSegment]:
    """Unlinks and closes it in the end."""
    try:
        yield segment
    finally:
        segment.unlink()
        segment.close()


def write_block(segment: SegmentMap, slot: int, payload: bytes, **fields: Any) -> pb.BadBlock:
    """Store a one-part block as a writer does, with these fields of its header; answers how a reader names it."""
    segment.slots(slot, 1, SLOT)[0, : len(payload)] = np.frombuffer(payload, dtype=np.uint8)
    header = header_of(**{"length_bytes": len(payload), "checksum": xxhash.xxh3_64_intdigest(payload), **fields})
    header["check"] = slot_checks(header, slot, segment.generation(segment.slab_of(slot, SLOT)), SLOT)
    segment.headers(slot, 1, SLOT)[:] = header
    return pb.BadBlock(namespace_id=NAMESPACE, chain=b"before00keykey00", stamp=77)


def header_of(**fields: Any) -> Array:
    """One header, without its check; keys and namespaces as bytes."""
    header = np.zeros(1, dtype=SLOT_HEADER)
    told = {"state": COMMITTED, "key_bytes": 8, "parent_kind": PARENT_ROOT, "stamp": 77, "namespace": NAMESPACE}
    for name, value in {**told, "key": b"keykey00", **fields}.items():
        size = SLOT_HEADER[name].itemsize
        header[name] = np.void(value.ljust(size, b"\0")) if isinstance(value, bytes) else value
    return header


class MemoryTables:
    """Slot tables without a file: slabs of `slots` slots of slot_bytes each; headers sealed by seal()."""

    GENERATION = 9

    def __init__(self, slabs: Sequence[tuple[int, int]], workers: Sequence[int] = ()) -> None:
        self.records = [SlabRecord(self.GENERATION, size, slots) for size, slots in slabs]
        self.slabs = len(self.records)
        self.tables = [np.zeros(record.slots, dtype=SLOT_HEADER) for record in self.records]
        self.workers = set(workers)

    def bound_to(self, slab: int) -> SlabRecord:
        return self.records[slab]

    def own_table(self, slab: int) -> Array:
        return self.tables[slab]

    def mapped_workers(self) -> set[int]:
        return self.workers

    def put(self, slab: int, index: int, **fields: Any) -> None:
        self.tables[slab][index : index + 1] = header_of(**fields)

    def seal(self) -> None:
        """Make the check of every header right that is not zeros."""
        for slab, (record, table) in enumerate(zip(self.records, self.tables, strict=True)):
            checks = slot_checks(table, slab * record.slots, record.generation, record.slot_bytes)
            table["check"] = np.where(table["state"] == 0, 0, checks)
