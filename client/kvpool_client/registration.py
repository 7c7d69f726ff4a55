"""Carries out what session.py decides: registers, keeps the session stream, reports inventories, retires.

Rules
  - A channel and a thread of its own; heartbeats and inventories leave from gRPC's sending threads, so that neither a
    long order nor a slow call delays them. The question whether we are there is answered from the thread that hears it.
  - Every call has a deadline, but the two streams: they end with the session, which ends when the Master is silent.
    There is no end of trying again.
  - Events of a stream that was closed are dropped.
"""

from __future__ import annotations

import queue
import random
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import grpc

from kvpool_client.channel import NotVetted, generation_of, open_channel
from kvpool_client.clock import Clock
from kvpool_client.copying import Copier
from kvpool_client.inventory_report import InventoryReport
from kvpool_client.logs import Log
from kvpool_client.node import Node
from kvpool_client.orders import Orders
from kvpool_client.session import Session, State
from kvpool_client.session_messages import (
    CloseSession,
    Due,
    Event,
    Failed,
    Forgotten,
    HeartbeatOk,
    Instruction,
    InventoryDone,
    InventoryFailed,
    Left,
    OpenSession,
    Probe,
    Refused,
    Register,
    ReportInventory,
    Retire,
    Stop,
)
from kvpool_client.session_wire import heard, registered
from kvpool_proto import pool_pb2 as pb
from kvpool_proto import pool_pb2_grpc
from kvpool_proto.errors import BadRequest, KVPoolError, ProtocolError, StaleIncarnation, UnknownNode, UnknownSegment
from kvpool_proto.status import from_rpc_error
from kvpool_proto.tls import Tls

EVENTS_MAX: Final = 1024
FENCE_LOOK_S: Final = 0.02
"""How often it is looked whether writes that were told to end have ended."""
HEARTBEAT_MS_MIN: Final = 10

_CHANNEL_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),  # a connection of its own
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),  # ours is above it
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),  # the Master's name may mean another host by now
)
_AWAY: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


@dataclass(slots=True)
class Counts:
    """What happened since the start."""

    heartbeats_sent: int = 0
    failures: int = 0
    """Times that the Master was not reached, broke off, or refused for now."""
    sessions_opened: int = 0
    inventories_sent: int = 0
    """To the end, and taken by the Master."""
    inventories_failed: int = 0
    blocks_reported: int = 0
    """By those that were taken."""


@dataclass(frozen=True, slots=True)
class _Stream:
    call: Any
    number: int


