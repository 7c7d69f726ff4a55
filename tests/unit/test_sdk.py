"""sdk.py, store.py, node_link.py on a pool in this process: what it does, and what it says when it cannot."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvpool_client import ROOT, UNKNOWN, Contiguous, KVPool, Namespace, Rows
from kvpool_client.devices.base import Bytes
from kvpool_client.devices.cpu import CpuDevice
from kvpool_master.core import messages as m
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import (
    BadNamespaceSpec,
    KeyLengthMismatch,
    LimitReached,
    NamespaceDiffers,
    PartOutOfRange,
    SlotTooLarge,
)
from kvpool_proto.namespace import NamespaceSpec
from unit.sdk_double import NODE, PoolDouble

PART_BYTES = 5000


def spec_of(**changes: Any) -> NamespaceSpec:
    given = {"model": "m", "dtype": "uint8", "block_tokens": 16, "part_bytes": PART_BYTES, "key_bytes": 12}
    return NamespaceSpec(**{**given, **changes})


def chain_of(blocks: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(blocks * 12)


def data_of(blocks: int, seed: int = 1) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (blocks, PART_BYTES), dtype=np.uint8)


def empty(blocks: int) -> npt.NDArray[np.uint8]:
    return np.zeros((blocks, PART_BYTES), dtype=np.uint8)


@pytest.fixture
def double(tmp_path: Path) -> Iterator[PoolDouble]:
    double = PoolDouble(tmp_path)
    yield double
    double.stop()


@pytest.fixture
def pool(double: PoolDouble) -> Iterator[KVPool]:
    with double.connect() as pool:
        yield pool


@pytest.fixture
def space(pool: KVPool) -> Namespace:
    return pool.namespace(spec_of())


class Hooked(CpuDevice):
    """Does something after every run that it moved."""

    def __init__(self, then: Any) -> None:
        self.then = then

    def bind(self, layout: Any, part_bytes: int, *, writable: bool) -> Any:
        buffer, then = super().bind(layout, part_bytes, writable=writable), self.then

        class Buffer:
            blocks = buffer.blocks

            def gather(self, first: int, slots: Bytes) -> None:
                buffer.gather(first, slots)
                then()

            def scatter(self, first: int, slots: Bytes) -> None:
                buffer.scatter(first, slots)
                then()

            def rows(self, first: int, blocks: int) -> Bytes | None:
                return buffer.rows(first, blocks)

        return Buffer()


# -- what it does --------------------------------------------------------------------------------------


def test_store_lookup_load_release(double: PoolDouble, pool: KVPool, space: Namespace) -> None:
    chain, data = chain_of(20), data_of(20)
    stored = space.store(chain[: 12 * 15], Contiguous(data))
    assert (stored.stored_blocks, stored.existing_blocks, stored.reason, stored.bytes) == (15, 0, "", 15 * PART_BYTES)
    again = space.store(chain, Contiguous(data))
    assert (again.stored_blocks, again.existing_blocks, again.reason) == (5, 15, "")

    other = np.random.default_rng(5).bytes(12)
    with space.lookup(chain + other, skip=3) as hit:
        assert (len(hit), hit.blocks, hit.reason) == (17, 17, "unknown_key")
        assert int(hit.extents.blocks.sum()) == 17
        target = empty(17)
        loaded = space.load(hit, Contiguous(target))
        assert (loaded.blocks, loaded.reason, loaded.bytes) == (17, "", 17 * PART_BYTES)
        assert (target == data[3:]).all()
        rows = empty(30)
        assert space.load(hit, Rows([rows], np.arange(29, 22, -1)), blocks=7).blocks == 7
        assert (rows[29:22:-1] == data[3:10]).all()
    assert pool.flush(20_000)
    assert double.core.snapshot(double.now_ms).leases == 0
    assert space.load(hit, Contiguous(target)).reason == "lease_expired"

    stats = pool.stats()
    assert (stats.lookups, stats.lookup_blocks, stats.hit_blocks, stats.hit_tokens) == (1, 18, 17, 17 * 16)
    assert (stats.loads, stats.loaded_blocks, stats.loaded_bytes) == (3, 24, 24 * PART_BYTES)
    assert (stats.stores, stats.stored_blocks, stats.existing_blocks) == (2, 20, 15)
    assert (dict(stats.lookups_short), dict(stats.loads_short)) == ({"unknown_key": 1}, {"lease_expired": 1})


def test_the_node_client_hears_what_the_worker_did(double: PoolDouble, pool: KVPool, space: Namespace) -> None:
    space.store(chain_of(5), Contiguous(data_of(5)))
    with space.lookup(chain_of(7)) as hit:
        space.load(hit, Contiguous(empty(5)))
    pool.close()
    ((name, totals),) = double.node.use.totals().items()
    assert name == (space.id.hex()[:8], space.spec.model)
    counts = ("lookups", "lookup_blocks", "hit_blocks", "hit_tokens", "loaded_tokens", "stored_bytes")
    assert [totals[count] for count in counts] == [1, 7, 5, 5 * 16, 5 * 16, 5 * PART_BYTES]
    assert totals["load_us"] > 0
    assert double.node.use.short() == {("lookup", "unknown_key"): 1}


def test_peek_explain_remove_purge(double: PoolDouble, space: Namespace) -> None:
    chain = chain_of(6)
    assert (space.peek(chain).blocks, space.peek(chain).reason) == (0, "unknown_key")
    space.store(chain, Contiguous(data_of(6)))
    assert (space.peek(chain, skip=2).blocks, space.peek(chain).reason) == (6 - 2, "")
    assert double.core.snapshot(double.now_ms).leases == 0
    removed = space.remove(chain, skip=4)
    assert (removed.blocks, removed.reason) == (2, "")
    double.now_ms += 50
    peeked = space.peek(chain, explain=True)
    assert peeked.blocks == 4
    assert peeked.gone is not None
    assert (peeked.gone.reason, peeked.gone.ago_ms) == ("removed", 50)
    assert space.purge().blocks == 4
    assert space.lookup(chain).blocks == 0


def test_every_rank_stores_its_part_and_any_loads_all(double: PoolDouble, pool: KVPool) -> None:
    space = pool.namespace(spec_of(parts=3))
    chain = chain_of(9)
    data = [data_of(9, seed) for seed in range(3)]
    for part in (2, 0):
        stored = space.store(chain, Contiguous(data[part]), parts=part)
        assert (stored.stored_blocks, stored.reason) == (9, "")
        assert space.lookup(chain).reason in ("being_written", "part_missing")
    assert space.store(chain, [Contiguous(one) for one in data]).stored_blocks == 9  # part 1 is all that lacks
    with double.connect() as other:
        ranks = other.namespace(spec_of(parts=3))
        with ranks.lookup(chain) as hit:
            assert hit.blocks == 9
            target = [empty(9) for _ in range(2)]
            loaded = ranks.load(hit, [Contiguous(one) for one in target], part=range(1, 3))
            assert (loaded.blocks, loaded.bytes) == (9, 2 * 9 * PART_BYTES)
            assert (target[0] == data[1]).all()
            assert (target[1] == data[2]).all()


def test_one_reservation_for_all_parts(double: PoolDouble, pool: KVPool) -> None:
    space = pool.namespace(spec_of(parts=4))
    data = [data_of(7, seed) for seed in range(4)]
    stored = space.store(chain_of(7), [Contiguous(one) for one in data])
    assert (stored.stored_blocks, stored.bytes) == (7, 4 * 7 * PART_BYTES)
    commits = double.called("Commit")
    assert [(commit.part_from, commit.part_to, commit.blocks_written, commit.final) for commit in commits] == [
        (0, 4, 7, True)
    ]
    assert len(double.called("Reserve")) == 1
    with space.lookup(chain_of(7)) as hit:
        target = [empty(7) for _ in range(4)]
        assert space.load(hit, [Contiguous(one) for one in target], part=range(4)).blocks == 7
        assert all((one == other).all() for one, other in zip(target, data, strict=True))


def test_chains_that_start_anywhere(pool: KVPool) -> None:
    space = pool.namespace(spec_of(entry="any"))
    chain, data = chain_of(10), data_of(10)
    assert space.store(chain[5 * 12 :], Contiguous(data[5:]), parent=UNKNOWN).stored_blocks == 5
    assert space.lookup(chain[5 * 12 :]).blocks == 5
    assert space.store(chain[: 5 * 12], Contiguous(data[:5]), parent=ROOT).stored_blocks == 5
    tail, more = chain_of(2, 7), data_of(2, 7)
    assert space.store(tail, Contiguous(more), parent=chain[-12:]).stored_blocks == 2
    with space.lookup(tail) as hit:
        target = empty(2)
        assert space.load(hit, Contiguous(target)).blocks == 2
        assert (target == more).all()


# -- what it says when it cannot -----------------------------------------------------------------------


def test_a_flipped_byte_costs_the_rest_and_the_block_goes(double: PoolDouble, pool: KVPool, space: Namespace) -> None:
    chain, data = chain_of(8), data_of(8)
    space.store(chain, Contiguous(data))
    hit = space.lookup(chain)
    where = hit.extents
    assert len(where) == 1
    double.segment.slots(int(where.first_slot[0]), 8, space.spec.slot_bytes)[5, 100] ^= 1
    target = empty(8)
    loaded = space.load(hit, Contiguous(target))
    assert (loaded.blocks, loaded.reason) == (5, "verify_failed")
    assert (target[:5] == data[:5]).all()
    assert pool.flush(20_000)
    assert (pool.stats().verify_failures, pool.stats().bad_blocks_confirmed) == (1, 1)
    assert space.lookup(chain).blocks == 5
    assert space.store(chain, Contiguous(data)).stored_blocks == 1  # just the hole
    assert space.lookup(chain).blocks == 8


def test_a_lease_that_ran_out_is_a_miss(double: PoolDouble, space: Namespace) -> None:
    space.store(chain_of(4), Contiguous(data_of(4)))
    hit = space.lookup(chain_of(4))
    assert space.renew(hit) == ""
    double.now_ms = hit.deadline_ms
    target = empty(4)
    assert space.load(hit, Contiguous(target)).reason == "lease_expired"
    assert not target.any()
    assert space.renew(hit) == "lease_unknown"


def test_times_count_from_before_the_request(double: PoolDouble, space: Namespace) -> None:
    space.store(chain_of(4), Contiguous(data_of(4)))

    def slow(_: Any) -> None:
        double.now_ms += 3_000

    double.instead["Lookup"] = slow
    began_ms = double.now_ms
    hit = space.lookup(chain_of(4))
    assert hit.deadline_ms == began_ms + double.settings.lease_min_ms
    double.instead["Reserve"] = lambda _: setattr(double, "now_ms", double.now_ms + double.settings.write_min_ms)
    stored = space.store(chain_of(4, 2), Contiguous(data_of(4)))
    assert (stored.stored_blocks, stored.reason) == (0, "write_expired")


def test_a_store_stops_at_its_deadline_and_keeps_what_it_wrote(double: PoolDouble, tmp_path: Path) -> None:
    def late() -> None:
        double.now_ms += 600

    with double.connect(device=Hooked(late), piece_bytes=2 * 8192) as pool:
        space = pool.namespace(spec_of())
        stored = space.store(chain_of(6), Contiguous(data_of(6)), timeout_ms=1_000)
        assert (stored.stored_blocks, stored.reason) == (4, "timed_out")
        assert space.lookup(chain_of(6)).blocks == 4
        assert pool.flush(20_000)
    assert double.core.snapshot(double.now_ms).reservations == 0


def test_a_new_epoch_stops_a_store_between_pieces(double: PoolDouble) -> None:
    pieces: list[int] = []

    def fence() -> None:
        pieces.append(1)
        double.node.obey(double.epoch + 1)

    with double.connect(device=Hooked(fence), piece_bytes=2 * 8192) as pool:
        space = pool.namespace(spec_of())
        stored = space.store(chain_of(6), Contiguous(data_of(6)))
        assert (stored.stored_blocks, stored.reason, len(pieces)) == (0, "stale_epoch", 1)
        assert pool.flush(20_000)
    assert [request.writer for request in double.called("Abort")] == [True]
    assert double.called("Commit") == []


def test_somebody_else_writes(double: PoolDouble, space: Namespace) -> None:
    chain = chain_of(5)
    double.apply(m.Reserve(space.id, b"r" * 16, m.Parent.ROOT, chain[: 3 * 12], 0, 1, (NODE,), 9))
    stored = space.store(chain, Contiguous(data_of(5)))
    assert (stored.stored_blocks, stored.being_written_blocks, stored.reason) == (2, 3, "being_written")
    hit = space.lookup(chain)
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


def test_blocks_lost_between_write_and_commit(double: PoolDouble) -> None:
    with double.connect(device=Hooked(lambda: double.apply(m.Purge(spec_of().id)))) as pool:
        space = pool.namespace(spec_of())
        stored = space.store(chain_of(3), Contiguous(data_of(3)))
        assert stored.stored_blocks == 0
        assert stored.reason in ("lost", "reservation_ended", "reservation_unknown")


def test_bytes_that_change_while_they_are_loaded(double: PoolDouble) -> None:
    slots: list[Any] = []
    with double.connect(device=Hooked(lambda: [slot.__setitem__((1, 7), slot[1, 7] ^ 1) for slot in slots])) as pool:
        space = pool.namespace(spec_of())
        space.store(chain_of(3), Contiguous(data_of(3)))
        hit = space.lookup(chain_of(3))
        slots.append(double.segment.slots(int(hit.extents.first_slot[0]), 3, space.spec.slot_bytes))
        loaded = space.load(hit, Contiguous(empty(3)))
        assert (loaded.blocks, loaded.reason) == (1, "verify_failed")


# -- when the others are away --------------------------------------------------------------------------


def test_nobody_is_there(tmp_path: Path) -> None:
    """No Master, no node client: nothing raises, and after the first call nothing waits."""
    with KVPool.connect("127.0.0.1:1", str(tmp_path / "none.sock"), timeout_ms=300) as pool:
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
        assert dict(pool.stats().lookups_short) == {"unreachable": 100}


def test_the_master_dies_in_the_middle_of_a_store(double: PoolDouble) -> None:
    with double.connect(device=Hooked(double.stop_master), timeout_ms=500) as pool:
        space = pool.namespace(spec_of())
        stored = space.store(chain_of(3), Contiguous(data_of(3)))
        assert (stored.stored_blocks, stored.reason) == (0, "unreachable")
        assert space.lookup(chain_of(3)).reason == "unreachable"


def test_a_master_that_restarts_is_found_again(double: PoolDouble, pool: KVPool, space: Namespace) -> None:
    space.store(chain_of(4), Contiguous(data_of(4)))
    old = space.lookup(chain_of(4))
    assert old.blocks == 4
    double.stop_master()
    assert space.lookup(chain_of(4)).reason == "unreachable"
    double.start_master(epoch=11)
    end_s = time.perf_counter() + 20
    while space.lookup(chain_of(4)).reason == "unreachable":
        assert time.perf_counter() < end_s
        double.now_ms += 10_000  # the breaker's time, too
    assert space.lookup(chain_of(4)).reason == "unknown_key"
    assert space.load(old, Contiguous(empty(4))).blocks == 0
    stored = space.store(chain_of(4), Contiguous(data_of(4)))
    if stored.reason:  # the first one finds that the handles are of another epoch
        double.now_ms += 10_000
        stored = space.store(chain_of(4), Contiguous(data_of(4)))
    assert (stored.stored_blocks, stored.reason) == (4, "")
    with space.lookup(chain_of(4)) as hit:
        assert space.load(hit, Contiguous(empty(4))).blocks == 4
        assert hit.extents.segment.tolist() == old.extents.segment.tolist()  # yet they are not the same segments
    assert space.load(old, Contiguous(empty(4))).reason == "segment_elsewhere"


def test_an_answer_of_a_former_epoch_is_a_miss(double: PoolDouble, space: Namespace) -> None:
    space.store(chain_of(4), Contiguous(data_of(4)))
    assert space.lookup(chain_of(4)).blocks == 4
    double.instead["Lookup"] = lambda _: pb.LookupReply(hit_blocks=4, epoch=double.epoch - 1)
    hit = space.lookup(chain_of(4))
    assert (hit.blocks, hit.reason) == (0, "stale_epoch")


def test_the_namespace_is_opened_again_when_it_is_forgotten(double: PoolDouble, space: Namespace) -> None:
    double.core.namespaces.clear()
    assert space.lookup(chain_of(4)).reason == "unknown_key"
    assert len(double.called("OpenNamespace")) == 2


def test_who_gets_no_answer_takes_the_request_back(double: PoolDouble) -> None:
    """An abort and a release that overtake what they end: nothing stays reserved or leased."""
    go = threading.Event()
    with double.connect(timeout_ms=200) as hasty:
        space = hasty.namespace(spec_of())
        space.store(chain_of(2), Contiguous(data_of(2)))
        double.instead = dict.fromkeys(("Reserve", "Lookup"), lambda _: go.wait(30) and None)
        stored = space.store(chain_of(4), Contiguous(data_of(4)))
        assert (stored.stored_blocks, stored.reason) == (0, "unreachable")
        assert hasty.flush(20_000)
        assert [request.writer for request in double.called("Abort")] == [True]
    with double.connect(timeout_ms=200) as hasty:
        assert hasty.namespace(spec_of()).lookup(chain_of(2)).reason == "unreachable"
        assert hasty.flush(20_000)
        released = double.called("Release")[-1].lease_ids
        assert list(released) == [double.called("Lookup")[-1].lease_id]
    go.set()
    double.stop_master()  # waits for what it was at
    found = double.core.snapshot(double.now_ms)
    assert (found.leases, found.reservations) == (0, 0)


def test_room_that_is_being_made_ready_is_waited_for(double: PoolDouble, space: Namespace) -> None:
    pending = pb.ReserveReply(reason=pb.REASON_SLAB_PENDING, epoch=double.epoch)
    answers = [pending, pending]
    double.instead["Reserve"] = lambda _: answers.pop() if answers else None
    stored = space.store(chain_of(3), Contiguous(data_of(3)))
    assert (stored.stored_blocks, stored.existing_blocks, stored.reason) == (3, 0, "")
    double.instead["Reserve"] = lambda _: pending
    assert space.store(chain_of(3, 9), Contiguous(data_of(3))).reason == "slab_pending"


def test_many_threads_at_once(double: PoolDouble, pool: KVPool, space: Namespace) -> None:
    """Stores and loads of overlapping chains through one pool: what is loaded is right."""
    head, head_data = chain_of(5, 50), data_of(5, 50)
    failures: list[str] = []

    def work(seed: int) -> None:
        chain, data = head + chain_of(4, seed), np.concatenate([head_data, data_of(4, seed)])
        for _ in range(15):
            space.store(chain, Contiguous(data))
            with space.lookup(chain) as hit:
                target = empty(9)
                loaded = space.load(hit, Contiguous(target))
                if not (target[: loaded.blocks] == data[: loaded.blocks]).all() or loaded.blocks != hit.blocks:
                    failures.append(f"{seed}: {loaded}")
            space.remove(chain, skip=int(seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert pool.stats().loaded_blocks > 100


def test_a_refusal_is_a_reason(double: PoolDouble, space: Namespace) -> None:
    def refuse(_: Any) -> None:
        raise LimitReached("leases_max")

    double.instead["Lookup"] = double.instead["Reserve"] = refuse
    assert space.lookup(chain_of(4)).reason == "limit"
    assert space.store(chain_of(4), Contiguous(data_of(4))).reason == "limit"


@pytest.mark.parametrize("blocks", [3, 9])
def test_answers_that_cannot_be(double: PoolDouble, space: Namespace, blocks: int) -> None:
    """Extents that do not cover the hit, or lie outside, are a miss: they become addresses."""
    space.store(chain_of(4), Contiguous(data_of(4)))
    extents = pb.Extents(
        offset=[0], blocks=[blocks], segment=[0], first_slot=[1], part_from=[0], part_to=[1], stamp=[1], stride=[1]
    )
    real = space.lookup(chain_of(4))
    extents.segment[0] = int(real.extents.segment[0])
    double.instead["Lookup"] = lambda _: pb.LookupReply(
        hit_blocks=4, extents=extents, lease_ms=1_000, epoch=double.epoch
    )
    hit = space.lookup(chain_of(4))
    assert space.load(hit, Contiguous(empty(4))).reason == "protocol"
    extents.first_slot[0], extents.blocks[0] = 1 << 31, 4
    hit = space.lookup(chain_of(4))
    assert space.load(hit, Contiguous(empty(4))).reason == "protocol"
    extents.segment[0] = 77
    hit = space.lookup(chain_of(4))
    assert space.load(hit, Contiguous(empty(4))).reason == "segment_elsewhere"


# -- the worker's lock, and mistakes of the caller ------------------------------------------------------


def test_the_lock_lives_as_long_as_the_pool_is_used(double: PoolDouble) -> None:
    pool = double.connect()
    space = pool.namespace(spec_of())
    space.store(chain_of(4), Contiguous(data_of(4)))
    worker_id = double.called("Reserve")[-1].worker_id
    assert double.segment.held_by(worker_id)
    pool.close()
    gc.collect()
    assert not double.segment.held_by(worker_id)


def test_mistakes_of_the_caller_are_raised(double: PoolDouble, pool: KVPool, space: Namespace) -> None:
    chain, data = chain_of(4), data_of(4)
    with pytest.raises(BadNamespaceSpec, match="block_tokens"):
        pool.namespace(spec_of(block_tokens=0))
    with pytest.raises(SlotTooLarge):
        pool.namespace(spec_of(part_bytes=1 << 20))
    with pytest.raises(NamespaceDiffers):
        pool.namespace(spec_of(entry="any"))
    for call in (space.lookup, space.peek, space.remove):
        with pytest.raises(KeyLengthMismatch):
            call(chain[:-1])
        with pytest.raises(ValueError, match="skip = 5"):
            call(chain, 5)
    with pytest.raises(KeyLengthMismatch):
        space.store(chain[:-1], Contiguous(data))
    with pytest.raises(ValueError, match="entry"):
        space.store(chain, Contiguous(data), parent=UNKNOWN)
    with pytest.raises(ValueError, match="4 are needed"):
        space.store(chain, Contiguous(data[:3]))
    with pytest.raises(ValueError, match="a part has 5000"):
        space.store(chain, Contiguous(data[:, :4999]))
    with pytest.raises(PartOutOfRange):
        space.store(chain, Contiguous(data), parts=1)
    with pytest.raises(ValueError, match="2 layouts for 1 parts"):
        space.store(chain, [Contiguous(data)] * 2)
    space.store(chain, Contiguous(data))
    hit = space.lookup(chain)
    with pytest.raises(ValueError, match="blocks = -1"):
        space.load(hit, Contiguous(empty(4)), blocks=-1)
    with pytest.raises(ValueError, match="4 are needed"):
        space.load(hit, Contiguous(empty(3)))
    for given in ({"timeout_ms": 0}, {"verify": "some"}, {"copy_threads": 0}):
        with pytest.raises(ValueError):
            double.connect(**given)


def test_nothing_asked_is_nothing_done(double: PoolDouble, space: Namespace) -> None:
    hit = space.lookup(b"")
    assert (len(hit), hit.reason, space.load(hit, Contiguous(empty(1))).blocks) == (0, "", 0)
    assert space.lookup(chain_of(2), skip=2).reason == ""
    assert space.store(b"", Contiguous(empty(1))).stored_blocks == 0
    assert space.remove(b"").blocks == space.peek(b"").blocks == 0
    assert {name for name, _ in double.calls} == {"OpenNamespace"}
