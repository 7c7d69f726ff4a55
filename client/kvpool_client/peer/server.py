"""The data port: where other nodes' workers and node clients read and write this node's slots.

Rules
  - A connection has a thread of its own; there are at most connections_max. A few more are told that there are too
    many; beyond those they are closed at once.
  - Whatever a peer does, however slowly, costs its own connection only.
  - stop() returns when every thread has ended: nothing is written after it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Generator
from typing import Final

from kvpool_client.acceptor import Acceptor
from kvpool_client.clock import SYSTEM, Clock
from kvpool_client.logs import Log
from kvpool_client.peer.counting import Account, PeerCounts
from kvpool_client.peer.serving import LoadsFirst, PeerHost, Talk
from kvpool_client.peer.stream import Stream, abort
from kvpool_client.peer.writes import PeerWrites
from kvpool_client.start_error import StartError

BACKLOG: Final = 128
BUSY_MAX: Final = 8
"""Connections over the limit that are told so at a time."""

Wrap = Callable[[socket.socket], socket.socket]


class PeerServer:
    """Serves `host` on `listen` from start() to stop(). port: where; port 0 takes a free one. Raises StartError.

    io_timeout_ms: longest time in which a peer may move no byte, and for each frame that is no payload.
    idle_timeout_ms: longest time between frames. wrap: makes an accepted connection a TLS one; raises OSError, or
    ValueError when it cannot.
    """

    def __init__(
        self,
        listen: tuple[str, int],
        host: PeerHost,
        *,
        connections_max: int,
        io_timeout_ms: int,
        idle_timeout_ms: int,
        wrap: Wrap | None = None,
        log: Log,
        clock: Clock = SYSTEM,
    ) -> None:
        self._host = host
        self._connections_max = connections_max
        self._io_s = io_timeout_ms / 1000
        self._idle_s = idle_timeout_ms / 1000
        self._wrap = wrap
        self._log = log
        self._clock = clock
        self._account = Account(log, clock)
        self._lock = threading.Lock()
        self._handles: set[socket.socket] = set()  # of open connections: duplicates, to end them by
        self._served = 0
        self._stopping = False
        self.loads_first = LoadsFirst()
        listener = _listen(listen)
        self.port: int = listener.getsockname()[1]
        self._acceptor = Acceptor("data-port", listener, self._serve, self._broken, connections_max + BUSY_MAX)

    @property
    def counts(self) -> PeerCounts:
        """What was done and refused since the start."""
        return self._account.counts

    @property
    def writes(self) -> PeerWrites:
        """Those in progress."""
        return self._host.writes

    @property
    def open_connections(self) -> int:
        """How many peers are connected."""
        return self._served

    def start(self) -> None:
        """Begin to serve."""
        self._acceptor.start()

    def stop(self) -> None:
        """End all connections, and with them all writes."""
        with self._lock:
            self._stopping = True
            for handle in self._handles:
                abort(handle)
        self._acceptor.stop()

    def _serve(self, connection: socket.socket) -> None:
        peer = str(connection.getpeername()[0])
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(self._io_s)
        with self._handle(connection), contextlib.ExitStack() as closing:
            try:
                wrapped = closing.enter_context(self._wrap(connection) if self._wrap is not None else connection)
            except ValueError as error:  # ours to mend: certificates, a revocation list
                self._account.refused(peer, "unauthenticated", str(error))
                return
            except OSError as error:
                self._account.refused(peer, "unauthenticated", f"no TLS: {error}")
                raise
            talk = Talk(
                Stream(wrapped, self._io_s, self._clock), peer, self._host, self.loads_first, self._account, self._io_s
            )
            with self._seat() as busy:
                if talk.hello(busy):
                    self._account.connected()
                    talk.serve(self._idle_s)

    @contextlib.contextmanager
    def _handle(self, connection: socket.socket) -> Generator[None, None, None]:
        """Let stop() end the connection, whatever becomes of the socket in a TLS handshake."""
        with connection.dup() as handle:
            with self._lock:
                if self._stopping:
                    raise ConnectionAbortedError
                self._handles.add(handle)
            try:
                yield
            finally:
                with self._lock:
                    self._handles.remove(handle)

    @contextlib.contextmanager
    def _seat(self) -> Generator[str, None, None]:
        """A place among connections_max; answers why there is none, or nothing."""
        with self._lock:
            admitted = self._served < self._connections_max
            self._served += admitted
        try:
            yield "" if admitted else f"data_connections_max = {self._connections_max} are connected"
        finally:
            with self._lock:
                self._served -= admitted

    def _broken(self, error: Exception) -> None:
        self._log.error("peer_connection_failed", text=repr(error))


def _listen(listen: tuple[str, int]) -> socket.socket:
    host, port = listen
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server(listen, family=family, backlog=BACKLOG)
    except OSError as error:
        raise StartError(f"data_listen = {host}:{port}: {error.strerror}") from error
