"""Holders and capabilities in replies: who gets the right to what, and that a worker builds the same tables."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool_master.core import messages as m
from kvpool_master.core.extents import pack
from kvpool_master.core.messages import Reason, RunState
from kvpool_master.core.pool import Pool
from kvpool_master.core.settings import Settings
from kvpool_master.grants import Grants
from kvpool_master.service import WRITE_SLACK_MS
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.capability import READ, WRITE, make_mac, part_table
from kvpool_proto.convert import spec_to_message
from kvpool_proto.namespace import NamespaceSpec
from unit.master_double import EPOCH, ScriptedCore, Stopped, play, serving, until

ID = b"i" * 16
CHAIN = b"k" * 48
TWO = b"k" * 16 + b"l" * 16
SPEC = NamespaceSpec(model="m", block_tokens=16, part_bytes=4096, dtype="float16", parts=2)
PACKED = pack(0, 2, 1, 10, 0, 2, 2, EPOCH << 32) + pack(2, 1, 3, 7, 0, 2, 2, EPOCH << 32 | 5)
HOLDERS = {1: ("a", "10.0.0.1:9502"), 3: ("b", "10.0.0.2:9502"), 4: ("c", "")}
NOW_MS = 5_000
SETTINGS = Settings()


def granted(calls: Any, op: Any, until_ms: int, own: str = "") -> list[pb.Holder]:
    """As the key of this life grants it."""
    made = Grants(calls.server.shell.grants.key, EPOCH, lambda handle: HOLDERS[handle])
    return made.holders(op, ID, PACKED, until_ms, own)


def test_a_lookup_names_the_holders_and_grants_reading_for_the_life_of_a_lease() -> None:
    core = ScriptedCore(
        {m.Lookup: m.Hit(3, Reason.NONE, PACKED, 5_000), m.Peek: m.Peeked(3, Reason.NONE, PACKED, None)}, HOLDERS
    )
    until_ms = NOW_MS + SETTINGS.lease_life_max_ms

    async def scene() -> None:
        async with serving(core, Stopped(NOW_MS).clock()) as calls:
            elsewhere = await calls.pool.Lookup(pb.LookupRequest(namespace_id=ID, chain=CHAIN))
            at_home = await calls.pool.Lookup(pb.LookupRequest(namespace_id=ID, chain=CHAIN, node_id="a"))
            assert (elsewhere.valid_until_ms, at_home.valid_until_ms) == (until_ms, until_ms)
            assert list(elsewhere.holders) == granted(calls, READ, until_ms)
            assert list(at_home.holders) == granted(calls, READ, until_ms, own="a")
            assert [len(holder.mac) for holder in at_home.holders] == [0, 2]
            await calls.pool.Peek(pb.PeekRequest(namespace_id=ID, chain=CHAIN))
            assert calls.server.shell.grants.made == 6, "a peek grants nothing"

    play(scene)
    assert [command for command in core.commands if isinstance(command, m.Lookup)] == [
        m.Lookup(ID, CHAIN, 0, b""),
        m.Lookup(ID, CHAIN, 0, b"", "a"),
    ]


def test_a_miss_grants_nothing() -> None:
    async def scene() -> None:
        async with serving(ScriptedCore({m.Lookup: m.Hit(0, Reason.HOLE, b"", 0)}, HOLDERS)) as calls:
            reply = await calls.pool.Lookup(pb.LookupRequest(namespace_id=ID, chain=CHAIN))
            assert reply == pb.LookupReply(reason=pb.REASON_HOLE, epoch=EPOCH)

    play(scene)


@pytest.mark.parametrize(
    ("nodes", "own"), [([], ""), (["a"], "a"), (["a", "a"], "a"), (["a", "b"], ""), (["elsewhere"], "elsewhere")]
)
def test_a_reservation_grants_writing_a_little_longer_than_it_lasts(nodes: list[str], own: str) -> None:
    runs = (m.Run(0, 2, 0, 2, RunState.YOURS), m.Run(2, 1, 0, 2, RunState.YOURS, 1))
    core = ScriptedCore({m.Reserve: m.Reserved(3, Reason.NONE, runs, PACKED, 9_000)}, HOLDERS)
    until_ms = NOW_MS + 9_000 + WRITE_SLACK_MS
    ask = pb.ReserveRequest(namespace_id=ID, chain=CHAIN, parent_kind=pb.PARENT_ROOT, part_to=2, nodes=nodes)

    async def scene() -> None:
        async with serving(core, Stopped(NOW_MS).clock()) as calls:
            for _ in range(2):  # a retry is granted anew
                reply = await calls.pool.Reserve(ask)
                assert reply.valid_until_ms == until_ms
                assert list(reply.holders) == granted(calls, WRITE, until_ms, own)
                assert not reply.run_share

    play(scene)


async def joined(calls: Any, node: str) -> tuple[Any, list[int]]:
    """A node client's stream and handles, after it has bound the slabs that it was told to at first."""
    offer = pb.SegmentOffer(index=0, size_bytes=1 << 20, slab_bytes=1 << 16, numa_node=-1)
    request = pb.RegisterRequest(node_id=node, incarnation=1, segments=[offer], data_address=f"10.0.0.{ord(node)}:9502")
    handles = list((await calls.nodes.Register(request)).segment_handles)
    stream = calls.nodes.Session()
    await stream.write(pb.SessionUp(node_id=node, incarnation=1))
    down = await stream.read()
    bound = [pb.SlabBound(segment=one.segment, slab=one.slab, slot_bytes=one.slot_bytes) for one in down.bind_slabs]
    assert bound
    await stream.write(pb.SessionUp(node_id=node, incarnation=1, slabs_bound=bound))
    return stream, handles


