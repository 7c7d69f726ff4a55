"""A pool of several nodes as processes, each node on a host of its own if there is a network, with workers beside it.

Rules
  - A node is named n0, n1, ...; the Master's host is called "master". Without a network all are on loopback.
  - Times are short, so that what has to happen does: a node that is not heard for a second is suspect.
  - Whoever ends without being told to fails the test; a failure tells the last lines of everybody.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pytest

from integration.network_world import Network
from integration.processes import STOP_S, MasterProcess, NodeProcess

TESTS: Final = Path(__file__).parents[1]
MASTER: Final = "master"
FAR: Final = "far"
"""A host without a node client."""
DATA_PORT: Final = 9502
"""Of a node that has its host to itself."""
BLOCKS: Final = 20
"""Of a chain, unless a test says otherwise."""
ANSWER_S: Final = 40.0
COME_ABOUT_S: Final = 20.0
"""For the pool to notice what befell it, and to be well again."""
LAST_LINES: Final = 25
MASTER_FLAGS: Final = (
    *("--tick-ms", "50", "--drain-ms", "500", "--clear-wait-ms", "300"),
    *("--core-lease-min-ms", "1000", "--core-lease-max-ms", "2000", "--core-lease-life-max-ms", "4000"),
    *("--core-write-min-ms", "1000", "--core-write-max-ms", "2000", "--core-quarantine-ms", "4000"),
    *("--core-heartbeat-ms", "150", "--core-suspect-ms", "1000", "--core-retire-ms", "5000"),
    *("--core-probe-ms", "500", "--core-report-window-ms", "3000", "--core-report-hold-ms", "2000"),
    *("--core-inventory-ms", "5000", "--core-recovery-ms", "10000", "--core-ramp-ms", "0", "--core-copy-ms", "5000"),
)
NODE_FLAGS: Final = (
    *("--segment-bytes", "32MiB", "--slab-bytes", "2MiB", "--local-timeout-ms", "1s"),
    *("--rpc-timeout-ms", "1s", "--backoff-max-ms", "500ms", "--ready-wait-ms", "2s", "--data-io-timeout-ms", "1s"),
)

Answer = dict[str, Any]


class WorkerProcess:
    """host_worker.py on the host of a node; see there for what it can be told."""

    def __init__(self, words: Sequence[str], log: Path, *, inside: Sequence[str] = ()) -> None:
        self._log = log
        environment = os.environ | {"KVPOOL_PLAINTEXT": "true"}
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [*inside, sys.executable, "-m", "integration.host_worker", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=TESTS,
                env=environment,
            )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def lines(self) -> list[str]:
        return self._log.read_text().splitlines()

    def tell(self, do: str, **words: Any) -> None:
        """Have it begin something; hear() its answer later."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **words}) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Answer:
        """The next answer. AssertionError if it ended instead."""
        try:
            line = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            raise AssertionError(f"no answer within {ANSWER_S} s") from None
        assert line, "\n".join(["a worker ended:", *self.lines])
        return json.loads(line)

    def ask(self, do: str, **words: Any) -> Answer:
        """Have it do something, now."""
        self.tell(do, **words)
        return self.hear()

    def end(self) -> None:
        """Its clean end; what it said last."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait(STOP_S)
        self._reader.join(STOP_S)
        assert code == 0, "\n".join(["a worker ended badly:", *self.lines])

    def kill(self) -> None:
        """SIGKILL, whatever it does."""
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait(STOP_S)
        self._reader.join(STOP_S)
        with suppress(BrokenPipeError):  # what was told last
            self._process.stdin.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put("")


class Cluster:
    """A context manager: a Master and these nodes, running; workers start when they are first asked for."""

    def __init__(
        self,
        *names: str,
        network: Network | None = None,
        master_flags: Sequence[str] = (),
        node_flags: Sequence[str] = (),
    ) -> None:
        self.names = names
        self.network = network
        self.failed = False
        """A test failed: nothing is expected of it any more."""
        self.nodes: dict[str, NodeProcess] = {}
        self._master_flags = (*MASTER_FLAGS, *master_flags)
        self._node_flags = (*NODE_FLAGS, *node_flags)
        self._workers: dict[str, WorkerProcess] = {}
        self._former: list[tuple[str, list[str]]] = []

    # -- who is there ------------------------------------------------------------------------------------

    def host(self, name: str) -> str:
        """Where it can be reached."""
        return self.network.address(name) if self.network else "127.0.0.1"

    def inside(self, name: str) -> tuple[str, ...]:
        """What its command line begins with."""
        return self.network.inside(name) if self.network else ()

    def start_master(self, port: int = 0) -> None:
        """The Master's next life, after the former one's end at the same port."""
        self.master = MasterProcess(
            *self._master_flags,
            port=port,
            state_dir=self._memory / "state",
            host=self.host(MASTER),
            inside=self.inside(MASTER),
        )

    def kill_master(self) -> None:
        """SIGKILL."""
        self.master.kill()
        self._former.append((MASTER, self.master.lines))

    def start_node(self, name: str, *flags: str, master: str = "") -> NodeProcess:
        """A node client's next life. master: where it finds the Master, if not where that is."""
        folder = self._memory / name
        folder.mkdir(exist_ok=True)
        listen = ("--data-listen", f"{self.host(name)}:{DATA_PORT}") if self.network else ()
        self.nodes[name] = NodeProcess(
            master or self.master.address,
            folder,
            *self._node_flags,
            *("--node-id", name),
            *listen,
            *flags,
            host=self.host(name),
            inside=self.inside(name),
        )
        return self.nodes[name]

    def kill_node(self, name: str) -> None:
        """SIGKILL."""
        node = self.nodes.pop(name)
        node.kill()
        self._former.append((name, node.lines))

    def stop_node(self, name: str) -> None:
        """SIGTERM."""
        node = self.nodes.pop(name)
        code = node.stop()
        self._former.append((name, node.lines))
        assert code == 0

    def worker(self, name: str, number: int = 0) -> WorkerProcess:
        """The number-th worker beside a node, or on a host without one, as the Master's is."""
        worker = f"{name}.{number}"
        if worker not in self._workers:
            socket_path = str(self._memory / name / "node.sock") if name in self.names else ""
            self._workers[worker] = WorkerProcess(
                (self.master.address, socket_path, worker),
                self._memory / f"{worker}.stderr",
                inside=self.inside(name),
            )
        return self._workers[worker]

    def churn(self, *workers: WorkerProcess, seed: int, for_s: float, first: int = 0) -> None:
        """Have workers begin to load and store at random, all at the same time; hear() each of them later."""
        for worker in workers:
            worker.tell("peek", seed=seed, blocks=1)
        for worker in workers:
            worker.hear()
        for number, worker in enumerate(workers):
            worker.tell("churn", seed=seed + number, for_s=for_s, first=first)

    def ask(self, name: str, do: str, **words: Any) -> Answer:
        """Have the first worker beside a node do something."""
        return self.worker(name).ask(do, **words)

    @property
    def links(self) -> Network:
        """What befalls the hosts' links."""
        assert self.network is not None
        return self.network

    def store(self, at: str, seed: int, blocks: int = BLOCKS, replicas: int = 1) -> None:
        """A worker beside this node stores a chain that nobody has, all of it there.

        A node that is new may not be ready, or its worker not know its segment: then the worker tries again.
        """
        words = {"seed": seed, "blocks": blocks, "replicas": replicas}
        answers: list[Answer] = []

        def near() -> bool:
            answers[:] = self.ask(at, "store", **words), self.ask(at, "load", **words)
            if answers[0]["stored"] == blocks and answers[1]["nodes"] == [at]:
                return True
            self.ask(at, "remove", **words)
            return False

        until(near, lambda: f"chain {seed} is stored at {at}: {answers}")

    def load(self, at: str, seed: int, blocks: int = BLOCKS, replicas: int = 1) -> None:
        """A worker beside this node loads a chain, all of it."""
        answer = self.ask(at, "load", seed=seed, blocks=blocks, replicas=replicas)
        assert answer["loaded"] == blocks, (at, answer)

    def until_loaded(self, at: str, seed: int, blocks: int = BLOCKS, replicas: int = 1) -> None:
        """The same, in the end."""
        answer: Answer = {}

        def whole() -> bool:
            answer.update(self.ask(at, "load", seed=seed, blocks=blocks, replicas=replicas))
            return answer["loaded"] == blocks

        until(whole, lambda: f"chain {seed} is loaded at {at}: {answer}")

    # -- how it is ---------------------------------------------------------------------------------------

    def states(self) -> dict[str, str]:
        """Of each node, as the Master sees it."""
        return {node["node_id"]: node["state"] for node in self._status()["nodes"]}

    def used_bytes(self) -> dict[str, int]:
        """Of each node's segments, as the Master sees it."""
        return {
            node["node_id"]: sum(int(segment["used_bytes"]) for segment in node["segments"])
            for node in self._status()["nodes"]
        }

    def until_up(self, *names: str) -> None:
        """Wait until these nodes, or all, are up and have nothing left to report."""

        def well() -> bool:
            nodes = {node["node_id"]: node for node in self._status()["nodes"]}
            return all(
                name in nodes
                and nodes[name]["state"] in ("up", "ramp")
                and nodes[name]["inventory"] in ("none", "complete")
                for name in names or self.names
            )

        until(well, "nodes are up")

    def sound(self) -> None:
        """The directory agrees with itself, and no daemon met anything that it calls an error."""
        self.ask(MASTER, "sound")
        lives = [(MASTER, self.master.lines), *((name, node.lines) for name, node in self.nodes.items())]
        bad = [
            f"{name}: {line}"
            for name, lines in [*lives, *self._former]
            for line in lines
            if '"level": "error"' in line or "Traceback" in line
        ]
        assert not bad, "\n".join(bad)

    def _status(self) -> Answer:
        return self.ask(MASTER, "status")

    # -- start and end -----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="kvpool-net-", dir="/dev/shm")
        self._memory = Path(self._folder.name)
        try:
            self.start_master()
            for name in self.names:
                self.start_node(name)
            self.until_up()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None and not self.failed:
                self.sound()
                for worker in self._workers.values():
                    worker.end()
                self._workers.clear()
        except Exception as late:
            late.add_note(self.story())
            raise
        finally:
            if error is not None:
                error.add_note(self.story())
            self._end()

    def _end(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        for node in self.nodes.values():
            node.kill()
        if hasattr(self, "master"):
            self.master.kill()
        self._folder.cleanup()

    def story(self) -> str:
        """The last lines of everybody."""
        lives = [*self._former, (MASTER, self.master.lines)]
        lives += [(name, life.lines) for life_of in (self.nodes, self._workers) for name, life in life_of.items()]
        return "\n".join(f"--- {name}\n" + "\n".join(lines[-LAST_LINES:]) for name, lines in lives if lines)


@contextmanager
def hosts(*names: str) -> Iterator[Cluster]:
    """A cluster whose Master and nodes have a host each; one more host gives no memory."""
    with Network(MASTER, FAR, *names) as network, Cluster(*names, network=network) as cluster:
        yield cluster
        network.heal()


@contextmanager
def lent(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A fixture's cluster: a test that fails shows its story."""
    failures = request.session.testsfailed
    yield cluster
    if request.session.testsfailed > failures:
        cluster.failed = True
        print(cluster.story())


class Shared:
    """Makes a cluster that tests share until one of them fails: the next one has a new one."""

    def __init__(self, make: Callable[[], AbstractContextManager[Cluster]]) -> None:
        self._make = make
        self._stack = ExitStack()
        self._cluster: Cluster | None = None

    def get(self) -> Cluster:
        if self._cluster is None or self._cluster.failed:
            self.close()
            self._cluster = self._stack.enter_context(self._make())
        return self._cluster

    def close(self) -> None:
        self._stack.close()


def until(what: Callable[[], object], about: str | Callable[[], str], limit_s: float = COME_ABOUT_S) -> None:
    """Wait for something of other processes. about: what that is, and at the end how it stands."""
    end_s = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end_s, f"not within {limit_s} s: {about() if callable(about) else about}"
        time.sleep(0.05)
