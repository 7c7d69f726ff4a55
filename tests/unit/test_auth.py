"""Who may make which call: every role against every service, tenants, and what is counted and logged."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from kvpool_master.auth import LOG_AGAIN_MS, REFUSALS_MAX, SERVICES, Auth, Refusal
from kvpool_master.clock import Clock
from kvpool_master.logs import Log
from kvpool_master.tokens import Tokens
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import Forbidden, KVPoolError, Unauthenticated
from unit.test_auth_tokens import table

OURS, THEIRS, UNKNOWN = b"a" * 16, b"b" * 16, b"c" * 16
LEASE_OF_OURS, LEASE_OF_THEIRS, LEASE_UNKNOWN = b"1" * 16, b"2" * 16, b"3" * 16
FILE = (
    table("worker", "of-a", 'role = "worker"\ntenants = ["a"]')
    + table("node", "n", 'role = "node"')
    + table("admin", "boss")
    + table("old", "gone", 'role = "admin"\nexpires = 1970-01-01T00:01:40Z')
)


class Context:
    """A call's context: where it comes from and what it presents."""

    def __init__(self, token: str | None = None, peer: str = "ipv4:10.0.0.1:1234", name: str = "cn") -> None:
        self._metadata = [("user-agent", "x")] + ([("authorization", f"Bearer {token}")] if token else [])
        self._peer = peer
        self._name = name

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [b"pem of " + self._name.encode()], "x509_common_name": [self._name.encode()]}


class Judge:
    """Certificates that are all right but one."""

    def refusal(self, pem: bytes) -> Refusal | None:
        return Refusal("certificate_revoked", "the certificate 17 is revoked") if pem == b"pem of thief" else None


class World:
    """An Auth with tokens, a clock and a log."""

    def __init__(self, folder: Path) -> None:
        self.now_ms = 0
        self.clock = Clock(now_ms=lambda: self.now_ms, wall_s=lambda: 100.0)
        self.text = io.StringIO()
        path = folder / "tokens.toml"
        path.write_text(FILE)
        path.chmod(0o600)
        self.tokens = Tokens(str(path), self.clock, self.text.write)
        self.auth = self.make(self.tokens)

    def make(self, tokens: Tokens | None, judge: Judge | None = None) -> Auth:
        tenants = {OURS: "a", THEIRS: "b"}
        grants = {LEASE_OF_OURS: OURS, LEASE_OF_THEIRS: THEIRS}
        log = Log("debug", True, self.clock, self.text)
        return Auth(judge, tokens, tenants.get, grants.get, self.clock, log)

    def logged(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.getvalue().splitlines()]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def refused(auth: Auth, context: Any, method: str, request: Any = None) -> KVPoolError:
    with pytest.raises((Unauthenticated, Forbidden)) as caught:
        auth.admit(context, method, request)
    return caught.value


REQUESTS = {
    "OpenNamespace": lambda space, _: pb.OpenNamespaceRequest(
        spec=pb.NamespaceSpec(tenant="a" if space == OURS else "b")
    ),
    "Lookup": lambda space, _: pb.LookupRequest(namespace_id=space),
    "Peek": lambda space, _: pb.PeekRequest(namespace_id=space),
    "Reserve": lambda space, _: pb.ReserveRequest(namespace_id=space),
    "Remove": lambda space, _: pb.RemoveRequest(namespace_id=space),
    "Purge": lambda space, _: pb.PurgeRequest(namespace_id=space),
    "Renew": lambda _, grant: pb.RenewRequest(lease_id=grant),
    "Commit": lambda _, grant: pb.CommitRequest(reservation_id=grant),
    "Abort": lambda _, grant: pb.AbortRequest(reservation_id=grant),
    "Release": lambda _, grant: pb.ReleaseRequest(lease_ids=[grant]),
    "ReportNode": lambda *_: pb.ReportNodeRequest(node_id="n"),
}
"""Of the service Pool, by a namespace or a grant of it."""


def test_every_method_of_workers_is_thought_of() -> None:
    assert REQUESTS.keys() == {method for method, service in SERVICES.items() if service == "Pool"}


