"""What all namespaces of one KVPool share, and a namespace's calls to the Master."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvpool_client.background import Background
from kvpool_client.clock import Clock
from kvpool_client.lanes import Lanes
from kvpool_client.master_client import MasterClient
from kvpool_client.node_link import Link
from kvpool_client.stats import Counters
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.convert import spec_to_message
from kvpool_proto.errors import ProtocolError, StaleEpoch, UnknownNamespace
from kvpool_proto.namespace import NamespaceSpec

_Reply = TypeVar("_Reply")


class EpochGuard:
    """The highest epoch seen. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._highest = 0

    def highest(self) -> int:
        """The epoch that rules, as far as this process knows."""
        return self._highest

    def obey(self, epoch: int) -> None:
        """Raise StaleEpoch unless no higher epoch was seen."""
        with self._lock:
            if epoch < self._highest:
                raise StaleEpoch(f"epoch {epoch}, but {self._highest} was seen")
            self._highest = epoch


class LeaseReturns:
    """Leases to release, sent in the background, as many as there are in one request."""

    def __init__(self, master: MasterClient, background: Background, clock: Clock, timeout_ms: int) -> None:
        self._master = master
        self._background = background
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._lock = threading.Lock()
        self._leases: list[bytes] = []

    def put(self, lease_id: bytes) -> None:
        """End this lease soon. If that cannot be said, it ends by itself."""
        with self._lock:
            self._leases.append(lease_id)
            first = len(self._leases) == 1
        if first and not self._background.submit(self._send):
            with self._lock:
                self._leases.clear()

    def _send(self) -> None:
        with self._lock:
            leases, self._leases = self._leases, []
        request = pb.ReleaseRequest(lease_ids=leases)
        self._master.call(self._master.pool.Release, request, self._clock.now_ms() + self._timeout_ms, patient=True)


class NodeReports:
    """Tells the Master, in the background, of nodes whose data port could not be used."""

    def __init__(self, master: MasterClient, link: Link, background: Background, clock: Clock, timeout_ms: int) -> None:
        self._master = master
        self._link = link
        self._background = background
        self._clock = clock
        self._timeout_ms = timeout_ms

    def put(self, node_id: str, reason: str) -> None:
        """Report a node soon. If the Master cannot be told, it judges by what it sees itself."""

        def send() -> None:
            """With the name of the node on which we are by now."""
            request = pb.ReportNodeRequest(node_id=node_id, reporter_node_id=self._link.present.node_id, reason=reason)
            self._master.call(self._master.pool.ReportNode, request, self._clock.now_ms() + self._timeout_ms)

        self._background.submit(send)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """timeout_ms: of a call to the Master where the caller names no other. bypass: what the environment turns off."""

    master: MasterClient
    link: Link
    lanes: Lanes
    background: Background
    returns: LeaseReturns
    clock: Clock
    timeout_ms: int
    counters: Counters
    bypass: int = 0
    epochs: EpochGuard = field(default_factory=EpochGuard)

    def off(self, call: int) -> bool:
        """Is this kind of call, a BYPASS_ bit, turned off? One or few reads of memory."""
        return bool((self.bypass | self.link.bypass()) & call)

    def called(self, call: str, spec: NamespaceSpec, reason: str, **amounts: float) -> None:
        """Count a call; see Counters. The node client hears of it within about a second."""
        self.counters.called(call, spec, reason, **amounts)
        self.background.want_idle()


class NamespaceCalls:
    """Calls within one namespace, which is opened when first needed and when the Master does not know it any more."""

    def __init__(self, context: Context, spec: NamespaceSpec) -> None:
        self.spec = spec
        self.id = spec.id
        self._context = context
        self._open = False

    def ask(self, method: Callable[..., _Reply], request: Any, deadline_ms: int, *, again: bool = False) -> _Reply:
        """The reply to a request of this namespace. Raises as MasterClient.call, and StaleEpoch."""
        if not self._open:
            self.open(deadline_ms)
        master = self._context.master
        try:
            reply = master.call(method, request, deadline_ms, again=again)
        except UnknownNamespace:
            self.open(deadline_ms)
            reply = master.call(method, request, deadline_ms, again=again)
        epoch = getattr(reply, "epoch", None)
        if epoch is not None:
            self._context.epochs.obey(epoch)
        return reply

    def open(self, deadline_ms: int) -> None:
        """Register the namespace. Raises as ask, and ProtocolError when the two sides compute differently."""
        request = pb.OpenNamespaceRequest(spec=spec_to_message(self.spec), namespace_id=self.id)
        reply = self._context.master.call(self._context.master.pool.OpenNamespace, request, deadline_ms, again=True)
        if (reply.namespace_id, reply.slot_bytes) != (self.id, self.spec.slot_bytes):
            raise ProtocolError("the Master computes another namespace id or slot size: compare the versions")
        self._context.epochs.obey(reply.epoch)
        self._open = True
