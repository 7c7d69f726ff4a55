"""TLS connections between files that are right, wrong, revoked, run out and replaced."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest

from kvpool_proto.security import PLAINTEXT, Security, SecurityError
from kvpool_proto.tls import LOOK_MS, CrlError, Tls, tls_of
from unit.tls_world import Pki, certs


class World:
    """Files, a clock, and what was warned of."""

    def __init__(self, folder: Path) -> None:
        self.pki = Pki(folder)
        self.pki.issue("a")
        self.pki.issue("b")
        self.now_ms = 0
        self.warnings: list[str] = []

    def tls(self, security: Security) -> Tls:
        return Tls(security, self.warnings.append, lambda: self.now_ms)

    def later(self) -> None:
        """It is time to look at the files again."""
        self.now_ms += LOOK_MS


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "pki")


def talk(server: Tls, client: Tls, host: str = "127.0.0.1") -> str:
    """Why a connection does not come about; empty: both have heard each other."""
    ends = socket.socketpair()
    for end in ends:
        end.settimeout(5)
    words: list[str] = []

    def serve() -> None:
        try:
            with server.wrap_server(ends[0]) as sock:
                sock.sendall(sock.recv(1))
        except (OSError, CrlError) as error:
            words.append(f"server: {error}")
            ends[0].close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_client(ends[1], host) as sock:
            sock.sendall(b"x")
            if sock.recv(1) != b"x":
                words.append("client: closed")
    except (OSError, CrlError) as error:
        words.append(f"client: {error}")
    finally:
        with contextlib.suppress(OSError):
            ends[1].shutdown(socket.SHUT_RDWR)
        thread.join()
        for end in ends:
            end.close()
    return "; ".join(words)


def test_two_certificates_of_one_ca_talk(world: World) -> None:
    a, b = world.tls(world.pki.security("a")), world.tls(world.pki.security("b", crl=""))
    assert talk(a, b) == ""
    assert talk(b, a, "localhost") == ""


def test_plain_text_has_no_tls(world: World) -> None:
    assert tls_of(PLAINTEXT, world.warnings.append, lambda: 0) is None
    with pytest.raises(SecurityError, match="neither TLS nor plain text"):
        tls_of(Security(), world.warnings.append, lambda: 0)


@pytest.mark.parametrize("side", ["server", "client"])
@pytest.mark.parametrize("wrong", ["expired", "revoked", "of another CA"])
def test_a_wrong_certificate_is_refused_by_the_other_side(world: World, tmp_path: Path, side: str, wrong: str) -> None:
    other = world.tls(world.pki.security("a"))
    security = world.pki.security("b")
    if wrong == "expired":
        world.pki.issue("b", days=-1)
        expected = "certificate has expired"
    elif wrong == "revoked":
        world.pki.revoke("b")
        expected = "certificate revoked"
        other = world.tls(world.pki.security("a"))
    else:
        foreign = Pki(tmp_path / "foreign")
        foreign.issue("b")
        security = foreign.security("b", ca=world.pki.path("ca.pem"), crl="")
        expected = "unable to get (local )?issuer|unable to get certificate CRL|self.signed"
    mine = world.tls(security)
    words = talk(mine, other) if side == "server" else talk(other, mine)
    refuser = "client" if side == "server" else "server"
    assert f"{refuser}: " in words
    refusal = words[words.index(f"{refuser}: ") :]
    assert re.search(expected, refusal), words


def test_a_name_that_the_certificate_does_not_have_is_refused(world: World) -> None:
    a, b = world.tls(world.pki.security("a")), world.tls(world.pki.security("b"))
    assert "not valid for 'elsewhere'" in talk(a, b, "elsewhere")
    assert "not valid for '127.0.0.2'" in talk(a, b, "127.0.0.2")


def test_a_client_without_a_certificate_is_refused(world: World) -> None:
    server = world.tls(world.pki.security("a"))
    context = ssl.create_default_context(cafile=world.pki.path("ca.pem"))

    class Bare:
        def wrap_client(self, sock: socket.socket, host: str) -> ssl.SSLSocket:
            return context.wrap_socket(sock, server_hostname=host)

    bare: Any = Bare()
    assert "server: [SSL: PEER_DID_NOT_RETURN_A_CERTIFICATE]" in talk(server, bare)


def test_a_list_that_has_run_out_lets_nobody_in(world: World) -> None:
    world.pki.revoke(days=-1)
    a, b = world.tls(world.pki.security("a")), world.tls(world.pki.security("b", crl=""))
    assert "CRL has expired" in talk(a, b)


def test_replaced_files_are_taken(world: World) -> None:
    a, b = world.tls(world.pki.security("a")), world.tls(world.pki.security("b"))
    former = a.current()
    world.pki.issue("a", hosts=["elsewhere"])
    assert a.current() is former  # not looked at yet
    assert not a.changed_since(former)
    world.later()
    assert a.changed_since(former)
    assert a.current().number == former.number + 1
    assert not a.changed_since(a.current())
    assert talk(a, b, "elsewhere") == ""
    world.pki.revoke("b")
    world.later()
    assert "certificate revoked" in talk(a, b, "elsewhere")
    world.pki.revoke()
    world.later()
    assert talk(a, b, "elsewhere") == ""
    assert world.warnings == []


def test_files_that_do_not_fit_together_are_not_taken(world: World) -> None:
    a, b = world.tls(world.pki.security("a")), world.tls(world.pki.security("b"))
    certificate, key = world.pki.authority.issue("a", ["localhost", "127.0.0.1"], 1)
    world.pki.put("a.pem", certificate)
    world.later()
    assert talk(a, b) == ""
    world.later()
    a.current()
    (warning,) = world.warnings
    assert "no PEM files of one pair" in warning
    assert "the former files still hold" in warning
    world.pki.put("a.key", key, 0o600)
    world.later()
    assert a.current().cert == certificate
    assert talk(a, b) == ""


@pytest.mark.parametrize("spoilt", ["gone", "empty", "writable"])
def test_a_list_that_cannot_be_read_lets_nobody_in_until_it_can(world: World, spoilt: str) -> None:
    a, b = world.tls(world.pki.security("a")), world.tls(world.pki.security("b", crl=""))
    path = world.pki.folder / "crl.pem"
    match spoilt:
        case "gone":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case _:
            path.chmod(0o666)
    world.later()
    assert "tls_crl" in talk(a, b)
    assert a.changed_since(None)
    with pytest.raises(CrlError):
        a.current()
    (warning,) = world.warnings
    assert "nobody is let in until it can be used" in warning
    path.unlink(missing_ok=True)
    world.pki.revoke()
    world.later()
    assert talk(a, b) == ""


def test_an_encrypted_key_needs_its_password(world: World) -> None:
    world.pki.issue("b", password="sesame")
    with pytest.raises(SecurityError, match="it is encrypted; set tls_key_password_file"):
        world.tls(world.pki.security("b"))
    password = world.pki.put("password", b"sesame\n", 0o600)
    b = world.tls(world.pki.security("b", key_password_file=password))
    assert b"ENCRYPTED" not in b.current().key
    assert talk(b, world.tls(world.pki.security("a"))) == ""
    world.pki.put("password", b"guess\n", 0o600)
    with pytest.raises(SecurityError, match=r"the password in .*password does not open it"):
        world.tls(world.pki.security("b", key_password_file=password))


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("ca.pem", b"", "tls_ca = .*: no PEM certificates"),
        ("ca.pem", b"\xff", "tls_ca = .*: no PEM certificates"),
        ("a.pem", b"nothing", "tls_cert = .*no PEM files of one pair"),
        ("a.key", b"nothing", "tls_key = .*no PEM files of one pair"),
        ("crl.pem", b"nothing", "tls_crl = .*no PEM revocation list"),
    ],
)
def test_what_is_no_pem_file_is_named(world: World, file: str, content: bytes, text: str) -> None:
    world.pki.put(file, content, 0o600)
    with pytest.raises(SecurityError, match=text):
        world.tls(world.pki.security("a"))


def test_a_token_is_read_with_the_files(world: World) -> None:
    path = world.pki.put("token", b"first\n", 0o600)
    a = world.tls(world.pki.security("a", token_file=path))
    assert a.current().token == "first"
    world.pki.put("token", b"second\n", 0o600)
    world.later()
    assert a.current().token == "second"


def test_make_certs_overwrites_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    certs.make(folder, 1, ["localhost"])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(certs.Refused):
        certs.make(folder, 1, ["localhost"])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_what_make_certs_makes_can_be_used_and_revoked(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    certs.make(folder, 1, ["localhost", "127.0.0.1"])

    def security(role: str) -> Security:
        own = {"cert": str(folder / f"{role}.pem"), "key": str(folder / f"{role}.key")}
        return Security(ca=str(folder / "ca.pem"), crl=str(folder / "crl.pem"), **own)

    now_ms = 0
    master, worker = (Tls(security(role), print, lambda: now_ms) for role in ("master", "worker"))
    assert talk(master, worker) == ""
    certs.renew_list(folder, 1, folder / "node.pem")
    certs.renew_list(folder, 1, folder / "worker.pem")
    now_ms += LOOK_MS
    assert "certificate revoked" in talk(master, worker)
    node = Tls(security("node"), print, lambda: now_ms)
    assert "certificate revoked" in talk(master, node)
