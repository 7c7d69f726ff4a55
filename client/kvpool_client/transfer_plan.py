"""One call's blocks, wherever they lie, divided into lanes: one for this node's memory, one for each other node.

Rules
  - What is mapped here is local, whatever the reply says of its node; all else goes through its node's data port.
  - Blocks that cannot be reached end a part where they begin: those behind them are not asked for.
  - No I/O, no waiting; work in Python grows with runs, not with blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from kvpool_client.devices.base import Buffer
from kvpool_client.headers import PARENT_ROOT, PEER_WRITER
from kvpool_client.holders import Holder, Holders, PartGrant
from kvpool_client.peer.copies import PeerCopy
from kvpool_client.runs import Extents, Row, mapped
from kvpool_client.segment import AttachedSegment
from kvpool_client.transfer import PartCopy, expected_headers
from kvpool_proto.capability import Op
from kvpool_proto.namespace import NamespaceSpec

HERE: Final = ""
"""The place of blocks whose segment is mapped."""


class Source:
    """Where a reply says that blocks lie, and what of it this process can reach.

    segments: mapped here, by their handles of `epoch`. elsewhere: the reason for those that should be and are not.
    waits: whether a node is not to be asked now.
    """

    def __init__(
        self,
        extents: Extents,
        epoch: int,
        segments: Mapping[int, AttachedSegment],
        holders: Holders,
        waits: Callable[[str], bool],
        elsewhere: str = "segment_elsewhere",
    ) -> None:
        self.extents = extents
        self.epoch = epoch
        self.segments = segments
        self.holders = holders
        self._waits = waits
        self._elsewhere = elsewhere
        self._places: dict[tuple[int, int], Holder | str] = {}

    def place(self, handle: int, part: int) -> Holder | str:
        """Who gives a segment's blocks of a part: HERE, a holder, or nobody, for this reason. The same every time."""
        found = self._places.get((handle, part))
        if found is None:
            found = self._places[handle, part] = self._find(handle, part)
        return found

    def _find(self, handle: int, part: int) -> Holder | str:
        if handle in self.segments:
            return HERE
        holder = self.holders.by_segment.get(handle)
        if holder is None or self.holders.is_askers(handle):
            return self._elsewhere
        if not holder.address:
            return "no_data_port"
        if part not in holder.macs:
            return self._elsewhere
        return "peer_unreachable" if self._waits(holder.node_id) else holder


def not_mapped(extents: Extents, parts: range, holders: Holders, segments: Mapping[int, AttachedSegment]) -> set[int]:
    """Handles of segments with blocks of these parts that are not mapped here, but that a Hello may bring."""
    rows = (extents.part_from < parts.stop) & (extents.part_to > parts.start)
    handles = set(extents.segment[rows].tolist()) - segments.keys()
    return {handle for handle in handles if holders.may_be_ours(handle)}


def reachable(source: Source, part: int, rows: Sequence[Row]) -> tuple[Sequence[Row], str]:
    """The leading rows of a part that can be reached, and why not all."""
    for at, row in enumerate(rows):
        place = source.place(row.segment, part)
        if isinstance(place, str) and place != HERE:
            return rows[:at], place
    return rows, ""


class Wanted(NamedTuple):
    """Of one part, the blocks to copy between a buffer and the slots of reachable rows."""

    part: int
    buffer: Buffer
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class Origin:
    """What headers say of a chain's first block and of their writer; see PartCopy. Readers compare none of it."""

    parent_kind: int = PARENT_ROOT
    parent_key: bytes = b""
    worker_id: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Copies, by where they lie. peers: by node id, all of one node's to one address."""

    here: list[PartCopy] = field(default_factory=list[PartCopy])
    peers: dict[str, list[PeerCopy]] = field(default_factory=dict[str, list[PeerCopy]])


def divide(
    source: Source, spec: NamespaceSpec, op: Op, chain: bytes, wanted: Iterable[Wanted], origin: Origin | None = None
) -> Plan:
    """The lanes of one call. chain: the keys of the layout's blocks. Raises SlabChanged, ProtocolError."""
    origin = origin or Origin()
    plan = Plan()
    for part, buffer, rows in wanted:
        near: list[Row] = []
        far: dict[str, tuple[Holder, list[Row]]] = {}
        for row in rows:
            place = source.place(row.segment, part)
            if isinstance(place, Holder):
                far.setdefault(place.node_id, (place, []))[1].append(row)
            else:
                near.append(row)
        if near:
            runs = mapped(near, source.segments, spec.slot_bytes)
            plan.here.append(
                PartCopy(spec, part, chain, runs, buffer, origin.parent_kind, origin.parent_key, origin.worker_id)
            )
        for node_id, (holder, some) in far.items():
            copy = _peer_copy(source, spec, op, chain, Wanted(part, buffer, some), origin, holder)
            plan.peers.setdefault(node_id, []).append(copy)
    return plan


def _peer_copy(
    source: Source, spec: NamespaceSpec, op: Op, chain: bytes, wanted: Wanted, origin: Origin, holder: Holder
) -> PeerCopy:
    valid_until_ms = source.holders.valid_until_ms
    right = PartGrant(holder, op, source.epoch, valid_until_ms, spec.id, wanted.part, source.extents)
    runs = [right.run_of(row) for row in wanted.rows]
    headers = expected_headers(spec, wanted.part, chain, runs, origin.parent_kind, origin.parent_key)
    stamps = np.array([row.stamp for row in wanted.rows], dtype=np.uint64)
    headers["stamp"] = np.repeat(stamps, [row.blocks for row in wanted.rows])
    headers["worker_id"] = PEER_WRITER
    return PeerCopy(right.grant, runs, headers, wanted.buffer, spec.part_bytes, spec.slot_bytes)
