"""Replays the table of tests/unit/leaf_lru.py on the core: hit rates within half a point, and accesses a second."""

from __future__ import annotations

from bench.report import Row, row
from kvpool_master.clock import SYSTEM
from kvpool_master.replay import parse_capacities, replay
from kvpool_master.replay_trace import read_trace
from unit.leaf_lru import POINTS_MAX, TABLE, TRACES

ACCESSES_PER_S_MIN = 100_000
SPEED_TRACE = "mooncake_conversation"


def run() -> list[Row]:
    """Hit rate per trace and capacity, its distance from the table's, and the speed on the conversation trace."""
    rows: list[Row] = []
    accesses = seconds = 0.0
    for name, expected in TABLE.items():
        trace = read_trace(TRACES / f"{name}.jsonl.zst")
        for capacity in parse_capacities(",".join(expected), trace.distinct):
            result = replay(trace, capacity, lambda _done, _total: None, SYSTEM.precise_s)
            percent = 100 * result.hit_rate
            rows.append(row(f"replay {name}, capacity {capacity.text}: hit rate", percent, "%"))
            off = abs(percent - expected[capacity.text])
            rows.append(row("  distance from an independent simulation", off, "points", at_most=POINTS_MAX))
            if name == SPEED_TRACE:
                accesses += result.asked_blocks
                seconds += result.seconds
    rows.append(row("replay, block accesses a second", accesses / seconds, "1/s", at_least=ACCESSES_PER_S_MIN))
    return rows
