"""Everybody killed, ended, stopped and continued at random while workers check every byte; then nothing is lost.

KVPOOL_CHAOS_S: how long faults go on, 75 s by default. KVPOOL_CHAOS_SEED: which, at random by default; a failure
names its seed and tells what happened when.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from integration.chaos_worker import CALL_MS, KEPT_CHAINS, STORE_MS
from integration.chaos_world import NODES, WORKERS, Interval, World, faults, node_id, wait
from integration.master_client import Client
from kvpool_client.sdk import NODE_TIMEOUT_S_MAX
from kvpool_master.state import FILE as DATABASE
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import BY_REASON, BadRequest, ProtocolError

CHAOS_S: Final = float(os.environ.get("KVPOOL_CHAOS_S", "75"))
RECOVERY_S: Final = 15.0
"""For a pool that was ill-treated to be warm again by itself."""
SLACK_S: Final = 1.0
"""What a call may take beyond its time: seven processes and their restarts share two cores."""
LIMIT_S: Final = {
    "lookup": CALL_MS / 1000,
    "load": CALL_MS / 1000 + NODE_TIMEOUT_S_MAX,
    "store": (STORE_MS + CALL_MS) / 1000 + NODE_TIMEOUT_S_MAX,
    "remove": CALL_MS / 1000,
}
"""A call's own time; a load and a store may first have to ask the node client, a store commits behind its time."""
BUGS: Final = {"internal", "wrong_block"} | {
    error.reason.lower() for error in BY_REASON.values() if issubclass(error, (BadRequest, ProtocolError))
}
"""Reasons that no fault explains."""
Line = dict[str, Any]


@pytest.mark.timeout(CHAOS_S + 180)
def test_nothing_is_lost_and_nothing_is_ever_wrong(tmp_path: Path) -> None:
    seed = int(os.environ.get("KVPOOL_CHAOS_SEED", time.time_ns() % 1_000_000))
    with World(tmp_path, seed) as world, told(world):
        world.start_daemons()
        world.start(*WORKERS)
        happened = ill_treat(world)
        recovered_s = warm_again(world)
        world.end(*WORKERS)
        drained(world)
        purged_for_ever(world)
        kept = killed_while_storing(world)
        found_again(world, kept)
        found_again(world, kept)
        drained(world)
        leaves_what_it_should(world)
        sound_logs(world)
        calls = read_journal(world)
        never_late(calls, world.stopped)
        tell(world, calls, f"{happened} faults, warm again after {recovered_s:.1f} s, {len(kept)} chains kept")


def ill_treat(world: World) -> int:
    """Faults for CHAOS_S; the directory is sound after each. How many there were."""
    end_s, happened = time.monotonic() + CHAOS_S, 0
    for fault in faults(world.seed):
        if time.monotonic() >= end_s:
            break
        world.befall(fault)
        happened += 1
        with master_of(world) as client:
            client.sound()
    return happened


def warm_again(world: World) -> float:
    """Nobody helps: both nodes are back, every worker loads, room is made. How long that took."""
    began_s = time.monotonic()
    recovered(world)
    size = world.journal.stat().st_size

    def loading() -> set[str]:
        """Workers that have loaded something since."""
        with world.journal.open() as journal:
            journal.seek(size)
            lines: list[Line] = [json.loads(line) for line in journal if line.endswith("\n")]
        return {line["worker"] for line in lines if line["call"] == "load" and line["blocks"]}

    wait(lambda: loading() == set(WORKERS), RECOVERY_S, "every worker loads")
    took_s = time.monotonic() - began_s
    with master_of(world) as client:
        wait(lambda: metric(client, "gone_blocks_total{", 'reason="evicted"') > 0, RECOVERY_S, "evictions")
    world.alive()
    return took_s


def recovered(world: World) -> None:
    """The Master is ready, all nodes are up and have reported."""
    with master_of(world) as client:
        wait(lambda: client.get("/readyz")[0] == 200 and all_up(client.status()), RECOVERY_S, "all nodes up")
        client.sound()


def all_up(status: pb.StatusReply) -> bool:
    """Are all nodes up, with nothing left to report?"""
    nodes = {node.node_id: (node.state, node.inventory) for node in status.nodes}
    return nodes.keys() == {node_id(node) for node in NODES} and all(
        state in ("up", "ramp") and inventory in ("none", "complete") for state, inventory in nodes.values()
    )


def drained(world: World) -> None:
    """The workers are gone: nothing is leased, reserved or quarantined any more."""

    def held(status: pb.StatusReply) -> int:
        """Leases, reservations and quarantined bytes, added up."""
        quarantined = sum(segment.quarantined_bytes for node in status.nodes for segment in node.segments)
        return status.leases + status.reservations + quarantined

    with master_of(world) as client:
        wait(lambda: held(client.status()) == 0, RECOVERY_S, "leases, reservations and quarantine at 0")
        client.sound()


