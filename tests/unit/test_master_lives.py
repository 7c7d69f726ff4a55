"""The shell around the core: memory before answers, epochs met, readiness, the switch, and a Master that was late."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvpool_master.core import messages as m
from kvpool_master.core.pool import Pool
from kvpool_master.core.settings import Settings
from kvpool_master.core.snapshot import PoolCounters
from kvpool_master.server import StartError
from kvpool_master.state import EPOCH_MAX, State, StateError
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.convert import spec_to_message
from kvpool_proto.namespace import NamespaceSpec
from unit.master_double import EPOCH, Calls, ScriptedCore, Stopped, picture, play, refused, serving, until, untimed

SPEC = NamespaceSpec(model="m", block_tokens=16, part_bytes=4096, dtype="float16")
OPEN = pb.OpenNamespaceRequest(spec=spec_to_message(SPEC))
ID = b"i" * 16


def register(node: str = "a", epoch_seen: int = 0, incarnation: int = 1) -> pb.RegisterRequest:
    offer = pb.SegmentOffer(index=0, size_bytes=1 << 20, slab_bytes=1 << 16, numa_node=-1)
    return pb.RegisterRequest(node_id=node, incarnation=incarnation, segments=[offer], epoch_seen=epoch_seen)


async def opened(calls: Calls, node: str = "a") -> tuple[Any, pb.SessionDown]:
    stream = calls.nodes.Session()
    await stream.write(pb.SessionUp(node_id=node, incarnation=1))
    return stream, await stream.read()


def next_start(folder: Path) -> Any:
    state = State.open(str(folder))
    try:
        return state.begin(0.0, Settings())
    finally:
        state.close()


# -- memory before answers


def test_what_the_core_wants_remembered_is_on_the_disk_before_the_answer(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(Pool, state_dir=str(tmp_path)) as calls:
            await calls.nodes.Register(register())
            await calls.pool.OpenNamespace(OPEN)
            await calls.pool.Purge(pb.PurgeRequest(namespace_id=SPEC.id))
            assert sum(calls.server.shell.state_writes.counts) == 3

    play(scene)
    memory = next_start(tmp_path).memory
    assert (memory.namespaces, memory.nodes) == ((SPEC,), ("a",))
    assert memory.tombstones == ((SPEC.id, EPOCH << 32),)


def test_a_master_that_cannot_remember_answers_nothing_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    order = m.BindSlab("a", 8, 0, 4096)
    core = ScriptedCore(
        {
            m.OpenNamespace: m.Opened(SPEC.id, 4096, (order, m.Remember(namespace=SPEC))),
            m.Release: m.Released(0),
            m.Register: m.Registered((8,)),
        }
    )

    def broken(self: State, effects: Any) -> None:
        raise StateError("the disk is full")

    async def scene() -> None:
        async with serving(core, drain_ms=60_000) as calls:
            await calls.nodes.Register(register())
            stream, _ = await opened(calls)
            monkeypatch.setattr(State, "remember", broken)
            error = await refused(calls.pool.OpenNamespace(OPEN))
            assert (error.reason, str(error)) == ("STOPPING", "the disk is full")
            shell = calls.server.shell
            assert (shell.failure, shell.ended.is_set()) == ("the disk is full", True)
            assert await stream.read() is grpc.aio.EOF, "the order went out all the same"
            commands = len(core.commands)
            assert (await refused(calls.pool.Release(pb.ReleaseRequest()))).reason == "STOPPING"
            shell.tick()
            assert len(core.commands) == commands
            assert calls.log.getvalue().count('"event": "failed"') == 1

    play(scene)


def test_a_tick_that_cannot_be_remembered_ends_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    core = ScriptedCore({m.Tick: m.Done((m.Remember(node_gone="a"),))})

    def broken(self: State, effects: Any) -> None:
        raise StateError("gone")

    monkeypatch.setattr(State, "remember", broken)

    async def scene() -> None:
        async with serving(core, tick_ms=1) as calls:
            await calls.server.shell.ended.wait()
            assert (calls.server.shell.failure, calls.server.shell.failed_ticks) == ("gone", 0)

    play(scene)


def test_a_clean_stop_leaves_the_grace_that_the_core_says_and_a_failure_does_not(tmp_path: Path) -> None:
    core = ScriptedCore()
    core.grace_ms = 77

    async def scene() -> None:
        async with serving(core, state_dir=str(tmp_path)):
            pass
        assert next_start(tmp_path).memory.grace_ms == 77
        async with serving(core, state_dir=str(tmp_path)) as calls:
            calls.server.shell.fail("broken")

    play(scene)
    assert next_start(tmp_path).memory.grace_ms == Settings().write_max_ms


def test_two_masters_on_one_directory(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(ScriptedCore(), state_dir=str(tmp_path)):
            with pytest.raises(StartError, match="another Master"):
                async with serving(ScriptedCore(), state_dir=str(tmp_path)):
                    pass

    play(scene)


# -- epochs


def test_a_master_that_has_reserved_nothing_moves_above_an_epoch_that_it_meets(tmp_path: Path) -> None:
    async def scene() -> None:
        async with serving(Pool, state_dir=str(tmp_path)) as calls:
            await calls.pool.OpenNamespace(OPEN)
            assert (await calls.nodes.Register(register("b"))).epoch == EPOCH
            stream, _ = await opened(calls, "b")
            former = calls.server.shell.core
            assert (await calls.nodes.Register(register("a", EPOCH + 20))).epoch == EPOCH + 21
            assert (await refused(stream.read())).reason == "NODE_UNKNOWN"
            core = calls.server.shell.core
            assert isinstance(core, Pool)
            assert core is not former
            assert (await calls.pool.OpenNamespace(OPEN)).epoch == EPOCH + 21
            assert set(core.namespaces) == {SPEC.id}
            # Whom we told it obeys our own epoch.
            assert (await calls.nodes.Register(register("a", EPOCH + 21))).epoch == EPOCH + 21
            assert calls.server.shell.core is core

    play(scene)
    assert next_start(tmp_path).epoch == EPOCH + 22


def test_our_own_epoch_from_a_node_that_we_never_told_it_is_anothers() -> None:
    async def scene() -> None:
        async with serving(Pool) as calls:
            assert (await calls.nodes.Register(register("a", EPOCH))).epoch == EPOCH + 1

    play(scene)


def test_a_master_that_has_reserved_something_ends_and_the_next_life_is_above(tmp_path: Path) -> None:
    core = ScriptedCore({m.Register: m.Registered((8,))})
    core.reserved_anything = True

    async def scene() -> None:
        async with serving(core, state_dir=str(tmp_path)) as calls:
            assert (await calls.nodes.Register(register("a", EPOCH - 1))).epoch == EPOCH
            assert (await refused(calls.nodes.Register(register("b", EPOCH + 20)))).reason == "STOPPING"
            assert f"epoch {EPOCH + 20}" in calls.server.shell.failure
            assert calls.server.shell.ended.is_set()

    play(scene)
    assert next_start(tmp_path).epoch == EPOCH + 22


def test_a_number_that_can_be_no_epoch_is_refused() -> None:
    async def scene() -> None:
        async with serving(Pool) as calls:
            assert (await refused(calls.nodes.Register(register("a", EPOCH_MAX)))).reason == "BAD_REQUEST"
            assert (await calls.nodes.Register(register("a"))).epoch == EPOCH

    play(scene)


def test_grants_of_another_epoch_are_refused_and_those_of_ours_are_not() -> None:
    core = ScriptedCore({m.Renew: m.Renewed(5), m.Commit: m.Committed(1, 0), m.Abort: m.Aborted(True)})

    async def scene() -> None:
        async with serving(core) as calls:
            for epoch in (EPOCH - 1, EPOCH + 1):
                for call in (
                    calls.pool.Renew(pb.RenewRequest(lease_id=ID, epoch=epoch)),
                    calls.pool.Commit(pb.CommitRequest(reservation_id=ID, epoch=epoch)),
                    calls.pool.Abort(pb.AbortRequest(reservation_id=ID, epoch=epoch)),
                ):
                    assert (await refused(call)).reason == "STALE_EPOCH"
            assert core.commands == []
            for epoch in (0, EPOCH):
                await calls.pool.Renew(pb.RenewRequest(lease_id=ID, epoch=epoch))
                await calls.pool.Commit(pb.CommitRequest(reservation_id=ID, epoch=epoch))
                await calls.pool.Abort(pb.AbortRequest(reservation_id=ID, epoch=epoch))
            assert len(core.commands) == 6

    play(scene)


# -- what nodes are told


def test_a_purge_is_told_to_every_node_also_to_one_whose_session_opens_later() -> None:
    purged = m.Purged(4, 9, (m.Remember(tombstone=(ID, 9)), m.Bury(ID, 9)))
    core = ScriptedCore({m.Register: m.Registered((8,)), m.Purge: purged})
    told = [pb.Tombstone(namespace_id=ID, stamp=9)]

    async def scene() -> None:
        async with serving(core) as calls:
            for node in ("a", "b"):
                await calls.nodes.Register(register(node))
            stream, hello = await opened(calls)
            assert not hello.tombstones
            await calls.pool.Purge(pb.PurgeRequest(namespace_id=ID))
            assert list((await stream.read()).tombstones) == told
            _, hello = await opened(calls, "b")
            assert list(hello.tombstones) == told

    play(scene)


def test_the_switch_is_durable_and_told_at_once(tmp_path: Path) -> None:
    core = ScriptedCore({m.Register: m.Registered((8,))})
    switch = pb.Bypass(lookups=True, stores=True)

    async def scene() -> None:
        async with serving(core, state_dir=str(tmp_path)) as calls:
            assert not (await calls.nodes.Register(register())).bypass.lookups
            stream, hello = await opened(calls)
            assert not hello.HasField("bypass")
            assert (await calls.admin.SetBypass(pb.SetBypassRequest(bypass=switch))).nodes_told == 1
            assert (await stream.read()).bypass == switch
        async with serving(core, state_dir=str(tmp_path)) as calls:
            assert (await calls.admin.Status(pb.StatusRequest())).bypass == switch
            assert (await calls.nodes.Register(register())).bypass == switch
            await calls.admin.SetBypass(pb.SetBypassRequest())
            assert (await calls.nodes.Register(register())).bypass == pb.Bypass()
            assert untimed((await opened(calls))[1]) == pb.SessionDown(epoch=calls.server.shell.epoch)

    play(scene)


def test_a_remove_waits_for_the_nodes_and_names_those_that_did_not_answer() -> None:
    orders = tuple(m.ClearSlots(node, at, 8, 4096, ((5, 2, 1 << 63),)) for at, node in enumerate("abc", 1))
    core = ScriptedCore({m.Register: m.Registered((8,)), m.Remove: m.Removed(3, ("c",), orders)})

    async def scene() -> None:
        async with serving(core, clear_wait_ms=60_000) as calls:
            streams = {}
            for node in "ab":
                await calls.nodes.Register(register(node))
                streams[node], _ = await opened(calls, node)
            removing = calls.pool.Remove(pb.RemoveRequest(namespace_id=ID, chain=b"k" * 16))
            for node, stream in streams.items():
                (order,) = (await stream.read()).clear_slots
                assert (order.segment, order.slot_bytes) == (8, 4096)
                assert (list(order.first_slot), list(order.slots), list(order.stamp)) == ([5], [2], [1 << 63])
                await stream.write(pb.SessionUp(node_id=node, incarnation=1, cleared=[order.order]))
            assert await removing == pb.RemoveReply(removed_blocks=3, nodes_away=["c"])
            cleared = [command for command in core.commands if isinstance(command, m.SlotsCleared)]
            assert sorted((command.node, command.order) for command in cleared) == [("a", 1), ("b", 2)]
            # With nobody answering, the request's own deadline counts.
            reply = await calls.pool.Remove(pb.RemoveRequest(namespace_id=ID, chain=b"k" * 16), timeout=0.3)
            assert list(reply.nodes_away) == ["a", "b", "c"]

    play(scene)


# -- readiness


def http(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_it_serves_at_once_and_is_ready_when_the_core_says_so() -> None:
    core = ScriptedCore({m.Release: m.Released(0), m.Register: m.Registered((8,))})
    core.picture = picture(ready=False, recovery="2 nodes have not come back (a, b)")

    async def scene() -> None:
        async with serving(core, tick_ms=60_000) as calls:
            server, health = calls.server, health_pb2_grpc.HealthStub(calls.channel)

            async def status(name: str) -> Any:
                return (await health.Check(health_pb2.HealthCheckRequest(service=name))).status  # pyright: ignore

            await calls.nodes.Register(register())
            await calls.pool.Release(pb.ReleaseRequest())
            answer = await asyncio.to_thread(http, server.http_port, "/readyz")
            assert answer == (503, "recovering: 2 nodes have not come back (a, b)\n")
            for name in ("", "kvpool.v1.Pool"):
                assert await status(name) == health_pb2.HealthCheckResponse.NOT_SERVING
            core.picture = picture(ready=True, counters=PoolCounters(recovered_blocks=1234))
            server.shell.tick()
            assert '"recovered_blocks": 1234' in calls.log.getvalue()
            core.picture = picture(ready=False)  # ready once, ready for ever
            server.shell.tick()
            assert await asyncio.to_thread(http, server.http_port, "/readyz") == (200, "ready\n")
            for name in ("", "kvpool.v1.Pool"):
                assert await status(name) == health_pb2.HealthCheckResponse.SERVING
            assert calls.log.getvalue().count('"recovered"') == 1

    play(scene)


# -- a Master that was late


def test_a_late_master_ticks_before_it_obeys_and_expires_nobody() -> None:
    time = Stopped()

    async def scene() -> None:
        async with serving(Pool, time.clock(), tick_ms=60_000) as calls:
            shell = calls.server.shell
            await calls.nodes.Register(register())
            stream, _ = await opened(calls)
            time.ms += 10 * Settings().retire_ms
            # The next that it reads is somebody else's request, then what the node said meanwhile.
            assert (await calls.nodes.Register(register("b"))).epoch == EPOCH
            assert {node.node: node.state for node in shell.snapshot().nodes} == {"a": "up", "b": "ramp"}
            # A session that broke meanwhile, perhaps for want of our answers, makes nobody suspect.
            stream.cancel()
            await until(lambda: "session_lost" in calls.log.getvalue())
            assert {node.state for node in shell.snapshot().nodes} == {"up", "ramp"}
            # Its heartbeats decide, within the usual time.
            for _ in range(Settings().suspect_ms // 1_000):
                assert shell.snapshot().nodes[0].state == "up"
                time.ms += 1_000
                shell.tick()
            assert shell.snapshot().nodes[0].state == "suspect"

    play(scene)


def test_a_session_that_breaks_makes_its_node_suspect_when_the_master_was_in_time() -> None:
    time = Stopped()

    async def scene() -> None:
        async with serving(Pool, time.clock(), tick_ms=60_000) as calls:
            await calls.nodes.Register(register())
            stream, _ = await opened(calls)
            stream.cancel()
            await until(lambda: [node.state for node in calls.server.shell.snapshot().nodes] == ["suspect"])

    play(scene)
