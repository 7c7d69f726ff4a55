"""The address that a node client tells for its data port: whether others can reach it there. Nothing is resolved."""

from __future__ import annotations

from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import unquote

from kvpool_proto.errors import BadRequest

ADDRESS_CHARS_MAX = 300
"""A name of 253 characters, a port, brackets."""


def check_data_address(address: str, peer: str) -> None:
    """Raise BadRequest unless others can be told this address. peer: gRPC's word for where the node called from.

    Loopback is an address only for nodes on the Master's own machine.
    """
    if not address:
        return
    host, colon, port = address.rpartition(":")
    bare = host.startswith("[") == host.endswith("]") and ("[" in host or ":" not in host)
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
    if not (colon and host and bare and 0 < number < 65_536 and len(address) <= ADDRESS_CHARS_MAX):
        raise BadRequest(f"data_address = {address[:ADDRESS_CHARS_MAX]!r}: host:port, or empty for no data port")
    told = _literal(host)
    if host == "*" or (told is not None and told.is_unspecified):
        raise BadRequest(f"data_address = {address!r} is no address: set data_advertise to one of the node's own")
    if _is_loopback(host, told) and not _came_over_loopback(peer):
        raise BadRequest(
            f"data_address = {address!r}, but the node called from {peer!r}: set data_advertise to an address at which"
            " other nodes reach it"
        )


def _literal(host: str) -> IPv4Address | IPv6Address | None:
    with suppress(ValueError):
        address = ip_address(host.removeprefix("[").removesuffix("]"))
        return getattr(address, "ipv4_mapped", None) or address
    return None


def _is_loopback(host: str, literal: IPv4Address | IPv6Address | None) -> bool:
    if literal is not None:
        return literal.is_loopback
    name = host.lower().removesuffix(".")
    return name == "localhost" or name.endswith(".localhost")


def _came_over_loopback(peer: str) -> bool:
    kind, _, where = unquote(peer).partition(":")
    if kind == "unix":
        return True
    literal = _literal(where.rpartition(":")[0])
    return literal is not None and literal.is_loopback
