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

import logging
import os
import sys
from functools import cache
from types import TracebackType
from typing import Final

from kvpool_client import bypass
from kvpool_client.answers import Gone, Hit, LoadResult, Peeked, Removed, StoreResult
from kvpool_client.background import Background
from kvpool_client.clock import SYSTEM, Clock
from kvpool_client.context import Context, LeaseReturns, NamespaceCalls, NodeReports
from kvpool_client.devices.base import Device
from kvpool_client.devices.cpu import CpuDevice
from kvpool_client.lanes import Lanes
from kvpool_client.local_socket import LocalClient
from kvpool_client.master_client import MasterClient
from kvpool_client.namespace import Namespace
from kvpool_client.node_link import Link, NodeLink, NoNode
from kvpool_client.peer.copies import PeerCopy
from kvpool_client.peer.engine import PeerEngine
from kvpool_client.peers import Peers
from kvpool_client.stats import Counters, Stats
from kvpool_client.store import ROOT, UNKNOWN, Parent, Share
from kvpool_client.transfer import PIECE_BYTES, LocalEngine
from kvpool_client.transfer_engine import TransferEngine, Verify
from kvpool_proto.errors import BadNamespaceSpec, KVPoolError, NamespaceDiffers, SlotTooLarge
from kvpool_proto.namespace import NamespaceSpec
from kvpool_proto.security import PLAINTEXT_WARNING, Security
from kvpool_proto.tls import tls_of

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
    "Share",
    "Stats",
    "StoreResult",
]

NODE_TIMEOUT_S_MAX: Final = 0.5
PEER_CONNECT_MS: Final = 500
PEER_IO_MS: Final = 1_000
"""Without progress for so long, a peer is given up."""
PEER_PIECE_BYTES: Final = 32 << 20
"""Asked for in one go: hashed while it is in a cache."""
_LOG = logging.getLogger("kvpool")


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
        peer_connections: int = 2,
        peer_engine: TransferEngine[PeerCopy] | None = None,
        name: str = "",
        clock: Clock = SYSTEM,
        security: Security | None = None,
    ) -> KVPool:
        """A pool whose Master is at `master` ("host:port") and whose node client listens on `node_socket`.

        Neither needs to be there: until they are, everything is a miss. An empty node_socket: this host gives no DRAM,
        all blocks lie on other nodes. timeout_ms: of a call to the Master that names no other. verify: see
        transfer_engine.py. device: what moves the engine's bytes, host memory by default. copy_threads: threads that
        share the copying of a piece. peer_connections: to each other node's data port; peer_engine: what moves blocks
        of other nodes instead. name: for the node client's logs. KVPOOL_BYPASS in the environment: see bypass.py.
        security: TLS and token, or plain text; what the environment says by default, see kvpool_proto/security.py.
        Raises ValueError; SecurityError, which is one, where neither is told.
        """
        if min(timeout_ms, copy_threads, piece_bytes, peer_connections) < 1:
            raise ValueError(
                f"timeout_ms = {timeout_ms}, copy_threads = {copy_threads}, piece_bytes = {piece_bytes}, "
                f"peer_connections = {peer_connections}: >= 1"
            )
        if verify not in ("full", "sampled", "off"):
            raise ValueError(f"verify = {verify!r}: full, sampled or off")
        switched_off = bypass.from_environment(os.environ)
        security = Security.from_environment(os.environ) if security is None else security
        tls = tls_of(security, _LOG.error, clock.now_ms)
        if tls is None:
            _warn_once(PLAINTEXT_WARNING)
        client = MasterClient(master, clock, tls=tls)
        counters = Counters()
        background = Background(idle=lambda: link.report_use(counters.take_untold))
        link = _link(node_socket, timeout_ms, name, clock, background)
        device = device or CpuDevice()
        peer = peer_engine or PeerEngine(
            device,
            verify=verify,
            connections=peer_connections,
            piece_bytes=min(piece_bytes, PEER_PIECE_BYTES),
            connect_timeout_ms=PEER_CONNECT_MS,
            io_timeout_ms=PEER_IO_MS,
            wrap=tls.wrap_client if tls is not None and not security.data_plaintext else None,
            clock=clock,
        )
        here = LocalEngine(device, verify=verify, copy_threads=copy_threads, piece_bytes=piece_bytes)
        peers = Peers(clock, NodeReports(client, link, background, clock, timeout_ms).put)
        return cls(
            Context(
                master=client,
                link=link,
                lanes=Lanes(here, peer, peers),
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
        return context.counters.snapshot(
            master_breaks=context.master.breaks,
            node_breaks=context.link.breaks,
            peer_breaks=context.lanes.peers.breaks,
        )

    def flush(self, timeout_ms: int) -> bool:
        """Wait until releases and reports in the background are sent. False: not within the time."""
        return self._context.background.flush(timeout_ms / 1000)

    def close(self) -> None:
        """Send what is to be sent, within timeout_ms, and let go of Master, node client and segments."""
        context = self._context
        context.background.close(context.timeout_ms / 1000)
        context.link.report_use(context.counters.take_untold)
        context.lanes.close()
        context.master.close()
        context.link.close()

    def __enter__(self) -> KVPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _link(socket: str, timeout_ms: int, name: str, clock: Clock, background: Background) -> Link:
    """The way to the node client, and a first Hello on it, so that the mapping is warm when it is needed."""
    if not socket:
        return NoNode()
    client = LocalClient(socket, min(timeout_ms / 1000, NODE_TIMEOUT_S_MAX))
    name = name or f"{os.path.basename(sys.argv[0]) or 'python'}:{os.getpid()}"
    link = NodeLink(client, name, clock, background.submit)
    background.submit(link.attachment)
    return link


@cache
def _warn_once(text: str) -> None:
    """Once in the life of this process."""
    _LOG.warning("kvpool: %s", text)
