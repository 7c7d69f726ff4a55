"""The core alone: lookup, put, memory a block, eviction. No I/O, no processes; every ratio is measured in one run.

The forest of 2 million blocks: for speed, 2,000 chains of 1,024 blocks; for memory and eviction, copies of the
conversation trace with salted keys, so that chains have the lengths and branches of real prompts.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from bench.report import Row, row
from kvpool_master.core import messages as m
from kvpool_master.core.extents import RECORD_BYTES
from kvpool_master.core.pool import Pool
from kvpool_master.core.settings import Settings
from kvpool_master.replay_trace import KEY_BYTES, read_trace
from kvpool_proto.geometry import slab_bytes_for
from kvpool_proto.namespace import NamespaceSpec

TRACE = Path(__file__).parent.parent / "data" / "traces" / "mooncake_conversation.jsonl.zst"
BLOCKS = 2_000_000
CHAIN_BLOCKS = 1024
SLAB_SLOTS = 1 << 16
FOREVER_MS = 1 << 50


def make_pool(slots: int, *, parts: int = 1, key_bytes: int = 16, entry: str = "root") -> tuple[Pool, bytes]:
    """A pool with one node whose segment has at least `slots` slots, all bound."""
    settings = Settings(
        reserve_share_permille=1000,
        evict_ahead=False,
        bind_ahead_permille=1000,
        suspect_ms=FOREVER_MS,
        retire_ms=FOREVER_MS,
        leases_max=1 << 20,
        evict_inline_spans_max=1 << 20,
    )
    pool = Pool(settings, epoch=1)
    slab_bytes = slab_bytes_for(min(slots, SLAB_SLOTS), 4096)
    slabs = -(-slots // SLAB_SLOTS)
    pool.apply(m.Register("node", 1, (m.SegmentOffer(0, slabs * slab_bytes, slab_bytes),)), 0)
    spec = NamespaceSpec(
        model="bench",
        block_tokens=16,
        part_bytes=4096,
        dtype="int8",
        key_bytes=key_bytes,
        parts=parts,
        entry=entry,  # type: ignore[arg-type]
    )
    opened = pool.apply(m.OpenNamespace(spec), 0)
    for effect in [one for one in opened.effects if isinstance(one, m.BindSlab)]:
        pool.apply(m.SlabBound("node", 1, effect.segment, effect.slab, effect.slot_bytes), 0)
    return pool, opened.namespace


def put(pool: Pool, namespace: bytes, chain: bytes, ident: int, parts: int = 1, *, at_once: bool = False) -> int:
    """Reserve and commit a chain, part by part or all parts at once. Returns the blocks of the chain answered."""
    reservation = ident.to_bytes(16, "big")
    answer = pool.apply(m.Reserve(namespace, reservation, m.Parent.ROOT, chain, 0, parts), ident)
    granted = sum(run.blocks for run in answer.runs if run.state is m.RunState.YOURS and run.part_from == 0)
    if granted and at_once:
        pool.apply(m.Commit(reservation, 0, parts, granted, True), ident)
    elif granted:
        for part in range(parts):
            pool.apply(m.Commit(reservation, part, part + 1, granted, True), ident)
    return answer.answered


def median_us(action: Callable[[bytes], object], chains: list[bytes]) -> float:
    """Median time of `action` over the chains, in us."""
    times: list[float] = []
    for chain in chains:
        start = time.perf_counter()
        action(chain)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def bench_lookup() -> list[Row]:
    """One leased full hit of 1,024 blocks among 2 million, against one dict lookup per block of the same keys."""
    pool, namespace = make_pool(BLOCKS + SLAB_SLOTS)
    chains = [os.urandom(16 * CHAIN_BLOCKS) for _ in range(BLOCKS // CHAIN_BLOCKS)]
    for number, chain in enumerate(chains):
        assert put(pool, namespace, chain, number) == CHAIN_BLOCKS
    table: dict[bytes, int] = {}
    for number, chain in enumerate(chains):
        for at in range(0, len(chain), 16):
            table[chain[at : at + 16]] = number
    leases = iter(range(1, 1 << 20))

    def lookup(chain: bytes) -> None:
        hit = pool.apply(m.Lookup(namespace, chain, 0, next(leases).to_bytes(16, "big")), BLOCKS)
        assert hit.blocks == CHAIN_BLOCKS

    def lookup_by_block(chain: bytes) -> None:
        for at in range(0, len(chain), 16):
            if chain[at : at + 16] not in table:
                raise AssertionError

    sample = random.Random(7).sample(chains, 1000)
    ours, per_block = median_us(lookup, sample), median_us(lookup_by_block, sample)
    return [
        row("core lookup, 1,024 blocks of 2 M, full hit", ours, "us"),
        row("one dict lookup per block, same keys", per_block, "us"),
        row("core lookup, times faster than a dict per block", per_block / ours, "x", at_least=20),
    ]


def _put_next(pool: Pool, namespace: bytes, idents: Iterator[int], parts: int, at_once: bool, chain: bytes) -> None:
    put(pool, namespace, chain, next(idents), parts, at_once=at_once)


def bench_put() -> list[Row]:
    """Reserve + commit of 1,024 new blocks with 1 part and with 8, each part committed by its own command."""
    took: dict[str, float] = {}
    rounds = 300
    for name, parts, at_once in (("1 part", 1, False), ("8 parts", 8, False), ("8 parts at once", 8, True)):
        pool, namespace = make_pool(rounds * CHAIN_BLOCKS * parts + SLAB_SLOTS, parts=parts)
        idents = iter(range(rounds))
        chains = [os.urandom(16 * CHAIN_BLOCKS) for _ in range(rounds)]
        store = partial(_put_next, pool, namespace, idents, parts, at_once)
        took[name] = median_us(store, chains)
    return [
        row("core reserve + commit, 1,024 new blocks, 1 part", took["1 part"], "us"),
        row("the same, 8 parts, 8 commits", took["8 parts"], "us"),
        row("8 parts, as a multiple of 1 part", took["8 parts"] / took["1 part"], "x", at_most=3),
        row("8 parts, one commit for all", took["8 parts at once"] / took["1 part"], "x"),
    ]


def conversation(key_bytes: int) -> Iterator[bytes]:
    """Chains of the conversation trace, copy after copy, keys salted per copy, until 2 million blocks are distinct."""
    trace = read_trace(TRACE)
    chains = [[key for (key,) in struct.iter_unpack(f"{KEY_BYTES}s", one.chain)] for one in trace.requests]
    for copy in range(BLOCKS // trace.distinct + 1):
        salt = copy.to_bytes(8, "big")
        keys: dict[bytes, bytes] = {}
        for chain in chains:
            for block in chain:
                if block not in keys:
                    keys[block] = hashlib.blake2b(block, digest_size=key_bytes, salt=salt).digest()
            yield b"".join([keys[block] for block in chain])


def resident_bytes() -> int:
    """Resident memory of this process, after what is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fill(pool: Pool, namespace: bytes, chains: Iterable[bytes], most: int) -> int:
    """Store chains until `most` blocks are stored. Returns how many are."""
    tree = pool.namespaces[namespace].tree
    for ident, chain in enumerate(chains):
        put(pool, namespace, chain, ident)
        if tree.blocks >= most:
            break
    return tree.blocks


