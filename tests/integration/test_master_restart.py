"""The Master killed, stopped, continued and started again: what it remembers, and that nobody suffers for its stall."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from integration.master_client import KEY_BYTES, SPEC, TIMEOUT_S, Client, Node, chain, refused, until
from integration.processes import MasterProcess
from kvpool_proto import pool_pb2 as pb

CONTENTS = 77
SLOT_BYTES = 4096


@contextmanager
def master(state_dir: Path, *flags: str) -> Iterator[Client]:
    """A life of the Master on this directory. It is killed at the end unless it has ended before."""
    with MasterProcess(*flags, state_dir=state_dir) as process:
        client = Client(process)
        try:
            yield client
        finally:
            client.close()


def held(keys: bytes, stamp: int) -> tuple[pb.InventoryChunk, ...]:
    """The inventory of a node whose segment holds both parts of a chain that starts at the root."""
    blocks = len(keys) // KEY_BYTES
    strands = pb.Strands(
        namespace_id=SPEC.id,
        key_bytes=KEY_BYTES,
        slot_bytes=SLOT_BYTES,
        part_to=2,
        blocks=[blocks],
        extents=[1],
        parent_kind=[pb.PARENT_ROOT],
        parent_keys=bytes(KEY_BYTES),
        keys=keys,
        extent_blocks=[blocks],
        first_slot=[0],
        stride=[2],
        stamp=[stamp],
    )
    slabs = pb.InventoryChunk(slab=[0], slot_bytes=[SLOT_BYTES])
    return slabs, pb.InventoryChunk(strands=[strands]), pb.InventoryChunk(end=pb.InventoryEnd(blocks=blocks))


def stored(client: Client, node: Node) -> bytes:
    """Store a chain; returns its keys."""
    client.open()
    node.bind()
    until(lambda: client.reserve(chain=chain(1)).reason != pb.REASON_SLAB_PENDING)
    keys, reservation = chain(3), os.urandom(16)
    client.reserve(chain=keys, reservation_id=reservation)
    assert client.commit(reservation, 3, final=True).committed_blocks == 3
    return keys


def test_what_was_stored_is_found_by_the_life_after_a_kill(tmp_path: Path) -> None:
    with master(tmp_path) as client:
        keys = stored(client, Node(client.nodes, "a", contents=CONTENTS))
        epoch = client.process.epoch
        assert client.process.kill() == -signal.SIGKILL
    with master(tmp_path) as client:
        assert client.process.epoch > epoch
        assert client.get("/readyz") == (503, "recovering: 1 nodes have not come back (a)\n")
        assert client.lookup(chain=keys).reason == pb.REASON_UNKNOWN_KEY
        node = Node(client.nodes, "a", contents=CONTENTS, holds=True, epoch_seen=epoch)
        assert node.tell(*held(keys, epoch << 32 | 9)).blocks_taken == 3
        assert client.lookup(chain=keys).hit_blocks == 3
        # The former life's leases and reservations may still be alive.
        assert client.reserve(chain=chain(2)).reason == pb.REASON_STARTING
        until(lambda: client.get("/readyz") == (200, "ready\n"))
        assert client.process.event("recovered")["recovered_blocks"] == 3
        lease, reservation = os.urandom(16), os.urandom(16)
        stale = [
            refused(lambda: client.pool.Renew(pb.RenewRequest(lease_id=lease, epoch=epoch))),
            refused(lambda: client.commit(reservation, 1, epoch=epoch)),
            refused(lambda: client.pool.Abort(pb.AbortRequest(reservation_id=reservation, epoch=epoch))),
        ]
        assert {error.reason for error in stale} == {"STALE_EPOCH"}
        client.sound()
        node.break_off()


def test_after_a_clean_stop_without_open_leases_nothing_waits(tmp_path: Path) -> None:
    with master(tmp_path, "--core-write-min-ms", "50ms") as client:
        keys = stored(client, Node(client.nodes, "a", contents=CONTENTS))
        until(lambda: not client.status().reservations)
        epoch = client.process.epoch
        assert client.process.stop() == 0
    with master(tmp_path) as client:
        node = Node(client.nodes, "a", contents=CONTENTS, holds=True, epoch_seen=epoch)
        node.tell(*held(keys, epoch << 32 | 9))
        until(lambda: client.reserve(chain=chain(2)).reason == pb.REASON_NONE)
        node.break_off()


def test_a_purge_and_the_switch_outlive_a_kill(tmp_path: Path) -> None:
    switch = pb.Bypass(loads=True)
    with master(tmp_path) as client:
        keys = stored(client, Node(client.nodes, "a", contents=CONTENTS))
        client.pool.Purge(pb.PurgeRequest(namespace_id=SPEC.id), timeout=TIMEOUT_S)
        client.admin.SetBypass(pb.SetBypassRequest(bypass=switch), timeout=TIMEOUT_S)
        epoch = client.process.epoch
        client.process.kill()
    with master(tmp_path) as client:
        node = Node(client.nodes, "a", contents=CONTENTS, holds=True, epoch_seen=epoch)
        (tombstone,) = node.registered.tombstones
        assert (tombstone.namespace_id, tombstone.stamp >> 32) == (SPEC.id, epoch)
        assert node.registered.bypass == client.status().bypass == switch
        # A node that had not heard of it reports what is dead all the same.
        assert node.tell(*held(keys, tombstone.stamp)).blocks_surplus == 3
        assert client.lookup(chain=keys).reason == pb.REASON_UNKNOWN_KEY
        client.sound()
        node.break_off()


def test_a_lost_directory_is_survived(tmp_path: Path) -> None:
    with master(tmp_path / "lost") as client:
        seen = client.process.epoch + 1_000
        node = Node(client.nodes, "a", epoch_seen=seen)
        assert node.registered.epoch == seen + 1
        client.open()
        node.bind()
        until(lambda: client.reserve(chain=chain(1)).reason == pb.REASON_NONE)
        assert client.reserve(chain=chain(1)).epoch == seen + 1
        client.process.kill()
    with master(tmp_path / "lost") as client:
        assert client.process.epoch == seen + 2


def test_a_master_that_has_reserved_does_not_go_on_below_an_epoch_that_it_meets(tmp_path: Path) -> None:
    with master(tmp_path) as client:
        stored(client, Node(client.nodes, "a"))
        seen = client.process.epoch + 1_000
        assert refused(lambda: Node(client.nodes, "b", epoch_seen=seen)).reason == "STOPPING"
        assert client.process.process.wait(TIMEOUT_S) == 2
    errors = [line for line in client.process.lines if '"level": "error"' in line]
    assert len(errors) == 1
    assert f"epoch {seen}" in errors[0]
    with master(tmp_path) as client:
        assert client.process.epoch > seen


def test_a_second_master_on_the_directory_fails_with_one_line(tmp_path: Path) -> None:
    with master(tmp_path):
        words = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--plaintext", "--state-dir", str(tmp_path)]
        done = subprocess.run(
            [sys.executable, "-m", "kvpool_master", *words], capture_output=True, text=True, timeout=30, check=False
        )
    assert done.returncode == 1
    assert re.fullmatch(r"kvpool-master: state_dir = .*: another Master uses .*\n", done.stderr)


class Beating:
    """Heartbeats of a node, for as long as it is open."""

    def __init__(self, node: Node, period_s: float) -> None:
        self._node = node
        self._ended = threading.Event()
        self._period_s = period_s
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._period_s):
            self._node.report()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(TIMEOUT_S)


def test_a_master_that_was_stopped_expires_nobody(tmp_path: Path) -> None:
    flags = ("--tick-ms", "50", "--core-stall-ms", "200", "--core-heartbeat-ms", "50")
    flags += ("--core-suspect-ms", "400", "--core-retire-ms", "800")
    with master(tmp_path, *flags) as client:
        node = Node(client.nodes, "a", contents=CONTENTS)
        keys = stored(client, node)
        beating = Beating(node, 0.05)
        for _ in range(2):
            client.process.process.send_signal(signal.SIGSTOP)
            assert not threading.Event().wait(1.6)
            client.process.process.send_signal(signal.SIGCONT)
            assert client.lookup(chain=keys).hit_blocks == 3
        until(lambda: client.process.event("stalled"))
        assert not threading.Event().wait(0.5)  # longer than a node that is silent would be up
        assert [(known.node_id, known.state) for known in client.status().nodes] == [("a", "ramp")]
        assert client.lookup(chain=keys).hit_blocks == 3
        assert not client.process.event("session_lost"), client.process.lines
        beating.end()
        until(lambda: client.status().nodes == [] or client.status().nodes[0].state == "suspect")
        node.break_off()


@pytest.mark.parametrize("sealed", ["a file", "not sound"])
def test_a_directory_that_cannot_be_used_is_told_in_one_line(tmp_path: Path, sealed: str) -> None:
    state_dir = tmp_path / "state"
    if sealed == "a file":
        state_dir.write_text("")
    else:
        state_dir.mkdir()
        (state_dir / "kvpool-master.db").write_bytes(os.urandom(9_000))
    words = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--plaintext", "--state-dir", str(state_dir)]
    done = subprocess.run(
        [sys.executable, "-m", "kvpool_master", *words], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvpool-master: state_dir = {state_dir}: ")
    assert done.stderr.count("\n") == 1
