"""The world of the chaos test: a Master, two nodes with two workers each, all processes, and what befalls them.

Rules
  - What happens follows from the seed alone (faults()); when exactly it happens does not: these are real processes.
  - A fault is over when all its victims run again: started anew if they had ended, else continued.
  - Nobody may end but by a fault: alive() says who did.
  - Each part has a journal of its lives; story() tells all of it, for a test that failed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from integration.processes import STOP_S, DaemonProcess, MasterProcess, NodeProcess

WORKER: Final = Path(__file__).with_name("chaos_worker.py")
NODES: Final = ("n0", "n1")
WORKERS: Final = ("n0.0", "n0.1", "n1.0", "n1.1")
LONG_S: Final = 5.5
"""Longer than every deadline below: a writer's slots come back 4.5 s after it reserved."""
MASTER_FLAGS: Final = (
    *("--tick-ms", "50", "--drain-ms", "500", "--clear-wait-ms", "300"),
    *("--core-lease-min-ms", "500", "--core-lease-max-ms", "1500", "--core-lease-life-max-ms", "3000"),
    *("--core-write-min-ms", "500", "--core-write-max-ms", "1500", "--core-quarantine-ms", "3000"),
    *("--core-incomplete-grace-ms", "1000", "--core-heartbeat-ms", "150", "--core-suspect-ms", "1500"),
    *("--core-retire-ms", "4000", "--core-stall-ms", "500"),
    *("--core-inventory-ms", "3000", "--core-recovery-ms", "10000"),
)
NODE_FLAGS: Final = (
    *("--segment-bytes", "16MiB", "--slab-bytes", "1MiB", "--local-timeout-ms", "1s"),
    *("--rpc-timeout-ms", "1s", "--backoff-max-ms", "500ms", "--ready-wait-ms", "200ms"),
)
LAST_LINES: Final = 25

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Fault:
    """After quiet_s something happens to one or two parts at once: kill, end (SIGTERM) or stop. It lasts for_s."""

    quiet_s: float
    harm: tuple[tuple[str, str], ...]
    for_s: float


def faults(seed: int) -> Iterator[Fault]:
    """What happens, without end. Every part meets every kind of fault early on, alone or with another part."""
    rng = random.Random(seed)
    while True:
        every = [(part, kind) for part in ("master", *NODES, *WORKERS) for kind in ("kill", "stop")]
        every += [(part, "end") for part in ("master", *NODES)]
        rng.shuffle(every)
        while every:
            harm = [every.pop()]
            if every and every[-1][0] != harm[0][0] and rng.random() < 0.4:
                harm.append(every.pop())
            long = rng.random() < (0.5 if "stop" in harm[0] else 0.1)
            yield Fault(rng.uniform(0.2, 1.5), tuple(harm), LONG_S if long else rng.uniform(0, 1.5))


class WorkerProcess:
    """chaos_worker.py with a verb; what it writes on stderr is kept in a file."""

    def __init__(self, log: Path, *words: str) -> None:
        self._log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen([sys.executable, str(WORKER), *words], stderr=stderr)

    @property
    def lines(self) -> list[str]:
        return self._log.read_text().splitlines()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(STOP_S)

    def kill(self) -> int:
        """SIGKILL; the exit code."""
        self.process.kill()
        return self.process.wait(STOP_S)


