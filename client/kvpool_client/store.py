"""A store: reserve, write, commit.

Rules
  - Only what nobody has and nobody writes is written; of a store in shares only the caller's own.
  - What was written before a stop is committed; the rest is given up with the writer's word, at once or, when the
    Master does not answer, in the background.
  - The word is given for a part only when every peer has said that it writes no more of it. Else what is confirmed is
    committed and the rest is given up without the word: the Master then clears it through the node's data port. A share
    is left to expire instead, for to give it up without the word would end all shares.
  - The attachment under whose worker number was reserved is held until the end: its lock says that we still write.
    Only through its mappings is written here: own segments that another attachment maps are out of reach.
  - A newer epoch, heard of by whatever way, ends a store: nothing more is written, nothing is committed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool_client import headers
from kvpool_client.answers import StoreResult, short_reason
from kvpool_client.context import Context, NamespaceCalls
from kvpool_client.devices.base import Buffer
from kvpool_client.holders import holders_of
from kvpool_client.lanes import Stored
from kvpool_client.node_link import Attachment
from kvpool_client.runs import count, count_before, extents_of, rows_of, within
from kvpool_client.transfer import Term
from kvpool_client.transfer_plan import Origin, Plan, Source, Wanted, divide, not_mapped, reachable
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.capability import WRITE
from kvpool_proto.errors import KVPoolError, ProtocolError, StaleEpoch, Unreachable


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
_OTHERS = 254  # another share's to write
ID_BYTES: Final = 16

States = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of a store that `count` ranks make together, for KV that they all hold alike (parts = 1).

    Each makes the same store with the same id and its own index: 0 .. count - 1. id: 16 bytes that the ranks agree on
    and that no other store has. Raises ValueError.
    """

    index: int
    count: int
    id: bytes

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"share {self.index} of {self.count}: 0 .. count - 1")
        if len(self.id) != ID_BYTES:
            raise ValueError(f"an id of {len(self.id)} bytes: {ID_BYTES}")


def _next_id(ident: bytes) -> bytes:
    """The id under which all ranks ask for what their first reservation had no room for."""
    return blake2b(ident, digest_size=ID_BYTES, person=b"kvpool-share").digest()


def store(
    context: Context,
    calls: NamespaceCalls,
    chain: bytes,
    parent: Parent | bytes,
    parts: range,
    buffers: Sequence[Buffer],
    timeout_ms: int | None,
    share: Share | None = None,
) -> StoreResult:
    """Store a chain; asks again, for a moment, while room is being made ready (slab_pending).

    parts: parts.start .. parts.stop - 1, with one buffer each that has the whole chain. timeout_ms: of reserving and
    copying; None: as long as the reservations hold.
    """
    end_ms = None if timeout_ms is None else context.clock.now_ms() + timeout_ms
    share = share or Share(0, 1, os.urandom(ID_BYTES))
    attempt = _Store(context, calls, chain, parent, parts, buffers, share)
    result = attempt.run(timeout_ms)
    for _ in range(PENDING_TRIES_MAX):
        left_ms = None if end_ms is None else end_ms - context.clock.now_ms()
        if result.reason != "slab_pending" or (left_ms is not None and left_ms <= 0):
            break
        threading.Event().wait(PENDING_PAUSE_S)
        if attempt.granted:  # to any share; else nothing was reserved under this id
            share = replace(share, id=_next_id(share.id))
        attempt = _Store(context, calls, chain, parent, parts, buffers, share)
        more = attempt.run(left_ms)
        result = replace(
            more,
            stored_blocks=result.stored_blocks + more.stored_blocks,
            existing_blocks=result.existing_blocks,  # the second time, ours are among them
            bytes=result.bytes + more.bytes,
        )
    return result


