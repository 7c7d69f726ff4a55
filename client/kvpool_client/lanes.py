"""Carries out a plan: the local lane in the caller's thread, one lane per other node beside it, one answer.

Rules
  - A call with one lane starts no thread. Threads are bounded; lanes that none has begun when the caller has done its
    own are the caller's: nobody waits for a thread.
  - A call ends when all its lanes have: nobody touches its buffers any more.
  - A load's answer is the leading run that is right in all parts, with the reason of the block where it ends; a
    store's is a leading run of each part, with a reason that some lane gives.
  - What goes wrong in a peer's lane, whatever it is, costs that lane's blocks only.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar

from kvpool_client.devices.base import Device
from kvpool_client.peer.copies import PeerCopy
from kvpool_client.peers import Peers
from kvpool_client.runs import Blocks, block_at, count, count_before
from kvpool_client.transfer import LocalEngine
from kvpool_client.transfer_engine import Copied, Term, TransferEngine, Written
from kvpool_client.transfer_plan import Plan
from kvpool_proto.errors import KVPoolError, ProtocolError

THREADS_MAX: Final = 16
"""Lanes of all calls that have a thread of their own at once."""
SILENCE_MS_MIN: Final = 200
"""A peer that moved nothing in as long as this, until its call's time was up, counts as silent."""
_SILENT: Final = ("peer_unreachable", "protocol", "internal")
"""Reasons for which a peer is avoided. One that is busy, or refuses a capability, has answered."""
_LOG: Final = logging.getLogger("kvpool")

_T = TypeVar("_T")


class _Lane(Generic[_T]):
    """Work that one thread does, whichever comes first."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self._work = work
        self._taken = threading.Lock()
        self._ended = threading.Event()
        self._result: list[_T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do it, unless somebody else has begun."""
        if not self._taken.acquire(blocking=False):
            return
        try:
            self._result.append(self._work())
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def end(self) -> None:
        """Wait until it is done; if nobody has begun, nobody will."""
        if not self._taken.acquire(blocking=False):
            self._ended.wait()

    def result(self) -> _T:
        """Of the work that is done. Raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._result[0]


@dataclass(frozen=True, slots=True)
class Loaded:
    """copied: leading blocks right in all parts. far_blocks: how many blocks, of all parts, came from other nodes."""

    copied: Copied
    far_blocks: int


@dataclass(frozen=True, slots=True)
class Stored:
    """blocks: by part, the leading ones of the plan's that are written. reason: why not all.

    unconfirmed: parts that a peer may still be writing.
    """

    blocks: dict[int, int]
    reason: str
    unconfirmed: frozenset[int]


class Lanes:
    """Thread safe. here: copies memory; peer: speaks with other nodes."""

    def __init__(self, here: LocalEngine, peer: TransferEngine[PeerCopy], peers: Peers) -> None:
        self.peers = peers
        self._here = here
        self._peer = peer
        self._threads = ThreadPoolExecutor(THREADS_MAX, "kvpool-lane")

    @property
    def device(self) -> Device:
        """What binds buffers."""
        return self._here.device

    def close(self) -> None:
        """End threads and connections; later calls go on in their callers' threads, or are misses."""
        self._threads.shutdown(wait=False)
        self._here.close()
        self._peer.close()

    def read(self, plan: Plan, blocks: int, term: Term) -> Loaded:
        """Copy the first `blocks` blocks of the layout, which the plan covers in every part."""
        lanes: list[Callable[[], list[Copied]]] = [
            partial(self._read_far, node_id, copies, term) for node_id, copies in plan.peers.items()
        ]
        if plan.here:
            lanes.insert(0, lambda: self._here.read(plan.here, term))
        copied = [one for lane in self._run(lanes) for one in lane]
        far = [copy.runs for copies in plan.peers.values() for copy in copies]
        answer = Copied(blocks)
        for runs, one in zip([*(copy.runs for copy in plan.here), *far], copied, strict=True):
            end = block_at(runs, one.blocks)
            if end is not None and (end < answer.blocks or (end == answer.blocks < blocks and not answer.reason)):
                answer = Copied(end, one.reason, one.bad)
        return Loaded(answer, sum(count_before(runs, answer.blocks) for runs in far))

    def write(self, plan: Plan, term: Term, progress: Callable[[dict[int, int]], str]) -> Stored:
        """Copy what the plan names. progress: told the blocks by part now and then; may return a reason to stop."""
        told = _Totals(plan, progress)
        lanes: list[Callable[[], Written]] = [
            partial(self._write_far, node_id, copies, term, told) for node_id, copies in plan.peers.items()
        ]
        if plan.here:
            lanes.insert(0, lambda: self._here.write(plan.here, term, partial(told.progress, "")))
        results = self._run(lanes)
        nodes = [*([""] if plan.here else []), *plan.peers]
        unconfirmed: set[int] = set()
        for node_id, written in zip(nodes, results, strict=True):
            told.note(node_id, written.blocks)
            if not written.confirmed:
                unconfirmed |= {copy.grant.part for copy in plan.peers[node_id]}
        reasons = [written.reason for written in results if written.reason]
        reason = "stale_epoch" if "stale_epoch" in reasons else next(iter(reasons), "")
        return Stored(told.blocks(), reason, frozenset(unconfirmed))

    def _run(self, works: Sequence[Callable[[], _T]]) -> list[_T]:
        """The results of all works. Raises what one of them raised, when all have ended."""
        lanes = [_Lane(work) for work in works]
        try:
            for lane in lanes[1:]:
                with contextlib.suppress(RuntimeError):  # closed, or no room for a thread: ours, then
                    self._threads.submit(lane.run)
            for lane in lanes:
                lane.run()
        finally:
            for lane in lanes:
                lane.end()
        return [lane.result() for lane in lanes]

    def _read_far(self, node_id: str, copies: list[PeerCopy], term: Term) -> list[Copied]:
        over = term.ended(())
        turn = None if over else self.peers.begin(node_id)
        if turn is None:
            return [Copied(0, over or "peer_unreachable")] * len(copies)
        left_ms, silence = term.left_s() * 1000, ""
        try:
            copied = self._peer.read(copies, term)
            _check(len(copied), copies)
            reason = next((one.reason for one in copied if one.reason), "")
            silence = _silence(reason, any(one.blocks for one in copied), term, left_ms)
        except Exception as error:  # a peer's doing, or the engine's mistake: a miss either way
            reason = _reason(error)
            silence = _silence(reason, False, term, left_ms)
            copied = [Copied(0, reason)] * len(copies)
        finally:
            self.peers.end(turn, silence)
        return copied

    def _write_far(self, node_id: str, copies: list[PeerCopy], term: Term, told: _Totals) -> Written:
        over = term.ended(())
        turn = None if over else self.peers.begin(node_id)
        if turn is None:
            return Written([0] * len(copies), over or "peer_unreachable")
        left_ms, silence = term.left_s() * 1000, ""
        try:
            written = self._peer.write(copies, term, partial(told.progress, node_id))
            _check(len(written.blocks), copies)
            silence = _silence(written.reason, any(written.blocks), term, left_ms)
        except Exception as error:
            reason = _reason(error)
            silence = _silence(reason, False, term, left_ms)
            written = Written([0] * len(copies), reason, confirmed=False)
        finally:
            self.peers.end(turn, silence)
        return written