def _spooled(chains: Iterable[bytes], file: IO[bytes]) -> Iterator[bytes]:
    """The same chains, read back one by one, so that making them leaves nothing in memory."""
    for chain in chains:
        file.write(len(chain).to_bytes(4, "little") + chain)
    file.seek(0)
    yield b""
    while head := file.read(4):
        yield file.read(int.from_bytes(head, "little"))


def measure_memory(key_bytes: int, entry: str) -> float:
    """Resident bytes a block of a directory of 2 million blocks, in this process (start a fresh one)."""
    pool, namespace = make_pool(BLOCKS + SLAB_SLOTS, key_bytes=key_bytes, entry=entry)
    with tempfile.TemporaryFile() as file:
        chains = _spooled(conversation(key_bytes), file)
        next(chains)
        before = resident_bytes()
        blocks = fill(pool, namespace, chains, BLOCKS)
    pool.apply(m.Tick(), FOREVER_MS)  # remembered reservations and deadlines go
    return (resident_bytes() - before) / blocks


def bench_memory() -> list[Row]:
    """Memory a block at 2 million blocks: resident set, each case in a process of its own."""
    rows: list[Row] = []
    cases = (("root", 16, 60.0), ("any", 16, 160.0), ("root", 8, None), ("root", 32, None), ("any", 32, None))
    for entry, key_bytes, limit in cases:
        command = [sys.executable, "-m", "bench.bench_core", "memory", str(key_bytes), entry]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
        name = f"core memory a block, 2 M blocks, entry = {entry}, {key_bytes}-byte keys"
        rows.append(row(name, float(done.stdout), "bytes", at_most=limit))
    return rows


