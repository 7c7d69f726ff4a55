"""Blocks from and to another node's slots, through its data port: the SDK's engine for all that is not mapped here.

Rules
  - What is read is right only if the headers that the port sends before and after name the blocks that were asked
    for, and the bytes that arrived have the checksum that the headers carry. They go straight into the caller's
    memory; where that is not host memory, through memory of at most a piece for each connection.
  - What is written is written by the node client there, which checks the checksum that was made here, and says when
    it is committed. A call that ends without that word is not confirmed.
  - A call's pieces are shared by several connections, one thread each, the caller's among them; a thread that has not
    begun when there is nothing left to do never begins.
  - A connection that was kept since an earlier call may be dead: a question that it did not answer at all is asked
    once more, on a fresh one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Final

from kvpool_client.clock import Clock
from kvpool_client.devices.base import Device
from kvpool_client.peer.call import Call, Means
from kvpool_client.peer.copies import PeerCopy
from kvpool_client.peer.pool import Connections, Wrap
from kvpool_client.transfer import SAMPLE_EVERY
from kvpool_client.transfer_engine import Copied, Progress, Term, Verify, Written

THREADS_MAX: Final = 32
"""Threads beside those of callers, of all calls at once."""


class PeerEngine:
    """See TransferEngine; all copies of a call are of one address. Reasons beyond LocalEngine's: those of wire.py.

    connections: that a call uses at most. piece_bytes: that are asked for at a time. io_timeout_ms: longest time
    without progress. wrap: as for Connections.
    """

    def __init__(
        self,
        device: Device,
        *,
        verify: Verify,
        connections: int,
        piece_bytes: int,
        connect_timeout_ms: int,
        io_timeout_ms: int,
        wrap: Wrap | None = None,
        clock: Clock,
    ) -> None:
        self._device = device
        self._means = Means(
            connections=Connections(connect_timeout_ms, io_timeout_ms, wrap, clock),
            clock=clock,
            step={"full": 1, "sampled": SAMPLE_EVERY, "off": 0}[verify],
            lanes=connections,
            piece_bytes=piece_bytes,
        )
        self._threads = ThreadPoolExecutor(THREADS_MAX, "kvpool-peer")

    def close(self) -> None:
        """End connections and threads. Calls under way get errors; later ones are misses."""
        self._means.connections.close()
        self._threads.shutdown(wait=False)

    def read(self, copies: Sequence[PeerCopy], term: Term) -> list[Copied]:
        """See TransferEngine."""
        call = Call(self._means, copies, term)
        self._run(call, call.read)
        self._device.publish()
        return [Copied(blocks, reason) for blocks, reason in call.turns.totals()]

    def write(self, copies: Sequence[PeerCopy], term: Term, progress: Progress) -> Written:
        """See TransferEngine."""
        self._device.wait_sources()
        call = Call(self._means, copies, term, progress)
        self._run(call, call.write)
        totals = call.turns.totals()
        reason = next((reason for _, reason in totals if reason), call.stopped)
        return Written([blocks for blocks, _ in totals], reason, call.confirmed)

    def _run(self, call: Call, lane: Callable[[], None]) -> None:
        """The call's pieces, in this thread and in those that it gets. Raises what one of them raised."""
        others: list[Future[None]] = []
        try:
            for _ in range(call.lanes - 1):
                with suppress(RuntimeError):  # closed: this one does it all
                    others.append(self._threads.submit(lane))
            lane()
        finally:
            call.turns.stop()
            begun = [other for other in others if not other.cancel()]
            wait(begun)
        for other in begun:
            other.result()
