"""The rights in a reply: who holds its extents, and what lets the asker use them at the data ports (capability.py).

Rules
  - Pure: key, epoch and times come from the shell; made counts what was given out.
  - A node gets one capability for each part of which extents lie on it, over all of them in the reply's order.
  - The asker's own node gets none, for it maps the segments; nor does a node without a data port. A node that is not
    known any more is not named.
  - Cost grows with nodes and parts, not with runs: those are columns. For a few runs, the most frequent reply, columns
    cost more than all the rest, and are not made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from struct import Struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvpool_master.core import extents as ex
from kvpool_master.core.messages import CopySlots
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.capability import READ, Op, make_mac, part_table

ROW: Final = np.dtype(
    {
        "names": ["offset", "blocks", "segment", "first_slot", "part_from", "part_to", "stride", "stamp"],
        "formats": ["<u4", "<u4", "<u4", "<u4", "<u2", "<u2", "<u2", "<u8"],
        "offsets": [0, 4, 8, 12, 16, 18, 20, 24],
        "itemsize": ex.RECORD_BYTES,
    }
)
"""A record of core/extents.py."""

FEW_RUNS: Final = 16
"""Up to so many runs are quicker one by one: 8 us against 40 us."""

_COLUMNS: Final = ("segment", "first_slot", "blocks", "stride", "stamp", "part_from")
_RUN: Final = Struct("<IIIIQ")
"""The same as capability.RUN."""

Rows = npt.NDArray[Any]
"""ROW, shape (runs,)."""


class Grants:
    """Makes the capabilities of one epoch. holder_of: node and data address of a segment; ("", "") if not known."""

    def __init__(self, key: bytes, epoch: int, holder_of: Callable[[int], tuple[str, str]]) -> None:
        self.key = key
        self.made = 0
        self._epoch = epoch
        self._holder_of = holder_of

    def holders(self, op: Op, namespace: bytes, packed: bytes, valid_until_ms: int, own: str = "") -> list[pb.Holder]:
        """The nodes on which packed extents lie, in their order. own: the asker's node."""
        tables_of: Callable[[list[int]], Iterator[tuple[int, bytes]]]
        if len(packed) <= FEW_RUNS * ex.RECORD_BYTES:
            few = [*ex.records(packed)]
            handles = [row[2] for row in few]
            tables_of = partial(_tables_of_few, few)
        else:
            rows = np.frombuffer(packed, dtype=ROW)
            handles = rows["segment"].tolist()
            tables_of = partial(_tables, rows)
        by_node: dict[tuple[str, str], list[int]] = {}
        for handle in dict.fromkeys(handles):
            by_node.setdefault(self._holder_of(handle), []).append(handle)
        holders: list[pb.Holder] = []
        for (node, address), of_node in by_node.items():
            if not node:
                continue
            if node == own or not address:
                holders.append(pb.Holder(node_id=node, data_address=address, segments=of_node))
                continue
            parts: list[int] = []
            macs: list[bytes] = []
            for part, table in tables_of(of_node):
                parts.append(part)
                macs.append(make_mac(self.key, op, self._epoch, valid_until_ms, namespace, part, table))
            self.made += len(macs)
            holders.append(pb.Holder(node_id=node, data_address=address, segments=of_node, part=parts, mac=macs))
        return holders

    def source(self, order: CopySlots, valid_until_ms: int) -> pb.Holder | None:
        """Who holds the source of a copy; None if it is not known any more."""
        packed = ex.pack(*order.source)
        return next(iter(self.holders(READ, order.namespace, packed, valid_until_ms)), None)


def _tables_of_few(rows: list[ex.Record], handles: list[int]) -> Iterator[tuple[int, bytes]]:
    """(part, table) of the parts of the runs in these segments, parts rising."""
    there = [row for row in rows if row[2] in handles]
    for part in range(min(row[4] for row in there), max(row[5] for row in there)):
        runs = [
            _RUN.pack(segment, first_slot + part - low, blocks, stride, stamp)
            for _, blocks, segment, first_slot, low, high, stride, stamp in there
            if low <= part < high
        ]
        if runs:
            yield part, b"".join(runs)


def _tables(rows: Rows, handles: list[int]) -> Iterator[tuple[int, bytes]]:
    """The same. Parts that lie in the same runs cost one table, and an addition each."""
    rows = rows[np.logical_or.reduce([rows["segment"] == handle for handle in handles])]
    ranges = set(zip(rows["part_from"].tolist(), rows["part_to"].tolist(), strict=True))
    borders = sorted({border for each in ranges for border in each})
    for low, high in pairwise(borders):
        there = rows if len(ranges) == 1 else rows[(rows["part_from"] <= low) & (rows["part_to"] >= high)]
        if not len(there):
            continue
        table = part_table(low, **{name: there[name] for name in _COLUMNS})
        for part in range(low, high):
            yield part, table.tobytes()
            table["first_slot"] += 1
