"""Copies between nodes: drains, replicas, hot runs; and what becomes of them when the world changes meanwhile."""

from __future__ import annotations

import pytest

from kvpool_master.core import extents as ex
from kvpool_master.core import messages as m
from kvpool_master.core.memory import Memory
from kvpool_master.core.messages import Reason
from kvpool_proto.errors import UnknownNode
from unit.core_world import PART_BYTES, World, chain


def keys(blocks: int, start: int = 0) -> bytes:
    return chain(range(start, start + blocks))


# -- drain


def test_a_drain_moves_what_is_there_and_nobody_misses_a_block() -> None:
    world = World(slots=64, nodes=("n", "o", "p"), parts=2)
    for number in range(3):
        world.put(keys(10, 100 * number), nodes=("n",))
    world.do(m.Drain("n"))
    assert world.state("n").state == "draining"
    world.settle()
    assert world.state("n").state == "drained"
    assert world.state("n").drain_left_blocks == 0
    for number in range(3):
        where = world.nodes_of(keys(10, 100 * number))
        assert len(where) == 10
        assert "n" not in where
    assert world.pool.counters.moved_blocks == 30
    world.do(m.RetireNode("n", 1))
    world.tick()
    assert sum(world.hit(keys(10, 100 * number)) for number in range(3)) == 30


def test_newest_blocks_are_moved_while_there_is_room() -> None:
    world = World(slots=8, nodes=("n", "o"))
    world.put(keys(8, 100), nodes=("o",))
    world.do(m.Remove(world.namespace, keys(8, 100), 4))
    world.put(keys(4), nodes=("n",))
    world.put(keys(4, 50), nodes=("n",), name="newer")
    world.tick(after_ms=1)
    world.do(m.Drain("n"))
    world.settle()
    assert world.state("n").state == "drained"
    assert world.nodes_of(keys(4, 50)) == ["o"] * 4
    assert world.peek(keys(4)).reason is Reason.NODE_AWAY, "no room was left for the older ones"
    assert world.hit(keys(4, 100)) == 4, "nothing is evicted for a move"


def test_leases_run_out_before_a_node_is_drained() -> None:
    world = World(nodes=("n", "o"))
    world.put(keys(6), nodes=("n",))
    hit = world.lookup(keys(6))
    world.do(m.Drain("n"))
    for _ in range(5):
        world.tick(after_ms=1)
        world.copied()
    assert world.nodes_of(keys(6)) == ["o"] * 6
    assert hit.blocks == 6
    assert world.state("n").state == "drained", "nodes_of lets time pass"

    world = World(nodes=("n", "o"))
    world.put(keys(6), nodes=("n",))
    world.lookup(keys(6))
    world.do(m.Drain("n"))
    for _ in range(5):
        world.tick(after_ms=1)
        world.copied()
    assert world.state("n").state == "draining"
    assert world.state("n").drain_left_blocks > 0
    world.release("lease")
    world.tick(after_ms=1)
    assert world.state("n").state == "drained"


def test_a_writer_at_work_is_waited_for() -> None:
    world = World(nodes=("n", "o"))
    world.reserve("r", keys(6), nodes=("n",))
    world.do(m.Drain("n"))
    for _ in range(5):
        world.tick(after_ms=1)
    assert world.state("n").state == "draining"
    world.commit("r", 6, final=True)
    world.settle()
    assert world.state("n").state == "drained"
    assert world.nodes_of(keys(6)) == ["o"] * 6
    assert world.reserve("s", keys(4, 100), nodes=("n",)).extents, "it went elsewhere"
    assert world.pool.counters.spilled_blocks == 4


def test_undrain_takes_writes_again_and_shows_what_is_left() -> None:
    world = World(slots=8, nodes=("n", "o"))
    world.put(keys(8, 100), nodes=("o",))
    world.put(keys(4), nodes=("n",))
    world.do(m.Drain("n"))
    world.settle()
    assert world.hit(keys(4)) == 0
    assert world.do(m.Undrain("n")).effects == (m.Remember(draining=("n", False)),)
    assert world.hit(keys(4)) == 4
    assert world.state("n").state != "drained"
    assert world.nodes_of(keys(4)) == ["n"] * 4
    assert world.reserve("s", keys(4, 900), nodes=("n",)).answered == 4


def test_a_drain_is_remembered_over_lives_and_refused_for_strangers() -> None:
    world = World(nodes=("n", "o"))
    assert world.do(m.Drain("n")).effects == (m.Remember(draining=("n", True)),)
    assert world.do(m.Drain("n")).effects == ()
    for verb in (m.Drain, m.Undrain):
        with pytest.raises(UnknownNode):
            world.do(verb("stranger"))
    later = World(nodes=("n", "o"), memory=Memory(nodes=("n", "o"), draining=("n",)))
    assert later.state("n").state == "draining"
    assert later.state("o").state == "ramp"
    later.do(m.RetireNode("n", 1))
    later.do(m.Undrain("n"))
    later.register("n", 2)
    assert later.state("n").state == "ramp"


