"""One node's inventory: asked for, arriving, complete or failed. What its rows do is recovery.py's matter.

state     what it waits for                               leaves to
waiting   its turn: a few nodes report at a time          arriving
arriving  slabs, strands, slots being written, the end    complete (the node has none any more), failed
failed    that the node registers again
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class InventoryState(Enum):
    """Where an inventory stands."""

    WAITING = "waiting"
    ARRIVING = "arriving"
    FAILED = "failed"


@dataclass(slots=True)
class Inventory:
    """number: under which it was asked for. moved_ms: when it last made progress."""

    moved_ms: int
    state: InventoryState = InventoryState.WAITING
    number: int = 0
    blocks: int = 0
    slots_writing: int = 0