class World:
    """A context manager; at its end everything is killed and the folders are gone."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.journal = folder / "journal.jsonl"
        self.seed = seed
        self.port = 0
        self.running: dict[str, DaemonProcess | WorkerProcess] = {}
        self.stopped: dict[str, list[Interval]] = {}
        self._memory = tempfile.TemporaryDirectory(prefix="kvpool-chaos-", dir="/dev/shm")
        self.memory = Path(self._memory.name)
        self._rng = random.Random(seed)
        self._began_s = time.monotonic()
        self._events: list[str] = []
        self._former: list[tuple[str, list[str]]] = []
        for node in NODES:
            (self.memory / node).mkdir()

    # -- who is there ------------------------------------------------------------------------------------

    @property
    def master(self) -> MasterProcess:
        found = self.running["master"]
        assert isinstance(found, MasterProcess)
        return found

    def node(self, name: str) -> NodeProcess:
        found = self.running[name]
        assert isinstance(found, NodeProcess)
        return found

    def start(self, *parts: str, verb: str = "churn") -> None:
        """Start parts that do not run; workers with this verb."""
        for part in parts:
            assert part not in self.running
            self.running[part] = self._launch(part, verb)
            self._note(f"{part} started")

    def start_daemons(self) -> None:
        """In any order."""
        parts = ["master", *NODES]
        self._rng.shuffle(parts)
        if not self.port:
            parts.sort()  # the first Master chooses its port
        self.start(*parts)

    def end(self, *parts: str, kind: str = "end") -> None:
        """kill: at once. end: cleanly, which has to succeed."""
        for part in parts:
            process = self.running[part]
            code = process.kill() if kind == "kill" else process.stop()
            del self.running[part]
            self._note(f"{part} {kind}: {code}")
            self._former.append((part, process.lines))
            assert code == (-signal.SIGKILL if kind == "kill" else 0), f"{part} ended with {code}"

    def kill_all(self) -> None:
        """Everybody, in any order."""
        parts = list(self.running)
        self._rng.shuffle(parts)
        self.end(*parts, kind="kill")

    def befall(self, fault: Fault) -> None:
        """Let it happen, and be over."""
        time.sleep(fault.quiet_s)
        since_s: dict[str, float] = {}
        for part, kind in fault.harm:
            if kind == "stop":
                self.running[part].process.send_signal(signal.SIGSTOP)
                since_s[part] = time.monotonic()
                self._note(f"{part} stopped")
            else:
                self.end(part, kind=kind)
        time.sleep(fault.for_s)
        for part, kind in fault.harm:
            if kind == "stop":
                self.running[part].process.send_signal(signal.SIGCONT)
                self.stopped.setdefault(part, []).append((since_s[part], time.monotonic()))
                self._note(f"{part} continued")
            else:
                self.start(part)
        self.alive()

    def alive(self) -> None:
        """Nobody has ended."""
        ended = {part: code for part, process in self.running.items() if (code := process.process.poll()) is not None}
        assert not ended, f"ended by themselves: {ended}"

    def work(self, verb: str, node: str, *words: str) -> None:
        """Run a worker of this node to its end, which has to be a good one."""
        process = WorkerProcess(self.folder / f"{verb}.stderr", *self._words(verb, f"{node}.{verb}"), *words)
        self._note(f"{verb} at {node}")
        code = process.process.wait(60)
        assert code == 0, f"{verb} at {node}:\n" + "\n".join(process.lines)

    def story(self) -> str:
        """What happened, and the last lines of everybody."""
        lives = [*self._former, *((part, process.lines) for part, process in self.running.items())]
        last = {part: lines for part, lines in lives if lines}
        logs = [f"--- {part}\n" + "\n".join(lines[-LAST_LINES:]) for part, lines in last.items()]
        return f"KVPOOL_CHAOS_SEED={self.seed}\n" + "\n".join([*self._events, *logs])

    def lines(self) -> Iterator[tuple[str, str]]:
        """(part, line) of all logs."""
        for part, lines in [*self._former, *((part, process.lines) for part, process in self.running.items())]:
            yield from ((part, line) for line in lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self.running.values():
            process.kill()
        self._memory.cleanup()

    def _launch(self, part: str, verb: str) -> DaemonProcess | WorkerProcess:
        if part == "master":
            master = MasterProcess(*MASTER_FLAGS, port=self.port, state_dir=self.folder / "state")
            self.port = master.grpc_port
            return master
        address = f"127.0.0.1:{self.port}"
        if part in NODES:
            return NodeProcess(address, self.memory / part, *NODE_FLAGS, "--node-id", node_id(part))
        log = self.folder / f"{part}.{len(self._events)}.stderr"
        return WorkerProcess(log, *self._words(verb, part))

    def _words(self, verb: str, name: str) -> tuple[str, ...]:
        socket_path = str(self.memory / name.partition(".")[0] / "node.sock")
        return verb, f"127.0.0.1:{self.port}", socket_path, str(self.journal), name, str(self._rng.randrange(1 << 30))

    def _note(self, text: str) -> None:
        self._events.append(f"{time.monotonic() - self._began_s:7.2f} s  {text}")


def node_id(part: str) -> str:
    """Of a node, unique on this machine."""
    return f"chaos-{os.getpid()}-{part}"


def wait(what: Callable[[], object], limit_s: float, about: str) -> float:
    """Wait for something of other processes; how long it took, in seconds."""
    began_s = time.monotonic()
    while not what():
        assert time.monotonic() - began_s < limit_s, f"not within {limit_s} s: {about}"
        time.sleep(0.05)
    return time.monotonic() - began_s
