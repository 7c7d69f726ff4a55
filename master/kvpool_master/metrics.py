"""Every metric of the Master, and the collector that reads them from a snapshot of the core at each scrape.

Rules
  - METRICS is the list: name as exposed -> use. What is not in it cannot be exported, and all of it always is.
  - Names are in the user's words; units stand last; a counter ends in _total and falls only with a new Master.
  - Namespaces are labelled with the first 12 hex digits of their id and the model; segments with node id and the
    node's own number of the segment; tenants by name.
"""

from __future__ import annotations

import resource
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpool_master.core.messages import GoneReason, Reason
from kvpool_master.core.snapshot import (
    EVICTED_IDLE_BOUNDS_S,
    NamespaceSnapshot,
    SegmentSnapshot,
    Snapshot,
    TenantSnapshot,
)
from kvpool_master.state import BYPASS_BITS

RPC_BOUNDS_S = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1, 2e-1, 5e-1, 1.0)
LATE_BOUNDS_S = (1e-3, 5e-3, 1e-2, 5e-2, 1e-1, 5e-1, 1.0, 2.0, 5.0)
NAMESPACE_HEX_DIGITS = 12
NODE_STATES = ("up", "ramp", "draining", "drained", "suspect")
INVENTORY_STATES = ("waiting", "arriving", "failed")

