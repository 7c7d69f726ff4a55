"""Slabs and free runs of slots of one segment. Numbers only: it knows nothing of blocks, parts or keys.

Rules
  - A slab is unbound, being bound (told to the node, not confirmed), or bound to one slot size. Only slots of bound
    slabs are handed out; slots are numbered slab * slots per slab + slot in slab.
  - Free runs never cross a slab border (the next slab's table lies between) and are joined on return, so an empty
    slab is one run as long as the slab.
  - `take` prefers the smallest run that holds the whole wish (looking a power of two at a time), else the longest.
    Asking costs no more when more is free: runs wait in stacks by the bit length of their size.
"""

from __future__ import annotations

from collections import deque

from kvpool_proto.geometry import slots_per_slab

CANDIDATES_MAX = 8
"""Runs of the wish's own size class that `take` looks at before it cuts a longer one."""
SIZE_CLASSES = 34
"""Bit lengths of run sizes: slot numbers have 32 bits."""


class FreeRuns:
    """The free runs of all slabs bound to one slot size."""

    __slots__ = ("_by_end", "_by_start", "_counts", "_sizes", "_stacks", "free", "per_slab", "slabs")

    def __init__(self, per_slab: int) -> None:
        self.per_slab = per_slab
        self.slabs: set[int] = set()
        self.free = 0
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self._stacks: list[list[int]] = [[] for _ in range(SIZE_CLASSES)]
        """Starts of runs by bit length; entries that tell no longer the truth are dropped when met."""
        self._counts = [0] * SIZE_CLASSES
        self._sizes = 0
        """Bit n is set when a run of bit length n is free."""

    def _add(self, first: int, length: int) -> None:
        self._by_start[first] = length
        self._by_end[first + length] = first
        size = length.bit_length()
        self._counts[size] += 1
        self._sizes |= 1 << size
        stack = self._stacks[size]
        stack.append(first)
        if len(stack) > 2 * self._counts[size] + 64:
            stack[:] = {start for start in stack if self._is(start, size)}

    def _is(self, first: int, size: int) -> bool:
        length = self._by_start.get(first)
        return length is not None and length.bit_length() == size

    def _remove(self, first: int) -> int:
        length = self._by_start.pop(first)
        del self._by_end[first + length]
        size = length.bit_length()
        self._counts[size] -= 1
        if not self._counts[size]:
            self._sizes &= ~(1 << size)
            self._stacks[size].clear()
        return length

    def add_slab(self, slab: int) -> None:
        """All slots of a newly bound slab are free."""
        self.slabs.add(slab)
        self.free += self.per_slab
        self._add(slab * self.per_slab, self.per_slab)

    def remove_slab(self, slab: int) -> None:
        """Take an empty slab away."""
        length = self._remove(slab * self.per_slab)
        assert length == self.per_slab
        self.slabs.discard(slab)
        self.free -= self.per_slab

    def empty_slab(self) -> int | None:
        """A slab without a used slot, if there is one."""
        for first in self._stacks[self.per_slab.bit_length()]:
            if self._by_start.get(first) == self.per_slab:
                return first // self.per_slab
        return None

    def _top(self, size: int) -> int:
        stack = self._stacks[size]
        while not self._is(stack[-1], size):
            stack.pop()
        return stack[-1]

    def _candidate(self, slots: int) -> int | None:
        """The start of the run to take from for `slots`."""
        if not self._sizes:
            return None
        size = slots.bit_length()
        for first in self._stacks[size][: -CANDIDATES_MAX - 1 : -1]:
            if self._is(first, size) and self._by_start[first] >= slots:
                return first
        above = self._sizes >> (size + 1)
        if above:
            return self._top((above & -above).bit_length() + size)
        return self._top(self._sizes.bit_length() - 1)

    def take(self, slots: int, unit: int) -> tuple[int, int] | None:
        """Take one run of at most `slots`, a multiple of `unit`: (first, slots), or None when no run has `unit`."""
        first = self._candidate(slots)
        if first is None:
            return None
        length = self._by_start[first]
        taken = min(length, slots) // unit * unit
        if taken == 0:
            return None
        self._remove(first)
        if taken < length:
            self._add(first + taken, length - taken)
        self.free -= taken
        return first, taken

    def give(self, first: int, slots: int) -> None:
        """Return a run, joining it with its free neighbours in the slab."""
        self.free += slots
        end = first + slots
        if first % self.per_slab and first in self._by_end:
            first = self._by_end[first]
            self._remove(first)
        if end % self.per_slab and end in self._by_start:
            end += self._remove(end)
        assert first not in self._by_start
        self._add(first, end - first)

    def runs(self) -> list[tuple[int, int]]:
        """All free runs as (first, slots), in order."""
        return sorted(self._by_start.items())


