"""recovery.py, intake.py: whose inventory is next, and those that are refused."""

from __future__ import annotations

import pytest

from kvpool_master.core import messages as m
from kvpool_master.core.memory import Memory
from kvpool_proto.errors import BadRequest, StaleInventory
from unit.core_world import PART_BYTES, World, chain, slots_of
from unit.recovery_world import come_back, files_of, report, restart


def test_a_few_nodes_report_at_a_time_and_each_number_counts_once() -> None:
    world = World(inventories_max=2)
    restart(world, Memory((world.spec,), (), ("a", "b", "c"), 0))
    numbers = [come_back(world, name)[1] for name in "abc"]
    assert numbers[:2] == [1, 2]
    assert numbers[2] == 0
    handle = world.pool.liveness.nodes["a"].segments[0].handle
    world.do(m.InventorySlabs("a", 1, 1, handle, ()))
    done = world.do(m.InventoryEnd("a", 1, 1, 0, 0))
    assert done.effects == (m.AskInventory("c", 1, 3),)
    with pytest.raises(StaleInventory):
        world.do(m.InventoryEnd("a", 1, 1, 0, 0))
    with pytest.raises(StaleInventory):
        world.do(m.InventorySlabs("b", 1, 1, world.pool.liveness.nodes["b"].segments[0].handle, ()))


def test_a_node_that_comes_again_before_its_inventory_is_complete_starts_anew() -> None:
    world = World()
    world.put(chain("abc"))
    file = files_of(world.pool)["n"]
    restart(world)
    handle, number = come_back(world)
    report(world, file, handle, number, end=False)
    assert world.hit(chain("abc")) == 3
    again, next_number = come_back(world)
    assert again != handle
    assert next_number > number
    report(world, file, again, next_number)
    world.tick()
    assert world.hit(chain("abc")) == 3
    assert {place[0] for place in slots_of(world.peek(chain("abc")).extents).values()} == {again}
    assert list(world.pool.space.segments) == [again]


def test_an_inventory_that_makes_no_progress_is_given_up() -> None:
    world = World(inventory_ms=1_000)
    world.put(chain("abc"))
    restart(world)
    come_back(world)
    assert world.tick(after_ms=999).effects == ()
    assert world.tick(after_ms=1).effects == (m.Retire("n", 1), m.Remember(node_gone="n"))
    assert world.pool.counters.inventories_failed == 1


@pytest.mark.parametrize(
    "strand",
    [
        m.Strand(m.Parent.ROOT, chain("ab"), ((1, 0, 1, 1),)),
        m.Strand(m.Parent.ROOT, chain("ab"), ((2, 0, 1, 0),)),
        m.Strand(m.Parent.ROOT, chain("ab"), ((2, 63, 1, 1),)),
        m.Strand(m.Parent.ROOT, chain("ab"), ((2, 64, 1, 1),)),
        m.Strand(m.Parent.ROOT, chain("ab"), ((1, 5, 1, 1), (1, 5, 1, 2))),
        m.Strand(b"short", chain("ab"), ((2, 0, 1, 1),)),
        m.Strand(m.Parent.ROOT, b"", ()),
        m.Strand(m.Parent.ROOT, chain("ab"), ((2, 0, 0, 1),)),
    ],
    ids=["keys", "stamp", "slab-border", "no-slab", "twice", "parent", "empty", "stride"],
)
def test_an_inventory_that_breaks_a_rule_has_failed(strand: m.Strand) -> None:
    world = World()
    restart(world)
    handle, number = come_back(world)
    world.do(m.InventorySlabs("n", 1, number, handle, ((0, PART_BYTES),)))
    with pytest.raises(BadRequest):
        world.do(m.InventoryStrands("n", 1, number, handle, world.namespace, 8, PART_BYTES, 0, 1, (strand,)))
    with pytest.raises(StaleInventory):
        world.do(m.InventoryEnd("n", 1, number, 0, 0))
    assert not world.pool.recovery.ready


def test_an_inventory_that_ends_too_early_has_failed() -> None:
    world = World()
    restart(world)
    handle, number = come_back(world)
    with pytest.raises(BadRequest, match="slabs"):
        world.do(m.InventoryEnd("n", 1, number, 0, 0))
    handle, number = come_back(world)
    world.do(m.InventorySlabs("n", 1, number, handle, ((0, PART_BYTES),)))
    with pytest.raises(BadRequest, match="1"):
        world.do(m.InventoryEnd("n", 1, number, 1, 0))


def test_what_does_not_fit_its_namespace_is_surplus() -> None:
    world = World()
    restart(world)
    handle, number = come_back(world)
    world.do(m.InventorySlabs("n", 1, number, handle, ((0, 2 * PART_BYTES),)))
    strand = m.Strand(m.Parent.ROOT, chain("ab"), ((2, 0, 1, 1),))
    taken = world.do(m.InventoryStrands("n", 1, number, handle, world.namespace, 8, 2 * PART_BYTES, 0, 1, (strand,)))
    assert taken == m.Taken(0, 2, 0)
    world.do(m.InventoryEnd("n", 1, number, 2, 0))
    assert (world.hit(chain("ab")), world.used_slots) == (0, 0)