METRICS: dict[str, str] = {
    # what was asked and answered
    "kvpool_master_lookups_total": "Lookups answered, by namespace.",
    "kvpool_master_lookup_blocks_total": "Blocks asked for beyond what HBM holds; the denominator of the hit rate.",
    "kvpool_master_lookup_tokens_total": "The same in tokens.",
    "kvpool_master_hit_blocks_total": "Blocks found and leased; the numerator of the hit rate.",
    "kvpool_master_hit_tokens_total": "The same in tokens: prefill that was not recomputed, if the loads succeeded.",
    "kvpool_master_short_lookups_total": "Lookups that found less than asked, by reason: why there are misses.",
    "kvpool_master_reserves_total": "Reservations asked for, by namespace.",
    "kvpool_master_granted_block_parts_total": "Parts of blocks that writers got room for.",
    "kvpool_master_allocation_failures_total": "Reservations answered short, by reason: why blocks were not stored.",
    "kvpool_master_stored_blocks_total": "Blocks that became complete.",
    "kvpool_master_stored_tokens_total": "The same in tokens.",
    "kvpool_master_gone_blocks_total": "Blocks that went, by reason: evicted means that more DRAM would have helped.",
    "kvpool_master_conflicts_total": "Keys refused since they were seen after two parents: a broken prefix hash.",
    # what is held
    "kvpool_master_directory_blocks": "Complete blocks in the directory, by namespace.",
    "kvpool_master_directory_spans": "Spans that hold them: the directory's cost grows with these.",
    "kvpool_master_directory_bytes": "Memory of the directory, estimated; over directory_blocks, its bytes per block.",
    "kvpool_master_resident_bytes": "Slot bytes that a namespace holds, all parts.",
    "kvpool_master_gone_ring_blocks": "Blocks that the ring of the gone remembers for Peek with explain.",
    # leases and reservations
    "kvpool_master_leases_live": "Leases that hold blocks now.",
    "kvpool_master_leases_granted_total": "Leases granted.",
    "kvpool_master_leases_released_total": "Leases that their holders released.",
    "kvpool_master_leases_expired_total": "Leases that ran out: readers that died or were too slow.",
    "kvpool_master_reservations_live": "Reservations that are open now.",
    "kvpool_master_reservations_opened_total": "Reservations that were granted room.",
    "kvpool_master_reservations_completed_total": "Reservations of which all was committed.",
    "kvpool_master_reservations_aborted_total": "Reservations given up at least in part by their writers.",
    "kvpool_master_reservations_expired_total": "Reservations that ran out: writers that died or were too slow.",
    # eviction
    "kvpool_master_evicted_idle_seconds": "How long evicted blocks had not been asked for: short means a small pool.",
    "kvpool_master_evict_passes_total": "Passes of eviction.",
    "kvpool_master_evict_blocked_total": "Passes that freed less than was needed, by what held the leaves.",
    # nodes and their space
    "kvpool_master_nodes": "Nodes by state; suspect ones are hidden from lookups, drained ones may be stopped.",
    "kvpool_master_nodes_reported_total": "Times that a node became suspect since workers could not use its data port.",
    "kvpool_master_sessions": "Node clients that are connected.",
    "kvpool_master_segment_bytes": "Size of each segment.",
    "kvpool_master_segment_used_bytes": "Slots of a segment that are not free.",
    "kvpool_master_segment_reserved_bytes": "Of these, granted to open reservations and not committed yet.",
    "kvpool_master_segment_quarantined_bytes": "Of these, given up without the writer's word; they come back later.",
    "kvpool_master_segment_deferred_bytes": "Of these, hidden and waiting for leases to end.",
    "kvpool_master_segment_unclaimed_bytes": "Of these, recovered for namespaces that nobody has opened again yet.",
    "kvpool_master_segment_closed_state": "1 while a segment takes no reservation: an inventory or a grace is awaited.",
    # placement, copies between nodes
    "kvpool_master_spilled_block_parts_total": "Parts of blocks granted on another node than the writer's.",
    "kvpool_master_copies_live": "Copies between nodes that are ordered and not answered.",
    "kvpool_master_copies_failed_total": "Copies that brought fewer blocks than ordered, or were not answered.",
    "kvpool_master_moved_blocks_total": "Blocks moved off draining nodes; if its parts were moved apart, each counts.",
    "kvpool_master_replicated_blocks_total": "Blocks that got another copy, counted in the same way.",
    # rights
    "kvpool_master_tenant_bytes": "Slot bytes that a tenant's namespaces hold, replicas included.",
    "kvpool_master_tenant_quota_bytes": "What it may hold; 0: no limit.",
    "kvpool_master_over_quota_total": "Reservations answered short since the tenant's quota was full.",
    "kvpool_master_capabilities_total": "Capabilities given out: one for each node and part of a reply.",
    "kvpool_master_refused_total": "Requests refused for want of a right, by reason.",
    # recovery after a restart
    "kvpool_master_ready_state": "1 once every known node has reported what it holds, or its time was over.",
    "kvpool_master_inventories_live": "Inventories that are awaited, by state; failed: until the node registers again.",
    "kvpool_master_inventories_completed_total": "Inventories that are complete.",
    "kvpool_master_inventories_failed_total": "Inventories given up, since they made no progress.",
    "kvpool_master_recovered_blocks_total": "Blocks that inventories made complete.",
    "kvpool_master_surplus_blocks_total": "Blocks of inventories that the directory had already, or that do not fit.",
    "kvpool_master_dead_blocks_total": "Blocks of inventories that a purge had ended.",
    "kvpool_master_unclaimed_blocks_total": "Blocks of inventories whose namespace was not open when they came.",
    # the Master itself
    "kvpool_master_rpc_seconds": "Time in the Master per RPC, by method and gRPC code; transport not included.",
    "kvpool_master_loop_late_seconds": "How late the loop ran its timer: above 0.1 s, clients time out.",
    "kvpool_master_failed_ticks_total": "Ticks that raised: a bug, see the log.",
    "kvpool_master_state_write_seconds": "Time of each write to the state directory; all RPCs wait for it.",
    "kvpool_master_bypass_state": "1 for each call (lookups, loads, stores) that is switched off in all workers.",
    "kvpool_master_stalls_total": "Ticks so late that liveness deadlines were moved.",
    "kvpool_master_memory_bytes": "Resident memory of the process.",
    "kvpool_master_memory_peak_bytes": "The most it ever was.",
    "kvpool_master_epoch": "The epoch: changes with every start of the Master.",
    "kvpool_master_build_info": "1, labelled with the version.",
}

