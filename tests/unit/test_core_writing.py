"""Reserve, commit, abort: who writes what, what becomes visible, what comes back."""

from __future__ import annotations

import pytest

from kvpool_master.core import extents as ex
from kvpool_master.core import messages as m
from kvpool_master.core.messages import Reason, RunState
from kvpool_master.core.segments import LIST_SLACK
from kvpool_proto.errors import (
    BadRequest,
    CommitTooLarge,
    ForeignId,
    PartOutOfRange,
    ReservationEnded,
    UnknownReservation,
)
from unit.core_world import World, chain, slots_of


def test_blocks_become_visible_as_the_running_total_grows() -> None:
    world = World()
    answer = world.reserve("r", chain("abcdef"))
    assert answer.runs == (m.Run(0, 6, 0, 1, RunState.YOURS),)
    assert world.peek(chain("abcdef")).reason is Reason.BEING_WRITTEN
    for total in (2, 2, 5, 4):
        world.commit("r", total)
    assert world.hit(chain("abcdef")) == 5
    assert world.commit("r", 6, final=True) == m.Committed(6, 0)
    hit = world.lookup(chain("abcdef"))
    assert len(ex.extents(hit.extents)) == 1, "increments are joined again"


def test_a_second_writer_is_told_and_gets_only_the_rest() -> None:
    world = World()
    world.reserve("one", chain("abcd"))
    world.commit("one", 2)
    second = world.reserve("two", chain("abcdef"))
    assert second.runs == (
        m.Run(0, 2, 0, 1, RunState.EXISTS),
        m.Run(2, 2, 0, 1, RunState.BEING_WRITTEN),
        m.Run(4, 2, 0, 1, RunState.YOURS),
    )
    world.commit("two", 2, final=True)
    assert world.hit(chain("abcdef")) == 2
    world.commit("one", 4, final=True)
    assert world.hit(chain("abcdef")) == 6


def test_a_divergence_in_the_middle_of_a_span_being_written() -> None:
    world = World()
    world.reserve("one", chain("abcdef"))
    world.put(chain("abcxyz"), name="two")
    assert world.hit(chain("abcxyz")) == 0
    world.commit("one", 4)
    assert (world.hit(chain("abcxyz")), world.hit(chain("abcdef"))) == (6, 4)
    assert world.commit("one", 6, final=True).blocks == 6


def test_a_block_is_visible_when_all_parts_are_there_and_parts_have_their_own_writers() -> None:
    world = World(parts=3)
    for rank in range(3):
        answer = world.reserve(f"rank{rank}", chain("abcd"), parts=(rank, rank + 1))
        assert answer.answered == 4
    world.commit("rank1", 4, parts=(1, 2), final=True)
    world.commit("rank0", 3, parts=(0, 1))
    assert world.hit(chain("abcd")) == 0
    world.commit("rank2", 2, parts=(2, 3))
    assert world.hit(chain("abcd")) == 2
    places = slots_of(world.lookup(chain("abcd")).extents)
    assert set(places) == {(block, part) for block in range(2) for part in range(3)}
    assert len(set(places.values())) == 6


def test_one_reservation_covers_all_parts_side_by_side() -> None:
    world = World(parts=4)
    answer = world.reserve("scheduler", chain("abc"))
    (extent,) = ex.extents(answer.extents)
    assert (extent.blocks, extent.part_from, extent.part_to, extent.stride) == (3, 0, 4, 4)
    for rank in (2, 0, 3, 1):
        assert world.hit(chain("abc")) == 0
        world.commit("scheduler", 3, parts=(rank, rank + 1), final=True)
    assert world.hit(chain("abc")) == 3


def test_a_part_given_up_in_the_middle_is_written_by_somebody_else() -> None:
    world = World(parts=3)
    world.reserve("all", chain("abcd"))
    world.commit("all", 4, parts=(0, 1), final=True)
    world.commit("all", 4, parts=(2, 3), final=True)
    world.commit("all", 1, parts=(1, 2), final=True)
    assert world.hit(chain("abcd")) == 1
    again = world.reserve("rank1", chain("abcd"), parts=(1, 2))
    assert [(run.offset, run.state) for run in again.runs] == [(0, RunState.EXISTS), (1, RunState.YOURS)]
    world.commit("rank1", 3, parts=(1, 2), final=True)
    places = slots_of(world.lookup(chain("abcd")).extents)
    assert len(places) == len(set(places.values())) == 12


def test_blocks_that_lack_a_part_go_after_a_grace() -> None:
    world = World(parts=2)
    world.reserve("half", chain("abcd"), parts=(0, 1))
    world.commit("half", 4, parts=(0, 1), final=True)
    assert world.peek(chain("abcd")).reason is Reason.PART_MISSING
    world.tick(after_ms=299)
    assert world.used_slots == 4
    world.tick(after_ms=1)
    assert world.used_slots == 0
    assert world.peek(chain("abcd")).reason is Reason.UNKNOWN_KEY


