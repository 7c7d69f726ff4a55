"""Orders wait for their node, are sent until they are answered, and are bounded."""

from __future__ import annotations

import pytest

from kvpool_master import sessions as s
from kvpool_master.core.messages import BindSlab, Retire, SlabBound
from kvpool_master.sessions import Sessions
from unit.master_double import play


def order(slab: int, slot_bytes: int = 4096) -> BindSlab:
    return BindSlab("a", 1, slab, slot_bytes)


def test_an_answer_to_an_older_order_does_not_answer_the_newer() -> None:
    async def scene() -> None:
        sessions = Sessions()
        sessions.registered("a", 1)
        sessions.carry_out([order(0, 4096), order(0, 8192)])
        sessions.answered(SlabBound("a", 1, 1, 0, 4096))
        assert await sessions.open("a", 1).next() == [order(0, 8192)]

    play(scene)


def test_a_newer_incarnation_gets_no_order_of_the_older() -> None:
    async def scene() -> None:
        sessions = Sessions()
        sessions.registered("a", 1)
        sessions.carry_out([order(0)])
        sessions.registered("a", 2)
        assert await sessions.open("a", 2).next() == []

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


def test_orders_go_in_messages_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s, "ORDERS_PER_MESSAGE", 2)

    async def scene() -> None:
        sessions = Sessions()
        sessions.registered("a", 1)
        sessions.carry_out([order(slab) for slab in range(3)])
        session = sessions.open("a", 1)
        assert [await session.next(), await session.next()] == [[order(0), order(1)], [order(2)]]

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
