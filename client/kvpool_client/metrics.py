"""Every metric of the node client, read from its parts at each scrape.

Rules
  - METRICS is the list: name as exposed -> use. Exactly these are exported, always all of them.
  - Units stand last; a counter ends in _total and falls only with a new process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvpool_client.bypass import BYPASS_LOADS, BYPASS_LOOKUPS, BYPASS_STORES
from kvpool_client.copying import Copier
from kvpool_client.local_server import LocalServer
from kvpool_client.node import Node
from kvpool_client.owned_segment import OwnedSegment
from kvpool_client.peer.counting import PeerCounts
from kvpool_client.peer.server import PeerServer
from kvpool_client.registration import Registration
from kvpool_client.session import State

METRICS: Final[dict[str, str]] = {
    # what this node gives
    "kvpool_client_segment_bytes": "DRAM that this node offers to the pool, by segment.",
    "kvpool_client_segment_slabs": "Slabs of a segment.",
    "kvpool_client_segment_slabs_bound": "Of these, bound to a slot size: all bound means that no other size fits.",
    "kvpool_client_prefault_seconds": "How long the start took to adopt, or to allocate and touch, the segments.",
    "kvpool_client_files_dropped_total": "Segment files of a former life that were not sound and made anew.",
    "kvpool_client_slabs_dropped_total": "Slabs dropped at the start since their records were not sound.",
    "kvpool_client_slots_dropped_total": "Slots dropped at the start since their headers were not sound.",
    "kvpool_client_slots_cleared_total": "Slots cleared by the Master's order: removed, purged or bad blocks.",
    "kvpool_client_writes_dropped_total": "Slots cleared at the start: peers were writing them when it ended.",
    # its data port, for workers of other nodes
    "kvpool_client_data_connections_live": "Connections of peers on the data port.",
    "kvpool_client_data_read_blocks_total": "Parts of blocks that peers read here, copies to other nodes included.",
    "kvpool_client_data_read_bytes_total": "The same in bytes.",
    "kvpool_client_data_written_blocks_total": "Parts of blocks that peers wrote here and that were confirmed.",
    "kvpool_client_data_written_bytes_total": "The same in bytes.",
    "kvpool_client_data_writes_live": "Writes of peers, and copies from them, that are under way.",
    "kvpool_client_data_refused_total": "What the data port refused, by reason: capabilities, garbage, one too many.",
    # copies from peers, by the Master's order
    "kvpool_client_copies_live": "Orders to copy from peers that wait or are under way.",
    "kvpool_client_copies_done_total": "Orders that were carried out to the end.",
    "kvpool_client_copies_failed_total": "Orders that ended before; the log says why.",
    "kvpool_client_copied_blocks_total": "Blocks copied from peers, all parts, verified.",
    "kvpool_client_copied_bytes_total": "The same in bytes, all parts.",
    # its workers
    "kvpool_client_workers_attached": "Workers that map the segments now.",
    "kvpool_client_workers_gone_total": "Workers whose lock went: their open writes were given up.",
    "kvpool_client_local_connections": "Open connections on the Unix socket.",
    "kvpool_client_local_refused_total": "Connections on it that allowed_uids and allowed_gids do not name.",
    "kvpool_client_blocks_checked_total": "Blocks that workers reported as bad and that were checked again.",
    "kvpool_client_blocks_bad_total": "Of these, really bad and reported to the Master: above 0, suspect the memory.",
    # what its workers did, by namespace
    "kvpool_client_lookups_total": "Lookups of this node's workers, by namespace.",
    "kvpool_client_lookup_blocks_total": "Blocks they asked for beyond what HBM holds.",
    "kvpool_client_lookup_tokens_total": "The same in tokens.",
    "kvpool_client_hit_blocks_total": "Of these, found; over lookup_blocks, the hit rate of this node.",
    "kvpool_client_hit_tokens_total": "The same in tokens.",
    "kvpool_client_loaded_blocks_total": "Blocks copied into HBM and verified; below hit_blocks: see short_calls.",
    "kvpool_client_loaded_tokens_total": "The same in tokens: prefill that was really saved.",
    "kvpool_client_loaded_bytes_total": "The same in bytes, all parts; over load_seconds, the speed of loads.",
    "kvpool_client_load_seconds_total": "Time spent in loads.",
    "kvpool_client_stored_blocks_total": "Blocks that workers stored.",
    "kvpool_client_stored_tokens_total": "The same in tokens.",
    "kvpool_client_stored_bytes_total": "The same in bytes, all parts; over store_seconds, the speed of stores.",
    "kvpool_client_store_seconds_total": "Time spent in stores.",
    "kvpool_client_existing_blocks_total": "Blocks not stored since the pool had them: work that sharing saved.",
    "kvpool_client_verify_failures_total": "Loads that found wrong bytes and refused them: above 0, suspect memory.",
    "kvpool_client_short_calls_total": "Lookups, loads and stores that did less than asked, by call and reason.",
    # the Master
    "kvpool_client_session_state": "1 for the state of the session (joining, serving, draining, stopped).",
    "kvpool_client_master_epoch": "The Master's life that is obeyed, the highest seen; 0 before the first.",
    "kvpool_client_heartbeats_sent_total": "Heartbeats and reports sent.",
    "kvpool_client_heartbeat_failures_total": "Times that the Master was not reached, broke off or refused for now.",
    "kvpool_client_reconnects_total": "Sessions opened after the first.",
    "kvpool_client_inventories_sent_total": "Inventories that the Master asked for and took.",
    "kvpool_client_inventories_failed_total": "Inventories that broke off or were refused; they are sent again.",
    "kvpool_client_reported_blocks_total": "Blocks in the inventories that were taken.",
    "kvpool_client_bypass_state": "1 for each call (lookups, loads, stores) that an operator has switched off.",
    # the process
    "kvpool_client_memory_bytes": "Resident memory of the process without shared pages (segments).",
    "kvpool_client_build_info": "1, with the version.",
}

_OF_NAMESPACE: Final[dict[str, tuple[str, float]]] = {
    "kvpool_client_lookups_total": ("lookups", 1),
    "kvpool_client_lookup_blocks_total": ("lookup_blocks", 1),
    "kvpool_client_lookup_tokens_total": ("lookup_tokens", 1),
    "kvpool_client_hit_blocks_total": ("hit_blocks", 1),
    "kvpool_client_hit_tokens_total": ("hit_tokens", 1),
    "kvpool_client_loaded_blocks_total": ("loaded_blocks", 1),
    "kvpool_client_loaded_tokens_total": ("loaded_tokens", 1),
    "kvpool_client_loaded_bytes_total": ("loaded_bytes", 1),
    "kvpool_client_load_seconds_total": ("load_us", 1e-6),
    "kvpool_client_stored_blocks_total": ("stored_blocks", 1),
    "kvpool_client_stored_tokens_total": ("stored_tokens", 1),
    "kvpool_client_stored_bytes_total": ("stored_bytes", 1),
    "kvpool_client_store_seconds_total": ("store_us", 1e-6),
    "kvpool_client_existing_blocks_total": ("existing_blocks", 1),
    "kvpool_client_verify_failures_total": ("verify_failures", 1),
}
"""Metric -> the count of use.py that it tells, and its unit."""

_OF_SEGMENT: Final[dict[str, Callable[[OwnedSegment], int]]] = {
    "kvpool_client_segment_bytes": lambda segment: segment.size_bytes,
    "kvpool_client_segment_slabs": lambda segment: segment.slabs,
    "kvpool_client_segment_slabs_bound": lambda segment: segment.slabs_bound,
}

_CALLS: Final = {"lookups": BYPASS_LOOKUPS, "loads": BYPASS_LOADS, "stores": BYPASS_STORES}


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the numbers come from."""

    node: Node
    registration: Registration
    local: LocalServer
    data: PeerServer | None
    copier: Copier
    prefault_s: float
    version: str


