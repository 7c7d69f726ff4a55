"""Callers of a Master that serves TLS: gRPC as it comes, with the files and the token that a test chooses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import grpc

from integration.master_client import TIMEOUT_S, refused
from integration.processes import MasterProcess
from kvpool_proto import pool_pb2 as pb
from kvpool_proto import pool_pb2_grpc as pb_grpc
from kvpool_proto.errors import KVPoolError
from unit.tls_world import Pki

TOKENS = {
    "admin": 'role = "admin"',
    "node": 'role = "node"',
    "worker-a": 'role = "worker"\ntenants = ["a"]',
    "worker-b": 'role = "worker"\ntenants = ["b"]',
    "expired": 'role = "admin"\nexpires = 2020-01-01T00:00:00Z',
}


def put_tokens(pki: Pki, names: tuple[str, ...] = tuple(TOKENS)) -> str:
    """A tokens file in which the name is the token; its path."""
    tables = [
        f'[[token]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n{TOKENS[name]}\n'
        for name in names
    ]
    return pki.put("tokens.toml", "".join(tables).encode(), 0o600)


class Caller:
    """Stubs to a Master. certificate: its name at `pki`; None: none. ca: whom to trust, the Master's by default."""

    def __init__(
        self, master: MasterProcess, pki: Pki, certificate: str | None, token: str = "", ca: bytes | None = None
    ) -> None:
        chain = None if certificate is None else (pki.folder / f"{certificate}.pem").read_bytes()
        key = None if certificate is None else (pki.folder / f"{certificate}.key").read_bytes()
        roots = ca or (pki.folder / "ca.pem").read_bytes()
        credentials = grpc.ssl_channel_credentials(roots, key, chain)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.channel = grpc.secure_channel(
            master.address, credentials, options=(("grpc.use_local_subchannel_pool", 1),)
        )
        self.pool: Any = pb_grpc.PoolStub(self.channel)
        self.nodes: Any = pb_grpc.NodesStub(self.channel)
        self.admin: Any = pb_grpc.AdminStub(self.channel)

    def call(self, method: Callable[..., Any], request: Any) -> Any:
        return method(request, timeout=TIMEOUT_S, metadata=self._metadata)

    def refused(self, method: Callable[..., Any], request: Any) -> KVPoolError:
        return refused(lambda: self.call(method, request))

    def status(self) -> pb.StatusReply:
        return self.call(self.admin.Status, pb.StatusRequest())

    def status_refused(self) -> KVPoolError:
        return self.refused(self.admin.Status, pb.StatusRequest())

    def close(self) -> None:
        self.channel.close()
