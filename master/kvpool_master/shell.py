"""What all parts of the daemon share: the core, its durable memory, the time, and who carries out its effects.

Rules
  - What the core wants remembered is on the disk before its command is answered. If that fails, the Master has
    failed: it answers nothing any more and ends.
  - The core and the epoch may be replaced while the Master serves (meet): who needs them reads them here each time.
  - The key of capabilities is made with the epoch and kept nowhere: the next life makes its own.
  - Before anything else a Master that was late itself ticks, so that the core moves the deadlines of its nodes. A
    session found broken in that time may have broken for want of our answers: heartbeats decide instead.
"""

from __future__ import annotations

import asyncio
import secrets
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from kvpool_master.clock import Clock
from kvpool_master.config import MasterConfig
from kvpool_master.core.liveness import Liveness
from kvpool_master.core.messages import Command, Effect, Remember, SessionLost, Tick
from kvpool_master.core.pool import Namespace
from kvpool_master.core.snapshot import Snapshot
from kvpool_master.grants import Grants
from kvpool_master.logs import Log
from kvpool_master.metrics import RPC_BOUNDS_S, Histogram
from kvpool_master.node_watch import NodeWatch
from kvpool_master.sessions import Session, Sessions, SetBypass
from kvpool_master.state import EPOCH_MAX, Start, State, StateError
from kvpool_proto.capability import KEY_BYTES
from kvpool_proto.errors import BadRequest, Stopping, UnknownNode

_T = TypeVar("_T")


class Core(Protocol):
    """The part of core.pool.Pool that the daemon uses."""

    @property
    def reserved_anything(self) -> bool:
        """Whether a stamp of this epoch was given out."""
        ...

    @property
    def namespaces(self) -> Mapping[bytes, Namespace]:
        """Those that are registered, by id."""
        ...

    def namespace_of(self, ident: bytes) -> bytes | None:
        """The namespace of a lease or a reservation; None: it is not known."""
        ...

    @property
    def liveness(self) -> Liveness:
        """Which nodes there are, and how they are."""
        ...

    def apply(self, command: Command, now_ms: int) -> Any:
        """The outcome that messages.py names beside the command; KVPoolError if nothing was changed."""
        ...

    def grace_left_ms(self, now_ms: int) -> int:
        """How long something granted may still be alive."""
        ...

    def holder_of(self, handle: int) -> tuple[str, str]:
        """The node of a segment and the address of its data port; empty if not known."""
        ...

    def snapshot(self, now_ms: int) -> Snapshot:
        """Counters and sizes."""
        ...

    def check_invariants(self) -> int:
        """Spans checked; AssertionError if an index is wrong."""
        ...


