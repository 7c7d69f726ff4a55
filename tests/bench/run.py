"""`make bench`: every figure that has a target, in one run, as a table and as JSON.

  python tests/bench/run.py [--json FILE] [--only core,replay,rpc,recovery,copy,peer]

Exit code 1 when a target was missed. Nothing else should run on the machine meanwhile; ratios are measured inside
this run, so that noise hits both of their sides.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import bench_copy, bench_core, bench_peer, bench_recovery, bench_replay, bench_rpc
from bench.report import Row, machine, show, write

BENCHES: dict[str, Callable[[], list[Row]]] = {
    "core": bench_core.run,
    "replay": bench_replay.run,
    "rpc": bench_rpc.run,
    "recovery": bench_recovery.run,
    "copy": bench_copy.run,
    "peer": bench_peer.run,
}


def main() -> int:
    """Run them all; 0 if every target was reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--only", default=",".join(BENCHES), help="some of them")
    arguments = parser.parse_args()
    print(machine())
    rows: list[Row] = []
    for name in arguments.only.split(","):
        print(f"\n{name}", flush=True)
        found = BENCHES[name]()
        print(show(found), flush=True)
        rows += found
    if arguments.json:
        write(rows, arguments.json)
    missed = [one.name for one in rows if one.ok is False]
    print(f"\n{len(rows)} figures, {len(missed)} targets missed" + "".join(f"\n  {name}" for name in missed))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