_NAMESPACE = ["namespace", "model"]
_SEGMENT = ["node", "segment"]

_OF_NAMESPACE: Mapping[str, Callable[[NamespaceSnapshot], int]] = {
    "kvpool_master_lookups_total": lambda held: held.counters.lookups,
    "kvpool_master_lookup_blocks_total": lambda held: held.counters.lookup_blocks,
    "kvpool_master_lookup_tokens_total": lambda held: held.counters.lookup_blocks * held.spec.block_tokens,
    "kvpool_master_hit_blocks_total": lambda held: held.counters.hit_blocks,
    "kvpool_master_hit_tokens_total": lambda held: held.counters.hit_blocks * held.spec.block_tokens,
    "kvpool_master_reserves_total": lambda held: held.counters.reserves,
    "kvpool_master_granted_block_parts_total": lambda held: held.counters.granted_blocks,
    "kvpool_master_stored_blocks_total": lambda held: held.counters.stored_blocks,
    "kvpool_master_stored_tokens_total": lambda held: held.counters.stored_blocks * held.spec.block_tokens,
    "kvpool_master_conflicts_total": lambda held: held.counters.conflicts,
    "kvpool_master_directory_blocks": lambda held: held.blocks,
    "kvpool_master_directory_spans": lambda held: held.spans,
    "kvpool_master_resident_bytes": lambda held: held.bytes,
}
_OF_NAMESPACE_BY_REASON: Mapping[str, Callable[[NamespaceSnapshot], dict[str, int]]] = {
    "kvpool_master_short_lookups_total": lambda held: _by_name(held.counters.short_lookups),
    "kvpool_master_allocation_failures_total": lambda held: _by_name(held.counters.short_reserves),
    "kvpool_master_gone_blocks_total": lambda held: _by_name(held.counters.gone_blocks),
}
_OF_SEGMENT: Mapping[str, Callable[[SegmentSnapshot], int]] = {
    "kvpool_master_segment_bytes": lambda segment: segment.size_bytes,
    "kvpool_master_segment_used_bytes": lambda segment: segment.used_bytes,
    "kvpool_master_segment_reserved_bytes": lambda segment: segment.reserved_bytes,
    "kvpool_master_segment_quarantined_bytes": lambda segment: segment.quarantined_bytes,
    "kvpool_master_segment_deferred_bytes": lambda segment: segment.deferred_bytes,
    "kvpool_master_segment_unclaimed_bytes": lambda segment: segment.unclaimed_bytes,
    "kvpool_master_segment_closed_state": lambda segment: int(segment.closed),
}
_OF_TENANT: Mapping[str, Callable[[TenantSnapshot], int]] = {
    "kvpool_master_tenant_bytes": lambda held: held.bytes,
    "kvpool_master_tenant_quota_bytes": lambda held: held.quota_bytes,
    "kvpool_master_over_quota_total": lambda held: held.over_quota,
}
_OF_POOL: Mapping[str, Callable[[Snapshot], int]] = {
    "kvpool_master_gone_ring_blocks": lambda pool: pool.ring_blocks,
    "kvpool_master_directory_bytes": lambda pool: pool.directory_bytes,
    "kvpool_master_leases_live": lambda pool: pool.leases,
    "kvpool_master_leases_granted_total": lambda pool: pool.counters.leases_granted,
    "kvpool_master_leases_released_total": lambda pool: pool.counters.leases_released,
    "kvpool_master_leases_expired_total": lambda pool: pool.counters.leases_expired,
    "kvpool_master_reservations_live": lambda pool: pool.reservations,
    "kvpool_master_reservations_opened_total": lambda pool: pool.counters.reservations_opened,
    "kvpool_master_reservations_completed_total": lambda pool: pool.counters.reservations_completed,
    "kvpool_master_reservations_aborted_total": lambda pool: pool.counters.reservations_aborted,
    "kvpool_master_reservations_expired_total": lambda pool: pool.counters.reservations_expired,
    "kvpool_master_evict_passes_total": lambda pool: pool.counters.evict_passes,
    "kvpool_master_nodes_reported_total": lambda pool: pool.counters.nodes_reported,
    "kvpool_master_spilled_block_parts_total": lambda pool: pool.counters.spilled_blocks,
    "kvpool_master_copies_live": lambda pool: pool.copies_open,
    "kvpool_master_copies_failed_total": lambda pool: pool.counters.copies_failed,
    "kvpool_master_moved_blocks_total": lambda pool: pool.counters.moved_blocks,
    "kvpool_master_replicated_blocks_total": lambda pool: pool.counters.replicated_blocks,
    "kvpool_master_ready_state": lambda pool: int(pool.ready),
    "kvpool_master_inventories_completed_total": lambda pool: pool.counters.inventories_completed,
    "kvpool_master_inventories_failed_total": lambda pool: pool.counters.inventories_failed,
    "kvpool_master_recovered_blocks_total": lambda pool: pool.counters.recovered_blocks,
    "kvpool_master_surplus_blocks_total": lambda pool: pool.counters.surplus_blocks,
    "kvpool_master_dead_blocks_total": lambda pool: pool.counters.dead_blocks,
    "kvpool_master_unclaimed_blocks_total": lambda pool: pool.counters.unclaimed_blocks,
    "kvpool_master_stalls_total": lambda pool: pool.counters.stalls,
    "kvpool_master_epoch": lambda pool: pool.epoch,
}


