"""What the Master asks of a node client besides slabs: inventories, dead workers, slots to clear, the switch."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from integration.node_world import KEYS, NAMESPACE, SLAB, SLOT, bound, cleared, get, gone, reported, store, until
from integration.nodes_double import WAIT_S, NodesDouble
from kvpool_client.daemon import NodeDaemon
from kvpool_client.headers import FREE, PEER_WRITER, WRITING
from kvpool_client.local_socket import LocalClient, Welcome
from kvpool_client.node import Node
from kvpool_client.peer.copies import Grant
from kvpool_client.session import State
from kvpool_client.session_messages import Tombstones
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.capability import READ, WRITE, Op, make_mac, part_table
from kvpool_proto.errors import BadCapability, BadRequest, CapabilityExpired, KVPoolError
from kvpool_proto.geometry import slots_per_slab

PER_SLAB = slots_per_slab(SLAB, SLOT)


@pytest.fixture
def stored(node_daemon: NodeDaemon, nodes_double: NodesDouble, local_client: LocalClient) -> Iterator[Welcome]:
    """A worker; blocks 0 and 1 of a chain in slots 2 and 3 of segment 100, block 2 in the second slab of 101."""
    nodes_double.order(
        pb.BindSlab(segment=100, slab=0, slot_bytes=SLOT), pb.BindSlab(segment=101, slab=1, slot_bytes=SLOT)
    )
    nodes_double.wait(lambda: len(bound(nodes_double)) == 2)
    welcome = local_client.hello("w")
    for block in range(2):
        store(welcome.segments[0], 2 + block, block=block)
    store(welcome.segments[1], PER_SLAB, block=2, stamp=78)
    yield welcome
    for segment in welcome.segments:
        segment.close()


def states(welcome: Welcome, n: int = 4) -> list[int]:
    return welcome.segments[0].headers(0, n, SLOT)["state"].tolist()


# -- inventories ---------------------------------------------------------------------------------------


def test_an_inventory_tells_what_is_there(node_daemon: NodeDaemon, nodes_double: NodesDouble, stored: Welcome) -> None:
    store(stored.segments[0], 5, block=3, state=WRITING, worker_id=stored.worker_id)
    store(stored.segments[0], 6, block=4, state=WRITING, worker_id=12345)
    nodes_double.ask_inventory(1)
    chunks = nodes_double.wait(lambda: nodes_double.inventories.get(1))
    incarnation = nodes_double.registered[0].incarnation
    assert {(chunk.node_id, chunk.incarnation, chunk.number) for chunk in chunks} == {("n1", incarnation, 1)}
    assert [(chunk.segment, *zip(chunk.slab, chunk.slot_bytes, strict=True)) for chunk in chunks if chunk.slab] == [
        (100, (0, SLOT)),
        (101, (1, SLOT)),
    ]
    assert reported(chunks) == {KEYS[0] + KEYS[1]: [(100, 2, 2)], KEYS[2]: [(101, PER_SLAB, 1)]}
    writing = [(*w.first_slot, *w.slots, *w.worker_id) for chunk in chunks for w in chunk.writing]
    assert writing == [(5, 1, stored.worker_id)]
    assert (chunks[-1].end.blocks, chunks[-1].end.slots_writing) == (3, 1)
    until(lambda: node_daemon.registration.counts.inventories_sent == 1)
    text = get(node_daemon.http_port, "/metrics")[1]
    assert "kvpool_client_reported_blocks_total 3.0" in text
    assert "kvpool_client_inventories_sent_total 1.0" in text


def test_segments_that_hold_nothing_have_an_inventory_too(nodes_double: NodesDouble, node_daemon: NodeDaemon) -> None:
    assert node_daemon.registration.state is State.SERVING
    nodes_double.ask_inventory(1)
    chunks = nodes_double.wait(lambda: nodes_double.inventories.get(1))
    assert not any(chunk.slab or chunk.strands or chunk.writing for chunk in chunks)
    assert (chunks[-1].end.blocks, chunks[-1].end.slots_writing) == (0, 0)


def test_a_newer_number_ends_an_inventory_and_nothing_else(
    node_daemon: NodeDaemon, nodes_double: NodesDouble, stored: Welcome
) -> None:
    nodes_double.hold_inventories = True
    nodes_double.ask_inventory(1)
    nodes_double.wait(lambda: nodes_double.chunks)
    nodes_double.wait_heartbeats(3)
    nodes_double.ask_inventory(2)
    nodes_double.wait(lambda: nodes_double.chunks[-1].number == 2)
    nodes_double.release_inventories()
    nodes_double.wait(lambda: 2 in nodes_double.inventories)
    assert list(nodes_double.inventories) == [2]
    assert len(nodes_double.registered) == 1
    assert node_daemon.registration.counts.inventories_failed == 0


def test_an_inventory_that_breaks_off_is_sent_again_after_a_registration(
    node_daemon: NodeDaemon, nodes_double: NodesDouble, stored: Welcome
) -> None:
    nodes_double.hold_inventories = True
    nodes_double.ask_inventory(1)
    nodes_double.wait(lambda: nodes_double.chunks)
    nodes_double.release_inventories(BadRequest("a chunk that cannot be"))
    nodes_double.wait(lambda: len(nodes_double.registered) == 2)
    nodes_double.inventory_refusal = None
    nodes_double.ask_inventory(2)
    chunks = nodes_double.wait(lambda: nodes_double.inventories.get(2))
    assert chunks[-1].end.blocks == 3
    assert node_daemon.registration.counts.inventories_failed == 1
    assert nodes_double.registered[0].incarnation == nodes_double.registered[1].incarnation


def test_an_inventory_ends_with_its_session(
    node_daemon: NodeDaemon, nodes_double: NodesDouble, stored: Welcome
) -> None:
    nodes_double.hold_inventories = True
    nodes_double.ask_inventory(1)
    nodes_double.wait(lambda: nodes_double.chunks)
    nodes_double.break_session()
    nodes_double.wait(lambda: len(nodes_double.registered) == 2)
    nodes_double.release_inventories()
    nodes_double.ask_inventory(2)
    nodes_double.wait(lambda: 2 in nodes_double.inventories)
    assert 1 not in nodes_double.inventories
    assert node_daemon.registration.counts.inventories_failed == 0


def test_a_writer_that_dies_while_it_is_reported_is_told_of_afterwards(
    node_daemon: NodeDaemon, nodes_double: NodesDouble, stored: Welcome
) -> None:
    store(stored.segments[0], 5, block=3, state=WRITING, worker_id=stored.worker_id)
    nodes_double.hold_inventories = True
    nodes_double.ask_inventory(1)
    nodes_double.wait(lambda: any(chunk.segment == 100 for chunk in nodes_double.chunks))
    for segment in stored.segments:
        segment.close()
    nodes_double.wait(lambda: gone(nodes_double) == {stored.worker_id})
    before = len(nodes_double.heard)
    nodes_double.release_inventories()
    nodes_double.wait(lambda: any(stored.worker_id in message.workers_gone for message in nodes_double.heard[before:]))


# -- orders --------------------------------------------------------------------------------------------


def test_slots_are_cleared_by_stamp(node_daemon: NodeDaemon, nodes_double: NodesDouble, stored: Welcome) -> None:
    before = states(stored)
    wrong, right = (
        pb.ClearSlots(order=n, segment=100, slot_bytes=SLOT, first_slot=[2], slots=[1], stamp=[stamp])
        for n, stamp in ((5, 76), (6, 77))
    )
    nodes_double.send(pb.SessionDown(epoch=10, clear_slots=[wrong]))
    nodes_double.wait(lambda: cleared(nodes_double) == [5])
    assert states(stored) == before
    nodes_double.send(pb.SessionDown(epoch=9, clear_slots=[right]))
    nodes_double.send(pb.SessionDown(epoch=10, clear_slots=[right]))
    nodes_double.wait(lambda: cleared(nodes_double) == [5, 6])
    assert states(stored) == [FREE, FREE, FREE, before[3]]
    assert "kvpool_client_slots_cleared_total 1.0" in get(node_daemon.http_port, "/metrics")[1]


def test_slots_that_peers_write_are_cleared_when_that_has_ended(
    node_daemon: NodeDaemon, nodes_double: NodesDouble, stored: Welcome
) -> None:
    store(stored.segments[0], 0, stamp=80, state=WRITING, worker_id=PEER_WRITER)
    order = pb.ClearSlots(order=5, segment=100, slot_bytes=SLOT, first_slot=[0], slots=[1], stamp=[80])
    writes = node_daemon.node.writes
    with writes.under(node_daemon.node.segments[0], [0], 80):
        nodes_double.send(pb.SessionDown(epoch=10, clear_slots=[order]))
        nodes_double.order(pb.BindSlab(segment=100, slab=1, slot_bytes=SLOT))
        nodes_double.wait(lambda: len(bound(nodes_double)) == 3)  # what comes later does not wait for it
        assert cleared(nodes_double) == []
        assert states(stored)[0] == WRITING
    nodes_double.wait(lambda: cleared(nodes_double) == [5])
    assert states(stored)[0] == FREE


def test_a_clearing_that_waits_ends_with_its_session(
    node_daemon: NodeDaemon, nodes_double: NodesDouble, stored: Welcome
) -> None:
    store(stored.segments[0], 0, stamp=80, state=WRITING, worker_id=PEER_WRITER)
    order = pb.ClearSlots(order=5, segment=100, slot_bytes=SLOT, first_slot=[0], slots=[1], stamp=[80])
    with node_daemon.node.writes.under(node_daemon.node.segments[0], [0], 80):
        nodes_double.send(pb.SessionDown(epoch=10, clear_slots=[order]))
        nodes_double.break_session()
        nodes_double.wait(lambda: len(nodes_double.registered) == 2)
    assert node_daemon.registration.serving.wait(WAIT_S)
    nodes_double.send(pb.SessionDown(epoch=10, clear_slots=[pb.ClearSlots(order=6, segment=100, slot_bytes=SLOT)]))
    nodes_double.wait(lambda: cleared(nodes_double) == [6])
    assert states(stored)[0] == WRITING


def test_an_inventory_tells_what_peers_write_and_not_what_they_left(
    node_daemon: NodeDaemon, nodes_double: NodesDouble, stored: Welcome
) -> None:
    for slot in (5, 6):
        store(stored.segments[0], slot, block=3, stamp=80, state=WRITING, worker_id=PEER_WRITER)
    with node_daemon.node.writes.under(node_daemon.node.segments[0], [6], 80):
        nodes_double.ask_inventory(1)
        chunks = nodes_double.wait(lambda: nodes_double.inventories.get(1))
    assert [(*w.first_slot, *w.slots, *w.worker_id) for chunk in chunks for w in chunk.writing] == [(6, 1, 0)]


def test_a_long_order_holds_up_no_answer_that_we_are_there(
    node_daemon: NodeDaemon, nodes_double: NodesDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()

    def long(self: Node, tombstones: Tombstones) -> None:
        begun.set()
        assert go.wait(WAIT_S)

    monkeypatch.setattr(Node, "bury", long)
    nodes_double.send(pb.SessionDown(epoch=10, tombstones=[pb.Tombstone(namespace_id=NAMESPACE, stamp=1)]))
    assert begun.wait(WAIT_S)
    nodes_double.send(pb.SessionDown(epoch=10, probe=7))
    nodes_double.wait(lambda: any(message.probed == 7 for message in nodes_double.heard))
    go.set()


def test_the_key_and_the_time_of_the_master_are_learnt(node_daemon: NodeDaemon, nodes_double: NodesDouble) -> None:
    keyring, key = node_daemon.node.keyring, nodes_double.key
    valid_until_ms = nodes_double.master_ms() + 3_600_000
    table = part_table(0, segment=[100], first_slot=[0], blocks=[1], stride=[1], stamp=[77], part_from=[0]).tobytes()

    def grant(epoch: int, op: Op, key: bytes) -> Grant:
        mac = make_mac(key, op, epoch, valid_until_ms, NAMESPACE, 0, table)
        return Grant("", "n1", op, epoch, valid_until_ms, NAMESPACE, 0, table, mac)

    keyring.check(grant(10, WRITE, key))
    with pytest.raises(BadCapability):
        keyring.check(grant(10, READ, b"x" * 32))
    nodes_double.epoch, nodes_double.key = 11, b"l" * 32
    nodes_double.break_session()
    until(lambda: node_daemon.node.epoch == 11 and node_daemon.node.handles)
    keyring.check(grant(11, WRITE, nodes_double.key))
    keyring.check(grant(10, READ, key))
    with pytest.raises(KVPoolError):
        keyring.check(grant(10, WRITE, key))
    nodes_double.send(pb.SessionDown(epoch=11, master_ms=valid_until_ms + 1_000))
    nodes_double.order(pb.BindSlab(segment=100, slab=0, slot_bytes=SLOT))
    nodes_double.wait(lambda: bound(nodes_double))
    with pytest.raises(CapabilityExpired):
        keyring.check(grant(11, READ, nodes_double.key))


def test_orders_to_clear_that_cannot_be_are_not_answered(
    node_daemon: NodeDaemon, nodes_double: NodesDouble, stored: Welcome
) -> None:
    for order, segment, slot in ((1, 999, 2), (2, 100, 1 << 31), (3, 100, 2)):
        run = pb.ClearSlots(order=order, segment=segment, slot_bytes=SLOT, first_slot=[slot], slots=[1], stamp=[77])
        nodes_double.send(pb.SessionDown(epoch=10, clear_slots=[run]))
    nodes_double.wait(lambda: cleared(nodes_double) == [3])
    nodes_double.send(pb.SessionDown(epoch=10, clear_slots=[pb.ClearSlots(order=4, segment=100, first_slot=[1])]))
    nodes_double.wait(lambda: len(nodes_double.registered) == 2)  # nothing of such a Master can be believed
    assert cleared(nodes_double) == [3]


def test_tombstones_come_with_a_registration_and_later(
    node_daemon: NodeDaemon, nodes_double: NodesDouble, stored: Welcome
) -> None:
    before = states(stored)
    nodes_double.send(pb.SessionDown(epoch=10, tombstones=[pb.Tombstone(namespace_id=NAMESPACE, stamp=76)]))
    nodes_double.send(pb.SessionDown(epoch=10, tombstones=[pb.Tombstone(namespace_id=b"o" * 16, stamp=99)]))
    nodes_double.ask_inventory(1)
    nodes_double.wait(lambda: 1 in nodes_double.inventories)
    assert states(stored) == before
    nodes_double.tombstones = [pb.Tombstone(namespace_id=NAMESPACE, stamp=77)]
    nodes_double.break_session()
    nodes_double.wait(lambda: len(nodes_double.registered) == 2)
    assert node_daemon.registration.serving.wait(WAIT_S)
    nodes_double.ask_inventory(2)
    chunks = nodes_double.wait(lambda: nodes_double.inventories.get(2))
    assert states(stored) == [FREE] * 4
    assert reported(chunks) == {KEYS[2]: [(101, PER_SLAB, 1)]}  # its stamp is newer
    store(stored.segments[0], 1)  # of a writer that did not notice
    nodes_double.ask_inventory(3)
    chunks = nodes_double.wait(lambda: nodes_double.inventories.get(3))
    assert reported(chunks) == {KEYS[2]: [(101, PER_SLAB, 1)]}


def test_the_switch_reaches_a_worker(node_daemon: NodeDaemon, nodes_double: NodesDouble, stored: Welcome) -> None:
    nodes_double.send(pb.SessionDown(epoch=10, bypass=pb.Bypass(lookups=True, stores=True)))
    until(lambda: [segment.bypass() for segment in stored.segments] == [5, 5])
    nodes_double.send(pb.SessionDown(epoch=10))
    nodes_double.wait_heartbeats(2)
    assert stored.segments[0].bypass() == 5
    assert 'kvpool_client_bypass_state{call="stores"} 1.0' in get(node_daemon.http_port, "/metrics")[1]
    nodes_double.send(pb.SessionDown(epoch=10, bypass=pb.Bypass()))
    until(lambda: [segment.bypass() for segment in stored.segments] == [0, 0])
    nodes_double.bypass = pb.Bypass(loads=True)
    nodes_double.break_session()
    until(lambda: [segment.bypass() for segment in stored.segments] == [2, 2])


def test_only_workers_that_are_gone_are_answered(
    node_daemon: NodeDaemon, nodes_double: NodesDouble, stored: Welcome
) -> None:
    nodes_double.send(pb.SessionDown(epoch=10, ask_workers=[stored.worker_id, 4711, 0, 1 << 63]))
    nodes_double.wait(lambda: 4711 in gone(nodes_double))
    assert gone(nodes_double) == {4711, 1 << 63}
    assert node_daemon.node.workers.attached == 1