@pytest.mark.parametrize("method", sorted(SERVICES))
@pytest.mark.parametrize("role", ["worker", "node", "admin"])
def test_a_role_has_its_service(world: World, role: str, method: str) -> None:
    request = REQUESTS[method](OURS, LEASE_OF_OURS) if method in REQUESTS else None
    allowed = role == "admin" or SERVICES[method] == {"worker": "Pool", "node": "Nodes"}[role]
    if allowed:
        world.auth.admit(Context(role), method, request)
        assert world.auth.refused == {}
    else:
        assert isinstance(refused(world.auth, Context(role), method, request), Forbidden)
        assert world.auth.refused == {"role": 1}


@pytest.mark.parametrize("method", sorted(REQUESTS.keys() - {"Release", "ReportNode"}))
def test_what_is_of_another_tenant_is_forbidden(world: World, method: str) -> None:
    request = REQUESTS[method](THEIRS, LEASE_OF_THEIRS)
    error = refused(world.auth, Context("worker"), method, request)
    assert isinstance(error, Forbidden)
    assert "of-a is not of the tenant 'b'" in str(error)
    assert world.auth.refused == {"tenant": 1}
    world.auth.admit(Context("admin"), method, request)


@pytest.mark.parametrize("method", sorted(REQUESTS.keys() - {"OpenNamespace"}))
def test_what_nobody_knows_goes_on_to_be_told_so(world: World, method: str) -> None:
    world.auth.admit(Context("worker"), method, REQUESTS[method](UNKNOWN, LEASE_UNKNOWN))


def test_a_release_passes_over_foreign_leases(world: World) -> None:
    ids = [LEASE_OF_THEIRS, LEASE_OF_OURS, LEASE_UNKNOWN, LEASE_OF_THEIRS]
    request = pb.ReleaseRequest(lease_ids=ids)
    world.auth.admit(Context("worker"), "Release", request)
    assert list(request.lease_ids) == [LEASE_OF_OURS, LEASE_UNKNOWN]
    request = pb.ReleaseRequest(lease_ids=ids)
    world.auth.admit(Context("admin"), "Release", request)
    assert list(request.lease_ids) == ids


@pytest.mark.parametrize(
    ("token", "reason"), [(None, "no_token"), ("guess", "unknown_token"), ("old", "expired_token")]
)
def test_a_token_has_to_be_known_and_alive(world: World, token: str | None, reason: str) -> None:
    assert isinstance(refused(world.auth, Context(token), "Status"), Unauthenticated)
    assert world.auth.refused == {reason: 1}


def test_other_words_are_no_token(world: World) -> None:
    context: Any = Context()
    context._metadata = [("authorization", "Basic admin"), ("authorization-bin", b"Bearer admin")]
    refused(world.auth, context, "Status")
    assert world.auth.refused == {"no_token": 1}


def test_a_revoked_certificate_is_refused_whatever_token_comes_with_it(world: World) -> None:
    for tokens in (world.tokens, None):
        auth = world.make(tokens, Judge())
        assert isinstance(refused(auth, Context("admin", name="thief"), "Status"), Unauthenticated)
        assert auth.refused == {"certificate_revoked": 1}
        auth.admit(Context("admin"), "Status")


def test_without_tokens_and_certificates_all_may_do_all(world: World) -> None:
    auth = world.make(None)
    for method in SERVICES:
        auth.admit(object(), method)


def test_a_refusal_is_logged_once_a_minute_for_each_peer(world: World) -> None:
    for port in range(3):
        refused(world.auth, Context("guess", peer=f"ipv4:10.0.0.1:{port}", name=""), "Status")
    refused(world.auth, Context("guess", peer="ipv4:10.0.0.2:1", name=""), "Status")
    world.now_ms = LOG_AGAIN_MS
    refused(world.auth, Context("guess", peer="ipv4:10.0.0.1:9", name=""), "Status")
    assert [(line["peer"], line["reason"]) for line in world.logged()] == [
        ("ipv4:10.0.0.1", "unknown_token"),
        ("ipv4:10.0.0.2", "unknown_token"),
        ("ipv4:10.0.0.1", "unknown_token"),
    ]
    assert world.auth.refused == {"unknown_token": 5}
    assert "guess" not in world.text.getvalue()


def test_who_is_logged_is_remembered_within_bounds(world: World) -> None:
    for number in range(REFUSALS_MAX + 10):
        refused(world.auth, Context("guess", peer=f"ipv4:10.0.{number >> 8}.{number & 255}:1", name=""), "Status")
    assert len(world.auth._logged) == REFUSALS_MAX
