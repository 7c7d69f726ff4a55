"""A whole pool in one process for SDK tests: the Master's real core behind a plain gRPC server, a real node.

Other nodes can be added: real segments, and `DataPorts` in place of their data ports. Time stands still unless a test
moves it. What a call does can be changed by method name: see `instead`. A new life of the Master knows what it was to
remember, and hears the rest from the node's inventory.
"""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from inspect import iscoroutinefunction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np

from kvpool_client.clock import Clock
from kvpool_client.devices.cpu import CpuDevice
from kvpool_client.inventory_report import InventoryReport
from kvpool_client.local_server import LocalServer
from kvpool_client.logs import Log
from kvpool_client.node import Node
from kvpool_client.owned_segment import OwnedSegment, SegmentPlan
from kvpool_client.peer.copies import PeerCopy
from kvpool_client.runs import Run, places_of
from kvpool_client.sdk import KVPool
from kvpool_client.session_messages import Clearing, InventoryDone, Order
from kvpool_client.transfer import LocalEngine, PartCopy
from kvpool_client.transfer_engine import Copied, Progress, Term, Written
from kvpool_master.convert_nodes import inventory_from_message
from kvpool_master.core import messages as m
from kvpool_master.core.memory import Memory
from kvpool_master.core.pool import Pool
from kvpool_master.core.settings import Settings
from kvpool_master.grants import Grants
from kvpool_master.service import PoolService
from kvpool_proto import pool_pb2 as pb
from kvpool_proto import pool_pb2_grpc as pb_grpc
from kvpool_proto.capability import KEY_BYTES, READ, RUN, WRITE, make_mac
from kvpool_proto.errors import BadCapability, KVPoolError
from kvpool_proto.security import PLAINTEXT
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
        self.change: dict[str, Callable[[Any], Any]] = {}
        """By method name, what to do to its reply."""
        self.remembered: list[m.Remember] = []
        self._lock = threading.RLock()
        self._lives = 0
        self._log = Log("error", False, Clock(), io.StringIO())
        self._start_node(slabs)
        self.far: dict[str, Node] = {}
        """By name, the nodes that were added."""
        self.ports = DataPorts(self)
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
        match effect:
            case m.BindSlab():
                node = self.node_of(effect.node)
                node.bind(Order(effect.segment, effect.slab, effect.slot_bytes))
                self.apply(m.SlabBound(node.node_id, node.incarnation, effect.segment, effect.slab, effect.slot_bytes))
            case m.ClearSlots():
                node = self.node_of(effect.node)
                node.clear_slots(Clearing(effect.order, effect.segment, effect.slot_bytes, effect.runs))
                self.apply(m.SlotsCleared(node.node_id, node.incarnation, effect.order))
            case m.AskWorkers():
                for worker in self.node_of(effect.node).workers.gone_of(effect.workers):
                    self.apply(m.WorkerGone(effect.node, worker))
            case m.AskInventory():
                self._report(self.epoch << 32 | effect.number)
            case m.Remember():
                self.remembered.append(effect)
            case m.Retire():
                raise AssertionError("nobody is given up here")
            case m.ProbeNode():
                self.apply(m.ProbeAnswered(effect.node, self.node_of(effect.node).incarnation, effect.number))
            case _:  # burials, copies: nobody waits for them here
                pass

    def node_of(self, name: str) -> Node:
        """The node of that name."""
        return self.node if name == NODE else self.far[name]

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
            clock=self.clock,
            grants=Grants(b"k" * KEY_BYTES, self.epoch, self.core.holder_of),
            config=SimpleNamespace(core=self.settings, clear_wait_ms=0),
            sessions=SimpleNamespace(settled=self._settled),
            refuse_when_stopping=lambda: None,
            log=SimpleNamespace(info=lambda *_, **__: None, warning=lambda *_, **__: None),
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
                reply = asyncio.run(function(request, None)) if iscoroutinefunction(function) else function(request)
            except KVPoolError as error:
                context.set_trailing_metadata(trailing_metadata(error))
                context.abort(CODES[error.code], str(error))
            self.change.get(name, lambda _: None)(reply)
            return reply

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
        self.node = Node(NODE, self._lives, [self.segment], 8, self._log, self.clock)
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

    def register(self, epoch: int, node: Node | None = None) -> None:
        """As registration.py does: what the Master knows by its contents stays, the rest is reported if it asks.

        node: ours, if no other.
        """
        node = node or self.node
        offers = tuple(
            m.SegmentOffer(offer.index, offer.size_bytes, offer.slab_bytes, -1, offer.contents, offer.holds)
            for offer in node.offers()
        )
        with self._lock:
            command = m.Register(node.node_id, node.incarnation, offers, node.epoch, node.data_address)
            registered = self.core.apply(command, self.now_ms)
            node.obey(epoch)
            node.bury(registered.tombstones)
            node.announce(registered.handles)
            for effect in registered.effects:
                self._carry_out(effect)

    def add_node(self, name: str, slabs: int = 16, data_address: str = "far:1") -> Node:
        """One more node, at whose data port our workers reach what lies there."""
        plan = SegmentPlan(
            directory=self.folder, node_id=name, index=0, size_bytes=slabs * SLAB_BYTES, slab_bytes=SLAB_BYTES
        )
        segment = OwnedSegment.open(plan, incarnation=1, prefault_threads=1, progress=lambda _: None)
        node = self.far[name] = Node(name, 1, [segment], 8, self._log, self.clock)
        node.data_address = data_address
        self.register(self.epoch, node)
        self.apply(m.Tick())
        return node

    def place_on(self, *names: str) -> None:
        """From now on room is given on these nodes only, one for each part if there are several; none: as usual."""

        def elsewhere(request: pb.ReserveRequest) -> None:
            """As if the writer were on a node that is not here, and could not use the others."""
            request.avoid_nodes.extend({NODE, *self.far} - set(names))
            request.nodes[:] = names if len(names) > 1 else ["elsewhere"]

        self.instead.pop("Reserve", None)
        if names:
            self.instead["Reserve"] = elsewhere

    # -- the SDK

    def connect(self, **given: Any) -> KVPool:
        """A worker of this pool."""
        given = {"timeout_ms": 20_000, "clock": self.clock, "name": "test", "security": PLAINTEXT, **given}
        given = {"peer_engine": self.ports, "node_socket": self.socket_path, **given}
        return KVPool.connect(f"127.0.0.1:{self.port}", **given)

    def stop(self) -> None:
        """Everything, with nothing left behind and the core sound."""
        self.core.check_invariants()
        self.stop_master()
        self.local.stop()
        for node in (self.node, *self.far.values()):
            node.segments[0].unlink()
            node.segments[0].close()


