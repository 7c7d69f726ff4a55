"""A real segment for tests of transfer.py and runs.py, and blocks that lie in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count as numbers
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool_client.clock import Clock
from kvpool_client.devices.base import Bytes, Contiguous
from kvpool_client.devices.cpu import CpuDevice
from kvpool_client.headers import checks_at
from kvpool_client.owned_segment import OwnedSegment
from kvpool_client.runs import Run, places_of
from kvpool_client.segment import AttachedSegment
from kvpool_client.transfer import LocalEngine, PartCopy, Term
from kvpool_proto.namespace import NamespaceSpec

SLAB_BYTES = 256 << 10
SLABS = 32
HANDLE = 7
EPOCH = 40
WRITER = 4242
DEVICE = CpuDevice()
STAMPS = numbers((EPOCH << 32) + 1)


@dataclass
class World:
    """A segment seen by its owner and by a worker, and a time that only tests move."""

    owner: OwnedSegment
    worker: AttachedSegment
    now_ms: int = 1_000

    @property
    def clock(self) -> Clock:
        return Clock(now_ms=lambda: self.now_ms)

    def term(self, deadline_ms: int = 2_000) -> Term:
        return Term(self.clock, deadline_ms, "time_over", EPOCH)

    def bind(self, slot_bytes: int) -> None:
        self.owner.identify(incarnation=1, epoch=EPOCH)
        for slab in range(SLABS):
            self.owner.bind_slab(slab, slot_bytes)


def spec_of(part_bytes: int, parts: int = 1) -> NamespaceSpec:
    return NamespaceSpec(model="m", dtype="uint8", block_tokens=16, part_bytes=part_bytes, parts=parts, key_bytes=12)


def chain_of(spec: NamespaceSpec, blocks: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).bytes(blocks * spec.key_bytes)


def run_at(world: World, blocks: int, slot: int = 0, first: int = 0) -> Run:
    return Run(first, blocks, world.worker, slot, 1, next(STAMPS))


def part_copy(
    spec: NamespaceSpec, chain: bytes, runs: list[Run], buffer: Any, part: int = 0, worker_id: int = 0
) -> PartCopy:
    return PartCopy(spec, part, chain, runs, buffer, worker_id=worker_id)


def written(engine: LocalEngine, world: World, copies: Sequence[PartCopy]) -> list[int]:
    done = engine.write(copies, world.term(), lambda _: "")
    assert (done.reason, done.confirmed) == ("", True)
    return done.blocks


@dataclass
class Spy:
    """A buffer that does something after each run it copied."""

    array: Bytes
    then: Callable[[], None]
    calls: list[int] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        return len(self.array)

    def gather(self, first: int, slots: Bytes) -> None:
        slots[:, : self.array.shape[1]] = self.array[first : first + len(slots)]
        self.calls.append(first)
        self.then()

    def scatter(self, first: int, slots: Bytes) -> None:
        self.array[first : first + len(slots)] = slots[:, : self.array.shape[1]]
        self.calls.append(first)
        self.then()

    def rows(self, first: int, blocks: int) -> Bytes | None:
        return None


SPEC = spec_of(5000)
BLOCKS = 12


@dataclass
class Stored:
    """BLOCKS blocks in one run, read back in pieces of four blocks."""

    world: World
    chain: bytes
    run: Run
    data: npt.NDArray[np.uint8]
    engine: LocalEngine

    def read(self, **changes: Any) -> tuple[Any, npt.NDArray[np.uint8]]:
        target = np.zeros_like(self.data)
        buffer = changes.get("buffer") or DEVICE.bind(Contiguous(target), SPEC.part_bytes, writable=True)
        spec, part = changes.get("spec", SPEC), changes.get("part", 0)
        copy = part_copy(spec, changes.get("chain", self.chain), [self.run], buffer, part)
        return self.engine.read([copy], self.world.term())[0], target

    @property
    def headers(self) -> Any:
        return self.run.headers(SPEC.slot_bytes)

    def reseal(self) -> None:
        self.headers["check"][:] = checks_at(self.headers.copy(), places_of([self.run], SPEC.slot_bytes))
