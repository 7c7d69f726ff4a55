"""Two-phase put: reservations, running totals, giving up, quarantine.

Rules
  - Nothing is written twice: a block part has one writer. A reservation's blocks are those granted to it, counted
    in chain order for each part; `done` counts those committed.
  - A part of a reservation ends by its writer's word (final commit, own abort), by a scheduler's abort, by expiry,
    by a purge, or with its writer's process. Without the writer's word its slots go to quarantine, since the writer
    may still copy; they come back with the word, the end of the process, or quarantine_ms later.
  - An ended reservation is remembered for a while: the same commit again gets the same answer, more is refused.
"""

from __future__ import annotations

from collections import OrderedDict

from kvpool_master.core import extents as ex
from kvpool_master.core.forest import Forest, detach_piece
from kvpool_master.core.leases import DeadlineHeap, Remembered
from kvpool_master.core.messages import Commit, Committed, Reserve, Reserved
from kvpool_master.core.segments import Space
from kvpool_master.core.settings import Settings
from kvpool_master.core.snapshot import PoolCounters
from kvpool_master.core.spans import Piece, Span, Tree, Writer
from kvpool_proto.errors import CommitTooLarge, PartOutOfRange, ReservationEnded, UnknownReservation


class Reservation(Writer):
    """One put. Masks have a bit per part of the namespace."""

    __slots__ = (
        "answer",
        "deadline_ms",
        "done",
        "ended",
        "granted",
        "id",
        "lost",
        "mark",
        "mask",
        "nodes",
        "parts",
        "quarantine_end_ms",
        "quarantined",
        "remember_until_ms",
        "stamp",
        "tree",
        "worker",
        "workers",
    )

    def __init__(self, command: Reserve, tree: Tree, stamp: int) -> None:
        super().__init__()
        self.id = command.reservation
        self.tree = tree
        self.stamp = stamp
        self.mask = (1 << command.part_to) - (1 << command.part_from)
        self.parts = range(command.part_from, command.part_to)
        self.nodes = command.nodes
        self.worker = command.worker
        self.workers: dict[int, int] | None = None
        """Workers that committed a part of a reservation that a scheduler made."""
        self.mark = mark_of(command)
        self.answer: Reserved | None = None
        self.granted: list[tuple[int, int]] = []
        """Blocks granted: (mask of parts, blocks), each mask once."""
        self.done = [0] * len(self.parts)
        """Blocks committed, by part; see `written`."""
        self.lost: dict[int, int] | None = None
        """Of these, removed meanwhile, by part."""
        self.ended = 0
        self.deadline_ms = 0
        self.remember_until_ms = 0
        self.quarantined = b""
        self.quarantine_end_ms = 0

    def granted_blocks(self, part: int) -> int:
        """How many blocks of a part are this reservation's."""
        return sum([blocks for mask, blocks in self.granted if mask >> part & 1])

    def grant(self, mask: int, blocks: int) -> None:
        """Note that blocks of the parts in `mask` are this reservation's."""
        for at, (known, before) in enumerate(self.granted):
            if known == mask:
                self.granted[at] = (mask, before + blocks)
                return
        self.granted.append((mask, blocks))

    def written(self, part: int) -> int:
        """How many of a part's blocks are committed."""
        return self.done[part - self.parts.start]

    def lost_blocks(self, part: int) -> int:
        """How many of a part's committed blocks had been removed before."""
        return self.lost.get(part, 0) if self.lost else 0

    def worker_of(self, part: int) -> int:
        """The process that writes a part, 0 if it is not known."""
        return self.workers.get(part, self.worker) if self.workers else self.worker

    def node_of(self, part: int) -> str:
        """The node that the part's writer named; empty if it named none."""
        if len(self.nodes) <= 1:
            return self.nodes[0] if self.nodes else ""
        return self.nodes[part - self.parts.start]


