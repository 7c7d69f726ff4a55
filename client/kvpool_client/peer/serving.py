"""The data port's side of one connection: capabilities checked, pieces sent and received.

Rules
  - Nothing is sent or taken without a capability that holds at that moment, and a slot is sent only while its header
    says what the capability names. Who stalls is asked for that again before it gets more.
  - A write is registered (writes.py) from its first mark to its end. Marks, barrier, a look at the epoch, then the
    payload: either whoever obeys a new epoch finds the marks, or the write sees the new epoch and stops.
  - What is committed under a stamp is not written again under it, and nothing is written over a newer stamp. A write
    that breaks off leaves its slots WRITING: the same stamp may try again, or its slots are fenced and cleared.
  - Loads go before stores: a write waits, STORE_WAIT_S at most, until no read is under way. Meanwhile its peer waits
    for GO and has sent nothing.
  - A frame that cannot be is answered, and ends the connection; a refusal is answered, and does not.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, Protocol

import numpy as np

from kvpool_client.headers import COMMITTED, PEER_WRITER, SLOT_HEADER, U64, WRITING, Array, Barrier, checks_at
from kvpool_client.owned_segment import OwnedSegment
from kvpool_client.peer import wire
from kvpool_client.peer.counting import Account
from kvpool_client.peer.grants import Placed, Presented
from kvpool_client.peer.judging import Flags, held, portions, same, sums_of, why_not
from kvpool_client.peer.keyring import Keyring
from kvpool_client.peer.stream import Stream
from kvpool_client.peer.wire import Answer, Ask
from kvpool_client.peer.writes import PeerWrites
from kvpool_client.runs import Run, count, head, headers_of, places_of, put_headers, stamps_of
from kvpool_client.slot_table import can_be
from kvpool_proto.capability import READ, RUN, WRITE, Op
from kvpool_proto.errors import (
    BadCapability,
    KVPoolError,
    PeerBusy,
    ProtocolError,
    ReservationEnded,
    SlabChanged,
    StaleEpoch,
)
from kvpool_proto.geometry import slot_bytes_for

STORE_WAIT_S: Final = 0.05


class PeerHost(Protocol):
    """What the data port asks of its node. Thread safe."""

    writes: PeerWrites
    keyring: Keyring

    @property
    def epoch(self) -> int:
        """The highest that is obeyed."""
        ...

    def segment_of(self, epoch: int, handle: int) -> OwnedSegment:
        """What that epoch calls so. Raises UnknownSegment."""
        ...


class LoadsFirst:
    """Counts reads that are under way, so that writes can let them go first. Calling it waits for that."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._loads = 0

    @contextmanager
    def load(self) -> Generator[None, None, None]:
        """A read is under way."""
        with self._changed:
            self._loads += 1
        try:
            yield
        finally:
            with self._changed:
                self._loads -= 1
                self._changed.notify_all()

    def __call__(self) -> None:
        """Return when none is, after STORE_WAIT_S at the latest."""
        with self._changed:
            self._changed.wait_for(lambda: not self._loads, STORE_WAIT_S)


