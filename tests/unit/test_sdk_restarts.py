"""The SDK when the Master or the node client dies and comes back, at rest and in the middle of a call."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest

from kvpool_client import Contiguous, KVPool, Namespace
from kvpool_master.core import messages as m
from kvpool_proto.errors import StaleEpoch, UnknownReservation
from unit.sdk_double import PoolDouble
from unit.sdk_world import Hooked, chain_of, data_of, empty, spec_of

STEP_MS = 200
"""More than the first waits of the breakers, less than the least lease over all the steps a test takes."""


def restart_master(double: PoolDouble, **given: int) -> None:
    double.stop_master()
    double.start_master(double.epoch + 1, **given)


def found_again(double: PoolDouble, space: Namespace, blocks: int) -> Any:
    """The first hit after a restart; nothing else is done for it."""
    end_s = time.perf_counter() + 20
    while (hit := space.lookup(chain_of(blocks))).reason == "unreachable":
        assert time.perf_counter() < end_s
        double.now_ms += STEP_MS
        threading.Event().wait(0.005)
    return hit


def loads(space: Namespace, hit: Any, blocks: int) -> str:
    """Why not all `blocks` of chain_of(blocks) were loaded; empty: they were, and are right."""
    target = empty(blocks)
    loaded = space.load(hit, Contiguous(target))
    assert (target[: loaded.blocks] == data_of(blocks)[: loaded.blocks]).all()
    return loaded.reason if loaded.blocks < blocks else ""


# -- the Master ----------------------------------------------------------------------------------------


def test_what_was_stored_is_hit_after_a_restart_of_the_master(
    pool_double: PoolDouble, sdk_pool: KVPool, sdk_space: Namespace
) -> None:
    sdk_space.store(chain_of(40), Contiguous(data_of(40)))
    worker_id = pool_double.called("Reserve")[-1].worker_id
    pool_double.stop_master()
    assert sdk_space.lookup(chain_of(40)).reason == "unreachable"
    assert sdk_space.store(chain_of(40), Contiguous(data_of(40))).reason == "unreachable"
    pool_double.start_master(epoch=11)
    hit = found_again(pool_double, sdk_space, 40)
    assert (hit.blocks, hit.reason, hit.epoch) == (40, "", 11)
    assert loads(sdk_space, hit, 40) == ""
    stored = sdk_space.store(chain_of(5, 2), Contiguous(data_of(5, 2)))
    assert (stored.stored_blocks, stored.reason) == (5, "")
    assert sdk_pool.stats().master_breaks == 1
    gc.collect()
    assert pool_double.called("Reserve")[-1].worker_id != worker_id
    assert not pool_double.segment.held_by(worker_id)  # whatever was being written under it has ended


def test_a_pool_that_holds_nothing_yet_survives_a_restart_of_the_master(
    pool_double: PoolDouble, sdk_pool: KVPool, sdk_space: Namespace
) -> None:
    assert pool_double.segment.slabs_bound  # ahead of the first store: there is an inventory, of nothing
    restart_master(pool_double)
    assert found_again(pool_double, sdk_space, 4).reason == "unknown_key"
    assert sdk_space.store(chain_of(4), Contiguous(data_of(4))).stored_blocks == 4


def test_a_hit_of_the_former_epoch_is_loaded_until_its_lease_ends(
    pool_double: PoolDouble, sdk_pool: KVPool, sdk_space: Namespace
) -> None:
    sdk_space.store(chain_of(4), Contiguous(data_of(4)))
    old = sdk_space.lookup(chain_of(4))
    restart_master(pool_double)
    assert loads(sdk_space, old, 4) == ""  # through the mapping of before
    new = found_again(pool_double, sdk_space, 4)
    assert loads(sdk_space, new, 4) == ""
    assert loads(sdk_space, old, 4) == ""  # through the new one
    assert sdk_space.renew(old) == "stale_epoch"
    assert sdk_space.renew(new) == ""
    assert loads(sdk_space, old, 4) == ""
    pool_double.now_ms = old.deadline_ms
    assert loads(sdk_space, old, 4) == "lease_expired"
    old.release()
    assert sdk_pool.flush(20_000)


def test_bad_bytes_are_reported_by_the_handle_of_today(
    pool_double: PoolDouble, sdk_pool: KVPool, sdk_space: Namespace
) -> None:
    sdk_space.store(chain_of(4), Contiguous(data_of(4)))
    old = sdk_space.lookup(chain_of(4))
    restart_master(pool_double)
    assert loads(sdk_space, found_again(pool_double, sdk_space, 4), 4) == ""
    pool_double.segment.slots(int(old.extents.first_slot[0]), 4, sdk_space.spec.slot_bytes)[2, 9] ^= 1
    assert loads(sdk_space, old, 4) == "verify_failed"
    assert sdk_pool.flush(20_000)
    assert sdk_pool.stats().bad_blocks_confirmed == 1
    assert sdk_space.lookup(chain_of(4)).blocks == 2


def test_a_master_that_restarts_in_the_middle_of_a_store_ends_it(pool_double: PoolDouble) -> None:
    """The piece that was complete comes back with the inventory; nothing is written under the former epoch."""
    moves: list[int] = []

    def restart() -> None:
        moves.append(1)
        if len(moves) == 2:
            restart_master(pool_double)

    with pool_double.connect(device=Hooked(restart), piece_bytes=2 * 8192) as pool:
        space = pool.namespace(spec_of())
        stored = space.store(chain_of(6), Contiguous(data_of(6)))
        assert (stored.stored_blocks, stored.reason, len(moves)) == (0, "stale_epoch", 2)
        assert pool_double.called("Commit") == []
        hit = found_again(pool_double, space, 6)
        assert (hit.blocks, loads(space, hit, 2)) == (2, "")
        assert pool.flush(20_000)
        aborts = pool_double.called("Abort")
        assert [(abort.writer, abort.epoch) for abort in aborts] == [(True, 10)]


def test_a_commit_that_is_not_answered_is_not_stored_but_comes_back(pool_double: PoolDouble) -> None:
    with pool_double.connect(device=Hooked(pool_double.stop_master), timeout_ms=500) as pool:
        space = pool.namespace(spec_of())
        stored = space.store(chain_of(3), Contiguous(data_of(3)))
        assert (stored.stored_blocks, stored.reason) == (0, "unreachable")
        assert space.lookup(chain_of(3)).reason == "unreachable"
        pool_double.start_master(epoch=11)
    with pool_double.connect() as pool:
        space = pool.namespace(spec_of())
        hit = space.lookup(chain_of(3))
        assert (hit.blocks, loads(space, hit, 3)) == (3, "")


def test_the_master_is_told_of_what_epoch_it_is_asked(pool_double: PoolDouble, sdk_space: Namespace) -> None:
    sdk_space.store(chain_of(4), Contiguous(data_of(4)))
    hit = sdk_space.lookup(chain_of(4))
    sdk_space.renew(hit)
    assert [request.epoch for name in ("Commit", "Renew") for request in pool_double.called(name)] == [10, 10]


@pytest.mark.parametrize("error", [StaleEpoch("of before"), UnknownReservation("never heard of")])
def test_a_store_whose_reservation_is_gone_says_so_and_the_next_one_begins_anew(
    pool_double: PoolDouble, sdk_pool: KVPool, sdk_space: Namespace, error: Exception
) -> None:
    def refuse(_: Any) -> None:
        raise error

    pool_double.instead["Commit"] = refuse
    stored = sdk_space.store(chain_of(4), Contiguous(data_of(4)))
    assert (stored.stored_blocks, stored.reason) == (0, error.reason.lower())  # type: ignore[attr-defined]
    assert sdk_pool.flush(20_000)  # the abort is sent
    del pool_double.instead["Commit"]
    assert sdk_space.store(chain_of(4), Contiguous(data_of(4))).stored_blocks == 4


def test_nothing_is_stored_while_the_graces_of_the_former_epoch_run(
    pool_double: PoolDouble, sdk_pool: KVPool, sdk_space: Namespace
) -> None:
    sdk_space.store(chain_of(4), Contiguous(data_of(4)))
    restart_master(pool_double, grace_ms=60_000)
    assert found_again(pool_double, sdk_space, 4).blocks == 4  # reads need no grace
    stored = sdk_space.store(chain_of(5, 2), Contiguous(data_of(5, 2)))
    assert (stored.stored_blocks, stored.reason) == (0, "starting")
    pool_double.now_ms += 60_000
    pool_double.apply(m.Tick())
    assert sdk_space.store(chain_of(5, 2), Contiguous(data_of(5, 2))).stored_blocks == 5


def test_a_purge_before_the_restart_is_a_purge_after_it(
    pool_double: PoolDouble, sdk_pool: KVPool, sdk_space: Namespace
) -> None:
    sdk_space.store(chain_of(4), Contiguous(data_of(4)))
    assert sdk_space.purge().blocks == 4
    sdk_space.store(chain_of(2), Contiguous(data_of(2)))
    restart_master(pool_double)
    assert found_again(pool_double, sdk_space, 4).blocks == 2


# -- the node client -----------------------------------------------------------------------------------


def test_data_goes_on_while_the_node_client_is_away_and_when_it_is_back(
    pool_double: PoolDouble, sdk_pool: KVPool, sdk_space: Namespace
) -> None:
    sdk_space.store(chain_of(4), Contiguous(data_of(4)))
    worker_id = pool_double.called("Reserve")[-1].worker_id
    hit = sdk_space.lookup(chain_of(4))
    pool_double.stop_node()
    assert loads(sdk_space, hit, 4) == ""
    assert sdk_space.store(chain_of(4, 2), Contiguous(data_of(4, 2))).stored_blocks == 4
    pool_double.start_node()
    assert loads(sdk_space, hit, 4) == ""
    assert sdk_space.store(chain_of(4, 3), Contiguous(data_of(4, 3))).stored_blocks == 4
    assert {request.worker_id for request in pool_double.called("Reserve")} == {worker_id}  # no new Hello
    assert pool_double.segment.held_by(worker_id)
    for seed in (1, 2, 3):
        assert sdk_space.lookup(chain_of(4, seed)).blocks == 4


def test_the_socket_reconnects_and_a_dead_one_is_not_hammered(
    pool_double: PoolDouble, sdk_pool: KVPool, sdk_space: Namespace
) -> None:
    sdk_space.store(chain_of(4), Contiguous(data_of(4)))
    hit = sdk_space.lookup(chain_of(4))
    pool_double.segment.slots(int(hit.extents.first_slot[0]), 4, sdk_space.spec.slot_bytes)[1, 7] ^= 1
    pool_double.stop_node()
    for _ in range(20):
        assert loads(sdk_space, hit, 4) == "verify_failed"
        assert sdk_pool.flush(20_000)
    assert (sdk_pool.stats().node_breaks, sdk_pool.stats().bad_blocks_confirmed) == (1, 0)
    pool_double.start_node()
    end_s = time.perf_counter() + 20
    while sdk_pool.stats().bad_blocks_confirmed == 0:
        assert time.perf_counter() < end_s
        pool_double.now_ms += STEP_MS
        assert loads(sdk_space, hit, 4) == "verify_failed"
        assert sdk_pool.flush(20_000)
    assert sdk_space.lookup(chain_of(4)).blocks == 1


def test_a_node_client_on_a_new_file_is_mapped_anew(
    pool_double: PoolDouble, sdk_pool: KVPool, sdk_space: Namespace
) -> None:
    """A store that reserved under the former number does not write to the new file: nobody holds its lock there."""
    sdk_space.store(chain_of(4), Contiguous(data_of(4)))
    old = sdk_space.lookup(chain_of(4))
    worker_id = pool_double.called("Reserve")[-1].worker_id
    pool_double.stop_node()
    pool_double.start_node(lost=True)
    assert sdk_space.lookup(chain_of(4)).blocks == 0
    stored = sdk_space.store(chain_of(4), Contiguous(data_of(4)))
    assert (stored.stored_blocks, stored.reason) == (0, "segment_elsewhere")
    assert pool_double.called("Reserve")[-1].worker_id == worker_id
    assert sdk_pool.flush(20_000)
    assert sdk_space.store(chain_of(4), Contiguous(data_of(4))).stored_blocks == 4
    assert pool_double.called("Reserve")[-1].worker_id != worker_id
    assert loads(sdk_space, sdk_space.lookup(chain_of(4)), 4) == ""
    assert loads(sdk_space, old, 4) == "segment_elsewhere"
