"""What a segment file says about itself: superblock, slab records, slot headers.

Rules
  - All integers are little-endian. A header is trusted only if its check agrees.
  - The slot header check covers every field, the slab's generation and slot size, and the slot number: no header
    outlives its geometry, none can be moved.
  - The check is arithmetic on the header's 64-bit columns, so that whole tables are checked at once. It guards
    against torn and stale headers, not against somebody who may write the segment.
  - A writer goes FREE or COMMITTED -> WRITING (with stamp), barrier, payload, barrier, COMMITTED (with checksum).
    A reader sees the expected keys and stamps COMMITTED before its copy, and again after it.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvpool_proto.geometry import SLAB_RECORD_BYTES, SLOT_HEADER_BYTES

U64 = npt.NDArray[np.uint64]
Array = npt.NDArray[Any]

MAGIC: Final = int.from_bytes(b"kvpool\x00\x01", "little")
VERSION: Final = 2
KEY_FIELD_BYTES: Final = 32

FREE: Final = 0
WRITING: Final = 1
COMMITTED: Final = 2

PEER_WRITER: Final = 1 << 62
"""The worker_id of slots written through the data port: above every worker's."""

PARENT_ROOT: Final = 1
PARENT_KEY: Final = 2
PARENT_UNKNOWN: Final = 3

SLOT_HEADER: Final = np.dtype(
    [
        ("state", "<u2"),
        ("part", "<u2"),
        ("key_bytes", "u1"),
        ("parent_kind", "u1"),
        ("reserved", "<u2"),
        ("namespace", "V16"),
        ("key", "V32"),  # padded with zeros behind key_bytes
        ("parent_key", "V32"),
        ("stamp", "<u8"),
        ("length_bytes", "<u8"),
        ("checksum", "<u8"),  # XXH3-64 of the part's bytes; 0 with verify off
        ("worker_id", "<u8"),  # who writes or wrote the slot; 0: unknown
        ("check", "<u8"),
    ]
)
SLAB_RECORD: Final = np.dtype(
    [("generation", "<u8"), ("slot_bytes", "<u8"), ("slots", "<u8"), ("spare", "V32"), ("check", "<u8")]
)
SUPERBLOCK: Final = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u8"),
        ("node_id", "V256"),  # UTF-8, padded with zeros
        ("incarnation", "<u8"),
        ("epoch", "<u8"),  # the highest that the node client obeys
        ("size_bytes", "<u8"),  # of the slabs
        ("slab_bytes", "<u8"),
        ("segment_index", "<u8"),
        ("contents", "<u8"),  # a random number: new with the file, and when something was lost from it
        ("bypass", "<u8"),  # what workers skip; bits of bypass.py
        ("check", "<u8"),
    ]
)
SUPERBLOCK_COPIES: Final = (2048, 0)
"""Where the superblock stands in the file, twice, in the order of writing: one of them is whole at every moment."""
assert SLOT_HEADER.itemsize == SLOT_HEADER_BYTES
assert SLAB_RECORD.itemsize == SLAB_RECORD_BYTES

# Odd multipliers from the golden ratio's 64-bit fraction (Knuth, TAOCP 6.4, Fibonacci hashing), one a column.
_GOLDEN: Final = 0x9E3779B97F4A7C15
_FACTORS: Final = np.array([(_GOLDEN * (2 * i + 1) | 1) & (2**64 - 1) for i in range(64)], dtype=np.uint64)


# Rows that are mixed at once: their words and the scratch stay in the second-level cache.
_MIX_ROWS: Final = 2048


def _mix(records: Array) -> U64:
    """One 64-bit value per record (contiguous, at most 62 words each); the last word, the check itself, is left out.

    Wraps around by design.
    """
    words = records.view(np.uint64).reshape(len(records), records.dtype.itemsize // 8)
    factors = _FACTORS[: words.shape[1]].copy()
    factors[-1] = 0
    mixed = np.empty(len(words), dtype=np.uint64)
    scratch = np.empty((min(len(words), _MIX_ROWS), words.shape[1]), dtype=np.uint64)
    for start in range(0, len(words), _MIX_ROWS):
        rows = words[start : start + _MIX_ROWS]
        folded = np.right_shift(rows, np.uint64(31), out=scratch[: len(rows)])
        np.bitwise_xor(folded, rows, out=folded)
        np.einsum("ij,j->i", folded, factors, out=mixed[start : start + _MIX_ROWS])
    return _stirred(mixed)


def _stirred(mixed: U64) -> U64:
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(_GOLDEN)
    mixed ^= mixed >> np.uint64(32)
    return mixed


def slot_checks(headers: Array, first_slot: int, generation: int, slot_bytes: int) -> U64:
    """The checks that `headers` (SLOT_HEADER, contiguous) should carry as slots first_slot, first_slot + 1, ...

    first_slot counts through the segment. Returns uint64, one per header.
    """
    slots = np.arange(first_slot, first_slot + len(headers), dtype=np.uint64)
    return checks_at(headers, places(slots, life(generation, slot_bytes)))


def checks_at(headers: Array, where: U64) -> U64:
    """The checks that `headers` (SLOT_HEADER, contiguous) should carry in the slots of `where`; see places."""
    return _mix(headers) ^ where


def places(slots: U64, lives: U64 | np.uint64) -> U64:
    """What their place adds to the checks of headers. lives: of the slots' slabs; see life."""
    return (slots * _FACTORS[62]) ^ lives


def life(generation: int, slot_bytes: int) -> np.uint64:
    """What a slab's generation and slot size add to the checks of its headers."""
    return np.uint64((generation * int(_FACTORS[63]) ^ slot_bytes * _GOLDEN) & (2**64 - 1))


def record_check(record: Array) -> U64:
    """The check that slab records or a superblock should carry, one per record."""
    return _mix(record)


def digests(columns: U64) -> U64:
    """One 64-bit value for each column of (words, n), at most 64 words, to sort and search by.

    Equal columns have equal digests; others can be made to.
    """
    mixed = np.zeros(columns.shape[1], dtype=np.uint64)
    for words, factor in zip(columns, _FACTORS, strict=False):
        mixed += (words >> np.uint64(31) ^ words) * factor
    return _stirred(mixed)


def pack_keys(chain: bytes, key_bytes: int) -> Array:
    """The keys of a chain as V32, zero-padded: shape (blocks,)."""
    blocks = len(chain) // key_bytes
    padded = np.zeros((blocks, KEY_FIELD_BYTES), dtype=np.uint8)
    padded[:, :key_bytes] = np.frombuffer(chain, dtype=np.uint8).reshape(blocks, key_bytes)
    return padded.view("V32").reshape(blocks)


class Barrier:
    """A full memory barrier between the steps of a copy, for processors that reorder (ARM).

    Python has none. Releasing and taking a lock is one: POSIX (4.12, Memory Synchronization) makes sem_post and
    sem_wait, on which CPython's locks stand, synchronise memory; what precedes the release is seen before what
    follows the acquire.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self) -> None:
        """Order every load and store before this call before every one after it."""
        self._lock.release()
        self._lock.acquire()
