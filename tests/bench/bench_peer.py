"""How fast bytes move through a data port: `python tests/bench/bench_peer.py [MiB]`.

3 MiB slots over loopback, one worker, the data port in a process of its own. Every ratio is against a plain Python
socket pair that moves the same bytes between the same memory, in the same run: sendall() of slots, recv_into() them.
iperf3 stands beside them where it is installed, TLS where the package `cryptography` is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.bench_copy import MIB, SLAB_BYTES, aligned
from bench.report import Row, row, show
from kvpool_client.clock import SYSTEM
from kvpool_client.devices.base import Contiguous, Layout, Rows
from kvpool_client.devices.cpu import CpuDevice
from kvpool_client.headers import PARENT_ROOT, PEER_WRITER
from kvpool_client.logs import Log
from kvpool_client.owned_segment import OwnedSegment, SegmentPlan
from kvpool_client.peer.copies import Grant, PeerCopy, PeerRun
from kvpool_client.peer.engine import PeerEngine
from kvpool_client.peer.keyring import Keyring
from kvpool_client.peer.server import PeerServer
from kvpool_client.peer.writes import PeerWrites
from kvpool_client.transfer import PIECE_BYTES, expected_headers
from kvpool_client.transfer_engine import Term, Verify
from kvpool_proto.capability import READ, WRITE, Op, make_mac, part_table
from kvpool_proto.geometry import slots_per_slab
from kvpool_proto.namespace import NamespaceSpec
from kvpool_proto.tls import Tls

SLOT_BYTES = 3 * MIB
PER_SLAB = slots_per_slab(SLAB_BYTES, SLOT_BYTES)
ROUNDS = 7
ROW_BYTES = 48 << 10
EPOCH, KEY = 7, b"k" * 32
SPEC = NamespaceSpec(model="bench", dtype="uint8", block_tokens=16, part_bytes=SLOT_BYTES)
STAMPS = count((EPOCH << 32) + 1)
NEVER_MS = 1 << 50


class Host:
    """The node whose data port it is."""

    def __init__(self, directory: Path, blocks: int) -> None:
        slabs = -(-blocks // PER_SLAB)
        plan = SegmentPlan(
            directory=directory, node_id="bench", index=0, size_bytes=slabs * SLAB_BYTES, slab_bytes=SLAB_BYTES
        )
        self.segment = OwnedSegment.create(plan, incarnation=1, prefault_threads=1, progress=lambda _: None)
        for slab in range(slabs):
            self.segment.bind_slab(slab, SLOT_BYTES)
        self.epoch = EPOCH
        self.writes = PeerWrites()
        self.keyring = Keyring(SYSTEM)
        self.keyring.learn(EPOCH, KEY, 0, 0)

    def segment_of(self, epoch: int, handle: int) -> OwnedSegment:
        """There is but one."""
        return self.segment


def serve(directory: Path, blocks: int) -> None:
    """Be that node until stdin ends; says its ports."""
    host = Host(directory, blocks)
    log = Log("warning", False, SYSTEM, sys.stderr)
    ports: dict[str, int] = {}
    servers: list[PeerServer] = []
    for name, tls in (("plain", None), ("tls", tls_in(directory))):
        if name == "plain" or tls is not None:
            server = PeerServer(
                ("127.0.0.1", 0), host, connections_max=16, io_timeout_ms=5_000, idle_timeout_ms=60_000,
                wrap=None if tls is None else tls.wrap_server, log=log
            )  # fmt: skip
            server.start()
            servers.append(server)
            ports[name] = server.port
    listener = socket.create_server(("127.0.0.1", 0))
    ports["raw"] = listener.getsockname()[1]
    slots = [host.segment.slots(slot, 1, SLOT_BYTES)[0].data for slot in range(blocks)]
    threading.Thread(target=serve_raw, args=(listener, slots), daemon=True).start()
    print(json.dumps(ports), flush=True)
    sys.stdin.read()
    for server in servers:
        server.stop()
    host.segment.unlink()
    host.segment.close()


def serve_raw(listener: socket.socket, slots: list[memoryview]) -> None:
    """The other end of the plain pair: all slots there or back, as one byte asks."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while asked := connection.recv(1):
        for slot in slots:
            connection.sendall(slot) if asked == b"r" else fill(connection, slot)
        if asked == b"w":
            connection.sendall(b".")


