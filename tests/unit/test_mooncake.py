"""The mooncake engine over a double of the package: addresses, checks, and transfers that do not end."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_client.devices.base import Contiguous
from kvpool_client.engines import mooncake_lanes
from kvpool_client.engines.mooncake import Exposure, MooncakeEngine
from kvpool_client.engines.mooncake_export import MooncakeExport
from kvpool_client.engines.mooncake_package import start
from kvpool_client.peer.copies import PeerCopy
from kvpool_client.start_error import StartError
from kvpool_client.transfer import LocalEngine, PartCopy
from kvpool_client.transfer_engine import Copied, Progress, Term, Written
from unit.mooncake_double import TransfersDouble, exposure_of, peer_copy
from unit.transfer_world import (
    BLOCKS,
    DEVICE,
    EPOCH,
    HANDLE,
    SLAB_BYTES,
    SPEC,
    STAMPS,
    Bytes,
    Run,
    Stored,
    World,
    chain_of,
    spec_of,
)


@dataclass
class DataPorts:
    """Says that it was asked."""

    asked: list[str] = field(default_factory=list[str])

    def read(self, copies: Sequence[PeerCopy], term: Term) -> list[Copied]:
        self.asked.append("read")
        return [Copied(0, "data_port")] * len(copies)

    def write(self, copies: Sequence[PeerCopy], term: Term, progress: Progress) -> Written:
        self.asked.append("write")
        return Written([0] * len(copies), "data_port")

    def close(self) -> None:
        self.asked.append("close")


def engine_for(world: World, package: TransfersDouble, **settings: Any) -> MooncakeEngine:
    where: Callable[[Any], Exposure | None] = settings.pop("where", lambda grant: exposure_of(world))
    ports = settings.pop("ports", DataPorts())
    return MooncakeEngine(DEVICE, ports, where, host="here", clock=world.clock, package=package, **settings)


@dataclass
class Reader:
    """The blocks of a stored run, read by a worker elsewhere."""

    stored: Stored
    package: TransfersDouble
    ports: DataPorts
    engine: MooncakeEngine
    target: Bytes

    def copy(self) -> PeerCopy:
        buffer = DEVICE.bind(Contiguous(self.target), SPEC.part_bytes, writable=True)
        return peer_copy(SPEC, self.stored.chain, [self.stored.run], buffer)

    def read(self, deadline_ms: int = 60_000) -> tuple[int, str]:
        (copied,) = self.engine.read([self.copy()], self.stored.world.term(deadline_ms))
        assert copied.bad is None
        return copied.blocks, copied.reason


@pytest.fixture
def reader(stored_run: Stored) -> Reader:
    package, ports = TransfersDouble(), DataPorts()
    engine = engine_for(stored_run.world, package, ports=ports, piece_bytes=5 * SPEC.slot_bytes)
    return Reader(stored_run, package, ports, engine, np.zeros_like(stored_run.data))


@settings(max_examples=40, deadline=None)
@given(
    part_bytes=st.sampled_from([1, 4096, 5000, 12288]),
    parts=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    gap=st.integers(0, 2),
    place=st.integers(0, 40),
    piece_bytes=st.sampled_from([1, 40_000, 1 << 20]),
    seed=st.integers(0, 1 << 31),
)
def test_round_trip(
    segment_world: World,
    part_bytes: int,
    parts: int,
    lengths: list[int],
    gap: int,
    place: int,
    piece_bytes: int,
    seed: int,
) -> None:
    """Parts side by side, gaps between the runs of a copy, over the borders of slabs."""
    spec = spec_of(part_bytes, parts)
    segment_world.bind(spec.slot_bytes)
    blocks = sum(lengths) + gap * len(lengths)
    chain = chain_of(spec, blocks, seed)
    data = np.random.default_rng(seed).integers(0, 256, (parts, blocks, part_bytes), dtype=np.uint8)
    target = np.zeros_like(data)
    per_slab = segment_world.worker.slots_in_slab(spec.slot_bytes)
    local: list[PartCopy] = []
    remote: list[PeerCopy] = []
    for part in range(parts):
        runs: list[Run] = []
        first, slot = 0, place
        for length in lengths:
            if slot // per_slab != (slot + length * parts - 1) // per_slab:
                slot = (slot // per_slab + 1) * per_slab
            runs.append(Run(first, length, segment_world.worker, slot + part, parts, next(STAMPS)))
            first, slot = first + length + gap, slot + length * parts + gap
        source = DEVICE.bind(Contiguous(data[part]), part_bytes, writable=False)
        local.append(PartCopy(spec, part, chain, runs, source))
        remote.append(
            peer_copy(spec, chain, runs, DEVICE.bind(Contiguous(target[part]), part_bytes, writable=True), part)
        )
    assert LocalEngine(DEVICE).write(local, segment_world.term(), lambda _: "").blocks == [sum(lengths)] * parts
    engine = engine_for(segment_world, TransfersDouble(), piece_bytes=piece_bytes)
    assert engine.read(remote, segment_world.term(60_000)) == [Copied(sum(lengths))] * parts
    stored = np.concatenate([np.arange(run.first, run.first + run.blocks) for run in remote[0].runs])
    assert (target[:, stored] == data[:, stored]).all()
    assert not np.delete(target, stored, axis=1).any()


def test_neighbours_travel_together(reader: Reader) -> None:
    assert reader.read() == (BLOCKS, "")
    assert (reader.target == reader.stored.data).all()
    payload = [size for size in reader.package.wanted if size > 4096]
    assert payload == [4 * SPEC.slot_bytes + SPEC.part_bytes] * 2 + [SPEC.slot_bytes + SPEC.part_bytes]


def test_nothing_wrong_reaches_the_buffer(reader: Reader) -> None:
    reader.stored.run.slots(SPEC.slot_bytes)[6, 4999] ^= 1
    assert reader.read() == (6, "verify_failed")
    assert (reader.target[:6] == reader.stored.data[:6]).all()
    assert not reader.target[6:].any()


def test_a_block_written_over_during_the_copy(reader: Reader) -> None:
    def overwrite(size_bytes: int) -> None:
        if size_bytes > 4096:
            reader.stored.headers["stamp"][2] += 1
            reader.stored.reseal()
            reader.package.before = lambda size_bytes: None

    reader.package.before = overwrite
    assert reader.read() == (2, "stale_stamp")
    assert not reader.target[2:].any()


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [("state", 1, "stale_stamp"), ("part", 1, "wrong_block"), ("checksum", 0, "unverified")],
)
def test_a_header_of_something_else(reader: Reader, column: str, value: int, reason: str) -> None:
    reader.stored.headers[column][3] = value
    reader.stored.reseal()
    assert reader.read() == (3, reason)


def test_a_torn_header(reader: Reader) -> None:
    reader.stored.headers["length_bytes"][3] ^= 0x40
    assert reader.read() == (3, "torn_header")


def test_a_slab_that_was_bound_anew(reader: Reader) -> None:
    reader.stored.world.owner.bind_slab(0, 2 * SPEC.slot_bytes)
    assert reader.read() == (0, "slab_changed")
    assert not reader.target.any()


def test_a_base_that_is_none(reader: Reader) -> None:
    """As after a restart of the node client: its mappings lie elsewhere."""
    wrong = exposure_of(reader.stored.world).bases[HANDLE] + SLAB_BYTES
    reader.engine = engine_for(
        reader.stored.world, reader.package, where=lambda _: Exposure("there:1", {HANDLE: wrong})
    )
    assert reader.read() == (0, "protocol")


def test_an_answer_that_cannot_be(reader: Reader) -> None:
    copy = reader.copy()
    beyond = PeerCopy(
        copy.grant, [copy.runs[0]._replace(at=1)], copy.headers, copy.buffer, copy.part_bytes, copy.slot_bytes
    )
    assert reader.engine.read([beyond], reader.stored.world.term(60_000)) == [Copied(0, "protocol")]


def test_without_an_offer_the_data_port_reads(reader: Reader) -> None:
    reader.engine = engine_for(reader.stored.world, reader.package, ports=reader.ports, where=lambda _: None)
    assert reader.read() == (0, "data_port")
    assert reader.package.calls == []


def test_stores_go_to_data_ports(reader: Reader) -> None:
    reader.engine.write([reader.copy()], reader.stored.world.term(), lambda _: "")
    reader.engine.close()
    assert reader.ports.asked == ["write", "close"]
    assert reader.package.calls == []


@pytest.mark.parametrize("trouble", ["silent", "refuses", "fails"])
def test_a_peer_that_does_not_answer(reader: Reader, trouble: str) -> None:
    """Its data port is asked, and mooncake left alone until a probe is due."""
    setattr(reader.package, trouble, True)
    assert reader.read() == (0, "data_port")
    assert ("read" in reader.package.calls) == (trouble != "silent")  # a silent one is not opened
    setattr(reader.package, trouble, False)
    reader.package.calls.clear()
    assert reader.read() == (0, "data_port")
    assert reader.package.calls == []
    reader.stored.world.now_ms += 1_000
    assert reader.read() == (BLOCKS, "")
    assert reader.package.calls[0] == "probe"


def test_late_bytes_do_not_reach_the_caller(reader: Reader) -> None:
    """Its term ends while transfers are under way: they end in the lane's memory, which is not lent before."""
    reader.package.stalled = True
    assert reader.read(reader.stored.world.now_ms + 20) == (0, "time_over")
    assert reader.package.flying
    reader.stored.world.now_ms += 1_000
    assert reader.read() == (0, "data_port")
    threads = [thread for thread in threading.enumerate() if thread.name == "kvpool-mooncake"]
    reader.package.stalled = False
    for thread in threads:
        thread.join(10)
    assert len(threads) == 1
    assert not reader.package.flying
    assert not reader.target.any()
    assert reader.read() == (BLOCKS, "")


