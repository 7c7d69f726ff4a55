"""What workers do: look up, load and verify, store, remove, purge, on chains that share prefixes.

The chains are more than the pool holds, so that it is full and evicts. All parts of a block are stored by one call, or
each by a call of its own, as ranks do. What ranks hold alike they also store in shares, each of them its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from kvpool_client.answers import Hit, StoreResult
from kvpool_client.devices.base import Contiguous
from kvpool_client.sdk import ROOT, Namespace, Share
from kvpool_client.store import ID_BYTES
from simulation.facts import bytes_of, chain_of, keys_of
from simulation.hub import MS, Hub
from simulation.worker_process import WorkerProcess

if TYPE_CHECKING:
    from simulation.world import World

FAMILIES: Final = 7
BLOCKS_MAX: Final = 9
RANKS: Final = (2, 3)
OPERATIONS: Final = {"read": 50, "store": 38, "share": 6, "remove": 2, "purge": 1, "peek": 3}


class Traffic:
    """What one thread of a worker does until the world says that it is enough."""

    def __init__(self, world: World, worker: WorkerProcess, number: int) -> None:
        self._world = world
        self._hub: Hub = world.hub
        self._rng = world.hub.rng
        self._worker = worker
        self._number = number
        self.doing = "connecting"
        self.finished = False

    def run(self) -> None:
        """The thread's work."""
        if not self._number:
            self._worker.connect()
        while not self._worker.spaces:
            self._hub.sleep(5 * MS)
        operations = self._world.plan.operations
        while not self._world.enough:
            self.doing = self._rng.choices(list(operations), list(operations.values()))[0]
            space = self._rng.choice(self._worker.spaces)
            getattr(self, "_" + self.doing)(space, self._chain(space))
            self.doing = "resting"
            self._hub.sleep(int(self._rng.expovariate(1 / (60 * MS))))
        self.finished = True

    def _chain(self, space: Namespace) -> bytes:
        """A chain of a family that this machine has much to do with, or of any."""
        rng = self._rng
        families = range(FAMILIES)
        family = rng.choice(families)
        if rng.random() < 0.6:
            machines = self._world.machines
            family = rng.choice(families[machines.index(self._worker.machine) :: len(machines)])
        branches = tuple(rng.choice((0, 0, 1)) if block % 3 == 2 else 0 for block in range(rng.randrange(BLOCKS_MAX)))
        return chain_of(family, branches, space.spec.key_bytes)

    # -- reading

    def _read(self, space: Namespace, chain: bytes) -> None:
        rng, world = self._rng, self._world
        blocks = len(chain) // space.spec.key_bytes
        skip = rng.randrange(blocks + 1) if rng.random() < 0.2 else 0
        dead = world.checkers.dead.get(space.id, 0)
        with space.lookup(chain, skip) as hit:
            if hit.blocks:
                world.checkers.looked_up(
                    self._worker.process, self._worker.clock, hit, space.id, space.spec.slot_bytes, dead
                )
            self._hub.note(f"lookup {_name(chain)} skip {skip}: {hit!r}")
            for _ in range(rng.choice((1, 1, 1, 2))):
                if rng.random() < 0.3:
                    self._hub.sleep(rng.randrange(rng.choice((60, 400, 400, 3_000)) * MS))
                self._load(space, hit)
                if rng.random() < 0.15:
                    space.renew(hit)

    def _load(self, space: Namespace, hit: Hit) -> None:
        spec = space.spec
        first = self._rng.randrange(spec.parts)
        parts = range(first, self._rng.randrange(first, spec.parts) + 1)
        wanted = [np.full((max(hit.blocks, 1), spec.part_bytes), 0xEE, dtype=np.uint8) for _ in parts]
        result = space.load(hit, [Contiguous(rows) for rows in wanted], parts)
        keys = keys_of(hit.chain, spec.key_bytes)[hit.skip :]
        for part, rows in zip(parts, wanted, strict=True):
            for block in range(result.blocks):
                good = bool((rows[block] == bytes_of(space.id, keys[block], part, spec.part_bytes)).all())
                self._world.checkers.loaded(good, 1, f"{_name(hit.chain)} block {hit.skip + block} part {part} {hit!r}")
        if hit.blocks:
            self._hub.note(f"load of {hit.blocks}: {result.blocks} {result.reason}")
            self._world.checkers.seen.add(f"load: {result.reason or 'whole'}")

    def _peek(self, space: Namespace, chain: bytes) -> None:
        space.peek(chain, explain=True)

    # -- writing

    def _store(self, space: Namespace, chain: bytes) -> None:
        rng = self._rng
        parts = range(space.spec.parts)
        if rng.random() < 0.4:
            for part in rng.sample(parts, len(parts)):
                self._store_parts(space, chain, range(part, part + 1))
        else:
            self._store_parts(space, chain, parts)

    def _store_parts(self, space: Namespace, chain: bytes, parts: range) -> None:
        since_us = self._hub.now_us
        sources = [Contiguous(_rows(space, chain, part)) for part in parts]
        timeout_ms = self._rng.choice((None, None, 1_000))
        result = space.store(chain, sources, parent=ROOT, parts=parts, timeout_ms=timeout_ms)
        self._hub.note(
            f"store {_name(chain)} {len(chain) // space.spec.key_bytes} blocks parts {parts.start}-{parts.stop}:"
            f" {result.stored_blocks} new, {result.existing_blocks} there {result.reason}"
        )
        self._world.checkers.seen.add(f"store: {result.reason or 'whole'}")
        self._world.checkers.seen.add("stored blocks", result.stored_blocks)
        if not result.reason:
            self._world.promises.stored(space.spec, chain, parts, since_us)

    def _share(self, space: Namespace, chain: bytes) -> None:
        """Several ranks store what they all hold. Who is not there, or is killed, leaves its share to nobody."""
        rng, since_us = self._rng, self._hub.now_us
        number = self._worker.spaces.index(space)
        if space.spec.parts > 1:
            return
        others = [one for one in self._world.live_workers() if one.spaces and one is not self._worker]
        ranks = [self._worker, *rng.sample(others, min(len(others), rng.choice(RANKS) - 1))]
        count, ident = max(rng.choice(RANKS), len(ranks)), rng.randbytes(ID_BYTES)
        blocks = len(chain) // space.spec.key_bytes
        results: list[StoreResult] = []

        def store(worker: WorkerProcess, index: int) -> None:
            """One rank."""
            own = worker.spaces[number]
            source = Contiguous(_rows(own, chain, 0))
            result = own.store(chain, source, parent=ROOT, share=Share(index, count, ident))
            self._hub.note(f"share {index} of {count} of {_name(chain)}: {result.stored_blocks} new {result.reason}")
            self._world.checkers.seen.add(f"share: {result.reason or 'whole'}")
            results.append(result)
            there = {one.existing_blocks for one in results}  # another number: of another reservation under the id
            if len(there) == 1 and sum(one.stored_blocks for one in results) + there.pop() == blocks:
                self._world.checkers.seen.add("stored in shares")
                self._world.promises.stored(own.spec, chain, range(1), since_us)

        for index, worker in enumerate(ranks[1:], 1):
            worker.process.spawn(lambda worker=worker, index=index: store(worker, index), f"rank{index}")
        store(self._worker, 0)

    # -- removing

    def _remove(self, space: Namespace, chain: bytes) -> None:
        skip = self._rng.randrange(len(chain) // space.spec.key_bytes)
        self._world.promises.removing(space.id, keys_of(chain, space.spec.key_bytes)[skip:])
        removed = space.remove(chain, skip)
        self._hub.note(f"remove {_name(chain)} skip {skip}: {removed.blocks} {removed.reason}")

    def _purge(self, space: Namespace, chain: bytes) -> None:
        checkers = self._world.checkers
        removed = space.purge()
        if not removed.reason:
            checkers.dead[space.id] = max(checkers.dead.get(space.id, 0), checkers.purged.get(space.id, 0))
        self._hub.note(f"purge: {removed.blocks} {removed.reason}")


def _rows(space: Namespace, chain: bytes, part: int) -> npt.NDArray[np.uint8]:
    spec = space.spec
    keys = keys_of(chain, spec.key_bytes)
    return np.stack([bytes_of(space.id, key, part, spec.part_bytes) for key in keys])


def _name(chain: bytes) -> str:
    return chain[-4:].hex()


def store_and_read(worker: WorkerProcess, tries: int, pause_us: int, rng: Any) -> str:
    """Store a fresh chain in every namespace and read it back; empty, or what did not work, after so many tries."""
    why = ""
    for space in worker.spaces:
        why = "not tried"
        for _ in range(tries):
            chain = rng.randbytes(2 * space.spec.key_bytes)
            parts = range(space.spec.parts)
            stored = space.store(chain, [Contiguous(_rows(space, chain, part)) for part in parts])
            with space.lookup(chain) as hit:
                rows = [np.zeros((2, space.spec.part_bytes), dtype=np.uint8) for _ in parts]
                loaded = space.load(hit, [Contiguous(one) for one in rows], parts)
            if loaded.blocks == 2 and all((rows[part] == _rows(space, chain, part)).all() for part in parts):
                why = ""
                break
            why = f"store: {stored.reason}, lookup: {hit.reason}, load: {loaded.reason}"
            worker.hub.sleep(pause_us)
        if why:
            return f"{space.spec.model}: {why}"
    return why
