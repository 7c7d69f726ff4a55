"""How fast bytes move between an engine's buffers and a segment: `python tests/bench/bench_copy.py [MiB]`.

Every ratio is against numpy's own copy of the same bytes between the same buffers in the same run. np.copyto of the
whole is one call over all bytes: where it is longer than glibc's non-temporal threshold (192 MiB on some machines) it
streams past the caches, which no bounded piece does on its own; the figure in pieces of the same size stands beside
it. With --stream in this process, or STREAM in an engine's environment, pieces stream, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import Row, row
from kvpool_client.clock import SYSTEM
from kvpool_client.devices.base import Buffer, Contiguous, Layout, Rows
from kvpool_client.devices.cpu import CpuDevice
from kvpool_client.owned_segment import OwnedSegment, SegmentPlan
from kvpool_client.runs import Run
from kvpool_client.segment import AttachedSegment
from kvpool_client.transfer import PIECE_BYTES, LocalEngine, PartCopy, Term, Verify
from kvpool_proto.geometry import slots_per_slab
from kvpool_proto.namespace import NamespaceSpec

MIB = 1 << 20
SLAB_BYTES = 64 * MIB
ROUNDS = 9
LAYERS = 32
STREAM = "glibc.cpu.x86_non_temporal_threshold=0x100000"


class Pool:
    """A prefaulted segment with every slab bound to one slot size, and the runs of one long chain in it."""

    def __init__(self, directory: Path, total_bytes: int, slot_bytes: int) -> None:
        per_slab = slots_per_slab(SLAB_BYTES, slot_bytes)
        self.blocks = total_bytes // slot_bytes
        slabs = -(-self.blocks // per_slab)
        plan = SegmentPlan(
            directory=directory, node_id="bench", index=0, size_bytes=slabs * SLAB_BYTES, slab_bytes=SLAB_BYTES
        )
        self.owner = OwnedSegment.create(plan, incarnation=1, prefault_threads=1, progress=lambda _: None)
        for slab in range(slabs):
            self.owner.bind_slab(slab, slot_bytes)
        self.worker = AttachedSegment(self.owner.open_for_worker(1), 0, plan.size_bytes, plan.slab_bytes)
        self.per_slab = per_slab
        self.spec = NamespaceSpec(model="bench", dtype="uint8", block_tokens=16, part_bytes=slot_bytes)
        self.chain = np.random.default_rng(1).bytes(self.blocks * self.spec.key_bytes)

    def runs(self, run_blocks: int) -> list[Run]:
        """The chain cut at slab borders and after every run_blocks blocks."""
        runs: list[Run] = []
        done = 0
        while done < self.blocks:
            length = min(run_blocks, self.blocks - done, self.per_slab - done % self.per_slab)
            runs.append(Run(done, length, self.worker, done, 1, 1))
            done += length
        return runs

    def copy(self, layout: Layout, run_blocks: int) -> PartCopy:
        """All blocks, to or from `layout`."""
        buffer: Buffer = CpuDevice().bind(layout, self.spec.part_bytes, writable=True)
        return PartCopy(self.spec, 0, self.chain, self.runs(run_blocks), buffer)

    def close(self) -> None:
        """Leave nothing behind."""
        self.worker.close()
        self.owner.unlink()
        self.owner.close()


def gib_per_s(total_bytes: int, steps: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Of the fastest of ROUNDS rounds; the steps take turns, so that what disturbs one disturbs all."""
    best_s = dict.fromkeys(steps, float("inf"))
    for _ in range(ROUNDS):
        for name, step in steps.items():
            started_s = time.perf_counter()
            step()
            best_s[name] = min(best_s[name], time.perf_counter() - started_s)
    return {name: total_bytes / seconds / (1 << 30) for name, seconds in best_s.items()}


def aligned(total_bytes: int) -> np.ndarray[Any, Any]:
    """A touched buffer that begins at a page, as engines' large or pinned buffers do."""
    raw = np.ones(total_bytes + 4096, dtype=np.uint8)
    return raw[-raw.ctypes.data % 4096 :][:total_bytes]


@dataclass(frozen=True, slots=True)
class Case:
    """One way to copy. run_blocks: 0 for runs as long as slabs. target: ratio to numpy that is to be reached."""

    verify: Verify = "off"
    threads: int = 1
    run_blocks: int = 0
    target: float | None = None


def measure(
    pool: Pool, name: str, layout: Layout, cases: list[Case], base: dict[str, Callable[[], object]]
) -> list[dict[str, Any]]:
    """Stores and loads of all cases against base["store"], base["load"] (and base["store pieces"], ... if given)."""
    total_bytes = pool.blocks * pool.spec.part_bytes
    term = Term(SYSTEM, SYSTEM.now_ms() + 3_600_000, "expired")
    steps = dict(base)
    engines = [LocalEngine(CpuDevice(), verify=case.verify, copy_threads=case.threads) for case in cases]
    for case, engine in zip(cases, engines, strict=True):
        copy = pool.copy(layout, case.run_blocks or pool.blocks)
        steps[f"store {case}"] = partial(store, engine, copy, term)
        steps[f"load {case}"] = partial(load, engine, copy, term, pool.blocks)
    rates = gib_per_s(total_bytes, steps)
    rows: list[dict[str, Any]] = []
    for case, engine in zip(cases, engines, strict=True):
        engine.close()
        for what in ("store", "load"):
            rate = rates[f"{what} {case}"]
            rows.append(
                {
                    "name": f"{name} {what}" + (f", runs of {case.run_blocks}" if case.run_blocks else ""),
                    "verify": case.verify,
                    "threads": case.threads,
                    "gib_per_s": rate,
                    "numpy_gib_per_s": rates[what],
                    "ratio": rate / rates[what],
                    "ratio_in_pieces": rate / rates.get(f"{what} pieces", rates[what]),
                    "target": case.target,
                }
            )
    return rows


