"""Messages of workers and operators to commands of the core, and its outcomes to messages. No decision is taken here.

Runs travel column by column: no Python step per block, and few per run.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from kvpool_master.core.extents import records
from kvpool_master.core.messages import (
    Commit,
    Parent,
    Peeked,
    Reserve,
    Reserved,
)
from kvpool_master.core.snapshot import NodeSnapshot, Snapshot
from kvpool_master.state import BYPASS_BITS
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.convert import spec_to_message
from kvpool_proto.errors import BadRequest

PARENTS = {pb.PARENT_ROOT: Parent.ROOT, pb.PARENT_UNKNOWN: Parent.UNKNOWN}


def enum_to_message(value: IntEnum) -> Any:
    """The number of a reason or state, which is that of the contract; protobuf has a type of its own per enum."""
    return value.value


def extents_to_message(packed: bytes) -> pb.Extents:
    """Packed extents (core/extents.py) as parallel columns."""
    if not packed:
        return pb.Extents()
    offset, blocks, segment, first_slot, part_from, part_to, stride, stamp = zip(*records(packed), strict=True)
    return pb.Extents(
        offset=offset,
        blocks=blocks,
        segment=segment,
        first_slot=first_slot,
        part_from=part_from,
        part_to=part_to,
        stride=stride,
        stamp=stamp,
    )


def reserve_from_message(request: pb.ReserveRequest) -> Reserve:
    """The command of a request. Raises BadRequest if it does not say what the put follows."""
    parent = request.parent_key if request.parent_kind == pb.PARENT_KEY else PARENTS.get(request.parent_kind)
    if parent is None:
        raise BadRequest(f"parent_kind = {request.parent_kind}: root, key or unknown")
    return Reserve(
        request.namespace_id,
        request.reservation_id,
        parent,
        request.chain,
        request.part_from,
        request.part_to,
        tuple(request.nodes),
        request.worker_id,
        request.shares or 1,
        request.share,
        tuple(request.avoid_nodes),
    )


def reserved_to_message(reserved: Reserved, epoch: int, shares: int) -> pb.ReserveReply:
    """The reply of a reservation, without its holders."""
    reply = pb.ReserveReply(
        answered_blocks=reserved.answered,
        reason=enum_to_message(reserved.reason),
        write_ms=reserved.write_ms,
        epoch=epoch,
    )
    if reserved.runs:
        rows = [
            (run.offset, run.blocks, run.part_from, run.part_to, enum_to_message(run.state)) for run in reserved.runs
        ]
        offset, blocks, part_from, part_to, state = zip(*rows, strict=True)
        reply.run_offset.extend(offset)
        reply.run_blocks.extend(blocks)
        reply.run_part_from.extend(part_from)
        reply.run_part_to.extend(part_to)
        reply.run_state.extend(state)
        if shares > 1:
            reply.run_share.extend([run.share for run in reserved.runs])
    if reserved.extents:
        reply.extents.CopyFrom(extents_to_message(reserved.extents))
    return reply


def peeked_to_message(peeked: Peeked, epoch: int) -> pb.PeekReply:
    """The reply of a peek."""
    reply = pb.PeekReply(
        hit_blocks=peeked.blocks,
        reason=enum_to_message(peeked.reason),
        extents=extents_to_message(peeked.extents),
        epoch=epoch,
    )
    if peeked.gone is not None:
        gone = peeked.gone
        reply.gone.CopyFrom(pb.Gone(reason=enum_to_message(gone.reason), ago_ms=gone.ago_ms, idle_ms=gone.idle_ms))
    return reply


def commit_from_message(request: pb.CommitRequest) -> Commit:
    """The command of a request."""
    return Commit(
        request.reservation_id,
        request.part_from,
        request.part_to,
        request.blocks_written,
        request.final,
        request.worker_id,
        request.share,
    )


def tombstones_to_message(tombstones: Iterable[tuple[bytes, int]]) -> list[pb.Tombstone]:
    """(namespace, newest dead stamp) as they travel."""
    return [pb.Tombstone(namespace_id=namespace, stamp=stamp) for namespace, stamp in tombstones]


def bypass_to_message(bits: int) -> pb.Bypass:
    """The switch as it travels."""
    return pb.Bypass(**{name: bool(bits & bit) for name, bit in BYPASS_BITS.items()})


def bypass_from_message(bypass: pb.Bypass) -> int:
    """The bits of a switch."""
    return sum(bit for name, bit in BYPASS_BITS.items() if getattr(bypass, name))


def status_to_message(snapshot: Snapshot, version: str, uptime_ms: int, bypass: int) -> pb.StatusReply:
    """What is stored and who holds it."""
    namespaces = [
        pb.NamespaceStatus(
            namespace_id=held.id,
            spec=spec_to_message(held.spec),
            blocks=held.blocks,
            stored_bytes=held.bytes,
            spans=held.spans,
        )
        for held in snapshot.namespaces
    ]
    return pb.StatusReply(
        epoch=snapshot.epoch,
        version=version,
        uptime_ms=uptime_ms,
        namespaces=namespaces,
        nodes=[_node_to_message(node) for node in snapshot.nodes],
        leases=snapshot.leases,
        reservations=snapshot.reservations,
        ready=snapshot.ready,
        recovery=snapshot.recovery,
        bypass=bypass_to_message(bypass),
        tenants=[
            pb.TenantStatus(tenant=held.tenant, stored_bytes=held.bytes, quota_bytes=held.quota_bytes)
            for held in snapshot.tenants
        ],
    )


def _node_to_message(node: NodeSnapshot) -> pb.NodeStatus:
    segments = [
        pb.SegmentStatus(
            handle=segment.handle,
            index=segment.index,
            size_bytes=segment.size_bytes,
            used_bytes=segment.used_bytes,
            quarantined_bytes=segment.quarantined_bytes,
            slabs=segment.slabs,
            slabs_bound=segment.slabs_bound,
        )
        for segment in node.segments
    ]
    return pb.NodeStatus(
        node_id=node.node,
        incarnation=node.incarnation,
        state=node.state,
        state_reason=node.state_reason,
        heartbeat_age_ms=node.heartbeat_age_ms,
        segments=segments,
        inventory=node.inventory,
        data_address=node.data_address,
        drain_left_blocks=node.drain_left_blocks,
    )
