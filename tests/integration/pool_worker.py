"""A worker process for the tests: `python pool_worker.py MASTER SOCKET VERB BLOCKS [SEED]`; one line a result.

store: puts patterned blocks. load: gets them and compares. die: reserves, says so, and waits to be killed.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from kvpool_client import Contiguous, KVPool
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.keys import chain_of
from kvpool_proto.namespace import NamespaceSpec
from kvpool_proto.security import PLAINTEXT

PART_BYTES = 50_000
SPEC = NamespaceSpec(model="stack-test", block_tokens=16, part_bytes=PART_BYTES, dtype="uint8", parts=2)


def pattern(blocks: int, part: int, seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """What block b of a part holds: bytes that depend on seed, block and part."""
    rng = np.random.default_rng(seed * 2 + part)
    return rng.integers(0, 256, (blocks, PART_BYTES), dtype=np.uint8)


def chain(blocks: int, seed: int) -> bytes:
    """The keys of the blocks."""
    return chain_of(range(blocks * SPEC.block_tokens), SPEC.block_tokens, seed=str(seed))


def main() -> None:
    """See the module's docstring."""
    master, socket_path, verb = sys.argv[1:4]
    blocks, seed = int(sys.argv[4]), int(sys.argv[5]) if len(sys.argv) > 5 else 1
    with KVPool.connect(master, socket_path, timeout_ms=10_000, security=PLAINTEXT) as pool:
        space = pool.namespace(SPEC)
        data = [pattern(blocks, part, seed) for part in range(2)]
        if verb == "store":
            stored = space.store(chain(blocks, seed), [Contiguous(part) for part in data])
            print(stored.stored_blocks, stored.reason, flush=True)
        elif verb == "load":
            with space.lookup(chain(blocks, seed)) as hit:
                found = [np.zeros_like(part) for part in data]
                loaded = space.load(hit, [Contiguous(part) for part in found], part=range(2))
            good = loaded.blocks
            same = all(np.array_equal(a[:good], b[:good]) for a, b in zip(found, data, strict=True))
            print(good, hit.reason or loaded.reason, same, flush=True)
        elif verb == "die":
            attached = pool._context.link.attachment()  # the test stands in for a copy that never ends
            request = pb.ReserveRequest(
                namespace_id=space.id,
                reservation_id=os.urandom(16),
                parent_kind=pb.PARENT_ROOT,
                chain=chain(blocks, seed),
                part_to=2,
                nodes=[attached.node_id],
                worker_id=attached.worker_id,
            )
            print(pool._context.master.pool.Reserve(request, timeout=10).answered_blocks, flush=True)
            time.sleep(600)


if __name__ == "__main__":
    main()