class Talk:
    """One connection, from hello to its end. peer: the other side's host, for the log. frame_s: for one frame."""

    def __init__(
        self, stream: Stream, peer: str, host: PeerHost, loads: LoadsFirst, account: Account, frame_s: float
    ) -> None:
        self._stream = stream
        self._peer = peer
        self._host = host
        self._loads = loads
        self._account = account
        self._frame_s = frame_s
        self._presented = Presented()
        self._barrier = Barrier()

    def hello(self, busy: str) -> bool:
        """Open it. busy: why it is not served, which it is told; then, and when it is not understood, False."""
        stream = self._stream
        stream.within(self._frame_s)
        try:
            head = stream.receive(wire.HEAD.size)
            kind, _, size_bytes = wire.body_bytes(head)
            wire.check_hello(head, stream.receive(size_bytes) if kind == wire.HELLO else b"")
            if busy:
                raise PeerBusy(busy)
        except (ProtocolError, PeerBusy) as error:
            self._answer(self._refused(error))
            return False
        stream.send([wire.pack_hello()])
        return True

    def serve(self, idle_s: float) -> None:
        """Answer until the other side closes, or is idle for too long, or breaks a rule. Raises OSError, EOFError."""
        stream, io_s = self._stream, self._stream.io_s
        while True:
            stream.io_s = idle_s
            stream.within(idle_s)
            head = stream.receive(wire.HEAD.size)
            stream.io_s = io_s
            stream.within(self._frame_s)
            try:
                kind, number, size_bytes = wire.body_bytes(head)
                self._take(kind, number, stream.receive(size_bytes))
            except ProtocolError as error:
                stream.within(self._frame_s)
                self._answer(self._refused(error))
                return

    def _take(self, kind: int, number: int, body: bytes) -> None:
        """One frame. Raises ProtocolError for one that cannot be."""
        if kind == wire.GRANT:
            self._present(number, body)
        elif kind == wire.ASK_READ:
            self._read(wire.parse_ask(number, body)[0])
        elif kind == wire.ASK_WRITE:
            ask, headers = wire.parse_ask(number, body)
            if len(headers) != ask.blocks or not wire.seal_holds(headers):
                raise ProtocolError("headers that are none, or were damaged on their way")
            self._write(ask, headers)
        else:
            raise ProtocolError("a second hello")

    def _present(self, number: int, body: bytes) -> None:
        grant = wire.parse_grant(body)
        runs = len(grant.table) // RUN.itemsize
        try:
            self._host.keyring.check(grant)
            placed = Placed(grant, lambda handle: self._host.segment_of(grant.epoch, handle))
            self._presented.put(number, placed, runs)
        except KVPoolError as error:  # said when the number is used
            self._presented.put(number, error, 0)

    def _placed(self, number: int, op: Op) -> Placed:
        """The capability of that number, for this. Raises KVPoolError unless it holds now."""
        found = self._presented.get(number)
        if found is None:
            raise BadCapability("no capability has this number")
        if isinstance(found, KVPoolError):
            raise found
        if found.grant.op != op:
            raise BadCapability("the capability is for something else")
        self._host.keyring.check_term(found.grant)
        return found

    def _refused(self, error: KVPoolError) -> Answer:
        answer = wire.refusal(error)
        if isinstance(error, SlabChanged):
            self._account.missed(answer.reason)
        else:
            self._account.refused(self._peer, answer.reason, answer.text)
        return answer

    def _answer(self, answer: Answer) -> None:
        self._stream.send([wire.pack_answer(answer)])

    # -- reading ---------------------------------------------------------------------------------------

    def _read(self, ask: Ask) -> None:
        with self._loads.load():
            try:
                placed = self._placed(ask.number, READ)
                runs = placed.runs(ask.at, ask.blocks, ask.part_bytes)
                answer, headers = self._look(placed, runs, ask.part_bytes)
            except KVPoolError as error:
                self._stream.within(self._frame_s)
                self._answer(self._refused(error))
                return
            if answer.reason:
                self._account.missed(answer.reason)
            kept = head(runs, answer.blocks)
            pieces = _payload(kept, ask.part_bytes) if kept else []
            self._stream.until_s = float("inf")  # however long it takes, if only it moves

            def check() -> None:
                self._check_still(placed, kept, headers, ask.part_bytes)

            self._stream.send([wire.pack_answer(answer), headers.tobytes(), *pieces], check)
            self._stream.send([_now(kept, ask.part_bytes).tobytes()])
            self._account.read(answer.blocks, answer.blocks * ask.part_bytes)

    def _look(self, placed: Placed, runs: Sequence[Run], part_bytes: int) -> tuple[Answer, Array]:
        """How many leading blocks can be sent, and their headers."""
        grant, slot_bytes = placed.grant, slot_bytes_for(part_bytes)
        found: list[Array] = []
        done = 0
        for run in runs:
            try:
                headers = headers_of([run], slot_bytes)
                sound = headers["check"] == checks_at(headers, places_of([run], slot_bytes))
            except SlabChanged as error:
                return wire.refusal(error, done), _joined(found)
            good = sound & held(headers, grant.namespace, grant.part, part_bytes, np.full(1, run.stamp, np.uint64))
            if not good.all():
                first = int(np.argmin(good))
                reason = why_not(headers[first], run.stamp, bool(sound[first]))
                return Answer(False, done + first, reason), _joined([*found, headers[:first]])
            found.append(headers)
            done += run.blocks
        return Answer(False, done), _joined(found)

    def _check_still(self, placed: Placed, runs: Sequence[Run], headers: Array, part_bytes: int) -> None:
        """The peer kept us waiting: may it still have this? Raises ConnectionAbortedError: there is no other way."""
        try:
            self._host.keyring.check_term(placed.grant)
            still = bool(same(_now(runs, part_bytes), headers).all())
        except KVPoolError:
            still = False
        if not still:
            self._account.missed("stale_stamp")
            raise ConnectionAbortedError("the slots changed while the peer kept us waiting")

    # -- writing ---------------------------------------------------------------------------------------

    def _write(self, ask: Ask, headers: Array) -> None:
        self._stream.within(self._frame_s)
        try:
            placed = self._placed(ask.number, WRITE)
            runs = placed.runs(ask.at, ask.blocks, ask.part_bytes)
            self._check_headers(placed, runs, headers, ask.part_bytes)
            self._loads()
            with ExitStack() as open_writes:
                for run in runs:
                    slots = range(run.slot, run.slot + run.blocks * run.stride, run.stride)
                    open_writes.enter_context(
                        self._host.writes.under(run.segment, slots, run.stamp, self._stream.abort)
                    )
                answer = self._write_registered(placed, runs, headers, ask)
        except KVPoolError as error:
            answer = self._refused(error)
        self._stream.within(self._frame_s)
        self._answer(answer)

    def _check_headers(self, placed: Placed, runs: Sequence[Run], headers: Array, part_bytes: int) -> None:
        grant = placed.grant
        good = held(headers, grant.namespace, grant.part, part_bytes, stamps_of(runs))
        if not (good & can_be(headers, slot_bytes_for(part_bytes))).all():
            raise BadCapability("headers of other blocks than the capability is for")

    def _write_registered(self, placed: Placed, runs: Sequence[Run], headers: Array, ask: Ask) -> Answer:
        """What to answer in the end. Raises KVPoolError."""
        part_bytes = ask.part_bytes
        slot_bytes = slot_bytes_for(part_bytes)
        places = places_of(runs, slot_bytes)
        there = self._there(headers_of(runs, slot_bytes), headers, places)
        if there[0]:
            return Answer(False, len(there) if there.all() else int(np.argmin(there)))
        blocks = int(np.argmax(there)) if there.any() else len(headers)
        runs, headers, places = head(runs, blocks), headers[:blocks], places[:blocks]
        self._host.keyring.check_term(placed.grant)  # loads may have taken a while
        self._mark(runs, headers, places, slot_bytes, WRITING, np.zeros(blocks, dtype=np.uint64))
        if self._host.epoch != placed.grant.epoch:
            raise StaleEpoch("another life of the Master rules")
        pieces = _payload(runs, part_bytes)
        self._answer(Answer(True, blocks))
        self._stream.until_s = float("inf")
        found: list[U64] = []
        for some in portions(pieces, part_bytes) if ask.hashed else [pieces]:
            self._stream.receive_into(some)
            found.append(sums_of(some, part_bytes) if ask.hashed else np.zeros(blocks, dtype=np.uint64))
        sums = np.frombuffer(self._stream.receive(8 * blocks), dtype="<u8")
        if (sums != np.concatenate(found)).any():
            self._account.missed("verify_failed")
            return Answer(False, 0, "verify_failed")
        self._mark(runs, headers, places, slot_bytes, COMMITTED, sums)
        self._account.written(blocks, blocks * part_bytes)
        return Answer(False, blocks)

    def _there(self, found: Array, headers: Array, places: U64) -> Flags:
        """Which blocks are committed already. Raises ReservationEnded where slots are not to be written."""
        sound = found["check"] == checks_at(found, places)
        ours = sound & (found["state"] == COMMITTED) & (found["stamp"] == headers["stamp"])
        there = ours & (found["key"] == headers["key"])
        if (ours & ~there).any():
            raise ReservationEnded("the slots hold other blocks under this stamp")
        if (sound & (found["state"] != 0) & (found["stamp"] > headers["stamp"])).any():
            raise ReservationEnded("the slots hold something newer")
        return there

    def _mark(
        self, runs: Sequence[Run], headers: Array, places: U64, slot_bytes: int, state: int, checksums: U64
    ) -> None:
        """Write the headers, parted by barriers from what comes before and after."""
        marks = headers.copy()
        marks["state"], marks["checksum"], marks["worker_id"] = state, checksums, PEER_WRITER
        marks["check"] = checks_at(marks, places)
        self._barrier()
        put_headers(runs, marks, slot_bytes)
        self._barrier()


def _payload(runs: Sequence[Run], part_bytes: int) -> list[memoryview]:
    """The bytes of the blocks where they lie, in as few pieces as there can be. Raises SlabChanged."""
    slot_bytes = slot_bytes_for(part_bytes)
    pieces: list[memoryview] = []
    for run in runs:
        slots = run.slots(slot_bytes)[:, :part_bytes]
        if slots.flags.c_contiguous:
            pieces.append(slots.reshape(-1).data)
        else:
            pieces += [slot.data for slot in slots]
    return pieces


def _now(runs: Sequence[Run], part_bytes: int) -> Array:
    """The headers as they are; zeros if a slab was bound anew meanwhile."""
    try:
        return headers_of(runs, slot_bytes_for(part_bytes))
    except SlabChanged:
        return np.zeros(count(runs), dtype=SLOT_HEADER)


def _joined(found: Sequence[Array]) -> Array:
    return np.concatenate(found) if found else np.empty(0, dtype=SLOT_HEADER)
