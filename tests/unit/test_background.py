"""background.py: duties are done in order, bounded, and whatever happens to one the next is done."""

from __future__ import annotations

import threading

import pytest

from kvpool_client.background import DUTIES_MAX, Background
from kvpool_proto.errors import Unreachable


def fail(error: Exception) -> None:
    raise error


def test_duties_are_done_in_order_and_errors_end_with_them() -> None:
    background = Background()
    done: list[int] = []
    for number in range(5):
        assert background.submit(lambda number=number: done.append(number))
        assert background.submit(lambda: fail(Unreachable("nobody")))
    assert background.flush(30.0)
    assert done == [0, 1, 2, 3, 4]
    background.close(1.0)
    assert not background.submit(lambda: None)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_a_duty_does_not_end_the_others() -> None:
    background = Background()
    assert background.submit(lambda: fail(KeyError("a bug")))
    thread = background._thread
    assert thread is not None
    thread.join(30.0)
    done = threading.Event()
    assert background.submit(done.set)
    assert done.wait(30.0)
    assert background.flush(30.0)
    background.close(1.0)


def test_what_does_not_fit_is_dropped() -> None:
    background = Background()
    go, at_it = threading.Event(), threading.Event()
    assert background.submit(lambda: (at_it.set(), go.wait(30.0)))
    assert at_it.wait(30.0)
    assert all(background.submit(lambda: None) for _ in range(DUTIES_MAX))
    assert not background.submit(lambda: None)
    assert not background.flush(0.0)
    go.set()
    assert background.flush(30.0)
    background.close(1.0)


def test_no_room_for_a_thread_drops_the_duty(monkeypatch: pytest.MonkeyPatch) -> None:
    background = Background(idle=lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: fail(RuntimeError("can't start new thread")))
        assert not background.submit(lambda: None)
        background.want_idle()
    done = threading.Event()
    assert background.submit(done.set)
    assert done.wait(30.0)
    background.close(1.0)
