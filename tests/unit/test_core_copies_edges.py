"""Copies at the edges: found by the machine of many nodes (tests/property), each by a few commands here."""

from __future__ import annotations

from kvpool_master.core import extents as ex
from kvpool_master.core import messages as m
from unit.core_world import World, chain


def keys(blocks: int, start: int = 0) -> bytes:
    return chain(range(start, start + blocks))


def stamps(world: World, blocks: bytes, node: str = "") -> set[int]:
    """Of what a lookup from a node is given."""
    hit = world.do(m.Lookup(world.namespace, blocks, 0, world.ident(f"stamps{world.now}{node}"), node))
    world.release(f"stamps{world.now}{node}")
    return {row[7] for row in ex.records(hit.extents)}


def test_a_copy_finds_room_for_all_parts_side_by_side_or_none() -> None:
    world = World(slots=8, nodes=("n", "o"), parts=2, replicas=2)
    world.reserve("odd", keys(7, 100), (0, 1), nodes=("o",))
    world.commit("odd", 7, (0, 1), final=True)
    world.do(m.BlockBad(world.namespace, keys(3, 100), (1 << 32) + 1))
    free = world.pool.space.segments[2].allocator.runs_of(world.spec.slot_bytes).runs()
    assert len(free) == 2
    assert all(length == 1 for _, length in free), "two slots, apart"
    world.put(keys(1), nodes=("n",))
    world.tick(after_ms=1)
    assert not world.copies
    assert world.hit(keys(1)) == 1


def test_a_lease_of_the_last_moment_is_waited_for() -> None:
    world = World(slots=4, nodes=("n", "o"))
    world.put(keys(4, 100), nodes=("o",))
    world.put(keys(2), nodes=("n",))
    world.do(m.Drain("n"))
    world.tick(after_ms=1)  # nothing can be moved
    assert world.lookup(keys(2)).blocks == 2
    world.tick(after_ms=1)
    assert world.hit(keys(2)) == 0, "hidden"
    assert world.state("n").state == "draining"
    world.release("lease")
    world.tick(after_ms=1)
    assert world.state("n").state == "drained"


def test_a_bad_replica_of_one_block_is_no_reason_to_drop_its_neighbours() -> None:
    world = World(slots=32, nodes=("n", "o"), replicas=2)
    world.put(keys(6), nodes=("n",))
    world.settle()
    (replica,) = stamps(world, keys(6), "o")
    world.do(m.BlockBad(world.namespace, keys(3), replica))
    assert world.nodes_of(keys(6), "o") == ["o", "o", "n", "o", "o", "o"]
    world.do(m.RetireNode("n", 1))
    assert world.hit(keys(6)) == 2


def test_all_parts_of_a_bad_block_are_replaced_wherever_they_lie() -> None:
    world = World(slots=32, nodes=("n", "o", "p"), replicas=2, parts=2)
    world.put(keys(2), nodes=("n", "o"))
    world.settle()
    (stamp,) = stamps(world, keys(2))
    assert world.do(m.BlockBad(world.namespace, keys(1), stamp)).blocks == 0
    assert stamp not in stamps(world, keys(1))
    assert world.hit(keys(2)) == 2


def test_each_part_has_replicas_of_its_own() -> None:
    world = World(slots=32, nodes=("n", "o", "p"), replicas=2, parts=2)
    world.put(keys(3), nodes=("n", "o"))
    world.settle()
    assert world.used_slots == 3 * 2 * 2
    world.do(m.RetireNode("o", 1))
    for _ in range(3):
        assert world.hit(keys(3)) == 3
        world.tick(after_ms=1)


def test_replicas_that_are_to_take_over_are_not_evicted() -> None:
    world = World(slots=8, nodes=("n", "o"), replicas=2)
    world.put(keys(6), nodes=("n",))
    world.settle()
    world.do(m.RetireNode("n", 1))  # nobody has taken it apart yet
    answer = world.reserve("r", keys(8, 100), nodes=("o",))
    assert answer.answered == 2
    assert world.hit(keys(6)) == 6
    world.tick(after_ms=1)
    assert world.hit(keys(6)) == 6


def test_what_a_replica_has_taken_over_is_free_in_a_node_that_is_gone() -> None:
    world = World(slots=32, nodes=("n", "o"), replicas=2, retire_spans_max=1)
    world.put(keys(3), nodes=("n",))
    world.put(keys(3, 100), nodes=("n",))
    world.settle()
    world.do(m.RetireNode("n", 1))
    world.tick(after_ms=1)  # one of two: every slot is free or held (World.do)
    assert 1 in world.pool.space.segments
    for _ in range(5):
        world.tick(after_ms=1)
    assert 1 not in world.pool.space.segments
    assert world.hit(keys(3)) == world.hit(keys(3, 100)) == 3
