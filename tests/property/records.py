"""What the naive pool remembers: one record per block, one per part and copy, one per lease, reservation and node."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvpool_master.core.messages import Reserve, Reserved
from property.places import Place

Ref = tuple[bytes, bytes]
"""A block: (namespace, keys of the whole prefix) where entry is root, (namespace, key) where it is any."""


class Keep(Enum):
    """Why a slot is not free."""

    WRITING = "granted to an open reservation"
    STORED = "committed part of a block"
    QUARANTINE = "given up without the writer's word"
    LOOSE = "hidden: free when no lease covers it"
    COPYING = "granted to a copy that is under way"
    CLEARING = "free when its node has cleared it"


@dataclass(eq=False, slots=True)
class Cell:
    """One part of one block in one slot. sure = False: the core may have dropped it."""

    ref: Ref
    part: int
    place: Place
    stamp: int
    slot_bytes: int
    reservation: bytes
    keep: Keep = Keep.WRITING
    until_ms: int = 0
    """QUARANTINE: surely held until then, surely free at a Tick after free_by_ms."""
    free_by_ms: int = 0
    sure: bool = True
    shaky: bool = False
    """It took over from one that was lost, or was copied for a move: another copy may stand instead of it."""


@dataclass(eq=False, slots=True)
class Block:
    """A block of which at least one part has a slot. alone_since_ms: when its last writer went."""

    ref: Ref
    parts: list[Cell | None]
    alone_since_ms: int = 0
    copies: list[Cell] = field(default_factory=list[Cell])
    """Further copies of its parts; one that is not sure may be gone."""

    def cells(self) -> list[Cell]:
        return [cell for cell in self.parts if cell is not None]

    def everything(self) -> list[Cell]:
        """Its cells, and further copies of them."""
        return [*self.cells(), *self.copies]

    def of(self, part: int) -> list[Cell]:
        """All copies of a part, first the one that counts."""
        return [cell for cell in self.everything() if cell.part == part]

    def stored(self) -> bool:
        """Every part is committed."""
        return all(cell is not None and cell.keep is Keep.STORED for cell in self.parts)


@dataclass(eq=False, slots=True)
class Lease:
    asked: tuple[bytes, bytes, int]
    """Namespace, chain, skip."""
    born_ms: int
    deadline_ms: int
    hit: list[Cell]
    pinned: list[Cell]
    """The hit and all before it."""
    doubtful: bool = False


@dataclass(eq=False, slots=True)
class Reservation:
    request: Reserve
    reply: Reserved
    deadline_ms: int
    stamp: int
    granted: dict[int, list[Cell]]
    written: dict[int, int]
    share: int = 0
    nodes: tuple[str, ...] = ()
    worker: int = 0
    closed: set[int] = field(default_factory=set[int])
    ended: str = ""
    ended_ms: int = 0
    dead: bool = False
    """Some of its slots are gone with their node."""

    def open_cells(self, part: int) -> list[Cell]:
        return self.granted[part][self.written[part] :]

    def node_of(self, part: int) -> str:
        """Where the part's writer is, empty if it did not say."""
        return self.nodes[part - self.request.part_from] if len(self.nodes) > 1 else "".join(self.nodes)


@dataclass(eq=False, slots=True)
class Slab:
    slot_bytes: int = 0
    """0: never bound."""
    binding: int = 0
    """The size it is being bound to, 0: none."""


@dataclass(eq=False, slots=True)
class Segment:
    node: str
    slab_bytes: int
    slabs: list[Slab]


@dataclass(eq=False, slots=True)
class Node:
    incarnation: int
    handles: tuple[int, ...]
    heard_ms: int
    lost: bool = False
    """The session broke, nothing heard since."""
    leaving: bool = False
    up: bool = True
    port: bool = False
    """Peers can reach its data port."""
    joined_ms: int = 0
    drained: bool = False
    reports: dict[str, int] = field(default_factory=dict[str, int])
    """By reporting host, when."""
    reported: bool = False
    """It was made suspect for reports, and was not up since."""
    held_until_ms: int = 0
    """Suspect until then, whatever its heartbeats say."""
    probe: tuple[int, int] | None = None
    """A question to it that is not answered: its number, and by when it has to be."""
