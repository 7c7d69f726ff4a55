"""A Master process with TLS and tokens: who is let in, who is not, and what is said of it."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from integration.master_client import SPEC, TIMEOUT_S, chain, until
from integration.processes import MasterProcess
from integration.tls_clients import TOKENS, Caller, put_tokens
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.convert import spec_to_message
from kvpool_proto.errors import Forbidden, KVPoolError, Unauthenticated, Unreachable
from kvpool_proto.namespace import NamespaceSpec
from unit.tls_world import Pki

Call = Callable[..., Caller]


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    pki = Pki(tmp_path / "pki")
    for name in ("master", "peer"):
        pki.issue(name)
    put_tokens(pki)
    return pki


@pytest.fixture
def master(pki: Pki) -> Iterator[MasterProcess]:
    with MasterProcess(*pki.flags("master", tokens_file=pki.path("tokens.toml"))) as process:
        yield process


@pytest.fixture
def caller(master: MasterProcess, pki: Pki) -> Iterator[Call]:
    callers: list[Caller] = []

    def make(certificate: str | None = "peer", token: str = "admin", ca: bytes | None = None) -> Caller:
        callers.append(Caller(master, pki, certificate, token, ca))
        return callers[-1]

    yield make
    for each in callers:
        each.close()


def told(master: MasterProcess, reason: str) -> list[dict[str, Any]]:
    """What was logged of refusals for that reason."""
    lines = [json.loads(line) for line in list(master.lines) if '"event": "call_refused"' in line]
    return [line for line in lines if line["reason"] == reason]


def counted(master: MasterProcess) -> dict[str, int]:
    """Refusals by reason, as /metrics tells them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{master.http_port}/metrics", timeout=TIMEOUT_S) as answer:
        lines = answer.read().decode().splitlines()
    head = "kvpool_master_refused_total{reason="
    found = [line.removeprefix(head).split("} ") for line in lines if line.startswith(head)]
    return {reason.strip('"'): int(float(number)) for reason, number in found}


def test_a_peer_with_certificate_and_token_is_let_in(caller: Call, master: MasterProcess) -> None:
    assert caller().status().epoch == master.epoch
    assert counted(master) == {}


@pytest.mark.parametrize("wrong", ["none", "expired", "of another CA"])
def test_a_wrong_certificate_does_not_get_through_the_handshake(
    caller: Call, pki: Pki, tmp_path: Path, wrong: str
) -> None:
    name: str | None = "peer"
    if wrong == "none":
        name = None
    elif wrong == "expired":
        pki.issue("peer", days=-1)
    else:
        foreign = Pki(tmp_path / "foreign")
        foreign.issue("peer")
        for file in ("peer.pem", "peer.key"):
            pki.put(file, (foreign.folder / file).read_bytes())
    assert isinstance(caller(name).status_refused(), Unreachable)


def test_a_plain_client_is_not_answered(master: MasterProcess, caller: Call) -> None:
    with grpc.insecure_channel(master.address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.RpcError) as caught:
            check(b"", timeout=TIMEOUT_S)
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    caller().status()


def test_garbage_and_silence_cost_nobody_else(master: MasterProcess, caller: Call) -> None:
    host, _, port = master.address.rpartition(":")
    silent = socket.create_connection((host, int(port)))
    with socket.create_connection((host, int(port))) as noisy:
        noisy.sendall(os.urandom(4_096))
    caller().status()
    silent.close()


