"""KV that several ranks hold alike: each writes its share of one reservation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvpool_client import Contiguous, Namespace, Share
from kvpool_client.transfer_engine import Written
from kvpool_master.core import messages as m
from kvpool_proto import pool_pb2 as pb
from unit.sdk_double import NODE, PoolDouble
from unit.sdk_world import PART_BYTES, chain_of, data_of, empty, spec_of

BLOCKS = 9
CHAIN, DATA = chain_of(BLOCKS), data_of(BLOCKS)
ID = b"the engine's own"


@pytest.fixture
def ranks(pool_double: PoolDouble) -> Iterator[list[Namespace]]:
    """Three workers on our node."""
    with ExitStack() as stack:
        pools = [stack.enter_context(pool_double.connect()) for _ in range(3)]
        yield [pool.namespace(spec_of()) for pool in pools]


def stored(rank: Namespace, index: int, chain: bytes = CHAIN, **given: Any) -> tuple[int, int, int, str]:
    """What a rank's share of a store comes to."""
    blocks = len(chain) // 12
    found = rank.store(chain, Contiguous(data_of(blocks)), share=Share(index, 3, ID), **given)
    assert found.bytes == found.stored_blocks * PART_BYTES
    return found.stored_blocks, found.existing_blocks, found.being_written_blocks, found.reason


def hit(rank: Namespace) -> tuple[int, str]:
    """What is hit of CHAIN; it is right."""
    with rank.lookup(CHAIN) as found:
        target = empty(BLOCKS)
        assert rank.load(found, Contiguous(target)).blocks == found.blocks
        assert (target[: found.blocks] == DATA[: found.blocks]).all()
        return found.blocks, found.reason


def flush(rank: Namespace) -> None:
    """Wait until what it had to say in the background is said."""
    assert rank._context.background.flush(20.0)


def test_every_rank_writes_its_share(pool_double: PoolDouble, ranks: list[Namespace]) -> None:
    for index in (2, 0, 1):
        assert stored(ranks[index], index) == (3, 0, 6, "")
    assert hit(ranks[0]) == (BLOCKS, "")
    requests = pool_double.called("Reserve")
    assert {(request.reservation_id, request.shares) for request in requests} == {(ID, 3)}
    assert [request.share for request in requests] == [2, 0, 1]
    commits = [(commit.share, commit.blocks_written, commit.final) for commit in pool_double.called("Commit")]
    assert commits == [(2, 3, True), (0, 3, True), (1, 3, True)]
    assert pool_double.core.snapshot(pool_double.now_ms).reservations == 0


def test_a_rank_that_is_missing_costs_its_share(pool_double: PoolDouble, ranks: list[Namespace]) -> None:
    assert stored(ranks[0], 0) == (3, 0, 6, "")
    assert stored(ranks[2], 2) == (3, 0, 6, "")
    assert hit(ranks[1]) == (3, "being_written")
    pool_double.now_ms += pool_double.settings.write_max_ms
    pool_double.apply(m.Tick())
    assert hit(ranks[1])[0] == 3
    again = ranks[1].store(CHAIN, Contiguous(DATA))
    assert (again.stored_blocks, again.existing_blocks, again.reason) == (3, 6, "")
    assert hit(ranks[1]) == (BLOCKS, "")


def test_a_scheduler_can_reserve_for_its_ranks(pool_double: PoolDouble, ranks: list[Namespace]) -> None:
    pool_double.apply(m.Reserve(ranks[0].id, ID, m.Parent.ROOT, CHAIN, 0, 1, (NODE, NODE, NODE), worker=0, shares=3))
    for index, rank in enumerate(ranks):
        assert stored(rank, index) == (3, 0, 6, "")
    assert hit(ranks[0]) == (BLOCKS, "")


def test_only_what_is_missing_is_divided(ranks: list[Namespace]) -> None:
    ranks[0].store(CHAIN[: 3 * 12], Contiguous(DATA[:3]))
    for index, rank in enumerate(ranks):
        assert stored(rank, index) == (2, 3, 4, "")
    assert hit(ranks[0]) == (BLOCKS, "")


