"""Registration, liveness, retirement, stalls."""

from __future__ import annotations

import pytest

from kvpool_master.core import messages as m
from kvpool_master.core.messages import Reason
from kvpool_proto.errors import (
    BadRequest,
    BadSegment,
    LimitReached,
    NodeIdTaken,
    StaleIncarnation,
    UnknownNode,
    UnknownSegment,
)
from kvpool_proto.namespace import NamespaceSpec
from unit.core_world import PART_BYTES, World, chain

ALIVE = {"suspect_ms": 5_000, "retire_ms": 30_000}


def beat(world: World, node: str = "n", incarnation: int = 1) -> None:
    world.do(m.Heartbeat(node, incarnation))


def test_a_silent_node_is_suspect_then_retired() -> None:
    world = World(**ALIVE)  # type: ignore[arg-type]
    world.put(chain("abc"))
    world.tick(after_ms=4_999)
    assert world.hit(chain("abc")) == 3
    world.tick(after_ms=1)
    assert world.peek(chain("abc")).reason is Reason.NODE_AWAY
    assert world.reserve("r", chain("x")).reason is Reason.NO_NODE
    beat(world)
    assert world.hit(chain("abc")) == 3
    world.tick(after_ms=5_000)
    outcome = world.tick(after_ms=25_000)
    assert outcome.effects == (m.Retire("n", 1), m.Remember(node_gone="n"))
    assert world.peek(chain("abc"), explain=True).reason is Reason.UNKNOWN_KEY
    assert world.peek(chain("abc"), explain=True).gone == m.Gone(m.GoneReason.NODE_RETIRED, 0, 34_999 + 1)


def test_a_broken_session_makes_suspect_at_once() -> None:
    world = World()
    world.put(chain("abc"))
    world.do(m.SessionLost("n", 0))
    assert world.hit(chain("abc")) == 3, "an older life's session"
    world.do(m.SessionLost("n", 1))
    assert world.hit(chain("abc")) == 0
    assert world.pool.snapshot(0).nodes[0].state_reason == "session lost"
    world.register("n", 1)
    assert world.hit(chain("abc")) == 3


def test_a_run_ends_before_the_first_block_on_a_node_that_is_away() -> None:
    world = World(slots=4)
    world.register("far", 1)
    world.put(chain("abcd"), nodes=("n",))
    world.put(chain("abcdefg"), nodes=("far",))
    assert world.hit(chain("abcdefg")) == 7
    world.do(m.SessionLost("far", 1))
    hit = world.lookup(chain("abcdefg"))
    assert (hit.blocks, hit.reason) == (4, Reason.NODE_AWAY)
    world.do(m.SessionLost("n", 1))
    beat(world, "far")
    assert world.hit(chain("abcdefg")) == 0
    assert world.hit(chain("abcdefg"), skip=4) == 3


def test_two_lives_of_one_id() -> None:
    world = World()
    with pytest.raises(NodeIdTaken):
        world.register("n", 2)
    world.put(chain("abc"))
    world.do(m.SessionLost("n", 1))
    handles = world.register("n", 2).handles
    assert handles != (1,)
    with pytest.raises(StaleIncarnation):
        world.register("n", 1)
    with pytest.raises(StaleIncarnation):
        beat(world, "n", 1)
    assert world.hit(chain("abc")) == 0
    world.put(chain("abc"))
    assert world.hit(chain("abc")) == 3


def test_a_retired_node_costs_slices_of_its_own_spans() -> None:
    world = World(slots=32, tick_spans_max=2)
    world.register("far", 1)
    for number in range(6):
        world.put(chain([number, 1]), nodes=("far",))
    world.put(chain("keep"), nodes=("n",))
    world.do(m.RetireNode("far", 1))
    tree = world.pool.namespaces[world.namespace].tree
    assert tree.spans == 7
    world.tick()
    assert tree.spans == 5
    for _ in range(8):
        world.tick()
    assert tree.spans == 1
    assert set(world.pool.space.segments) == {1}
    assert world.hit(chain("keep")) == 4


def test_a_retired_node_takes_what_was_being_written_there() -> None:
    world = World(parts=2, slots=32)
    world.register("far", 1)
    world.reserve("r", chain("abcd"), nodes=("n", "far"))
    world.commit("r", 1, parts=(0, 2))
    world.do(m.RetireNode("far", 1))
    world.tick()
    assert world.commit("r", 3, parts=(1, 2)) == m.Committed(3, 2)
    assert world.commit("r", 4, parts=(0, 1), final=True).blocks == 4
    world.commit("r", 4, parts=(1, 2), final=True)
    assert world.hit(chain("abcd")) == 0
    world.tick(after_ms=300)
    assert world.used_slots == 0


