"""Random commands to the core, every answer judged by the naive pool (judge.py). A failure prints all commands."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvpool_master.core.messages import (
    Abort,
    BlockBad,
    Command,
    Commit,
    Heartbeat,
    Lookup,
    OpenNamespace,
    Parent,
    Peek,
    Purge,
    Register,
    Release,
    Remove,
    Renew,
    Reserve,
    Reserved,
    RetireNode,
    RunState,
    SegmentOffer,
    SessionLost,
    SlabBound,
    SlotsCleared,
    Tick,
    WorkerGone,
)
from kvpool_master.core.pool import Pool
from kvpool_master.core.settings import Settings
from property.finish import finish
from property.judge import Core, Judge
from property.nonsense import NONSENSE
from property.running import TIMEOUT_S, machine_settings
from property.strategies import (
    KINDS,
    NODES,
    SETTINGS,
    SLAB_BYTES,
    WORKERS,
    Kind,
    Word,
    delays_ms,
    long_words,
    starts,
    words,
)

picks = st.integers(0, 7)
rarely = st.sampled_from([False] * 7 + [True])
mostly = st.sampled_from([True] * 5 + [False])
TROUBLES = (
    "session lost",
    "session of a former life lost",
    "leaves",
    "heartbeat",
    "heartbeat of a former life",
    "registers",
    "registers anew",
    "purge",
    "slab bound unasked",
)


class CoreMachine(RuleBasedStateMachine):
    """The rules; each sends one command or a few. Arguments named `pick` choose among what there is."""

    fills = True
    """The pool is filled to the last slot at the end."""

    @staticmethod
    def core_of(settings: Settings) -> Core:
        """What is judged; test_machine_catches.py puts faults here."""
        return Pool(settings, epoch=1)

    @initialize(
        names=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=2, unique=True),
        settings=st.sampled_from(sorted(SETTINGS)),
        slabs=st.lists(st.integers(1, 4), min_size=2, max_size=3),
        prompt=st.sampled_from([True, True, False]),
    )
    def start(self, names: list[str], settings: str, slabs: list[int], prompt: bool) -> None:
        """slabs: of the segments, dealt to two nodes. prompt: nodes bind slabs at once."""
        self.offers = {
            name: tuple(SegmentOffer(index, count * SLAB_BYTES, SLAB_BYTES) for index, count in enumerate(slabs[at::2]))
            for at, name in enumerate(NODES)
        }
        self.begin([KINDS[name] for name in names], SETTINGS[settings], NODES)
        self.prompt = prompt

    def begin(self, kinds: list[Kind], settings: Settings, nodes: tuple[str, ...]) -> None:
        """All nodes join, all namespaces are opened; slabs that are bound are answered for later."""
        self.judge = Judge(self.core_of(settings), settings)
        self.kinds = kinds
        self.prompt, self.clears = False, True
        self.ids = 0
        self.words: list[str] = []
        self.lives: dict[str, int] = dict.fromkeys(nodes, 1)
        for name in nodes:
            self.register(name, 1)
        for kind in kinds:
            self.send(OpenNamespace(kind.spec))

    # -- what rules share --------------------------------------------------------------------------------

    def send(self, command: Command) -> Any:
        answer = self.judge.step(command)
        self.after()
        return answer

    def after(self) -> None:
        """What nodes do at once."""
        while self.prompt and self.judge.binds:
            self.bind(0)
        while self.clears and self.judge.clears:
            self.clear(0)

    def clear(self, pick: int) -> None:
        """A node answers for slots that it has cleared; also one that is away."""
        order = list(self.judge.clears.values())[pick % len(self.judge.clears)]
        self.judge.step(SlotsCleared(order.node, self.lives[order.node], order.order))

    def kind(self, pick: int) -> Kind:
        return self.kinds[pick % len(self.kinds)]

    def fresh_id(self) -> bytes:
        self.ids += 1
        return self.ids.to_bytes(16, "big")

    def known_id(self, pick: int) -> bytes:
        """One of the last few ids, or one that comes later."""
        return max(1, self.ids + 1 - pick).to_bytes(16, "big")

    def put(
        self, pick: int, near: Word, start: int, orphan: bool = False, new: bool = False
    ) -> tuple[Kind, bytes, Parent | bytes]:
        """Kind, chain and parent of a put; only entry = any may start behind the root."""
        kind, word = self.kind(pick), near.of(self.words)
        if new:
            self.words.append(word)
        if kind.spec.entry == "root":
            return kind, kind.chain(word), Parent.ROOT
        start = min(start, len(word) - 1)
        if orphan:
            return kind, kind.chain(word, start), Parent.UNKNOWN
        parent = kind.chain(word[:start])[-kind.spec.key_bytes :] if start else Parent.ROOT
        return kind, kind.chain(word, start), parent

    # -- reading -----------------------------------------------------------------------------------------

    @rule(
        pick=picks,
        word=words,
        start=starts,
        skip=starts,
        how=st.sampled_from(["lease", "lease", "again", "peek", "explain"]),
        again=picks,
    )
    def lookup(self, pick: int, word: Word, start: int, skip: int, how: str, again: int) -> None:
        kind, chain, _ = self.put(pick, word, start)
        skip = min(skip, len(chain) // kind.spec.key_bytes)
        if how in ("lease", "again"):
            lease = self.fresh_id() if how == "lease" else self.known_id(again)
            self.send(Lookup(kind.spec.id, chain, skip, lease))
        else:
            self.send(Peek(kind.spec.id, chain, skip, how == "explain"))

    @rule(pick=picks, count=st.integers(1, 3), early=rarely)
    def release(self, pick: int, count: int, early: bool) -> None:
        leases = list(self.judge.model.leases)
        if early:
            self.send(Release((self.known_id(pick % 2),)))
        elif leases:
            self.send(Release(tuple(leases[pick % len(leases) :][:count])))

    @rule(pick=picks, unknown=rarely)
    def renew(self, pick: int, unknown: bool) -> None:
        leases = list(self.judge.model.leases)
        if unknown or leases:
            self.send(Renew(self.known_id(pick) if unknown else leases[pick % len(leases)]))

    # -- writing -----------------------------------------------------------------------------------------

    @rule(
        pick=picks,
        word=words | long_words,
        start=starts,
        orphan=st.booleans(),
        part=st.none() | st.integers(0, 2),
        nodes=st.lists(st.sampled_from(NODES), max_size=3),
        worker=st.sampled_from(WORKERS),
        again=st.sampled_from([None] * 5 + [0, 1, 2]),
    )
    def reserve(
        self,
        pick: int,
        word: Word,
        start: int,
        orphan: bool,
        part: int | None,
        nodes: list[str],
        worker: int,
        again: int | None,
    ) -> None:
        kind, chain, parent = self.put(pick, word, start, orphan, new=True)
        parts = kind.spec.parts
        low, high = (0, parts) if part is None else (part % parts, part % parts + 1)
        named = tuple(nodes[: high - low]) if len(nodes) >= high - low else tuple(nodes[:1])
        if worker:
            named = (named or NODES)[:1]
        key = self.fresh_id() if again is None else self.known_id(again)
        self.send(Reserve(kind.spec.id, key, parent, chain, low, high, named, worker))

    @rule(pick=picks, some=st.lists(words, min_size=1, max_size=4), keep=st.booleans(), named=st.booleans())
    def request(self, pick: int, some: list[Word], keep: bool, named: bool) -> None:
        """What an engine does for prompts: look up, store the rest, release or go on reading."""
        for word in some:
            kind, chain, _ = self.put(pick, word, 0)
            lease = self.fresh_id()
            self.send(Lookup(kind.spec.id, chain, 0, lease))
            self.store_all(pick, word, 0, False, (NODES[pick % 2],) if named else ())
            if not keep:
                self.send(Release((lease,)))

    @rule(pick=picks, word=words | long_words, start=starts, orphan=st.booleans(), named=st.booleans())
    def store(self, pick: int, word: Word, start: int, orphan: bool, named: bool) -> None:
        self.store_all(pick, word, start, orphan, (NODES[pick % 2],) if named else ())

    def store_all(self, pick: int, word: Word, start: int, orphan: bool, named: tuple[str, ...]) -> None:
        """A whole put: reserve all parts, commit all that is granted."""
        kind, chain, parent = self.put(pick, word, start, orphan, new=True)
        key, parts = self.fresh_id(), kind.spec.parts
        answer = self.send(Reserve(kind.spec.id, key, parent, chain, 0, parts, named))
        if isinstance(answer, Reserved) and answer.write_ms:
            for part in range(parts):
                granted = [run for run in answer.runs if run.part_from <= part < run.part_to]
                blocks = sum(run.blocks for run in granted if run.state is RunState.YOURS)
                self.send(Commit(key, part, part + 1, blocks, final=True))

    @rule(pick=picks)
    def retry(self, pick: int) -> None:
        """The same reservation again."""
        known = list(self.judge.model.reservations.values())[-4:]
        if known:
            self.send(known[pick % len(known)].request)

    @rule(pick=picks, blocks=st.integers(0, 6), one=st.none() | st.integers(0, 2), final=st.booleans())
    def commit(self, pick: int, blocks: int, one: int | None, final: bool) -> None:
        known = list(self.judge.model.reservations.values())[-8:]
        if not known:
            return
        reservation = known[pick % len(known)]
        request = reservation.request
        low, high = request.part_from, request.part_to
        if one is not None:
            low, high = one, one + 1
        self.send(
            Commit(request.reservation, low, high, blocks, final, reservation.worker, reservation.share)
        )  # fmt: skip

    @rule(pick=picks, writer=st.booleans(), one=st.none() | st.integers(0, 2), unknown=rarely)
    def abort(self, pick: int, writer: bool, one: int | None, unknown: bool) -> None:
        known = list(self.judge.model.reservations.values())[-8:]
        if not known and not unknown:
            return
        key, share = self.known_id(pick % 2), 0
        if not unknown:
            key, share = known[pick % len(known)].request.reservation, known[pick % len(known)].share
        self.send(Abort(key, writer, share=share) if one is None else Abort(key, writer, one, one + 1, share))

    @rule(pick=picks, other=rarely)
    def worker_gone(self, pick: int, other: bool) -> None:
        """The process of a reservation ends; other: one that has reserved nothing."""
        known = [(one.nodes, one.worker) for one in self.judge.model.reservations.values()]
        known = [(nodes or NODES, worker) for nodes, worker in known[-8:] if worker]
        if other or known:
            (name, *_), worker = (NODES, WORKERS[pick % len(WORKERS)]) if other else known[pick % len(known)]
            self.send(WorkerGone(name, worker))

    # -- removing ----------------------------------------------------------------------------------------

    @rule(pick=picks, word=words, start=starts, skip=starts)
    def remove(self, pick: int, word: Word, start: int, skip: int) -> None:
        kind, chain, _ = self.put(pick, word, start)
        self.send(Remove(kind.spec.id, chain, min(skip, len(chain) // kind.spec.key_bytes)))

    @rule(pick=picks, wrong=st.sampled_from([False, False, True]))
    def bad_bytes(self, pick: int, wrong: bool) -> None:
        blocks = sorted(self.judge.model.blocks.items())
        if blocks:
            (namespace, keys), block = blocks[pick * 3 % len(blocks)]
            cells = block.cells()
            self.send(BlockBad(namespace, keys, cells[pick % len(cells)].stamp + wrong))

    # -- time and nodes ----------------------------------------------------------------------------------

    @rule(ms=delays_ms, alive=mostly, tick=mostly)
    def advance(self, ms: int, alive: bool, tick: bool) -> None:
        """Let time pass. alive: in steps, with heartbeats; else at once."""
        step_ms = 300 if alive else ms or 1
        for passed in range(0, max(ms, 1), step_ms):
            self.judge.now_ms += min(step_ms, ms - passed)
            if alive:
                for name, node in list(self.judge.model.nodes.items()):
                    self.send(Heartbeat(name, node.incarnation))
            if tick:
                self.send(Tick())

    @precondition(lambda self: self.judge.binds)
    @rule(pick=picks)
    def bind(self, pick: int) -> None:
        """A node answers for a slab."""
        effect = self.judge.binds.pop(pick % len(self.judge.binds))
        life = self.lives[effect.node]
        self.judge.step(SlabBound(effect.node, life, effect.segment, effect.slab, effect.slot_bytes))

    @rule(name=st.sampled_from(NODES), what=st.sampled_from(TROUBLES), pick=picks)
    def trouble(self, name: str, what: str, pick: int) -> None:
        self.in_trouble(name, what, pick)

    def in_trouble(self, name: str, what: str, pick: int) -> None:
        """What happens now and then."""
        life, node = self.lives[name], self.judge.model.nodes.get(name)
        if what == "session lost":
            self.send(SessionLost(name, life))
        elif what == "session of a former life lost":
            self.send(SessionLost(name, life - 1))
        elif what == "leaves":
            self.send(RetireNode(name, life))
        elif what == "heartbeat":
            self.send(Heartbeat(name, life))
        elif what == "heartbeat of a former life":
            self.send(Heartbeat(name, life - 1))
        elif what == "registers":
            self.lives[name] += node is None
            self.register(name, self.lives[name])
        elif what == "registers anew":
            self.lives[name] += node is None or not node.up
            self.register(name, self.lives[name] + (node is not None and node.up))
        elif what == "purge":
            self.send(Purge(self.kind(pick).spec.id))
        else:
            self.bind_unasked(pick)

    @rule(name=st.sampled_from(NODES))
    def recover(self, name: str) -> None:
        self.come_back(name)

    def come_back(self, name: str) -> None:
        """A node that is away comes back."""
        node = self.judge.model.nodes.get(name)
        if node is None or not node.up:
            self.lives[name] += 1
            self.register(name, self.lives[name])

    def register(self, name: str, life: int) -> None:
        self.send(Register(name, life, self.offers[name]))

    def bind_unasked(self, pick: int) -> None:
        """An answer that nobody asked for, or for a size that was not asked for."""
        segments = list(self.judge.model.segments.items())
        if segments:
            handle, segment = segments[pick % len(segments)]
            size = (8192, 16384)[pick % 2]
            if segment.slabs[0].binding != size:
                self.send(SlabBound(segment.node, self.lives[segment.node], handle, 0, size))

    # -- the rest ----------------------------------------------------------------------------------------

    @rule(pick=picks, nonsense=st.sampled_from(sorted(NONSENSE)))
    def nonsense(self, pick: int, nonsense: str) -> None:
        command, errors = NONSENSE[nonsense](self.kind(pick), self.fresh_id())
        self.judge.refused(command, *errors)

    @rule()
    def settle(self) -> None:
        """Let graces pass and ticks come to rest: sums must be exact."""
        for _ in range(2):
            self.advance(300, alive=True, tick=True)
        self.judge.settle()

    def teardown(self) -> None:
        if hasattr(self, "judge") and not self.judge.broken:
            finish(self)


TestCore = CoreMachine.TestCase
TestCore.settings = machine_settings(examples=230)
TestCore = pytest.mark.timeout(TIMEOUT_S)(TestCore)
