"""Applies commands to the core and judges every answer by the naive pool.

After each command it looks at every block there ever was (Peek, one by one): what vanished must have had a reason
to, what is there must lie where it was written, what is not complete must not be seen. Then it compares the
snapshot's sums and lets the core check its own invariants. A failure carries the list of commands so far.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, Protocol

from kvpool_master.core.messages import (
    BindSlab,
    ClearSlots,
    Command,
    GoneReason,
    Opened,
    OpenNamespace,
    Outcome,
    Peek,
    Peeked,
    Reason,
    Reserve,
    Retire,
    RetireNode,
    SessionLost,
    Tick,
    WorkerGone,
)
from kvpool_master.core.settings import Settings
from kvpool_master.core.snapshot import Snapshot
from kvpool_proto.errors import KVPoolError
from property import copying, membership, reading, removing, sums, writing
from property.command_list import shown
from property.naive import Naive
from property.places import spread
from property.records import Block, Keep, Ref

Answer = Outcome | KVPoolError
NOTHING: frozenset[Ref] = frozenset()
TICKS_TO_REST_MAX = 300
TICKS_AT_REST = 3
SLICES_AT_REST = 40
"""Slices of a retired node or a purge may pass over many a span that is long gone before anything shows."""


class Core(Protocol):
    """What is judged."""

    def apply(self, command: Command, now_ms: int) -> Outcome: ...
    def snapshot(self, now_ms: int) -> Snapshot: ...
    def check_invariants(self) -> object: ...


class Judge:
    """One pool under judgement. `now_ms` is set by the caller and never falls."""

    def __init__(self, core: Core, settings: Settings) -> None:
        self.core = core
        self.model = Naive(settings)
        self.now_ms = 0
        self.log: list[str] = []
        self.binds: list[BindSlab] = []
        """Slabs that the nodes were told to bind and have not answered for."""
        self.clears: dict[int, ClearSlots] = {}
        self.copies: dict[int, copying.Order] = {}
        """Orders to clear and to copy that are not answered."""
        self.visible: set[Ref] = set()
        self.unsettled = False
        """Slices of work may be left for later Ticks, so sums may lag."""
        self.retiring = False
        """Slices of a node that left may be left: copies there may still be counted."""
        self.made_room = False
        """The last command evicted something."""
        self.broken = False
        self._evicted: dict[bytes, int] = {}
        self._counted = sums.Counted()
        self.snapshot = core.snapshot(0)

    def step(self, command: Command) -> Answer:
        """Apply one command and judge the answer. Raises AssertionError with all commands so far."""
        self.log.append(f"{self.now_ms:>6} {shown(command)}")
        with self.telling():
            return self._step(command)

    @contextmanager
    def telling(self) -> Generator[None]:
        """Adds the list of commands to whatever is raised inside, once."""
        try:
            yield
        except Exception as error:
            if not self.broken:
                self.broken = True
                error.add_note("commands so far (now_ms, command):\n" + "\n".join(self.log))
            raise

    def refused(self, command: Command, *errors: type[KVPoolError]) -> None:
        """The command breaks a rule: one of `errors` is raised and nothing changes."""
        self.log.append(f"{self.now_ms:>6} {shown(command)} (to be refused)")
        with self.telling():
            try:
                answer = self.core.apply(command, self.now_ms)
            except errors:
                self.core.check_invariants()
                self.sweep()
                sums.check_slots(self)
            else:
                raise AssertionError(f"accepted: {answer}")

    def _step(self, command: Command) -> Answer:
        answer: Answer
        try:
            answer = self.core.apply(command, self.now_ms)
            self.log[-1] += f" -> {shown(answer)}"
        except KVPoolError as error:
            answer = error
            self.log[-1] += f" raised {type(error).__name__}: {error}"
        effects = getattr(answer, "effects", ())
        self.core.check_invariants()
        self.snapshot = self.core.snapshot(self.now_ms)
        self.made_room = sums.doubt_copies(self)
        self._evictions(isinstance(command, Reserve | Tick))
        self.model.doubt(self.now_ms)
        membership.observe(self, command, answer, [effect for effect in effects if isinstance(effect, Retire)])
        judge = _JUDGES[type(command)]
        binds = [effect for effect in effects if isinstance(effect, BindSlab)]
        if isinstance(command, Reserve) and not isinstance(answer, KVPoolError):
            chain = self.model.refs(command.namespace, command.chain)
            self.model.claim(chain, command.parent)
            own = {ref for ref in chain if not self.model.contradicted(ref)}
            self.sweep(evicting=own)
            self._bind(binds)
            judge(self, command, answer)
        else:
            judge(self, command, answer)
            copying.ordered(self, effects)
            self._bind(binds)
        sums.check(self, command)
        self._counted.note(self.snapshot)
        return answer

    def counted(self, name: str) -> int:
        """By how much the last command has raised one of the pool's counters."""
        return getattr(self.snapshot.counters, name) - getattr(self._counted, name)

    @property
    def before(self) -> sums.Counted:
        """What stood before the last command."""
        return self._counted

    def tenant_bytes(self, tenant: str) -> int:
        """What the snapshot says that a tenant holds."""
        return next((one.bytes for one in self.snapshot.tenants if one.tenant == tenant), 0)

    # -- blocks ------------------------------------------------------------------------------------------

    def peek(self, ref: Ref, explain: bool = False) -> tuple[Peeked, int]:
        """Ask for this block alone; also its place in the chain asked for."""
        namespace, keys = ref
        skip = len(keys) // self.model.specs[namespace].key_bytes - 1
        peeked = self.core.apply(Peek(namespace, keys, skip, explain), self.now_ms)
        assert isinstance(peeked, Peeked)
        return peeked, skip

    def sweep(
        self,
        may: Iterable[Ref] = NOTHING,
        must: Iterable[Ref] = NOTHING,
        evicting: set[Ref] | None = None,
        reason: GoneReason = GoneReason.EVICTED,
    ) -> set[Ref]:
        """Look at every block. may, must: what the command hides; evicting: evictions are allowed, but of these.

        Returns what vanished; its slots are loose after a hiding, free after an eviction.
        """
        model, gone = self.model, set[Ref]()
        self.visible = set()
        for ref in model.seen:
            peeked, skip = self.peek(ref)
            block = model.blocks.get(ref)
            if block is None or not block.stored():
                assert not peeked.blocks, f"{ref} is visible but not stored: {peeked}"
            elif peeked.blocks:
                self.visible.add(ref)
                self._as_written(block, peeked, skip)
            elif peeked.reason is Reason.NODE_AWAY and copying.may_hide(model, block):
                continue
            elif peeked.reason is Reason.CONFLICT and model.contradicted(ref):
                for cell in block.cells():
                    cell.sure = False
            elif all(cell.sure for cell in block.cells()):
                gone.add(ref)
            else:
                for cell in block.everything():
                    cell.sure = False  # a part of it was in doubt: all of it may be gone
        assert set(must) <= gone, f"still there: {set(must) - gone}"
        if evicting is None:
            assert gone <= set(may) | set(must), f"vanished for no reason: {gone - set(may) - set(must)}"
        for ref in gone:
            if evicting is None:
                block = model.blocks[ref]
                for cell in [*block.copies, *block.cells()]:
                    model.detach(cell, Keep.LOOSE)
            else:
                self._evict(ref, gone, evicting)
            self._explained(ref, reason)
        if evicting is not None:
            model.doubt_leaves(evicting, self.now_ms)
        return gone

    @staticmethod
    def sure(block: Block) -> bool:
        """Complete, and nothing can have taken it."""
        return block.stored() and all(cell.sure for cell in block.cells())

    def _as_written(self, block: Block, peeked: Peeked, skip: int) -> None:
        assert (peeked.blocks, peeked.reason) == (1, Reason.NONE), peeked
        places = spread(peeked.extents)
        assert set(places) == {(skip, part) for part in range(len(block.parts))}
        for (_, part), (place, stamp) in places.items():
            copying.seen(self, block, part, place, stamp)

    def _evict(self, ref: Ref, gone: set[Ref], own: set[Ref]) -> None:
        model = self.model
        block = model.blocks[ref]
        cells = block.everything()
        assert ref not in own, f"evicted from the chain that is being stored: {ref}"
        for lease in model.leases.values():
            if self.now_ms < lease.deadline_ms:
                assert not set(cells) & set(lease.pinned), f"evicted under a lease: {ref}"
        for other, behind in model.blocks.items():
            if other in gone or ref not in model.before(other):
                continue
            assert not self.sure(behind), f"evicted {ref} although {other} follows it"
            for cell in behind.cells():
                live = cell.keep is Keep.WRITING and self.now_ms < model.reservations[cell.reservation].deadline_ms
                assert not live, f"evicted {ref} although {other} is being written behind it"
        for copy in list(block.copies):
            model.detach(copy, Keep.LOOSE)  # it may have gone before, and wait for a reader
        for cell in block.cells():
            model.forget(cell)

    def _explained(self, ref: Ref, reason: GoneReason) -> None:
        spec = self.model.specs[ref[0]]
        if spec.model in ("raw", "wild"):
            return
        if spec.entry == "root" and not self.visible.issuperset(self.model.before(ref)):
            return  # the first block that is missing may be one before it
        peeked, _ = self.peek(ref, explain=True)
        assert peeked.gone is not None, f"{ref}: not remembered"
        assert peeked.gone.reason is reason, f"{ref}: {peeked.gone}, not {reason}"

    def _evictions(self, allowed: bool) -> None:
        for space in self.snapshot.namespaces:
            evicted = space.counters.gone_blocks.get(GoneReason.EVICTED, 0)
            before = self._evicted.get(space.id, 0)
            assert allowed or evicted == before, "evicted by another command"
            self.made_room |= evicted != before
            self._evicted[space.id] = evicted

    def settle(self) -> None:
        """Tick until nothing is left in slices, then everything that may be free must be free."""
        same, enough = 0, SLICES_AT_REST if self.unsettled else TICKS_AT_REST
        for _ in range(TICKS_TO_REST_MAX):
            before = self._state()
            self.step(Tick())
            same = same + 1 if before == self._state() else 0
            if same == enough:
                break
        else:
            raise AssertionError("Ticks at one time never come to rest")
        self.unsettled = self.retiring = False
        if not self.model.leases:
            for cell in [cell for cell in self.model.held.values() if cell.keep is Keep.LOOSE]:
                self.model.forget(cell)
            sums.check_slots(self)

    def _state(self) -> list[object]:
        spaces = [(space.blocks, space.bytes, space.spans) for space in self.snapshot.namespaces]
        return [spaces, [node.segments for node in self.snapshot.nodes], self.snapshot.leases]

    # -- nodes -------------------------------------------------------------------------------------------

    def _bind(self, effects: list[BindSlab]) -> None:
        for effect in effects:
            self.model.bind(effect, self.now_ms)
            self.binds.append(effect)


