"""Is a stored part of a block bad? The node client's own look at a slot that a worker complains about."""

from __future__ import annotations

import xxhash

from kvpool_client.headers import COMMITTED, slot_checks
from kvpool_client.segment import SegmentMap
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import SlabChanged


def block_is_bad(segment: SegmentMap, block: pb.BadBlock, slot: int, slot_bytes: int) -> bool:
    """True unless the slot holds the part that `block` names: namespace, last key of the chain, stamp, checksum.

    Without a checksum (0: stored with verify off) the bytes cannot be judged and count as good. False, too, when the
    slab is bound anew: the Master knows nothing of the block any more. Raises ProtocolError for a slot that cannot
    exist.
    """
    try:
        header = segment.headers(slot, 1, slot_bytes).copy()
        payload = segment.slots(slot, 1, slot_bytes)[0]
        generation = segment.generation(segment.slab_of(slot, slot_bytes))
    except SlabChanged:
        return False
    if header["check"][0] != slot_checks(header, slot, generation, slot_bytes)[0]:
        return True
    key_bytes, length_bytes = int(header["key_bytes"][0]), int(header["length_bytes"][0])
    found = (
        int(header["state"][0]),
        int(header["stamp"][0]),
        header["namespace"][0].tobytes(),
        header["key"][0].tobytes()[:key_bytes],
    )
    if found != (COMMITTED, block.stamp, block.namespace_id, block.chain[-key_bytes:]) or length_bytes > slot_bytes:
        return True
    checksum = int(header["checksum"][0])
    return checksum != 0 and checksum != xxhash.xxh3_64_intdigest(payload[:length_bytes])
