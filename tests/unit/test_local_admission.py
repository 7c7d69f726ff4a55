"""Whom the node client lets in on its Unix socket, by the kernel's word."""

from __future__ import annotations

import contextlib
import io
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool_client.clock import Clock
from kvpool_client.config import describe, load_config
from kvpool_client.local_server import Admission, LocalServer
from kvpool_client.local_socket import LocalClient
from kvpool_client.logs import Log
from kvpool_proto.errors import Forbidden

UID, GID = os.geteuid(), os.getegid()
NOBODY = 4_242
Make = Callable[..., LocalServer]


@pytest.fixture
def log() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def make(tmp_path: Path, log: io.StringIO) -> Iterator[Make]:
    """Starts a server that lets these users and groups in."""
    servers: list[LocalServer] = []
    node: Any = SimpleNamespace()

    def start(uids: tuple[int, ...], gids: tuple[int, ...]) -> LocalServer:
        admission = Admission(frozenset(uids), frozenset(gids))
        server = LocalServer(tmp_path / "s", 0o600, node, 5.0, 8, Log("info", False, Clock(), log), admission)
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def client(tmp_path: Path) -> Iterator[LocalClient]:
    client = LocalClient(str(tmp_path / "s"), 5.0)
    yield client
    client.close()


@pytest.mark.parametrize(
    ("uids", "gids"), [((), ()), ((UID,), ()), ((), (GID,)), ((NOBODY,), (GID,)), ((NOBODY, UID), (NOBODY,))]
)
def test_who_is_named_is_let_in(make: Make, client: LocalClient, uids: tuple[int, ...], gids: tuple[int, ...]) -> None:
    server = make(uids, gids)
    client.ping()
    client.ping()
    assert server.refused == 0


@pytest.mark.parametrize(("uids", "gids"), [((NOBODY,), ()), ((), (NOBODY,)), ((NOBODY,), (NOBODY,))])
def test_who_is_not_named_hears_so_and_is_counted_and_logged_once(
    make: Make, client: LocalClient, log: io.StringIO, uids: tuple[int, ...], gids: tuple[int, ...]
) -> None:
    server = make(uids, gids)
    for _ in range(3):
        with pytest.raises(Forbidden, match=f"user {UID} of group {GID} is in neither allowed_uids nor allowed_gids"):
            client.ping()
    assert server.refused == 3
    assert log.getvalue().count("local_connection_refused") == 1


def test_who_is_not_let_in_may_say_anything_or_nothing(
    make: Make, client: LocalClient, log: io.StringIO, tmp_path: Path
) -> None:
    server = make((NOBODY,), ())
    for data in (b"", b"\xff" * 8, b"\x05\0\0\0ab"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.settimeout(5.0)
            stranger.connect(str(tmp_path / "s"))
            stranger.sendall(data)
            with contextlib.suppress(ConnectionResetError):  # of what it had sent, not all was read
                while stranger.recv(4_096):
                    pass
    assert server.refused == 3
    assert "failed" not in log.getvalue()


def test_the_configuration_names_them(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text("allowed_uids = [0, 1000]\nallowed_gids = []\n")
    config = load_config(["--config", str(file)], {})
    assert (config.allowed_uids, config.allowed_gids) == ((0, 1000), ())
    assert load_config(["--allowed-uids", "0,1000"], {"KVPOOL_CLIENT_ALLOWED_GIDS": ""}) == config
    file.write_text(describe(config))
    assert load_config(["--config", str(file)], {}) == config
