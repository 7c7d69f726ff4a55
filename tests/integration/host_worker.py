"""A worker that tests talk to: `python -m integration.host_worker MASTER SOCKET NAME`; a line of JSON in, one out.

in   {"do": a method of Worker, its parameters ...}
out  what the method answers

Rules
  - What a block holds follows from its key and part: whoever reads it knows every byte.
  - Nothing is caught: a call of the SDK that raises, or a wrong byte, ends the process with a traceback.
  - SOCKET may be empty: a host without a node client.
  - Every answer has `ms`, the longest single call of the SDK in it.
"""

from __future__ import annotations

import json
import random
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from functools import cached_property
from typing import Any, Final, TypeVar

import grpc
import numpy as np
from google.protobuf.json_format import MessageToDict

from integration.chaos_worker import content
from kvpool_client import Contiguous, KVPool
from kvpool_client.sdk import Namespace
from kvpool_proto import pool_pb2 as pb
from kvpool_proto import pool_pb2_grpc as pb_grpc
from kvpool_proto.keys import chain_of
from kvpool_proto.namespace import NamespaceSpec

CALL_MS: Final = 1_000
"""Of lookup and load, each."""
STORE_MS: Final = 2_000
"""Of reserving and copying."""
ADMIN_S: Final = 10.0
PART_BYTES: Final = 50_000
PARTS: Final = 2
BLOCK_BYTES: Final = PARTS * PART_BYTES
BLOCK_ROOM: Final = PARTS * (52 << 10)
"""What a block takes in a segment: slots are multiples of 4 KiB."""
CHURN_CHAINS, CHURN_BLOCKS_MAX = 24, 16

Answer = dict[str, Any]
_Made = TypeVar("_Made")


def spec_of(replicas: int) -> NamespaceSpec:
    """The namespace of the tests, or another one that wants so many copies."""
    model = "network-test" if replicas < 2 else f"network-test-{replicas}"
    return NamespaceSpec(
        model=model, block_tokens=16, part_bytes=PART_BYTES, dtype="uint8", parts=PARTS, replicas=replicas
    )


def chain(seed: int, blocks: int) -> bytes:
    """Equal seeds share their leading blocks."""
    return chain_of(range(blocks * 16), 16, seed=str(seed))


