"""A pool in this process for SDK tests; a segment, and a run stored in it, for tests of transfers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool_client import Contiguous, KVPool, Namespace
from kvpool_client.owned_segment import OwnedSegment, SegmentPlan
from kvpool_client.segment import AttachedSegment
from kvpool_client.transfer import LocalEngine
from unit.peer_world import Case, PeerWorld, case_of, engine, until
from unit.sdk_double import PoolDouble
from unit.sdk_world import spec_of
from unit.transfer_world import (
    BLOCKS,
    DEVICE,
    HANDLE,
    SLAB_BYTES,
    SLABS,
    SPEC,
    Stored,
    World,
    chain_of,
    part_copy,
    run_at,
    written,
)


@pytest.fixture
def pool_double(tmp_path: Path) -> Iterator[PoolDouble]:
    double = PoolDouble(tmp_path)
    yield double
    double.stop()


@pytest.fixture
def sdk_pool(pool_double: PoolDouble) -> Iterator[KVPool]:
    with pool_double.connect() as pool:
        yield pool


@pytest.fixture
def sdk_space(sdk_pool: KVPool) -> Namespace:
    return sdk_pool.namespace(spec_of())


@pytest.fixture(scope="module")
def segment_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    plan = SegmentPlan(
        directory=tmp_path_factory.mktemp("segment"),
        node_id="n",
        index=0,
        size_bytes=SLABS * SLAB_BYTES,
        slab_bytes=SLAB_BYTES,
    )
    owner = OwnedSegment.create(plan, incarnation=1, prefault_threads=1, progress=lambda _: None)
    worker = AttachedSegment(owner.open_for_worker(1), HANDLE, plan.size_bytes, plan.slab_bytes)
    yield World(owner, worker)
    worker.close()
    owner.unlink()
    owner.close()


@pytest.fixture
def stored_run(segment_world: World) -> Stored:
    segment_world.bind(SPEC.slot_bytes)
    segment_world.now_ms = 1_000
    chain = chain_of(SPEC, BLOCKS)
    data = np.random.default_rng(2).integers(0, 256, (BLOCKS, SPEC.part_bytes), dtype=np.uint8)
    engine = LocalEngine(DEVICE, piece_bytes=4 * SPEC.slot_bytes)
    run = run_at(segment_world, BLOCKS, slot=3)
    buffer = DEVICE.bind(Contiguous(data), SPEC.part_bytes, writable=False)
    assert written(engine, segment_world, [part_copy(SPEC, chain, [run], buffer)]) == [BLOCKS]
    return Stored(segment_world, chain, run, data, engine)


@pytest.fixture(scope="module")
def peer_world(segment_world: World) -> Iterator[PeerWorld]:
    peer = PeerWorld(segment_world)
    yield peer
    peer.close()


@pytest.fixture
def peer_case(peer_world: PeerWorld) -> Iterator[Case]:
    """Fresh slots, an engine that asks for four blocks at a time over one connection, and refusals counted anew."""
    made = engine(connections=1)
    peer_world.server.counts.refused.clear()
    case = case_of(peer_world, made)
    yield case
    made.close()
    case.engine.close()
    until(lambda: peer_world.server.open_connections == 0)
