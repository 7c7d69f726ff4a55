"""Two-phase put: reservations, running totals, giving up, quarantine.

Rules
  - Nothing is written twice: a block part has one writer. A reservation's blocks are those granted to it, counted
    in chain order for each part; `done` counts those committed.
  - A part of a reservation ends by its writer's word (final commit, own abort), by a scheduler's abort, by expiry,
    by a purge, or with its writer's process. Without the writer's word its slots go to quarantine, since the writer
    may still copy; they come back with the word, the end of the process, or quarantine_ms later.
  - Slots on another node than the writer's are written by that node's data port. Only the writer's word frees them at
    once; else their node ends what is written there, clears their headers and answers (clearing.py).
  - A put in shares is a reservation for each share; its key is the id and the share's number.
  - An ended reservation is remembered for a while: the same commit again gets the same answer, more is refused.
"""

from __future__ import annotations

from collections import OrderedDict

from kvpool_master.core import extents as ex
from kvpool_master.core.clearing import Clearing
from kvpool_master.core.forest import Forest, detach_piece
from kvpool_master.core.leases import DeadlineHeap, Remembered
from kvpool_master.core.messages import Commit, Committed
from kvpool_master.core.reservation import SHARE_BYTES, Reservation
from kvpool_master.core.segments import Space
from kvpool_master.core.settings import Settings
from kvpool_master.core.snapshot import PoolCounters
from kvpool_master.core.spans import Piece, Span, Tree
from kvpool_proto.errors import CommitTooLarge, PartOutOfRange, ReservationEnded, UnknownReservation


