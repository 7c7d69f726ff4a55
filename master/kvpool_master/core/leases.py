"""Read leases, the deadline heap, and ids whose end overtook their beginning.

Rules
  - A lease pins the deepest block of its hit, which holds all before it. It protects until it is released or has
    expired; a renewal never reaches beyond the maximum life, counted from the first grant.
  - A lookup that comes again keeps what its first answer was given: the deeper of both pins, and the first number.
  - Leases are numbered in order of grant. Room that was hidden is freed when no lease is alive that is not younger:
    `oldest_number` is the barrier.
  - Deadlines wait in lazy heaps: an entry that no longer tells the truth is dropped or queued again when met.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from kvpool_master.core.settings import Settings

if TYPE_CHECKING:
    from kvpool_master.core.spans import Span


NEVER_MS = 1 << 62


class Lease:
    """Blocks [0, end) of `span`, and all before them, may not be evicted nor reused."""

    __slots__ = ("born_ms", "deadline_ms", "depth", "end", "id", "mark", "namespace", "number", "span", "term_ms")

    def __init__(self, lease: bytes, namespace: bytes, span: Span, end: int, *, depth: int = 0, mark: int = 0) -> None:
        self.id = lease
        self.namespace = namespace
        self.span = span
        self.end = end
        self.depth = depth
        """How many blocks of its chain the deepest one and those before it are."""
        self.mark = mark
        """What makes a second lookup with the same id a retry of the first."""
        self.number = 0
        self.born_ms = 0
        self.term_ms = 0
        self.deadline_ms = 0

    def pin(self) -> None:
        """Protect the blocks."""
        if self.span.leases is None:
            self.span.leases = [self]
        else:
            self.span.leases.append(self)

    def unpin(self) -> Span:
        """Protect no more; returns the span, which may have been kept for this lease only."""
        span = self.span
        assert span.leases is not None
        span.leases.remove(self)
        if not span.leases:
            span.leases = None
        return span


class DeadlineHeap:
    """(deadline, id) pairs; the owner says what an id's deadline is now. next_ms: the first deadline."""

    __slots__ = ("_heap", "next_ms")

    def __init__(self) -> None:
        self._heap: list[tuple[int, bytes]] = []
        self.next_ms = NEVER_MS

    def push(self, deadline_ms: int, ident: bytes) -> None:
        """Queue an id; queueing it again is harmless."""
        heappush(self._heap, (deadline_ms, ident))
        self.next_ms = self._heap[0][0]

    def due(self, now_ms: int) -> list[tuple[int, bytes]]:
        """Take out the entries whose time has come."""
        heap = self._heap
        over: list[tuple[int, bytes]] = []
        while heap and heap[0][0] <= now_ms:
            over.append(heappop(heap))
        self.next_ms = heap[0][0] if heap else NEVER_MS
        return over

    def rebuild(self, alive: Iterable[tuple[int, bytes]], count: int) -> None:
        """Forget all but `alive` (of which there are `count`) once most entries have become idle."""
        if len(self._heap) > 2 * count + 1024:
            self._heap = list(alive)
            heapify(self._heap)
            self.next_ms = self._heap[0][0] if self._heap else NEVER_MS


class Remembered:
    """Ids that were ended before they began, for a while and up to a number."""

    __slots__ = ("_ids", "_keep_ms", "_most")

    def __init__(self, most: int, keep_ms: int) -> None:
        self._ids: OrderedDict[bytes, int] = OrderedDict()
        self._most = most
        self._keep_ms = keep_ms

    def add(self, ident: bytes, now_ms: int) -> None:
        """Remember `ident` from now on."""
        self._ids[ident] = now_ms + self._keep_ms
        self._ids.move_to_end(ident)
        if len(self._ids) > self._most:
            self._ids.popitem(last=False)

    def __contains__(self, ident: bytes) -> bool:
        return ident in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def expire(self, now_ms: int) -> None:
        """Forget what is too old."""
        while self._ids and next(iter(self._ids.values())) <= now_ms:
            self._ids.popitem(last=False)


class LeaseTable:
    """All live leases."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._live: OrderedDict[bytes, Lease] = OrderedDict()
        self.deadlines = DeadlineHeap()
        self._number = 0
        self.overtaken = Remembered(settings.remembered_ids_max, settings.remember_ms)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._live.values())

    def get(self, ident: bytes) -> Lease | None:
        """The live lease of that id, if any."""
        return self._live.get(ident)

    @property
    def newest_number(self) -> int:
        """The number of the lease granted last."""
        return self._number

    @property
    def oldest_number(self) -> int:
        """The number of the oldest live lease; above newest_number when none is alive."""
        for lease in self._live.values():
            return lease.number
        return self._number + 1

    def full(self) -> bool:
        """Whether another lease would be one too many."""
        return len(self._live) >= self._settings.leases_max

    def grant(self, lease: Lease, size_bytes: int, now_ms: int, old: Lease | None = None) -> int:
        """Start a lease over `size_bytes`, or another life of `old`: its age, number and place stay. Returns its ms."""
        settings = self._settings
        if old is None:
            self._number += 1
        lease.number = self._number if old is None else old.number
        lease.born_ms = now_ms if old is None else old.born_ms
        term = settings.lease_min_ms + size_bytes // settings.lease_bytes_per_ms
        lease.term_ms = min(term, settings.lease_max_ms)
        lease.pin()
        self._live[lease.id] = lease
        return self.renew(lease, now_ms)

    def renew(self, lease: Lease, now_ms: int) -> int:
        """Move the deadline one term ahead, within the maximum life. Returns the ms left."""
        end = lease.born_ms + self._settings.lease_life_max_ms
        lease.deadline_ms = max(lease.deadline_ms, min(now_ms + lease.term_ms, end))
        self.deadlines.push(lease.deadline_ms, lease.id)
        return max(0, lease.deadline_ms - now_ms)

    def end(self, ident: bytes) -> Lease | None:
        """Take a lease out; the caller unpins it. None for an unknown id."""
        return self._live.pop(ident, None)

    def expired(self, now_ms: int) -> list[Lease]:
        """The leases whose time is over; the caller ends them."""
        over: dict[bytes, Lease] = {}
        for deadline, ident in self.deadlines.due(now_ms):
            lease = self._live.get(ident)
            if lease is not None and lease.deadline_ms == deadline:
                over[ident] = lease
        return list(over.values())

    def sweep(self, now_ms: int) -> None:
        """Forget what is idle or old: once a Tick."""
        live = self._live
        self.deadlines.rebuild(((lease.deadline_ms, lease.id) for lease in live.values()), len(live))
        self.overtaken.expire(now_ms)
