"""The Unix socket between workers and their node client, without the socket: requests, replies and descriptors.

Both real ends are used: LocalClient makes the request and maps what comes back, LocalServer answers. Between them is a
thread of the node client's process, so that one that is stopped does not answer, and one that is gone refuses.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from kvpool_client.local_server import LocalServer
from kvpool_client.local_socket import LocalClient, pack_frame
from kvpool_client.logs import Log
from kvpool_proto import pool_pb2 as pb
from simulation.hub import MS, Hub, Process, Waiter

Servers = dict[str, "SimLocalServer"]
"""Who listens on a path."""


class SimLocalServer(LocalServer):
    """Answers as LocalServer does; made in place of it by the daemon."""

    def __init__(self, hub: Hub, servers: Servers, path: Path, node: Any, log: Log) -> None:
        assert hub.thread is not None
        self.process: Process = hub.thread.process
        self.hub = hub
        self._node = node
        self._log = log
        self._servers = servers
        self._name = str(path)

    @property
    def open_connections(self) -> int:
        """There are none."""
        return 0

    def start(self) -> None:
        """Listen."""
        self._servers[self._name] = self

    def stop(self) -> None:
        """Listen no more."""
        if self._servers.get(self._name) is self:
            del self._servers[self._name]

    def ask(self, frame: bytes, waiter: Waiter) -> None:
        """Carry out a request in a thread of the node client; its answer fires the waiter, with descriptors."""

        def serve() -> None:
            """One request, as a connection's thread does it."""
            fds: list[int] = []
            try:
                reply = self._answer(pb.LocalRequest.FromString(frame[4:]), fds)
                pack_frame(reply)
            except BaseException:
                _close(fds)
                raise
            if waiter.done:
                _close(fds)  # nobody waits any more: the descriptors went down with the socket
            else:
                waiter.fire((reply, fds))

        self.process.spawn(serve, "local")


class SimLocalClient(LocalClient):
    """A LocalClient whose requests go to SimLocalServer."""

    def __init__(self, hub: Hub, servers: Servers, path: str, timeout_s: float) -> None:
        super().__init__(path, timeout_s)
        self._hub = hub
        self._servers = servers

    def _exchange(self, frame: bytes, *_: Any) -> tuple[pb.LocalReply, list[int]]:
        hub = self._hub
        hub.sleep(hub.rng.randrange(20, 200))
        server = self._servers.get(self._path)
        if server is None or not server.process.alive:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
        waiter = Waiter(hub)
        gone = lambda: waiter.fire(None)  # noqa: E731
        server.process.on_end.append(gone)
        server.process.post(lambda: server.ask(frame, waiter))
        if not waiter.wait(int(self._timeout_s * 1e6)):
            raise TimeoutError("timed out")
        server.process.on_end.remove(gone)
        if waiter.value is None:
            raise EOFError("the other side closed the connection")
        hub.sleep(hub.rng.randrange(10, MS))
        return waiter.value


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
