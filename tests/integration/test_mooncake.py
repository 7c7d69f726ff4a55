"""mooncake's own package over loopback TCP: a node and readers in processes of their own, and peers that stop."""

from __future__ import annotations

import importlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from integration.mooncake_node import BLOCKS, CHAIN, HANDLE, HOST, ROWS, SPEC, pattern
from kvpool_client.clock import SYSTEM
from kvpool_client.devices.base import Bytes, Contiguous
from kvpool_client.devices.cpu import CpuDevice
from kvpool_client.engines.mooncake import Exposure, MooncakeEngine
from kvpool_client.engines.mooncake_package import start
from kvpool_client.peer.copies import Grant, PeerCopy
from kvpool_client.transfer_engine import Copied, Progress, Term, Written
from unit.mooncake_double import peer_copy

try:
    importlib.import_module("mooncake.engine")
except ImportError as missing:
    pytest.skip(f"mooncake cannot be loaded: {missing}", allow_module_level=True)

NODE = Path(__file__).with_name("mooncake_node.py")
DEVICE = CpuDevice()


class Node:
    """A process that offers blocks."""

    def __init__(self, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, NODE, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        server, base = self.answer().split()
        self.exposure = Exposure(server, {HANDLE: int(base)})

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


class NoDataPorts:
    """Nothing can be read or written there."""

    def read(self, copies: Sequence[PeerCopy], term: Term) -> list[Copied]:
        return [Copied(0, "data_port")] * len(copies)

    def write(self, copies: Sequence[PeerCopy], term: Term, progress: Progress) -> Written:
        return Written([0] * len(copies), "data_port")

    def close(self) -> None:
        pass


class Reader:
    """This process's engine."""

    def __init__(self) -> None:
        self.offers: dict[str, Exposure] = {}
        self._engine = MooncakeEngine(DEVICE, NoDataPorts(), self._where, host=HOST, piece_bytes=4 * SPEC.slot_bytes)

    def read(self, exposure: Exposure, target: Bytes, timeout_ms: int = 30_000) -> tuple[int, str]:
        self.offers["now"] = exposure
        copy = peer_copy(SPEC, CHAIN, ROWS, DEVICE.bind(Contiguous(target), SPEC.part_bytes, writable=True))
        (copied,) = self._engine.read([copy], Term(SYSTEM, SYSTEM.now_ms() + timeout_ms, "time_over"))
        return copied.blocks, copied.reason

    def _where(self, grant: Grant) -> Exposure | None:
        return self.offers.get("now")


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.stop()


@pytest.fixture
def target() -> Bytes:
    return np.zeros((BLOCKS, SPEC.part_bytes), dtype=np.uint8)


def test_blocks_of_another_process(reader: Reader, node: Node, target: Bytes) -> None:
    assert reader.read(node.exposure, target) == (BLOCKS, "")
    assert (target == pattern()).all()


def test_spoiled_bytes_are_a_miss(reader: Reader, node: Node, target: Bytes) -> None:
    node.tell("spoil 12")
    assert node.answer() == "spoiled\n"
    assert reader.read(node.exposure, target) == (12, "verify_failed")
    assert (target[:12] == pattern()[:12]).all()
    assert not target[12:].any()


def test_a_stranger_cannot_write(reader: Reader, node: Node, target: Bytes) -> None:
    """Nor ends the node's process: the mapping that it offers is read-only."""
    stranger: Any = start(HOST, "tcp")
    mine = np.full(2 << 20, 7, dtype=np.uint8)
    base = node.exposure.bases[HANDLE]
    assert stranger.transfer_sync_write(node.exposure.server, mine.ctypes.data, base, len(mine)) != 0
    assert reader.read(node.exposure, target) == (BLOCKS, "")
    assert (target == pattern()).all()


def test_a_node_that_stops_and_goes_on(reader: Reader, node: Node, target: Bytes) -> None:
    """The call ends by its term; what comes late stays out of its buffer; afterwards all is well."""
    assert reader.read(node.exposure, target) == (BLOCKS, "")
    node.process.send_signal(signal.SIGSTOP)
    target.fill(0)
    assert reader.read(node.exposure, target, timeout_ms=300) == (0, "time_over")
    assert reader.read(node.exposure, target, timeout_ms=300) == (0, "data_port")
    node.process.send_signal(signal.SIGCONT)
    late = SYSTEM.now_ms() + 30_000
    copied = (0, "data_port")
    while copied[1] == "data_port" and SYSTEM.now_ms() < late:
        assert not target.any()
        copied = reader.read(node.exposure, target)
    assert copied == (BLOCKS, "")
    assert (target == pattern()).all()


def test_a_node_that_is_gone(reader: Reader, node: Node, target: Bytes) -> None:
    assert reader.read(node.exposure, target) == (BLOCKS, "")
    node.stop()
    assert reader.read(node.exposure, target) == (0, "data_port")


def test_a_node_that_never_answers_holds_nobody_up(reader: Reader, node: Node, target: Bytes) -> None:
    with socket.create_server((HOST, 0)) as silent:
        nobody = Exposure(f"{HOST}:{silent.getsockname()[1]}", {HANDLE: 4096})
        assert reader.read(nobody, target, timeout_ms=300) == (0, "time_over")
        assert reader.read(node.exposure, target) == (BLOCKS, "")


def test_an_offer_ends(reader: Reader, node: Node, target: Bytes) -> None:
    node.tell("end")
    assert node.process.wait(30) == 0
    assert reader.read(node.exposure, target) == (0, "data_port")
