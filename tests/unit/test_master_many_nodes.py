"""What the shell adds for many nodes: shares, copies, reports, drains, quotas, the log."""

from __future__ import annotations

from pathlib import Path

from kvpool_master.core import messages as m
from kvpool_master.core.liveness import Node
from kvpool_master.core.messages import Reason, RunState
from kvpool_master.core.pool import Pool
from kvpool_master.core.settings import Settings
from kvpool_master.core.snapshot import NodeSnapshot, TenantSnapshot
from kvpool_master.node_watch import WATCH_MS
from kvpool_master.sessions import TIME_TOLD_MS
from kvpool_master.state import State
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import UnknownNode
from unit.master_double import EPOCH, ScriptedCore, Stopped, picture, play, refused, serving, until, untimed

ID = b"i" * 16
CHAIN = b"k" * 48
HOLDERS = {1: ("a", "10.0.0.1:9502"), 3: ("b", "10.0.0.2:9502"), 4: ("c", "")}
NOW_MS = 5_000
SETTINGS = Settings()


def test_shares_and_nodes_to_avoid_travel_both_ways() -> None:
    runs = (m.Run(0, 2, 0, 1, RunState.YOURS), m.Run(2, 1, 0, 1, RunState.YOURS, 1))
    core = ScriptedCore(
        {
            m.Reserve: m.Reserved(3, Reason.NONE, runs, b"", 0),
            m.Commit: m.Committed(2, 0),
            m.Abort: m.Aborted(True),
        },
        HOLDERS,
    )

    async def scene() -> None:
        async with serving(core) as calls:
            reply = await calls.pool.Reserve(
                pb.ReserveRequest(
                    namespace_id=ID,
                    chain=CHAIN,
                    parent_kind=pb.PARENT_ROOT,
                    part_to=1,
                    shares=2,
                    share=1,
                    avoid_nodes=["x", "y"],
                )
            )
            assert (list(reply.run_share), list(reply.holders), reply.valid_until_ms) == ([0, 1], [], 0)
            await calls.pool.Commit(pb.CommitRequest(reservation_id=ID, part_to=1, blocks_written=2, share=1))
            await calls.pool.Abort(pb.AbortRequest(reservation_id=ID, writer=True, share=1))

    play(scene)
    assert core.commands == [
        m.Reserve(ID, b"", m.Parent.ROOT, CHAIN, 0, 1, shares=2, share=1, avoid=("x", "y")),
        m.Commit(ID, 0, 1, 2, False, share=1),
        m.Abort(ID, True, share=1),
    ]


def test_an_order_to_copy_goes_down_with_the_right_to_its_source() -> None:
    source = (0, 2, 3, 40, 1, 3, 4, 66)
    told, gone = (
        m.CopySlots("a", number, ID, 4096, (0, 2, handle, *source[3:]), 1, 8, 77) for number, handle in ((3, 3), (4, 9))
    )
    core = ScriptedCore({m.Register: m.Registered((1,), (told, gone, m.ProbeNode("a", 5)))}, HOLDERS)
    until_ms = NOW_MS + SETTINGS.copy_ms

    async def scene() -> None:
        async with serving(core, Stopped(NOW_MS).clock()) as calls:
            await calls.nodes.Register(pb.RegisterRequest(node_id="a", incarnation=1))
            for answers in ({"copied": [pb.SlotsCopied(order=EPOCH << 32 | 3, blocks=2)], "probed": 5}, {}):
                stream = calls.nodes.Session()
                await stream.write(pb.SessionUp(node_id="a", incarnation=1))
                down = await stream.read()
                if not answers:
                    assert untimed(down) == pb.SessionDown(epoch=EPOCH)
                    break
                (order,) = down.copy_slots
                holder = calls.server.shell.grants.source(told, until_ms)
                assert (down.probe, down.master_ms) == (5, NOW_MS)
                assert order == pb.CopySlots(
                    order=EPOCH << 32 | 3,
                    namespace_id=ID,
                    part_bytes=4096,
                    part_from=1,
                    part_to=3,
                    blocks=2,
                    from_segment=3,
                    from_slot=40,
                    from_stride=4,
                    from_stamp=66,
                    source=holder,
                    valid_until_ms=until_ms,
                    to_segment=1,
                    to_slot=8,
                    stamp=77,
                )
                assert len(order.source.mac) == 2
                await stream.write(pb.SessionUp(node_id="a", incarnation=1, **answers))
                await until(lambda: m.SlotsCopied("a", 1, 3, 2) in core.commands)

    play(scene)
    assert m.ProbeAnswered("a", 1, 5) in core.commands


def test_an_open_session_is_told_the_time_with_heartbeats() -> None:
    time = Stopped()
    core = ScriptedCore()

    async def scene() -> None:
        async with serving(core, time.clock()) as calls:
            stream = calls.nodes.Session()
            beat = pb.SessionUp(node_id="a", incarnation=1)
            await stream.write(beat)
            first = (await stream.read()).master_ms
            time.ms += TIME_TOLD_MS - 1
            await stream.write(beat)
            await until(lambda: len(core.commands) == 2)
            time.ms += 1
            await stream.write(beat)
            assert await stream.read() == pb.SessionDown(epoch=EPOCH, master_ms=first + TIME_TOLD_MS)

    play(scene)


