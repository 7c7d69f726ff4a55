"""lanes.py with scripted engines: who runs which lane, and what the lanes' results come to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool_client.clock import Clock
from kvpool_client.lanes import THREADS_MAX, Lanes
from kvpool_client.peer.copies import PeerRun
from kvpool_client.peers import Peers
from kvpool_client.transfer_engine import Copied, Term, Written
from kvpool_client.transfer_plan import Plan

CLOCK = Clock(now_ms=lambda: 1_000)
TERM = Term(CLOCK, 2_000, "time_over")


def copy(part: int, *runs: tuple[int, int]) -> Any:
    """A copy of a part's blocks: (first, how many) of each run. Fits both kinds."""
    return SimpleNamespace(part=part, grant=SimpleNamespace(part=part), runs=[PeerRun(*run, at=0) for run in runs])


class Engine:
    """Answers what it is told to, and remembers the threads in which it was asked."""

    def __init__(self, answer: Callable[[Sequence[Any]], Any]) -> None:
        self.answer = answer
        self.device = None
        self.threads: list[int] = []
        self.closed = False

    def read(self, copies: Sequence[Any], term: Term) -> Any:
        self.threads.append(threading.get_ident())
        return self.answer(copies)

    def write(self, copies: Sequence[Any], term: Term, progress: Callable[[list[int]], str]) -> Any:
        self.threads.append(threading.get_ident())
        return self.answer([*copies, progress])

    def close(self) -> None:
        self.closed = True


def lanes_of(here: Engine, peer: Engine) -> Lanes:
    return Lanes(here, peer, Peers(CLOCK, lambda *_: None))  # type: ignore[arg-type]


def all_of(copies: Sequence[Any]) -> list[Copied]:
    return [Copied(sum(run.blocks for run in one.runs)) for one in copies]


def never(copies: Sequence[Any]) -> Any:
    raise AssertionError("nobody asked for this")


# -- threads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [Plan([copy(0, (0, 5))]), Plan([], {"m": [copy(0, (0, 5))]}), Plan()])
def test_one_lane_starts_no_thread(plan: Plan) -> None:
    here, peer = Engine(all_of), Engine(all_of)
    lanes = lanes_of(here, peer)
    before = threading.active_count()
    assert lanes.read(plan, 5, TERM).copied == Copied(5)
    assert threading.active_count() == before
    assert {*here.threads, *peer.threads} <= {threading.get_ident()}


def test_the_local_lane_is_the_callers() -> None:
    here, peer = Engine(all_of), Engine(all_of)
    plan = Plan([copy(0, (0, 5))], {"m": [copy(0, (5, 2))], "k": [copy(0, (7, 1))]})
    assert lanes_of(here, peer).read(plan, 8, TERM).copied == Copied(8)
    assert here.threads == [threading.get_ident()]
    assert len(peer.threads) == 2


def test_nobody_waits_for_a_thread() -> None:
    """While all threads are taken, calls do all their lanes themselves."""
    go, taken = threading.Event(), threading.Semaphore(0)

    def stuck(copies: Sequence[Any]) -> list[Copied]:
        taken.release()
        assert go.wait(30.0)
        return all_of(copies)

    lanes = lanes_of(Engine(all_of), peer := Engine(stuck))
    plan = Plan([copy(0, (0, 1))], {f"m{number}": [copy(0, (1 + number, 1))] for number in range(THREADS_MAX)})
    blocked = threading.Thread(target=lanes.read, args=(plan, 1 + THREADS_MAX, TERM))
    blocked.start()
    for _ in range(THREADS_MAX):
        assert taken.acquire(timeout=30.0)
    peer.answer = all_of
    peer.threads.clear()
    plan = Plan([copy(0, (0, 1))], {"a": [copy(0, (1, 1))], "b": [copy(0, (2, 1))]})
    assert lanes.read(plan, 3, TERM).copied == Copied(3)
    assert peer.threads == [threading.get_ident()] * 2
    go.set()
    blocked.join(30.0)
    assert not blocked.is_alive()


def test_calls_go_on_after_close() -> None:
    here, peer = Engine(all_of), Engine(all_of)
    lanes = lanes_of(here, peer)
    lanes.close()
    assert here.closed
    assert peer.closed
    assert lanes.read(Plan([copy(0, (0, 1))], {"m": [copy(0, (1, 1))]}), 2, TERM).copied == Copied(2)


def test_what_the_own_device_raises_is_raised_when_all_lanes_have_ended() -> None:
    ended: list[str] = []

    def broken(copies: Sequence[Any]) -> Any:
        raise MemoryError("the engine's own")

    def slow(copies: Sequence[Any]) -> list[Copied]:
        threading.Event().wait(0.05)
        ended.append("m")
        return all_of(copies)

    with pytest.raises(MemoryError):
        lanes_of(Engine(broken), Engine(slow)).read(Plan([copy(0, (0, 1))], {"m": [copy(0, (1, 1))]}), 2, TERM)
    assert ended == ["m"]