def test_a_stalled_master_expires_nobody() -> None:
    world = World(**{**ALIVE, "stall_ms": 1_000})  # type: ignore[arg-type]
    world.put(chain("abc"))
    world.tick()
    world.tick(after_ms=60_000)
    assert world.hit(chain("abc")) == 3
    assert world.pool.counters.stalls == 1
    for _ in range(4):
        world.tick(after_ms=1_000)
    assert world.hit(chain("abc")) == 3
    world.tick(after_ms=1_000)
    assert world.hit(chain("abc")) == 0


def test_slabs_are_used_only_when_the_node_has_confirmed() -> None:
    world = World(slots=8, slabs=2, bind_ahead_permille=0)
    first = world.pool.apply(m.Reserve(world.namespace, b"1" * 16, m.Parent.ROOT, chain(range(12)), 0, 1), world.now)
    assert (first.answered, first.reason) == (8, Reason.SLAB_PENDING)
    (order,) = first.effects
    second = m.Reserve(world.namespace, b"2" * 16, m.Parent.ROOT, chain("x"), 0, 1)
    assert world.pool.apply(second, world.now).reason is Reason.SLAB_PENDING
    assert world.pool.apply(m.Register("n", 1, world.pool.liveness.nodes["n"].offers), world.now).effects == (order,), (
        "asked again when the node comes back"
    )
    world.do(m.SlabBound("n", 1, order.segment, order.slab, order.slot_bytes + 1))
    assert (
        world.pool.apply(m.Reserve(world.namespace, b"3" * 16, m.Parent.ROOT, chain("x"), 0, 1), world.now).reason
        is Reason.SLAB_PENDING
    ), "not what was asked"
    world.do(m.SlabBound("n", 1, order.segment, order.slab, order.slot_bytes))
    assert world.put(chain("x")).answered == 1


def test_a_slab_is_bound_where_one_is_left_although_scattered_slots_are_free() -> None:
    world = World(slots=5, parts=2, slabs=1)
    for node in ("second", "third"):
        world.register(node, 1)
    other = NamespaceSpec(model="other", block_tokens=1, part_bytes=2 * PART_BYTES, dtype="int8", key_bytes=8)
    world.do(m.Purge(world.namespace))
    for slab_of in ("n", "second"):
        assert world.put(chain([ord(slab_of[0]), 1]), nodes=(slab_of,)).answered == 2
    world.do(m.OpenNamespace(other))
    assert list(world.pool.liveness.nodes["third"].segments[0].allocator.per_size[PART_BYTES].slabs) == []
    assert world.reserve("r", chain("x")).reason is Reason.SLAB_PENDING
    assert world.put(chain("x")).answered == 1


def test_bad_registrations_are_refused() -> None:
    world = World(nodes_max=2, segments_per_node_max=2)
    good = m.SegmentOffer(0, world.slab_bytes, world.slab_bytes)
    for offers, error in (
        ((), BadSegment),
        ((m.SegmentOffer(0, 0, world.slab_bytes),), BadSegment),
        ((m.SegmentOffer(0, world.slab_bytes + 16384, world.slab_bytes),), BadSegment),
        ((m.SegmentOffer(0, 100, 100),), BadSegment),
        ((good, good), BadSegment),
        (tuple(m.SegmentOffer(index, world.slab_bytes, world.slab_bytes) for index in range(3)), LimitReached),
    ):
        with pytest.raises(error):
            world.do(m.Register("new", 1, offers))
    with pytest.raises(BadRequest):
        world.do(m.Register("", 1, (good,)))
    with pytest.raises(BadRequest):
        world.do(m.Register("new", 0, (good,)))
    with pytest.raises(BadSegment):
        world.do(m.Register("n", 1, (m.SegmentOffer(1, world.slab_bytes, world.slab_bytes),)))
    with pytest.raises(UnknownNode):
        beat(world, "nobody")
    with pytest.raises(UnknownSegment):
        world.do(m.SlabBound("n", 1, 99, 0, 16384))
    world.do(m.Register("second", 1, (good,)))
    with pytest.raises(LimitReached):
        world.do(m.Register("third", 1, (good,)))
