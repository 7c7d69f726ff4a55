"""Structured logs: one line per event, key=value or JSON.

Rules
  - An event has a fixed name (words_with_underscores); what varies is a field.
  - One event is one line: what cannot be printed inside a value is escaped.
  - No flood: of one event LINES_MAX lines in WINDOW_MS; the rest is counted, and the next line that is written says
    how many were held back.
  - A log that cannot be written disturbs nobody.
"""

from __future__ import annotations

import contextlib
import json
import threading
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

from kvpool_client.clock import Clock

Level = Literal["debug", "info", "warning", "error"]
Field = str | int | float | bool | bytes | None

LEVELS: Final[tuple[Level, ...]] = ("debug", "info", "warning", "error")
LINES_MAX: Final = 20
WINDOW_MS: Final = 10_000


class Log:
    """Writes events from `lowest` up to `stream`. Thread-safe."""

    def __init__(self, lowest: Level, as_json: bool, clock: Clock, stream: TextIO) -> None:
        self._lowest = LEVELS.index(lowest)
        self._as_json = as_json
        self._clock = clock
        self._stream = stream
        self._lock = threading.Lock()
        self._windows: dict[str, tuple[int, int]] = {}  # event -> when its window began, lines wanted since

    def debug(self, event: str, **fields: Field) -> None:
        """For those who look into the node client itself."""
        self._write("debug", event, fields)

    def info(self, event: str, **fields: Field) -> None:
        """Normal life."""
        self._write("info", event, fields)

    def warning(self, event: str, **fields: Field) -> None:
        """Worse than it should be; the node client goes on by itself."""
        self._write("warning", event, fields)

    def error(self, event: str, **fields: Field) -> None:
        """Somebody has to look."""
        self._write("error", event, fields)

    def _write(self, level: Level, event: str, fields: dict[str, Field]) -> None:
        if LEVELS.index(level) < self._lowest:
            return
        with self._lock:
            held_back = self._admit(event)
            if held_back is None:
                return
            if held_back:
                fields = {**fields, "held_back": held_back}
            when = datetime.fromtimestamp(self._clock.wall_s(), UTC).isoformat(timespec="milliseconds")
            line = (_json if self._as_json else _text)(when, level, event, fields)
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(line + "\n")
                self._stream.flush()

    def _admit(self, event: str) -> int | None:
        """Lines of this event held back in its last window; None: hold this one back too."""
        now_ms = self._clock.now_ms()
        began_ms, wanted = self._windows.get(event, (now_ms - WINDOW_MS, 0))
        if now_ms - began_ms >= WINDOW_MS:
            self._windows[event] = (now_ms, 1)
            return max(0, wanted - LINES_MAX)
        self._windows[event] = (began_ms, wanted + 1)
        return 0 if wanted < LINES_MAX else None


def _json(when: str, level: str, event: str, fields: dict[str, Field]) -> str:
    plain = {name: value.hex() if isinstance(value, bytes) else value for name, value in fields.items()}
    return json.dumps({"ts": when, "level": level, "event": event, **plain})


def _text(when: str, level: str, event: str, fields: dict[str, Field]) -> str:
    return " ".join([when, level, event, *(f"{name}={_word(value)}" for name, value in fields.items())])


def _word(value: Field) -> str:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, str) and value.isprintable() and value and not any(sign in value for sign in ' "='):
        return value
    return json.dumps(value)
