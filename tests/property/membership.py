"""Judges what concerns nodes: registration, liveness, slabs that are bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from kvpool_master.core.messages import (
    ClearSlots,
    Command,
    Effect,
    Heartbeat,
    Outcome,
    Register,
    Registered,
    Retire,
    RetireNode,
    SessionLost,
    SlabBound,
    SlotsCleared,
    Tick,
)
from kvpool_proto.errors import KVPoolError, NodeIdTaken, StaleIncarnation, UnknownNode, UnknownSegment
from property.naive import Node, Segment, Slab

if TYPE_CHECKING:
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
        node.up = state.state == "up"
        if node.up:
            assert not node.lost, f"{name} is up although its session broke"
            late = isinstance(command, Tick) and settings.stall_ms > 1 << 30 and silent_ms >= settings.suspect_ms
            assert not late, f"{name} is up after {silent_ms} ms of silence"
        else:
            assert node.lost or silent_ms >= settings.suspect_ms, f"{name} is suspect too early"
    for effect in retired:
        assert effect.node not in model.nodes or model.nodes[effect.node].incarnation > effect.incarnation


def clear(judge: Judge, effects: Iterable[Effect]) -> None:
    """The nodes clear headers at once, also those that are away. The pool is cross-checked before and after."""
    judge.core.check_invariants()
    for effect in effects:
        if isinstance(effect, ClearSlots):
            judge.core.apply(SlotsCleared(effect.node, 1, effect.order), judge.now_ms)
            judge.core.check_invariants()


def _drop(judge: Judge, name: str, node: Node) -> None:
    judge.unsettled = True
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


def _registered(judge: Judge, command: Register, answer: Registered) -> None:
    model = judge.model
    old = model.nodes.get(command.node)
    if old is not None and old.incarnation == command.incarnation:
        assert answer.handles == old.handles, "a retry got other handles"
        old.heard_ms, old.lost = judge.now_ms, False
        return
    if old is not None:
        _drop(judge, command.node, old)
    assert len(answer.handles) == len(command.segments)
    model.nodes[command.node] = Node(command.incarnation, answer.handles, judge.now_ms)
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
        assert node.up
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
}