def test_an_address_that_nobody_else_reaches_is_refused() -> None:
    core = ScriptedCore({m.Register: m.Registered(())})

    async def scene() -> None:
        async with serving(core) as calls:
            for address in ("127.0.0.1:9502", "10.0.0.1:9502"):  # we are on loopback ourselves
                await calls.nodes.Register(pb.RegisterRequest(node_id="a", incarnation=1, data_address=address))
            error = await refused(calls.nodes.Register(pb.RegisterRequest(node_id="a", data_address="0.0.0.0:1")))
            assert error.reason == "BAD_REQUEST"

    play(scene)
    assert [command.data_address for command in core.commands if isinstance(command, m.Register)] == [
        "127.0.0.1:9502",
        "10.0.0.1:9502",
    ]


def test_a_report_is_heard_and_logged() -> None:
    core = ScriptedCore({m.ReportNode: m.NodeReported(True, (m.ProbeNode("a", 1),))})

    async def scene() -> None:
        async with serving(core) as calls:
            request = pb.ReportNodeRequest(node_id="a", reporter_node_id="b", reason="reset" * 1_000)
            assert (await calls.pool.ReportNode(request)).suspect
            assert '"event": "node_reported"' in calls.log.getvalue()
            assert len(calls.log.getvalue()) < 4_000

    play(scene)
    assert core.commands == [m.ReportNode("a", "b")]


def test_drains_and_quotas_are_on_the_disk_before_they_are_answered(tmp_path: Path) -> None:
    offer = pb.SegmentOffer(index=0, size_bytes=1 << 20, slab_bytes=1 << 16, numa_node=-1)

    async def scene() -> None:
        async with serving(Pool, state_dir=str(tmp_path)) as calls:
            for node in ("a", "b"):
                await calls.nodes.Register(pb.RegisterRequest(node_id=node, incarnation=1, segments=[offer]))
                for _ in range(2):
                    await calls.admin.Drain(pb.DrainRequest(node_id=node))
            await calls.admin.Undrain(pb.UndrainRequest(node_id="b"))
            unknown = await refused(calls.admin.Drain(pb.DrainRequest(node_id="c")))
            assert unknown.reason == UnknownNode.reason
            assert (await calls.admin.SetQuota(pb.SetQuotaRequest(tenant="t", quota_bytes=9))).stored_bytes == 0
            too_much = await refused(calls.admin.SetQuota(pb.SetQuotaRequest(tenant="t", quota_bytes=(1 << 64) - 1)))
            assert too_much.reason == "BAD_REQUEST"
            events = [calls.log.getvalue().count(f'"{event}"') for event in ("drain_begun", "drain_ended", "quota_set")]
            assert events == [2, 1, 1]

    play(scene)
    state = State.open(str(tmp_path))
    try:
        memory = state.begin(0.0, SETTINGS).memory
    finally:
        state.close()
    assert (memory.draining, memory.quotas) == (("a",), (("t", 9),))


def test_a_stopping_master_drains_nobody() -> None:
    core = ScriptedCore()

    async def scene() -> None:
        async with serving(core) as calls:
            calls.server.shell.stopping = True
            for call, request in (
                (calls.admin.Drain, pb.DrainRequest(node_id="a")),
                (calls.admin.Undrain, pb.UndrainRequest(node_id="a")),
                (calls.admin.SetQuota, pb.SetQuotaRequest(tenant="t")),
            ):
                assert (await refused(call(request))).reason == "STOPPING"

    play(scene)
    assert core.commands == []


def test_status_tells_addresses_drains_and_tenants() -> None:
    core = ScriptedCore()
    node = NodeSnapshot("a", 4, "draining", "draining", 12, "none", (), "10.0.0.1:9502", 17)
    core.picture = picture(nodes=(node,), tenants=(TenantSnapshot("t", 5, 6, 7),))

    async def scene() -> None:
        async with serving(core) as calls:
            status = await calls.admin.Status(pb.StatusRequest())
        (told,) = status.nodes
        assert (told.state, told.data_address, told.drain_left_blocks) == ("draining", "10.0.0.1:9502", 17)
        assert list(status.tenants) == [pb.TenantStatus(tenant="t", stored_bytes=5, quota_bytes=6)]

    play(scene)


def test_what_becomes_of_a_node_is_logged_once() -> None:
    time = Stopped()
    core = ScriptedCore()
    node = Node("a", 1, (), [], 0)

    async def scene() -> None:
        async with serving(core, time.clock(), tick_ms=60_000) as calls:

            def seen() -> list[str]:
                """The words that two looks add to the log."""
                before = len(calls.log.getvalue())
                for _ in range(2):
                    time.ms += WATCH_MS
                    calls.server.shell.tick()
                lines = calls.log.getvalue()[before:].splitlines()
                return [line.partition('"event": ')[2] for line in lines]

            core.liveness.nodes["a"] = node
            assert seen() == []
            node.draining, node.reason = True, "draining"
            assert seen() == ['"node_state", "node": "a", "state": "draining", "why": "draining"}']
            node.drained, node.reason = True, "drained"
            assert seen() == ['"node_state", "node": "a", "state": "drained", "why": "drained"}']
            node.up, node.reason = False, "reported by b, c"
            assert seen() == ['"node_state", "node": "a", "state": "suspect", "why": "reported by b, c"}']
            del core.liveness.nodes["a"]
            assert seen() == ['"node_gone", "node": "a", "was": "suspect"}']

    play(scene)


def test_each_life_has_a_key_of_its_own(tmp_path: Path) -> None:
    keys: list[bytes] = []

    async def scene() -> None:
        for _ in range(2):
            async with serving(Pool, state_dir=str(tmp_path)) as calls:
                shell = calls.server.shell
                keys.append(shell.grants.key)
                shell.meet("a", shell.epoch + 5)
                keys.append(shell.grants.key)

    play(scene)
    assert len(set(keys)) == 4
    assert not any(key in file.read_bytes() for key in keys for file in tmp_path.iterdir())
