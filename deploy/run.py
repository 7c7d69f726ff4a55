"""`make run`: a Master and one node client in the foreground; Ctrl-C stops both, the node client first.

Their own settings hold (KVPOOL_MASTER_*, KVPOOL_CLIENT_*); where none is given: loopback, plain text, the usual ports,
Unix socket and state directory in a folder of the user's, a segment of at most 1 GiB and half of what /dev/shm has
free, which is removed at the end (KVPOOL_CLIENT_DISCARD=false keeps it). Both write their logs to this terminal. Exit
code: 0 after Ctrl-C or SIGTERM, 1 if one of them did not start or ended by itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

SLAB_BYTES = 64 << 20
SEGMENT_BYTES_MAX = 1 << 30
READY_DEADLINE_S = 60.0
STOP_DEADLINE_S = 15.0
POLL_S = 0.05


class Failed(Exception):
    """A daemon did not start, or ended by itself; the text is one line."""


def settings() -> dict[str, str]:
    """The environment of both daemons: what the user set, and defaults for the rest."""
    given = dict(os.environ)
    folder = Path(given.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"kvpool-{os.getuid()}"
    defaults = {
        "KVPOOL_MASTER_LISTEN": "127.0.0.1:50051",
        "KVPOOL_MASTER_HTTP": "127.0.0.1:9500",
        "KVPOOL_MASTER_STATE_DIR": str(folder / "master"),
        "KVPOOL_CLIENT_HTTP": "127.0.0.1:9501",
        "KVPOOL_CLIENT_SOCKET_PATH": str(folder / "node.sock"),
        "KVPOOL_CLIENT_SLAB_BYTES": str(SLAB_BYTES),
        "KVPOOL_CLIENT_DISCARD": "true",
    }
    environment = defaults | given
    for prefix in ("KVPOOL_MASTER_", "KVPOOL_CLIENT_"):
        if not any(name.startswith(f"{prefix}TLS_") for name in given):
            environment.setdefault(f"{prefix}PLAINTEXT", "true")
    environment.setdefault("KVPOOL_CLIENT_MASTER", environment["KVPOOL_MASTER_LISTEN"])
    if "KVPOOL_CLIENT_SEGMENT_BYTES" not in environment:
        environment |= _room(environment.get("KVPOOL_CLIENT_SEGMENT_DIR", "/dev/shm"), folder)
    ours = ("KVPOOL_CLIENT_SOCKET_PATH", "KVPOOL_MASTER_STATE_DIR")
    if any(environment[name] == defaults[name] for name in ours):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return environment


def _room(directory: str, folder: Path) -> dict[str, str]:
    """Where the segment goes and how large it is; an ordinary folder where shared memory is too small."""
    free = shutil.disk_usage(directory).free if os.path.isdir(directory) else 0
    slabs = min(SEGMENT_BYTES_MAX, free // 2) // SLAB_BYTES
    if slabs:
        return {"KVPOOL_CLIENT_SEGMENT_DIR": directory, "KVPOOL_CLIENT_SEGMENT_BYTES": str(slabs * SLAB_BYTES)}
    print(f"{directory} has {free >> 20} MiB free, too little: the segment goes to {folder}", flush=True)
    return {"KVPOOL_CLIENT_SEGMENT_DIR": str(folder), "KVPOOL_CLIENT_SEGMENT_BYTES": str(4 * SLAB_BYTES)}


@contextmanager
def daemon(name: str, package: str, url: str, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a daemon of kvpool from when its `url` answers OK. Stops it, and waits, on every way out."""
    process = subprocess.Popen([sys.executable, "-m", package, "serve"], env=dict(environment), start_new_session=True)
    try:
        _wait_ready(name, process, url)
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(name: str, process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + READY_DEADLINE_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Failed(f"{name} did not start (exit code {process.returncode})")
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(POLL_S)
    raise Failed(f"{name} was not ready within {READY_DEADLINE_S:.0f} s: {url}")


def _how(environment: Mapping[str, str]) -> str:
    """What a worker has to be told."""
    plain = environment.get("KVPOOL_MASTER_PLAINTEXT") == "true"
    return " in plain text (workers: KVPOOL_PLAINTEXT=true)" if plain else ""


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(number)


def main() -> int:
    """Run both until told to stop; the exit code."""
    signal.signal(signal.SIGTERM, _stop)
    environment = settings()
    try:
        with ExitStack() as stack:
            # A process that serves on a taken port would answer for ours: the Master refuses a taken port itself.
            # A Master that knows nodes from before is ready only when they are back; it serves them from the start.
            alive = f"http://{environment['KVPOOL_MASTER_HTTP']}/healthz"
            master = stack.enter_context(daemon("the Master", "kvpool_master", alive, environment))
            ready = f"http://{environment['KVPOOL_CLIENT_HTTP']}/readyz"
            node = stack.enter_context(daemon("the node client", "kvpool_client", ready, environment))
            print(
                f"\nkvpool is running{_how(environment)}; Ctrl-C stops it\n"
                f"  Master       gRPC {environment['KVPOOL_MASTER_LISTEN']}   "
                f"metrics http://{environment['KVPOOL_MASTER_HTTP']}/metrics\n"
                f"  node client  socket {environment['KVPOOL_CLIENT_SOCKET_PATH']}   "
                f"metrics http://{environment['KVPOOL_CLIENT_HTTP']}/metrics\n"
                f"  segment      {int(environment['KVPOOL_CLIENT_SEGMENT_BYTES']) >> 20} MiB in "
                f"{environment.get('KVPOOL_CLIENT_SEGMENT_DIR', '/dev/shm')}\n",
                flush=True,
            )
            while True:
                for name, process in (("the Master", master), ("the node client", node)):
                    if process.poll() is not None:
                        raise Failed(f"{name} ended by itself (exit code {process.returncode})")
                time.sleep(POLL_S * 10)
    except Failed as failure:
        print(f"kvpool: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kvpool has stopped")
        return 0


if __name__ == "__main__":
    sys.exit(main())