class Histogram:
    """Counts per bucket and their sum; to observe costs one bisect and two additions."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value; a bucket includes its upper bound."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class RpcTimes:
    """Seconds per RPC, by method and gRPC code."""

    def __init__(self) -> None:
        self.histograms: dict[tuple[str, str], Histogram] = {}

    def observe(self, method: str, code: str, seconds: float) -> None:
        """Count one RPC."""
        histogram = self.histograms.get((method, code))
        if histogram is None:
            histogram = self.histograms[method, code] = Histogram(RPC_BOUNDS_S)
        histogram.observe(seconds)


class MasterCollector(Collector):
    """Reads everything at the moment of a scrape."""

    def __init__(
        self,
        *,
        snapshot: Callable[[], Snapshot],
        rpc_times: RpcTimes,
        late: Histogram,
        failed_ticks: Callable[[], int],
        sessions: Callable[[], int],
        state_writes: Histogram,
        bypass: Callable[[], int],
        version: str,
        capabilities: Callable[[], int],
        refused: Mapping[str, int],
    ) -> None:
        """refused: by reason, and counted on by who owns it."""
        self._snapshot = snapshot
        self._rpc_times = rpc_times
        self._late = late
        self._failed_ticks = failed_ticks
        self._sessions = sessions
        self._state_writes = state_writes
        self._bypass = bypass
        self._version = version
        self._capabilities = capabilities
        self._refused = refused

    def describe(self) -> list[Metric]:
        """Nothing, so that registering takes no snapshot."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families of METRICS."""
        pool = self._snapshot()
        yield from _namespace_families(pool)
        yield from _node_families(pool)
        for name, value in _OF_TENANT.items():
            yield _filled(name, ["tenant"], [((held.tenant,), value(held)) for held in pool.tenants])
        for name, value in _OF_POOL.items():
            yield _filled(name, [], [((), value(pool))])
        blocked = [((why,), passes) for why, passes in sorted(pool.counters.evict_blocked.items())]
        yield _filled("kvpool_master_evict_blocked_total", ["reason"], blocked)
        idle = _family_of_histograms("kvpool_master_evicted_idle_seconds", [])
        _add_histogram(
            idle, (), EVICTED_IDLE_BOUNDS_S, pool.counters.evicted_idle_buckets, pool.counters.evicted_idle_ms / 1000
        )
        yield idle
        yield from self._own_families()

    def _own_families(self) -> Iterator[Metric]:
        rpcs = _family_of_histograms("kvpool_master_rpc_seconds", ["method", "code"])
        for labels, times in sorted(self._rpc_times.histograms.items()):
            _add_histogram(rpcs, labels, times.bounds, times.counts, times.total)
        yield rpcs
        for name, times in (
            ("kvpool_master_loop_late_seconds", self._late),
            ("kvpool_master_state_write_seconds", self._state_writes),
        ):
            family = _family_of_histograms(name, [])
            _add_histogram(family, (), times.bounds, times.counts, times.total)
            yield family
        bits = self._bypass()
        off = [((call,), int(bool(bits & bit))) for call, bit in BYPASS_BITS.items()]
        yield _filled("kvpool_master_bypass_state", ["call"], off)
        yield _filled("kvpool_master_capabilities_total", [], [((), self._capabilities())])
        refused = [((why,), count) for why, count in sorted(self._refused.items())]
        yield _filled("kvpool_master_refused_total", ["reason"], refused)
        yield _filled("kvpool_master_failed_ticks_total", [], [((), self._failed_ticks())])
        yield _filled("kvpool_master_sessions", [], [((), self._sessions())])
        yield _filled("kvpool_master_memory_bytes", [], [((), _resident_bytes())])
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        yield _filled("kvpool_master_memory_peak_bytes", [], [((), peak_bytes)])
        yield _filled("kvpool_master_build_info", ["version"], [((self._version,), 1)])


