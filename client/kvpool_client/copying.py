"""Copies of a peer's blocks into our own slots, by the Master's order: replicas, moves of a drain, copies on a hit.

Rules
  - Bytes come into memory of the copy's own first and are checked there: a slot is being written only while they are
    moved into it, however slow the peer is. What is not right is not moved.
  - The slots are registered like those of peers' writes: an order to clear them ends the copy.
  - Bounded: COPIES_MAX orders wait or are under way, COPY_THREADS at a time, bytes_max of memory in all. One order too
    many is answered as failed.
  - Copies give way to loads, for a bounded time.
  - An order belongs to its session: it ends with it, at a piece's border, and is not answered then. The Master orders
    again; blocks that are there already are not copied again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from kvpool_client.headers import (
    COMMITTED,
    PEER_WRITER,
    WRITING,
    Array,
    Barrier,
    checks_at,
    life,
    places,
)
from kvpool_client.logs import Log
from kvpool_client.outbox import Outbox
from kvpool_client.owned_segment import OwnedSegment
from kvpool_client.peer.copies import Grant
from kvpool_client.peer.wire import PIECE_BLOCKS_MAX, PIECE_BYTES_MAX
from kvpool_client.peer.writes import PeerWrites
from kvpool_client.session_messages import Copy
from kvpool_client.slot_table import can_be
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.capability import READ, part_table
from kvpool_proto.errors import KVPoolError, ReservationEnded, StaleEpoch
from kvpool_proto.geometry import SLOT_HEADER_BYTES, slot_bytes_for

COPIES_MAX: Final = 64
COPY_THREADS: Final = 2

_RAW_HEADER: Final = np.dtype((np.void, SLOT_HEADER_BYTES))
Rows = npt.NDArray[np.uint8]
"""Blocks of one part: uint8 (blocks, part_bytes)."""


class Puller(Protocol):
    """Reads blocks at peers' data ports. Thread safe."""

    def pull(self, grant: Grant, at: int, into: Sequence[memoryview]) -> tuple[Array, str]:
        """Read the at-th block of the grant's table and those behind it, one per element of `into`, part_bytes long.

        Returns the headers that the peer's slots had before and after, SLOT_HEADER, one for each block that came, and
        why not more came. They are not compared with anything else. Raises KVPoolError.
        """
        ...

    def close(self) -> None:
        """End what is under way: it raises KVPoolError."""
        ...


class CopyHost(Protocol):
    """What a copy asks of its node."""

    writes: PeerWrites

    @property
    def epoch(self) -> int:
        """The highest that is obeyed."""
        ...

    def segment_of(self, epoch: int, handle: int) -> OwnedSegment:
        """The segment with that handle. Raises UnknownSegment."""
        ...


class LoadsFirst(Protocol):
    """Waits until no load is under way, for a bounded time."""

    def __call__(self) -> None: ...


@dataclass(slots=True)
class CopyCounts:
    """Since the start. failed: orders that ended short. blocks, bytes: of those answered, all parts."""

    done: int = 0
    failed: int = 0
    blocks: int = 0
    bytes: int = 0


class _Over(Exception):
    """The order's session is over."""


