"""transfer.py on a real segment: bytes and headers that are not what they should be are not there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpool_client.devices.base import Contiguous
from kvpool_client.headers import FREE, WRITING
from kvpool_client.transfer import SAMPLE_EVERY, LocalEngine
from unit.transfer_world import BLOCKS, DEVICE, SPEC, Spy, Stored, part_copy, spec_of, written


def test_a_flipped_byte_ends_the_run(stored_run: Stored) -> None:
    stored_run.run.slots(SPEC.slot_bytes)[6, 4999] ^= 1
    copied, target = stored_run.read()
    assert (copied.blocks, copied.reason) == (6, "verify_failed")
    assert (target[:6] == stored_run.data[:6]).all()
    assert copied.bad == stored_run.run.sub(6, 1)
    assert not target[8:].any()  # the third piece was not begun


def test_padding_behind_the_part_does_not_count(stored_run: Stored) -> None:
    stored_run.run.slots(SPEC.slot_bytes)[6, 5000] ^= 1
    assert stored_run.read()[0].blocks == BLOCKS


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("state", WRITING, "stale_stamp"),
        ("state", FREE, "stale_stamp"),
        ("stamp", 5, "stale_stamp"),
        ("key", np.void(b"k" * 32), "wrong_block"),
        ("namespace", np.void(b"n" * 16), "wrong_block"),
        ("part", 1, "wrong_block"),
        ("length_bytes", 4999, "wrong_block"),
        ("key_bytes", 13, "wrong_block"),
        ("checksum", 0, "unverified"),
        ("checksum", 1, "verify_failed"),
    ],
)
def test_a_sound_header_of_something_else(stored_run: Stored, column: str, value: Any, reason: str) -> None:
    stored_run.headers[column][5:6] = value
    stored_run.reseal()
    copied, target = stored_run.read()
    assert (copied.blocks, copied.reason) == (5, reason)
    assert (copied.bad is not None) == (reason in ("wrong_block", "verify_failed", "stale_stamp"))
    assert (target[:5] == stored_run.data[:5]).all()


@pytest.mark.parametrize("column", ["part", "key", "namespace", "parent_key", "length_bytes", "checksum", "check"])
def test_a_torn_header(stored_run: Stored, column: str) -> None:
    field_bytes = stored_run.headers[column][5:6].copy().view(np.uint8)
    field_bytes[0] ^= 0x40
    stored_run.headers[column][5:6] = field_bytes.view(stored_run.headers[column].dtype)
    copied, _ = stored_run.read()
    assert (copied.blocks, copied.reason) == (5, "torn_header")


def test_a_header_that_was_moved_with_its_bytes(stored_run: Stored) -> None:
    slots = stored_run.run.slots(SPEC.slot_bytes)
    stored_run.headers[5:6], slots[5] = stored_run.headers[4:5].copy(), slots[4].copy()
    chain = bytearray(stored_run.chain)
    chain[5 * 12 : 6 * 12] = chain[4 * 12 : 5 * 12]
    copied, _ = stored_run.read(chain=bytes(chain))
    assert (copied.blocks, copied.reason) == (5, "torn_header")


def test_what_was_asked_for_is_compared(stored_run: Stored) -> None:
    other = bytearray(stored_run.chain)
    other[7 * 12] ^= 1
    assert stored_run.read(chain=bytes(other))[0].blocks == 7
    assert stored_run.read(part=1)[0].blocks == 0
    assert stored_run.read(spec=spec_of(4999))[0].blocks == 0


def test_a_slab_that_was_bound_anew(stored_run: Stored) -> None:
    stored_run.world.owner.bind_slab(0, SPEC.slot_bytes)
    assert stored_run.read()[0].reason == "stale_stamp"
    stored_run.world.owner.bind_slab(0, 4096)
    copied, target = stored_run.read()
    assert (copied.blocks, copied.reason) == (0, "slab_changed")
    assert not target.any()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda stored: stored.headers["stamp"].__setitem__(slice(2, 3), 9), "stale_stamp"),
        (lambda stored: stored.headers["state"].__setitem__(slice(2, 3), WRITING), "stale_stamp"),
        (lambda stored: stored.run.slots(SPEC.slot_bytes)[2].fill(0), "verify_failed"),
        (lambda stored: stored.world.owner.bind_slab(0, 4096), "slab_changed"),
    ],
)
def test_what_changes_during_the_copy_is_noticed(stored_run: Stored, change: Any, reason: str) -> None:
    target = np.zeros_like(stored_run.data)
    copied, _ = stored_run.read(buffer=Spy(target, lambda: change(stored_run)))
    assert copied.reason == reason
    assert copied.blocks == (0 if reason == "slab_changed" else 2)
    assert (target[:2] == stored_run.data[:2]).all()


def test_what_weaker_verification_sees(stored_run: Stored) -> None:
    stored_run.run.slots(SPEC.slot_bytes)[1:, 17] ^= 1
    stored_run.engine = LocalEngine(DEVICE, verify="off")
    assert stored_run.read()[0].blocks == BLOCKS
    stored_run.engine = LocalEngine(DEVICE, verify="sampled")
    copied, _ = stored_run.read()
    assert copied.reason == "verify_failed"
    assert 1 <= copied.blocks <= SAMPLE_EVERY


def test_stored_with_verify_off_is_read_by_who_asks_for_no_more(stored_run: Stored) -> None:
    off = LocalEngine(DEVICE, verify="off")
    buffer = DEVICE.bind(Contiguous(stored_run.data), SPEC.part_bytes, writable=False)
    written(off, stored_run.world, [part_copy(SPEC, stored_run.chain, [stored_run.run], buffer)])
    assert not stored_run.headers["checksum"].any()
    assert stored_run.read()[0].reason == "unverified"
    stored_run.engine = off
    assert stored_run.read()[0].blocks == BLOCKS
