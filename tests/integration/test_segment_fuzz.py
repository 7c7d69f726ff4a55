"""A stopped node's file with random bytes spoiled: the next life serves and reports what is intact, and only that.

KVPOOL_FUZZ_SEGMENTS: how many files, seeds 0, 1, ...; a failure names its seed.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvpool_client.devices.base import Contiguous
from kvpool_client.headers import COMMITTED, SUPERBLOCK, SUPERBLOCK_COPIES
from kvpool_client.inventory import chunks, scan
from kvpool_client.owned_segment import OwnedSegment, SegmentPlan
from kvpool_client.runs import Run
from kvpool_client.segment import AttachedSegment
from kvpool_client.transfer import LocalEngine
from kvpool_proto.errors import KVPoolError
from kvpool_proto.geometry import (
    SLAB_RECORD_BYTES,
    SLOT_HEADER_BYTES,
    SUPERBLOCK_BYTES,
    slabs_offset,
    slot_table_bytes,
    slots_per_slab,
)
from unit.inventory_world import strands_in
from unit.transfer_world import DEVICE, EPOCH, SLAB_BYTES, SLABS, World, chain_of, part_copy, spec_of, written

FILES = int(os.environ.get("KVPOOL_FUZZ_SEGMENTS", "40"))
SPECS = [spec_of(5000), spec_of(20_000)]
Bytes = npt.NDArray[np.uint8]


@dataclass
class Chain:
    """What was stored: block i of a spec in slot + i of one slab."""

    spec_at: int
    keys: bytes
    slot: int
    stamp: int
    data: Bytes

    @property
    def slot_bytes(self) -> int:
        return SPECS[self.spec_at].slot_bytes


class File:
    """A segment file of one seed: half of its slabs bound, chains in some of them."""

    def __init__(self, directory: Path, choose: random.Random) -> None:
        self.plan = SegmentPlan(
            directory=directory, node_id="n", index=0, size_bytes=SLABS * SLAB_BYTES, slab_bytes=SLAB_BYTES
        )
        self.choose = choose
        self.engine = LocalEngine(DEVICE)
        self.owner = OwnedSegment.create(self.plan, incarnation=1, prefault_threads=1, progress=lambda _: None)
        self.owner.identify(1, EPOCH)
        self.worker = self.attach(1)
        self.chains = [self.store(slab) for slab in range(0, SLABS, 2)]
        self.contents = self.owner.contents
        self.before = self.owner.memory.copy()
        self.records = [self.owner.bound_to(slab) for slab in range(SLABS)]

    def attach(self, worker_id: int) -> AttachedSegment:
        return AttachedSegment(self.owner.open_for_worker(worker_id), 7, self.plan.size_bytes, SLAB_BYTES)

    def store(self, slab: int) -> Chain:
        at = self.choose.randrange(len(SPECS))
        spec = SPECS[at]
        self.owner.bind_slab(slab, spec.slot_bytes)
        slots = self.owner.bound_to(slab).slots
        blocks = self.choose.randint(1, slots)
        slot = slab * slots + self.choose.randint(0, slots - blocks)
        data = np.frombuffer(self.choose.randbytes(blocks * spec.part_bytes), np.uint8).reshape(blocks, -1)
        keys = chain_of(spec, blocks, seed=self.choose.randrange(1 << 32))
        stamp = (EPOCH << 32) + 1 + slab
        run = Run(0, blocks, self.worker, slot, 1, stamp)
        copy = part_copy(spec, keys, [run], DEVICE.bind(Contiguous(data.copy()), spec.part_bytes, writable=False))
        assert written(self.engine, World(self.owner, self.worker), [copy]) == [blocks]
        return Chain(at, keys, slot, stamp, data)

    def spoil(self) -> Bytes:
        """Stop the node, change bytes of its file; answers the file as it is then."""
        self.owner.close()
        places = [
            *((start, start + SUPERBLOCK.itemsize) for start in SUPERBLOCK_COPIES),
            (SUPERBLOCK_BYTES, SUPERBLOCK_BYTES + SLABS * SLAB_RECORD_BYTES),
            *(self.table_range(slab) for slab in range(SLABS)),
            (slabs_offset(SLABS), len(self.before)),
        ]
        odds = [0.3, 0.3, 3, *[1.0] * SLABS, 20]
        after = self.before.copy()
        for start, end in self.choose.choices(places, odds, k=self.choose.choice((1, 5, 30, 200))):
            if start < end:
                length = min(end - start, self.choose.choice((1, 1, 4, 128, 5000)))
                at = self.choose.randint(start, end - length)
                after[at : at + length] = np.frombuffer(self.choose.randbytes(length), np.uint8)
        with self.plan.path.open("r+b") as file:
            file.write(after.tobytes())
        return after

    def table_range(self, slab: int) -> tuple[int, int]:
        start = slabs_offset(SLABS) + slab * SLAB_BYTES
        return start, start + self.records[slab].slots * SLOT_HEADER_BYTES

    def reopen(self) -> None:
        self.owner = OwnedSegment.open(self.plan, incarnation=2, prefault_threads=1, progress=lambda _: None)

    def read(self, chain: Chain, block: int) -> Bytes | None:
        """What a worker gets for a block; None: a miss."""
        spec = SPECS[chain.spec_at]
        target = np.zeros((1, spec.part_bytes), np.uint8)
        key = chain.keys[block * spec.key_bytes : (block + 1) * spec.key_bytes]
        try:
            run = Run(0, 1, self.worker, chain.slot + block, 1, chain.stamp)
            copy = part_copy(spec, key, [run], DEVICE.bind(Contiguous(target), spec.part_bytes, writable=True))
            return target[0] if self.engine.read([copy], World(self.owner, self.worker).term())[0].blocks else None
        except KVPoolError:
            return None


class Intact:
    """What of a file was not touched."""

    def __init__(self, file: File, after: Bytes) -> None:
        same = file.before == after
        copies = [same[start : start + SUPERBLOCK.itemsize].all() for start in SUPERBLOCK_COPIES]
        self.file = any(copies)
        records = same[SUPERBLOCK_BYTES : SUPERBLOCK_BYTES + SLABS * SLAB_RECORD_BYTES]
        self.records = records.reshape(SLABS, SLAB_RECORD_BYTES).all(axis=1)
        self.committed: set[tuple[int, int]] = set()
        """(slot size, slot) of committed slots with an intact header and record."""
        self.torn: set[tuple[int, int]] = set()
        """Of slots whose headers say something else than before, under an intact record."""
        for slab in np.flatnonzero(self.records).tolist():
            start, end = file.table_range(slab)
            headers = same[start:end].reshape(-1, SLOT_HEADER_BYTES).all(axis=1)
            zeros = ~after[start:end].reshape(-1, SLOT_HEADER_BYTES).any(axis=1)
            states = file.before[start:end].reshape(-1, SLOT_HEADER_BYTES)[:, 0]
            record = file.records[slab]
            for index in range(record.slots):
                slot = (record.slot_bytes, slab * record.slots + index)
                if headers[index] and states[index] == COMMITTED:
                    self.committed.add(slot)
                elif not headers[index] and not zeros[index]:
                    self.torn.add(slot)


def check_file(directory: Path, seed: int) -> None:
    file = File(directory, random.Random(seed))
    mapped = file.choose.random() < 0.5
    if not mapped:
        file.worker.close()
    after = file.spoil()
    intact = Intact(file, after)
    file.reopen()
    adoption = file.owner.adoption
    assert adoption.kept == intact.file, adoption
    wanted = intact.committed if intact.file else set()
    torn = intact.torn if intact.file else set()
    if intact.file:
        assert adoption.slabs_dropped == np.count_nonzero(~intact.records)
        assert adoption.slots_dropped == (0 if mapped else len(torn))
        assert (file.owner.contents == file.contents) == (adoption.slabs_dropped + adoption.slots_dropped == 0)
    if not mapped or not intact.file:
        file.worker = file.attach(2)
    found = list(chunks(scan(file.owner, {}, bool)))
    told = [(slot.slot_bytes, slot.slot) for slots, _ in strands_in(found) for slot in slots]
    assert len(told) == len(set(told))
    assert set(told) == wanted
    writing = {
        (each.slot_bytes, first + index)
        for chunk in found
        for each in chunk.writing
        for first, slots in zip(each.first_slot, each.slots, strict=True)
        for index in range(slots)
    }
    assert writing == (torn if mapped else set())
    for chain in file.chains:
        for block, data in enumerate(chain.data):
            got = file.read(chain, block)
            assert got is None or np.array_equal(got, data), "wrong bytes"
            there = (chain.slot_bytes, chain.slot + block) in wanted and payload_is_intact(file, after, chain, block)
            assert (got is not None) == there
    file.worker.close()
    file.owner.unlink()
    file.owner.close()


def payload_is_intact(file: File, after: Bytes, chain: Chain, block: int) -> bool:
    slots = slots_per_slab(SLAB_BYTES, chain.slot_bytes)
    slab, index = divmod(chain.slot + block, slots)
    start = file.table_range(slab)[0] + slot_table_bytes(slots) + index * chain.slot_bytes
    end = start + SPECS[chain.spec_at].part_bytes
    return np.array_equal(file.before[start:end], after[start:end])


@pytest.mark.parametrize("seed", range(FILES))
def test_what_is_intact_is_served_and_nothing_else(tmp_path: Path, seed: int) -> None:
    check_file(tmp_path, seed)
