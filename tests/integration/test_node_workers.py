"""Workers of a node client: they come, die, outlive it and report bad blocks."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from integration.node_world import SLAB, SLOT, Make, bound, gone, store
from integration.nodes_double import NodesDouble
from kvpool_client.config import NodeConfig
from kvpool_client.daemon import NodeDaemon
from kvpool_client.local_socket import FRAME_BYTES_MAX, LocalClient
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import LimitReached, MessageTooLarge, ProtocolError, UnknownSegment, Unreachable
from kvpool_proto.geometry import slots_per_slab

WORKER = """
import sys, time
from kvpool_client.local_socket import LocalClient
welcome = LocalClient(sys.argv[1], 5).hello("worker")
welcome.segments[0].memory[-1] = 17
print(welcome.worker_id, flush=True)
time.sleep(100)
"""


def worker_process(config: NodeConfig) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen([sys.executable, "-c", WORKER, config.socket_path], stdout=-1, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_workers_death_is_told_and_only_its_death(
    node_daemon: NodeDaemon, nodes_double: NodesDouble, node_config: NodeConfig
) -> None:
    process, worker_id = worker_process(node_config)
    assert node_daemon.node.segments[0].memory[-1] == 17
    assert node_daemon.node.workers.attached == 1
    process.send_signal(signal.SIGSTOP)
    nodes_double.wait_heartbeats(5)
    assert not gone(nodes_double)
    process.kill()
    process.wait()
    assert nodes_double.wait(lambda: gone(nodes_double)) == {worker_id}
    nodes_double.break_session()
    nodes_double.wait(lambda: sum(worker_id in message.workers_gone for message in nodes_double.heard) == 2)
    assert process.stdout is not None
    process.stdout.close()


def test_the_connection_is_not_the_worker(
    node_daemon: NodeDaemon, nodes_double: NodesDouble, local_client: LocalClient
) -> None:
    welcome = local_client.hello("w")
    local_client.close()
    nodes_double.wait_heartbeats(5)
    assert not gone(nodes_double)
    welcome.segments[0].close()
    nodes_double.wait_heartbeats(5)
    assert not gone(nodes_double)
    welcome.segments[1].close()
    assert nodes_double.wait(lambda: gone(nodes_double)) == {welcome.worker_id}


def test_workers_outlive_the_node_client(node_daemon: NodeDaemon, local_client: LocalClient) -> None:
    welcome = local_client.hello("w")
    node_daemon.stop()
    for segment in welcome.segments:
        segment.memory[-4096:] = 3
        assert segment.superblock.node_id == "n1"
        segment.close()
    with pytest.raises(Unreachable):
        local_client.ping()


def test_the_client_connects_again_by_itself(
    local_client: LocalClient, node_daemon: NodeDaemon, make_daemon: Make
) -> None:
    local_client.ping()
    node_daemon.stop()
    again = make_daemon()
    local_client.ping()
    welcome = local_client.hello("w")
    assert welcome.incarnation == again.node.incarnation > node_daemon.node.incarnation
    for segment in welcome.segments:
        segment.close()


def test_too_many_workers(make_daemon: Make, node_config: NodeConfig) -> None:
    make_daemon(workers_max=1)
    local = LocalClient(node_config.socket_path, 5)
    welcome = local.hello("one")
    with pytest.raises(LimitReached, match="workers_max = 1"):
        local.hello("two")
    for segment in welcome.segments:
        segment.close()
    local.close()


def test_ids_are_unique(local_client: LocalClient) -> None:
    welcomes = [local_client.hello("w") for _ in range(5)]
    assert len({welcome.worker_id for welcome in welcomes} - {0}) == 5
    for welcome in welcomes:
        for segment in welcome.segments:
            segment.close()


def test_only_really_bad_blocks_are_reported(
    node_daemon: NodeDaemon, nodes_double: NodesDouble, local_client: LocalClient
) -> None:
    nodes_double.order(pb.BindSlab(segment=100, slab=1, slot_bytes=SLOT))
    nodes_double.wait(lambda: bound(nodes_double))
    welcome = local_client.hello("w")
    slot, epoch = slots_per_slab(SLAB, SLOT) + 1, welcome.epoch
    block = store(welcome.segments[0], slot, b"payload")
    assert local_client.report_bad(block, epoch, 100, slot, SLOT) is False
    welcome.segments[0].slots(slot, 1, SLOT)[0, 0] ^= 1
    assert local_client.report_bad(block, epoch - 1, 100, slot, SLOT) is False
    assert local_client.report_bad(block, epoch, 100, slot, SLOT) is True
    assert nodes_double.wait(lambda: [bad for message in nodes_double.heard for bad in message.bad_blocks]) == [block]
    assert (node_daemon.node.blocks_checked_total, node_daemon.node.blocks_bad_total) == (2, 1)
    with pytest.raises(UnknownSegment):
        local_client.report_bad(block, epoch, 999, slot, SLOT)
    with pytest.raises(ProtocolError):
        local_client.report_bad(block, epoch, 100, 1 << 31, SLOT)
    with pytest.raises(ProtocolError):
        local_client.report_bad(pb.BadBlock(), epoch, 100, slot, SLOT)
    with pytest.raises(MessageTooLarge):
        local_client.report_bad(
            pb.BadBlock(namespace_id=b"n" * 16, chain=bytes(FRAME_BYTES_MAX)), epoch, 100, slot, SLOT
        )
    for segment in welcome.segments:
        segment.close()
