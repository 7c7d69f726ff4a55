"""A data port over a real segment, capabilities for it, and a worker elsewhere that has neither."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool_client.clock import Clock
from kvpool_client.devices.base import Buffer, Contiguous
from kvpool_client.headers import PARENT_ROOT, PEER_WRITER, Array, checks_at
from kvpool_client.logs import Log
from kvpool_client.owned_segment import OwnedSegment
from kvpool_client.peer import wire
from kvpool_client.peer.connection import Connection
from kvpool_client.peer.copies import Grant, PeerCopy, PeerRun
from kvpool_client.peer.engine import PeerEngine
from kvpool_client.peer.keyring import Keyring
from kvpool_client.peer.server import PeerServer
from kvpool_client.peer.stream import Stream, abort
from kvpool_client.peer.writes import PeerWrites
from kvpool_client.runs import Row, Run, places_of
from kvpool_client.transfer import expected_headers
from kvpool_client.transfer_engine import Copied, Term, Verify, Written
from kvpool_proto.capability import READ, WRITE, Op, make_mac, part_table
from kvpool_proto.errors import UnknownSegment
from kvpool_proto.namespace import NamespaceSpec
from unit.transfer_world import DEVICE, EPOCH, HANDLE, STAMPS, World, spec_of

KEY = b"k" * 32
FORMER_KEY = b"f" * 32
FORMER_EPOCH = EPOCH - 1
MASTER_MS = 500_000
VALID_MS = MASTER_MS + 60_000
IO_MS = 3_000
WAIT_S = 10.0
HELLO_BYTES = len(wire.pack_hello())
Bytes = npt.NDArray[np.uint8]


def until(true: Callable[[], object]) -> None:
    """Wait for another thread."""
    end_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end_s, "it never came true"
        time.sleep(0.001)


@dataclass
class HostDouble:
    """What the data port knows of its node; seen: called at each look at the epoch."""

    segment: OwnedSegment
    keyring: Keyring
    writes: PeerWrites = field(default_factory=PeerWrites)
    epoch_now: int = EPOCH
    seen: Callable[[], object] = lambda: None

    @property
    def epoch(self) -> int:
        self.seen()
        return self.epoch_now

    def segment_of(self, epoch: int, handle: int) -> OwnedSegment:
        if epoch not in (EPOCH, FORMER_EPOCH) or handle != HANDLE:
            raise UnknownSegment(f"{handle} of {epoch}")
        return self.segment


class PeerWorld:
    """The server, its log, and what a worker elsewhere has of it. Times of capabilities are world's; waits are real."""

    def __init__(self, world: World, former_key_ms: int = 30_000, **settings: Any) -> None:
        self.world = world
        self.time = Clock(now_ms=lambda: world.now_ms)
        keyring = Keyring(self.time)
        keyring.learn(FORMER_EPOCH, FORMER_KEY, MASTER_MS, 0)
        keyring.learn(EPOCH, KEY, MASTER_MS, former_key_ms)
        self.host = HostDouble(world.owner, keyring)
        self.log = io.StringIO()
        told = {"connections_max": 16, "io_timeout_ms": IO_MS, "idle_timeout_ms": 30_000} | settings
        self.server = PeerServer(
            ("127.0.0.1", 0), self.host, log=Log("debug", False, self.time, self.log), clock=self.time, **told
        )
        self.address = f"127.0.0.1:{self.server.port}"
        self.server.start()

    def close(self) -> None:
        self.server.stop()

    @property
    def refused(self) -> dict[str, int]:
        return dict(self.server.counts.refused)

    def grant(
        self,
        spec: NamespaceSpec,
        runs: Sequence[Run | Row],
        op: Op,
        part: int = 0,
        key: bytes = KEY,
        segment: int = HANDLE,
        **changes: Any,
    ) -> Grant:
        """The Master's word for these runs; changes: to the fields that it signs."""
        table = part_table(
            part,
            segment=[segment] * len(runs),
            first_slot=[run.slot for run in runs],
            blocks=[run.blocks for run in runs],
            stride=[run.stride for run in runs],
            stamp=[run.stamp for run in runs],
            part_from=[part] * len(runs),
        ).tobytes()
        grant = replace(Grant(self.address, "n", op, EPOCH, VALID_MS, spec.id, part, table, b""), **changes)
        mac = make_mac(
            key, grant.op, grant.epoch, grant.valid_until_ms, grant.namespace, grant.part, memoryview(grant.table)
        )
        return replace(grant, mac=mac)

    def copy(
        self,
        spec: NamespaceSpec,
        chain: bytes,
        runs: Sequence[Run | Row],
        buffer: Buffer,
        op: Op = READ,
        part: int = 0,
        **changes: Any,
    ) -> PeerCopy:
        """What the SDK makes of these runs of a reply, all on this node."""
        grant = self.grant(spec, runs, op, part, **changes)
        ats = [sum(run.blocks for run in runs[:index]) for index in range(len(runs))]
        wanted = [PeerRun(run.first, run.blocks, at) for run, at in zip(runs, ats, strict=True)]
        headers = expected_headers(spec, part, chain, runs, PARENT_ROOT, b"")
        headers["stamp"] = np.repeat(np.array([run.stamp for run in runs], np.uint64), [run.blocks for run in runs])
        headers["worker_id"] = PEER_WRITER
        return PeerCopy(grant, wanted, headers, buffer, spec.part_bytes, spec.slot_bytes)

    def stream(self) -> Stream:
        """A bare connection."""
        return Stream(socket.create_connection(("127.0.0.1", self.server.port)), IO_MS / 1000)

    def connection(self) -> Connection:
        stream = self.stream()
        try:
            return Connection(stream)
        except BaseException:
            stream.close()
            raise


