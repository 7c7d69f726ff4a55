"""Commands in, outcomes out: frozen values, the whole vocabulary of the core.

A command enters Pool.apply(command, now_ms); what comes back is a reply of the type named beside the command
(its `effects` say what others must be told). A broken rule raises a KVPoolError and changes nothing.

Rules of the words used here
  - ids of leases and reservations: 16 bytes, chosen by the caller; namespace: 16-byte id
  - chain: packed keys, first block first; offsets count blocks from the start of the request's chain
  - extents: packed, see extents.py; parts: half-open [part_from, part_to)
  - times are in ms; what a reply calls *_ms is a duration from now
  - the values of the hottest path are named tuples: made in a third of the time of a frozen dataclass
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvpool_master.core.effects import AskInventory as AskInventory
from kvpool_master.core.effects import AskWorkers as AskWorkers
from kvpool_master.core.effects import BindSlab as BindSlab
from kvpool_master.core.effects import Bury as Bury
from kvpool_master.core.effects import ClearSlots as ClearSlots
from kvpool_master.core.effects import CopySlots as CopySlots
from kvpool_master.core.effects import Effect as Effect
from kvpool_master.core.effects import ProbeNode as ProbeNode
from kvpool_master.core.effects import Remember as Remember
from kvpool_master.core.effects import Retire as Retire
from kvpool_master.core.node_messages import Drain as Drain
from kvpool_master.core.node_messages import Heartbeat as Heartbeat
from kvpool_master.core.node_messages import InventoryEnd as InventoryEnd
from kvpool_master.core.node_messages import InventorySlabs as InventorySlabs
from kvpool_master.core.node_messages import InventoryStrands as InventoryStrands
from kvpool_master.core.node_messages import InventoryWriting as InventoryWriting
from kvpool_master.core.node_messages import NodeReported as NodeReported
from kvpool_master.core.node_messages import ProbeAnswered as ProbeAnswered
from kvpool_master.core.node_messages import Register as Register
from kvpool_master.core.node_messages import Registered as Registered
from kvpool_master.core.node_messages import ReportNode as ReportNode
from kvpool_master.core.node_messages import RetireNode as RetireNode
from kvpool_master.core.node_messages import SegmentOffer as SegmentOffer
from kvpool_master.core.node_messages import SessionLost as SessionLost
from kvpool_master.core.node_messages import SlabBound as SlabBound
from kvpool_master.core.node_messages import SlotsCleared as SlotsCleared
from kvpool_master.core.node_messages import SlotsCopied as SlotsCopied
from kvpool_master.core.node_messages import Strand as Strand
from kvpool_master.core.node_messages import Taken as Taken
from kvpool_master.core.node_messages import Undrain as Undrain
from kvpool_master.core.node_messages import WorkerGone as WorkerGone
from kvpool_master.core.reasons import GoneReason as GoneReason
from kvpool_master.core.reasons import Parent as Parent
from kvpool_master.core.reasons import Reason as Reason
from kvpool_master.core.reasons import RunState as RunState
from kvpool_proto.namespace import NamespaceSpec

ID_BYTES = 16


# -- namespaces ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenNamespace:
    """Register or find a namespace -> Opened. The first slab of its slot size is bound ahead.

    Raises BadNamespaceSpec, NamespaceDiffers (same id, other `entry`), SlotTooLarge, LimitReached.
    """

    spec: NamespaceSpec


@dataclass(frozen=True, slots=True)
class Opened:
    namespace: bytes
    slot_bytes: int
    effects: tuple[Effect, ...] = ()


# -- reading -------------------------------------------------------------------------------------------


class Lookup(NamedTuple):
    """Lease the longest run after `skip` blocks that can be copied now -> Hit.

    An unknown key ends the run. The first `skip` blocks may be holes; where entry is root they must be known.
    The lease pins only the deepest block hit, which holds all before it; nothing is leased on a miss.
    A lease id seen before (a retry) keeps protecting what its first answer named. node: the asker's, whose own copies
    are preferred. Raises UnknownNamespace,
    KeyLengthMismatch, EmptyChain, ChainTooLong, BadId, ForeignId (the id is that of another lookup),
    UnknownLease (it was released before it was granted).
    """

    namespace: bytes
    chain: bytes
    skip: int
    lease: bytes
    node: str = ""


class Hit(NamedTuple):
    """blocks: hits after `skip`; extents cover chain blocks [skip, skip + blocks), all parts."""

    blocks: int
    reason: Reason
    extents: bytes
    lease_ms: int


@dataclass(frozen=True, slots=True)
class Peek:
    """The question of Lookup without lease, touch or metric -> Peeked. Raises as Lookup."""

    namespace: bytes
    chain: bytes
    skip: int
    explain: bool = False


@dataclass(frozen=True, slots=True)
class Gone:
    reason: GoneReason
    ago_ms: int
    idle_ms: int


@dataclass(frozen=True, slots=True)
class Peeked:
    """gone: with `explain`, what the ring remembers of the first missing block."""

    blocks: int
    reason: Reason
    extents: bytes
    gone: Gone | None


@dataclass(frozen=True, slots=True)
class Release:
    """End leases -> Released. An unknown id is remembered: its lookup, arriving later, is refused. Raises BadId."""

    leases: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Released:
    released: int


@dataclass(frozen=True, slots=True)
class Renew:
    """Prolong a lease up to its maximum life -> Renewed. Raises UnknownLease."""

    lease: bytes


@dataclass(frozen=True, slots=True)
class Renewed:
    lease_ms: int


# -- writing -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask for room for what is missing of a chain -> Reserved.

    parent: Parent.ROOT, Parent.UNKNOWN or the key before chain[0]; entry = root takes only Parent.ROOT.
    nodes: node of each part of [part_from, part_to), or of each share, or one for all, or () for anywhere.
    worker: the writing process (node client's number), 0 for a scheduler that reserves for its ranks.
    shares: among how many writers the blocks of one part are divided, in runs as long as can be; share: the caller's
    own. Each share is committed and given up by itself. avoid: nodes that the caller could not write to.
    The same id again is the same reservation and gets the same answer. Raises as Lookup, PartOutOfRange,
    BadRequest, ForeignId (the id is a reservation for another chain), ReservationEnded (the id was aborted
    or has expired).
    """

    namespace: bytes
    reservation: bytes
    parent: Parent | bytes
    chain: bytes
    part_from: int
    part_to: int
    nodes: tuple[str, ...] = ()
    worker: int = 0
    shares: int = 1
    share: int = 0
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks [offset, offset + blocks) of parts [part_from, part_to) are in one state. share: whose they are."""

    offset: int
    blocks: int
    part_from: int
    part_to: int
    state: RunState
    share: int = 0


@dataclass(frozen=True, slots=True)
class Reserved:
    """runs cover every asked part of chain blocks [0, answered); extents say where to write what is yours.

    Runs are ordered by offset, then part. write_ms = 0 and no reservation is kept when nothing is yours.
    """

    answered: int
    reason: Reason
    runs: tuple[Run, ...]
    extents: bytes
    write_ms: int
    effects: tuple[Effect, ...] = ()


@dataclass(frozen=True, slots=True)
class Commit:
    """Report that the first `blocks` of the blocks granted to each named part are written -> Committed.

    A running total: less than before, or the same again, changes nothing. final gives up the rest of these
    parts with the writer's word. A commit after the end of these parts answers as before when it adds nothing,
    else raises ReservationEnded; final is the writer's word even then. Raises UnknownReservation, PartOutOfRange,
    CommitTooLarge.
    """

    reservation: bytes
    part_from: int
    part_to: int
    blocks: int
    final: bool
    worker: int = 0
    share: int = 0


@dataclass(frozen=True, slots=True)
class Committed:
    """blocks: the total that stands, the lowest of the parts named; lost: of these, removed meanwhile."""

    blocks: int
    lost: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Give up what is not committed of parts (part_to = 0: all) -> Aborted.

    writer: the word of the parts' own writer (share: which one), who copies no more: slots come back at once, else
    they stay in quarantine, and all shares end. An unknown id is remembered: its reserve, arriving later, is refused.
    """

    reservation: bytes
    writer: bool
    part_from: int = 0
    part_to: int = 0
    share: int = 0


