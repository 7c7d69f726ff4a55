"""The SDK on several nodes: one load or store over lanes, nodes that fail, processes without a node client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool_client import Contiguous, KVPool, Namespace
from kvpool_client.peers import AVOID_FIRST_MS
from kvpool_client.transfer import Copied
from kvpool_client.transfer_engine import Written
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import BadCapability, ProtocolError
from kvpool_proto.geometry import slots_per_slab
from unit.sdk_double import NODE, SLAB_BYTES, PoolDouble
from unit.sdk_world import PART_BYTES, chain_of, data_of, empty, spec_of

BLOCKS = 12
CHAIN, DATA = chain_of(BLOCKS), data_of(BLOCKS)


@pytest.fixture
def far_double(pool_double: PoolDouble) -> PoolDouble:
    """Nodes m and k beside our own."""
    pool_double.add_node("m", data_address="m:1")
    pool_double.add_node("k", data_address="k:1")
    return pool_double


@pytest.fixture
def spread(far_double: PoolDouble, sdk_space: Namespace) -> Namespace:
    """CHAIN: blocks 0 to 3 on our node, 4 to 6 on m, 7 and 8 on ours, 9 to 11 on k."""
    for blocks, names in ((4, ()), (7, ("m",)), (9, ()), (12, ("k",))):
        far_double.place_on(*names)
        stored = sdk_space.store(CHAIN[: blocks * 12], Contiguous(DATA[:blocks]))
        assert stored.reason == ""
    far_double.place_on()
    far_double.ports.calls.clear()
    return sdk_space


def loaded(space: Namespace, blocks: int = BLOCKS, **given: Any) -> tuple[int, str]:
    """How many blocks of CHAIN were loaded, right, and why not all of the hit."""
    with space.lookup(CHAIN) as hit:
        assert hit.blocks == BLOCKS
        target = empty(blocks)
        result = space.load(hit, Contiguous(target), blocks=blocks, **given)
        assert (target[: result.blocks] == DATA[: result.blocks]).all()
        return result.blocks, result.reason


# -- where blocks lie ----------------------------------------------------------------------------------


def test_blocks_on_three_nodes_are_one_load(far_double: PoolDouble, sdk_pool: KVPool, spread: Namespace) -> None:
    assert loaded(spread) == (BLOCKS, "")
    assert sorted(far_double.ports.calls) == [("read", "k"), ("read", "m")]
    assert loaded(spread, blocks=5) == (5, "")
    assert far_double.ports.calls[2:] == [("read", "m")]
    assert loaded(spread, blocks=4) == (4, "")
    assert len(far_double.ports.calls) == 3
    stats = sdk_pool.stats()
    assert (stats.loaded_bytes, stats.remote_loaded_bytes) == (21 * PART_BYTES, 7 * PART_BYTES)
    assert (stats.stored_bytes, stats.remote_stored_bytes) == (12 * PART_BYTES, 6 * PART_BYTES)


def test_lanes_run_beside_each_other(far_double: PoolDouble, spread: Namespace) -> None:
    met = threading.Barrier(2, timeout=30.0)
    for node in ("m", "k"):
        far_double.ports.instead[node] = lambda *_: met.wait() and None
    assert loaded(spread) == (BLOCKS, "")


def test_parts_on_different_nodes(far_double: PoolDouble, sdk_pool: KVPool) -> None:
    space = sdk_pool.namespace(spec_of(parts=3))
    data = [data_of(6, seed) for seed in range(3)]
    far_double.place_on("m", NODE, "k")
    stored = space.store(chain_of(6), [Contiguous(one) for one in data])
    assert (stored.stored_blocks, stored.reason) == (6, "")
    far_double.place_on()
    far_double.ports.calls.clear()
    with space.lookup(chain_of(6)) as hit:
        target = [empty(6) for _ in range(3)]
        assert space.load(hit, [Contiguous(one) for one in target], part=range(3)).blocks == 6
        assert all((one == other).all() for one, other in zip(target, data, strict=True))
        assert sorted(far_double.ports.calls) == [("read", "k"), ("read", "m")]
        assert space.load(hit, Contiguous(target[0]), part=1).blocks == 6  # ours alone
        assert len(far_double.ports.calls) == 2


def test_the_shortest_part_counts_wherever_it_lies(far_double: PoolDouble, sdk_pool: KVPool) -> None:
    space = sdk_pool.namespace(spec_of(parts=2))
    data = [data_of(6, seed) for seed in range(2)]
    far_double.place_on(NODE, "m")
    space.store(chain_of(6), [Contiguous(one) for one in data])
    far_double.ports.instead["m"] = lambda what, copies: [Copied(2, "stale_stamp")]
    with space.lookup(chain_of(6)) as hit:
        result = space.load(hit, [Contiguous(empty(6)) for _ in range(2)], part=range(2))
    assert (result.blocks, result.reason, result.bytes) == (2, "stale_stamp", 4 * PART_BYTES)


def test_the_pool_is_asked_from_our_node(far_double: PoolDouble, sdk_pool: KVPool, spread: Namespace) -> None:
    assert loaded(spread)[0] == BLOCKS
    assert far_double.called("Lookup")[-1].node_id == NODE
    assert list(far_double.called("Reserve")[0].nodes) == [NODE]
    with spread.lookup(CHAIN) as hit:
        holders = {holder.node_id: holder for holder in hit.holders.by_segment.values()}
    assert {name: len(holder.macs) for name, holder in holders.items()} == {NODE: 0, "m": 1, "k": 1}


def test_a_lookup_does_not_wait_to_know_its_node(far_double: PoolDouble, spread: Namespace) -> None:
    """What it then hears of our own segments is not needed: they are mapped by the time of the load, or are not."""
    far_double.local.stop()
    with far_double.connect() as pool:
        space = pool.namespace(spec_of())
        with space.lookup(CHAIN) as hit:
            assert far_double.called("Lookup")[-1].node_id == ""
            result = space.load(hit, Contiguous(empty(BLOCKS)))
            assert (result.blocks, result.reason) == (0, "no_data_port")
        far_double.start_socket()
        pool.flush(20_000)


# -- nodes that fail -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("instead", "blocks", "reason"),
    [
        ([Copied(0, "peer_unreachable")], 4, "peer_unreachable"),
        ([Copied(2, "peer_unreachable")], 6, "peer_unreachable"),
        ([Copied(1, "verify_failed")], 5, "verify_failed"),
        ([Copied(0, "peer_busy")], 4, "peer_busy"),
        (BadCapability("no"), 4, "capability"),
        (ProtocolError("garbage"), 4, "protocol"),
        (OSError("reset"), 4, "internal"),
        (ZeroDivisionError(), 4, "internal"),
        ([], 4, "internal"),
        ([Copied(3), Copied(3)], 4, "protocol"),
    ],
)
def test_a_node_that_fails_costs_what_it_holds_and_what_follows(
    far_double: PoolDouble, spread: Namespace, instead: Any, blocks: int, reason: str
) -> None:
    def fail(what: str, copies: list[Any]) -> Any:
        if isinstance(instead, Exception):
            raise instead
        if 0 < blocks - 4 < 3:
            assert far_double.ports.head(what, copies, blocks - 4) == [Copied(blocks - 4)]
        return instead or [None]

    far_double.ports.instead["m"] = fail
    assert loaded(spread) == (blocks, reason)


def test_a_node_that_does_not_answer_is_reported_avoided_and_tried_again(
    far_double: PoolDouble, sdk_pool: KVPool, spread: Namespace
) -> None:
    ports = far_double.ports
    ports.instead["m"] = lambda *_: [Copied(0, "peer_unreachable")]
    for _ in range(3):
        assert loaded(spread) == (4, "peer_unreachable")
    assert ports.calls.count(("read", "m")) == 1  # then it is a miss at once
    assert ports.calls.count(("read", "k")) == 1  # what lies behind it is not asked for either
    assert sdk_pool.flush(20_000)
    (report,) = far_double.called("ReportNode")
    assert (report.node_id, report.reporter_node_id, report.reason) == ("m", NODE, "peer_unreachable")
    spread.store(chain_of(3, 5), Contiguous(data_of(3, 5)))
    assert list(far_double.called("Reserve")[-1].avoid_nodes) == ["m"]

    far_double.now_ms += 2 * AVOID_FIRST_MS  # the first probe fails, too
    assert loaded(spread) == (4, "peer_unreachable")
    assert loaded(spread) == (4, "peer_unreachable")
    assert ports.calls.count(("read", "m")) == 2
    del ports.instead["m"]
    far_double.now_ms += 3 * AVOID_FIRST_MS
    assert loaded(spread) == (BLOCKS, "")
    spread.store(chain_of(3, 6), Contiguous(data_of(3, 6)))
    assert list(far_double.called("Reserve")[-1].avoid_nodes) == []
    assert sdk_pool.flush(20_000)
    assert len(far_double.called("ReportNode")) == sdk_pool.stats().peer_breaks == 1


@pytest.mark.parametrize("what", [[Copied(0, "peer_busy")], BadCapability("no")])
def test_a_refusal_is_an_answer(far_double: PoolDouble, sdk_pool: KVPool, spread: Namespace, what: Any) -> None:
    def refuse(*_: Any) -> Any:
        if isinstance(what, Exception):
            raise what
        return what

    far_double.ports.instead["m"] = refuse
    loaded(spread)
    loaded(spread)
    assert far_double.ports.calls.count(("read", "m")) == 2
    assert sdk_pool.flush(20_000)
    assert (far_double.called("ReportNode"), sdk_pool.stats().peer_breaks) == ([], 0)


def test_a_mistake_of_an_engine_is_not_blamed_on_the_node(
    far_double: PoolDouble, sdk_pool: KVPool, spread: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    far_double.ports.instead["m"] = lambda *_: 1 // 0
    loaded(spread)
    assert loaded(spread) == (4, "peer_unreachable")  # but it is avoided
    assert caplog.text.count("ZeroDivisionError") == 1
    assert sdk_pool.flush(20_000)
    assert (far_double.called("ReportNode"), sdk_pool.stats().peer_breaks) == ([], 1)


@pytest.mark.parametrize(("moved", "silent"), [(0, 1), (1, 0)])
def test_a_node_that_moves_nothing_until_time_is_up_is_silent(
    far_double: PoolDouble, sdk_pool: KVPool, spread: Namespace, moved: int, silent: int
) -> None:
    def late(what: str, copies: list[Any]) -> list[Copied]:
        if moved:
            far_double.ports.head(what, copies, moved)
        return [Copied(moved, "timed_out")]

    far_double.ports.instead["m"] = late
    assert loaded(spread, timeout_ms=250) == (4 + moved, "timed_out")
    assert sdk_pool.stats().peer_breaks == silent


def test_no_time_at_all_says_nothing_about_a_node(far_double: PoolDouble, sdk_pool: KVPool, spread: Namespace) -> None:
    far_double.ports.instead["m"] = lambda *_: [Copied(0, "timed_out")]
    assert loaded(spread, timeout_ms=50)[1] == "timed_out"
    assert sdk_pool.stats().peer_breaks == 0


# -- writes --------------------------------------------------------------------------------------------


def test_a_write_that_failed_with_the_peers_word_is_committed_as_far_as_it_came(
    far_double: PoolDouble, sdk_pool: KVPool, sdk_space: Namespace
) -> None:
    far_double.place_on("m")
    far_double.ports.instead["m"] = lambda what, copies: Written([0], "peer_busy")
    stored = sdk_space.store(CHAIN, Contiguous(DATA))
    assert (stored.stored_blocks, stored.reason) == (0, "peer_busy")
    assert sdk_pool.flush(20_000)
    assert [request.writer for request in far_double.called("Abort")] == [True]
    assert far_double.core.snapshot(far_double.now_ms).reservations == 0


def test_no_word_is_given_for_what_a_silent_peer_may_still_write(
    far_double: PoolDouble, sdk_pool: KVPool, sdk_space: Namespace
) -> None:
    """What is confirmed is committed; the rest comes back when the node has cleared it."""

    def part_of_it(what: str, copies: list[Any]) -> Written:
        assert far_double.ports.head(what, copies, 2) == Written([2])
        return Written([2], "peer_unreachable", confirmed=False)

    far_double.place_on("m")
    far_double.ports.instead["m"] = part_of_it
    stored = sdk_space.store(CHAIN, Contiguous(DATA))
    assert (stored.stored_blocks, stored.reason) == (2, "peer_unreachable")
    assert sdk_pool.flush(20_000)
    assert [(commit.blocks_written, commit.final) for commit in far_double.called("Commit")] == [(2, False)]
    assert [request.writer for request in far_double.called("Abort")] == [False]
    with sdk_space.lookup(CHAIN) as hit:
        assert hit.blocks == 2
    assert len(far_double.called("ReportNode")) == 1


def test_the_word_is_given_by_part(far_double: PoolDouble, sdk_pool: KVPool) -> None:
    space = sdk_pool.namespace(spec_of(parts=4))
    far_double.place_on(NODE, "m", NODE, "k")
    far_double.ports.instead["m"] = lambda what, copies: Written([0], "timed_out", confirmed=False)
    stored = space.store(chain_of(4), [Contiguous(data_of(4, seed)) for seed in range(4)])
    assert (stored.stored_blocks, stored.bytes) == (0, 3 * 4 * PART_BYTES)
    assert sdk_pool.flush(20_000)
    commits = [(one.part_from, one.part_to, one.blocks_written, one.final) for one in far_double.called("Commit")]
    assert commits == [(0, 1, 4, True), (2, 4, 4, True)]
    aborts = [(one.part_from, one.part_to, one.writer) for one in far_double.called("Abort")]
    assert aborts == [(1, 2, False)]


@pytest.mark.parametrize("error", [OSError("reset"), KeyError("k"), ProtocolError("garbage")])
def test_whatever_a_write_raises_is_an_unconfirmed_write(
    far_double: PoolDouble, sdk_pool: KVPool, sdk_space: Namespace, error: Exception
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    far_double.place_on("m")
    far_double.ports.instead["m"] = fail
    stored = sdk_space.store(CHAIN, Contiguous(DATA))
    assert stored.stored_blocks == 0
    assert stored.reason == ("protocol" if isinstance(error, ProtocolError) else "internal")
    assert sdk_pool.flush(20_000)
    assert [request.writer for request in far_double.called("Abort")] == [False]


@pytest.fixture
def small_double(tmp_path: Path) -> Iterator[PoolDouble]:
    """A slab here, more on m."""
    double = PoolDouble(tmp_path, slabs=1)
    double.add_node("m")
    yield double
    double.stop()


ROOM = slots_per_slab(SLAB_BYTES, spec_of().slot_bytes)


def test_what_does_not_fit_here_goes_elsewhere(small_double: PoolDouble) -> None:
    with small_double.connect() as pool:
        space = pool.namespace(spec_of())
        stored = space.store(chain_of(ROOM + 9), Contiguous(data_of(ROOM + 9)))
        assert (stored.stored_blocks, stored.reason) == (ROOM + 9, "")
        assert pool.stats().remote_stored_bytes == 9 * PART_BYTES
        assert small_double.ports.calls == [("write", "m")]
        with space.lookup(chain_of(ROOM + 9)) as hit:
            target = empty(ROOM + 9)
            assert space.load(hit, Contiguous(target)).blocks == ROOM + 9
            assert (target == data_of(ROOM + 9)).all()


def test_what_is_here_is_committed_when_the_other_node_goes_silent(small_double: PoolDouble) -> None:
    small_double.ports.instead["m"] = lambda *_: Written([0], "peer_unreachable", confirmed=False)
    with small_double.connect() as pool:
        space = pool.namespace(spec_of())
        stored = space.store(chain_of(ROOM + 9), Contiguous(data_of(ROOM + 9)))
        assert (stored.stored_blocks, stored.reason) == (ROOM, "peer_unreachable")
        assert pool.flush(20_000)
        assert space.lookup(chain_of(ROOM + 9)).blocks == ROOM
    commits = [(commit.blocks_written, commit.final) for commit in small_double.called("Commit")]
    assert (commits, [abort.writer for abort in small_double.called("Abort")]) == ([(ROOM, False)], [False])


# -- answers that do not fit ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda holders: holders[1].mac.pop(), "protocol"),
        (lambda holders: holders[1].mac.__setitem__(0, b"short"), "protocol"),
        (lambda holders: holders[1].segments.extend(holders[0].segments), "protocol"),
        (lambda holders: setattr(holders[1], "data_address", ""), "no_data_port"),
        (lambda holders: (holders[1].ClearField("mac"), holders[1].ClearField("part")), "segment_elsewhere"),
        (lambda holders: holders[1].ClearField("segments"), "segment_elsewhere"),
        (lambda holders: holders[1].mac.__setitem__(0, bytes(16)), "capability"),
    ],
)
def test_holders_that_do_not_fit_are_a_miss(
    far_double: PoolDouble, spread: Namespace, change: Any, reason: str
) -> None:
    names: list[list[str]] = []

    def spoil(reply: pb.LookupReply) -> None:
        names.append([holder.node_id for holder in reply.holders])
        change(reply.holders)

    far_double.change["Lookup"] = spoil
    hit = spread.lookup(CHAIN)
    result = spread.load(hit, Contiguous(empty(BLOCKS)))
    if hit.blocks:
        assert (result.blocks, result.reason) == (4, reason)
    else:
        assert hit.reason == reason
    assert names == [[NODE, "m", "k"]]


def test_room_on_a_node_that_cannot_be_reached_is_given_back(
    far_double: PoolDouble, sdk_pool: KVPool, sdk_space: Namespace
) -> None:
    far_double.place_on("m")
    sdk_space.store(CHAIN[:36], Contiguous(DATA[:3]))
    far_double.change["Reserve"] = lambda reply: [setattr(one, "data_address", "") for one in reply.holders]
    stored = sdk_space.store(CHAIN, Contiguous(DATA))
    assert (stored.stored_blocks, stored.reason) == (0, "no_data_port")
    assert sdk_pool.flush(20_000)
    assert [request.writer for request in far_double.called("Abort")] == [True]
    assert far_double.core.snapshot(far_double.now_ms).reservations == 0


# -- without a node client -----------------------------------------------------------------------------


def test_a_pool_without_a_node_client(far_double: PoolDouble, spread: Namespace) -> None:
    with far_double.connect(node_socket="") as pool:
        space = pool.namespace(spec_of())
        far_double.place_on("m")
        chain, data = chain_of(5, 4), data_of(5, 4)
        stored = space.store(chain, Contiguous(data))
        assert (stored.stored_blocks, stored.reason) == (5, "")
        request = far_double.called("Reserve")[-1]
        assert request.worker_id == far_double.called("Commit")[-1].worker_id == 0
        with space.lookup(chain) as hit:
            assert far_double.called("Lookup")[-1].node_id == ""
            target = empty(5)
            assert space.load(hit, Contiguous(target)).blocks == 5
            assert (target == data).all()
        with space.lookup(CHAIN) as hit:
            assert space.load(hit, Contiguous(empty(BLOCKS))).reason == "no_data_port"  # our node has none here
        assert pool.flush(20_000)
        assert pool.stats().node_breaks == 0
    assert far_double.core.snapshot(far_double.now_ms).leases == 0