class Copier:
    """Carries out orders until stop(); threads begin with the first. bytes_max: memory for bytes on their way."""

    def __init__(
        self, host: CopyHost, puller: Puller, outbox: Outbox, loads_first: LoadsFirst, *, bytes_max: int, log: Log
    ) -> None:
        self.counts = CopyCounts()
        self._host = host
        self._puller = puller
        self._outbox = outbox
        self._loads_first = loads_first
        self._piece_bytes = min(bytes_max // COPY_THREADS, PIECE_BYTES_MAX)
        self._log = log
        self._lock = threading.Lock()
        self._session = 0
        self._open = 0
        self._threads = ThreadPoolExecutor(COPY_THREADS, "kvpool-copies")

    @property
    def open_orders(self) -> int:
        """Orders that wait or are under way."""
        return self._open

    def submit(self, orders: Iterable[Copy], session: int) -> None:
        """Begin to carry out orders of this session, the outbox's number. Returns at once."""
        for order in orders:
            with self._lock:
                self._session = session
                admitted = self._open < COPIES_MAX
                self._open += admitted
            if admitted:
                self._threads.submit(self._run, order, session)
            else:
                self._answer(order, session, 0, "busy")

    def cancel(self) -> None:
        """The session is over, and its orders with it."""
        with self._lock:
            self._session = 0

    def stop(self) -> None:
        """End what is under way; returns when nothing is."""
        self.cancel()
        self._puller.close()
        self._threads.shutdown(cancel_futures=True)

    def _run(self, order: Copy, session: int) -> None:
        try:
            self._check_session(session)
            blocks, why = self._copy(order, session)
            self._check_session(session)
            self._answer(order, session, blocks, why)
        except _Over:
            pass
        except Exception as error:
            self._log.error("copy_failed", text=repr(error))
            self._answer(order, session, 0, "a bug in the node client")
        finally:
            with self._lock:
                self._open -= 1

    def _check_session(self, session: int) -> None:
        if self._session != session:
            raise _Over

    def _answer(self, order: Copy, session: int, blocks: int, why: str) -> None:
        with self._lock:
            self.counts.failed += blocks < order.blocks
            self.counts.done += blocks >= order.blocks
            self.counts.blocks += blocks
            self.counts.bytes += blocks * len(order.parts) * order.part_bytes
        if why:
            self._log.warning("copy_ended", peer=order.source[0], blocks=blocks, of=order.blocks, why=why)
        self._outbox.slots_copied(pb.SlotsCopied(order=order.number, blocks=blocks, why=why), session)

    def _copy(self, order: Copy, session: int) -> tuple[int, str]:
        """How many leading blocks are there in all parts, and why not more. Raises _Over."""
        done = 0
        try:
            copy = _Run(order, self._host)
            if copy.slot_bytes > self._piece_bytes:
                return 0, f"copy_bytes_max is below {COPY_THREADS} slots of {copy.slot_bytes} bytes"
            done = copy.there()
            step = min(self._piece_bytes // copy.slot_bytes, PIECE_BLOCKS_MAX)
            while done < order.blocks:
                blocks = min(step, order.blocks - done)
                good, why = self._piece(copy, done, blocks, session)
                done += good
                if good < blocks:
                    return done, why
        except KVPoolError as error:
            return done, error.reason.lower()
        return done, ""

    def _piece(self, copy: _Run, first: int, blocks: int, session: int) -> tuple[int, str]:
        """All parts of some blocks, one part after the other: how many blocks are there, and why not all."""
        why = ""
        keys: Array | None = None
        for part in copy.order.parts:
            self._loads_first()
            self._check_session(session)
            rows = np.empty((blocks, copy.order.part_bytes), dtype=np.uint8)
            headers, why_short = self._puller.pull(copy.grant(part), first, [row.data for row in rows])
            self._check_session(session)
            good, why_bad = copy.judge(part, headers, rows, keys)
            if good < blocks:
                blocks, why = good, why_bad or why_short
            if blocks == 0:
                break
            keys = headers["key"][:blocks]
            copy.put(part, first, headers[:blocks], rows[:blocks])
        return blocks, why


class _Run:
    """The run of an order, on both sides."""

    def __init__(self, order: Copy, host: CopyHost) -> None:
        self.order = order
        self.slot_bytes = slot_bytes_for(order.part_bytes)
        self._host = host
        self._segment = host.segment_of(order.epoch, order.segment)

    def grant(self, part: int) -> Grant:
        """The capability of one part."""
        order = self.order
        table = part_table(
            part,
            segment=[order.from_segment],
            first_slot=[order.from_slot],
            blocks=[order.blocks],
            stride=[order.from_stride],
            stamp=[order.from_stamp],
            part_from=[order.parts.start],
        )
        return Grant(
            address=order.source[1],
            node_id=order.source[0],
            op=READ,
            epoch=order.epoch,
            valid_until_ms=order.valid_until_ms,
            namespace=order.namespace,
            part=part,
            table=table.tobytes(),
            mac=order.macs[part - order.parts.start],
        )

    def there(self) -> int:
        """How many leading blocks stand in our slots already, committed under the order's stamp."""
        order = self.order
        good = np.ones(order.blocks, dtype=np.bool_)
        for part in order.parts:
            slot, table = self._table(part, 0, order.blocks)
            headers = table.copy()
            good &= self._sound(headers, slot) & self._says(headers, part, order.stamp)
        return order.blocks if good.all() else int(np.argmin(good))

    def judge(self, part: int, headers: Array, rows: Rows, keys: Array | None) -> tuple[int, str]:
        """How many leading blocks came as they were stored, and why the next is not. keys: those of another part."""
        rows = rows[: len(headers)]
        said = self._says(headers, part, self.order.from_stamp) & can_be(headers, self.slot_bytes)
        if keys is not None:
            said &= headers["key"] == keys[: len(headers)]
        sums = np.fromiter(map(xxhash.xxh3_64_intdigest, rows), np.uint64, len(rows))
        right = said & ((headers["checksum"] == 0) | (headers["checksum"] == sums))  # 0: stored with verify off
        if right.all():
            return len(headers), ""
        good = int(np.argmin(right))
        return good, "verify_failed" if said[good] else "wrong_block"

    def put(self, part: int, first: int, headers: Array, rows: Rows) -> None:
        """Write blocks from the first-th on into our slots.

        Raises KVPoolError: ReservationEnded if slots were given to somebody else since, StaleEpoch if the epoch ended.
        """
        slot, table = self._table(part, first, len(headers))
        order, stride = self.order, len(self.order.parts)
        slots = self._segment.slots(slot, (len(rows) - 1) * stride + 1, self.slot_bytes)[::stride]
        barrier = Barrier()
        ours = headers.copy()
        ours["stamp"], ours["worker_id"] = order.stamp, PEER_WRITER
        found = table.copy()
        if (self._sound(found, slot) & (found["stamp"] > order.stamp)).any():
            raise ReservationEnded("slots hold something newer than the order")
        with self._host.writes.under(self._segment, range(slot, slot + len(rows) * stride, stride), order.stamp):
            for state in (WRITING, COMMITTED):
                ours["state"] = state
                ours["check"] = self._checks(ours, slot)
                table.view(_RAW_HEADER)[:] = ours.view(_RAW_HEADER)
                barrier()
                if state == WRITING:
                    if self._host.epoch != order.epoch:
                        raise StaleEpoch("another life of the Master rules")
                    slots[:, : order.part_bytes] = rows
                    barrier()

    def _table(self, part: int, first: int, blocks: int) -> tuple[int, Array]:
        """The slot of a part's block, and the headers of it and those behind it: a live view."""
        stride = len(self.order.parts)
        slot = self.order.slot + first * stride + part - self.order.parts.start
        return slot, self._segment.headers(slot, (blocks - 1) * stride + 1, self.slot_bytes)[::stride]

    def _sound(self, headers: Array, slot: int) -> npt.NDArray[np.bool_]:
        return headers["check"] == self._checks(headers, slot)

    def _checks(self, headers: Array, slot: int) -> Array:
        generation = self._segment.generation(self._segment.slab_of(slot, self.slot_bytes))
        slots = slot + np.arange(len(headers), dtype=np.uint64) * np.uint64(len(self.order.parts))
        return checks_at(headers, places(slots, life(generation, self.slot_bytes)))

    def _says(self, headers: Array, part: int, stamp: int) -> npt.NDArray[np.bool_]:
        """Which headers are of committed blocks of the order's namespace and this part, under this stamp."""
        return (
            (headers["state"] == COMMITTED)
            & (headers["namespace"] == np.void(self.order.namespace))
            & (headers["part"] == part)
            & (headers["stamp"] == stamp)
            & (headers["length_bytes"] == self.order.part_bytes)
        )
