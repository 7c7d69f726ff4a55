"""What a segment holds, from its slot headers: scanned, and cut into chunks for the Master.

Rules
  - Every committed slot is reported once, but for those that are dead (a purge). What is not sound is not reported.
  - Slots that somebody may still be writing are reported as such: WRITING ones while their worker lives, and while
    any worker maps the segment also those of an unknown worker and torn headers; those that peers write as long as the
    data port is at it.
  - A chunk has at most CHUNK_BLOCKS_MAX blocks; a strand that is longer goes on in the next one, after a key.
  - Work in Python grows with runs, not with blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvpool_client.headers import PARENT_KEY, PEER_WRITER, Array
from kvpool_client.slot_table import I64, Found, Tables, look
from kvpool_client.strands import Runs, Strands, runs_in, shapes, spread, strands_of
from kvpool_proto import pool_pb2 as pb

CHUNK_BLOCKS_MAX: Final = 4096

WRITING_RUN: Final = np.dtype([("slot_bytes", "<i8"), ("first_slot", "<i8"), ("slots", "<i8"), ("worker_id", "<u8")])


@dataclass(frozen=True, slots=True)
class SegmentInventory:
    """slabs: (slab, slot bytes) of those bound. writing: WRITING_RUN, slots of one size in rising order."""

    slabs: list[tuple[int, int]]
    strands: Strands
    writing: Array


def scan(
    segment: Tables,
    dead: Mapping[bytes, int],
    alive: Callable[[int], bool],
    written: AbstractSet[int] = frozenset(),
) -> SegmentInventory:
    """Look at every header of a segment. Raises SlabChanged if it is closed meanwhile.

    dead: namespace -> newest dead stamp. alive(worker id): whether that worker may still write. written: slots that
    peers were writing when the look began.
    """
    slabs = [(slab, size) for slab in range(segment.slabs) if (size := segment.bound_to(slab).slot_bytes)]
    mapped = bool(segment.mapped_workers())
    lives = {0: mapped, PEER_WRITER: False}
    of_peers = np.array(sorted(written), dtype=np.int64)
    runs: list[Runs] = []
    writing = [np.empty(0, dtype=WRITING_RUN)]
    for found in look(segment):
        rows = _not_dead(found, dead)
        if len(rows):
            runs.append(runs_in(found, rows))
        if (mapped or written) and len(found.writing) + len(found.torn):
            writing.append(_writing_runs(found, alive if mapped else _nobody, lives, of_peers))
    return SegmentInventory(slabs, strands_of(runs), np.concatenate(writing))


def chunks(found: SegmentInventory) -> Iterator[pb.InventoryChunk]:
    """The messages that report it, without node, incarnation, number and segment: slabs, strands, slots being written.

    None for a segment of which no slab is bound.
    """
    if found.slabs:
        slab, slot_bytes = zip(*found.slabs, strict=True)
        yield pb.InventoryChunk(slab=slab, slot_bytes=slot_bytes)
    yield from _strand_chunks(found.strands)
    for start in range(0, len(found.writing), CHUNK_BLOCKS_MAX):
        yield _writing_chunk(found.writing[start : start + CHUNK_BLOCKS_MAX])


# -- scanning ------------------------------------------------------------------------------------------


def _not_dead(found: Found, dead: Mapping[bytes, int]) -> I64:
    rows = found.committed
    if not dead or not len(rows):
        return rows
    namespaces = found.headers["namespace"][rows]
    starts = np.flatnonzero(np.concatenate([[True], namespaces[1:] != namespaces[:-1]]))
    limits = np.array([dead.get(namespaces[start].tobytes(), 0) for start in starts.tolist()], dtype=np.uint64)
    return rows[found.headers["stamp"][rows] > np.repeat(limits, np.diff(np.append(starts, len(rows))))]


def _nobody(worker_id: int) -> bool:
    return False


def _writing_runs(found: Found, alive: Callable[[int], bool], lives: dict[int, bool], of_peers: I64) -> Array:
    """lives: what alive() has said so far. of_peers: slots that peers write."""
    rows = np.concatenate([found.writing, found.torn])
    workers = found.headers["worker_id"][rows]
    workers[len(found.writing) :] = 0
    by_peer = np.isin(found.slot[rows], of_peers)
    ids, which = np.unique(workers, return_inverse=True)
    for worker_id in ids.tolist():
        if worker_id not in lives:
            lives[worker_id] = alive(worker_id)
    kept = np.array([lives[worker_id] for worker_id in ids.tolist()])[which]
    kept |= by_peer & ((workers == PEER_WRITER) | (workers == 0))
    workers[workers == PEER_WRITER] = 0
    order = np.argsort(rows[kept], kind="stable")
    rows, workers = rows[kept][order], workers[kept][order]
    slot, slab = found.slot[rows], found.slab[rows]
    goes_on = (np.diff(slot) == 1) & (slab[1:] == slab[:-1]) & (workers[1:] == workers[:-1])
    starts = np.flatnonzero(np.concatenate([[True], ~goes_on])[: len(rows)])
    runs = np.zeros(len(starts), dtype=WRITING_RUN)
    runs["slot_bytes"], runs["first_slot"], runs["worker_id"] = found.slot_bytes, slot[starts], workers[starts]
    runs["slots"] = np.diff(np.append(starts, len(rows)))
    return runs


# -- chunks --------------------------------------------------------------------------------------------


def _strand_chunks(strands: Strands) -> Iterator[pb.InventoryChunk]:
    if not len(strands.runs):
        return
    runs, heads, chunk = _cut(strands)
    differs = (shapes(runs)[1:] != shapes(runs)[:-1]) | (runs["namespace"][1:] != runs["namespace"][:-1])
    breaks = np.flatnonzero(np.concatenate([[True], differs | (chunk[1:] != chunk[:-1])]))
    heads[breaks] = True
    message = pb.InventoryChunk()
    for start, end in zip(breaks.tolist(), [*breaks[1:].tolist(), len(runs)], strict=True):
        if start and chunk[start] != chunk[start - 1]:
            yield message
            message = pb.InventoryChunk()
        message.strands.append(_strands_message(runs[start:end], np.flatnonzero(heads[start:end]), strands))
    yield message


def _cut(strands: Strands) -> tuple[Array, Array, I64]:
    """The runs cut where a chunk is full; which of them begin a strand, or its rest; in which chunk each one goes."""
    whole = strands.runs
    ends = np.cumsum(whole["blocks"])
    starts = ends - whole["blocks"]
    first_chunk = starts // CHUNK_BLOCKS_MAX
    pieces = (ends - 1) // CHUNK_BLOCKS_MAX - first_chunk + 1
    of_run = np.repeat(np.arange(len(whole)), pieces)
    chunk = spread(first_chunk, pieces)
    begin = np.maximum(starts[of_run], chunk * CHUNK_BLOCKS_MAX)
    end = np.minimum(ends[of_run], (chunk + 1) * CHUNK_BLOCKS_MAX)
    skipped = begin - starts[of_run]
    runs = whole[of_run]
    runs["first_slot"] += skipped * runs["stride"]
    runs["keys_at"] += skipped
    runs["blocks"] = end - begin
    strand = np.repeat(np.arange(len(strands.lengths)), strands.lengths)[of_run]
    begins = np.concatenate([[True], strand[1:] != strand[:-1]])
    rests = np.flatnonzero(np.concatenate([[False], chunk[1:] != chunk[:-1]]) & ~begins)
    before = runs["keys_at"][rests - 1] + runs["blocks"][rests - 1] - 1
    runs["parent_kind"][rests] = PARENT_KEY
    runs["parent_key"][rests] = strands.keys[before].view("V32")[:, 0]
    begins[rests] = True
    return runs, begins, chunk


def _strands_message(runs: Array, heads: I64, strands: Strands) -> pb.Strands:
    """Runs of one namespace and shape; heads: where strands begin."""
    key_bytes = int(runs["key_bytes"][0])
    first = runs[heads]
    parents = np.ascontiguousarray(first["parent_key"]).view(np.uint8).reshape(-1, strands.keys.shape[1])
    parents[first["parent_kind"] != PARENT_KEY] = 0
    return pb.Strands(
        namespace_id=runs["namespace"][0].tobytes(),
        key_bytes=key_bytes,
        slot_bytes=int(runs["slot_bytes"][0]),
        part_from=int(runs["part_from"][0]),
        part_to=int(runs["part_to"][0]),
        blocks=np.add.reduceat(runs["blocks"], heads).tolist(),
        extents=np.diff(np.append(heads, len(runs))).tolist(),
        parent_kind=first["parent_kind"].tolist(),
        parent_keys=parents[:, :key_bytes].tobytes(),
        keys=strands.keys[spread(runs["keys_at"], runs["blocks"]), :key_bytes].tobytes(),
        extent_blocks=runs["blocks"].tolist(),
        first_slot=runs["first_slot"].tolist(),
        stride=runs["stride"].tolist(),
        stamp=runs["stamp"].tolist(),
    )


def _writing_chunk(runs: Array) -> pb.InventoryChunk:
    message = pb.InventoryChunk()
    for slot_bytes in np.unique(runs["slot_bytes"]).tolist():
        some = runs[runs["slot_bytes"] == slot_bytes]
        message.writing.add(
            slot_bytes=slot_bytes,
            first_slot=some["first_slot"].tolist(),
            slots=some["slots"].tolist(),
            worker_id=some["worker_id"].tolist(),
        )
    return message
