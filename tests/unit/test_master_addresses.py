"""Which addresses of data ports the Master tells others."""

from __future__ import annotations

import pytest

from kvpool_master.addresses import check_data_address
from kvpool_proto.errors import BadRequest

ELSEWHERE = "ipv4:10.0.0.7:40000"


@pytest.mark.parametrize(
    "address", ["", "10.0.0.1:9502", "node-7.cluster:1", "[2001:db8::7]:65535", "[::ffff:10.0.0.1]:9502"]
)
def test_an_address_that_others_can_reach(address: str) -> None:
    check_data_address(address, ELSEWHERE)


@pytest.mark.parametrize(
    "address",
    [
        "node",
        "node:",
        ":9502",
        "node:0",
        "node:65536",
        "node:x",
        "2001:db8::7:9502",
        "[2001:db8::7:9502",
        "a" * 400 + ":1",
    ],
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(BadRequest, match="host:port"):
        check_data_address(address, ELSEWHERE)


@pytest.mark.parametrize("address", ["0.0.0.0:9502", "[::]:9502", "*:9502", "[::ffff:0.0.0.0]:9502"])
@pytest.mark.parametrize("peer", [ELSEWHERE, "ipv4:127.0.0.1:5"])
def test_a_wildcard_is_no_address(address: str, peer: str) -> None:
    with pytest.raises(BadRequest, match="data_advertise"):
        check_data_address(address, peer)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:9502", "127.9.9.9:9502", "localhost:9502", "LocalHost.:9502", "x.localhost:1", "[::1]:9502"]
)
@pytest.mark.parametrize(
    ("peer", "here"),
    [
        ("ipv4:127.0.0.1:40000", True),
        ("ipv6:%5B::1%5D:40000", True),
        ("ipv6:[::1]:40000", True),
        ("ipv6:%5B::ffff:127.0.0.1%5D:40000", True),
        ("unix:", True),
        (ELSEWHERE, False),
        ("ipv6:%5B2001:db8::5%5D:40000", False),
        ("ipv6:%5Bfe80::1%25eth0%5D:40000", False),
        ("", False),
    ],
)
def test_loopback_is_an_address_for_the_masters_own_machine(address: str, peer: str, here: bool) -> None:
    if here:
        check_data_address(address, peer)
        return
    with pytest.raises(BadRequest, match="data_advertise"):
        check_data_address(address, peer)