def test_two_nodes_that_drain_at_once_do_not_move_to_each_other() -> None:
    world = World(nodes=("n", "o", "p"), copies_per_node_max=1)
    world.put(keys(10), nodes=("n",))
    world.put(keys(10, 100), nodes=("o",))
    world.do(m.Drain("n"))
    world.do(m.Drain("o"))
    world.settle()
    assert world.nodes_of(keys(10)) == world.nodes_of(keys(10, 100)) == ["p"] * 10


# -- the world changes while a copy is under way


@pytest.mark.parametrize("what", ["removed", "purged", "bad", "retired", "target gone", "undrained", "nothing"])
def test_a_copy_counts_only_for_blocks_that_still_are_what_was_copied(what: str) -> None:
    world = World(slots=32, nodes=("n", "o"))
    world.put(keys(8), nodes=("n",))
    (stamp,) = {row[7] for row in world_rows(world)}
    world.do(m.Drain("n"))
    world.tick()
    assert [order.source[1] for order in world.copies] == [8]
    if what == "removed":
        world.do(m.Remove(world.namespace, keys(8), 3))
    elif what == "purged":
        world.do(m.Purge(world.namespace))
    elif what == "bad":
        world.do(m.BlockBad(world.namespace, keys(4), stamp))
    elif what == "retired":
        world.do(m.RetireNode("n", 1))
        world.tick()
    elif what == "target gone":
        world.do(m.RetireNode("o", 1))
    elif what == "undrained":
        world.do(m.Undrain("n"))
    world.copied()
    expected = {"removed": 3, "purged": 0, "bad": 3, "retired": 0, "target gone": 8}.get(what, 8)
    assert world.hit(keys(8)) == expected
    world.settle()
    for _ in range(3):
        world.tick(after_ms=1)
    assert all(one.reserved_bytes == 0 for one in world.pool.space.segments.values())
    assert not world.pool.copies.open
    assert not world.pool.copies.busy


def world_rows(world: World) -> list[tuple[int, ...]]:
    tree = world.pool.namespaces[world.namespace].tree
    return [row for span in tree.root.kids() for row in ex.records(span.extents)]


def test_a_copy_cut_and_joined_meanwhile_is_installed_where_its_blocks_are() -> None:
    world = World(slots=64, nodes=("n", "o"))
    world.put(keys(8), nodes=("n",))
    world.do(m.Drain("n"))
    world.tick()
    fork = keys(5) + chain("x")
    world.put(fork, nodes=("o",))  # cuts the span that is being copied
    world.put(keys(12), nodes=("o",))
    world.copied(blocks=7)
    assert world.hit(keys(12)) == 12
    assert world.hit(fork) == 6
    assert world.nodes_of(keys(8))[:7] == ["o"] * 7
    world.settle()
    assert world.nodes_of(keys(12)) == ["o"] * 12


def test_an_order_without_an_answer_is_given_up_and_its_slots_cleared() -> None:
    world = World(slots=32, nodes=("n", "o"), copy_ms=1_000)
    world.put(keys(8), nodes=("n",))
    world.do(m.Drain("n"))
    world.tick()
    late = world.copies
    world.copies = []
    world.tick(after_ms=1_000)
    assert world.pool.counters.copies_failed == 1
    assert world.copies, "it is tried again"
    assert [order.node for order in late] == ["o"]
    world.do(m.SlotsCopied("o", 1, late[0].order, 8))
    assert world.hit(keys(8)) == 8
    world.settle()
    assert world.nodes_of(keys(8)) == ["o"] * 8


def test_a_move_that_always_fails_leaves_the_block_where_it_is() -> None:
    world = World(slots=32, nodes=("n", "o"))
    world.put(keys(8), nodes=("n",))
    world.do(m.Drain("n"))
    for _ in range(10):
        world.tick(after_ms=1)
        world.copied(blocks=0)
    assert world.state("n").state == "drained"
    world.do(m.Undrain("n"))
    assert world.nodes_of(keys(8)) == ["n"] * 8


# -- replicas


def test_replicas_are_made_read_at_home_and_take_over() -> None:
    world = World(slots=32, nodes=("n", "o", "p"), replicas=2, parts=2)
    world.put(keys(6), nodes=("n",))
    world.settle()
    assert world.pool.counters.replicated_blocks == 6
    (home,) = replica_nodes(world)
    assert home != "n"
    assert world.nodes_of(keys(6), home) == [home] * 6
    assert world.nodes_of(keys(6), "n") == ["n"] * 6
    world.do(m.SessionLost("n", 1))
    assert world.nodes_of(keys(6)) == [home] * 6
    world.do(m.RetireNode("n", 1))
    world.tick()
    assert world.hit(keys(6)) == 6
    assert world.nodes_of(keys(6)) == [home] * 6
    world.settle()
    assert world.pool.counters.replicated_blocks == 12, "on the third node"
    world.do(m.RetireNode(home, 1))
    world.tick()
    assert world.hit(keys(6)) == 6


