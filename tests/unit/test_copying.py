"""Copies from peers: only what is right gets into slots, orders end as they should, and what is there stays."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvpool_client.clock import SYSTEM
from kvpool_client.copying import COPIES_MAX, COPY_THREADS, Copier
from kvpool_client.headers import COMMITTED, PARENT_KEY, PARENT_ROOT, PEER_WRITER, WRITING, Array
from kvpool_client.logs import Log
from kvpool_client.outbox import Outbox
from kvpool_client.owned_segment import OwnedSegment
from kvpool_client.peer.copies import Grant
from kvpool_client.peer.writes import PeerWrites
from kvpool_client.session_messages import Copy
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.capability import READ, RUN
from kvpool_proto.errors import KVPoolError, PeerUnreachable, UnknownSegment
from unit.inventory_world import report
from unit.segment_world import NAMESPACE, SLOT, create, header_of, opened, plan_in, write_block

EPOCH, HANDLE, FROM, TO = 10, 3, 77, 99
PART_BYTES = SLOT - 100
BLOCKS, PARTS = 5, 2
WAIT_S = 10.0

Spoil = Callable[[Array, Sequence[memoryview], int, int], None]


class PeerDouble:
    """Holds the blocks of a chain in two parts. spoil: changes (headers, rows, part, at) on their way."""

    def __init__(self) -> None:
        self.data = np.random.default_rng(5).integers(0, 256, (PARTS, BLOCKS, PART_BYTES), dtype=np.uint8)
        self.asked: list[tuple[Grant, int, int]] = []
        self.blocks = BLOCKS
        self.spoil: Spoil = lambda headers, rows, part, at: None
        self.hold = threading.Event()
        self.hold.set()
        self.holding = threading.Event()
        self.error: KVPoolError | None = None

    def pull(self, grant: Grant, at: int, into: Sequence[memoryview]) -> tuple[Array, str]:
        self.asked.append((grant, at, len(into)))
        self.holding.set()
        assert self.hold.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        came = max(0, min(len(into), self.blocks - at))
        headers = self.headers(grant.part)[at : at + came]
        for row, view in zip(self.data[grant.part, at : at + came], into[:came], strict=True):
            view[:] = row.data
        self.spoil(headers, into, grant.part, at)
        return headers, "" if came == len(into) else "stale_stamp"

    def headers(self, part: int) -> Array:
        return np.concatenate(
            [
                header_of(
                    key=b"%08d" % block, parent_key=b"%08d" % (block - 1) if block else b"", part=part, stamp=FROM,
                    parent_kind=PARENT_KEY if block else PARENT_ROOT, length_bytes=PART_BYTES, worker_id=8,
                    checksum=xxhash.xxh3_64_intdigest(self.data[part, block])
                )
                for block in range(BLOCKS)
            ]
        )  # fmt: skip

    def close(self) -> None:
        self.error = PeerUnreachable("closed")
        self.hold.set()


class World:
    """A node with one bound segment, its copier, and a session."""

    def __init__(self, segment: OwnedSegment) -> None:
        self.segment = segment
        self.epoch = EPOCH
        self.writes = PeerWrites()
        self.peer = PeerDouble()
        self.outbox = Outbox()
        self.session = self.outbox.open()
        self.loads_first_asked = 0
        self.copier = self.make()

    def make(self, bytes_max: int = COPY_THREADS * 2 * SLOT) -> Copier:
        log = Log("debug", False, SYSTEM, io.StringIO())
        return Copier(self, self.peer, self.outbox, self.give_way, bytes_max=bytes_max, log=log)

    def give_way(self) -> None:
        self.loads_first_asked += 1

    def segment_of(self, epoch: int, handle: int) -> OwnedSegment:
        if (epoch, handle) != (EPOCH, HANDLE):
            raise UnknownSegment("another")
        return self.segment

    def copied(self, *orders: Copy) -> list[pb.SlotsCopied]:
        """What the Master hears of these orders."""
        self.copier.submit(orders, self.session)
        heard: list[pb.SlotsCopied] = []
        while len(heard) < len(orders):
            message = pb.SessionUp()
            assert self.outbox.fill(message, self.session, WAIT_S)
            assert message.copied, "not in time"
            heard.extend(message.copied)
        return heard

    def stored(self) -> list[tuple[int, int, bytes]]:
        """(part, slot, key) of what an inventory would tell."""
        return [
            (strands.part_from + part, first + block * stride + part, strands.keys[at * 8 :][block * 8 :][:8])
            for chunk in report(self.segment)
            for strands in chunk.strands
            for at, (first, blocks, stride) in enumerate(
                zip(strands.first_slot, strands.extent_blocks, strands.stride, strict=True)
            )
            for block in range(blocks)
            for part in range(strands.part_to - strands.part_from)
        ]


ORDER = Copy(
    number=41, epoch=EPOCH, namespace=NAMESPACE, part_bytes=PART_BYTES, parts=range(PARTS), blocks=BLOCKS,
    source=("n2", "10.0.0.2:9502"), from_segment=8, from_slot=4, from_stride=3, from_stamp=FROM,
    macs=(b"0" * 16, b"1" * 16), valid_until_ms=5_000, segment=HANDLE, slot=2, stamp=TO
)  # fmt: skip


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with opened(create(plan_in(tmp_path))) as segment:
        segment.bind_slab(0, SLOT)
        found = World(segment)
        yield found
        found.copier.stop()


def states(world: World) -> list[int]:
    return world.segment.table(0)["state"].tolist()[: 3 + BLOCKS * PARTS]


def test_all_parts_of_all_blocks_are_copied_under_the_new_stamp(world: World) -> None:
    assert world.copied(ORDER) == [pb.SlotsCopied(order=41, blocks=BLOCKS)]
    assert sorted(world.stored()) == sorted(
        (part, 2 + block * PARTS + part, b"%08d" % block) for block in range(BLOCKS) for part in range(PARTS)
    )
    table = world.segment.table(0)[2 : 2 + BLOCKS * PARTS]
    assert set(table["stamp"].tolist()) == {TO}
    assert set(table["worker_id"].tolist()) == {PEER_WRITER}
    for part in range(PARTS):
        slots = world.segment.slots(2 + part, (BLOCKS - 1) * PARTS + 1, SLOT)[::PARTS]
        assert np.array_equal(slots[:, :PART_BYTES], world.peer.data[part])
        said = world.peer.headers(part)
        for name in ("key", "parent_key", "parent_kind", "checksum", "length_bytes", "part"):
            assert np.array_equal(table[part::PARTS][name], said[name])
    assert not world.writes.in_progress(world.segment)
    counts = world.copier.counts
    assert (counts.done, counts.failed, counts.blocks, counts.bytes) == (1, 0, 5, 5 * 2 * PART_BYTES)


def test_grants_are_of_one_row_and_pieces_bounded(world: World) -> None:
    world.copied(ORDER)
    assert [(grant.part, at, blocks) for grant, at, blocks in world.peer.asked] == [
        (0, 0, 2), (1, 0, 2), (0, 2, 2), (1, 2, 2), (0, 4, 1), (1, 4, 1)
    ]  # fmt: skip
    assert world.loads_first_asked == 6
    grant = world.peer.asked[1][0]
    assert np.frombuffer(grant.table, dtype=RUN).tolist() == [(8, 5, BLOCKS, 3, FROM)]
    assert replace(grant, table=b"") == Grant(
        address="10.0.0.2:9502", node_id="n2", op=READ, epoch=EPOCH, valid_until_ms=5_000, namespace=NAMESPACE,
        part=1, table=b"", mac=b"1" * 16
    )  # fmt: skip


def flip_byte(headers: Array, rows: Sequence[memoryview], part: int, at: int) -> None:
    if (part, at) == (1, 2):
        rows[1][7] ^= 1


def another(name: str, value: object) -> Spoil:
    def spoil(headers: Array, rows: Sequence[memoryview], part: int, at: int) -> None:
        if (part, at) == (1, 2):
            headers[name][1] = value

    return spoil


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (flip_byte, "verify_failed"),
        (another("stamp", FROM + 1), "wrong_block"),
        (another("namespace", np.void(b"m" * 16)), "wrong_block"),
        (another("part", 0), "wrong_block"),
        (another("length_bytes", PART_BYTES - 1), "wrong_block"),
        (another("state", WRITING), "wrong_block"),
        (another("key", np.void(b"otherkey".ljust(32, b"\0"))), "wrong_block"),
        (another("parent_kind", 9), "wrong_block"),
        (another("checksum", 1), "verify_failed"),
    ],
)
def test_what_is_not_right_is_not_taken(world: World, spoil: Spoil, why: str) -> None:
    world.peer.spoil = spoil
    assert world.copied(ORDER) == [pb.SlotsCopied(order=41, blocks=3, why=why)]
    assert states(world) == [0, 0, *[COMMITTED] * 6, COMMITTED, 0, 0, 0, 0], "block 3 has one part, which is right"
    assert world.copier.counts.failed == 1


def test_blocks_stored_without_checksum_stay_so(world: World) -> None:
    def without(headers: Array, rows: Sequence[memoryview], part: int, at: int) -> None:
        headers["checksum"] = 0

    world.peer.spoil = without
    assert world.copied(ORDER)[0].blocks == BLOCKS
    assert not world.segment.table(0)["checksum"].any()


def test_a_peer_that_has_less_or_is_away(world: World) -> None:
    world.peer.blocks = 3
    assert world.copied(ORDER) == [pb.SlotsCopied(order=41, blocks=3, why="stale_stamp")]
    world.peer.error = PeerUnreachable("no answer")
    assert world.copied(replace(ORDER, stamp=TO + 1)) == [pb.SlotsCopied(order=41, blocks=0, why="peer_unreachable")]


def test_what_is_there_is_not_copied_again(world: World) -> None:
    world.peer.blocks = 3
    world.copied(ORDER)
    world.peer.blocks = BLOCKS
    world.peer.asked.clear()
    before = world.segment.table(0)[2:8].copy()
    assert world.copied(ORDER) == [pb.SlotsCopied(order=41, blocks=BLOCKS)]
    assert [at for _, at, _ in world.peer.asked] == [3, 3]
    assert np.array_equal(world.segment.table(0)[2:8], before)
    world.peer.asked.clear()
    assert world.copied(ORDER)[0].blocks == BLOCKS
    assert not world.peer.asked


def test_orders_that_cannot_be(world: World) -> None:
    assert world.copied(replace(ORDER, segment=HANDLE + 1))[0].why == "segment_unknown"
    assert world.copied(replace(ORDER, slot=12))[0].why == "protocol", "over the border of the slab"
    world.copier.stop()
    world.copier = world.make(bytes_max=2 * SLOT - 1)
    assert "copy_bytes_max" in world.copied(ORDER)[0].why
    assert not world.peer.asked


def test_cleared_stamps_end_a_copy(world: World) -> None:
    assert world.writes.fence([TO], 0)
    assert world.copied(ORDER)[0].blocks == 0
    assert not world.segment.table(0)["state"].any()


def test_slots_that_somebody_else_has_by_now_are_left_alone(world: World) -> None:
    write_block(world.segment, 6, b"newer", stamp=TO + 1)
    before = world.segment.table(0)[6].copy()
    assert world.copied(ORDER) == [pb.SlotsCopied(order=41, blocks=2, why="reservation_ended")]
    assert world.segment.table(0)[6] == before
    write_block(world.segment, 6, b"older", stamp=TO - 1)
    assert world.copied(ORDER)[0].blocks == BLOCKS


def test_another_epoch_ends_a_copy_before_its_payload(world: World) -> None:
    world.epoch = EPOCH + 1
    assert world.copied(ORDER) == [pb.SlotsCopied(order=41, blocks=0, why="stale_epoch")]
    assert not world.segment.slots(2, 1, SLOT).any()
    assert states(world)[2:4] == [WRITING, 0]


def test_orders_end_with_their_session_unanswered(world: World) -> None:
    world.peer.hold.clear()
    world.copier.submit([ORDER, replace(ORDER, number=42, stamp=TO + 1)], world.session)
    assert world.peer.holding.wait(WAIT_S)
    world.copier.cancel()
    world.session = world.outbox.open()
    world.peer.hold.set()
    assert world.copied(replace(ORDER, number=43)) == [pb.SlotsCopied(order=43, blocks=BLOCKS)]
    assert world.copier.counts.failed == 0


def test_one_order_too_many_is_answered_at_once(world: World) -> None:
    world.peer.hold.clear()
    world.copier.submit([replace(ORDER, number=number) for number in range(COPIES_MAX)], world.session)
    assert world.copier.open_orders == COPIES_MAX
    assert world.copied(replace(ORDER, number=1000)) == [pb.SlotsCopied(order=1000, blocks=0, why="busy")]
    world.copier.cancel()
    world.peer.hold.set()


def test_stopping_does_not_wait_for_a_peer(world: World) -> None:
    world.peer.hold.clear()
    world.copier.submit([ORDER], world.session)
    assert world.peer.holding.wait(WAIT_S)
    world.copier.stop()
    assert not world.segment.table(0)["state"].any()
