"""The service of workers: request -> command -> reply. Nothing is decided here.

Every public method is one RPC, a plain function; rpc.py puts deadline, errors and time around it. What was granted
under another epoch is refused (STALE_EPOCH) where the request names it: ids mean nothing across lives.
"""

from __future__ import annotations

from kvpool_master.convert import (
    commit_from_message,
    enum_to_message,
    extents_to_message,
    peeked_to_message,
    reserve_from_message,
    reserved_to_message,
)
from kvpool_master.core.messages import (
    Abort,
    Aborted,
    ClearSlots,
    Committed,
    Hit,
    Lookup,
    NodeReported,
    Opened,
    OpenNamespace,
    Peek,
    Peeked,
    Purge,
    Purged,
    Release,
    Released,
    Remove,
    Removed,
    Renew,
    Renewed,
    ReportNode,
    Reserved,
)
from kvpool_master.shell import Shell
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.capability import READ, WRITE
from kvpool_proto.convert import spec_from_message
from kvpool_proto.errors import NamespaceDiffers, StaleEpoch

WAIT_SHARE = 0.75
"""Of a request's remaining time, what waiting for others may take."""
WRITE_SLACK_MS = 1_000
"""So much longer than its reservation a capability to write holds: data ports know our time only from messages."""
REPORT_CHARS_MAX = 200
"""Of a report's reason, what is logged."""


class PoolService:
    """kvpool.v1.Pool."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def _of_this_life(self, epoch: int) -> None:
        """Raise StaleEpoch if the grant that a request refers to is of another epoch; 0: not said."""
        if epoch and epoch != self._shell.epoch:
            raise StaleEpoch(f"granted under epoch {epoch}; {self._shell.epoch} rules")

    def OpenNamespace(self, request: pb.OpenNamespaceRequest) -> pb.OpenNamespaceReply:
        """Register or find a namespace."""
        self._shell.refuse_when_stopping()
        spec = spec_from_message(request.spec)
        if request.namespace_id and request.namespace_id != spec.id:
            raise NamespaceDiffers(f"the spec's id is {spec.id.hex()}, the caller's is {request.namespace_id.hex()}")
        opened: Opened = self._shell.apply(OpenNamespace(spec))
        return pb.OpenNamespaceReply(
            namespace_id=opened.namespace,
            slot_bytes=opened.slot_bytes,
            chain_blocks_max=self._shell.config.core.chain_blocks_max,
            epoch=self._shell.epoch,
        )

    def Lookup(self, request: pb.LookupRequest) -> pb.LookupReply:
        """Lease the longest run that can be copied now."""
        self._shell.refuse_when_stopping()
        shell, namespace, node = self._shell, request.namespace_id, request.node_id
        hit: Hit = shell.apply(Lookup(namespace, request.chain, request.skip_blocks, request.lease_id, node))
        if not hit.blocks:
            return pb.LookupReply(reason=enum_to_message(hit.reason), epoch=shell.epoch)
        # A lease may be renewed up to its maximum life, and the capabilities stay the same.
        until_ms = shell.clock.now_ms() + shell.config.core.lease_life_max_ms
        return pb.LookupReply(
            hit_blocks=hit.blocks,
            reason=enum_to_message(hit.reason),
            extents=extents_to_message(hit.extents),
            lease_ms=hit.lease_ms,
            epoch=shell.epoch,
            holders=shell.grants.holders(READ, namespace, hit.extents, until_ms, node),
            valid_until_ms=until_ms,
        )

    def Peek(self, request: pb.PeekRequest) -> pb.PeekReply:
        """The question of Lookup, without a lease."""
        peeked: Peeked = self._shell.apply(
            Peek(request.namespace_id, request.chain, request.skip_blocks, request.explain)
        )
        return peeked_to_message(peeked, self._shell.epoch)

    def Release(self, request: pb.ReleaseRequest) -> pb.ReleaseReply:
        """End leases."""
        released: Released = self._shell.apply(Release(tuple(request.lease_ids)))
        return pb.ReleaseReply(released=released.released)

    def Renew(self, request: pb.RenewRequest) -> pb.RenewReply:
        """Prolong a lease."""
        self._of_this_life(request.epoch)
        renewed: Renewed = self._shell.apply(Renew(request.lease_id))
        return pb.RenewReply(lease_ms=renewed.lease_ms)

    def Reserve(self, request: pb.ReserveRequest) -> pb.ReserveReply:
        """Ask for room."""
        self._shell.refuse_when_stopping()
        shell = self._shell
        command = reserve_from_message(request)
        reserved: Reserved = shell.apply(command)
        reply = reserved_to_message(reserved, shell.epoch, command.shares)
        if reserved.extents:
            # Several nodes are named for several writers: which of them reads this answer is not known.
            own = command.nodes[0] if len(set(command.nodes)) == 1 else ""
            until_ms = shell.clock.now_ms() + reserved.write_ms + WRITE_SLACK_MS
            reply.holders.extend(shell.grants.holders(WRITE, command.namespace, reserved.extents, until_ms, own))
            reply.valid_until_ms = until_ms
        return reply

    def Commit(self, request: pb.CommitRequest) -> pb.CommitReply:
        """Report blocks written."""
        self._of_this_life(request.epoch)
        committed: Committed = self._shell.apply(commit_from_message(request))
        return pb.CommitReply(committed_blocks=committed.blocks, lost_blocks=committed.lost, epoch=self._shell.epoch)

    def Abort(self, request: pb.AbortRequest) -> pb.AbortReply:
        """Give up what is not committed."""
        self._of_this_life(request.epoch)
        aborted: Aborted = self._shell.apply(
            Abort(request.reservation_id, request.writer, request.part_from, request.part_to, request.share)
        )
        return pb.AbortReply(aborted=aborted.aborted)

    async def Remove(self, request: pb.RemoveRequest, remaining_s: float | None) -> pb.RemoveReply:
        """Hide the blocks of a chain, and wait a while for the nodes to clear their slot headers."""
        removed: Removed = self._shell.apply(Remove(request.namespace_id, request.chain, request.skip_blocks))
        wait_s = self._shell.config.clear_wait_ms / 1000
        if remaining_s is not None:
            wait_s = min(wait_s, remaining_s * WAIT_SHARE)
        away = set(removed.nodes_away)
        orders = [order for order in removed.effects if isinstance(order, ClearSlots) and order.node not in away]
        away |= await self._shell.sessions.settled(orders, wait_s)
        return pb.RemoveReply(removed_blocks=removed.blocks, nodes_away=sorted(away))

    def Purge(self, request: pb.PurgeRequest) -> pb.PurgeReply:
        """Hide all of a namespace."""
        purged: Purged = self._shell.apply(Purge(request.namespace_id))
        self._shell.log.info("namespace_purged", namespace=request.namespace_id, blocks=purged.blocks)
        return pb.PurgeReply(purged_blocks=purged.blocks)

    def ReportNode(self, request: pb.ReportNodeRequest) -> pb.ReportNodeReply:
        """Hear that a worker could not use a node's data port."""
        reported: NodeReported = self._shell.apply(ReportNode(request.node_id, request.reporter_node_id))
        self._shell.log.warning(
            "node_reported",
            node=request.node_id,
            reporter=request.reporter_node_id,
            why=request.reason[:REPORT_CHARS_MAX],
            suspect=reported.suspect,
        )
        return pb.ReportNodeReply(suspect=reported.suspect)
