"""The checkers can fail: every planted fault (faults.py) is caught by some seed, and as it should be."""

from __future__ import annotations

import pytest

from simulation.faults import FAULTS
from simulation.test_simulation import simulation

SEEDS_MAX = 40


@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_caught(fault: str) -> None:
    done = simulation("--fault", fault, "--seeds", str(SEEDS_MAX))
    assert done.returncode == 0, done.stdout[-4_000:] + done.stderr[-4_000:]
