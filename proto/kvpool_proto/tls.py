"""TLS of both sides: the files of a Security, read, checked and read again when they are replaced.

Rules
  - Mutual, TLS 1.2 or newer. With a revocation list each side refuses the other's certificate if the list names it, and
    every certificate if the list has run out.
  - New files are taken whole or not at all: while they do not fit together, the former ones hold, and that is said
    once. A revocation list that cannot be read is different: nobody is let in until it can.
  - What was checked is what is used: each file is read once, and handed to OpenSSL as an open file in memory.
  - Only an encrypted key needs the package `cryptography`.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from kvpool_proto.security import Security, SecurityError, read_public, read_secret, read_word

LOOK_MS: Final = 1_000
"""Files are looked at no oftener."""

_Signature = tuple[tuple[int, ...] | None, ...]


def tls_of(security: Security, warn: Callable[[str], None], now_ms: Callable[[], int]) -> Tls | None:
    """Its files, loaded; None: plain text, as asked for. See Tls. Raises SecurityError."""
    security.check()
    return None if security.plaintext else Tls(security, warn, now_ms)


def of_data_port(tls: Tls | None) -> Tls | None:
    """What connections to data ports are wrapped with; None: they are plain."""
    return None if tls is None or tls.security.data_plaintext else tls


class CrlError(SecurityError):
    """The revocation list cannot be used: nobody is to be let in."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """One state of the files. number: rises with each. key: PEM, never encrypted. crl: None where none is told."""

    number: int
    server: ssl.SSLContext
    client: ssl.SSLContext
    ca: bytes
    cert: bytes
    key: bytes
    crl: bytes | None
    token: str


class Tls:
    """A Security that is not plain text, in use. Thread safe. Raises SecurityError if its files cannot be used.

    warn: told, in one line, when new files cannot be taken. now_ms: the caller's clock.
    """

    def __init__(self, security: Security, warn: Callable[[str], None], now_ms: Callable[[], int]) -> None:
        self.security = security
        self._warn = warn
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._looked_ms = now_ms()
        self._signature = self._look()
        self._loaded = _load(security, 1)
        self._refusal = ""

    def current(self) -> Loaded:
        """The files as they are now. Raises CrlError."""
        with self._lock:
            now_ms = self._now_ms()
            if now_ms - self._looked_ms >= LOOK_MS:
                self._looked_ms = now_ms
                signature = self._look()
                if signature != self._signature:
                    self._signature = signature
                    self._reload()
            if self._refusal:
                raise CrlError(self._refusal)
            return self._loaded

    def changed_since(self, loaded: Loaded | None) -> bool:
        """Whether current() would answer something else, or refuse. Reads no file, so it is quick."""
        with self._lock:
            if loaded is not self._loaded or self._refusal:
                return True
            now_ms = self._now_ms()
            if now_ms - self._looked_ms < LOOK_MS:
                return False
            if self._look() == self._signature:
                self._looked_ms = now_ms
                return False
            return True

    def wrap_server(self, sock: socket.socket) -> ssl.SSLSocket:
        """The accepted connection, after the handshake: within the socket's timeout. Raises OSError, CrlError."""
        return self.current().server.wrap_socket(sock, server_side=True)

    def wrap_client(self, sock: socket.socket, host: str) -> ssl.SSLSocket:
        """The connection to `host`, a name or an address that its certificate has to name. Raises as wrap_server."""
        return self.current().client.wrap_socket(sock, server_hostname=host)

    def _reload(self) -> None:
        try:
            self._loaded = _load(self.security, self._loaded.number + 1)
            self._refusal = ""
        except CrlError as error:
            self._refusal = str(error)
            self._warn(f"{error}; nobody is let in until it can be used")
        except SecurityError as error:
            self._warn(f"{error}; the former files still hold")

    def _look(self) -> _Signature:
        security = self.security
        paths = (security.ca, security.cert, security.key, security.key_password_file, security.crl)
        return tuple(_signature_of(path) for path in (*paths, security.token_file) if path)


def _signature_of(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _load(security: Security, number: int) -> Loaded:
    ca = read_public("tls_ca", security.ca)
    cert = read_public("tls_cert", security.cert)
    key = read_secret("tls_key", security.key)
    if b"ENCRYPTED" in key:
        key = _decrypted(security, key)
    crl = None
    if security.crl:
        try:
            crl = read_public("tls_crl", security.crl)
        except SecurityError as error:
            raise CrlError(str(error)) from error
    token = read_word("token_file", security.token_file) if security.token_file else ""
    server, client = (_context(side, security, ca, cert, key, crl) for side in (True, False))
    return Loaded(number, server, client, ca, cert, key, crl, token)


def _context(serves: bool, security: Security, ca: bytes, cert: bytes, key: bytes, crl: bytes | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    if serves:
        context.num_tickets = 0  # every connection is checked anew
    else:
        context.set_alpn_protocols(["h2"])  # a gRPC server insists on it; a data port does not look
    try:
        context.load_verify_locations(cadata=ca.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise SecurityError(f"tls_ca = {security.ca}: no PEM certificates ({_word_of(error)})") from error
    if not context.get_ca_certs():
        raise SecurityError(f"tls_ca = {security.ca}: no certificate of a CA in it")
    with _in_memory(cert) as cert_path, _in_memory(key) as key_path:
        try:
            context.load_cert_chain(cert_path, key_path)
        except (ssl.SSLError, OSError) as error:
            raise SecurityError(
                f"tls_cert = {security.cert}, tls_key = {security.key}: no PEM files of one pair ({_word_of(error)})"
            ) from error
    if crl is not None:
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        before = context.cert_store_stats()["crl"]
        with _in_memory(crl) as path:
            try:
                context.load_verify_locations(cafile=path)
            except (ssl.SSLError, OSError) as error:
                raise CrlError(f"tls_crl = {security.crl}: no PEM revocation list ({_word_of(error)})") from error
        if context.cert_store_stats()["crl"] == before:
            raise CrlError(f"tls_crl = {security.crl}: no revocation list in it")
    return context


def _decrypted(security: Security, key: bytes) -> bytes:
    where = f"tls_key = {security.key}"
    if not security.key_password_file:
        raise SecurityError(f"{where}: it is encrypted; set tls_key_password_file")
    password = read_word("tls_key_password_file", security.key_password_file)
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError as error:
        raise SecurityError(f"{where}: an encrypted key needs a package: pip install 'kvpool[tls]'") from error
    try:
        opened = serialization.load_pem_private_key(key, password.encode())
    except (ValueError, TypeError) as error:
        raise SecurityError(
            f"{where}: the password in {security.key_password_file} does not open it (tls_key_password_file)"
        ) from error
    return opened.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@contextmanager
def _in_memory(content: bytes) -> Generator[str]:
    """The path of a file with this content, which is in memory and goes at the end of the block."""
    with open(os.memfd_create("kvpool-tls", os.MFD_CLOEXEC), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _word_of(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
