"""The demo's processes: Master, node client, workers. Each is stopped, and waited for, on every way out.

Rules
  - A daemon is there when it has logged `ready`; a worker is done when it has said `end`.
  - Children run in sessions of their own, so that Ctrl-C reaches only the demo, which stops them in order.
  - What a child wrote to stderr is kept to its last lines and shown only if it failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, Final

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
READY_DEADLINE_S: Final = 60.0
STOP_DEADLINE_S: Final = 15.0
_LINES_KEPT: Final = 40


class ChildFailed(RuntimeError):
    """A process of the demo ended, or did not get ready; the text holds its last words."""


class _Child:
    """A process with a thread that reads its stderr. Nothing runs before start()."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready: dict[str, Any] = {}
        self.told = threading.Event()
        """Set when it is ready, or has closed its stderr."""
        self._last_lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._process: subprocess.Popen[str] | None = None

    def start(self, command: Sequence[str], environment: Mapping[str, str], *, talks: bool) -> None:
        """Run it; `talks`: with pipes to its stdin and stdout."""
        pipe = subprocess.PIPE if talks else subprocess.DEVNULL
        with _signals_held():
            self._process = subprocess.Popen(
                [sys.executable, *command],
                env=_without_settings(os.environ) | dict(environment),
                stdin=pipe,
                stdout=pipe,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        threading.Thread(target=self._read, args=(self._process.stderr,), daemon=True).start()

    def messages(self) -> Iterator[dict[str, Any]]:
        """Its lines on stdout, the last one being {"kind": "end"}. Raises ChildFailed if that never comes."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message: dict[str, Any] = json.loads(line)
            yield message
            if message["kind"] == "end":
                return
        raise self.failed("ended too early")

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._last_lines.append(line)
                if not self.ready and '"event": "ready"' in line:
                    self.ready = json.loads(line)
                    self.told.set()
        self.told.set()

    def failed(self, what: str) -> ChildFailed:
        """The error for this child, with its last lines."""
        self.stop()
        assert self._process is not None
        code = self._process.returncode
        return ChildFailed(f"{self.name} {what}, exit code {code}\n{''.join(self._last_lines)}".rstrip())

    def stop(self) -> None:
        """Ask it to end, wait, kill it if it does not. Harmless when it has ended or never ran."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.told.wait(STOP_DEADLINE_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Put off what a stop signal does: raising out of Popen would leave a child that nobody knows."""
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _frame: came.append(number)) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The demo sets everything itself: a variable of the user's would send its daemons elsewhere."""
    return {name: value for name, value in environment.items() if not name.startswith("KVPOOL_")}


@contextmanager
def daemon(name: str, command: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run a daemon of kvpool; gives the fields of its `ready` event. Raises ChildFailed."""
    child = _Child(name)
    try:
        child.start(["-m", *command], {}, talks=False)
        if not child.told.wait(READY_DEADLINE_S):
            raise child.failed(f"was not ready within {READY_DEADLINE_S:.0f} s")
        if not child.ready:
            raise child.failed("ended before it was ready")
        yield child.ready
    finally:
        child.stop()


@contextmanager
def worker(name: str, command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Iterator[dict[str, Any]]]:
    """Run a worker; gives its messages as they come (see _Child.messages)."""
    child = _Child(name)
    try:
        child.start(command, environment, talks=True)
        yield child.messages()
    finally:
        child.stop()
