"""The run of blocks that a lookup may hand out. Reads, never changes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvpool_master.core import extents as ex
from kvpool_master.core.directory import Walk
from kvpool_master.core.messages import Reason
from kvpool_master.core.replicas import Replicas
from kvpool_master.core.spans import Span, Tree


@dataclass(slots=True)
class CommittedRun:
    """blocks after the skipped ones, the span in which the last one lies and how many of its blocks are in.

    known: how many leading blocks of the chain the directory knows, committed or not.
    """

    blocks: int
    reason: Reason
    last: Span | None
    end: int
    known: int
    pieces: list[bytes]
    spans: list[Span]
    """In which the blocks lie."""

    def extents(self) -> bytes:
        """All runs, offsets from the start of the chain."""
        return self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)


def committed_run(
    tree: Tree,
    found: Walk,
    skip: int,
    chain_bytes: int,
    hidden: set[int],
    replicas: Replicas | None = None,
    own: Collection[int] = (),
) -> CommittedRun:
    """The longest run behind `skip` whose every part is committed and lies in segments that are not hidden.

    replicas: where there are any, and then `own`: the segments of the asker's node.
    """
    matched = found.matched
    run = CommittedRun(0, Reason.NONE, None, 0, matched, [], [])
    base = found.base  # where in the chain the span's first block would stand
    for span in found.path:
        size = span.blocks
        start = max(0, skip - base)
        end = min(size, matched - base)
        if start < end:
            if span.have != tree.full:
                run.reason = _why_incomplete(span)
                return run
            packed = span.extents
            if replicas is not None and span in replicas.of:
                packed = replicas.choose(span, packed, start, end, own)
            if hidden and ex.touches(packed, hidden):
                end = min(end, _first_hidden(packed, start, hidden))
                run.reason = Reason.NODE_AWAY if end < min(size, matched - base) else Reason.NONE
            if start < end:
                run.pieces.append(_cut_out(packed, start, end, size, base))
                run.blocks += end - start
                run.last, run.end = span, end
                run.spans.append(span)
            if run.reason:
                return run
        base += size
    if matched * tree.key_bytes < chain_bytes and skip * tree.key_bytes < chain_bytes:
        run.reason = Reason.UNKNOWN_KEY
    return run


def _cut_out(packed: bytes, start: int, end: int, size: int, base: int) -> bytes:
    if end < size:
        packed = ex.split(packed, end)[0]
    if start:
        packed = ex.split(packed, start)[1]
    return ex.shift(packed, base + start)


def _first_hidden(packed: bytes, start: int, hidden: set[int]) -> int:
    """The first block from `start` on that has a part in a hidden segment."""
    rows = [row for row in ex.records(packed) if row[2] in hidden and row[0] + row[1] > start]
    return min((max(row[0], start) for row in rows), default=1 << 62)


def _why_incomplete(span: Span) -> Reason:
    if span.writers:
        return Reason.BEING_WRITTEN
    return Reason.PART_MISSING if span.have else Reason.HOLE
