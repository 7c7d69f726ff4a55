"""Connections of a listening socket, one thread each, at most so many: what the Unix socket and HTTP stand on.

Rules
  - Whatever a connection's handler raises ends that connection and is told to nobody else.
  - One over the limit is closed at once.
  - stop() returns when every thread has ended; handlers notice by their sockets being shut down.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class Acceptor:
    """Serves connections of `listener` (bound, listening), which it closes in the end.

    handle(socket) talks on a connection until it returns or raises; the socket is closed for it. failed(error) is
    told what handlers raise beyond OSError and EOFError (their own bugs).
    """

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        handle: Callable[[socket.socket], None],
        failed: Callable[[Exception], None],
        connections_max: int,
    ) -> None:
        self._name = name
        self._listener = listener
        self._handle = handle
        self._failed = failed
        self._connections_max = connections_max
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)

    @property
    def open_connections(self) -> int:
        """How many connections are being served."""
        return len(self._open)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def stop(self) -> None:
        """Accept no more, end all connections, wait for their threads."""
        with self._lock:
            self._stopping.set()
            threads = list(self._open.values())
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        self._thread.join()
        self._listener.close()
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._stopping.wait(0.05):  # else out of descriptors: some may come back
                    return
                continue
            if not self._admit(connection):
                connection.close()

    def _admit(self, connection: socket.socket) -> bool:
        thread = threading.Thread(target=self._serve, args=(connection,), name=self._name, daemon=True)
        with self._lock:
            if self._stopping.is_set() or len(self._open) >= self._connections_max:
                return False
            try:
                thread.start()
            except RuntimeError:  # no more threads
                return False
            self._open[connection] = thread
            return True

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._handle(connection)
        except (OSError, EOFError):
            pass  # the other side broke off, or took too long
        except Exception as error:
            self._failed(error)
        finally:
            with self._lock:
                del self._open[connection]
            connection.close()
