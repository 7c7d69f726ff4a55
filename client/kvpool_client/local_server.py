"""The node client's end of the Unix socket; what travels on it is in local_socket.py.

Rules
  - Who gets in may write all of the segments. The file's mode lets them in; where users or groups are named, the
    kernel's word on the process that connected has to name one of them, too.
  - A socket file that nobody answers is a dead owner's and is replaced; one that is answered is refused.
  - A sound request gets a reply, a refusal included; after a frame that is none, the connection ends.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kvpool_client.acceptor import Acceptor
from kvpool_client.local_socket import PROTOCOL, Deadline, pack_frame, receive_frame
from kvpool_client.logs import Log
from kvpool_client.start_error import StartError
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import Forbidden, KVPoolError, MessageTooLarge, ProtocolError

BACKLOG: Final = 64
REFUSAL_S: Final = 0.2
"""How long one that is not let in may take to hear so."""
REFUSALS_TOLD_MAX: Final = 1024
_PATH_BYTES_MAX: Final = 107
"""What the kernel takes in sun_path."""


_CREDENTIALS: Final = struct.Struct("iII")
"""What SO_PEERCRED answers: process, user, group."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Whom the kernel may say that a connection comes from; nobody named: whoever the socket's mode lets in."""

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()

    def refusal(self, connection: socket.socket) -> str:
        """Why it may not come in; empty: it may."""
        if not self.uids and not self.gids:
            return ""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, gid = _CREDENTIALS.unpack(credentials)
        if uid in self.uids or gid in self.gids:
            return ""
        return f"user {uid} of group {gid} is in neither allowed_uids nor allowed_gids"


ANYBODY: Final = Admission()


class LocalNode(Protocol):
    """What the server asks of the node."""

    def welcome(self, name: str) -> tuple[pb.LocalWelcome, list[int]]:
        """Let a worker in; answers the descriptors to send and close. Raises KVPoolError, OSError."""
        ...

    def report_bad(self, complaint: pb.LocalBadBlock) -> bool:
        """Check a slot again and see to the report. Raises KVPoolError."""
        ...

    def used(self, use: pb.LocalUse) -> None:
        """Take in what a worker did with the pool."""
        ...


class LocalServer:
    """Serves workers on `path` until stop(), which removes the file. Raises StartError."""

    def __init__(
        self,
        path: Path,
        mode: int,
        node: LocalNode,
        timeout_s: float,
        connections_max: int,
        log: Log,
        admission: Admission = ANYBODY,
    ) -> None:
        self._path = path
        self._node = node
        self._timeout_s = timeout_s
        self._log = log
        self._admission = admission
        self._told: set[str] = set()  # refusals that were logged
        self.refused = 0
        """Connections that were not let in."""
        listener = _listen(path, mode)
        self._inode = os.lstat(path).st_ino
        self._acceptor = Acceptor("local-socket", listener, self._serve, self._broken, connections_max)

    @property
    def open_connections(self) -> int:
        """How many workers are connected."""
        return self._acceptor.open_connections

    def start(self) -> None:
        """Begin to serve."""
        self._acceptor.start()

    def stop(self) -> None:
        """End all connections and remove the socket file, if it is still ours."""
        self._acceptor.stop()
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(self._path).st_ino == self._inode:
                os.unlink(self._path)

    def _serve(self, connection: socket.socket) -> None:
        if refusal := self._admission.refusal(connection):
            self._refuse(connection, refusal)
            return
        known = False  # has it sent a sound request yet?
        while True:
            if known:
                connection.settimeout(None)
                if not connection.recv(1, socket.MSG_PEEK):
                    return
            deadline = Deadline(self._timeout_s)
            fds: list[int] = []
            try:
                request = receive_frame(connection, pb.LocalRequest, deadline)
                known = True
                reply = self._answer(request, fds)
            except (MessageTooLarge, ProtocolError) as error:
                reply = _refusal(error)
                known = False
                self._log.warning("local_frame_refused", text=str(error))
            try:
                deadline.limit(connection)
                _send(connection, reply, fds)
            finally:
                for fd in fds:
                    os.close(fd)
            if not known:
                return

    def _refuse(self, connection: socket.socket, refusal: str) -> None:
        """Not let in: it is told why, and so is the log, once for each user and group, as far as they fit."""
        self.refused += 1
        if refusal not in self._told and len(self._told) < REFUSALS_TOLD_MAX:
            self._told.add(refusal)
            self._log.warning("local_connection_refused", text=refusal)
        deadline = Deadline(REFUSAL_S)
        with contextlib.suppress(KVPoolError):  # whatever it wants; it reads ours only after it has sent its own
            receive_frame(connection, pb.LocalRequest, deadline)
        deadline.limit(connection)
        _send(connection, _refusal(Forbidden(refusal)), [])

    def _answer(self, request: pb.LocalRequest, fds: list[int]) -> pb.LocalReply:
        """The reply; descriptors to go with it are appended to `fds`. Raises ProtocolError for no request at all."""
        try:
            match request.WhichOneof("kind"):
                case "hello":
                    if request.hello.protocol != PROTOCOL:
                        raise ProtocolError(f"protocol {request.hello.protocol}: this node client speaks {PROTOCOL}")
                    welcome, opened = self._node.welcome(request.hello.name[:256])
                    fds += opened
                    return pb.LocalReply(welcome=welcome)
                case "bad_block":
                    return pb.LocalReply(bad_confirmed=self._node.report_bad(request.bad_block))
                case "use":
                    self._node.used(request.use)
                    return pb.LocalReply()
                case "ping":
                    return pb.LocalReply()
                case _:
                    raise ProtocolError("an empty request")
        except ProtocolError:
            raise
        except KVPoolError as error:
            return _refusal(error)
        except OSError as error:
            self._log.error("local_request_failed", text=str(error))
            return _refusal(KVPoolError(f"the node client could not: {error.strerror}"))

    def _broken(self, error: Exception) -> None:
        self._log.error("local_connection_failed", text=repr(error))


def _refusal(error: KVPoolError) -> pb.LocalReply:
    return pb.LocalReply(error_reason=error.reason, error_text=str(error))


def _send(connection: socket.socket, reply: pb.LocalReply, fds: list[int]) -> None:
    frame = pack_frame(reply)
    sent = socket.send_fds(connection, [frame], fds) if fds else 0
    connection.sendall(frame[sent:])


def _listen(path: Path, mode: int) -> socket.socket:
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise StartError(f"socket_path has {len(os.fsencode(path))} bytes; the kernel takes {_PATH_BYTES_MAX}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_dead(path)
        listener.bind(os.fspath(path))
        os.chmod(path, mode)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(f"socket_path = {path}: {error.strerror}{_hint(error)}") from error
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_dead(path: Path) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise StartError(f"socket_path = {path}: something that is not a socket is there; remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except TimeoutError:
            pass  # somebody is there, and busy
    raise StartError(f"socket_path = {path}: another node client listens there; stop it or choose another path")


def _hint(error: OSError) -> str:
    if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT):
        return ""
    folder = os.environ.get("XDG_RUNTIME_DIR") or f"/tmp/kvpool-{os.geteuid()}"
    return f"; without rights there, set for example socket_path = {folder}/node.sock"
