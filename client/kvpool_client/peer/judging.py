"""What headers and bytes that crossed a connection say: are they the blocks that were meant? No I/O."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool_client.headers import COMMITTED, SLOT_HEADER, U64, Array
from kvpool_client.peer.wire import HASH_BYTES

Flags = npt.NDArray[np.bool_]


def held(found: Array, namespace: bytes, part: int, part_bytes: int, stamps: U64) -> Flags:
    """Which headers are of committed blocks of this namespace, part and length, under these stamps."""
    return (
        (found["state"] == COMMITTED)
        & (found["stamp"] == stamps)
        & (found["namespace"] == np.void(namespace))
        & (found["part"] == part)
        & (found["length_bytes"] == part_bytes)
    )


def why_not(found: Array, stamp: int, sound: bool) -> str:
    """The reason that a header (one element) is not the one that was meant, under this stamp."""
    if found["state"] != COMMITTED or found["stamp"] != stamp:
        return "stale_stamp"
    return "wrong_block" if sound else "torn_header"


def agree(found: Array, wanted: Array) -> tuple[int, str]:
    """How many leading headers name the blocks of `wanted` under their stamps, and why the next does not."""
    good = np.ones(len(found), dtype=np.bool_)
    for name in ("state", "stamp", "namespace", "part", "length_bytes", "key_bytes", "key"):
        good &= found[name] == wanted[name]
    if good.all():
        return len(found), ""
    first = int(np.argmin(good))
    return first, why_not(found[first], int(wanted["stamp"][first]), sound=True)


def words(headers: Array) -> U64:
    """A view of contiguous headers to compare whole ones by, (n, 16)."""
    return headers.view(np.uint64).reshape(len(headers), SLOT_HEADER.itemsize // 8)


def same(one: Array, other: Array) -> Flags:
    """Which headers are equal, bit by bit."""
    return (words(one) == words(other)).all(axis=1)


def portions(pieces: Sequence[memoryview], part_bytes: int) -> list[list[memoryview]]:
    """The pieces in groups of whole blocks, about HASH_BYTES each, a block at least; they are as for sums_of."""
    size_bytes = max(1, HASH_BYTES // part_bytes) * part_bytes
    groups: list[list[memoryview]] = []
    room = 0
    for piece in pieces:
        while len(piece):
            if not room:
                groups.append([])
                room = size_bytes
            groups[-1].append(piece[:room])
            piece, room = piece[room:], room - len(groups[-1][-1])
    return groups


def sums_of(pieces: Sequence[memoryview], part_bytes: int, every: int = 1, first: int = 0) -> U64:
    """XXH3-64 of blocks first, first + every, ...; 0 for the others.

    pieces: the blocks' bytes, part_bytes each; a piece holds whole blocks, or whole pieces make up a block.
    """
    sums: list[int] = []
    state, room = xxhash.xxh3_64(), part_bytes
    for piece in pieces:
        if len(piece) >= part_bytes:
            for at in range(0, len(piece), part_bytes):
                chosen = (len(sums) - first) % every == 0
                sums.append(xxhash.xxh3_64_intdigest(piece[at : at + part_bytes]) if chosen else 0)
            continue
        chosen = (len(sums) - first) % every == 0
        if chosen:
            state.update(piece)
        room -= len(piece)
        if not room:
            sums.append(state.intdigest() if chosen else 0)
            state, room = xxhash.xxh3_64(), part_bytes
    return np.array(sums, dtype=np.uint64)
