"""A CA for tests, with the tool that `make certs` runs, and files that tests spoil and replace."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kvpool_proto.security import Security

HOSTS = ("localhost", "127.0.0.1")


def _certs() -> ModuleType:
    path = Path(__file__).parents[2] / "deploy" / "certs.py"
    spec = importlib.util.spec_from_file_location("kvpool_certs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


certs: Any = _certs()


class Pki:
    """A CA whose files lie in `folder`: ca.pem, crl.pem, and NAME.pem with NAME.key of each that issue() made."""

    def __init__(self, folder: Path, days: float = 1.0) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.authority = certs.Authority.new("test CA", 30)
        self._serials: dict[str, int] = {}
        self.put("ca.pem", certs.pem(self.authority.certificate))
        self.revoke(days=days)

    def issue(self, name: str, days: float = 1.0, hosts: Sequence[str] = HOSTS, password: str = "") -> None:
        """A certificate and its key, in the place of a former one of that name."""
        certificate, key = self.authority.issue(name, hosts, days)
        self._serials[name] = certs.x509.load_pem_x509_certificate(certificate).serial_number
        if password:
            key = certs.key_pem(certs.serialization.load_pem_private_key(key, None), password)
        self.put(f"{name}.pem", certificate)
        self.put(f"{name}.key", key, 0o600)

    def revoke(self, *names: str, days: float = 1.0) -> None:
        """A new list, with these and no others."""
        serials = [self._serials[name] for name in names]
        self.put("crl.pem", self.authority.revocation_list(serials, days))

    def security(self, name: str, **changes: Any) -> Security:
        """With the certificate of that name and the list."""
        files = {"ca": self.path("ca.pem"), "crl": self.path("crl.pem")}
        files |= {"cert": self.path(f"{name}.pem"), "key": self.path(f"{name}.key")}
        return Security(**(files | changes))

    def flags(self, name: str, **changes: str) -> list[str]:
        """The same for a daemon's command line."""
        files = {"ca": "ca.pem", "crl": "crl.pem", "cert": f"{name}.pem", "key": f"{name}.key"}
        named = {f"tls_{setting}": self.path(file) for setting, file in files.items()} | changes
        return [word for setting, path in named.items() for word in (f"--{setting.replace('_', '-')}", path)]

    def path(self, file: str) -> str:
        return str(self.folder / file)

    def put(self, file: str, content: bytes, mode: int = 0o644) -> str:
        """A file, whole at once; its path."""
        fresh = self.folder / f"{file}.new"
        fresh.write_bytes(content)
        os.chmod(fresh, mode)
        fresh.replace(self.folder / file)
        return self.path(file)
