"""The list of metrics is what is exported, values come from the snapshot, and the cheap histogram is right."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from kvpool_master.core.messages import GoneReason, Reason
from kvpool_master.core.snapshot import (
    NamespaceCounters,
    NamespaceSnapshot,
    NodeSnapshot,
    PoolCounters,
    SegmentSnapshot,
    Snapshot,
    TenantSnapshot,
)
from kvpool_master.metrics import METRICS, Histogram, MasterCollector, RpcTimes, exposition, registry_of
from kvpool_proto.namespace import NamespaceSpec
from unit.master_double import picture

SPEC = NamespaceSpec(model='odd "name"\n', block_tokens=16, part_bytes=4096, dtype="float16")
NAME = SPEC.id.hex()[:12]
EMPTY = picture()


def full() -> Snapshot:
    asked = NamespaceCounters(
        lookups=3,
        lookup_blocks=10,
        hit_blocks=4,
        short_lookups={Reason.UNKNOWN_KEY: 2},
        short_reserves={Reason.NO_SPACE: 1},
        stored_blocks=5,
        gone_blocks={GoneReason.EVICTED: 6},
    )
    pool = PoolCounters(
        leases_granted=9,
        evict_blocked={"leased": 2},
        recovered_blocks=21,
        inventories_failed=22,
        nodes_reported=23,
        moved_blocks=24,
        replicated_blocks=25,
        copies_failed=26,
        spilled_blocks=27,
    )
    pool.evicted(4, 4_000)
    pool.evicted(2, 90_000_000)
    segment = SegmentSnapshot(3, 1, 1 << 20, 4096, 100, 200, 50, 30, True, 16, 2)
    return picture(
        namespaces=(NamespaceSnapshot(SPEC.id, SPEC, 5, 20_480, 2, asked),),
        nodes=(
            NodeSnapshot("a", 4, "up", "", 12, "waiting", (segment,)),
            *(NodeSnapshot(state, 4, state, "", 12, "none", ()) for state in ("ramp", "draining", "drained")),
        ),
        leases=1,
        reservations=2,
        ring_blocks=3,
        directory_bytes=99,
        counters=pool,
        ready=False,
        tenants=(TenantSnapshot("t", 28, 29, 30),),
        copies_open=31,
    )


def scraped(snapshot: Snapshot, times: RpcTimes | None = None) -> bytes:
    collector = MasterCollector(
        snapshot=lambda: snapshot,
        rpc_times=times or RpcTimes(),
        late=Histogram((1.0,)),
        failed_ticks=lambda: 0,
        sessions=lambda: 1,
        state_writes=Histogram((1.0,)),
        bypass=lambda: 5,
        version="1.2",
        capabilities=lambda: 33,
        refused={"forbidden": 2},
    )
    return exposition(registry_of(collector))


def samples(text: bytes) -> dict[tuple[str, tuple[str, ...]], float]:
    families = text_string_to_metric_families(text.decode())
    return {(s.name, tuple(sorted(s.labels.values()))): s.value for family in families for s in family.samples}


def test_exactly_the_list_is_exported_even_when_nothing_happened() -> None:
    for snapshot in (EMPTY, full()):
        types = [line.split()[2] for line in scraped(snapshot).decode().splitlines() if line.startswith("# TYPE")]
        assert sorted(types) == sorted(METRICS)


def test_values_and_labels() -> None:
    got = samples(scraped(full()))
    where = (NAME, SPEC.model)
    expected = {
        ("kvpool_master_lookup_blocks_total", where): 10,
        ("kvpool_master_lookup_tokens_total", where): 160,
        ("kvpool_master_hit_tokens_total", where): 64,
        ("kvpool_master_stored_tokens_total", where): 80,
        ("kvpool_master_resident_bytes", where): 20_480,
        ("kvpool_master_short_lookups_total", (*where, "unknown_key")): 2,
        ("kvpool_master_allocation_failures_total", (*where, "no_space")): 1,
        ("kvpool_master_gone_blocks_total", (*where, "evicted")): 6,
        ("kvpool_master_nodes", ("up",)): 1,
        ("kvpool_master_nodes", ("ramp",)): 1,
        ("kvpool_master_nodes", ("draining",)): 1,
        ("kvpool_master_nodes", ("drained",)): 1,
        ("kvpool_master_nodes", ("suspect",)): 0,
        ("kvpool_master_nodes_reported_total", ()): 23,
        ("kvpool_master_moved_blocks_total", ()): 24,
        ("kvpool_master_replicated_blocks_total", ()): 25,
        ("kvpool_master_copies_failed_total", ()): 26,
        ("kvpool_master_spilled_block_parts_total", ()): 27,
        ("kvpool_master_tenant_bytes", ("t",)): 28,
        ("kvpool_master_tenant_quota_bytes", ("t",)): 29,
        ("kvpool_master_over_quota_total", ("t",)): 30,
        ("kvpool_master_copies_live", ()): 31,
        ("kvpool_master_capabilities_total", ()): 33,
        ("kvpool_master_refused_total", ("forbidden",)): 2,
        ("kvpool_master_segment_bytes", ("a", "1")): 1 << 20,
        ("kvpool_master_segment_reserved_bytes", ("a", "1")): 50,
        ("kvpool_master_segment_deferred_bytes", ("a", "1")): 200,
        ("kvpool_master_segment_unclaimed_bytes", ("a", "1")): 30,
        ("kvpool_master_segment_closed_state", ("a", "1")): 1,
        ("kvpool_master_inventories_live", ("waiting",)): 1,
        ("kvpool_master_inventories_live", ("failed",)): 0,
        ("kvpool_master_inventories_failed_total", ()): 22,
        ("kvpool_master_recovered_blocks_total", ()): 21,
        ("kvpool_master_ready_state", ()): 0,
        ("kvpool_master_bypass_state", ("lookups",)): 1,
        ("kvpool_master_bypass_state", ("loads",)): 0,
        ("kvpool_master_bypass_state", ("stores",)): 1,
        ("kvpool_master_leases_granted_total", ()): 9,
        ("kvpool_master_leases_live", ()): 1,
        ("kvpool_master_reservations_live", ()): 2,
        ("kvpool_master_gone_ring_blocks", ()): 3,
        ("kvpool_master_directory_bytes", ()): 99,
        ("kvpool_master_evict_blocked_total", ("leased",)): 2,
        ("kvpool_master_evicted_idle_seconds_bucket", ("1.0",)): 0,
        ("kvpool_master_evicted_idle_seconds_bucket", ("5.0",)): 4,
        ("kvpool_master_evicted_idle_seconds_bucket", ("+Inf",)): 6,
        ("kvpool_master_evicted_idle_seconds_count", ()): 6,
        ("kvpool_master_evicted_idle_seconds_sum", ()): 4 * 4 + 2 * 90_000,
        ("kvpool_master_epoch", ()): 7,
        ("kvpool_master_build_info", ("1.2",)): 1,
    }
    assert {key: got.get((key[0], tuple(sorted(key[1])))) for key in expected} == expected
    assert got["kvpool_master_memory_bytes", ()] > 1 << 20


def test_rpc_times_by_method_and_code() -> None:
    times = RpcTimes()
    for seconds in (1e-5, 1e-4, 1.5e-4, 30.0):
        times.observe("Lookup", "OK", seconds)
    times.observe("Lookup", "NOT_FOUND", 0.1)
    got = samples(scraped(EMPTY, times))
    buckets = [got["kvpool_master_rpc_seconds_bucket", (le, "Lookup", "OK")] for le in ("0.0001", "0.0002", "1.0")]
    assert buckets == [2, 3, 3]
    assert got["kvpool_master_rpc_seconds_count", ("Lookup", "OK")] == 4
    assert got["kvpool_master_rpc_seconds_count", ("Lookup", "NOT_FOUND")] == 1


def test_the_names_are_well_formed() -> None:
    for name, use in METRICS.items():
        assert name.startswith("kvpool_master_")
        assert use.endswith(".")
