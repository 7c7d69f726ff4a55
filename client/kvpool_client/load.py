"""A load: the leading blocks of a hit, copied from where its extents lie and verified.

Rules
  - Segments are those of the hit's own epoch. A newer epoch does not end a load: what was leased before may be read
    until its lease ends, and is verified as always.
  - A block with bad bytes is reported to the node client, in the background.
"""

from __future__ import annotations

from kvpool_client.answers import Hit
from kvpool_client.context import Context
from kvpool_client.devices.base import Buffer
from kvpool_client.runs import Run, count, head, runs_of
from kvpool_client.transfer import Copied, PartCopy, Term
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import KVPoolError, ProtocolError
from kvpool_proto.namespace import NamespaceSpec


def load(
    context: Context, spec: NamespaceSpec, hit: Hit, parts: range, buffers: list[Buffer], blocks: int, term: Term
) -> Copied:
    """Copy the hit's first `blocks` blocks into the buffers, one per part, and verify them."""
    try:
        copied = context.engine.read(_reads(context, spec, hit, parts, buffers, blocks), term)
    except KVPoolError as error:
        return Copied(0, error.reason.lower())
    if copied.bad is not None:
        _report(context, spec, hit, copied.bad)
    return copied


def _reads(
    context: Context, spec: NamespaceSpec, hit: Hit, parts: range, buffers: list[Buffer], blocks: int
) -> list[PartCopy]:
    """What to copy. Raises SegmentElsewhere, NodeUnreachable, ProtocolError for extents with gaps."""
    segments = context.link.holding(hit.epoch, hit.extents.segments_of(parts)).segments[hit.epoch]
    chain = hit.chain[hit.skip * spec.key_bytes :][: blocks * spec.key_bytes]
    reads: list[PartCopy] = []
    for part, buffer in zip(parts, buffers, strict=True):
        every = runs_of(
            hit.extents, part, segments, slot_bytes=spec.slot_bytes, first_block=hit.skip, blocks=hit.blocks
        )
        runs = head(every, blocks)
        if not runs or not runs[-1].first + runs[-1].blocks == count(runs) == blocks:
            raise ProtocolError(f"extents of part {part} do not cover the hit")
        reads.append(PartCopy(spec, part, chain, runs, buffer))
    return reads


def _report(context: Context, spec: NamespaceSpec, hit: Hit, bad: Run) -> None:
    """Ask the node client, in the background, to look at a block of a hit."""
    end = (hit.skip + bad.first + 1) * spec.key_bytes
    block = pb.BadBlock(namespace_id=spec.id, chain=hit.chain[:end], stamp=bad.stamp)

    def report() -> None:
        """Send it and count whether the block was bad."""
        where = (bad.segment.epoch_of_handle, bad.segment.handle, bad.slot)
        confirmed = context.link.report_bad(block, *where, spec.slot_bytes)
        context.counters.confirmed_bad(confirmed)

    context.background.submit(report)