class Worker:
    """Each public method is something to be told."""

    def __init__(self, master: str, socket_path: str, name: str) -> None:
        self._master = master
        self._socket_path = socket_path
        self._name = name
        self._longest_ms = 0.0

    # -- the SDK -----------------------------------------------------------------------------------------

    def store(self, seed: int, blocks: int, replicas: int = 1) -> Answer:
        """Store a chain: blocks stored, existing, being written by others."""
        space, keys = self._space(replicas), chain(seed, blocks)
        sources = [Contiguous(content(space.spec, keys, part)) for part in range(PARTS)]
        done = self._timed("store", lambda: space.store(keys, sources, timeout_ms=STORE_MS))
        return {
            "stored": done.stored_blocks,
            "existing": done.existing_blocks,
            "being_written": done.being_written_blocks,
            "reason": done.reason,
        }

    def load(self, seed: int, blocks: int, replicas: int = 1) -> Answer:
        """Look a chain up, load what is found and compare every byte: blocks found, and loaded; nodes they lie on."""
        space, keys = self._space(replicas), chain(seed, blocks)
        with self._timed("lookup", lambda: space.lookup(keys)) as hit:
            if not hit.blocks:
                return {"found": 0, "loaded": 0, "reason": hit.reason, "nodes": []}
            found = [np.zeros((hit.blocks, PART_BYTES), dtype=np.uint8) for _ in range(PARTS)]
            layouts = [Contiguous(rows) for rows in found]
            loaded = self._timed("load", lambda: space.load(hit, layouts, part=range(PARTS), timeout_ms=CALL_MS))
        right = keys[: loaded.blocks * space.spec.key_bytes]
        for part, rows in enumerate(found):
            if right and not np.array_equal(rows[: loaded.blocks], content(space.spec, right, part)):
                raise AssertionError(f"{self._name}: wrong bytes in part {part} of chain {seed}")
        nodes = sorted({holder.node_id for holder in hit.holders.by_segment.values()})
        return {"found": hit.blocks, "loaded": loaded.blocks, "reason": loaded.reason or hit.reason, "nodes": nodes}

    def peek(self, seed: int, blocks: int, replicas: int = 1) -> Answer:
        """What a lookup would find."""
        found = self._space(replicas).peek(chain(seed, blocks), timeout_ms=CALL_MS)
        return {"found": found.blocks, "reason": found.reason}

    def remove(self, seed: int, blocks: int, replicas: int = 1) -> Answer:
        """Hide a chain."""
        return {"removed": self._space(replicas).remove(chain(seed, blocks), timeout_ms=STORE_MS).blocks}

    def churn(self, seed: int, for_s: float, first: int) -> Answer:
        """Load chains at random, from the first on, and store what is missing; counts and reasons of all calls."""
        rng, end_s = random.Random(seed), time.monotonic() + for_s
        counts: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        while time.monotonic() < end_s:
            number, blocks = first + rng.randrange(CHURN_CHAINS), rng.randint(1, CHURN_BLOCKS_MAX)
            read = self.load(number, blocks)
            counts["loaded"] += read["loaded"]
            reasons[f"load {read['reason']}"] += 1
            if read["loaded"] < blocks:
                stored = self.store(number, blocks)
                counts["stored"] += stored["stored"]
                reasons[f"store {stored['reason']}"] += 1
        return {"loaded": counts["loaded"], "stored": counts["stored"], "reasons": reasons}

    def stats(self) -> Answer:
        """The SDK's own counters, those that are whole numbers."""
        stats = self._pool.stats()
        return {item.name: count for item in fields(stats) if isinstance(count := getattr(stats, item.name), int)}

    # -- the operator ------------------------------------------------------------------------------------

    def status(self) -> Answer:
        """The Master's StatusReply; numbers of 64 bits are strings."""
        reply = self._admin.Status(pb.StatusRequest(), timeout=ADMIN_S)
        return MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)

    def sound(self) -> Answer:
        """Every index of the Master's directory agrees, else an error."""
        self._admin.CheckInvariants(pb.CheckInvariantsRequest(), timeout=ADMIN_S)
        return {}

    def drain(self, node: str) -> Answer:
        self._admin.Drain(pb.DrainRequest(node_id=node), timeout=ADMIN_S)
        return {}

    def undrain(self, node: str) -> Answer:
        self._admin.Undrain(pb.UndrainRequest(node_id=node), timeout=ADMIN_S)
        return {}

    def get(self, url: str) -> Answer:
        """The lines of a page, as this host sees it."""
        with urllib.request.urlopen(url, timeout=ADMIN_S) as reply:
            return {"lines": reply.read().decode().splitlines()}

    # -- between the lines -------------------------------------------------------------------------------

    def answer(self, line: str) -> str:
        """Do what a line says."""
        told = json.loads(line)
        self._longest_ms = 0.0
        made: Answer = getattr(self, told.pop("do"))(**told)
        return json.dumps(made | {"ms": self._longest_ms})

    def end(self) -> None:
        """Let go of what was used."""
        if "_pool" in self.__dict__:
            self._pool.close()

    @cached_property
    def _pool(self) -> KVPool:
        return KVPool.connect(self._master, self._socket_path, timeout_ms=CALL_MS, name=self._name)

    @cached_property
    def _admin(self) -> Any:
        return pb_grpc.AdminStub(grpc.insecure_channel(self._master))

    def _space(self, replicas: int) -> Namespace:
        return self._pool.namespace(spec_of(replicas))

    def _timed(self, call: str, made: Callable[[], _Made]) -> _Made:
        """Make a call of the SDK. It ends within its time and a generous margin, whatever befalls the network."""
        began_s = time.monotonic()
        answer = made()
        took_ms = 1000 * (time.monotonic() - began_s)
        self._longest_ms = max(self._longest_ms, took_ms)
        if took_ms > LIMIT_MS[call]:
            raise AssertionError(f"{self._name}: {call} took {took_ms:.0f} ms, {LIMIT_MS[call]} at most: {answer}")
        return answer


MARGIN_MS: Final = 2_000
"""Many processes share two cores."""
LIMIT_MS: Final = {
    "lookup": CALL_MS + MARGIN_MS,
    "load": CALL_MS + 500 + MARGIN_MS,  # it may first ask the node client
    "store": STORE_MS + CALL_MS + 500 + MARGIN_MS,  # and it commits behind its time
}


def main() -> None:
    """See the module's docstring."""
    worker = Worker(*sys.argv[1:4])
    for line in sys.stdin:
        print(worker.answer(line), flush=True)
    worker.end()


if __name__ == "__main__":
    main()