def test_no_peer_is_asked_when_time_is_up_or_another_epoch_rules() -> None:
    plan = Plan([], {"m": [copy(0, (0, 5))]})
    lanes = lanes_of(Engine(never), Engine(never))
    assert lanes.read(plan, 5, Term(CLOCK, 1_000, "lease_expired")).copied == Copied(0, "lease_expired")
    found = lanes.write(plan, Term(CLOCK, 2_000, "time_over", 7, lambda: 8), lambda _: "")
    assert (found.blocks, found.reason, found.unconfirmed) == ({0: 0}, "stale_epoch", frozenset())


# -- what a load comes to ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "far", "blocks", "reason", "far_blocks"),
    [
        (Copied(6), Copied(4), 10, "", 4),
        (Copied(6), Copied(0, "peer_unreachable"), 3, "peer_unreachable", 0),
        (Copied(6), Copied(3, "verify_failed"), 8, "verify_failed", 3),
        (Copied(2, "stale_stamp"), Copied(4), 2, "stale_stamp", 0),
        (Copied(4, "stale_stamp"), Copied(4), 7, "stale_stamp", 3),
        (Copied(4, "stale_stamp"), Copied(2, "peer_busy"), 5, "peer_busy", 2),
    ],
)
def test_the_leading_run_counts(here: Copied, far: Copied, blocks: int, reason: str, far_blocks: int) -> None:
    """Blocks 0 to 2 and 6, 7 and 9 lie here, the others on m."""
    plan = Plan([copy(0, (0, 3), (6, 2), (9, 1))], {"m": [copy(0, (3, 3), (8, 1))]})
    loaded = lanes_of(Engine(lambda _: [here]), Engine(lambda _: [far])).read(plan, 10, TERM)
    assert (loaded.copied.blocks, loaded.copied.reason, loaded.far_blocks) == (blocks, reason, far_blocks)


def test_the_reason_is_that_of_the_copy_that_ended_not_of_one_that_was_stopped() -> None:
    plan = Plan([copy(0, (0, 9)), copy(1, (0, 9))])
    lanes = lanes_of(Engine(lambda _: [Copied(4), Copied(4, "torn_header")]), Engine(never))
    assert lanes.read(plan, 9, TERM).copied == Copied(4, "torn_header")


# -- what a store comes to -----------------------------------------------------------------------------


def stored(here: Written, far: Written) -> Any:
    """Part 0: blocks 0 to 3 and 6 here, 4 and 5 on m. Part 1: 0 to 6 on m."""
    plan = Plan([copy(0, (0, 4), (6, 1))], {"m": [copy(0, (4, 2)), copy(1, (0, 7))]})
    return lanes_of(Engine(lambda _: here), Engine(lambda _: far)).write(plan, TERM, lambda _: "")


def test_the_leading_run_of_each_part_is_stored() -> None:
    assert stored(Written([5]), Written([2, 7])).blocks == {0: 7, 1: 7}
    found = stored(Written([5]), Written([1, 6], "timed_out"))
    assert (found.blocks, found.reason, found.unconfirmed) == ({0: 5, 1: 6}, "timed_out", frozenset())
    found = stored(Written([2], "write_expired"), Written([2, 7]))
    assert (found.blocks, found.reason) == ({0: 2, 1: 7}, "write_expired")
    found = stored(Written([5]), Written([0, 3], "peer_unreachable", confirmed=False))
    assert (found.blocks, found.unconfirmed) == ({0: 4, 1: 3}, {0, 1})


def test_a_newer_epoch_is_the_reason_whatever_else_went_wrong() -> None:
    assert stored(Written([2], "time_over"), Written([0, 0], "stale_epoch")).reason == "stale_epoch"


def test_progress_is_that_of_all_lanes_and_one_reason_stops_them_all() -> None:
    told: list[dict[int, int]] = []
    met = threading.Barrier(2, timeout=30.0)

    def here(words: Sequence[Any]) -> Written:
        *_, progress = words
        assert progress([3]) == ""
        met.wait()
        met.wait()
        return Written([3], progress([3]))

    def far(words: Sequence[Any]) -> Written:
        *_, progress = words
        met.wait()
        reason = progress([2])
        met.wait()
        return Written([2], reason)

    def report(blocks: dict[int, int]) -> str:
        told.append(dict(blocks))
        return "lost" if len(told) == 2 else ""

    plan = Plan([copy(0, (0, 5))], {"m": [copy(0, (5, 3))]})
    found = lanes_of(Engine(here), Engine(far)).write(plan, TERM, report)
    assert (told, found.blocks, found.reason) == ([{0: 3}, {0: 3}], {0: 3}, "lost")
