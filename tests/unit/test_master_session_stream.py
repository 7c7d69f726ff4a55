"""Sessions of node clients over real gRPC: reports up, orders down, and every way in which they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvpool_master.core import messages as m
from kvpool_master.core.messages import BindSlab, Done, Retire
from kvpool_master.nodes_service import SessionStream
from kvpool_master.rpc import Guard
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.convert import spec_to_message
from kvpool_proto.errors import StaleIncarnation, UnknownLease, UnknownNode
from kvpool_proto.namespace import NamespaceSpec
from unit.master_double import EPOCH, ScriptedCore, play, refused, serving, until, untimed

SPEC = NamespaceSpec(model="m", block_tokens=16, part_bytes=4096, dtype="float16")
ID = b"i" * 16
CHAIN = b"k" * 48


def register(incarnation: int) -> pb.RegisterRequest:
    offer = pb.SegmentOffer(index=0, size_bytes=1 << 20, slab_bytes=1 << 16, numa_node=-1, contents=1 << 63, holds=True)
    return pb.RegisterRequest(node_id="a", incarnation=incarnation, segments=[offer], epoch_seen=EPOCH - 1)


def up(incarnation: int = 1, **reports: Any) -> pb.SessionUp:
    return pb.SessionUp(node_id="a", incarnation=incarnation, **reports)


async def opened(calls: Any, incarnation: int = 1) -> tuple[Any, pb.SessionDown]:
    stream = calls.nodes.Session()
    await stream.write(up(incarnation))
    return stream, await stream.read()


def binds(down: pb.SessionDown) -> list[tuple[int, int, int]]:
    return [(bind.segment, bind.slab, bind.slot_bytes) for bind in down.bind_slabs]


def test_registration_and_what_a_session_reports() -> None:
    core = ScriptedCore({m.Register: m.Registered((8,), (), ((ID, 6),))})

    async def scene() -> None:
        async with serving(core) as calls:
            reply = await calls.nodes.Register(register(1))
            assert reply == pb.RegisterReply(
                epoch=EPOCH,
                segment_handles=[8],
                heartbeat_ms=1_000,
                suspect_ms=5_000,
                retire_ms=60_000,
                tombstones=[pb.Tombstone(namespace_id=ID, stamp=6)],
                bypass=pb.Bypass(),
                capability_key=calls.server.shell.grants.key,
                master_ms=reply.master_ms,
                former_key_ms=300_000,
            )
            assert (len(reply.capability_key), reply.master_ms > 0) == (32, True)
            stream, hello = await opened(calls)
            assert untimed(hello) == pb.SessionDown(epoch=EPOCH)
            bound = pb.SlabBound(segment=8, slab=2, slot_bytes=4096, generation=1)
            bad = pb.BadBlock(namespace_id=ID, chain=CHAIN, stamp=5)
            # The answer to an order of a former epoch means nothing.
            cleared = [EPOCH << 32 | 4, (EPOCH - 1) << 32 | 5]
            copied = [pb.SlotsCopied(order=number, blocks=2, why="peer\n") for number in cleared]
            await stream.write(
                up(
                    slabs_bound=[bound],
                    workers_gone=[3],
                    bad_blocks=[bad],
                    cleared=cleared,
                    probed=9,
                    copied=copied,
                )
            )
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF
            await until(lambda: isinstance(core.commands[-1], m.SessionLost))
            await calls.nodes.Retire(pb.RetireRequest(node_id="a", incarnation=1))

    play(scene)
    assert core.commands == [
        m.Register("a", 1, (m.SegmentOffer(0, 1 << 20, 1 << 16, -1, 1 << 63, True),), EPOCH - 1),
        m.Heartbeat("a", 1),
        m.Heartbeat("a", 1),
        m.WorkerGone("a", 3),
        m.BlockBad(ID, CHAIN, 5),
        m.ProbeAnswered("a", 1, 9),
        m.SlotsCleared("a", 1, 4),
        m.SlotsCopied("a", 1, 4, 2),
        m.SlabBound("a", 1, 8, 2, 4096),
        m.SessionLost("a", 1),
        m.RetireNode("a", 1),
    ]


def test_orders_of_any_command_reach_the_node_once() -> None:
    first, second = BindSlab("a", 8, 0, 4096), BindSlab("a", 8, 1, 8192)
    core = ScriptedCore({m.Register: m.Registered((8,), (first,)), m.OpenNamespace: m.Opened(SPEC.id, 8192, (second,))})

    async def scene() -> None:
        async with serving(core) as calls:
            await calls.nodes.Register(register(1))
            stream, hello = await opened(calls)
            assert binds(hello) == [(8, 0, 4096)]
            await calls.pool.OpenNamespace(pb.OpenNamespaceRequest(spec=spec_to_message(SPEC)))
            assert binds(await stream.read()) == [(8, 1, 8192)]
            # One order is answered, one is not: a later session gets only the latter.
            await stream.write(up(slabs_bound=[pb.SlabBound(segment=8, slab=0, slot_bytes=4096)]))
            await until(lambda: isinstance(core.commands[-1], m.SlabBound))
            stream.cancel()
            await until(lambda: isinstance(core.commands[-1], m.SessionLost))
            _, hello = await opened(calls)
            assert binds(hello) == [(8, 1, 8192)]

    play(scene)


def test_a_newer_session_ends_the_older_without_calling_the_node_lost() -> None:
    core = ScriptedCore()

    async def scene() -> None:
        async with serving(core) as calls:
            old, _ = await opened(calls)
            new, _ = await opened(calls)
            assert await old.read() is grpc.aio.EOF
            await new.write(up(workers_gone=[1]))
            await until(lambda: isinstance(core.commands[-1], m.WorkerGone))
            assert calls.server.shell.sessions.open_sessions == 1

    play(scene)
    assert not [command for command in core.commands if isinstance(command, m.SessionLost)]


def test_a_superseded_session_is_not_heard_any_more() -> None:
    core = ScriptedCore()

    class Context:
        async def write(self, message: pb.SessionDown) -> None:
            pass

    async def scene() -> None:
        async with serving(core) as calls:
            shell = calls.server.shell

            async def messages() -> AsyncIterator[pb.SessionUp]:
                yield up()
                shell.sessions.open("a", 1)
                yield up(slabs_bound=[pb.SlabBound(segment=8, slab=0, slot_bytes=4096)])

            guard = Guard(shell.clock, shell.log, calls.server.rpc_times)
            await SessionStream(shell, guard).serve(messages(), Context())

    play(scene)
    assert core.commands == [m.Heartbeat("a", 1)]


def test_a_newer_incarnation_ends_the_older_session_with_the_error() -> None:
    core = ScriptedCore({m.Register: m.Registered((8,))})

    async def scene() -> None:
        async with serving(core) as calls:
            await calls.nodes.Register(register(1))
            old, _ = await opened(calls)
            await calls.nodes.Register(register(2))
            assert (await refused(old.read())).reason == "INCARNATION_STALE"

    play(scene)


def test_a_session_that_the_core_refuses_ends_with_the_error() -> None:
    def heartbeat(command: m.Heartbeat) -> Done:
        if command.incarnation < 5:
            raise StaleIncarnation("old")
        return Done()

    async def scene() -> None:
        async with serving(ScriptedCore({m.Heartbeat: heartbeat})) as calls:
            stream = calls.nodes.Session()
            await stream.write(up(4))
            assert (await refused(stream.read())).reason == "INCARNATION_STALE"
            stream = calls.nodes.Session()
            await stream.write(pb.SessionUp())
            assert (await refused(stream.read())).reason == "BAD_REQUEST"
            assert calls.server.shell.sessions.open_sessions == 0

    play(scene)


def test_a_heartbeat_that_is_refused_later_ends_the_session() -> None:
    core = ScriptedCore()

    async def scene() -> None:
        async with serving(core) as calls:
            stream, _ = await opened(calls)
            core.answers[m.Heartbeat] = UnknownNode("retired")
            await stream.write(up())
            assert (await refused(stream.read())).reason == "NODE_UNKNOWN"

    play(scene)


def test_a_refused_report_costs_the_node_nothing() -> None:
    core = ScriptedCore({m.WorkerGone: UnknownLease("no")})

    async def scene() -> None:
        async with serving(core) as calls:
            stream, _ = await opened(calls)
            await stream.write(up(workers_gone=[1, 2]))
            await stream.write(up())
            await until(lambda: core.commands[-1] == m.Heartbeat("a", 1) and len(core.commands) == 5)
            assert "report_refused" in calls.log.getvalue()

    play(scene)


def test_a_node_that_was_given_up_is_told_so() -> None:
    async def scene() -> None:
        async with serving(ScriptedCore()) as calls:
            stream, _ = await opened(calls)
            sessions = calls.server.shell.sessions
            sessions.carry_out((Retire("a", 0), Retire("b", 1)))
            assert sessions.open_sessions == 1
            sessions.carry_out((Retire("a", 1),))
            assert (await stream.read()).retired
            assert await stream.read() is grpc.aio.EOF

    play(scene)


def test_a_stop_ends_open_sessions_at_once() -> None:
    async def scene() -> None:
        async with serving(ScriptedCore(), drain_ms=60_000) as calls:
            stream, _ = await opened(calls)
            async with asyncio.timeout(10):
                await calls.server.stop()
            assert await stream.read() is grpc.aio.EOF

    play(scene)