def test_the_grace_counts_from_the_end_of_the_last_writer() -> None:
    world = World(parts=2)
    world.reserve("half", chain("ab"), parts=(0, 1))
    world.commit("half", 2, parts=(0, 1), final=True)
    world.now += 250
    world.reserve("other", chain("ab"), parts=(1, 2))
    world.now += 99
    world.do(m.Abort(world.ident("other"), True))
    world.tick(after_ms=299)
    assert world.used_slots == 2
    world.tick(after_ms=1)
    assert world.used_slots == 0


def test_expiry_gives_up_the_rest_and_keeps_it_in_quarantine() -> None:
    world = World(slots=8)
    answer = world.reserve("slow", chain("abcdef"))
    world.commit("slow", 2)
    world.tick(after_ms=answer.write_ms)
    assert world.hit(chain("abcdef")) == 2
    assert world.used_slots == 6, "the writer may still be copying"
    with pytest.raises(ReservationEnded):
        world.commit("slow", 3)
    assert world.commit("slow", 2).blocks == 2, "the same again gets the same answer"
    world.commit("slow", 2, final=True)
    assert world.used_slots == 2, "the writer's word ends the quarantine"


def test_a_late_commit_that_is_refused_still_is_the_writers_word() -> None:
    world = World()
    world.tick(after_ms=world.reserve("slow", chain("abc")).write_ms)
    assert world.used_slots == 3
    with pytest.raises(ReservationEnded):
        world.commit("slow", 3, final=True)
    assert world.used_slots == 0


def test_quarantine_ends_after_its_time_or_with_the_writers_process() -> None:
    world = World()
    world.tick(after_ms=world.reserve("lost", chain("abc"), worker=7, nodes=("n",)).write_ms)
    world.tick(after_ms=4_999)
    assert world.used_slots == 3
    world.tick(after_ms=1)
    assert world.used_slots == 0
    world.tick(after_ms=world.reserve("killed", chain("abc"), worker=7, nodes=("n",)).write_ms)
    world.do(m.WorkerGone("n", 8))
    assert world.used_slots == 3
    world.do(m.WorkerGone("n", 7))
    assert world.used_slots == 0


def test_no_process_has_number_0_so_none_ends_a_schedulers_reservation() -> None:
    world = World()
    write_ms = world.reserve("scheduler", chain("abc")).write_ms
    world.do(m.WorkerGone("n", 0))
    assert (world.used_slots, len(world.pool.writes.open)) == (3, 1), "its ranks may be writing"
    world.tick(after_ms=write_ms)
    world.do(m.WorkerGone("n", 0))
    assert world.used_slots == 3, "and still may, in quarantine"


def test_a_dead_workers_open_reservations_end_at_once() -> None:
    world = World()
    world.reserve("dead", chain("abcd"), worker=7, nodes=("n",))
    world.commit("dead", 1)
    world.do(m.WorkerGone("n", 7))
    assert (world.used_slots, world.hit(chain("abcd"))) == (1, 1)
    assert world.reserve("next", chain("abcd")).runs[-1] == m.Run(1, 3, 0, 1, RunState.YOURS)


@pytest.mark.parametrize(("writer", "left"), [(True, 0), (False, 3)])
def test_an_abort_is_final_only_from_the_writer(writer: bool, left: int) -> None:
    world = World()
    world.reserve("r", chain("abc"))
    assert world.do(m.Abort(world.ident("r"), writer)).aborted
    assert world.used_slots == left
    assert world.peek(chain("abc")).reason is Reason.UNKNOWN_KEY
    assert not world.do(m.Abort(world.ident("r"), True)).aborted
    assert world.used_slots == 0


def test_an_abort_of_foreign_parts_changes_nothing() -> None:
    world = World(parts=3)
    world.reserve("r", chain("abc"), parts=(0, 2))
    for _ in range(2):
        with pytest.raises(PartOutOfRange):
            world.do(m.Abort(world.ident("r"), True, 1, 3))
        assert world.used_slots == 6, "open, then in quarantine"
        world.tick(after_ms=200)


def test_parts_go_to_the_nodes_that_they_name() -> None:
    world = World(parts=4)
    far = world.register("far", 1).handles
    answer = world.reserve("r", chain("ab"), nodes=("n", "far", "far", "n"))
    places = {(e.part_from, e.part_to): e.segment for e in ex.extents(answer.extents)}
    assert places == {(0, 1): 1, (1, 3): far[0], (3, 4): 1}
    world.commit("r", 2, parts=(0, 1), final=True)
    world.commit("r", 2, parts=(2, 3), final=True)
    world.do(m.Abort(world.ident("r"), True))
    rest = world.reserve("rest", chain("ab"), nodes=("n", "far", "n", "n"))
    assert {(e.part_from, e.part_to): e.segment for e in ex.extents(rest.extents)} == {(1, 2): far[0], (3, 4): 1}


def test_an_abort_that_overtakes_its_reserve_is_remembered() -> None:
    world = World()
    assert not world.do(m.Abort(world.ident("early"), True)).aborted
    with pytest.raises(ReservationEnded):
        world.reserve("early", chain("abc"))


