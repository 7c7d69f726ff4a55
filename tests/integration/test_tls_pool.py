"""A whole pool over TLS: Master and node clients as processes, workers with certificates and tokens of their own."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from integration.master_client import TIMEOUT_S, until
from integration.pool_worker import PART_BYTES, chain, pattern
from integration.processes import MasterProcess, NodeProcess
from integration.tls_clients import Caller, put_tokens
from kvpool_client import Contiguous, KVPool, sdk
from kvpool_proto.namespace import NamespaceSpec
from kvpool_proto.security import Security, SecurityError
from unit.tls_world import Pki

SPEC = NamespaceSpec(model="tls", dtype="float16", block_tokens=16, part_bytes=PART_BYTES, tenant="a")
SIZES = ("--segment-bytes", "16MiB", "--slab-bytes", "4MiB")


class World:
    """A pool whose files a test spoils and replaces. Everything is stopped in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pki = Pki(folder / "pki")
        for name in ("master", "node", "worker", "admin"):
            self.pki.issue(name)
        self.tokens = put_tokens(self.pki)
        self._open: list[Any] = []
        self.master = self.kept(
            MasterProcess(*self.pki.flags("master", tokens_file=self.tokens), state_dir=folder / "state")
        )

    def kept(self, opened: Any) -> Any:
        """Something to be stopped in the end."""
        self._open.append(opened)
        return opened

    def token(self, name: str) -> str:
        return self.pki.put(f"{name}.token", name.encode() + b"\n", 0o600)

    def node(self, name: str = "n1", certificate: str = "node", **settings: str) -> NodeProcess:
        """A node client; it is not there yet if the Master does not take it."""
        files = {"token_file": self.token("node")} | settings
        (self.folder / name).mkdir(exist_ok=True)
        flags = (*SIZES, "--node-id", name, "--ready-wait-ms", "2s", *self.pki.flags(certificate, **files))
        return self.kept(NodeProcess(self.master.address, self.folder / name, *flags))

    def security(self, token: str = "worker-a", certificate: str = "worker", **changes: Any) -> Security:
        return self.pki.security(certificate, token_file=self.token(token), **changes)

    def pool(self, node_socket: str, security: Security | None = None) -> KVPool:
        return self.kept(
            KVPool.connect(self.master.address, node_socket, timeout_ms=2_000, security=security or self.security())
        )

    def serving(self, node: str = "n1") -> bool:
        """Does the Master hold the node to be up?"""
        admin = Caller(self.master, self.pki, "admin", "admin")
        try:
            states = {each.node_id: each.state for each in admin.status().nodes}
        finally:
            admin.close()
        return states.get(node) in ("up", "ramp")

    def stop(self) -> None:
        for opened in reversed(self._open):
            if isinstance(opened, KVPool):
                opened.close()
            elif opened.process.poll() is None:
                opened.kill()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.stop()


def stored(pool: KVPool, seed: int = 1) -> tuple[int, str]:
    """Store 8 blocks; how many were, and why not more."""
    result = pool.namespace(SPEC).store(chain(8, seed), Contiguous(pattern(8, 0, seed)))
    return result.stored_blocks, result.reason


def loaded(pool: KVPool, seed: int = 1) -> tuple[int, str]:
    """Load them; how many were there, right, and why not more."""
    space, found = pool.namespace(SPEC), np.zeros((8, PART_BYTES), dtype=np.uint8)
    with space.lookup(chain(8, seed)) as hit:
        result = space.load(hit, Contiguous(found))
    assert np.array_equal(found[: result.blocks], pattern(8, 0, seed)[: result.blocks])
    return result.blocks, result.reason


def log_lines(process: Any, event: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in list(process.lines) if f'"event": "{event}"' in line]


def test_what_one_worker_stores_another_loads(world: World) -> None:
    node = world.node()
    assert stored(world.pool(node.socket_path)) == (8, "")
    assert loaded(world.pool(node.socket_path)) == (8, "")
    assert stored(world.pool(node.socket_path, world.security("worker-b")))[0] == 0
    assert loaded(world.pool(node.socket_path, world.security("admin"))) == (8, "")
    assert not log_lines(node, "plaintext")


