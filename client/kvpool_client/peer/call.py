"""One read or write at one data port: what its threads share, and what each does with its pieces.

Rules: see engine.py.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvpool_client.clock import Clock
from kvpool_client.devices.base import Bytes
from kvpool_client.peer.connection import Arrived, Connection, Hashing
from kvpool_client.peer.copies import PeerCopy
from kvpool_client.peer.judging import agree, same
from kvpool_client.peer.pieces import Piece, Turns, cut, leading
from kvpool_client.peer.pool import Connections
from kvpool_client.peer.stream import beyond
from kvpool_client.transfer import PROGRESS_BYTES
from kvpool_client.transfer_engine import Progress, Term
from kvpool_proto.errors import KVPoolError


@dataclass(frozen=True, slots=True)
class Means:
    """What an engine's calls use. step: every which block is hashed; 0: none. lanes: connections of one call."""

    connections: Connections
    clock: Clock
    step: int
    lanes: int
    piece_bytes: int


class Call:
    """turns: how far it came. stopped: why progress() ended it. confirmed: see Written."""

    def __init__(self, means: Means, copies: Sequence[PeerCopy], term: Term, progress: Progress = lambda _: "") -> None:
        self.means = means
        self.copies = copies
        self.turns = Turns(copies, cut(copies, means.piece_bytes, means.lanes))
        self.lanes = min(means.lanes, len(self.turns.pieces))
        self.stopped = ""
        self.confirmed = True
        self.until_s = means.clock.precise_s() + term.left_s()
        self._term = term
        self._progress = progress
        self._caller = threading.get_ident()
        self._unreported_bytes = 0

    def read(self) -> None:
        """What each thread of a read does."""
        _Reading(self).run()

    def write(self) -> None:
        """What each thread of a write does."""
        _Writing(self).run()

    def next(self) -> Piece | None:
        """The next piece to begin; None: there is none any more."""
        piece = self.turns.take()
        reason = self._term.ended(()) if piece is not None else ""
        if piece is not None and reason:
            self.turns.ended(piece, 0, reason)
            return None
        return piece

    def reason(self, error: KVPoolError | OSError | EOFError) -> str:
        """What an error is called."""
        if isinstance(error, KVPoolError):
            return error.reason.lower()
        if isinstance(error, TimeoutError) and self.means.clock.precise_s() >= self.until_s:
            return self._term.reason
        return "peer_unreachable"

    def report(self, written_bytes: int) -> None:
        """Tell progress() now and then, in the caller's thread."""
        self._unreported_bytes += written_bytes
        if self._unreported_bytes >= PROGRESS_BYTES and threading.get_ident() == self._caller:
            self._unreported_bytes = 0
            self.stopped = self._progress([blocks for blocks, _ in self.turns.totals()])
            if self.stopped:
                self.turns.stop()


class _Enough(Exception):
    """The call has ended while an answer is on its way that nobody wants any more."""


