"""What we use of mooncake's package, and how it is started. Only the TCP links of 0.3.13 have been run.

Rules
  - UNAUTHENTICATED: whoever reaches an engine's ports may read all memory that it has registered, and write what is
    mapped writable. It listens on every address of the machine, whatever `host` says. Off unless asked for.
  - So over TCP nothing is registered but read-only mappings (the kernel refuses a stranger's write into them), and
    readers register nothing. Other links (RDMA, Ascend) need registered, writable memory on both sides.
  - Calls block for as long as the package likes, up to a minute with a peer that does not answer: mooncake.py.
  - An engine does not outlive a fork: in the child every transfer fails, after half a minute.
"""

from __future__ import annotations

import importlib
from typing import Final, Protocol, cast

from kvpool_client.start_error import StartError

PEER_TO_PEER: Final = "P2PHANDSHAKE"
"""Engines ask each other for what they have registered: no metadata server."""
TCP: Final = "tcp"

COMPLETED: Final = 1
FAILED: Final = -1


class Transfers(Protocol):
    """The package's TransferEngine, as far as it is used here. Thread safe; releases the GIL; 0 is success."""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str, /) -> int: ...

    def get_rpc_port(self) -> int: ...

    def register_memory(self, address: int, size_bytes: int, /) -> int: ...

    def unregister_memory(self, address: int, /) -> int: ...

    def send_probe(self, server: str, /) -> int: ...

    def batch_transfer_async_read(
        self, server: str, local: list[int], remote: list[int], sizes_bytes: list[int], /
    ) -> int:
        """A number for the batch; 0: refused."""
        ...

    def transfer_check_status(self, batch: int, /) -> int:
        """COMPLETED or FAILED, once: the number is void then. All else: under way. Says it of a batch's first only."""
        ...


def start(host: str, protocol: str) -> Transfers:
    """A running engine on ports of its own choice. host: a name or address of this machine that peers can reach.

    Raises StartError.
    """
    try:
        transfers = cast(Transfers, importlib.import_module("mooncake.engine").TransferEngine())
    except ImportError as error:
        raise StartError(
            f"mooncake: {error}; it needs the package's extra `mooncake` and the system's libibverbs1, librdmacm1, "
            "libnuma1, also without RDMA"
        ) from None
    if transfers.initialize(host, PEER_TO_PEER, protocol, ""):
        raise StartError(f"mooncake: no engine for protocol {protocol!r} on host {host!r}; its log says why")
    return transfers
