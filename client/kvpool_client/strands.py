"""From committed slot headers to strands: runs of consecutive blocks of one chain. Pure; arrays in, arrays out.

Rules
  - Parts of a block side by side, of one stamp, are one group; groups of consecutive blocks with the same parts, at
    one distance, in one slab, of one stamp, are a run: an extent of the contract.
  - A run whose first block follows the last block of another run of the same namespace, parts and slot size goes on
    its strand; where several do, one of them. Cycles, which only forged headers have, are cut somewhere.
  - Strands stand in an order in which parents come before children, where both are here.
  - Digests of keys find what may be equal; the keys themselves decide. Work in Python grows with runs, not blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool_client.headers import KEY_FIELD_BYTES, PARENT_KEY, U64, Array, digests
from kvpool_client.slot_table import I64, Found, words_of
from kvpool_proto.namespace import PARTS_MAX

Mask = npt.NDArray[np.bool_]

RUN: Final = np.dtype(
    [
        ("namespace", "V16"),
        ("slot_bytes", "<i8"),
        ("key_bytes", "<u2"),
        ("part_from", "<u2"),
        ("part_to", "<u2"),
        ("parent_kind", "<u2"),
        ("parent_key", "V32"),
        ("last_key", "V32"),
        ("stamp", "<u8"),
        ("first_slot", "<i8"),
        ("stride", "<i8"),
        ("blocks", "<i8"),
        ("keys_at", "<i8"),  # index of its first block's key
    ]
)
_RAW_RUN: Final = np.dtype((np.void, RUN.itemsize))  # copied as they are: field by field is slow

# The words of a slot header, by what they say (headers.SLOT_HEADER).
_PLACE, _NAMESPACE, _KEY, _PARENT, _STAMP = 0, slice(1, 3), slice(3, 7), slice(7, 11), 11
_WORDS: Final = 12


class Runs(NamedTuple):
    """Runs and what their blocks are called. runs: RUN. keys: uint8 (blocks, 32), run by run, padded with zeros.

    digests: of each block's namespace and key.
    """

    runs: Array
    keys: npt.NDArray[np.uint8]
    digests: U64


@dataclass(frozen=True, slots=True)
class Strands:
    """runs: RUN, strand by strand, parents first. lengths: how many runs each strand has. keys: as in Runs."""

    runs: Array
    lengths: I64
    keys: npt.NDArray[np.uint8]


# -- runs ----------------------------------------------------------------------------------------------


def runs_in(found: Found, rows: I64) -> Runs:
    """The runs of the committed headers at `rows` (rising) of `found`."""
    words = words_of(found.headers)
    columns = np.ascontiguousarray((words if len(rows) == len(words) else words[rows])[:, :_WORDS].T)
    slot, slab = found.slot[rows], found.slab[rows]
    part = (columns[_PLACE] >> np.uint64(16) & np.uint64(0xFFFF)).astype(np.int64)
    lead, width = _groups(columns, part, slot, slab)
    part_from = part[lead]
    if len(lead) and ((part_from != part_from[0]) | (width != width[0])).any():
        order = np.lexsort((width, part_from))  # stable: slots rise within the same parts
        lead, width, part_from = lead[order], width[order], part_from[order]
    if len(lead) != len(rows) or (np.diff(lead) != 1).any():
        columns, slot, slab = columns[:, lead], slot[lead], slab[lead]
    goes_on = _goes_on(columns, part_from, width, slot, slab)
    starts = np.flatnonzero(np.concatenate([[True], ~goes_on])[: len(slot)])
    ends = np.append(starts[1:], len(slot))
    runs = np.zeros(len(starts), dtype=RUN)
    head = columns[:, starts]
    runs["namespace"] = np.ascontiguousarray(head[_NAMESPACE].T).view("V16")[:, 0]
    runs["slot_bytes"] = found.slot_bytes
    runs["key_bytes"] = head[_PLACE] >> np.uint64(32) & np.uint64(0xFF)
    runs["parent_kind"] = head[_PLACE] >> np.uint64(40) & np.uint64(0xFF)
    runs["part_from"], runs["part_to"] = part_from[starts], (part_from + width)[starts]
    runs["parent_key"] = np.ascontiguousarray(head[_PARENT].T).view("V32")[:, 0]
    keys = np.ascontiguousarray(columns[_KEY].T).view(np.uint8)
    runs["last_key"] = keys[ends - 1].view("V32")[:, 0]
    runs["stamp"], runs["first_slot"] = head[_STAMP], slot[starts]
    runs["blocks"] = ends - starts
    second = np.minimum(starts + 1, ends - 1)
    runs["stride"] = np.where(second > starts, slot[second] - slot[starts], width[starts])
    runs["keys_at"] = starts
    return Runs(runs, keys, digests(columns[1:7]))


def _groups(columns: U64, part: I64, slot: I64, slab: I64) -> tuple[I64, I64]:
    """Where each group begins, and how many parts it has."""
    if not part.any():
        return np.arange(len(part)), np.ones(len(part), dtype=np.int64)
    joins = (
        (np.diff(part) == 1)
        & (np.diff(slot) == 1)
        & (slab[1:] == slab[:-1])
        & (columns[_PLACE, 1:] >> np.uint64(32) == columns[_PLACE, :-1] >> np.uint64(32))
        & (columns[1:, 1:] == columns[1:, :-1]).all(axis=0)
    )
    lead = np.flatnonzero(np.concatenate([[True], ~joins]))
    return lead, np.diff(np.append(lead, len(part)))


def _goes_on(columns: U64, part_from: I64, width: I64, slot: I64, slab: I64) -> Mask:
    """Between neighbouring groups: whether the second goes on the run of the first."""
    distance = np.diff(slot)
    place = columns[_PLACE] >> np.uint64(32)
    parent_kind = place[1:] >> np.uint64(8) & np.uint64(0xFF)
    follows = (
        (parent_kind == PARENT_KEY)
        & (place[1:] & np.uint64(0xFF) == place[:-1] & np.uint64(0xFF))
        & (columns[_PARENT, 1:] == columns[_KEY, :-1]).all(axis=0)
        & (columns[_NAMESPACE, 1:] == columns[_NAMESPACE, :-1]).all(axis=0)
        & (columns[_STAMP, 1:] == columns[_STAMP, :-1])
        & (part_from[1:] == part_from[:-1])
        & (width[1:] == width[:-1])
        & (slab[1:] == slab[:-1])
        & (distance >= width[:-1])
        & (distance <= PARTS_MAX)  # no more parts lie side by side
    )
    # A new distance ends the run, unless the run has only just begun: of such turns in a row, every second one does.
    turns = np.zeros(len(follows), dtype=np.bool_)
    turns[1:] = follows[1:] & follows[:-1] & (distance[1:] != distance[:-1])
    order = np.arange(len(follows))
    since = order - np.maximum.accumulate(np.where(turns, -1, order))
    return follows & ~(turns & (since % 2 == 1))


# -- strands -------------------------------------------------------------------------------------------


def strands_of(found: Sequence[Runs]) -> Strands:
    """All runs of a segment, strand by strand."""
    if not found:
        return Strands(np.empty(0, RUN), np.empty(0, np.int64), np.empty((0, KEY_FIELD_BYTES), np.uint8))
    runs = np.concatenate([some.runs.view(_RAW_RUN) for some in found]).view(RUN)
    keys = np.concatenate([some.keys for some in found])
    bases = np.cumsum([0, *(len(some.keys) for some in found[:-1])])
    runs["keys_at"] += np.repeat(bases, [len(some.runs) for some in found])
    order, lengths = _in_order(_before(runs))
    starts = np.cumsum(lengths) - lengths
    heads = runs[order[starts]]
    strand_of = np.empty(len(runs), dtype=np.int64)
    strand_of[order] = np.repeat(np.arange(len(lengths)), lengths)
    block_digests = np.concatenate([some.digests for some in found])
    depth = _depths(_parents(heads, runs, strand_of, keys, block_digests))
    # Within a depth, strands of a kind stand together.
    kind = digests(_names(heads, "parent_key", shapes(heads))[[0, 1, 6]])
    turn = np.lexsort((kind, depth))
    turned = order[spread(starts[turn], lengths[turn])]
    return Strands(runs.view(_RAW_RUN)[turned].view(RUN), lengths[turn], keys)


def spread(starts: I64, lengths: I64) -> I64:
    """The numbers start, start + 1, ..., `lengths` of them for each start, one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def shapes(runs: Array) -> U64:
    """Slot size (a multiple of 4 KiB), key bytes and parts of each run, in one number."""
    shape = runs["slot_bytes"].astype(np.uint64) >> np.uint64(12)
    for name, bits in (("key_bytes", 6), ("part_from", 11), ("part_to", 11)):
        shape = shape << np.uint64(bits) | runs[name].astype(np.uint64)
    return shape


