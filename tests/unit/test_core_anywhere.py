"""entry = any: chains that start anywhere, orphans, joins, conflicts."""

from __future__ import annotations

from kvpool_master.core import messages as m
from kvpool_master.core.messages import Parent, Reason, RunState
from unit.core_world import KEY_BYTES, World, chain


def key(path: str) -> bytes:
    return chain(path)[-KEY_BYTES:]


def tail(path: str, start: int) -> bytes:
    return chain(path)[start * KEY_BYTES :]


def anywhere(**more: object) -> World:
    return World(entry="any", **more)  # type: ignore[arg-type]


def test_a_lookup_starts_wherever_its_first_key_is_known() -> None:
    world = anywhere()
    world.put(chain("abcdef"))
    hit = world.lookup(tail("abcdef", 2))
    assert (hit.blocks, hit.reason) == (4, Reason.NONE)
    assert world.hit(tail("abcdefg", 5)) == 1
    assert world.hit(tail("abcdef", 1), skip=2) == 3


def test_skipped_blocks_need_not_be_known() -> None:
    world = anywhere()
    world.put(tail("abcdef", 3), parent=Parent.UNKNOWN)
    assert world.hit(chain("abcdef")) == 0
    assert world.hit(chain("abcdef"), skip=3) == 3
    assert world.hit(chain("abcdef"), skip=4) == 2
    world.put(chain("abc"))
    world.put(tail("abcdef", 3), parent=key("abc"))
    assert world.hit(chain("xy") + tail("abcdef", 2), skip=2) == 0, "it follows another block"
    assert world.do(m.Remove(world.namespace, chain("abcdef"), 4)).blocks == 2


def test_an_explanation_is_of_the_first_block_asked_for() -> None:
    world = anywhere(slots=4)
    world.put(tail("abcd", 2), parent=Parent.UNKNOWN)
    world.put(chain("wxyz"))
    gone = world.peek(chain("abcd"), skip=2, explain=True).gone
    assert gone is not None
    assert gone.reason is m.GoneReason.EVICTED


def test_a_put_follows_a_key() -> None:
    world = anywhere()
    world.put(chain("abc"))
    world.put(tail("abcdef", 3), parent=key("abc"))
    assert world.hit(chain("abcdef")) == 6
    world.put(tail("abxyz", 2), parent=key("ab"))
    assert world.hit(chain("abxyz")) == 5


def test_an_orphan_is_found_and_joined_when_a_chain_shows_the_link() -> None:
    world = anywhere()
    world.put(tail("abcdef", 3), parent=Parent.UNKNOWN)
    assert world.hit(tail("abcdef", 3)) == 3
    answer = world.put(chain("abcdef"))
    assert answer.runs == (m.Run(0, 3, 0, 1, RunState.YOURS), m.Run(3, 3, 0, 1, RunState.EXISTS))
    assert world.hit(chain("abcdef")) == 6
    assert not list(world.pool.namespaces[world.namespace].tree.orphans.kids())


def test_an_orphan_after_a_parent_that_is_not_there_waits_below_a_hole() -> None:
    world = anywhere()
    world.put(tail("abcd", 2), parent=key("ab"))
    assert world.hit(tail("abcd", 2)) == 2
    assert world.hit(tail("abcd", 1)) == 0
    world.put(chain("ab"))
    assert world.hit(chain("abcd")) == 4


def test_an_orphan_that_turns_out_to_start_at_the_root() -> None:
    world = anywhere()
    world.put(chain("abc"), parent=Parent.UNKNOWN)
    world.put(chain("abcd"), parent=Parent.ROOT)
    assert world.hit(chain("abcd")) == 4
    assert [span.keys for span in world.pool.namespaces[world.namespace].tree.root.kids()] == [chain("abcd")]


def test_a_key_seen_after_two_parents_is_a_conflict() -> None:
    world = anywhere()
    world.put(chain("abc"))
    bad = chain("xy") + key("abc")
    answer = world.put(bad)
    assert (answer.answered, answer.reason) == (2, Reason.CONFLICT)
    assert world.hit(bad) == 2
    assert world.pool.namespaces[world.namespace].counters.conflicts == 1


def test_a_join_never_closes_a_circle() -> None:
    world = anywhere()
    world.put(chain("abc"), parent=Parent.UNKNOWN)
    circle = tail("abcz", 3) + key("a")
    answer = world.put(circle, parent=key("abc"))
    assert (answer.answered, answer.reason) == (1, Reason.CONFLICT)
    own = world.put(chain("p") + key("p"))
    assert (own.answered, own.reason) == (1, Reason.CONFLICT)
    parent = world.put(chain("q"), parent=key("q"))
    assert (parent.answered, parent.reason) == (0, Reason.CONFLICT)


def test_the_index_forgets_what_goes() -> None:
    world = anywhere(slots=6)
    world.put(chain("abcdef"))
    world.put(chain("xyz"))
    index = world.pool.namespaces[world.namespace].tree.index
    assert index is not None
    assert len(index) == 6
    assert world.hit(tail("abcdef", 3)) == 0
    world.do(m.Purge(world.namespace))
    assert world.hit(chain("abc")) == 0
