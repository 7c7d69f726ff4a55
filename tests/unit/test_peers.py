"""peers.py: which nodes are avoided, for how long, and who hears of it."""

from __future__ import annotations

from kvpool_client.clock import Clock
from kvpool_client.peers import AVOID_FIRST_MS, AVOID_MAX_MS, NODES_MAX, Peers, Turn


class World:
    """Peers, a time that only tests move, and what was reported. Waits are as long as they are named."""

    def __init__(self) -> None:
        self.now_ms = 1_000
        self.reports: list[tuple[str, str]] = []
        self.peers = Peers(Clock(now_ms=lambda: self.now_ms), lambda *report: self.reports.append(report), lambda: 0.5)

    def use(self, node_id: str, silence: str = "") -> bool:
        """Was it used?"""
        turn = self.peers.begin(node_id)
        if turn is not None:
            self.peers.end(turn, silence)
        return turn is not None


def test_a_silent_node_is_avoided_for_growing_times() -> None:
    world = World()
    assert world.use("m", "peer_unreachable")
    wait_ms = AVOID_FIRST_MS
    for _ in range(8):
        assert world.peers.waits("m")
        assert world.peers.avoided() == ["m"]
        world.now_ms += wait_ms - 1
        assert not world.use("m", "peer_unreachable")
        world.now_ms += 1
        assert (world.peers.waits("m"), world.peers.avoided()) == (False, [])
        assert world.use("m", "peer_unreachable")
        wait_ms = min(2 * wait_ms, AVOID_MAX_MS)
    assert (world.reports, world.peers.breaks) == ([("m", "peer_unreachable")], 1)


def test_one_call_goes_first() -> None:
    world = World()
    world.use("m", "timed_out")
    world.now_ms += AVOID_FIRST_MS
    probe = world.peers.begin("m")
    assert probe == Turn("m", probe=True)
    assert world.peers.begin("m") is None
    assert world.peers.waits("m")
    world.peers.end(probe, "")
    assert world.use("m")
    assert not world.peers.waits("m")
    world.use("m", "timed_out")
    assert (world.reports, world.peers.breaks) == ([("m", "timed_out")] * 2, 2)


def test_calls_that_were_under_way_change_nothing() -> None:
    world = World()
    turns = [world.peers.begin("m") for _ in range(5)]
    for turn in turns:
        assert turn is not None
        world.peers.end(turn, "peer_unreachable")
    world.now_ms += AVOID_FIRST_MS
    assert not world.peers.waits("m")
    assert (len(world.reports), world.peers.breaks) == (1, 1)


def test_who_answers_what_nobody_understands_is_not_reported() -> None:
    world = World()
    world.use("m", "protocol")
    world.use("k", "internal")
    assert (world.peers.avoided(), world.reports) == (["m", "k"], [])


def test_the_node_that_failed_first_is_forgotten_for_one_more() -> None:
    world = World()
    for number in range(NODES_MAX + 1):
        world.use(f"n{number}", "peer_unreachable")
    assert not world.peers.waits("n0")
    assert len(world.peers.avoided()) == NODES_MAX
