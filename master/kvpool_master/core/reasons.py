"""The enumerations of the core's vocabulary; messages.py is where to import them from."""

from __future__ import annotations

from enum import Enum, IntEnum


class Reason(IntEnum):
    """Why an answer is shorter than the question; the numbers are those of pool.proto."""

    NONE = 0
    UNKNOWN_KEY = 1
    HOLE = 2
    BEING_WRITTEN = 3
    PART_MISSING = 4
    NODE_AWAY = 5
    CONFLICT = 6
    NO_SPACE = 7
    RESERVE_SHARE = 8
    NO_NODE = 9
    SLAB_PENDING = 10
    TOO_MANY_LEASES = 11
    TOO_MANY_RESERVATIONS = 12
    STARTING = 13
    OVER_QUOTA = 14


class GoneReason(IntEnum):
    """Why blocks went; the numbers are those of pool.proto."""

    EVICTED = 1
    INCOMPLETE = 2
    REMOVED = 3
    PURGED = 4
    BAD_BYTES = 5
    NODE_RETIRED = 6
    WRITE_GIVEN_UP = 7


class RunState(IntEnum):
    """What a run of a ReserveReply is to the caller; the numbers are those of pool.proto."""

    EXISTS = 1
    BEING_WRITTEN = 2
    YOURS = 3


class Parent(Enum):
    """A put that follows the root, or nobody knows what. A put that follows a block names its key (bytes)."""

    ROOT = "root"
    UNKNOWN = "unknown"
