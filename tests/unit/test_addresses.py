"""What is told to the Master as the data port's address, and what is refused."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from kvpool_client.addresses import advertised, is_loopback, is_wildcard
from kvpool_client.start_error import StartError

NEAR, FAR = "127.0.0.1:50051", "10.0.0.9:50051"


@pytest.mark.parametrize(
    ("listen", "advertise", "master", "address"),
    [
        ("127.0.0.1:9502", "", NEAR, "127.0.0.1:9600"),
        ("127.0.0.1:0", "", "localhost:50051", "127.0.0.1:9600"),
        ("[::1]:0", "", "[::1]:50051", "[::1]:9600"),
        ("10.0.0.2:0", "", FAR, "10.0.0.2:9600"),
        ("0.0.0.0:9600", "10.0.0.2:7000", FAR, "10.0.0.2:7000"),
        ("0.0.0.0:9600", "node-2.example:0", FAR, "node-2.example:9600"),
        ("127.0.0.1:9600", "10.0.0.2:7000", FAR, "10.0.0.2:7000"),
        ("[::]:0", "[fd00::2]:0", FAR, "[fd00::2]:9600"),
    ],
)
def test_what_is_told(listen: str, advertise: str, master: str, address: str) -> None:
    assert advertised(listen, advertise, 9600, master) == address


@pytest.mark.parametrize(
    ("listen", "advertise", "master", "says"),
    [
        ("0.0.0.0:9502", "", NEAR, "data_listen = '0.0.0.0:9502' says nowhere"),
        ("[::]:9502", "", FAR, "set data_advertise"),
        ("10.0.0.2:9502", "0.0.0.0:9502", FAR, "data_advertise = '0.0.0.0:9502' says nowhere"),
        ("127.0.0.1:9502", "", FAR, "set data_listen and data_advertise"),
        ("0.0.0.0:9502", "localhost:9502", FAR, "data_advertise = 'localhost:9502' is reached from this machine only"),
        ("[::1]:9502", "", FAR, "10.0.0.9:50051 is elsewhere"),
    ],
)
def test_what_is_refused(listen: str, advertise: str, master: str, says: str) -> None:
    with pytest.raises(StartError) as refused:
        advertised(listen, advertise, 9502, master)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("found", "near"), [(["127.0.1.1", "::1"], True), (["127.0.1.1", "10.0.0.9"], False), ([], False)]
)
def test_the_name_of_a_master_is_looked_up(monkeypatch: pytest.MonkeyPatch, found: list[str], near: bool) -> None:
    def answer(host: str, *_: Any, **__: Any) -> list[Any]:
        assert host == "pool"
        if not found:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    if near:
        assert advertised("127.0.0.1:0", "", 9502, "pool:50051") == "127.0.0.1:9502"
    else:
        with pytest.raises(StartError, match="elsewhere"):
            advertised("127.0.0.1:0", "", 9502, "pool:50051")


def test_kinds_of_hosts() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1", "localhost", "a.localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "::", "0.0.0.0", "local", "localhost.example", "::ffff:10.0.0.1")))
    assert all(map(is_wildcard, ("0.0.0.0", "::", "*")))
    assert not any(map(is_wildcard, ("127.0.0.1", "node", "::1")))
