"""node_link.py with a scripted node client: who waits for it, when it is asked again, and which mapping is used."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvpool_client.background import DUTIES_MAX
from kvpool_client.breaker import BACKOFF_FIRST_MS, BACKOFF_MAX_MS
from kvpool_client.bypass import BYPASS_LOADS, BYPASS_STORES
from kvpool_client.clock import Clock
from kvpool_client.local_socket import Welcome
from kvpool_client.node_link import HELLO_PAUSE_MAX_MS, LOOK_MS, NodeLink
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import LimitReached, NodeUnreachable, ProtocolError, SegmentElsewhere, Unreachable


@dataclass(eq=False)
class Mapped:
    """A mapping of a file that calls itself `contents`; 0: its superblock is spoiled."""

    handle: int
    contents: int
    bits: int = 0
    memory: Any = field(default_factory=lambda: np.zeros(1, dtype=np.uint8))

    @property
    def superblock(self) -> Mapped:
        if not self.contents:
            raise ProtocolError("spoiled")
        return self

    def bypass(self) -> int:
        return self.bits


class Scripted:
    """A LocalClient whose node client is away, or lets in under `epoch` with these (handle, contents)."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.epoch = 5
        self.files: list[tuple[int, int]] = [(1, 71), (2, 72)]
        self.calls: list[str] = []
        self.before: Callable[[], object] = lambda: None

    def _say(self, call: str) -> None:
        self.calls.append(call)
        self.before()
        if self.error is not None:
            raise self.error

    def hello(self, name: str) -> Welcome:
        self._say("hello")
        segments: Any = tuple(Mapped(*file) for file in self.files)
        return Welcome("n", 1, self.epoch, 100 + self.calls.count("hello"), segments)

    def ping(self) -> None:
        self._say("ping")

    def report_bad(self, *_: Any) -> bool:
        self._say("bad")
        return True

    def report_use(self, use: pb.LocalUse) -> None:
        self._say("use")

    def close(self) -> None:
        self.calls.append("close")


class World:
    """A link, its node client, a time that tests move, and the duties that a background thread would do."""

    def __init__(self) -> None:
        self.now_ms = 1_000
        self.node = Scripted()
        self.duties: list[Callable[[], object]] = []
        self.room = DUTIES_MAX
        client: Any = self.node
        self.link = NodeLink(client, "test", Clock(now_ms=lambda: self.now_ms), self._submit, lambda: 0.5)

    def _submit(self, duty: Callable[[], object]) -> bool:
        if len(self.duties) >= self.room:
            return False
        self.duties.append(duty)
        return True

    def work(self) -> None:
        while self.duties:
            self.duties.pop(0)()

    def gone(self) -> bool:
        try:
            self.link.attachment()
        except NodeUnreachable:
            return True
        return False


@pytest.fixture
def world() -> World:
    return World()


USE = pb.LocalUse(namespaces=[pb.NamespaceUse(lookups=1)])
AWAY = Unreachable("no answer")
BAD = (pb.BadBlock(), 7, 1, 0, 4096)

# -- a node client that does not answer ----------------------------------------------------------------


@pytest.mark.parametrize("error", [AWAY, OSError("no room to map"), LimitReached("workers_max"), ProtocolError("?")])
def test_who_lets_nobody_in_costs_one_hello_and_is_probed(world: World, error: Exception) -> None:
    world.node.error = error
    assert all(world.gone() for _ in range(100))
    assert (world.node.calls, world.link.breaks, world.duties) == (["hello"], 1, [])
    for attempt in range(12):
        world.now_ms += 2 * BACKOFF_MAX_MS
        assert all(world.gone() for _ in range(100))  # nobody waits, one probe is sent
        assert len(world.duties) == 1
        world.work()
        assert len(world.node.calls) == 2 + attempt
        world.now_ms += BACKOFF_FIRST_MS - 1
        assert world.gone()
        assert world.duties == []
    world.node.error = None
    world.now_ms += 2 * BACKOFF_MAX_MS
    assert world.gone()
    world.work()
    assert set(world.node.calls) == {"hello"}  # what was missing was asked for
    assert not world.gone()
    assert (world.link.attachment().worker_id, world.link.breaks) == (100 + len(world.node.calls), 1)


def test_a_mapped_node_client_that_dies_is_pinged_and_nothing_is_mapped_anew(world: World) -> None:
    before = world.link.attachment()
    world.node.error = AWAY
    assert not world.link.report_bad(*BAD)
    told: list[int] = []
    for _ in range(50):
        assert not world.link.report_bad(*BAD)
        world.link.report_use(lambda: told.append(1) or USE)
    assert (world.node.calls, told, world.link.breaks) == (["hello", "bad"], [], 1)
    assert world.link.attachment() is before
    world.now_ms += BACKOFF_FIRST_MS
    world.link.report_use(lambda: told.append(1) or USE)
    world.work()
    assert (world.node.calls, told) == (["hello", "bad", "ping"], [])  # still away
    world.node.error = None
    world.now_ms += 2 * BACKOFF_FIRST_MS
    assert not world.link.report_bad(*BAD)
    world.work()
    world.link.report_use(lambda: told.append(1) or USE)
    assert world.link.report_bad(*BAD)
    assert (world.node.calls[3:], told) == (["ping", "use", "bad"], [1])
    assert world.link.attachment() is before


def test_a_refusal_is_an_answer(world: World) -> None:
    world.link.attachment()
    world.node.error = ProtocolError("no such slot")
    assert not world.link.report_bad(*BAD)
    world.node.error = None
    assert world.link.report_bad(*BAD)
    assert world.link.breaks == 0


