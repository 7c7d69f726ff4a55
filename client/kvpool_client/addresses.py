"""Where peers reach this node's data port: what is told to the Master, and what must not be.

Rules
  - Where we listen and what we tell others are two settings; the second follows from the first where it can.
  - A wildcard is no address, and a loopback address is one for peers on this machine only: it may be told only to a
    Master that is itself reached over loopback.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

from kvpool_client.config import split_address
from kvpool_client.start_error import StartError


def advertised(listen: str, advertise: str, port: int, master: str) -> str:
    """host:port to tell the Master. listen, advertise, master: the settings; port: what listen took.

    Port 0 in `advertise` means that port. A Master's name that does not resolve now counts as remote. Raises
    StartError, which says what to set.
    """
    name = "data_advertise" if advertise else "data_listen"
    host, told = split_address(name, advertise or listen)
    if is_wildcard(host):
        raise StartError(
            f"{name} = {advertise or listen!r} says nowhere in particular: set data_advertise to the host:port at "
            "which other nodes reach this one"
        )
    if is_loopback(host) and not _on_loopback(split_address("master", master)[0]):
        raise StartError(
            f"{name} = {advertise or listen!r} is reached from this machine only, but the Master at {master} is "
            'elsewhere: set data_listen and data_advertise to an address of this node, or data_listen = "" for no '
            "data port"
        )
    told = told if advertise and told else port
    return f"[{host}]:{told}" if ":" in host else f"{host}:{told}"


def is_loopback(host: str) -> bool:
    """Does the name or literal mean this machine, wherever it is said? Nothing is resolved."""
    address = _literal(host)
    if address is None:
        return host == "localhost" or host.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_wildcard(host: str) -> bool:
    """Does it stand for all addresses of a machine?"""
    address = _literal(host)
    return host == "*" if address is None else address.is_unspecified


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with suppress(ValueError):
        return ipaddress.ip_address(host)
    return None


def _on_loopback(host: str) -> bool:
    """The same as is_loopback for a name that is resolved."""
    if is_loopback(host):
        return True
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(found) and all(map(is_loopback, found))
