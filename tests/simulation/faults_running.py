"""Planted faults of what goes on all the time: reading, writing, leases, quarantine, slabs, liveness. See faults.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpool_client import owned_segment, transfer
from kvpool_client.headers import SLAB_RECORD, Array, record_check
from kvpool_client.owned_segment import OwnedSegment
from kvpool_client.runs import Run, count, head, headers_of
from kvpool_client.transfer import Copied, LocalEngine, PartCopy, Term
from kvpool_client.workers import Workers
from kvpool_master.core.leases import LeaseTable
from kvpool_master.core.liveness import Liveness
from kvpool_master.core.writes import Writes
from kvpool_proto.geometry import SLAB_RECORD_BYTES, SUPERBLOCK_BYTES
from simulation.doubles import Patches

# -- readers and writers -------------------------------------------------------------------------------


def read_blindly(patches: Patches) -> None:
    def read(engine: LocalEngine, part: PartCopy, start: int, runs: list[Run]) -> Copied:
        """Copy, look at nothing."""
        engine._move(part, runs, part.buffer.scatter, np.zeros(count(runs), dtype=np.uint64), 0)
        return Copied(count(runs))

    patches.set(LocalEngine, "_read_checked", read)


def no_look_afterwards(patches: Patches) -> None:
    def read(engine: LocalEngine, part: PartCopy, start: int, runs: list[Run]) -> Copied:
        """Look before the copy only."""
        before = headers_of(runs, part.slot_bytes)
        wanted = slice(start, start + len(before))
        good, reason = transfer.agree(before, part.headers[wanted], part.places[wanted])
        if good:
            sums = np.zeros(good, dtype=np.uint64)
            engine._move(part, head(runs, good), part.buffer.scatter, sums, 0)
        return Copied(good, reason)

    patches.set(LocalEngine, "_read_checked", read)


def no_deadline(patches: Patches) -> None:
    left_s: Callable[[Term], float] = Term.left_s
    patches.set(Term, "left_s", lambda term: left_s(term) if term.epoch is None else 60.0)


def no_deadline_no_epoch(patches: Patches) -> None:
    no_deadline(patches)
    patches.set(Term, "overruled", lambda term, runs: "")


# -- the Master's space --------------------------------------------------------------------------------


def leases_end_early(patches: Patches) -> None:
    renew: Callable[..., int] = LeaseTable.renew

    def half(table: LeaseTable, lease: Any, now_ms: int) -> int:
        """Tell the holder of a time twice as long as ours."""
        left_ms = renew(table, lease, now_ms)
        lease.deadline_ms = now_ms + left_ms // 2
        table.deadlines.push(lease.deadline_ms, lease.id)
        return left_ms

    patches.set(LeaseTable, "renew", half)


def no_wait_for_leases(patches: Patches) -> None:
    """Take what was hidden for younger than every lease."""
    patches.set(LeaseTable, "newest_number", property(lambda table: -1))


def count_twice(patches: Patches) -> None:
    advance: Callable[..., None] = Writes._advance
    patches.set(
        Writes,
        "_advance",
        lambda one, reservation, part, total: advance(
            one, reservation, part, min(total + reservation.written(part), reservation.granted_blocks(part))
        ),
    )


def no_quarantine(patches: Patches) -> None:
    give_up: Callable[..., None] = Writes.give_up
    patches.set(Writes, "give_up", lambda one, reservation, mask, *, word: give_up(one, reservation, mask, word=True))


def expire_for_a_stall(patches: Patches) -> None:
    def tick(liveness: Liveness, now_ms: int) -> int:
        """Forget that we were late."""
        liveness._last_tick_ms = now_ms
        return 0

    patches.set(Liveness, "tick", tick)


# -- node clients --------------------------------------------------------------------------------------


def rebind_carelessly(patches: Patches) -> None:
    def bind(segment: OwnedSegment, slab: int, record: Any, cleared_slots: int) -> None:
        """Neither clear the table nor raise the generation."""
        fields: Array = np.zeros(1, dtype=SLAB_RECORD)
        record = record._replace(generation=1)
        fields["generation"], fields["slot_bytes"], fields["slots"] = record
        fields["check"] = record_check(fields)
        at = SUPERBLOCK_BYTES + slab * SLAB_RECORD_BYTES
        segment.memory[at : at + SLAB_RECORD_BYTES] = fields.view(np.uint8)
        segment._bound[slab] = record

    patches.set(owned_segment.OwnedSegment, "_bind", bind)


def gone_by_silence(patches: Patches) -> None:
    """Take for gone who has said nothing for a few heartbeats."""
    poll: Callable[..., list[tuple[int, str]]] = Workers.poll
    polls = itertools.count()

    def silent(workers: Workers) -> list[tuple[int, str]]:
        """Workers.poll: nobody ever says anything here."""
        return [*poll(workers), *(workers._names.items() if next(polls) % 4 == 3 else ())]

    patches.set(Workers, "poll", silent)
