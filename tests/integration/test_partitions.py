"""Hosts of their own, whose links are cut, lost, thin, late or down: blocks go missing, nothing else does.

Each worker of host_worker.py compares every byte and its calls' times itself; if anything is wrong, it ends.
"""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.cluster_world import BLOCKS, COME_ABOUT_S, DATA_PORT, FAR, MASTER, Cluster, Shared, hosts, lent, until
from integration.host_worker import BLOCK_BYTES, CHURN_BLOCKS_MAX, CHURN_CHAINS
from integration.network_world import Network
from integration.relay import Relay

pytestmark = pytest.mark.timeout(60)
N0, N1, N2 = "n0", "n1", "n2"


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    one = Shared(lambda: hosts(N0, N1, N2))
    yield one
    one.close()


@pytest.fixture
def pool(shared: Shared, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three nodes that are well, and are so again afterwards."""
    with lent(shared.get(), request) as pool:
        yield pool
    if not pool.failed:
        pool.links.heal()
        pool.until_up()
        pool.sound()


@pytest.fixture
def seed() -> int:
    """Of a chain that no other test has; a failure shows it."""
    return random.SystemRandom().randrange(1_000, 1 << 30)


def stored_and_shared(pool: Cluster, at: str, seed: int) -> None:
    """A chain lies on this node, and everybody else loads it."""
    pool.store(at, seed)
    for name in pool.names:
        pool.load(name, seed)


def loaded(pool: Cluster, at: str, seed: int) -> int:
    """Blocks of a chain that a worker beside this node gets now."""
    return pool.ask(at, "load", seed=seed, blocks=BLOCKS)["loaded"]


def test_what_one_host_stores_another_loads(pool: Cluster, seed: int) -> None:
    stored_and_shared(pool, N0, seed)
    assert pool.ask(N1, "stats")["remote_loaded_bytes"] >= BLOCKS * BLOCK_BYTES
    pool.load(FAR, seed)  # a host without a node client


@pytest.mark.parametrize(
    ("how", "long"), [("cut", False), ("cut", True), ("down", True), ("unheard", False), ("deaf", False)]
)
def test_a_node_cut_off_from_the_master_hides_its_blocks_and_brings_them_back(
    pool: Cluster, seed: int, how: str, long: bool
) -> None:
    """unheard, deaf: the node, one way only. long: longer than it takes to be retired."""
    stored_and_shared(pool, N0, seed)
    stored_and_shared(pool, N1, seed + 1)
    if how == "cut":
        pool.links.cut(MASTER, N0)
    elif how == "unheard":
        pool.links.cut(N0, MASTER, one_way=True)
    elif how == "deaf":
        pool.links.cut(MASTER, N0, one_way=True)
    else:
        pool.links.down(N0)
    until(lambda: pool.states().get(N0) not in ("up", "ramp"), "the Master misses the node")
    assert pool.ask(N1, "load", seed=seed, blocks=BLOCKS)["found"] == 0, "its blocks are hidden"
    assert loaded(pool, N0, seed) == 0, "nobody there can ask"
    pool.load(N2, seed + 1)  # others do not notice
    pool.store(N2, seed + 2)
    if long:
        until(lambda: N0 not in pool.states(), "the node is retired")
    pool.links.heal()
    pool.until_up(N0)
    for name in pool.names:
        pool.until_loaded(name, seed)


@pytest.mark.parametrize(("deaf", "mute"), [(True, True), (True, False), (False, True)])
def test_a_node_cut_off_from_one_peer_is_a_miss_for_that_peer_only(
    pool: Cluster, seed: int, deaf: bool, mute: bool
) -> None:
    """deaf: n0 hears nothing of n1. mute: n1 hears nothing of n0. The Master hears both."""
    stored_and_shared(pool, N0, seed)
    if deaf:
        pool.links.cut(N1, N0, one_way=True)
    if mute:
        pool.links.cut(N0, N1, one_way=True)
    first = pool.ask(N1, "load", seed=seed, blocks=BLOCKS)
    assert first["loaded"] < BLOCKS
    assert first["reason"] in ("peer_unreachable", "timed_out")
    until(lambda: pool.ask(N1, "stats")["peer_breaks"] > 0, "n1 avoids the peer")
    reported = pool.ask(N1, "load", seed=seed, blocks=BLOCKS)
    assert (reported["loaded"], reported["reason"]) == (0, "peer_unreachable")
    for name in (N0, N2):
        pool.load(name, seed)  # others do not notice
    pool.store(N1, seed + 1)  # nor does its own node
    assert pool.states()[N0] in ("up", "ramp"), "one host's word is not enough"
    pool.links.heal()
    pool.until_loaded(N1, seed)


def test_a_node_that_two_hosts_report_is_suspect_although_the_master_hears_it(pool: Cluster, seed: int) -> None:
    stored_and_shared(pool, N0, seed)
    pool.links.cut(N0, N1)
    pool.links.cut(N0, N2)

    def reported() -> bool:
        for name in (N1, N2):
            loaded(pool, name, seed)
        return pool.states()[N0] == "suspect"

    until(reported, "two hosts' word counts for all")
    assert pool.ask(N1, "load", seed=seed, blocks=BLOCKS)["found"] == 0, "hidden"
    pool.links.heal()
    pool.until_up(N0)
    for name in pool.names:
        pool.until_loaded(name, seed)


def test_writes_to_nodes_that_vanish_are_given_up_and_their_room_comes_back(pool: Cluster, seed: int) -> None:
    """A worker without a node client writes to others over a thin link; two of them go out of its reach."""
    far = pool.worker(FAR)
    pool.links.thin(FAR, "40mbit")  # so that it is in the middle of something
    pool.churn(far, seed=seed, for_s=5, first=seed)
    time.sleep(1.5)
    pool.links.cut(FAR, N0)
    pool.links.cut(N1, FAR, one_way=True)
    done = far.hear()
    print(f"\nseed {seed}:", done)
    until(lambda: far.ask("store", seed=seed + 99, blocks=BLOCKS)["stored"] == BLOCKS, "it stores where it can")
    assert far.ask("load", seed=seed + 99, blocks=BLOCKS)["nodes"] == [N2]
    assert far.ask("stats")["peer_breaks"], (seed, done)
    pool.links.heal()
    pool.until_up()
    until(lambda: held(pool) == 0, "nothing is held for writes that were given up")
    for number in range(CHURN_CHAINS):
        pool.ask(N0, "load", seed=seed + number, blocks=CHURN_BLOCKS_MAX)


def held(pool: Cluster) -> int:
    """Reservations and quarantined bytes, as the Master counts them."""
    status = pool.ask(MASTER, "status")
    segments = [segment for node in status["nodes"] for segment in node["segments"]]
    return int(status["reservations"]) + sum(int(segment["quarantined_bytes"]) for segment in segments)


@pytest.mark.parametrize("how", ["lossy", "thin", "lossy and thin"])
def test_poor_links_cost_time_and_hits_but_nothing_else(pool: Cluster, seed: int, how: str) -> None:
    for name in pool.names:
        if "lossy" in how:
            pool.links.lossy(name, 3)
        if "thin" in how:
            pool.links.thin(name, "40mbit")
    workers = [pool.worker(name) for name in pool.names]
    pool.churn(*workers, seed=seed, for_s=5)
    done = [worker.hear() for worker in workers]
    print(f"\nseed {seed}:", *done, sep="\n")
    assert all(answer["stored"] + answer["loaded"] for answer in done), (seed, done)
    pool.links.heal()
    pool.until_up()


def test_a_late_peer_and_a_late_master_are_waited_for_within_the_deadline(pool: Cluster, seed: int) -> None:
    """n0's data port is 60 ms away, its way to the Master 40 ms."""
    data, master = (pool.links.address(N0), DATA_PORT), (pool.links.address(MASTER), pool.master.grpc_port)
    with late(pool.links, N0, 7_001, data, 0.06) as far, late(pool.links, N0, 7_002, master, 0.04) as up:
        pool.stop_node(N0)
        pool.start_node(
            N0, "--data-advertise", f"{pool.links.address(N0)}:7001", master=f"{pool.links.address(N0)}:7002"
        )
        try:
            pool.until_up()
            stored_and_shared(pool, N0, seed)
            assert far.carried_bytes >= BLOCKS * BLOCK_BYTES
            assert up.carried_bytes
            workers = [pool.worker(name) for name in pool.names]
            pool.churn(*workers, seed=seed, for_s=3)
            done = [worker.hear() for worker in workers]
            print(f"\nseed {seed}:", *done, sep="\n")
            assert all(answer["loaded"] for answer in done), (seed, done)
            far.delay_s = 5.0
            short = pool.ask(N1, "load", seed=seed, blocks=BLOCKS)
            assert (short["loaded"], short["reason"]) in ((0, "peer_unreachable"), (0, "timed_out"))
        finally:
            pool.stop_node(N0)
            pool.start_node(N0)


def late(network: Network, host: str, port: int, target: tuple[str, int], delay_s: float) -> Relay:
    """A relay on this host."""

    def lead() -> socket.socket:
        end = network.socket(host)
        end.settimeout(COME_ABOUT_S)
        end.connect(target)
        end.settimeout(None)
        return end

    listener = network.socket(host)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((network.address(host), port))
    return Relay(listener, lead, delay_s)


def test_a_data_port_that_only_its_own_host_reaches_is_refused_at_start(pool: Cluster, tmp_path: Path) -> None:
    words = ["--master", pool.master.address, "--segment-dir", str(tmp_path), "--node-id", "n9", "--plaintext"]
    words += ["--segment-bytes", "4MiB", "--slab-bytes", "1MiB", "--socket-path", str(tmp_path / "node.sock")]
    words += ["--data-listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    done = subprocess.run(
        [*pool.links.inside(N0), sys.executable, "-m", "kvpool_client", "serve", *words],
        capture_output=True,
        text=True,
        timeout=15,
        check=False,
    )
    assert done.returncode == 1
    assert "data_advertise" in done.stderr
    assert "n9" not in pool.states()
