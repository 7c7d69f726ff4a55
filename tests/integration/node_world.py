"""What tests of the node client share: its sizes, and how they look at it and at what its Master heard."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from integration.nodes_double import WAIT_S, NodesDouble
from kvpool_client.daemon import NodeDaemon
from kvpool_proto import pool_pb2 as pb

SLAB = 1 << 20
SLOT = 64 << 10

Make = Callable[..., NodeDaemon]


def until(what: Callable[[], Any]) -> Any:
    """Wait for something that happens in another thread or process and tells nobody."""
    end = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)
    return found


def bound(master: NodesDouble) -> list[pb.SlabBound]:
    return [slab for message in master.heard for slab in message.slabs_bound]


def gone(master: NodesDouble) -> set[int]:
    return {worker for message in master.heard for worker in message.workers_gone}


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
