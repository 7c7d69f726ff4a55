"""One tree and one table of errors: exception | reason | gRPC code | what the caller should do.

Reasons travel as google.rpc.ErrorInfo (see status.py); this file knows nothing of gRPC, so the core may
raise from it. An error here means that nothing was changed. A miss, a full pool or a short answer is never
an error: those are `Reason`s of a reply.
"""

from __future__ import annotations

from typing import ClassVar

DOMAIN = "kvpool"


class KVPoolError(Exception):
    """Root of every error that kvpool raises. `reason` is stable; the text is for people."""

    reason: ClassVar[str] = "INTERNAL"
    code: ClassVar[str] = "INTERNAL"
    action: ClassVar[str] = "Report it: this is a bug in kvpool."


# -- the caller broke a rule: change the request ------------------------------------------------------


class BadRequest(KVPoolError):
    reason = "BAD_REQUEST"
    code = "INVALID_ARGUMENT"
    action = "Correct the request; the text names the field."


class KeyLengthMismatch(BadRequest):
    reason = "KEY_LENGTH"
    action = "Send whole keys of the namespace's key_bytes."


class EmptyChain(BadRequest):
    reason = "CHAIN_EMPTY"
    action = "Do not ask for prompts shorter than a block."


class ChainTooLong(BadRequest):
    reason = "CHAIN_TOO_LONG"
    action = "Cut the chain to chain_blocks_max (OpenNamespaceReply)."


class PartOutOfRange(BadRequest):
    reason = "PART_RANGE"
    action = "Name parts within the namespace and the reservation."


class BadId(BadRequest):
    reason = "ID_LENGTH"
    action = "Use 16 random bytes."


class BadNamespaceSpec(BadRequest):
    reason = "NAMESPACE_SPEC"
    action = "Correct the spec; the text names the field."


class BadSegment(BadRequest):
    reason = "SEGMENT_GEOMETRY"
    action = "Offer segments of a whole, non-zero number of slabs, within the limits."


class SlotTooLarge(BadRequest):
    reason = "SLOT_TOO_LARGE"
    action = "Use larger slabs or fewer block_tokens: a slot has to fit in a slab."


class CommitTooLarge(BadRequest):
    reason = "COMMIT_TOO_LARGE"
    action = "Commit at most what was granted to the part."


# -- the thing named is not there or not yours --------------------------------------------------------


class UnknownNamespace(KVPoolError):
    reason = "NAMESPACE_UNKNOWN"
    code = "NOT_FOUND"
    action = "Open the namespace again (the Master may have restarted)."


class UnknownLease(KVPoolError):
    reason = "LEASE_UNKNOWN"
    code = "NOT_FOUND"
    action = "Look up again: the lease has ended."


class UnknownReservation(KVPoolError):
    reason = "RESERVATION_UNKNOWN"
    code = "NOT_FOUND"
    action = "Treat the blocks as not stored; reserve again if they still matter."


class ReservationEnded(KVPoolError):
    reason = "RESERVATION_ENDED"
    code = "FAILED_PRECONDITION"
    action = "Treat the blocks as not stored; reserve again with a new id."


class ForeignId(KVPoolError):
    reason = "ID_FOREIGN"
    code = "FAILED_PRECONDITION"
    action = "Choose a fresh id: this one belongs to another request."


class NamespaceDiffers(KVPoolError):
    reason = "NAMESPACE_DIFFERS"
    code = "FAILED_PRECONDITION"
    action = "Use the spec that is registered, or another namespace."


class UnknownNode(KVPoolError):
    reason = "NODE_UNKNOWN"
    code = "NOT_FOUND"
    action = "Register again."


class UnknownSegment(KVPoolError):
    reason = "SEGMENT_UNKNOWN"
    code = "NOT_FOUND"
    action = "Register again."


class NodeIdTaken(KVPoolError):
    reason = "NODE_ID_TAKEN"
    code = "ALREADY_EXISTS"
    action = "Give each node client its own node id, or wait until the other is suspect."


class StaleIncarnation(KVPoolError):
    reason = "INCARNATION_STALE"
    code = "FAILED_PRECONDITION"
    action = "A newer life of this node is registered: stop."


