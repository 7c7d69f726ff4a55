"""The service of operators: request -> command -> reply. Nothing is decided here; see service.py for the form."""

from __future__ import annotations

from kvpool_master.convert import bypass_from_message, status_to_message
from kvpool_master.core.messages import Drain, QuotaSet, SetQuota, Undrain
from kvpool_master.shell import Shell
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import NotEnabled


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

    def Drain(self, request: pb.DrainRequest) -> pb.DrainReply:
        """Take no more writes on a node, and move what it holds elsewhere."""
        self._shell.refuse_when_stopping()
        if self._shell.apply(Drain(request.node_id)).effects:
            self._shell.log.info("drain_begun", node=request.node_id)
        return pb.DrainReply()

    def Undrain(self, request: pb.UndrainRequest) -> pb.UndrainReply:
        """End a drain."""
        self._shell.refuse_when_stopping()
        if self._shell.apply(Undrain(request.node_id)).effects:
            self._shell.log.info("drain_ended", node=request.node_id)
        return pb.UndrainReply()

    def SetQuota(self, request: pb.SetQuotaRequest) -> pb.SetQuotaReply:
        """Limit the bytes of a tenant."""
        self._shell.refuse_when_stopping()
        quota: QuotaSet = self._shell.apply(SetQuota(request.tenant, request.quota_bytes))
        self._shell.log.info(
            "quota_set", tenant=request.tenant, quota_bytes=request.quota_bytes, stored_bytes=quota.bytes
        )
        return pb.SetQuotaReply(stored_bytes=quota.bytes)

    def CheckInvariants(self, request: pb.CheckInvariantsRequest) -> pb.CheckInvariantsReply:
        """Cross-check every index of the directory; only with --debug, since it stops the world for its time."""
        if not self._shell.config.debug:
            raise NotEnabled("CheckInvariants is served only with --debug")
        return pb.CheckInvariantsReply(spans_checked=self._shell.core.check_invariants())
