"""The machine can fail: each fault planted in front of the core is found by the same rules within a few examples."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import run_state_machine_as_test

from kvpool_master.core.extents import RECORD_BYTES, Extent, extents, pack
from kvpool_master.core.messages import (
    Abort,
    BlockBad,
    Command,
    Commit,
    Committed,
    Done,
    Hit,
    Lookup,
    Outcome,
    Peek,
    Peeked,
    Purge,
    Purged,
    Release,
    Released,
    Remove,
    Reserve,
    Reserved,
    RunState,
    SessionLost,
    Tick,
    WorkerGone,
)
from kvpool_master.core.pool import Pool
from kvpool_master.core.settings import Settings
from kvpool_master.core.snapshot import Snapshot
from kvpool_proto.errors import KVPoolError
from property.test_core_machine import CoreMachine


class Faulty:
    """A core whose answers pass through a fault."""

    def __init__(self, settings: Settings) -> None:
        self.pool = Pool(settings, epoch=1)
        self.stored: list[Reserve] = []

    def apply(self, command: Command, now_ms: int) -> Outcome:
        return self.pool.apply(command, now_ms)

    def snapshot(self, now_ms: int) -> Snapshot:
        return self.pool.snapshot(now_ms)

    def check_invariants(self) -> None:
        self.pool.check_invariants()

    def quietly(self, command: Command, now_ms: int) -> None:
        """Apply behind the judge's back."""
        with suppress(KVPoolError):
            self.pool.apply(command, now_ms)


class DropsLeases(Faulty):
    """A lookup that leases nothing but says it does."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        answer = self.pool.apply(command, now_ms)
        if isinstance(command, Lookup):
            self.quietly(Release((command.lease,)), now_ms)
        return answer


class FreesLeasedSlots(Faulty):
    """A lookup whose blocks are removed, and whose slots are given away under the reader."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        answer = self.pool.apply(command, now_ms)
        if isinstance(command, Lookup) and isinstance(answer, Hit) and answer.blocks:
            self.quietly(Release((command.lease,)), now_ms)
            self.quietly(Remove(command.namespace, command.chain, command.skip), now_ms)
        return answer


class KeepsLeases(Faulty):
    """A release that releases nothing."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        if isinstance(command, Release):
            return Released(len(command.leases))
        return self.pool.apply(command, now_ms)


class HitsTooLong(Faulty):
    """A hit that claims one block more, next to the last."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        answer = self.pool.apply(command, now_ms)
        if isinstance(command, Lookup) and isinstance(answer, Hit) and answer.reason and answer.blocks:
            last = extents(answer.extents)[-1]
            longer = answer.extents[:-RECORD_BYTES] + pack(*last._replace(blocks=last.blocks + 1))
            return answer._replace(blocks=answer.blocks + 1, extents=longer)
        return answer


class HitsTooShort(Faulty):
    """A hit that stops a block early."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        if isinstance(command, Lookup):
            answer = self.pool.apply(command, now_ms)
            keys = len(command.chain) // 8
            if isinstance(answer, Hit) and answer.blocks > 1 and answer.blocks == keys:
                return self.pool.apply(command._replace(chain=command.chain[:-8]), now_ms)
            return answer
        return self.pool.apply(command, now_ms)


class PointsElsewhere(Faulty):
    """Extents that are one slot off."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        answer = self.pool.apply(command, now_ms)
        if isinstance(command, Lookup) and isinstance(answer, Hit) and answer.extents:
            moved = [run._replace(first_slot=run.first_slot + 1) for run in extents(answer.extents)]
            return answer._replace(extents=b"".join([pack(*run) for run in moved]))
        return answer


class GrantsTwice(Faulty):
    """A reservation that owns the slots of the one before it as well."""

    last: tuple[Extent, ...] = ()

    def apply(self, command: Command, now_ms: int) -> Outcome:
        answer = self.pool.apply(command, now_ms)
        if isinstance(answer, Reserved) and answer.write_ms:
            runs = tuple(extents(answer.extents))
            last, self.last = self.last, runs
            if len(last) == len(runs) == 1 and last[0].blocks == runs[0].blocks:
                moved = runs[0]._replace(segment=last[0].segment, first_slot=last[0].first_slot)
                return _with(answer, extents=pack(*moved))
        return answer


