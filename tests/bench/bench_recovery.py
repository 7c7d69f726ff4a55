"""Restarts: how fast slot headers are scanned, a directory is rebuilt from them, and a killed Master hits again.

The rebuilt pool looks like one that has been full for long: chains of 64 blocks, stored in runs of 4 at random places
(a replayed trace gives 2 to 7), a third of the chains from the root, the others from somewhere in another chain.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.report import Row, row
from integration.master_client import SPEC, TIMEOUT_S, Client
from integration.processes import MasterProcess, NodeProcess
from kvpool_client import Contiguous, KVPool
from kvpool_client.headers import (
    COMMITTED,
    PARENT_KEY,
    PARENT_ROOT,
    SLOT_HEADER,
    Array,
    checks_at,
    life,
    pack_keys,
    places,
)
from kvpool_client.inventory import chunks, scan
from kvpool_client.segment import SlabRecord
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.geometry import slab_bytes_for, slots_per_slab
from kvpool_proto.security import PLAINTEXT

BLOCKS = 1_000_000
CHAIN_BLOCKS = 64
RUN_BLOCKS = 4
SLAB_SLOTS = 4096
SLOT_BYTES = 4096
RECOVER_BLOCKS = 200_000
RECOVER_CHAIN_BLOCKS = 1_000
SEED = 3
PATIENCE_S = 60.0

ONE_PART = replace(SPEC, parts=1, part_bytes=SLOT_BYTES)
EIGHT_PARTS = replace(SPEC, parts=8, part_bytes=SLOT_BYTES)


class Headers:
    """The slot tables of a segment in memory, without the slots: what inventory.scan() asks of a segment."""

    def __init__(self, headers: Array) -> None:
        self._headers = headers
        self.slabs = len(headers) // SLAB_SLOTS

    def bound_to(self, slab: int) -> SlabRecord:
        return SlabRecord(1, SLOT_BYTES, SLAB_SLOTS)

    def own_table(self, slab: int) -> Array:
        return self._headers[slab * SLAB_SLOTS : (slab + 1) * SLAB_SLOTS]

    def mapped_workers(self) -> set[int]:
        return set()


def full_segment() -> tuple[Headers, bytes]:
    """Headers of BLOCKS blocks as described above, and the keys of one chain from the root."""
    dice = np.random.default_rng(SEED)
    keys = dice.integers(0, 256, (BLOCKS, 16), dtype=np.uint8)
    starts = np.arange(0, BLOCKS, CHAIN_BLOCKS)
    from_root = dice.random(len(starts)) < 1 / 3
    from_root[0] = True
    parents = np.roll(keys, 1, axis=0)
    parents[starts] = keys[(dice.random(len(starts)) * starts).astype(np.int64)]
    headers = np.zeros(-(-BLOCKS // SLAB_SLOTS) * SLAB_SLOTS, dtype=SLOT_HEADER)
    runs = dice.permutation(BLOCKS // RUN_BLOCKS)
    slots = (np.repeat(runs, RUN_BLOCKS) * RUN_BLOCKS + np.arange(BLOCKS) % RUN_BLOCKS).astype(np.int64)
    filled = np.zeros(BLOCKS, dtype=SLOT_HEADER)
    filled["state"], filled["key_bytes"], filled["length_bytes"] = COMMITTED, 16, SLOT_BYTES
    filled["namespace"] = np.void(ONE_PART.id)
    filled["key"] = pack_keys(keys.tobytes(), 16)
    filled["parent_kind"] = PARENT_KEY
    filled["parent_key"] = pack_keys(parents.tobytes(), 16)
    filled["parent_kind"][starts[from_root]] = PARENT_ROOT
    filled["parent_key"][starts[from_root]] = np.void(bytes(32))
    filled["stamp"] = (1 << 32) + 1 + np.arange(BLOCKS) // CHAIN_BLOCKS
    filled["check"] = checks_at(filled, places(slots.view(np.uint64), life(1, SLOT_BYTES)))
    headers[slots] = filled
    return Headers(headers), keys[:CHAIN_BLOCKS].tobytes()


def bench_scan(headers: Headers) -> tuple[list[pb.InventoryChunk], list[Row]]:
    """The scan of all headers, with the linking of runs to strands; best of two, the first one warms up."""
    took_s: list[float] = []
    found = None
    for _ in range(2):
        start = time.perf_counter()
        found = scan(headers, {}, bool)
        took_s.append(time.perf_counter() - start)
    assert found is not None
    start = time.perf_counter()
    messages = list(chunks(found))
    packed_s = time.perf_counter() - start
    assert sum(sum(strands.blocks) for chunk in messages for strands in chunk.strands) == BLOCKS
    return messages, [
        row("scan of 1 million slot headers, runs and strands", min(took_s), "s", at_most=1.0),
        row("the same packed into messages", packed_s, "s"),
    ]


def of_eight_parts(messages: list[pb.InventoryChunk]) -> list[pb.InventoryChunk]:
    """The same blocks with eight parts side by side."""
    changed: list[pb.InventoryChunk] = []
    for message in messages:
        copy = pb.InventoryChunk()
        copy.CopyFrom(message)
        for strands in copy.strands:
            strands.namespace_id, strands.part_to = EIGHT_PARTS.id, 8
            for at, first in enumerate(strands.first_slot):
                strands.first_slot[at], strands.stride[at] = 8 * first, 8
        if copy.slab:
            slabs = 8 * len(copy.slab)
            copy.ClearField("slab")
            copy.ClearField("slot_bytes")
            copy.slab.extend(range(slabs))
            copy.slot_bytes.extend([SLOT_BYTES] * slabs)
        changed.append(copy)
    return changed


def cpu_s(process: MasterProcess) -> float:
    """What a process has used so far, user and system."""
    fields = Path(f"/proc/{process.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class _Asker(threading.Thread):
    """Looks one chain up all the time; `times_s` of the answers."""

    def __init__(self, client: Client, namespace: bytes, keys: bytes) -> None:
        super().__init__(daemon=True)
        self._client, self._namespace, self._keys = client, namespace, keys
        self._over = threading.Event()
        self.times_s: list[float] = []

    def run(self) -> None:
        while not self._over.wait(0.01):
            start = time.perf_counter()
            self._client.lookup(namespace_id=self._namespace, chain=self._keys)
            self.times_s.append(time.perf_counter() - start)

    def end(self) -> float:
        """The 99th percentile, in seconds."""
        self._over.set()
        self.join()
        return float(np.percentile(self.times_s, 99))


def rebuild(messages: list[pb.InventoryChunk], parts: int, keys: bytes, asked: bool) -> tuple[float, float, float]:
    """A Master's CPU and wall seconds for an inventory, and the p99 of lookups meanwhile, if it is asked any."""
    slab_bytes = slab_bytes_for(SLAB_SLOTS, SLOT_BYTES)
    assert slots_per_slab(slab_bytes, SLOT_BYTES) == SLAB_SLOTS
    slabs = parts * -(-BLOCKS // SLAB_SLOTS)
    with MasterProcess("--core-suspect-ms", "600s", "--core-retire-ms", "600s") as process:
        client = Client(process)
        namespace = client.open(ONE_PART if parts == 1 else EIGHT_PARTS)
        offer = pb.SegmentOffer(size_bytes=slabs * slab_bytes, slab_bytes=slab_bytes, contents=1, holds=True)
        request = pb.RegisterRequest(node_id="n", incarnation=1, segments=[offer], epoch_seen=1)
        handle = client.nodes.Register(request, timeout=TIMEOUT_S).segment_handles[0]
        over = threading.Event()
        session = client.nodes.Session(_beats(over))
        number = next(down.report_inventory for down in session if down.report_inventory)
        for message in messages:
            message.node_id, message.incarnation, message.number, message.segment = "n", 1, number, handle
        end = pb.InventoryChunk(node_id="n", incarnation=1, number=number)
        end.end.blocks = BLOCKS
        asker = _Asker(client, namespace, keys)
        if asked:
            asker.start()
        before_s, start = cpu_s(process), time.perf_counter()
        reply = client.nodes.Inventory(iter([*messages, end]), timeout=PATIENCE_S)
        wall_s, used_s = time.perf_counter() - start, cpu_s(process) - before_s
        p99_s = asker.end() if asked else 0.0
        assert reply.blocks_taken == BLOCKS
        assert client.lookup(namespace_id=namespace, chain=keys).hit_blocks == CHAIN_BLOCKS
        over.set()
        session.cancel()
        client.close()
        process.kill()
    return used_s, wall_s, p99_s


def _beats(over: threading.Event) -> Iterator[pb.SessionUp]:
    yield pb.SessionUp(node_id="n", incarnation=1)
    over.wait(PATIENCE_S)


def bench_kill() -> list[Row]:
    """A Master that holds RECOVER_BLOCKS blocks is killed; until a worker's lookup is a full hit, and loads, again."""
    chains = [np.random.default_rng(number).bytes(16 * RECOVER_CHAIN_BLOCKS) for number in range(200)]
    assert len(chains) * RECOVER_CHAIN_BLOCKS == RECOVER_BLOCKS
    data = np.zeros((RECOVER_CHAIN_BLOCKS, SLOT_BYTES), dtype=np.uint8)
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-") as name:
        folder = Path(name)
        state = folder / "state"
        master = MasterProcess("--core-reserve-share-permille", "1000", state_dir=state)
        port = master.grpc_port
        size = ("--segment-bytes", "1GiB", "--slab-bytes", "64MiB", "--node-id", "bench", "--discard")
        with NodeProcess(master.address, folder, *size) as node:
            with KVPool.connect(master.address, node.socket_path, timeout_ms=20_000, security=PLAINTEXT) as pool:
                kv = pool.namespace(ONE_PART)
                for keys in chains:
                    stored = kv.store(keys, Contiguous(data))
                    assert stored.stored_blocks == RECOVER_CHAIN_BLOCKS, stored
            with KVPool.connect(master.address, node.socket_path, security=PLAINTEXT) as pool:
                kv = pool.namespace(ONE_PART)
                killed_s = time.perf_counter()
                master.kill()
                with MasterProcess("--core-reserve-share-permille", "1000", port=port, state_dir=state) as next_life:
                    first_s = _until_full(kv, chains[:1], data) - killed_s
                    last_s = _until_full(kv, chains, data) - killed_s
                    node.stop()
                    next_life.stop()
    return [
        row("SIGKILL of a Master with 200,000 blocks to the first full hit, loaded", first_s, "s", at_most=3.0),
        row("the same, to a full hit of every chain", last_s, "s"),
    ]


def _until_full(kv: Any, chains: list[bytes], data: Any) -> float:
    """When the last of the chains is a full hit and loaded."""
    deadline = time.perf_counter() + PATIENCE_S
    for keys in chains:
        while True:
            assert time.perf_counter() < deadline, "it did not come back"
            with kv.lookup(keys) as hit:
                if hit.blocks == RECOVER_CHAIN_BLOCKS and kv.load(hit, Contiguous(data)).blocks == hit.blocks:
                    break
            time.sleep(0.005)
    return time.perf_counter()


def run() -> list[Row]:
    """All of it."""
    headers, keys = full_segment()
    messages, rows = bench_scan(headers)
    for parts in (1, 8):
        told = messages if parts == 1 else of_eight_parts(messages)
        what = f"rebuild of 1 million blocks of {parts} part{'s' if parts > 1 else ''}"
        used_s, wall_s, _ = rebuild(told, parts, keys, asked=False)
        rows.append(row(f"{what}, the Master's CPU", used_s, "s", at_most=3.0 if parts == 1 else None))
        rows.append(row(f"{what}, as it takes", wall_s, "s"))
        _, wall_s, p99_s = rebuild(told, parts, keys, asked=True)
        rows.append(row(f"{what}, as it takes under lookups", wall_s, "s"))
        rows.append(row(f"{what}: these lookups, p99", 1000 * p99_s, "ms"))
    del messages
    return rows + bench_kill()
