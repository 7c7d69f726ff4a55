"""Connections to data ports, kept between calls.

Rules
  - Names are resolved again for every connection, never for longer than it may take to connect.
  - At most CONNECTIONS_MAX are open at a time; one more is PeerBusy. Those that nobody used for IDLE_MS are closed at
    the next use of any.
  - Nothing waits under the lock.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from kvpool_client.clock import Clock
from kvpool_client.peer.connection import Connection
from kvpool_client.peer.stream import Stream
from kvpool_proto.errors import PeerBusy, PeerUnreachable, ProtocolError, Unauthenticated

CONNECTIONS_MAX: Final = 256
IDLE_MS: Final = 30_000
RESOLVING_MAX: Final = 4
"""Names that are being looked up at a time."""

Wrap = Callable[[socket.socket, str], socket.socket]


class Connections:
    """Thread safe. wrap: makes a connection to a host a TLS one; raises OSError, or ValueError when it cannot."""

    def __init__(self, connect_timeout_ms: int, io_timeout_ms: int, wrap: Wrap | None, clock: Clock) -> None:
        self._connect_s = connect_timeout_ms / 1000
        self._io_s = io_timeout_ms / 1000
        self._wrap = wrap
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: dict[str, list[Connection]] = {}
        self._in_use: set[Connection] = set()
        self._opening = 0
        self._closed = False
        self._resolving = threading.Semaphore(RESOLVING_MAX)
        self._names = ThreadPoolExecutor(RESOLVING_MAX, "kvpool-names")

    @contextlib.contextmanager
    def use(self, address: str, until_s: float, *, fresh: bool = False) -> Generator[Connection, None, None]:
        """A connection to host:port for as long as the block lasts. until_s: when it ends, on clock.precise_s.

        fresh: none that was used before. An error in the block breaks the connection. Raises PeerUnreachable, PeerBusy,
        Unauthenticated, ProtocolError, and TimeoutError when until_s comes first.
        """
        connection = None if fresh else self._take(address)
        if connection is None:
            connection = self._open(address, until_s)
        try:
            connection.stream.until_s, connection.answered = until_s, False
            yield connection
        except BaseException:
            self._drop(connection)
            raise
        self._give(address, connection)

    def close(self) -> None:
        """End all connections, those in use too: they get errors. No more are made."""
        with self._lock:
            self._closed = True
            idle = [connection for some in self._idle.values() for connection in some]
            self._idle.clear()
            for connection in self._in_use:
                connection.stream.abort()
        for connection in idle:
            connection.stream.close()
        self._names.shutdown(wait=False)

    def _take(self, address: str) -> Connection | None:
        """One that nobody uses and that is still good."""
        now_ms = self._clock.now_ms()
        with self._lock:
            stale = [one for some in self._idle.values() for one in some if now_ms - one.used_ms >= IDLE_MS]
            for key, some in list(self._idle.items()):
                self._idle[key] = [one for one in some if now_ms - one.used_ms < IDLE_MS]
                if not self._idle[key]:
                    del self._idle[key]
            found = None
            while found is None and self._idle.get(address):
                one = self._idle[address].pop()
                if one.stream.quiet():
                    found = one
                    self._in_use.add(one)
                else:
                    stale.append(one)
        for one in stale:
            one.stream.close()
        return found

    def _give(self, address: str, connection: Connection) -> None:
        connection.reused, connection.used_ms = True, self._clock.now_ms()
        with self._lock:
            self._in_use.discard(connection)
            if not self._closed:
                self._idle.setdefault(address, []).append(connection)
                return
        connection.stream.close()

    def _drop(self, connection: Connection) -> None:
        with self._lock:
            self._in_use.discard(connection)
        connection.stream.close()

    def _open(self, address: str, until_s: float) -> Connection:
        with self._lock:
            if self._closed:
                raise PeerUnreachable("connections are closed here")
            self._make_room()
            self._opening += 1
        try:
            connection = self._connect(address, until_s)
        finally:
            with self._lock:
                self._opening -= 1
        with self._lock:
            self._in_use.add(connection)
            if self._closed:
                connection.stream.abort()
        return connection

    def _make_room(self) -> None:
        """Close one that nobody uses if there are too many. Raises PeerBusy when all are in use."""
        idle = sum(map(len, self._idle.values()))
        if idle + len(self._in_use) + self._opening < CONNECTIONS_MAX:
            return
        if not idle:
            raise PeerBusy(f"{CONNECTIONS_MAX} connections to data ports are in use")
        key = min(self._idle, key=lambda address: self._idle[address][0].used_ms)
        self._idle[key].pop(0).stream.close()
        if not self._idle[key]:
            del self._idle[key]

    def _connect(self, address: str, until_s: float) -> Connection:
        now_s = self._clock.precise_s
        end_s = min(until_s, now_s() + self._connect_s)

        def left_s() -> float:
            left = end_s - now_s()
            if left <= 0:
                raise TimeoutError("timed out")
            return left

        try:
            host, places = self._resolve(address, left_s())
            sock = _first(places, left_s)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.settimeout(left_s())
                sock = self._wrap(sock, host) if self._wrap is not None else sock
                stream = Stream(sock, self._io_s, self._clock)
                stream.until_s = end_s
                return Connection(stream)
            except BaseException:
                sock.close()
                raise
        except (OSError, EOFError, ValueError) as error:
            if now_s() >= until_s:
                raise TimeoutError from error
            text = f"data port {address}: {error}"
            refused = isinstance(error, ValueError) or (
                isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError)
            )  # a ValueError: certificates of ours that cannot be used
            raise (Unauthenticated if refused else PeerUnreachable)(text) from error

    def _resolve(self, address: str, timeout_s: float) -> tuple[str, list[Any]]:
        """The host and what getaddrinfo says of it. Raises OSError, ProtocolError for no address at all."""
        host, colon, port = address.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isdecimal() or int(port) > 65535:
            raise ProtocolError(f"{address!r} is no address of a data port")
        if _is_literal(host):
            return host, socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        if not self._resolving.acquire(blocking=False):
            raise TimeoutError("too many names are being looked up")
        try:
            looked = self._names.submit(socket.getaddrinfo, host, int(port), type=socket.SOCK_STREAM)
        except RuntimeError as error:  # closed
            self._resolving.release()
            raise ConnectionAbortedError("closed") from error
        looked.add_done_callback(lambda _: self._resolving.release())
        return host, looked.result(timeout_s)


def _first(places: list[Any], left_s: Callable[[], float]) -> socket.socket:
    """A connection to the first place that takes one. Raises OSError."""
    failure: OSError = ConnectionRefusedError("no address")
    for family, kind, protocol, _, where in places:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(left_s())
            sock.connect(where)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
