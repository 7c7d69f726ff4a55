"""The naive pool: one record per block, one per part, plain dicts and sets. Slow, obvious, independent of the core.

It does not predict where space is placed or which leaf is evicted. It remembers what the core answered, and says
what may be true next: which slots are surely held, which blocks surely follow which, who is alive. Where the
contract leaves the core freedom (a deadline has passed but no Tick yet, a grace is over) a record is in doubt:
the core may go on with it or drop it, and the next answer tells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from kvpool_master.core.extents import extents
from kvpool_master.core.messages import BindSlab, Parent
from kvpool_master.core.settings import Settings
from kvpool_proto.geometry import slot_bytes_for, slots_per_slab
from kvpool_proto.namespace import NamespaceSpec
from property.places import Place
from property.records import Block, Cell, Keep, Lease, Node, Ref, Reservation, Segment, Slab

ROOT: Ref = (b"", b"")


class Naive:
    """What has been answered so far."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.specs: dict[bytes, NamespaceSpec] = {}
        self.blocks: dict[Ref, Block] = {}
        self.held: dict[tuple[Place, int], Cell] = {}
        """By place and slot size: a slot number means something only together with its size."""
        self.leases: dict[bytes, Lease] = {}
        self.reservations: dict[bytes, Reservation] = {}
        self.nodes: dict[str, Node] = {}
        self.segments: dict[int, Segment] = {}
        self.links: dict[Ref, Ref] = {}
        """entry = any: the block before, where the core must know it."""
        self.claims: dict[Ref, set[Ref]] = {}
        """entry = any: every block that any chain ever named as the one before."""
        self.seen: set[Ref] = set()
        """Every block that was ever granted."""
        self.released_early: dict[bytes, int] = {}
        self.aborted_early: dict[bytes, int] = {}
        self.stamp = 0
        self.draining: set[str] = set()
        self.quotas: dict[str, int] = {}

    # -- blocks ------------------------------------------------------------------------------------------

    def refs(self, namespace: bytes, chain: bytes) -> list[Ref]:
        """The blocks that a chain names, if nothing speaks against it."""
        spec = self.specs[namespace]
        ends = range(spec.key_bytes, len(chain) + 1, spec.key_bytes)
        starts = 0 if spec.entry == "root" else spec.key_bytes
        return [(namespace, chain[end - starts if starts else 0 : end]) for end in ends]

    def before(self, ref: Ref) -> Iterator[Ref]:
        """The blocks that surely stand before `ref`, nearest first."""
        namespace, keys = ref
        spec = self.specs[namespace]
        if spec.entry == "root":
            for end in range(len(keys) - spec.key_bytes, 0, -spec.key_bytes):
                yield namespace, keys[:end]
            return
        met = {ref}
        while (ref := self.links.get(ref, ROOT)) in self.blocks and ref not in met:
            met.add(ref)
            yield ref

    def contradicted(self, ref: Ref) -> bool:
        """Chains named different blocks before it, or it before itself (only where keys are not hashes)."""
        if len(self.claims.get(ref, ())) > 1:
            return True
        met: set[Ref] = set()
        ways = list(self.claims.get(ref, ()))
        while ways:
            one = ways.pop()
            if one == ref:
                return True
            if one not in met:
                met.add(one)
                ways += self.claims.get(one, ())
        return False

    def claim(self, chain: list[Ref], parent: Parent | bytes) -> None:
        """Remember which block a chain names before which."""
        namespace = chain[0][0]
        if self.specs[namespace].entry == "root":
            return
        if parent is not Parent.UNKNOWN:
            first = ROOT if isinstance(parent, Parent) else (namespace, parent)
            self.claims.setdefault(chain[0], set()).add(first)
        for one, following in pairwise(chain):
            self.claims.setdefault(following, set()).add(one)

    def link(self, ref: Ref, previous: Ref) -> None:
        """The core has seen `previous` before `ref` while it knew both, and nothing contradicts it."""
        if self.claims.get(ref) == {previous} and previous in self.blocks and not self.contradicted(ref):
            self.links[ref] = previous

    def leased(self, cell: Cell, now_ms: int) -> bool:
        """A lease that surely lives covers its slot."""
        return any(cell in lease.hit for lease in self.leases.values() if now_ms < lease.deadline_ms)

    # -- slots -------------------------------------------------------------------------------------------

    def surely_held(self, cell: Cell, now_ms: int) -> bool:
        """The slot cannot have been freed by now."""
        if self.leased(cell, now_ms):
            return True
        if cell.keep is Keep.WRITING:
            reservation = self.reservations[cell.reservation]
            remote = not self.is_local(reservation, cell)
            return remote or now_ms < reservation.deadline_ms + self.settings.quarantine_ms
        if cell.keep is Keep.QUARANTINE:
            return now_ms < cell.until_ms
        return cell.keep in (Keep.COPYING, Keep.CLEARING) or (cell.keep is Keep.STORED and cell.sure)

    def holds(self, cell: Cell) -> bool:
        """The slot has not been freed since it was granted."""
        return self.held.get((cell.place, cell.slot_bytes)) is cell

    def forget(self, cell: Cell) -> None:
        """The slot is free."""
        if self.holds(cell):
            del self.held[cell.place, cell.slot_bytes]
        self.detach(cell, None)

    def detach(self, cell: Cell, keep: Keep | None) -> None:
        """The part is no longer there; its slot is kept for the reason given, if any."""
        block = self.blocks.get(cell.ref)
        if block is not None and cell in block.copies:
            block.copies.remove(cell)
        elif block is not None and block.parts[cell.part] is cell:
            self._bequeath(block, cell)
            if not block.cells():
                del self.blocks[cell.ref]
                self.links.pop(cell.ref, None)
        if keep is not None:
            cell.keep = keep

    def _bequeath(self, block: Block, cell: Cell) -> None:
        """A part is lost; another copy of it takes its place."""
        heir = block.parts[cell.part] = next((one for one in block.copies if one.part == cell.part), None)
        if heir is not None:
            block.copies.remove(heir)
            heir.shaky = True
            self.follow(cell, heir)

    def follow(self, old: Cell, new: Cell) -> None:
        """Leases that hold a block hold it in its new place."""
        for lease in self.leases.values():
            if old in lease.pinned:
                lease.pinned.append(new)

    def let_go(self, cell: Cell, since_ms: int, now_ms: int) -> None:
        """The writer is out of time since `since_ms`; the core noticed at `now_ms` at the latest."""
        if not self.is_local(self.reservations[cell.reservation], cell):
            self.detach(cell, Keep.CLEARING)
            return
        self.detach(cell, Keep.QUARANTINE)
        cell.until_ms = since_ms + self.settings.quarantine_ms
        cell.free_by_ms = now_ms + self.settings.quarantine_ms

    def doubt(self, now_ms: int) -> None:
        """Blocks that lack a part and whose writers may be gone for the whole grace may be gone as well."""
        for block in self.blocks.values():
            if block.stored():
                continue
            since_ms = block.alone_since_ms
            for cell in block.cells():
                if cell.keep is Keep.WRITING:
                    since_ms = max(since_ms, self.reservations[cell.reservation].deadline_ms)
            if now_ms >= since_ms + self.settings.incomplete_grace_ms:
                for cell in block.cells():
                    cell.sure = cell.sure and cell.keep is not Keep.STORED

    def doubt_leaves(self, own: set[Ref], now_ms: int) -> None:
        """What an eviction may take of blocks that lack a part: whatever nobody writes and nothing follows."""
        lacking = [block for block in self.blocks.values() if not block.stored() and not self.written(block, now_ms)]
        inner = {before for ref in self.blocks for before in self.before(ref)}
        for block in lacking:
            if block.ref not in own and (block.ref not in inner or not self._followed(block.ref, now_ms)):
                for cell in block.cells():
                    cell.sure = cell.sure and cell.keep is not Keep.STORED

    def _followed(self, ref: Ref, now_ms: int) -> bool:
        """A block stands behind it that is complete or being written."""
        behind = [block for other, block in self.blocks.items() if ref in self.before(other)]
        return any(block.stored() or self.written(block, now_ms) for block in behind)

    def written(self, block: Block, now_ms: int) -> bool:
        """A writer who is in time owns a part of it."""
        cells = [cell for cell in block.cells() if cell.keep is Keep.WRITING]
        return any(now_ms < self.reservations[cell.reservation].deadline_ms for cell in cells)

    def slots(self, segment: int, slab: int) -> range:
        """The slot numbers of a bound slab."""
        record = self.segments[segment]
        count = slots_per_slab(record.slab_bytes, record.slabs[slab].slot_bytes)
        return range(slab * count, (slab + 1) * count)

    def slab_of(self, place: Place, slot_bytes: int) -> Slab:
        """The slab that a slot of this size lies in."""
        record = self.segments[place[0]]
        return record.slabs[place[1] // slots_per_slab(record.slab_bytes, slot_bytes)]

    def cells_in_slab(self, segment: int, slab: int) -> list[Cell]:
        size = self.segments[segment].slabs[slab].slot_bytes
        if not size:
            return []
        return [cell for slot in self.slots(segment, slab) if (cell := self.held.get(((segment, slot), size)))]

    def check_runs(self, namespace: bytes, packed: bytes) -> None:
        """Every run is contiguous memory: it lies in one slab."""
        slot_bytes = self.slot_bytes(namespace)
        for run in extents(packed):
            per_slab = slots_per_slab(self.segments[run.segment].slab_bytes, slot_bytes)
            end = run.first_slot + (run.blocks - 1) * run.stride + run.part_to - run.part_from
            assert run.first_slot // per_slab == (end - 1) // per_slab, f"a run over two slabs: {run}"

    def bind(self, effect: BindSlab, now_ms: int) -> None:
        """The core gives a slab another size: nothing in it may still be held."""
        assert self.segments[effect.segment].node == effect.node, "a slab of another node"
        slab = self.segments[effect.segment].slabs[effect.slab]
        for cell in self.cells_in_slab(effect.segment, effect.slab):
            assert not self.surely_held(cell, now_ms), f"slab bound anew while slot {cell.place} is {cell.keep.value}"
            self.forget(cell)
        slab.binding = effect.slot_bytes

    def drop_segments(self, handles: Iterable[int], now_ms: int) -> None:
        """A node is gone with all it held."""
        gone = set(handles)
        lost = [cell for cell in self.held.values() if cell.place[0] in gone]
        lost.sort(key=lambda cell: cell.ref in self.blocks and cell in self.blocks[cell.ref].cells())
        for cell in lost:  # further copies first: they are no heirs
            block = self.blocks.get(cell.ref)
            if block is not None:
                block.alone_since_ms = now_ms
            self.forget(cell)
        for reservation in self.reservations.values():
            cells = [cell for part in reservation.granted.values() for cell in part]
            reservation.dead |= any(cell.place[0] in gone for cell in cells)
        for lease in self.leases.values():
            lease.doubtful |= any(cell.place[0] in gone for cell in lease.pinned)
        for handle in gone:
            del self.segments[handle]

    # -- reservations ------------------------------------------------------------------------------------

    def give_up(self, reservation: Reservation, parts: Iterable[int], now_ms: int, word: bool) -> None:
        """End parts of a reservation. word: the writer says so itself, so the slots are free at once."""
        since_ms = min(reservation.deadline_ms, now_ms)
        for part in parts:
            for cell in reservation.open_cells(part):
                if not self.holds(cell):
                    continue
                if cell.keep is Keep.WRITING:
                    block = self.blocks[cell.ref]
                    block.alone_since_ms = max(block.alone_since_ms, since_ms)
                    if word:
                        self.forget(cell)
                    else:
                        self.let_go(cell, since_ms, now_ms)
                elif word and cell.keep is not Keep.CLEARING:
                    self.forget(cell)
            reservation.closed.add(part)
        for part in reservation.granted:  # one quarantine a reservation: it starts anew with what is given up last
            for cell in reservation.open_cells(part):
                cell.free_by_ms = max(cell.free_by_ms, now_ms + self.settings.quarantine_ms)

    def is_local(self, reservation: Reservation, cell: Cell) -> bool:
        """The writer may have the slot mapped, so that nobody but itself can say when it is done."""
        return reservation.node_of(cell.part) in ("", self.segments[cell.place[0]].node)

    def end_if_over(self, reservation: Reservation, why: str, now_ms: int) -> None:
        """Nothing is left to be written."""
        over = all(
            part in reservation.closed or reservation.written[part] == len(cells)
            for part, cells in reservation.granted.items()
        )
        if over and not reservation.ended:
            reservation.ended = why
            reservation.ended_ms = min(now_ms, reservation.deadline_ms)

    def slot_bytes(self, namespace: bytes) -> int:
        return slot_bytes_for(self.specs[namespace].part_bytes)
