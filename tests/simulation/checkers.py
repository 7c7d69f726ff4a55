"""What must never happen, looked for while it happens. What must be true in the end: see verdict.py.

Rules checked here
  - A read that says it is good has the bytes of its key.
  - No slot has two writers within their times; no slab is bound anew, and no slot is written, under a lease that runs
    by its holder's clock. Exempt is a writer that looked in time and lost the processor past the end of its
    reservation's time and quarantine: it spoils what it marks, which is counted and excused.
  - What was purged is never hit again.
  - A Master that stalled suspects and retires no node whose messages had reached its machine.
  - The core's indexes agree with each other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvpool_client.answers import Hit
from kvpool_client.headers import COMMITTED, WRITING, Array
from kvpool_master.core import messages as m
from simulation.clocks import MachineClock
from simulation.facts import Page, Place, pages_of, pages_of_slab, places_of
from simulation.hub import Process, Thread
from simulation.losses import Losses

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from simulation.world import World

INVARIANTS_EVERY = 8


@dataclass(slots=True)
class Hold:
    """A lease as its holder sees it, on `pages`."""

    process: Process
    clock: MachineClock
    hit: Hit
    pages: set[Page]

    def runs(self) -> bool:
        """Does it run by its holder's clock?"""
        return self.process.alive and self.clock.now_ms() < self.hit.deadline_ms


@dataclass(slots=True)
class Claim:
    """A writer that marked a page WRITING, for a block."""

    thread: Thread
    stamp: int
    block: tuple[bytes, bytes]
    clock: MachineClock
    deadline_ms: int
    writing: bool = True

    def holds(self) -> bool:
        """Is it still within its time, and at it?"""
        return self.writing and self.thread.process.alive and self.clock.now_ms() < self.deadline_ms


@dataclass(slots=True)
class Seen:
    """What happened, in numbers, so that a run in which nothing happens is noticed."""

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, what: str, number: int = 1) -> None:
        """So many more of it."""
        self.counts[what] += number


