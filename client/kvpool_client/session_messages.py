"""The vocabulary of session.py: events that go in, instructions that come out. Data only.

Rules
  - Handles, epochs and numbers are the Master's; times are milliseconds.
  - `A -> B, C` in a docstring: carrying out A ends in one of the events B, C.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Order:
    """Bind a slab of the segment with this handle."""

    segment: int
    slab: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Clearing:
    """Make slots FREE whose headers still show a stamp. number: to be answered. runs: (first slot, slots, stamp)."""

    number: int
    segment: int
    slot_bytes: int
    runs: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a run of a peer's blocks into slots of one's own: CopySlots of pool.proto. number: to be answered.

    epoch: of the session it came on. source: the peer's node id and data address. macs: one per part of `parts`.
    """

    number: int
    epoch: int
    namespace: bytes
    part_bytes: int
    parts: range
    blocks: int
    source: tuple[str, str]
    from_segment: int
    from_slot: int
    from_stride: int
    from_stamp: int
    macs: tuple[bytes, ...]
    valid_until_ms: int
    segment: int
    slot: int
    stamp: int


Tombstones = tuple[tuple[bytes, int], ...]
"""(namespace, newest dead stamp)."""


# -- events --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Due:
    """The time that wake_ms() named has come (or start)."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The Master took us in. silence_ms: how long it may say nothing before we ask whether it is there.

    bypass: all bits of the switch (bypass.py). key: of this epoch's capabilities, empty: there are none; master_ms: the
    Master's time; former_key_ms: how long the former epoch's key still holds.
    """

    epoch: int
    handles: tuple[int, ...]
    silence_ms: int
    tombstones: Tombstones = ()
    bypass: int = 0
    key: bytes = field(default=b"", repr=False)
    master_ms: int = 0
    former_key_ms: int = 0


@dataclass(frozen=True, slots=True)
class Heard:
    """A message on the session. inventory: the number to report it under, 0: not asked for. bypass: None: no news.

    master_ms: the Master's time, 0: not told.
    """

    epoch: int
    orders: tuple[Order, ...] = ()
    retired: bool = False
    inventory: int = 0
    ask_workers: tuple[int, ...] = ()
    clearings: tuple[Clearing, ...] = ()
    tombstones: Tombstones = ()
    bypass: int | None = None
    copies: tuple[Copy, ...] = ()
    master_ms: int = 0


@dataclass(frozen=True, slots=True)
class HeartbeatOk:
    """The Master answered when asked whether it is there."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Registering or the session failed: not reached, broken, or refused for now. jitter: in [0, 1)."""

    why: str
    jitter: float


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The Master answers, but does not know us."""


@dataclass(frozen=True, slots=True)
class InventoryDone:
    """The inventory was taken, or is not wanted any more."""

    number: int


@dataclass(frozen=True, slots=True)
class InventoryFailed:
    """The inventory broke off, or was refused. jitter: in [0, 1)."""

    number: int
    why: str
    jitter: float


@dataclass(frozen=True, slots=True)
class Refused:
    """For good: superseded by a newer life of this node, or the offer breaks a rule."""

    why: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The operator wants us to leave. discard: for good, with all that we hold."""

    discard: bool


@dataclass(frozen=True, slots=True)
class Left:
    """Retiring is done, or given up."""


Event = (
    Due
    | Registered
    | Heard
    | HeartbeatOk
    | Failed
    | Forgotten
    | InventoryDone
    | InventoryFailed
    | Refused
    | Stop
    | Left
)


# -- instructions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """Register this incarnation -> Registered, Failed, Refused."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Let workers in: the handles are good."""

    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Open the stream of heartbeats -> Heard, Failed, Forgotten, Refused."""


@dataclass(frozen=True, slots=True)
class CloseSession:
    """End the stream, an inventory that is on its way, and copies; nothing that they still say counts."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask whether the Master is there -> HeartbeatOk, Failed."""


@dataclass(frozen=True, slots=True)
class ObeyEpoch:
    """Write the epoch to the superblocks: writers of the former one stop. Former handles mean nothing any more."""

    epoch: int


@dataclass(frozen=True, slots=True)
class LearnKey:
    """Check capabilities with this epoch's key; the former one's holds for reading, for a while."""

    epoch: int
    key: bytes = field(repr=False)
    master_ms: int
    former_key_ms: int


@dataclass(frozen=True, slots=True)
class TellTime:
    """The Master's time, in which capabilities end."""

    epoch: int
    master_ms: int


@dataclass(frozen=True, slots=True)
class Bury:
    """Forget what is dead."""

    tombstones: Tombstones


@dataclass(frozen=True, slots=True)
class SetBypass:
    """Write the switch to the superblocks."""

    bits: int


@dataclass(frozen=True, slots=True)
class Bind:
    """Carry out orders and report them as done."""

    orders: tuple[Order, ...]


@dataclass(frozen=True, slots=True)
class ClearSlots:
    """Carry out orders and report them as done."""

    orders: tuple[Clearing, ...]


@dataclass(frozen=True, slots=True)
class CopySlots:
    """Carry out orders in the background and report how far they went."""

    orders: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class AnswerWorkers:
    """Report those of these workers that are gone."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReportInventory:
    """Report what the segments hold; an older report ends -> InventoryDone, InventoryFailed."""

    number: int


@dataclass(frozen=True, slots=True)
class Retire:
    """Tell the Master that this incarnation is gone, as far as it can be reached -> Left."""

    incarnation: int


Instruction = (
    Register
    | Announce
    | OpenSession
    | CloseSession
    | Probe
    | ObeyEpoch
    | LearnKey
    | TellTime
    | Bury
    | SetBypass
    | Bind
    | ClearSlots
    | CopySlots
    | AnswerWorkers
    | ReportInventory
    | Retire
)
