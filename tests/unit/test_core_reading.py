"""Lookup, peek, leases: what is found, what is held, and for how long."""

from __future__ import annotations

import pytest

from kvpool_master.core import messages as m
from kvpool_master.core.messages import Reason
from kvpool_proto.errors import (
    BadId,
    ChainTooLong,
    EmptyChain,
    ForeignId,
    KeyLengthMismatch,
    UnknownLease,
    UnknownNamespace,
)
from kvpool_proto.namespace import NamespaceSpec
from unit.core_world import World, chain, slots_of


def test_a_stored_chain_is_found_whole_and_by_its_prefixes() -> None:
    world = World()
    granted = world.put(chain("abcdef"))
    hit = world.lookup(chain("abcdef"))
    assert (hit.blocks, hit.reason) == (6, Reason.NONE)
    assert slots_of(hit.extents) == slots_of(granted.extents)
    assert world.lookup(chain("abc"), lease="x").blocks == 3
    longer = world.lookup(chain("abcdefgh"), lease="y")
    assert (longer.blocks, longer.reason) == (6, Reason.UNKNOWN_KEY)


def test_skip_leaves_out_what_the_caller_holds() -> None:
    world = World()
    granted = world.put(chain("abcdef"))
    hit = world.lookup(chain("abcdef"), skip=4)
    assert hit.blocks == 2
    assert slots_of(hit.extents) == {place: slot for place, slot in slots_of(granted.extents).items() if place[0] >= 4}
    beyond = world.lookup(chain("abcdef"), skip=6, lease="z")
    assert (beyond.blocks, beyond.reason, beyond.lease_ms) == (0, Reason.NONE, 0)


def test_skipped_blocks_may_be_holes_but_must_be_known() -> None:
    world = World()
    world.put(chain("abcdef"))
    world.do(m.Remove(world.namespace, chain("abc"), 0))
    assert world.hit(chain("abcdef")) == 0
    assert world.peek(chain("abcdef")).reason is Reason.HOLE
    assert world.hit(chain("abcdef"), skip=3) == 3
    assert world.hit(chain("xbcdef"), skip=3) == 0


def test_a_divergence_in_the_middle_of_a_span_being_read() -> None:
    world = World()
    world.put(chain("abcdef"))
    world.lookup(chain("abcdef"), lease="whole")
    world.lookup(chain("abc"), lease="front")
    world.put(chain("abcxyz"))
    assert world.hit(chain("abcdef")) == world.hit(chain("abcxyz")) == 6
    assert world.release("whole", "front") == 2


def test_a_chain_that_is_not_monotone_does_not_match_past_its_first_difference() -> None:
    world = World(slots=256)
    keys = chain(range(200))
    world.put(keys)
    for at in (0, 1, 77, 150, 199):
        twisted = keys[: at * 8] + b"\xff" * 8 + keys[(at + 1) * 8 :]
        assert world.hit(twisted) == at


def test_a_lease_keeps_its_blocks_and_all_before_from_eviction() -> None:
    world = World(slots=8)
    world.put(chain("abcdef"))
    world.lookup(chain("abc"))
    answer = world.put(chain(range(8)))
    assert answer.answered == 5, "d, e, f and the two free slots"
    assert world.hit(chain("abcdef")) == 3
    assert answer.reason is Reason.NO_SPACE
    world.release("lease")
    assert world.put(chain(range(8))).answered == 8
    assert world.hit(chain("abc")) == 0


def test_a_lease_ends_with_its_time_and_not_before() -> None:
    world = World(slots=6)
    world.put(chain("abcdef"))
    hit = world.lookup(chain("abcdef"))
    world.now += hit.lease_ms - 1
    assert world.put(chain("x")).reason is Reason.NO_SPACE
    world.now += 1
    assert world.put(chain("x")).reason is Reason.NONE
    assert world.pool.counters.leases_expired == 1


def test_a_lease_is_renewed_up_to_its_maximum_life() -> None:
    world = World()
    world.put(chain("ab"))
    left = world.lookup(chain("ab")).lease_ms
    lived = 0
    while left:
        world.now += left - 1
        lived += left - 1
        left = world.do(m.Renew(world.ident("lease"))).lease_ms
        assert left <= 200
        if left == 1:
            break
    assert lived + left == 1_000
    with pytest.raises(UnknownLease):
        world.do(m.Renew(world.ident("lease")), after_ms=1)


