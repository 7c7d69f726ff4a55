"""Client side of kvpool: the node client daemon and the worker SDK, whose names these are."""

from kvpool_client.devices.base import Contiguous, Rows
from kvpool_client.sdk import (
    ROOT,
    UNKNOWN,
    Gone,
    Hit,
    KVPool,
    LoadResult,
    Namespace,
    Peeked,
    Removed,
    Share,
    Stats,
    StoreResult,
)

__all__ = [
    "ROOT",
    "UNKNOWN",
    "Contiguous",
    "Gone",
    "Hit",
    "KVPool",
    "LoadResult",
    "Namespace",
    "Peeked",
    "Removed",
    "Rows",
    "Share",
    "Stats",
    "StoreResult",
]
