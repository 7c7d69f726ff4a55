"""What a dead owner's file still holds: checked before anything of it is used.

Rules
  - Nothing is rebuilt that cannot be verified. A file whose length or superblock is not that of the plan is no
    segment of ours: it goes as a whole. A slab whose record fails its check holds nothing any more. A slot header
    that is neither zeros nor sound is cleared, unless a worker maps the segment: it may be in the middle of a write.
  - What peers were writing ended with the dead owner, through whom they wrote: these slots are cleared. They had never
    been confirmed, so who knows the contents by their number has lost nothing that it counts on.
  - Where something is lost, the contents get a new number first: whoever knew them by the old one asks anew.
  - Headers under a lost slab record could be right again if the slab got its former generation back: it gets one that
    no slab had before.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvpool_client.headers import PEER_WRITER, SLAB_RECORD, Array, record_check
from kvpool_client.segment import SegmentMap, SlabRecord, Superblock
from kvpool_client.slot_table import Found, Tables, look
from kvpool_proto.errors import ProtocolError
from kvpool_proto.geometry import SLAB_RECORD_BYTES, SUPERBLOCK_BYTES

_GENERATION_BITS: Final = 62


@dataclass(frozen=True, slots=True)
class Adoption:
    """What became of the file that was there. kept: it goes on; why: it was dropped, empty if there was none.

    slots_dropped: of slots whose headers were cleared. slabs_dropped: whose records were lost. writes_dropped: of slots
    in which peers were writing.
    """

    kept: bool = False
    why: str = ""
    slots_dropped: int = 0
    slabs_dropped: int = 0
    writes_dropped: int = 0


def check_identity(found: Superblock, node_id: str, index: int, size_bytes: int, slab_bytes: int) -> None:
    """Raise ProtocolError unless the superblock is that of the segment described."""
    is_of = (found.node_id, found.segment_index, found.size_bytes, found.slab_bytes)
    if is_of != (node_id, index, size_bytes, slab_bytes):
        raise ProtocolError(
            f"it is segment {is_of[1]} of node {is_of[0]!r} with {is_of[2]} bytes in slabs of {is_of[3]}, "
            f"not segment {index} with {size_bytes} in slabs of {slab_bytes}"
        )


def read_records(segment: SegmentMap) -> tuple[list[SlabRecord], list[int]]:
    """How the slabs are bound, and the slabs whose records are unsound: these count as unbound, with a new generation.

    Nothing is written. Raises SlabChanged if the segment is closed.
    """
    end = SUPERBLOCK_BYTES + segment.slabs * SLAB_RECORD_BYTES
    fields = segment.memory[SUPERBLOCK_BYTES:end].copy().view(SLAB_RECORD)
    sizes, size_of = np.unique(fields["slot_bytes"], return_inverse=True)
    slots = np.array([segment.slots_in_slab(int(size)) for size in sizes], dtype=np.uint64)
    unbound = fields["slot_bytes"] == 0
    sound = (record_check(fields) == fields["check"]) & (fields["slots"] == slots[size_of])
    sound &= unbound | (slots[size_of] > 0)
    columns = (fields[name].tolist() for name in ("generation", "slot_bytes", "slots"))
    records = [SlabRecord(*record) for record in zip(*columns, strict=True)]
    lost: list[int] = np.flatnonzero(~sound).tolist()
    for slab in lost:
        records[slab] = SlabRecord(new_generation(), 0, 0)
    return records, lost


Slots = list[tuple[int, Array]]
"""(slab, slots of it)."""


def unfinished(tables: Tables) -> tuple[Slots, Slots]:
    """Where headers are neither zeros nor sound, and where peers were writing.

    Raises SlabChanged if the segment is closed.
    """
    torn: Slots = []
    written: Slots = []
    for found in look(tables):
        torn += _by_slab(tables, found, found.torn)
        written += _by_slab(tables, found, found.writing[found.headers["worker_id"][found.writing] == PEER_WRITER])
    return torn, written


def _by_slab(tables: Tables, found: Found, rows: Array) -> Slots:
    slabs = found.slab[rows]
    return [
        (slab, found.slot[rows[slabs == slab]] - slab * tables.bound_to(slab).slots)
        for slab in np.unique(slabs).tolist()
    ]


def new_contents() -> int:
    """A number for the contents of a segment: never 0, and never the same twice."""
    return 1 + secrets.randbelow((1 << 64) - 1)


def new_generation() -> int:
    """A generation that no header was sealed under, with room to count on."""
    return 1 << _GENERATION_BITS | secrets.randbits(_GENERATION_BITS)