def mark_of(command: Reserve) -> int:
    """What makes a second Reserve with the same id a retry of the first."""
    return hash((command.namespace, command.chain, command.part_from, command.part_to))


class Writes:
    """Open reservations, those that ended, and their quarantine."""

    def __init__(self, settings: Settings, space: Space, forest: Forest, counters: PoolCounters) -> None:
        self._settings = settings
        self._space = space
        self._forest = forest
        self._counters = counters
        self.open: dict[bytes, Reservation] = {}
        self.deadlines = DeadlineHeap()
        self.ended: OrderedDict[bytes, Reservation] = OrderedDict()
        self.quarantine: dict[bytes, Reservation] = {}
        self.overtaken = Remembered(settings.remembered_ids_max, settings.remember_ms)

    def start(self, reservation: Reservation, size_bytes: int, now_ms: int) -> int:
        """Open a reservation with a deadline for `size_bytes`. Returns its ms."""
        settings = self._settings
        term = min(settings.write_min_ms + size_bytes // settings.write_bytes_per_ms, settings.write_max_ms)
        reservation.deadline_ms = now_ms + term
        self.open[reservation.id] = reservation
        self.deadlines.push(reservation.deadline_ms, reservation.id)
        self._counters.reservations_opened += 1
        return term

    def is_over(self, ident: bytes) -> bool:
        """Whether a reservation of that id has ended, also before it began, and is remembered."""
        return ident in self.ended or ident in self.quarantine or ident in self.overtaken

    # -- progress

    def commit(self, command: Commit, now_ms: int) -> Committed:
        """See messages.Commit."""
        found = self.open.get(command.reservation) or self.ended.get(command.reservation)
        found = found or self.quarantine.get(command.reservation)
        if found is None:
            raise UnknownReservation("no such reservation, or it ended long ago")
        parts = range(command.part_from, command.part_to)
        asked = (1 << command.part_to) - (1 << command.part_from)
        if not parts or asked & ~found.mask:
            raise PartOutOfRange(f"parts [{command.part_from}, {command.part_to}) are not all in the reservation")
        for part in parts:
            if command.blocks > found.granted_blocks(part):
                raise CommitTooLarge(
                    f"blocks_written = {command.blocks}, but {found.granted_blocks(part)} were granted to part {part}"
                )
        if command.final and found.quarantined:
            self._leave_quarantine(found, asked)
        refused = [part for part in parts if found.ended >> part & 1 and command.blocks > found.written(part)]
        if refused:
            raise ReservationEnded(f"parts {refused} of the reservation have ended: expired, aborted or purged")
        if found.id in self.open:
            for part in parts:
                if command.worker and command.worker != found.worker:
                    found.workers = {**(found.workers or {}), part: command.worker}
                if not found.ended >> part & 1:
                    self._advance(found, part, command.blocks)
            if command.final:
                self.give_up(found, asked, word=True)
            self._close_if_over(found, now_ms)
        return Committed(min(map(found.written, parts)), max(map(found.lost_blocks, parts)))

    def _advance(self, reservation: Reservation, part: int, total: int) -> None:
        """Commit one part up to `total` of its granted blocks."""
        bit = 1 << part
        left = total - reservation.written(part)
        if left <= 0:
            return
        self._lose_retired(reservation)
        reservation.done[part - reservation.parts.start] = total
        for piece in list(reservation.pieces):
            if left == 0:
                return
            if piece.lost & bit:
                left -= self._skip_lost(reservation, piece, part, left)
            elif piece.mask & bit:
                left -= self._complete(piece, bit, left)

    def _lose_retired(self, reservation: Reservation) -> None:
        """What was to be written to a node that is retired is lost, although nobody has come to take it apart yet."""
        while self._forest.retiring and any(
            piece.span is not None and self._forest.lose_retired(piece.span) for piece in list(reservation.pieces)
        ):
            pass

    def _skip_lost(self, reservation: Reservation, piece: Piece, part: int, left: int) -> int:
        """Pass over blocks that were removed while being written. Returns how many."""
        blocks = min(left, piece.blocks)
        if blocks < piece.blocks:
            piece = self._cut_piece(piece, blocks)
        reservation.lost = {**(reservation.lost or {}), part: reservation.lost_blocks(part) + blocks}
        piece.lost &= ~(1 << part)
        if not piece.mask and not piece.lost:
            reservation.pieces.remove(piece)
        return blocks

    def _cut_piece(self, piece: Piece, blocks: int) -> Piece:
        """Split a piece, and its span where it has one. Returns the front."""
        if piece.span is not None:
            at = piece.reservation.pieces.index(piece)
            self._forest.cut(piece.span, blocks)
            return piece.reservation.pieces[at]
        front = Piece(piece.reservation, None, blocks, piece.mask, piece.lost)
        pieces = piece.reservation.pieces
        pieces.insert(pieces.index(piece), front)
        piece.blocks -= blocks
        return front

    def _complete(self, piece: Piece, bit: int, left: int) -> int:
        """Commit up to `left` blocks of one part of a piece. Returns how many."""
        if left < piece.blocks:
            piece = self._cut_piece(piece, left)
        span = piece.span
        assert span is not None
        blocks = piece.blocks
        slot_bytes = span.tree.slot_bytes
        for row in ex.records(span.extents):
            if row[4] <= bit.bit_length() - 1 < row[5]:
                self._space.segments[row[2]].reserved_bytes -= row[1] * slot_bytes
        detach_piece(piece, bit, lost=False)
        if self._forest.complete(span, bit):
            span.tree.counters.stored_blocks += blocks
        if not span.writers:
            self._forest.changed(span)
        return blocks

    # -- ends

    def give_up(self, reservation: Reservation, mask: int, *, word: bool) -> None:
        """End parts of an open reservation: what is not committed goes, to quarantine unless the writer says so."""
        slot_bytes = reservation.tree.slot_bytes
        reservation.ended |= mask & reservation.mask
        left: list[ex.Record] = []
        for piece in list(reservation.pieces):
            span, pending = piece.span, piece.mask & mask
            piece.lost &= ~mask
            if span is not None and pending:
                left += self._forest.strip(span, pending)
                detach_piece(piece, pending, lost=False)
                self._forest.given_up(span)
                self._forest.changed(span)
            elif not piece.mask and not piece.lost:
                reservation.pieces.remove(piece)
        if not left:
            return
        self._space.charge(left, slot_bytes, "reserved_bytes", -1)
        if word:
            self._space.give(left, slot_bytes)
        else:
            self._space.charge(left, slot_bytes, "quarantined_bytes", 1)
            reservation.quarantined += b"".join([ex.pack(*row) for row in left])
            self.quarantine[reservation.id] = reservation

    def displace(self, span: Span, mask: int) -> None:
        """A complete copy of these parts has come back: who writes them anew does so for nothing, as commit tells."""
        slot_bytes = span.tree.slot_bytes
        for piece in list(span.writers or ()):
            pending = piece.mask & mask
            if pending:
                reservation = piece.reservation
                assert isinstance(reservation, Reservation)
                rows = self._forest.strip(span, pending)
                self._space.charge(rows, slot_bytes, "reserved_bytes", -1)
                self._space.charge(rows, slot_bytes, "quarantined_bytes", 1)
                reservation.quarantined += b"".join([ex.pack(*row) for row in rows])
                self.quarantine[reservation.id] = reservation
                detach_piece(piece, pending, lost=True)

    def _leave_quarantine(self, reservation: Reservation, mask: int) -> None:
        """The writer of these parts copies no more."""
        slot_bytes = reservation.tree.slot_bytes
        reservation.quarantined, rows = ex.without_parts(reservation.quarantined, mask)
        self._space.charge(rows, slot_bytes, "quarantined_bytes", -1)
        self._space.give(rows, slot_bytes)
        if not reservation.quarantined:
            self.quarantine.pop(reservation.id, None)

    def _close_if_over(self, reservation: Reservation, now_ms: int) -> None:
        if reservation.pieces and reservation.ended != reservation.mask:
            return
        if all(reservation.written(part) == reservation.granted_blocks(part) for part in reservation.parts):
            self._counters.reservations_completed += 1
        else:
            self._counters.reservations_aborted += 1
        self._close(reservation, now_ms)

    def _close(self, reservation: Reservation, now_ms: int) -> None:
        del self.open[reservation.id]
        reservation.ended = reservation.mask
        reservation.answer = None
        reservation.remember_until_ms = now_ms + self._settings.remember_ms
        reservation.quarantine_end_ms = now_ms + self._settings.quarantine_ms
        self.ended[reservation.id] = reservation
        if len(self.ended) > self._settings.remembered_ids_max:
            self.ended.popitem(last=False)

    def abort(self, ident: bytes, mask: int | None, *, writer: bool, now_ms: int) -> bool:
        """Give up parts (None: all). False, and remembered, when nothing of that id is open."""
        reservation = self.open.get(ident)
        over = self.quarantine.get(ident)
        known = reservation or over
        if known is not None and mask is not None and mask & ~known.mask:
            raise PartOutOfRange("the parts are not all in the reservation")
        if over is not None and writer:
            self._leave_quarantine(over, over.mask if mask is None else mask)
        if reservation is None:
            if ident not in self.ended:
                self.overtaken.add(ident, now_ms)
            return False
        self.give_up(reservation, reservation.mask if mask is None else mask, word=writer)
        self._close_if_over(reservation, now_ms)
        return True

    def worker_gone(self, node: str, worker: int, now_ms: int) -> None:
        """A writer's process has ended: nothing of its parts is written any more. 0 is no process."""
        if not worker:
            return
        for reservation in [*self.open.values(), *self.quarantine.values()]:
            mask = 0
            for part in reservation.parts:
                if reservation.worker_of(part) == worker and reservation.node_of(part) in ("", node):
                    mask |= 1 << part
            if not mask:
                continue
            if reservation.quarantined:
                self._leave_quarantine(reservation, mask)
            if reservation.id in self.open:
                self.give_up(reservation, mask, word=True)
                self._close_if_over(reservation, now_ms)

    def workers(self, node: str) -> set[int]:
        """The workers of a node that write, or that a quarantine waits for."""
        found: set[int] = set()
        for reservation in [*self.open.values(), *self.quarantine.values()]:
            found |= {
                reservation.worker_of(part) for part in reservation.parts if reservation.node_of(part) in ("", node)
            }
        return found - {0}

    def purge(self, tree: Tree, now_ms: int) -> None:
        """End all reservations of a tree that was purged."""
        for reservation in [found for found in self.open.values() if found.tree is tree]:
            self.give_up(reservation, reservation.mask, word=False)
            self._close_if_over(reservation, now_ms)

    def expire(self, now_ms: int) -> None:
        """End what is past its deadline."""
        for _, ident in self.deadlines.due(now_ms):
            reservation = self.open.get(ident)
            if reservation is not None and reservation.deadline_ms <= now_ms:
                self._counters.reservations_expired += 1
                self.give_up(reservation, reservation.mask, word=False)
                self._close(reservation, now_ms)

    def sweep(self, now_ms: int) -> None:
        """Free what was long enough in quarantine and forget ids that are old: once a Tick."""
        for reservation in list(self.quarantine.values()):
            if reservation.id not in self.open and reservation.quarantine_end_ms <= now_ms:
                self._leave_quarantine(reservation, reservation.mask)
        while self.ended and next(iter(self.ended.values())).remember_until_ms <= now_ms:
            self.ended.popitem(last=False)
        live = self.open
        self.deadlines.rebuild(((one.deadline_ms, one.id) for one in live.values()), len(live))
        self.overtaken.expire(now_ms)
