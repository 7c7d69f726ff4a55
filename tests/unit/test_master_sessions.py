"""Orders wait for their node, are sent until they are answered, and are bounded."""

from __future__ import annotations

import asyncio

import pytest

from kvpool_master import sessions as s
from kvpool_master.core.messages import (
    AskInventory,
    AskWorkers,
    BindSlab,
    Bury,
    ClearSlots,
    CopySlots,
    ProbeAnswered,
    ProbeNode,
    Remember,
    Retire,
    SlabBound,
    SlotsCleared,
    SlotsCopied,
)
from kvpool_master.sessions import Sessions, SetBypass
from kvpool_proto.errors import UnknownNode
from unit.master_double import play


def order(slab: int, slot_bytes: int = 4096) -> BindSlab:
    return BindSlab("a", 1, slab, slot_bytes)


def clear(number: int, runs: int = 1, node: str = "a") -> ClearSlots:
    return ClearSlots(node, number, 1, 4096, tuple((at, 1, 9) for at in range(runs)))


def copy(number: int, stamp: int = 0, parts: int = 1) -> CopySlots:
    return CopySlots("a", number, b"n", 4096, (0, 2, 5, 0, 0, parts, parts, 3), 1, 0, stamp or number)


def test_an_answer_to_an_older_order_does_not_answer_the_newer() -> None:
    async def scene() -> None:
        sessions = Sessions()
        sessions.registered("a", 1)
        sessions.carry_out([order(0, 4096), order(0, 8192)])
        sessions.bound(SlabBound("a", 1, 1, 0, 4096))
        assert await sessions.open("a", 1).next() == [order(0, 8192)]

    play(scene)


def test_a_registration_starts_with_nothing() -> None:
    async def scene() -> None:
        sessions = Sessions()
        for incarnation in (1, 1, 2):
            sessions.registered("a", incarnation)
            assert await sessions.open("a", incarnation).next() == []
            sessions.carry_out([order(0), clear(1), AskInventory("a", incarnation, 1)])

    play(scene)


def test_what_is_never_answered_is_told_on_every_session_and_only_the_newest_of_it() -> None:
    async def scene() -> None:
        sessions = Sessions()
        sessions.registered("a", 1)
        first = sessions.open("a", 1)
        assert await first.next() == []
        sessions.carry_out(
            [Remember(node="a"), AskWorkers("a", (5,)), AskInventory("a", 1, 1), AskInventory("a", 0, 9)]
        )
        sessions.carry_out([AskInventory("a", 1, 2), AskWorkers("a", (6, 7))])
        told = [
            sessions.tell_all(one) for one in (Bury(b"n", 3), Bury(b"m", 4), Bury(b"n", 5), SetBypass(1), SetBypass(0))
        ]
        assert told == [1] * 5
        assert len(await first.next() or []) == 9
        newest = [AskWorkers("a", (6, 7)), AskInventory("a", 1, 2), Bury(b"n", 5), Bury(b"m", 4), SetBypass(0)]
        assert await sessions.open("a", 1).next() == newest
        sessions.reported("a")
        newest.remove(AskInventory("a", 1, 2))
        assert await sessions.open("a", 1).next() == newest

    play(scene)


def test_a_node_that_is_gone_is_forgotten_and_its_orders_with_it() -> None:
    async def scene() -> None:
        sessions = Sessions()
        sessions.registered("a", 1)
        session = sessions.open("a", 1)
        sessions.carry_out([order(0), Retire("a", 1), order(1)])
        assert await session.next() is None
        assert session.retired
        assert not sessions.closed(session)
        assert await sessions.open("a", 1).next() == []

    play(scene)


def test_when_all_are_forgotten_their_sessions_end_with_the_reason() -> None:
    async def scene() -> None:
        sessions = Sessions()
        sessions.registered("a", 1)
        session = sessions.open("a", 1)
        sessions.forget_all(UnknownNode("anew"))
        assert await session.next() is None
        assert session.error is not None
        assert session.error.reason == "NODE_UNKNOWN"
        assert not sessions.closed(session)

    play(scene)


def test_orders_go_in_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s, "ROWS_PER_MESSAGE", 3)

    async def scene() -> None:
        sessions = Sessions()
        sessions.registered("a", 1)
        sent = [order(0), clear(1), order(1), clear(2, runs=5), order(2)]
        sessions.carry_out(sent)
        session = sessions.open("a", 1)
        assert [await session.next() for _ in range(4)] == [sent[:2], sent[2:3], sent[3:4], sent[4:]]

    play(scene)