class DataPorts:
    """A transfer engine for PeerCopy: what the nodes' data ports do, done in this process to their segments.

    A capability is checked as a data port would; nothing else of one is here.
    """

    def __init__(self, double: PoolDouble) -> None:
        self._double = double
        self._engine = LocalEngine(CpuDevice())
        self.calls: list[tuple[str, str]] = []
        """("read" or "write", node), in order."""
        self.instead: dict[str, Callable[[str, list[PeerCopy]], Any]] = {}
        """By node, what to do instead: the result, or an exception to raise; None: as usual."""

    def read(self, copies: Sequence[PeerCopy], term: Term) -> list[Copied]:
        return self._serve("read", copies) or self._engine.read([self._part_copy(copy, READ) for copy in copies], term)

    def write(self, copies: Sequence[PeerCopy], term: Term, progress: Progress) -> Written:
        return self._serve("write", copies) or self._engine.write(
            [self._part_copy(copy, WRITE) for copy in copies], term, progress
        )

    def close(self) -> None:
        self._engine.close()

    def head(self, what: str, copies: Sequence[PeerCopy], blocks: int) -> Any:
        """Do the first `blocks` blocks of a call's only copy, really."""
        (copy,) = copies
        (run,) = copy.runs
        some = replace(copy, runs=[run._replace(blocks=blocks)], headers=copy.headers[:blocks])
        term = Term(self._double.clock, self._double.now_ms + 1, "timed_out")
        if what == "read":
            return self._engine.read([self._part_copy(some, READ)], term)
        return self._engine.write([self._part_copy(some, WRITE)], term, lambda _: "")

    def _serve(self, what: str, copies: Sequence[PeerCopy]) -> Any:
        (node_id,) = {copy.grant.node_id for copy in copies}
        self.calls.append((what, node_id))
        instead = self.instead.get(node_id)
        return instead(what, list(copies)) if instead is not None else None

    def _part_copy(self, copy: PeerCopy, op: int) -> PartCopy:
        """The same as a copy of the far node's own memory."""
        grant = copy.grant
        mac = make_mac(
            b"k" * KEY_BYTES, grant.op, grant.epoch, grant.valid_until_ms, grant.namespace, grant.part, grant.table
        )
        if (grant.mac, grant.op) != (mac, op) or grant.epoch != self._double.epoch:
            raise BadCapability("not the Master's")
        node = self._double.far[grant.node_id]
        assert grant.address == node.data_address
        rows = np.frombuffer(grant.table, dtype=RUN)
        starts = np.cumsum(rows["blocks"]) - rows["blocks"]
        runs: list[Run] = []
        for run in copy.runs:
            at = int(np.searchsorted(starts, run.at, side="right")) - 1
            row, skipped = rows[at], run.at - int(starts[at])
            assert skipped + run.blocks <= row["blocks"], "a run lies within one row"
            slot = int(row["first_slot"]) + skipped * int(row["stride"])
            segment: Any = node.segment_of(grant.epoch, int(row["segment"]))
            runs.append(Run(run.first, run.blocks, segment, slot, int(row["stride"]), int(row["stamp"])))
        found: Any = object.__new__(PartCopy)
        found.part, found.runs, found.buffer = grant.part, runs, copy.buffer
        found.part_bytes, found.slot_bytes = copy.part_bytes, copy.slot_bytes
        found.headers, found.places = copy.headers, places_of(runs, copy.slot_bytes)
        return found
