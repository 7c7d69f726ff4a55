"""What travels between a data port and those who use it: frames, their layouts, their limits. No I/O.

The side that connects asks, the data port answers; little-endian all through. A frame is 8 bytes of head (kind u8,
nothing u8, number u16, body bytes u32), then its body, of at most BODY_BYTES_MAX for its kind:

  HELLO   magic 8, version u16, nothing 6. First on a connection, answered by the same.
  GRANT   a capability (_GRANT), then its table of runs. `number` names it on this connection from now on. Not
          answered: what is wrong with it is the answer to whoever names it.
  READ    at u32, blocks u32, hashed u32, nothing 4, part_bytes u64, of grant `number`. Answered by ANSWER, then, for
          the leading blocks that can be had: their slots' headers, part_bytes of each, the headers again as they were
          when all was sent.
  WRITE   the same, then a header for each block: COMMITTED, and in `check` what sealed() computes, for TCP's own sum
          is weak. Answered by ANSWER: so many leading blocks are there already, or why none can be written; or by
          GO: so many leading blocks are wanted. After GO, part_bytes of each of these, then a u64 of each: its
          checksum, or 0 unless `hashed`. At last ANSWER: they are written, all or none.
  ANSWER, GO   8 bytes of head too: kind u8, nothing u8, text bytes u16, blocks u32; then the text: reason, newline,
          words for people; empty if nothing is wrong.

Rules
  - Every length is bounded before anything is allocated for it, and what a block is is said by a grant, not by lengths.
  - A reason is one of REASONS; another one counts as "protocol": what a peer says ends up in metrics.
  - Another version of this is another `version`; a data port that does not speak it says so in ANSWER.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np

from kvpool_client.headers import SLOT_HEADER, Array, checks_at
from kvpool_client.peer.copies import Grant
from kvpool_proto.capability import MAC_BYTES, READ, RUN, RUNS_MAX, WRITE
from kvpool_proto.errors import BY_REASON, KVPoolError, ProtocolError
from kvpool_proto.geometry import SLOT_HEADER_BYTES

MAGIC: Final = b"kvpooldp"
VERSION: Final = 1

HELLO: Final = 1
GRANT: Final = 2
ASK_READ: Final = 3
ASK_WRITE: Final = 4
ANSWER: Final = 16
GO: Final = 17

PIECE_BLOCKS_MAX: Final = 1024
PIECE_BYTES_MAX: Final = 64 << 20
"""Payload of one READ or WRITE of more than one block; a single block may have more."""
PART_BYTES_MAX: Final = 1 << 40
HASH_BYTES: Final = 4 << 20
"""Payload is hashed in portions of about so much, each as soon as it came, or just before it goes: it is still in a
cache then, and the connection is busy with the portion before or behind."""
TEXT_BYTES_MAX: Final = 512
GRANTS_MAX: Final = 64
GRANT_RUNS_MAX: Final = 4 * RUNS_MAX
"""Capabilities that a connection keeps, and runs in all their tables; the oldest go first."""

HEAD: Final = struct.Struct("<BxHI")
_HELLO: Final = struct.Struct("<8sH6x")
_GRANT: Final = struct.Struct(f"<BxHxxxxQQ16s{MAC_BYTES}s")
_ASK: Final = struct.Struct("<III4xQ")

BODY_BYTES_MAX: Final = {
    HELLO: _HELLO.size,
    GRANT: _GRANT.size + RUNS_MAX * RUN.itemsize,
    ASK_READ: _ASK.size,
    ASK_WRITE: _ASK.size + PIECE_BLOCKS_MAX * SLOT_HEADER_BYTES,
}
_BODY_BYTES_MIN: Final = {HELLO: _HELLO.size, GRANT: _GRANT.size + RUN.itemsize, ASK_READ: _ASK.size}
_BODY_BYTES_MIN[ASK_WRITE] = _ASK.size + SLOT_HEADER_BYTES

MISSES: Final = ("stale_stamp", "torn_header", "wrong_block", "verify_failed")
"""Reasons of a data port that are no errors: the slots hold something else."""
REASONS: Final = frozenset({*MISSES, *(reason.lower() for reason in BY_REASON)})


class Ask(NamedTuple):
    """A READ or WRITE. number: the grant's. at: the first block, counted through the grant's table.

    hashed: checksums come with the payload of a WRITE.
    """

    number: int
    at: int
    blocks: int
    hashed: bool
    part_bytes: int


class Answer(NamedTuple):
    """What a data port says. go: payload is wanted. reason: one of REASONS, or empty."""

    go: bool
    blocks: int
    reason: str = ""
    text: str = ""


def pack_hello() -> bytes:
    """The frame that opens a connection, either way."""
    return HEAD.pack(HELLO, 0, _HELLO.size) + _HELLO.pack(MAGIC, VERSION)


def check_hello(head: bytes, body: bytes) -> None:
    """Raises ProtocolError unless the other side opens with what we speak."""
    kind, _, _ = HEAD.unpack(head)
    if kind != HELLO or len(body) != _HELLO.size or body[: len(MAGIC)] != MAGIC:
        raise ProtocolError("the other side does not speak our protocol")
    version = _HELLO.unpack(body)[1]
    if version != VERSION:
        raise ProtocolError(f"the other side speaks version {version}, this one {VERSION}")


def body_bytes(head: bytes) -> tuple[int, int, int]:
    """(kind, number, bytes of the body) of a frame that asks. Raises ProtocolError for one that cannot be."""
    kind, number, size_bytes = HEAD.unpack(head)
    if kind not in BODY_BYTES_MAX:
        raise ProtocolError(f"a frame of kind {kind}")
    if not _BODY_BYTES_MIN[kind] <= size_bytes <= BODY_BYTES_MAX[kind]:
        raise ProtocolError(f"a frame of kind {kind} with {size_bytes} bytes")
    return kind, number, size_bytes


def pack_grant(number: int, grant: Grant) -> bytes:
    """The frame that presents a capability."""
    head = _GRANT.pack(grant.op, grant.part, grant.epoch, grant.valid_until_ms, grant.namespace, grant.mac)
    return HEAD.pack(GRANT, number, len(head) + len(grant.table)) + head + grant.table


def parse_grant(body: bytes) -> Grant:
    """What was presented, with no address. Raises ProtocolError."""
    op, part, epoch, valid_until_ms, namespace, mac = _GRANT.unpack_from(body)
    table = body[_GRANT.size :]
    if op not in (READ, WRITE) or len(table) % RUN.itemsize:
        raise ProtocolError("a capability that is none")
    return Grant("", "", op, epoch, valid_until_ms, namespace, part, table, mac)


def pack_ask(kind: int, ask: Ask, headers: Array | None = None) -> bytes:
    """A READ or WRITE. headers: SLOT_HEADER, sealed()."""
    told = b"" if headers is None else headers.tobytes()
    body = _ASK.pack(*ask[1:])
    return HEAD.pack(kind, ask.number, len(body) + len(told)) + body + told


def parse_ask(number: int, body: bytes) -> tuple[Ask, Array]:
    """A READ or WRITE, and the headers that came with it. Raises ProtocolError for more than we do in one go."""
    at, blocks, hashed, part_bytes = _ASK.unpack_from(body)
    ask = Ask(number, at, blocks, bool(hashed), part_bytes)
    if not 1 <= ask.blocks <= PIECE_BLOCKS_MAX or not 1 <= ask.part_bytes <= PART_BYTES_MAX:
        raise ProtocolError(f"{ask.blocks} blocks of {ask.part_bytes} bytes")
    if ask.blocks > 1 and ask.blocks * ask.part_bytes > PIECE_BYTES_MAX:
        raise ProtocolError(f"{ask.blocks * ask.part_bytes} bytes in one piece; at most {PIECE_BYTES_MAX}")
    if (len(body) - _ASK.size) % SLOT_HEADER_BYTES:
        raise ProtocolError("headers that are none")
    return ask, np.frombuffer(body, dtype=SLOT_HEADER, offset=_ASK.size).copy()


def pack_answer(answer: Answer) -> bytes:
    """The head of an answer and its text."""
    text = f"{answer.reason}\n{answer.text}".encode()[:TEXT_BYTES_MAX] if answer.reason else b""
    return HEAD.pack(GO if answer.go else ANSWER, len(text), answer.blocks) + text


def text_bytes(head: bytes) -> tuple[bool, int, int]:
    """(go, blocks, bytes of the text that follows) of an answer. Raises ProtocolError."""
    kind, size_bytes, blocks = HEAD.unpack(head)
    if kind not in (ANSWER, GO) or size_bytes > TEXT_BYTES_MAX:
        raise ProtocolError("the data port answers what is no answer")
    return kind == GO, blocks, size_bytes


def answer_of(go: bool, blocks: int, told: bytes) -> Answer:
    """An answer, with its text."""
    reason, _, text = told.decode(errors="replace").partition("\n")
    return Answer(go, blocks, reason if reason in REASONS or not reason else "protocol", text)


def refusal(error: KVPoolError, blocks: int = 0) -> Answer:
    """An error as an answer."""
    return Answer(False, blocks, error.reason.lower(), str(error))


def sealed(headers: Array) -> Array:
    """The same headers with a check of their fields alone, as they travel in a WRITE."""
    told = headers.copy()
    told["check"] = checks_at(told, np.zeros(len(told), dtype=np.uint64))
    return told


def seal_holds(headers: Array) -> bool:
    """Are these what sealed() made?"""
    return bool((headers["check"] == checks_at(headers, np.zeros(len(headers), dtype=np.uint64))).all())
