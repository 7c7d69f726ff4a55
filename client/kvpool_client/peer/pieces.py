"""One call on one data port, cut into pieces that several connections share. No I/O.

Rules
  - A piece is of one copy, contiguous in its capability's table, at most so many bytes unless it is a single block.
    Pieces go in the order of the layout, over all copies: leading blocks of all parts come first.
  - The first piece that falls short ends the call: nothing behind the block where it ended is begun any more.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kvpool_client.peer.copies import PeerCopy
from kvpool_client.peer.wire import PIECE_BLOCKS_MAX, PIECE_BYTES_MAX
from kvpool_client.runs import Blocks, block_at

SHARE_BYTES_MIN: Final = 1 << 20
"""A call is divided among connections only as far as each gets so much."""


@dataclass(frozen=True, slots=True)
class Span:
    """Blocks first .. first + blocks - 1 of a layout."""

    first: int
    blocks: int


@dataclass(slots=True)
class Piece:
    """Blocks of the copy's runs from the start-th on; at: of the first, in the capability's table.

    spans: where they lie in the layout. done: how many leading ones came through; reason: why not all.
    """

    copy: int
    start: int
    at: int
    spans: list[Span]
    blocks: int
    done: int = 0
    reason: str = ""

    @property
    def first(self) -> int:
        """The first block's place in the layout."""
        return self.spans[0].first


@dataclass(slots=True)
class Turns:
    """Hands out pieces, one after the other, to several threads, and keeps what became of them."""

    copies: Sequence[PeerCopy]
    pieces: list[Piece]
    _next: int = 0
    _end: int | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> Piece | None:
        """The next piece; None: there is no more to do."""
        with self._lock:
            if self._next == len(self.pieces) or not self.wants(self.pieces[self._next]):
                return None
            self._next += 1
            return self.pieces[self._next - 1]

    def wants(self, piece: Piece) -> bool:
        """Does some of it lie before the block where the call ended, if it did?"""
        return self._end is None or piece.first < self._end

    def stop(self) -> None:
        """Nothing more is begun."""
        with self._lock:
            self._next = len(self.pieces)

    def ended(self, piece: Piece, done: int, reason: str) -> None:
        """What became of a piece: how many leading blocks came through, and why not all."""
        with self._lock:
            piece.done, piece.reason = done, reason
            if done < piece.blocks:
                end = block_at(piece.spans, done)
                assert end is not None
                self._end = end if self._end is None else min(end, self._end)

    def totals(self) -> list[tuple[int, str]]:
        """Of each copy, how many leading blocks came through so far, and why it ended, if it did."""
        with self._lock:
            totals = [(0, "")] * len(self.copies)
            whole = [True] * len(self.copies)
            for piece in self.pieces:
                if whole[piece.copy]:
                    totals[piece.copy] = (totals[piece.copy][0] + piece.done, piece.reason)
                    whole[piece.copy] = piece.done == piece.blocks
            return totals


def cut(copies: Sequence[PeerCopy], piece_bytes: int, connections: int) -> list[Piece]:
    """The pieces of a call, in the order in which they go. Work in Python grows with runs and pieces."""
    total_bytes = sum(copy.part_bytes * sum(run.blocks for run in copy.runs) for copy in copies)
    size_bytes = min(piece_bytes, PIECE_BYTES_MAX, max(SHARE_BYTES_MIN, -(-total_bytes // connections)))
    pieces: list[Piece] = []
    for index, copy in enumerate(copies):
        blocks_max = max(1, min(size_bytes // copy.part_bytes, PIECE_BLOCKS_MAX))
        pieces += _pieces_of(index, copy, blocks_max)
    return sorted(pieces, key=lambda piece: (piece.first, piece.copy))


def _pieces_of(index: int, copy: PeerCopy, blocks_max: int) -> list[Piece]:
    pieces: list[Piece] = []
    start = 0
    for run in copy.runs:
        done = 0
        while done < run.blocks:
            last = pieces[-1] if pieces else None
            if last is None or last.blocks == blocks_max or last.at + last.blocks != run.at + done:
                last = Piece(index, start, run.at + done, [], 0)
                pieces.append(last)
            blocks = min(run.blocks - done, blocks_max - last.blocks)
            _extend(last, Span(run.first + done, blocks))
            done, start = done + blocks, start + blocks
    return pieces


def _extend(piece: Piece, span: Span) -> None:
    """Append a span, as part of the last one where it goes on from there."""
    piece.blocks += span.blocks
    last = piece.spans[-1] if piece.spans else None
    if last is not None and last.first + last.blocks == span.first:
        piece.spans[-1] = Span(last.first, last.blocks + span.blocks)
    else:
        piece.spans.append(span)


def leading(spans: Sequence[Blocks], blocks: int) -> list[Span]:
    """The spans of the first so many blocks."""
    kept: list[Span] = []
    for span in spans:
        if blocks <= 0:
            break
        kept.append(Span(span.first, min(span.blocks, blocks)))
        blocks -= span.blocks
    return kept
