"""Both sides of the contract against a Master process: a node client without memory, and a worker's calls."""

from __future__ import annotations

import os
import queue
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from integration.processes import MasterProcess
from kvpool_proto import pool_pb2 as pb
from kvpool_proto import pool_pb2_grpc as pb_grpc
from kvpool_proto.convert import spec_to_message
from kvpool_proto.errors import KVPoolError
from kvpool_proto.keys import chain_of
from kvpool_proto.namespace import NamespaceSpec
from kvpool_proto.status import from_rpc_error

TIMEOUT_S = 10.0
KEY_BYTES = 16
SLAB_BYTES = 1 << 20
SPEC = NamespaceSpec(model="daemon-test", block_tokens=16, part_bytes=4096, dtype="float16", parts=2)


class Node:
    """A node client's side of the contract, without memory: registers and binds slabs as told.

    contents: the number of its file. holds: it has something to report. epoch_seen: highest obeyed so far.
    data_address: of its data port, which it does not have.
    """

    def __init__(
        self,
        nodes: Any,
        node_id: str,
        incarnation: int = 1,
        *,
        contents: int = 0,
        holds: bool = False,
        epoch_seen: int = 0,
        data_address: str = "",
    ) -> None:
        self.node_id = node_id
        self.incarnation = incarnation
        self._nodes = nodes
        offer = pb.SegmentOffer(
            size_bytes=8 * SLAB_BYTES, slab_bytes=SLAB_BYTES, numa_node=-1, contents=contents, holds=holds
        )
        request = pb.RegisterRequest(
            node_id=node_id,
            incarnation=incarnation,
            segments=[offer],
            epoch_seen=epoch_seen,
            data_address=data_address,
        )
        self.registered = nodes.Register(request, timeout=TIMEOUT_S)
        self._more: queue.SimpleQueue[pb.SessionUp | None] = queue.SimpleQueue()
        self._more.put(pb.SessionUp(node_id=node_id, incarnation=incarnation))
        self.stream = nodes.Session(iter(self._more.get, None))

    def bind(self) -> None:
        """Answer the next message of orders that has any."""
        for down in self.stream:
            bound = [
                pb.SlabBound(segment=order.segment, slab=order.slab, slot_bytes=order.slot_bytes, generation=1)
                for order in down.bind_slabs
            ]
            if bound:
                self.report(slabs_bound=bound)
                return

    def tell(self, *chunks: pb.InventoryChunk) -> pb.InventoryReply:
        """Wait to be asked, then send an inventory of these chunks."""
        number = next(down.report_inventory for down in self.stream if down.report_inventory)
        for chunk in chunks:
            chunk.node_id, chunk.incarnation, chunk.number = self.node_id, self.incarnation, number
            (chunk.segment,) = self.registered.segment_handles
        return self._nodes.Inventory(iter(chunks), timeout=TIMEOUT_S)

    def report(self, **reports: Any) -> None:
        """Send a message up the session."""
        self._more.put(pb.SessionUp(node_id=self.node_id, incarnation=self.incarnation, **reports))

    def break_off(self) -> None:
        self.stream.cancel()
        self._more.put(None)

    def retire(self) -> None:
        self._nodes.Retire(pb.RetireRequest(node_id=self.node_id, incarnation=self.incarnation), timeout=TIMEOUT_S)
        self._more.put(None)


class Client:
    """Stubs of one Master, and the calls that the tests repeat."""

    def __init__(self, process: MasterProcess) -> None:
        self.process = process
        self.channel = grpc.insecure_channel(process.address)
        self.pool: Any = pb_grpc.PoolStub(self.channel)
        self.nodes: Any = pb_grpc.NodesStub(self.channel)
        self.admin: Any = pb_grpc.AdminStub(self.channel)

    def close(self) -> None:
        self.channel.close()

    def open(self, spec: NamespaceSpec = SPEC) -> bytes:
        request = pb.OpenNamespaceRequest(spec=spec_to_message(spec))
        return self.pool.OpenNamespace(request, timeout=TIMEOUT_S).namespace_id

    def status(self) -> pb.StatusReply:
        return self.admin.Status(pb.StatusRequest(), timeout=TIMEOUT_S)

    def reserve(self, **changes: Any) -> pb.ReserveReply:
        fields = {"namespace_id": SPEC.id, "reservation_id": os.urandom(16), "parent_kind": pb.PARENT_ROOT}
        fields |= {"chain": chain(), "part_from": 0, "part_to": 2} | changes
        return self.pool.Reserve(pb.ReserveRequest(**fields), timeout=TIMEOUT_S)

    def lookup(self, **changes: Any) -> pb.LookupReply:
        fields = {"namespace_id": SPEC.id, "chain": chain(), "lease_id": os.urandom(16)} | changes
        return self.pool.Lookup(pb.LookupRequest(**fields), timeout=TIMEOUT_S)

    def commit(self, reservation: bytes, blocks: int, **changes: Any) -> pb.CommitReply:
        fields = {"reservation_id": reservation, "part_from": 0, "part_to": 2, "blocks_written": blocks} | changes
        return self.pool.Commit(pb.CommitRequest(**fields), timeout=TIMEOUT_S)

    def get(self, path: str) -> tuple[int, str]:
        url = f"http://127.0.0.1:{self.process.http_port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def sound(self) -> None:
        """The Master still answers, and every index of its directory agrees."""
        self.admin.CheckInvariants(pb.CheckInvariantsRequest(), timeout=TIMEOUT_S)


def chain(blocks: int = 3, seed: str | None = None) -> bytes:
    """Keys of a prompt that no other test asks for, unless a seed is named."""
    return chain_of(range(blocks * 16), 16, KEY_BYTES, os.urandom(8).hex() if seed is None else seed)


def refused(call: Callable[[], Any]) -> KVPoolError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return from_rpc_error(caught.value)


def until(condition: Callable[[], bool]) -> None:
    """Wait for an event of another process, with a deadline."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)