class Shell:
    """The running core. Used by one thread, never across an await, so every command is whole.

    stopping: nothing new is taken. failure: why the Master must end, else "". ended: set when it is to end, by a
    failure or by who runs it. ready: every known node has reported its inventory, or its time was over.
    """

    def __init__(
        self, config: MasterConfig, clock: Clock, log: Log, state: State, make_core: Callable[..., Core]
    ) -> None:
        """Begin a life under an epoch of its own. Raises StateError."""
        self.config = config
        self.clock = clock
        self.log = log
        self.sessions = Sessions()
        self.state_writes = Histogram(RPC_BOUNDS_S)
        self.failed_ticks = 0
        self.stopping = False
        self.failure = ""
        self.ended = asyncio.Event()
        self.ready = asyncio.Event()
        self._closed = False
        self._state = state
        self._make_core = make_core
        self._began_ms = self._ticked_ms = self._excused_until_ms = clock.now_ms()
        self._begin(state.begin(clock.wall_s(), config.core))

    def _begin(self, start: Start) -> None:
        self.epoch = start.epoch
        self.obeyed_by: set[str] = set()
        """Nodes that were told this epoch by us."""
        self.bypass = start.bypass
        self.core = self._make_core(self.config.core, start.epoch, start.memory, self.clock.now_ms())
        self._watch = NodeWatch(self.log)
        self.grants = Grants(secrets.token_bytes(KEY_BYTES), start.epoch, self.core.holder_of)
        if self.snapshot().ready:
            self.ready.set()
        self.tick()  # from now on the core knows when it is late

    # -- commands

    def apply(self, command: Command) -> Any:
        """The outcome of a command, its effects on their way. Raises what the core raises, and Stopping."""
        outcome = self.ask(command)
        effects = getattr(outcome, "effects", ())
        if effects:
            self.carry_out(effects)
        return outcome

    def ask(self, command: Command) -> Any:
        """The outcome of a command whose effects the caller hands to carry_out(). Raises as apply()."""
        if self.failure:
            raise Stopping(self.failure)
        now_ms = self.clock.now_ms()
        self._catch_up(now_ms)
        return self.core.apply(command, now_ms)

    def carry_out(self, effects: Sequence[Effect]) -> None:
        """Remember what is to be remembered, then hand out orders. Raises Stopping if it cannot be remembered."""
        news = [effect for effect in effects if isinstance(effect, Remember)]
        if news:
            self._write(lambda: self._state.remember(news))
        self.sessions.carry_out(effects)

    def snapshot(self) -> Snapshot:
        """The core as it is now."""
        return self.core.snapshot(self.clock.now_ms())

    def tenant_of(self, namespace_id: bytes) -> str | None:
        """The tenant of a namespace; None: it is not known."""
        namespace = self.core.namespaces.get(namespace_id)
        return None if namespace is None else namespace.spec.tenant

    def namespace_of(self, ident: bytes) -> bytes | None:
        """The namespace of a lease or a reservation; None: it is not known."""
        return self.core.namespace_of(ident)

    def refuse_when_stopping(self) -> None:
        """Raise Stopping once the Master is on its way out: nothing new is leased, reserved or registered."""
        if self.stopping:
            raise Stopping(self.failure or "the Master is stopping")

    # -- lives

    def meet(self, node: str, epoch_seen: int) -> None:
        """A node has obeyed this epoch. If it is above ours we move above it, or end if we have reserved something.

        So also if it is ours, but not from us: a life whose memory was lost began in the same second. Raises BadRequest
        for what is no epoch, Stopping when we end.
        """
        if epoch_seen < self.epoch or (epoch_seen == self.epoch and node in self.obeyed_by):
            return
        if epoch_seen >= EPOCH_MAX:
            raise BadRequest(f"epoch_seen = {epoch_seen}: below {EPOCH_MAX}")
        ours, reserved = self.epoch, self.core.reserved_anything
        start = self._write(lambda: self._state.raise_epoch(epoch_seen))
        if reserved:
            self.fail(f"a node has obeyed epoch {epoch_seen}; ours is {ours}, and we have reserved under it")
            raise Stopping(self.failure)
        self.log.warning("epoch_raised", former=ours, epoch=start.epoch, seen=epoch_seen)
        self._begin(start)
        self.sessions.forget_all(UnknownNode(f"the Master moved to epoch {start.epoch}"))

    def set_bypass(self, bits: int) -> int:
        """Turn the switch for good; returns how many connected nodes were told. Raises Stopping."""
        self.refuse_when_stopping()
        self._write(lambda: self._state.set_bypass(bits))
        self.bypass = bits
        return self.sessions.tell_all(SetBypass(bits))

    def fail(self, why: str) -> None:
        """The Master must not answer any more. The first word counts."""
        if not self.failure:
            self.failure, self.stopping = why, True
            self.log.error("failed", text=why)
            self.sessions.end_all()
            self.ended.set()

    def close(self) -> None:
        """The end of this life: what may outlive it is written, unless it failed. Twice is as once."""
        if self._closed:
            return
        self._closed = True
        if not self.failure:
            try:
                self._state.end(self.core.grace_left_ms(self.clock.now_ms()))
            except StateError as error:
                self.log.error("grace_not_written", text=str(error))  # the next life waits for the longest times
        self._state.close()

    def _write(self, step: Callable[[], _T]) -> _T:
        started_s = self.clock.precise_s()
        try:
            return step()
        except StateError as error:
            self.fail(str(error))
            raise Stopping(self.failure) from error
        finally:
            self.state_writes.observe(self.clock.precise_s() - started_s)

    # -- time

    def tick(self) -> None:
        """One Tick. Never raises: one that fails is a bug, but the next one may do."""
        now_ms = self.clock.now_ms()
        late_ms, self._ticked_ms = now_ms - self._ticked_ms, now_ms
        if late_ms > self.config.core.stall_ms:
            self._excused_until_ms = now_ms + self.config.core.suspect_ms
            self.log.warning("stalled", late_ms=late_ms)
        try:
            self.apply(Tick())
            self._watch.look(self.core.liveness.nodes.values(), now_ms)
            if not self.ready.is_set():
                self._see_whether_ready(now_ms)
        except Stopping:
            pass  # failed, and said so
        except Exception as error:
            self.failed_ticks += 1
            trace = "".join(traceback.format_exception(error))
            self.log.error("tick_failed", error=repr(error), traceback=trace)

    def lost(self, session: Session) -> None:
        """A node's session broke, its newest: the node is suspect at once, unless we were late ourselves."""
        now_ms = self.clock.now_ms()
        self._catch_up(now_ms)
        excused = now_ms < self._excused_until_ms
        self.log.warning("session_lost", node=session.node, incarnation=session.incarnation, excused=excused)
        if not excused:
            self.apply(SessionLost(session.node, session.incarnation))

    def _catch_up(self, now_ms: int) -> None:
        if now_ms - self._ticked_ms > self.config.core.stall_ms:
            self.tick()

    def _see_whether_ready(self, now_ms: int) -> None:
        pool = self.snapshot()
        if pool.ready:
            counters = pool.counters
            self.log.info(
                "recovered",
                after_ms=now_ms - self._began_ms,
                nodes=len(pool.nodes),
                inventories=counters.inventories_completed,
                recovered_blocks=counters.recovered_blocks,
                surplus_blocks=counters.surplus_blocks,
                dead_blocks=counters.dead_blocks,
                unclaimed_blocks=counters.unclaimed_blocks,
            )
            self.ready.set()