def store(engine: LocalEngine, copy: PartCopy, term: Term) -> None:
    """All of it."""
    done = engine.write([copy], term, lambda _: "")
    assert not done.reason, done.reason


def load(engine: LocalEngine, copy: PartCopy, term: Term, blocks: int) -> None:
    """All of it."""
    (copied,) = engine.read([copy], term)
    assert copied.blocks == blocks, copied.reason


def bench_contiguous(directory: Path, total_bytes: int) -> list[dict[str, Any]]:
    """3 MiB slots against np.copyto."""
    pool = Pool(directory, total_bytes, 3 * MIB)
    try:
        flat = aligned(pool.blocks * 3 * MIB)
        memory = pool.worker.memory[-len(flat) :]
        pieces = [slice(start, start + PIECE_BYTES) for start in range(0, len(flat), PIECE_BYTES)]
        base: dict[str, Callable[[], object]] = {
            "store": lambda: np.copyto(memory, flat),
            "load": lambda: np.copyto(flat, memory),
            "store pieces": lambda: [np.copyto(memory[piece], flat[piece]) for piece in pieces],
            "load pieces": lambda: [np.copyto(flat[piece], memory[piece]) for piece in pieces],
        }
        cases = [Case("off", target=0.85), Case("full", target=0.5), Case("off", 2), Case("full", 2)]
        layout = Contiguous(flat.reshape(pool.blocks, 3 * MIB))
        return measure(pool, "contiguous 3 MiB", layout, [*cases, Case(run_blocks=4)], base)
    finally:
        pool.close()


def bench_rows(directory: Path, total_bytes: int, row_bytes: int) -> list[dict[str, Any]]:
    """LAYERS tensors of scattered rows against one np.take of as many rows from one array."""
    pool = Pool(directory, total_bytes, LAYERS * row_bytes)
    try:
        rng = np.random.default_rng(2)
        flat = aligned(pool.blocks * LAYERS * row_bytes)
        table = flat.reshape(-1, row_bytes)
        memory = pool.worker.memory[-len(flat) :].reshape(table.shape)
        every = rng.permutation(len(table))
        base: dict[str, Callable[[], object]] = {
            "store": lambda: np.take(table, every, axis=0, out=memory, mode="clip"),
            "load": lambda: np.take(memory, every, axis=0, out=table, mode="clip"),
        }
        layout = Rows(list(flat.reshape(LAYERS, pool.blocks, row_bytes)), rng.permutation(pool.blocks))
        cases = [Case(target=0.85), Case("full"), Case(run_blocks=4)]
        return measure(pool, f"rows of {row_bytes >> 10} KiB", layout, cases, base)
    finally:
        pool.close()


def figures(total_bytes: int = 512 * MIB, say: Callable[[str], object] = lambda _: None) -> dict[str, Any]:
    """All figures. say: is told what is being measured. Needs about 2.2 x total_bytes of memory, half in /dev/shm."""
    say(f"contiguous, {total_bytes >> 20} MiB")
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-", dir="/dev/shm") as folder:
        rows = bench_contiguous(Path(folder), total_bytes)
        for row_kib in (16, 32, 64, 128):
            say(f"rows of {row_kib} KiB")
            rows += bench_rows(Path(folder), total_bytes, row_kib << 10)
    return {"bytes": total_bytes, "tunables": os.environ.get("GLIBC_TUNABLES", ""), "rows": rows}


def show(result: dict[str, Any]) -> str:
    """The figures as a table."""
    lines = [f"{'':36} verify threads   GiB/s   numpy   ratio  pieces  target"]
    for one in result["rows"]:
        target = one["target"]
        judged = "" if target is None else f"{target:.2f} {'ok' if one['ratio'] >= target else 'MISSED'}"
        rates = [one[name] for name in ("gib_per_s", "numpy_gib_per_s", "ratio", "ratio_in_pieces")]
        columns = "{:7.1f} {:7.1f} {:7.2f} {:7.2f}".format(*rates)
        lines.append(f"{one['name']:36} {one['verify']:6} {one['threads']:7} {columns}  {judged}".rstrip())
    return "\n".join(lines)


def run() -> list[Row]:
    """The figures that have a target, in a process with STREAM and, for comparison, in one without."""
    rows: list[Row] = []
    for name, flags in (("", ["--stream"]), (" (glibc as it comes)", [])):
        command = [sys.executable, __file__, "--json", *flags]
        environment = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        for one in json.loads(done.stdout)["rows"]:
            if one["target"] is None or (name and "contiguous" not in one["name"]):
                continue
            target = None if name else one["target"]
            rows.append(row(f"{one['name']}, verify {one['verify']}{name}", one["gib_per_s"], "GiB/s"))
            rows.append(row("  as a share of numpy's copy of the same bytes", one["ratio"], "x", at_least=target))
    return rows


def main() -> None:
    """Measure, print a table; --json for the figures alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mib", nargs="?", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--stream", action="store_true", help=f"run again with GLIBC_TUNABLES={STREAM}")
    given = parser.parse_args()
    if given.stream and os.environ.get("GLIBC_TUNABLES") != STREAM:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "GLIBC_TUNABLES": STREAM})
    result = figures(given.mib * MIB, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(result, indent=1) if given.json else show(result))


if __name__ == "__main__":
    main()