def engine(verify: Verify = "full", connections: int = 2, piece_bytes: int = 20_000, **settings: Any) -> PeerEngine:
    told = {"connect_timeout_ms": 2_000, "io_timeout_ms": IO_MS, "clock": Clock()} | settings
    return PeerEngine(DEVICE, verify=verify, connections=connections, piece_bytes=piece_bytes, **told)


def term(limit_ms: int = 20_000) -> Term:
    clock = Clock()
    return Term(clock, clock.now_ms() + limit_ms, "time_over", EPOCH)


SPEC = spec_of(5000)
BLOCKS = 12


@dataclass
class Case:
    """BLOCKS blocks of one part in one run of slots, as a worker elsewhere writes and reads them."""

    peer: PeerWorld
    engine: PeerEngine
    chain: bytes
    run: Row
    data: Bytes

    def write(self, **changes: Any) -> Written:
        given = {name: changes.pop(name) for name in ("chain", "data", "term") if name in changes}
        buffer = DEVICE.bind(Contiguous(given.get("data", self.data)), SPEC.part_bytes, writable=False)
        chain, runs = given.get("chain", self.chain), changes.pop("runs", [self.run])
        copy = self.peer.copy(SPEC, chain, runs, buffer, **({"op": WRITE} | changes))
        return self.engine.write([copy], given.get("term", term()), lambda _: "")

    def read(self, **changes: Any) -> tuple[Copied, Bytes]:
        target = np.zeros_like(self.data)
        buffer = DEVICE.bind(Contiguous(target), SPEC.part_bytes, writable=True)
        given = {name: changes.pop(name) for name in ("chain", "term") if name in changes}
        copy = self.peer.copy(SPEC, given.get("chain", self.chain), changes.pop("runs", [self.run]), buffer, **changes)
        return self.engine.read([copy], given.get("term", term()))[0], target

    @property
    def headers(self) -> Array:
        """Of the slots, live."""
        return self.slot_run.headers(SPEC.slot_bytes)

    @property
    def slots(self) -> Bytes:
        return self.slot_run.slots(SPEC.slot_bytes)

    @property
    def slot_run(self) -> Run:
        run = self.run
        return Run(run.first, run.blocks, self.peer.world.worker, run.slot, run.stride, run.stamp)

    def told(self) -> Array:
        """The headers that a writer sends."""
        headers = expected_headers(SPEC, 0, self.chain, [self.run], PARENT_ROOT, b"")
        headers["stamp"] = self.run.stamp
        return headers

    def grant(self, op: Op, **changes: Any) -> Grant:
        return self.peer.grant(SPEC, changes.pop("runs", [self.run]), op, **changes)

    def states(self) -> set[int]:
        return set(self.headers["state"].tolist())

    def reseal(self) -> None:
        """Make the checks of spoiled headers right again."""
        self.headers["check"][:] = checks_at(self.headers.copy(), places_of([self.slot_run], SPEC.slot_bytes))


def case_of(peer: PeerWorld, made: PeerEngine, seed: int = 3, slot: int = 2) -> Case:
    """Fresh slots, nothing written."""
    peer.world.bind(SPEC.slot_bytes)
    peer.world.now_ms = 1_000
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (BLOCKS, SPEC.part_bytes), dtype=np.uint8)
    chain = rng.bytes(BLOCKS * SPEC.key_bytes)
    case = Case(peer, made, chain, Row(0, BLOCKS, HANDLE, slot, 1, next(STAMPS), 0), data)
    case.slots[:] = 0
    return case


class Relay:
    """Stands between a worker and the data port.

    change(bytes, to the data port?) answers what to pass on; None: both connections end. connections: so far.
    """

    def __init__(self, port: int, change: Callable[[bytes, bool], bytes | None]) -> None:
        self._port = port
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._sockets = [self._listener]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        for sock in self._sockets:
            abort(sock)
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        for sock in self._sockets:
            sock.close()

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            far = socket.create_connection(("127.0.0.1", self._port))
            self._sockets += [near, far]
            self._start(self._pass, near, far, True)
            self._start(self._pass, far, near, False)

    def _pass(self, source: socket.socket, target: socket.socket, there: bool) -> None:
        with suppress(OSError):
            while (got := source.recv(1 << 16)) and (changed := self._change(got, there)) is not None:
                target.sendall(changed)
        abort(source)
        abort(target)


@contextmanager
def relayed(peer: PeerWorld, change: Callable[[bytes, bool], bytes | None]) -> Iterator[Relay]:
    relay = Relay(peer.server.port, change)
    try:
        yield relay
    finally:
        relay.close()


@contextmanager
def port(talk: Callable[[socket.socket], object]) -> Iterator[str]:
    """A data port that does what it likes on each connection; its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def serve(sock: socket.socket) -> None:
        with sock:
            sock.settimeout(WAIT_S)
            with suppress(OSError):
                talk(sock)

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=serve, args=(sock,), daemon=True))
            threads[-1].start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        abort(listener)
        accepting.join(WAIT_S)
        listener.close()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


def hello(sock: socket.socket) -> None:
    """As a data port says it."""
    got = 0
    while got < HELLO_BYTES:
        got += len(sock.recv(HELLO_BYTES - got))
    sock.sendall(wire.pack_hello())