def fill(connection: socket.socket, slot: memoryview) -> None:
    """recv_into() until it is full."""
    while len(slot):
        slot = slot[connection.recv_into(slot) :]


def tls_in(directory: Path) -> Tls | None:
    """Certificates made once in this folder; None without the package for that."""
    try:
        from unit.tls_world import Pki
    except ImportError:
        return None
    folder = directory / "certs"
    if not folder.exists():
        Pki(folder).issue("node")
    names = {name: str(folder / file) for name, file in (("ca", "ca.pem"), ("cert", "node.pem"), ("key", "node.key"))}
    from kvpool_proto.security import Security

    return Tls(Security(**names), print, SYSTEM.now_ms)


@dataclass(frozen=True, slots=True)
class Case:
    """One way to ask. port: "plain" or "tls"."""

    verify: Verify = "off"
    connections: int = 1
    port: str = "plain"
    rows: bool = False
    target: float | None = None

    def __str__(self) -> str:
        words = [f"verify {self.verify}", f"{self.connections} connection{'s' if self.connections > 1 else ''}"]
        words += [f"rows of {ROW_BYTES >> 10} KiB"] if self.rows else []
        words += ["TLS"] if self.port == "tls" else []
        return ", ".join(words)


class Worker:
    """The worker, with as many blocks in its memory as lie in the node's."""

    def __init__(self, blocks: int, ports: dict[str, int], tls: Tls | None) -> None:
        self.blocks = blocks
        self._ports = ports
        self._tls = tls
        self._flat = aligned(blocks * SLOT_BYTES)
        self._chain = np.random.default_rng(1).bytes(blocks * SPEC.key_bytes)
        self._stamp = 0
        self._raw = socket.create_connection(("127.0.0.1", ports["raw"]))
        self._raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._views = [one.data for one in self._flat.reshape(blocks, SLOT_BYTES)]

    def raw(self, op: Op) -> None:
        """All blocks through the plain pair."""
        self._raw.sendall(b"r" if op == READ else b"w")
        for view in self._views:
            fill(self._raw, view) if op == READ else self._raw.sendall(view)
        if op == WRITE:
            assert self._raw.recv(1) == b"."

    def engine(self, case: Case) -> PeerEngine:
        """As the SDK makes it."""
        return PeerEngine(
            CpuDevice(),
            verify=case.verify,
            connections=case.connections,
            piece_bytes=PIECE_BYTES,
            connect_timeout_ms=2_000,
            io_timeout_ms=5_000,
            wrap=self._tls.wrap_client if self._tls is not None and case.port == "tls" else None,
            clock=SYSTEM,
        )

    def copy(self, case: Case, op: Op) -> PeerCopy:
        """All blocks; a store's under a stamp of its own, which the loads after it name."""
        if op == WRITE:
            self._stamp = next(STAMPS)
        starts = range(0, self.blocks, PER_SLAB)
        lengths = [min(PER_SLAB, self.blocks - start) for start in starts]
        n = len(lengths)
        table = part_table(
            0, segment=[0] * n, first_slot=list(starts), blocks=lengths, stride=[1] * n, stamp=[self._stamp] * n,
            part_from=[0] * n
        ).tobytes()  # fmt: skip
        mac = make_mac(KEY, op, EPOCH, NEVER_MS, SPEC.id, 0, table)
        address = f"127.0.0.1:{self._ports[case.port]}"
        grant = Grant(address, "bench", op, EPOCH, NEVER_MS, SPEC.id, 0, table, mac)
        runs = [PeerRun(start, length, start) for start, length in zip(starts, lengths, strict=True)]
        headers = expected_headers(SPEC, 0, self._chain, runs, PARENT_ROOT, b"")
        headers["stamp"], headers["worker_id"] = self._stamp, PEER_WRITER
        layers = SLOT_BYTES // ROW_BYTES
        layout: Layout = Contiguous(self._flat.reshape(self.blocks, SLOT_BYTES))
        if case.rows:
            ids = np.random.default_rng(2).permutation(self.blocks)
            layout = Rows(list(self._flat.reshape(layers, self.blocks, ROW_BYTES)), ids)
        buffer = CpuDevice().bind(layout, SLOT_BYTES, writable=True)
        return PeerCopy(grant, runs, headers, buffer, SLOT_BYTES, SLOT_BYTES)


