"""peer/wire.py and peer/grants.py: frames, their limits, and the capabilities of a connection."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvpool_client.peer import wire
from kvpool_client.peer.copies import Grant
from kvpool_client.peer.grants import Numbered, Placed
from kvpool_client.peer.wire import Answer, Ask
from kvpool_proto.capability import READ, RUNS_MAX, part_table
from kvpool_proto.errors import ProtocolError, UnknownSegment
from unit.segment_world import header_of


class Segment:
    """As much of one as a table needs."""

    slab_bytes = 1 << 20


def grant_of(**columns: Any) -> Grant:
    told: dict[str, Any] = {"segment": [7, 7], "first_slot": [5, 40], "blocks": [4, 6], "stride": [2, 1]}
    told |= {"stamp": [9, 8], "part_from": [0, 0]} | columns
    return Grant("", "", READ, 10, 99, b"n" * 16, 0, part_table(0, **told).tobytes(), b"m" * 16)


def placed(**columns: Any) -> Placed:
    segments = {7: Segment()}
    return Placed(grant_of(**columns), lambda handle: segments[handle])  # type: ignore[return-value,arg-type]


def test_frames_come_out_as_they_went_in() -> None:
    frame = wire.pack_grant(3, grant_of())
    assert wire.body_bytes(frame[:8]) == (wire.GRANT, 3, len(frame) - 8)
    assert wire.parse_grant(frame[8:]) == grant_of()
    ask, headers = Ask(3, 70_000, 2, True, 5000), wire.sealed(np.concatenate([header_of(), header_of(stamp=8)]))
    frame = wire.pack_ask(wire.ASK_WRITE, ask, headers)
    found, told = wire.parse_ask(wire.body_bytes(frame[:8])[1], frame[8:])
    assert (found, told.tobytes()) == (ask, headers.tobytes())
    for answer in (Answer(True, 3), Answer(False, 0, "slab_changed", "words\nand more")):
        frame = wire.pack_answer(answer)
        go, blocks, size_bytes = wire.text_bytes(frame[:8])
        assert (len(frame), wire.answer_of(go, blocks, frame[8:])) == (8 + size_bytes, answer)
    wire.check_hello(wire.pack_hello()[:8], wire.pack_hello()[8:])


@pytest.mark.parametrize(
    ("kind", "size_bytes"),
    [
        (0, 16),
        (wire.ANSWER, 16),
        (wire.HELLO, 15),
        (wire.HELLO, 17),
        (wire.GRANT, 70),
        (wire.GRANT, wire.BODY_BYTES_MAX[wire.GRANT] + 1),
        (wire.ASK_READ, wire.BODY_BYTES_MAX[wire.ASK_READ] + 1),
        (wire.ASK_WRITE, wire.BODY_BYTES_MAX[wire.ASK_WRITE] + 1),
        (wire.ASK_WRITE, (1 << 32) - 1),
    ],
)
def test_a_frame_is_judged_by_its_head(kind: int, size_bytes: int) -> None:
    with pytest.raises(ProtocolError):
        wire.body_bytes(wire.HEAD.pack(kind, 0, size_bytes))


@pytest.mark.parametrize(
    ("blocks", "part_bytes"),
    [(0, 1), (1, 0), (1025, 1), (1, wire.PART_BYTES_MAX + 1), (2, wire.PIECE_BYTES_MAX // 2 + 1)],
)
def test_no_more_than_a_piece_is_asked_for(blocks: int, part_bytes: int) -> None:
    frame = wire.pack_ask(wire.ASK_READ, Ask(0, 0, blocks, False, part_bytes))
    with pytest.raises(ProtocolError):
        wire.parse_ask(0, frame[8:])
    wire.parse_ask(0, wire.pack_ask(wire.ASK_READ, Ask(0, 0, 1, False, wire.PIECE_BYTES_MAX + 1))[8:])


def test_another_version_and_another_protocol_are_refused() -> None:
    hello = wire.pack_hello()
    newer = hello[:16] + struct.pack("<H", wire.VERSION + 1) + hello[18:]
    with pytest.raises(ProtocolError, match=f"version {wire.VERSION + 1}, this one {wire.VERSION}"):
        wire.check_hello(newer[:8], newer[8:])
    for head, body in ((hello[:8], b"x" + hello[9:]), (hello[:8], b""), (b"GET / HT", hello[8:])):
        with pytest.raises(ProtocolError):
            wire.check_hello(head, body)


def test_a_reason_that_nobody_knows_is_a_broken_protocol() -> None:
    assert wire.answer_of(False, 0, b"free beer\nwords").reason == "protocol"
    assert wire.answer_of(False, 0, b"\xff\xfe").reason == "protocol"
    assert wire.answer_of(False, 0, b"peer_busy").reason == "peer_busy"
    long = wire.pack_answer(Answer(False, 0, "protocol", "x" * 10_000))
    assert wire.text_bytes(long[:8])[2] == wire.TEXT_BYTES_MAX == len(long) - 8
    with pytest.raises(ProtocolError):
        wire.text_bytes(wire.HEAD.pack(wire.ANSWER, wire.TEXT_BYTES_MAX + 1, 0))


def test_headers_that_were_damaged_on_their_way_are_noticed() -> None:
    headers = wire.sealed(header_of())
    assert wire.seal_holds(headers)
    headers["key"] = np.void(b"other".ljust(32, b"\0"))
    assert not wire.seal_holds(headers)


def test_where_the_blocks_of_a_table_lie() -> None:
    runs = placed().runs(3, 5, 5000)
    assert [(run.first, run.blocks, run.slot, run.stride, run.stamp) for run in runs] == [
        (0, 1, 11, 2, 9),
        (1, 4, 40, 1, 8),
    ]
    assert [(run.slot, run.blocks) for run in placed().runs(4, 1, 5000)] == [(40, 1)]
    with pytest.raises(ProtocolError):
        placed().runs(6, 5, 5000)


@pytest.mark.parametrize(
    "columns",
    [
        {"blocks": [4, 0]},
        {"stride": [0, 1]},
        {"blocks": [(1 << 32) - 1, 1], "stride": [(1 << 32) - 1, 1]},
        {"first_slot": [(1 << 32) - 1, 0]},
        {"blocks": [1 << 31, 1 << 31], "stride": [1, 1], "first_slot": [0, 0]},
    ],
)
def test_tables_that_cannot_be(columns: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        placed(**columns)


def test_a_segment_that_is_not_ours() -> None:
    def none(handle: int) -> Any:
        raise UnknownSegment(str(handle))

    with pytest.raises(UnknownSegment):
        Placed(grant_of(), none)
    with pytest.raises(ProtocolError):
        Placed(replace(grant_of(), table=b""), none)


def test_few_capabilities_are_kept_and_the_oldest_go() -> None:
    kept: Numbered[str] = Numbered()
    for number in range(wire.GRANTS_MAX + 1):
        kept.put(number, f"g{number}", 1)
    assert (kept.get(0), kept.get(1), kept.number_of(lambda one: one == "g2")) == (None, "g1", 2)
    for number in range(4):
        kept.put(number, "long", RUNS_MAX)
    assert kept.get(wire.GRANTS_MAX) is None, "too many runs together"
    kept.put(4, "one more", 1)
    assert [kept.get(number) for number in range(5)] == [None, "long", "long", "long", "one more"]
    kept.put(3, "again", RUNS_MAX)
    assert (kept.get(1), kept.get(3)) == ("long", "again")