class Allocator:
    """Slabs and slots of one segment."""

    __slots__ = ("binding", "per_size", "size_bytes", "slab_bytes", "slabs", "unbound")

    def __init__(self, slabs: int, slab_bytes: int) -> None:
        self.slabs = slabs
        self.slab_bytes = slab_bytes
        self.size_bytes = slabs * slab_bytes
        self.unbound: deque[int] = deque(range(slabs))
        self.binding: dict[int, int] = {}
        """Slabs whose binding is not confirmed, with the slot size."""
        self.per_size: dict[int, FreeRuns] = {}

    def runs_of(self, slot_bytes: int) -> FreeRuns:
        """The free runs of a slot size. Raises SlotTooLarge when a slab cannot hold such a slot."""
        runs = self.per_size.get(slot_bytes)
        if runs is None:
            runs = self.per_size[slot_bytes] = FreeRuns(slots_per_slab(self.slab_bytes, slot_bytes))
        return runs

    def ready_slots(self, slot_bytes: int) -> int:
        """Slots that are free, or will be once the node has confirmed a binding."""
        runs = self.runs_of(slot_bytes)
        if not self.binding:
            return runs.free
        return runs.free + runs.per_slab * list(self.binding.values()).count(slot_bytes)

    def can_bind(self, slot_bytes: int) -> bool:
        """Whether slots of that size are coming, or would be if a slab was bound."""
        if self.unbound or slot_bytes in self.binding.values():
            return True
        return any(runs.empty_slab() is not None for size, runs in self.per_size.items() if size != slot_bytes)

    def start_binding(self, slot_bytes: int, rebind: bool) -> int | None:
        """Choose a slab to bind: an unbound one, or with `rebind` an empty one of another slot size."""
        if self.unbound:
            slab = self.unbound.popleft()
        elif rebind:
            found = self._empty_elsewhere(slot_bytes)
            if found is None:
                return None
            slab = found
        else:
            return None
        self.binding[slab] = slot_bytes
        return slab

    def _empty_elsewhere(self, slot_bytes: int) -> int | None:
        others = [(runs.free * size, size) for size, runs in self.per_size.items() if size != slot_bytes and runs.free]
        for _, size in sorted(others, reverse=True):
            runs = self.per_size[size]
            slab = runs.empty_slab()
            if slab is not None:
                runs.remove_slab(slab)
                return slab
        return None

    def finish_binding(self, slab: int, slot_bytes: int) -> bool:
        """The node confirmed; False (and nothing done) when that is not what it was told."""
        if self.binding.get(slab) != slot_bytes:
            return False
        del self.binding[slab]
        self.runs_of(slot_bytes).add_slab(slab)
        return True

    def adopt(self, bound: dict[int, int]) -> None:
        """A file's slabs: those in `bound` (slab -> slot size) have no free slot yet, the others are unbound."""
        self.unbound = deque(slab for slab in range(self.slabs) if slab not in bound)
        for slab, slot_bytes in bound.items():
            self.runs_of(slot_bytes).slabs.add(slab)

    def room_bytes(self, slot_bytes: int) -> int:
        """Bytes that slots of a size could take: those free, and whole slabs not bound or being bound."""
        runs = self.per_size.get(slot_bytes)
        free = runs.free * slot_bytes if runs else 0
        return free + (len(self.unbound) + len(self.binding)) * self.slab_bytes

    def used_bytes(self) -> int:
        """Bytes in slots that are not free."""
        return sum((len(runs.slabs) * runs.per_slab - runs.free) * size for size, runs in self.per_size.items())
