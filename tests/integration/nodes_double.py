"""A scripted Master for node clients: takes registrations, keeps sessions, gives the orders that a test wants.

It behaves as nodes_service.py of the Master does: segments keep their handles as long as their contents are known, a
session says at once which epoch it is, orders follow, and what breaks a rule ends in a status with a reason.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from kvpool_proto import pool_pb2 as pb
from kvpool_proto import pool_pb2_grpc as pb_grpc
from kvpool_proto.capability import KEY_BYTES
from kvpool_proto.errors import KVPoolError, StaleInventory, UnknownNode
from kvpool_proto.status import CODES, trailing_metadata

WAIT_S = 20.0


class NodesDouble(pb_grpc.NodesServicer):
    """Serves on `port` (0: any) until stop(). What came in is in `registered`, `heard`, `chunks` and `retired`.

    inventories: those that came to their end, by number. hold_inventories: each waits after its first chunk, until it
    is not the newest any more or nobody holds it.
    """

    def __init__(self, port: int = 0, epoch: int = 10, heartbeat_ms: int = 20, suspect_ms: int = 5_000) -> None:
        self.epoch = epoch
        self.heartbeat_ms = heartbeat_ms
        self.suspect_ms = suspect_ms
        self.next_handle = 100
        self.refusal: KVPoolError | None = None
        self.registered: list[pb.RegisterRequest] = []
        self.heard: list[pb.SessionUp] = []
        self.retired: list[pb.RetireRequest] = []
        self.chunks: list[pb.InventoryChunk] = []
        self.inventories: dict[int, list[pb.InventoryChunk]] = {}
        self.hold_inventories = False
        self.inventory_refusal: KVPoolError | None = None
        self.tombstones: list[pb.Tombstone] = []
        self.bypass = pb.Bypass()
        self.key = b"k" * KEY_BYTES
        self.former_key_ms = 60_000
        self.nodes: dict[str, tuple[list[int], list[int]]] = {}
        """Contents and handles."""
        self._asked = 0
        self._changed = threading.Condition()
        self._sessions: list[queue.Queue[pb.SessionDown | KVPoolError | None]] = []
        self._server = grpc.server(ThreadPoolExecutor(8))
        pb_grpc.add_NodesServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def master_ms(self) -> int:
        """The time that it tells."""
        return time.monotonic_ns() // 1_000_000

    def wait(self, what: Callable[[], Any]) -> Any:
        """Wait until what() is true, asked whenever something came in; its value."""
        with self._changed:
            assert self._changed.wait_for(what, WAIT_S), "it did not happen in time"
            return what()

    def wait_heartbeats(self, n: int = 2) -> None:
        """Wait for n more messages."""
        there = len(self.heard)
        self.wait(lambda: len(self.heard) >= there + n)

    def send(self, message: pb.SessionDown) -> None:
        """Say something on the session that was opened last."""
        self._session().put(message)

    def order(self, *orders: pb.BindSlab) -> None:
        self.send(pb.SessionDown(epoch=self.epoch, bind_slabs=orders))

    def ask_inventory(self, number: int) -> None:
        with self._changed:
            self._asked = number
            self._changed.notify_all()
        self.send(pb.SessionDown(epoch=self.epoch, report_inventory=number))

    def release_inventories(self, refusal: KVPoolError | None = None) -> None:
        """Let held inventories go on, or end them with a refusal."""
        with self._changed:
            self.hold_inventories = False
            self.inventory_refusal = refusal
            self._changed.notify_all()

    def break_session(self, error: KVPoolError | None = None) -> None:
        self._session().put(error)

    def forget(self) -> None:
        """Know no node any more."""
        self.nodes.clear()

    def stop(self) -> None:
        for session in self._sessions:
            session.put(None)
        self._server.stop(None).wait()

    def _session(self) -> queue.Queue[pb.SessionDown | KVPoolError | None]:
        """The session opened last, once it is that of the last registration."""
        self.wait(lambda: len(self._sessions) >= len(self.registered))
        return self._sessions[-1]

    # -- the service -----------------------------------------------------------------------------------

    def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterReply:
        with self._changed:
            self.registered.append(request)
            self._changed.notify_all()
            if self.refusal is not None:
                _abort(context, self.refusal)
            contents = [segment.contents for segment in request.segments]
            known = self.nodes.get(request.node_id)
            if known is None or known[0] != contents:
                handles = list(range(self.next_handle, self.next_handle + len(request.segments)))
                self.next_handle += len(handles)
                known = self.nodes[request.node_id] = (contents, handles)
            return pb.RegisterReply(
                epoch=self.epoch,
                segment_handles=known[1],
                heartbeat_ms=self.heartbeat_ms,
                suspect_ms=self.suspect_ms,
                retire_ms=60_000,
                tombstones=self.tombstones,
                bypass=self.bypass,
                capability_key=self.key,
                master_ms=self.master_ms(),
                former_key_ms=self.former_key_ms,
            )

    def Session(self, messages: Iterator[pb.SessionUp], context: Any) -> Iterator[pb.SessionDown]:
        down: queue.Queue[pb.SessionDown | KVPoolError | None] = queue.Queue()
        first = next(messages, None)
        if first is None:
            return  # broken off before it began
        with self._changed:
            self.heard.append(first)
            if first.node_id not in self.nodes:
                _abort(context, UnknownNode(f"node {first.node_id!r}"))
            self._sessions.append(down)
            self._changed.notify_all()
        context.add_callback(lambda: down.put(None))
        threading.Thread(target=self._hear, args=(messages,), daemon=True).start()
        yield pb.SessionDown(epoch=self.epoch, master_ms=self.master_ms())
        while (said := down.get()) is not None:
            if isinstance(said, KVPoolError):
                _abort(context, said)
            yield said

    def Inventory(self, chunks: Iterator[pb.InventoryChunk], context: Any) -> pb.InventoryReply:
        came: list[pb.InventoryChunk] = []
        for chunk in chunks:
            came.append(chunk)
            with self._changed:
                self.chunks.append(chunk)
                self._changed.notify_all()
                while self.hold_inventories and self._asked == chunk.number:
                    assert self._changed.wait(WAIT_S)
                if self.inventory_refusal is not None:
                    _abort(context, self.inventory_refusal)
                if self._asked != chunk.number:
                    _abort(context, StaleInventory(f"{self._asked} is wanted, not {chunk.number}"))
                if chunk.HasField("end"):
                    self.inventories[chunk.number] = came
        return pb.InventoryReply(blocks_taken=1)

    def Retire(self, request: pb.RetireRequest, context: Any) -> pb.RetireReply:
        with self._changed:
            self.retired.append(request)
            self.nodes.pop(request.node_id, None)
            self._changed.notify_all()
        return pb.RetireReply()

    def _hear(self, messages: Iterator[pb.SessionUp]) -> None:
        try:
            for message in messages:
                with self._changed:
                    self.heard.append(message)
                    self._changed.notify_all()
        except Exception:
            return  # the stream is over


def _abort(context: Any, error: KVPoolError) -> None:
    context.set_trailing_metadata(trailing_metadata(error))
    context.abort(CODES[error.code], str(error))
