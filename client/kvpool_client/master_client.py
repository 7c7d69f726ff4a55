"""Calls to the Master: a deadline on every one, typed errors, and no waiting for a Master that is away.

Rules
  - A call ends by its deadline, with the reply or a KVPoolError; nothing else is raised.
  - No answer opens the breaker (breaker.py): from then on calls raise Unreachable at once. The probe is an empty
    Release, sent without waiting for it.
  - The same request is sent once more only where the caller says that it may be, and within the same deadline.
    All ids are chosen by callers, so a request that had arrived all the same changes nothing when it comes again.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import DecodeError

from kvpool_client.breaker import BACKOFF_FIRST_MS, Breaker
from kvpool_client.channel import NotVetted, open_channel
from kvpool_client.clock import SYSTEM, Clock
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.errors import DeadlinePassed, KVPoolError, ProtocolError, Unreachable
from kvpool_proto.pool_pb2_grpc import PoolStub
from kvpool_proto.status import from_rpc_error
from kvpool_proto.tls import Tls

MESSAGE_BYTES_MAX: Final = 16 << 20
PROBE_TIMEOUT_S: Final = 1.0

# gRPC waits up to two minutes between its own attempts to connect; the breaker paces calls, so it may be quicker.
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.initial_reconnect_backoff_ms", BACKOFF_FIRST_MS),
    ("grpc.min_reconnect_backoff_ms", BACKOFF_FIRST_MS),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
_NO_ANSWER: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


class MasterClient:
    """The Master at `address` ("host:port"). Thread safe. Connects by itself, when first used and ever again.

    tls: None: plain text.
    """

    def __init__(
        self,
        address: str,
        clock: Clock = SYSTEM,
        spread: Callable[[], float] = random.random,
        tls: Tls | None = None,
    ) -> None:
        self._clock = clock
        self._spread = spread
        self._channel = open_channel(address, tls, _OPTIONS, clock)
        self.pool = PoolStub(self._channel)
        self._breaker = Breaker()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def breaks(self) -> int:
        """How often the Master was given up until a probe is answered."""
        return self._breaker.opened

    def call(
        self,
        method: Callable[..., _Reply],
        request: Any,
        deadline_ms: int,
        *,
        again: bool = False,
        patient: bool = False,
    ) -> _Reply:
        """The reply of `method`, one of self.pool, by deadline_ms on the clock.

        again: send the request once more, and wait for a connection, if there was none. patient: do so whatever the
        breaker says, for callers whom nobody waits for. Raises Unreachable without an answer, DeadlinePassed when
        there was no time to ask, else what the Master refused with.
        """
        if not patient and not self._may_go():
            raise Unreachable("the Master did not answer lately; it is being probed")
        if deadline_ms <= self._clock.now_ms():
            raise DeadlinePassed("no time left to ask the Master")
        try:
            try:
                reply = method(request, timeout=self._left_s(deadline_ms))
            except grpc.RpcError as error:
                if not (again or patient) or not _silent(error):
                    raise
                reply = method(request, timeout=self._left_s(deadline_ms), wait_for_ready=True)
        except grpc.RpcError as error:
            self._note(_silent(error), probe=False)
            raise _meaning(error) from error
        except ValueError as error:  # gRPC's word for a channel that was closed
            raise Unreachable("the pool is closed") from error
        self._note(False, probe=False)
        return reply

    def close(self) -> None:
        """End the connection; calls under way raise Unreachable."""
        with self._lock:
            self._closed = True
        self._channel.close()

    def _may_go(self) -> bool:
        with self._lock:
            if not self._breaker.open:
                return True
            probe = not self._closed and self._breaker.take_probe(self._clock.now_ms())
        if probe:
            self._probe()
        return False

    def _left_s(self, deadline_ms: int) -> float:
        return max(deadline_ms - self._clock.now_ms(), 0) / 1000

    def _note(self, silent: bool, *, probe: bool) -> None:
        with self._lock:
            if silent:
                self._breaker.silent(self._clock.now_ms(), self._spread(), probe=probe)
            else:
                self._breaker.answered()

    def _probe(self) -> None:
        try:
            future = self.pool.Release.future(pb.ReleaseRequest(), timeout=PROBE_TIMEOUT_S, wait_for_ready=True)
            future.add_done_callback(self._probed)
        except NotVetted:
            self._note(True, probe=True)
        except ValueError:  # closed meanwhile
            return

    def _probed(self, future: Any) -> None:
        cancelled = future.cancelled()  # by close()
        error = None if cancelled else future.exception()
        self._note(cancelled or (error is not None and _silent(error)), probe=True)


def _silent(error: Any) -> bool:
    """Did nobody answer? A status with a reason of ours is an answer, whatever its code."""
    return error.code() in _NO_ANSWER and isinstance(_meaning(error), Unreachable)


def _meaning(error: Any) -> KVPoolError:
    try:
        return from_rpc_error(error)
    except DecodeError:
        return ProtocolError("the error's details cannot be read: is this the Master's address?")