def test_a_lookup_under_the_id_of_another_one_is_refused() -> None:
    world = World()
    world.put(chain("abcdef"))
    world.lookup(chain("abcdef"))
    for other, skip in (("ab", 0), ("abcdef", 1), ("zz", 0)):
        with pytest.raises(ForeignId):
            world.lookup(chain(other), skip)
    assert world.lookup(chain("abcdef")).blocks == 6
    assert len(world.pool.leases) == 1


def test_a_release_that_overtakes_its_lookup_is_remembered() -> None:
    world = World()
    world.put(chain("ab"))
    assert world.release("early") == 0
    with pytest.raises(UnknownLease):
        world.lookup(chain("ab"), lease="early")
    world.tick(after_ms=1_001)
    assert world.lookup(chain("ab"), lease="early").blocks == 2


def test_leases_have_a_limit_that_is_a_miss_with_a_reason() -> None:
    world = World(leases_max=1)
    world.put(chain("ab"))
    world.lookup(chain("ab"), lease="one")
    second = world.lookup(chain("ab"), lease="two")
    assert (second.blocks, second.reason) == (0, Reason.TOO_MANY_LEASES)


def test_peek_neither_leases_nor_touches() -> None:
    world = World(slots=4)
    world.put(chain("ab"))
    world.put(chain("xy"))
    world.peek(chain("ab"))
    assert len(world.pool.leases) == 0
    world.put(chain("pq"))
    assert (world.hit(chain("ab")), world.hit(chain("xy"))) == (0, 2)


def test_what_went_is_explained() -> None:
    world = World(slots=4)
    world.put(chain("abcd"))
    world.now += 50
    world.put(chain("x"))
    world.now += 7
    gone = world.peek(chain("abcd"), explain=True).gone
    assert gone == m.Gone(m.GoneReason.EVICTED, ago_ms=7, idle_ms=50)
    assert world.peek(chain("never"), explain=True).gone is None


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (lambda w: m.Lookup(w.namespace, b"", 0, bytes(16)), EmptyChain),
        (lambda w: m.Lookup(w.namespace, bytes(9), 0, bytes(16)), KeyLengthMismatch),
        (lambda w: m.Lookup(w.namespace, bytes(8 * 11), 0, bytes(16)), ChainTooLong),
        (lambda w: m.Lookup(w.namespace, bytes(8), 0, bytes(15)), BadId),
        (lambda w: m.Lookup(bytes(16), bytes(8), 0, bytes(16)), UnknownNamespace),
        (lambda w: m.Peek(w.namespace, bytes(7), 0), KeyLengthMismatch),
        (lambda w: m.Release((b"short",)), BadId),
        (lambda w: m.Renew(bytes(16)), UnknownLease),
    ],
)
def test_bad_input_is_refused(command: object, error: type[Exception]) -> None:
    world = World(chain_blocks_max=10)
    with pytest.raises(error):
        world.do(command(world))  # type: ignore[operator]


def test_a_lease_id_of_another_namespace_is_foreign() -> None:
    world = World()
    world.put(chain("ab"))
    world.lookup(chain("ab"))
    other = NamespaceSpec(model="other", block_tokens=1, part_bytes=16384, dtype="int8", key_bytes=8)
    namespace = world.do(m.OpenNamespace(other)).namespace
    with pytest.raises(ForeignId):
        world.do(m.Lookup(namespace, chain("ab"), 0, world.ident("lease")))


def test_a_lookup_that_comes_twice_keeps_what_its_first_answer_named() -> None:
    """Found by the simulation: the second answer was shorter, and the first one's blocks were used again."""
    world = World(slots=4)
    world.put(chain("abcd"))
    assert world.lookup(chain("abcd")).blocks == 4
    world.do(m.Remove(world.namespace, chain("abcd"), 2))
    assert world.lookup(chain("abcd")).blocks == 2
    world.tick()
    assert world.used_slots == 4, "the first answer may still be read"
    world.do(m.Purge(world.namespace))
    assert world.lookup(chain("abcd")).blocks == 0
    world.tick()
    assert world.used_slots == 4
    world.release("lease")
    world.tick()
    world.tick()
    assert world.used_slots == 0
