"""What the simulation knows and the pool does not: which bytes belong to a key, where things lie in files.

Pages of 4 KiB of a segment file are the unit: slots of different sizes that overlap share pages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool_proto.geometry import PAGE_BYTES, slot_table_bytes, slots_per_slab
from kvpool_proto.namespace import NamespaceSpec
from simulation.node_process import SLAB_BYTES

Page = tuple[int, int]
"""Inode, and number of the page among the file's slabs."""

TENANT = "tight"
"""Whose quota is set."""


def specs_of(replicas: int) -> tuple[NamespaceSpec, ...]:
    """The namespaces of a world."""
    common: dict[str, Any] = {"dtype": "uint8", "block_tokens": 16, "replicas": replicas}
    return (
        NamespaceSpec(model="small", part_bytes=96, key_bytes=8, **common),
        NamespaceSpec(model="wide", part_bytes=4_300, key_bytes=12, parts=2, entry="any", tenant=TENANT, **common),
    )


@lru_cache(maxsize=1 << 14)
def bytes_of(namespace: bytes, key: bytes, part: int, part_bytes: int) -> npt.NDArray[np.uint8]:
    """The bytes of one part of the block with this key: of the same key always the same."""
    seed = namespace + key + part.to_bytes(2, "little")
    return np.frombuffer(hashlib.shake_128(seed).digest(part_bytes), dtype=np.uint8)


@lru_cache(maxsize=1 << 14)
def key_after(parent: bytes, choice: int, key_bytes: int) -> bytes:
    """The key of the block that follows `parent` by this choice of tokens."""
    return hashlib.blake2b(parent + bytes([choice]), digest_size=key_bytes).digest()


def chain_of(family: int, branches: tuple[int, ...], key_bytes: int) -> bytes:
    """A prompt's chain: a family of prompts, and which way it goes at each block."""
    key = hashlib.blake2b(b"family%d" % family, digest_size=key_bytes).digest()
    keys = [key]
    for branch in branches:
        key = key_after(key, branch, key_bytes)
        keys.append(key)
    return b"".join(keys)


def keys_of(chain: bytes, key_bytes: int) -> list[bytes]:
    """The keys of a chain."""
    return [chain[at : at + key_bytes] for at in range(0, len(chain), key_bytes)]


def pages_of(inode: int, slot: int, slot_bytes: int) -> list[Page]:
    """The pages of one slot."""
    per_slab = slots_per_slab(SLAB_BYTES, slot_bytes)
    slab, index = divmod(slot, per_slab)
    first = (slab * SLAB_BYTES + slot_table_bytes(per_slab) + index * slot_bytes) // PAGE_BYTES
    return [(inode, first + page) for page in range(slot_bytes // PAGE_BYTES)]


def pages_of_slab(inode: int, slab: int) -> list[Page]:
    """All pages of a slab."""
    pages = SLAB_BYTES // PAGE_BYTES
    return [(inode, slab * pages + page) for page in range(pages)]


@dataclass(frozen=True, slots=True)
class Place:
    """One part of one block of a chain: where it lies. stamp: whose."""

    block: int
    part: int
    segment: int
    slot: int
    stamp: int


def places_of(columns: Iterator[tuple[int, ...]]) -> list[Place]:
    """The places that extents name. columns: offset, blocks, segment, first slot, part from, part to, stride, stamp."""
    return [
        Place(offset + block, part, segment, first + block * stride + part - low, stamp)
        for offset, blocks, segment, first, low, high, stride, stamp in columns
        for block in range(blocks)
        for part in range(low, high)
    ]
