"""Transfers of mooncake with an end to waiting: memory that is taken until a transfer is over, its caller gone or not.

Rules
  - A transfer cannot be ended, and goes on writing after mooncake's own calls have given it up. So bytes come into
    memory of a lane, and a lane whose caller left is not lent again before all that it has under way is over.
  - mooncake's calls know no deadline of ours: a thread makes them, its caller waits until the term ends.
  - Bounded: LANES_MAX lanes, each with one thread at most. A peer that holds a lane whose caller left is busy.
  - A peer is opened only after it answered a probe: opening one that is silent holds a lock inside mooncake that
    stops the transfers from all others for a minute.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final

import numpy as np

from kvpool_client.devices.base import Bytes
from kvpool_client.engines.mooncake_package import COMPLETED, FAILED, Transfers
from kvpool_client.engines.remote_slots import RemoteFile, Transfer
from kvpool_client.transfer_engine import Term
from kvpool_proto.errors import PeerBusy, PeerUnreachable

LANES_MAX: Final = 4
FLYING_MAX: Final = 256
"""Transfers of one lane that mooncake knows at a time; it queues 1,024 for a peer."""
POLL_S: Final = 0.0001


class TimeOver(Exception):
    """The term has ended."""


class Peer:
    """Another node's mooncake engine. files: by base, as far as they are known."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.opened = False
        self.files: dict[int, RemoteFile] = {}
        self.lanes_left = 0


class Lane:
    """Memory, and a thread that fills it."""

    def __init__(self, transfers: Transfers, registered: bool) -> None:
        self._memory = np.empty(0, dtype=np.uint8)
        self._transfers = transfers
        self._registered = registered

    def memory_of(self, size_bytes: int) -> Bytes:
        """The lane's first size_bytes, uint8, kept until more are asked for. Raises PeerBusy if it cannot have them."""
        if len(self._memory) < size_bytes:
            if self._registered and len(self._memory):
                self._transfers.unregister_memory(self._memory.ctypes.data)
            self._memory = np.empty(0, dtype=np.uint8)
            memory = np.empty(size_bytes, dtype=np.uint8)
            if self._registered and self._transfers.register_memory(memory.ctypes.data, size_bytes):
                raise PeerBusy(f"mooncake cannot register {size_bytes} bytes")
            self._memory = memory
        return self._memory[:size_bytes]

    def carry(self, peer: Peer, wanted: Sequence[Transfer]) -> bool:
        """Read all of it, however long that takes; were all good? Returns when nothing is under way."""
        if not peer.opened and self._transfers.send_probe(peer.server):
            return False
        coming = iter(wanted)
        flying: list[int] = []
        good = True
        while True:
            for transfer in islice(coming, FLYING_MAX - len(flying) if good else 0):
                batch = self._transfers.batch_transfer_async_read(
                    peer.server, [transfer.local], [transfer.remote], [transfer.size_bytes]
                )
                if not batch:
                    good = False
                    break
                flying.append(batch)
            if not flying:
                peer.opened = good
                return good
            states = [self._transfers.transfer_check_status(batch) for batch in flying]
            good = good and FAILED not in states
            flying = [batch for batch, state in zip(flying, states, strict=True) if state not in (COMPLETED, FAILED)]
            time.sleep(POLL_S)


class Loan:
    """A lane, lent to a caller who wants something of one peer until a term ends."""

    def __init__(self, lanes: Lanes, lane: Lane, peer: Peer, term: Term) -> None:
        self.lane = lane
        self.peer = peer
        self.left = False
        """The caller went while something was under way. Written under the lock of `lanes`."""
        self._lanes = lanes
        self._term = term

    def fetch(self, wanted: Sequence[Transfer]) -> None:
        """Read all of it into the lane's memory. Raises PeerUnreachable where that fails, TimeOver."""
        over = threading.Event()
        good = threading.Event()

        def run() -> None:
            try:
                if self.lane.carry(self.peer, wanted):
                    good.set()
            finally:
                self._lanes.end(self, over)

        threading.Thread(target=run, name="kvpool-mooncake", daemon=True).start()
        if not over.wait(max(0.0, self._term.left_s())) and self._lanes.leave(self, over):
            raise TimeOver
        if not good.is_set():
            raise PeerUnreachable(f"mooncake cannot read from {self.peer.server}")


class Lanes:
    """The lanes of this process."""

    def __init__(self, transfers: Transfers, *, registered: bool) -> None:
        self._free: queue.LifoQueue[Lane] = queue.LifoQueue()
        for _ in range(LANES_MAX):
            self._free.put(Lane(transfers, registered))
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, peer: Peer, term: Term) -> Generator[Loan, None, None]:
        """A lane until the end of the block and of all that was asked for in it. Raises PeerBusy, at once."""
        if peer.lanes_left:
            raise PeerBusy(f"{peer.server} has not finished what a former caller wanted")
        try:
            lane = self._free.get_nowait()
        except queue.Empty:
            raise PeerBusy("every lane is taken") from None
        loan = Loan(self, lane, peer, term)
        try:
            yield loan
        finally:
            if not loan.left:
                self._free.put(lane)

    def leave(self, loan: Loan, over: threading.Event) -> bool:
        """The caller goes unless its batch is over by now; did it?"""
        with self._lock:
            loan.left = not over.is_set()
            loan.peer.lanes_left += loan.left
            return loan.left

    def end(self, loan: Loan, over: threading.Event) -> None:
        """A batch is over."""
        with self._lock:
            over.set()
            if not loan.left:
                return
            loan.peer.lanes_left -= 1
        self._free.put(loan.lane)
