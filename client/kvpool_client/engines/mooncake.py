"""Reads of blocks on other nodes through mooncake's transfer engine: one-sided, checked like every other read.

Rules
  - Reading only. Stores go through data ports, whose node clients mark and verify the slots.
  - The checks are LocalEngine's: headers as expected before the payload and the same after it, checksums; and each
    slab's record, which the checks of headers need. Only blocks that were found right reach a caller's buffer.
  - What mooncake allows, and to whom: mooncake_package.py. How long it may take: mooncake_lanes.py.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import xxhash

from kvpool_client.clock import SYSTEM, Clock
from kvpool_client.devices.base import Bytes, Device
from kvpool_client.engines.mooncake_lanes import Lanes, Loan, Peer, TimeOver
from kvpool_client.engines.mooncake_package import TCP, Transfers, start
from kvpool_client.engines.remote_slots import RemoteFile, RemoteSlots, Transfer, locate, segments_of, transfers_of
from kvpool_client.headers import SLAB_RECORD, SLOT_HEADER, U64, Array, life, places, record_check
from kvpool_client.peer.copies import Grant, PeerCopy
from kvpool_client.peers import Peers
from kvpool_client.segment import read_superblock
from kvpool_client.transfer import SAMPLE_EVERY, agree
from kvpool_client.transfer_engine import Copied, Progress, Term, TransferEngine, Verify, Written
from kvpool_proto.errors import KVPoolError, PeerBusy, PeerUnreachable, SlabChanged, UnknownSegment
from kvpool_proto.geometry import SLAB_RECORD_BYTES, SLOT_HEADER_BYTES, SUPERBLOCK_BYTES

PIECE_BYTES: Final = 32 << 20
"""Of all copies of a call, checked together, unless one block of each is longer."""
TRANSFER_BYTES: Final = 8 << 20
"""Of one transfer, unless one block is longer."""
PEERS_MAX: Final = 1_024
"""Remembered; the one that came first is forgotten, and opened anew when it is asked again."""


@dataclass(frozen=True, slots=True)
class Exposure:
    """Where a node offers its segments. server: host:port. bases: by handle, the address of each file's first byte."""

    server: str
    bases: Mapping[int, int]


