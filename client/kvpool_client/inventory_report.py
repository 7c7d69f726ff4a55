"""One report of what the segments hold, on a stream of its own.

Rules
  - It is scanned as it is sent, a slab at a time, in gRPC's sending thread: neither heartbeats nor orders wait.
  - It begins after the epoch stands in the superblocks. A writer looks at the epoch once more after its marks, before
    it touches payload: so either its marks are seen here, or it sees the epoch and stops.
  - A report that was cancelled says nothing more, whatever becomes of its call.
  - What peers are writing is asked before the headers are looked at: a write that begins later is of this epoch.
  - Workers that were reported as writing are looked at again when all was taken: what the session said of their death
    may have overtaken the report.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from kvpool_client import inventory
from kvpool_client.node import Node
from kvpool_client.session_messages import Event, InventoryDone, InventoryFailed
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import KVPoolError, StaleInventory
from kvpool_proto.status import from_rpc_error


class InventoryReport:
    """The report of `node` under a number, with the handles and tombstones of this moment.

    taken: what the Master made of it; None until all was taken. blocks: sent so far.
    """

    def __init__(self, node: Node, number: int) -> None:
        self.number = number
        self.blocks = 0
        self.taken: pb.InventoryReply | None = None
        self._node = node
        self._handles = node.handles
        self._dead = node.dead
        self._writers: set[int] = set()
        self._cancelled = False
        self._call: Any = None

    def start(self, stub: Any, tell: Callable[[InventoryReport, Event], None]) -> None:
        """Begin to send; tell(self, event) says how it ended, in a thread of gRPC. stub: of the Nodes service."""

        def ended(call: Any) -> None:
            """Say how it ended."""
            tell(self, self._outcome(call))

        self._call = stub.Inventory.future(self._chunks())
        self._call.add_done_callback(ended)

    def cancel(self) -> None:
        """Say no more. After the end: does nothing."""
        self._cancelled = True
        self._call.cancel()

    def _outcome(self, call: Any) -> Event:
        try:
            self.taken = call.result()
        except grpc.FutureCancelledError:
            return InventoryDone(self.number)
        except grpc.RpcError as error:
            refusal = from_rpc_error(error)
            if isinstance(refusal, StaleInventory):
                return InventoryDone(self.number)
            return InventoryFailed(self.number, str(refusal), random.random())
        if not self._cancelled:
            self._node.answer_workers(self._writers)
        return InventoryDone(self.number)

    def _chunks(self) -> Iterator[pb.InventoryChunk]:
        end = pb.InventoryEnd()
        try:
            for handle, segment in zip(self._handles, self._node.segments, strict=True):
                written = self._node.writes.in_progress(segment)
                found = inventory.scan(segment, self._dead, self._alive, written)
                for chunk in inventory.chunks(found):
                    if self._cancelled:
                        return
                    chunk.segment = handle
                    self._count(chunk, end)
                    yield self._addressed(chunk)
        except (KVPoolError, OSError):
            if self._cancelled:
                return  # the segments may be closed already
            raise
        yield self._addressed(pb.InventoryChunk(end=end))

    def _addressed(self, chunk: pb.InventoryChunk) -> pb.InventoryChunk:
        chunk.node_id, chunk.incarnation, chunk.number = self._node.node_id, self._node.incarnation, self.number
        return chunk

    def _count(self, chunk: pb.InventoryChunk, end: pb.InventoryEnd) -> None:
        end.blocks += sum(sum(strands.blocks) for strands in chunk.strands)
        self.blocks = end.blocks
        for writing in chunk.writing:
            end.slots_writing += sum(writing.slots)
            self._writers.update(writing.worker_id)

    def _alive(self, worker_id: int) -> bool:
        return not self._node.workers.gone_of([worker_id])
