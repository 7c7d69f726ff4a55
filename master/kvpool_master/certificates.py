"""The Master's certificate, and what it makes of the certificates of those who call.

gRPC takes only certificates of our CA, in time, at the handshake. What it cannot do is done here at every call: a
certificate that was revoked since, or that ran out on a connection that lives long.

Rules
  - Without `tls_crl` only time is checked. With it, the list of the certificate's own issuer must be there, signed by
    it, and in time; else nobody of that issuer is let in.
  - Certificates are read once and remembered, at most CERTIFICATES_MAX; a new list forgets them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, Final

import grpc
from cryptography import x509

from kvpool_master.auth import Refusal
from kvpool_master.clock import Clock
from kvpool_proto.security import SecurityError
from kvpool_proto.tls import CrlError, Loaded, Tls

CERTIFICATES_MAX: Final = 8_192
_END: Final = b"-----END X509 CRL-----"


@dataclass(frozen=True, slots=True)
class _Known:
    """A certificate: when it begins and ends, when its revocation list ends, seconds since 1970; or why not at all."""

    begins_s: float = -inf
    ends_s: float = inf
    list_ends_s: float = inf
    refusal: Refusal | None = None


class Certificates:
    """Those of a Master that serves TLS. Raises SecurityError if the revocation list cannot be used."""

    def __init__(self, tls: Tls, clock: Clock) -> None:
        self._tls = tls
        self._clock = clock
        self._known: dict[bytes, _Known] = {}
        self._given_out = 0
        loaded = tls.current()
        self._number: int = loaded.number
        self._lists = _lists(loaded)
        self._broken = ""
        """Why the present lists cannot be used."""

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC's port: the files of each moment."""
        fetch: Any = self._fetch  # may answer None, which its type does not say
        return grpc.dynamic_ssl_server_credentials(
            self._configuration(self._tls.current()), fetch, require_client_authentication=True
        )

    def refusal(self, pem: bytes) -> Refusal | None:
        """Why a peer with this certificate, which gRPC has verified, may not call; None: it may."""
        try:
            self._take(self._tls.current())
        except CrlError as error:
            return Refusal("crl", str(error))
        if self._broken:
            return Refusal("crl", self._broken)
        known = self._known.get(pem)
        if known is None:
            if len(self._known) >= CERTIFICATES_MAX:
                self._known.clear()
            known = self._known[pem] = self._read(pem)
        now_s = self._clock.wall_s()
        if known.refusal is not None:
            return known.refusal
        if not known.begins_s <= now_s < known.ends_s:
            return Refusal("certificate_expired", "the certificate is not in its time")
        if now_s >= known.list_ends_s:
            return Refusal("crl", "tls_crl has run out: its nextUpdate has passed; put a new list in its place")
        return None

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """What gRPC asks before each handshake, on threads of its own; None: as before."""
        try:
            loaded = self._tls.current()
        except CrlError:
            return None  # every call is refused
        return None if loaded.number == self._given_out else self._configuration(loaded)

    def _configuration(self, loaded: Loaded) -> grpc.ServerCertificateConfiguration:
        self._given_out = loaded.number
        return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.cert)], loaded.ca)

    def _take(self, loaded: Loaded) -> None:
        """Read new revocation lists, and forget what was known under the former ones."""
        if loaded.number == self._number:
            return
        self._number = loaded.number
        self._known.clear()
        try:
            self._lists, self._broken = _lists(loaded), ""
        except SecurityError as error:
            self._broken = str(error)

    def _read(self, pem: bytes) -> _Known:
        try:
            certificate = x509.load_pem_x509_certificate(pem)
        except ValueError as error:
            return _Known(refusal=Refusal("certificate", f"the certificate cannot be read: {error}"))
        begins_s, ends_s = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
        if self._lists is None:
            return _Known(begins_s, ends_s)
        issuer, serial = certificate.issuer, certificate.serial_number
        revoked = self._lists.get(issuer)
        if revoked is None:
            return _Known(refusal=Refusal("crl", f"tls_crl has no list of the issuer {issuer.rfc4514_string()}"))
        if revoked.get_revoked_certificate_by_serial_number(serial) is not None:
            return _Known(refusal=Refusal("certificate_revoked", f"the certificate {serial:x} is revoked"))
        list_ends = revoked.next_update_utc
        return _Known(begins_s, ends_s, inf if list_ends is None else list_ends.timestamp())


def _lists(loaded: Loaded) -> dict[x509.Name, x509.CertificateRevocationList] | None:
    """The revocation lists by issuer; None: there is to be none. Raises SecurityError."""
    if loaded.crl is None:
        return None
    authorities = {each.subject: each.public_key() for each in x509.load_pem_x509_certificates(loaded.ca)}
    found: dict[x509.Name, x509.CertificateRevocationList] = {}
    for text in loaded.crl.split(_END)[:-1]:
        try:
            read = x509.load_pem_x509_crl(text + _END)
            key: Any = authorities.get(read.issuer)
            signed = key is not None and read.is_signature_valid(key)
        except (ValueError, TypeError) as error:
            raise SecurityError(f"tls_crl: a revocation list cannot be read: {error}") from error
        if not signed:
            raise SecurityError(f"tls_crl: the list of {read.issuer.rfc4514_string()} is not signed by a CA of tls_ca")
        found[read.issuer] = read
    return found
