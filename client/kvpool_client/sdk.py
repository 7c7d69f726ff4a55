"""KVPool: what an engine process sees of the pool. lookup, load, store, release.

Rules
  - Nothing is raised for a miss, a full pool, wrong bytes, or a Master or node client that is away: the answer says
    why. Raised are a caller's own mistakes: a bad namespace spec, keys of the wrong length, buffers that do not fit.
  - Every call has a deadline. The times of leases and reservations count from before the request was sent.
  - Only the highest epoch seen is obeyed: answers of a former one are misses, stores under it stop; what it leased
    may be loaded until the lease ends.
  - Whatever is switched off (bypass.py) is a miss before anything is asked.
  - Thread safe. A store gives way to loads (gate.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from kvpool_client import bypass
from kvpool_client.answers import Gone, Hit, LoadResult, Peeked, Removed, StoreResult, gone_reason, short_reason
from kvpool_client.background import Background
from kvpool_client.bypass import BYPASS_LOADS, BYPASS_LOOKUPS, BYPASS_STORES
from kvpool_client.clock import SYSTEM, Clock
from kvpool_client.context import Context, LeaseReturns, NamespaceCalls
from kvpool_client.devices.base import Buffer, Device, Layout
from kvpool_client.devices.cpu import CpuDevice
from kvpool_client.load import load
from kvpool_client.local_socket import LocalClient
from kvpool_client.master_client import MasterClient
from kvpool_client.node_link import NodeLink
from kvpool_client.runs import extents_of
from kvpool_client.stats import Counters, Stats
from kvpool_client.store import ROOT, UNKNOWN, Parent, store
from kvpool_client.transfer import PIECE_BYTES, LocalEngine, Term, Verify
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import (
    BadNamespaceSpec,
    KeyLengthMismatch,
    KVPoolError,
    NamespaceDiffers,
    PartOutOfRange,
    SlotTooLarge,
)
from kvpool_proto.namespace import NamespaceSpec

__all__ = [
    "ROOT",
    "UNKNOWN",
    "Gone",
    "Hit",
    "KVPool",
    "LoadResult",
    "Namespace",
    "Parent",
    "Peeked",
    "Removed",
    "Stats",
    "StoreResult",
]

NODE_TIMEOUT_S_MAX = 0.5


class KVPool:
    """One engine process's access to the pool. Make it with connect(); a context manager."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @classmethod
    def connect(
        cls,
        master: str = "127.0.0.1:50051",
        node_socket: str = "/run/kvpool/node.sock",
        *,
        timeout_ms: int = 500,
        verify: Verify = "full",
        device: Device | None = None,
        copy_threads: int = 1,
        piece_bytes: int = PIECE_BYTES,
        name: str = "",
        clock: Clock = SYSTEM,
    ) -> KVPool:
        """A pool whose Master is at `master` ("host:port") and whose node client listens on `node_socket`.

        Neither needs to be there: until they are, everything is a miss. timeout_ms: of a call to the Master that
        names no other. verify: see transfer.py. device: what moves the engine's bytes, host memory by default.
        copy_threads: threads that share the copying of a piece. name: for the node client's logs. KVPOOL_BYPASS in
        the environment: see bypass.py. Raises ValueError.
        """
        if timeout_ms < 1 or copy_threads < 1 or piece_bytes < 1:
            raise ValueError(
                f"timeout_ms = {timeout_ms}, copy_threads = {copy_threads}, piece_bytes = {piece_bytes}: >= 1"
            )
        if verify not in ("full", "sampled", "off"):
            raise ValueError(f"verify = {verify!r}: full, sampled or off")
        switched_off = bypass.from_environment(os.environ)
        client = MasterClient(master, clock)
        node = LocalClient(node_socket, min(timeout_ms / 1000, NODE_TIMEOUT_S_MAX))
        counters = Counters()
        background = Background(idle=lambda: link.report_use(counters.take_untold))
        name = name or f"{os.path.basename(sys.argv[0]) or 'python'}:{os.getpid()}"
        link = NodeLink(node, name, clock, background.submit)
        background.submit(link.attachment)  # so that the mapping is warm when it is needed
        engine = LocalEngine(device or CpuDevice(), verify=verify, copy_threads=copy_threads, piece_bytes=piece_bytes)
        return cls(
            Context(
                master=client,
                link=link,
                engine=engine,
                background=background,
                returns=LeaseReturns(client, background, clock, timeout_ms),
                clock=clock,
                timeout_ms=timeout_ms,
                counters=counters,
                bypass=switched_off,
            )
        )

    def namespace(self, spec: NamespaceSpec) -> Namespace:
        """The namespace of this spec, registered if need be; when the Master is away, at its first use.

        Raises BadNamespaceSpec, NamespaceDiffers, SlotTooLarge: the spec cannot be used.
        """
        spec.check()
        calls = NamespaceCalls(self._context, spec)
        try:
            calls.open(self._context.clock.now_ms() + self._context.timeout_ms)
        except (BadNamespaceSpec, NamespaceDiffers, SlotTooLarge):
            raise
        except KVPoolError:
            pass  # every call says why, and tries again
        return Namespace(self._context, calls)

    def stats(self) -> Stats:
        """What this pool has done so far."""
        context = self._context
        return context.counters.snapshot(master_breaks=context.master.breaks, node_breaks=context.link.breaks)

    def flush(self, timeout_ms: int) -> bool:
        """Wait until releases and reports in the background are sent. False: not within the time."""
        return self._context.background.flush(timeout_ms / 1000)

    def close(self) -> None:
        """Send what is to be sent, within timeout_ms, and let go of Master, node client and segments."""
        context = self._context
        context.background.close(context.timeout_ms / 1000)
        context.link.report_use(context.counters.take_untold)
        context.engine.close()
        context.master.close()
        context.link.close()

    def __enter__(self) -> KVPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


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
        request = pb.LookupRequest(namespace_id=self.id, chain=chain, skip_blocks=skip, lease_id=lease_id)
        try:
            reply = self._calls.ask(context.master.pool.Lookup, request, self._deadline_ms(started_ms, timeout_ms))
            extents = extents_of(reply.extents)
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
        copied = load(self._context, self.spec, hit, parts, buffers, wanted, term)
        loaded = copied.blocks * len(parts) * self.spec.part_bytes
        seconds = self._context.clock.precise_s() - started_s
        self._context.called(
            "loads",
            self.spec,
            copied.reason,
            loaded_blocks=copied.blocks,
            loaded_bytes=loaded,
            load_seconds=seconds,
            verify_failures=copied.reason == "verify_failed",
        )
        return LoadResult(copied.blocks, copied.reason, loaded, seconds)

    def store(
        self,
        chain: bytes,
        source: Layout | Sequence[Layout],
        parent: Parent | bytes = ROOT,
        parts: int | range | None = None,
        timeout_ms: int | None = None,
    ) -> StoreResult:
        """Store those blocks of a chain that nobody has; block 0 of `source` is chain block 0.

        parent: what chain[0] follows: ROOT, a key, or UNKNOWN; entry = "root" takes ROOT only. parts: one, or a range
        of neighbours with one source each; all of the namespace by default. timeout_ms: of reserving and copying; as
        long as the Master gives by default. Raises KeyLengthMismatch, PartOutOfRange; ValueError for a parent that
        the namespace does not take and, unless stores are off, for sources that do not fit.
        """
        started_s = self._context.clock.precise_s()
        blocks = self._blocks(chain, 0)
        if isinstance(parent, bytes) and len(parent) != self.spec.key_bytes:
            raise KeyLengthMismatch(f"a parent of {len(parent)} bytes, keys have {self.spec.key_bytes}")
        if parent is not ROOT and self.spec.entry == "root":
            raise ValueError('entry = "root": chains are stored from the root on')
        if not blocks:
            return StoreResult()
        if self._context.off(BYPASS_STORES):
            self._context.called("stores", self.spec, bypass.REASON)
            return StoreResult(reason=bypass.REASON)
        wanted = range(self.spec.parts) if parts is None else parts
        numbers, buffers = self._bind(wanted, source, blocks, writable=False)
        result = store(self._context, self._calls, chain, parent, numbers, buffers, timeout_ms)
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
        device = self._context.engine.device
        buffers = [device.bind(layout, self.spec.part_bytes, writable=writable) for layout in several]
        if any(buffer.blocks < blocks for buffer in buffers):
            raise ValueError(f"layouts of {[buffer.blocks for buffer in buffers]} blocks: {blocks} are needed")
        return parts, buffers
