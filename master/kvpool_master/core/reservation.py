"""One put, or one share of it: what was granted, committed and lost, by part. writes.py changes it.

Rules
  - A put in shares is a reservation for each share; its key is the id and the share's number.
"""

from __future__ import annotations

from kvpool_master.core.messages import Reserve, Reserved
from kvpool_master.core.spans import Tree, Writer

SHARE_BYTES = 2
"""Of a share's number, behind the id."""


class Reservation(Writer):
    """One put. Masks have a bit per part of the namespace."""

    __slots__ = (
        "answer",
        "deadline_ms",
        "done",
        "ended",
        "granted",
        "id",
        "key",
        "lost",
        "mark",
        "mask",
        "nodes",
        "parts",
        "quarantine_end_ms",
        "quarantined",
        "remember_until_ms",
        "share",
        "stamp",
        "tree",
        "worker",
        "workers",
    )

    def __init__(self, command: Reserve, tree: Tree, stamp: int, share: int = 0) -> None:
        super().__init__()
        self.id = command.reservation
        self.key = key_of(command.reservation, share, command.shares)
        self.share = share
        self.tree = tree
        self.stamp = stamp
        self.mask = (1 << command.part_to) - (1 << command.part_from)
        self.parts = range(command.part_from, command.part_to)
        self.nodes = command.nodes
        self.worker = command.worker
        if command.shares > 1:
            self.nodes = command.nodes[share : share + 1] if len(command.nodes) > 1 else command.nodes
            self.worker = command.worker if share == command.share else 0
        self.workers: dict[int, int] | None = None
        """Workers that committed a part of a reservation that a scheduler made."""
        self.mark = mark_of(command)
        self.answer: Reserved | None = None
        self.granted: list[tuple[int, int]] = []
        """Blocks granted: (mask of parts, blocks), each mask once."""
        self.done = [0] * len(self.parts)
        """Blocks committed, by part; see `written`."""
        self.lost: dict[int, int] | None = None
        """Of these, removed meanwhile, by part."""
        self.ended = 0
        self.deadline_ms = 0
        self.remember_until_ms = 0
        self.quarantined = b""
        self.quarantine_end_ms = 0

    def introduce(self, command: Reserve) -> None:
        """The writer of a share makes itself known."""
        self.worker = command.worker or self.worker
        if len(command.nodes) == 1:
            self.nodes = command.nodes

    def granted_blocks(self, part: int) -> int:
        """How many blocks of a part are this reservation's."""
        return sum([blocks for mask, blocks in self.granted if mask >> part & 1])

    def grant(self, mask: int, blocks: int) -> None:
        """Note that blocks of the parts in `mask` are this reservation's."""
        for at, (known, before) in enumerate(self.granted):
            if known == mask:
                self.granted[at] = (mask, before + blocks)
                return
        self.granted.append((mask, blocks))

    def written(self, part: int) -> int:
        """How many of a part's blocks are committed."""
        return self.done[part - self.parts.start]

    def lost_blocks(self, part: int) -> int:
        """How many of a part's committed blocks had been removed before."""
        return self.lost.get(part, 0) if self.lost else 0

    def worker_of(self, part: int) -> int:
        """The process that writes a part, 0 if it is not known."""
        return self.workers.get(part, self.worker) if self.workers else self.worker

    def node_of(self, part: int) -> str:
        """The node that the part's writer named; empty if it named none."""
        if len(self.nodes) <= 1:
            return self.nodes[0] if self.nodes else ""
        return self.nodes[part - self.parts.start]


def mark_of(command: Reserve) -> int:
    """What makes a second Reserve with the same id a retry of the first."""
    return hash((command.namespace, command.chain, command.part_from, command.part_to, command.shares))


def key_of(ident: bytes, share: int, shares: int) -> bytes:
    """Under what a reservation, or one share of it, is found."""
    return ident if shares == 1 else ident + share.to_bytes(SHARE_BYTES)