class Registration:
    """Keeps `node` registered at the Master at `target` from start() to stop(). copier: carries out orders to copy.

    ended: set when it has stopped; `refused` then says why, if the Master turned it away for good.
    """

    def __init__(
        self,
        target: str,
        node: Node,
        copier: Copier,
        rpc_timeout_ms: int,
        backoff_max_ms: int,
        clock: Clock,
        log: Log,
        tls: Tls | None = None,
    ) -> None:
        self.counts = Counts()
        self.serving = threading.Event()
        self.ended = threading.Event()
        self.refused: str | None = None
        self._node = node
        self._orders = Orders(node, copier, log)
        self._timeout_s = rpc_timeout_ms / 1000
        self._clock = clock
        self._log = log
        self._session = Session(node.incarnation, backoff_max_ms, node.epoch)
        self._heartbeat_s = 1.0
        self._events: queue.Queue[tuple[_Stream | InventoryReport | None, Event]] = queue.Queue(EVENTS_MAX)
        self._stream: _Stream | None = None
        self._report: InventoryReport | None = None
        self._target = target
        self._tls = tls
        self._thread = threading.Thread(target=self._run, name="registration", daemon=True)

    @property
    def state(self) -> State:
        """Where the session stands."""
        return self._session.state

    def start(self) -> None:
        """Begin to register; returns at once."""
        self._channel = open_channel(self._target, self._tls, _CHANNEL_OPTIONS, self._clock)
        self._stub = pool_pb2_grpc.NodesStub(self._channel)
        self._thread.start()

    def stop(self, *, discard: bool) -> None:
        """End the session; the Master keeps what it knows of this node for a while. discard: retire, for good.

        Takes a few rpc_timeout_ms at most.
        """
        self._events.put((None, Stop(discard)))
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._session.state is not State.STOPPED:
                self._drive(self._next_event())
        except Exception as error:
            self.refused = f"a bug in the node client: {error!r}"
            self._log.error("registration_failed", text=self.refused)
            raise
        finally:
            self._close_session()
            self._channel.close()
            self.ended.set()

    def _next_event(self) -> Event:
        wake_ms = self._session.wake_ms()
        while True:
            left_s = None if wake_ms is None else max(0.0, (wake_ms - self._clock.now_ms()) / 1000)
            look_s = min(FENCE_LOOK_S, FENCE_LOOK_S if left_s is None else left_s) if self._orders.waiting else left_s
            try:
                source, event = self._events.get(timeout=look_s)
            except queue.Empty:
                if look_s == left_s:
                    return Due()
                self._orders.again()
                continue
            if self._counts_still(source):
                return event

    def _counts_still(self, source: _Stream | InventoryReport | None) -> bool:
        return source is None or source is self._stream or source is self._report

    def _drive(self, event: Event) -> None:
        """Apply an event and those that come of it."""
        events = deque([event])
        while events:
            event = events.popleft()
            before = self._session.state
            instructions = self._session.apply(event, self._clock.now_ms())
            self._session.check()
            self._tell(event, before)
            for instruction in instructions:
                try:
                    came = self._perform(instruction)
                except NotVetted as error:  # a stream, which does not wait to be vetted
                    self._report, came = None, self._failed(str(error))
                if came is not None:
                    events.append(came)

    def _tell(self, event: Event, before: State) -> None:
        """Log and count what changed."""
        session = self._session
        if isinstance(event, Failed):
            self.counts.failures += 1
            self._log.warning("master_away", why=event.why, retry_in_ms=(session.wake_ms() or 0) - self._clock.now_ms())
        if isinstance(event, Refused) and session.state is State.STOPPED:
            self.refused = event.why
            self._log.error("refused", why=event.why)
        if isinstance(event, InventoryDone | InventoryFailed):
            self._tell_inventory(event)
        if session.state is not before:
            self._log.info(
                "session", state=session.state.value, why=session.why, epoch=session.epoch,
                incarnation=session.incarnation
            )  # fmt: skip
        if session.state is State.SERVING:
            self.serving.set()
        else:
            self.serving.clear()

    def _tell_inventory(self, event: InventoryDone | InventoryFailed) -> None:
        if isinstance(event, InventoryFailed):
            self.counts.inventories_failed += 1
            self._log.warning("inventory_failed", number=event.number, why=event.why)
        elif self._report is not None and (taken := self._report.taken) is not None:
            self.counts.inventories_sent += 1
            self.counts.blocks_reported += self._report.blocks
            self._log.info(
                "inventory_taken", number=event.number, blocks=self._report.blocks, taken=taken.blocks_taken,
                surplus=taken.blocks_surplus, unclaimed=taken.blocks_unclaimed
            )  # fmt: skip

    def _perform(self, instruction: Instruction) -> Event | None:
        match instruction:
            case Register(incarnation):
                return self._register(incarnation)
            case OpenSession():
                self._open_session()
            case CloseSession():
                self._close_session()
            case Probe():
                return self._probe()
            case Retire(incarnation):
                return self._retire(incarnation)
            case ReportInventory(number):
                self._report_inventory(number)
            case _:
                self._orders.perform(instruction, self._stream.number if self._stream else 0)
        return None

    def _register(self, incarnation: int) -> Event:
        offers = self._node.offers()
        request = pb.RegisterRequest(
            node_id=self._node.node_id,
            incarnation=incarnation,
            segments=offers,
            epoch_seen=self._session.epoch,
            data_address=self._node.data_address,
        )
        try:
            reply = self._stub.Register(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            refusal = from_rpc_error(error)
            if isinstance(refusal, StaleIncarnation | BadRequest):
                return Refused(f"{refusal.reason}: {refusal}")
            return self._failed(str(refusal))
        self._heartbeat_s = max(HEARTBEAT_MS_MIN, reply.heartbeat_ms) / 1000
        try:
            return registered(reply, len(offers))
        except ProtocolError as error:
            return self._failed(str(error))

    def _open_session(self) -> None:
        number = self._node.outbox.open()
        call: Any = self._stub.Session(self._heartbeats(number, self._session.incarnation))
        stream = self._stream = _Stream(call, number)
        self.counts.sessions_opened += 1
        threading.Thread(target=self._listen, args=(stream,), name="session-reader", daemon=True).start()

    def _close_session(self) -> None:
        self._cancel_inventory()
        self._orders.end()
        stream, self._stream = self._stream, None
        if stream is not None:
            self._node.outbox.close()
            stream.call.cancel()

    def _report_inventory(self, number: int) -> None:
        self._cancel_inventory()
        self._report = InventoryReport(self._node, number)
        self._report.start(self._stub, self._hand_over)

    def _cancel_inventory(self) -> None:
        report, self._report = self._report, None
        if report is not None:
            report.cancel()

    def _heartbeats(self, number: int, incarnation: int) -> Iterator[pb.SessionUp]:
        """What we say on a session: reports at once, and something at least every heartbeat. Runs in gRPC's thread.

        It ends when the channel has a new connection, so that the next session is on that.
        """
        wait_s = 0.0
        generation = generation_of(self._channel)
        while generation_of(self._channel) == generation:
            self._node.poll_workers()
            message = pb.SessionUp(node_id=self._node.node_id, incarnation=incarnation)
            if not self._node.outbox.fill(message, number, wait_s):
                return
            self.counts.heartbeats_sent += 1
            wait_s = self._heartbeat_s
            yield message

    def _listen(self, stream: _Stream) -> None:
        """Hand what the Master says on a stream to our thread."""
        try:
            for message in stream.call:
                if message.probe:
                    self._node.outbox.probed(message.probe, stream.number)
                self._hand_over(stream, heard(message))
            event: Event = self._failed("the Master ended the session")
        except ProtocolError as error:
            event = self._failed(str(error))
        except grpc.RpcError as error:
            event = self._why_ended(from_rpc_error(error))
        self._hand_over(stream, event)

    def _hand_over(self, source: _Stream | InventoryReport, event: Event) -> None:
        while self._counts_still(source):
            try:
                self._events.put((source, event), timeout=0.5)
                break
            except queue.Full:
                continue

    def _why_ended(self, error: KVPoolError) -> Event:
        if isinstance(error, UnknownNode | UnknownSegment):
            return Forgotten()
        if isinstance(error, StaleIncarnation | BadRequest):
            return Refused(f"{error.reason}: {error}")
        return self._failed(str(error))

    def _probe(self) -> Event:
        """Standard health check on the session's own connection: any answer will do."""
        check = self._channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            check(b"", timeout=self._timeout_s)
        except grpc.RpcError as error:
            refusal: Any = error
            if refusal.code() in _AWAY:
                return self._failed(f"silent: {refusal.details()}")
        return HeartbeatOk()

    def _retire(self, incarnation: int) -> Event:
        request = pb.RetireRequest(node_id=self._node.node_id, incarnation=incarnation)
        try:
            self._stub.Retire(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            self._log.warning("retire_not_told", incarnation=incarnation, text=str(from_rpc_error(error)))
        return Left()

    def _failed(self, why: str) -> Failed:
        return Failed(why, random.random())