class _Lane:
    """One thread and its connection.

    pending: pieces begun, and how many blocks of each are done already; the first `asked` have been asked for.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.memory = _Memory()
        self.pending: deque[tuple[Piece, int]] = deque()
        self.asked = 0
        self.broke = False
        """A connection broke that may have passed on a question."""

    def run(self) -> None:
        """Do pieces until there are no more."""
        means = self.call.means
        self.begin()
        for fresh in (False, True):
            if not self.pending:
                return
            connection: Connection | None = None
            self.asked = 0
            try:
                address = self.call.copies[0].grant.address
                with means.connections.use(address, self.call.until_s, fresh=fresh) as connection:
                    while self.pending:
                        self.step(connection)
                        if not self.pending:
                            self.begin()
                    return
            except _Enough:
                self.fail("")
            except (KVPoolError, OSError, EOFError) as error:
                self.broke = self.broke or connection is not None
                kept = connection is not None and connection.reused and not connection.answered
                if fresh or not kept or not isinstance(error, (ConnectionError, EOFError)):
                    self.fail(self.call.reason(error))

    def begin(self) -> None:
        """Begin one piece more, if there is one."""
        piece = self.call.next()
        if piece is not None:
            self.pending.append((piece, 0))

    def ended(self, done: int, reason: str) -> None:
        """The first of `pending` is over."""
        piece, _ = self.pending.popleft()
        self.asked -= 1
        self.call.turns.ended(piece, done, reason)

    def fail(self, reason: str) -> None:
        """All of `pending` are."""
        while self.pending:
            piece, done = self.pending.popleft()
            self.call.turns.ended(piece, done, reason)

    def step(self, connection: Connection) -> None:
        """Ask for what is pending, and be done with the first of it."""
        raise NotImplementedError


class _Reading(_Lane):
    """The next piece is asked for before the present one has come."""

    def step(self, connection: Connection) -> None:
        """See _Lane."""
        if len(self.pending) == 1:
            self.begin()
        for piece, _ in list(self.pending)[self.asked :]:
            copy = self.call.copies[piece.copy]
            if self.asked and not connection.goes_ahead(copy.grant):
                break
            connection.ask_read(copy.grant, piece.at, piece.blocks, copy.part_bytes)
            self.asked += 1
        piece, _ = self.pending[0]
        copy, step = self.call.copies[piece.copy], self.call.means.step
        hashing = Hashing(step, random.randrange(max(step, 1)))
        into, staged = self.memory.of(copy, piece)
        arrived = connection.take_read(piece.blocks, copy.part_bytes, into, hashing)
        good, reason = _judge(copy, piece, arrived, hashing)
        if staged is not None:
            at = 0
            for span in leading(piece.spans, good):
                copy.buffer.scatter(span.first, staged[at : at + span.blocks])
                at += span.blocks
        self.ended(good, reason)
        if self.pending and not any(self.call.turns.wants(piece) for piece, _ in self.pending):
            if self.asked:
                raise _Enough  # and the connection goes with it: to wait for the answer would take as long as a piece
            self.fail("")


class _Writing(_Lane):
    """The next piece is asked for when the present one is sent, and before the data port has said what became of it."""

    def step(self, connection: Connection) -> None:
        """See _Lane."""
        piece, done = self.pending[0]
        copy, hashed = self.call.copies[piece.copy], self.call.means.step > 0
        if not self.asked:
            self._ask(connection, piece, done)
        answer = connection.take_go(piece.blocks - done)
        if answer.go:
            payload, staged = self.memory.of(copy, piece)
            if staged is not None:
                at = 0
                for span in piece.spans:
                    copy.buffer.gather(span.first, staged[at : at + span.blocks])
                    at += span.blocks
            connection.pay(answer.blocks, copy.part_bytes, beyond(payload, done * copy.part_bytes), hashed)
            if len(self.pending) == 1:
                self.begin()
            if len(self.pending) > 1:
                self._ask(connection, *self.pending[1])
            answer = connection.take_written(answer.blocks)
        done += answer.blocks
        if not answer.reason and done < piece.blocks:  # some were there already
            self.pending[0] = (piece, done)
            self.pending.rotate(-1)
            self.asked -= 1
            return
        if answer.reason and self.broke:
            self.call.confirmed = False
        self.ended(done, answer.reason)
        self.call.report(done * copy.slot_bytes)

    def _ask(self, connection: Connection, piece: Piece, done: int) -> None:
        copy = self.call.copies[piece.copy]
        headers = copy.headers[piece.start + done : piece.start + piece.blocks]
        connection.ask_write(copy.grant, piece.at + done, headers, copy.part_bytes, self.call.means.step > 0)
        self.asked += 1

    def fail(self, reason: str) -> None:
        """See _Lane."""
        self.call.confirmed = self.call.confirmed and not self.broke
        super().fail(reason)


def _judge(copy: PeerCopy, piece: Piece, arrived: Arrived, hashing: Hashing) -> tuple[int, str]:
    """How many leading blocks that arrived are right, and why the next is not."""
    arrived_blocks = len(arrived.before)
    good, reason = agree(arrived.before, copy.headers[piece.start : piece.start + arrived_blocks])
    if good == arrived_blocks < piece.blocks:
        reason = arrived.reason or "protocol"
    if not good:
        return 0, reason
    before = arrived.before[:good]
    stands = same(before, arrived.after[:good])
    right = stands.copy()
    if hashing.step:
        chosen = slice(hashing.first, None, hashing.step)
        right[chosen] &= (arrived.sums[:good] == before["checksum"])[chosen]
    if right.all():
        return good, reason
    first = int(np.argmin(right))
    if not stands[first]:
        return first, "stale_stamp"
    return first, "verify_failed" if before["checksum"][first] else "unverified"  # stored with verify off


class _Memory:
    """Where a thread's pieces lie: in the buffers themselves, or in memory of its own where these cannot be reached."""

    def __init__(self) -> None:
        self._own: Bytes = np.empty(0, dtype=np.uint8)

    def of(self, copy: PeerCopy, piece: Piece) -> tuple[list[memoryview], Bytes | None]:
        """The bytes of the piece's blocks, and the slots to gather them into or scatter them from, if there are any."""
        views: list[memoryview] = []
        for span in piece.spans:
            some = copy.buffer.pieces(span.first, span.blocks)
            if some is None:
                break
            views += some
        else:
            return views, None
        size_bytes = piece.blocks * copy.slot_bytes
        if len(self._own) < size_bytes:
            self._own = np.empty(size_bytes, dtype=np.uint8)
        slots = self._own[:size_bytes].reshape(piece.blocks, copy.slot_bytes)
        return [slot.data for slot in slots[:, : copy.part_bytes]], slots
