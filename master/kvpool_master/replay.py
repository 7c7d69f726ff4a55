"""`kvpool-master replay`: drives the real core with a request trace, in virtual time, without I/O.

Rules
  - One node, one segment, one slab: its slots are the capacity, exact to the block. One block takes one slot,
    and eviction happens only when a slot is needed, so a replay compares eviction policies and nothing else.
  - Each request: lookup, lease released at once, then reserve and commit of the rest (the head that fits).
  - Hit rate = leading run of blocks present / all blocks asked.
  - Time is the trace's. Liveness never interferes. The wall clock serves only to tell the speed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Final

from kvpool_master.clock import SYSTEM
from kvpool_master.core.messages import (
    BindSlab,
    Commit,
    Effect,
    GoneReason,
    Hit,
    Lookup,
    Opened,
    OpenNamespace,
    Parent,
    Register,
    Registered,
    Release,
    Reserve,
    Reserved,
    RunState,
    SegmentOffer,
    SlabBound,
    Tick,
)
from kvpool_master.core.pool import Pool
from kvpool_master.core.settings import Settings
from kvpool_master.replay_trace import KEY_BYTES, Request, Trace, TraceError, read_trace
from kvpool_proto.errors import KVPoolError
from kvpool_proto.geometry import SLAB_BYTES_MIN, slab_bytes_for
from kvpool_proto.namespace import NamespaceSpec

PART_BYTES: Final = SLAB_BYTES_MIN
"""Any size will do; with this one the slab of a single block is not below the least."""
TICK_MS: Final = 10_000
_NEVER_MS: Final = 1 << 60
_NODE: Final = "replay"
_SETTINGS: Final = Settings(
    chain_blocks_max=1 << 32,
    watermark_high_permille=1000,
    watermark_low_permille=1000,
    evict_ahead=False,
    evict_inline_spans_max=1 << 32,
    gone_ring_blocks_max=1,
    reserve_share_permille=1000,
    suspect_ms=_NEVER_MS,
    retire_ms=_NEVER_MS,
    stall_ms=_NEVER_MS,
)

Progress = Callable[[int, int], None]
"""Called with (requests done, requests in all)."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one capacity gave; the counts are in blocks."""

    capacity: str
    capacity_blocks: int
    hit_blocks: int
    asked_blocks: int
    hit_rate: float
    evicted_blocks: int
    short_stores: int
    """Requests of which only a head was stored."""
    seconds: float
    accesses_per_s: float


@dataclass(frozen=True, slots=True)
class Capacity:
    """A capacity as written and in blocks."""

    text: str
    blocks: int


def parse_capacities(text: str, distinct: int) -> tuple[Capacity, ...]:
    """Capacities like "1%,2.5%,4096": percent of `distinct`, rounded down, or a number of blocks.

    Raises ValueError, naming the item, unless each is at least one block.
    """
    capacities: list[Capacity] = []
    for item in (part.strip() for part in text.split(",")):
        try:
            blocks = int(Fraction(item[:-1]) * distinct / 100) if item.endswith("%") else int(item)
        except (ValueError, ZeroDivisionError):
            raise ValueError(f"capacity {item!r}: a percentage like 2.5% or a number of blocks") from None
        if blocks < 1:
            raise ValueError(f"capacity {item!r}: {blocks} of {distinct} distinct blocks, at least 1")
        capacities.append(Capacity(item, blocks))
    return tuple(capacities)


class Replay:
    """The core with room for exactly `blocks` blocks, fed one request at a time."""

    def __init__(self, blocks: int) -> None:
        self._pool = Pool(_SETTINGS, epoch=1)
        self._ids = 0
        self._tick_ms = TICK_MS
        self.hit_blocks = 0
        self.short_stores = 0
        slab_bytes = slab_bytes_for(blocks, PART_BYTES)
        registered = self._pool.apply(Register(_NODE, 1, (SegmentOffer(0, slab_bytes, slab_bytes),)), 0)
        assert isinstance(registered, Registered)
        self._carry_out(registered.effects)
        spec = NamespaceSpec(model="replay", block_tokens=1, part_bytes=PART_BYTES, dtype="uint8", key_bytes=KEY_BYTES)
        opened = self._pool.apply(OpenNamespace(spec), 0)
        assert isinstance(opened, Opened)
        self._carry_out(opened.effects)
        self._namespace = opened.namespace

    def request(self, request: Request) -> None:
        """Look one request up and store what is missing; adds to hit_blocks and short_stores."""
        pool, namespace, chain, now_ms = self._pool, self._namespace, request.chain, request.at_ms
        if now_ms >= self._tick_ms:
            pool.apply(Tick(), now_ms)
            self._tick_ms = now_ms + TICK_MS
        self._ids += 1
        request_id = self._ids.to_bytes(16, "big")
        hit = pool.apply(Lookup(namespace, chain, 0, request_id), now_ms)
        assert isinstance(hit, Hit)
        if hit.blocks:
            pool.apply(Release((request_id,)), now_ms)
            self.hit_blocks += hit.blocks
        blocks = len(chain) // KEY_BYTES
        if hit.blocks == blocks:
            return
        answer = pool.apply(Reserve(namespace, request_id, Parent.ROOT, chain, 0, 1), now_ms)
        assert isinstance(answer, Reserved)
        self._carry_out(answer.effects, now_ms)
        self.short_stores += answer.answered < blocks
        granted = sum([run.blocks for run in answer.runs if run.state is RunState.YOURS])
        if granted:
            pool.apply(Commit(request_id, 0, 1, granted, final=True), now_ms)

    def evicted_blocks(self, now_ms: int) -> int:
        """Blocks evicted so far."""
        (namespace,) = self._pool.snapshot(now_ms).namespaces
        return namespace.counters.gone_blocks.get(GoneReason.EVICTED, 0)

    def _carry_out(self, effects: tuple[Effect, ...], now_ms: int = 0) -> None:
        for effect in effects:
            if isinstance(effect, BindSlab):
                bound = SlabBound(effect.node, 1, effect.segment, effect.slab, effect.slot_bytes)
                self._pool.apply(bound, now_ms)


