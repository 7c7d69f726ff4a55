"""The Unix socket between the node client and its node's workers: frames, descriptors, the worker's end.

Rules
  - A frame is 4 bytes of length, little-endian, then one LocalRequest or LocalReply of at most FRAME_BYTES_MAX.
  - Every request gets one reply. The reply to Hello carries one descriptor per segment.
  - Whatever a worker sends, and wherever it breaks off, costs its own connection only.
  - A connection that has sent one sound request may be idle; before that, and within a frame, time is limited.
  - The descriptors and mappings that a worker got outlive the connection and the node client.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Final, TypeVar

from google.protobuf.message import DecodeError

from kvpool_client.clock import SYSTEM, Clock
from kvpool_client.segment import AttachedSegment
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import BY_REASON, KVPoolError, MessageTooLarge, ProtocolError, Unreachable

FRAME_BYTES_MAX: Final = 1 << 20
PROTOCOL: Final = 1
SEGMENTS_MAX: Final = 64
"""Descriptors in one reply; the kernel takes 253."""

_LENGTH: Final = struct.Struct("<I")
_Message = TypeVar("_Message", pb.LocalRequest, pb.LocalReply)


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a node client tells a worker. worker_id: for reservations, unique to this Hello."""

    node_id: str
    incarnation: int
    epoch: int
    worker_id: int
    segments: tuple[AttachedSegment, ...]


class LocalClient:
    """A worker's end. Connects when first used, and again (once per call) when the connection has dropped.

    Every call takes at most timeout_s, waiting for other threads' calls included; it raises Unreachable when there is
    no answer, ProtocolError when there is a wrong one, or the node client's own refusal.
    """

    def __init__(self, socket_path: str, timeout_s: float) -> None:
        self._path = socket_path
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def hello(self, name: str) -> Welcome:
        """Introduce this process (name: for logs) and map every segment. Each call makes a new worker_id.

        The caller closes the segments. Raises Unreachable also while the node client has no Master; OSError when
        there is no room for a mapping.
        """
        reply, fds = self._call(pb.LocalRequest(hello=pb.LocalHello(protocol=PROTOCOL, name=name)))
        welcome = reply.welcome
        segments: list[AttachedSegment] = []
        try:
            if not welcome.worker_id or len(fds) != len(welcome.segments):
                raise ProtocolError(f"{len(fds)} descriptors for {len(welcome.segments)} segments")
            segments.extend(  # one by one: what is mapped when the next fails is closed below
                AttachedSegment(fds.pop(0), told.handle, told.size_bytes, told.slab_bytes, welcome.epoch)
                for told in welcome.segments
            )
        except BaseException as error:
            for segment in segments:
                segment.close()
            if isinstance(error, (ValueError, OverflowError)):  # mmap's words for sizes that cannot be
                raise ProtocolError(f"a segment that cannot be mapped: {error}") from error
            raise
        finally:
            _close_all(fds)
        return Welcome(welcome.node_id, welcome.incarnation, welcome.epoch, welcome.worker_id, tuple(segments))

    def report_bad(self, block: pb.BadBlock, epoch: int, segment: int, slot: int, slot_bytes: int) -> bool:
        """Let the node client check a part of a block again. segment: its handle within `epoch`.

        True: it is bad, and the Master has been told or will be. Raises MessageTooLarge for a chain over 1 MiB.
        """
        request = pb.LocalBadBlock(block=block, segment=segment, slot=slot, slot_bytes=slot_bytes, epoch=epoch)
        reply, fds = self._call(pb.LocalRequest(bad_block=request))
        _close_all(fds)
        return reply.bad_confirmed

    def report_use(self, use: pb.LocalUse) -> None:
        """Tell the node client what this worker did, for its metrics."""
        _close_all(self._call(pb.LocalRequest(use=use))[1])

    def ping(self) -> None:
        """Return if the node client answers."""
        _close_all(self._call(pb.LocalRequest(ping=pb.LocalPing()))[1])

    def close(self) -> None:
        """End the connection. Segments stay mapped; a later call connects again."""
        with self._lock:
            self._disconnect()

    def _call(self, request: pb.LocalRequest) -> tuple[pb.LocalReply, list[int]]:
        """The reply and the descriptors that came with it, which are the caller's to close."""
        frame = pack_frame(request)
        deadline = Deadline(self._timeout_s)
        if not self._lock.acquire(timeout=self._timeout_s):
            raise Unreachable(f"node client at {self._path}: other calls are waiting for it")
        try:
            reused = self._socket is not None
            try:
                reply, fds = self._exchange(frame, deadline)
            except (OSError, EOFError):
                if not reused:
                    raise
                reply, fds = self._exchange(frame, deadline)  # the old connection had dropped; requests may be repeated
        except (OSError, EOFError) as error:
            raise Unreachable(f"node client at {self._path}: {error or type(error).__name__}") from error
        finally:
            self._lock.release()
        if reply.error_reason:
            _close_all(fds)
            raise BY_REASON.get(reply.error_reason, KVPoolError)(reply.error_text)
        return reply, fds

    def _exchange(self, frame: bytes, deadline: Deadline) -> tuple[pb.LocalReply, list[int]]:
        """One request and its reply. After any error the connection is gone."""
        fds: list[int] = []
        try:
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                deadline.limit(self._socket)
                self._socket.connect(self._path)
            deadline.limit(self._socket)
            self._socket.sendall(frame)
            return receive_frame(self._socket, pb.LocalReply, deadline, fds), fds
        except BaseException:
            _close_all(fds)
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class Deadline:
    """The end of a time that starts now, for several socket calls in a row."""

    def __init__(self, timeout_s: float, clock: Clock = SYSTEM) -> None:
        self._now_s = clock.precise_s
        self._end_s = self._now_s() + timeout_s

    def limit(self, sock: socket.socket) -> None:
        """Let the next call on `sock` take no longer than what is left. Raises TimeoutError when nothing is."""
        left_s = self._end_s - self._now_s()
        if left_s <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left_s)


