"""A node that offers a segment to mooncake: `python mooncake_node.py DIRECTORY`; prints its server and base.

The segment holds BLOCKS patterned blocks. Then, a line each on stdin: `spoil N` flips a byte of block N; `end` ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from kvpool_client.clock import SYSTEM
from kvpool_client.devices.base import Bytes, Contiguous
from kvpool_client.devices.cpu import CpuDevice
from kvpool_client.engines.mooncake_export import MooncakeExport
from kvpool_client.owned_segment import OwnedSegment, SegmentPlan
from kvpool_client.runs import Row, mapped
from kvpool_client.segment import AttachedSegment
from kvpool_client.transfer import LocalEngine, PartCopy
from kvpool_client.transfer_engine import Term
from kvpool_proto.keys import chain_of
from kvpool_proto.namespace import NamespaceSpec

HOST = "127.0.0.1"
SPEC = NamespaceSpec(model="mooncake-test", block_tokens=16, part_bytes=1_000_000, dtype="uint8")
BLOCKS = 20
HANDLE = 7
CHAIN = chain_of(range(BLOCKS * SPEC.block_tokens), SPEC.block_tokens)
SLAB_BYTES = 8 << 20
ROWS = [Row(0, 3, HANDLE, 1, 1, 71, 0), Row(3, 7, HANDLE, 7, 1, 72, 1), Row(10, 10, HANDLE, 14, 1, 73, 2)]
"""Where the blocks lie, over the borders of slabs of seven slots."""


def pattern() -> Bytes:
    """What the blocks hold."""
    return np.random.default_rng(4).integers(0, 256, (BLOCKS, SPEC.part_bytes), dtype=np.uint8)


def main() -> None:
    """See the module's docstring."""
    plan = SegmentPlan(
        directory=Path(sys.argv[1]), node_id="n", index=0, size_bytes=5 * SLAB_BYTES, slab_bytes=SLAB_BYTES
    )
    owner = OwnedSegment.create(plan, incarnation=1, prefault_threads=1, progress=lambda _: None)
    try:
        owner.identify(incarnation=1, epoch=1)
        for slab in range(owner.slabs):
            owner.bind_slab(slab, SPEC.slot_bytes)
        worker = AttachedSegment(owner.open_for_worker(1), HANDLE, plan.size_bytes, plan.slab_bytes)
        runs = mapped(ROWS, {HANDLE: worker}, SPEC.slot_bytes)
        device = CpuDevice()
        buffer = device.bind(Contiguous(pattern()), SPEC.part_bytes, writable=False)
        term = Term(SYSTEM, SYSTEM.now_ms() + 60_000, "time_over")
        assert LocalEngine(device).write([PartCopy(SPEC, 0, CHAIN, runs, buffer)], term, lambda _: "").blocks == [
            BLOCKS
        ]
        export = MooncakeExport(HOST)
        print(export.server, export.offer(owner), flush=True)
        for line in sys.stdin:
            verb, *words = line.split()
            if verb == "end":
                break
            row = next(row for row in ROWS if row.first <= int(words[0]) < row.first + row.blocks)
            worker.slots(row.slot + int(words[0]) - row.first, 1, SPEC.slot_bytes)[0, 0] ^= 1
            print("spoiled", flush=True)
        export.close()
    finally:
        owner.unlink()


if __name__ == "__main__":
    main()
