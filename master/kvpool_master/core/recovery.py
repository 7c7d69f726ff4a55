"""How a pool becomes whole again: whose inventory is next, when segments open, when all is there.

Rules
  - A few nodes report at a time. An inventory that makes no progress for inventory_ms is given up: its node is
    retired and has to register again.
  - A segment that came with contents is closed until its inventory is complete, and until no lease and no reservation
    of a former life can be alive any more. What has arrived is served at once.
  - Ready: every node known from former lives, and every one that registered meanwhile, has nothing to report any more,
    or recovery_ms have passed since the start. Once ready, ready for ever.
  - While inventories are awaited, every tree has an index (reindex.py). Orphans in a tree with entry = root, which
    nothing can reach, wait for their ancestors until orphan_grace_ms after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvpool_master.core import messages as m
from kvpool_master.core.claims import Claims
from kvpool_master.core.forest import Forest
from kvpool_master.core.intake import Intake
from kvpool_master.core.inventory import Inventory, InventoryState
from kvpool_master.core.liveness import Liveness, Node
from kvpool_master.core.memory import Memory
from kvpool_master.core.messages import AskInventory, Effect, GoneReason, Remember
from kvpool_master.core.reindex import Reindex
from kvpool_master.core.segments import Segment
from kvpool_master.core.settings import Settings
from kvpool_master.core.snapshot import PoolCounters
from kvpool_master.core.spans import Tree
from kvpool_master.core.unclaimed import Unclaimed


class Recovery:
    """See the module's docstring. trees: those of all open namespaces."""

    def __init__(
        self,
        settings: Settings,
        epoch: int,
        memory: Memory,
        start_ms: int,
        forest: Forest,
        liveness: Liveness,
        intake: Intake,
        unclaimed: Unclaimed,
        counters: PoolCounters,
        trees: Callable[[], Iterable[Tree]],
    ) -> None:
        self._settings = settings
        self._epoch = epoch
        self._start_ms = start_ms
        self._forest = forest
        self._liveness = liveness
        self._intake = intake
        self._unclaimed = unclaimed
        self._counters = counters
        self._trees = trees
        self._reindex = Reindex()
        self._number = 0
        self._missing = dict.fromkeys(memory.nodes)
        """Nodes known from former lives that have not registered yet."""
        self._quiet_since_ms = start_ms
        """When the last inventory was complete."""
        self.ready = not memory.nodes
        self._longest_ms = max(settings.lease_max_ms, settings.write_max_ms)
        self._had_former = memory.grace_ms is not None
        self._former_ms = self._longest_ms if memory.grace_ms is None else memory.grace_ms

    # -- nodes and namespaces come

    def joined(self, node: Node, command: m.Register, now_ms: int) -> None:
        """A node brings segments that are not known: those that hold something are closed, and to be reported."""
        self._missing.pop(node.name, None)
        for segment, offer in zip(node.segments, command.segments, strict=True):
            if not offer.holds:
                continue
            # One that was given up in this very epoch may have readers and writers of this epoch.
            same = command.epoch_seen == self._epoch
            segment.quiet_until_ms = now_ms + self._longest_ms if same else self._start_ms + self._former_ms
            segment.closed = True
            segment.claims = Claims(segment.allocator)
            node.inventory = Inventory(now_ms)

    def kept(self, node: Node) -> None:
        """A node is back whose segments are known."""
        self._missing.pop(node.name, None)

    def gone(self, segment: Segment) -> None:
        """A segment's node was given up."""
        self._unclaimed.forget(segment)
        if segment.claims is not None:
            segment.claims.free_unclaimed()
            segment.claims = None

    def opened(self, tree: Tree) -> None:
        """A namespace is open, or purged and open anew: it gets what waited for it."""
        waiting = self._unclaimed.take(tree.namespace)
        if self.expecting or waiting:
            self._reindex.begin([tree])  # complete at once: the tree is empty
        for command in waiting:
            self._intake.adopt(tree, command)

    @property
    def expecting(self) -> bool:
        """Whether an inventory is awaited, or may yet come from a node that is known."""
        return bool(self._missing) or any(node.inventory is not None for node in self._liveness.nodes.values())

    def grace_left_ms(self, now_ms: int) -> int:
        """How long something of a former life may still be alive."""
        ends = [segment.quiet_until_ms for node in self._liveness.nodes.values() for segment in node.segments]
        return max([self._start_ms + self._former_ms if self._had_former else 0, *ends]) - now_ms

    def describe(self) -> str:
        """For people: what is awaited; empty once ready."""
        if self.ready:
            return ""
        states = [node.inventory.state for node in self._liveness.nodes.values() if node.inventory is not None]
        counts = {state.value: states.count(state) for state in InventoryState if state in states}
        parts = [f"{count} inventories {word}" for word, count in counts.items()]
        if self._missing:
            names = ", ".join(sorted(self._missing)[:8])
            parts.insert(0, f"{len(self._missing)} nodes have not come back ({names})")
        return "; ".join(parts)

    # -- time

    def overdue(self, now_ms: int) -> list[Node]:
        """Nodes whose inventory makes no progress; the caller gives them up."""
        limit_ms = now_ms - self._settings.inventory_ms
        found: list[Node] = []
        for node in self._liveness.nodes.values():
            inventory = node.inventory
            if (
                inventory is not None
                and inventory.state is not InventoryState.WAITING
                and inventory.moved_ms <= limit_ms
            ):
                found.append(node)
        self._counters.inventories_failed += len(found)
        return found

    def stalled(self, delay_ms: int) -> None:
        """The Master itself was late by so much: nobody's time is over for it."""
        self._start_ms += delay_ms if not self.ready else 0
        for node in self._liveness.nodes.values():
            if node.inventory is not None:
                node.inventory.moved_ms += delay_ms

    def tick(self, now_ms: int) -> list[Effect]:
        """Everything that time does here."""
        effects: list[Effect] = []
        if self._missing and now_ms >= self._start_ms + self._settings.recovery_ms:
            effects += [Remember(node_gone=name) for name in self._missing]
            self._missing.clear()
        self._unclaimed.expire(now_ms)
        effects += self.ask(now_ms)
        if self.expecting:
            self._quiet_since_ms = now_ms
        else:
            self._tidy(now_ms)
        return effects

    def ask(self, now_ms: int) -> list[Effect]:
        """Let the next nodes report, if it is their turn. Nothing awaited any more: ready."""
        self.ready = self.ready or not self.expecting
        waiting: list[Node] = []
        arriving = 0
        for node in self._liveness.nodes.values():
            if node.inventory is not None:
                arriving += node.inventory.state is InventoryState.ARRIVING
                if node.inventory.state is InventoryState.WAITING and node.up:
                    waiting.append(node)
        if waiting:
            self._reindex.begin(self._trees())
            self._reindex.work(self._settings.tick_spans_max)
        effects: list[Effect] = []
        if self._reindex.complete:
            for node in waiting[: max(0, self._settings.inventories_max - arriving)]:
                assert node.inventory is not None
                self._number += 1
                node.inventory.state, node.inventory.number = InventoryState.ARRIVING, self._number
                node.inventory.moved_ms = now_ms
                effects.append(AskInventory(node.name, node.incarnation, self._number))
        return effects

    def open_segments(self, now_ms: int) -> list[Segment]:
        """Open the segments that nothing keeps closed any more; returns them."""
        opened: list[Segment] = []
        for node in self._liveness.nodes.values():
            for segment in node.segments:
                if not segment.closed or segment.claims is not None:
                    continue
                segment.sort(self._settings.tick_spans_max)
                if not segment.unsorted and segment.quiet_until_ms <= now_ms:
                    segment.closed = False
                    opened.append(segment)
        return opened

    def _tidy(self, now_ms: int) -> None:
        """No inventory is awaited: drop indexes, and orphans whose ancestors did not come in time."""
        for tree in self._trees():
            if tree.anywhere or tree.index is None or tree.indexing:
                continue
            if tree.orphans.children and now_ms >= self._quiet_since_ms + self._settings.orphan_grace_ms:
                self._forest.drop_below(tree.orphans, self._settings.tick_spans_max, GoneReason.INCOMPLETE)
        self._reindex.end(self._trees())
