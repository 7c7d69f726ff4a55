"""Who may talk to whom, as it is configured: one choice and a few files, the same on Master, node client and worker.

Rules
  - Exactly one of two: plain text, asked for by its own flag, or TLS with a CA, a certificate and a key. Neither is
    not a default but an error that says what to do.
  - Every file must belong to root or to this user. Keys, passwords and tokens may be read by nobody else (root's may be
    readable by our group), certificates and revocation lists be written by nobody else.
  - A token travels only over TLS.
  - Everything wrong raises SecurityError with one line that names the file and what to do.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

VARIABLES: Final = {
    "plaintext": "KVPOOL_PLAINTEXT",
    "ca": "KVPOOL_TLS_CA",
    "cert": "KVPOOL_TLS_CERT",
    "key": "KVPOOL_TLS_KEY",
    "key_password_file": "KVPOOL_TLS_KEY_PASSWORD_FILE",
    "crl": "KVPOOL_TLS_CRL",
    "token_file": "KVPOOL_TOKEN_FILE",
    "data_plaintext": "KVPOOL_DATA_PLAINTEXT",
}
"""What from_environment() reads, by field. The daemons have settings instead."""
FILE_BYTES_MAX: Final = 4 << 20
"""Of a certificate, key, revocation list, password or token file."""
_SWITCHES: Final = {"1": True, "true": True, "on": True, "": False, "0": False, "false": False, "off": False}


class SecurityError(ValueError):
    """What was configured cannot be used; the text is one line for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """plaintext: no TLS anywhere. ca, cert, key, crl: PEM files. data_plaintext: the data port is plain, with
    capabilities only, although the Master is spoken to over TLS.
    """

    plaintext: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    key_password_file: str = ""
    crl: str = ""
    token_file: str = ""
    data_plaintext: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Security:
        """What a worker's environment says, checked. Raises SecurityError."""
        told = {name: environ[variable] for name, variable in VARIABLES.items() if variable in environ}
        values: dict[str, str | bool] = dict(told)
        for item in fields(cls):
            if item.type == "bool" and item.name in told:
                word = told[item.name].lower()
                if word not in _SWITCHES:
                    raise SecurityError(f"{VARIABLES[item.name]} = {told[item.name]!r}: true or false")
                values[item.name] = _SWITCHES[word]
        security = cls(**values)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        security.check()
        return security

    def check(self) -> None:
        """Raise SecurityError unless this is one whole choice. Looks at no file."""
        files = {item.name: getattr(self, item.name) for item in fields(self) if item.type == "str"}
        given = [name for name, path in files.items() if path]
        if self.plaintext:
            if given:
                raise SecurityError(f"plaintext together with {_setting(given[0])}: plain text uses no files; drop one")
            return
        missing = [_setting(name) for name in ("ca", "cert", "key") if not files[name]]
        if given and missing:
            raise SecurityError(f"{_setting(given[0])} without {', '.join(missing)}: TLS needs all three")
        if missing:
            raise SecurityError(
                "neither TLS nor plain text is chosen: set tls_ca, tls_cert and tls_key (`make certs` makes some for"
                " tests), or ask for plain text (--plaintext; in workers KVPOOL_PLAINTEXT=true)"
            )


PLAINTEXT: Final = Security(plaintext=True)

PLAINTEXT_WARNING: Final = "plain text, as asked for: nobody is authenticated, and everything can be read on the way"


def read_secret(setting: str, path: str) -> bytes:
    """The bytes of a key, password or token file. Raises SecurityError."""
    return _read(setting, path, secret=True)


def read_public(setting: str, path: str) -> bytes:
    """The bytes of a certificate or revocation list. Raises SecurityError."""
    return _read(setting, path, secret=False)


def read_word(setting: str, path: str) -> str:
    """The one line of a password or token file, without its end. Raises SecurityError."""
    try:
        word = read_secret(setting, path).decode("ascii").rstrip("\r\n")
    except UnicodeDecodeError:
        word = ""
    if not word or not word.isprintable():
        raise SecurityError(f"{setting} = {path}: one line of printable ASCII is expected")
    return word


def _setting(name: str) -> str:
    return name if name == "token_file" else f"tls_{name}"


def _read(setting: str, path: str, *, secret: bool) -> bytes:
    where = f"{setting} = {path}"
    try:
        with open(path, "rb", opener=_opened) as file:
            found = os.fstat(file.fileno())
            content = file.read(FILE_BYTES_MAX + 1) if stat.S_ISREG(found.st_mode) else b""
    except OSError as error:
        raise SecurityError(f"{where}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise SecurityError(f"{where}: not a regular file")
    if found.st_uid not in (0, os.geteuid()):
        raise SecurityError(f"{where}: belongs to user {found.st_uid}; it has to be root's or our own (chown)")
    excess = stat.S_IMODE(found.st_mode) & (_excess_of_secret(found) if secret else 0o022)
    if excess:
        who, mode = ("read", "chmod 600") if secret else ("written", "chmod go-w")
        raise SecurityError(f"{where}: may be {who} by others (mode {found.st_mode & 0o777:04o}); {mode} it")
    if len(content) > FILE_BYTES_MAX:
        raise SecurityError(f"{where}: larger than {FILE_BYTES_MAX >> 20} MiB")
    return content


def _opened(path: str, flags: int) -> int:
    """Without waiting for whoever might be at the other end of what is no file."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _excess_of_secret(found: os.stat_result) -> int:
    """The rights that nobody may have on a secret: all of others', or all but our group's to read what is root's."""
    ours = {os.getegid(), *os.getgroups()}
    return 0o037 if found.st_uid == 0 and found.st_gid in ours else 0o077