def _names(runs: Array, key: str, shape: U64) -> U64:
    """Namespace, a key (the field of that name) and `shape` of each run, as words (7, runs)."""
    names = np.empty((7, len(runs)), dtype=np.uint64)
    names[0:2] = np.ascontiguousarray(runs["namespace"]).view(np.uint64).reshape(-1, 2).T
    names[2:6] = np.ascontiguousarray(runs[key]).view(np.uint64).reshape(-1, 4).T
    names[6] = shape
    return names


def _before(runs: Array) -> I64:
    """For each run the one that it goes on from, -1 for none; no two go on from the same."""
    result = np.full(len(runs), -1, dtype=np.int64)
    later = np.flatnonzero(runs["parent_kind"] == PARENT_KEY)
    shape = shapes(runs)
    by_end = digests(_names(runs, "last_key", shape))
    wanted = digests(_names(runs, "parent_key", shape))[later]
    order, turn = np.argsort(by_end, kind="stable"), np.argsort(wanted, kind="stable")
    later = later[turn]
    at = np.searchsorted(by_end[order], wanted[turn])
    before = order[np.minimum(at, len(runs) - 1)]
    fits = (
        (runs["last_key"][before] == runs["parent_key"][later])
        & (runs["namespace"][before] == runs["namespace"][later])
        & (shape[before] == shape[later])
        & (before != later)
    )
    before, chosen = np.unique(before[fits], return_index=True)
    result[later[fits][chosen]] = before
    return result


