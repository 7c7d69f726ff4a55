"""A whole pool in one process for SDK tests: the Master's real core behind a plain gRPC server, a real node.

Time stands still unless a test moves it. What a call does can be changed by method name: see `instead`. A new life of
the Master knows what it was to remember, and hears the rest from the node's inventory.
"""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from inspect import iscoroutinefunction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc

from kvpool_client.clock import Clock
from kvpool_client.inventory_report import InventoryReport
from kvpool_client.local_server import LocalServer
from kvpool_client.logs import Log
from kvpool_client.node import Node
from kvpool_client.owned_segment import OwnedSegment, SegmentPlan
from kvpool_client.sdk import KVPool
from kvpool_client.session_messages import Clearing, InventoryDone, Order
from kvpool_master.convert_nodes import inventory_from_message
from kvpool_master.core import messages as m
from kvpool_master.core.memory import Memory
from kvpool_master.core.pool import Pool
from kvpool_master.core.settings import Settings
from kvpool_master.service import PoolService
from kvpool_proto import pool_pb2 as pb
from kvpool_proto import pool_pb2_grpc as pb_grpc
from kvpool_proto.errors import KVPoolError
from kvpool_proto.status import CODES, trailing_metadata

SLAB_BYTES = 256 << 10
NODE = "n"


