"""Any history, then a new life of the Master: what could be hit can be hit again, in the same slots, in any order told.

The nodes' files hold the header of every committed block (recovery_world.files_of); strands arrive in any order, nodes
interleaved. All invariants are checked after every command (World.do).
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_master.core import messages as m
from unit.core_world import World, chain, slots_of
from unit.recovery_world import blocks_of, come_back, files_of, restart, tell

NODES = ("n", "n2")
WORDS = st.text("abc", min_size=1, max_size=7)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), WORDS, st.sampled_from(NODES)),
        st.tuples(st.just("split"), WORDS, st.booleans()),
        st.tuples(st.just("half"), WORDS, st.integers(0, 3)),
        st.tuples(st.just("remove"), WORDS, st.integers(0, 3)),
        st.tuples(st.just("touch"), WORDS, st.none()),
        st.tuples(st.just("wait"), st.just(""), st.integers(1, 400)),
    ),
    max_size=25,
)


def store(world: World, keys: bytes, name: str, nodes: tuple[str, ...]) -> None:
    """Write whatever is granted of each part."""
    answer = world.reserve(name, keys, nodes=nodes)
    for part in range(world.parts):
        mine = [run for run in answer.runs if run.state is m.RunState.YOURS and run.part_from <= part < run.part_to]
        if mine:
            world.commit(name, sum(run.blocks for run in mine), (part, part + 1), final=True)


def live(world: World, steps: list[tuple[str, str, Any]]) -> set[str]:
    """Play a history; the chains that were named."""
    named: set[str] = set()
    for number, (what, words, how) in enumerate(steps):
        keys, name = chain(words), f"r{number}"
        named.add(words)
        if what == "put":
            store(world, keys, name, (how,))
        elif what == "split":
            nodes = (NODES if how else NODES[::-1])[: world.parts]
            store(world, keys, name, nodes)
        elif what == "half":
            answer = world.reserve(name, keys, nodes=("n",))
            granted = [run for run in answer.runs if run.state is m.RunState.YOURS and run.part_from == 0]
            if granted:
                world.commit(name, min(how, sum(run.blocks for run in granted)), (0, 1), final=bool(how % 2))
        elif what == "remove":
            world.do(m.Remove(world.namespace, keys, min(how, len(words))))
        elif what == "touch":
            world.lookup(keys, lease=name)
        else:
            world.tick(after_ms=how)
    return named - {""}


@settings(max_examples=150, deadline=None)
@given(st.data(), STEPS, st.sampled_from([1, 2]), st.sampled_from(["root", "any"]), st.integers(4, 24))
def test_what_could_be_hit_can_be_hit_again(
    data: st.DataObject, steps: list[tuple[str, str, Any]], parts: int, entry: str, slots: int
) -> None:
    world = World(parts=parts, entry=entry, slots=slots, incomplete_grace_ms=100)
    world.register("n2", 1)
    named = live(world, steps)
    before = {words: _places(world, words) for words in named}
    files = files_of(world.pool)
    restart(world)
    heads: dict[str, tuple[int, int]] = {name: come_back(world, name) for name in NODES}
    todo: list[tuple[str, Any]] = []
    for name in NODES:
        world.do(m.InventorySlabs(name, 1, heads[name][1], heads[name][0], files[name].slabs))
        todo += [(name, held) for held in files[name].held]
    for name, held in data.draw(st.permutations(todo)):
        tell(world, held, heads[name][0], (name, 1, heads[name][1]))
        words = data.draw(st.sampled_from(sorted(named)))
        assert len(_places(world, words)) <= len(before[words])
    for name in NODES:
        world.do(m.InventoryEnd(name, 1, heads[name][1], sum(blocks_of(held.strand) for held in files[name].held), 0))
    assert world.pool.recovery.ready
    for words in named:
        assert _places(world, words) == before[words], words
    world.tick(after_ms=1_000)
    for words in named:
        assert _places(world, words) == before[words], f"{words}, after the graces"
    for words in named:  # and all can be written to
        store(world, chain(words), f"again{words}", ())
        world.tick()


def _places(world: World, words: str) -> dict[tuple[int, int], tuple[str, int]]:
    """(block, part) -> (node, slot) of what could be hit."""
    nodes = {one.handle: node.name for node in world.pool.liveness.nodes.values() for one in node.segments}
    found = slots_of(world.peek(chain(words)).extents)
    return {place: (nodes[handle], slot) for place, (handle, slot) in found.items()}
