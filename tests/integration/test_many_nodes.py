"""Several nodes on one machine, each with a segment of its own: one pool for all their workers.

Each worker of host_worker.py compares every byte and its calls' times itself; if anything is wrong, it ends.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from integration.cluster_world import BLOCKS, MASTER, Cluster, Shared, lent, until
from integration.host_worker import BLOCK_BYTES, BLOCK_ROOM, CHURN_BLOCKS_MAX, CHURN_CHAINS

pytestmark = pytest.mark.timeout(60)
N0, N1, N2, N3 = "n0", "n1", "n2", "n3"


@pytest.fixture
def seed() -> int:
    """Of chains that no other test has; a failure shows it."""
    return random.SystemRandom().randrange(1_000, 1 << 30)


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    one = Shared(lambda: Cluster(N0, N1, N2))
    yield one
    one.close()


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three nodes without anything on them."""
    with Cluster(N0, N1, N2) as pool, lent(pool, request):
        yield pool


@pytest.fixture
def pool(shared: Shared, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three nodes that are up, and are so again afterwards; other tests' chains may lie there."""
    with lent(shared.get(), request) as pool:
        yield pool
    if not pool.failed:
        pool.until_up()
        pool.sound()


def loaded(pool: Cluster, at: str, seed: int, blocks: int = BLOCKS, replicas: int = 1) -> int:
    """Blocks of a chain that a worker beside this node gets now."""
    return pool.ask(at, "load", seed=seed, blocks=blocks, replicas=replicas)["loaded"]


def test_a_chain_that_its_node_has_no_room_for_lies_on_others_too(seed: int) -> None:
    """First on the writer's own node, then elsewhere; what lies on two nodes is loaded in one call."""
    blocks = 100
    with Cluster(N0, N1, node_flags=("--segment-bytes", "8MiB")) as pool:
        assert blocks * BLOCK_ROOM > 8 << 20
        assert pool.ask(N0, "store", seed=seed, blocks=BLOCKS)["stored"] == BLOCKS
        assert pool.used_bytes()[N1] == 0, "its own node first"
        for some in (blocks // 2, blocks):
            assert pool.ask(N0, "store", seed=seed, blocks=some)["reason"] == ""
        for name in (MASTER, N0, N1):
            answer = pool.ask(name, "load", seed=seed, blocks=blocks)
            assert (answer["loaded"], answer["nodes"]) == (blocks, [N0, N1])


def test_a_worker_without_a_node_client_stores_and_loads(pool: Cluster, seed: int) -> None:
    assert pool.ask(MASTER, "store", seed=seed, blocks=BLOCKS)["stored"] == BLOCKS
    for name in (MASTER, *pool.names):
        pool.load(name, seed)
    stats = pool.ask(MASTER, "stats")
    assert stats["remote_stored_bytes"] == stats["remote_loaded_bytes"] == BLOCKS * BLOCK_BYTES


def test_a_node_killed_is_a_miss_for_all_until_its_next_life(pool: Cluster, seed: int) -> None:
    for number, name in enumerate(pool.names):
        pool.store(name, seed + number)
    pool.load(N1, seed)
    pool.kill_node(N0)
    short = pool.ask(N1, "load", seed=seed, blocks=BLOCKS)
    assert short["loaded"] == 0, "whether the Master knows yet, or not"
    until(lambda: pool.ask(N2, "load", seed=seed, blocks=BLOCKS)["found"] == 0, "its blocks are hidden")
    pool.load(N2, seed + 1)  # others do not notice
    pool.start_node(N0)
    pool.until_up()
    for name in pool.names:
        pool.until_loaded(name, seed)


def test_a_node_restarted_empty_lost_its_own_blocks_and_no_others(pool: Cluster, seed: int) -> None:
    for number, name in enumerate(pool.names):
        pool.store(name, seed + number)
    pool.stop_node(N0)
    pool.start_node(N0, "--discard")
    pool.until_up()
    pool.load(N1, seed)  # a file that was kept is adopted
    pool.stop_node(N0)
    assert N0 not in pool.states(), "it retired"
    pool.start_node(N0)
    pool.until_up()
    assert loaded(pool, N1, seed) == 0
    for number in (1, 2):
        pool.load(N0, seed + number)
    pool.store(N0, seed)
    pool.load(N1, seed)


def test_replicas_outlive_the_node_of_their_writer(pool: Cluster, seed: int) -> None:
    before = sum(pool.used_bytes().values())
    assert pool.ask(N0, "store", seed=seed, blocks=BLOCKS, replicas=2)["stored"] == BLOCKS
    until(lambda: sum(pool.used_bytes().values()) - before >= 2 * BLOCKS * BLOCK_ROOM, "another node has a copy of all")
    time.sleep(0.5)  # the last of it is confirmed
    pool.kill_node(N0)
    for name in (N1, N2):
        pool.until_loaded(name, seed, replicas=2)
    pool.start_node(N0)
    pool.until_up()


def test_what_is_hit_often_from_afar_comes_near(seed: int) -> None:
    with Cluster(N0, N1, master_flags=("--core-copy-hits-min", "2")) as pool:
        pool.store(N0, seed)

        def near() -> bool:
            pool.load(N1, seed)
            return pool.used_bytes()[N1] >= BLOCKS * BLOCK_ROOM

        until(near, "n1 has a copy")
        time.sleep(0.5)  # the last of it is confirmed
        afar = pool.ask(N1, "stats")["remote_loaded_bytes"]
        pool.load(N1, seed)
        assert pool.ask(N1, "stats")["remote_loaded_bytes"] == afar, "its own copy is preferred"
        pool.kill_node(N0)
        pool.until_loaded(N1, seed)


def test_a_drain_under_load_moves_what_there_is_room_for(fresh: Cluster, seed: int) -> None:
    pool = fresh
    kept = [seed + number for number in range(4)]
    for number in kept:
        pool.store(N0, number)
    workers = [pool.worker(name, 1) for name in pool.names]
    pool.churn(*workers, seed=seed, for_s=8)
    time.sleep(1)
    pool.ask(MASTER, "drain", node=N0)
    until(lambda: pool.states()[N0] == "drained", "the node has nothing that anybody waits for", 30)
    pool.stop_node(N0)
    for number in kept:
        for name in (N1, N2):
            pool.load(name, number)
    done = [worker.hear() for worker in workers]
    assert all(answer["loaded"] for answer in done), (seed, done)
    pool.start_node(N0, "--discard")
    until(lambda: pool.states().get(N0) == "drained", "still drained, in its next life")
    until(lambda: pool.ask(N0, "store", seed=seed + 9, blocks=BLOCKS)["stored"] == BLOCKS, "on another node")
    assert N0 not in pool.ask(N0, "load", seed=seed + 9, blocks=BLOCKS)["nodes"]
    pool.ask(MASTER, "undrain", node=N0)
    pool.until_up()


def test_a_drain_without_room_loses_only_what_had_none(seed: int) -> None:
    """Two full nodes: one is drained all the same, and what the other keeps is right."""
    with Cluster(N0, N1, node_flags=("--segment-bytes", "8MiB")) as pool:
        for name, numbers in ((N0, range(3)), (N1, range(3, 6))):
            for number in numbers:
                pool.ask(name, "store", seed=seed + number, blocks=BLOCKS)
        pool.ask(MASTER, "drain", node=N0)
        until(lambda: pool.states()[N0] == "drained", "drained, moved or not", 30)
        pool.stop_node(N0)
        until(lambda: pool.states().get(N0) in (None, "suspect"), "the Master knows")
        found = [loaded(pool, N1, seed + number) for number in range(6)]
        assert any(found[3:]), (seed, found)


def test_the_master_dies_under_load_and_its_next_life_knows_what_all_nodes_hold(pool: Cluster, seed: int) -> None:
    """Its capabilities have a new key; those of its former life go on for reading, as its leases do."""
    for number, name in enumerate(pool.names):
        pool.store(name, seed + number)
    workers = [pool.worker(name, 1) for name in pool.names]
    pool.churn(*workers, seed=seed, for_s=6)
    time.sleep(2)
    pool.kill_master()
    pool.start_master(pool.master.grpc_port)
    done = [worker.hear() for worker in workers]
    print(f"\nseed {seed}:", *done, sep="\n")
    assert all(answer["loaded"] for answer in done), (seed, done)
    pool.until_up()
    for number in range(len(pool.names)):
        for name in pool.names:
            pool.until_loaded(name, seed + number)


def test_eight_workers_on_four_nodes_share_everything_while_a_node_dies(seed: int) -> None:
    """No wrong byte, no late call, no exception; afterwards all of them load what any of them stored."""
    with Cluster(N0, N1, N2, N3) as pool:
        workers = [pool.worker(name, number) for name in pool.names for number in (0, 1)]
        pool.churn(*workers, seed=seed, for_s=10)
        time.sleep(4)
        pool.kill_node(N1)
        time.sleep(2)
        pool.start_node(N1)
        done = [worker.hear() for worker in workers]
        print(f"\nseed {seed}:", *done, sep="\n")
        assert all(answer["loaded"] and answer["stored"] for answer in done), (seed, done)
        remote = [worker.ask("stats")["remote_loaded_bytes"] for worker in workers]
        assert all(remote), (seed, remote)
        pool.until_up()
        for number in range(CHURN_CHAINS):
            found = [loaded(pool, name, number, CHURN_BLOCKS_MAX) for name in pool.names]
            assert len(set(found)) == 1, f"seed {seed}: chain {number}, {found} on {pool.names}"
