"""The pool's state machine: apply(command, now_ms) -> outcome. The one door to the core.

Rules
  - Time enters with each command and never goes back (an earlier now_ms is taken as the latest seen).
  - Leases and reservations that are past their deadline end before the command is looked at.
  - A command that breaks a rule raises a KVPoolError and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvpool_master.core import messages as m
from kvpool_master.core.adopt import Adopter
from kvpool_master.core.clearing import Clearing
from kvpool_master.core.copies import Copies
from kvpool_master.core.drains import Drains
from kvpool_master.core.evictor import Evictor
from kvpool_master.core.forest import Forest
from kvpool_master.core.intake import Intake
from kvpool_master.core.invariants import check_pool
from kvpool_master.core.leases import LeaseTable
from kvpool_master.core.liveness import Liveness
from kvpool_master.core.members import Members
from kvpool_master.core.memory import NO_MEMORY, Memory
from kvpool_master.core.messages import Effect
from kvpool_master.core.placement import Placement
from kvpool_master.core.puts import Puts
from kvpool_master.core.quotas import Quotas
from kvpool_master.core.reading import Reading
from kvpool_master.core.recovery import Recovery
from kvpool_master.core.removal import Removal
from kvpool_master.core.segments import Space
from kvpool_master.core.settings import Settings
from kvpool_master.core.snapshot import NamespaceCounters, PoolCounters, Snapshot
from kvpool_master.core.spans import Tree
from kvpool_master.core.strays import Strays
from kvpool_master.core.survey import take_snapshot
from kvpool_master.core.unclaimed import Unclaimed
from kvpool_master.core.writes import Writes
from kvpool_proto.errors import (
    BadId,
    BadRequest,
    ChainTooLong,
    EmptyChain,
    KeyLengthMismatch,
    LimitReached,
    NamespaceDiffers,
    PartOutOfRange,
    SlotTooLarge,
    UnknownNamespace,
)
from kvpool_proto.namespace import NamespaceSpec

SHARES_MAX = 1024
"""Among so many writers the blocks of one part may be divided."""


@dataclass(slots=True)
class Namespace:
    """A registered namespace and its present tree."""

    spec: NamespaceSpec
    tree: Tree
    counters: NamespaceCounters


class Pool:
    """See the module's docstring."""

    def __init__(self, settings: Settings, epoch: int, memory: Memory = NO_MEMORY, start_ms: int = 0) -> None:
        """memory: of former lives. start_ms: now, on the clock of apply()."""
        settings.check()
        self.settings = settings
        self.epoch = epoch
        self.counters = PoolCounters()
        self.namespaces: dict[bytes, Namespace] = {}
        self.leases = LeaseTable(settings)
        self.space = Space(settings)
        self.forest = Forest(settings, self.space, self.leases, self.counters)
        self.clearing = Clearing(self.space, self.leases)
        self.writes = Writes(settings, self.space, self.forest, self.clearing, self.counters)
        self.liveness = Liveness(settings, start_ms)
        self.placement = Placement(settings, self.space, self.liveness)
        self.strays = Strays(settings, self.space)
        self.removal = Removal(self.space, self.forest, self.liveness, self.clearing)
        self.unclaimed = Unclaimed(settings, self.space)
        self.tombstones = dict(memory.tombstones)
        adopter = Adopter(self.forest, self.space, self.writes, self.counters, epoch, start_ms)
        self.intake = Intake(
            self.space, self.liveness, self.strays, self.unclaimed, adopter, self.tombstones, self.counters
        )
        self.recovery = Recovery(
            settings, epoch, memory, start_ms, self.forest, self.liveness, self.intake, self.unclaimed, self.counters,
            self._trees
        )  # fmt: skip
        self.evictor = Evictor(settings, self.forest, self.counters)
        self.quotas = Quotas(settings, self.forest, self._trees_of, memory.quotas)
        self.puts = Puts(
            settings, epoch, self.space, self.forest, self.evictor, self.writes, self.liveness, self.placement,
            self.quotas, self.counters
        )  # fmt: skip
        self.copies = Copies(
            settings, self.space, self.forest, self.leases, self.liveness, self.placement, self.clearing,
            self.counters, self.puts.next_stamp
        )  # fmt: skip
        self.drains = Drains(settings, self.leases, self.liveness, self.copies)
        self.reading = Reading(
            settings, self.leases, self.forest, self.space, self.liveness, self.copies, self.counters
        )
        self.members = Members(
            settings, self.space, self.forest, self.liveness, self.writes, self.strays, self.clearing, self.recovery,
            self.placement, self.copies, self.drains, self.counters, memory
        )  # fmt: skip
        self._now_ms = start_ms
        for spec in memory.namespaces:
            self._add(spec)
        self._verbs = self._table_of_verbs()

    def _table_of_verbs(self) -> dict[type, Callable[[Any, int], Any]]:
        return {
            m.OpenNamespace: self._open,
            m.Lookup: lambda command, now_ms: self.reading.lookup(
                command, self._tree(command.namespace, command.chain), now_ms
            ),
            m.Peek: lambda command, now_ms: self.reading.peek(
                command, self._tree(command.namespace, command.chain), now_ms
            ),
            m.Release: self.reading.release,
            m.Renew: self.reading.renew,
            m.Reserve: self._reserve,
            m.Commit: self.writes.commit,
            m.Abort: self._abort,
            m.Remove: lambda command, _: self.removal.remove(command, self._tree(command.namespace, command.chain)),
            m.BlockBad: lambda command, _: self.removal.block_bad(
                command, self._tree(command.namespace, command.chain)
            ),
            m.Purge: self._purge,
            m.Register: self._register,
            m.Heartbeat: self._done(self.members.heartbeat),
            m.SlabBound: self._done(lambda command, _: self.members.slab_bound(command)),
            m.SlotsCleared: self._done(lambda command, _: self.clearing.cleared(command.node, command.order)),
            m.InventorySlabs: self._done(self.intake.slabs),
            m.InventoryStrands: self._strands,
            m.InventoryWriting: self._done(self.intake.writing),
            m.InventoryEnd: self._inventory_end,
            m.WorkerGone: self._done(self._worker_gone),
            m.SessionLost: self._done(lambda command, _: self.members.session_lost(command)),
            m.RetireNode: lambda command, _: m.Done(tuple(self.members.leave(command))),
            m.ReportNode: self.members.report,
            m.ProbeAnswered: self._done(lambda command, _: self.members.probe_answered(command)),
            m.Drain: lambda command, _: self.members.drain(command),
            m.Undrain: lambda command, _: self.members.drain(command),
            m.SlotsCopied: self._done(lambda command, _: self.copies.done(command)),
            m.SetQuota: self._set_quota,
            m.Tick: self._tick,
        }

    def apply(self, command: m.Command, now_ms: int) -> Any:
        """Carry out one command at `now_ms`; the outcome's type stands beside the command in messages.py."""
        now_ms = self._now_ms = max(now_ms, self._now_ms)
        self.forest.now_ms = self.placement.now_ms = self.copies.now_ms = now_ms
        if self.leases.deadlines.next_ms <= now_ms:
            for lease in self.leases.expired(now_ms):
                self.counters.leases_expired += 1
                self.reading.unpin(lease, ended=True)
        if self.writes.deadlines.next_ms <= now_ms:
            self.writes.expire(now_ms)
        return self._verbs[type(command)](command, now_ms)

    def snapshot(self, now_ms: int) -> Snapshot:
        """Numbers for metrics and status. Takes time linear in namespaces and segments."""
        return take_snapshot(self, max(now_ms, self._now_ms))

    def check_invariants(self) -> int:
        """Cross-check every index; raises AssertionError. Returns the number of spans. Linear in everything."""
        return check_pool(self)

    @property
    def reserved_anything(self) -> bool:
        """Whether a stamp of this epoch was given out."""
        return self.puts.stamp > self.epoch << 32

    def grace_left_ms(self, now_ms: int) -> int:
        """How long a lease, a reservation, or something of a former life may still be alive; 0: none is."""
        ends = [lease.deadline_ms for lease in self.leases]
        ends += [reservation.deadline_ms for reservation in self.writes.open.values()]
        return max(0, self.recovery.grace_left_ms(now_ms), max(ends, default=now_ms) - now_ms)

    def holder_of(self, handle: int) -> tuple[str, str]:
        """The node of a segment, and the address of its data port; empty if it is not known."""
        segment = self.space.segments.get(handle)
        node = self.liveness.nodes.get(segment.node) if segment is not None else None
        return (node.name, node.data_address) if node is not None else ("", "")

    def namespace_of(self, ident: bytes) -> bytes | None:
        """The namespace of a lease or a reservation that is alive or remembered."""
        lease = self.leases.get(ident)
        if lease is not None:
            return lease.namespace
        reservation = self.writes.of(ident)
        return reservation.tree.namespace if reservation is not None else None

    @staticmethod
    def _done(verb: Callable[[Any, int], None]) -> Callable[[Any, int], m.Done]:
        def run(command: Any, now_ms: int) -> m.Done:
            """Carry out the verb; raises what it raises."""
            verb(command, now_ms)
            return m.Done()

        return run

    # -- namespaces and checks

    def _open(self, command: m.OpenNamespace, now_ms: int) -> m.Opened:
        spec = command.spec
        spec.check()
        ident = spec.id
        known = self.namespaces.get(ident)
        if known is not None:
            if known.spec != spec:
                registered = f"entry = {known.spec.entry}, replicas = {known.spec.replicas}"
                raise NamespaceDiffers(f"the namespace is registered with {registered}")
            return m.Opened(ident, spec.slot_bytes)
        if len(self.namespaces) >= self.settings.namespaces_max:
            raise LimitReached(f"namespaces_max = {self.settings.namespaces_max} namespaces are registered")
        segments = [segment for node in self.liveness.nodes.values() for segment in node.segments]
        fitting = [segment for segment in segments if segment.fits(spec.slot_bytes)]
        if segments and not fitting:
            largest = max(segment.allocator.slab_bytes for segment in segments)
            raise SlotTooLarge(f"a slot of {spec.slot_bytes} bytes does not fit in a slab of {largest} bytes")
        self._add(spec)
        effects: list[Effect] = [m.Remember(namespace=spec)]
        for segment in fitting:
            effects += self.space.bind(segment, spec.slot_bytes, 1)
        return m.Opened(ident, spec.slot_bytes, tuple(effects))

    def _add(self, spec: NamespaceSpec) -> None:
        counters = NamespaceCounters()
        tree = Tree(spec, spec.id, counters)
        self.namespaces[spec.id] = Namespace(spec, tree, counters)
        self.quotas.opened(tree)
        self.recovery.opened(tree)

    def _set_quota(self, command: m.SetQuota, now_ms: int) -> m.QuotaSet:
        self.quotas.set(command.tenant, command.bytes)
        return m.QuotaSet(self.quotas.used(command.tenant), (m.Remember(quota=(command.tenant, command.bytes)),))

    def _trees_of(self, tenant: str) -> list[Tree]:
        return [tree for tree in self._trees() if tree.tenant == tenant]

    def _trees(self) -> list[Tree]:
        return [namespace.tree for namespace in self.namespaces.values()]

    def _namespace(self, ident: bytes) -> Namespace:
        namespace = self.namespaces.get(ident)
        if namespace is None:
            raise UnknownNamespace(f"namespace {ident.hex() or '(empty)'} is not registered")
        return namespace

    def _tree(self, ident: bytes, chain: bytes) -> Tree:
        """The tree of a namespace in which `chain` is well formed. Raises by the table of errors."""
        tree = self._namespace(ident).tree
        if not chain:
            raise EmptyChain("the chain is empty")
        if len(chain) % tree.key_bytes:
            raise KeyLengthMismatch(f"the chain has {len(chain)} bytes: not a multiple of key_bytes = {tree.key_bytes}")
        if len(chain) > self.settings.chain_blocks_max * tree.key_bytes:
            blocks = len(chain) // tree.key_bytes
            raise ChainTooLong(f"the chain has {blocks} blocks: chain_blocks_max = {self.settings.chain_blocks_max}")
        return tree

    # -- writing

    def _reserve(self, command: m.Reserve, now_ms: int) -> m.Reserved:
        tree = self._tree(command.namespace, command.chain)
        if len(command.reservation) != m.ID_BYTES:
            raise BadId(f"reservation_id has {len(command.reservation)} bytes: {m.ID_BYTES}")
        if not 0 <= command.part_from < command.part_to <= tree.parts:
            raise PartOutOfRange(f"parts [{command.part_from}, {command.part_to}): within [0, {tree.parts})")
        if not 0 <= command.share < command.shares <= SHARES_MAX:
            raise BadRequest(f"share {command.share} of {command.shares}: within 1 to {SHARES_MAX} shares")
        if command.shares > 1 and command.part_to - command.part_from > 1:
            raise BadRequest(f"{command.shares} shares of several parts: only one part can be divided")
        if len(command.nodes) not in (0, 1, max(command.shares, command.part_to - command.part_from)):
            raise BadRequest(f"nodes has {len(command.nodes)} names: none, one, or one for each part or share")
        if not tree.anywhere and command.parent is not m.Parent.ROOT:
            raise BadRequest("a namespace with entry = root takes only chains that start at the root")
        if isinstance(command.parent, bytes) and len(command.parent) != tree.key_bytes:
            raise KeyLengthMismatch(f"parent_key has {len(command.parent)} bytes: key_bytes = {tree.key_bytes}")
        return self.puts.reserve(command, tree, now_ms)

    def _abort(self, command: m.Abort, now_ms: int) -> m.Aborted:
        if len(command.reservation) != m.ID_BYTES:
            raise BadId(f"reservation_id has {len(command.reservation)} bytes: {m.ID_BYTES}")
        mask = (1 << command.part_to) - (1 << command.part_from) if command.part_to else None
        if mask is not None and not 0 <= command.part_from < command.part_to:
            raise PartOutOfRange(f"parts [{command.part_from}, {command.part_to})")
        aborted = self.writes.abort(
            command.reservation, mask, writer=command.writer, share=command.share, now_ms=now_ms
        )
        return m.Aborted(aborted)

    # -- purging

    def _purge(self, command: m.Purge, now_ms: int) -> m.Purged:
        namespace = self._namespace(command.namespace)
        self.writes.purge(namespace.tree, now_ms)
        blocks = self.forest.bury(namespace.tree)
        namespace.tree = Tree(namespace.spec, command.namespace, namespace.counters)
        self.quotas.opened(namespace.tree)
        self.recovery.opened(namespace.tree)
        stamp = self.tombstones[command.namespace] = self.puts.stamp
        orders = self.clearing.bury(command.namespace, stamp)
        return m.Purged(blocks, stamp, (m.Remember(tombstone=(command.namespace, stamp)), *orders))

    # -- nodes and time

    def _register(self, command: m.Register, now_ms: int) -> m.Registered:
        registered = self.members.register(command, self._slot_sizes(), now_ms)
        return replace(registered, tombstones=tuple(self.tombstones.items()))

    def _slot_sizes(self) -> set[int]:
        return {namespace.spec.slot_bytes for namespace in self.namespaces.values()}

    def _strands(self, command: m.InventoryStrands, now_ms: int) -> m.Taken:
        namespace = self.namespaces.get(command.namespace)
        return self.intake.strands(command, namespace and namespace.tree, now_ms)

    def _inventory_end(self, command: m.InventoryEnd, now_ms: int) -> m.Done:
        self.intake.end(command, now_ms)
        return m.Done(tuple(self.recovery.ask(now_ms)))

    def _worker_gone(self, command: m.WorkerGone, now_ms: int) -> None:
        self.writes.worker_gone(command.node, command.worker, now_ms)
        self.strays.worker_gone(command.node, command.worker)

    def _tick(self, command: m.Tick, now_ms: int) -> m.Done:
        delay_ms = self.liveness.tick(now_ms)
        if delay_ms:
            self.counters.stalls += 1
            self.recovery.stalled(delay_ms)
        effects = self.members.tick(self._slot_sizes(), now_ms)
        effects += self.recovery.tick(now_ms)
        self.placement.tick()
        self.quotas.tick()
        effects += self.copies.tick()
        effects += self.drains.tick()
        effects += self.clearing.due()
        self.writes.sweep(now_ms)
        self.strays.sweep(now_ms)
        self.leases.sweep(now_ms)
        self.forest.drop_incomplete()
        self.space.settle_deferred(self.leases.oldest_number)
        self.forest.work(self.settings.tick_spans_max)
        for node in self.liveness.nodes.values():
            for segment in node.segments:
                if segment.closed:
                    continue
                if self.settings.evict_ahead and not self.placement.room_elsewhere(segment):
                    self.evictor.evict_ahead(segment)
                for slot_bytes in sorted(segment.starved):
                    self.evictor.empty_a_slab(segment, slot_bytes)
                effects += self.space.settle_starved(segment)
        return m.Done(tuple(effects))
