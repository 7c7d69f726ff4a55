"""The harness of the network tests is itself tested: each thing that may befall a link does so, and is undone."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from integration.network_world import BRIDGE, PREFIX, Network
from integration.relay import Relay

PORT = 4000
SHORT_S = 0.4
"""Long enough for a packet within this machine, not for a second SYN."""
LONG_S = 10.0
MIB = 1 << 20


@pytest.fixture(scope="module")
def built() -> Iterator[Network]:
    with Network("a", "b", "c") as network:
        yield network


@pytest.fixture
def network(built: Network) -> Iterator[Network]:
    yield built
    built.heal()


def connected(network: Network, here: str, there: str, timeout_s: float = SHORT_S) -> tuple[socket.socket, ...]:
    """Both ends of a new connection. Raises OSError."""
    with network.socket(there) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((network.address(there), PORT))
        listener.listen()
        near = network.socket(here)
        try:
            near.settimeout(timeout_s)
            near.connect((network.address(there), PORT))
            listener.settimeout(timeout_s)
            far, _ = listener.accept()
        except OSError:
            near.close()
            raise
    for end in (near, far):
        end.settimeout(LONG_S)
    return near, far


def reaches(network: Network, here: str, there: str) -> bool:
    """Can a connection be made?"""
    try:
        ends = connected(network, here, there)
    except OSError:
        return False
    for end in ends:
        end.close()
    return True


def send(near: socket.socket, far: socket.socket, size_bytes: int) -> float:
    """How long this much takes from one end to the other, in seconds."""
    data, got = os.urandom(size_bytes), bytearray()

    def sending() -> None:
        near.sendall(data)

    thread = threading.Thread(target=sending)
    began_s = time.monotonic()
    thread.start()
    while len(got) < size_bytes:
        got += far.recv(MIB)
    took_s = time.monotonic() - began_s
    thread.join(LONG_S)
    assert got == data
    return took_s


def disciplines(network: Network) -> str:
    """The queues of all links."""
    listed = [
        subprocess.run(
            ["tc", "-n", network.namespace(where), "qdisc", "show"], capture_output=True, text=True, check=True
        )
        for where in (BRIDGE, *network.hosts)
    ]
    return "".join(done.stdout for done in listed)


def test_hosts_reach_each_other_and_nobody_else_reaches_them(network: Network) -> None:
    for here, there in (("a", "b"), ("b", "a"), ("c", "a")):
        assert reaches(network, here, there)
    with network.socket("a") as listener, socket.socket() as outside:
        listener.bind((network.address("a"), PORT))
        listener.listen()
        for end in (listener, outside):
            end.settimeout(SHORT_S)
        with suppress(OSError):  # something else may answer for that address
            outside.connect((network.address("a"), PORT))
        with pytest.raises(TimeoutError):
            listener.accept()


def test_a_cut_is_between_two_hosts_only(network: Network) -> None:
    network.cut("a", "b")
    assert not reaches(network, "a", "b")
    assert not reaches(network, "b", "a")
    assert reaches(network, "a", "c")
    assert reaches(network, "c", "b")
    network.heal()
    assert reaches(network, "a", "b")


def test_a_cut_of_one_way_lets_the_other_way_pass(network: Network) -> None:
    near, far = connected(network, "a", "b")
    with near, far:
        network.cut("a", "b", one_way=True)
        far.sendall(b"still heard")
        assert near.recv(100) == b"still heard"
        near.sendall(b"not heard")
        far.settimeout(SHORT_S)
        with pytest.raises(TimeoutError):
            far.recv(100)
        network.heal()
        far.settimeout(LONG_S)
        assert far.recv(100) == b"not heard", "sent again once the cut is healed"


def test_a_lossy_link_loses_packets_and_tcp_makes_up_for_it(network: Network) -> None:
    near, far = connected(network, "a", "b")
    with near, far:
        send(near, far, MIB)
        assert network.dropped("b") == 0
        network.lossy("b", 10)
        for here, there, at in ((near, far, "b"), (far, near, "a")):
            before = network.dropped(at)
            for _ in range(20):
                send(here, there, MIB)
                if network.dropped(at) > before:
                    break
            assert network.dropped(at) > before


@pytest.mark.parametrize(("here", "there"), [("a", "b"), ("b", "a")])
def test_a_thin_link_is_thin_both_ways(network: Network, here: str, there: str) -> None:
    near, far = connected(network, here, there)
    with near, far:
        network.thin("b", "8mbit")
        assert send(near, far, MIB) > 0.7, "1 MiB at 1 MB/s"
        assert "tbf" in disciplines(network)
        network.heal()
        assert "tbf" not in disciplines(network)


def test_a_link_that_is_down_comes_up_again(network: Network) -> None:
    network.down("b")
    assert not reaches(network, "a", "b")
    assert not reaches(network, "b", "a")
    network.up("b")
    assert reaches(network, "a", "b")


def test_a_relay_delays_both_ways_and_changes_nothing(network: Network) -> None:
    with network.socket("b") as target:
        target.bind((network.address("b"), PORT + 1))
        target.listen()

        def lead() -> socket.socket:
            end = network.socket("b")
            end.connect((network.address("b"), PORT + 1))
            return end

        listener = network.socket("b")
        listener.bind((network.address("b"), PORT + 2))
        with Relay(listener, lead, delay_s=0.15) as relay, network.socket("a") as near:
            near.settimeout(LONG_S)
            near.connect((network.address("b"), PORT + 2))
            far, _ = target.accept()
            with far:
                far.settimeout(LONG_S)
                assert send(near, far, 4 * MIB) >= 0.15
                assert send(far, near, 1) >= 0.15
                assert relay.carried_bytes == 4 * MIB + 1
                near.close()
                assert far.recv(1) == b"", "the end arrives as well"


def test_nothing_is_left_behind(network: Network) -> None:
    """Of a test process that died: its namespaces, and what ran in them."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = f"{PREFIX}{gone.pid}-0-a"
    subprocess.run(["ip", "netns", "add", left], check=True)
    inside = subprocess.Popen(["ip", "netns", "exec", left, "sleep", "600"])
    while os.readlink(f"/proc/{inside.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="in the middle"), Network("a") as other:
        raise RuntimeError("in the middle")
    assert inside.wait(LONG_S) == -9
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert left not in names
    assert not [host for host in (BRIDGE, "a") if other.namespace(host) in names]
    assert network.namespace("a") in names
