"""Structured logs: one line per event, key=value or JSON.

Rules
  - An event has a fixed name (words_with_underscores); all that varies is a field.
  - One event is one line: line breaks inside values are escaped.
  - No flood: of one event BURST lines in WINDOW_MS, then they are counted; the count stands as `suppressed` in the
    next line of that event that is written.
  - A log that cannot be written disturbs nobody.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

from kvpool_master.clock import Clock

LEVELS = ("debug", "info", "warning", "error")
BURST = 20
WINDOW_MS = 10_000

Value = str | int | float | bool | bytes | None


@dataclass(slots=True)
class _Window:
    started_ms: int
    lines: int = 0
    suppressed: int = 0


class Log:
    """Writes events of `level` and above to `stream`."""

    def __init__(self, level: str, as_json: bool, clock: Clock, stream: TextIO) -> None:
        self._lowest = LEVELS.index(level)
        self._as_json = as_json
        self._clock = clock
        self._stream = stream
        self._windows: dict[str, _Window] = {}

    def debug(self, event: str, **fields: Value) -> None:
        """For those who look into the Master itself."""
        self._write(0, event, fields)

    def info(self, event: str, **fields: Value) -> None:
        """Normal life: starts, stops, nodes that come and go."""
        self._write(1, event, fields)

    def warning(self, event: str, **fields: Value) -> None:
        """Something is worse than it should be; the Master goes on by itself."""
        self._write(2, event, fields)

    def error(self, event: str, **fields: Value) -> None:
        """A bug or a broken machine: somebody has to look."""
        self._write(3, event, fields)

    def _write(self, level: int, event: str, fields: dict[str, Value]) -> None:
        if level < self._lowest:
            return
        suppressed = self._admit(event)
        if suppressed is None:
            return
        if suppressed:
            fields["suppressed"] = suppressed
        when = datetime.fromtimestamp(self._clock.wall_s(), UTC).isoformat(timespec="milliseconds")
        head: dict[str, Value] = {"ts": when, "level": LEVELS[level], "event": event}
        line = _json_line(head | fields) if self._as_json else _text_line(head, fields)
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            pass

    def _admit(self, event: str) -> int | None:
        """How many lines of this event were held back since its last one; None: hold this one back too."""
        now = self._clock.now_ms()
        window = self._windows.get(event)
        if window is None or now - window.started_ms >= WINDOW_MS:
            self._windows[event] = _Window(now, lines=1)
            return window.suppressed if window else 0
        if window.lines >= BURST:
            window.suppressed += 1
            return None
        window.lines += 1
        return 0


class LibraryHandler(logging.Handler):
    """Hands what libraries say through `logging` to our log, as the event `library`."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record. Never raises."""
        write = self._log.error if record.levelno >= logging.ERROR else self._log.warning
        write("library", logger=record.name, text=self.format(record))


def _plain(value: Value) -> str | int | float | bool | None:
    return value.hex() if isinstance(value, bytes) else value


def _json_line(fields: dict[str, Value]) -> str:
    return json.dumps({name: _plain(value) for name, value in fields.items()}, ensure_ascii=True)


def _text_line(head: dict[str, Value], fields: dict[str, Value]) -> str:
    words = [str(value) for value in head.values()]
    words += [f"{name}={_word(_plain(value))}" for name, value in fields.items()]
    return " ".join(words)


def _word(value: str | int | float | bool | None) -> str:
    if isinstance(value, str) and value and value.isprintable() and not set(value) & set(' "='):
        return value
    return json.dumps(value, ensure_ascii=True)
