"""Header checks: one definition, whatever the number of headers, and nothing that escapes them."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool_client.headers import (
    SLAB_RECORD,
    SLOT_HEADER,
    SUPERBLOCK,
    Array,
    Barrier,
    pack_keys,
    record_check,
    slot_checks,
)


def random_headers(n: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).integers(0, 256, n * SLOT_HEADER.itemsize, dtype=np.uint8).view(SLOT_HEADER)


def plain_check(words: list[int], factors: list[int]) -> int:
    """The definition, word by word."""
    full = (1 << 64) - 1
    mixed = sum((word ^ word >> 31) * factor for word, factor in zip(words, factors, strict=True)) & full
    mixed = (mixed ^ mixed >> 29) * 0x9E3779B97F4A7C15 & full
    return mixed ^ mixed >> 32


@pytest.mark.parametrize("dtype", [SLAB_RECORD, SUPERBLOCK])
def test_record_check_is_its_definition(dtype: np.dtype) -> None:
    records = np.random.default_rng(2).integers(0, 256, 3 * dtype.itemsize, dtype=np.uint8).view(dtype)
    words = records.view(np.uint64).reshape(3, -1)[:, :-1].tolist()
    factors = [(0x9E3779B97F4A7C15 * (2 * i + 1) | 1) & (1 << 64) - 1 for i in range(len(words[0]))]
    assert record_check(records).tolist() == [plain_check(row, factors) for row in words]


def test_a_check_does_not_cover_itself() -> None:
    headers = random_headers(5)
    before = slot_checks(headers, 7, 3, 4096)
    headers["check"] = before
    assert np.array_equal(slot_checks(headers, 7, 3, 4096), before)


@pytest.mark.parametrize("n", [0, 1, 2047, 2048, 2049, 5000])
def test_many_at_once_are_as_one_by_one(n: int) -> None:
    headers = random_headers(n)
    together = slot_checks(headers, 100, 9, 8192)
    assert len(together) == n
    for i in range(0, n, 499):
        assert together[i] == slot_checks(headers[i : i + 1], 100 + i, 9, 8192)[0]


@pytest.mark.parametrize("byte", range(SLOT_HEADER.itemsize - 8))
def test_every_byte_counts(byte: int) -> None:
    headers = random_headers(1)
    before = slot_checks(headers, 0, 1, 4096)[0]
    headers.view(np.uint8)[byte] ^= 1
    assert slot_checks(headers, 0, 1, 4096)[0] != before


def test_place_generation_and_slot_size_count() -> None:
    headers = random_headers(1)
    places = [(0, 1, 4096), (1, 1, 4096), (0, 2, 4096), (0, 1, 8192), (1 << 31, 1, 4096), (0, 1 << 40, 4096)]
    assert len({int(slot_checks(headers, *place)[0]) for place in places}) == len(places)


def test_keys_are_padded_with_zeros() -> None:
    keys = pack_keys(bytes(range(1, 25)), 12)
    assert keys[1].tobytes() == bytes(range(13, 25)) + bytes(20)


def test_a_barrier_can_be_passed_again_and_again() -> None:
    barrier = Barrier()
    for _ in range(3):
        barrier()
        assert barrier._lock.locked()  # held again: the next pass can release it
