"""RPC -> command -> reply and back, errors as statuses, sessions and their orders; around a scripted core."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from kvpool_master.core import messages as m
from kvpool_master.core.extents import pack
from kvpool_master.core.messages import GoneReason, Parent, Reason, RunState
from kvpool_master.core.snapshot import NamespaceCounters, NamespaceSnapshot, NodeSnapshot, SegmentSnapshot
from kvpool_master.rpc import Guard
from kvpool_master.server import StartError
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.convert import spec_to_message
from kvpool_proto.errors import BY_REASON, KVPoolError
from kvpool_proto.namespace import NamespaceSpec
from kvpool_proto.status import from_rpc_error
from unit.master_double import EPOCH, ScriptedCore, picture, play, refused, serving

SPEC = NamespaceSpec(model="m", block_tokens=16, part_bytes=4096, dtype="float16", parts=4)
ID = b"i" * 16
CHAIN = b"k" * 48
ADMIN = [method.name for method in pb.DESCRIPTOR.services_by_name["Admin"].methods]
# offset, blocks, segment, first slot, part from, part to, stride, stamp
RUNS = [(0, 2, 1, 10, 0, 4, 4, EPOCH << 40), (2, 1, 2, 90, 0, 1, 4, 5), (2, 1, 3, 7, 1, 4, 3, (1 << 64) - 1)]
PACKED = b"".join(pack(*run) for run in RUNS)


def rows(extents: pb.Extents) -> list[tuple[int, ...]]:
    columns = (extents.offset, extents.blocks, extents.segment, extents.first_slot, extents.part_from)
    return list(zip(*columns, extents.part_to, extents.stride, extents.stamp, strict=True))


def test_reading() -> None:
    core = ScriptedCore(
        {
            m.Lookup: m.Hit(3, Reason.HOLE, PACKED, 5_000),
            m.Peek: m.Peeked(3, Reason.UNKNOWN_KEY, PACKED, m.Gone(GoneReason.EVICTED, 11, 12)),
            m.Release: m.Released(2),
            m.Renew: m.Renewed(77),
        }
    )

    async def scene() -> None:
        async with serving(core) as calls:
            hit = await calls.pool.Lookup(
                pb.LookupRequest(namespace_id=ID, chain=CHAIN, skip_blocks=1, lease_id=b"l" * 16)
            )
            peeked = await calls.pool.Peek(pb.PeekRequest(namespace_id=ID, chain=CHAIN, skip_blocks=2, explain=True))
            released = await calls.pool.Release(pb.ReleaseRequest(lease_ids=[b"l" * 16, b"x" * 16]))
            renewed = await calls.pool.Renew(pb.RenewRequest(lease_id=b"l" * 16))
        assert (hit.hit_blocks, hit.reason, hit.lease_ms, hit.epoch) == (3, pb.REASON_HOLE, 5_000, EPOCH)
        assert rows(hit.extents) == rows(peeked.extents) == RUNS
        assert (peeked.hit_blocks, peeked.reason, peeked.epoch) == (3, pb.REASON_UNKNOWN_KEY, EPOCH)
        assert peeked.gone == pb.Gone(reason=pb.GONE_EVICTED, ago_ms=11, idle_ms=12)
        assert (released.released, renewed.lease_ms) == (2, 77)

    play(scene)
    assert core.commands == [
        m.Lookup(ID, CHAIN, 1, b"l" * 16),
        m.Peek(ID, CHAIN, 2, True),
        m.Release((b"l" * 16, b"x" * 16)),
        m.Renew(b"l" * 16),
    ]


def test_a_miss_names_its_reason_and_leases_nothing() -> None:
    core = ScriptedCore({m.Lookup: m.Hit(0, Reason.NODE_AWAY, b"", 0), m.Peek: m.Peeked(0, Reason.HOLE, b"", None)})

    async def scene() -> None:
        async with serving(core) as calls:
            assert await calls.pool.Lookup(pb.LookupRequest()) == pb.LookupReply(
                reason=pb.REASON_NODE_AWAY, epoch=EPOCH
            )
            peeked = await calls.pool.Peek(pb.PeekRequest())
            assert (peeked.reason, peeked.HasField("gone")) == (pb.REASON_HOLE, False)

    play(scene)


def test_writing() -> None:
    runs = (m.Run(0, 1, 0, 4, RunState.EXISTS), m.Run(1, 2, 2, 3, RunState.YOURS))
    core = ScriptedCore(
        {
            m.Reserve: m.Reserved(3, Reason.NO_SPACE, runs, PACKED, 9_000),
            m.Commit: m.Committed(2, 1),
            m.Abort: m.Aborted(True),
            m.Remove: m.Removed(4),
            m.Purge: m.Purged(5),
        }
    )
    ask = {"namespace_id": ID, "reservation_id": b"r" * 16, "chain": CHAIN, "part_from": 2, "part_to": 3}

    async def scene() -> None:
        async with serving(core) as calls:
            reply = await calls.pool.Reserve(
                pb.ReserveRequest(parent_kind=pb.PARENT_KEY, parent_key=b"p" * 16, nodes=["a", "b"], worker_id=9, **ask)
            )
            await calls.pool.Reserve(pb.ReserveRequest(parent_kind=pb.PARENT_ROOT, **ask))
            await calls.pool.Reserve(pb.ReserveRequest(parent_kind=pb.PARENT_UNKNOWN, **ask))
            error = await refused(calls.pool.Reserve(pb.ReserveRequest(**ask)))
            committed = await calls.pool.Commit(
                pb.CommitRequest(
                    reservation_id=b"r" * 16, part_from=2, part_to=3, blocks_written=2, final=True, worker_id=9
                )
            )
            aborted = await calls.pool.Abort(
                pb.AbortRequest(reservation_id=b"r" * 16, writer=True, part_from=2, part_to=3)
            )
            removed = await calls.pool.Remove(pb.RemoveRequest(namespace_id=ID, chain=CHAIN, skip_blocks=1))
            purged = await calls.pool.Purge(pb.PurgeRequest(namespace_id=ID))
        assert (reply.answered_blocks, reply.reason, reply.write_ms, reply.epoch) == (
            3,
            pb.REASON_NO_SPACE,
            9000,
            EPOCH,
        )
        assert (list(reply.run_offset), list(reply.run_blocks)) == ([0, 1], [1, 2])
        assert (list(reply.run_part_from), list(reply.run_part_to)) == ([0, 2], [4, 3])
        assert list(reply.run_state) == [pb.RUN_EXISTS, pb.RUN_YOURS]
        assert rows(reply.extents) == RUNS
        assert error.reason == "BAD_REQUEST"
        assert committed == pb.CommitReply(committed_blocks=2, lost_blocks=1, epoch=EPOCH)
        assert (aborted.aborted, removed.removed_blocks, purged.purged_blocks) == (True, 4, 5)

    play(scene)
    place = (CHAIN, 2, 3)
    assert core.commands == [
        m.Reserve(ID, b"r" * 16, b"p" * 16, *place, ("a", "b"), 9),
        m.Reserve(ID, b"r" * 16, Parent.ROOT, *place),
        m.Reserve(ID, b"r" * 16, Parent.UNKNOWN, *place),
        m.Commit(b"r" * 16, 2, 3, 2, True, 9),
        m.Abort(b"r" * 16, True, 2, 3),
        m.Remove(ID, CHAIN, 1),
        m.Purge(ID),
    ]


def test_opening_a_namespace_checks_the_callers_id() -> None:
    core = ScriptedCore({m.OpenNamespace: m.Opened(SPEC.id, 4096)})
    spec = spec_to_message(SPEC)

    async def scene() -> None:
        async with serving(core) as calls:
            reply = await calls.pool.OpenNamespace(pb.OpenNamespaceRequest(spec=spec, namespace_id=SPEC.id))
            assert reply == pb.OpenNamespaceReply(
                namespace_id=SPEC.id, slot_bytes=4096, chain_blocks_max=65_536, epoch=EPOCH
            )
            other = await refused(calls.pool.OpenNamespace(pb.OpenNamespaceRequest(spec=spec, namespace_id=ID)))
            empty = await refused(calls.pool.OpenNamespace(pb.OpenNamespaceRequest()))
            assert (other.reason, empty.reason) == ("NAMESPACE_DIFFERS", "NAMESPACE_SPEC")

    play(scene)
    assert core.commands == [m.OpenNamespace(SPEC)]


@pytest.mark.parametrize("kind", BY_REASON.values(), ids=lambda kind: kind.__name__)
def test_every_error_of_the_table_arrives_as_itself(kind: type[KVPoolError]) -> None:
    async def scene() -> None:
        async with serving(ScriptedCore({m.Renew: kind("said so")})) as calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await calls.pool.Renew(pb.RenewRequest())
            assert caught.value.code().name == kind.code
            error = from_rpc_error(caught.value)
            assert (type(error), str(error)) == (kind, "said so")

    play(scene)


def test_a_bug_is_internal_logged_once_and_the_master_goes_on() -> None:
    core = ScriptedCore({m.Renew: ZeroDivisionError("oops"), m.Release: m.Released(0)})

    async def scene() -> None:
        async with serving(core) as calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await calls.pool.Renew(pb.RenewRequest())
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            await calls.pool.Release(pb.ReleaseRequest())
            lines = calls.log.getvalue().splitlines()
            assert [line for line in lines if "oops" in line] == [line for line in lines if "rpc_failed" in line]
            assert sum("Traceback" in line for line in lines) == 1

    play(scene)


def test_a_request_past_its_deadline_is_dropped_undone() -> None:
    done: list[Any] = []

    class Late:
        def time_remaining(self) -> float:
            return 0.0

        async def abort(self, code: grpc.StatusCode, text: str, metadata: Any) -> None:
            raise ConnectionAbortedError(code.name)

    async def scene() -> None:
        async with serving(ScriptedCore()) as calls:
            guard = Guard(calls.server.shell.clock, calls.server.log, calls.server.rpc_times)
            handler = guard.service(
                pb.DESCRIPTOR.services_by_name["Admin"],
                _Functions(**dict.fromkeys(ADMIN, done.append)),
            )
            with pytest.raises(ConnectionAbortedError, match="DEADLINE_EXCEEDED"):
                await handler.Status(pb.StatusRequest(), Late())

    play(scene)
    assert done == []


class _Functions:
    def __init__(self, **functions: Any) -> None:
        self.__dict__.update(functions)


def test_a_service_that_lacks_a_method_is_noticed_at_start() -> None:
    async def scene() -> None:
        async with serving(ScriptedCore()) as calls:
            guard = Guard(calls.server.shell.clock, calls.server.log, calls.server.rpc_times)
            with pytest.raises(AttributeError, match="SetBypass"):
                guard.service(pb.DESCRIPTOR.services_by_name["Admin"], _Functions(Status=repr))

    play(scene)


def test_a_message_over_the_limit_is_refused_and_one_below_it_is_not() -> None:
    core = ScriptedCore({m.Lookup: m.Hit(0, Reason.UNKNOWN_KEY, b"", 0)})

    async def scene() -> None:
        async with serving(core, message_bytes_max=64 << 10) as calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await calls.pool.Lookup(pb.LookupRequest(chain=bytes(64 << 10)))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert core.commands == []
            await calls.pool.Lookup(pb.LookupRequest(chain=bytes(60 << 10)))
            assert len(core.commands) == 1

    play(scene)


def test_a_stopping_master_takes_nothing_new_but_lets_others_finish() -> None:
    core = ScriptedCore({m.Commit: m.Committed(1, 0), m.Release: m.Released(1)})
    register = pb.RegisterRequest(node_id="a")

    async def scene() -> None:
        async with serving(core) as calls:
            calls.server.shell.stopping = True
            spec = pb.OpenNamespaceRequest(spec=spec_to_message(SPEC))
            refusals = [
                await refused(calls.pool.Lookup(pb.LookupRequest())),
                await refused(calls.pool.Reserve(pb.ReserveRequest())),
                await refused(calls.pool.OpenNamespace(spec)),
                await refused(calls.nodes.Register(register)),
            ]
            assert {error.reason for error in refusals} == {"STOPPING"}
            await calls.pool.Commit(pb.CommitRequest())
            await calls.pool.Release(pb.ReleaseRequest())

    play(scene)
    assert [type(command) for command in core.commands] == [m.Commit, m.Release]


def test_check_invariants_needs_the_debug_flag() -> None:
    async def scene() -> None:
        async with serving(ScriptedCore()) as calls:
            assert (await refused(calls.admin.CheckInvariants(pb.CheckInvariantsRequest()))).reason == "NOT_ENABLED"
        async with serving(ScriptedCore(), debug=True) as calls:
            assert (await calls.admin.CheckInvariants(pb.CheckInvariantsRequest())).spans_checked == 3

    play(scene)


def test_status() -> None:
    segment = SegmentSnapshot(3, 0, 1 << 20, 4096, 100, 0, 50, 0, False, 16, 2)
    core = ScriptedCore()
    core.picture = picture(
        namespaces=(NamespaceSnapshot(SPEC.id, SPEC, 5, 20_480, 2, NamespaceCounters()),),
        nodes=(NodeSnapshot("a", 4, "suspect", "session lost", 12, "arriving", (segment,)),),
        leases=6,
        reservations=7,
        ready=False,
        recovery="1 inventories arriving",
    )

    async def scene() -> None:
        async with serving(core) as calls:
            status = await calls.admin.Status(pb.StatusRequest())
        held, node = status.namespaces[0], status.nodes[0]
        assert (status.epoch, status.leases, status.reservations) == (EPOCH, 6, 7)
        assert (held.namespace_id, held.spec, held.blocks) == (SPEC.id, spec_to_message(SPEC), 5)
        assert (held.stored_bytes, held.spans) == (20_480, 2)
        assert (node.node_id, node.incarnation, node.state, node.state_reason) == ("a", 4, "suspect", "session lost")
        assert (node.heartbeat_age_ms, node.inventory) == (12, "arriving")
        assert (status.ready, status.recovery) == (False, "1 inventories arriving")
        assert status.bypass == pb.Bypass()
        assert node.segments[0] == pb.SegmentStatus(
            handle=3, index=0, size_bytes=1 << 20, used_bytes=4096, quarantined_bytes=100, slabs=16, slabs_bound=2
        )

    play(scene)


@pytest.mark.parametrize("taken", ["listen", "http"])
def test_a_start_that_fails_leaves_nothing_open(taken: str) -> None:
    async def scene() -> None:
        async with serving(ScriptedCore()) as calls:
            ports = {"listen": calls.server.grpc_port, "http": calls.server.http_port}
            with pytest.raises(StartError, match=f"{taken} = 127.0.0.1:{ports[taken]}: "):
                async with serving(ScriptedCore(), **{taken: f"127.0.0.1:{ports[taken]}"}):
                    pass
            assert (await calls.admin.Status(pb.StatusRequest())).epoch == EPOCH

    play(scene)
