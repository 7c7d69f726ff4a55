"""The node client's second look at a block that a worker complains about."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool_client.blockcheck import block_is_bad
from kvpool_client.headers import WRITING
from kvpool_client.owned_segment import OwnedSegment
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import ProtocolError
from unit.segment_world import PER_SLAB, SLOT, create, opened, plan_in, write_block


@pytest.fixture
def owned(tmp_path: Path) -> Iterator[OwnedSegment]:
    with opened(create(plan_in(tmp_path))) as segment:
        yield segment


def test_a_good_block_is_not_bad(owned: OwnedSegment) -> None:
    owned.bind_slab(1, SLOT)
    block = write_block(owned, PER_SLAB + 2, b"some bytes")
    assert not block_is_bad(owned, block, PER_SLAB + 2, SLOT)


def test_every_doubt_makes_it_bad(owned: OwnedSegment) -> None:
    owned.bind_slab(1, SLOT)
    slot = PER_SLAB + 2
    block = write_block(owned, slot, b"some bytes")
    assert block_is_bad(owned, pb.BadBlock(namespace_id=b"m" * 16, chain=block.chain, stamp=77), slot, SLOT)
    assert block_is_bad(owned, pb.BadBlock(namespace_id=b"n" * 16, chain=block.chain, stamp=78), slot, SLOT)
    assert block_is_bad(owned, pb.BadBlock(namespace_id=b"n" * 16, chain=b"keykey01", stamp=77), slot, SLOT)
    assert block_is_bad(owned, block, slot + 1, SLOT)
    owned.slots(slot, 1, SLOT)[0, 4] ^= 1
    assert block_is_bad(owned, block, slot, SLOT)
    block = write_block(owned, slot, b"some bytes", state=WRITING)
    assert block_is_bad(owned, block, slot, SLOT)
    block = write_block(owned, slot, b"some bytes")
    owned.headers(slot, 1, SLOT)["length_bytes"] = 1 << 60
    assert block_is_bad(owned, block, slot, SLOT)


def test_a_rebound_slab_is_no_bad_block(owned: OwnedSegment) -> None:
    owned.bind_slab(0, SLOT)
    block = write_block(owned, 0, b"x")
    owned.bind_slab(0, 2 * SLOT)
    assert not block_is_bad(owned, block, 0, SLOT)
    with pytest.raises(ProtocolError):
        block_is_bad(owned, block, 1 << 31, SLOT)
