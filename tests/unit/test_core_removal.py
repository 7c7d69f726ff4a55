"""Eviction, removal, purge, bad bytes, and how space comes back."""

from __future__ import annotations

import gc

import pytest

from kvpool_master.core import extents as ex
from kvpool_master.core import messages as m
from kvpool_master.core.messages import GoneReason, Reason
from kvpool_master.core.segments import LIST_SLACK
from kvpool_master.core.spans import Piece, Span
from kvpool_proto.errors import NamespaceDiffers, SlotTooLarge, UnknownNamespace
from kvpool_proto.namespace import NamespaceSpec
from unit.core_world import PART_BYTES, World, chain


def spec(model: str, part_bytes: int, **more: object) -> NamespaceSpec:
    return NamespaceSpec(
        model=model,
        block_tokens=1,
        part_bytes=part_bytes,
        dtype="int8",
        key_bytes=8,
        **more,  # type: ignore[arg-type]
    )


def test_leaves_go_first_tail_before_head_oldest_first() -> None:
    world = World(slots=9)
    world.put(chain("abcx"))
    world.put(chain("abcy"))
    world.put(chain("pqrs"))  # slots: a b c x y p q r s
    gone: list[str] = []
    names = {"x": "abcx", "y": "abcy", "c": "abc", "b": "ab", "a": "a", "s": "pqrs", "r": "pqr"}
    for new in range(6):
        world.put(chain([100 + new]))
        gone += [name for name, path in names.items() if name not in gone and world.hit(chain(path)) < len(path)]
    assert gone == ["x", "y", "c", "b", "a", "s"]


def test_a_hit_touches_its_deepest_block_and_so_all_before_but_not_what_lies_behind() -> None:
    world = World(slots=8)
    world.put(chain("abcd"))
    world.put(chain("pqrs"))
    world.lookup(chain("ab"))
    world.release("lease")
    for new in range(6):
        world.put(chain([100 + new]))
        left = (world.hit(chain("abcd")), world.hit(chain("pqrs")))
        assert left == [(3, 4), (2, 4), (2, 3), (2, 2), (2, 1), (2, 0)][new]


def test_a_parent_inherits_the_age_of_its_last_child() -> None:
    world = World(slots=6)
    world.put(chain("ab"))
    world.put(chain("pq"))
    world.put(chain("abc"))
    world.put(chain("xyz"))  # evicts p q, and c: then b is as old as c was
    assert world.hit(chain("pq")) == 0
    assert world.hit(chain("abc")) >= 2


def test_eviction_works_ahead_between_the_watermarks() -> None:
    world = World(
        slots=100, evict_ahead=True, watermark_high_permille=900, watermark_low_permille=500, evict_step_spans_max=2
    )
    for number in range(9):
        world.put(chain([number, *range(9)]))
    world.tick()
    before = world.used_slots
    world.put(chain([77, *range(9)]))
    world.tick()
    assert world.used_slots == before + 10 - 20, "two spans a Tick"
    for _ in range(10):
        world.tick()
    size = world.pool.space.segments[1].allocator.size_bytes
    assert 0.4 * size < world.used_slots * PART_BYTES <= 0.5 * size
    assert world.hit(chain([77, *range(9)])) == 10


def test_a_pass_that_frees_nothing_says_why() -> None:
    world = World(slots=4)
    world.put(chain("abcd"))
    world.lookup(chain("abcd"))
    assert world.put(chain("x")).reason is Reason.NO_SPACE
    assert world.pool.counters.evict_blocked == {"leased": 1}
    counters = world.pool.namespaces[world.namespace].counters
    assert counters.short_reserves == {Reason.NO_SPACE: 1}


