"""local_socket.py, the worker's end: how long a call may take, and what it makes of strange answers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpool_client.local_socket import Deadline, LocalClient, pack_frame, receive_frame
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import ProtocolError, Unreachable


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as found:
        found.bind(str(tmp_path / "node.sock"))
        found.listen(8)
        yield found


def answer(listener: socket.socket, *replies: pb.LocalReply) -> None:
    """One connection; as many requests as there are replies."""
    connection, _ = listener.accept()
    with connection:
        for reply in replies:
            receive_frame(connection, pb.LocalRequest, Deadline(30.0))
            connection.sendall(pack_frame(reply))


def test_a_node_client_that_hangs_holds_nobody_longer_than_the_timeout(listener: socket.socket, tmp_path: Path) -> None:
    """Not even those that wait for others' calls, nor those whose connection has dropped."""
    client = LocalClient(str(tmp_path / "node.sock"), timeout_s=0.4)
    server = threading.Thread(target=answer, args=(listener, pb.LocalReply()))
    server.start()
    client.ping()
    server.join()  # the connection is closed now; the next one is accepted by nobody
    took_s: list[float] = []

    def call() -> None:
        began_s = time.perf_counter()
        with pytest.raises(Unreachable):
            client.ping()
        took_s.append(time.perf_counter() - began_s)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(took_s) == 4
    assert max(took_s) < 0.75
    client.close()


def test_a_connection_that_dropped_is_made_again(listener: socket.socket, tmp_path: Path) -> None:
    client = LocalClient(str(tmp_path / "node.sock"), timeout_s=30.0)
    for _ in range(2):
        server = threading.Thread(target=answer, args=(listener, pb.LocalReply(bad_confirmed=True)))
        server.start()
        assert client.report_bad(pb.BadBlock(), 7, 1, 2, 4096)
        server.join()
    client.close()


def test_a_welcome_without_its_descriptors(listener: socket.socket, tmp_path: Path) -> None:
    client = LocalClient(str(tmp_path / "node.sock"), timeout_s=30.0)
    welcome = pb.LocalWelcome(worker_id=7, segments=[pb.LocalSegment(handle=1, size_bytes=1 << 20)])
    server = threading.Thread(target=answer, args=(listener, pb.LocalReply(welcome=welcome)))
    server.start()
    with pytest.raises(ProtocolError, match="0 descriptors for 1 segments"):
        client.hello("test")
    server.join()
    client.close()
