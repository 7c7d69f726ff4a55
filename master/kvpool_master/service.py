"""The services of workers and operators: request -> command -> reply. Nothing is decided here.

Every public method is one RPC, a plain function; rpc.py puts deadline, errors and time around it. What was granted
under another epoch is refused (STALE_EPOCH) where the request names it: ids mean nothing across lives.
"""

from __future__ import annotations

from kvpool_master.convert import (
    bypass_from_message,
    commit_from_message,
    enum_to_message,
    extents_to_message,
    peeked_to_message,
    reserve_from_message,
    reserved_to_message,
    status_to_message,
)
from kvpool_master.core.messages import (
    Abort,
    Aborted,
    ClearSlots,
    Committed,
    Hit,
    Lookup,
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
    Reserved,
)
from kvpool_master.shell import Shell
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.convert import spec_from_message
from kvpool_proto.errors import NamespaceDiffers, NotEnabled, StaleEpoch

WAIT_SHARE = 0.75
"""Of a request's remaining time, what waiting for others may take."""


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
        hit: Hit = self._shell.apply(Lookup(request.namespace_id, request.chain, request.skip_blocks, request.lease_id))
        if not hit.blocks:
            return pb.LookupReply(reason=enum_to_message(hit.reason), epoch=self._shell.epoch)
        return pb.LookupReply(
            hit_blocks=hit.blocks,
            reason=enum_to_message(hit.reason),
            extents=extents_to_message(hit.extents),
            lease_ms=hit.lease_ms,
            epoch=self._shell.epoch,
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
        reserved: Reserved = self._shell.apply(reserve_from_message(request))
        return reserved_to_message(reserved, self._shell.epoch)

    def Commit(self, request: pb.CommitRequest) -> pb.CommitReply:
        """Report blocks written."""
        self._of_this_life(request.epoch)
        committed: Committed = self._shell.apply(commit_from_message(request))
        return pb.CommitReply(committed_blocks=committed.blocks, lost_blocks=committed.lost, epoch=self._shell.epoch)

    def Abort(self, request: pb.AbortRequest) -> pb.AbortReply:
        """Give up what is not committed."""
        self._of_this_life(request.epoch)
        aborted: Aborted = self._shell.apply(
            Abort(request.reservation_id, request.writer, request.part_from, request.part_to)
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


class AdminService:
    """kvpool.v1.Admin."""

    def __init__(self, shell: Shell, version: str) -> None:
        self._shell = shell
        self._version = version
        self._started_ms = shell.clock.now_ms()

    def Status(self, request: pb.StatusRequest) -> pb.StatusReply:
        """What is stored and who holds it."""
        uptime_ms = self._shell.clock.now_ms() - self._started_ms
        return status_to_message(self._shell.snapshot(), self._version, uptime_ms, self._shell.bypass)

    def SetBypass(self, request: pb.SetBypassRequest) -> pb.SetBypassReply:
        """Turn lookups, loads or stores of all workers off, or on again."""
        bits = bypass_from_message(request.bypass)
        told = self._shell.set_bypass(bits)
        self._shell.log.warning("bypass_set", bits=bits, nodes_told=told)
        return pb.SetBypassReply(nodes_told=told)

    def CheckInvariants(self, request: pb.CheckInvariantsRequest) -> pb.CheckInvariantsReply:
        """Cross-check every index of the directory; only with --debug, since it stops the world for its time."""
        if not self._shell.config.debug:
            raise NotEnabled("CheckInvariants is served only with --debug")
        return pb.CheckInvariantsReply(spans_checked=self._shell.core.check_invariants())
