"""Puts the doubles in place of what the real packages import, and takes them out again.

Only what touches the outside is replaced: threads, queues, the two ends of gRPC, TCP sockets, the Unix socket, HTTP,
locks that end with a process, randomness. All that decides anything stays real.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import random
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc

import kvpool_client
from simulation.channel import Channel
from simulation.kernel import Kernel
from simulation.local_link import Servers, SimLocalClient, SimLocalServer
from simulation.sockets import select_double, socket_double
from simulation.thread_pools import ThreadPool, wait_for
from simulation.threads import queue_double, threading_double
from simulation.wires import Wires

if TYPE_CHECKING:
    from simulation.hub import Hub
    from simulation.network import Network

_LEFT_OUT = ("kvpool_client.connectors", "kvpool_client.cli", "kvpool_client.__main__")


class Patches:
    """Attributes that were set, to be set back."""

    def __init__(self) -> None:
        self._former: list[tuple[Any, str, Any]] = []
        self._last: list[Callable[[], object]] = []

    def on_undo(self, action: Callable[[], object]) -> None:
        """Do something when all is set back."""
        self._last.append(action)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Let owner.name be `value` until undo()."""
        self._former.append((owner, name, owner.__dict__.get(name, getattr(owner, name))))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Set everything back, the last first."""
        while self._former:
            owner, name, value = self._former.pop()
            setattr(owner, name, value)
        while self._last:
            self._last.pop()()


class _Instead:
    """A module with some other attributes."""

    def __init__(self, module: ModuleType, **instead: Any) -> None:
        self.__dict__.update(instead)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _NoHttp:
    """The node client's HTTP server: nobody asks it here."""

    port = 0

    def __init__(self, *_: object) -> None:
        pass

    def start(self) -> None:
        """Listen on nothing."""

    def stop(self) -> None:
        """Nothing to stop."""


class _NoHttpMaster:
    """The Master's HTTP server, too."""

    def __init__(self, *_: object) -> None:
        pass

    async def start(self, *_: object) -> int:
        """Listen on nothing."""
        return 0

    async def stop(self) -> None:
        """Nothing to stop."""


@contextmanager
def installed(hub: Hub, network: Network, wires: Wires, servers: Servers, kernel: Kernel) -> Iterator[Patches]:
    """The doubles, for the time of the block; what is patched beside them goes with them."""
    patches = Patches()
    try:
        _threads(patches, hub)
        _outside(patches, hub, network, servers, kernel)
        _sockets(patches, wires)
        _randomness(patches, hub)
        yield patches
    finally:
        patches.undo()


def _threads(patches: Patches, hub: Hub) -> None:
    doubles: dict[str, Any] = {
        "threading": threading_double(hub),
        "queue": queue_double(hub),
        "ThreadPoolExecutor": partial(ThreadPool, hub),
    }
    for module in client_modules():
        for name, double in doubles.items():
            if name in module.__dict__:
                patches.set(module, name, double)


def client_modules() -> list[ModuleType]:
    """All modules of kvpool_client but connectors and command lines."""
    for found in pkgutil.walk_packages(kvpool_client.__path__, "kvpool_client."):
        if not found.name.startswith(_LEFT_OUT):
            importlib.import_module(found.name)
    names = sorted(name for name in sys.modules if name.startswith("kvpool_client."))
    return [sys.modules[name] for name in names if not name.startswith(_LEFT_OUT)]


def _outside(patches: Patches, hub: Hub, network: Network, servers: Servers, kernel: Kernel) -> None:
    from kvpool_client import daemon, local_socket, locks, master_client, registration, sdk, transfer
    from kvpool_master import server
    from kvpool_master.state import State

    opened: Callable[[str], State] = State.open

    def open_state(directory: str) -> State:
        """State.open: SQLite's lock ends with the process, too."""
        assert network.listener is not None
        state = opened(directory)
        network.listener.process.on_end.append(state.close)
        return state

    def channel(*_: object, **__: object) -> Channel:
        """channel.open_channel()."""
        assert hub.thread is not None
        return Channel(network, hub.thread.process)

    def aio_server(**given: Any) -> Any:
        """grpc.aio.server."""
        assert network.listener is not None
        return network.listener.make_grpc(**given)

    patches.set(State, "open", open_state)
    for module in (master_client, registration):
        patches.set(module, "open_channel", channel)
    patches.set(server, "grpc", _Instead(grpc, aio=SimpleNamespace(server=aio_server, Server=object)))
    patches.set(server, "HttpServer", _NoHttpMaster)
    patches.set(server, "version", lambda: "0")
    patches.set(daemon, "HttpServer", _NoHttp)
    patches.set(daemon, "version", lambda _: "0")
    local_server: Callable[..., Any] = lambda path, mode, node, timeout_s, most, log, _: SimLocalServer(  # noqa: E731
        hub, servers, path, node, log
    )
    patches.set(daemon, "LocalServer", local_server)
    patches.set(sdk, "LocalClient", lambda path, timeout_s: SimLocalClient(hub, servers, path, timeout_s))
    patches.set(locks, "try_own", kernel.try_own)
    patches.set(local_socket, "AttachedSegment", kernel.attach)
    patches.set(transfer, "PROGRESS_BYTES", 8 << 10)  # so that short stores report their progress, too


def _sockets(patches: Patches, wires: Wires) -> None:
    """Data ports and those who use them; the local sockets and HTTP are replaced higher up."""
    from kvpool_client.peer import engine, pool, server, stream
    from kvpool_client.peer.connection import Connection

    instead = socket_double(wires)
    for module in (pool, server, stream):
        patches.set(module, "socket", _Instead(socket, **instead))
    patches.set(stream, "select", select_double())
    patches.set(engine, "wait", wait_for)
    of_socket: Callable[[Any], int] = lambda connection: hash(connection.stream._sock)  # noqa: E731
    patches.set(Connection, "__hash__", of_socket)  # so that the order of a set is the same each time


def _randomness(patches: Patches, hub: Hub) -> None:
    state = random.getstate()
    random.seed(hub.seed)
    chosen = random.Random(hub.seed + 1)
    patches.set(os, "urandom", chosen.randbytes)
    patches.set(secrets, "randbelow", chosen.randrange)
    patches.set(secrets, "randbits", chosen.getrandbits)
    patches.set(secrets, "token_bytes", chosen.randbytes)
    patches.on_undo(lambda: random.setstate(state))
