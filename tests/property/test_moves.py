"""With room elsewhere a drain, and with replicas a node's death, loses nothing that could be hit.

Any history of puts on three nodes with ports; orders to copy are answered in any order, some of them short or twice.
All invariants are checked after every command (World.do). Where room is short: test_many_nodes_machine.py.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_master.core import messages as m
from property.test_recovery import store
from unit.core_world import World, chain

NODES = ("n", "o", "p")
WORDS = st.text("ab", min_size=1, max_size=6)
PUTS = st.lists(st.tuples(WORDS, st.lists(st.sampled_from(NODES), min_size=1, max_size=2).map(tuple)), max_size=8)
LESS = st.lists(st.integers(0, 3), max_size=2)
"""Answers that are short: fewer than make the core give up."""
TICKS_MAX = 120


def world_of(
    data: st.DataObject, puts: list[tuple[str, tuple[str, ...]]], replicas: int
) -> tuple[World, dict[str, int]]:
    """A pool with that history, of which each node could hold all; what can be hit of each word."""
    parts = data.draw(st.sampled_from([1, 2]))
    entry = data.draw(st.sampled_from(["root", "any"]))
    world = World(
        slots=64, slabs=4, nodes=NODES, parts=parts, entry=entry, copies_per_node_max=data.draw(st.integers(1, 3)),
        copy_run_bytes_max=16384 * data.draw(st.integers(1, 4)), tick_spans_max=data.draw(st.integers(1, 5)),
        replicas=replicas,
    )  # fmt: skip
    for number, (word, nodes) in enumerate(puts):
        store(world, chain(word), f"r{number}", nodes[:parts])
    hits = {word: world.hit(chain(word)) for word, _ in puts}
    assert all(hits[word] == len(word) for word in hits)
    return world, hits


def settle(world: World, data: st.DataObject, less: list[int], done: str = "") -> None:
    """Answer orders in any order, the first ones with so many blocks less, until none comes or `done` is drained."""
    less, idle = list(less), 0
    for _ in range(TICKS_MAX):
        world.tick(after_ms=1)
        idle = 0 if world.copies else idle + 1
        if world.state(done).state == "drained" if done else idle > 3:
            return
        orders = data.draw(st.permutations(world.copies))
        kept = orders[: data.draw(st.integers(0, len(orders)))] or orders
        world.copies = [order for order in orders if order not in kept]
        for order in kept:
            blocks = max(0, order.source[1] - (less.pop() if less else 0))
            for _ in range(2):
                world.do(m.SlotsCopied(order.node, 1, order.order, blocks))
    raise AssertionError(f"never at rest: {world.copies}")


@settings(max_examples=60, deadline=None)
@given(st.data(), PUTS, LESS, st.sampled_from([1, 2]))
def test_a_drain_loses_nothing(
    data: st.DataObject, puts: list[tuple[str, tuple[str, ...]]], less: list[int], replicas: int
) -> None:
    world, hits = world_of(data, puts, replicas=replicas)
    if data.draw(st.booleans()):
        settle(world, data, [])
    world.do(m.Drain("n"))
    settle(world, data, less, done="n")
    assert world.state("n").drain_left_blocks == 0
    for word, blocks in hits.items():
        assert world.hit(chain(word)) == blocks, f"{word}, drained"
        assert "n" not in world.nodes_of(chain(word))
    world.do(m.RetireNode("n", 1))
    for word, blocks in hits.items():
        assert world.hit(chain(word)) == blocks, f"{word}, after the node has left"


@settings(max_examples=60, deadline=None)
@given(st.data(), PUTS, LESS, st.sampled_from(NODES))
def test_a_block_with_replicas_outlives_a_node(
    data: st.DataObject, puts: list[tuple[str, tuple[str, ...]]], less: list[int], dead: str
) -> None:
    world, hits = world_of(data, puts, replicas=2)
    settle(world, data, less)
    slots = world.used_slots
    assert slots == 2 * world.parts * len({word[:end] for word in hits for end in range(1, len(word) + 1)})
    world.do(m.SessionLost(dead, 1))
    for word, blocks in hits.items():
        assert world.hit(chain(word)) == blocks, f"{word}, while {dead} is away"
    world.do(m.RetireNode(dead, 1))
    for _ in range(3):
        for word, blocks in hits.items():
            assert world.hit(chain(word)) == blocks, f"{word}, {dead} is gone"
        world.tick(after_ms=1)
    settle(world, data, [])
    for _ in range(30):
        world.tick(after_ms=1)
    assert world.used_slots == slots, "each block has two copies again"
