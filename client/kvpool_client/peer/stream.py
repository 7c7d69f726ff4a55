"""Bytes over a TCP connection, plain or TLS, from and into memory where it lies. Both ends of the data port use it.

Rules
  - Every wait ends: after io_s without a byte moved, and when `until` has come, whatever moved.
  - Plain: many pieces of memory go with one system call; a receiver sleeps until a piece is full. What is sent is
    taken from memory only as far as the kernel has room for it, so a reader that stalls gets nothing that came into
    that memory later without check() having been asked.
  - TLS: piece after piece; Python's ssl has no scatter and gather.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from kvpool_client.clock import SYSTEM, Clock

IOV_MAX: Final = 1024
"""Pieces of memory that the kernel takes in one call."""
RECHECK_S: Final = 0.02
"""check() is asked before bytes are taken from memory later than so long after it was asked last."""
TLS_SEND_BYTES: Final = 1 << 20
_TIMEVAL: Final = struct.Struct("@ll")
_FOR_EVER: Final = float("inf")


class Stream:
    """A connected socket, which it owns. One thread at a time, but for abort().

    io_s: longest time without progress. until_s: when time is up, on clock.precise_s; set by whoever uses it. Its
    methods raise TimeoutError, EOFError when the other side has closed, OSError.
    """

    def __init__(self, sock: socket.socket, io_s: float, clock: Clock = SYSTEM) -> None:
        self.io_s = io_s
        self.until_s = _FOR_EVER
        self._sock = sock
        self._now_s = clock.precise_s
        self._tls = isinstance(sock, ssl.SSLSocket)
        self._limit_s = 0.0
        self._poll = select.poll()
        if not self._tls:
            sock.settimeout(None)  # waits are the kernel's: SO_RCVTIMEO, or poll()
            self._poll.register(sock, select.POLLOUT)

    def within(self, seconds: float) -> None:
        """Let what follows be over in so many seconds from now."""
        self.until_s = self._now_s() + seconds

    def send(self, pieces: Sequence[bytes | memoryview], check: Callable[[], object] | None = None) -> None:
        """Send all of it. check: raises if the pieces are not to be sent any more."""
        rest = [memoryview(piece) for piece in pieces if len(piece)]
        at, checked_s = 0, self._now_s()
        while at < len(rest):
            if check is not None and self._now_s() - checked_s > RECHECK_S:
                check()
                checked_s = self._now_s()
            sent = self._send_tls(rest[at]) if self._tls else self._send_plain(rest[at : at + IOV_MAX])
            at = _skip(rest, at, sent)

    def receive_into(self, pieces: Sequence[memoryview]) -> None:
        """Fill all of them."""
        rest = [piece for piece in pieces if len(piece)]
        at = 0
        while at < len(rest):
            got = self._receive_tls(rest[at]) if self._tls else self._receive_plain(rest[at : at + IOV_MAX])
            if not got:
                raise EOFError("the other side closed the connection")
            at = _skip(rest, at, got)

    def receive(self, size_bytes: int) -> bytes:
        """So many bytes."""
        got = bytearray(size_bytes)
        self.receive_into([memoryview(got)])
        return bytes(got)

    def quiet(self) -> bool:
        """Is nothing there to be read, no end either? Then a connection that nobody used may be used."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | select.POLLHUP)
        return not poll.poll(0)

    def abort(self) -> None:
        """From any thread: whoever uses it gets an error soon."""
        abort(self._sock)

    def close(self) -> None:
        """Never raises."""
        self._sock.close()

    def _left_s(self) -> float:
        left_s = min(self.io_s, self.until_s - self._now_s())
        if left_s <= 0:
            raise TimeoutError("time is up")
        return left_s

    def _send_plain(self, pieces: Sequence[memoryview]) -> int:
        try:
            return self._sock.sendmsg(pieces, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            if not self._poll.poll(self._left_s() * 1000 + 1):
                raise TimeoutError("the other side takes nothing") from None
            return 0

    def _receive_plain(self, pieces: Sequence[memoryview]) -> int:
        limit_s = self._left_s()
        if limit_s != self._limit_s:
            self._limit_s = limit_s
            seconds, part = divmod(max(int(limit_s * 1e6), 1000), 1_000_000)  # 0 would be for ever
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(seconds, part))
        try:
            if len(pieces) == 1:
                return self._sock.recv_into(pieces[0], 0, socket.MSG_WAITALL)
            return self._sock.recvmsg_into(pieces, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise TimeoutError("the other side sends nothing") from None

    def _send_tls(self, piece: memoryview) -> int:
        self._sock.settimeout(self._left_s())
        return self._sock.send(piece[:TLS_SEND_BYTES])

    def _receive_tls(self, piece: memoryview) -> int:
        self._sock.settimeout(self._left_s())
        return self._sock.recv_into(piece)


def abort(sock: socket.socket) -> None:
    """Make whoever waits on this connection stop. Not SSLSocket's shutdown, after which bytes would go out plain."""
    with suppress(OSError):  # it is over already
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def up_to(pieces: Sequence[memoryview], size_bytes: int) -> list[memoryview]:
    """The first so many bytes of the pieces."""
    kept: list[memoryview] = []
    for piece in pieces:
        if size_bytes <= 0:
            break
        kept.append(piece if len(piece) <= size_bytes else piece[:size_bytes])
        size_bytes -= len(piece)
    return kept


def beyond(pieces: Sequence[memoryview], size_bytes: int) -> list[memoryview]:
    """All but those."""
    rest = list(pieces)
    return rest[_skip(rest, 0, size_bytes) :]


def _skip(pieces: list[memoryview], at: int, size_bytes: int) -> int:
    """Pass over so many bytes of the pieces from the at-th on, cutting the one where they end."""
    while size_bytes and size_bytes >= len(pieces[at]):
        size_bytes -= len(pieces[at])
        at += 1
    if size_bytes:
        pieces[at] = pieces[at][size_bytes:]
    return at
