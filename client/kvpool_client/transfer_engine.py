"""What moves blocks between an engine's buffers and slots, wherever they lie: the interface of all transfer engines.

Rules
  - A call ends by its term, plus what is under way. Nothing is raised for what others did: the result says how far
    each copy came, in the order of its runs, and why not further. Rows behind that may have been written to.
  - When a call has ended, nobody touches its buffers any more.
  - An engine waits for the sources of a write and makes what it read visible (devices/base.py) by itself.
  - Thread safe.

`LocalEngine` (transfer.py) copies memory, `PeerEngine` (peer/engine.py) speaks with data ports; another engine for
other nodes' slots takes PeerCopy as that one does, and is handed to KVPool.connect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

from kvpool_client.clock import Clock
from kvpool_client.runs import Run

Verify = Literal["full", "sampled", "off"]
"""full: every block. sampled: one in SAMPLE_EVERY, which weakens "never wrong bytes". off: headers only."""
Progress = Callable[[list[int]], str]
"""Told now and then how many blocks of each copy are written; what it returns, if anything, is a reason to stop."""
CopyT = TypeVar("CopyT", contravariant=True)


@dataclass(frozen=True, slots=True)
class Copied:
    """blocks: the leading ones that are right. reason: why not all; empty where another copy of the call ended before.

    bad: the block to blame, where there is one and it lies here.
    """

    blocks: int
    reason: str = ""
    bad: Run | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """blocks: of each copy, the leading ones that are written. reason: why not all.

    confirmed: nothing is written under this call any more. False: a peer went silent and may still be at it.
    """

    blocks: list[int]
    reason: str = ""
    confirmed: bool = True


@dataclass(frozen=True, slots=True)
class Term:
    """How long a copy may go on: until deadline_ms on the clock, and while neither its segments nor `ruling` know an
    epoch above `epoch`.

    reason: what it is called when time is up. ruling: answers the highest epoch that this process has heard of.
    """

    clock: Clock
    deadline_ms: int
    reason: str
    epoch: int | None = None
    ruling: Callable[[], int] = lambda: 0

    def left_s(self) -> float:
        """Seconds left, negative when over."""
        return (self.deadline_ms - self.clock.now_ms()) / 1000

    def ended(self, runs: Sequence[Run]) -> str:
        """Why `runs` may not be copied any more; empty while they may."""
        return self.reason if self.left_s() <= 0 else self.overruled(runs)

    def overruled(self, runs: Sequence[Run]) -> str:
        """The same but for the time: is there a newer epoch?"""
        if self.epoch is None:
            return ""
        known = [self.ruling(), *(segment.epoch() for segment in {run.segment for run in runs})]
        if max(known) <= self.epoch:
            return ""
        return "stale_epoch"


class TransferEngine(Protocol[CopyT]):
    """Moves the copies of one call, which all lie in one place: this node's memory, or one other node's."""

    def read(self, copies: Sequence[CopyT], term: Term) -> list[Copied]:
        """Copy slots into buffers, verified; leading blocks of all copies first."""
        ...

    def write(self, copies: Sequence[CopyT], term: Term, progress: Progress) -> Written:
        """Copy buffers into slots, leading blocks of all copies first; the first failure ends the call."""
        ...

    def close(self) -> None:
        """Let go of threads and connections. Later calls are slower, or misses."""
        ...
