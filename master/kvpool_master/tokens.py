"""The tokens file: who is who, in TOML, by the digest of what they present.

    [[token]]
    name = "engines-of-a"            # for logs
    sha256 = "9f86d0..."             # of the token's characters, hexadecimal
    role = "worker"                  # worker, node, admin
    tenants = ["a"]                  # of workers, and only of them
    expires = 2027-01-01T00:00:00Z   # optional

Rules
  - The file holds no token: who can read it can impersonate nobody. It is still checked as a secret is, for who can
    write it decides who may do what.
  - It is read again when it was replaced. One that is broken is not taken: the former holds, and that is said once.
"""

from __future__ import annotations

import hashlib
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, cast, get_args

from kvpool_master.clock import Clock
from kvpool_proto.security import SecurityError, read_secret

LOOK_MS: Final = 1_000
"""The file is looked at no oftener."""
TOKENS_MAX: Final = 100_000

Role = Literal["worker", "node", "admin"]
_KEYS: Final = {"name", "sha256", "role", "tenants", "expires"}


@dataclass(frozen=True, slots=True)
class Token:
    """What its bearer may do. expires_s: seconds since 1970; None: never."""

    name: str
    role: Role
    tenants: frozenset[str]
    expires_s: float | None


class Tokens:
    """The tokens of the file at `path`, by what is presented. Raises SecurityError. warn: told what is wrong later."""

    def __init__(self, path: str, clock: Clock, warn: Callable[[str], None]) -> None:
        self._path = path
        self._clock = clock
        self._warn = warn
        self._looked_ms = clock.now_ms()
        self._signature = self._look()
        self._tokens = _read(path)

    def find(self, presented: str) -> Token | None:
        """The token, expired or not; None: unknown."""
        now_ms = self._clock.now_ms()
        if now_ms - self._looked_ms >= LOOK_MS:
            self._looked_ms = now_ms
            self._reload()
        return self._tokens.get(hashlib.sha256(presented.encode()).hexdigest())

    def _reload(self) -> None:
        signature = self._look()
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._tokens = _read(self._path)
        except SecurityError as error:
            self._warn(f"{error}; the former tokens still hold")

    def _look(self) -> tuple[int, ...] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read(path: str) -> dict[str, Token]:
    where = f"tokens_file = {path}"
    try:
        document = tomllib.loads(read_secret("tokens_file", path).decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SecurityError(f"{where}: {error}") from error
    entries = document.pop("token", [])
    if document or not isinstance(entries, list):
        raise SecurityError(f"{where}: only tables [[token]] are known")
    found: dict[str, Token] = {}
    names: set[str] = set()
    for number, entry in enumerate(cast(list[Any], entries), start=1):
        digest, token = _entry(f"{where}: token {number}", entry)
        if digest in found or token.name in names:
            raise SecurityError(f"{where}: token {number}: its name or sha256 stands there twice")
        found[digest] = token
        names.add(token.name)
    if len(found) > TOKENS_MAX:
        raise SecurityError(f"{where}: more than {TOKENS_MAX} tokens")
    return found


def _entry(where: str, entry: Any) -> tuple[str, Token]:
    """Digest and token of one table. Raises SecurityError."""
    if not isinstance(entry, dict):
        raise SecurityError(f"{where}: only tables [[token]] are known")
    told = cast(dict[str, Any], entry)
    if unknown := sorted(told.keys() - _KEYS):
        raise SecurityError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(sorted(_KEYS))}")
    name, digest, role = told.get("name"), told.get("sha256"), told.get("role")
    if not isinstance(name, str) or not name:
        raise SecurityError(f"{where}: name = {name!r}: a text")
    if not isinstance(digest, str) or len(digest) != 64 or set(digest.lower()) - set("0123456789abcdef"):
        raise SecurityError(f"{where}: sha256 = {digest!r}: 64 hexadecimal digits")
    if role not in get_args(Role):
        raise SecurityError(f"{where}: role = {role!r}: one of {', '.join(get_args(Role))}")
    tenants = _texts(told.get("tenants", []))
    if tenants is None:
        raise SecurityError(f"{where}: tenants: a list of texts")
    if bool(tenants) != (role == "worker"):
        raise SecurityError(f"{where}: tenants: workers have some, others have none")
    expires = told.get("expires")
    if expires is not None and not (isinstance(expires, datetime) and expires.tzinfo is not None):
        raise SecurityError(f"{where}: expires = {expires}: date, time and zone, such as 2027-01-01T00:00:00Z")
    expires_s = None if expires is None else expires.timestamp()
    return digest.lower(), Token(name, cast(Role, role), frozenset(tenants), expires_s)


def _texts(value: object) -> list[str] | None:
    """The value, if it is a list of texts."""
    items = cast(list[object], value) if isinstance(value, list) else [None]
    texts = [item for item in items if isinstance(item, str)]
    return texts if len(texts) == len(items) else None
