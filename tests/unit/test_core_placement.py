"""Where writes go: own node, choice of two, long runs, ramp, reports, remote writers' slots."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from kvpool_master.core import extents as ex
from kvpool_master.core import messages as m
from kvpool_master.core.messages import Reason
from kvpool_proto.errors import BadRequest, ForeignId, ReservationEnded
from unit.core_world import PART_BYTES, World, chain, slots_of


def keys(blocks: int, start: int = 0) -> bytes:
    return chain(range(start, start + blocks))


def shares_of(world: World, answer: m.Reserved) -> Counter[str]:
    """Block parts granted by node."""
    found = slots_of(answer.extents).values()
    return Counter(world.pool.space.segments[handle].node for handle, _ in found)


def test_the_writers_own_node_comes_first_and_the_others_when_it_is_full() -> None:
    world = World(slots=16, nodes=("n", "o", "p"))
    assert shares_of(world, world.put(keys(10), nodes=("n",))) == {"n": 10}
    answer = world.put(keys(20, 100), nodes=("n",))
    assert shares_of(world, answer)["n"] == 6
    assert answer.answered == 20
    assert answer.reason is Reason.NONE
    assert world.hit(keys(10)) == 10, "room elsewhere goes before eviction"
    assert world.pool.counters.spilled_blocks == 14


def test_when_all_is_full_the_own_node_evicts_first() -> None:
    world = World(slots=8, nodes=("n", "o"))
    world.put(keys(8), nodes=("n",))
    world.put(keys(8, 100), nodes=("o",))
    assert shares_of(world, world.put(keys(4, 200), nodes=("n",))) == {"n": 4}
    assert world.hit(keys(8)) == 4
    assert world.hit(keys(8, 100)) == 8


def test_who_has_no_data_port_gets_only_its_own_writes() -> None:
    world = World(slots=4, nodes=("n",))
    offer = m.SegmentOffer(0, world.slab_bytes, world.slab_bytes)
    world.do(m.Register("q", 1, (offer,)))
    answer = world.reserve("r", keys(8), nodes=("n",))
    assert shares_of(world, answer) == {"n": 4}
    assert answer.reason is Reason.RESERVE_SHARE
    assert shares_of(world, world.reserve("s", keys(4, 100), nodes=("q",))) == {"q": 4}


def test_whoever_has_no_node_is_not_sent_to_one_without_a_data_port() -> None:
    world = World(slots=64, nodes=("n", "o"))
    offer = m.SegmentOffer(0, 4 * world.slab_bytes, world.slab_bytes)
    world.pool.apply(m.Register("q", 1, (offer,)), world.now)
    for number in range(20):
        assert "q" not in shares_of(world, world.put(keys(2, 100 * number)))


def test_nothing_is_placed_on_nodes_that_are_suspect_draining_or_avoided() -> None:
    world = World(slots=64, nodes=("n", "o", "p", "q"))
    world.do(m.SessionLost("o", 1))
    world.do(m.Drain("p"))
    for number in range(20):
        answer = world.put(keys(2, 100 * number), avoid=("q",))
        assert set(shares_of(world, answer)) == {"n"}
    assert world.reserve("r", keys(2, 9_000), nodes=("p",), avoid=("q", "n")).reason is Reason.NO_NODE


def test_a_batch_is_spread_in_long_runs_and_evenly_by_capacity() -> None:
    world = World(slots=64, slabs=16, nodes=("n", "o", "p", "q"), spread_run_bytes=32 * PART_BYTES)
    total: Counter[str] = Counter()
    for number in range(12):
        answer = world.put(keys(256, 1_000 * number))
        assert ex.count(answer.extents) <= 256 // 32 + 4, "runs, not blocks"
        total += shares_of(world, answer)
    assert set(total) == {"n", "o", "p", "q"}
    assert max(total.values()) < 1.5 * min(total.values()), total


def test_a_node_twice_as_large_gets_about_twice_as_much() -> None:
    world = World(slots=64, slabs=8, nodes=("n", "o"), spread_run_bytes=8 * PART_BYTES)
    slabs, world.slabs = world.slabs, 16
    world.register("big", 1)
    world.slabs = slabs
    total: Counter[str] = Counter()
    for number in range(30):
        total += shares_of(world, world.put(keys(32, 1_000 * number)))
    assert 0.35 < total["big"] / total.total() < 0.65, total


def test_a_node_that_joins_empty_gets_little_at_first() -> None:
    def part_of(world: World) -> float:
        """Which part of what is written the newcomer gets."""
        total: Counter[str] = Counter()
        for number in range(40):
            total += shares_of(world, world.put(keys(8, 1_000 * number + world.now), name=f"{world.now}.{number}"))
        return total["new"] / total.total()

    world = World(slots=256, slabs=8, nodes=("n", "o", "p"), ramp_ms=80_000, spread_run_bytes=4 * PART_BYTES)
    world.tick(after_ms=90_000)
    world.put(keys(1_500, 500_000))
    world.register("new", 1)
    assert world.state("new").state == "ramp"
    early = part_of(world)
    world.tick(after_ms=81_000)
    assert world.state("new").state == "up"
    late = part_of(world)
    assert early < 0.15 < late, (early, late)


def test_slabs_are_waited_for_on_the_own_node_rather_than_writing_elsewhere() -> None:
    world = World(slots=8, slabs=2, nodes=("n", "o"), bind_ahead_permille=0)
    answer = world.put(keys(12), nodes=("n",))
    assert answer.answered == 8
    assert answer.reason is Reason.SLAB_PENDING
    assert shares_of(world, world.put(keys(12), nodes=("n",))) == {"n": 4}


# -- reports


def up(world: World, node: str) -> bool:
    return world.state(node).state != "suspect"


def test_one_host_makes_the_master_ask_two_make_suspect() -> None:
    world = World(nodes=("n", "o", "p"))
    answer = world.do(m.ReportNode("n", "o"))
    assert answer == m.NodeReported(False, (m.ProbeNode("n", 1),))
    assert world.do(m.ReportNode("n", "o")) == m.NodeReported(False, ()), "the same host counts once"
    world.do(m.ProbeAnswered("n", 1, 1))
    world.tick(after_ms=5_000)
    assert up(world, "n")
    assert world.do(m.ReportNode("n", "p")).suspect
    assert not up(world, "n")
    assert "o, p" in world.state("n").state_reason
    assert world.pool.counters.nodes_reported == 1


def test_reports_of_long_ago_of_itself_and_of_strangers_count_for_nothing() -> None:
    world = World(nodes=("n", "o", "p"), report_window_ms=1_000)
    world.do(m.ReportNode("n", "o"))
    world.do(m.ProbeAnswered("n", 1, 1))
    world.tick(after_ms=1_500)
    assert not world.do(m.ReportNode("n", "p")).suspect
    for reporter in ("n", "stranger"):
        assert world.do(m.ReportNode("n", reporter)) == m.NodeReported(False)
    assert world.do(m.ReportNode("nobody", "o")) == m.NodeReported(False)


def test_a_reported_node_that_does_not_answer_is_suspect_until_its_hold_is_over() -> None:
    world = World(nodes=("n", "o"), probe_ms=500, report_hold_ms=3_000)
    world.put(keys(3), nodes=("n",))
    world.do(m.ReportNode("n", "o"))
    world.tick(after_ms=499)
    assert up(world, "n")
    world.tick(after_ms=1)
    assert not up(world, "n")
    assert "did not answer" in world.state("n").state_reason
    assert world.peek(keys(3)).reason is Reason.NODE_AWAY
    world.do(m.Heartbeat("n", 1), after_ms=2_999)
    assert not up(world, "n")
    world.do(m.Heartbeat("n", 1), after_ms=1)
    assert up(world, "n")
    assert world.hit(keys(3)) == 3


def test_a_stalled_master_does_not_count_its_own_time_against_a_probe() -> None:
    world = World(nodes=("n", "o"), probe_ms=500, stall_ms=1_000)
    world.tick()
    world.do(m.ReportNode("n", "o"))
    world.tick(after_ms=5_000)
    assert up(world, "n")


# -- slots on other nodes


@pytest.mark.parametrize("how", ["expired", "aborted", "worker gone", "purged"])
def test_slots_of_a_remote_writer_come_back_only_when_their_node_has_cleared_them(how: str) -> None:
    world = World(slots=8, nodes=("n", "o"))
    world.clears = False
    world.put(keys(8), nodes=("n",))
    answer = world.reserve("r", keys(8, 100), nodes=("n",), worker=7)
    assert shares_of(world, answer) == {"o": 8}
    if how == "expired":
        world.tick(after_ms=300)
    elif how == "aborted":
        world.do(m.Abort(world.ident("r"), writer=False))
    elif how == "worker gone":
        world.do(m.WorkerGone("n", 7))
    else:
        world.do(m.Purge(world.namespace))
    world.tick()
    orders = [order for order in world.uncleared if order.node == "o"]
    assert sum(slots for order in orders for _, slots, _ in order.runs) == 8
    full = world.reserve("s", keys(8, 200), nodes=("o",), avoid=("n",))
    assert not full.extents
    assert full.reason is Reason.NO_SPACE
    world.clear()
    assert shares_of(world, world.reserve("t", keys(8, 300), nodes=("o",))) == {"o": 8}


def test_the_remote_writers_own_word_frees_at_once() -> None:
    world = World(slots=8, nodes=("n", "o"))
    world.put(keys(8), nodes=("n",))
    world.reserve("r", keys(8, 100), nodes=("n",), worker=7)
    world.do(m.Abort(world.ident("r"), writer=True))
    assert not world.uncleared
    assert shares_of(world, world.reserve("t", keys(8, 300), nodes=("o",))) == {"o": 8}


# -- shares


def by_share(answer: m.Reserved) -> list[tuple[int, int, int]]:
    """(share, first block, blocks) of what is to be written."""
    return [(run.share, run.offset, run.blocks) for run in answer.runs if run.state is m.RunState.YOURS]


def shared(world: World, share: int, shares: int = 3, chain_keys: bytes = keys(10), **more: Any) -> m.Reserved:
    return world.reserve("g", chain_keys, shares=shares, share=share, worker=100 + share, **more)


def test_ranks_share_the_writing_of_what_they_all_hold() -> None:
    world = World()
    first = shared(world, 0)
    assert by_share(first) == [(0, 0, 4), (1, 4, 3), (2, 7, 3)]
    assert [replace(shared(world, rank), effects=(), write_ms=0) for rank in (1, 2)] == [
        replace(first, effects=(), write_ms=0)
    ] * 2
    world.do(m.Commit(world.ident("g"), 0, 1, 3, True, 102, share=2))
    assert world.hit(keys(10)) == 0
    world.do(m.Commit(world.ident("g"), 0, 1, 4, True, 100, share=0))
    assert world.hit(keys(10)) == 4
    assert by_share(shared(world, 1)) != []
    assert world.hit(keys(10)) == 4
    world.do(m.Commit(world.ident("g"), 0, 1, 3, True, 101, share=1))
    assert world.hit(keys(10)) == 10
    assert not world.pool.writes.shared
    assert not world.pool.writes.open


def test_only_what_is_missing_is_divided_and_a_rank_that_stays_away_costs_its_share() -> None:
    world = World()
    world.put(keys(4))
    answer = shared(world, 1, shares=2, chain_keys=keys(10))
    assert by_share(answer) == [(0, 4, 3), (1, 7, 3)]
    world.do(m.Commit(world.ident("g"), 0, 1, 3, True, 101, share=1))
    world.tick(after_ms=300)
    assert world.hit(keys(10)) == 4
    more = world.reserve("h", keys(10))
    assert by_share(more) == [(0, 4, 3)], "the missing share is a hole that the next writer fills"


def test_a_known_stretch_without_bytes_is_divided_too() -> None:
    world = World()
    world.put(keys(12))
    world.do(m.Remove(world.namespace, keys(6), 1))
    answer = shared(world, 0, shares=4, chain_keys=keys(14))
    assert by_share(answer) == [(0, 1, 2), (1, 3, 2), (2, 5, 1), (2, 12, 1), (3, 13, 1)]
    for share, blocks in enumerate((2, 2, 2, 1)):
        world.do(m.Commit(world.ident("g"), 0, 1, blocks, True, share=share))
    assert world.hit(keys(14)) == 14


def test_each_share_is_written_on_its_own_node() -> None:
    world = World(nodes=("n", "o"))
    answer = shared(world, 0, shares=2, chain_keys=keys(8), nodes=("n", "o"))
    where = slots_of(answer.extents)
    nodes = [world.pool.space.segments[where[block, 0][0]].node for block in range(8)]
    assert nodes == ["n"] * 4 + ["o"] * 4


def test_a_rank_gives_up_its_own_share_a_scheduler_all() -> None:
    world = World()
    shared(world, 0)
    world.do(m.Abort(world.ident("g"), writer=True, share=1))
    assert len(world.pool.writes.open) == 2
    world.do(m.Abort(world.ident("g"), writer=False))
    assert not world.pool.writes.open
    assert world.used_slots == 7, "in quarantine"
    world.do(m.WorkerGone("n", 100))
    assert world.used_slots == 3, "the third rank was never heard of"


def test_shares_of_one_group_agree_or_are_refused() -> None:
    world = World(parts=1)
    shared(world, 0)
    for shares in (1, 2):
        with pytest.raises(ForeignId):
            world.reserve("g", keys(10), shares=shares, share=0)
    for shares, share in ((2, 2), (2_000, 0), (0, 0)):
        with pytest.raises(BadRequest):
            world.reserve("x", keys(10), shares=shares, share=share)
    for share in range(3):
        world.do(m.Abort(world.ident("g"), writer=True, share=share))
    with pytest.raises(ReservationEnded):
        shared(world, 2)
    wide = World(parts=2)
    with pytest.raises(BadRequest, match="several parts"):
        wide.reserve("x", keys(4), shares=2, share=0)
