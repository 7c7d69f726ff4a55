"""peer/writes.py: writes in progress, and fences."""

from __future__ import annotations

import threading

import pytest

from kvpool_client.peer import writes as writes_module
from kvpool_client.peer.writes import PeerWrites
from kvpool_proto.errors import PeerBusy, ReservationEnded

HERE, THERE = object(), object()


@pytest.fixture
def writes() -> PeerWrites:
    return PeerWrites()


def test_no_two_write_the_same_slots(writes: PeerWrites) -> None:
    token = writes.begin(HERE, [1, 2, 3], 5)
    for stamp in (5, 6):
        with pytest.raises(PeerBusy):
            writes.begin(HERE, [3, 4], stamp)
    writes.begin(HERE, [4], 5)
    writes.begin(THERE, [1, 2], 5)
    assert (writes.in_progress(HERE), writes.in_progress(THERE), writes.open) == ({1, 2, 3, 4}, {1, 2}, 3)
    writes.end(token)
    writes.begin(HERE, [3], 6)
    assert writes.in_progress(HERE) == {3, 4}


def test_a_fence_lets_nothing_begin_and_ends_what_is_under_way(writes: PeerWrites) -> None:
    aborted: list[str] = []
    token = writes.begin(HERE, [1], 5, lambda: aborted.append("5"))
    writes.begin(HERE, [2], 6, lambda: aborted.append("6"))
    assert not writes.fence([5, 7], 0)
    assert aborted == ["5"]
    for stamp in (5, 7):
        with pytest.raises(ReservationEnded):
            writes.begin(HERE, [9], stamp)
    writes.end(token)
    assert writes.fence([5, 7], 0)
    writes.begin(HERE, [9], 8)


def test_a_fence_waits_until_the_write_has_ended(writes: PeerWrites) -> None:
    ended = threading.Event()
    token = writes.begin(HERE, [1], 5, ended.set)
    thread = threading.Thread(target=lambda: (ended.wait(10), writes.end(token)))
    thread.start()
    assert writes.fence([5], 10)
    thread.join()


def test_a_write_ends_whatever_becomes_of_it(writes: PeerWrites) -> None:
    with pytest.raises(EOFError), writes.under(HERE, [1], 5):
        raise EOFError
    assert not writes.in_progress(HERE)


def test_the_dead_are_forgotten_oldest_first(writes: PeerWrites, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes_module, "DEAD_STAMPS_MAX", 3)
    for stamp in (1, 2, 3, 1, 4):
        assert writes.fence([stamp], 0)
    for stamp in (3, 1, 4):
        with pytest.raises(ReservationEnded):
            writes.begin(HERE, [1], stamp)
    writes.begin(HERE, [1], 2)