def test_bytes_of_another_node_come_over_tls(world: World) -> None:
    near, far = world.node("n1"), world.node("n2")
    assert stored(world.pool(near.socket_path)) == (8, "")
    assert loaded(world.pool(far.socket_path)) == (8, "")
    plain = replace(world.security(), data_plaintext=True)
    assert loaded(world.pool(far.socket_path, plain))[0] == 0


def metric(process: Any, name: str) -> float:
    """Of a daemon's /metrics; 0 if it is not there."""
    with urllib.request.urlopen(f"http://127.0.0.1:{process.http_port}/metrics", timeout=TIMEOUT_S) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_a_data_port_refuses_counts_and_logs_wrong_certificates_once(world: World, tmp_path: Path) -> None:
    foreign = Pki(tmp_path / "foreign")
    foreign.issue("stranger")
    for name, days in (("expired", -1), ("thief", 1)):
        world.pki.issue(name, days)
    world.pki.revoke("thief")
    node = world.node()
    contexts = [ssl.create_default_context(cafile=world.pki.path("ca.pem")) for _ in range(4)]
    for context, (pki, name) in zip(
        contexts[1:], ((world.pki, "expired"), (world.pki, "thief"), (foreign, "stranger")), strict=True
    ):
        context.load_cert_chain(pki.path(f"{name}.pem"), pki.path(f"{name}.key"))
    host, _, port = node.event("ready")["data"].rpartition(":")

    def turned_away(context: ssl.SSLContext) -> bool:
        with socket.create_connection((host, int(port)), TIMEOUT_S) as plain:
            try:
                with context.wrap_socket(plain, server_hostname=host) as sock:
                    return sock.recv(1) == b""
            except OSError:
                return True

    assert all(turned_away(context) for context in contexts)
    with socket.create_connection((host, int(port)), TIMEOUT_S) as plain:
        plain.sendall(b"\x00" * 64)
        with contextlib.suppress(ConnectionResetError):
            assert plain.recv(1_024)[:1] in (b"", b"\x15")  # an alert of TLS
    until(lambda: metric(node, "kvpool_client_data_refused_total") == 5)
    (line,) = log_lines(node, "peer_refused")
    assert line["peer"] == "127.0.0.1"


def test_a_user_that_is_not_named_does_not_get_in(world: World) -> None:
    node = world.node(allowed_uids="4242")
    assert stored(world.pool(node.socket_path))[0] == 0
    assert metric(node, "kvpool_client_local_refused_total") >= 1
    assert len(log_lines(node, "local_connection_refused")) == 1


def test_the_data_port_may_be_plain_while_the_master_is_not(world: World) -> None:
    near, far = world.node("n1", data_plaintext="true"), world.node("n2", data_plaintext="true")
    plain = replace(world.security(), data_plaintext=True)
    assert stored(world.pool(near.socket_path, plain)) == (8, "")
    assert loaded(world.pool(far.socket_path, plain)) == (8, "")


def test_encrypted_keys_and_a_password(world: World) -> None:
    password = world.pki.put("password", b"sesame\n", 0o600)
    for name in ("node", "worker"):
        world.pki.issue(name, password="sesame")
    node = world.node(tls_key_password_file=password)
    assert stored(world.pool(node.socket_path, world.security(key_password_file=password))) == (8, "")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [("no token", "unauthenticated"), ("role", "forbidden"), ("tenant", "forbidden"), ("revoked", "unauthenticated")],
)
def test_a_worker_without_the_right_gets_a_miss_that_says_so(world: World, wrong: str, reason: str) -> None:
    node = world.node()
    assert stored(world.pool(node.socket_path)) == (8, "")
    match wrong:
        case "no token":
            security = replace(world.security(), token_file="")
        case "role":
            security = world.security("node")
        case "tenant":
            security = world.security("worker-b")
        case _:
            world.pki.issue("thief")
            world.pki.revoke("thief")
            security = world.security(certificate="thief")
            until(lambda: _refused(world))
    pool = world.pool(node.socket_path, security)
    assert loaded(pool) == (0, reason)
    assert stored(pool, seed=2) == (0, reason)
    assert loaded(world.pool(node.socket_path)) == (8, "")