def replay(trace: Trace, capacity: Capacity, progress: Progress, clock: Callable[[], float]) -> Result:
    """Feed the whole trace to a pool of that capacity. clock: seconds, for the speed alone."""
    pool = Replay(capacity.blocks)
    total = len(trace.requests)
    step = max(1, total // 100)
    started = clock()
    with _without_cycle_collector():
        for done, request in enumerate(trace.requests, start=1):
            pool.request(request)
            if done % step == 0 or done == total:
                progress(done, total)
    seconds = max(clock() - started, 1e-9)
    return Result(
        capacity=capacity.text,
        capacity_blocks=capacity.blocks,
        hit_blocks=pool.hit_blocks,
        asked_blocks=trace.accesses,
        hit_rate=pool.hit_blocks / trace.accesses,
        evicted_blocks=pool.evicted_blocks(trace.requests[-1].at_ms),
        short_stores=pool.short_stores,
        seconds=round(seconds, 3),
        accesses_per_s=round(trace.accesses / seconds),
    )


@contextmanager
def _without_cycle_collector() -> Generator[None]:
    """The core frees by reference counts (see server.spare_the_directory); walking it for cycles takes a fifth."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def main(argv: Sequence[str]) -> int:
    """`kvpool-master replay ...`; returns the exit code. The table goes to stdout, progress to stderr."""
    arguments = _arguments(argv)
    try:
        trace = read_trace(arguments.trace)
        capacities = parse_capacities(arguments.capacity, trace.distinct)
        results = [replay(trace, capacity, _progress_of(capacity.text), SYSTEM.precise_s) for capacity in capacities]
    except (TraceError, ValueError, KVPoolError) as error:
        sys.stderr.write(f"kvpool-master replay: {error}\n")
        return 1
    report = _as_json if arguments.json else _as_table
    sys.stdout.write(report(trace, arguments.policy, results))
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="kvpool-master replay",
        description="Replay a request trace against the core and tell the prefix hit rate of each capacity.",
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="*.jsonl or *.jsonl.zst (needs kvpool[replay])")
    parser.add_argument(
        "--capacity",
        default="1%,2%,5%,10%,20%,50%",
        help="percentages of the trace's distinct blocks, or numbers of blocks (default: %(default)s)",
    )
    parser.add_argument("--policy", choices=["lru"], default="lru", help="what ranks the leaves (default: lru)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of a table")
    return parser.parse_args(argv)


def _progress_of(capacity: str) -> Progress:
    """Writes how far a replay is to stderr: in place on a terminal, else a line a quarter."""
    terminal = sys.stderr.isatty()
    shown = 0

    def show(done: int, total: int) -> None:
        """Requests done so far, of how many."""
        nonlocal shown
        percent = 100 * done // total
        if percent >= shown + (1 if terminal else 25):
            shown = percent
            end = "\r" if terminal and done < total else "\n"
            sys.stderr.write(f"capacity {capacity}: {percent:3d} % of {total:,} requests{end}")
            sys.stderr.flush()

    return show


def _as_json(trace: Trace, policy: str, results: Sequence[Result]) -> str:
    report = {
        "trace": trace.name,
        "policy": policy,
        "requests": len(trace.requests),
        "block_accesses": trace.accesses,
        "distinct_blocks": trace.distinct,
        "results": [asdict(result) for result in results],
    }
    return json.dumps(report) + "\n"


def _as_table(trace: Trace, policy: str, results: Sequence[Result]) -> str:
    lines = [
        f"{trace.name}: {len(trace.requests):,} requests, {trace.accesses:,} block accesses, "
        f"{trace.distinct:,} distinct blocks; policy {policy}",
        f"{'capacity':>10} {'blocks':>11} {'hit rate':>9} {'evicted':>11} {'cut short':>10} {'accesses/s':>11}",
    ]
    lines += [
        f"{result.capacity:>10} {result.capacity_blocks:>11,} {result.hit_rate:>9.2%} {result.evicted_blocks:>11,} "
        f"{result.short_stores:>10,} {result.accesses_per_s:>11,.0f}"
        for result in results
    ]
    return "\n".join(lines) + "\n"
