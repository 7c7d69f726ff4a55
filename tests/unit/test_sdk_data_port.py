"""The SDK and a node's real data port: what is stored on another node is loaded from it, over loopback."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvpool_client import Contiguous, KVPool, Rows
from kvpool_client.clock import Clock
from kvpool_client.node import Node
from kvpool_client.peer.server import PeerServer
from kvpool_proto.capability import KEY_BYTES
from unit.sdk_double import PoolDouble
from unit.sdk_world import PART_BYTES, chain_of, data_of, empty, spec_of

BLOCKS = 40
CHAIN, DATA = chain_of(BLOCKS), data_of(BLOCKS)


class Far:
    """A node with a data port."""

    def __init__(self, double: PoolDouble, name: str) -> None:
        self.double = double
        self.node: Node = double.add_node(name, data_address="127.0.0.1:0")
        self.node.keyring.learn(double.epoch, b"k" * KEY_BYTES, double.now_ms, 0)
        self.start()

    def start(self) -> None:
        """On a port of its own, of which the Master hears."""
        self.server = PeerServer(
            ("127.0.0.1", 0), self.node, connections_max=8, io_timeout_ms=5_000, idle_timeout_ms=5_000,
            log=self.double._log, clock=Clock(),
        )  # fmt: skip
        self.server.start()
        self.node.data_address = f"127.0.0.1:{self.server.port}"
        self.double.register(self.double.epoch, self.node)


@pytest.fixture
def far(pool_double: PoolDouble) -> Iterator[Far]:
    found = Far(pool_double, "m")
    yield found
    found.server.stop()


@pytest.fixture
def pool(far: Far) -> Iterator[KVPool]:
    with far.double.connect(peer_engine=None) as found:
        yield found


def test_blocks_come_back_from_where_they_were_put(far: Far, pool: KVPool) -> None:
    space = pool.namespace(spec_of())
    far.double.place_on("m")
    stored = space.store(CHAIN, Contiguous(DATA))
    assert (stored.stored_blocks, stored.reason) == (BLOCKS, "")
    with space.lookup(CHAIN, skip=3) as hit:
        target = empty(BLOCKS)
        rows = np.arange(BLOCKS - 1, 2, -1)
        loaded = space.load(hit, Rows([target], rows))
        assert (loaded.blocks, loaded.reason) == (BLOCKS - 3, "")
        assert (target[rows] == DATA[3:]).all()
    assert pool.stats().remote_loaded_bytes == (BLOCKS - 3) * PART_BYTES


def test_parts_here_and_there(far: Far, pool: KVPool) -> None:
    space = pool.namespace(spec_of(parts=3))
    data = [data_of(BLOCKS, seed) for seed in range(3)]
    far.double.place_on("m", "n", "m")
    stored = space.store(CHAIN, [Contiguous(one) for one in data])
    assert (stored.stored_blocks, stored.reason) == (BLOCKS, "")
    with space.lookup(CHAIN) as hit:
        target = [empty(BLOCKS) for _ in range(3)]
        assert space.load(hit, [Contiguous(one) for one in target], part=range(3)).blocks == BLOCKS
        assert all((one == other).all() for one, other in zip(target, data, strict=True))


def test_a_flipped_byte_over_there(far: Far, pool: KVPool) -> None:
    space = pool.namespace(spec_of())
    far.double.place_on("m")
    space.store(CHAIN, Contiguous(DATA))
    with space.lookup(CHAIN) as hit:
        slot = int(hit.extents.first_slot[0]) + 5
        far.node.segments[0].slots(slot, 1, space.spec.slot_bytes)[0, 9] ^= 1
        target = empty(BLOCKS)
        loaded = space.load(hit, Contiguous(target))
        assert (loaded.blocks, loaded.reason) == (5, "verify_failed")
        assert (target[:5] == DATA[:5]).all()
    assert pool.stats().peer_breaks == 0


def test_a_data_port_that_is_gone_and_back(far: Far, pool: KVPool) -> None:
    space = pool.namespace(spec_of())
    space.store(CHAIN[: 10 * 12], Contiguous(DATA[:10]))
    far.double.place_on("m")
    space.store(CHAIN, Contiguous(DATA))
    far.server.stop()
    with space.lookup(CHAIN) as hit:
        loaded = space.load(hit, Contiguous(empty(BLOCKS)))
        assert (loaded.blocks, loaded.reason) == (10, "peer_unreachable")
    stored = space.store(chain_of(5, 8), Contiguous(data_of(5, 8)))
    assert stored.stored_blocks == 0
    assert pool.flush(20_000)
    assert [request.node_id for request in far.double.called("ReportNode")] == ["m"]
    far.start()
    far.double.now_ms += 1_000
    with space.lookup(CHAIN) as hit:
        assert space.load(hit, Contiguous(empty(BLOCKS))).blocks == BLOCKS