def test_a_rank_without_a_share_stores_nothing(ranks: list[Namespace]) -> None:
    chain = CHAIN[: 2 * 12]
    assert [stored(rank, index, chain)[0] for index, rank in enumerate(ranks)] == [1, 1, 0]


def test_a_rank_that_fails_gives_up_its_share_alone(pool_double: PoolDouble, ranks: list[Namespace]) -> None:
    def late(_: Any) -> None:
        pool_double.now_ms += 1_000

    pool_double.change["Reserve"] = late
    assert stored(ranks[1], 1, timeout_ms=500) == (0, 0, 6, "timed_out")
    pool_double.change.clear()
    flush(ranks[1])
    assert [(abort.share, abort.writer) for abort in pool_double.called("Abort")] == [(1, True)]
    assert stored(ranks[0], 0) == (3, 0, 6, "")
    assert stored(ranks[2], 2) == (3, 0, 6, "")
    assert hit(ranks[0])[0] == 3
    assert ranks[1].store(CHAIN, Contiguous(DATA)).stored_blocks == 3


def test_a_share_that_a_silent_peer_may_still_write_is_left_to_expire(
    pool_double: PoolDouble, ranks: list[Namespace]
) -> None:
    """To give it up without the word would end the shares of the others."""
    pool_double.add_node("m")
    pool_double.place_on("m")
    pool_double.ports.instead["m"] = lambda *_: Written([0], "peer_unreachable", confirmed=False)
    assert stored(ranks[0], 0) == (0, 0, 6, "peer_unreachable")
    flush(ranks[0])
    assert pool_double.called("Abort") == pool_double.called("Commit") == []
    del pool_double.ports.instead["m"]
    assert stored(ranks[1], 1) == (3, 0, 6, "")
    assert stored(ranks[2], 2) == (3, 0, 6, "")


def test_all_ranks_ask_again_under_the_same_id(pool_double: PoolDouble, ranks: list[Namespace]) -> None:
    """While nothing was granted it is the first id, then the next, that all ranks compute alike."""
    nothing = pb.ReserveReply(reason=pb.REASON_SLAB_PENDING, epoch=pool_double.epoch)
    answers: list[pb.ReserveReply | None] = [nothing, None]
    pool_double.instead["Reserve"] = lambda _: answers.pop(0) if answers else None

    def pending(reply: pb.ReserveReply) -> None:
        if len(pool_double.called("Reserve")) == 2:
            reply.reason = pb.REASON_SLAB_PENDING

    pool_double.change["Reserve"] = pending
    assert stored(ranks[0], 0)[0] == 3
    ids = [request.reservation_id for request in pool_double.called("Reserve")]
    assert ids[:2] == [ID, ID]
    assert len(set(ids)) == 2
    pool_double.calls.clear()
    answers[:] = [nothing, None]
    assert stored(ranks[1], 1)[0] == 3
    assert [request.reservation_id for request in pool_double.called("Reserve")] == ids


def test_shares_that_do_not_fit_the_runs_are_a_miss(pool_double: PoolDouble, ranks: list[Namespace]) -> None:
    pool_double.change["Reserve"] = lambda reply: reply.run_share.pop()
    assert stored(ranks[0], 0) == (0, 0, 0, "protocol")


def test_what_is_no_share(pool_double: PoolDouble, ranks: list[Namespace]) -> None:
    for index, count, ident in ((3, 3, ID), (-1, 3, ID), (0, 0, ID), (0, 3, ID[:15])):
        with pytest.raises(ValueError):
            Share(index, count, ident)
    with pool_double.connect() as pool:
        space = pool.namespace(spec_of(parts=2))
        with pytest.raises(ValueError, match="2 parts"):
            space.store(CHAIN, [Contiguous(DATA)] * 2, share=Share(0, 3, ID))
    assert ranks[0].store(CHAIN, Contiguous(DATA), share=Share(0, 1, ID)).stored_blocks == BLOCKS
    assert pool_double.called("Reserve")[-1].reservation_id == ID
