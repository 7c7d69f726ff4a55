"""The operator: asks the Master to drain nodes, to end that, to set quotas; takes away nodes that are drained."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import grpc

from kvpool_proto import pool_pb2 as pb
from kvpool_proto import pool_pb2_grpc
from simulation.channel import Channel
from simulation.hub import MS, Process

if TYPE_CHECKING:
    from simulation.world import World

TIMEOUT_S: Final = 1.0
LOOK_US: Final = 400 * MS
WAIT_US: Final = 12_000 * MS
"""For so long an operator waits for a node to be drained."""


class OperatorProcess:
    """On a machine of its own, which nobody cuts off; it lives as long as the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._hub = world.hub
        self.process = Process(world.hub, "operator", "operator")
        self._stub: Any = pool_pb2_grpc.AdminStub(Channel(world.network, self.process))  # type: ignore[arg-type]

    def drain(self, node: str, then_remove: bool) -> None:
        """Drain a node; then_remove: when it is said to be drained, stop it and throw its memory away."""

        def work() -> None:
            """In a thread."""
            if self._ask(self._stub.Drain, pb.DrainRequest(node_id=node)) is None:
                return
            end_us = self._hub.now_us + WAIT_US
            while then_remove and self._hub.now_us < end_us and not self._world.enough:
                self._hub.sleep(LOOK_US)
                status = self._ask(self._stub.Status, pb.StatusRequest())
                if status is not None and _state(status, node) == "drained":
                    self._world.checkers.seen.add("drained nodes removed")
                    self._world.discard(node)
                    return

        self.process.spawn(work, f"drains {node}")

    def undrain(self, node: str, done: Callable[[], bool] = lambda: True) -> None:
        """End a drain; asked again until done()."""

        def work() -> None:
            """In a thread."""
            while True:
                self._ask(self._stub.Undrain, pb.UndrainRequest(node_id=node))
                if done():
                    return
                self._hub.sleep(LOOK_US)

        self.process.spawn(work, f"undrains {node}")

    def set_quota(self, tenant: str, quota_bytes: int) -> None:
        """Limit a tenant."""
        request = pb.SetQuotaRequest(tenant=tenant, quota_bytes=quota_bytes)
        self.process.spawn(lambda: self._ask(self._stub.SetQuota, request), "sets a quota")

    def _ask(self, call: Any, request: Any) -> Any:
        """The reply; None if there was none."""
        try:
            return call(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            self._hub.note(f"{type(request).__name__}: {error}")
            return None


def _state(status: Any, node: str) -> str:
    return next((one.state for one in status.nodes if one.node_id == node), "")