def transfer(engine: PeerEngine, copy: PeerCopy, blocks: int) -> None:
    """All of it."""
    term = Term(SYSTEM, SYSTEM.now_ms() + 60_000, "expired")
    if copy.grant.op == WRITE:
        written = engine.write([copy], term, lambda _: "")
        assert written.blocks == [blocks], written.reason
    else:
        (copied,) = engine.read([copy], term)
        assert copied.blocks == blocks, copied.reason


def rates(worker: Worker, cases: list[Case]) -> dict[tuple[str, Op], float]:
    """GB/s of the fastest of ROUNDS rounds, by name and direction; "raw": the plain pair. They take turns."""
    best_s: dict[tuple[str, Op], float] = {}
    engines = [worker.engine(case) for case in cases]

    def time_it(name: str, op: Op, step: Callable[[], None]) -> None:
        started_s = time.perf_counter()
        step()
        best_s[name, op] = min(best_s.get((name, op), float("inf")), time.perf_counter() - started_s)

    ops: tuple[Op, Op] = (WRITE, READ)
    for _ in range(ROUNDS):
        for op in ops:
            time_it("raw", op, lambda op=op: worker.raw(op))
        for case, engine in zip(cases, engines, strict=True):
            for op in ops:
                copy = worker.copy(case, op)
                time_it(str(case), op, lambda engine=engine, copy=copy: transfer(engine, copy, worker.blocks))
    for engine in engines:
        engine.close()
    return {name: worker.blocks * SLOT_BYTES / seconds / 1e9 for name, seconds in best_s.items()}


@contextmanager
def node(directory: Path, blocks: int) -> Iterator[dict[str, int]]:
    """The node in a process of its own; its ports."""
    command = [sys.executable, __file__, "--serve", str(directory), str(blocks * SLOT_BYTES // MIB)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait()


def iperf3_gb_per_s() -> float | None:
    """One stream over loopback for two seconds; None where it is not installed."""
    if shutil.which("iperf3") is None:
        return None
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    server = subprocess.Popen(["iperf3", "-s", "-1", "-B", "127.0.0.1", "-p", port], stdout=subprocess.DEVNULL)
    try:
        time.sleep(0.3)
        command = ["iperf3", "-c", "127.0.0.1", "-p", port, "-t", "2", "-J"]
        done: Any = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        return done["end"]["sum_received"]["bits_per_second"] / 8e9
    finally:
        server.terminate()
        server.wait()


def figures(total_bytes: int) -> list[Row]:
    """All of them. Needs about 2.1 x total_bytes of memory, half of it in /dev/shm."""
    blocks = total_bytes // SLOT_BYTES
    cases = [Case(verify, lanes) for verify in ("off", "full") for lanes in (1, 2, 4)]
    cases[0] = Case(target=0.9)
    cases.append(Case(rows=True))
    with tempfile.TemporaryDirectory(prefix="kvpool-bench-", dir="/dev/shm") as folder:
        tls = tls_in(Path(folder))
        cases += [Case("off", lanes, "tls") for lanes in (1, 2, 4)] if tls is not None else []
        with node(Path(folder), blocks) as ports:
            worker = Worker(blocks, ports, tls)
            found = rates(worker, cases)
    rows = [
        row(f"plain socket pair, {name}", found["raw", op], "GB/s") for op, name in ((WRITE, "there"), (READ, "back"))
    ]
    iperf3 = iperf3_gb_per_s()
    rows += [row("iperf3, one stream", iperf3, "GB/s")] if iperf3 is not None else []
    for case in cases:
        for op, name in ((WRITE, "store"), (READ, "load")):
            rows.append(row(f"peer {name}, {case}", found[str(case), op], "GB/s"))
            share = found[str(case), op] / found["raw", op]
            rows.append(row(f"peer {name}, {case}, share of the plain pair", share, "x", at_least=case.target))
    if tls is None:
        print("no TLS: the package cryptography is not installed")
    return rows


def run() -> list[Row]:
    """The figures of `make bench`."""
    return figures(192 * MIB)


def main() -> None:
    """Measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mib", nargs="?", type=int, default=192)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve, given.mib * MIB // SLOT_BYTES)
        return
    print(show(figures(given.mib * MIB)))


if __name__ == "__main__":
    main()
