"""The data port of a node client: where it is said to be, who gets what through it, and copies between two nodes."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from integration.node_world import NAMESPACE, SLOT, Make, bound, cleared, copied, get, store, until
from integration.nodes_double import NodesDouble
from integration.test_node_process import Process
from kvpool_client.clock import SYSTEM
from kvpool_client.config import NodeConfig
from kvpool_client.daemon import NodeDaemon
from kvpool_client.headers import COMMITTED, FREE, PEER_WRITER, WRITING
from kvpool_client.local_socket import LocalClient
from kvpool_client.peer import wire
from kvpool_client.peer.connection import Connection
from kvpool_client.peer.copies import Grant
from kvpool_client.peer.pull import PeerPuller
from kvpool_client.peer.stream import Stream
from kvpool_client.peer.wire import Ask
from kvpool_client.start_error import StartError
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.capability import READ, WRITE, Op, make_mac, part_table
from kvpool_proto.errors import BadCapability
from unit.segment_world import header_of

BLOCKS = [bytes([65 + block]) * SLOT for block in range(3)]


# -- addresses -----------------------------------------------------------------------------------------


def test_the_master_is_told_where_the_data_port_is(make_daemon: Make, nodes_double: NodesDouble) -> None:
    daemon = make_daemon(data_advertise="127.0.0.2:0")
    host, port = nodes_double.registered[0].data_address.split(":")
    assert host == "127.0.0.2"
    with socket.create_connection(("127.0.0.1", int(port)), timeout=5):
        until(lambda: "kvpool_client_data_connections_live" in get(daemon.http_port, "/metrics")[1])


def test_a_node_may_have_no_data_port(make_daemon: Make, nodes_double: NodesDouble) -> None:
    daemon = make_daemon(data_listen="")
    assert nodes_double.registered[0].data_address == ""
    assert "kvpool_client_data_read_blocks_total 0.0" in get(daemon.http_port, "/metrics")[1]


def test_an_address_that_peers_cannot_use_is_refused_at_the_start(make_daemon: Make, node_config: NodeConfig) -> None:
    with pytest.raises(StartError, match="set data_advertise"):
        make_daemon(data_listen="0.0.0.0:0")
    with pytest.raises(StartError, match="set data_listen and data_advertise"):
        make_daemon(master="192.0.2.1:50051")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(StartError, match="data_listen"):
        make_daemon(data_listen=f"127.0.0.1:{taken.getsockname()[1]}")
    assert not list(Path(node_config.segment_dir).iterdir())


# -- who gets what -------------------------------------------------------------------------------------


@pytest.fixture
def holder(node_daemon: NodeDaemon, nodes_double: NodesDouble, local_client: LocalClient) -> Iterator[NodeDaemon]:
    """n1, with three blocks of a chain from slot 2 of its segment 100 on."""
    nodes_double.order(pb.BindSlab(segment=100, slab=0, slot_bytes=SLOT))
    nodes_double.wait(lambda: bound(nodes_double))
    welcome = local_client.hello("w")
    for block, payload in enumerate(BLOCKS):
        store(welcome.segments[0], 2 + block, payload, block=block)
    yield node_daemon
    for segment in welcome.segments:
        segment.close()


def grant(address: str, double: NodesDouble, op: Op = READ, key: bytes = b"", stamp: int = 77, slot: int = 2) -> Grant:
    table = part_table(
        0, segment=[100], first_slot=[slot], blocks=[3], stride=[1], stamp=[stamp], part_from=[0]
    ).tobytes()
    until_ms = double.master_ms() + 60_000
    mac = make_mac(key or double.key, op, double.epoch, until_ms, NAMESPACE, 0, table)
    return Grant(address, "n1", op, double.epoch, until_ms, NAMESPACE, 0, table, mac)


@pytest.fixture
def puller() -> Iterator[PeerPuller]:
    made = PeerPuller(connect_timeout_ms=5_000, io_timeout_ms=5_000, clock=SYSTEM)
    yield made
    made.close()


def pulled(puller: PeerPuller, of: Grant, blocks: int = 3) -> list[bytes]:
    rows = np.zeros((blocks, SLOT), dtype=np.uint8)
    headers, _ = puller.pull(of, 0, [row.data for row in rows])
    return [row.tobytes() for row in rows[: len(headers)]]


def test_blocks_are_read_by_capability_and_by_nothing_else(
    holder: NodeDaemon, nodes_double: NodesDouble, puller: PeerPuller
) -> None:
    address = holder.node.data_address
    assert pulled(puller, grant(address, nodes_double)) == BLOCKS
    assert pulled(puller, grant(address, nodes_double, stamp=78)) == []
    for wrong in (grant(address, nodes_double, key=b"x" * 32), grant(address, nodes_double, WRITE)):
        assert puller.pull(wrong, 0, [memoryview(bytearray(SLOT))])[1] == BadCapability.reason.lower()
    text = get(holder.http_port, "/metrics")[1]
    assert "kvpool_client_data_read_blocks_total 3.0" in text
    assert f"kvpool_client_data_read_bytes_total {3.0 * SLOT}" in text
    assert 'kvpool_client_data_refused_total{reason="capability"} 2.0' in text


def test_the_former_epoch_is_read_out_under_its_own_handles(
    holder: NodeDaemon, nodes_double: NodesDouble, puller: PeerPuller
) -> None:
    former = grant(holder.node.data_address, nodes_double)
    nodes_double.epoch, nodes_double.key = 11, b"l" * 32
    nodes_double.forget()  # so that handles are others
    nodes_double.break_session()
    until(lambda: holder.node.epoch == 11 and holder.node.handles)
    assert 100 not in holder.node.handles
    assert pulled(puller, former) == BLOCKS


def test_a_connection_that_was_closed_meanwhile_is_replaced(
    holder: NodeDaemon, nodes_double: NodesDouble, puller: PeerPuller, make_daemon: Make, node_config: NodeConfig
) -> None:
    of = grant(holder.node.data_address, nodes_double)
    assert pulled(puller, of) == BLOCKS
    port = of.address.split(":")[1]
    holder.stop()
    again = make_daemon(data_listen=f"127.0.0.1:{port}")
    assert again.node.data_address == of.address
    assert pulled(puller, of) == BLOCKS


# -- copies --------------------------------------------------------------------------------------------


def copy_order(order: int, double: NodesDouble, address: str, to_segment: int) -> pb.SessionDown:
    of = grant(address, double)
    source = pb.Holder(node_id="n1", data_address=address, segments=[100], part=[0], mac=[of.mac])
    copy = pb.CopySlots(
        order=order, namespace_id=NAMESPACE, part_bytes=SLOT, part_from=0, part_to=1, blocks=3, from_segment=100,
        from_slot=2, from_stride=1, from_stamp=77, source=source, valid_until_ms=of.valid_until_ms,
        to_segment=to_segment, to_slot=5, stamp=99
    )  # fmt: skip
    return pb.SessionDown(epoch=double.epoch, copy_slots=[copy])


@pytest.fixture
def receiver(holder: NodeDaemon, nodes_double: NodesDouble, make_daemon: Make, tmp_path: Path) -> NodeDaemon:
    """n2, the node whose session was opened last; its segment is 102."""
    there = len(bound(nodes_double))
    daemon = make_daemon(node_id="n2", socket_path=str(tmp_path / "n2.sock"))
    nodes_double.order(pb.BindSlab(segment=102, slab=0, slot_bytes=SLOT))
    nodes_double.wait(lambda: len(bound(nodes_double)) > there)
    return daemon


def test_a_node_copies_blocks_of_another(holder: NodeDaemon, receiver: NodeDaemon, nodes_double: NodesDouble) -> None:
    nodes_double.send(copy_order(8, nodes_double, holder.node.data_address, 102))
    assert nodes_double.wait(lambda: copied(nodes_double)) == [pb.SlotsCopied(order=8, blocks=3)]
    segment = receiver.node.segments[0]
    assert [slot.tobytes() for slot in segment.slots(5, 3, SLOT)] == BLOCKS
    headers = segment.headers(5, 3, SLOT)
    assert (headers["state"].tolist(), headers["stamp"].tolist()) == ([COMMITTED] * 3, [99] * 3)
    text = get(receiver.http_port, "/metrics")[1]
    assert "kvpool_client_copies_done_total 1.0" in text
    assert f"kvpool_client_copied_bytes_total {3.0 * SLOT}" in text
    nodes_double.ask_inventory(1)
    chunks = nodes_double.wait(lambda: nodes_double.inventories.get(1))
    assert chunks[-1].end.blocks == 3


def test_an_order_that_cannot_be_carried_out_is_answered_with_a_reason(
    holder: NodeDaemon, receiver: NodeDaemon, nodes_double: NodesDouble
) -> None:
    address = holder.node.data_address
    nodes_double.send(copy_order(1, nodes_double, address, 999))
    nodes_double.wait(lambda: len(copied(nodes_double)) == 1)
    holder.stop()
    nodes_double.send(copy_order(2, nodes_double, address, 102))
    nodes_double.wait(lambda: len(copied(nodes_double)) == 2)
    assert [(copy.order, copy.blocks, copy.why) for copy in copied(nodes_double)] == [
        (1, 0, "segment_unknown"),
        (2, 0, "peer_unreachable"),
    ]
    assert "kvpool_client_copies_failed_total 2.0" in get(receiver.http_port, "/metrics")[1]


# -- writes that break off -----------------------------------------------------------------------------


class HalfWrite:
    """A peer that has written half of a block into slot 9 of segment 100, under stamp 80, and keeps still."""

    def __init__(self, address: str, double: NodesDouble) -> None:
        self._exits = contextlib.ExitStack()
        host, port = address.split(":")
        stream = Stream(self._exits.enter_context(socket.create_connection((host, int(port)))), 5.0)
        connection = Connection(stream)
        header = header_of(key=b"key00000", stamp=80, length_bytes=SLOT, state=COMMITTED)
        stream.send(
            [
                wire.pack_grant(0, grant(address, double, WRITE, stamp=80, slot=9)),
                wire.pack_ask(wire.ASK_WRITE, Ask(0, 0, 1, False, SLOT), wire.sealed(header)),
            ]
        )
        go, blocks, size_bytes = wire.text_bytes(bytes(connection.stream.receive(wire.HEAD.size)))
        assert (go, blocks, size_bytes) == (True, 1, 0), stream.receive(size_bytes)
        stream.send([bytes(SLOT // 2)])

    def close(self) -> None:
        self._exits.close()


@pytest.fixture
def half_write(nodes_double: NodesDouble) -> Iterator[Callable[[str], HalfWrite]]:
    made: list[HalfWrite] = []

    def begin(address: str) -> HalfWrite:
        made.append(HalfWrite(address, nodes_double))
        return made[-1]

    yield begin
    for write in made:
        write.close()


def test_an_order_to_clear_ends_a_write_that_stalls(
    holder: NodeDaemon, nodes_double: NodesDouble, half_write: Callable[[str], HalfWrite]
) -> None:
    half_write(holder.node.data_address)
    header = holder.node.segments[0].headers(9, 1, SLOT)
    assert (header["state"][0], header["worker_id"][0]) == (WRITING, PEER_WRITER)
    nodes_double.ask_inventory(1)
    chunks = nodes_double.wait(lambda: nodes_double.inventories.get(1))
    assert [(*w.first_slot, *w.slots, *w.worker_id) for chunk in chunks for w in chunk.writing] == [(9, 1, 0)]
    order = pb.ClearSlots(order=5, segment=100, slot_bytes=SLOT, first_slot=[9], slots=[1], stamp=[80])
    nodes_double.send(pb.SessionDown(epoch=10, clear_slots=[order]))
    nodes_double.wait(lambda: cleared(nodes_double) == [5])
    assert header["state"][0] == FREE
    assert not holder.node.writes.open


def test_what_a_killed_node_client_was_taking_is_free_in_its_next_life(
    nodes_double: NodesDouble, node_config: NodeConfig, half_write: Callable[[str], HalfWrite]
) -> None:
    first = Process(node_config, "--segments", "2")
    second: Process | None = None
    try:
        first.wait_line(" ready")
        nodes_double.order(pb.BindSlab(segment=100, slab=0, slot_bytes=SLOT))
        nodes_double.wait(lambda: bound(nodes_double))
        half_write(nodes_double.registered[0].data_address)
        first.signal(signal.SIGKILL)
        first.ended()
        second = Process(node_config, "--segments", "2")
        assert "writes_dropped=1" in second.wait_line("segment_opened")
        nodes_double.wait(lambda: len(nodes_double.registered) == 2)
        before, after = nodes_double.registered
        assert [s.contents for s in after.segments] == [s.contents for s in before.segments]
        second.signal(signal.SIGTERM)
        assert second.ended() == 0
    finally:
        for process in (first, second):
            if process is not None:
                process.kill_if_alive()


def test_peers_of_a_stopped_node_client_are_let_go(holder: NodeDaemon, half_write: Callable[[str], HalfWrite]) -> None:
    half_write(holder.node.data_address)
    holder.stop()
    assert not holder.node.writes.open
