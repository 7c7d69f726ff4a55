"""The machine of many nodes can fail: faults planted in the core are found by its rules, not by its cross-check.

Rules
  - A fault is one method replaced, or one command or answer changed on its way. The core's own check_invariants is off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvpool_master.core import copies, liveness
from kvpool_master.core.messages import (
    ClearSlots,
    Command,
    Heartbeat,
    Lookup,
    Outcome,
    ReportNode,
    Reserve,
    Reserved,
    SlotsCleared,
    SlotsCopied,
)
from kvpool_master.core.settings import Settings
from property.test_machine_catches import Faulty, catch
from property.test_many_nodes_machine import ManyNodesMachine


class Unchecked(Faulty):
    """Only the naive pool judges. part, method, instead: what is replaced."""

    part = ""
    method = ""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if self.method:
            part: Any = self.pool
            for name in self.part.split("."):
                part = getattr(part, name)
            setattr(part, self.method, self.instead)

    def instead(self, *args: Any, **named: Any) -> Any:
        """What is done instead: nothing."""

    def check_invariants(self) -> None:
        return


class MovesNothing(Unchecked):
    """A move that is counted, while its block stays where it was."""

    part, method = "copies", "_switch"


class CountsMissingCopies(Unchecked):
    """All of a run counts as copied, although its node said less."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        if isinstance(command, SlotsCopied):
            command = replace(command, blocks=1 << 20)
        return self.pool.apply(command, now_ms)


class CopiesWhatChanged(Unchecked):
    """A copy counts for blocks that were stored anew, or lie elsewhere since."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copies, "_same_slots", lambda _row, _block, _source, _at: True)  # pyright: ignore
            return self.pool.apply(command, now_ms)


class CutsNoReplicas(Unchecked):
    """Replicas stay as long as they were when their span is cut."""

    part, method = "forest.replicas", "cut"


class LosesReplicas(Unchecked):
    """No replica takes the place of what is lost."""

    part, method = "forest", "replace"


class ForgetsOwnCopies(Unchecked):
    """Readers are sent to other nodes, although they have a copy."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        return self.pool.apply(command._replace(node="") if isinstance(command, Lookup) else command, now_ms)


class MovesUnderReaders(Unchecked):
    """Slots of what was moved are free at once, whoever reads them."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        if not isinstance(command, SlotsCopied):
            return self.pool.apply(command, now_ms)
        space = self.pool.space
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(space, "defer", lambda rows, slot_bytes, _number: space.give(rows, slot_bytes))  # pyright: ignore
            return self.pool.apply(command, now_ms)


class FreesUncleared(Unchecked):
    """Slots that remote writers gave up are used again before their node has cleared them."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        answer = self.pool.apply(command, now_ms)
        for effect in getattr(answer, "effects", ()):
            if isinstance(effect, ClearSlots):
                self.quietly(SlotsCleared(effect.node, 1, effect.order), now_ms)
        return answer


class TakesRemoteForLocal(Unchecked):
    """Slots of a writer elsewhere come back with its process, without a word to their node."""

    part, method = "writes", "_is_local"

    def instead(self, *args: Any, **named: Any) -> bool:
        return True


class GrantsAboveQuotas(Unchecked):
    """Quotas that nobody looks at."""

    part, method = "quotas", "blocks_left"

    def instead(self, tree: Any, block_bytes: int, blocks: int) -> int:
        return blocks


class EvictsNothingForQuotas(Unchecked):
    """A tenant at its quota is refused, whatever old blocks it has."""

    part, method = "quotas", "_shrink"


class WritesElsewhereFirst(Unchecked):
    """The writer's own node is not asked."""

    part, method = "placement", "own"

    def instead(self, *args: Any, **named: Any) -> list[Any]:
        return []


class WritesToDraining(Unchecked):
    """A node that drains takes writes."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(liveness.Node, "writable", property(lambda node: node.up))
            return self.pool.apply(command, now_ms)


class WritesToAvoided(Unchecked):
    """A writer's word that it cannot use a node is not heard."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        return self.pool.apply(replace(command, avoid=()) if isinstance(command, Reserve) else command, now_ms)


class DrainsTooEarly(Unchecked):
    """A node is drained while it is read and written."""

    part, method = "drains", "is_drained"

    def instead(self, *args: Any, **named: Any) -> bool:
        return True


class GivesSharesTwice(Unchecked):
    """Blocks of the second share are said to be the first one's, too."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        answer = self.pool.apply(command, now_ms)
        if isinstance(answer, Reserved):
            runs = tuple(replace(run, share=max(0, run.share - 1)) for run in answer.runs)
            return replace(answer, runs=runs)
        return answer


class TrustsOneReport(Unchecked):
    """One host's report makes a node suspect."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        answer = self.pool.apply(command, now_ms)
        if isinstance(command, ReportNode) and command.reporter:
            self.quietly(ReportNode(command.node, ""), now_ms)
        return answer


class ForgetsReports(Unchecked):
    """A heartbeat is enough for a node that was reported."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        node = self.pool.liveness.nodes.get(command.node) if isinstance(command, Heartbeat) else None
        if node is not None:
            node.reported_until_ms = 0
        return self.pool.apply(command, now_ms)


FAULTS: list[Callable[[Settings], Faulty]] = [
    MovesNothing,
    CountsMissingCopies,
    CopiesWhatChanged,
    CutsNoReplicas,
    LosesReplicas,
    ForgetsOwnCopies,
    MovesUnderReaders,
    FreesUncleared,
    TakesRemoteForLocal,
    GrantsAboveQuotas,
    EvictsNothingForQuotas,
    WritesElsewhereFirst,
    WritesToDraining,
    WritesToAvoided,
    DrainsTooEarly,
    GivesSharesTwice,
    TrustsOneReport,
    ForgetsReports,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: Callable[[Settings], Faulty]) -> None:
    catch(ManyNodesMachine, fault)