class Checkers:
    """All checks of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._hub = world.hub
        self._applied = 0
        self.seen = Seen()
        self.holds: list[Hold] = []
        self.claims: dict[Page, Claim] = {}
        self.inodes: dict[tuple[int, int], int] = {}
        """Epoch and handle -> inode of the segment's file."""
        self.epoch = 0
        """The highest epoch of any Master so far."""
        self.purged: dict[bytes, int] = {}
        """Namespace -> newest stamp that its last purge ended."""
        self.purged_us: dict[bytes, int] = {}
        """When that was."""
        self.dead: dict[bytes, int] = {}
        """Namespace -> the stamp of `purged`, of purges that were answered."""
        self.left: dict[tuple[bytes, bytes], dict[str, int]] = {}
        """(namespace, key) -> by reason, when the core last said that it went."""
        self.losses = Losses(world)
        self.drained: set[tuple[str, int]] = set()
        """Nodes that were said to be drained, by epoch, until they are not any more."""
        self.spoiled: set[tuple[bytes, bytes]] = set()

    # -- readers

    def looked_up(self, process: Process, clock: MachineClock, hit: Hit, namespace: bytes, slot_bytes: int,
                  dead_before: int) -> Hold:  # fmt: skip
        """A worker has a hit; dead_before: self.dead before it asked."""
        self.seen.add("hit blocks", hit.blocks)
        places = _places_of_hit(hit)
        dead_before = min(dead_before, self.dead.get(namespace, 0))
        for place in places:
            if place.stamp <= dead_before:
                self._hub.fail(f"a purged block is hit: block {place.block} of {hit!r} has stamp {place.stamp:#x}")
        pages = {page for place in places for page in self.pages_at(hit.epoch, place, slot_bytes)}
        hold = Hold(process, clock, hit, pages)
        self.holds = [one for one in self.holds if one.runs()]
        self.holds.append(hold)
        return hold

    def loaded(self, good: bool, blocks: int, what: str) -> None:
        """A load says that so many blocks are good."""
        self.seen.add("verified blocks", blocks)
        if not good:
            self._hub.fail(f"WRONG BYTES: {what}")

    def pages_at(self, epoch: int, place: Place, slot_bytes: int) -> list[Page]:
        """The pages of a place, by the handles of an epoch."""
        inode = self.inodes.get((epoch, place.segment))
        return [] if inode is None else pages_of(inode, place.slot, slot_bytes)

    # -- writers

    def looked(self, term: Any, reason: str) -> None:
        """A copy looked whether it may go on."""
        thread = self._hub.thread
        if thread is not None:
            clock = self._world.clocks[thread.process.machine]
            now_ms = clock.now_ms()
            thread.facts["term"] = (term, now_ms < term.deadline_ms and not reason, now_ms)

    def putting(self, runs: list[Any], headers: Array, before: Array, slot_bytes: int) -> None:
        """A writer is about to write these headers over those before."""
        thread = self._hub.thread
        assert thread is not None
        self.seen.add("headers put", len(headers))
        piece = [
            (pages_of(self._world.kernel.inode_of(run.segment), run.slot + index * run.stride, slot_bytes), run.stamp)
            for run in runs
            for index in range(run.blocks)
        ]
        thread.facts["piece"] = piece
        marking = int(headers["state"][0]) == WRITING
        late = self._late(thread, marking=marking)
        if late:
            self.seen.add("late marks" if marking else "late commits")
        overtaken = late or self._overtaken(thread, marking=marking)
        for (pages, _), header, former in zip(piece, headers, before, strict=True):
            self._put(thread, pages, header, late)
            if overtaken and int(former["state"]) == COMMITTED and former["stamp"] != header["stamp"]:
                self._spoil((former["namespace"].tobytes(), _key(former)))

    def _put(self, thread: Thread, pages: list[Page], header: Any, late: bool) -> None:
        stamp, state, block = int(header["stamp"]), int(header["state"]), (header["namespace"].tobytes(), _key(header))
        for page in pages:
            self._touch(thread, page, stamp, late, f"puts state {state}, stamp {stamp:#x}", marking=state == WRITING)
            claim = self.claims.get(page)
            if state == WRITING and (claim is None or claim.stamp <= stamp):
                term = thread.facts["term"][0]
                clock = self._world.clocks[thread.process.machine]
                self.claims[page] = Claim(thread, stamp, block, clock, term.deadline_ms)
            elif state == COMMITTED and claim is not None and claim.stamp == stamp:
                claim.writing = False  # it does not come back to this slot
        if state == COMMITTED:
            self.losses.committed(block, pages[0][0])

    def copying(self) -> None:
        """A writer is about to touch payload of the piece that it marked last."""
        thread = self._hub.thread
        assert thread is not None
        piece = thread.facts.get("piece")
        if not piece:
            return  # what is copied is the caller's own memory
        late = self._late(thread, marking=False)
        for pages, stamp in piece:
            for page in pages:
                self._touch(thread, page, stamp, late, f"copies under stamp {stamp:#x}")

    def _touch(self, thread: Thread, page: Page, stamp: int, late: bool, what: str, *, marking: bool = False) -> None:
        """A writer touches a page: fail if it is another's, unless the writer is late and may be.

        A late writer's marks alone do no harm to one who is still writing: it has the last word on its headers.
        """
        claim = self.claims.get(page)
        whose = ""
        if claim is not None and (claim.stamp > stamp or (claim.stamp < stamp and claim.holds())):
            whose = f"it is {claim.thread.label}'s under stamp {claim.stamp:#x}"
            if late and not (marking and claim.holds()):
                self._spoil(claim.block)
        if not self._overtaken(thread, marking=marking):
            for hold in self.holds:
                if page in hold.pages and hold.runs():
                    whose = f"{hold.process.name} leases it ({hold.hit!r})"
        if whose and not late:
            self._hub.fail(f"{thread.label} {what} on page {page} while {whose}")

    def _spoil(self, block: tuple[bytes, bytes]) -> None:
        self.seen.add("spoiled blocks")
        self.spoiled.add(block)

    def _late(self, thread: Thread, *, marking: bool) -> bool:
        """Has a writer that looked in time been away for longer than anybody has to wait for it?

        Once marked, a slot waits for its writer to the end of the quarantine. One that was not marked yet when a new
        Master's inventory was made waits only as long as its reservation.
        """
        term, in_time, looked_ms = thread.facts["term"]
        now_ms = self._world.clocks[thread.process.machine].now_ms()
        slept = now_ms - looked_ms >= self._world.settings.quarantine_ms - 10
        return in_time and now_ms >= term.deadline_ms and (slept or self._overtaken(thread, marking=marking))

    def _overtaken(self, thread: Thread, *, marking: bool) -> bool:
        """Is a writer that looked in time about to mark what a new Master's inventory found unmarked?

        It looks once more and stops; what an inventory brought back there, evicted before, is lost for its marks.
        """
        term, in_time, _ = thread.facts["term"]
        return bool(marking and in_time and self.epoch > term.epoch)

    def wrote(self) -> None:
        """The running thread's write is over: it copies no more."""
        assert self._hub.thread is not None
        self._hub.thread.facts.pop("piece", None)
        for claim in self.claims.values():
            if claim.thread is self._hub.thread:
                claim.writing = False

    def binding(self, segment: Any, slab: int) -> None:
        """A node client is about to clear a slab's table."""
        inode = self._world.inode_of(segment.plan.path)
        pages = set(pages_of_slab(inode, slab))
        for hold in self.holds:
            if hold.runs() and pages & hold.pages:
                self._hub.fail(f"slab {slab} is bound anew under a lease of {hold.process.name}: {hold.hit!r}")
        for page in pages:
            claim = self.claims.get(page)
            if claim is not None and claim.holds():
                self._hub.fail(f"slab {slab} is bound anew while {claim.thread.label} writes it")

    def clearing(self, segment: Any, slot_bytes: int, runs: Any) -> None:
        """A node client is about to clear slots. A Master that began lately knows nothing of leases before it."""
        inode = self._world.kernel.inode_of(segment)
        for first, slots, stamp in runs:
            for slot in range(first, first + slots):
                for page in pages_of(inode, slot, slot_bytes):
                    claim = self.claims.get(page)
                    if claim is not None and claim.stamp == stamp and claim.holds():
                        self._hub.fail(f"slot {slot} is cleared while {claim.thread.label} writes it")
                    for hold in self.holds:
                        if page in hold.pages and hold.hit.epoch == self.epoch and hold.runs():
                            self._hub.fail(f"slot {slot} is cleared under a lease of {hold.process.name}: {hold.hit!r}")

    # -- the core

    def applied(self, pool: Any, command: Any, outcome: Any) -> None:
        """The core carried out a command."""
        self._applied += 1
        self.epoch = max(self.epoch, pool.epoch)
        self.seen.add(type(command).__name__)
        if isinstance(command, m.Register):
            self._registered(pool, command, outcome)
        elif isinstance(command, m.Tick):
            self._look_for_drained(pool)
        elif isinstance(command, m.Purge):
            self.purged[command.namespace] = outcome.stamp
            self.purged_us[command.namespace] = self._hub.now_us
        if self._applied % INVARIANTS_EVERY == 0:
            try:
                pool.check_invariants()
            except AssertionError as error:
                self._hub.fail(f"the core's invariants do not hold after {command}: {error!r}")
        for effect in getattr(outcome, "effects", ()):
            if isinstance(effect, m.Retire) and isinstance(command, m.Tick):
                self._must_be_silent(effect.node, self._world.settings.retire_ms, "retired")

    def _registered(self, pool: Any, command: m.Register, outcome: Any) -> None:
        for offer, handle in zip(command.segments, outcome.handles, strict=True):
            inode = self._world.inode_of(self._world.segment_path(command.node, offer.index))
            self.inodes.setdefault((pool.epoch, handle), inode)

    def forgetting(self, node: Any) -> None:
        """The core gives up a node."""
        epoch = self._world.core.epoch
        handles = {one.handle: self.inodes[epoch, one.handle] for one in node.segments}
        self.losses.forgetting(node, handles)

    def _look_for_drained(self, pool: Any) -> None:
        """A node that is said to be drained has no reader and no writer."""
        for node in pool.liveness.nodes.values():
            name = (node.name, pool.epoch)
            if not node.drained:
                self.drained.discard(name)
            elif name not in self.drained:
                self.drained.add(name)
                self.seen.add("nodes drained")
                if any(one.closed for one in node.segments):
                    self._hub.fail(f"{node.name} is drained before it is known what it holds")
                inodes = {self.inodes[pool.epoch, one.handle] for one in node.segments}
                for hold in self.holds:
                    if hold.runs() and any(page[0] in inodes for page in hold.pages):
                        self._hub.fail(f"{node.name} is drained under a lease of {hold.process.name}: {hold.hit!r}")
                for page, claim in self.claims.items():
                    if page[0] in inodes and claim.holds():
                        self._hub.fail(f"{node.name} is drained while {claim.thread.label} writes on it")

    def gone(self, tree: Any, keys: bytes, reason: m.GoneReason) -> None:
        """The core says that blocks went."""
        size = tree.key_bytes
        self.seen.add(f"gone: {reason.name.lower()}", len(keys) // size)
        for at in range(0, len(keys), size):
            self.left.setdefault((tree.namespace, keys[at : at + size]), {})[reason.name] = self._hub.now_us

    def suspected(self, node: str, reason: str) -> None:
        """The core takes a node for suspect."""
        if "heartbeat" in reason:
            self._must_be_silent(node, self._world.settings.suspect_ms, "suspected")

    def _must_be_silent(self, node: str, limit_ms: int, what: str) -> None:
        master = self._world.master
        last_us = master.beats_us.get(node) if master is not None else None
        if last_us is not None and self._hub.now_us - last_us < limit_ms * 900:
            self._hub.fail(f"{node} is {what} {(self._hub.now_us - last_us) / 1e6:.3f} s after its last message")


def _key(header: Any) -> bytes:
    return header["key"].tobytes()[: int(header["key_bytes"])]


def _places_of_hit(hit: Hit) -> list[Place]:
    found = hit.extents
    names = ("offset", "blocks", "segment", "first_slot", "part_from", "part_to", "stride", "stamp")
    columns: list[npt.NDArray[np.int64]] = [getattr(found, name) for name in names]
    return places_of(zip(*(column.tolist() for column in columns), strict=True))
