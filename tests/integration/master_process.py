"""A Master as users start it: a process of its own on free loopback ports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any

START_S = 30.0
STOP_S = 30.0
_LOOPBACK = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")


class MasterProcess:
    """Starts at once; grpc_port and http_port are known when the constructor returns."""

    def __init__(self, *flags: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvpool_master", "serve", "--log-json", "--debug", *_LOOPBACK, *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("KVPOOL_")},
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(START_S) or not self.event("ready"):
            self.kill()
            raise AssertionError("the Master did not start:\n" + "\n".join(self.lines))
        ready = self.event("ready")
        self.grpc_port = int(ready["grpc_port"])
        self.http_port = int(ready["http_port"])
        self.epoch = int(ready["epoch"])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def event(self, name: str) -> dict[str, Any]:
        """The first logged event of that name; empty if there is none."""
        found = [json.loads(line) for line in list(self.lines) if f'"event": "{name}"' in line]
        return found[0] if found else {}

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self._ended()

    def kill(self) -> int:
        """SIGKILL; the exit code."""
        self.process.kill()
        return self._ended()

    def _ended(self) -> int:
        code = self.process.wait(STOP_S)
        self._reader.join(STOP_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            if '"event": "ready"' in line:
                self._ready.set()
        self._ready.set()

    def __enter__(self) -> MasterProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.kill()
        elif self.process.stderr is not None:
            self._ended()
