"""Effects: what the shell must carry out for a command, before it answers. Part of the vocabulary of messages.py."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool_proto.namespace import NamespaceSpec


@dataclass(frozen=True, slots=True)
class BindSlab:
    """Tell the node to clear the slab's table, set the slot size and raise the generation; it answers SlabBound."""

    node: str
    segment: int
    slab: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Retire:
    """The node was given up: end its session and say so."""

    node: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class AskInventory:
    """Tell the node to report its inventory under this number; an older one counts no more."""

    node: str
    incarnation: int
    number: int


@dataclass(frozen=True, slots=True)
class AskWorkers:
    """Ask the node which of these workers are gone; it answers WorkerGone for each that is."""

    node: str
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClearSlots:
    """Tell the node to make slots FREE whose headers still show these stamps; it answers SlotsCleared.

    runs: (first slot, slots, stamp). Until the answer, or until the node is retired, the slots are not used again.
    """

    node: str
    order: int
    segment: int
    slot_bytes: int
    runs: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class ProbeNode:
    """Ask the node on its session whether it is there; it answers ProbeAnswered at once."""

    node: str
    number: int


@dataclass(frozen=True, slots=True)
class CopySlots:
    """Tell the node to copy a run of blocks from a peer into slots of its own; it answers SlotsCopied.

    source: a record of extents.py with offset 0: where the blocks, all parts of the record, lie. Block b of part p
    goes into slot to_slot + b * (part_to - part_from) + (p - part_from) of to_segment, under `stamp`.
    """

    node: str
    order: int
    namespace: bytes
    part_bytes: int
    source: tuple[int, int, int, int, int, int, int, int]
    to_segment: int
    to_slot: int
    stamp: int


@dataclass(frozen=True, slots=True)
class Bury:
    """Tell every node to make slots FREE whose headers show a stamp of the namespace up to this one."""

    namespace: bytes
    stamp: int


@dataclass(frozen=True, slots=True)
class Remember:
    """Write to durable memory before the command that this is an effect of is answered (see memory.py).

    One field is set: a namespace that was opened, a purge tombstone (namespace, newest dead stamp), the name of a
    node that joined, or of one that was given up, (node, whether it drains), (tenant, quota bytes or 0).
    """

    namespace: NamespaceSpec | None = None
    tombstone: tuple[bytes, int] | None = None
    node: str = ""
    node_gone: str = ""
    draining: tuple[str, bool] | None = None
    quota: tuple[str, int] | None = None


Effect = BindSlab | Retire | AskInventory | AskWorkers | ClearSlots | CopySlots | ProbeNode | Bury | Remember