def test_old_versions_of_tls_are_refused(master: MasterProcess, pki: Pki) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(pki.path("ca.pem"))
    context.load_cert_chain(pki.path("peer.pem"), pki.path("peer.key"))
    context.set_ciphers("DEFAULT@SECLEVEL=0")
    context.options &= ~(ssl.OP_NO_TLSv1 | ssl.OP_NO_TLSv1_1)
    with pytest.warns(DeprecationWarning, match=r"TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    host, _, port = master.address.rpartition(":")
    with socket.create_connection((host, int(port))) as plain, pytest.raises((ssl.SSLError, OSError)):
        context.wrap_socket(plain, server_hostname=host)


def test_a_revoked_certificate_is_refused_on_a_connection_that_stands(
    master: MasterProcess, caller: Call, pki: Pki
) -> None:
    admin = caller()
    admin.status()
    pki.revoke("peer")
    errors: list[KVPoolError] = []

    def is_refused() -> bool:
        try:
            admin.status()
        except grpc.RpcError:
            errors.append(admin.status_refused())
        return bool(errors)

    until(is_refused)
    errors += [caller().status_refused() for _ in range(3)]
    assert all(isinstance(error, Unauthenticated) for error in errors)
    assert "is revoked" in str(errors[0])
    assert counted(master)["certificate_revoked"] >= len(errors)
    assert len(told(master, "certificate_revoked")) == 1
    pki.revoke()
    until(lambda: _let_in(admin))


def _let_in(caller: Caller) -> bool:
    try:
        caller.status()
    except grpc.RpcError:
        return False
    return True


def test_a_list_that_cannot_be_used_refuses_all(master: MasterProcess, caller: Call, pki: Pki) -> None:
    admin = caller()
    admin.status()
    pki.revoke(days=-1)
    until(lambda: not _let_in(admin))
    assert "has run out" in str(admin.status_refused())
    (pki.folder / "crl.pem").write_bytes(b"")
    until(lambda: "tls_crl = " in str(admin.status_refused()))
    assert len(told(master, "crl")) == 1
    pki.revoke()
    until(lambda: _let_in(admin))


@pytest.mark.parametrize(
    ("token", "reason"), [("", "no_token"), ("guess", "unknown_token"), ("expired", "expired_token")]
)
def test_a_wrong_token_is_refused_counted_and_logged_once(
    master: MasterProcess, caller: Call, token: str, reason: str
) -> None:
    for _ in range(3):
        assert isinstance(caller(token=token).status_refused(), Unauthenticated)
    assert counted(master) == {reason: 3}
    (line,) = told(master, reason)
    assert line["method"] == "Status"
    assert line["peer"] == "ipv4:127.0.0.1"
    assert "guess" not in "".join(master.lines)


def test_a_token_of_another_role_is_forbidden(master: MasterProcess, caller: Call) -> None:
    lookup = pb.LookupRequest(namespace_id=SPEC.id, chain=chain(), lease_id=os.urandom(16))
    register = pb.RegisterRequest(node_id="n", incarnation=1)
    worker, node = caller(token="worker-a"), caller(token="node")
    errors = [worker.refused(worker.nodes.Register, register), worker.status_refused()]
    errors += [node.refused(node.pool.Lookup, lookup), node.status_refused()]
    session = worker.refused(lambda _, **given: list(worker.nodes.Session(iter([]), **given)), None)
    inventory = worker.refused(lambda _, **given: worker.nodes.Inventory(iter([]), **given), None)
    assert all(isinstance(error, Forbidden) for error in (*errors, session, inventory))
    assert counted(master) == {"role": 6}
    assert sorted(line["who"] for line in told(master, "role")) == ["node", "worker-a"]


def test_a_tenant_sees_only_its_own(master: MasterProcess, caller: Call) -> None:
    a, b, admin = (caller(token=token) for token in ("worker-a", "worker-b", "admin"))
    ours = NamespaceSpec(model="m", block_tokens=16, part_bytes=4096, dtype="float16", tenant="a")
    theirs = replace(ours, tenant="b")
    for who, spec in ((a, ours), (b, theirs)):
        who.call(who.pool.OpenNamespace, pb.OpenNamespaceRequest(spec=spec_to_message(spec)))

    def ask(who: Caller, spec: NamespaceSpec) -> list[tuple[Callable[..., Any], Any]]:
        keys = chain()
        return [
            (who.pool.OpenNamespace, pb.OpenNamespaceRequest(spec=spec_to_message(spec))),
            (who.pool.Lookup, pb.LookupRequest(namespace_id=spec.id, chain=keys, lease_id=os.urandom(16))),
            (who.pool.Peek, pb.PeekRequest(namespace_id=spec.id, chain=keys)),
            (who.pool.Remove, pb.RemoveRequest(namespace_id=spec.id, chain=keys)),
            (who.pool.Purge, pb.PurgeRequest(namespace_id=spec.id)),
        ]

    for method, request in ask(a, theirs):
        error = a.refused(method, request)
        assert isinstance(error, Forbidden), method
        assert "worker-a is not of the tenant 'b'" in str(error)
    assert counted(master) == {"tenant": 5}
    assert len(told(master, "tenant")) == 1
    for who, spec in ((a, ours), (b, theirs), (admin, ours), (admin, theirs)):
        for method, request in ask(who, spec):
            who.call(method, request)


def test_health_is_open_and_reflection_is_not(master: MasterProcess, caller: Call) -> None:
    channel = caller(token="").channel
    health: Any = health_pb2_grpc.HealthStub(channel)
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S).status
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        list(reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest()]), timeout=TIMEOUT_S))
    error: Any = caught.value
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