class Writes:
    """Open reservations, those that ended, and their quarantine."""

    def __init__(
        self, settings: Settings, space: Space, forest: Forest, clearing: Clearing, counters: PoolCounters
    ) -> None:
        self._clearing = clearing
        self._settings = settings
        self._space = space
        self._forest = forest
        self._counters = counters
        self.open: dict[bytes, Reservation] = {}
        self.shared: dict[bytes, set[bytes]] = {}
        """By id, the keys of the shares that are open."""
        self.deadlines = DeadlineHeap()
        self.ended: OrderedDict[bytes, Reservation] = OrderedDict()
        self.quarantine: dict[bytes, Reservation] = {}
        self.overtaken = Remembered(settings.remembered_ids_max, settings.remember_ms)

    def start(self, reservation: Reservation, size_bytes: int, now_ms: int) -> int:
        """Open a reservation with a deadline for `size_bytes`. Returns its ms."""
        settings = self._settings
        term = min(settings.write_min_ms + size_bytes // settings.write_bytes_per_ms, settings.write_max_ms)
        reservation.deadline_ms = now_ms + term
        self.open[reservation.key] = reservation
        if reservation.key != reservation.id:
            self.shared.setdefault(reservation.id, set()).add(reservation.key)
        self.deadlines.push(reservation.deadline_ms, reservation.key)
        self._counters.reservations_opened += 1
        return term

    def is_over(self, ident: bytes) -> bool:
        """Whether a reservation of that id has ended, also before it began, and is remembered."""
        return ident in self.ended or ident in self.quarantine or ident in self.overtaken

    # -- progress

    def commit(self, command: Commit, now_ms: int) -> Committed:
        """See messages.Commit."""
        found = self._found(command.reservation, command.share)
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
        if found.key in self.open:
            for part in parts:
                if command.worker and command.worker != found.worker:
                    found.workers = {**(found.workers or {}), part: command.worker}
                if not found.ended >> part & 1:
                    self._advance(found, part, command.blocks)
            if command.final:
                self.give_up(found, asked, word=True)
            self._close_if_over(found, now_ms)
        return Committed(min(map(found.written, parts)), max(map(found.lost_blocks, parts)))

    def _found(self, ident: bytes, share: int) -> Reservation | None:
        """The reservation of an id, or its share, open or remembered."""
        shared = ident + share.to_bytes(SHARE_BYTES) if 0 <= share < 1 << 8 * SHARE_BYTES else ident
        for key in (ident, shared) if share == 0 else (shared,):
            found = self.open.get(key) or self.ended.get(key) or self.quarantine.get(key)
            if found is not None:
                return found
        return None

    def of(self, ident: bytes) -> Reservation | None:
        """Some reservation of an id, in shares or not."""
        keys = (ident, *self.shared.get(ident, ()))
        return next((found for key in keys if (found := self.open.get(key)) is not None), self._found(ident, 0))

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
        self._let_go(reservation, left, word=word)

    def _let_go(self, reservation: Reservation, rows: list[ex.Record], *, word: bool) -> None:
        """Slots of an open reservation that no span holds any more: free by the writer's word, else not yet."""
        slot_bytes = reservation.tree.slot_bytes
        self._space.charge(rows, slot_bytes, "reserved_bytes", -1)
        if word:
            self._space.give(rows, slot_bytes)
            return
        here = [row for row in rows if self._is_local(reservation, row)]
        if len(here) < len(rows):
            self._clearing.later([row for row in rows if row not in here], slot_bytes)
        if here:
            self._space.charge(here, slot_bytes, "quarantined_bytes", 1)
            reservation.quarantined += b"".join([ex.pack(*row) for row in here])
            self.quarantine[reservation.key] = reservation

    def _is_local(self, reservation: Reservation, row: ex.Record) -> bool:
        """Whether the writer maps the row's segment, as far as is known."""
        return reservation.node_of(row[4]) in ("", self._space.segments[row[2]].node)

    def displace(self, span: Span, mask: int) -> None:
        """A complete copy of these parts has come back: who writes them anew does so for nothing, as commit tells."""
        for piece in list(span.writers or ()):
            pending = piece.mask & mask
            if pending:
                reservation = piece.reservation
                assert isinstance(reservation, Reservation)
                self._let_go(reservation, self._forest.strip(span, pending), word=False)
                detach_piece(piece, pending, lost=True)

    def _leave_quarantine(self, reservation: Reservation, mask: int) -> None:
        """The writer of these parts copies no more."""
        slot_bytes = reservation.tree.slot_bytes
        reservation.quarantined, rows = ex.without_parts(reservation.quarantined, mask)
        self._space.charge(rows, slot_bytes, "quarantined_bytes", -1)
        self._space.give(rows, slot_bytes)
        if not reservation.quarantined:
            self.quarantine.pop(reservation.key, None)

    def _close_if_over(self, reservation: Reservation, now_ms: int) -> None:
        if reservation.pieces and reservation.ended != reservation.mask:
            return
        if all(reservation.written(part) == reservation.granted_blocks(part) for part in reservation.parts):
            self._counters.reservations_completed += 1
        else:
            self._counters.reservations_aborted += 1
        self._close(reservation, now_ms)

    def _close(self, reservation: Reservation, now_ms: int) -> None:
        del self.open[reservation.key]
        if reservation.key != reservation.id:
            keys = self.shared[reservation.id]
            keys.discard(reservation.key)
            if not keys:
                del self.shared[reservation.id]
        reservation.ended = reservation.mask
        reservation.answer = None
        reservation.remember_until_ms = now_ms + self._settings.remember_ms
        reservation.quarantine_end_ms = now_ms + self._settings.quarantine_ms
        self.ended[reservation.key] = reservation
        if len(self.ended) > self._settings.remembered_ids_max:
            self.ended.popitem(last=False)

    def abort(self, ident: bytes, mask: int | None, *, writer: bool, share: int, now_ms: int) -> bool:
        """Give up parts (None: all), of all shares unless `writer` speaks for its own.

        False, and remembered, when nothing of that id is open.
        """
        if writer:
            found = self._found(ident, share)
            return self._abort(ident, ident if found is None else found.key, mask, writer=True, now_ms=now_ms)
        keys = sorted(self.shared.get(ident, ())) or [ident]
        return sum(self._abort(ident, key, mask, writer=False, now_ms=now_ms) for key in keys) > 0

    def _abort(self, ident: bytes, key: bytes, mask: int | None, *, writer: bool, now_ms: int) -> bool:
        reservation = self.open.get(key)
        over = self.quarantine.get(key)
        known = reservation or over
        if known is not None and mask is not None and mask & ~known.mask:
            raise PartOutOfRange("the parts are not all in the reservation")
        if over is not None and writer:
            self._leave_quarantine(over, over.mask if mask is None else mask)
        if reservation is None:
            if key not in self.ended:
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
            if reservation.key in self.open:
                self.give_up(reservation, mask, word=False)  # the data ports of other nodes may not know yet
                self._close_if_over(reservation, now_ms)
            if reservation.quarantined:
                self._leave_quarantine(reservation, mask)

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
            if reservation.key not in self.open and reservation.quarantine_end_ms <= now_ms:
                self._leave_quarantine(reservation, reservation.mask)
        while self.ended and next(iter(self.ended.values())).remember_until_ms <= now_ms:
            self.ended.popitem(last=False)
        live = self.open
        self.deadlines.rebuild(((one.deadline_ms, one.key) for one in live.values()), len(live))
        self.overtaken.expire(now_ms)