@dataclass(frozen=True, slots=True)
class Aborted:
    aborted: bool


# -- removing ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Remove:
    """Hide the blocks of a chain behind `skip` -> Removed; slots free when the leases of now have ended.

    What hangs below stays and is reachable again when the hole is filled. Blocks being written are left alone.
    """

    namespace: bytes
    chain: bytes
    skip: int


@dataclass(frozen=True, slots=True)
class Removed:
    """nodes_away: those with headers of the removed blocks that are not told yet: away, or read under leases."""

    blocks: int
    nodes_away: tuple[str, ...] = ()
    effects: tuple[Effect, ...] = ()


@dataclass(frozen=True, slots=True)
class Purge:
    """Hide all of a namespace and end its reservations, for ever: what was given out until now is dead -> Purged."""

    namespace: bytes


@dataclass(frozen=True, slots=True)
class Purged:
    """stamp: the newest that is dead."""

    blocks: int
    stamp: int = 0
    effects: tuple[Effect, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockBad:
    """A node client's word that the last block of `chain` with this stamp has bad bytes -> Removed."""

    namespace: bytes
    chain: bytes
    stamp: int


# -- rights -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SetQuota:
    """Limit the slot bytes that a tenant's namespaces hold; 0: no limit -> QuotaSet.

    A tenant at its limit evicts its own oldest leaves to store more; what finds none is answered OVER_QUOTA. One that
    is above a new limit shrinks with time. Raises BadRequest, LimitReached.
    """

    tenant: str
    bytes: int


@dataclass(frozen=True, slots=True)
class QuotaSet:
    """bytes: what the tenant holds now."""

    bytes: int
    effects: tuple[Effect, ...] = ()


# -- time ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """Everything that time does: expiry, liveness, eviction ahead of need, background slices -> Done."""


@dataclass(frozen=True, slots=True)
class Done:
    effects: tuple[Effect, ...] = ()


Command = (
    OpenNamespace
    | Lookup
    | Peek
    | Release
    | Renew
    | Reserve
    | Commit
    | Abort
    | Remove
    | Purge
    | BlockBad
    | Register
    | Heartbeat
    | SlabBound
    | SlotsCleared
    | InventorySlabs
    | InventoryStrands
    | InventoryWriting
    | InventoryEnd
    | WorkerGone
    | SessionLost
    | RetireNode
    | ReportNode
    | ProbeAnswered
    | Drain
    | Undrain
    | SlotsCopied
    | SetQuota
    | Tick
)
Outcome = (
    Opened
    | Hit
    | Peeked
    | Released
    | Renewed
    | Reserved
    | Committed
    | Aborted
    | Removed
    | Purged
    | Registered
    | Taken
    | NodeReported
    | QuotaSet
    | Done
)