def test_new_tokens_are_taken_and_broken_ones_are_not(master: MasterProcess, caller: Call, pki: Pki) -> None:
    admin = caller()
    admin.status()
    pki.put("tokens.toml", b"[[token", 0o600)
    until(lambda: _let_in(admin) and any("the former tokens still hold" in line for line in master.lines))
    put_tokens(pki, tuple(TOKENS.keys() - {"admin"}))
    until(lambda: not _let_in(admin))


def test_a_new_certificate_is_shown_to_those_who_come_later(master: MasterProcess, caller: Call, pki: Pki) -> None:
    admin = caller()
    admin.status()
    other = Pki(pki.folder.parent / "other")
    other.issue("master")
    for file in ("master.pem", "master.key"):
        pki.put(file, (other.folder / file).read_bytes(), 0o600)
    trusts_new = (other.folder / "ca.pem").read_bytes()
    until(lambda: _let_in(caller(ca=trusts_new)))
    admin.status()
    assert isinstance(caller().status_refused(), Unreachable)


def test_an_encrypted_key_serves(pki: Pki) -> None:
    pki.issue("master", password="sesame")
    password = pki.put("password", b"sesame\n", 0o600)
    with MasterProcess(*pki.flags("master", tls_key_password_file=password)) as process:
        peer = Caller(process, pki, "peer")
        assert peer.status().epoch == process.epoch
        peer.close()
        assert process.event("no_tokens")


def started(*flags: str) -> tuple[int, str]:
    """The exit code and the words of a Master that does not start."""
    words = [sys.executable, "-m", "kvpool_master", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", *flags]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stderr


def test_a_master_starts_in_plain_text_only_when_asked(tmp_path: Path) -> None:
    code, words = started("--state-dir", str(tmp_path))
    assert code == 1
    assert words.startswith("kvpool-master: neither TLS nor plain text is chosen: ")
    assert words.count("\n") == 1
    with MasterProcess() as process:
        assert "nobody is authenticated" in process.event("plaintext")["text"]


@pytest.mark.parametrize(
    ("file", "mode", "words"),
    [
        ("master.key", 0o644, "tls_key = .*chmod 600"),
        ("master.pem", 0o666, "tls_cert = .*chmod go-w"),
        ("tokens.toml", 0o604, "tokens_file = .*chmod 600"),
        ("crl.pem", 0o646, "tls_crl = .*chmod go-w"),
    ],
)
def test_files_that_others_may_touch_are_refused(pki: Pki, tmp_path: Path, file: str, mode: int, words: str) -> None:
    (pki.folder / file).chmod(mode)
    flags = pki.flags("master", tokens_file=pki.path("tokens.toml"))
    code, told = started("--state-dir", str(tmp_path / "state"), *flags)
    assert code == 1
    assert told.count("\n") == 1
    assert re.match(f"kvpool-master: {words}", told)
