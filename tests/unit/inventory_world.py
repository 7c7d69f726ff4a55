"""What inventories tell, read back slot by slot, and an oracle that reads the headers one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvpool_client.headers import COMMITTED, PARENT_KEY, PARENT_ROOT, PARENT_UNKNOWN, slot_checks
from kvpool_client.inventory import chunks, scan
from kvpool_client.slot_table import Tables
from kvpool_proto import pool_pb2 as pb
from unit.segment_world import MemoryTables

N, M = b"n" * 16, b"m" * 16
KEY_BYTES = {N: 8, M: 12}


class Stored(NamedTuple):
    """One slot: what its header says, what an inventory tells of it."""

    namespace: bytes
    key: bytes
    parent_kind: int
    parent_key: bytes
    slot_bytes: int
    slot: int
    part: int
    stamp: int


def report(
    tables: Tables, dead: dict[bytes, int] | None = None, alive: Callable[[int], bool] = bool
) -> list[pb.InventoryChunk]:
    return list(chunks(scan(tables, dead or {}, alive)))


def strands_in(report: list[pb.InventoryChunk]) -> Iterator[tuple[list[Stored], pb.Strands]]:
    """Each strand slot by slot, as pool.proto defines it."""
    for strands in (each for chunk in report for each in chunk.strands):
        size = strands.key_bytes
        keys = [strands.keys[at : at + size] for at in range(0, len(strands.keys), size)]
        parents = [strands.parent_keys[at : at + size] for at in range(0, len(strands.parent_keys), size)]
        columns = zip(strands.extent_blocks, strands.first_slot, strands.stride, strands.stamp, strict=True)
        extents = list(columns)
        assert sum(strands.blocks) == len(keys) == sum(strands.extent_blocks)
        assert sum(strands.extents) == len(extents)
        for blocks, count, kind, parent in zip(
            strands.blocks, strands.extents, strands.parent_kind, parents, strict=True
        ):
            assert kind == PARENT_KEY or not parent.strip(b"\0")
            slots: list[Stored] = []
            for n, first, stride, stamp in [extents.pop(0) for _ in range(count)]:
                for block in range(n):
                    key = keys.pop(0)
                    for part in range(strands.part_from, strands.part_to):
                        slot = first + block * stride + part - strands.part_from
                        slots.append(
                            Stored(strands.namespace_id, key, kind, parent, strands.slot_bytes, slot, part, stamp)
                        )
                    kind, parent = PARENT_KEY, key
            assert len(slots) == blocks * (strands.part_to - strands.part_from)
            yield slots, strands


def told(report: list[pb.InventoryChunk]) -> list[Stored]:
    return sorted(slot for slots, _ in strands_in(report) for slot in slots)


def expected(tables: MemoryTables) -> list[Stored]:
    """What the headers say, one by one."""
    found: list[Stored] = []
    for slab, (record, table) in enumerate(zip(tables.records, tables.tables, strict=True)):
        for index, header in enumerate(table):
            size = int(header["key_bytes"])
            slot = slab * record.slots + index
            check = slot_checks(table[index : index + 1].copy(), slot, record.generation, record.slot_bytes)[0]
            if header["state"] != COMMITTED or header["check"] != check:
                continue
            kind = int(header["parent_kind"])
            parent = header["parent_key"].tobytes()[:size] if kind == PARENT_KEY else bytes(size)
            key, namespace = header["key"].tobytes()[:size], header["namespace"].tobytes()
            part, stamp = int(header["part"]), int(header["stamp"])
            found.append(Stored(namespace, key, kind, parent, record.slot_bytes, slot, part, stamp))
    return sorted(found)


def check_order(report: list[pb.InventoryChunk]) -> None:
    """A strand that follows a block of another strand stands after one that has it."""
    strands = [slots for slots, _ in strands_in(report)]
    first_with: dict[tuple[bytes, bytes], int] = {}
    for at, slots in enumerate(strands):
        for slot in slots:
            first_with.setdefault((slot.namespace, slot.key), at)
    for at, slots in enumerate(strands):
        if slots[0].parent_kind == PARENT_KEY:
            assert first_with.get((slots[0].namespace, slots[0].parent_key), -1) < at


class Writer:
    """Fills tables with chains as reservations place them: extents anywhere, parts side by side or not."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        shapes = [(4096, 40), (8192, 24)]
        self.tables = MemoryTables([self.choose.choice(shapes) for _ in range(self.choose.randint(1, 6))])
        self.chains: dict[bytes, list[bytes]] = {N: [], M: []}
        self.stamp = 0

    def write(self) -> MemoryTables:
        for _ in range(self.choose.randint(1, 12)):
            namespace = self.choose.choice((N, M))
            self.put(namespace, {N: 4096, M: 8192}[namespace])
        self.tables.seal()
        return self.tables

    def put(self, namespace: bytes, slot_bytes: int) -> None:
        choose, known = self.choose, self.chains[namespace]
        kind = choose.choice((PARENT_ROOT, PARENT_KEY, PARENT_KEY, PARENT_UNKNOWN))
        parent = choose.choice(known) if known and choose.random() < 0.9 else choose.randbytes(KEY_BYTES[namespace])
        keys = [choose.randbytes(KEY_BYTES[namespace]) for _ in range(choose.randint(1, 20))]
        side_by_side = choose.choice((1, 1, 2, 4))
        given_up = {part for part in range(side_by_side) if choose.random() < 0.2}
        self.stamp += 1
        at = 0
        while at < len(keys):
            self.stamp += choose.random() < 0.2
            blocks = min(choose.randint(1, 8), len(keys) - at)
            if not self.extent(namespace, slot_bytes, keys, at, blocks, side_by_side, given_up, (kind, parent)):
                break
            at += blocks
        known.extend(keys[:at])

    def extent(
        self, namespace: bytes, slot_bytes: int, keys: list[bytes], at: int, blocks: int, side_by_side: int,
        given_up: set[int], follows: tuple[int, bytes],
    ) -> bool:  # fmt: skip
        """Write blocks at .. at + blocks - 1 of keys where there is room."""
        room = [slab for slab in range(self.tables.slabs) if self.tables.records[slab].slot_bytes == slot_bytes]
        for slab in self.choose.sample(room, len(room)):
            used = self.tables.tables[slab]["state"] != 0
            length = blocks * side_by_side
            free = [first for first in range(len(used) - length + 1) if not used[first : first + length].any()]
            if not free:
                continue
            first = self.choose.choice((free[0], self.choose.choice(free)))
            for block in range(blocks):
                kind, parent = (PARENT_KEY, keys[at + block - 1]) if at + block else follows
                for part in set(range(side_by_side)) - given_up:
                    self.tables.put(
                        slab, first + block * side_by_side + part, namespace=namespace, key=keys[at + block],
                        key_bytes=KEY_BYTES[namespace], parent_kind=kind, parent_key=parent, part=part,
                        stamp=self.stamp
                    )  # fmt: skip
            return True
        return False