class _Store:
    """One reservation, or the caller's share of it: parts parts.start .. parts.stop - 1, one buffer each."""

    def __init__(
        self,
        context: Context,
        calls: NamespaceCalls,
        chain: bytes,
        parent: Parent | bytes,
        parts: range,
        buffers: Sequence[Buffer],
        share: Share,
    ) -> None:
        self._context = context
        self._calls = calls
        self._chain = chain
        self._parent = (pb.PARENT_KEY, headers.PARENT_KEY, parent) if isinstance(parent, bytes) else _KINDS[parent]
        self._parts = parts
        self._buffers = buffers
        self._share = share
        self._worker_id = 0
        self._epoch = 0
        self._committed = dict.fromkeys(parts, 0)
        self._lost = 0
        self.granted = False
        """Was anything reserved, for whatever share?"""

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
            plan, reason = self._plan(reply, states, attached)
        except BaseException as error:
            self._give_up(self._parts, word=True)
            if isinstance(error, KVPoolError):
                return StoreResult(reason=error.reason.lower())
            raise
        term = Term(context.clock, started_ms + reply.write_ms, "write_expired", reply.epoch, context.epochs.highest)
        if timeout_ms is not None and timeout_ms < reply.write_ms:
            term = replace(term, deadline_ms=started_ms + timeout_ms, reason="timed_out")
        mine = [part for part, row in zip(self._parts, states, strict=True) if (row == pb.RUN_YOURS).any()]
        if mine:
            reason = self._write(plan, mine, term) or reason
        del attached  # until here its lock said that we may write
        return self._result(states, plan, reason or short_reason(reply.reason))

    def _reserve(self, node_id: str, deadline_ms: int) -> pb.ReserveReply:
        wire_kind, _, key = self._parent
        share = self._share
        request = pb.ReserveRequest(
            namespace_id=self._calls.id,
            reservation_id=share.id,
            parent_kind=wire_kind,
            parent_key=key,
            chain=self._chain,
            part_from=self._parts.start,
            part_to=self._parts.stop,
            nodes=[node_id] if node_id else [],
            worker_id=self._worker_id,
            shares=share.count if share.count > 1 else 0,
            share=share.index,
            avoid_nodes=[other for other in self._context.lanes.peers.avoided() if other != node_id],
        )
        try:
            return self._calls.ask(self._context.master.pool.Reserve, request, deadline_ms)
        except (Unreachable, StaleEpoch):
            self._give_up(self._parts, word=True)  # it may have arrived all the same
            raise

    def _states(self, reply: pb.ReserveReply) -> States:
        """RUN_* of every part and answered block, RUN_YOURS of our share only. Raises ProtocolError."""
        blocks = len(self._chain) // self._calls.spec.key_bytes
        if reply.answered_blocks > blocks:
            raise ProtocolError(f"{reply.answered_blocks} blocks answered, {blocks} asked for")
        states = np.zeros((len(self._parts), reply.answered_blocks), dtype=np.uint8)
        base = self._parts.start
        shares = reply.run_share if self._share.count > 1 else [self._share.index] * len(reply.run_state)
        columns = (reply.run_offset, reply.run_blocks, reply.run_part_from, reply.run_part_to, reply.run_state, shares)
        if {len(column) for column in columns} != {len(reply.run_state)}:
            raise ProtocolError("runs have columns of different lengths")
        for offset, length, low, high, state, share in zip(*columns, strict=True):
            if state not in _RUN_STATES:
                raise ProtocolError(f"run state {state}: compare the versions")
            if state == pb.RUN_YOURS and share != self._share.index:
                state = _OTHERS
            states[max(low - base, 0) : max(high - base, 0), offset : offset + length] = state
        return states

    def _plan(self, reply: pb.ReserveReply, states: States, attached: Attachment) -> tuple[Plan, str]:
        """What of ours to write, and why not all. Raises SlabChanged; ProtocolError when extents and runs differ."""
        extents = extents_of(reply.extents)
        self.granted = len(extents) > 0
        source = self._source(reply, attached)
        _, kind, key = self._parent
        wanted: list[Wanted] = []
        short = ""
        for part, buffer, row in zip(self._parts, self._buffers, states, strict=True):
            every = rows_of(extents, part, first_block=0, blocks=reply.answered_blocks)
            mine = within(every, _spans(row == pb.RUN_YOURS))
            granted = np.count_nonzero(row == pb.RUN_YOURS)
            if count(mine) != granted or count(every) != granted + np.count_nonzero(row == _OTHERS):
                raise ProtocolError(f"part {part}: extents and runs of a reservation differ")
            near, why = reachable(source, part, mine)
            short = short or why
            wanted.append(Wanted(part, buffer, near))
        origin = Origin(kind, key, self._worker_id)
        return divide(source, self._calls.spec, WRITE, self._chain, wanted, origin), short

    def _source(self, reply: pb.ReserveReply, attached: Attachment) -> Source:
        """Where to write. Raises ProtocolError."""
        extents = extents_of(reply.extents)
        holders = holders_of(reply.holders, reply.valid_until_ms, attached.node_id)
        segments = attached.segments.get(reply.epoch, {})
        waits = self._context.lanes.peers.waits
        missing = not_mapped(extents, self._parts, holders, segments)
        if missing:
            try:
                self._context.link.holding(
                    reply.epoch, missing
                )  # for the next store; the number of this one is the old
            except KVPoolError as error:
                return Source(extents, reply.epoch, segments, holders, waits, error.reason.lower())
        return Source(extents, reply.epoch, segments, holders, waits)

    def _write(self, plan: Plan, mine: Sequence[int], term: Term) -> str:
        """Write what can be reached of the parts that are ours, and commit it. Returns why not all of it."""
        far = {copy.grant.part for copies in plan.peers.values() for copy in copies}
        try:
            stored = self._context.lanes.write(plan, term, lambda so_far: self._commit(so_far, final=False))
        except BaseException:
            self._give_up([part for part in mine if part not in far], word=True)
            self._give_up([part for part in mine if part in far], word=False)
            raise
        return self._settle(replace(stored, blocks=dict.fromkeys(mine, 0) | stored.blocks))

    def _settle(self, stored: Stored) -> str:
        """Commit what was written, give up the rest. Returns why not all."""
        sure = {part: blocks for part, blocks in stored.blocks.items() if part not in stored.unconfirmed}
        unsure = {part: blocks for part, blocks in stored.blocks.items() if part in stored.unconfirmed}
        reason = stored.reason
        over = False
        if any(stored.blocks.values()) and reason != "stale_epoch":
            failure = self._commit(sure, final=True) or self._commit(unsure, final=False)
            reason, over = reason or failure, not failure
        if not over:
            self._give_up([*sure], word=True)
        self._give_up([*unsure], word=False)
        return reason

    def _commit(self, written: Mapping[int, int], *, final: bool) -> str:
        """Report totals by part, neighbours with equal ones in one request. Returns why it failed, if it did."""
        master = self._context.master
        news = sorted(one for one in written.items() if final or one[1] > self._committed[one[0]])
        for first, last, blocks in _neighbours(news):
            request = pb.CommitRequest(
                reservation_id=self._share.id,
                part_from=first,
                part_to=last + 1,
                blocks_written=blocks,
                final=final,
                worker_id=self._worker_id,
                epoch=self._epoch,
                share=self._share.index,
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

    def _give_up(self, parts: Sequence[int], *, word: bool) -> None:
        """Give up what is not committed of some parts, in the background. word: nobody copies to them any more."""
        if not word and self._share.count > 1:
            return  # see the rules
        master = self._context.master
        requests = [
            pb.AbortRequest(
                reservation_id=self._share.id,
                writer=word,
                part_from=first,
                part_to=last + 1,
                epoch=self._epoch,
                share=self._share.index,
            )
            for first, last, _ in _neighbours([(part, 0) for part in parts])
        ]

        def send() -> None:
            """All of them, one after the other."""
            for request in requests:
                master.call(master.pool.Abort, request, self._deadline_ms(), patient=True)

        if requests:
            self._context.background.submit(send)

    def _deadline_ms(self) -> int:
        return self._context.clock.now_ms() + self._context.timeout_ms

    def _result(self, states: States, plan: Plan, reason: str) -> StoreResult:
        """Counts, from the states and what was committed of them."""
        part_bytes = self._calls.spec.part_bytes
        ends: dict[int, int] = {}
        for part, row in zip(self._parts, states, strict=True):
            done = np.flatnonzero(row == pb.RUN_YOURS)[: self._committed[part]]
            row[done] = _DONE
            ends[part] = int(done[-1]) + 1 if len(done) else 0
        far = sum(count_before(copy.runs, ends[copy.grant.part]) for copies in plan.peers.values() for copy in copies)
        self._context.counters.add(remote_stored_bytes=far * part_bytes)
        stored = (states == _DONE).any(axis=0) & ~np.isin(states, (pb.RUN_YOURS, _OTHERS)).any(axis=0)
        others = int((states == pb.RUN_BEING_WRITTEN).any(axis=0).sum())
        return StoreResult(
            stored_blocks=max(int(stored.sum()) - self._lost, 0),
            existing_blocks=int((states == pb.RUN_EXISTS).all(axis=0).sum()),
            being_written_blocks=others + int((states == _OTHERS).any(axis=0).sum()),
            reason=reason or ("lost" if self._lost else "being_written" if others else ""),
            bytes=sum(self._committed.values()) * part_bytes,
        )


def _spans(mine: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The ranges [start, end) in which `mine` is true."""
    edges = np.flatnonzero(np.diff(mine.astype(np.int8), prepend=0, append=0)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _neighbours(totals: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(first part, last part, total) of every run of neighbouring parts with equal totals; parts rise."""
    start = 0
    for index in range(1, len(totals) + 1):
        part, total = totals[index - 1]
        if index == len(totals) or totals[index] != (part + 1, total):
            yield totals[start][0], part, total
            start = index
