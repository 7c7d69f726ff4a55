"""A worker of the chaos test: `python chaos_worker.py VERB MASTER SOCKET JOURNAL NAME SEED [CHAIN ...]`.

churn  look up, load, compare every byte, store what is missing, in a loop, until SIGTERM
keep   store chains of its own, each until the pool has all of it, and say so; then wait to be killed
check  every CHAIN that somebody kept is found and read, whole; nothing that was purged is found
purge  drop all that was churned; none of it is found

Rules
  - Every call is a line of the journal, in JSON: call, chain, start_s and end_s on the system's monotonic clock,
    blocks, reason. A line is written at once, so that it outlives a SIGKILL.
  - What a block holds follows from its key and part: whoever reads it knows every byte.
  - Nothing is caught: a call that raises, or a wrong byte, ends the process with a traceback.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvpool_client import Contiguous, KVPool
from kvpool_client.sdk import Namespace
from kvpool_proto.keys import chain_of
from kvpool_proto.namespace import NamespaceSpec
from kvpool_proto.security import PLAINTEXT

CALL_MS: Final = 500
STORE_MS: Final = 1_000
"""Of reserving and copying."""
PURGE_MS: Final = 5_000
PARTED: Final = NamespaceSpec(model="parted", block_tokens=16, part_bytes=50_000, dtype="uint8", parts=2)
WHOLE: Final = NamespaceSpec(model="whole", block_tokens=16, part_bytes=90_000, dtype="uint8", parts=1)
KEPT: Final = NamespaceSpec(model="kept", block_tokens=16, part_bytes=50_000, dtype="uint8", parts=2)
TRUNKS, BRANCHES = 4, 5
TRUNK_BLOCKS, CHAIN_BLOCKS_MAX = 6, 20
KEPT_CHAINS, KEPT_BLOCKS = 6, 8

Rows = npt.NDArray[np.uint8]
_Answer = TypeVar("_Answer")


def keys_of(spec: NamespaceSpec, owner: str, trunk: int, branch: int, blocks: int) -> bytes:
    """A chain of `blocks` blocks whose first TRUNK_BLOCKS belong to all branches of the owner's trunk."""
    tokens = [trunk] * (TRUNK_BLOCKS * spec.block_tokens) + [branch] * (CHAIN_BLOCKS_MAX * spec.block_tokens)
    return chain_of(tokens[: blocks * spec.block_tokens], spec.block_tokens, spec.key_bytes, owner)


def content(spec: NamespaceSpec, chain: bytes, part: int) -> Rows:
    """What a part of every block of the chain holds."""
    keys = [chain[at : at + spec.key_bytes] for at in range(0, len(chain), spec.key_bytes)]
    seeds = [int.from_bytes(key, "little") + part for key in keys]
    return np.stack([np.random.default_rng(seed).integers(0, 256, spec.part_bytes, np.uint8) for seed in seeds])


