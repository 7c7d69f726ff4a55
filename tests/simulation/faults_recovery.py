"""Planted faults of restart, fencing and recovery. See faults.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvpool_client import inventory
from kvpool_client.owned_segment import OwnedSegment, SegmentPlan
from kvpool_client.session import Session
from kvpool_client.session_messages import Registered
from kvpool_client.transfer import Term
from kvpool_master import state
from kvpool_master.core.intake import Intake
from kvpool_master.core.messages import Remember
from kvpool_master.core.recovery import Recovery
from kvpool_master.shell import Shell
from kvpool_master.state import Start, State
from simulation.doubles import Patches


def no_grace(patches: Patches) -> None:
    """Segments that hold something are open as soon as their inventory is there."""
    joined: Callable[..., None] = Recovery.joined

    def at_once(recovery: Recovery, node: Any, command: Any, now_ms: int) -> None:
        """Recovery.joined."""
        joined(recovery, node, command, now_ms)
        for segment in node.segments:
            segment.quiet_until_ms = 0

    patches.set(Recovery, "joined", at_once)


def epoch_of_the_wall(patches: Patches) -> None:
    """The epoch is what the wall clock says, whatever it was before, and whatever nodes have seen."""
    begin: Callable[..., Start] = State.begin
    patches.set(
        State,
        "begin",
        lambda one, wall_s, settings: replace(begin(one, wall_s, settings), epoch=int(wall_s)),
    )
    patches.set(Shell, "meet", lambda *_: None)


def forget_tombstones(patches: Patches) -> None:
    """Tombstones are not on the disk."""
    put: Callable[[Any, Remember], None] = state._put
    patches.set(state, "_put", lambda db, effect: effect.tombstone or put(db, effect))


def obey_no_tombstones(patches: Patches) -> None:
    """Nodes do not clear what is dead, and the Master takes it in again: either line alone is enough."""
    init: Callable[..., None] = Intake.__init__

    def without(intake: Intake, *given: Any) -> None:
        """Intake.__init__."""
        init(intake, *given)
        intake._tombstones = {}

    patches.set(Intake, "__init__", without)
    patches.set(OwnedSegment, "bury", lambda segment, namespace, stamp: 0)
    scan: Callable[..., Any] = inventory.scan
    patches.set(inventory, "scan", lambda segment, dead, *rest: scan(segment, {}, *rest))


def ignore_newer_epochs(patches: Patches) -> None:
    """A writer looks at its own time only."""
    patches.set(Term, "overruled", lambda term, runs: "")


def hide_writers(patches: Patches) -> None:
    """Slots being written are not reported."""
    scan: Callable[..., Any] = inventory.scan

    def without(*given: Any) -> Any:
        """inventory.scan."""
        found = scan(*given)
        return replace(found, writing=found.writing[:0])

    patches.set(inventory, "scan", without)


def lose_blocks(patches: Patches) -> None:
    """The first committed block of every slab is not reported."""
    not_dead: Callable[..., Any] = inventory._not_dead
    patches.set(inventory, "_not_dead", lambda found, dead: not_dead(found, dead)[1:])


def compare_no_epochs(patches: Patches) -> None:
    """A Master does not look at the epochs that nodes have seen, and nodes obey whatever comes."""
    registered: Callable[..., Any] = Session._registered

    def obey(session: Session, event: Registered, now_ms: int) -> Any:
        """Session._registered."""
        session.epoch = min(session.epoch, event.epoch)
        return registered(session, event, now_ms)

    patches.set(Session, "_registered", obey)
    patches.set(Shell, "meet", lambda *_: None)


def adopt_nothing(patches: Patches) -> None:
    """A node client that starts makes its files anew."""
    opened: Callable[..., OwnedSegment] = OwnedSegment.open

    def fresh(plan: SegmentPlan, **given: Any) -> OwnedSegment:
        """OwnedSegment.open."""
        plan.path.unlink(missing_ok=True)
        return opened(plan, **given)

    patches.set(OwnedSegment, "open", fresh)
