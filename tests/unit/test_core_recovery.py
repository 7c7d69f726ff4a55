"""recovery.py, intake.py, adopt.py: what an inventory brings back, and what it must not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool_master.core import messages as m
from kvpool_master.core.memory import Memory
from kvpool_master.core.messages import Reason
from kvpool_proto.errors import UnknownReservation
from kvpool_proto.namespace import NamespaceSpec
from unit.core_world import PART_BYTES, World, chain, slots_of
from unit.recovery_world import come_back, files_of, recover, report, restart, tell


@pytest.mark.parametrize("entry", ["root", "any"])
@pytest.mark.parametrize("backwards", [False, True])
def test_all_committed_blocks_are_back_where_they_were(entry: str, backwards: bool) -> None:
    world = World(entry=entry, parts=2)
    for words in ("abcdef", "abcxyz", "abcdgh", "q"):
        world.put(chain(words))
    before = {words: slots_of(world.peek(chain(words)).extents) for words in ("abcdef", "abcxyz", "abcdgh", "q")}
    count = len(files_of(world.pool)["n"].held)
    recover(world, reversed(range(count)) if backwards else range(count))
    for words, slots in before.items():
        found = slots_of(world.peek(chain(words)).extents)
        assert {place: slot for place, (_, slot) in found.items()} == {
            place: slot for place, (_, slot) in slots.items()
        }
    assert world.pool.counters.recovered_blocks == 12
    assert world.pool.recovery.ready


def test_a_lookup_is_answered_from_what_has_arrived() -> None:
    world = World()
    world.put(chain("abc"))
    world.put(chain("xyz"))
    file = files_of(world.pool)["n"]
    restart(world)
    handle, number = come_back(world)
    head = ("n", 1, number)
    world.do(m.InventorySlabs(*head, handle, file.slabs))
    first = tell(world, file.held[0], handle, head)
    assert first == m.Taken(3, 0, 0)
    assert sorted([world.hit(chain("abc")), world.hit(chain("xyz"))]) == [0, 3]
    assert not world.pool.recovery.ready
    assert world.lookup(chain("abc")).blocks + world.lookup(chain("xyz"), lease="other").blocks == 3


def test_nothing_is_reserved_evicted_or_bound_before_the_grace_is_over() -> None:
    world = World(slots=4)
    world.put(chain("ab"))
    recover(world)
    assert world.reserve("r", chain("xyz")).reason is Reason.STARTING
    assert world.do(m.OpenNamespace(_other(world))).effects == (m.Remember(namespace=_other(world)),)
    world.tick(after_ms=199)
    assert world.reserve("s", chain("xyz")).reason is Reason.STARTING
    world.tick(after_ms=1)
    assert world.reserve("t", chain("xyzw")).answered == 4, "two free slots, two by eviction"


def test_no_reservation_before_the_inventory_is_complete_however_long_it_takes() -> None:
    world = World(inventory_ms=10_000)
    world.put(chain("ab"))
    file = files_of(world.pool)["n"]
    restart(world)
    handle, number = come_back(world)
    report(world, file, handle, number, end=False)
    world.tick(after_ms=9_000)
    assert world.reserve("r", chain("xyz")).reason is Reason.STARTING
    world.do(m.InventoryEnd("n", 1, number, 2, 0))
    world.tick()
    assert world.reserve("s", chain("xyz")).answered == 3


def test_a_fresh_node_serves_at_once_beside_one_that_recovers() -> None:
    world = World()
    world.put(chain("ab"))
    restart(world)
    come_back(world)
    world.register("fresh", 1)
    assert world.reserve("r", chain("xyz"), nodes=("fresh",)).answered == 3
    assert world.reserve("s", chain("xyw"), nodes=("n",)).reason is Reason.STARTING


def test_slots_being_written_come_back_with_their_worker_or_after_the_quarantine() -> None:
    world = World(slots=8)
    world.put(chain("ab"))
    file = files_of(world.pool)["n"]
    file.writing = [(PART_BYTES, 4, 2, 5), (PART_BYTES, 7, 1, 0)]
    restart(world)
    report(world, file, *come_back(world))
    assert world.used_slots == 5
    world.do(m.WorkerGone("n", 6))
    world.do(m.WorkerGone("other", 5))
    assert world.used_slots == 5
    world.do(m.WorkerGone("n", 5))
    assert world.used_slots == 3
    world.tick(after_ms=4_999)
    assert world.used_slots == 3
    world.tick(after_ms=1)
    assert world.used_slots == 2


def test_a_part_that_is_there_already_is_surplus_and_its_slot_free() -> None:
    world = World()
    world.put(chain("abc"))
    file = files_of(world.pool)["n"]
    twin = m.Strand(m.Parent.ROOT, chain("abcd"), ((4, 20, 1, 1),))
    file.held.append(type(file.held[0])(world.namespace, PART_BYTES, (0, 1), twin))
    restart(world)
    taken = report(world, file, *come_back(world))
    assert taken[1] == m.Taken(1, 3, 0)
    assert world.hit(chain("abcd")) == 4
    assert world.used_slots == 4


def test_parts_of_two_nodes_make_blocks() -> None:
    world = World(parts=2)
    world.register("n2", 1)
    world.reserve("r", chain("abc"), nodes=("n", "n2"))
    world.commit("r", 3, final=True)
    files = files_of(world.pool)
    restart(world)
    first = come_back(world)
    second = come_back(world, "n2")
    report(world, files["n"], *first)
    assert (world.hit(chain("abc")), world.peek(chain("abc")).reason) == (0, Reason.PART_MISSING)
    report(world, files["n2"], *second, node="n2")
    assert world.hit(chain("abc")) == 3


def test_what_stays_incomplete_goes_after_the_grace() -> None:
    world = World(parts=2)
    world.register("n2", 1)
    world.reserve("r", chain("abc"), nodes=("n", "n2"))
    world.commit("r", 3, final=True)
    files = files_of(world.pool)
    restart(world)
    report(world, files["n"], *come_back(world))
    world.tick(after_ms=300)
    assert world.peek(chain("abc")).reason is Reason.UNKNOWN_KEY
    assert world.used_slots == 0


def test_an_orphan_is_joined_when_its_ancestors_arrive_from_another_node() -> None:
    world = World()
    world.register("n2", 1)
    world.put(chain("abc"), nodes=("n",))
    world.put(chain("abcdef"), nodes=("n2",))
    files = files_of(world.pool)
    restart(world)
    report(world, files["n2"], *come_back(world, "n2"), node="n2")
    assert world.hit(chain("abcdef")) == 0
    report(world, files["n"], *come_back(world))
    assert world.hit(chain("abcdef")) == 6


def test_an_orphan_whose_ancestors_never_come_is_dropped_and_a_put_joins_it_before() -> None:
    world = World(recovery_ms=1_000, orphan_grace_ms=5_000)
    world.register("n2", 1)
    world.put(chain("abc"), nodes=("n",))
    world.put(chain("abcdef"), nodes=("n2",))
    world.put(chain("x"), nodes=("n",))
    world.put(chain("xyz"), nodes=("n2",))
    files = files_of(world.pool)
    restart(world)
    report(world, files["n2"], *come_back(world, "n2"), node="n2")
    done = world.tick(after_ms=1_000)
    assert m.Remember(node_gone="n") in done.effects
    assert world.pool.recovery.ready
    world.put(chain("abcdef"), nodes=("n2",))
    assert world.hit(chain("abcdef")) == 6
    assert world.used_slots == 3 + 3 + 2
    world.tick(after_ms=5_000)
    world.tick()
    assert world.used_slots == 6, "nothing reaches y and z"
    assert world.hit(chain("abcdef")) == 6


def test_a_purge_is_for_ever_also_for_what_is_away() -> None:
    world = World()
    world.put(chain("abc"))
    file = files_of(world.pool)["n"]
    purged = world.do(m.Purge(world.namespace))
    told = m.Bury(world.namespace, purged.stamp)
    assert purged.effects == (m.Remember(tombstone=(world.namespace, purged.stamp)), told)
    world.put(chain("xyz"))
    file.held += files_of(world.pool)["n"].held
    restart(world)
    assert world.do(m.Register("other", 1, (m.SegmentOffer(0, 1 << 20, 1 << 19),))).tombstones == (
        (world.namespace, purged.stamp),
    )
    report(world, file, *come_back(world))
    assert (world.hit(chain("abc")), world.hit(chain("xyz"))) == (0, 3)
    assert world.pool.counters.dead_blocks == 3
    assert world.used_slots == 3


def test_a_strand_is_dead_in_the_middle_only() -> None:
    world = World()
    restart(world, Memory((world.spec,), ((world.namespace, 50),), ("n",), 0))
    handle, number = come_back(world)
    world.do(m.InventorySlabs("n", 1, number, handle, ((0, PART_BYTES),)))
    strand = m.Strand(m.Parent.ROOT, chain("abcdef"), ((2, 0, 1, 60), (2, 10, 1, 50), (2, 20, 1, 51)))
    taken = world.do(m.InventoryStrands("n", 1, number, handle, world.namespace, 8, PART_BYTES, 0, 1, (strand,)))
    assert taken == m.Taken(4, 2, 0)
    assert world.hit(chain("abcdef")) == 2
    world.do(m.InventoryEnd("n", 1, number, 6, 0))
    world.tick()
    world.put(chain("abcdef"))
    assert world.hit(chain("abcdef")) == 6
    assert world.used_slots == 6, "e and f were joined, c and d written anew"


def test_blocks_of_a_namespace_that_nobody_knows_wait_for_it() -> None:
    world = World(unclaimed_ms=10_000)
    world.put(chain("abc"))
    file = files_of(world.pool)["n"]
    restart(world, Memory(nodes=("n",)))
    assert report(world, file, *come_back(world))[0] == m.Taken(0, 0, 3)
    world.tick(after_ms=9_999)
    assert world.used_slots == 3
    world.do(m.OpenNamespace(world.spec))
    assert world.hit(chain("abc")) == 3


def test_blocks_of_a_namespace_that_nobody_opens_are_free_in_the_end() -> None:
    world = World(unclaimed_ms=10_000)
    world.put(chain("abc"))
    file = files_of(world.pool)["n"]
    restart(world, Memory(nodes=("n",)))
    report(world, file, *come_back(world))
    world.tick(after_ms=10_000)
    assert world.used_slots == 0
    world.do(m.OpenNamespace(world.spec))
    assert world.hit(chain("abc")) == 0


def test_with_its_memory_lost_the_longest_times_of_the_settings_are_waited_for() -> None:
    world = World(lease_max_ms=700, write_max_ms=300)
    world.put(chain("abc"))
    file = files_of(world.pool)["n"]
    restart(world, Memory())
    assert world.pool.recovery.ready
    report(world, file, *come_back(world))
    world.do(m.OpenNamespace(world.spec))
    world.tick(after_ms=699)
    assert world.reserve("r", chain("xyz")).reason is Reason.STARTING
    world.tick(after_ms=1)
    assert world.reserve("s", chain("xyz")).answered == 3


def test_a_node_client_that_restarts_keeps_everything() -> None:
    world = World(slots=8)
    offer = m.SegmentOffer(0, world.slabs * world.slab_bytes, world.slab_bytes, contents=9)
    handle = world.do(m.Register("k", 1, (offer,))).handles[0]
    world.put(chain("abc"), nodes=("k",))
    world.lookup(chain("abc"))
    world.reserve("r", chain("xyz"), nodes=("k",), worker=7)
    world.do(m.SessionLost("k", 1))
    assert world.peek(chain("abc")).reason is Reason.NODE_AWAY
    offer = m.SegmentOffer(0, offer.size_bytes, offer.slab_bytes, contents=9, holds=True)
    back = world.do(m.Register("k", 2, (offer,), epoch_seen=1))
    assert back.handles == (handle,)
    assert back.effects == (m.AskWorkers("k", (7,)),)
    assert world.hit(chain("abc")) == 3
    assert world.commit("r", 3, final=True) == m.Committed(3, 0)
    assert world.do(m.Renew(world.ident("lease"))).lease_ms > 0


def test_a_node_client_that_restarts_with_other_contents_is_asked_for_them() -> None:
    world = World()
    world.put(chain("abc"))
    file = files_of(world.pool)["n"]
    world.do(m.SessionLost("n", 1))
    command = m.Register("n", 2, (m.SegmentOffer(0, world.slab_bytes, world.slab_bytes, contents=8, holds=True),), 1)
    answer = world.do(command)
    number = next(effect.number for effect in answer.effects if isinstance(effect, m.AskInventory))
    assert world.hit(chain("abc")) == 0
    report(world, file, answer.handles[0], number, incarnation=2)
    assert world.hit(chain("abc")) == 3
    assert world.reserve("r", chain("xyz")).reason is Reason.STARTING, "its old readers and writers may be alive"
    for _ in range(3):
        world.tick(after_ms=100)
    assert world.hit(chain("abc")) == 3, "the old copy was taken apart, not the new one"
    assert world.reserve("s", chain("xyz")).answered == 3


def test_a_commit_to_a_node_that_was_given_up_is_lost_even_before_it_is_taken_apart() -> None:
    world = World()
    world.reserve("r", chain("abc"), nodes=("n",))
    world.do(m.RetireNode("n", 1))
    assert world.commit("r", 3, final=True) == m.Committed(3, 3)
    assert world.hit(chain("abc")) == 0


def test_leases_and_reservations_of_the_former_epoch_are_unknown() -> None:
    world = World()
    world.reserve("r", chain("abc"))
    recover(world)
    with pytest.raises(UnknownReservation):
        world.commit("r", 3)


def test_ages_follow_the_stamps() -> None:
    world = World(slots=4)
    world.put(chain("a"))
    world.put(chain("b"))
    world.put(chain("c"))
    recover(world, [2, 0, 1])
    world.tick(after_ms=200)
    world.put(chain("xy"))
    assert [world.hit(chain(word)) for word in ("a", "b", "c")] == [0, 1, 1]


def test_a_returning_node_meets_a_directory_without_an_index() -> None:
    world = World(tick_spans_max=1, retire_ms=200_000, suspect_ms=100_000)
    world.register("n2", 1)
    for words in ("abcdef", "abcxyz", "pq"):
        world.put(chain(words), nodes=("n",))
    world.put(chain("abcdefgh"), nodes=("n2",))
    world.put(chain("pqrs"), nodes=("n2",))
    file = files_of(world.pool)["n2"]
    world.do(m.RetireNode("n2", 1))
    offer = m.SegmentOffer(0, world.slab_bytes, world.slab_bytes, contents=8, holds=True)
    answer = world.do(m.Register("n2", 1, (offer,), epoch_seen=1))
    asked = [effect for effect in answer.effects if isinstance(effect, m.AskInventory)]
    assert not asked, "the index is being built"
    for _ in range(20):
        world.put(chain("abcdefz"), nodes=("n",))
        asked += [effect for effect in world.tick().effects if isinstance(effect, m.AskInventory)]
    report(world, file, answer.handles[0], asked[0].number, node="n2")
    assert (world.hit(chain("abcdefgh")), world.hit(chain("pqrs"))) == (8, 4)
    world.tick()
    assert all(namespace.tree.index is None for namespace in world.pool.namespaces.values())


def _other(world: World) -> NamespaceSpec:
    return replace(world.spec, model="other", part_bytes=2 * PART_BYTES)


def test_a_copy_that_comes_back_stays_although_somebody_writes_the_block_anew() -> None:
    """Found by the simulation (seed 462): the copy counted as surplus, the writer gave up, and the block was lost."""
    world = World(slots=8)
    world.put(chain("abc"), nodes=("n",))
    file = files_of(world.pool)["n"]
    restart(world)
    world.register("n2", 1)
    assert world.reserve("r", chain("abcd"), nodes=("n2",)).answered == 4
    report(world, file, *come_back(world))
    assert world.hit(chain("abcd")) == 3
    assert world.commit("r", 4) == m.Committed(4, 3)
    assert world.hit(chain("abcd")) == 4
    assert world.used_slots == 3 + 3 + 1, "what was written for nothing waits for the writer's word"
    world.commit("r", 4, final=True)
    assert world.used_slots == 4
