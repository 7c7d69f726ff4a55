"""The node client in this process against a scripted Master: its life, and a Master that comes and goes."""

from __future__ import annotations

import io
import socket
from contextlib import closing
from pathlib import Path

import pytest

from integration.node_world import SLAB, SLOT, Make, bound, get, until
from integration.nodes_double import WAIT_S, NodesDouble
from kvpool_client.clock import SYSTEM, Clock
from kvpool_client.config import NodeConfig
from kvpool_client.daemon import Interrupted, NodeDaemon
from kvpool_client.local_socket import LocalClient
from kvpool_client.logs import Log
from kvpool_client.session import State
from kvpool_client.start_error import StartError
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import BadSegment, NodeIdTaken, StaleIncarnation, UnknownNode, Unreachable

# -- life ----------------------------------------------------------------------------------------------


def test_offers_its_segments_beats_and_keeps_them_at_the_end(
    make_daemon: Make, nodes_double: NodesDouble, node_config: NodeConfig
) -> None:
    daemon = make_daemon()
    (request,) = nodes_double.registered
    assert (request.epoch_seen, [s.holds for s in request.segments]) == (0, [False, False])
    assert len({s.contents for s in request.segments} - {0}) == 2
    assert request.node_id == "n1"
    assert [(s.index, s.size_bytes, s.slab_bytes, s.numa_node) for s in request.segments] == [
        (0, 2 * SLAB, SLAB, -1),
        (1, 2 * SLAB, SLAB, -1),
    ]
    nodes_double.wait_heartbeats(3)
    assert get(daemon.http_port, "/readyz") == (200, "serving\n")
    assert len(list(Path(node_config.segment_dir).iterdir())) == 2
    daemon.stop()
    daemon.stop()
    assert not nodes_double.retired
    assert len(list(Path(node_config.segment_dir).iterdir())) == 2
    assert not Path(node_config.socket_path).exists()


def test_discarding_leaves_nothing_behind(
    make_daemon: Make, nodes_double: NodesDouble, node_config: NodeConfig
) -> None:
    daemon = make_daemon(discard=True)
    daemon.stop()
    (request,) = nodes_double.registered
    assert [(r.node_id, r.incarnation) for r in nodes_double.retired] == [("n1", request.incarnation)]
    assert not list(Path(node_config.segment_dir).iterdir())


def test_starts_without_a_master_and_finds_it_later(
    make_daemon: Make, node_config: NodeConfig, nodes_double: NodesDouble
) -> None:
    nodes_double.stop()
    daemon = make_daemon(ready_wait_ms=0)
    assert get(daemon.http_port, "/readyz") == (503, "joining\n")
    assert get(daemon.http_port, "/healthz") == (200, "alive\n")
    with closing(LocalClient(node_config.socket_path, 5)) as local, pytest.raises(Unreachable, match="not registered"):
        local.hello("early")
    later = NodesDouble(port=nodes_double.port)
    later.wait(lambda: later.registered)
    assert daemon.registration.serving.wait(WAIT_S)
    daemon.stop()
    later.stop()


def test_two_of_one_id_on_one_machine(node_daemon: NodeDaemon, make_daemon: Make, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="another node_id"):
        make_daemon(socket_path=str(tmp_path / "other.sock"))
    with pytest.raises(StartError, match="another node client listens"):
        make_daemon(node_id="n2")
    assert len(list((tmp_path / "shm").iterdir())) == 2
    assert node_daemon.registration.state is State.SERVING


def test_a_start_that_fails_leaves_nothing_behind(
    make_daemon: Make, node_config: NodeConfig, nodes_double: NodesDouble, tmp_path: Path
) -> None:
    with pytest.raises(StartError, match="segment_bytes"):
        make_daemon(segment_bytes=1 << 50, slab_bytes=1 << 40)
    taken = socket.create_server(("127.0.0.1", 0))
    with taken, pytest.raises(StartError, match="http = "):
        make_daemon(http=f"127.0.0.1:{taken.getsockname()[1]}")
    with pytest.raises(StartError, match="the kernel takes 107"):
        make_daemon(socket_path=str(tmp_path / ("x" * 100) / "node.sock"))
    Path(node_config.socket_path).write_text("a file")
    with pytest.raises(StartError, match="not a socket"):
        make_daemon()
    Path(node_config.socket_path).unlink()
    nodes_double.refusal = BadSegment("too large for me")
    with pytest.raises(StartError, match="too large for me"):
        make_daemon()
    assert not list(Path(node_config.segment_dir).iterdir())
    assert not Path(node_config.socket_path).exists()


def test_a_start_that_fails_keeps_what_was_there(
    make_daemon: Make, node_config: NodeConfig, nodes_double: NodesDouble
) -> None:
    make_daemon().stop()
    nodes_double.refusal = BadSegment("not today")
    with pytest.raises(StartError, match="not today"):
        make_daemon(discard=True)
    assert len(list(Path(node_config.segment_dir).iterdir())) == 2
    assert not nodes_double.retired


