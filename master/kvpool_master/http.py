"""A very small HTTP/1.1 responder for GET: metrics and health, on the Master's own loop, no thread.

Rules
  - One request a connection; the answer closes it.
  - Bounded: HEADER_BYTES_MAX of header, TIMEOUT_S for a request and its answer, CONNECTIONS_MAX at once.
  - What is not a GET request gets 400 as soon as that is clear. Nothing that arrives here disturbs the Master.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvpool_master.logs import Log

HEADER_BYTES_MAX = 8 << 10
TIMEOUT_S = 5.0
CONNECTIONS_MAX = 64
_METHOD = b"GET "
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class Answer(NamedTuple):
    """content_type: of `body`."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Route = Callable[[], Answer]


class HttpServer:
    """Answers GET for the paths of `routes`."""

    def __init__(self, routes: Mapping[str, Route], log: Log, *, timeout_s: float = TIMEOUT_S) -> None:
        self._routes = routes
        self._log = log
        self._timeout_s = timeout_s
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; the port that was taken. Raises OSError."""
        self._server = await asyncio.start_server(self._connected, host, port, limit=HEADER_BYTES_MAX)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stop listening and drop what is open."""
        if self._server is not None:
            self._server.close()
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)
            await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            async with asyncio.timeout(self._timeout_s):
                full = len(self._open) > CONNECTIONS_MAX
                answer = Answer(503, b"too many connections\n") if full else await self._answer(reader)
                writer.write(_encode(answer))
                await writer.drain()
        except (OSError, TimeoutError):
            pass  # gone or too slow: no answer reaches it
        except asyncio.CancelledError:
            pass  # stop(); the streams of asyncio log a task that ends cancelled
        finally:
            self._open.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> Answer:
        head = await _read_head(reader)
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return Answer(400, b"a GET request of HTTP/1.x is expected\n")
        path = words[1].split(b"?", 1)[0].decode("latin-1")
        route = self._routes.get(path)
        if route is None:
            return Answer(404, " ".join(["one of", *self._routes]).encode() + b"\n")
        try:
            return route()
        except Exception as error:
            trace = "".join(traceback.format_exception(error))
            self._log.error("http_failed", path=path, error=repr(error), traceback=trace)
            return Answer(500, b"failed; see the log\n")


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    """The header of a GET request; b"" for anything else."""
    head = b""
    while b"\r\n\r\n" not in head:
        chunk = await reader.read(HEADER_BYTES_MAX)
        head += chunk
        if not chunk or len(head) > HEADER_BYTES_MAX or not head.startswith(_METHOD[: len(head)]):
            return b""
    return head


def _encode(answer: Answer) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status} {_REASONS[answer.status]}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode("ascii") + answer.body