class GrantsWhatIsBeingWritten(Faulty):
    """Somebody else's run is called the caller's own."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        answer = self.pool.apply(command, now_ms)
        if isinstance(answer, Reserved):
            states = {RunState.BEING_WRITTEN: RunState.YOURS}
            runs = tuple(_with(run, state=states.get(run.state, run.state)) for run in answer.runs)
            return _with(answer, runs=runs)
        return answer


class ForgetsCommits(Faulty):
    """A commit that is answered and not done."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        if isinstance(command, Commit) and command.blocks:
            self.pool.apply(_with(command, blocks=0, final=False), now_ms)
            return Committed(command.blocks, 0)
        return self.pool.apply(command, now_ms)


class ShowsBlocksEarly(Faulty):
    """The commit of one part counts for all."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        answer = self.pool.apply(command, now_ms)
        if isinstance(command, Commit) and isinstance(answer, Committed):
            for part in range(3):
                self.quietly(Commit(command.reservation, part, part + 1, answer.blocks, final=False), now_ms)
        return answer


class SkipsQuarantine(Faulty):
    """What a scheduler aborts is free at once."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        return self.pool.apply(_with(command, writer=True) if isinstance(command, Abort) else command, now_ms)


class QuarantinesForEver(Faulty):
    """A writer's word that is not heard."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        return self.pool.apply(_with(command, writer=False) if isinstance(command, Abort) else command, now_ms)


class EvictsInner(Faulty):
    """A Tick that takes the first block of a chain and leaves those behind it."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        answer = self.pool.apply(command, now_ms)
        if isinstance(command, Reserve):
            self.stored.append(command)
        if isinstance(command, Tick) and self.stored:
            first = self.stored.pop()
            self.quietly(Remove(first.namespace, first.chain[:8], 0), now_ms)
        return answer


class IgnoresPurge(Faulty):
    """A purge that hides nothing."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        return Purged(0) if isinstance(command, Purge) else self.pool.apply(command, now_ms)


class IgnoresLostSessions(Faulty):
    """A node that stays up although its session broke."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        return Done() if isinstance(command, SessionLost) else self.pool.apply(command, now_ms)


class BelievesAnyStamp(Faulty):
    """Bad bytes are reported with an old stamp, and the new block goes."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        if isinstance(command, BlockBad):
            answer = self.pool.apply(Peek(command.namespace, command.chain, 0), now_ms)
            if isinstance(answer, Peeked) and answer.extents:
                command = _with(command, stamp=extents(answer.extents)[-1].stamp)
        return self.pool.apply(command, now_ms)


class MissesDeadWorkers(Faulty):
    """A worker's end that nobody notices."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        return Done() if isinstance(command, WorkerGone) else self.pool.apply(command, now_ms)


class NeverExpires(Faulty):
    """Ticks that do nothing."""

    def apply(self, command: Command, now_ms: int) -> Outcome:
        return Done() if isinstance(command, Tick) else self.pool.apply(command, now_ms)


class ExpiresEarly(Faulty):
    """Ticks that run ahead of the clock."""

    ahead_ms = 0

    def apply(self, command: Command, now_ms: int) -> Outcome:
        if isinstance(command, Tick):
            self.ahead_ms = 400
        return self.pool.apply(command, now_ms + self.ahead_ms)


def _with(value: Any, **changes: Any) -> Any:
    return value._replace(**changes) if hasattr(value, "_replace") else replace(value, **changes)


FAULTS: list[Callable[[Settings], Faulty]] = [
    DropsLeases,
    FreesLeasedSlots,
    KeepsLeases,
    HitsTooLong,
    HitsTooShort,
    PointsElsewhere,
    GrantsTwice,
    GrantsWhatIsBeingWritten,
    ForgetsCommits,
    ShowsBlocksEarly,
    SkipsQuarantine,
    QuarantinesForEver,
    EvictsInner,
    IgnoresPurge,
    IgnoresLostSessions,
    BelievesAnyStamp,
    MissesDeadWorkers,
    NeverExpires,
    ExpiresEarly,
]


def catch(machine: type[CoreMachine], fault: Callable[[Settings], Faulty]) -> None:
    """The machine's rules find the fault, and say by which commands."""
    faulty = type("FaultyMachine", (machine,), {"core_of": staticmethod(fault)})
    found = hypothesis_settings(
        max_examples=400,
        stateful_step_count=40,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
    )
    with pytest.raises((AssertionError, LookupError, StopIteration)) as failure:  # the core may stumble, too
        run_state_machine_as_test(faulty, settings=found)
    assert any("commands so far" in note for note in failure.value.__notes__)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found(fault: Callable[[Settings], Faulty]) -> None:
    catch(CoreMachine, fault)