def test_removed_blocks_hide_at_once_and_free_when_the_leases_of_then_have_ended() -> None:
    world = World()
    world.put(chain("abcdef"))
    world.lookup(chain("abcdef"), lease="before")
    assert world.do(m.Remove(world.namespace, chain("abcd"), 2)) == m.Removed(2, ("n",)), "not to be cleared yet"
    assert world.peek(chain("abcdef")).reason is Reason.HOLE
    assert (world.hit(chain("abcdef")), world.hit(chain("abcdef"), 4), world.used_slots) == (2, 2, 6)
    world.lookup(chain("ab"), lease="after")
    world.tick()
    assert world.used_slots == 6
    world.release("before")
    world.tick()
    assert world.used_slots == 4
    assert world.put(chain("abcdef")).runs[1] == m.Run(2, 2, 0, 1, m.RunState.YOURS), "just the hole"
    assert world.hit(chain("abcdef")) == 6


def test_a_hole_goes_when_nothing_hangs_below() -> None:
    world = World()
    world.put(chain("abcd"))
    world.do(m.Remove(world.namespace, chain("ab"), 0))
    world.do(m.Remove(world.namespace, chain("abcd"), 2))
    assert world.pool.namespaces[world.namespace].tree.spans == 0
    assert world.peek(chain("abcd"), explain=True).gone == m.Gone(GoneReason.REMOVED, 0, 0)


def test_a_hole_that_only_a_lease_kept_goes_when_it_is_cut_off() -> None:
    world = World()
    world.put(chain("ab"))
    world.lookup(chain("a"))
    world.do(m.Remove(world.namespace, chain("ab"), 0))
    tree = world.pool.namespaces[world.namespace].tree
    assert tree.spans == 1, "a hole under a lease"
    world.put(chain("a"))
    assert (tree.spans, world.hit(chain("ab"))) == (1, 1)
    world.do(m.Remove(world.namespace, chain("a"), 0))
    world.put(chain("ax"))
    assert (tree.spans, world.hit(chain("ax"))) == (1, 2)


def test_bad_bytes_take_one_block_and_only_with_its_stamp() -> None:
    world = World()
    stamp = ex.extents(world.put(chain("abcd")).extents)[0].stamp
    assert world.do(m.BlockBad(world.namespace, chain("ab"), stamp + 1)).blocks == 0
    assert world.do(m.BlockBad(world.namespace, chain("ab"), stamp)).blocks == 1
    assert (world.hit(chain("abcd")), world.hit(chain("abcd"), skip=2)) == (1, 2)


def test_purge_hides_all_ends_reservations_and_frees_in_slices() -> None:
    world = World(tick_spans_max=1)
    for number in range(5):
        world.put(chain([number, 1, 2]))
    world.lookup(chain([0, 1, 2]))
    world.reserve("open", chain("abc"))
    assert world.do(m.Purge(world.namespace)).blocks == 15
    assert (world.hit(chain([0, 1, 2])), world.used_slots) == (0, 18)
    world.tick()
    assert world.used_slots == 18, "a reader may still be copying"
    world.release("lease")
    world.do(m.Abort(world.ident("open"), True))
    assert world.used_slots == 15
    for _ in range(3):
        world.tick()
    assert 0 < world.used_slots < 15
    for _ in range(5):
        world.tick()
    assert world.used_slots == 0
    world.put(chain([0, 1, 2]))
    assert world.hit(chain([0, 1, 2])) == 3


def test_slabs_move_to_the_slot_size_that_needs_them() -> None:
    world = World(slots=16, slabs=2)
    world.put(chain(range(16)))
    world.put(chain(range(100, 116)))
    large = world.do(m.OpenNamespace(spec("large", 65536)))
    assert large.effects == (m.Remember(namespace=spec("large", 65536)),), "both slabs are in use"
    world.do(m.Remove(world.namespace, chain(range(100, 116)), 0))
    reserve = m.Reserve(large.namespace, b"1" * 16, m.Parent.ROOT, chain("ab"), 0, 1)
    assert world.do(reserve).reason is Reason.SLAB_PENDING, "an empty slab is being bound"
    again = world.do(m.Reserve(large.namespace, b"2" * 16, m.Parent.ROOT, chain("ab"), 0, 1))
    assert (again.answered, again.reason) == (2, Reason.NONE)
    assert world.hit(chain(range(16))) == 16