def _refused(world: World) -> bool:
    """Has the Master read the list on which the thief is?"""
    thief = Caller(world.master, world.pki, "thief", "admin")
    try:
        thief.status()
    except Exception:
        return True
    finally:
        thief.close()
    return False


@pytest.mark.parametrize("wrong", ["revoked", "another CA"])
def test_a_worker_gives_nothing_to_a_master_it_does_not_trust(world: World, tmp_path: Path, wrong: str) -> None:
    node = world.node()
    security = world.security()
    if wrong == "revoked":
        world.pki.revoke("master")
    else:
        other = Pki(tmp_path / "other")
        security = replace(security, ca=other.path("ca.pem"), crl=other.path("crl.pem"))
    pool = world.pool(node.socket_path, security)
    assert loaded(pool) == (0, "unreachable")
    assert pool.stats().master_breaks == 1


def test_a_node_client_without_the_right_is_not_taken_in(world: World) -> None:
    node = world.node(token_file=world.token("worker-a"))
    assert not world.serving()
    lines = log_lines(node, "master_away")
    assert lines
    assert "is not for the role worker" in lines[0]["why"]
    (line,) = [line for line in log_lines(world.master, "call_refused") if line["reason"] == "role"]
    assert line["who"] == "worker-a"
    world.pki.put("worker-a.token", b"node\n", 0o600)
    until(world.serving)


def test_a_node_client_that_is_revoked_is_put_out_and_comes_back(world: World) -> None:
    node = world.node()
    assert stored(world.pool(node.socket_path)) == (8, "")
    assert world.serving()
    world.pki.revoke("node")
    until(lambda: not world.serving())
    assert any("is revoked" in line["why"] for line in log_lines(node, "master_away"))
    assert len([line for line in log_lines(world.master, "call_refused") if line["reason"] != "role"]) == 1
    world.pki.revoke()
    until(world.serving)
    until(lambda: loaded(world.pool(node.socket_path)) == (8, ""))


def test_a_master_that_is_revoked_is_left_by_its_node_clients(world: World) -> None:
    node = world.node()
    assert world.serving()
    world.pki.revoke("master")
    until(lambda: not world.serving())
    until(lambda: any("certificate revoked" in line["why"] for line in log_lines(node, "master_away")))
    world.pki.revoke()
    until(world.serving)


def test_certificates_of_all_are_replaced_while_they_run(world: World) -> None:
    node = world.node()
    pool = world.pool(node.socket_path)
    assert stored(pool) == (8, "")
    for name in ("master", "node", "worker"):
        world.pki.issue(name)
    until(lambda: len(log_lines(world.master, "node_registered")) > 1)
    until(lambda: world.serving() and loaded(pool) == (8, ""))
    assert stored(pool, seed=2) == (8, "")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "neither TLS nor plain text is chosen"),
        (("--tls-ca", "/nowhere.pem"), "tls_ca without tls_cert, tls_key"),
        (("--plaintext", "--token-file", "/nowhere"), "plaintext together with token_file"),
    ],
)
def test_a_node_client_starts_in_plain_text_only_when_asked(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    where = ("--segment-dir", str(tmp_path), "--socket-path", str(tmp_path / "s"), "--http", "127.0.0.1:0")
    argv = [sys.executable, "-m", "kvpool_client", "serve", *where, "--segment-bytes", "64MiB", *flags]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvpool-client: {words}")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_node_clients_key_is_nobody_elses(world: World) -> None:
    (world.pki.folder / "node.key").chmod(0o604)
    with pytest.raises(AssertionError, match=r"tls_key = .*chmod 600"):
        world.node()


def test_a_worker_connects_in_plain_text_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connect: Callable[[], KVPool] = lambda: KVPool.connect("127.0.0.1:1", "/nowhere", timeout_ms=1)  # noqa: E731
    monkeypatch.delenv("KVPOOL_PLAINTEXT", raising=False)
    with pytest.raises(SecurityError, match="neither TLS nor plain text is chosen"):
        connect()
    monkeypatch.setenv("KVPOOL_PLAINTEXT", "true")
    sdk._warn_once.cache_clear()
    for _ in range(2):
        connect().close()
    assert [record.getMessage()[:18] for record in caplog.records] == ["kvpool: plain text"]
