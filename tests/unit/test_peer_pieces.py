"""peer/pieces.py: how a call is cut, and what its result is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool_client.headers import SLOT_HEADER
from kvpool_client.peer import pieces as pieces_module
from kvpool_client.peer.copies import Grant, PeerCopy, PeerRun
from kvpool_client.peer.judging import portions, sums_of
from kvpool_client.peer.pieces import Span, Turns, cut, leading
from kvpool_client.peer.wire import HASH_BYTES, PIECE_BLOCKS_MAX, PIECE_BYTES_MAX
from kvpool_proto.capability import READ

NOTHING: Any = None


def copy_of(*runs: tuple[int, int, int], part_bytes: int = 10) -> PeerCopy:
    grant = Grant("a:1", "n", READ, 1, 1, b"n" * 16, 0, b"", b"")
    wanted = [PeerRun(*run) for run in runs]
    headers = np.zeros(sum(run.blocks for run in wanted), dtype=SLOT_HEADER)
    return PeerCopy(grant, wanted, headers, NOTHING, part_bytes, 4096)


@pytest.fixture(autouse=True)
def _shares_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "SHARE_BYTES_MIN", 1)


def test_pieces_follow_the_table_and_skip_gaps_in_the_layout() -> None:
    copy = copy_of((0, 3, 10), (5, 2, 13), (9, 4, 30))
    found = cut([copy], 40, 1)
    assert [(one.start, one.at, one.blocks) for one in found] == [(0, 10, 4), (4, 14, 1), (5, 30, 4)]
    assert [one.spans for one in found] == [[Span(0, 3), Span(5, 1)], [Span(6, 1)], [Span(9, 4)]]


def test_leading_blocks_of_all_copies_come_first() -> None:
    found = cut([copy_of((0, 6, 0)), copy_of((0, 6, 0))], 20, 1)
    assert [(one.first, one.copy) for one in found] == [(0, 0), (0, 1), (2, 0), (2, 1), (4, 0), (4, 1)]


def test_a_small_call_is_shared_as_far_as_that_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [one.blocks for one in cut([copy_of((0, 8, 0))], 1_000, 2)] == [4, 4]
    monkeypatch.setattr(pieces_module, "SHARE_BYTES_MIN", 1_000)
    assert [one.blocks for one in cut([copy_of((0, 8, 0))], 1_000, 2)] == [8]


def test_pieces_are_bounded_however_large_blocks_are() -> None:
    (one,) = cut([copy_of((0, 1, 0), part_bytes=2 * PIECE_BYTES_MAX)], 1, 1)
    assert one.blocks == 1
    assert [one.blocks for one in cut([copy_of((0, PIECE_BLOCKS_MAX + 1, 0), part_bytes=1)], 1 << 40, 1)] == [
        PIECE_BLOCKS_MAX,
        1,
    ]
    sizes = [one.blocks for one in cut([copy_of((0, 3, 0), part_bytes=PIECE_BYTES_MAX // 2)], 1 << 40, 1)]
    assert sizes == [2, 1]
    assert cut([], 1, 1) == []
    assert cut([copy_of()], 1, 1) == []


def test_nothing_is_begun_behind_the_block_where_a_piece_ended() -> None:
    copies = [copy_of((0, 6, 0)), copy_of((0, 6, 0))]
    turns = Turns(copies, cut(copies, 20, 1))
    first, second = turns.take(), turns.take()
    assert first is not None
    assert second is not None
    turns.ended(second, 1, "stale_stamp")
    turns.ended(first, 2, "")
    assert turns.take() is None
    assert turns.totals() == [(2, ""), (1, "stale_stamp")]


def test_a_gap_ends_the_total_whatever_came_behind_it() -> None:
    copies = [copy_of((0, 6, 0))]
    turns = Turns(copies, cut(copies, 20, 1))
    taken = [turns.take() for _ in range(3)]
    for piece, done in zip(taken, (2, 1, 2), strict=True):
        assert piece is not None
        turns.ended(piece, done, "" if done == 2 else "torn_header")
    assert turns.totals() == [(3, "torn_header")]
    turns = Turns(copies, cut(copies, 20, 1))
    turns.stop()
    assert (turns.take(), turns.totals()) == (None, [(0, "")])


def test_leading_spans() -> None:
    spans = [Span(3, 2), Span(8, 4)]
    assert leading(spans, 0) == []
    assert leading(spans, 3) == [Span(3, 2), Span(8, 1)]
    assert leading(spans, 9) == spans


@given(part_bytes=st.integers(1, 60), blocks=st.integers(1, 9), every=st.integers(1, 4), draw=st.data())
def test_blocks_are_hashed_however_they_lie(part_bytes: int, blocks: int, every: int, draw: st.DataObject) -> None:
    first = draw.draw(st.integers(0, every - 1))
    bytes_of = np.random.default_rng(1).bytes(part_bytes * blocks)
    whole = memoryview(bytes_of)
    rows = [whole[at : at + part_bytes] for at in range(0, len(whole), part_bytes)]
    cuts = sorted({0, part_bytes, *draw.draw(st.lists(st.integers(0, part_bytes), max_size=3))})
    parts = [row[low:high] for row in rows for low, high in pairwise(cuts)]
    wanted = [int(sums_of([row], part_bytes)[0]) if (at - first) % every == 0 else 0 for at, row in enumerate(rows)]
    for pieces in ([whole], rows, parts):
        assert sums_of(pieces, part_bytes, every, first).tolist() == wanted


def test_portions_are_whole_blocks() -> None:
    part_bytes = HASH_BYTES // 3 + 1
    whole = memoryview(bytes(5 * part_bytes))
    rows = [whole[at : at + part_bytes // 2] for at in range(0, len(whole), part_bytes // 2)]
    for pieces in ([whole], rows if part_bytes % 2 == 0 else [whole]):
        sizes = [sum(map(len, some)) for some in portions(pieces, part_bytes)]
        assert sizes == [2 * part_bytes, 2 * part_bytes, part_bytes]
    assert [sum(map(len, some)) for some in portions([memoryview(bytes(9))], 3)] == [9]
    large = memoryview(bytes(2 * (HASH_BYTES + 5)))
    assert [sum(map(len, some)) for some in portions([large], HASH_BYTES + 5)] == [HASH_BYTES + 5] * 2
