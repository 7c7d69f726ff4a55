"""A store: reserve, write, commit.

Rules
  - Only what nobody has and nobody writes is written.
  - What was written before a stop is committed; the rest is given up with the writer's word, at once or, when the
    Master does not answer, in the background.
  - The attachment under whose worker number was reserved is held until the end: its lock says that we still write.
    Only through its mappings is written: a reservation whose segments another attachment maps is given up.
  - A newer epoch, heard of by whatever way, ends a store: nothing more is written, nothing is committed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool_client import headers
from kvpool_client.answers import StoreResult, short_reason
from kvpool_client.context import Context, NamespaceCalls
from kvpool_client.devices.base import Buffer
from kvpool_client.node_link import Attachment
from kvpool_client.runs import count, extents_of, runs_of
from kvpool_client.transfer import PartCopy, Term
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import KVPoolError, ProtocolError, SegmentElsewhere, StaleEpoch, Unreachable


class Parent(Enum):
    """What a chain follows, where it is no known key."""

    ROOT = "root"
    UNKNOWN = "unknown"


ROOT = Parent.ROOT
UNKNOWN = Parent.UNKNOWN

_KINDS = {
    ROOT: (pb.PARENT_ROOT, headers.PARENT_ROOT, b""),
    UNKNOWN: (pb.PARENT_UNKNOWN, headers.PARENT_UNKNOWN, b""),
}
PENDING_TRIES_MAX: Final = 20
PENDING_PAUSE_S: Final = 0.02
_RUN_STATES: Final = (pb.RUN_EXISTS, pb.RUN_BEING_WRITTEN, pb.RUN_YOURS)
_DONE = 255  # beside the RUN_* of the contract: written and committed by this call

States = npt.NDArray[np.uint8]


def store(
    context: Context,
    calls: NamespaceCalls,
    chain: bytes,
    parent: Parent | bytes,
    parts: range,
    buffers: Sequence[Buffer],
    timeout_ms: int | None,
) -> StoreResult:
    """Store a chain; asks again, for a moment, while room is being made ready (slab_pending).

    parts: parts.start .. parts.stop - 1, with one buffer each that has the whole chain. timeout_ms: of reserving and
    copying; None: as long as the reservations hold.
    """
    end_ms = None if timeout_ms is None else context.clock.now_ms() + timeout_ms
    result = _Store(context, calls, chain, parent, parts, buffers).run(timeout_ms)
    for _ in range(PENDING_TRIES_MAX):
        left_ms = None if end_ms is None else end_ms - context.clock.now_ms()
        if result.reason != "slab_pending" or (left_ms is not None and left_ms <= 0):
            break
        threading.Event().wait(PENDING_PAUSE_S)
        more = _Store(context, calls, chain, parent, parts, buffers).run(left_ms)
        result = replace(
            more,
            stored_blocks=result.stored_blocks + more.stored_blocks,
            existing_blocks=result.existing_blocks,  # the second time, ours are among them
            bytes=result.bytes + more.bytes,
        )
    return result


class _Store:
    """One reservation: parts parts.start .. parts.stop - 1, one buffer each."""

    def __init__(
        self,
        context: Context,
        calls: NamespaceCalls,
        chain: bytes,
        parent: Parent | bytes,
        parts: range,
        buffers: Sequence[Buffer],
    ) -> None:
        self._context = context
        self._calls = calls
        self._chain = chain
        self._parent = (pb.PARENT_KEY, headers.PARENT_KEY, parent) if isinstance(parent, bytes) else _KINDS[parent]
        self._parts = parts
        self._buffers = buffers
        self._id = os.urandom(16)
        self._worker_id = 0
        self._epoch = 0
        self._committed = dict.fromkeys(parts, 0)
        self._lost = 0

    def run(self, timeout_ms: int | None) -> StoreResult:
        """Do it. timeout_ms: for reserving and writing; None: as long as the reservation holds."""
        context = self._context
        started_ms = context.clock.now_ms()
        asking_ms = context.timeout_ms if timeout_ms is None else min(timeout_ms, context.timeout_ms)
        try:
            attached = context.link.attachment(context.epochs.highest())
            self._worker_id = attached.worker_id
            reply = self._reserve(attached.node_id, started_ms + asking_ms)
            self._epoch = reply.epoch
        except KVPoolError as error:
            return StoreResult(reason=error.reason.lower())
        try:
            states = self._states(reply)
            grants = self._grants(reply, states, attached)
        except BaseException as error:
            self._abort_later()
            if isinstance(error, KVPoolError):
                return StoreResult(reason=error.reason.lower())
            raise
        reason = ""
        if grants:
            term = Term(
                context.clock, started_ms + reply.write_ms, "write_expired", reply.epoch, context.epochs.highest
            )
            if timeout_ms is not None and timeout_ms < reply.write_ms:
                term = replace(term, deadline_ms=started_ms + timeout_ms, reason="timed_out")
            reason = self._write(grants, term)
        del attached  # until here its lock said that we may write
        return self._result(states, reason or short_reason(reply.reason))

    def _reserve(self, node_id: str, deadline_ms: int) -> pb.ReserveReply:
        wire_kind, _, key = self._parent
        request = pb.ReserveRequest(
            namespace_id=self._calls.id,
            reservation_id=self._id,
            parent_kind=wire_kind,
            parent_key=key,
            chain=self._chain,
            part_from=self._parts.start,
            part_to=self._parts.stop,
            nodes=[node_id],
            worker_id=self._worker_id,
        )
        try:
            return self._calls.ask(self._context.master.pool.Reserve, request, deadline_ms)
        except (Unreachable, StaleEpoch):
            self._abort_later()  # it may have arrived all the same
            raise

    def _states(self, reply: pb.ReserveReply) -> States:
        """RUN_* of every part and answered block. Raises ProtocolError."""
        blocks = len(self._chain) // self._calls.spec.key_bytes
        if reply.answered_blocks > blocks:
            raise ProtocolError(f"{reply.answered_blocks} blocks answered, {blocks} asked for")
        states = np.zeros((len(self._parts), reply.answered_blocks), dtype=np.uint8)
        base = self._parts.start
        columns = (reply.run_offset, reply.run_blocks, reply.run_part_from, reply.run_part_to, reply.run_state)
        if {len(column) for column in columns} != {len(reply.run_state)}:
            raise ProtocolError("runs have columns of different lengths")
        for offset, length, low, high, state in zip(*columns, strict=True):
            if state not in _RUN_STATES:
                raise ProtocolError(f"run state {state}: compare the versions")
            states[max(low - base, 0) : max(high - base, 0), offset : offset + length] = state
        return states

    def _grants(self, reply: pb.ReserveReply, states: States, attached: Attachment) -> dict[int, PartCopy]:
        """What to write, by part. Raises SegmentElsewhere, SlabChanged; ProtocolError when extents and runs differ."""
        extents = extents_of(reply.extents)
        if not len(extents):
            return {}
        handles = extents.segments_of(self._parts)
        if not attached.holds(reply.epoch, handles):
            self._context.link.holding(reply.epoch, handles)  # for the next store; the number of this one is the old
            raise SegmentElsewhere("mapped anew since this store began")
        segments = attached.segments[reply.epoch]
        spec = self._calls.spec
        _, kind, key = self._parent
        grants: dict[int, PartCopy] = {}
        for part, buffer, row in zip(self._parts, self._buffers, states, strict=True):
            runs = runs_of(
                extents, part, segments, slot_bytes=spec.slot_bytes, first_block=0, blocks=reply.answered_blocks
            )
            if count(runs) != np.count_nonzero(row == pb.RUN_YOURS):
                raise ProtocolError(f"part {part}: extents and runs of a reservation differ")
            if runs:
                grants[part] = PartCopy(spec, part, self._chain, runs, buffer, kind, key, self._worker_id)
        return grants

    def _write(self, grants: dict[int, PartCopy], term: Term) -> str:
        """Write what was granted and commit it. Returns why not all of it."""
        parts = list(grants)
        try:
            written, reason = self._context.engine.write(
                list(grants.values()), term, lambda so_far: self._commit(parts, so_far, final=False)
            )
        except BaseException:
            self._abort_later()
            raise
        if any(written) and reason != "stale_epoch":
            failure = self._commit(parts, written, final=True)
            if not failure:
                return reason
            reason = reason or failure
        self._abort_later()
        return reason

    def _commit(self, parts: list[int], written: list[int], *, final: bool) -> str:
        """Report the totals of `parts`, neighbours with equal ones in one request. Returns why it failed, if it did."""
        master = self._context.master
        self._lost = 0
        for first, last, blocks in _neighbours(parts, written):
            request = pb.CommitRequest(
                reservation_id=self._id,
                part_from=first,
                part_to=last + 1,
                blocks_written=blocks,
                final=final,
                worker_id=self._worker_id,
                epoch=self._epoch,
            )
            try:
                reply = master.call(master.pool.Commit, request, self._deadline_ms(), again=True)
                self._context.epochs.obey(reply.epoch)
            except KVPoolError as error:
                return error.reason.lower()
            for part in range(first, last + 1):
                self._committed[part] = reply.committed_blocks
            self._lost = max(self._lost, reply.lost_blocks)
        return ""

    def _abort_later(self) -> None:
        """Give up what is not committed, with the writer's word: nothing is copied any more."""
        master = self._context.master
        request = pb.AbortRequest(
            reservation_id=self._id,
            writer=True,
            part_from=self._parts.start,
            part_to=self._parts.stop,
            epoch=self._epoch,
        )
        self._context.background.submit(
            lambda: master.call(master.pool.Abort, request, self._deadline_ms(), patient=True)
        )

    def _deadline_ms(self) -> int:
        return self._context.clock.now_ms() + self._context.timeout_ms

    def _result(self, states: States, reason: str) -> StoreResult:
        """Counts, from the states and what was committed of them."""
        for part, row in zip(self._parts, states, strict=True):
            row[np.flatnonzero(row == pb.RUN_YOURS)[: self._committed[part]]] = _DONE
        stored = (states == _DONE).any(axis=0) & (states != pb.RUN_YOURS).all(axis=0)
        being_written = int((states == pb.RUN_BEING_WRITTEN).any(axis=0).sum())
        return StoreResult(
            stored_blocks=max(int(stored.sum()) - self._lost, 0),
            existing_blocks=int((states == pb.RUN_EXISTS).all(axis=0).sum()),
            being_written_blocks=being_written,
            reason=reason or ("lost" if self._lost else "being_written" if being_written else ""),
            bytes=sum(self._committed.values()) * self._calls.spec.part_bytes,
        )


def _neighbours(parts: list[int], written: list[int]) -> Iterator[tuple[int, int, int]]:
    """(first part, last part, total) of every run of neighbouring parts with equal totals."""
    start = 0
    for index in range(1, len(parts) + 1):
        if index == len(parts) or parts[index] != parts[index - 1] + 1 or written[index] != written[start]:
            yield parts[start], parts[index - 1], written[start]
            start = index
