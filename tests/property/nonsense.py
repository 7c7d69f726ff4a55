"""Commands that break a rule, each with the errors that may refuse it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvpool_master.core.messages import (
    BlockBad,
    Command,
    Commit,
    Heartbeat,
    Lookup,
    OpenNamespace,
    Parent,
    Peek,
    Purge,
    Register,
    Remove,
    Renew,
    Reserve,
    SegmentOffer,
)
from kvpool_proto.errors import (
    BadId,
    BadNamespaceSpec,
    BadRequest,
    BadSegment,
    ChainTooLong,
    EmptyChain,
    KeyLengthMismatch,
    KVPoolError,
    NamespaceDiffers,
    PartOutOfRange,
    UnknownLease,
    UnknownNamespace,
    UnknownNode,
    UnknownReservation,
)
from property.strategies import SLAB_BYTES, Kind

NOWHERE = b"\xff" * 16

Nonsense = tuple[Command, tuple[type[KVPoolError], ...]]


def _reserve(kind: Kind, key: bytes, **fields: object) -> Reserve:
    base = Reserve(kind.spec.id, key, Parent.ROOT, kind.chain("ab"), 0, kind.spec.parts)
    return replace(base, **fields)  # type: ignore[arg-type]


def _differs(kind: Kind) -> OpenNamespace:
    return OpenNamespace(replace(kind.spec, entry="any" if kind.spec.entry == "root" else "root"))


NONSENSE: dict[str, Callable[[Kind, bytes], Nonsense]] = {
    "lookup of an empty chain": lambda kind, key: (Lookup(kind.spec.id, b"", 0, key), (EmptyChain,)),
    "lookup of half a key": lambda kind, key: (
        Lookup(kind.spec.id, kind.chain("ab")[:-1], 0, key),
        (KeyLengthMismatch,),
    ),
    "lookup of too long a chain": lambda kind, key: (
        Lookup(kind.spec.id, kind.chain("a" * 65), 0, key),
        (ChainTooLong,),
    ),
    "lookup with a short id": lambda kind, key: (Lookup(kind.spec.id, kind.chain("a"), 0, key[1:]), (BadId,)),
    "lookup in no namespace": lambda kind, key: (Lookup(NOWHERE, kind.chain("a"), 0, key), (UnknownNamespace,)),
    "peek in no namespace": lambda kind, _key: (Peek(NOWHERE, kind.chain("a"), 0), (UnknownNamespace,)),
    "renewal of no lease": lambda _kind, _key: (Renew(NOWHERE), (UnknownLease,)),
    "reserve of no part": lambda kind, key: (_reserve(kind, key, part_to=0), (PartOutOfRange,)),
    "reserve of a part too many": lambda kind, key: (
        _reserve(kind, key, part_to=kind.spec.parts + 1),
        (PartOutOfRange,),
    ),
    "reserve with a long id": lambda kind, key: (_reserve(kind, key + b"x"), (BadId,)),
    "reserve with too many nodes": lambda kind, key: (_reserve(kind, key, nodes=("n1",) * 9), (BadRequest,)),
    "reserve after half a key": lambda kind, key: (
        _reserve(kind, key, parent=b"half"),
        (KeyLengthMismatch, BadRequest),
    ),
    "reserve in no namespace": lambda kind, key: (_reserve(kind, key, namespace=NOWHERE), (UnknownNamespace,)),
    "commit of no reservation": lambda _kind, _key: (Commit(NOWHERE, 0, 1, 1, final=True), (UnknownReservation,)),
    "remove in no namespace": lambda kind, _key: (Remove(NOWHERE, kind.chain("a"), 0), (UnknownNamespace,)),
    "purge of no namespace": lambda _kind, _key: (Purge(NOWHERE), (UnknownNamespace,)),
    "bad bytes in no namespace": lambda kind, _key: (BlockBad(NOWHERE, kind.chain("a"), 1), (UnknownNamespace,)),
    "another entry for a namespace": lambda kind, _key: (_differs(kind), (NamespaceDiffers,)),
    "namespace without blocks": lambda kind, _key: (
        OpenNamespace(replace(kind.spec, block_tokens=0)),
        (BadNamespaceSpec,),
    ),
    "heartbeat of a stranger": lambda _kind, _key: (Heartbeat("stranger", 1), (UnknownNode,)),
    "segment of no bytes": lambda _kind, _key: (
        Register("stranger", 1, (SegmentOffer(0, 0, SLAB_BYTES),)),
        (BadSegment,),
    ),
    "segment of a slab and a bit": lambda _kind, _key: (
        Register("stranger", 1, (SegmentOffer(0, SLAB_BYTES + 4096, SLAB_BYTES),)),
        (BadSegment,),
    ),
}
