"""Blocks from another node's data port as they are, with their headers: for copies that the node client makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kvpool_client.clock import Clock
from kvpool_client.headers import SLOT_HEADER, Array
from kvpool_client.peer.connection import Hashing
from kvpool_client.peer.copies import Grant
from kvpool_client.peer.judging import same
from kvpool_client.peer.pool import Connections, Wrap
from kvpool_client.peer.wire import PIECE_BLOCKS_MAX
from kvpool_proto.errors import PeerUnreachable

PULL_BYTES: Final = 8 << 20
"""Asked for at a time, unless a single block has more."""
PULL_S: Final = 60.0
"""The longest time for that, though bytes may move."""


class PeerPuller:
    """See copying.Puller. Arguments as for Connections."""

    def __init__(self, *, connect_timeout_ms: int, io_timeout_ms: int, wrap: Wrap | None = None, clock: Clock) -> None:
        self._connections = Connections(connect_timeout_ms, io_timeout_ms, wrap, clock)
        self._now_s = clock.precise_s

    def close(self) -> None:
        """End what is under way, which raises PeerUnreachable."""
        self._connections.close()

    def pull(self, grant: Grant, at: int, into: Sequence[memoryview]) -> tuple[Array, str]:
        """See copying.Puller. Raises PeerUnreachable, PeerBusy, Unauthenticated, ProtocolError."""
        part_bytes = len(into[0])
        step = max(1, min(PULL_BYTES // part_bytes, PIECE_BLOCKS_MAX))
        found = [np.empty(0, dtype=SLOT_HEADER)]
        for start in range(0, len(into), step):
            some = into[start : start + step]
            try:
                with self._connections.use(grant.address, self._now_s() + PULL_S) as connection:
                    connection.ask_read(grant, at + start, len(some), part_bytes)
                    arrived = connection.take_read(len(some), part_bytes, some, Hashing(0))
            except (OSError, EOFError) as error:
                raise PeerUnreachable(f"data port {grant.address}: {error}") from error
            stands = same(arrived.before, arrived.after)
            good = len(stands) if stands.all() else int(np.argmin(stands))
            found.append(arrived.before[:good])
            if good < len(some):
                reason = (arrived.reason or "protocol") if good == len(stands) else "stale_stamp"
                return np.concatenate(found), reason
        return np.concatenate(found), ""
