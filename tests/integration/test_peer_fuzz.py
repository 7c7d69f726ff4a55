"""A data port under random damage: sessions that were recorded, spoiled and sent again, beside a worker in earnest.

What is promised: every connection ends or is answered, the worker's blocks stay right, nothing outside of the slots
of the capability for writing that the spoiled sessions hold is ever touched, and none of those says COMMITTED with
other bytes than its checksum's. KVPOOL_FUZZ_PEERS: how many sessions, seeds 0, 1, ...; a failure names its seed.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvpool_client.headers import COMMITTED
from kvpool_client.owned_segment import OwnedSegment, SegmentPlan
from kvpool_client.peer import wire
from kvpool_client.peer.wire import Ask
from kvpool_client.runs import Row
from kvpool_client.segment import AttachedSegment
from kvpool_client.transfer_engine import Written
from kvpool_proto.capability import READ, WRITE
from unit.peer_world import BLOCKS, SPEC, Case, PeerWorld, case_of, engine, until
from unit.transfer_world import HANDLE, SLAB_BYTES, SLABS, STAMPS, World

SESSIONS = int(os.environ.get("KVPOOL_FUZZ_PEERS", "300"))
IMPATIENT = {"io_timeout_ms": 60, "idle_timeout_ms": 60, "connections_max": 32}


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[PeerWorld]:
    plan = SegmentPlan(
        directory=tmp_path, node_id="n", index=0, size_bytes=SLABS * SLAB_BYTES, slab_bytes=SLAB_BYTES
    )  # fmt: skip
    owner = OwnedSegment.create(plan, incarnation=1, prefault_threads=1, progress=lambda _: None)
    worker = AttachedSegment(owner.open_for_worker(1), HANDLE, plan.size_bytes, plan.slab_bytes)
    peer = PeerWorld(World(owner, worker), **IMPATIENT)
    yield peer
    peer.close()
    worker.close()
    owner.unlink()
    owner.close()


def session_of(case: Case, hashed: bool) -> list[bytes]:
    """What a worker sends that writes all blocks of a case in two pieces and reads them."""
    half = BLOCKS // 2
    frames = [wire.pack_hello(), wire.pack_grant(0, case.grant(WRITE)), wire.pack_grant(1, case.grant(READ))]
    for at in (0, half):
        headers = wire.sealed(case.told()[at : at + half])
        frames.append(wire.pack_ask(wire.ASK_WRITE, Ask(0, at, half, hashed, SPEC.part_bytes), headers))
        rows = case.data[at : at + half]
        sums = [xxhash.xxh3_64_intdigest(row.tobytes()) if hashed else 0 for row in rows]
        frames += [rows.tobytes(), np.array(sums, dtype="<u8").tobytes()]
    frames.append(wire.pack_ask(wire.ASK_READ, Ask(1, 0, BLOCKS, False, SPEC.part_bytes)))
    return frames


def spoilt(frames: list[bytes], choose: random.Random) -> bytes:
    """The same with some damage, most of it where lengths and kinds stand."""
    frames = list(frames)
    for _ in range(choose.choice([1, 1, 1, 2, 5])):
        at = choose.randrange(len(frames))
        frame = bytearray(frames[at])
        match choose.choice(["flip", "flip", "head", "cut", "drop", "twice", "swap", "grow", "noise"]):
            case "flip":
                frame[choose.randrange(len(frame))] ^= 1 << choose.randrange(8)
            case "head":
                frame[choose.randrange(min(32, len(frame)))] = choose.randrange(256)
            case "cut":
                del frame[choose.randrange(len(frame)) :]
            case "drop":
                frame.clear()
            case "twice":
                frame += bytes(frame)
            case "swap":
                other = choose.randrange(len(frames))
                frames[at], frames[other] = frames[other], frames[at]
                continue
            case "grow":
                frame[4:8] = choose.randrange(1 << 32).to_bytes(4, "little")
            case _:
                frame = bytearray(choose.randbytes(choose.randrange(2_000)))
        frames[at] = bytes(frame) or b"\0"
    return b"".join(frames)


def send(peer: PeerWorld, told: bytes, choose: random.Random) -> None:
    """In pieces, with or without reading what comes, and however it ends."""
    with socket.create_connection(("127.0.0.1", peer.server.port)) as sock, suppress(OSError):
        sock.settimeout(0.5)
        at = 0
        while at < len(told):
            size_bytes = choose.choice([7, 1_000, 1 << 16, 1 << 20])
            sock.sendall(told[at : at + size_bytes])
            at += size_bytes
        if choose.random() < 0.5:
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass


def test_spoiled_sessions(peer: PeerWorld) -> None:
    made = engine(connections=1, piece_bytes=1 << 20)
    honest = case_of(peer, made, slot=0)
    assert honest.write() == Written([BLOCKS])
    table = peer.world.worker.table(0)
    victim = range(BLOCKS, 2 * BLOCKS)  # the slots that the spoiled sessions may write
    for seed in range(SESSIONS):
        choose = random.Random(seed)
        run = Row(0, BLOCKS, HANDLE, victim.start, 1, next(STAMPS), 0)
        case = Case(peer, made, honest.chain, run, honest.data)
        send(peer, spoilt(session_of(case, choose.random() < 0.7), choose), choose)
        until(lambda: peer.host.writes.open == 0)
        copied, target = honest.read()
        assert (copied.blocks, copied.reason) == (BLOCKS, ""), seed
        assert np.array_equal(target, honest.data), seed
        for slot in victim:
            header = table[slot]
            if header["state"] == COMMITTED and header["checksum"]:
                stored = peer.world.worker.slots(slot, 1, SPEC.slot_bytes)[0, : SPEC.part_bytes]
                assert xxhash.xxh3_64_intdigest(stored.tobytes()) == header["checksum"], seed
    assert not table[2 * BLOCKS :]["state"].any()
    assert not peer.world.worker.slots(2 * BLOCKS, 5, SPEC.slot_bytes).any()
    until(lambda: peer.server.open_connections <= 1)
    assert "peer_connection_failed" not in peer.log.getvalue(), "a bug of ours"
    made.close()