def bench_eviction() -> list[Row]:
    """Eviction per freed block in a full directory of 2 million blocks, and of a tenth of that."""
    took: dict[int, float] = {}
    for size in (BLOCKS // 10, BLOCKS):
        pool, namespace = make_pool(size + SLAB_SLOTS)
        fill(pool, namespace, conversation(16), size)
        segment = next(iter(pool.space.segments.values()))
        slot_bytes = pool.namespaces[namespace].spec.slot_bytes
        runs = segment.allocator.runs_of(slot_bytes)
        freed, spent = 0, 0.0
        while freed < size // 20:
            start_free = runs.free
            start = time.perf_counter()
            pool.evictor.evict(segment, slot_bytes, start_free + 1000, 1 << 20)
            spent += time.perf_counter() - start
            freed += runs.free - start_free
        took[size] = spent / freed * 1e6
    return [
        row("eviction a freed block, 200,000 blocks", took[BLOCKS // 10], "us"),
        row("eviction a freed block, 2 M blocks", took[BLOCKS], "us", at_most=10),
        row("the same, as a multiple of 200,000 blocks", took[BLOCKS] / took[BLOCKS // 10], "x", at_most=2),
    ]


def many_nodes(nodes: int, slots: int, part_bytes: int, slab_slots: int) -> tuple[Pool, bytes]:
    """A pool whose `nodes` nodes have data ports and together at least `slots` slots, all bound."""
    settings = Settings(
        reserve_share_permille=1000, evict_ahead=False, bind_ahead_permille=1000, suspect_ms=FOREVER_MS,
        retire_ms=FOREVER_MS, ramp_ms=0,
    )  # fmt: skip
    pool = Pool(settings, epoch=1)
    slab_bytes = slab_bytes_for(slab_slots, part_bytes)
    offer = m.SegmentOffer(0, -(-slots // (nodes * slab_slots)) * slab_bytes, slab_bytes)
    for node in range(nodes):
        pool.apply(m.Register(f"node{node}", 1, (offer,), data_address=f"node{node}:1"), 0)
    spec = NamespaceSpec(model="bench", block_tokens=16, part_bytes=part_bytes, dtype="int8", key_bytes=16)
    opened = pool.apply(m.OpenNamespace(spec), 0)
    for effect in [one for one in opened.effects if isinstance(one, m.BindSlab)]:
        pool.apply(m.SlabBound(effect.node, 1, effect.segment, effect.slab, effect.slot_bytes), 0)
    return pool, opened.namespace


def bench_placement() -> list[Row]:
    """Reserve + commit of 1,024 blocks of 3 MiB for a writer without a segment, on 1 node and on 100."""
    rounds = 100
    took: dict[int, float] = {}
    runs: dict[int, float] = {}
    for nodes in (1, 100):
        pool, namespace = many_nodes(nodes, 2 * rounds * CHAIN_BLOCKS, 3 << 20, slab_slots=256)
        idents = iter(range(rounds))
        chains = [os.urandom(16 * CHAIN_BLOCKS) for _ in range(rounds)]
        took[nodes] = median_us(partial(_put_next, pool, namespace, idents, 1, True), chains)
        hits = [pool.apply(m.Peek(namespace, chain, 0), rounds) for chain in chains]
        runs[nodes] = sum(len(hit.extents) for hit in hits) / RECORD_BYTES / rounds
    return [
        row("placement of 1,024 blocks of 3 MiB, no own node, 1 node", took[1], "us"),
        row("the same on 100 nodes", took[100], "us"),
        row("the same, as a multiple of 1 node", took[100] / took[1], "x", at_most=2),
        row("runs of a chain, 1 node", runs[1], ""),
        row("runs of a chain, 100 nodes", runs[100], ""),
    ]


def bench_retire() -> list[Row]:
    """A node with a tenth of 2 million blocks is retired: how long one command keeps the others waiting."""
    pool, namespace = many_nodes(10, BLOCKS + BLOCKS // 10, 4096, slab_slots=1 << 13)
    fill(pool, namespace, conversation(16), BLOCKS)
    spare = gc.isenabled()
    gc.freeze()
    gc.disable()  # as the daemon does (server.spare_the_directory)
    runs = pool.liveness.nodes["node3"].segments[0].allocator.per_size[4096]
    held = len(runs.slabs) * runs.per_slab - runs.free
    times: list[float] = []
    commands: list[m.Command] = [m.RetireNode("node3", 1)]
    while pool.forest.retiring or commands:
        command = commands.pop() if commands else m.Tick()
        start = time.perf_counter()
        pool.apply(command, BLOCKS)
        times.append(time.perf_counter() - start)
    gc.unfreeze()
    if spare:
        gc.enable()
    return [
        row("blocks of the node that is retired, of 2 M", held, "blocks"),
        row("its retirement, longest command", max(times) * 1e3, "ms", at_most=20),
        row("the same, commands until all is gone", len(times), ""),
        row("the same, all commands together", sum(times), "s"),
    ]


def run() -> list[Row]:
    """All figures of the core."""
    return [
        *bench_lookup(), *bench_put(), *bench_placement(), *bench_eviction(), *bench_retire(), *bench_memory()
    ]  # fmt: skip


if __name__ == "__main__" and sys.argv[1:2] == ["memory"]:
    print(measure_memory(int(sys.argv[2]), sys.argv[3]))
