"""Quotas: a tenant's own oldest leaves go for its new blocks, others' never; what finds no room is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool_master.core import messages as m
from kvpool_master.core.memory import Memory
from kvpool_master.core.messages import Reason
from kvpool_proto.errors import BadRequest, LimitReached
from unit.core_world import PART_BYTES, World, chain


def keys(blocks: int, start: int = 0) -> bytes:
    return chain(range(start, start + blocks))


def held(world: World) -> dict[str, tuple[int, int, int]]:
    """By tenant: slots held, slots allowed, times refused."""
    tenants = world.pool.snapshot(world.now).tenants
    return {one.tenant: (one.bytes // PART_BYTES, one.quota_bytes // PART_BYTES, one.over_quota) for one in tenants}


def test_at_its_quota_a_tenant_evicts_its_own_oldest() -> None:
    world = World(slots=64)
    other = world.do(m.OpenNamespace(replace(world.spec, tenant="other"))).namespace
    world.do(m.Reserve(other, world.ident("o"), m.Parent.ROOT, keys(5), 0, 1))
    world.do(m.Commit(world.ident("o"), 0, 1, 5, True))
    answer = world.do(m.SetQuota("default", 10 * PART_BYTES))
    assert answer == m.QuotaSet(0, (m.Remember(quota=("default", 10 * PART_BYTES)),))
    world.put(keys(6))
    world.put(keys(4, 100))
    assert world.put(keys(3, 200)).reason is Reason.NONE
    assert world.hit(keys(6)) == 3
    assert world.hit(keys(4, 100)) == 4
    assert world.hit(keys(3, 200)) == 3
    assert world.do(m.Peek(other, keys(5), 0)).blocks == 5
    assert held(world) == {"default": (10, 10, 0), "other": (5, 0, 0)}


def test_what_finds_no_room_is_answered_over_quota_and_nothing_is_dropped() -> None:
    world = World(slots=64)
    world.do(m.SetQuota("default", 10 * PART_BYTES))
    world.put(keys(8))
    world.lookup(keys(8))
    answer = world.put(keys(6, 100))
    assert (answer.answered, answer.reason) == (2, Reason.OVER_QUOTA)
    assert world.hit(keys(8)) == 8
    assert world.hit(keys(6, 100)) == 2
    assert held(world)["default"] == (10, 10, 1)
    world.release("lease")
    assert world.put(keys(20, 300)).answered == 10, "a chain longer than the quota gets its head"


def test_a_quota_set_later_counts_what_is_there_and_shrinks_it_with_time() -> None:
    world = World(slots=64, evict_step_spans_max=2)
    for number in range(10):
        world.put(keys(2, 100 * number))
    assert world.do(m.SetQuota("default", 6 * PART_BYTES)).bytes == 20 * PART_BYTES
    assert world.used_slots == 20
    for _ in range(10):
        world.tick(after_ms=1)
    assert world.used_slots == 6
    assert world.hit(keys(2, 900)) == 2
    assert world.hit(keys(2)) == 0
    assert world.do(m.SetQuota("default", 0)).effects == (m.Remember(quota=("default", 0)),)
    for number in range(10):
        assert world.put(keys(2, 100 * number + 50)).reason is Reason.NONE
    assert world.used_slots == 26


def test_replicas_count() -> None:
    world = World(slots=64, nodes=("n", "o"), replicas=2)
    world.do(m.SetQuota("default", 100 * PART_BYTES))
    world.put(keys(6))
    world.settle()
    assert held(world)["default"][0] == 12


def test_quotas_are_remembered_bounded_and_checked() -> None:
    world = World(memory=Memory(quotas=(("default", 4 * PART_BYTES),)), quotas_max=2)
    assert world.put(keys(9)).reason is Reason.OVER_QUOTA
    world.do(m.SetQuota("b", 1))
    with pytest.raises(LimitReached, match="quotas_max"):
        world.do(m.SetQuota("c", 1))
    for tenant, size in (("", 1), ("x" * 2_000, 1), ("a", -1)):
        with pytest.raises(BadRequest):
            world.do(m.SetQuota(tenant, size))


def test_a_purged_namespace_stays_under_its_tenants_quota() -> None:
    world = World(slots=64)
    world.do(m.SetQuota("default", 4 * PART_BYTES))
    world.put(keys(4))
    world.do(m.Purge(world.namespace))
    world.tick()
    assert world.put(keys(9, 100)).answered == 4
