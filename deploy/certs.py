"""`make certs`: a CA for tests, certificates of both kinds, an empty revocation list and tokens, in ./certs.

  ca.pem  ca.key  crl.pem            the CA; its key signs what follows, and later lists
  master.pem  node.pem  worker.pem   certificates (and .key): for localhost, this host's name, 127.0.0.1 and ::1
  tokens.toml  *.token               tokens for admin, node and worker (tenant "default"), and the Master's file of them

For a pool that matters use your own CA: this one's key lies beside what it signed. Nothing is overwritten.

    certs.py [--folder certs] [--days 30] [--host NAME_OR_ADDRESS ...]
    certs.py --revoke certs/worker.pem           put a certificate on the list
    certs.py --renew-list                        a new list, for another --days days
"""

from __future__ import annotations

import argparse
import hashlib
import ipaddress
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAYS: Final = 30
HOSTS: Final = ("localhost", "127.0.0.1", "::1")
ROLES: Final = ("master", "node", "worker")
TOKENS: Final = {"admin": "", "node": "", "worker": 'tenants = ["default"]\n'}
SKEW: Final = timedelta(minutes=5)
"""Certificates begin a little earlier, for clocks that are behind."""


class Refused(Exception):
    """The text says why nothing was done."""


class Authority:
    """A CA."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self.key = key
        self.certificate = certificate

    @classmethod
    def new(cls, name: str, days: float) -> Authority:
        """A CA of its own."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = _builder(subject, subject, key.public_key(), days)
        builder = builder.add_extension(x509.BasicConstraints(True, 0), True).add_extension(usage, True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        return cls(key, builder.sign(key, hashes.SHA256()))

    @classmethod
    def of(cls, folder: Path) -> Authority:
        """The CA whose files lie in a folder. Raises Refused."""
        try:
            key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
            certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        except OSError as error:
            raise Refused(f"{error.filename}: {error.strerror}") from error
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(key, certificate)

    def issue(self, name: str, hosts: Sequence[str], days: float) -> tuple[bytes, bytes]:
        """A certificate for both directions and its key, PEM. days: from now; below 0: it has ended."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = _builder(_name(name), self.certificate.subject, key.public_key(), days)
        builder = builder.add_extension(x509.BasicConstraints(False, None), True).add_extension(names, False)
        builder = builder.add_extension(usages, False).add_extension(issuer, False)
        return pem(builder.sign(self.key, hashes.SHA256())), key_pem(key)

    def revocation_list(self, serials: Sequence[int], days: float) -> bytes:
        """The list that names these certificates, PEM."""
        now = datetime.now(UTC)
        ends = now + timedelta(days=days)
        builder = x509.CertificateRevocationListBuilder().issuer_name(self.certificate.subject)
        builder = builder.last_update(min(now, ends) - SKEW).next_update(ends)
        for serial in serials:
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now - SKEW)
            builder = builder.add_revoked_certificate(entry.build())
        return pem(builder.sign(self.key, hashes.SHA256()))


def pem(signed: x509.Certificate | x509.CertificateRevocationList) -> bytes:
    """A certificate or list as PEM."""
    return signed.public_bytes(serialization.Encoding.PEM)


def key_pem(key: ec.EllipticCurvePrivateKey, password: str = "") -> bytes:
    """A key as PEM, encrypted if there is a password."""
    lock = serialization.BestAvailableEncryption(password.encode()) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    ends = now + timedelta(days=days)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(min(now, ends) - SKEW).not_valid_after(ends)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def write(path: Path, content: bytes, *, secret: bool = False) -> None:
    """A new file; one that is there is refused."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    except FileExistsError:
        raise Refused(f"{path} is there already; nothing is overwritten") from None
    with open(fd, "wb") as file:
        file.write(content)


def replace(path: Path, content: bytes) -> None:
    """A file in the place of another, at once."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(content)
    fresh.chmod(0o644)
    fresh.replace(path)


def make(folder: Path, days: float, hosts: Sequence[str]) -> None:
    """All files of a folder. Raises Refused."""
    if folder.is_dir() and any(folder.iterdir()):
        raise Refused(f"{folder} is there already; nothing is overwritten")
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    authority = Authority.new("kvpool test CA", days)
    write(folder / "ca.pem", pem(authority.certificate))
    write(folder / "ca.key", key_pem(authority.key), secret=True)
    write(folder / "crl.pem", authority.revocation_list([], days))
    for role in ROLES:
        certificate, key = authority.issue(f"kvpool-{role}", hosts, days)
        write(folder / f"{role}.pem", certificate)
        write(folder / f"{role}.key", key, secret=True)
    tables: list[str] = []
    for role, more in TOKENS.items():
        token = secrets.token_urlsafe(32)
        write(folder / f"{role}.token", token.encode() + b"\n", secret=True)
        digest = hashlib.sha256(token.encode()).hexdigest()
        tables.append(f'[[token]]\nname = "{role}"\nsha256 = "{digest}"\nrole = "{role}"\n{more}')
    write(folder / "tokens.toml", "\n".join(tables).encode(), secret=True)


def renew_list(folder: Path, days: float, revoke: Path | None) -> None:
    """A new list with what is on the present one, and one more if there is one. Raises Refused."""
    try:
        former = x509.load_pem_x509_crl((folder / "crl.pem").read_bytes())
        serials = [entry.serial_number for entry in former]
        if revoke is not None:
            serials.append(x509.load_pem_x509_certificate(revoke.read_bytes()).serial_number)
    except OSError as error:
        raise Refused(f"{error.filename}: {error.strerror}") from error
    replace(folder / "crl.pem", Authority.of(folder).revocation_list(serials, days))


def main() -> int:
    """Do what the flags say; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("certs"))
    parser.add_argument("--days", type=float, default=DAYS)
    parser.add_argument("--host", action="append", default=[], help="a name or address more that certificates are for")
    parser.add_argument("--revoke", type=Path, metavar="CERTIFICATE")
    parser.add_argument("--renew-list", action="store_true")
    flags = parser.parse_args()
    try:
        if flags.revoke or flags.renew_list:
            renew_list(flags.folder, flags.days, flags.revoke)
            print(f"{flags.folder / 'crl.pem'} is new")
        else:
            make(flags.folder, flags.days, (*HOSTS, socket.gethostname(), *flags.host))
            print(f"{flags.folder}: a CA for tests, certificates and tokens, for {flags.days:g} days")
    except Refused as error:
        print(f"certs: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
