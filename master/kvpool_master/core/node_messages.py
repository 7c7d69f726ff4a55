"""What node clients say: registration, sessions, inventories. Part of the vocabulary of messages.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvpool_master.core.effects import Effect
from kvpool_master.core.reasons import Parent


@dataclass(frozen=True, slots=True)
class SegmentOffer:
    """index: the node's own number. size_bytes: slabs x slab_bytes. contents, holds: see SegmentOffer in pool.proto."""

    index: int
    size_bytes: int
    slab_bytes: int
    numa_node: int = -1
    contents: int = 0
    holds: bool = False


@dataclass(frozen=True, slots=True)
class Register:
    """A node client offers its segments -> Registered.

    The same incarnation again, or a newer one that offers the same contents, gets the same handles, and the
    directory stands. A newer incarnation with other contents replaces a suspect one, whose blocks are dropped; beside
    a live one it raises NodeIdTaken, an older one raises StaleIncarnation. A segment that is not known and holds
    something takes no reservation before its inventory is complete (AskInventory among the effects, when it is the
    node's turn) and before the grace of the former epoch is over. epoch_seen must not be above the pool's epoch.
    data_address: where peers reach its data port; without one its blocks are its own workers' only.
    Raises BadSegment, LimitReached, BadRequest.
    """

    node: str
    incarnation: int
    segments: tuple[SegmentOffer, ...]
    epoch_seen: int = 0
    data_address: str = ""


@dataclass(frozen=True, slots=True)
class Registered:
    """tombstones: (namespace, newest dead stamp), all there are."""

    handles: tuple[int, ...]
    effects: tuple[Effect, ...] = ()
    tombstones: tuple[tuple[bytes, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The node is alive: up again if it was suspect -> Done. Raises UnknownNode, StaleIncarnation."""

    node: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class SlabBound:
    """The node bound a slab as told -> Done. An answer to nothing that was asked is ignored."""

    node: str
    incarnation: int
    segment: int
    slab: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class SlotsCleared:
    """The node carried out an order of ClearSlots -> Done. An order that is not open is ignored."""

    node: str
    incarnation: int
    order: int


class Strand(NamedTuple):
    """A run of consecutive blocks of one chain, of which a segment holds some parts.

    parent: what the first block follows. extents: (blocks, first slot, stride, stamp), in chain order.
    """

    parent: Parent | bytes
    keys: bytes
    extents: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class InventorySlabs:
    """How a segment's slabs are bound, as (slab, slot bytes) -> Done. Once per segment, before all else of it.

    Raises, as the other messages of an inventory: StaleInventory unless `number` is the one asked for last and not
    complete; UnknownNode, StaleIncarnation, UnknownSegment; BadRequest for what cannot be, after which the node is
    asked for no more and has to register again.
    """

    node: str
    incarnation: int
    number: int
    segment: int
    slabs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class InventoryStrands:
    """Committed blocks that a segment holds parts [part_from, part_to) of -> Taken.

    Strands of a namespace that is not open wait for it, for a while. A part that the directory has already, or whose
    stamp is dead, is surplus: its slot is free. Raises as InventorySlabs.
    """

    node: str
    incarnation: int
    number: int
    segment: int
    namespace: bytes
    key_bytes: int
    slot_bytes: int
    part_from: int
    part_to: int
    strands: tuple[Strand, ...]


@dataclass(frozen=True, slots=True)
class Taken:
    """Blocks of the strands, by what became of them; a block counts as taken if one part of it was."""

    taken: int
    surplus: int
    unclaimed: int


@dataclass(frozen=True, slots=True)
class InventoryWriting:
    """Slots that somebody may still be writing: (first slot, slots, worker or 0) -> Done. Raises as InventorySlabs.

    They are in quarantine until the worker is gone, at the latest for quarantine_ms.
    """

    node: str
    incarnation: int
    number: int
    segment: int
    slot_bytes: int
    runs: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class InventoryEnd:
    """All was said: so many blocks in strands and slots being written -> Done. Raises as InventorySlabs."""

    node: str
    incarnation: int
    number: int
    blocks: int
    slots_writing: int


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker's process has ended: its reservations are given up, its quarantine ends -> Done. 0 is ignored."""

    node: str
    worker: int


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The node's session broke: suspect at once -> Done. Ignored for an older incarnation or an unknown node."""

    node: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class ReportNode:
    """A worker on node `reporter` could not use this node's data port -> NodeReported.

    One host's reports make the Master probe the node's session; a probe without an answer, or reports of two hosts
    within report_window_ms, make it suspect for all, for report_hold_ms after the last report at least. A report by
    the node itself, or of an unknown node, is ignored.
    """

    node: str
    reporter: str


@dataclass(frozen=True, slots=True)
class NodeReported:
    """suspect: the node is hidden from all by now."""

    suspect: bool
    effects: tuple[Effect, ...] = ()


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """The node answered effects.ProbeNode -> Done. An answer to nothing that was asked is ignored."""

    node: str
    incarnation: int
    number: int


@dataclass(frozen=True, slots=True)
class Drain:
    """The node takes no more writes, and what it holds is moved elsewhere while there is room -> Done.

    Newest blocks first; what is moved stays readable at its old place until the leases on it have ended. Drained: no
    block is left that can be moved, and no lease or reservation is open on it. Kept durably; a node that is not there
    drains when it comes, if it was ever known. Raises UnknownNode.
    """

    node: str


@dataclass(frozen=True, slots=True)
class Undrain:
    """The node takes writes again -> Done. Raises UnknownNode."""

    node: str


@dataclass(frozen=True, slots=True)
class SlotsCopied:
    """The node carried out an order of CopySlots for the first `blocks` blocks -> Done.

    An order that is not open is ignored.
    """

    node: str
    incarnation: int
    order: int
    blocks: int


@dataclass(frozen=True, slots=True)
class RetireNode:
    """The node leaves for good -> Done; its spans are dropped in slices by Tick. Unknown: ignored."""

    node: str
    incarnation: int
