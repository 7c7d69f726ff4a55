"""The nodes on which the extents of a reply lie, and the right to ask their data ports.

Rules
  - What the Master answers is checked before it is used; a column that does not fit is a ProtocolError.
  - A grant's table has the rows of one part in one holder's segments, in the order of the reply's extents: those are
    the bytes that the Master hashed (capability.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvpool_client.peer.copies import Grant, PeerRun
from kvpool_client.runs import I64, Extents, Row
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.capability import MAC_BYTES, Op, part_table
from kvpool_proto.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class Holder:
    """One node. address: of its data port, "host:port"; empty: it has none. macs: by part; none where we need none."""

    node_id: str
    address: str
    segments: frozenset[int]
    macs: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class Holders:
    """Those of one reply. by_segment: handle -> holder; empty in replies that know of one node only.

    asker: the node that the question named, whose own segments need no capability; empty: we have none, or did not
    know it yet.
    """

    by_segment: Mapping[int, Holder] = field(default_factory=dict[int, Holder])
    valid_until_ms: int = 0
    asker: str = ""

    def is_askers(self, handle: int) -> bool:
        """Is this a segment of the asker's node, which only a mapping reaches?"""
        holder = self.by_segment.get(handle)
        return holder is not None and holder.node_id == self.asker and not holder.macs

    def may_be_ours(self, handle: int) -> bool:
        """Could this be a segment of our node, as far as the reply says? Nobody gives a right to it then."""
        holder = self.by_segment.get(handle)
        if holder is None:
            return not self.by_segment
        return not holder.macs and self.asker in ("", holder.node_id)


NO_HOLDERS = Holders()


def holders_of(messages: Iterable[pb.Holder], valid_until_ms: int, asker: str) -> Holders:
    """The holders of a reply. Raises ProtocolError."""
    found: dict[int, Holder] = {}
    for message in messages:
        if len(message.part) != len(message.mac) or any(len(mac) != MAC_BYTES for mac in message.mac):
            raise ProtocolError(f"the capabilities for node {message.node_id!r} are none")
        macs = dict(zip(message.part, message.mac, strict=True))
        holder = Holder(message.node_id, message.data_address, frozenset(message.segments), macs)
        if found.keys() & holder.segments:
            raise ProtocolError("a segment has two holders")
        found |= dict.fromkeys(holder.segments, holder)
    return Holders(found, valid_until_ms, asker)


class PartGrant:
    """The right to one part of a reply on one node, and where each extent stands in its table."""

    def __init__(
        self, holder: Holder, op: Op, epoch: int, valid_until_ms: int, namespace: bytes, part: int, extents: Extents
    ) -> None:
        rows = (extents.part_from <= part) & (part < extents.part_to)
        index = np.flatnonzero(rows & np.isin(extents.segment, list(holder.segments)))
        blocks = extents.blocks[index]
        table = part_table(
            part,
            segment=extents.segment[index],
            first_slot=extents.first_slot[index],
            blocks=blocks,
            stride=extents.stride[index],
            stamp=extents.stamp[index],
            part_from=extents.part_from[index],
        )
        self.grant = Grant(
            address=holder.address,
            node_id=holder.node_id,
            op=op,
            epoch=epoch,
            valid_until_ms=valid_until_ms,
            namespace=namespace,
            part=part,
            table=table.tobytes(),
            mac=holder.macs[part],
        )
        starts: I64 = np.cumsum(blocks) - blocks
        self._at = dict(zip(index.tolist(), starts.tolist(), strict=True))

    def run_of(self, row: Row) -> PeerRun:
        """A row of `extents`, or some of its blocks, by its place in the table."""
        return PeerRun(row.first, row.blocks, self._at[row.extent] + row.skipped)