def test_a_retried_reserve_is_the_same_reservation() -> None:
    world = World()
    first = world.reserve("r", chain("abc"))
    world.now += 30
    again = world.reserve("r", chain("abc"))
    assert (again.runs, again.extents, again.write_ms) == (first.runs, first.extents, first.write_ms - 30)
    with pytest.raises(ForeignId):
        world.reserve("r", chain("abd"))


def test_open_reservations_hold_at_most_their_share() -> None:
    world = World(slots=20, reserve_share_permille=300)
    first = world.reserve("one", chain("abcd"))
    second = world.reserve("two", chain("pqrs"))
    assert (first.answered, second.answered, second.reason) == (4, 2, Reason.RESERVE_SHARE)
    world.commit("one", 4, final=True)
    assert world.reserve("three", chain("xyz")).answered == 3


def test_a_put_never_evicts_its_own_chain() -> None:
    world = World(slots=6)
    world.put(chain("abcd"))
    answer = world.put(chain("abcdefghij"))
    assert (answer.answered, answer.reason) == (6, Reason.NO_SPACE)
    assert world.hit(chain("abcdefghij")) == 6


def test_nothing_is_kept_of_a_put_that_finds_all_there() -> None:
    world = World()
    world.put(chain("abc"))
    answer = world.reserve("again", chain("abc"))
    assert (answer.write_ms, answer.extents) == (0, b"")
    with pytest.raises(UnknownReservation):
        world.commit("again", 0)


def test_reservations_have_a_limit_and_need_a_node() -> None:
    world = World(reservations_max=1)
    world.reserve("one", chain("ab"))
    assert world.reserve("two", chain("xy")).reason is Reason.TOO_MANY_RESERVATIONS
    world.do(m.Abort(world.ident("one"), True))
    assert world.reserve("far", chain("xy"), nodes=("elsewhere",)).reason is Reason.NO_NODE


def test_stamps_rise_and_carry_the_epoch() -> None:
    world = World(epoch=77)
    stamps = [ex.extents(world.put(chain(word)).extents)[0].stamp for word in ("a", "b", "c")]
    assert stamps == sorted(set(stamps))
    assert {stamp >> 32 for stamp in stamps} == {77}


@pytest.mark.parametrize(
    ("low", "high", "blocks", "error"),
    [(0, 1, 4, CommitTooLarge), (1, 2, 1, PartOutOfRange), (0, 0, 1, PartOutOfRange), (0, 1, 1 << 31, CommitTooLarge)],
)
def test_bad_commits_are_refused(low: int, high: int, blocks: int, error: type[Exception]) -> None:
    world = World(parts=2)
    world.reserve("r", chain("abc"), parts=(0, 1))
    with pytest.raises(error):
        world.commit("r", blocks, parts=(low, high))
    assert world.commit("r", 3, parts=(0, 1)).blocks == 3


def test_bad_reserves_are_refused() -> None:
    world = World(parts=2)
    with pytest.raises(PartOutOfRange):
        world.reserve("r", chain("a"), parts=(1, 3))
    with pytest.raises(PartOutOfRange):
        world.reserve("r", chain("a"), parts=(1, 1))
    with pytest.raises(BadRequest):
        world.reserve("r", chain("a"), parent=m.Parent.UNKNOWN)
    with pytest.raises(BadRequest):
        world.reserve("r", chain("a"), nodes=("a", "b", "c"))


def test_a_part_written_on_another_node_lets_the_block_be_evicted_there_too() -> None:
    world = World(parts=2, slots=4)
    world.register("far", 1)
    world.reserve("near", chain("ab"), parts=(0, 1), nodes=("n",))
    world.commit("near", 2, parts=(0, 1), final=True)
    world.reserve("far", chain("ab"), parts=(1, 2), nodes=("far",))
    world.commit("far", 2, parts=(1, 2), final=True)
    assert world.hit(chain("ab")) == 2
    assert world.put(chain("xy"), nodes=("far",)).answered == 2
    assert world.hit(chain("ab")) == 0


def test_committing_in_steps_over_a_slab_border_keeps_runs_within_slabs() -> None:
    world = World(slots=4, slabs=2)
    world.reserve("r", chain("abcdefgh"))
    for total in range(1, 9):
        world.commit("r", total)
    found = ex.extents(world.lookup(chain("abcdefgh")).extents)
    assert sorted((one.first_slot, one.blocks) for one in found) == [(0, 4), (4, 4)]


def test_a_span_that_is_joined_while_its_slabs_list_is_swept_stays_in_the_list() -> None:
    """Found by the simulation (seed 1): the list was swept before the span had what it was listed for."""
    world = World(slots=128, slabs=2)
    world.put(chain(range(126)))
    world.put(chain("pq"))  # the first slab is full
    for number in range(LIST_SLACK - 1):
        world.put(chain([1000 + number]))
    world.put(chain("pqr"))  # listed once as a new span, once as a part of its parent, which is one too many
    assert world.hit(chain("pqr")) == 3
