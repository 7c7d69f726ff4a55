"""A fixed number of seeds, each a whole pool in trouble; see README.md. `make simulate` runs more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SEEDS = 70
JOBS = 2
MUST_HAPPEN = (
    "verified blocks",
    "promises kept",
    "gone: evicted",
    "gone: purged",
    "InventoryEnd",
    "SlotsCleared",
    "trouble: kill_master",
    "trouble: kill_node",
    "trouble: kill_worker",
    "trouble: stop_worker while copying",
    "trouble: stop_node while copying",
    "trouble: lose_state",
    "trouble: lose_node",
    "trouble: cut_peers",
    "trouble: stall_port",
    "peer writes",
    "blocks loaded from other nodes",
    "blocks copied by nodes",
    "replicas looked at in the end",
    "stored in shares",
    "store: over_quota",
    "nodes drained",
    "drained nodes removed",
)
"""Without these the seeds would prove little."""


def simulation(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line, in a process of its own: its hash seed is fixed, its patches are nobody else's."""
    return subprocess.run(
        [sys.executable, "-m", "simulation", *arguments],
        cwd=TESTS,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(1800)
def test_seeds() -> None:
    done = simulation("--seeds", str(SEEDS), "--jobs", str(JOBS))
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    seen = {what: int(count) for count, what in re.findall(r"^ *(\d+) (.+)$", done.stdout, re.MULTILINE)}
    assert all(seen.get(what) for what in MUST_HAPPEN), seen


def test_same_seed_same_events() -> None:
    first, second = (simulation("--seed", "3").stdout.splitlines() for _ in range(2))
    assert "digest" in first[0]
    assert re.sub(r"in [\d.]+ s", "", first[0]) == re.sub(r"in [\d.]+ s", "", second[0])
    assert first[1:] == second[1:]
