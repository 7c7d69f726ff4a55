"""What tests of the node client share: its sizes, and how they look at it and at what its Master heard."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from integration.nodes_double import WAIT_S, NodesDouble
from kvpool_client.daemon import NodeDaemon
from kvpool_client.headers import COMMITTED, PARENT_KEY, PARENT_ROOT, slot_checks
from kvpool_client.segment import AttachedSegment
from kvpool_proto import pool_pb2 as pb

SLAB = 1 << 20
SLOT = 64 << 10
NAMESPACE = b"n" * 16
KEYS = [b"key%05d" % i for i in range(16)]
"""8 bytes each, a chain in this order."""

Make = Callable[..., NodeDaemon]


def until(what: Callable[[], Any]) -> Any:
    """Wait for something that happens in another thread or process and tells nobody."""
    end = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
    return found


def store(
    segment: AttachedSegment,
    slot: int,
    payload: bytes = b"payload",
    *,
    block: int = 0,
    stamp: int = 77,
    state: int = COMMITTED,
    worker_id: int = 0,
) -> pb.BadBlock:
    """Write a block of the chain KEYS as its only part, as a worker does; as a complaint would name it."""
    segment.slots(slot, 1, SLOT)[0, : len(payload)] = np.frombuffer(payload, dtype=np.uint8)
    header = segment.headers(slot, 1, SLOT)
    header["state"], header["key_bytes"], header["stamp"], header["length_bytes"] = state, 8, stamp, len(payload)
    header["parent_kind"], header["worker_id"] = PARENT_KEY if block else PARENT_ROOT, worker_id
    header["namespace"], header["key"] = np.void(NAMESPACE), np.void(KEYS[block].ljust(32, b"\0"))
    header["parent_key"] = np.void((KEYS[block - 1] if block else b"").ljust(32, b"\0"))
    header["checksum"] = xxhash.xxh3_64_intdigest(payload)
    header["check"] = slot_checks(header, slot, segment.generation(segment.slab_of(slot, SLOT)), SLOT)
    return pb.BadBlock(namespace_id=NAMESPACE, chain=b"".join(KEYS[: block + 1]), stamp=stamp)


def reported(chunks: list[pb.InventoryChunk]) -> dict[bytes, list[tuple[int, int, int]]]:
    """Keys of the strands of an inventory, joined, with the (segment, first slot, blocks) of their extents."""
    return {
        strands.keys: [
            (chunk.segment, *extent) for extent in zip(strands.first_slot, strands.extent_blocks, strict=True)
        ]
        for chunk in chunks
        for strands in chunk.strands
    }


def bound(master: NodesDouble) -> list[pb.SlabBound]:
    return [slab for message in master.heard for slab in message.slabs_bound]


def gone(master: NodesDouble) -> set[int]:
    return {worker for message in master.heard for worker in message.workers_gone}


def copied(master: NodesDouble) -> list[pb.SlotsCopied]:
    return [copy for message in master.heard for copy in message.copied]


def cleared(master: NodesDouble) -> list[int]:
    return [order for message in master.heard for order in message.cleared]


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