def pack_frame(message: pb.LocalRequest | pb.LocalReply) -> bytes:
    """The message as it travels. Raises MessageTooLarge."""
    body = message.SerializeToString()
    if len(body) > FRAME_BYTES_MAX:
        raise MessageTooLarge(f"{len(body)} bytes; a frame on the Unix socket has at most {FRAME_BYTES_MAX}")
    return _LENGTH.pack(len(body)) + body


def receive_frame(
    sock: socket.socket, kind: type[_Message], deadline: Deadline, fds: list[int] | None = None
) -> _Message:
    """Read one frame; descriptors that come with it are appended to `fds` at once, also if this raises.

    Raises EOFError when the other side has closed, TimeoutError, OSError; MessageTooLarge or ProtocolError for a
    frame that is none, after which nothing more can be read.
    """
    (length,) = _LENGTH.unpack(_receive(sock, _LENGTH.size, deadline, fds))
    if length > FRAME_BYTES_MAX:
        raise MessageTooLarge(f"a frame of {length} bytes; at most {FRAME_BYTES_MAX}")
    try:
        return kind.FromString(_receive(sock, length, deadline, None))
    except DecodeError as error:
        raise ProtocolError(f"not a {kind.__name__}") from error


def _receive(sock: socket.socket, size_bytes: int, deadline: Deadline, fds: list[int] | None) -> bytes:
    got = bytearray()
    while len(got) < size_bytes:
        deadline.limit(sock)
        if fds is None:
            piece = sock.recv(size_bytes - len(got))
        else:
            piece, found, flags, _ = socket.recv_fds(sock, size_bytes - len(got), SEGMENTS_MAX, socket.MSG_CMSG_CLOEXEC)
            fds += found
            if flags & socket.MSG_CTRUNC:
                raise ProtocolError(f"descriptors are missing: more than {SEGMENTS_MAX}, or our limit is reached")
        if not piece:
            raise EOFError("the other side closed the connection")
        got += piece
    return bytes(got)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
