"""sdk.py, store.py, node_link.py on a pool in this process: what it does."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

from kvpool_client import ROOT, UNKNOWN, Contiguous, KVPool, Namespace, Rows
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import BadNamespaceSpec, KeyLengthMismatch, NamespaceDiffers, PartOutOfRange, SlotTooLarge
from unit.sdk_double import PoolDouble
from unit.sdk_world import PART_BYTES, chain_of, data_of, empty, spec_of

# -- what it does --------------------------------------------------------------------------------------


def test_store_lookup_load_release(pool_double: PoolDouble, sdk_pool: KVPool, sdk_space: Namespace) -> None:
    chain, data = chain_of(20), data_of(20)
    stored = sdk_space.store(chain[: 12 * 15], Contiguous(data))
    assert (stored.stored_blocks, stored.existing_blocks, stored.reason, stored.bytes) == (15, 0, "", 15 * PART_BYTES)
    again = sdk_space.store(chain, Contiguous(data))
    assert (again.stored_blocks, again.existing_blocks, again.reason) == (5, 15, "")

    other = np.random.default_rng(5).bytes(12)
    with sdk_space.lookup(chain + other, skip=3) as hit:
        assert (len(hit), hit.blocks, hit.reason) == (17, 17, "unknown_key")
        assert int(hit.extents.blocks.sum()) == 17
        target = empty(17)
        loaded = sdk_space.load(hit, Contiguous(target))
        assert (loaded.blocks, loaded.reason, loaded.bytes) == (17, "", 17 * PART_BYTES)
        assert (target == data[3:]).all()
        rows = empty(30)
        assert sdk_space.load(hit, Rows([rows], np.arange(29, 22, -1)), blocks=7).blocks == 7
        assert (rows[29:22:-1] == data[3:10]).all()
    assert sdk_pool.flush(20_000)
    assert pool_double.core.snapshot(pool_double.now_ms).leases == 0
    assert sdk_space.load(hit, Contiguous(target)).reason == "lease_expired"

    stats = sdk_pool.stats()
    assert (stats.lookups, stats.lookup_blocks, stats.hit_blocks, stats.hit_tokens) == (1, 18, 17, 17 * 16)
    assert (stats.loads, stats.loaded_blocks, stats.loaded_bytes) == (3, 24, 24 * PART_BYTES)
    assert (stats.stores, stats.stored_blocks, stats.existing_blocks) == (2, 20, 15)
    assert (dict(stats.lookups_short), dict(stats.loads_short)) == ({"unknown_key": 1}, {"lease_expired": 1})


def test_the_node_client_hears_what_the_worker_did(
    pool_double: PoolDouble, sdk_pool: KVPool, sdk_space: Namespace
) -> None:
    sdk_space.store(chain_of(5), Contiguous(data_of(5)))
    with sdk_space.lookup(chain_of(7)) as hit:
        sdk_space.load(hit, Contiguous(empty(5)))
    sdk_pool.close()
    ((name, totals),) = pool_double.node.use.totals().items()
    assert name == (sdk_space.id.hex()[:8], sdk_space.spec.model)
    counts = ("lookups", "lookup_blocks", "hit_blocks", "hit_tokens", "loaded_tokens", "stored_bytes")
    assert [totals[count] for count in counts] == [1, 7, 5, 5 * 16, 5 * 16, 5 * PART_BYTES]
    assert totals["load_us"] > 0
    assert pool_double.node.use.short() == {("lookup", "unknown_key"): 1}


def test_peek_explain_remove_purge(pool_double: PoolDouble, sdk_space: Namespace) -> None:
    chain = chain_of(6)
    assert (sdk_space.peek(chain).blocks, sdk_space.peek(chain).reason) == (0, "unknown_key")
    sdk_space.store(chain, Contiguous(data_of(6)))
    assert (sdk_space.peek(chain, skip=2).blocks, sdk_space.peek(chain).reason) == (6 - 2, "")
    assert pool_double.core.snapshot(pool_double.now_ms).leases == 0
    removed = sdk_space.remove(chain, skip=4)
    assert (removed.blocks, removed.reason) == (2, "")
    pool_double.now_ms += 50
    peeked = sdk_space.peek(chain, explain=True)
    assert peeked.blocks == 4
    assert peeked.gone is not None
    assert (peeked.gone.reason, peeked.gone.ago_ms) == ("removed", 50)
    assert sdk_space.purge().blocks == 4
    assert sdk_space.lookup(chain).blocks == 0


def test_every_rank_stores_its_part_and_any_loads_all(pool_double: PoolDouble, sdk_pool: KVPool) -> None:
    space = sdk_pool.namespace(spec_of(parts=3))
    chain = chain_of(9)
    data = [data_of(9, seed) for seed in range(3)]
    for part in (2, 0):
        stored = space.store(chain, Contiguous(data[part]), parts=part)
        assert (stored.stored_blocks, stored.reason) == (9, "")
        assert space.lookup(chain).reason in ("being_written", "part_missing")
    assert space.store(chain, [Contiguous(one) for one in data]).stored_blocks == 9  # part 1 is all that lacks
    with pool_double.connect() as other:
        ranks = other.namespace(spec_of(parts=3))
        with ranks.lookup(chain) as hit:
            assert hit.blocks == 9
            target = [empty(9) for _ in range(2)]
            loaded = ranks.load(hit, [Contiguous(one) for one in target], part=range(1, 3))
            assert (loaded.blocks, loaded.bytes) == (9, 2 * 9 * PART_BYTES)
            assert (target[0] == data[1]).all()
            assert (target[1] == data[2]).all()


def test_one_reservation_for_all_parts(pool_double: PoolDouble, sdk_pool: KVPool) -> None:
    space = sdk_pool.namespace(spec_of(parts=4))
    data = [data_of(7, seed) for seed in range(4)]
    stored = space.store(chain_of(7), [Contiguous(one) for one in data])
    assert (stored.stored_blocks, stored.bytes) == (7, 4 * 7 * PART_BYTES)
    commits = pool_double.called("Commit")
    assert [(commit.part_from, commit.part_to, commit.blocks_written, commit.final) for commit in commits] == [
        (0, 4, 7, True)
    ]
    assert len(pool_double.called("Reserve")) == 1
    with space.lookup(chain_of(7)) as hit:
        target = [empty(7) for _ in range(4)]
        assert space.load(hit, [Contiguous(one) for one in target], part=range(4)).blocks == 7
        assert all((one == other).all() for one, other in zip(target, data, strict=True))


def test_chains_that_start_anywhere(sdk_pool: KVPool) -> None:
    space = sdk_pool.namespace(spec_of(entry="any"))
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


def test_room_that_is_being_made_ready_is_waited_for(pool_double: PoolDouble, sdk_space: Namespace) -> None:
    pending = pb.ReserveReply(reason=pb.REASON_SLAB_PENDING, epoch=pool_double.epoch)
    answers = [pending, pending]
    pool_double.instead["Reserve"] = lambda _: answers.pop() if answers else None
    stored = sdk_space.store(chain_of(3), Contiguous(data_of(3)))
    assert (stored.stored_blocks, stored.existing_blocks, stored.reason) == (3, 0, "")
    pool_double.instead["Reserve"] = lambda _: pending
    assert sdk_space.store(chain_of(3, 9), Contiguous(data_of(3))).reason == "slab_pending"


def test_many_threads_at_once(pool_double: PoolDouble, sdk_pool: KVPool, sdk_space: Namespace) -> None:
    """Stores, loads and removals of overlapping chains through one pool: what is loaded is right.

    A removal clears headers at once, also of blocks that somebody has leased: they are a miss then.
    """
    head, head_data = chain_of(5, 50), data_of(5, 50)
    failures: list[str] = []

    def work(seed: int) -> None:
        chain, data = head + chain_of(4, seed), np.concatenate([head_data, data_of(4, seed)])
        for _ in range(15):
            sdk_space.store(chain, Contiguous(data))
            with sdk_space.lookup(chain) as hit:
                target = empty(9)
                loaded = sdk_space.load(hit, Contiguous(target))
                whole = loaded.blocks == hit.blocks
                if not (target[: loaded.blocks] == data[: loaded.blocks]).all() or not whole:
                    failures.append(f"{seed}: {loaded}")
            sdk_space.remove(chain, skip=int(seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sdk_pool.stats().loaded_blocks > 100


# -- the worker's lock, and mistakes of the caller -----------------------------------------------------


def test_the_lock_lives_as_long_as_the_pool_is_used(pool_double: PoolDouble) -> None:
    pool = pool_double.connect()
    space = pool.namespace(spec_of())
    space.store(chain_of(4), Contiguous(data_of(4)))
    worker_id = pool_double.called("Reserve")[-1].worker_id
    assert pool_double.segment.held_by(worker_id)
    pool.close()
    gc.collect()
    assert not pool_double.segment.held_by(worker_id)


def test_mistakes_of_the_caller_are_raised(pool_double: PoolDouble, sdk_pool: KVPool, sdk_space: Namespace) -> None:
    chain, data = chain_of(4), data_of(4)
    with pytest.raises(BadNamespaceSpec, match="block_tokens"):
        sdk_pool.namespace(spec_of(block_tokens=0))
    with pytest.raises(SlotTooLarge):
        sdk_pool.namespace(spec_of(part_bytes=1 << 20))
    with pytest.raises(NamespaceDiffers):
        sdk_pool.namespace(spec_of(entry="any"))
    for call in (sdk_space.lookup, sdk_space.peek, sdk_space.remove):
        with pytest.raises(KeyLengthMismatch):
            call(chain[:-1])
        with pytest.raises(ValueError, match="skip = 5"):
            call(chain, 5)
    with pytest.raises(KeyLengthMismatch):
        sdk_space.store(chain[:-1], Contiguous(data))
    with pytest.raises(ValueError, match="entry"):
        sdk_space.store(chain, Contiguous(data), parent=UNKNOWN)
    with pytest.raises(ValueError, match="4 are needed"):
        sdk_space.store(chain, Contiguous(data[:3]))
    with pytest.raises(ValueError, match="a part has 5000"):
        sdk_space.store(chain, Contiguous(data[:, :4999]))
    with pytest.raises(PartOutOfRange):
        sdk_space.store(chain, Contiguous(data), parts=1)
    with pytest.raises(ValueError, match="2 layouts for 1 parts"):
        sdk_space.store(chain, [Contiguous(data)] * 2)
    sdk_space.store(chain, Contiguous(data))
    hit = sdk_space.lookup(chain)
    with pytest.raises(ValueError, match="blocks = -1"):
        sdk_space.load(hit, Contiguous(empty(4)), blocks=-1)
    with pytest.raises(ValueError, match="4 are needed"):
        sdk_space.load(hit, Contiguous(empty(3)))
    for given in ({"timeout_ms": 0}, {"verify": "some"}, {"copy_threads": 0}):
        with pytest.raises(ValueError):
            pool_double.connect(**given)


def test_nothing_asked_is_nothing_done(pool_double: PoolDouble, sdk_space: Namespace) -> None:
    hit = sdk_space.lookup(b"")
    assert (len(hit), hit.reason, sdk_space.load(hit, Contiguous(empty(1))).blocks) == (0, "", 0)
    assert sdk_space.lookup(chain_of(2), skip=2).reason == ""
    assert sdk_space.store(b"", Contiguous(empty(1))).stored_blocks == 0
    assert sdk_space.remove(b"").blocks == sdk_space.peek(b"").blocks == 0
    assert {name for name, _ in pool_double.calls} == {"OpenNamespace"}
