"""Counters that the core keeps, and the snapshot that metrics and status read.

Counters only rise within an epoch. Everything is in blocks and bytes; tokens are blocks x block_tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from kvpool_master.core.messages import GoneReason, Reason
from kvpool_proto.namespace import NamespaceSpec

EVICTED_IDLE_BOUNDS_S = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
"""Upper bounds of the histogram of idle time at eviction, in seconds."""


def _idle_buckets() -> list[int]:
    return [0] * (len(EVICTED_IDLE_BOUNDS_S) + 1)


@dataclass(slots=True)
class NamespaceCounters:
    """What happened in one namespace."""

    lookups: int = 0
    lookup_blocks: int = 0
    """Blocks asked after `skip`."""
    hit_blocks: int = 0
    short_lookups: dict[Reason, int] = field(default_factory=dict[Reason, int])
    """Lookups answered short, by reason."""
    reserves: int = 0
    granted_blocks: int = 0
    """Block parts granted to writers."""
    short_reserves: dict[Reason, int] = field(default_factory=dict[Reason, int])
    """Reservations answered short, by reason: the allocation failures among them."""
    stored_blocks: int = 0
    """Blocks that became complete."""
    gone_blocks: dict[GoneReason, int] = field(default_factory=dict[GoneReason, int])
    conflicts: int = 0
    """Keys refused because they were seen after two parents."""


@dataclass(slots=True)
class PoolCounters:
    """What happened in the whole pool."""

    leases_granted: int = 0
    leases_released: int = 0
    leases_expired: int = 0
    reservations_opened: int = 0
    reservations_completed: int = 0
    """Every granted part block was committed."""
    reservations_aborted: int = 0
    """Given up at least in part by a final commit, an abort, a purge or a dead worker."""
    reservations_expired: int = 0
    evicted_idle_buckets: list[int] = field(default_factory=_idle_buckets)
    evicted_idle_ms: int = 0
    evict_passes: int = 0
    evict_blocked: dict[str, int] = field(default_factory=dict[str, int])
    """Passes that could not free what was wanted, by what held them up: leased, being_written, no_leaf, step_limit."""
    recovered_blocks: int = 0
    """Blocks that inventories made complete."""
    surplus_blocks: int = 0
    """Blocks of inventories that the directory had already, or that do not fit into it."""
    dead_blocks: int = 0
    """Blocks of inventories that a purge had ended."""
    unclaimed_blocks: int = 0
    """Blocks of inventories whose namespace was not open when they came."""
    inventories_completed: int = 0
    inventories_failed: int = 0
    """Given up, since they made no progress."""
    nodes_reported: int = 0
    """Times that a node became suspect by reports of workers, or since it did not answer a probe."""
    moved_blocks: int = 0
    """Blocks of draining nodes that were moved to others (a block whose parts were moved apart counts for each)."""
    replicated_blocks: int = 0
    """Blocks of which a copy was made on another node, in the same way."""
    copies_failed: int = 0
    """Orders of CopySlots that ended with fewer blocks than asked for, or with no answer."""
    spilled_blocks: int = 0
    """Block parts granted on another node than the writer's."""
    stalls: int = 0
    """Ticks so late that liveness deadlines were moved."""

    def evicted(self, blocks: int, idle_ms: int) -> None:
        """Count `blocks` evicted after `idle_ms` without a request."""
        self.evicted_idle_buckets[bisect_left(EVICTED_IDLE_BOUNDS_S, idle_ms / 1000)] += blocks
        self.evicted_idle_ms += idle_ms * blocks


@dataclass(frozen=True, slots=True)
class NamespaceSnapshot:
    id: bytes
    spec: NamespaceSpec
    blocks: int
    """Complete blocks."""
    bytes: int
    """Slot bytes held by extents of the directory, all parts, complete or not."""
    spans: int
    counters: NamespaceCounters


@dataclass(frozen=True, slots=True)
class SegmentSnapshot:
    handle: int
    index: int
    size_bytes: int
    used_bytes: int
    """Slots not free: stored, reserved, quarantined or waiting for leases to end."""
    quarantined_bytes: int
    deferred_bytes: int
    """Hidden, waiting for the leases of their time to end."""
    reserved_bytes: int
    """Granted to open reservations, not yet committed."""
    unclaimed_bytes: int
    """Held for namespaces that nobody has opened since the Master's start."""
    closed: bool
    """Takes no reservation: its inventory is not complete, or the grace of a former epoch is not over."""
    slabs: int
    slabs_bound: int


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    node: str
    incarnation: int
    state: str
    """"up", "ramp" (up, joined lately), "draining", "drained" (it may stop) or "suspect"."""
    state_reason: str
    heartbeat_age_ms: int
    inventory: str
    """"none" (nothing to report, or all of it is here), "waiting", "arriving" or "failed"."""
    segments: tuple[SegmentSnapshot, ...]
    data_address: str = ""
    drain_left_blocks: int = 0
    """Of a draining node: blocks, leases and copies that it still waits for."""


@dataclass(frozen=True, slots=True)
class TenantSnapshot:
    """bytes: slots held by its namespaces. quota_bytes: 0 for none. over_quota: reservations answered so."""

    tenant: str
    bytes: int
    quota_bytes: int
    over_quota: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    epoch: int
    namespaces: tuple[NamespaceSnapshot, ...]
    nodes: tuple[NodeSnapshot, ...]
    leases: int
    reservations: int
    ring_blocks: int
    """Blocks that the ring of the gone remembers."""
    directory_bytes: int
    """Memory of spans, keys, extents and index, estimated from a sample."""
    counters: PoolCounters
    ready: bool = True
    """Every known node has reported, or its time was over."""
    recovery: str = ""
    tenants: tuple[TenantSnapshot, ...] = ()
    copies_open: int = 0
    """Orders of CopySlots that are not answered."""
    """For people: what is still awaited."""
