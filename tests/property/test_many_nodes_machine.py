"""Random commands to the core of a pool of several nodes; judged as in test_core_machine.py, whose rules run too.

Here nodes have data ports or none, are reported, drain and come back; runs are copied, tenants have quotas, puts are
made in shares. Orders to copy and to clear stay open until a rule answers them: fully, partly, late, twice or never.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvpool_master.core.messages import (
    BlockBad,
    Commit,
    CopySlots,
    Drain,
    Lookup,
    Parent,
    ProbeAnswered,
    Purge,
    Register,
    Remove,
    ReportNode,
    Reserve,
    Reserved,
    RetireNode,
    RunState,
    SegmentOffer,
    SetQuota,
    SlotsCleared,
    SlotsCopied,
    Tick,
    Undrain,
)
from property.running import TIMEOUT_S, machine_settings
from property.strategies import (
    MANY_KINDS,
    MANY_NODES,
    MANY_SETTINGS,
    QUOTAS_BYTES,
    SLAB_BYTES,
    TENANTS,
    WORKERS,
    Word,
    long_words,
    words,
)
from property.test_core_machine import TROUBLES, CoreMachine, mostly, picks, rarely

names = st.sampled_from(MANY_NODES)
homes = st.lists(names, max_size=3)


class ManyNodesMachine(CoreMachine):
    """The rules of CoreMachine but for those that others here replace, and more."""

    fills = False
    reserve = store = nonsense = None  # pyright: ignore[reportAssignmentType]

    @initialize(
        kinds=st.lists(st.sampled_from(sorted(MANY_KINDS)), min_size=1, max_size=2, unique=True),
        settings=st.sampled_from(sorted(MANY_SETTINGS)),
        slabs=st.lists(st.integers(1, 4), min_size=3, max_size=4),
        ports=st.sampled_from([7, 7, 7, 6, 3]),
        prompt=mostly,
        copies=st.booleans(),
        clears=mostly,
        stored=st.lists(st.tuples(long_words, homes), max_size=4),
        quota=st.sampled_from([0, 0, 0, 6 * 8_192]),
    )
    def start(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        kinds: list[str],
        settings: str,
        slabs: list[int],
        ports: int,
        prompt: bool,
        copies: bool,
        clears: bool,
        stored: list[tuple[Word, list[str]]],
        quota: int,
    ) -> None:
        """slabs: of the segments, dealt to the nodes. ports: mask of nodes with one. The rest: what is done at once."""
        self.offers = {
            name: tuple(SegmentOffer(index, count * SLAB_BYTES, SLAB_BYTES) for index, count in enumerate(slabs[at::3]))
            for at, name in enumerate(MANY_NODES)
        }
        self.ports = {name: f"{name}:1" if ports >> at & 1 else "" for at, name in enumerate(MANY_NODES)}
        self.old_copies: list[CopySlots] = []
        self.copies = False
        self.begin([MANY_KINDS[name] for name in kinds], MANY_SETTINGS[settings], MANY_NODES)
        self.prompt, self.clears, self.copies = True, clears, copies
        for pick, (word, nodes) in enumerate(stored):
            self.store_put(pick, word, nodes, skip=False)
        self.prompt = prompt
        if quota:
            self.send(SetQuota(self.kinds[0].spec.tenant, quota))

    def register(self, name: str, life: int) -> None:
        self.send(Register(name, life, self.offers[name], data_address=self.ports[name]))

    def after(self) -> None:
        """What nodes do at once."""
        super().after()
        while self.copies and self.judge.copies:
            self.answer_copy(0, 0)

    # -- copies and clearing

    @precondition(lambda self: self.judge.copies)
    @rule(pick=picks, short=st.sampled_from([0, 0, 0, 1, 2, 9]))
    def copied(self, pick: int, short: int) -> None:
        """A node answers for a copy; short: so many blocks are not there."""
        self.answer_copy(pick, short)

    def answer_copy(self, pick: int, short: int) -> None:
        orders = list(self.judge.copies.values())
        effect = orders[pick % len(orders)].effect
        self.old_copies.append(effect)
        blocks = max(0, effect.source[1] - short)
        self.judge.step(SlotsCopied(effect.node, self.lives[effect.node], effect.order, blocks))

    @precondition(lambda self: self.judge.copies)
    @rule(pick=picks, what=st.sampled_from(["removed", "stored anew", "bad", "purged", "source gone", "target gone"]))
    def copied_too_late(self, pick: int, what: str) -> None:
        """What is being copied goes, or changes, and then the node answers that the copy is there."""
        number, order = list(self.judge.copies.items())[pick % len(self.judge.copies)]
        effect, cell = order.effect, order.cells[-1][0][0]
        namespace, keys = cell.ref
        last = len(keys) // self.judge.model.specs[namespace].key_bytes - 1
        if what == "removed" or what == "stored anew":
            self.send(Remove(namespace, keys, last))
        elif what == "bad":
            self.send(BlockBad(namespace, keys, cell.stamp))
        elif what == "purged":
            self.send(Purge(namespace))
        else:
            name = order.source_node if what == "source gone" else effect.node
            self.send(RetireNode(name, self.lives[name]))
        if what == "stored anew":
            self.store_chain(namespace, keys, ())
        self.send(SlotsCopied(effect.node, self.lives[effect.node], number, effect.source[1]))

    @precondition(lambda self: self.old_copies)
    @rule(pick=picks)
    def copied_again(self, pick: int) -> None:
        """An answer that came before comes again."""
        effect = self.old_copies[-1 - pick % min(4, len(self.old_copies))]
        self.send(SlotsCopied(effect.node, self.lives[effect.node], effect.order, effect.source[1]))

    @precondition(lambda self: self.judge.clears)
    @rule(pick=picks, wrong=rarely)
    def cleared(self, pick: int, wrong: bool) -> None:
        """A node has cleared what it was told to; wrong: another node says so."""
        order = list(self.judge.clears.values())[pick % len(self.judge.clears)]
        name = MANY_NODES[pick % 3] if wrong else order.node
        self.send(SlotsCleared(name, self.lives[name], order.order))

    # -- nodes

    @rule(name=names, reporter=st.sampled_from([*MANY_NODES, *MANY_NODES, "", "stranger"]), answers=mostly)
    def report(self, name: str, reporter: str, answers: bool) -> None:
        """A worker could not use a node's data port; answers: the node answers the Master at once."""
        self.send(ReportNode(name, reporter))
        node = self.judge.model.nodes.get(name)
        if answers and node is not None and node.probe is not None:
            self.send(ProbeAnswered(name, node.incarnation, node.probe[0]))

    @rule(name=names, back=st.integers(0, 2), life=st.sampled_from([0, 0, 0, 1]))
    def answer_probe(self, name: str, back: int, life: int) -> None:
        node = self.judge.model.nodes.get(name)
        number = node.probe[0] if node is not None and node.probe is not None else 1
        self.send(ProbeAnswered(name, max(1, self.lives[name] - life), number - back))

    @rule(name=names)
    def drain(self, name: str) -> None:
        self.send(Drain(name))

    @rule(name=names)
    def undrain(self, name: str) -> None:
        self.send(Undrain(name))

    @rule(name=names, short=st.integers(0, 3), late=st.booleans(), read=st.booleans())
    def drain_and_leave(self, name: str, short: int, late: bool, read: bool) -> None:
        """An operator takes a node away: it stops when it is drained, if that comes to be. late: and comes back."""
        for word in self.words[-2:] if read else ():
            for kind in self.kinds:
                self.send(Lookup(kind.spec.id, kind.chain(word), 0, self.fresh_id()))
        self.send(Drain(name))
        for turn in range(8):
            self.advance(50, alive=True, tick=True)
            if self.judge.copies and turn != short:
                self.answer_copy(turn, short if turn < short else 0)
            node = self.judge.model.nodes.get(name)
            if node is None or node.drained:
                break
        if (node := self.judge.model.nodes.get(name)) is not None and node.drained:
            self.send(RetireNode(name, node.incarnation))
            if late:
                self.send(Undrain(name))

    @rule(ms=st.sampled_from([0, 1, 20]))
    def tick(self, ms: int) -> None:
        self.advance(ms, alive=True, tick=True)

    @rule(name=names, port=mostly)
    def move_port(self, name: str, port: bool) -> None:
        """The same life registers again, with a data port or without."""
        self.ports[name] = f"{name}:2" if port else ""
        node = self.judge.model.nodes.get(name)
        if node is not None:
            self.register(name, node.incarnation)

    @rule(name=names, what=st.sampled_from(TROUBLES), pick=picks)
    def trouble(self, name: str, what: str, pick: int) -> None:
        self.in_trouble(name, what, pick)

    @rule(name=names)
    def recover(self, name: str) -> None:
        self.come_back(name)

    # -- reading and writing

    @rule(pick=picks, word=words, node=names)
    def lookup_from(self, pick: int, word: Word, node: str) -> None:
        """A reader says where it is, twice; then hot runs may be copied."""
        kind, chain, _ = self.put(pick, word, 0)
        for _ in range(2):
            self.send(Lookup(kind.spec.id, chain, 0, self.fresh_id(), node))
        self.send(Tick())

    @precondition(lambda self: any(block.copies for block in self.judge.model.blocks.values()))
    @rule(pick=picks)
    def read_a_copy(self, pick: int) -> None:
        """A reader has a copy on its own node."""
        model = self.judge.model
        copies = [copy for block in model.blocks.values() for copy in block.copies]
        copy = copies[pick % len(copies)]
        namespace, keys = copy.ref
        self.send(Lookup(namespace, keys, 0, self.fresh_id(), model.segments[copy.place[0]].node))

    @rule(
        pick=picks,
        word=words | long_words,
        part=st.none() | st.integers(0, 2),
        nodes=homes,
        avoid=st.lists(names, max_size=2).map(tuple),
        worker=st.sampled_from(WORKERS),
        shares=st.sampled_from([1, 1, 2, 3]),
        share=picks,
    )
    def reserve_somewhere(
        self,
        pick: int,
        word: Word,
        part: int | None,
        nodes: list[str],
        avoid: tuple[str, ...],
        worker: int,
        shares: int,
        share: int,
    ) -> None:
        """A put by writers here and there, in shares where it is of one part."""
        kind, chain, parent = self.put(pick, word, 0, new=True)
        parts = kind.spec.parts
        low, high = (0, parts) if part is None else (part % parts, part % parts + 1)
        shares = shares if high - low == 1 else 1
        wanted = max(shares, high - low)
        named = tuple(nodes[:wanted]) if len(nodes) >= wanted else tuple(nodes[:1])
        key = self.fresh_id()
        self.send(
            Reserve(kind.spec.id, key, parent, chain, low, high, named, worker, shares, share % shares, avoid)
        )  # fmt: skip

    @rule(pick=picks, share=st.integers(0, 2), node=names, worker=st.sampled_from(WORKERS))
    def join_shares(self, pick: int, share: int, node: str, worker: int) -> None:
        """Another writer asks for its share, or the same one again."""
        known = [one.request for one in self.judge.model.reservations.values() if one.request.shares > 1][-4:]
        if known:
            first = known[pick % len(known)]
            self.send(
                Reserve(
                    first.namespace, first.reservation, first.parent, first.chain, first.part_from, first.part_to,
                    (node,), worker, first.shares, share % first.shares,
                )
            )  # fmt: skip

    @rule(pick=picks, word=words | long_words, nodes=homes, skip=rarely)
    def store_from(self, pick: int, word: Word, nodes: list[str], skip: bool) -> None:
        """A whole put, each part or share by a writer of its own; skip: one of them says nothing."""
        self.store_put(pick, word, nodes, skip)
        self.send(Tick())

    def store_put(self, pick: int, word: Word, nodes: list[str], skip: bool) -> None:
        kind, chain, _ = self.put(pick, word, 0, new=True)
        self.store_chain(kind.spec.id, chain, tuple(nodes), skip)

    def store_chain(self, namespace: bytes, chain: bytes, nodes: tuple[str, ...], skip: bool = False) -> None:
        parts = self.judge.model.specs[namespace].parts
        shares = max(1, len(nodes)) if parts == 1 else 1
        named = nodes if len(nodes) in (parts, shares) else nodes[:1]
        key = self.fresh_id()
        answer = self.send(Reserve(namespace, key, Parent.ROOT, chain, 0, parts, named, 0, shares))
        if not isinstance(answer, Reserved):
            return
        mine = [run for run in answer.runs if run.state is RunState.YOURS]
        for share in sorted({run.share for run in mine})[skip:]:
            for part in range(parts):
                runs = [run for run in mine if run.share == share and run.part_from <= part < run.part_to]
                if runs:
                    self.send(Commit(key, part, part + 1, sum(run.blocks for run in runs), final=True, share=share))

    # -- rights

    @rule(tenant=st.sampled_from(TENANTS), size=st.sampled_from(QUOTAS_BYTES))
    def quota(self, tenant: str, size: int) -> None:
        self.send(SetQuota(tenant, size))


TestManyNodes = ManyNodesMachine.TestCase
TestManyNodes.settings = machine_settings(examples=170)
TestManyNodes = pytest.mark.timeout(TIMEOUT_S)(TestManyNodes)