def purged_for_ever(world: World) -> None:
    """All that was churned is purged while a node is away; that and the Master's death bring nothing back."""
    here, away = NODES
    world.end(away, kind="kill")
    world.work("purge", here)
    world.end("master", kind="kill")
    world.start(away, "master")
    recovered(world)
    for node in NODES:
        world.work("check", node)


def killed_while_storing(world: World) -> list[str]:
    """Everybody is killed when some chains are kept and others are being written. The chains that are kept."""
    world.start(*WORKERS, verb="keep")
    some = 1 + world.seed % (KEPT_CHAINS - 1)

    def kept() -> list[Line]:
        """What workers said of chains that the pool had all of."""
        return [line for line in read_journal(world) if line["call"] == "kept"]

    def enough() -> bool:
        """Has every worker kept some?"""
        counts = Counter(line["worker"] for line in kept())
        return all(counts[worker] >= some for worker in WORKERS)

    wait(enough, 2 * RECOVERY_S, "chains are kept")
    world.kill_all()
    return [line["chain"] for line in kept()]


def found_again(world: World, kept: list[str]) -> None:
    """All is started, each kept chain is read by a worker of its node; then everybody is killed and started again."""
    if world.running:
        world.kill_all()
    world.start_daemons()
    recovered(world)
    for node in NODES:
        world.work("check", node, *(name for name in kept if name.startswith(node)))


def leaves_what_it_should(world: World) -> None:
    """After clean stops: one segment file for each node, the Master's database, nothing else; with discard, no file."""
    kept = {f"{node}/segments/kvpool-{node_id(node)}-0.seg" for node in NODES}
    world.end("master", *NODES)
    assert files_below(world.memory) == kept
    assert not [path for path in Path("/dev/shm").iterdir() if f"chaos-{os.getpid()}" in path.name]
    assert files_below(world.folder / "state") == {DATABASE}


def files_below(folder: Path) -> set[str]:
    """All that is no folder, sockets too."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def sound_logs(world: World) -> None:
    """No daemon met anything that it calls an error."""
    bad = [f"{part}: {line}" for part, line in world.lines() if '"level": "error"' in line or "Traceback" in line]
    assert not bad, bad


def read_journal(world: World) -> list[Line]:
    """All lines so far."""
    with world.journal.open() as journal:
        return [json.loads(line) for line in journal if line.endswith("\n")]


def never_late(calls: list[Line], stopped: dict[str, list[Interval]]) -> None:
    """Calls end in time, but for the time that the worker itself was stopped; no reason speaks of a bug."""
    late = [
        line for line in calls if line["call"] in LIMIT_S and own_s(line, stopped) > LIMIT_S[line["call"]] + SLACK_S
    ]
    assert not late, late
    assert not [line for line in calls if line.get("reason") in BUGS]


def own_s(line: Line, stopped: dict[str, list[Interval]]) -> float:
    """How long a call took, without the time its worker was stopped."""
    start_s, end_s = line["start_s"], line["end_s"]
    away_s = sum(max(0.0, min(end_s, to) - max(start_s, since)) for since, to in stopped.get(line["worker"], []))
    return end_s - start_s - away_s


def tell(world: World, calls: list[Line], summary: str) -> None:
    """For those who look (pytest -s): how much was done, why calls were short, how long they took."""
    print(f"\nKVPOOL_CHAOS_SEED={world.seed}: {summary}")
    for call, limit_s in LIMIT_S.items():
        of = [line for line in calls if line["call"] == call]
        longest_ms = 1000 * max(own_s(line, world.stopped) for line in of)
        reasons = dict(Counter(line["reason"] for line in of if line["reason"]).most_common())
        blocks = sum(line["blocks"] for line in of)
        print(f"{len(of)} x {call}, {blocks} blocks, longest {longest_ms:.0f} of {1000 * limit_s:.0f} ms, {reasons}")


def metric(client: Client, *parts: str) -> float:
    """The sum of the Master's samples whose line has all of these parts."""
    lines = [line for line in client.get("/metrics")[1].splitlines() if not line.startswith("#")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(part in line for part in parts))


@contextmanager
def master_of(world: World) -> Iterator[Client]:
    """A client of the present Master."""
    client = Client(world.master)
    try:
        yield client
    finally:
        client.close()


@contextmanager
def told(world: World) -> Iterator[None]:
    """A failure says how to repeat it and what happened."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:  # the latter: its time is over
        raise AssertionError(f"{error}\n{world.story()}") from error