class MooncakeEngine:
    """A TransferEngine for other nodes. Raises StartError where mooncake cannot be started.

    data_ports: takes stores, and loads from nodes that do not offer their segments or cannot be read so now; closed
    with this. where: the offer of a grant's node, None without one. host: as peers reach this machine. verify: as
    LocalEngine's.
    """

    def __init__(
        self,
        device: Device,
        data_ports: TransferEngine[PeerCopy],
        where: Callable[[Grant], Exposure | None],
        *,
        host: str,
        protocol: str = TCP,
        verify: Verify = "full",
        piece_bytes: int = PIECE_BYTES,
        clock: Clock = SYSTEM,
        package: Transfers | None = None,
    ) -> None:
        self._device = device
        self._data_ports = data_ports
        self._where = where
        self._step = {"full": 1, "sampled": SAMPLE_EVERY, "off": 0}[verify]
        self._piece_bytes = piece_bytes
        self._lanes = Lanes(package or start(host, protocol), registered=protocol != TCP)
        self._usable = Peers(clock, lambda server, why: None)
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}

    def read(self, copies: Sequence[PeerCopy], term: Term) -> list[Copied]:
        """See TransferEngine. Where mooncake does not bring the bytes, the data port is asked for all of them."""
        exposure = self._where(copies[0].grant) if copies else None
        turn = None if exposure is None else self._usable.begin(exposure.server)
        if exposure is None or turn is None:
            return self._data_ports.read(copies, term)
        parts: list[_Part] = []
        silence = "a bug"
        try:
            with self._lanes.lend(self._peer(exposure.server), term) as loan:
                parts = [_Part(loan, exposure, copy, self._step) for copy in copies]
                self._read(parts, term)
            silence = ""
        except PeerBusy:
            silence = ""
            return self._data_ports.read(copies, term)
        except PeerUnreachable as error:
            silence = str(error)
            return self._data_ports.read(copies, term)
        except TimeOver:
            silence = term.reason
        finally:
            self._usable.end(turn, silence)
        self._device.publish()
        return [Copied(part.copied.blocks, part.copied.reason or silence) for part in parts]

    def write(self, copies: Sequence[PeerCopy], term: Term, progress: Progress) -> Written:
        """See TransferEngine."""
        return self._data_ports.write(copies, term, progress)

    def close(self) -> None:
        """See TransferEngine. What mooncake has under way goes on into memory of its own."""
        self._data_ports.close()

    def _read(self, parts: Sequence[_Part], term: Term) -> None:
        """The same few blocks of all parts, then the next ones. Raises TimeOver, PeerBusy, PeerUnreachable."""
        end = 1 + max(run.first + run.blocks for part in parts for run in part.copy.runs)
        for part in parts:
            end = part.locate(end)
        size = max(1, self._piece_bytes // sum(part.copy.slot_bytes for part in parts))
        for low in range(0, end, size):
            for part in parts:
                if low < end:
                    end = part.read(low, min(low + size, end), end, term)

    def _peer(self, server: str) -> Peer:
        with self._lock:
            peer = self._peers.get(server)
            if peer is None:
                if len(self._peers) >= PEERS_MAX:
                    del self._peers[next(iter(self._peers))]
                peer = self._peers[server] = Peer(server)
            return peer


class _Part:
    """One copy, read piece by piece in a lent lane. step: every step-th block is hashed; 0: none. copied: so far."""

    def __init__(self, loan: Loan, exposure: Exposure, copy: PeerCopy, step: int) -> None:
        self.copy = copy
        self.copied = Copied(0)
        self._loan = loan
        self._exposure = exposure
        self._step = step
        self._all: RemoteSlots | None = None

    def locate(self, end: int) -> int:
        """Find out where the blocks lie. Returns `end`, or the first block if that cannot be. Raises as Loan.fetch."""
        try:
            self._all = locate(self.copy, self._files())
        except (PeerBusy, PeerUnreachable):
            raise
        except KVPoolError as error:  # extents that cannot be
            return self._end_with(error, self.copy.runs[0].first, end)
        return end

    def read(self, low: int, high: int, end: int, term: Term) -> int:
        """Copy blocks low .. high - 1, as far as there are. Returns `end`, or the first block that is not right.

        Raises as Loan.fetch.
        """
        if self._all is None:
            return end
        start, stop = np.searchsorted(self._all.first, (low, high)).tolist()
        if start == stop:
            return end
        where = self._all.cut(start, stop)
        good, reason = 0, term.ended(())
        try:
            if not reason:
                good, reason = self._read(where, self.copy.headers[start:stop])
        except (PeerBusy, PeerUnreachable):
            raise
        except KVPoolError as error:  # a slab that was bound anew
            return self._end_with(error, int(where.first[0]), end)
        self.copied = Copied(start + good, reason)
        return end if start + good == stop else int(where.first[good])

    def _end_with(self, error: KVPoolError, block: int, end: int) -> int:
        self._loan.peer.files.clear()
        self.copied = Copied(self.copied.blocks, error.reason.lower())
        return min(block, end)

    def _files(self) -> dict[int, RemoteFile]:
        """The files of the copy's segments, by handle. Raises as Loan.fetch, UnknownSegment, ProtocolError."""
        known = self._loan.peer.files
        found: dict[int, RemoteFile] = {}
        for handle in segments_of(self.copy):
            base = self._exposure.bases.get(handle)
            if base is None:
                raise UnknownSegment(f"{self._exposure.server} does not offer segment {handle}")
            file = known.get(base)
            if file is None:
                page = self._loan.lane.memory_of(SUPERBLOCK_BYTES)
                self._loan.fetch([Transfer(page.ctypes.data, base, SUPERBLOCK_BYTES)])
                said = read_superblock(page)
                file = known[base] = RemoteFile(base, said.size_bytes, said.slab_bytes)
            found[handle] = file
        return found

    def _read(self, where: RemoteSlots, wanted: Array) -> tuple[int, str]:
        """How many leading blocks are right, and in the buffer; why not the next. Raises as Loan.fetch, SlabChanged."""
        copy = self.copy
        rows, before, after, records = self._memory(len(where))
        slabs, slab_of = np.unique(where.record, return_inverse=True)
        records = records[: len(slabs)]
        self._loan.fetch(_transfers(slabs, records) + _transfers(where.header, before))
        lives = np.array([life(g, copy.slot_bytes) for g in _generations(records, copy.slot_bytes)], dtype=np.uint64)
        good, reason = agree(_headers(before), wanted, places(where.slot, lives[slab_of]))
        if not good:
            return 0, reason
        where, rows, before, after = where.cut(0, good), rows[:good], before[:good], after[:good]
        self._loan.fetch(_transfers(where.payload, rows, copy.part_bytes))
        self._loan.fetch(_transfers(where.header, after))
        right, why = self._right(where, rows, before, after)
        if right < good:
            good, reason = right, why
        for begin, end in _stretches(where.first[:good]):
            copy.buffer.scatter(int(where.first[begin]), rows[begin:end])
        return good, reason

    def _memory(self, blocks: int) -> list[Bytes]:
        """Of the lane: slots, headers before, headers after, slab records; uint8, a row per block."""
        sizes = (self.copy.slot_bytes, SLOT_HEADER_BYTES, SLOT_HEADER_BYTES, SLAB_RECORD_BYTES)
        memory = self._loan.lane.memory_of(blocks * sum(sizes))
        ends = np.cumsum(sizes) * blocks
        return [memory[end - size * blocks : end].reshape(blocks, size) for end, size in zip(ends, sizes, strict=True)]

    def _right(self, where: RemoteSlots, rows: Bytes, before: Bytes, after: Bytes) -> tuple[int, str]:
        """How many leading rows are what their headers say, and why the next is not."""
        same = (before == after).all(axis=1)
        checksums = _headers(after)["checksum"]
        sums = checksums.copy()
        if self._step:
            hashed = slice(random.randrange(self._step), None, self._step)
            some = rows[hashed, : self.copy.part_bytes]
            sums[hashed] = np.fromiter(map(xxhash.xxh3_64_intdigest, some), np.uint64, len(some))
        right = same & (sums == checksums)
        if right.all():
            return len(rows), ""
        good = int(np.argmin(right))
        if not same[good]:
            return good, "stale_stamp"
        return good, "verify_failed" if checksums[good] else "unverified"  # 0: stored with verify off


def _transfers(remote: U64, rows: Bytes, size_bytes: int | None = None) -> list[Transfer]:
    """Fill `rows` from `remote`, an address per row; only the first size_bytes of each are needed."""
    pitch = rows.shape[1]
    return transfers_of(remote, rows.ctypes.data, size_bytes or pitch, pitch, TRANSFER_BYTES)


def _headers(rows: Bytes) -> Array:
    return rows.reshape(-1).view(SLOT_HEADER)


def _generations(rows: Bytes, slot_bytes: int) -> list[int]:
    """Of slabs whose records these are. Raises SlabChanged unless all are bound to slot_bytes."""
    records = rows.reshape(-1).view(SLAB_RECORD)
    if (record_check(records) != records["check"]).any() or (records["slot_bytes"] != slot_bytes).any():
        raise SlabChanged(f"a slab is not bound to slots of {slot_bytes} bytes any more")
    return records["generation"].tolist()


def _stretches(firsts: Array) -> list[tuple[int, int]]:
    """Where blocks follow each other: from, to."""
    if not len(firsts):
        return []
    borders = [0, *(np.flatnonzero(np.diff(firsts) != 1) + 1).tolist(), len(firsts)]
    return list(pairwise(borders))
