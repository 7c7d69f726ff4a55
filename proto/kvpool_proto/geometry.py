"""Sizes that both sides must compute alike: bytes per block, slots, slabs.

A segment file is [superblock 4 KiB | slab table | padding to DATA_ALIGN | slab 0 | slab 1 | ...]; a slab is
[slot table, padded to 4 KiB | slots]. A slot number counts through the whole segment:
slab * slots_per_slab + slot in slab, so it has a meaning only together with the slot size.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvpool_proto.errors import BadSegment, SlotTooLarge

PAGE_BYTES = 4096
SLOT_HEADER_BYTES = 128
SUPERBLOCK_BYTES = 4096
SLAB_RECORD_BYTES = 64
DATA_ALIGN_BYTES = 2 << 20
"""Slabs start at a multiple of a huge page."""

SLAB_BYTES_MIN = 64 << 10
SLABS_MAX = 1 << 20
SLOT_NUMBER_MAX = (1 << 32) - 1

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


def kv_part_bytes(*, layers: int, kv_heads: int, head_dim: int, block_tokens: int, dtype: str) -> int:
    """Bytes of K and V of one block for the `kv_heads` that one rank holds.

    >>> kv_part_bytes(layers=30, kv_heads=3, head_dim=64, block_tokens=128, dtype="bfloat16")
    2949120
    """
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(sorted(DTYPE_BYTES))}")
    return mla_part_bytes(layer_dims=[2 * kv_heads * head_dim] * layers, block_tokens=block_tokens, dtype=dtype)


def mla_part_bytes(*, layer_dims: Sequence[int], block_tokens: int, dtype: str) -> int:
    """Bytes of one block where layer i keeps `layer_dims[i]` elements a token (MLA: latent + rope)."""
    return sum(layer_dims) * block_tokens * DTYPE_BYTES[dtype]


def round_up(value: int, step: int) -> int:
    """`value` rounded up to a multiple of `step`."""
    return -(-value // step) * step


def slot_bytes_for(part_bytes: int) -> int:
    """Room for one part of one block: its bytes rounded up to 4 KiB."""
    return round_up(part_bytes, PAGE_BYTES)


def slot_table_bytes(slots: int) -> int:
    """Bytes of the table of `slots` headers at the start of a slab, padded to 4 KiB."""
    return round_up(slots * SLOT_HEADER_BYTES, PAGE_BYTES)


def slots_per_slab(slab_bytes: int, slot_bytes: int) -> int:
    """How many slots of `slot_bytes` a slab holds beside its slot table.

    Raises SlotTooLarge when not even one fits.
    """
    slots = slab_bytes // (slot_bytes + SLOT_HEADER_BYTES)
    while slots and slot_table_bytes(slots) + slots * slot_bytes > slab_bytes:
        slots -= 1
    if slots == 0:
        raise SlotTooLarge(f"a slot of {slot_bytes} bytes does not fit in a slab of {slab_bytes} bytes")
    return slots


def slab_bytes_for(slots: int, slot_bytes: int) -> int:
    """The smallest slab that holds exactly `slots` slots."""
    return slot_table_bytes(slots) + slots * slot_bytes


def check_segment(size_bytes: int, slab_bytes: int) -> int:
    """The number of slabs of a segment. Raises BadSegment, naming what is wrong."""
    if slab_bytes < SLAB_BYTES_MIN or slab_bytes % PAGE_BYTES:
        raise BadSegment(f"slab_bytes = {slab_bytes}: at least {SLAB_BYTES_MIN} and a multiple of {PAGE_BYTES}")
    if size_bytes <= 0 or size_bytes % slab_bytes:
        raise BadSegment(f"size_bytes = {size_bytes}: a positive multiple of slab_bytes = {slab_bytes}")
    slabs = size_bytes // slab_bytes
    if slabs > SLABS_MAX or slabs * (slab_bytes // PAGE_BYTES) > SLOT_NUMBER_MAX:
        raise BadSegment(f"size_bytes = {size_bytes}: more than {SLABS_MAX} slabs or 2^32 slots")
    return slabs


def slabs_offset(slabs: int) -> int:
    """Where slab 0 starts in the file."""
    return round_up(SUPERBLOCK_BYTES + slabs * SLAB_RECORD_BYTES, DATA_ALIGN_BYTES)


def file_bytes(size_bytes: int, slab_bytes: int) -> int:
    """Length of the file of a segment that offers `size_bytes` of slabs."""
    return slabs_offset(size_bytes // slab_bytes) + size_bytes