def check_as_a_worker_does(key: bytes, op: Any, reply: Any) -> dict[str, int]:
    """Macs by holder, each of which is that of the columns of the reply."""
    found: dict[str, int] = {}
    columns = ("segment", "first_slot", "blocks", "stride", "stamp", "part_from")
    for holder in reply.holders:
        found[holder.node_id] = len(holder.mac)
        for part, mac in zip(holder.part, holder.mac, strict=True):
            there = [
                at
                for at, segment in enumerate(reply.extents.segment)
                if segment in holder.segments and reply.extents.part_from[at] <= part < reply.extents.part_to[at]
            ]
            table = part_table(part, **{name: [getattr(reply.extents, name)[at] for at in there] for name in columns})
            head = (key, op, reply.epoch, reply.valid_until_ms, SPEC.id, part)
            assert mac == make_mac(*head, table.tobytes())
    return found


def test_a_stored_block_is_granted_to_whoever_is_elsewhere() -> None:
    put = {"namespace_id": SPEC.id, "chain": TWO, "parent_kind": pb.PARENT_ROOT, "part_to": 2}

    async def scene() -> None:
        async with serving(Pool) as calls:
            shell = calls.server.shell
            await calls.pool.OpenNamespace(pb.OpenNamespaceRequest(spec=spec_to_message(SPEC)))
            streams = {node: await joined(calls, node) for node in ("a", "b")}
            await until(lambda: not any(s.slabs_bound == 0 for n in shell.snapshot().nodes for s in n.segments))
            ask = pb.ReserveRequest(reservation_id=b"r" * 16, nodes=["a"], **put)
            at_home = await calls.pool.Reserve(ask)
            assert check_as_a_worker_does(shell.grants.key, WRITE, at_home) == {"a": 0}
            await calls.pool.Abort(pb.AbortRequest(reservation_id=b"r" * 16, writer=True))
            ask = pb.ReserveRequest(reservation_id=b"s" * 16, avoid_nodes=["a"], **put)
            elsewhere = await calls.pool.Reserve(ask)
            assert check_as_a_worker_does(shell.grants.key, WRITE, elsewhere) == {"b": 2}
            assert list(elsewhere.holders[0].segments) == streams["b"][1]
            await calls.pool.Commit(pb.CommitRequest(reservation_id=b"s" * 16, part_to=2, blocks_written=2))
            hits = [
                await calls.pool.Lookup(
                    pb.LookupRequest(namespace_id=SPEC.id, chain=TWO, lease_id=bytes([at]) * 16, node_id=node)
                )
                for at, node in enumerate(("", "a", "b"))
            ]
            assert [hit.hit_blocks for hit in hits] == [2, 2, 2]
            found = [check_as_a_worker_does(shell.grants.key, READ, hit) for hit in hits]
            assert found == [{"b": 2}, {"b": 2}, {"b": 0}]
            assert hits[0].holders[0].data_address == f"10.0.0.{ord('b')}:9502"

    play(scene)
