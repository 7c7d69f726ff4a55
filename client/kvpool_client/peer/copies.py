"""What a worker wants of one other node: blocks of a part, where they lie there, and the right to them. Data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvpool_client.devices.base import Buffer
from kvpool_client.headers import Array
from kvpool_proto.capability import Op


class PeerRun(NamedTuple):
    """Blocks first .. first + blocks - 1 of a layout: the at-th block of the grant's table and those behind it.

    A run lies within one row of the table.
    """

    first: int
    blocks: int
    at: int


@dataclass(frozen=True, slots=True)
class Grant:
    """A capability as it travels: see capability.py. table: the bytes of a RUN array, all of it."""

    address: str
    node_id: str
    op: Op
    epoch: int
    valid_until_ms: int
    namespace: bytes
    part: int
    table: bytes
    mac: bytes


@dataclass(frozen=True, slots=True)
class PeerCopy:
    """One part of a call, as far as it lies on one node.

    runs: in the order of the chain, each block once; there may be gaps between them. headers: SLOT_HEADER, one per
    block of `runs` in order: COMMITTED, with the stamps of the slots; checks are not filled in, and checksums are for
    the engine to compare or to fill in. part_bytes of each block travel; slots have slot_bytes.
    """

    grant: Grant
    runs: Sequence[PeerRun]
    headers: Array
    buffer: Buffer
    part_bytes: int
    slot_bytes: int
