"""Daemons as users start them: processes of their own on free loopback ports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

START_S = 30.0
STOP_S = 30.0


class DaemonProcess:
    """Starts at once, in plain text unless told where its certificate is; http_port is known when it is made.

    inside: words before its command line, which run it elsewhere (network_world.py).
    """

    def __init__(self, module: str, *flags: str, inside: Sequence[str] = ()) -> None:
        self.lines: list[str] = []
        words = flags if any(flag.startswith("--tls-") for flag in flags) else ("--plaintext", *flags)
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-m", module, "serve", "--log-json", "--http", "127.0.0.1:0", *words],
            stderr=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("KVPOOL_")},
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(START_S) or not self.event("ready"):
            self.kill()
            raise AssertionError(f"{module} did not start:\n" + "\n".join(self.lines))
        self.http_port = int(self.event("ready")["http_port"])

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.kill()
        elif self.process.stderr is not None:
            self._ended()


class MasterProcess(DaemonProcess):
    """grpc_port and epoch are known when the constructor returns. port: 0 for any.

    state_dir: that of a former Master to be its next life; without one it has its own, which goes with it. host:
    where it listens.
    """

    def __init__(
        self,
        *flags: str,
        port: int = 0,
        state_dir: Path | None = None,
        host: str = "127.0.0.1",
        inside: Sequence[str] = (),
    ) -> None:
        self.host = host
        self._own = tempfile.TemporaryDirectory(prefix="kvpool-master-") if state_dir is None else None
        self.state_dir = Path(self._own.name) if self._own is not None else state_dir
        where = ("--listen", f"{host}:{port}", "--state-dir", str(self.state_dir))
        super().__init__("kvpool_master", "--debug", *where, *flags, inside=inside)
        ready = self.event("ready")
        self.grpc_port = int(ready["grpc_port"])
        self.epoch = int(ready["epoch"])

    @property
    def address(self) -> str:
        return f"{self.host}:{self.grpc_port}"

    def _ended(self) -> int:
        code = super()._ended()
        if self._own is not None:
            self._own.cleanup()
        return code


class NodeProcess(DaemonProcess):
    """A node client with its segment and socket in `folder`, and a data port of its own on `host`."""

    def __init__(
        self, master: str, folder: Path, *flags: str, host: str = "127.0.0.1", inside: Sequence[str] = ()
    ) -> None:
        self.socket_path = str(folder / "node.sock")
        self.segments = folder / "segments"
        self.segments.mkdir(exist_ok=True)
        where = ("--master", master, "--segment-dir", str(self.segments), "--socket-path", self.socket_path)
        super().__init__("kvpool_client", *where, "--data-listen", f"{host}:0", *flags, inside=inside)