def test_a_lane_that_was_left_is_not_lent(stored_run: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a reader of another peer: what one does not finish would come into what the other gave."""
    monkeypatch.setattr(mooncake_lanes, "LANES_MAX", 1)
    package, offers = TransfersDouble(stalled=True), [exposure_of(stored_run.world)]
    engine = engine_for(stored_run.world, package, where=lambda _: offers[-1])
    target = np.zeros_like(stored_run.data)
    copy = peer_copy(SPEC, stored_run.chain, [stored_run.run], DEVICE.bind(Contiguous(target), 5000, writable=True))
    assert engine.read([copy], stored_run.world.term(stored_run.world.now_ms + 20)) == [Copied(0, "time_over")]
    offers.append(Exposure("another:1", offers[0].bases))
    assert engine.read([copy], stored_run.world.term(60_000)) == [Copied(0, "data_port")]
    package.stalled = False
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "kvpool-mooncake"]
    thread.join(10)
    assert engine.read([copy], stored_run.world.term(60_000)) == [Copied(BLOCKS)]


def test_every_lane_taken(stored_run: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_lanes, "LANES_MAX", 0)
    ports = DataPorts()
    engine = engine_for(stored_run.world, TransfersDouble(), ports=ports)
    copy = peer_copy(
        SPEC, stored_run.chain, [stored_run.run], DEVICE.bind(Contiguous(stored_run.data), 5000, writable=True)
    )
    assert engine.read([copy], stored_run.world.term()) == [Copied(0, "data_port")]


def test_a_newer_epoch_ends_a_read(reader: Reader) -> None:
    term = Term(reader.stored.world.clock, 60_000, "time_over", EPOCH, ruling=lambda: EPOCH + 1)
    assert reader.engine.read([reader.copy()], term) == [Copied(0, "stale_epoch")]
    assert reader.read() == (BLOCKS, "")  # it says nothing of the peer


def test_transfers_under_way_are_bounded(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_lanes, "FLYING_MAX", 2)
    monkeypatch.setattr("kvpool_client.engines.mooncake.TRANSFER_BYTES", 1)
    assert reader.read() == (BLOCKS, "")
    assert reader.package.flying_most == 2


def test_over_tcp_readers_register_nothing_and_nodes_read_only_memory(reader: Reader) -> None:
    reader.read()
    assert reader.package.registered == {}
    export = MooncakeExport("node", package=reader.package)
    base = export.offer(reader.stored.world.owner)
    assert export.server == "node:16000"
    assert reader.package.registered == {base: len(reader.stored.world.owner.memory)}
    with open("/proc/self/maps") as maps:
        (rights,) = [line.split()[1] for line in maps if line.startswith(f"{base:x}-")]
    assert rights == "r--s"
    export.close()
    assert reader.package.registered == {}


def test_other_links_need_registered_memory_on_both_sides(reader: Reader) -> None:
    reader.engine = engine_for(reader.stored.world, reader.package, ports=reader.ports, protocol="rdma")
    assert reader.read() == (BLOCKS, "")
    assert len(reader.package.registered) == 1
    reader.package.cannot_register = True
    with pytest.raises(StartError, match="cannot be registered"):
        MooncakeExport("node", "rdma", package=reader.package).offer(reader.stored.world.owner)


def test_memory_that_cannot_be_registered(reader: Reader) -> None:
    reader.package.cannot_register = True
    reader.engine = engine_for(reader.stored.world, reader.package, ports=reader.ports, protocol="rdma")
    assert reader.read() == (0, "data_port")


def test_a_missing_package_or_library_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(StartError, match="libibverbs1"):
        start("127.0.0.1", "tcp")
