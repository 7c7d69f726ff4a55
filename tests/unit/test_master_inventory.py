"""Inventories over real gRPC: columns to strands, what is refused, and a directory that comes back from one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kvpool_master.convert_nodes import inventory_from_message
from kvpool_master.core import messages as m
from kvpool_master.core.messages import Parent
from kvpool_master.core.pool import Pool
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.convert import spec_to_message
from kvpool_proto.errors import BadRequest, StaleInventory
from kvpool_proto.keys import chain_of
from kvpool_proto.namespace import NamespaceSpec
from unit.master_double import EPOCH, ScriptedCore, play, refused, serving, until, untimed

SPEC = NamespaceSpec(model="m", block_tokens=16, part_bytes=4096, dtype="float16")
OPEN = pb.OpenNamespaceRequest(spec=spec_to_message(SPEC))
NUMBER = EPOCH << 32 | 3
SLAB_BYTES = 1 << 20


def chunk(**changes: Any) -> pb.InventoryChunk:
    return pb.InventoryChunk(**({"node_id": "a", "incarnation": 1, "number": NUMBER, "segment": 8} | changes))


def strands(**changes: Any) -> pb.Strands:
    """Two strands of 3 and 1 blocks, the first in two extents; keys of one byte for brevity."""
    fields: dict[str, Any] = {
        "namespace_id": SPEC.id,
        "key_bytes": 1,
        "slot_bytes": 4096,
        "part_from": 1,
        "part_to": 3,
        "blocks": [3, 1],
        "extents": [2, 1],
        "parent_kind": [pb.PARENT_ROOT, pb.PARENT_KEY],
        "parent_keys": b"\0c",
        "keys": b"abcd",
        "extent_blocks": [2, 1, 1],
        "first_slot": [10, 20, 30],
        "stride": [2, 2, 4],
        "stamp": [5, 6, 1 << 63],
    }
    return pb.Strands(**(fields | changes))


def commands(message: pb.InventoryChunk) -> list[m.Command]:
    return list(inventory_from_message(message, EPOCH))


def test_a_chunk_becomes_commands_in_order() -> None:
    writing = pb.WritingSlots(slot_bytes=4096, first_slot=[1, 7], slots=[2, 1], worker_id=[9, 0])
    end = pb.InventoryEnd(blocks=4, slots_writing=3)
    message = chunk(slab=[0, 2], slot_bytes=[4096, 8192], strands=[strands()], writing=[writing], end=end)
    first = m.Strand(Parent.ROOT, b"abc", ((2, 10, 2, 5), (1, 20, 2, 6)))
    second = m.Strand(b"c", b"d", ((1, 30, 4, 1 << 63),))
    assert commands(message) == [
        m.InventorySlabs("a", 1, 3, 8, ((0, 4096), (2, 8192))),
        m.InventoryStrands("a", 1, 3, 8, SPEC.id, 1, 4096, 1, 3, (first, second)),
        m.InventoryWriting("a", 1, 3, 8, 4096, ((1, 2, 9), (7, 1, 0))),
        m.InventoryEnd("a", 1, 3, 4, 3),
    ]


def test_a_segment_without_bound_slabs_says_so_with_an_empty_chunk() -> None:
    assert commands(chunk()) == [m.InventorySlabs("a", 1, 3, 8, ())]
    assert commands(chunk(end=pb.InventoryEnd())) == [m.InventoryEnd("a", 1, 3, 0, 0)]


BAD_STRANDS: dict[str, dict[str, Any]] = {
    "a strand without a parent": {"parent_kind": [pb.PARENT_ROOT]},
    "a parent of no kind": {"parent_kind": [pb.PARENT_ROOT, 0]},
    "too few parent keys": {"parent_keys": b"\0"},
    "too many keys": {"keys": b"abcde"},
    "keys of another length": {"key_bytes": 2},
    "fewer extents than said": {"extents": [2, 2]},
    "more extents than said": {"extents": [1, 1]},
    "an extent without stamp": {"stamp": [5, 6]},
    "a strand too many": {"blocks": [3, 1, 0]},
}


@pytest.mark.parametrize("case", BAD_STRANDS)
def test_columns_that_do_not_fit_together_are_refused(case: str) -> None:
    with pytest.raises(BadRequest):
        commands(chunk(strands=[strands(**BAD_STRANDS[case])]))


@pytest.mark.parametrize(
    "changes", [{"slab": [1]}, {"slot_bytes": [4096]}, {"writing": [pb.WritingSlots(first_slot=[1], slots=[1])]}]
)
def test_slabs_and_slots_in_columns_of_different_lengths_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        commands(chunk(**changes))


@pytest.mark.parametrize("number", [3, (EPOCH - 1) << 32 | 3, (EPOCH + 1) << 32 | 3])
def test_a_number_of_another_epoch_is_stale(number: int) -> None:
    with pytest.raises(StaleInventory):
        commands(chunk(number=number))


async def sent(calls: Any, chunks: Iterable[pb.InventoryChunk]) -> pb.InventoryReply:
    return await calls.nodes.Inventory(iter(chunks))


def test_the_reply_counts_what_became_of_the_blocks() -> None:
    taken = iter([m.Taken(1, 2, 3), m.Taken(10, 20, 30)])
    core = ScriptedCore({m.InventoryStrands: lambda _: next(taken)})

    async def scene() -> None:
        async with serving(core) as calls:
            reply = await sent(calls, [chunk(strands=[strands(), strands()]), chunk(end=pb.InventoryEnd())])
            assert reply == pb.InventoryReply(blocks_taken=11, blocks_surplus=22, blocks_unclaimed=33)

    play(scene)


def test_a_refusal_ends_the_stream_and_so_does_its_own_early_end() -> None:
    core = ScriptedCore({m.InventoryWriting: StaleInventory("another is awaited")})
    writing = pb.WritingSlots(slot_bytes=4096, first_slot=[1], slots=[2], worker_id=[9])

    async def scene() -> None:
        async with serving(core) as calls:
            stale = sent(calls, [chunk(writing=[writing]), chunk(end=pb.InventoryEnd())])
            assert (await refused(stale)).reason == "INVENTORY_STALE"
            assert (await refused(sent(calls, [chunk(slab=[0], slot_bytes=[4096])]))).reason == "BAD_REQUEST"
            assert (await refused(sent(calls, []))).reason == "BAD_REQUEST"
            former = chunk(number=(EPOCH - 1) << 32 | 3, end=pb.InventoryEnd())
            assert (await refused(sent(calls, [former]))).reason == "INVENTORY_STALE"
            calls.server.shell.stopping = True
            assert (await refused(sent(calls, [chunk(end=pb.InventoryEnd())]))).reason == "STOPPING"

    play(scene)
    assert [type(command) for command in core.commands] == [m.InventoryWriting, m.InventorySlabs]


def test_others_are_answered_between_the_commands_of_a_chunk() -> None:
    order: list[str] = []

    def strand(command: m.InventoryStrands) -> m.Taken:
        order.append("strands")
        return m.Taken(0, 0, 0)

    def release(command: m.Release) -> m.Released:
        order.append("release")
        return m.Released(0)

    core = ScriptedCore({m.InventoryStrands: strand, m.Release: release})
    many = chunk(strands=[strands()] * 2_000)

    async def scene() -> None:
        async with serving(core) as calls:
            report = asyncio.create_task(sent(calls, [many, chunk(end=pb.InventoryEnd())]))
            await until(lambda: order)
            await calls.pool.Release(pb.ReleaseRequest())
            await report

    play(scene)
    assert 0 < order.index("release") < 2_000


def test_a_question_stands_until_its_inventory_is_complete() -> None:
    ask = m.AskInventory("a", 1, 3)
    core = ScriptedCore({m.Register: m.Registered((8,), (ask, m.AskWorkers("a", (5, 6))))})
    offer = pb.SegmentOffer(index=0, size_bytes=SLAB_BYTES, slab_bytes=SLAB_BYTES, contents=1, holds=True)

    async def scene() -> None:
        async with serving(core) as calls:
            await calls.nodes.Register(pb.RegisterRequest(node_id="a", incarnation=1, segments=[offer]))
            hellos: list[pb.SessionDown] = []
            for ended in (False, True):
                stream = calls.nodes.Session()
                await stream.write(pb.SessionUp(node_id="a", incarnation=1))
                hellos.append(untimed(await stream.read()))
                if not ended:
                    await sent(calls, [chunk(end=pb.InventoryEnd())])
            asked = pb.SessionDown(epoch=EPOCH, report_inventory=NUMBER, ask_workers=[5, 6])
            assert hellos == [asked, pb.SessionDown(epoch=EPOCH, ask_workers=[5, 6])]

    play(scene)


def test_the_next_life_of_a_master_finds_what_a_node_reports(tmp_path: Path) -> None:
    keys = chain_of(range(3 * 16), 16, SPEC.key_bytes, "seed")
    offer = pb.SegmentOffer(index=0, size_bytes=SLAB_BYTES, slab_bytes=SLAB_BYTES, contents=77, holds=True)

    async def look(calls: Any) -> pb.LookupReply:
        return await calls.pool.Lookup(pb.LookupRequest(namespace_id=SPEC.id, chain=keys, lease_id=b"l" * 16))

    async def scene() -> None:
        async with serving(Pool, state_dir=str(tmp_path)) as calls:
            await calls.pool.OpenNamespace(OPEN)
            first = pb.SegmentOffer(index=0, size_bytes=SLAB_BYTES, slab_bytes=SLAB_BYTES, contents=77)
            await calls.nodes.Register(pb.RegisterRequest(node_id="a", incarnation=1, segments=[first]))
        async with serving(Pool, state_dir=str(tmp_path)) as calls:
            epoch = calls.server.shell.epoch
            assert not calls.server.shell.ready.is_set()
            request = pb.RegisterRequest(node_id="a", incarnation=1, segments=[offer], epoch_seen=epoch - 1)
            handle = (await calls.nodes.Register(request)).segment_handles[0]
            stream = calls.nodes.Session()
            await stream.write(pb.SessionUp(node_id="a", incarnation=1))
            number = (await stream.read()).report_inventory
            held = pb.Strands(
                namespace_id=SPEC.id, key_bytes=16, slot_bytes=4096, part_to=1, blocks=[3], extents=[1],
                parent_kind=[pb.PARENT_ROOT], parent_keys=bytes(16), keys=keys,
                extent_blocks=[3], first_slot=[4], stride=[1], stamp=[(epoch - 1) << 32 | 1],
            )  # fmt: skip
            report = [
                chunk(number=number, segment=handle, slab=[0], slot_bytes=[4096]),
                chunk(number=number, segment=handle, strands=[held]),
                chunk(number=number, end=pb.InventoryEnd(blocks=3)),
            ]
            assert await sent(calls, report) == pb.InventoryReply(blocks_taken=3)
            # The namespace is known from the state directory: nobody has opened it again.
            hit = await look(calls)
            assert (hit.hit_blocks, list(hit.extents.first_slot), hit.epoch) == (3, [4], epoch)
            calls.server.shell.tick()
            assert calls.server.shell.ready.is_set()
            assert (await refused(sent(calls, report))).reason == "INVENTORY_STALE"

    play(scene)