def _in_order(before: I64) -> tuple[I64, I64]:
    """The runs strand by strand, and how many each strand has. before: the run that each one goes on from, or -1.

    By leaps that double: a run leaps over all that are between it and the first of its strand.
    """
    numbers = np.arange(len(before))
    first, distance = numbers, np.zeros(len(before), dtype=np.int64)
    for _ in range(2):
        first = np.where(before < 0, numbers, before)
        distance = (before >= 0).astype(np.int64)
        for _ in range(len(before).bit_length()):
            beyond = first[first]
            if np.array_equal(beyond, first):
                break
            distance = distance + distance[first]
            first = beyond
        in_cycle = before[first] >= 0
        if not in_cycle.any():
            break
        before = np.where(in_cycle, -1, before)
    lengths = np.bincount(first, minlength=len(before))
    return np.lexsort((distance, first)), lengths[lengths > 0]


def _parents(heads: Array, runs: Array, strand_of: I64, keys: npt.NDArray[np.uint8], block_digests: U64) -> list[int]:
    """For each strand, by its first run, another strand with the block that it follows; -1 for none."""
    parents = np.full(len(heads), -1, dtype=np.int64)
    kids = np.flatnonzero(heads["parent_kind"] == PARENT_KEY)
    if not len(kids):
        return parents.tolist()
    names = _names(heads[kids], "parent_key", shapes(heads[kids]))[:6]
    wanted, which = np.unique(digests(names), return_inverse=True)
    at = np.minimum(np.searchsorted(wanted, block_digests), len(wanted) - 1)
    hits = np.flatnonzero(wanted[at] == block_digests)
    block_of = np.full(len(wanted), -1, dtype=np.int64)
    block_of[at[hits]] = hits
    block = block_of[which]
    kids, block = kids[block >= 0], block[block >= 0]
    run = np.searchsorted(runs["keys_at"], block, side="right") - 1
    same = (
        (keys[block].view("V32")[:, 0] == heads["parent_key"][kids])
        & (runs["namespace"][run] == heads["namespace"][kids])
        & (strand_of[run] != kids)
    )
    parents[kids[same]] = strand_of[run[same]]
    return parents.tolist()


def _depths(parents: list[int]) -> I64:
    """How many strands stand above each one; a cycle ends where it is met again."""
    depths = [0 if parent < 0 else -1 for parent in parents]
    for strand in range(len(parents)):
        path: list[int] = []
        while depths[strand] == -1:
            depths[strand] = -2
            path.append(strand)
            strand = parents[strand]
        depth = max(depths[strand], -1)
        for each in reversed(path):
            depth += 1
            depths[each] = depth
    return np.array(depths, dtype=np.int64)