class Journal:
    """Lines appended to a file, each in one write."""

    def __init__(self, path: str, worker: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._worker = worker

    def say(self, **fields: Any) -> None:
        os.write(self._fd, (json.dumps({"worker": self._worker, **fields}) + "\n").encode())

    def timed(self, call: str, chain: str, made: Callable[[], _Answer], blocks: str) -> _Answer:
        """Make a call and write it down. blocks: the attribute of the answer that counts them."""
        start_s = time.monotonic()
        answer: Any = made()
        end_s = time.monotonic()
        self.say(
            call=call, chain=chain, start_s=start_s, end_s=end_s, blocks=getattr(answer, blocks), reason=answer.reason
        )
        return answer


class Worker:
    """One engine process. name: "<node>.<number>"."""

    def __init__(self, master: str, socket_path: str, journal: str, name: str, seed: int) -> None:
        self.name = name
        self.node = name.partition(".")[0]
        self.rng = random.Random(seed)
        self.journal = Journal(journal, name)
        self.pool = KVPool.connect(master, socket_path, timeout_ms=CALL_MS, name=name, security=PLAINTEXT)
        self.ended = False

    def read(self, space: Namespace, name: str, chain: bytes, skip: int, parts: range, renew: bool = False) -> int:
        """Look up and load, and compare what was loaded; the blocks that are right."""
        spec = space.spec
        with self.journal.timed("lookup", name, lambda: space.lookup(chain, skip), "blocks") as hit:
            if not hit.blocks:
                return 0
            if renew:
                space.renew(hit)
            found = [np.zeros((hit.blocks, spec.part_bytes), dtype=np.uint8) for _ in parts]
            buffers = [Contiguous(rows) for rows in found]
            loaded = self.journal.timed(
                "load", name, lambda: space.load(hit, buffers, part=parts, timeout_ms=CALL_MS), "blocks"
            )
        good = chain[skip * spec.key_bytes :][: loaded.blocks * spec.key_bytes]
        for part, rows in zip(parts, found, strict=True):
            if good and not np.array_equal(rows[: loaded.blocks], content(spec, good, part)):
                raise AssertionError(f"{self.name}: wrong bytes in part {part} of {spec.model} {name}, skip {skip}")
        return loaded.blocks

    def store(self, space: Namespace, name: str, chain: bytes, parts: range) -> Any:
        """Store what is missing of a chain; the SDK's answer."""
        sources = [Contiguous(content(space.spec, chain, part)) for part in parts]
        return self.journal.timed(
            "store", name, lambda: space.store(chain, sources, parts=parts, timeout_ms=STORE_MS), "stored_blocks"
        )

    def churn(self) -> None:
        """One chain after the other."""
        spaces = [self.pool.namespace(PARTED), self.pool.namespace(WHOLE)]
        while not self.ended:
            self.turn(self.rng.choice(spaces))
            time.sleep(0.02 * self.rng.random())

    def turn(self, space: Namespace) -> None:
        """Read a chain and store what is missing, all parts or one; now and then remove its second half.

        Most chains are the node's own: what lies on the other node cannot be loaded, it is segment_elsewhere.
        """
        rng = self.rng
        owner = self.node if rng.random() < 0.85 else "all"
        trunk, branch, blocks = rng.randrange(TRUNKS), rng.randrange(BRANCHES), rng.randint(2, CHAIN_BLOCKS_MAX)
        name = f"{owner}/{trunk}/{branch}/{blocks}"
        chain = keys_of(space.spec, owner, trunk, branch, blocks)
        skip = rng.choice((0, 0, 0, blocks // 2))
        every = range(space.spec.parts)
        one = range(part := rng.choice(every), part + 1)
        good = self.read(space, name, chain, skip, rng.choice((every, one)), renew=rng.random() < 0.1)
        if skip + good < blocks:
            self.store(space, name, chain, rng.choice((every, every, one)))
        elif rng.random() < 0.05:
            self.journal.timed("remove", name, lambda: space.remove(chain, blocks // 2), "blocks")

    def keep(self) -> None:
        """See the module's docstring."""
        space = self.pool.namespace(KEPT)
        for number in range(KEPT_CHAINS):
            name = f"{self.name}/{number}"
            chain = keys_of(KEPT, name, 0, 0, KEPT_BLOCKS)
            stored = self.store(space, name, chain, range(KEPT.parts))
            while stored.stored_blocks + stored.existing_blocks < KEPT_BLOCKS:
                time.sleep(0.05)
                stored = self.store(space, name, chain, range(KEPT.parts))
            self.journal.say(call="kept", chain=name)
            time.sleep(0.3 * self.rng.random())
        while not self.ended:
            time.sleep(0.1)

    def check(self, names: list[str]) -> None:
        """See the module's docstring."""
        space = self.pool.namespace(KEPT)
        for name in names:
            good = self.read(space, name, keys_of(KEPT, name, 0, 0, KEPT_BLOCKS), 0, range(KEPT.parts))
            if good < KEPT_BLOCKS:
                raise AssertionError(f"{good} of {KEPT_BLOCKS} blocks of {name} are left")
        self.absent()

    def purge(self) -> None:
        """See the module's docstring."""
        for spec in (PARTED, WHOLE):
            purged = self.pool.namespace(spec).purge(PURGE_MS)
            if purged.reason:
                raise AssertionError(f"not purged: {purged.reason}")
        self.absent()

    def absent(self) -> None:
        """Nothing that was churned is found."""
        for spec in (PARTED, WHOLE):
            space = self.pool.namespace(spec)
            for owner, trunk in itertools.product((self.node, "all"), range(TRUNKS)):
                found = space.lookup(keys_of(spec, owner, trunk, 0, CHAIN_BLOCKS_MAX))
                if found.blocks or found.reason != "unknown_key":
                    raise AssertionError(f"{found} of {spec.model} {owner}/{trunk}, which was purged")


def main() -> None:
    """See the module's docstring."""
    verb, master, socket_path, journal, name, seed = sys.argv[1:7]
    worker = Worker(master, socket_path, journal, name, int(seed))
    signal.signal(signal.SIGTERM, lambda *_: setattr(worker, "ended", True))
    with worker.pool:
        if verb == "check":
            worker.check(sys.argv[7:])
        else:
            {"churn": worker.churn, "keep": worker.keep, "purge": worker.purge}[verb]()


if __name__ == "__main__":
    main()
