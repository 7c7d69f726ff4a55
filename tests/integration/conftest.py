"""A scripted Master, node clients of this process that belong to it, and a worker's connection to one."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from integration.node_world import SLAB, Make
from integration.nodes_double import NodesDouble
from kvpool_client.clock import SYSTEM
from kvpool_client.config import NodeConfig
from kvpool_client.daemon import NodeDaemon
from kvpool_client.local_socket import LocalClient
from kvpool_client.logs import Log


@pytest.fixture
def nodes_double() -> Iterator[NodesDouble]:
    double = NodesDouble()
    yield double
    double.stop()


@pytest.fixture
def node_config(nodes_double: NodesDouble, tmp_path: Path) -> NodeConfig:
    (tmp_path / "shm").mkdir()
    return NodeConfig(
        master=nodes_double.address,
        node_id="n1",
        segment_dir=str(tmp_path / "shm"),
        segment_bytes=4 * SLAB,
        segments=2,
        slab_bytes=SLAB,
        socket_path=str(tmp_path / "node.sock"),
        http="127.0.0.1:0",
        plaintext=True,
        data_listen="127.0.0.1:0",
        local_timeout_ms=1_000,
        backoff_max_ms=100,
    )


@pytest.fixture
def make_daemon(node_config: NodeConfig) -> Iterator[Make]:
    """Starts node clients in this process; stops what is left of them."""
    daemons: list[NodeDaemon] = []

    def start(**changes: Any) -> NodeDaemon:
        daemon = NodeDaemon(replace(node_config, **changes), Log("debug", False, SYSTEM, io.StringIO()))
        daemon.start()
        daemons.append(daemon)
        return daemon

    yield start
    for daemon in daemons:
        daemon.stop()


@pytest.fixture
def node_daemon(make_daemon: Make) -> NodeDaemon:
    return make_daemon()


@pytest.fixture
def local_client(node_daemon: NodeDaemon, node_config: NodeConfig) -> Iterator[LocalClient]:
    local = LocalClient(node_config.socket_path, timeout_s=5)
    yield local
    local.close()