def test_a_node_that_answers_nothing_loses_its_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s, "ORDERS_MAX", 2)

    async def scene() -> None:
        sessions = Sessions()
        sessions.registered("a", 1)
        session = sessions.open("a", 1)
        sessions.carry_out([order(slab) for slab in range(3)])
        assert await session.next() is None
        assert session.error is not None
        assert session.error.reason == "LIMIT"
        assert sessions.closed(session)

    play(scene)


def test_who_waits_for_cleared_slots_hears_of_all_answers_or_who_did_not_answer() -> None:
    async def scene() -> None:
        sessions = Sessions()
        for node in ("a", "b"):
            sessions.registered(node, 1)
        assert await sessions.settled([], 60) == set()
        orders = [clear(1), clear(2, node="b"), clear(3)]
        sessions.carry_out(orders)
        waiting = asyncio.create_task(sessions.settled(orders, 60))
        await asyncio.sleep(0)
        for node, number in (("a", 3), ("a", 2), ("a", 1)):  # order 2 is another node's
            sessions.cleared(SlotsCleared(node, 1, number))
        await asyncio.sleep(0)
        assert not waiting.done()
        sessions.cleared(SlotsCleared("b", 1, 2))
        assert await waiting == set()
        assert await sessions.open("a", 1).next() == []
        sessions.carry_out([clear(4), clear(5, node="b")])
        assert await sessions.settled([clear(4), clear(5, node="b")], 0) == {"a", "b"}
        assert await sessions.open("a", 1).next() == [clear(4)]

    play(scene)


def test_a_probe_stands_until_its_own_answer_and_only_the_newest() -> None:
    async def scene() -> None:
        sessions = Sessions()
        sessions.registered("a", 1)
        sessions.carry_out([ProbeNode("a", 3), ProbeNode("a", 4), ProbeNode("b", 5)])
        sessions.probed(ProbeAnswered("a", 1, 3))
        assert await sessions.open("a", 1).next() == [ProbeNode("a", 4)]
        sessions.probed(ProbeAnswered("a", 1, 4))
        assert await sessions.open("a", 1).next() == []

    play(scene)


def test_a_copy_is_told_on_each_session_until_it_is_answered_or_its_slots_are_to_be_cleared() -> None:
    async def scene() -> None:
        sessions = Sessions()
        sessions.registered("a", 1)
        session = sessions.open("a", 1)
        sessions.carry_out([copy(1), copy(2), copy(3, stamp=9), copy(4)])
        assert await session.next() == [copy(1), copy(2), copy(3, stamp=9), copy(4)]
        sessions.copied(SlotsCopied("a", 1, 2, 1))
        sessions.copied(SlotsCopied("a", 1, 7, 1))
        # The core gave the third up: a node that is told of it again would write where others may.
        sessions.carry_out([clear(5, runs=2)])
        assert await sessions.open("a", 1).next() == [copy(1), copy(4), clear(5, runs=2)]
        sessions.carry_out([clear(6, runs=2)])
        sessions.copied(SlotsCopied("a", 1, 1, 2))
        sessions.copied(SlotsCopied("a", 1, 4, 2))
        assert await sessions.open("a", 1).next() == [clear(5, runs=2), clear(6, runs=2)]

    play(scene)


def test_a_copy_counts_a_row_for_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s, "ROWS_PER_MESSAGE", 4)

    async def scene() -> None:
        sessions = Sessions()
        sessions.registered("a", 1)
        sessions.carry_out([order(0), copy(1, parts=2), order(1)])
        session = sessions.open("a", 1)
        assert [await session.next() for _ in range(2)] == [[order(0), copy(1, parts=2)], [order(1)]]

    play(scene)


def test_a_node_that_is_heard_is_told_the_time_now_and_then() -> None:
    async def scene() -> None:
        sessions = Sessions()
        sessions.registered("a", 1)
        session = sessions.open("a", 1)
        assert await session.next() == []
        session.told_ms = 1_000
        told = asyncio.create_task(session.next())
        session.heard(1_000 + s.TIME_TOLD_MS - 1)
        await asyncio.sleep(0)
        assert not told.done()
        session.heard(1_000 + s.TIME_TOLD_MS)
        assert await told == []

    play(scene)
