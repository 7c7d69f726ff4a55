"""Namespace: lookup, load, store and the rest, within KV of one kind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from kvpool_client import bypass
from kvpool_client.answers import Gone, Hit, LoadResult, Peeked, Removed, StoreResult, gone_reason, short_reason
from kvpool_client.bypass import BYPASS_LOADS, BYPASS_LOOKUPS, BYPASS_STORES
from kvpool_client.context import Context, NamespaceCalls
from kvpool_client.devices.base import Buffer, Layout
from kvpool_client.holders import holders_of
from kvpool_client.load import load
from kvpool_client.runs import extents_of
from kvpool_client.store import ROOT, Parent, Share, store
from kvpool_client.transfer import Term
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import KeyLengthMismatch, KVPoolError, PartOutOfRange


class Namespace:
    """KV of one kind. Made by KVPool.namespace(). Thread safe.

    chain: packed keys, first block first. timeout_ms: see each call; None: the pool's.
    """

    def __init__(self, context: Context, calls: NamespaceCalls) -> None:
        self._context = context
        self._calls = calls
        self.spec = calls.spec
        self.id = calls.id

    def lookup(self, chain: bytes, skip: int = 0, timeout_ms: int | None = None) -> Hit:
        """Lease the longest run of blocks after the first `skip` that can be loaded now.

        Raises KeyLengthMismatch, ValueError for a skip beyond the chain.
        """
        asked = self._blocks(chain, skip)
        if not asked:
            return Hit(chain=chain, skip=skip)
        context = self._context
        if context.off(BYPASS_LOOKUPS):
            context.called("lookups", self.spec, bypass.REASON, lookup_blocks=asked)
            return Hit(chain=chain, skip=skip, reason=bypass.REASON)
        started_ms = context.clock.now_ms()
        lease_id = os.urandom(16)
        node_id = context.link.present.node_id
        request = pb.LookupRequest(
            namespace_id=self.id, chain=chain, skip_blocks=skip, lease_id=lease_id, node_id=node_id
        )
        try:
            reply = self._calls.ask(context.master.pool.Lookup, request, self._deadline_ms(started_ms, timeout_ms))
            extents = extents_of(reply.extents)
            holders = holders_of(reply.holders, reply.valid_until_ms, node_id)
        except KVPoolError as error:
            context.returns.put(lease_id)  # it may have been granted all the same
            hit = Hit(chain=chain, skip=skip, reason=error.reason.lower())
        else:
            hit = Hit(
                chain=chain,
                skip=skip,
                blocks=min(reply.hit_blocks, asked),
                reason=short_reason(reply.reason),
                extents=extents,
                holders=holders,
                lease_id=lease_id,
                deadline_ms=started_ms + reply.lease_ms,
                epoch=reply.epoch,
                release=context.returns.put if reply.lease_ms else None,
            )
        context.called("lookups", self.spec, hit.reason, lookup_blocks=asked, hit_blocks=hit.blocks)
        return hit

    def peek(self, chain: bytes, skip: int = 0, *, explain: bool = False, timeout_ms: int | None = None) -> Peeked:
        """What lookup would hit, without a lease. explain: also why the first missing block went. Raises as lookup."""
        asked = self._blocks(chain, skip)
        if not asked:
            return Peeked(0, "")
        request = pb.PeekRequest(namespace_id=self.id, chain=chain, skip_blocks=skip, explain=explain)
        deadline_ms = self._deadline_ms(self._context.clock.now_ms(), timeout_ms)
        try:
            reply = self._calls.ask(self._context.master.pool.Peek, request, deadline_ms)
        except KVPoolError as error:
            return Peeked(0, error.reason.lower())
        gone = None
        if reply.HasField("gone"):
            gone = Gone(gone_reason(reply.gone.reason), reply.gone.ago_ms, reply.gone.idle_ms)
        return Peeked(reply.hit_blocks, short_reason(reply.reason), gone)

    def renew(self, hit: Hit, timeout_ms: int | None = None) -> str:
        """Prolong a hit's lease, up to its maximum life. Returns why not; empty: done.

        A hit that cannot be prolonged may be loaded until its deadline; after that, look up again.
        """
        started_ms = self._context.clock.now_ms()
        request = pb.RenewRequest(lease_id=hit.lease_id, epoch=hit.epoch)
        deadline_ms = self._deadline_ms(started_ms, timeout_ms)
        try:
            reply = self._context.master.call(self._context.master.pool.Renew, request, deadline_ms)
        except KVPoolError as error:
            return error.reason.lower()
        hit.deadline_ms = started_ms + reply.lease_ms
        return ""

    def release(self, hit: Hit) -> None:
        """hit.release()."""
        hit.release()

    def load(
        self,
        hit: Hit,
        destination: Layout | Sequence[Layout],
        part: int | range = 0,
        blocks: int | None = None,
        timeout_ms: int | None = None,
    ) -> LoadResult:
        """Copy the hit's leading blocks into `destination`, whose block 0 is chain block hit.skip, and verify them.

        part: one, or a range of neighbours with one destination each. blocks: how many, all by default. timeout_ms:
        as long as the lease by default. What lies behind the result's blocks in the destination is undefined. Raises
        PartOutOfRange; ValueError for destinations that do not fit, unless there is nothing to copy or loads are off.
        """
        started_s = self._context.clock.precise_s()
        started_ms = self._context.clock.now_ms()
        if blocks is not None and blocks < 0:
            raise ValueError(f"blocks = {blocks}: at least 0")
        wanted = hit.blocks if blocks is None else min(blocks, hit.blocks)
        if not wanted:
            return LoadResult(0, hit.reason, 0, 0.0)
        if self._context.off(BYPASS_LOADS):
            self._context.called("loads", self.spec, bypass.REASON)
            return LoadResult(0, bypass.REASON, 0, 0.0)
        parts, buffers = self._bind(part, destination, wanted, writable=True)
        term = Term(self._context.clock, hit.deadline_ms, "lease_expired")
        if timeout_ms is not None and started_ms + timeout_ms < hit.deadline_ms:
            term = Term(self._context.clock, started_ms + timeout_ms, "timed_out")
        loaded = load(self._context, self.spec, hit, parts, buffers, wanted, term)
        copied, part_bytes = loaded.copied, self.spec.part_bytes
        loaded_bytes = copied.blocks * len(parts) * part_bytes
        seconds = self._context.clock.precise_s() - started_s
        self._context.called(
            "loads",
            self.spec,
            copied.reason,
            loaded_blocks=copied.blocks,
            loaded_bytes=loaded_bytes,
            load_seconds=seconds,
            verify_failures=copied.reason == "verify_failed",
        )
        self._context.counters.add(remote_loaded_bytes=loaded.far_blocks * part_bytes)
        return LoadResult(copied.blocks, copied.reason, loaded_bytes, seconds)

    def store(
        self,
        chain: bytes,
        source: Layout | Sequence[Layout],
        parent: Parent | bytes = ROOT,
        parts: int | range | None = None,
        timeout_ms: int | None = None,
        share: Share | None = None,
    ) -> StoreResult:
        """Store those blocks of a chain that nobody has; block 0 of `source` is chain block 0.

        parent: what chain[0] follows: ROOT, a key, or UNKNOWN; entry = "root" takes ROOT only. parts: one, or a range
        of neighbours with one source each; all of the namespace by default. timeout_ms: of reserving and copying; as
        long as the Master gives by default. share: for KV that several ranks hold alike; what this rank writes of a
        store that all of them make. Raises KeyLengthMismatch, PartOutOfRange; ValueError for a parent that the
        namespace does not take, for shares of several parts and, unless stores are off, for sources that do not fit.
        """
        started_s = self._context.clock.precise_s()
        blocks = self._blocks(chain, 0)
        if isinstance(parent, bytes) and len(parent) != self.spec.key_bytes:
            raise KeyLengthMismatch(f"a parent of {len(parent)} bytes, keys have {self.spec.key_bytes}")
        if parent is not ROOT and self.spec.entry == "root":
            raise ValueError('entry = "root": chains are stored from the root on')
        if share is not None and share.count > 1 and self.spec.parts > 1:
            raise ValueError(f"{share.count} shares, but the namespace has {self.spec.parts} parts")
        if not blocks:
            return StoreResult()
        if self._context.off(BYPASS_STORES):
            self._context.called("stores", self.spec, bypass.REASON)
            return StoreResult(reason=bypass.REASON)
        wanted = range(self.spec.parts) if parts is None else parts
        numbers, buffers = self._bind(wanted, source, blocks, writable=False)
        result = store(self._context, self._calls, chain, parent, numbers, buffers, timeout_ms, share)
        result = replace(result, seconds=self._context.clock.precise_s() - started_s)
        self._context.called(
            "stores",
            self.spec,
            result.reason,
            stored_blocks=result.stored_blocks,
            stored_bytes=result.bytes,
            store_seconds=result.seconds,
            existing_blocks=result.existing_blocks,
        )
        return result

    def remove(self, chain: bytes, skip: int = 0, timeout_ms: int | None = None) -> Removed:
        """Hide the blocks of a chain behind the first `skip`. Raises as lookup."""
        if not self._blocks(chain, skip):
            return Removed(0)
        request = pb.RemoveRequest(namespace_id=self.id, chain=chain, skip_blocks=skip)
        deadline_ms = self._deadline_ms(self._context.clock.now_ms(), timeout_ms)
        try:
            reply = self._calls.ask(self._context.master.pool.Remove, request, deadline_ms, again=True)
        except KVPoolError as error:
            return Removed(0, error.reason.lower())
        return Removed(reply.removed_blocks, nodes_away=tuple(reply.nodes_away))

    def purge(self, timeout_ms: int | None = None) -> Removed:
        """Hide all blocks of the namespace, and end what is being written to it."""
        request = pb.PurgeRequest(namespace_id=self.id)
        deadline_ms = self._deadline_ms(self._context.clock.now_ms(), timeout_ms)
        try:
            reply = self._calls.ask(self._context.master.pool.Purge, request, deadline_ms, again=True)
        except KVPoolError as error:
            return Removed(0, error.reason.lower())
        return Removed(reply.purged_blocks)

    def _deadline_ms(self, started_ms: int, timeout_ms: int | None) -> int:
        return started_ms + (self._context.timeout_ms if timeout_ms is None else timeout_ms)

    def _blocks(self, chain: bytes, skip: int) -> int:
        """How many blocks follow the first `skip` of a chain of whole keys. Raises as lookup."""
        blocks, rest = divmod(len(chain), self.spec.key_bytes)
        if rest:
            raise KeyLengthMismatch(f"a chain of {len(chain)} bytes, keys have {self.spec.key_bytes}")
        if not 0 <= skip <= blocks:
            raise ValueError(f"skip = {skip}: the chain has {blocks} blocks")
        return blocks - skip

    def _bind(
        self, part: int | range, layouts: Layout | Sequence[Layout], blocks: int, *, writable: bool
    ) -> tuple[range, list[Buffer]]:
        """The parts and their buffers. Raises PartOutOfRange, ValueError."""
        parts = range(part, part + 1) if isinstance(part, int) else part
        if not parts or parts.step != 1 or parts.start < 0 or parts.stop > self.spec.parts:
            raise PartOutOfRange(f"parts {parts}: neighbours within 0 .. {self.spec.parts - 1}")
        several = list(layouts) if isinstance(layouts, Sequence) else [layouts]
        if len(several) != len(parts):
            raise ValueError(f"{len(several)} layouts for {len(parts)} parts")
        device = self._context.lanes.device
        buffers = [device.bind(layout, self.spec.part_bytes, writable=writable) for layout in several]
        if any(buffer.blocks < blocks for buffer in buffers):
            raise ValueError(f"layouts of {[buffer.blocks for buffer in buffers]} blocks: {blocks} are needed")
        return parts, buffers
