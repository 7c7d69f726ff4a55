"""The snapshot of a pool: numbers for metrics and status. Reads, never changes."""

from __future__ import annotations

from itertools import islice
from sys import getsizeof
from typing import TYPE_CHECKING

from kvpool_master.core.liveness import Node
from kvpool_master.core.messages import Reason
from kvpool_master.core.segments import Segment
from kvpool_master.core.snapshot import NamespaceSnapshot, NodeSnapshot, SegmentSnapshot, Snapshot, TenantSnapshot
from kvpool_master.core.spans import Span

if TYPE_CHECKING:
    from kvpool_master.core.pool import Pool

SAMPLE_SPANS = 256
"""Spans measured for the estimate of the directory's memory."""
INDEX_KEY_BYTES = 48
"""A 16-byte key as a Python integer."""


def take_snapshot(pool: Pool, now_ms: int) -> Snapshot:
    """Everything that metrics and status tell. Takes time linear in namespaces, nodes and slabs."""
    namespaces = tuple(
        NamespaceSnapshot(
            ident,
            namespace.spec,
            namespace.tree.blocks,
            namespace.tree.bytes,
            namespace.tree.spans,
            namespace.counters,
        )
        for ident, namespace in pool.namespaces.items()
    )
    return Snapshot(
        epoch=pool.epoch,
        namespaces=namespaces,
        nodes=tuple(_node(pool, node, now_ms) for node in pool.liveness.nodes.values()),
        leases=len(pool.leases),
        reservations=len(pool.writes.open),
        ring_blocks=pool.forest.ring.blocks,
        directory_bytes=directory_bytes(pool),
        counters=pool.counters,
        ready=pool.recovery.ready,
        recovery=pool.recovery.describe(),
        tenants=_tenants(pool),
        copies_open=len(pool.copies.open),
    )


def _tenants(pool: Pool) -> tuple[TenantSnapshot, ...]:
    held: dict[str, list[int]] = {tenant: [0, 0] for tenant in pool.quotas.limits}
    for namespace in pool.namespaces.values():
        sums = held.setdefault(namespace.spec.tenant, [0, 0])
        sums[0] += namespace.tree.bytes + namespace.tree.replica_bytes
        sums[1] += namespace.counters.short_reserves.get(Reason.OVER_QUOTA, 0)
    limits = pool.quotas.limits
    return tuple(
        TenantSnapshot(tenant, size, limits[tenant].limit_bytes if tenant in limits else 0, over)
        for tenant, (size, over) in held.items()
    )


def _node(pool: Pool, node: Node, now_ms: int) -> NodeSnapshot:
    return NodeSnapshot(
        node=node.name,
        incarnation=node.incarnation,
        state=node.state(now_ms),
        state_reason=node.reason,
        heartbeat_age_ms=max(0, now_ms - node.heartbeat_ms),
        inventory="none" if node.inventory is None else node.inventory.state.value,
        segments=tuple(_segment(segment) for segment in node.segments),
        data_address=node.data_address,
        drain_left_blocks=pool.drains.left(node) if node.draining else 0,
    )


def _segment(segment: Segment) -> SegmentSnapshot:
    allocator = segment.allocator
    return SegmentSnapshot(
        handle=segment.handle,
        index=segment.index,
        size_bytes=allocator.size_bytes,
        used_bytes=allocator.used_bytes(),
        quarantined_bytes=segment.quarantined_bytes,
        deferred_bytes=segment.deferred_bytes,
        reserved_bytes=segment.reserved_bytes,
        unclaimed_bytes=segment.unclaimed_bytes,
        closed=segment.closed,
        slabs=allocator.slabs,
        slabs_bound=allocator.slabs - len(allocator.unbound) - len(allocator.binding),
    )


def span_bytes(span: Span) -> int:
    """Memory of one span and what only it holds."""
    held = [span, span.keys, span.extents, span.ages, span.children, span.leases, span.writers]
    return sum(getsizeof(one) for one in held if one is not None)


def directory_bytes(pool: Pool) -> int:
    """Estimated memory of all live spans, their heap and slab entries, and the indexes."""
    total = 0
    spans = sum(namespace.tree.spans for namespace in pool.namespaces.values())
    segments = pool.space.segments.values()
    sample = [
        span
        for segment in islice(segments, 8)
        for spans_of_slab in islice([*segment.slab_spans.values(), segment.unsorted], 8)
        for span in islice(spans_of_slab, SAMPLE_SPANS // 64)
    ]
    if sample:
        total += spans * sum(map(span_bytes, sample)) // len(sample)
    for segment in segments:
        total += sum(getsizeof(heap) + len(heap) * getsizeof((0, None)) for heap in segment.leaves.values())
        total += sum(map(getsizeof, segment.slab_spans.values()))
    for namespace in pool.namespaces.values():
        if namespace.tree.index is not None:
            total += getsizeof(namespace.tree.index) + len(namespace.tree.index) * INDEX_KEY_BYTES
    return total
