"""What a data port does not give, and does not take: capabilities, slots, payload. All over real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool_client.headers import COMMITTED, FREE, PEER_WRITER, WRITING
from kvpool_client.peer import wire
from kvpool_client.peer.connection import Hashing
from kvpool_client.peer.wire import Ask
from kvpool_client.transfer_engine import Written
from kvpool_proto.capability import READ, WRITE
from unit.peer_world import (
    BLOCKS,
    EPOCH,
    FORMER_EPOCH,
    FORMER_KEY,
    MASTER_MS,
    SPEC,
    Case,
    PeerWorld,
    engine,
    relayed,
    until,
)
from unit.transfer_world import STAMPS

# -- capabilities --------------------------------------------------------------------------------------

BAD = [
    ({"key": b"x" * 32}, "capability"),
    ({"valid_until_ms": MASTER_MS - 1}, "capability_expired"),
    ({"epoch": EPOCH + 1}, "stale_epoch"),
    ({"segment": 8}, "segment_unknown"),
]


@pytest.mark.parametrize(("change", "reason"), BAD)
@pytest.mark.parametrize("op", [READ, WRITE])
def test_a_bad_capability_is_refused_counted_and_logged_once(
    peer_case: Case, change: dict[str, Any], reason: str, op: int
) -> None:
    fresh, made = PeerWorld(peer_case.peer.world), engine(piece_bytes=1 << 20)
    case = Case(fresh, made, peer_case.chain, peer_case.run, peer_case.data)
    try:
        for _ in range(3):
            if op == READ:
                copied, target = case.read(**change)
                assert (copied.blocks, copied.reason, target.any()) == (0, reason, False)
            else:
                assert case.write(**change) == Written([0], reason)
                assert case.states() == {FREE}
    finally:
        made.close()
        fresh.close()
    assert fresh.refused == {reason: 3}
    assert fresh.log.getvalue().count("peer_refused") == 1
    assert f"peer=127.0.0.1 reason={reason}" in fresh.log.getvalue()


def test_a_capability_to_read_does_not_write_nor_the_other_way_round(peer_case: Case) -> None:
    assert peer_case.write(op=READ) == Written([0], "capability")
    assert peer_case.states() == {FREE}
    peer_case.write()
    assert peer_case.read(op=WRITE)[0].reason == "capability"


def test_a_capability_covers_its_blocks_only(peer_case: Case) -> None:
    peer_case.write()
    connection = peer_case.peer.connection()
    into = [memoryview(bytearray(SPEC.part_bytes))]
    connection.ask_read(peer_case.grant(READ, runs=[peer_case.run.sub(0, 4)]), 4, 1, SPEC.part_bytes)
    assert connection.take_read(1, SPEC.part_bytes, into, Hashing(0)).reason == "protocol"
    connection.ask_read(peer_case.grant(READ), 4, 1, SPEC.part_bytes)
    assert connection.take_read(1, SPEC.part_bytes, into, Hashing(0)).reason == "", "the connection goes on"
    connection.stream.close()


def test_a_number_that_nothing_was_presented_under(peer_case: Case) -> None:
    stream = peer_case.peer.stream()
    stream.send([wire.pack_hello(), wire.pack_ask(wire.ASK_READ, Ask(5, 0, 1, False, SPEC.part_bytes))])
    stream.receive(len(wire.pack_hello()))
    go, blocks, size_bytes = wire.text_bytes(stream.receive(8))
    assert wire.answer_of(go, blocks, stream.receive(size_bytes)).reason == "capability"
    stream.close()


def test_a_capability_that_was_presented_in_time_ends_all_the_same(peer_case: Case) -> None:
    peer_case.write()
    assert peer_case.read()[0].blocks == BLOCKS
    peer_case.peer.host.keyring.tell_time(EPOCH, MASTER_MS + 60_001)
    try:
        assert peer_case.read()[0].reason == "capability_expired"
    finally:
        peer_case.peer.host.keyring.tell_time(EPOCH, MASTER_MS)


@pytest.mark.parametrize("former_key_ms", [5_000, 0])
def test_the_former_epochs_capabilities_read_for_a_while_and_do_not_write(peer_case: Case, former_key_ms: int) -> None:
    peer_case.write()
    fresh = PeerWorld(peer_case.peer.world, former_key_ms)
    case = Case(fresh, peer_case.engine, peer_case.chain, peer_case.run, peer_case.data)
    try:
        peer_case.peer.world.now_ms += 1_000
        copied, _ = case.read(epoch=FORMER_EPOCH, key=FORMER_KEY)
        assert (copied.blocks, copied.reason) == ((BLOCKS, "") if former_key_ms else (0, "stale_epoch"))
        assert case.write(epoch=FORMER_EPOCH, key=FORMER_KEY) == Written([0], "stale_epoch")
    finally:
        fresh.close()


# -- slots that hold something else --------------------------------------------------------------------


def spoil_state(case: Case) -> None:
    case.headers["state"][5] = WRITING
    case.reseal()


def spoil_stamp(case: Case) -> None:
    case.headers["stamp"][5] += 1
    case.reseal()


def spoil_namespace(case: Case) -> None:
    case.headers["namespace"][5] = np.void(b"q" * 16)
    case.reseal()


def spoil_part(case: Case) -> None:
    case.headers["part"][5] = 1
    case.reseal()


def spoil_length(case: Case) -> None:
    case.headers["length_bytes"][5] -= 1
    case.reseal()


def spoil_check(case: Case) -> None:
    case.headers["checksum"][5] += 1


def clear(case: Case) -> None:
    case.headers.view(np.uint8).reshape(BLOCKS, -1)[5] = 0


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (spoil_state, "stale_stamp"),
        (spoil_stamp, "stale_stamp"),
        (clear, "stale_stamp"),
        (spoil_namespace, "wrong_block"),
        (spoil_part, "wrong_block"),
        (spoil_length, "wrong_block"),
        (spoil_check, "torn_header"),
    ],
)
def test_leading_blocks_are_served_and_foreign_bytes_never(
    peer_case: Case, spoil: Callable[[Case], None], reason: str
) -> None:
    peer_case.write()
    spoil(peer_case)
    copied, target = peer_case.read()
    assert (copied.blocks, copied.reason, copied.bad) == (5, reason, None)
    assert np.array_equal(target[:5], peer_case.data[:5])
    assert not target[5].any(), "not a byte of it was sent"
    assert peer_case.peer.refused == {reason: 1}


def test_a_key_that_is_not_the_one_asked_for_is_found_by_the_reader(peer_case: Case) -> None:
    peer_case.write()
    other = bytearray(peer_case.chain)
    other[5 * SPEC.key_bytes] ^= 1
    copied, _ = peer_case.read(chain=bytes(other))
    assert (copied.blocks, copied.reason) == (5, "wrong_block")


def test_a_slab_that_was_bound_anew(peer_case: Case) -> None:
    peer_case.write()
    per_slab = peer_case.peer.world.worker.slots_in_slab(SPEC.slot_bytes)
    assert per_slab > 2 + BLOCKS
    peer_case.peer.world.owner.bind_slab(0, 2 * SPEC.slot_bytes)
    assert peer_case.read()[0].reason == "slab_changed"
    assert peer_case.write() == Written([0], "slab_changed")
    peer_case.peer.world.owner.bind_slab(0, SPEC.slot_bytes)
    assert peer_case.read()[0].reason == "stale_stamp"


def test_another_length_than_the_slots(peer_case: Case) -> None:
    peer_case.write()
    connection = peer_case.peer.connection()
    for part_bytes, reason in ((SPEC.part_bytes + 1, "wrong_block"), (100_000, "slab_changed")):
        connection.ask_read(peer_case.grant(READ), 0, 1, part_bytes)
        into = [memoryview(bytearray(part_bytes))]
        assert connection.take_read(1, part_bytes, into, Hashing(0)).reason == reason
    connection.stream.close()


def test_bytes_that_changed_in_the_slot_are_a_miss(peer_case: Case) -> None:
    peer_case.write()
    peer_case.slots[7][10] ^= 1
    copied, target = peer_case.read()
    assert (copied.blocks, copied.reason) == (7, "verify_failed")
    assert np.array_equal(target[:7], peer_case.data[:7])


def test_bytes_without_a_checksum_are_a_miss_unless_verify_is_off(peer_case: Case) -> None:
    careless = engine("off")
    case = Case(peer_case.peer, careless, peer_case.chain, peer_case.run, peer_case.data)
    assert case.write() == Written([BLOCKS])
    assert case.read()[0].blocks == BLOCKS
    assert peer_case.read()[0].reason == "unverified"
    careless.close()


def test_sampled_verification_finds_what_it_looks_at(peer_case: Case) -> None:
    peer_case.write()
    peer_case.slots[:, 3] ^= 1
    sampled = engine("sampled", piece_bytes=1 << 20)
    case = Case(peer_case.peer, sampled, peer_case.chain, peer_case.run, peer_case.data)
    copied, _ = case.read()
    assert copied.reason == "verify_failed", "of 12 blocks at least one is looked at"
    assert copied.blocks < 8
    sampled.close()


def test_bytes_that_change_on_their_way_are_a_miss(peer_case: Case) -> None:
    peer_case.write()
    spoilt = threading.Event()

    def change(got: bytes, there: bool) -> bytes:
        at = got.find(peer_case.data[2].tobytes()[:64])
        if there or at < 0:
            return got
        spoilt.set()
        return got[:at] + bytes([got[at] ^ 1]) + got[at + 1 :]

    with relayed(peer_case.peer, change) as relay:
        copied, _ = peer_case.read(address=relay.address)
    assert spoilt.is_set()
    assert (copied.blocks, copied.reason) == (2, "verify_failed")


# -- writes --------------------------------------------------------------------------------------------


def test_what_a_write_leaves_behind(peer_case: Case) -> None:
    assert peer_case.write() == Written([BLOCKS])
    headers = peer_case.headers.copy()
    assert peer_case.states() == {COMMITTED}
    assert set(headers["worker_id"].tolist()) == {PEER_WRITER}
    assert np.array_equal(peer_case.slots[:, : SPEC.part_bytes], peer_case.data)
    assert peer_case.peer.host.writes.open == 0
    told = peer_case.told()
    for name in ("key", "parent_key", "parent_kind", "key_bytes", "part", "namespace", "length_bytes", "stamp"):
        assert np.array_equal(headers[name], told[name]), name


def test_what_is_committed_under_a_stamp_is_not_written_again(peer_case: Case) -> None:
    assert peer_case.write(runs=[peer_case.run.sub(4, 3)], chain=peer_case.chain, data=peer_case.data) == Written([3])
    assert peer_case.write(data=np.zeros_like(peer_case.data)) == Written([BLOCKS])
    there = peer_case.slots[:, : SPEC.part_bytes]
    assert np.array_equal(there[4:7], peer_case.data[4:7])
    assert not there[:4].any()
    assert not there[7:].any()


def test_other_blocks_under_the_same_stamp_are_refused(peer_case: Case) -> None:
    peer_case.write()
    before = peer_case.headers.copy()
    assert peer_case.write(chain=peer_case.chain[::-1]) == Written([0], "reservation_ended")
    assert before.tobytes() == peer_case.headers.copy().tobytes()


def test_nothing_is_written_over_a_newer_stamp(peer_case: Case) -> None:
    newer = peer_case.run._replace(stamp=next(STAMPS))
    assert peer_case.write(runs=[newer]) == Written([BLOCKS])
    assert peer_case.write() == Written([0], "reservation_ended")
    assert peer_case.read(runs=[newer])[0].blocks == BLOCKS
    assert peer_case.write(runs=[newer._replace(stamp=next(STAMPS))]) == Written([BLOCKS]), "an older one goes"


def test_headers_have_to_be_those_of_the_capability(peer_case: Case) -> None:
    connection = peer_case.peer.connection()
    for name, value in (
        ("stamp", 1),
        ("part", 1),
        ("namespace", np.void(b"q" * 16)),
        ("length_bytes", 4999),
        ("state", WRITING),
        ("key_bytes", 0),
        ("parent_kind", 9),
    ):
        headers = peer_case.told()
        headers[name][3] = value
        connection.ask_write(peer_case.grant(WRITE), 0, headers, SPEC.part_bytes, True)
        assert connection.take_go(BLOCKS).reason == "capability", name
    assert peer_case.states() == {FREE}
    connection.stream.close()


def begun(case: Case, **changes: Any) -> Any:
    """A connection that was told to go on, and has sent some of the payload."""
    connection = case.peer.connection()
    connection.ask_write(case.grant(WRITE, **changes), 0, case.told(), SPEC.part_bytes, True)
    assert connection.take_go(BLOCKS) == (True, BLOCKS, "", "")
    connection.stream.send([case.data[:3].tobytes()])
    return connection


def test_a_writer_that_dies_in_the_middle_may_try_again(peer_case: Case) -> None:
    connection = begun(peer_case)
    assert peer_case.states() == {WRITING}
    assert peer_case.peer.host.writes.in_progress(peer_case.peer.world.owner) == set(range(2, 2 + BLOCKS))
    connection.stream.close()
    until(lambda: peer_case.peer.host.writes.open == 0)
    assert peer_case.states() == {WRITING}, "nobody can read it"
    assert peer_case.read()[0].reason == "stale_stamp"
    assert peer_case.write() == Written([BLOCKS])
    assert peer_case.read()[0].blocks == BLOCKS


def test_two_do_not_write_the_same_slots(peer_case: Case) -> None:
    connection = begun(peer_case)
    assert peer_case.write() == Written([0], "peer_busy")
    connection.stream.close()
    until(lambda: peer_case.peer.host.writes.open == 0)


def test_a_fence_ends_a_stalled_write_for_good(peer_case: Case) -> None:
    connection = begun(peer_case)
    assert peer_case.peer.host.writes.fence([peer_case.run.stamp], 10)
    with pytest.raises((EOFError, OSError)):
        connection.take_written(BLOCKS)
    connection.stream.close()
    assert peer_case.states() == {WRITING}
    assert peer_case.write() == Written([0], "reservation_ended"), "a capability that is replayed after that"


def test_payload_that_is_not_what_its_checksum_says_is_not_committed(peer_case: Case) -> None:
    connection = begun(peer_case)
    rest = peer_case.data[3:].copy()
    sums = np.zeros(BLOCKS, dtype="<u8")
    connection.stream.send([rest.tobytes(), sums.tobytes()])
    assert connection.take_written(BLOCKS).reason == "verify_failed"
    connection.stream.close()
    assert peer_case.states() == {WRITING}
    assert peer_case.write() == Written([BLOCKS]), "the same stamp may try again"


def test_payload_that_changes_on_its_way_is_not_committed(peer_case: Case) -> None:
    def change(got: bytes, there: bool) -> bytes:
        at = got.find(peer_case.data[6].tobytes()[:64])
        return got if at < 0 or not there else got[:at] + bytes([got[at] ^ 1]) + got[at + 1 :]

    with relayed(peer_case.peer, change) as relay:
        written = peer_case.write(address=relay.address)
    assert written == Written([4], "verify_failed")
    assert set(peer_case.headers["state"][:4].tolist()) == {COMMITTED}
    assert COMMITTED not in peer_case.headers["state"][4:8].tolist()


def test_a_new_epoch_between_marks_and_payload_stops_the_write(peer_case: Case) -> None:
    host = peer_case.peer.host

    def new_epoch() -> None:
        assert peer_case.states() == {FREE, WRITING}, "the first piece is marked, nothing is sent"
        host.epoch_now = EPOCH + 1

    host.seen = new_epoch
    try:
        assert peer_case.write() == Written([0], "stale_epoch")
    finally:
        host.seen, host.epoch_now = lambda: None, EPOCH
    assert not peer_case.slots[:, : SPEC.part_bytes].any()
    assert set(peer_case.headers["state"][:4].tolist()) == {WRITING}, "who scans for the new epoch finds the marks"


def test_a_store_waits_for_loads_but_not_for_ever(peer_case: Case) -> None:
    with peer_case.peer.server.loads_first.load():
        assert peer_case.write() == Written([BLOCKS]), "it is not starved"
    order: list[str] = []
    loads = peer_case.peer.server.loads_first
    with loads.load():
        waiting = threading.Thread(target=lambda: (loads(), order.append("store")))
        waiting.start()
        order.append("load")
    waiting.join()
    assert order == ["load", "store"]
