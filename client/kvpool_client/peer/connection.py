"""The asking side of one connection to a data port.

Rules
  - Answers come in the order of the questions, and the next question may be put before the present one is answered,
    so that neither side waits for the other between pieces: a READ at any time, if it is short enough to be taken
    while nobody reads it (goes_ahead); a WRITE as soon as the payload of the one before it is sent.
  - A capability is presented when it is first used here, in the same breath as the question.
  - After any error the connection is broken: nobody knows what would come next.
  - What the data port says is bounded by what was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from kvpool_client.headers import SLOT_HEADER, U64, Array
from kvpool_client.peer import wire
from kvpool_client.peer.copies import Grant
from kvpool_client.peer.grants import Numbered
from kvpool_client.peer.judging import portions, sums_of
from kvpool_client.peer.stream import Stream, up_to
from kvpool_client.peer.wire import Answer, Ask
from kvpool_proto.capability import RUN
from kvpool_proto.errors import BY_REASON, KVPoolError, ProtocolError

AHEAD_BYTES_MAX: Final = 16 << 10
"""The longest table that goes with a question ahead of time: the kernel has room for so much, whoever reads or not."""
_NUMBERS: Final = 1 << 16


class Hashing(NamedTuple):
    """Which blocks are hashed: first, first + step, ... of a piece. step 0: none."""

    step: int
    first: int = 0

    def sums(self, pieces: Sequence[memoryview], part_bytes: int, done: int) -> U64:
        """Checksums of the blocks in `pieces`, which come behind `done` others; 0 for those that are not chosen."""
        return sums_of(pieces, part_bytes, self.step, (self.first - done) % self.step)


class Arrived(NamedTuple):
    """What a READ brought. before, after: headers of the blocks that came, by when they were looked at.

    sums: of the bytes that came, as chosen.
    """

    before: Array
    after: Array
    sums: U64
    reason: str


class Connection:
    """Over a fresh stream; raises what that raises, ProtocolError, and the data port's refusal to talk at all.

    used_ms: when it was given back, for its pool. reused: it was in use before this use; answered: something was
    answered in this one.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.reused = False
        self.answered = False
        self.used_ms = 0
        self._presented: Numbered[bytes] = Numbered()
        self._number = 0
        stream.send([wire.pack_hello()])
        head = stream.receive(wire.HEAD.size)
        if head[0] == wire.ANSWER:
            answer = self._text(head)
            raise BY_REASON.get(answer.reason.upper(), KVPoolError)(answer.text)
        kind, _, size_bytes = wire.body_bytes(head)
        wire.check_hello(head, stream.receive(size_bytes) if kind == wire.HELLO else b"")

    def goes_ahead(self, grant: Grant) -> bool:
        """May a READ with this capability be asked for while payload is on its way to us?"""
        return self._number_of(grant) is not None or len(grant.table) <= AHEAD_BYTES_MAX

    def ask_read(self, grant: Grant, at: int, blocks: int, part_bytes: int) -> None:
        """Ask for the at-th block of the grant's table and those behind it."""
        self._ask(wire.ASK_READ, grant, Ask(0, at, blocks, False, part_bytes))

    def take_read(self, blocks: int, part_bytes: int, into: Sequence[memoryview], hashing: Hashing) -> Arrived:
        """The answer to the oldest question, which was for so much; part_bytes of each block go side by side `into`."""
        answer = self._answer(blocks)
        if answer.go:
            raise ProtocolError("the data port wants payload of a read")
        before, after = (np.empty(answer.blocks, dtype=SLOT_HEADER) for _ in range(2))
        sums = np.zeros(answer.blocks, dtype=np.uint64)
        if answer.blocks:
            pieces = up_to(into, answer.blocks * part_bytes)
            if not hashing.step:
                self.stream.receive_into([_raw(before), *pieces, _raw(after)])
            else:
                self.stream.receive_into([_raw(before)])
                done = 0
                for some in portions(pieces, part_bytes):
                    self.stream.receive_into(some)
                    found = hashing.sums(some, part_bytes, done)
                    sums[done : done + len(found)] = found
                    done += len(found)
                self.stream.receive_into([_raw(after)])
        return Arrived(before, after, sums, answer.reason)

    def ask_write(self, grant: Grant, at: int, headers: Array, part_bytes: int, hashed: bool) -> None:
        """Ask to write the blocks of `headers` (SLOT_HEADER, COMMITTED), the table's at-th and those behind it.

        hashed: checksums will come with them.
        """
        self._ask(wire.ASK_WRITE, grant, Ask(0, at, len(headers), hashed, part_bytes), wire.sealed(headers))

    def take_go(self, blocks: int) -> Answer:
        """The answer to the oldest question, to write so many blocks: at least one is there, or wanted, or refused."""
        answer = self._answer(blocks)
        if not answer.blocks and not answer.reason:
            raise ProtocolError("the data port wants nothing and does not say why")
        return answer

    def pay(self, blocks: int, part_bytes: int, payload: Sequence[memoryview], hashed: bool) -> None:
        """Send so many blocks, as GO said."""
        pieces = up_to(payload, blocks * part_bytes)
        if not hashed:
            self.stream.send([*pieces, bytes(8 * blocks)])
            return
        found: list[U64] = []
        for some in portions(pieces, part_bytes):
            found.append(sums_of(some, part_bytes))
            self.stream.send(some)
        self.stream.send([np.concatenate(found).tobytes()])

    def take_written(self, blocks: int) -> Answer:
        """What became of so many blocks that were sent: all are there, or none and the reason."""
        answer = self._answer(blocks)
        if answer.go or answer.blocks not in (0, blocks) or bool(answer.blocks) == bool(answer.reason):
            raise ProtocolError("the data port answers payload with something else")
        return answer

    def _ask(self, kind: int, grant: Grant, ask: Ask, headers: Array | None = None) -> None:
        frames: list[bytes] = []
        number = self._number_of(grant)
        if number is None:
            number = self._number
            self._number = (number + 1) % _NUMBERS
            self._presented.put(number, grant.mac, len(grant.table) // RUN.itemsize)
            frames.append(wire.pack_grant(number, grant))
        frames.append(wire.pack_ask(kind, ask._replace(number=number), headers))
        self.stream.send(frames)

    def _number_of(self, grant: Grant) -> int | None:
        return self._presented.number_of(lambda mac: mac == grant.mac)

    def _answer(self, blocks_max: int) -> Answer:
        head = self.stream.receive(wire.HEAD.size)
        self.answered = True
        answer = self._text(head)
        if answer.blocks > blocks_max:
            raise ProtocolError(f"the data port answers {answer.blocks} blocks of {blocks_max}")
        return answer

    def _text(self, head: bytes) -> Answer:
        go, blocks, size_bytes = wire.text_bytes(head)
        return wire.answer_of(go, blocks, self.stream.receive(size_bytes) if size_bytes else b"")


def _raw(headers: Array) -> memoryview:
    return headers.view(np.uint8).data
