"""A TCP relay that holds back what it carries: a link with a delay, for kernels that cannot make one.

Rules
  - Threads of the tests' process; its sockets may belong to any network namespace (network_world.py).
  - Each direction of a connection has a reader, which notes when a piece came, and a writer, which hands it on when its
    time has come. What waits between them is bounded: a sender is slowed, as by a long link.
  - An end passes on like bytes, after the delay; a reset as an end.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

PIECE_BYTES: Final = 64 << 10
PIECES_MAX: Final = 256
"""That wait in one direction of a connection."""
END_S: Final = 10.0

Piece = tuple[float, bytes]


class Relay:
    """A context manager. listener: bound. connect: a new connection to where it leads. delay_s: may be changed."""

    def __init__(self, listener: socket.socket, connect: Callable[[], socket.socket], delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.carried_bytes = 0
        self._listener = listener
        self._connect = connect
        self._ended = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        listener.listen()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.append(near)
            try:
                far = self._connect()
            except OSError:
                near.close()
                continue
            self._sockets.append(far)
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for here, there in ((near, far), (far, near)):
                waiting: queue.Queue[Piece] = queue.Queue(PIECES_MAX)
                for run, end in ((self._read, here), (self._write, there)):
                    thread = threading.Thread(target=run, args=(end, waiting), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _read(self, here: socket.socket, waiting: queue.Queue[Piece]) -> None:
        piece = b"-"
        while piece:
            try:
                piece = here.recv(PIECE_BYTES)
            except OSError:
                piece = b""
            waiting.put((time.monotonic(), piece))

    def _write(self, there: socket.socket, waiting: queue.Queue[Piece]) -> None:
        broken = False
        while True:
            came_s, piece = waiting.get()
            self._ended.wait(max(0.0, came_s + self.delay_s - time.monotonic()))
            if not piece:
                break
            self.carried_bytes += len(piece)
            if not broken:
                try:
                    there.sendall(piece)
                except OSError:
                    broken = True  # what else comes is taken and dropped, until the sender notices
        with suppress(OSError):
            there.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(END_S)
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(END_S)
        for end in self._sockets:
            end.close()
