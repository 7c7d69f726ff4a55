"""Who may make which call: certificate, token, role and tenant, at every call.

    role     may
    worker   kvpool.v1.Pool, in namespaces of its tenants
    node     kvpool.v1.Nodes
    admin    everything

Rules
  - In plain text everybody may do all: that was asked for. Without a tokens file so may every peer with a certificate.
  - A namespace belongs to the tenant of its spec. What names a namespace, lease or reservation of another tenant is
    Forbidden; a Release passes over them as over unknown ids. What names none that is known goes on, to be told so.
  - Each refusal is counted by its reason, and logged once a minute for each peer and reason, of REFUSALS_MAX at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

from kvpool_master.clock import Clock
from kvpool_master.logs import Log
from kvpool_master.tokens import Token, Tokens
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import Forbidden, KVPoolError, Unauthenticated

REFUSALS_MAX: Final = 1_024
"""Peers and reasons of which it is remembered when they were logged."""
LOG_AGAIN_MS: Final = 60_000

SERVICES: Final = {
    method.name: service.name for service in pb.DESCRIPTOR.services_by_name.values() for method in service.methods
}
_BY_NAMESPACE: Final = frozenset({"Lookup", "Peek", "Reserve", "Remove", "Purge"})
_BY_GRANT: Final = {"Renew": "lease_id", "Commit": "reservation_id", "Abort": "reservation_id"}
_SERVICE_OF_ROLE: Final = {"worker": "Pool", "node": "Nodes"}


@dataclass(frozen=True, slots=True)
class Refusal:
    """reason: for the metric. text: for the peer and the log."""

    reason: str
    text: str


class PeerCertificates(Protocol):
    """Judges certificates; see certificates.py."""

    def refusal(self, pem: bytes) -> Refusal | None:
        """Why a peer with this certificate may not call; None: it may."""
        ...


class Auth:
    """Admits calls, or refuses them. certificates None: plain text. tokens None: a certificate is enough.

    tenant_of: of a namespace id; namespace_of: of a lease or reservation id; None: unknown.
    """

    def __init__(
        self,
        certificates: PeerCertificates | None,
        tokens: Tokens | None,
        tenant_of: Callable[[bytes], str | None],
        namespace_of: Callable[[bytes], bytes | None],
        clock: Clock,
        log: Log,
    ) -> None:
        self.refused: dict[str, int] = {}
        """Calls refused so far, by reason."""
        self._certificates = certificates
        self._tokens = tokens
        self._tenant_of = tenant_of
        self._namespace_of = namespace_of
        self._clock = clock
        self._log = log
        self._logged: dict[tuple[str, str], int] = {}

    def admit(self, context: Any, method: str, request: Any = None) -> None:
        """Return if the caller may; request: of a unary method. Raises Unauthenticated, Forbidden."""
        if self._certificates is not None:
            refusal = self._certificates.refusal(_certificate(context))
            if refusal is not None:
                self._refuse(context, _name(context), method, refusal, Unauthenticated)
        if self._tokens is not None:
            token = self._token(context, method)
            if token.role != "admin":
                self._check_role(context, token, method, request)

    def _token(self, context: Any, method: str) -> Token:
        assert self._tokens is not None
        presented = _presented(context)
        if not presented:
            self._refuse(context, _name(context), method, Refusal("no_token", "no token"), Unauthenticated)
        token = self._tokens.find(presented)
        if token is None:
            refusal = Refusal("unknown_token", "the token is not known here")
            self._refuse(context, _name(context), method, refusal, Unauthenticated)
        if token.expires_s is not None and self._clock.wall_s() >= token.expires_s:
            refusal = Refusal("expired_token", f"the token {token.name} has expired")
            self._refuse(context, token.name, method, refusal, Unauthenticated)
        return token

    def _check_role(self, context: Any, token: Token, method: str, request: Any) -> None:
        service = SERVICES[method]
        if _SERVICE_OF_ROLE[token.role] != service:
            text = f"{service}.{method} is not for the role {token.role} of {token.name}"
            self._refuse(context, token.name, method, Refusal("role", text), Forbidden)
        if service == "Pool":
            if method == "Release":
                _leave_out(request.lease_ids, lambda ident: self._foreign(token, self._namespace_of(ident)) != "")
            elif foreign := self._foreign_tenant(token, method, request):
                text = f"{token.name} is not of the tenant {foreign!r}"
                self._refuse(context, token.name, method, Refusal("tenant", text), Forbidden)

    def _foreign_tenant(self, token: Token, method: str, request: Any) -> str:
        """The tenant that a request is about, if it is not one of the token's; else empty."""
        if method == "OpenNamespace":
            tenant: str = request.spec.tenant
            return "" if tenant in token.tenants else tenant or "(none)"
        if method in _BY_NAMESPACE:
            return self._foreign(token, request.namespace_id)
        if method in _BY_GRANT:
            return self._foreign(token, self._namespace_of(getattr(request, _BY_GRANT[method])))
        return ""

    def _foreign(self, token: Token, namespace: bytes | None) -> str:
        tenant = None if namespace is None else self._tenant_of(namespace)
        return "" if tenant is None or tenant in token.tenants else tenant

    def _refuse(self, context: Any, name: str, method: str, refusal: Refusal, error: type[KVPoolError]) -> NoReturn:
        """Count, log and raise a refusal."""
        self.refused[refusal.reason] = self.refused.get(refusal.reason, 0) + 1
        peer = _host(context)
        now_ms = self._clock.now_ms()
        last_ms = self._logged.pop((name or peer, refusal.reason), None)
        if last_ms is None or now_ms - last_ms >= LOG_AGAIN_MS:
            last_ms = now_ms
            self._log.warning(
                "call_refused", method=method, reason=refusal.reason, who=name, peer=peer, text=refusal.text
            )
        if len(self._logged) >= REFUSALS_MAX:
            del self._logged[next(iter(self._logged))]
        self._logged[name or peer, refusal.reason] = last_ms
        raise error(refusal.text)


def _certificate(context: Any) -> bytes:
    """The peer's, PEM; gRPC lets nobody in without."""
    return context.auth_context()["x509_pem_cert"][0]


def _name(context: Any) -> str:
    """The common name of the peer's certificate; empty in plain text."""
    names = context.auth_context().get("x509_common_name", [b""])
    return names[0].decode(errors="replace")


def _host(context: Any) -> str:
    """Where the call comes from, without the port, which is another one each time."""
    return context.peer().rpartition(":")[0]


def _presented(context: Any) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization" and isinstance(value, str) and value.startswith("Bearer "):
            return value.removeprefix("Bearer ")
    return ""


def _leave_out(ids: Any, is_foreign: Callable[[bytes], bool]) -> None:
    """Take the foreign ids out of a repeated field."""
    kept = [ident for ident in ids if not is_foreign(ident)]
    if len(kept) < len(ids):
        ids[:] = kept