def replica_nodes(world: World) -> set[str]:
    packed = world.pool.forest.replicas.of.values()
    return {world.pool.space.segments[handle].node for one in packed for handle in ex.segments(one)}


def test_all_runs_of_a_span_get_their_replica_and_one_that_fails_is_tried_again() -> None:
    world = World(slots=4, slabs=4, nodes=("n", "o"), replicas=2)
    world.put(keys(10), nodes=("n",))
    world.tick()
    world.copied(blocks=1)
    world.tick()
    world.copied(blocks=0)
    world.settle()
    assert world.nodes_of(keys(10), "o") == ["o"] * 10
    world = World(slots=16, nodes=("n", "o"), replicas=2)
    world.put(keys(10), nodes=("n",))
    for _ in range(5):
        world.tick(after_ms=1)
        world.copied(blocks=0)
    assert world.pool.counters.copies_failed == 3


def test_replicas_go_first_when_room_is_needed() -> None:
    world = World(slots=8, nodes=("n", "o"), replicas=2)
    world.put(keys(6), nodes=("n",))
    world.settle()
    assert world.used_slots == 12
    world.put(keys(8, 100), nodes=("o",))
    assert world.hit(keys(6)) == 6
    assert world.hit(keys(8, 100)) == 8
    assert not world.pool.forest.replicas


def test_a_replica_that_is_read_comes_back_when_the_reader_is_done() -> None:
    world = World(slots=8, nodes=("n", "o"), replicas=2)
    world.put(keys(6), nodes=("n",))
    world.settle()
    world.do(m.Lookup(world.namespace, keys(6), 0, world.ident("reader"), "o"))
    answer = world.reserve("r", keys(8, 100), nodes=("o",))
    assert answer.answered == 4, "two slots on o, two on n, and the reader keeps its own"
    world.release("reader")
    assert world.pool.space.segments[2].deferred_bytes == 0


def test_of_a_block_with_a_replica_only_the_bad_copy_goes() -> None:
    world = World(slots=32, nodes=("n", "o"), replicas=2)
    world.put(keys(6), nodes=("n",))
    world.settle()
    (stamp,) = {row[7] for row in world_rows(world)}
    assert world.do(m.BlockBad(world.namespace, keys(3), stamp)).blocks == 0
    assert world.hit(keys(6)) == 6
    assert world.nodes_of(keys(6), "n") == ["n", "n", "o", "n", "n", "n"]
    hit = world.do(m.Lookup(world.namespace, keys(1), 0, world.ident("x"), "o"))
    (replica,) = {row[7] for row in ex.records(hit.extents)}
    world.release("x")
    world.do(m.BlockBad(world.namespace, keys(1), replica))
    assert world.hit(keys(6)) == 6


def test_a_removed_block_takes_its_replicas_with_it() -> None:
    world = World(slots=32, nodes=("n", "o"), replicas=2)
    world.put(keys(6), nodes=("n",))
    world.settle()
    world.clears = False
    world.do(m.Remove(world.namespace, keys(6), 0))
    assert {order.node for order in world.uncleared} == {"n", "o"}
    world.clear()
    assert world.used_slots == 0
    assert not world.pool.forest.replicas


def test_hot_runs_are_copied_to_their_readers_only_if_asked_for() -> None:
    def read(world: World, times: int) -> None:
        """Hits from node o."""
        for number in range(times):
            world.do(m.Lookup(world.namespace, keys(6), 0, world.ident(f"l{number}"), "o"))
            world.release(f"l{number}")
        world.settle()

    world = World(nodes=("n", "o"))
    world.put(keys(6), nodes=("n",))
    read(world, 20)
    assert not world.pool.forest.replicas
    world = World(nodes=("n", "o"), copy_hits_min=3)
    world.put(keys(6), nodes=("n",))
    read(world, 2)
    assert not world.pool.forest.replicas
    read(world, 1 + 2)
    assert world.nodes_of(keys(6), "o") == ["o"] * 6
    assert world.nodes_of(keys(6), "n") == ["n"] * 6


def test_runs_of_a_copy_are_bounded() -> None:
    world = World(slots=64, nodes=("n", "o"), copy_run_bytes_max=3 * PART_BYTES, copies_per_node_max=2)
    world.put(keys(10), nodes=("n",))
    world.put(keys(10, 100), nodes=("n",))
    world.put(keys(10, 200), nodes=("n",))
    world.do(m.Drain("n"))
    world.tick()
    assert [order.source[1] for order in world.copies] == [3, 3]
    world.settle(ticks=200)
    assert world.state("n").state == "drained"
    assert world.nodes_of(keys(10)) == ["o"] * 10