def test_a_life_is_newer_than_the_former_one_whatever_the_clock_says(
    make_daemon: Make, node_config: NodeConfig, nodes_double: NodesDouble
) -> None:
    make_daemon().stop()
    daemon = NodeDaemon(node_config, Log("info", False, SYSTEM, io.StringIO()), Clock(wall_s=lambda: 5.0))
    daemon.start()
    former, again = nodes_double.registered
    assert again.incarnation == former.incarnation + 1
    assert [s.contents for s in again.segments] == [s.contents for s in former.segments]
    assert {segment.superblock.incarnation for segment in daemon.node.segments} == {again.incarnation}
    daemon.stop()


def test_only_what_is_missing_needs_room_and_what_is_too_much_goes(
    make_daemon: Make, node_config: NodeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[int] = []
    monkeypatch.setattr("kvpool_client.daemon.check_room", lambda needed_bytes, room: needed.append(needed_bytes))
    make_daemon().stop()
    make_daemon(segments=1, segment_bytes=2 * SLAB).stop()
    assert [path.name for path in Path(node_config.segment_dir).iterdir()] == ["kvpool-n1-0.seg"]
    make_daemon()
    assert needed[1] == 0
    assert 0 < needed[2] < needed[0]


def test_what_is_not_sound_is_dropped_and_counted(
    make_daemon: Make, nodes_double: NodesDouble, node_config: NodeConfig
) -> None:
    daemon = make_daemon()
    nodes_double.order(*(pb.BindSlab(segment=101, slab=slab, slot_bytes=SLOT) for slab in range(2)))
    nodes_double.wait(lambda: len(bound(nodes_double)) == 2)
    daemon.node.segments[1].table(0)["stamp"][2:4] = 5  # headers that nobody wrote
    daemon.stop()
    (Path(node_config.segment_dir) / "kvpool-n1-0.seg").write_bytes(b"nothing")
    again = make_daemon()
    text = get(again.http_port, "/metrics")[1]
    for name, dropped in (("files", 1), ("slabs", 0), ("slots", 2)):
        assert f"kvpool_client_{name}_dropped_total {dropped}.0" in text
    former, registered = nodes_double.registered
    assert not {s.contents for s in former.segments} & {s.contents for s in registered.segments}
    assert [s.holds for s in registered.segments] == [False, True]


def test_a_signal_while_starting_ends_the_start(node_config: NodeConfig, nodes_double: NodesDouble) -> None:
    daemon = NodeDaemon(node_config, Log("info", False, SYSTEM, io.StringIO()))
    with pytest.raises(Interrupted):
        daemon.start(interrupted=lambda: True)
    assert not list(Path(node_config.segment_dir).iterdir())
    assert not nodes_double.registered
    daemon.stop()


def test_a_node_id_that_is_taken_is_asked_for_again(make_daemon: Make, nodes_double: NodesDouble) -> None:
    nodes_double.refusal = NodeIdTaken("n1 is up")
    daemon = make_daemon(ready_wait_ms=0)
    nodes_double.wait(lambda: len(nodes_double.registered) >= 2)
    nodes_double.refusal = None
    assert daemon.registration.serving.wait(WAIT_S)


def test_a_newer_life_ends_this_one(node_daemon: NodeDaemon, nodes_double: NodesDouble) -> None:
    nodes_double.break_session(StaleIncarnation("a newer one is registered"))
    until(lambda: node_daemon.failure)
    assert "INCARNATION_STALE" in (node_daemon.failure or "")


# -- the Master comes and goes -------------------------------------------------------------------------


def test_orders_are_carried_out_once(node_daemon: NodeDaemon, nodes_double: NodesDouble) -> None:
    order = pb.BindSlab(segment=101, slab=1, slot_bytes=SLOT)
    nodes_double.order(order)
    assert nodes_double.wait(lambda: bound(nodes_double)) == [
        pb.SlabBound(segment=101, slab=1, slot_bytes=SLOT, generation=1)
    ]
    node_daemon.node.segments[1].table(1)["stamp"] = 5
    nodes_double.order(order)
    nodes_double.wait(lambda: len(bound(nodes_double)) == 2)
    assert node_daemon.node.segments[1].table(1)["stamp"].all()
    nodes_double.order(pb.BindSlab(segment=101, slab=1, slot_bytes=2 * SLOT))
    assert nodes_double.wait(lambda: bound(nodes_double)[2:])[0].generation == 2
    assert not node_daemon.node.segments[1].table(1)["stamp"].any()


def test_impossible_orders_disturb_nothing(node_daemon: NodeDaemon, nodes_double: NodesDouble) -> None:
    nodes_double.order(
        pb.BindSlab(segment=999, slab=0, slot_bytes=SLOT),
        pb.BindSlab(segment=100, slab=9, slot_bytes=SLOT),
        pb.BindSlab(segment=100, slab=0, slot_bytes=SLAB),
        pb.BindSlab(segment=100, slab=0, slot_bytes=SLOT),
    )
    assert [slab.slab for slab in nodes_double.wait(lambda: bound(nodes_double))] == [0]
    assert node_daemon.registration.state is State.SERVING


def test_a_broken_session_keeps_the_contents(
    node_daemon: NodeDaemon, nodes_double: NodesDouble, local_client: LocalClient
) -> None:
    welcome = local_client.hello("w")
    nodes_double.order(pb.BindSlab(segment=100, slab=0, slot_bytes=SLOT))
    nodes_double.wait(lambda: bound(nodes_double))
    nodes_double.break_session()
    nodes_double.wait(lambda: len(nodes_double.registered) == 2)
    first, again = nodes_double.registered
    assert again.incarnation == first.incarnation
    assert [s.contents for s in again.segments] == [s.contents for s in first.segments]
    assert ([s.holds for s in again.segments], again.epoch_seen) == ([True, False], 10)
    assert node_daemon.registration.serving.wait(WAIT_S)
    assert welcome.segments[0].slab_record(0).slot_bytes == SLOT
    for segment in welcome.segments:
        segment.close()


@pytest.mark.parametrize("how", ["retired", "unknown", "forgotten"])
def test_a_master_that_forgot_us_is_offered_the_same_contents(
    node_daemon: NodeDaemon, nodes_double: NodesDouble, local_client: LocalClient, how: str
) -> None:
    welcome = local_client.hello("w")
    segment = welcome.segments[0]
    nodes_double.order(pb.BindSlab(segment=100, slab=0, slot_bytes=SLOT))
    nodes_double.wait(lambda: bound(nodes_double))
    nodes_double.forget()
    if how == "retired":
        nodes_double.send(pb.SessionDown(epoch=10, retired=True))
    else:
        nodes_double.break_session(UnknownNode("n1") if how == "unknown" else None)
    until(lambda: node_daemon.node.handles == (102, 103) and node_daemon.registration.state is State.SERVING)
    first, again = nodes_double.registered
    assert again.incarnation == first.incarnation
    assert [s.contents for s in again.segments] == [s.contents for s in first.segments]
    assert [s.holds for s in again.segments] == [True, False]
    assert again.epoch_seen == 10
    assert segment.slab_record(0).slot_bytes == SLOT
    welcomed = local_client.hello("w")
    assert (welcomed.incarnation, [s.handle for s in welcomed.segments]) == (welcome.incarnation, [102, 103])
    for mapped in (*welcome.segments, *welcomed.segments):
        mapped.close()


def test_another_life_of_the_master_is_obeyed_and_a_former_one_is_not(
    node_daemon: NodeDaemon, nodes_double: NodesDouble, local_client: LocalClient
) -> None:
    welcome = local_client.hello("w")
    segment = welcome.segments[0]
    assert (welcome.epoch, segment.epoch()) == (10, 10)
    nodes_double.order(pb.BindSlab(segment=100, slab=0, slot_bytes=SLOT))
    nodes_double.wait(lambda: bound(nodes_double))
    nodes_double.stop()
    until(lambda: node_daemon.registration.state is State.JOINING)
    second = NodesDouble(port=nodes_double.port, epoch=11)
    second.wait(lambda: second.registered)
    assert node_daemon.registration.serving.wait(WAIT_S)
    assert second.registered[0].incarnation == welcome.incarnation
    assert not second.retired
    assert segment.epoch() == 11
    assert segment.slab_record(0).slot_bytes == SLOT
    second.stop()
    until(lambda: node_daemon.registration.state is State.JOINING)
    third = NodesDouble(port=nodes_double.port, epoch=9)
    third.wait(lambda: len(third.registered) >= 2)
    assert third.registered[0].epoch_seen == 11
    assert segment.epoch() == 11
    assert node_daemon.registration.state is State.JOINING
    node_daemon.stop()
    third.stop()
    for mapped in welcome.segments:
        mapped.close()


def test_no_worker_comes_in_between_two_epochs(
    node_daemon: NodeDaemon, nodes_double: NodesDouble, local_client: LocalClient
) -> None:
    nodes_double.refusal = NodeIdTaken("wait")
    nodes_double.send(pb.SessionDown(epoch=11))
    nodes_double.wait(lambda: len(nodes_double.registered) >= 2)
    assert node_daemon.node.epoch == 11
    with pytest.raises(Unreachable, match="not registered"):
        local_client.hello("w")
    nodes_double.epoch, nodes_double.refusal = 11, None
    assert node_daemon.registration.serving.wait(WAIT_S)
    welcome = local_client.hello("w")
    assert welcome.epoch == 11
    for segment in welcome.segments:
        segment.close()


def test_a_silent_master_is_asked_before_it_is_given_up(make_daemon: Make) -> None:
    with_nothing_to_say = NodesDouble(suspect_ms=30)
    daemon = make_daemon(master=with_nothing_to_say.address)
    with_nothing_to_say.wait_heartbeats(10)
    assert daemon.registration.counts.failures == 0
    assert daemon.registration.counts.sessions_opened == 1
    daemon.stop()
    with_nothing_to_say.stop()