class PoolDouble:
    """Master and node, on loopback and a Unix socket, until stop()."""

    def __init__(self, folder: Path, slabs: int = 16, settings: Settings | None = None) -> None:
        self.now_ms = 1_000
        self.clock = Clock(now_ms=lambda: self.now_ms)
        self.folder = folder
        self.settings = settings or Settings(reserve_share_permille=1000)
        self.calls: list[tuple[str, Any]] = []
        self.instead: dict[str, Callable[[Any], Any]] = {}
        """By method name, what to do before it; a KVPoolError raised there is its answer."""
        self.remembered: list[m.Remember] = []
        self._lock = threading.RLock()
        self._lives = 0
        self._log = Log("error", False, Clock(), io.StringIO())
        self._start_node(slabs)
        self.server: grpc.Server | None = None
        self.port = 0
        self.start_master(epoch=10)

    # -- the Master

    def start_master(self, epoch: int, grace_ms: int = 0) -> None:
        """A new life of the Master, on the same port as before; the node registers and reports what it holds.

        grace_ms: how long leases and reservations of the former life may still be alive.
        """
        memory = Memory(
            namespaces=tuple(
                {each.namespace.id: each.namespace for each in self.remembered if each.namespace}.values()
            ),
            tombstones=tuple(dict(each.tombstone for each in self.remembered if each.tombstone).items()),
            grace_ms=grace_ms,
        )
        self.core = Pool(self.settings, epoch, memory, self.now_ms)
        self.epoch = epoch
        self.server = grpc.server(ThreadPoolExecutor(8), options=(("grpc.so_reuseport", 0),))
        pb_grpc.add_PoolServicer_to_server(self._servicer(), self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        self.register(epoch)
        self.apply(m.Tick())
        self.server.start()

    def stop_master(self) -> None:
        """It is gone, its port refuses."""
        assert self.server is not None
        self.server.stop(None).wait()

    def apply(self, command: Any) -> Any:
        """One command to the core, its orders to the node carried out at once."""
        with self._lock:
            outcome = self.core.apply(command, self.now_ms)
            for effect in getattr(outcome, "effects", ()):
                self._carry_out(effect)
            return outcome

    def _carry_out(self, effect: m.Effect) -> None:
        life = self.node.incarnation
        match effect:
            case m.BindSlab():
                self.node.bind(Order(effect.segment, effect.slab, effect.slot_bytes))
                self.apply(m.SlabBound(NODE, life, effect.segment, effect.slab, effect.slot_bytes))
            case m.ClearSlots():
                self.node.clear_slots(Clearing(effect.order, effect.segment, effect.slot_bytes, effect.runs))
                self.apply(m.SlotsCleared(NODE, life, effect.order))
            case m.AskWorkers():
                for worker in self.node.workers.gone_of(effect.workers):
                    self.apply(m.WorkerGone(NODE, worker))
            case m.AskInventory():
                self._report(self.epoch << 32 | effect.number)
            case m.Remember():
                self.remembered.append(effect)
            case m.Retire():
                raise AssertionError("nobody is given up here")

    def _report(self, number: int) -> None:
        """The node's inventory, as it goes over the wire."""

        def take(chunks: Iterator[pb.InventoryChunk]) -> Future[pb.InventoryReply]:
            for chunk in chunks:
                for command in inventory_from_message(chunk, self.epoch):
                    self.apply(command)
            taken: Future[pb.InventoryReply] = Future()
            taken.set_result(pb.InventoryReply())
            return taken

        ends: list[Any] = []
        stub = SimpleNamespace(Inventory=SimpleNamespace(future=take))
        InventoryReport(self.node, number).start(stub, lambda _, event: ends.append(event))
        assert ends == [InventoryDone(number)]

    def _servicer(self) -> Any:
        shell = SimpleNamespace(
            apply=self.apply,
            epoch=self.epoch,
            config=SimpleNamespace(core=self.settings, clear_wait_ms=0),
            sessions=SimpleNamespace(settled=self._settled),
            refuse_when_stopping=lambda: None,
            log=SimpleNamespace(info=lambda *_, **__: None),
        )
        service: Any = PoolService(shell)  # type: ignore[arg-type]
        names = [method.name for method in pb.DESCRIPTOR.services_by_name["Pool"].methods]
        return SimpleNamespace(**{name: self._handler(name, getattr(service, name)) for name in names})

    async def _settled(self, *_: object) -> set[str]:
        """Every order was carried out before its command was answered."""
        return set()

    def _handler(self, name: str, function: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        def handle(request: Any, context: Any) -> Any:
            self.calls.append((name, request))
            try:
                changed = self.instead.get(name, lambda _: None)(request)
                if changed is not None:
                    return changed
                return asyncio.run(function(request, None)) if iscoroutinefunction(function) else function(request)
            except KVPoolError as error:
                context.set_trailing_metadata(trailing_metadata(error))
                context.abort(CODES[error.code], str(error))

        return handle

    def called(self, name: str) -> list[Any]:
        """The requests of one method so far."""
        return [request for method, request in self.calls if method == name]

    # -- the node

    def _start_node(self, slabs: int) -> None:
        plan = SegmentPlan(
            directory=self.folder, node_id=NODE, index=0, size_bytes=slabs * SLAB_BYTES, slab_bytes=SLAB_BYTES
        )
        self._lives += 1
        self.segment = OwnedSegment.open(plan, incarnation=self._lives, prefault_threads=1, progress=lambda _: None)
        self.node = Node(NODE, self._lives, [self.segment], 8, self._log)
        self.start_socket()

    def stop_node(self) -> None:
        """The node client is gone, its file is not."""
        self.local.stop()
        self.segment.close()

    def start_node(self, *, lost: bool = False) -> None:
        """A new life of the node client, on the file of the former one; lost: on a new file."""
        if lost:
            self.segment.plan.path.unlink()
        self.apply(m.SessionLost(NODE, self.node.incarnation))
        self._start_node(self.segment.slabs)
        self.register(self.epoch)
        self.apply(m.Tick())

    def start_socket(self) -> None:
        """Let workers in."""
        self.socket_path = str(self.folder / "node.sock")
        local = SimpleNamespace(welcome=self.node.welcome, report_bad=self._report_bad, used=self.node.used)
        self.local = LocalServer(Path(self.socket_path), 0o600, local, 5.0, 8, self._log)
        self.local.start()

    def _report_bad(self, complaint: pb.LocalBadBlock) -> bool:
        bad = self.node.report_bad(complaint)
        if bad:
            block = complaint.block
            self.apply(m.BlockBad(block.namespace_id, block.chain, block.stamp))
        return bad

    def register(self, epoch: int) -> None:
        """As registration.py does: what the Master knows by its contents stays, the rest is reported if it asks."""
        offers = tuple(
            m.SegmentOffer(offer.index, offer.size_bytes, offer.slab_bytes, -1, offer.contents, offer.holds)
            for offer in self.node.offers()
        )
        with self._lock:
            command = m.Register(NODE, self.node.incarnation, offers, self.node.epoch)
            registered = self.core.apply(command, self.now_ms)
            self.node.obey(epoch)
            self.node.bury(registered.tombstones)
            self.node.announce(registered.handles)
            for effect in registered.effects:
                self._carry_out(effect)

    # -- the SDK

    def connect(self, **given: Any) -> KVPool:
        """A worker of this pool."""
        given = {"timeout_ms": 20_000, "clock": self.clock, "name": "test", **given}
        return KVPool.connect(f"127.0.0.1:{self.port}", self.socket_path, **given)

    def stop(self) -> None:
        """Everything, with nothing left behind and the core sound."""
        self.core.check_invariants()
        self.stop_master()
        self.local.stop()
        self.segment.unlink()
        self.segment.close()
