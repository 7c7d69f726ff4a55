"""Request traces: one JSON object a line, plain or zstd-compressed, in replay order.

Rules
  - A line has `timestamp` (ms) and `hash_ids` (block ids, first block first; equal ids mean equal prefixes);
    whatever else stands there is ignored. Requests without a whole block are left out.
  - Keys are the ids as 8 big-endian bytes, packed for a whole request at once.
  - Time never runs backwards: a request that is out of order happens at the time of the one before it.
  - Whatever is wrong with a file is a TraceError of one line that names the file and the line.
"""

from __future__ import annotations

import io
import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

KEY_BYTES = 8
ZSTD_WINDOW_LOG_MAX = 27


class TraceError(Exception):
    """The trace cannot be read; the text is one line for people."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when, in ms of the trace, and its chain of KEY_BYTES-long keys."""

    at_ms: int
    chain: bytes


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace in memory."""

    name: str
    requests: tuple[Request, ...]
    accesses: int
    """Blocks asked for, all requests together."""
    distinct: int
    """Different blocks among them."""


def read_trace(path: Path) -> Trace:
    """The trace at `path`; *.zst is decompressed. Raises TraceError."""
    requests: list[Request] = []
    at_ms = 0
    try:
        with _opened(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.isspace():
                    continue
                request = _request(line, f"{path}, line {number}", at_ms)
                at_ms = request.at_ms
                if request.chain:
                    requests.append(request)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 text: {error.reason}") from error
    if not requests:
        raise TraceError(f"{path}: no request with a block in it")
    keys = np.frombuffer(b"".join([request.chain for request in requests]), dtype=">u8")
    return Trace(path.name, tuple(requests), len(keys), len(np.unique(keys)))


def _request(line: str, where: str, not_before_ms: int) -> Request:
    try:
        fields: Any = json.loads(line)
        at_ms = int(fields["timestamp"])
        ids: Any = fields["hash_ids"]
        if at_ms < 0 or not isinstance(ids, list):
            raise ValueError("timestamp is below 0 or hash_ids is no list")
        keys = _keys(cast(list[Any], ids))
    except KeyError as error:
        raise TraceError(f"{where}: no {error.args[0]}") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise TraceError(f"{where}: {error}") from error
    return Request(max(at_ms, not_before_ms), keys)


def _keys(ids: list[Any]) -> bytes:
    if not ids:
        return b""
    numbers: npt.NDArray[Any] = np.array(ids)
    if numbers.ndim != 1 or numbers.dtype != np.int64 or numbers.min() < 0:
        raise ValueError("hash_ids are not all whole numbers from 0 to 2^63 - 1")
    return numbers.astype(">u8").tobytes()


@contextmanager
def _opened(path: Path) -> Generator[io.TextIOBase]:
    with path.open("rb") as file:
        if path.suffix != ".zst":
            with io.TextIOWrapper(file, encoding="utf-8") as lines:
                yield lines
            return
        try:
            import zstandard
        except ImportError as error:
            raise TraceError(f"{path} is zstd-compressed: pip install 'kvpool[replay]'") from error
        try:
            with _decompressed(zstandard, file) as lines:
                yield lines
        except zstandard.ZstdError as error:
            raise TraceError(f"{path}: {error}") from error


def _decompressed(zstandard: Any, file: BinaryIO) -> io.TextIOWrapper:
    reader = zstandard.ZstdDecompressor(max_window_size=1 << ZSTD_WINDOW_LOG_MAX)
    return io.TextIOWrapper(reader.stream_reader(file, read_across_frames=True), encoding="utf-8")
