"""A load: the leading blocks of a hit, copied from where its extents lie and verified.

Rules
  - Segments are those of the hit's own epoch. A newer epoch does not end a load: what was leased before may be read
    until its lease ends, and is verified as always.
  - What cannot be reached, or went wrong, costs itself and what follows: the leading good run is loaded.
  - A block of this node with bad bytes is reported to the node client, in the background.
"""

from __future__ import annotations

from kvpool_client.answers import Hit
from kvpool_client.context import Context
from kvpool_client.devices.base import Buffer
from kvpool_client.lanes import Loaded
from kvpool_client.runs import Run, count, rows_of, within
from kvpool_client.transfer import Copied, Term
from kvpool_client.transfer_plan import Plan, Source, Wanted, divide, not_mapped, reachable
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.capability import READ
from kvpool_proto.errors import KVPoolError, ProtocolError
from kvpool_proto.namespace import NamespaceSpec


def load(
    context: Context, spec: NamespaceSpec, hit: Hit, parts: range, buffers: list[Buffer], blocks: int, term: Term
) -> Loaded:
    """Copy the hit's first `blocks` blocks into the buffers, one per part, and verify them."""
    try:
        plan, reached, reason = _plan(context, spec, hit, parts, buffers, blocks)
        loaded = context.lanes.read(plan, reached, term)
    except KVPoolError as error:
        return Loaded(Copied(0, error.reason.lower()), 0)
    if loaded.copied.bad is not None:
        _report(context, spec, hit, loaded.copied.bad)
    if loaded.copied.blocks == reached < blocks:
        return Loaded(Copied(reached, reason), loaded.far_blocks)
    return loaded


def _plan(
    context: Context, spec: NamespaceSpec, hit: Hit, parts: range, buffers: list[Buffer], blocks: int
) -> tuple[Plan, int, str]:
    """What to copy, how many leading blocks that is, and why not all. Raises ProtocolError, SlabChanged."""
    source = _source(context, hit, parts)
    reached, reason = blocks, ""
    every = [
        within(rows_of(hit.extents, part, first_block=hit.skip, blocks=hit.blocks), [(0, blocks)]) for part in parts
    ]
    for part, rows in zip(parts, every, strict=True):
        if count(rows) != blocks:
            raise ProtocolError(f"extents of part {part} do not cover the hit")
        near, why = reachable(source, part, rows)
        if count(near) < reached:
            reached, reason = count(near), why
    chain = hit.chain[hit.skip * spec.key_bytes :][: blocks * spec.key_bytes]
    wanted = [
        Wanted(part, buffer, within(rows, [(0, reached)]))
        for part, buffer, rows in zip(parts, buffers, every, strict=True)
    ]
    return divide(source, spec, READ, chain, wanted), reached, reason


def _source(context: Context, hit: Hit, parts: range) -> Source:
    """What the hit names, after a Hello where own segments are not mapped yet."""
    segments = context.link.present.segments.get(hit.epoch, {})
    waits = context.lanes.peers.waits
    missing = not_mapped(hit.extents, parts, hit.holders, segments)
    if missing:
        try:
            segments = context.link.holding(hit.epoch, missing).segments[hit.epoch]
        except KVPoolError as error:
            segments = context.link.present.segments.get(hit.epoch, {})  # of those some may have come
            return Source(hit.extents, hit.epoch, segments, hit.holders, waits, error.reason.lower())
    return Source(hit.extents, hit.epoch, segments, hit.holders, waits)


def _report(context: Context, spec: NamespaceSpec, hit: Hit, bad: Run) -> None:
    """Ask the node client, in the background, to look at a block of a hit."""
    end = (hit.skip + bad.first + 1) * spec.key_bytes
    block = pb.BadBlock(namespace_id=spec.id, chain=hit.chain[:end], stamp=bad.stamp)

    def report() -> None:
        """Send it and count whether the block was bad."""
        where = (bad.segment.epoch_of_handle, bad.segment.handle, bad.slot)
        confirmed = context.link.report_bad(block, *where, spec.slot_bytes)
        context.counters.add(bad_blocks_confirmed=confirmed)

    context.background.submit(report)
