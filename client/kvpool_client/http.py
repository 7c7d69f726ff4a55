"""Metrics and health over HTTP/1.1: GET /metrics, /healthz (alive), /readyz (serving).

Rules
  - One request a connection, heads of at most HEAD_BYTES_MAX, REQUEST_S in all, CONNECTIONS_MAX at a time.
  - What is not a request gets a 400 and disturbs nobody.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final

from kvpool_client.acceptor import Acceptor
from kvpool_client.local_socket import Deadline
from kvpool_client.logs import Log
from kvpool_client.start_error import StartError

HEAD_BYTES_MAX: Final = 8192
REQUEST_S: Final = 5.0
CONNECTIONS_MAX: Final = 16
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_PHRASES: Final = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Unavailable"}


class HttpServer:
    """Serves until stop(). port: the one in use. Raises StartError when the address cannot be had.

    metrics(): the text to serve. ready(): (whether, the word to say).
    """

    def __init__(
        self,
        address: tuple[str, int],
        metrics: Callable[[], bytes],
        ready: Callable[[], tuple[bool, str]],
        log: Log,
    ) -> None:
        self._metrics = metrics
        self._ready = ready
        self._log = log
        host, port = address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server(address, family=family, backlog=CONNECTIONS_MAX)
        except OSError as error:
            raise StartError(f"http = {host}:{port}: {error.strerror}") from error
        self.port: int = listener.getsockname()[1]
        self._acceptor = Acceptor("http", listener, self._serve, self._broken, CONNECTIONS_MAX)

    def start(self) -> None:
        """Begin to serve."""
        self._acceptor.start()

    def stop(self) -> None:
        """End all connections."""
        self._acceptor.stop()

    def _serve(self, connection: socket.socket) -> None:
        deadline = Deadline(REQUEST_S)
        head = bytearray()
        while b"\r\n\r\n" not in head and len(head) < HEAD_BYTES_MAX:
            deadline.limit(connection)
            piece = connection.recv(HEAD_BYTES_MAX - len(head))
            if not piece:
                break
            head += piece
            if not _may_be_request(bytes(head)):
                break
        status, kind, body = self._answer(bytes(head))
        reply = (
            f"HTTP/1.1 {status} {_PHRASES[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        deadline.limit(connection)
        connection.sendall(reply.encode() + (b"" if head.startswith(b"HEAD ") else body))
        connection.shutdown(socket.SHUT_WR)
        deadline.limit(connection)
        connection.recv(HEAD_BYTES_MAX)  # what is unread would reset the connection and with it our answer

    def _answer(self, head: bytes) -> tuple[int, str, bytes]:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if (
            not _may_be_request(head)
            or b"\r\n\r\n" not in head
            or len(words) != 3
            or not words[2].startswith(b"HTTP/1.")
        ):
            return _text(400, "not a request")
        if words[0] not in (b"GET", b"HEAD"):
            return _text(405, "GET only")
        match words[1].split(b"?", 1)[0]:
            case b"/metrics":
                return 200, METRICS_TYPE, self._metrics()
            case b"/healthz":
                return _text(200, "alive")
            case b"/readyz":
                ready, word = self._ready()
                return _text(200 if ready else 503, word)
            case _:
                return _text(404, "/metrics, /healthz, /readyz")

    def _broken(self, error: Exception) -> None:
        self._log.error("http_failed", text=repr(error))


def _may_be_request(head: bytes) -> bool:
    """False as soon as the bytes cannot be the head of a request: methods are capital letters."""
    method = head.split(b" ", 1)[0]
    return len(method) <= 16 and method.isalpha() and method.isupper()


def _text(status: int, body: str) -> tuple[int, str, bytes]:
    return status, "text/plain; charset=utf-8", body.encode() + b"\n"
