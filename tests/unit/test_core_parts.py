"""The small pieces of the core by themselves: extents, allocator, ages, leases' memory, settings."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvpool_master.core import extents as ex
from kvpool_master.core.allocator import Allocator, FreeRuns
from kvpool_master.core.leases import DeadlineHeap, Remembered
from kvpool_master.core.settings import Settings
from kvpool_master.core.snapshot import EVICTED_IDLE_BOUNDS_S, NamespaceCounters, PoolCounters
from kvpool_master.core.spans import Span, Tree
from kvpool_proto.geometry import slab_bytes_for
from kvpool_proto.namespace import NamespaceSpec
from unit.core_world import slots_of

WIDE = ex.pack(0, 6, 1, 100, 0, 3, 3, 9) + ex.pack(6, 2, 1, 200, 0, 3, 3, 9)


@pytest.mark.parametrize("at", range(9))
def test_a_split_keeps_every_slot_and_joins_again(at: int) -> None:
    head, tail = ex.split(WIDE, at)
    moved = {(block + at, part): slot for (block, part), slot in slots_of(tail).items()}
    assert slots_of(head) | moved == slots_of(WIDE)
    assert ex.join(head, tail, at, lambda _: 1000) == WIDE


def test_runs_are_not_joined_across_a_slab_border() -> None:
    head, tail = ex.pack(0, 2, 1, 4, 0, 1, 1, 9), ex.pack(0, 2, 1, 6, 0, 1, 1, 9)
    assert ex.count(ex.join(head, tail, 2, lambda _: 8)) == 1
    assert ex.count(ex.join(head, tail, 2, lambda _: 6)) == 2


@pytest.mark.parametrize("mask", range(8))
def test_parts_are_cut_out_of_runs(mask: int) -> None:
    kept, cut = ex.without_parts(WIDE, mask)
    lost = slots_of(b"".join([ex.pack(*row) for row in cut]))
    assert slots_of(kept) | lost == slots_of(WIDE)
    assert {part for _, part in lost} == {part for part in range(3) if mask >> part & 1}


def test_the_allocator_never_hands_a_slot_out_twice_nor_across_slabs() -> None:
    chance = random.Random(5)
    runs = FreeRuns(16)
    for slab in range(12):
        runs.add_slab(slab)
    held: list[tuple[int, int]] = []
    for _ in range(20_000):
        if chance.random() < 0.5:
            unit = chance.choice([1, 1, 2, 3])
            run = runs.take(chance.randint(1, 40), unit)
            if run is not None:
                assert run[1] % unit == 0
                assert run[0] // 16 == (run[0] + run[1] - 1) // 16
                held.append(run)
        elif held:
            first, slots = held.pop(chance.randrange(len(held)))
            keep = chance.randrange(slots)
            if keep:
                held.append((first, keep))
            runs.give(first + keep, slots - keep)
        edge = 0
        if chance.random() < 0.02:
            for first, slots in sorted([*held, *runs.runs()]):
                assert first == edge
                edge += slots
            assert edge == 12 * 16


def test_the_allocator_prefers_a_run_that_fits_and_then_the_longest() -> None:
    runs = FreeRuns(64)
    runs.add_slab(0)
    whole = runs.take(64, 1)
    assert whole == (0, 64)
    for first, slots in ((0, 3), (8, 8), (32, 20)):
        runs.give(first, slots)
    assert runs.take(7, 1) == (8, 7)
    assert runs.take(40, 1) == (32, 20)
    assert runs.take(2, 2) == (0, 2)
    assert runs.take(2, 2) is None


def test_slabs_are_bound_and_empty_ones_bound_again() -> None:
    allocator = Allocator(2, slab_bytes_for(8, 4096))
    assert allocator.start_binding(4096, rebind=False) == 0
    assert not allocator.finish_binding(0, 8192)
    assert allocator.finish_binding(0, 4096)
    assert not allocator.finish_binding(0, 4096)
    assert allocator.start_binding(8192, rebind=False) == 1
    assert allocator.start_binding(8192, rebind=False) is None
    taken = allocator.runs_of(4096).take(1, 1)
    assert taken is not None
    assert allocator.start_binding(8192, rebind=True) is None
    allocator.runs_of(4096).give(*taken)
    assert allocator.start_binding(8192, rebind=True) == 0
    assert allocator.used_bytes() == 0


def test_ages_along_a_span_are_steps_that_never_rise() -> None:
    spec = NamespaceSpec(model="m", block_tokens=1, part_bytes=1, dtype="int8", key_bytes=8)
    span = Span(Tree(spec, spec.id, NamespaceCounters()), None, bytes(80), 5)
    span.touch(4, 9)
    assert span.steps() == ((4, 9), (10, 5))
    span.touch(7, 8)
    assert span.steps() == ((4, 9), (7, 8), (10, 5))
    span.touch(10, 6)
    assert span.steps() == ((4, 9), (7, 8), (10, 6))
    span.touch(8, 12)
    assert span.steps() == ((8, 12), (10, 6))
    span.touch(10, 13)
    assert span.steps() == ((10, 13),)


def test_deadlines_and_remembered_ids() -> None:
    heap = DeadlineHeap()
    heap.push(5, b"a")
    heap.push(3, b"b")
    assert heap.next_ms == 3
    assert heap.due(4) == [(3, b"b")]
    assert heap.next_ms == 5
    memory = Remembered(most=2, keep_ms=10)
    for at, name in enumerate((b"x", b"y", b"z")):
        memory.add(name, at)
    assert (b"x" in memory, b"y" in memory, len(memory)) == (False, True, 2)
    memory.expire(11)
    assert b"y" not in memory
    assert b"z" in memory


def test_idle_times_fall_into_their_buckets() -> None:
    counters = PoolCounters()
    for idle_ms in (0, 1_000, 1_001, 10**9):
        counters.evicted(2, idle_ms)
    assert counters.evicted_idle_buckets[:2] == [4, 2]
    assert counters.evicted_idle_buckets[len(EVICTED_IDLE_BOUNDS_S)] == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"chain_blocks_max": 0},
        {"watermark_low_permille": 960},
        {"reserve_share_permille": 1001},
        {"lease_min_ms": 61_000},
        {"suspect_ms": 500},
        {"quarantine_ms": -1},
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(Settings(), **wrong).check()
    Settings().check()