class StaleInventory(KVPoolError):
    reason = "INVENTORY_STALE"
    code = "FAILED_PRECONDITION"
    action = "Stop this report: the Master has asked for a newer one, or will."


# -- not allowed --------------------------------------------------------------------------------------


class Unauthenticated(KVPoolError):
    reason = "UNAUTHENTICATED"
    code = "UNAUTHENTICATED"
    action = "Present a certificate or a token that the other side knows and that has not ended."


class Forbidden(KVPoolError):
    reason = "FORBIDDEN"
    code = "PERMISSION_DENIED"
    action = "Use an identity with this role and of this tenant."


class BadCapability(KVPoolError):
    reason = "CAPABILITY"
    code = "PERMISSION_DENIED"
    action = "Treat it as a miss; ask the Master again: it grants the blocks' capabilities."


class CapabilityExpired(BadCapability):
    reason = "CAPABILITY_EXPIRED"
    action = "Treat it as a miss; ask the Master again."


# -- not now ------------------------------------------------------------------------------------------


class LimitReached(KVPoolError):
    reason = "LIMIT"
    code = "RESOURCE_EXHAUSTED"
    action = "Back off; the text names the setting."


class MessageTooLarge(KVPoolError):
    reason = "MESSAGE_TOO_LARGE"
    code = "RESOURCE_EXHAUSTED"
    action = "Send less in one message; the text names the setting."


class NotEnabled(KVPoolError):
    reason = "NOT_ENABLED"
    code = "UNIMPLEMENTED"
    action = "Start the Master with the flag that the text names."


class Stopping(KVPoolError):
    reason = "STOPPING"
    code = "UNAVAILABLE"
    action = "Go on without the pool; reconnect with backoff."


class DeadlinePassed(KVPoolError):
    reason = "DEADLINE_PASSED"
    code = "DEADLINE_EXCEEDED"
    action = "Nothing was done; go on without the pool."


class Unreachable(KVPoolError):
    """Raised by clients: no answer from the Master or the node client within the deadline."""

    reason = "UNREACHABLE"
    code = "UNAVAILABLE"
    action = "Go on without the pool; the SDK reconnects by itself."


class NodeUnreachable(KVPoolError):
    """Raised by clients: no answer from the node client."""

    reason = "NODE_UNREACHABLE"
    code = "UNAVAILABLE"
    action = "Go on without the pool; the SDK asks the node client again by itself."


class PeerUnreachable(KVPoolError):
    """Raised by clients: no answer from another node's data port, or none in time."""

    reason = "PEER_UNREACHABLE"
    code = "UNAVAILABLE"
    action = "Treat it as a miss; the SDK avoids the node for a while and reports it."


class PeerBusy(KVPoolError):
    reason = "PEER_BUSY"
    code = "RESOURCE_EXHAUSTED"
    action = "Treat it as a miss, or raise the data port's limit that the text names."


class StaleEpoch(KVPoolError):
    """What was granted, or the Master that answers, belongs to a life of the Master that is over."""

    reason = "STALE_EPOCH"
    code = "FAILED_PRECONDITION"
    action = "Treat it as a miss and look up or reserve again: another life of the Master rules now."


class SegmentElsewhere(KVPoolError):
    """Raised by clients: the blocks lie in segments that are not mapped here."""

    reason = "SEGMENT_ELSEWHERE"
    code = "FAILED_PRECONDITION"
    action = "Treat it as a miss; the node client may still have to hear of the Master's new life."


class SlabChanged(KVPoolError):
    """Raised on a mapped segment: the slab is not, or no longer, bound to the slot size the caller was told."""

    reason = "SLAB_CHANGED"
    code = "FAILED_PRECONDITION"
    action = "Treat it as a miss: the slab was bound anew since the Master answered."


class ProtocolError(KVPoolError):
    """The other side sent what the contract does not allow."""

    reason = "PROTOCOL"
    code = "INTERNAL"
    action = "Compare the versions of both sides."


def _tree(root: type[KVPoolError]) -> list[type[KVPoolError]]:
    found = [root]
    for child in root.__subclasses__():
        found += _tree(child)
    return found


BY_REASON: dict[str, type[KVPoolError]] = {error.reason: error for error in _tree(KVPoolError)}
