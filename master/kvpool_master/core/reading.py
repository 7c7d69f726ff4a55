"""Lookup, peek, and the life of leases.

Rules
  - A lookup never waits and evicts nothing. It leases what it hands out, and touches only the deepest block.
  - A retry under a lease's id keeps what the first answer was given.
"""

from __future__ import annotations

from kvpool_master.core import messages as m
from kvpool_master.core.copies import Copies
from kvpool_master.core.directory import walk
from kvpool_master.core.forest import Forest
from kvpool_master.core.leases import Lease, LeaseTable
from kvpool_master.core.liveness import Liveness
from kvpool_master.core.messages import Reason
from kvpool_master.core.runs import CommittedRun, committed_run
from kvpool_master.core.segments import Space
from kvpool_master.core.settings import Settings
from kvpool_master.core.snapshot import PoolCounters
from kvpool_master.core.spans import Tree
from kvpool_proto.errors import BadId, ForeignId, UnknownLease

HOT_SPANS_MAX = 16
"""Of a hit, the deepest spans that count as asked for by the reader's node."""


class Reading:
    """Answers readers. tree: of the command's namespace, in which its chain is well formed."""

    def __init__(
        self,
        settings: Settings,
        leases: LeaseTable,
        forest: Forest,
        space: Space,
        liveness: Liveness,
        copies: Copies,
        counters: PoolCounters,
    ) -> None:
        self._settings = settings
        self._leases = leases
        self._forest = forest
        self._space = space
        self._liveness = liveness
        self._copies = copies
        self._counters = counters

    def _run(self, tree: Tree, command: m.Lookup | m.Peek) -> CommittedRun:
        found = walk(tree, command.chain, command.skip)
        hidden, replicas = self._space.hidden, self._forest.replicas
        if not replicas:
            return committed_run(tree, found, command.skip, len(command.chain), hidden)
        node = self._liveness.nodes.get(command.node) if isinstance(command, m.Lookup) else None
        own = {segment.handle for segment in node.segments} - hidden if node is not None else set[int]()
        return committed_run(tree, found, command.skip, len(command.chain), hidden, replicas, own)

    def lookup(self, command: m.Lookup, tree: Tree, now_ms: int) -> m.Hit:
        """See messages.Lookup."""
        if len(command.lease) != m.ID_BYTES:
            raise BadId(f"lease_id has {len(command.lease)} bytes: {m.ID_BYTES}")
        old = self._leases.get(command.lease)
        mark = hash((command.namespace, command.chain, command.skip))
        if old is not None and old.mark != mark:
            raise ForeignId("the lease id is that of another lookup")
        if command.lease in self._leases.overtaken:
            raise UnknownLease("the lease was released before it was granted")
        run = self._run(tree, command)
        counters = tree.counters
        counters.lookups += 1
        counters.lookup_blocks += max(0, len(command.chain) // tree.key_bytes - command.skip)
        blocks, reason, lease_ms = run.blocks, run.reason, 0
        if blocks and old is None and self._leases.full():
            blocks, reason = 0, Reason.TOO_MANY_LEASES
        if blocks:
            assert run.last is not None
            run.last.touch(run.end, self._forest.next_age())
            last, end, depth = run.last, run.end, command.skip + blocks
            if old is not None and old.depth > depth and old.span.tree is tree:
                last, end, depth = old.span, old.end, old.depth
            lease = Lease(command.lease, command.namespace, last, end, depth=depth, mark=mark)
            size = blocks * tree.parts * tree.slot_bytes
            lease_ms = self._leases.grant(lease, size, now_ms, old)
            self._counters.leases_granted += 1
            counters.hit_blocks += blocks
            if self._settings.copy_hits_min and command.node:
                self._copies.hit(run.spans[-HOT_SPANS_MAX:], command.node)
            if old is not None:
                self.unpin(old, ended=False)
        if reason:
            counters.short_lookups[reason] = counters.short_lookups.get(reason, 0) + 1
        return m.Hit(blocks, reason, run.extents() if blocks else b"", lease_ms)

    def peek(self, command: m.Peek, tree: Tree, now_ms: int) -> m.Peeked:
        """See messages.Peek."""
        run = self._run(tree, command)
        gone = None
        if command.explain and run.reason in (Reason.UNKNOWN_KEY, Reason.HOLE):
            missing = max(run.known, command.skip) if run.reason is Reason.UNKNOWN_KEY else command.skip + run.blocks
            at = missing * tree.key_bytes
            gone = self._forest.ring.find(command.namespace, command.chain[at : at + tree.key_bytes], now_ms)
        return m.Peeked(run.blocks, run.reason, run.extents(), gone)

    def unpin(self, lease: Lease, *, ended: bool) -> None:
        """A lease protects no more; what waited for its end may be free."""
        if ended:
            self._leases.end(lease.id)
        self._forest.settle(lease.unpin())
        self._space.settle_deferred(self._leases.oldest_number)

    def release(self, command: m.Release, now_ms: int) -> m.Released:
        """See messages.Release."""
        if any(len(ident) != m.ID_BYTES for ident in command.leases):
            raise BadId(f"lease ids have {m.ID_BYTES} bytes")
        released = 0
        for ident in command.leases:
            lease = self._leases.get(ident)
            if lease is None:
                self._leases.overtaken.add(ident, now_ms)
                continue
            self.unpin(lease, ended=True)
            released += 1
        self._counters.leases_released += released
        return m.Released(released)

    def renew(self, command: m.Renew, now_ms: int) -> m.Renewed:
        """See messages.Renew."""
        lease = self._leases.get(command.lease)
        if lease is None:
            raise UnknownLease("no such lease, or it has ended")
        return m.Renewed(self._leases.renew(lease, now_ms))