def test_a_probe_that_finds_no_room_is_sent_later(world: World) -> None:
    world.node.error = AWAY
    assert world.gone()
    world.room = 0
    world.now_ms += BACKOFF_FIRST_MS
    assert world.gone()
    world.room = 1
    assert world.gone()
    assert world.duties == []
    world.now_ms += 2 * BACKOFF_FIRST_MS
    assert world.gone()
    assert len(world.duties) == 1


def test_nothing_is_reported_before_a_hello(world: World) -> None:
    world.link.report_use(lambda: USE)
    assert world.node.calls == []


def test_callers_share_one_hello(world: World) -> None:
    saying, go = threading.Event(), threading.Event()
    world.node.before = lambda: (saying.set(), go.wait(30.0))
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(world.link.attachment().worker_id)) for _ in range(4)]
    threads[0].start()
    assert saying.wait(30.0)
    for thread in threads[1:]:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(30.0)
    assert (found, world.node.calls) == ([101] * 4, ["hello"])


def test_a_closed_link_asks_nobody(world: World) -> None:
    world.node.before = world.link.close  # while the Hello is under way
    assert world.gone()
    world.node.before = lambda: None
    world.now_ms += 2 * BACKOFF_MAX_MS
    assert world.gone()
    assert not world.link.report_bad(*BAD)
    assert (world.node.calls.count("hello"), world.link.bypass(), world.duties) == (1, 0, [])


# -- which mapping is used -----------------------------------------------------------------------------


def test_a_hello_that_brings_nothing_new_changes_nothing_and_becomes_rare(world: World) -> None:
    first = world.link.holding(5, {1, 2})
    assert world.node.calls == ["hello"]
    for _ in range(300):
        with pytest.raises(SegmentElsewhere):
            world.link.holding(5, {1, 9})
        world.now_ms += 100
    assert 30_000 // HELLO_PAUSE_MAX_MS <= world.node.calls.count("hello") <= 30_000 // HELLO_PAUSE_MAX_MS + 8
    assert world.link.attachment() is first


def test_a_new_epoch_maps_anew_and_hits_of_the_former_are_still_read(world: World) -> None:
    former = world.link.attachment()
    with pytest.raises(SegmentElsewhere, match="obeys epoch 5"):
        world.link.attachment(6)  # it has not heard of it
    world.node.epoch, world.node.files = 6, [(1, 72), (2, 80)]  # handles begin anew; 71 is gone, 80 is new
    world.now_ms += HELLO_PAUSE_MAX_MS
    found = world.link.holding(6, {1})
    assert found.worker_id != former.worker_id
    assert world.link.attachment(6) is found
    assert world.link.holding(5, {2}).segments[5][2] is found.segments[6][1]
    hellos = len(world.node.calls)
    with pytest.raises(SegmentElsewhere):
        world.link.holding(5, {1})
    assert len(world.node.calls) == hellos  # nothing can bring that back
    world.node.epoch = 7
    world.now_ms += HELLO_PAUSE_MAX_MS
    world.link.attachment(7)
    assert world.link.attachment().segments.keys() == {6, 7}


def test_new_handles_within_an_epoch(world: World) -> None:
    former = world.link.attachment()
    world.node.files = [(3, 71), (4, 72)]  # it was retired, and came back
    found = world.link.holding(5, {3, 4})
    assert found.worker_id != former.worker_id
    assert world.link.holding(5, {1, 2}).segments[5][1] is found.segments[5][3]
    world.now_ms += HELLO_PAUSE_MAX_MS
    with pytest.raises(SegmentElsewhere):
        world.link.holding(5, {9})
    assert world.link.attachment() is found  # the handles of before do not make the welcome a new one


def test_a_file_that_is_spoiled_is_no_file_of_before(world: World) -> None:
    world.node.files = [(1, 0)]
    world.link.attachment()
    world.node.epoch = 6
    world.link.attachment(6)
    with pytest.raises(SegmentElsewhere):
        world.link.holding(5, {1})


def test_the_switch_is_read_live_from_what_is_mapped(world: World) -> None:
    assert world.link.bypass() == 0
    first, second = world.link.attachment().segments[5].values()
    assert world.link.bypass() == 0
    first.bits, second.bits = BYPASS_LOADS, BYPASS_STORES  # type: ignore[attr-defined]
    assert world.link.bypass() == BYPASS_LOADS | BYPASS_STORES


def test_a_switch_that_nobody_can_turn_back_is_not_obeyed_for_ever(world: World) -> None:
    (first, _) = world.link.attachment().segments[5].values()
    first.bits = BYPASS_LOADS  # type: ignore[attr-defined]
    world.node.files = [(3, 90)]  # the node client began anew on another file
    world.now_ms += LOOK_MS
    assert [world.link.bypass() for _ in range(9)] == [BYPASS_LOADS] * 9
    assert (world.node.calls, len(world.duties)) == (["hello"], 1)
    world.work()
    assert (world.node.calls, world.link.bypass()) == (["hello", "hello"], 0)
    world.now_ms += LOOK_MS
    assert world.link.bypass() == 0
    assert world.duties == []


def test_a_node_client_that_comes_late_is_found_by_who_only_looks_up(world: World) -> None:
    world.node.error = AWAY
    assert world.gone()
    world.node.error = None
    for _ in range(2):
        world.now_ms += LOOK_MS
        assert world.link.bypass() == 0
        with contextlib.suppress(NodeUnreachable):
            world.work()
    assert world.link._attachment is not None
