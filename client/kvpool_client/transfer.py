"""Copies between slots and an engine's buffers, checked: never wrong bytes.

Rules
  - A read is good only if the headers say what was asked for before the copy, say the same after it, and the bytes
    in the slots, hashed after the copy, have the checksum that the headers carry. A slot whose header stands still
    and whose bytes are right after the copy held the right bytes during it.
  - A write marks the headers WRITING, then copies, then marks them COMMITTED with the checksums of what was copied;
    barriers between. A copy that went wrong has another checksum than its header says, which makes it a miss.
  - Copies go in pieces of bounded size, each through the gate. Before each piece the deadline is checked, and for a
    write that no newer epoch rules: a writer that wakes late spoils a piece at most.
  - A write looks at the epoch once more between its marks and the payload: either the node client, which first obeys
    and then scans, finds the marks, or the writer sees the new epoch, stops, and leaves the marks.
  - Nothing is raised for what others did: a Copied says how many leading blocks are good, and why not more.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import TIMEOUT_MAX
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool_client.devices.base import Buffer, Device
from kvpool_client.gate import CopyGate
from kvpool_client.headers import (
    COMMITTED,
    KEY_FIELD_BYTES,
    PARENT_KEY,
    PARENT_ROOT,
    SLOT_HEADER,
    U64,
    WRITING,
    Array,
    Barrier,
    checks_at,
    pack_keys,
)
from kvpool_client.runs import (
    Blocks,
    Run,
    before,
    block_at,
    count,
    cut,
    head,
    headers_of,
    places_of,
    put_headers,
    stamps_of,
    windows,
)
from kvpool_client.transfer_engine import Copied as Copied
from kvpool_client.transfer_engine import Progress, Written
from kvpool_client.transfer_engine import Term as Term
from kvpool_client.transfer_engine import Verify as Verify
from kvpool_proto.errors import KVPoolError
from kvpool_proto.namespace import NamespaceSpec

SAMPLE_EVERY: Final = 8
PIECE_BYTES: Final = 32 << 20
TASK_BYTES: Final = 4 << 20
"""Copied, then hashed, in one go: small enough for the bytes to be in a cache when they are hashed."""
REPORTED: Final = ("verify_failed", "torn_header", "wrong_block", "stale_stamp")
"""Reasons for which the node client is asked to look at the block."""
PROGRESS_BYTES: Final = 64 << 20
"""A write reports its running total about this often."""


class PartCopy:
    """One part of a call, as far as it lies here: its runs and what their headers say, the engine's side.

    chain: the keys of the layout's blocks, of which `runs` name some, in order. parent_kind: PARENT_* of headers.py,
    of the first block; parent_key: empty unless that is PARENT_KEY; worker_id: the writer's number; readers compare
    none of these. Raises SlabChanged if a slab is not bound as `runs` say.
    """

    def __init__(
        self,
        spec: NamespaceSpec,
        part: int,
        chain: bytes,
        runs: list[Run],
        buffer: Buffer,
        parent_kind: int = PARENT_ROOT,
        parent_key: bytes = b"",
        worker_id: int = 0,
    ) -> None:
        self.part = part
        self.runs = runs
        self.buffer = buffer
        self.part_bytes = spec.part_bytes
        self.slot_bytes = spec.slot_bytes
        self.headers = expected_headers(spec, part, chain, runs, parent_kind, parent_key)
        """COMMITTED, one per block of `runs`; checksums and checks are not filled in."""
        self.headers["stamp"] = stamps_of(runs)
        self.headers["worker_id"] = worker_id
        self.places = places_of(runs, spec.slot_bytes)

    def writing(self) -> Array:
        """The same headers, WRITING and sealed: what the slots say during a write."""
        headers = self.headers.copy()
        headers["state"] = WRITING
        headers["check"] = checks_at(headers, self.places)
        return headers


def expected_headers(
    spec: NamespaceSpec, part: int, chain: bytes, runs: Sequence[Blocks], parent_kind: int, parent_key: bytes
) -> Array:
    """What the headers of a part's blocks say when these are committed, one per block of `runs`.

    The other arguments as for PartCopy; stamp, worker_id, checksum and check are not filled in.
    """
    keys = pack_keys(chain, spec.key_bytes)
    headers = np.zeros(len(keys), dtype=SLOT_HEADER)
    headers["state"] = COMMITTED
    headers["part"] = part
    headers["key_bytes"] = spec.key_bytes
    headers["parent_kind"] = PARENT_KEY
    headers["parent_kind"][:1] = parent_kind
    headers["namespace"] = np.void(spec.id)
    headers["key"] = keys
    headers["parent_key"][1:] = keys[:-1]
    headers["parent_key"][:1] = np.void(parent_key.ljust(KEY_FIELD_BYTES, b"\0"))
    headers["length_bytes"] = spec.part_bytes
    if count(runs) == len(headers):
        return headers
    return headers[np.concatenate([np.arange(run.first, run.first + run.blocks) for run in runs])]


class LocalEngine:
    """Memory copies from and into mapped segments. Thread safe; copies in the callers' threads, one piece at a time.

    copy_threads: how many threads share the copying of a piece; 1: the caller's own.
    """

    def __init__(
        self, device: Device, *, verify: Verify = "full", copy_threads: int = 1, piece_bytes: int = PIECE_BYTES
    ) -> None:
        self.device = device
        self._step = {"full": 1, "sampled": SAMPLE_EVERY, "off": 0}[verify]
        self._piece_bytes = piece_bytes
        self._gate = CopyGate()
        self._barrier = Barrier()  # used inside the gate only
        self._threads = ThreadPoolExecutor(copy_threads, "kvpool-copy") if copy_threads > 1 else None

    def close(self) -> None:
        """End the copying threads after the piece under way; what is copied later is copied by its caller alone."""
        with self._gate.load(TIMEOUT_MAX):
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()

    def read(self, copies: Sequence[PartCopy], term: Term) -> list[Copied]:
        """See TransferEngine. What lies behind the first block that is not right in some copy is not copied."""
        found = [Copied(0)] * len(copies)
        for turn in self._turns(copies):
            end: int | None = None
            for index, piece in turn:
                wanted = piece if end is None else before(piece, end)
                if wanted:
                    copied = self._read_piece(copies[index], found[index].blocks, wanted, term)
                    found[index] = Copied(found[index].blocks + copied.blocks, copied.reason, copied.bad)
                    end = end if copied.blocks == count(wanted) else block_at(wanted, copied.blocks)
            if end is not None:
                break
        self.device.publish()
        return found

    def write(self, copies: Sequence[PartCopy], term: Term, progress: Progress) -> Written:
        """See TransferEngine; always confirmed: when this has returned, nobody writes any more."""
        self.device.wait_sources()
        marks = [copy.writing() for copy in copies]
        written = [0] * len(copies)
        unreported_bytes = 0
        for turn in self._turns(copies):
            if unreported_bytes >= PROGRESS_BYTES:
                unreported_bytes = 0
                reason = progress(written)
                if reason:
                    return Written(written, reason)
            for index, piece in turn:
                copy = copies[index]
                reason = self._write_piece(copy, marks[index], written[index], piece, term)
                if reason:
                    return Written(written, reason)
                written[index] += count(piece)
                unreported_bytes += count(piece) * copy.slot_bytes
        return Written(written)

    def _turns(self, copies: Sequence[PartCopy]) -> list[list[tuple[int, list[Run]]]]:
        """What is copied one after the other: every turn has the same few blocks of all copies that have some.

        (number of the copy, its runs), at most about a piece together.
        """
        size_blocks = max(1, self._piece_bytes // max(sum(copy.slot_bytes for copy in copies), 1))
        pieces = [windows(copy.runs, size_blocks) for copy in copies]
        order = sorted({window for some in pieces for window in some})
        return [[(index, some[window]) for index, some in enumerate(pieces) if window in some] for window in order]

    def _read_piece(self, part: PartCopy, start: int, runs: list[Run], term: Term) -> Copied:
        """Copy `runs`, the part's blocks from the start-th on."""
        with self._gate.load(term.left_s()) as admitted:
            reason = term.ended(runs) if admitted else term.reason
            if reason:
                return Copied(0, reason)
            try:
                return self._read_checked(part, start, runs)
            except KVPoolError as error:  # a slab that was bound anew, extents that cannot be
                return Copied(0, error.reason.lower())

    def _read_checked(self, part: PartCopy, start: int, runs: list[Run]) -> Copied:
        before = headers_of(runs, part.slot_bytes)
        wanted = slice(start, start + len(before))
        good, reason = agree(before, part.headers[wanted], part.places[wanted])
        if good:
            kept = head(runs, good)
            sums = before["checksum"][:good].copy()
            self._move(part, kept, part.buffer.scatter, sums, self._step)
            self._barrier()
            after = headers_of(kept, part.slot_bytes)
            same = (_words(after) == _words(before[:good])).all(axis=1)
            right = same & (sums == after["checksum"])
            if not right.all():
                good = int(np.argmin(right))
                reason = "stale_stamp" if not same[good] else "verify_failed"
                if same[good] and not after["checksum"][good]:
                    reason = "unverified"  # stored with verify off
        return Copied(good, reason, _block(runs, good) if reason in REPORTED else None)

    def _write_piece(self, part: PartCopy, marks: Array, start: int, runs: list[Run], term: Term) -> str:
        """Copy into `runs`, the part's blocks from the start-th on; marks: part.writing(). Returns why not."""
        with self._gate.store(term.left_s()) as admitted:
            if not admitted:
                return term.reason
            blocks = slice(start, start + count(runs))
            try:
                return term.ended(runs) or self._write_marked(part, marks[blocks], part.places[blocks], runs, term)
            except KVPoolError as error:
                return error.reason.lower()

    def _write_marked(self, part: PartCopy, marks: Array, places: U64, runs: list[Run], term: Term) -> str:
        put_headers(runs, marks, part.slot_bytes)
        self._barrier()
        reason = term.overruled(runs)
        if reason:
            return reason  # the marks stay: who scans for the new epoch finds them, or finds the slots as they were
        sums = np.zeros(len(marks), dtype=np.uint64)
        self._move(part, runs, part.buffer.gather, sums, min(self._step, 1), part.buffer.rows)
        headers = marks.copy()
        headers["state"] = COMMITTED
        headers["checksum"] = sums
        headers["check"] = checks_at(headers, places)
        self._barrier()
        put_headers(runs, headers, part.slot_bytes)
        return ""

    def _move(
        self,
        part: PartCopy,
        runs: list[Run],
        move: Callable[[int, npt.NDArray[np.uint8]], None],
        sums: U64,
        step: int,
        source: Callable[[int, int], npt.NDArray[np.uint8] | None] = lambda first, blocks: None,
    ) -> None:
        """Copy, then hash every step-th slot into `sums`, one element per block; step 0: none.

        In tasks of bounded size, in this thread or in several. source: the bytes copied, hashed instead where they
        lie in one piece: the copy left them in the cache, while slots were perhaps written past it.
        """
        shift = random.randrange(SAMPLE_EVERY)

        def copy(task: tuple[int, list[Run]]) -> None:
            """Move the runs of a task: its first block's place in `sums`, its runs."""
            at, some = task
            for run in some:
                slots = run.slots(part.slot_bytes)
                move(run.first, slots)
                if step:
                    sampled = slice((shift - run.first) % step, None, step)
                    rows = source(run.first, run.blocks)
                    hashed = slots[:, : part.part_bytes] if rows is None else rows
                    sums[at : at + run.blocks][sampled] = _sums(hashed[sampled])
                at += run.blocks

        whole = self._threads is None and not step
        blocks = count(runs) if whole else max(1, TASK_BYTES // part.slot_bytes)
        tasks = [(index * blocks, some) for index, some in enumerate(cut(runs, blocks))]
        for _ in map(copy, tasks) if self._threads is None else self._threads.map(copy, tasks):
            pass


def _block(runs: list[Run], index: int) -> Run:
    last = head(runs, index + 1)[-1]
    return last.sub(last.blocks - 1, 1)


def _mask() -> U64:
    """Ones where a reader knows what a header says."""
    known = np.zeros(1, dtype=SLOT_HEADER)
    for name in (*_BLOCK_FIELDS, "state", "stamp"):
        known[name] = np.void(b"\xff" * known.dtype[name].itemsize).view(known.dtype[name])
    return _words(known)


def _words(headers: Array) -> U64:
    return headers.view(np.uint64).reshape(len(headers), -1)


_BLOCK_FIELDS: Final = ("namespace", "part", "key_bytes", "key", "length_bytes")
_KNOWN: Final = _mask()


def agree(found: Array, wanted: Array, places: U64) -> tuple[int, str]:
    """How many leading headers say what is wanted and are sound, and why the next does not."""
    sound = found["check"] == checks_at(found, places)
    good = sound & ~((_words(found) ^ _words(wanted)) & _KNOWN).any(axis=1)
    if good.all():
        return len(good), ""
    first = int(np.argmin(good))
    if found["state"][first] != COMMITTED or found["stamp"][first] != wanted["stamp"][first]:
        return first, "stale_stamp"
    return first, "wrong_block" if sound[first] else "torn_header"


def _sums(rows: npt.NDArray[np.uint8]) -> U64:
    return np.fromiter(map(xxhash.xxh3_64_intdigest, rows), np.uint64, len(rows))
