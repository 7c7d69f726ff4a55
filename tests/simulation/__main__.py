"""python -m simulation, from tests/: runs seeds. One that fails prints its last events and how to replay it.

With --fault a fault is planted, and the first seed that catches it ends the run. The exit code is 1 if a seed failed,
or if the fault was not caught, or not as it should be.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

if os.environ.get("PYTHONHASHSEED") != "0":
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "simulation", *sys.argv[1:]])

from simulation.faults import FAULTS
from simulation.hub import SimulationFailure
from simulation.run import Outcome, simulate
from simulation.trouble import ALL
from simulation.world import SETTINGS, Plan


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--seeds", type=int, default=20, help="how many, from --first on")
    parser.add_argument("--first", type=int, help="1, or where a planted fault was caught soon")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the seeds")
    parser.add_argument("--only", default="", help="trouble of these kinds only, with commas between (trouble.py)")
    parser.add_argument("--fault", choices=sorted(FAULTS), help="plant this one: some seed has to fail")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every event")
    given = parser.parse_args()
    first = given.first or (FAULTS[given.fault].first if given.fault else 1)
    seeds = [given.seed] if given.seed is not None else list(range(first, first + given.seeds))
    run = partial(one_seed, fault=given.fault, only=given.only, verbose=given.verbose)
    if given.jobs > 1:
        pool = ProcessPoolExecutor(given.jobs)
        try:
            return report(pool.map(run, seeds), given.fault)
        finally:
            pool.shutdown(cancel_futures=True)
    return report(map(run, seeds), given.fault)


def one_seed(seed: int, fault: str | None, only: str, verbose: bool) -> tuple[int, Outcome | str]:
    """The seed, and what it came to or how it failed."""
    chosen = {name: often for name, often in ALL.items() if not only or name in only.split(",")}
    planted = FAULTS[fault] if fault else None
    plan = Plan(profile=chosen)
    if planted is not None:
        plan = Plan(
            profile=planted.profile,
            operations=planted.operations,
            trouble_us=planted.trouble_us,
            settings=replace(SETTINGS, **planted.settings),
            **planted.world,
        )
    options = "".join(f" --{name} {value}" for name, value in (("fault", fault), ("only", only)) if value)
    try:
        return seed, simulate(seed, plan, fault=planted and planted.plant, options=options, verbose=verbose)
    except SimulationFailure as failure:
        return seed, str(failure)
    except Exception:
        return seed, f"the simulation itself failed\n{traceback.format_exc()}"


def report(outcomes: Iterator[tuple[int, Outcome | str]], fault: str | None) -> int:
    """Print what came; the exit code."""
    seen: Counter[str] = Counter()
    failed = 0
    for seed, outcome in outcomes:
        if isinstance(outcome, Outcome):
            seen += outcome.seen
            print(
                f"seed {seed}: {outcome.steps} steps, {outcome.virtual_s:.0f} s in {outcome.real_s:.2f} s,"
                f" digest {outcome.digest:08x}",
                flush=True,
            )
            continue
        failed += 1
        if fault:
            said = outcome.splitlines()[0]
            print(f"seed {seed} catches {fault}: {said}")
            return 0 if any(word in said for word in FAULTS[fault].caught) else 1
        print(f"seed {seed} FAILED: {outcome}", flush=True)
    for what, count in sorted(seen.items()):
        print(f"{count:10} {what}")
    return 1 if failed or fault else 0


if __name__ == "__main__":
    raise SystemExit(main())
