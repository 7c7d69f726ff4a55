"""Hosts of their own on this machine: network namespaces on a bridge, and what may befall the links between them.

Rules
  - Names carry the test process's id: all of it goes at the end, whatever happened, and what a process that died left
    behind goes when the next one starts.
  - Nothing is reachable from outside: the bridge has a namespace of its own, and the tests' namespace no link to it.
  - Loss counts packets as the kernel hands them over, which may be larger than the link's.
  - This kernel has no netem: what a link may do is drop, one way too (nftables), be thin (tc tbf), or be down; a delay
    is made by relay.py.
  - Without root, ip, tc and nft, or where namespaces are not allowed, tests are skipped, and say why.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

import pytest

BRIDGE: Final = "bridge"
LINK: Final = "eth0"
CHAIN: Final = ("inet", "kvpool", "heard")
TBF: Final = ("burst", "64kb", "latency", "200ms")
PREFIX: Final = "kvpool-test-"
COMMAND_S: Final = 10
_NETWORK_NAMESPACE: Final = 0x40000000
_numbers = itertools.count()


class Network:
    """A context manager. hosts: names of up to 10 letters; each has an address of its own and its own loopback."""

    def __init__(self, *hosts: str) -> None:
        self.hosts = hosts
        self._prefix = f"{PREFIX}{os.getpid()}-{next(_numbers)}-"
        self._addresses = {host: f"10.77.0.{number}" for number, host in enumerate(hosts, start=1)}
        self._thin: set[str] = set()
        self._down: set[str] = set()

    # -- who is where ------------------------------------------------------------------------------------

    def address(self, host: str) -> str:
        """Its IPv4 address."""
        return self._addresses[host]

    def namespace(self, host: str) -> str:
        """The name of its network namespace."""
        return f"{self._prefix}{host}"

    def inside(self, host: str) -> tuple[str, ...]:
        """What a command line begins with to run there; the process keeps its id."""
        return ("ip", "netns", "exec", self.namespace(host))

    def socket(self, host: str) -> socket.socket:
        """A TCP socket of this process, as if made there."""
        with open("/proc/thread-self/ns/net") as here, open(f"/run/netns/{self.namespace(host)}") as there:
            _enter(there.fileno())
            try:
                return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            finally:
                _enter(here.fileno())

    # -- what befalls it ---------------------------------------------------------------------------------

    def cut(self, here: str, there: str, *, one_way: bool = False) -> None:
        """`there` hears nothing of `here` any more; unless it is one way, nor does `here` of `there`."""
        self._drop(there, "ip", "saddr", self.address(here))
        if not one_way:
            self._drop(here, "ip", "saddr", self.address(there))

    def lossy(self, host: str, percent: int) -> None:
        """So many of the packets to and from the host are lost, at random."""
        chance = ("numgen", "random", "mod", "100", "<", str(percent))
        self._drop(host, *chance)
        for other in self.hosts:
            if other != host:
                self._drop(other, "ip", "saddr", self.address(host), *chance)

    def thin(self, host: str, rate: str) -> None:
        """The host's link carries this much each way; a rate as tc takes it: "20mbit"."""
        self._thin.add(host)
        for where, link in ((host, LINK), (BRIDGE, host)):
            _run("tc", "-n", self.namespace(where), "qdisc", "replace", "dev", link, "root", "tbf", "rate", rate, *TBF)

    def down(self, host: str) -> None:
        """The host's link is down: it knows of no way to the others."""
        self._down.add(host)
        _run("ip", "-n", self.namespace(host), "link", "set", "dev", LINK, "down")

    def up(self, host: str) -> None:
        self._down.discard(host)
        _run("ip", "-n", self.namespace(host), "link", "set", "dev", LINK, "up")

    def dropped(self, host: str) -> int:
        """Packets that did not reach it since the links were last healed."""
        rules = _run(*self.inside(host), "nft", "list", "chain", *CHAIN)
        return sum(map(int, re.findall(r"counter packets (\d+)", rules)))

    def heal(self) -> None:
        """All links are as they were at the start."""
        for host in self.hosts:
            _run(*self.inside(host), "nft", "flush", "chain", *CHAIN)
        for host in tuple(self._thin):
            for where, link in ((host, LINK), (BRIDGE, host)):
                _run("tc", "-n", self.namespace(where), "qdisc", "del", "dev", link, "root")
            self._thin.discard(host)
        for host in tuple(self._down):
            self.up(host)

    # -- start and end -----------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        _require_tools()
        _remove_leftovers()
        try:
            self._build()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._remove()

    def _build(self) -> None:
        bridge = self.namespace(BRIDGE)
        try:
            _run("ip", "netns", "add", bridge)
            _run("ip", "netns", "exec", bridge, "true")
        except AssertionError as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        _run("ip", "-n", bridge, "link", "add", "name", BRIDGE, "type", "bridge")
        _run("ip", "-n", bridge, "link", "set", "dev", BRIDGE, "up")
        for host in self.hosts:
            there = self.namespace(host)
            _run("ip", "netns", "add", there)
            _run("ip", "-n", bridge, "link", "add", "name", host, "type", "veth", "peer", "name", LINK, "netns", there)
            _run("ip", "-n", bridge, "link", "set", "dev", host, "master", BRIDGE, "up")
            _run("ip", "-n", there, "address", "add", f"{self.address(host)}/24", "dev", LINK)
            for link in ("lo", LINK):
                _run("ip", "-n", there, "link", "set", "dev", link, "up")
            family, table, chain = CHAIN
            hook = f"add chain {family} {table} {chain} {{ type filter hook input priority 0; }}"
            _run(*self.inside(host), "nft", f"add table {family} {table}; {hook}")

    def _drop(self, host: str, *which: str) -> None:
        _run(*self.inside(host), "nft", "add", "rule", *CHAIN, "iifname", LINK, *which, "counter", "drop")

    def _remove(self) -> None:
        for name in _namespaces():
            if name.startswith(self._prefix):
                _remove(name)


def _enter(fd: int) -> None:
    """Move this thread into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _NETWORK_NAMESPACE):
        raise OSError(ctypes.get_errno(), "setns")


def _require_tools() -> None:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    missing = [tool for tool in ("ip", "tc", "nft") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian packages iproute2, nftables)")


def _namespaces() -> Sequence[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line]


def _remove_leftovers() -> None:
    """Namespaces, and what runs in them, of test processes that are gone."""
    for name in _namespaces():
        found = re.match(rf"{PREFIX}(\d+)-", name)
        if found and not os.path.exists(f"/proc/{found[1]}"):
            for pid in _run("ip", "netns", "pids", name).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _remove(name)


def _remove(name: str) -> None:
    _run("ip", "netns", "del", name)


def _run(*words: str) -> str:
    """A command's output; AssertionError with what it said, unless it succeeds."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
    return done.stdout