def test_a_slot_size_that_finds_no_slab_gets_one_whose_blocks_are_old() -> None:
    world = World(slots=16, slabs=2)
    large = world.do(m.OpenNamespace(spec("large", 65536)))
    for number in range(8):
        world.put(chain([number, 1, 2, 3]))
    world.now += 10_000
    reserve = m.Reserve(large.namespace, b"1" * 16, m.Parent.ROOT, chain("ab"), 0, 1)
    assert world.do(reserve).reason is Reason.NO_SPACE
    world.tick()
    assert world.do(m.Reserve(large.namespace, b"2" * 16, m.Parent.ROOT, chain("ab"), 0, 1)).answered == 2
    assert sum(world.hit(chain([number, 1, 2, 3])) for number in range(8)) == 16


def test_what_goes_is_freed_without_the_cycle_collector() -> None:
    world = World(slots=64, parts=2)
    gc.collect()
    before = sum(type(one) in (Span, Piece) for one in gc.get_objects())
    gc.disable()
    try:
        for number in range(400):
            keys = chain([number % 7, number, 1, 2, number % 3])
            world.put(keys, name=f"put{number}")  # evicts, since the pool holds six of them
            world.lookup(keys, lease="one")
            if number % 5 == 0:
                world.do(m.Remove(world.namespace, keys, 1))
            if number % 50 == 0:
                world.do(m.Purge(world.namespace))
            world.tick(after_ms=300)
        world.release("one")
        world.do(m.Purge(world.namespace))
        world.tick()
        world.tick(after_ms=10_000)
        left = sum(type(one) in (Span, Piece) for one in gc.get_objects()) - before
        # Lazy heaps and lists may hold some of the dead; a root or two a purge is a cycle of its own.
        assert left < 2 * LIST_SLACK + 3 * 9
    finally:
        gc.enable()


def test_namespaces() -> None:
    world = World()
    assert world.do(m.OpenNamespace(world.spec)).namespace == world.namespace
    other = NamespaceSpec(model="m", block_tokens=1, part_bytes=16384, dtype="int8", key_bytes=8, entry="any")
    with pytest.raises(NamespaceDiffers):
        world.do(m.OpenNamespace(other))
    with pytest.raises(SlotTooLarge):
        world.do(m.OpenNamespace(spec("huge", world.slab_bytes)))
    with pytest.raises(UnknownNamespace):
        world.do(m.Purge(bytes(16)))
    assert world.do(m.OpenNamespace(spec("m", 16384, tenant="else"))).namespace != world.namespace


def test_removed_blocks_come_back_neither_from_their_slots_nor_to_them_before_the_node_has_cleared() -> None:
    world = World(slots=4)
    world.put(chain("abcd"))
    world.clears = False
    removed = world.do(m.Remove(world.namespace, chain("abcd"), 2))
    (order,) = world.uncleared
    assert removed.nodes_away == ()
    assert [run[:2] for run in order.runs] == [(2, 2)]
    assert world.reserve("r", chain("xy")).answered == 2, "by eviction of a and b"
    assert world.used_slots == 4
    world.do(m.SessionLost("n", 1))
    answer = world.do(m.Register("n", 1, (m.SegmentOffer(0, world.slab_bytes, world.slab_bytes),)))
    assert order in answer.effects
    world.clear()
    assert world.used_slots == 2


def test_a_removal_names_the_nodes_that_are_away() -> None:
    world = World()
    world.put(chain("abcd"))
    world.do(m.SessionLost("n", 1))
    assert world.do(m.Remove(world.namespace, chain("abcd"), 2)).nodes_away == ("n",)


def test_a_purge_is_told_to_the_nodes_when_the_leases_of_then_have_ended() -> None:
    world = World()
    world.put(chain("ab"))
    world.lookup(chain("ab"))
    purged = world.do(m.Purge(world.namespace))
    assert purged.effects == (m.Remember(tombstone=(world.namespace, purged.stamp)),)
    assert world.tick().effects == ()
    world.release("lease")
    assert world.tick().effects == (m.Bury(world.namespace, purged.stamp),)
    assert world.tick().effects == ()