class _Totals:
    """How far a store has come, by part, over all its lanes. Thread safe.

    One lane at a time reports; the others go on meanwhile. A reason to stop is one for all.
    """

    def __init__(self, plan: Plan, report: Callable[[dict[int, int]], str]) -> None:
        self._report = report
        self._reporting = threading.Lock()
        self._reason = ""
        self._copies: dict[str, list[tuple[int, Sequence[Blocks]]]] = {
            "": [(copy.part, copy.runs) for copy in plan.here]
        }
        self._copies |= {
            node_id: [(copy.grant.part, copy.runs) for copy in copies] for node_id, copies in plan.peers.items()
        }
        self._written = {node_id: [0] * len(copies) for node_id, copies in self._copies.items()}

    def note(self, node_id: str, written: Sequence[int]) -> None:
        """A lane has written so much of each of its copies."""
        self._written[node_id] = list(written)

    def progress(self, node_id: str, written: Sequence[int]) -> str:
        """note(), and report unless somebody is at it. Returns why to stop; empty: go on."""
        self.note(node_id, written)
        if not self._reason and self._reporting.acquire(blocking=False):
            try:
                self._reason = self._report(self.blocks())
            finally:
                self._reporting.release()
        return self._reason

    def blocks(self) -> dict[int, int]:
        """By part, the blocks before the first that is not written."""
        ends: dict[int, int] = {}
        copies = [
            (part, runs, written)
            for node_id, some in self._copies.items()
            for (part, runs), written in zip(some, self._written[node_id], strict=True)
        ]
        for part, runs, written in copies:
            end = block_at(runs, written)
            if end is not None:
                ends[part] = min(end, ends.get(part, end))
        totals: dict[int, int] = {}
        for part, runs, _ in copies:
            blocks = count_before(runs, ends[part]) if part in ends else count(runs)
            totals[part] = totals.get(part, 0) + blocks
        return totals


def _check(results: int, copies: Sequence[PeerCopy]) -> None:
    if results != len(copies):
        raise ProtocolError(f"{results} results of {len(copies)} copies")


def _silence(reason: str, moved: bool, term: Term, left_ms: float) -> str:
    """Why a peer is held to have given no answer; empty: it gave one. left_ms: what it had of the term."""
    if reason in _SILENT:
        return reason
    return "timed_out" if reason == term.reason and not moved and left_ms >= SILENCE_MS_MIN else ""


def _reason(error: Exception) -> str:
    if isinstance(error, KVPoolError):
        return error.reason.lower()
    _LOG.error("a transfer engine failed; its node is avoided for a while", exc_info=error)
    return KVPoolError.reason.lower()