def registry_of(collector: MasterCollector) -> CollectorRegistry:
    """A registry of the Master's own; the library's global one is not used."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    """The text that Prometheus scrapes."""
    return generate_latest(registry)


def _filled(name: str, labels: list[str], samples: list[tuple[tuple[str, ...], int]]) -> Metric:
    """A counter or gauge family, by its name, with samples (label values, value)."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(name, METRICS[name], labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _family_of_histograms(name: str, labels: list[str]) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, METRICS[name], labels=labels)


def _add_histogram(
    family: HistogramMetricFamily,
    labels: tuple[str, ...],
    bounds: tuple[float, ...],
    counts: list[int],
    total: float,
) -> None:
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    family.add_metric(labels, [*zip(names, map(float, accumulate(counts)), strict=True)], total)


def _by_name(counts: Mapping[Reason, int] | Mapping[GoneReason, int]) -> dict[str, int]:
    return {reason.name.lower(): count for reason, count in counts.items()}


def _namespace_families(pool: Snapshot) -> Iterator[Metric]:
    named = [((held.id.hex()[:NAMESPACE_HEX_DIGITS], held.spec.model), held) for held in pool.namespaces]
    for name, value in _OF_NAMESPACE.items():
        yield _filled(name, _NAMESPACE, [(labels, value(held)) for labels, held in named])
    for name, values in _OF_NAMESPACE_BY_REASON.items():
        samples = [((*labels, why), count) for labels, held in named for why, count in sorted(values(held).items())]
        yield _filled(name, [*_NAMESPACE, "reason"], samples)


def _node_families(pool: Snapshot) -> Iterator[Metric]:
    states: dict[str, int] = dict.fromkeys(NODE_STATES, 0)
    for node in pool.nodes:
        states[node.state] = states.get(node.state, 0) + 1
    yield _filled("kvpool_master_nodes", ["state"], [((state,), count) for state, count in states.items()])
    awaited = [node.inventory for node in pool.nodes]
    live = [((state,), awaited.count(state)) for state in INVENTORY_STATES]
    yield _filled("kvpool_master_inventories_live", ["state"], live)
    named = [((node.node, str(segment.index)), segment) for node in pool.nodes for segment in node.segments]
    for name, value in _OF_SEGMENT.items():
        yield _filled(name, _SEGMENT, [(labels, value(segment)) for labels, segment in named])


def _resident_bytes() -> int:
    """What /proc says; the page count is the second word of statm."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
