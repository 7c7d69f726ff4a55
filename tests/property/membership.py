"""Judges what concerns nodes: registration, liveness, slabs that are bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvpool_master.core.messages import (
    Command,
    Done,
    Drain,
    Heartbeat,
    NodeReported,
    Outcome,
    ProbeAnswered,
    ProbeNode,
    Register,
    Registered,
    Remember,
    ReportNode,
    Retire,
    RetireNode,
    SessionLost,
    SlabBound,
    Tick,
    Undrain,
)
from kvpool_proto.errors import KVPoolError, NodeIdTaken, StaleIncarnation, UnknownNode, UnknownSegment
from property import copying
from property.records import Node, Segment, Slab

if TYPE_CHECKING:
    from kvpool_master.core.snapshot import NodeSnapshot
    from property.judge import Judge

Answer = Outcome | KVPoolError


def observe(judge: Judge, command: Command, answer: Answer, retired: list[Retire]) -> None:
    """After any command: who is up, suspect or gone must be so for a reason; what was lost with a node is lost."""
    model, settings = judge.model, judge.model.settings
    _hear(judge, command, answer)
    shown = {node.node: node for node in judge.snapshot.nodes}
    assert set(shown) <= set(model.nodes), "a node that never registered"
    for name, node in list(model.nodes.items()):
        silent_ms = judge.now_ms - node.heard_ms
        if name not in shown:
            assert node.leaving or silent_ms >= settings.retire_ms, f"{name} was given up too early"
            _drop(judge, name, node)
            continue
        state = shown[name]
        assert state.incarnation == node.incarnation
        assert tuple(segment.handle for segment in state.segments) == node.handles
        node.up = state.state != "suspect"
        node.drained = state.state == "drained"
        if node.up:
            _check_up(judge, command, name, state)
        else:
            _unanswered(judge, command, node)
            assert node.lost or node.reported or silent_ms >= settings.suspect_ms, f"{name} is suspect too early"
    for effect in retired:
        assert effect.node not in model.nodes or model.nodes[effect.node].incarnation > effect.incarnation


def _check_up(judge: Judge, command: Command, name: str, state: NodeSnapshot) -> None:
    """A node that is not suspect may be so, and is what it was told to be."""
    node, settings, now_ms = judge.model.nodes[name], judge.model.settings, judge.now_ms
    assert not node.lost, f"{name} is up although its session broke"
    assert now_ms >= node.held_until_ms, f"{name} is up although it was reported"
    node.reported = False
    if isinstance(command, Tick) and settings.stall_ms > 1 << 30:
        assert now_ms - node.heard_ms < settings.suspect_ms, (
            f"{name} is up after {now_ms - node.heard_ms} ms of silence"
        )
        assert node.probe is None or now_ms < node.probe[1], f"{name} is up, but does not answer"
    if name in judge.model.draining:
        assert state.state in ("draining", "drained")
        assert (state.state == "drained") == (not state.drain_left_blocks)
    else:
        assert state.state == ("ramp" if now_ms < node.joined_ms + settings.ramp_ms else "up")


def _unanswered(judge: Judge, command: Command, node: Node) -> None:
    """A Tick finds that a node was asked and did not answer."""
    if isinstance(command, Tick) and node.probe is not None and judge.now_ms >= node.probe[1]:
        node.reported, node.probe = True, None
        node.held_until_ms = judge.now_ms + judge.model.settings.report_hold_ms


def _drop(judge: Judge, name: str, node: Node) -> None:
    judge.unsettled = judge.retiring = True
    copying.drop(judge, name)
    judge.model.drop_segments(node.handles, judge.now_ms)
    del judge.model.nodes[name]


def _hear(judge: Judge, command: Command, answer: Answer) -> None:
    model = judge.model
    if isinstance(command, Register) and isinstance(answer, Registered):
        _registered(judge, command, answer)
    elif isinstance(command, Heartbeat | SessionLost | RetireNode):
        node = model.nodes.get(command.node)
        if node is None or node.incarnation != command.incarnation:
            return
        if isinstance(command, RetireNode):
            node.leaving = True
        else:
            node.lost = isinstance(command, SessionLost)
            node.heard_ms = node.heard_ms if node.lost else judge.now_ms
    elif isinstance(command, ReportNode):
        _reported(judge, command, answer)
    elif isinstance(command, Drain | Undrain):
        _drains(judge, command, answer)


def _reported(judge: Judge, command: ReportNode, answer: Answer) -> None:
    model, now_ms, settings = judge.model, judge.now_ms, judge.model.settings
    assert isinstance(answer, NodeReported), answer
    node = model.nodes.get(command.node)
    strange = bool(command.reporter) and command.reporter not in model.nodes
    if node is None or command.reporter == command.node or strange:
        assert answer.effects == ()
        return
    node.reports = {host: at for host, at in node.reports.items() if at > now_ms - settings.report_window_ms}
    node.reports[command.reporter] = now_ms
    probes = [effect for effect in answer.effects if isinstance(effect, ProbeNode)]
    if now_ms < node.held_until_ms or len(node.reports) > 1:
        node.reported, node.held_until_ms = True, now_ms + settings.report_hold_ms
        assert answer == NodeReported(suspect=True)
    elif node.up and node.probe is None:
        assert [probe.node for probe in probes] == [command.node], "the node is not asked"
        node.probe = probes[0].number, now_ms + settings.probe_ms
    else:
        assert not probes, "asked twice"


def _drains(judge: Judge, command: Drain | Undrain, answer: Answer) -> None:
    draining, name = judge.model.draining, command.node
    if isinstance(answer, KVPoolError):
        assert isinstance(answer, UnknownNode), answer
        assert name not in {*judge.model.nodes, *draining}
        return
    drains = isinstance(command, Drain)
    changes = drains != (name in draining)
    assert answer == Done((Remember(draining=(name, drains)),) if changes else ())
    (draining.add if drains else draining.discard)(name)


def _registered(judge: Judge, command: Register, answer: Registered) -> None:
    model = judge.model
    old = model.nodes.get(command.node)
    if old is not None and old.incarnation == command.incarnation:
        assert answer.handles == old.handles, "a retry got other handles"
        old.heard_ms, old.lost, old.port = judge.now_ms, False, bool(command.data_address)
        return
    if old is not None:
        _drop(judge, command.node, old)
    assert len(answer.handles) == len(command.segments)
    model.nodes[command.node] = Node(
        command.incarnation, answer.handles, judge.now_ms, port=bool(command.data_address), joined_ms=judge.now_ms
    )
    for handle, offer in zip(answer.handles, command.segments, strict=True):
        assert handle not in model.segments, "a handle given twice"
        slabs = [Slab() for _ in range(offer.size_bytes // offer.slab_bytes)]
        model.segments[handle] = Segment(command.node, offer.slab_bytes, slabs)


def _register(judge: Judge, command: Register, answer: Answer) -> None:
    old = judge.model.nodes.get(command.node)
    if isinstance(answer, NodeIdTaken):
        assert old is not None
        assert old.up
        assert command.incarnation > old.incarnation
    elif isinstance(answer, StaleIncarnation):
        assert old is not None
        assert command.incarnation < old.incarnation
    else:
        assert isinstance(answer, Registered)
    judge.sweep()


def _heartbeat(judge: Judge, command: Heartbeat, answer: Answer) -> None:
    node = judge.model.nodes.get(command.node)
    if node is None:
        assert isinstance(answer, UnknownNode)
    elif command.incarnation < node.incarnation:
        assert isinstance(answer, StaleIncarnation)
    else:
        assert not isinstance(answer, KVPoolError)
        assert node.up == (judge.now_ms >= node.held_until_ms)
    judge.sweep()


def _report(judge: Judge, command: ReportNode, answer: Answer) -> None:
    assert isinstance(answer, NodeReported), answer
    node = judge.model.nodes.get(command.node)
    if command.node != command.reporter:
        assert answer.suspect == (node is not None and not node.up)
    judge.sweep()


def _answered(judge: Judge, command: ProbeAnswered, answer: Answer) -> None:
    node = judge.model.nodes.get(command.node)
    if node is None or node.incarnation != command.incarnation:
        assert isinstance(answer, UnknownNode | StaleIncarnation)
    else:
        assert not isinstance(answer, KVPoolError)
        if node.probe is not None and node.probe[0] == command.number:
            node.probe = None
    judge.sweep()


def _drain(judge: Judge, command: Drain | Undrain, answer: Answer) -> None:
    judge.sweep()


def _bound(judge: Judge, command: SlabBound, answer: Answer) -> None:
    judge.sweep()
    node = judge.model.nodes.get(command.node)
    if node is None or node.incarnation != command.incarnation or command.segment not in node.handles:
        assert not isinstance(answer, KVPoolError) or isinstance(
            answer, UnknownNode | UnknownSegment | StaleIncarnation
        )
        return
    assert not isinstance(answer, KVPoolError), answer
    slab = judge.model.segments[command.segment].slabs[command.slab]
    if slab.binding == command.slot_bytes:
        slab.slot_bytes, slab.binding = command.slot_bytes, 0


JUDGES: dict[type, Callable[[Judge, Any, Any], None]] = {
    Register: _register,
    Heartbeat: _heartbeat,
    SlabBound: _bound,
    ReportNode: _report,
    ProbeAnswered: _answered,
    Drain: _drain,
    Undrain: _drain,
}