class NodeCollector(Collector):
    """Reads `sources` at each scrape."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        """One family per name of METRICS."""
        yield from self._segments()
        node = self._sources.node
        yield _gauge("kvpool_client_prefault_seconds", self._sources.prefault_s)
        adoptions = [segment.adoption for segment in node.segments]
        yield _counter("kvpool_client_files_dropped_total", sum(bool(found.why) for found in adoptions))
        yield _counter("kvpool_client_slabs_dropped_total", sum(found.slabs_dropped for found in adoptions))
        yield _counter("kvpool_client_slots_dropped_total", sum(found.slots_dropped for found in adoptions))
        yield _counter("kvpool_client_slots_cleared_total", node.slots_cleared_total)
        yield _counter("kvpool_client_writes_dropped_total", sum(found.writes_dropped for found in adoptions))
        yield from self._peers()
        yield _gauge("kvpool_client_workers_attached", node.workers.attached)
        yield _counter("kvpool_client_workers_gone_total", node.workers.gone_total)
        yield _gauge("kvpool_client_local_connections", self._sources.local.open_connections)
        yield _counter("kvpool_client_local_refused_total", self._sources.local.refused)
        yield _counter("kvpool_client_blocks_checked_total", node.blocks_checked_total)
        yield _counter("kvpool_client_blocks_bad_total", node.blocks_bad_total)
        yield from self._use()
        yield from self._master()
        yield _gauge("kvpool_client_memory_bytes", _private_bytes())
        build = GaugeMetricFamily(*_named("kvpool_client_build_info"), labels=["version"])
        build.add_metric([self._sources.version], 1)
        yield build

    def _peers(self) -> Iterator[Metric]:
        """The data port, zeros without one, and copies."""
        data, copier = self._sources.data, self._sources.copier
        counts = PeerCounts() if data is None else data.counts
        yield _gauge("kvpool_client_data_connections_live", 0 if data is None else data.open_connections)
        yield _counter("kvpool_client_data_read_blocks_total", counts.blocks_read)
        yield _counter("kvpool_client_data_read_bytes_total", counts.bytes_read)
        yield _counter("kvpool_client_data_written_blocks_total", counts.blocks_written)
        yield _counter("kvpool_client_data_written_bytes_total", counts.bytes_written)
        yield _gauge("kvpool_client_data_writes_live", self._sources.node.writes.open)
        name = "kvpool_client_data_refused_total"
        refused = CounterMetricFamily(name.removesuffix("_total"), METRICS[name], labels=["reason"])
        for reason, times in counts.refused.copy().items():
            refused.add_metric([reason], times)
        yield refused
        yield _gauge("kvpool_client_copies_live", copier.open_orders)
        yield _counter("kvpool_client_copies_done_total", copier.counts.done)
        yield _counter("kvpool_client_copies_failed_total", copier.counts.failed)
        yield _counter("kvpool_client_copied_blocks_total", copier.counts.blocks)
        yield _counter("kvpool_client_copied_bytes_total", copier.counts.bytes)

    def _master(self) -> Iterator[Metric]:
        node, counts = self._sources.node, self._sources.registration.counts
        states = GaugeMetricFamily(*_named("kvpool_client_session_state"), labels=["state"])
        for state in State:
            states.add_metric([state.value], float(state is self._sources.registration.state))
        yield states
        yield _gauge("kvpool_client_master_epoch", node.epoch)
        yield _counter("kvpool_client_heartbeats_sent_total", counts.heartbeats_sent)
        yield _counter("kvpool_client_heartbeat_failures_total", counts.failures)
        yield _counter("kvpool_client_reconnects_total", max(0, counts.sessions_opened - 1))
        yield _counter("kvpool_client_inventories_sent_total", counts.inventories_sent)
        yield _counter("kvpool_client_inventories_failed_total", counts.inventories_failed)
        yield _counter("kvpool_client_reported_blocks_total", counts.blocks_reported)
        calls = GaugeMetricFamily(*_named("kvpool_client_bypass_state"), labels=["call"])
        for call, bit in _CALLS.items():
            calls.add_metric([call], float(bool(node.bypass & bit)))
        yield calls

    def _segments(self) -> Iterator[Metric]:
        for name, value in _OF_SEGMENT.items():
            family = GaugeMetricFamily(*_named(name), labels=["segment"])
            for segment in self._sources.node.segments:
                family.add_metric([str(segment.plan.index)], value(segment))
            yield family

    def _use(self) -> Iterator[Metric]:
        totals = self._sources.node.use.totals()
        for name, (count, unit) in _OF_NAMESPACE.items():
            family = CounterMetricFamily(name.removesuffix("_total"), METRICS[name], labels=["namespace", "model"])
            for labels, counts in totals.items():
                family.add_metric(labels, counts[count] * unit)
            yield family
        name = "kvpool_client_short_calls_total"
        family = CounterMetricFamily(name.removesuffix("_total"), METRICS[name], labels=["call", "reason"])
        for labels, calls in self._sources.node.use.short().items():
            family.add_metric(labels, calls)
        yield family


def exposition(sources: Sources) -> Callable[[], bytes]:
    """A function that answers the text format of a scrape. The registry is our own."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(NodeCollector(sources))
    return lambda: generate_latest(registry)


def _named(name: str) -> tuple[str, str]:
    return name, METRICS[name]


def _gauge(name: str, value: float) -> Metric:
    return GaugeMetricFamily(*_named(name), value=value)


def _counter(name: str, value: float) -> Metric:
    return CounterMetricFamily(name.removesuffix("_total"), METRICS[name], value=value)


def _private_bytes() -> int:
    """Resident less shared, of /proc: the second and third word of statm, in pages."""
    words = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE")
