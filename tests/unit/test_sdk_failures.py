"""sdk.py, store.py, node_link.py on a pool in this process: what it says when it cannot."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvpool_client import Contiguous, KVPool, Namespace
from kvpool_master.core import messages as m
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import LimitReached
from kvpool_proto.security import PLAINTEXT
from unit.sdk_double import NODE, PoolDouble
from unit.sdk_world import Hooked, chain_of, data_of, empty, spec_of

# -- what it says when it cannot -----------------------------------------------------------------------


def test_a_flipped_byte_costs_the_rest_and_the_block_goes(
    pool_double: PoolDouble, sdk_pool: KVPool, sdk_space: Namespace
) -> None:
    chain, data = chain_of(8), data_of(8)
    sdk_space.store(chain, Contiguous(data))
    hit = sdk_space.lookup(chain)
    where = hit.extents
    assert len(where) == 1
    pool_double.segment.slots(int(where.first_slot[0]), 8, sdk_space.spec.slot_bytes)[5, 100] ^= 1
    target = empty(8)
    loaded = sdk_space.load(hit, Contiguous(target))
    assert (loaded.blocks, loaded.reason) == (5, "verify_failed")
    assert (target[:5] == data[:5]).all()
    assert sdk_pool.flush(20_000)
    assert (sdk_pool.stats().verify_failures, sdk_pool.stats().bad_blocks_confirmed) == (1, 1)
    assert sdk_space.lookup(chain).blocks == 5
    assert sdk_space.store(chain, Contiguous(data)).stored_blocks == 1  # just the hole
    assert sdk_space.lookup(chain).blocks == 8


def test_a_lease_that_ran_out_is_a_miss(pool_double: PoolDouble, sdk_space: Namespace) -> None:
    sdk_space.store(chain_of(4), Contiguous(data_of(4)))
    hit = sdk_space.lookup(chain_of(4))
    assert sdk_space.renew(hit) == ""
    pool_double.now_ms = hit.deadline_ms
    target = empty(4)
    assert sdk_space.load(hit, Contiguous(target)).reason == "lease_expired"
    assert not target.any()
    assert sdk_space.renew(hit) == "lease_unknown"


def test_times_count_from_before_the_request(pool_double: PoolDouble, sdk_space: Namespace) -> None:
    sdk_space.store(chain_of(4), Contiguous(data_of(4)))

    def slow(_: Any) -> None:
        pool_double.now_ms += 3_000

    pool_double.instead["Lookup"] = slow
    began_ms = pool_double.now_ms
    hit = sdk_space.lookup(chain_of(4))
    assert hit.deadline_ms == began_ms + pool_double.settings.lease_min_ms
    pool_double.instead["Reserve"] = lambda _: setattr(
        pool_double, "now_ms", pool_double.now_ms + pool_double.settings.write_min_ms
    )
    stored = sdk_space.store(chain_of(4, 2), Contiguous(data_of(4)))
    assert (stored.stored_blocks, stored.reason) == (0, "write_expired")


def test_a_store_stops_at_its_deadline_and_keeps_what_it_wrote(pool_double: PoolDouble, tmp_path: Path) -> None:
    def late() -> None:
        pool_double.now_ms += 600

    with pool_double.connect(device=Hooked(late), piece_bytes=2 * 8192) as pool:
        space = pool.namespace(spec_of())
        stored = space.store(chain_of(6), Contiguous(data_of(6)), timeout_ms=1_000)
        assert (stored.stored_blocks, stored.reason) == (4, "timed_out")
        assert space.lookup(chain_of(6)).blocks == 4
        assert pool.flush(20_000)
    assert pool_double.core.snapshot(pool_double.now_ms).reservations == 0


def test_a_new_epoch_stops_a_store_between_pieces(pool_double: PoolDouble) -> None:
    pieces: list[int] = []

    def fence() -> None:
        pieces.append(1)
        pool_double.node.obey(pool_double.epoch + 1)

    with pool_double.connect(device=Hooked(fence), piece_bytes=2 * 8192) as pool:
        space = pool.namespace(spec_of())
        stored = space.store(chain_of(6), Contiguous(data_of(6)))
        assert (stored.stored_blocks, stored.reason, len(pieces)) == (0, "stale_epoch", 1)
        assert pool.flush(20_000)
    assert [request.writer for request in pool_double.called("Abort")] == [True]
    assert pool_double.called("Commit") == []


def test_somebody_else_writes(pool_double: PoolDouble, sdk_space: Namespace) -> None:
    chain = chain_of(5)
    pool_double.apply(m.Reserve(sdk_space.id, b"r" * 16, m.Parent.ROOT, chain[: 3 * 12], 0, 1, (NODE,), 9))
    stored = sdk_space.store(chain, Contiguous(data_of(5)))
    assert (stored.stored_blocks, stored.being_written_blocks, stored.reason) == (2, 3, "being_written")
    hit = sdk_space.lookup(chain)
    assert (hit.blocks, hit.reason) == (0, "being_written")


def test_a_full_pool_takes_the_head_that_fits(tmp_path: Path) -> None:
    double = PoolDouble(tmp_path, slabs=2)
    with double.connect() as pool:
        space = pool.namespace(spec_of())
        room = 2 * 31
        stored = space.store(chain_of(100), Contiguous(data_of(100)))
        assert 0 < stored.stored_blocks <= room
        assert stored.reason in ("no_space", "reserve_share", "slab_pending")
        assert space.lookup(chain_of(100)).blocks == stored.stored_blocks
    double.stop()


def test_blocks_lost_between_write_and_commit(pool_double: PoolDouble) -> None:
    with pool_double.connect(device=Hooked(lambda: pool_double.apply(m.Purge(spec_of().id)))) as pool:
        space = pool.namespace(spec_of())
        stored = space.store(chain_of(3), Contiguous(data_of(3)))
        assert stored.stored_blocks == 0
        assert stored.reason in ("lost", "reservation_ended", "reservation_unknown")


def test_bytes_that_change_while_they_are_loaded(pool_double: PoolDouble) -> None:
    slots: list[Any] = []
    with pool_double.connect(
        device=Hooked(lambda: [slot.__setitem__((1, 7), slot[1, 7] ^ 1) for slot in slots])
    ) as pool:
        space = pool.namespace(spec_of())
        space.store(chain_of(3), Contiguous(data_of(3)))
        hit = space.lookup(chain_of(3))
        slots.append(pool_double.segment.slots(int(hit.extents.first_slot[0]), 3, space.spec.slot_bytes))
        loaded = space.load(hit, Contiguous(empty(3)))
        assert (loaded.blocks, loaded.reason) == (1, "verify_failed")


# -- when the others are away --------------------------------------------------------------------------


def test_nobody_is_there(tmp_path: Path) -> None:
    """No Master, no node client: nothing raises, and after the first call nothing waits."""
    with KVPool.connect("127.0.0.1:1", str(tmp_path / "none.sock"), timeout_ms=300, security=PLAINTEXT) as pool:
        space = pool.namespace(spec_of())
        began_s = time.perf_counter()
        for _ in range(100):
            hit = space.lookup(chain_of(4))
            assert (hit.blocks, hit.reason) == (0, "unreachable")
            assert space.load(hit, Contiguous(empty(4))).blocks == 0
            assert space.store(chain_of(4), Contiguous(data_of(4))).reason == "node_unreachable"
            assert space.peek(chain_of(4)).reason == "unreachable"
        assert space.remove(chain_of(4)).reason == "unreachable"
        assert space.purge().reason == "unreachable"
        assert space.renew(hit) == "unreachable"
        assert time.perf_counter() - began_s < 3.0  # 400 calls; one deadline is 0.3 s
        stats = pool.stats()
        assert (dict(stats.lookups_short), dict(stats.stores_short)) == (
            {"unreachable": 100},
            {"node_unreachable": 100},
        )
        assert (stats.master_breaks, stats.node_breaks) == (1, 1)


def test_nothing_raises_after_close(pool_double: PoolDouble) -> None:
    pool = pool_double.connect()
    space = pool.namespace(spec_of())
    space.store(chain_of(4), Contiguous(data_of(4)))
    hit = space.lookup(chain_of(4))
    for _ in range(2):
        pool.close()
        assert space.lookup(chain_of(4)).reason == "unreachable"
        assert space.load(hit, Contiguous(empty(4))).blocks == 0
        assert space.store(chain_of(4, 2), Contiguous(data_of(4))).reason == "node_unreachable"
        assert (space.renew(hit), space.purge().reason) == ("unreachable", "unreachable")
        hit.release()
    assert (pool.stats().stores, dict(pool.stats().loads_short)) == (3, {"node_unreachable": 2})


def test_an_answer_of_a_former_epoch_is_a_miss(pool_double: PoolDouble, sdk_space: Namespace) -> None:
    sdk_space.store(chain_of(4), Contiguous(data_of(4)))
    assert sdk_space.lookup(chain_of(4)).blocks == 4
    pool_double.instead["Lookup"] = lambda _: pb.LookupReply(hit_blocks=4, epoch=pool_double.epoch - 1)
    hit = sdk_space.lookup(chain_of(4))
    assert (hit.blocks, hit.reason) == (0, "stale_epoch")


def test_the_namespace_is_opened_again_when_it_is_forgotten(pool_double: PoolDouble, sdk_space: Namespace) -> None:
    pool_double.core.namespaces.clear()
    assert sdk_space.lookup(chain_of(4)).reason == "unknown_key"
    assert len(pool_double.called("OpenNamespace")) == 2


def test_who_gets_no_answer_takes_the_request_back(pool_double: PoolDouble) -> None:
    """An abort and a release that overtake what they end: nothing stays reserved or leased."""
    go = threading.Event()
    with pool_double.connect(timeout_ms=200) as hasty:
        space = hasty.namespace(spec_of())
        space.store(chain_of(2), Contiguous(data_of(2)))
        pool_double.instead = dict.fromkeys(("Reserve", "Lookup"), lambda _: go.wait(30) and None)
        stored = space.store(chain_of(4), Contiguous(data_of(4)))
        assert (stored.stored_blocks, stored.reason) == (0, "unreachable")
        assert hasty.flush(20_000)
        assert [request.writer for request in pool_double.called("Abort")] == [True]
    with pool_double.connect(timeout_ms=200) as hasty:
        assert hasty.namespace(spec_of()).lookup(chain_of(2)).reason == "unreachable"
        assert hasty.flush(20_000)
        released = pool_double.called("Release")[-1].lease_ids
        assert list(released) == [pool_double.called("Lookup")[-1].lease_id]
    go.set()
    pool_double.stop_master()  # waits for what it was at
    found = pool_double.core.snapshot(pool_double.now_ms)
    assert (found.leases, found.reservations) == (0, 0)


def test_a_refusal_is_a_reason(pool_double: PoolDouble, sdk_space: Namespace) -> None:
    def refuse(_: Any) -> None:
        raise LimitReached("leases_max")

    pool_double.instead["Lookup"] = pool_double.instead["Reserve"] = refuse
    assert sdk_space.lookup(chain_of(4)).reason == "limit"
    assert sdk_space.store(chain_of(4), Contiguous(data_of(4))).reason == "limit"


@pytest.mark.parametrize("blocks", [3, 9])
def test_answers_that_cannot_be(pool_double: PoolDouble, sdk_space: Namespace, blocks: int) -> None:
    """Extents that do not cover the hit, or lie outside, are a miss: they become addresses."""
    sdk_space.store(chain_of(4), Contiguous(data_of(4)))
    extents = pb.Extents(
        offset=[0], blocks=[blocks], segment=[0], first_slot=[1], part_from=[0], part_to=[1], stamp=[1], stride=[1]
    )
    real = sdk_space.lookup(chain_of(4))
    extents.segment[0] = int(real.extents.segment[0])
    pool_double.instead["Lookup"] = lambda _: pb.LookupReply(
        hit_blocks=4, extents=extents, lease_ms=1_000, epoch=pool_double.epoch
    )
    hit = sdk_space.lookup(chain_of(4))
    assert sdk_space.load(hit, Contiguous(empty(4))).reason == "protocol"
    extents.first_slot[0], extents.blocks[0] = 1 << 31, 4
    hit = sdk_space.lookup(chain_of(4))
    assert sdk_space.load(hit, Contiguous(empty(4))).reason == "protocol"
    extents.segment[0] = 77
    hit = sdk_space.lookup(chain_of(4))
    assert sdk_space.load(hit, Contiguous(empty(4))).reason == "segment_elsewhere"


def test_words_of_a_newer_master_are_no_mistakes(pool_double: PoolDouble, sdk_space: Namespace) -> None:
    """Numbers that this version does not know are reasons, or misses."""
    sdk_space.store(chain_of(4), Contiguous(data_of(4)))
    pool_double.instead["Peek"] = lambda _: pb.PeekReply(
        reason=99,  # type: ignore[arg-type]
        gone=pb.Gone(reason=98, ago_ms=7),  # type: ignore[arg-type]
        epoch=pool_double.epoch,
    )
    peeked = sdk_space.peek(chain_of(4), explain=True)
    assert peeked.gone is not None
    assert (peeked.reason, peeked.gone.reason) == ("reason_99", "reason_98")
    pool_double.instead["Reserve"] = lambda _: pb.ReserveReply(
        answered_blocks=4, run_offset=[0], run_blocks=[4], run_part_from=[0], run_part_to=[1],
        run_state=[300], epoch=pool_double.epoch,  # type: ignore[list-item]
    )  # fmt: skip
    assert sdk_space.store(chain_of(4, 2), Contiguous(data_of(4))).reason == "protocol"


def test_nodes_that_could_not_be_told_of_a_removal_are_named(pool_double: PoolDouble, sdk_space: Namespace) -> None:
    pool_double.instead["Remove"] = lambda _: pb.RemoveReply(removed_blocks=3, nodes_away=["m", "k"])
    removed = sdk_space.remove(chain_of(4))
    assert (removed.blocks, removed.reason, removed.nodes_away) == (3, "", ("m", "k"))
