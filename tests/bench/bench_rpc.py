"""RPCs of a real Master process over loopback, from one synchronous client; calls of both kinds take turns."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.report import Row, row
from integration.master_client import SPEC, TIMEOUT_S, Client, Node, chain
from integration.processes import MasterProcess
from kvpool_proto import pool_pb2 as pb

BLOCKS = 1024
CALLS = 3000
WARM_UP = 200


def median_us(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median time of each call, all of them in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(WARM_UP + CALLS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number >= WARM_UP:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) * 1e6 for name, found in times.items()}


def _lookup_and_release(client: Client, namespace: bytes, keys: bytes) -> None:
    reply = client.lookup(namespace_id=namespace, chain=keys)
    assert reply.hit_blocks == BLOCKS


def _bind_for_ever(node: Node) -> None:
    with contextlib.suppress(grpc.RpcError):
        while True:
            node.bind()


def _store(client: Client, namespace: bytes, keys: bytes) -> None:
    """Reserve and commit until all blocks are there; slabs are bound meanwhile."""
    deadline = time.monotonic() + TIMEOUT_S
    stored = 0
    while stored < BLOCKS:
        assert time.monotonic() < deadline, "no room within the time"
        ident = os.urandom(16)
        granted = client.reserve(namespace_id=namespace, reservation_id=ident, chain=keys, part_to=1).answered_blocks
        if granted > stored:
            client.commit(ident, granted - stored, part_to=1, final=True)
            stored = granted
        else:
            time.sleep(0.005)


def run() -> list[Row]:
    """Lookup of 1,024 keys, full hit, against an empty RPC of the same server."""
    spec = replace(SPEC, parts=1)
    health: Any = health_pb2_grpc
    # The stand-in for a node client sends no heartbeats.
    with MasterProcess("--core-suspect-ms", "600s", "--core-retire-ms", "600s") as process:
        client = Client(process)
        node = Node(client.nodes, "bench")
        namespace = client.open(spec)
        threading.Thread(target=_bind_for_ever, args=(node,), daemon=True).start()
        keys = chain(BLOCKS)
        _store(client, namespace, keys)
        check = health.HealthStub(client.channel).Check
        took = median_us(
            {
                "empty": partial(check, health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S),
                "lookup": partial(_lookup_and_release, client, namespace, keys),
                "peek": partial(
                    client.pool.Peek, pb.PeekRequest(namespace_id=namespace, chain=keys), timeout=TIMEOUT_S
                ),
            }
        )
        node.retire()
        client.close()
        process.stop()
    return [
        row("empty unary RPC (health check), p50", took["empty"], "us"),
        row("Lookup RPC, 1,024 keys, full hit, p50", took["lookup"], "us"),
        row("the same, as a multiple of an empty RPC", took["lookup"] / took["empty"], "x", at_most=1.5),
        row("Peek RPC, 1,024 keys, full hit, p50", took["peek"], "us"),
    ]
