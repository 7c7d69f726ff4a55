"""Capabilities: what the Master's answer lets its holder do at a data port. Made by the Master, checked by the port.

A capability is an HMAC-SHA256, cut to MAC_BYTES, over what it allows: an operation, an epoch, the end of its time, a
namespace, one part, and the runs of slots in which blocks of that part lie on one node, with their stamps. The key is
made by the Master for each epoch and known to the Master and to node clients only. Who holds a capability may use all
of its runs or some, until the Master's clock says valid_until_ms; what slots hold by then is compared with the stamps.

Rules
  - Both sides build the table of runs with part_table(), from columns in the order of the Master's answer, so that
    they hash the same bytes.
  - A segment's handle means something within one epoch only and names its node, so the node needs no field.
"""

from __future__ import annotations

import hmac
import struct
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

KEY_BYTES: Final = 32
MAC_BYTES: Final = 16
READ: Final = 1
WRITE: Final = 2
Op = Literal[1, 2]

RUN: Final = np.dtype(
    [("segment", "<u4"), ("first_slot", "<u4"), ("blocks", "<u4"), ("stride", "<u4"), ("stamp", "<u8")]
)
"""One run of a capability's part: block b lies in slot first_slot + b * stride."""
RUNS_MAX: Final = 65_536
"""Runs of one capability: chain_blocks_max of the Master."""

_HEAD: Final = struct.Struct("<16sBxHIQQ16s")
_CONTEXT: Final = b"kvpool-cap-1".ljust(16, b"\0")

Table = npt.NDArray[Any]
"""RUN, shape (runs,)."""


def part_table(
    part: int,
    *,
    segment: npt.ArrayLike,
    first_slot: npt.ArrayLike,
    blocks: npt.ArrayLike,
    stride: npt.ArrayLike,
    stamp: npt.ArrayLike,
    part_from: npt.ArrayLike,
) -> Table:
    """The table of one part, from columns of extents that hold it, in chain order."""
    table = np.empty(len(np.asarray(segment)), dtype=RUN)
    table["segment"] = segment
    table["first_slot"] = np.asarray(first_slot, dtype=np.int64) + part - np.asarray(part_from, dtype=np.int64)
    table["blocks"] = blocks
    table["stride"] = stride
    table["stamp"] = stamp
    return table


def make_mac(
    key: bytes, op: Op, epoch: int, valid_until_ms: int, namespace: bytes, part: int, table: bytes | memoryview
) -> bytes:
    """The capability. table: the bytes of a RUN array. Raises struct.error for numbers that cannot be."""
    head = _HEAD.pack(_CONTEXT, op, part, len(table) // RUN.itemsize, epoch, valid_until_ms, namespace)
    digest = hmac.new(key, head, "sha256")
    digest.update(table)
    return digest.digest()[:MAC_BYTES]


def same_mac(one: bytes, other: bytes) -> bool:
    """Compare in a time that tells nothing."""
    return hmac.compare_digest(one, other)
