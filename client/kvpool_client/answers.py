"""What the SDK answers. Every answer says in `reason` why it is short of the question; empty: it is not.

Reasons are those of pool.proto (Reason, in lower case: "unknown_key", "no_space", ...), those of errors.py in lower
case ("unreachable", "namespace_unknown", "slab_changed", ...), and these:
  stale_stamp      the slot holds something else by now             verify_failed  the bytes are not those stored
  torn_header      the slot's header is damaged                     wrong_block    it says another block than asked for
  unverified       stored without checksum, and verify is on        stale_epoch    another life of the Master rules
  lease_expired    the lease ran out, or was released               write_expired  the reservation ran out
  timed_out        the caller's own limit                           node_unreachable  no answer from the node client
  segment_elsewhere  the blocks lie in segments not mapped here, and nothing gives a right to ask for them
  no_data_port     they lie on a node that only its own workers can reach
  peer_unreachable their node's data port does not answer, or did not lately (peers.py); also "peer_busy", "capability"
  lost             removed between write and commit                 bypassed       switched off (bypass.py)
After a restart of the Master also "lease_unknown" and "reservation_unknown": the next lookup or store begins anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from kvpool_client.holders import NO_HOLDERS, Holders
from kvpool_client.runs import NO_EXTENTS, Extents
from kvpool_proto import pool_pb2 as pb


def short_reason(reason: pb.Reason.ValueType) -> str:
    """A Reason of pool.proto as the SDK says it; a number for one that a newer Master made."""
    if reason == pb.REASON_NONE:
        return ""
    known = pb.Reason.DESCRIPTOR.values_by_number.get(reason)
    return known.name.removeprefix("REASON_").lower() if known else f"reason_{reason}"


def gone_reason(reason: pb.GoneReason.ValueType) -> str:
    """A GoneReason in the same way."""
    known = pb.GoneReason.DESCRIPTOR.values_by_number.get(reason)
    return known.name.removeprefix("GONE_").lower() if known else f"reason_{reason}"


class Hit:
    """Leased blocks: chain blocks [skip, skip + blocks). len() is blocks. A context manager that releases.

    extents: where they lie, offsets counted from the chain's start, all parts. holders: on which nodes, and the right
    to ask these. lease_id, epoch: for the wire.
    deadline_ms: when the lease ends, on the pool's clock; counted from before the request was sent.
    """

    __slots__ = (
        "_release",
        "blocks",
        "chain",
        "deadline_ms",
        "epoch",
        "extents",
        "holders",
        "lease_id",
        "reason",
        "skip",
    )

    def __init__(
        self,
        *,
        chain: bytes,
        skip: int,
        blocks: int = 0,
        reason: str = "",
        extents: Extents = NO_EXTENTS,
        holders: Holders = NO_HOLDERS,
        lease_id: bytes = b"",
        deadline_ms: int = 0,
        epoch: int = 0,
        release: Callable[[bytes], None] | None = None,
    ) -> None:
        self.chain = chain
        self.skip = skip
        self.blocks = blocks
        self.reason = reason
        self.extents = extents
        self.holders = holders
        self.lease_id = lease_id
        self.deadline_ms = deadline_ms
        self.epoch = epoch
        self._release = release

    def __len__(self) -> int:
        return self.blocks

    def __repr__(self) -> str:
        return f"Hit(skip={self.skip}, blocks={self.blocks}, reason={self.reason!r})"

    def release(self) -> None:
        """End the lease, without waiting for it; loads from this hit are misses from now on. Any number of times."""
        release, self._release = self._release, None
        self.deadline_ms = 0
        if release is not None:
            release(self.lease_id)

    def __enter__(self) -> Hit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class LoadResult:
    """blocks: the leading blocks of the hit that are in the destination and right; bytes: of these, all parts."""

    blocks: int
    reason: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StoreResult:
    """stored_blocks: written by this call and committed, in every part that was this call's to write.

    existing_blocks: there before, in all parts named. being_written_blocks: somebody else is at it, the other shares of
    this store too. bytes: written and committed, all parts. Blocks whose last commit was not answered (the Master died)
    are not counted as stored; they may come back all the same, with the node's inventory: their bytes are complete.
    """

    stored_blocks: int = 0
    existing_blocks: int = 0
    being_written_blocks: int = 0
    reason: str = ""
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Gone:
    """Why a block went ("evicted", "purged", ...), how long ago, and how long nobody had asked for it by then."""

    reason: str
    ago_ms: int
    idle_ms: int


@dataclass(frozen=True, slots=True)
class Peeked:
    """What a lookup would hit. gone: with explain, what is remembered of the first block that is missing."""

    blocks: int
    reason: str
    gone: Gone | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """blocks: hidden; their room is freed when the leases alive then have ended.

    nodes_away: nodes that could not be told in time to clear the blocks' headers: with them blocks may come back.
    """

    blocks: int
    reason: str = ""
    nodes_away: tuple[str, ...] = ()