# -- one judge per command -----------------------------------------------------------------------------


def _plain(judge: Judge, command: Command, answer: Answer) -> None:
    """A command that may not fail, and at which nothing may vanish."""
    assert not isinstance(answer, KVPoolError), answer
    judge.sweep()


def _open(judge: Judge, command: OpenNamespace, answer: Answer) -> None:
    assert isinstance(answer, Opened)
    assert answer.namespace == command.spec.id
    judge.model.specs[answer.namespace] = command.spec
    judge.sweep()


def _tick(judge: Judge, command: Tick, answer: Answer) -> None:
    assert not isinstance(answer, KVPoolError)
    judge.sweep(evicting=set())
    sums.check_shrinking(judge)
    copying.expire(judge)
    reading.expire(judge.model, judge.now_ms)
    writing.expire(judge.model, judge.now_ms)


def _worker_gone(judge: Judge, command: WorkerGone, answer: Answer) -> None:
    assert not isinstance(answer, KVPoolError)
    writing.worker_gone(judge.model, command, judge.now_ms)
    judge.sweep()


_JUDGES: dict[type, Callable[[Judge, Any, Any], None]] = {
    OpenNamespace: _open,
    SessionLost: _plain,
    RetireNode: _plain,
    Tick: _tick,
    WorkerGone: _worker_gone,
    **copying.JUDGES,
    **membership.JUDGES,
    **reading.JUDGES,
    **removing.JUDGES,
    **sums.JUDGES,
    **writing.JUDGES,
}
