"""A worker's process: the real SDK, on a device whose copies other processes may interrupt anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpool_client.devices.base import Buffer, Bytes, Layout
from kvpool_client.devices.cpu import CpuDevice
from kvpool_client.sdk import KVPool, Namespace
from kvpool_proto.namespace import NamespaceSpec
from kvpool_proto.security import PLAINTEXT
from simulation.hub import Process
from simulation.node_process import socket_path

if TYPE_CHECKING:
    from simulation.world import World

TIMEOUT_MS = 500
PIECE_BYTES = 16 << 10
"""Four small slots: most calls take several pieces."""
STAGED_PERMILLE = 300


class WorkerProcess:
    """One life of a worker on a machine. alone: without a node client, as on a host that gives no DRAM."""

    def __init__(
        self, world: World, name: str, machine: str, specs: tuple[NamespaceSpec, ...], *, alone: bool = False
    ) -> None:
        self.hub = world.hub
        self.machine = machine
        self.clock = world.clocks[machine]
        self.process = Process(world.hub, name, machine)
        self._world = world
        self.pool: KVPool | None = None
        self.spaces: list[Namespace] = []
        self._specs = specs
        self._socket = "" if alone else socket_path(machine)

    def connect(self) -> None:
        """Come up; from the process's own thread."""
        self.pool = KVPool.connect(
            "127.0.0.1:50051",
            self._socket,
            timeout_ms=TIMEOUT_MS,
            device=InterruptedDevice(self._world),
            piece_bytes=PIECE_BYTES,
            name=self.process.name,
            clock=self.clock.of_client(),
            security=PLAINTEXT,
        )
        self.spaces = [self.pool.namespace(spec) for spec in self._specs]


class InterruptedDevice(CpuDevice):
    """Host memory, copied in two halves of every slot; between them the process may be stopped for long."""

    def __init__(self, world: World) -> None:
        self._world = world

    def bind(self, layout: Layout, part_bytes: int, *, writable: bool) -> Any:
        """See Device."""
        return _Interrupted(super().bind(layout, part_bytes, writable=writable), part_bytes, self._world)


class _Interrupted:
    def __init__(self, buffer: Buffer, part_bytes: int, world: World) -> None:
        self._buffer = buffer
        self._part_bytes = part_bytes
        self._world = world
        self.blocks = buffer.blocks

    def gather(self, first: int, slots: Bytes) -> None:
        """See Buffer."""
        half = self._part_bytes // 2
        for index in range(len(slots)):
            row = self._row(first + index)
            for some in (slice(None, half), slice(half, self._part_bytes)):
                self._world.checkers.copying()
                slots[index, some] = row[some]
                self._world.trouble.interrupt()

    def scatter(self, first: int, slots: Bytes) -> None:
        """See Buffer."""
        half = self._part_bytes // 2
        for index in range(len(slots)):
            row = self._row(first + index)
            for some in (slice(None, half), slice(half, self._part_bytes)):
                row[some] = slots[index, some]
                self._world.trouble.interrupt()

    def rows(self, first: int, blocks: int) -> Bytes | None:
        """See Buffer."""
        return self._buffer.rows(first, blocks)

    def pieces(self, first: int, blocks: int) -> list[memoryview] | None:
        """See Buffer; at times as if it were the memory of a device."""
        return None if self._world.hub.chance(STAGED_PERMILLE) else self._buffer.pieces(first, blocks)

    def _row(self, index: int) -> Bytes:
        rows = self._buffer.rows(index, 1)
        assert rows is not None, "the simulation copies contiguous layouts"
        return rows[0]
