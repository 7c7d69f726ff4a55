"""The node client's life: read it top to bottom.

Rules
  - Starting: what a former life left is adopted. An error is one line; it leaves nothing behind but what was there.
  - Serving: the Master may come and go; nothing but a signal, or a newer life of this node, ends it.
  - Stopping: end the session, let workers go, close, in the reverse order of the start. The segment files stay for
    the next life; with `discard` the node is retired and they are removed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Final

from kvpool_client.addresses import advertised
from kvpool_client.clock import SYSTEM, Clock, new_incarnation
from kvpool_client.config import NodeConfig, split_address
from kvpool_client.copying import Copier
from kvpool_client.http import HttpServer
from kvpool_client.local_server import Admission, LocalServer
from kvpool_client.logs import Log
from kvpool_client.metrics import Sources, exposition
from kvpool_client.node import Node
from kvpool_client.owned_segment import OwnedSegment, SegmentPlan, remove_leftovers
from kvpool_client.peer.pull import PeerPuller
from kvpool_client.peer.server import PeerServer
from kvpool_client.preflight import check_room, measure_room
from kvpool_client.registration import Registration
from kvpool_client.session import State
from kvpool_client.start_error import StartError
from kvpool_proto.errors import KVPoolError
from kvpool_proto.geometry import file_bytes
from kvpool_proto.security import PLAINTEXT_WARNING, SecurityError
from kvpool_proto.tls import Tls, of_data_port, tls_of

PROGRESS_MS: Final = 2_000
SIGNAL_LOOK_S: Final = 0.1
DATA_IDLE_MS: Final = 300_000
"""A peer's connection on which nothing happens for so long is closed."""
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
EXIT_STOPPED, EXIT_NOT_STARTED, EXIT_FAILED = 0, 1, 2


class Interrupted(Exception):
    """Asked to stop while starting."""


class NodeDaemon:
    """A node client in this process, from start() to stop(). Takes no signals; run() does."""

    def __init__(self, config: NodeConfig, log: Log, clock: Clock = SYSTEM) -> None:
        self._config = config
        self._log = log
        self._clock = clock
        self._exits = ExitStack()
        self._started = False
        self._prefault_s = 0.0
        self._segments: list[OwnedSegment] = []

    def start(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Start; returns when the Master has taken the node in, or ready_wait_ms later: it is tried for ever.

        interrupted() is asked from time to time; true raises Interrupted. Raises StartError, KVPoolError, OSError.
        After an error nothing is left behind but the files of a former life.
        """
        config, log = self._config, self._log
        with self._exits:
            self._tls = self._secured()
            self._open_segments(interrupted)
            former = max(segment.former_incarnation for segment in self._segments)
            incarnation = new_incarnation(self._clock, former)
            self.node = Node(config.node_id, incarnation, self._segments, config.workers_max, log, self._clock)
            self._start_data()
            self.registration = Registration(
                config.master, self.node, self._copier, config.rpc_timeout_ms, config.backoff_max_ms, self._clock, log,
                self._tls
            )  # fmt: skip
            self._start_local()
            self._start_http()
            self.registration.start()
            self._exits.callback(self._leave)
            self._await_master(interrupted)
            self._exits = self._exits.pop_all()
            self._started = True

    def stop(self) -> None:
        """End the session, let workers go, close; with `discard`, retire and unlink.

        Idempotent; workers that are still there keep their mappings.
        """
        if self._started:
            self._exits.close()
            self._started = False
            self._log.info("stopped", node=self._config.node_id)

    @property
    def failure(self) -> str | None:
        """Why it serves no more, without having been asked to stop; None while all is well."""
        return self.registration.refused or (
            "the registration ended" if self.registration.ended.is_set() and self._started else None
        )

    def _secured(self) -> Tls | None:
        """What Master and peers are reached with; None: plain text."""
        try:
            return tls_of(
                self._config.security, lambda text: self._log.error("security", text=text), self._clock.now_ms
            )
        except SecurityError as error:
            raise StartError(str(error)) from error

    def _open_segments(self, interrupted: Callable[[], bool]) -> None:
        config, log = self._config, self._log
        directory = Path(config.segment_dir)
        plans = config.plans()
        measure_room(directory)  # says so if there is no such folder
        for path, length_bytes in remove_leftovers(plans):
            log.warning("leftover_removed", path=str(path), length_bytes=length_bytes)
        missing_bytes = sum(map(_missing_bytes, plans))
        check_room(missing_bytes, measure_room(directory))
        began_s = self._clock.precise_s()
        incarnation = new_incarnation(self._clock)
        progress = _Progress(missing_bytes, log, self._clock, interrupted)
        for plan in plans:
            progress.add(0)
            segment = OwnedSegment.open(
                plan, incarnation=incarnation, prefault_threads=config.prefault_threads, progress=progress.add
            )
            self._exits.callback(self._close, segment)
            self._segments.append(segment)
            self._tell_adoption(segment)
        self._prefault_s = self._clock.precise_s() - began_s
        adopted = sum(segment.adoption.kept for segment in self._segments)
        log.info(
            "segments_opened", bytes=sum(plan.size_bytes for plan in plans), segments=len(plans), adopted=adopted,
            seconds=round(self._prefault_s, 3)
        )  # fmt: skip

    def _tell_adoption(self, segment: OwnedSegment) -> None:
        found = segment.adoption
        lost = found.why or found.slots_dropped or found.slabs_dropped or found.writes_dropped
        (self._log.warning if lost else self._log.info)(
            "segment_opened", path=str(segment.plan.path), adopted=found.kept, why=found.why,
            slots_dropped=found.slots_dropped, slabs_dropped=found.slabs_dropped, writes_dropped=found.writes_dropped,
            slabs_bound=segment.slabs_bound, workers=len(segment.mapped_workers())
        )  # fmt: skip

    def _close(self, segment: OwnedSegment) -> None:
        """Keep the file for the next life, unless it is to go, or nobody was ever let in."""
        if self._config.discard if self._started else not segment.adoption.kept:
            segment.unlink()
        segment.close()

    def _leave(self) -> None:
        self.registration.stop(discard=self._config.discard and self._started)

    def _start_data(self) -> None:
        """The data port, if there is to be one, and what copies from others' data ports."""
        config, node, log, clock = self._config, self.node, self._log, self._clock
        tls = of_data_port(self._tls)
        self._data: PeerServer | None = None
        if config.data_listen:
            self._data = PeerServer(
                split_address("data_listen", config.data_listen),
                node,
                connections_max=config.data_connections_max,
                io_timeout_ms=config.data_io_timeout_ms,
                idle_timeout_ms=DATA_IDLE_MS,
                wrap=tls and tls.wrap_server,
                log=log,
                clock=clock,
            )
            self._data.start()
            self._exits.callback(self._data.stop)
            node.data_address = advertised(config.data_listen, config.data_advertise, self._data.port, config.master)
        timeout_ms = config.data_io_timeout_ms
        puller = PeerPuller(
            connect_timeout_ms=timeout_ms, io_timeout_ms=timeout_ms, wrap=tls and tls.wrap_client, clock=clock
        )
        loads_first = self._data.loads_first if self._data else lambda: None
        self._copier = Copier(node, puller, node.outbox, loads_first, bytes_max=config.copy_bytes_max, log=log)
        self._exits.callback(self._copier.stop)

    def _start_http(self) -> None:
        sources = Sources(
            node=self.node,
            registration=self.registration,
            local=self._local,
            data=self._data,
            copier=self._copier,
            prefault_s=self._prefault_s,
            version=version("kvpool"),
        )
        http = HttpServer(split_address("http", self._config.http), exposition(sources), self._ready, self._log)
        self.http_port = http.port
        http.start()
        self._exits.callback(http.stop)

    def _start_local(self) -> None:
        config = self._config
        self._local = LocalServer(
            Path(config.socket_path),
            config.socket_mode,
            self.node,
            config.local_timeout_ms / 1000,
            config.connections_max,
            self._log,
            Admission(frozenset(config.allowed_uids), frozenset(config.allowed_gids)),
        )
        self._local.start()
        self._exits.callback(self._local.stop)

    def _await_master(self, interrupted: Callable[[], bool]) -> None:
        end_ms = self._clock.now_ms() + self._config.ready_wait_ms
        registration = self.registration
        while not registration.serving.wait(0.05) and self._clock.now_ms() < end_ms:
            if interrupted():
                raise Interrupted
            if registration.ended.is_set():
                raise StartError(f"the Master at {self._config.master} refuses this node: {registration.refused}")
        if self._tls is None:
            self._log.warning("plaintext", text=PLAINTEXT_WARNING)
        self._log.info(
            "ready",
            node=self._config.node_id,
            master=self._config.master,
            state=registration.state.value,
            socket=self._config.socket_path,
            data=self.node.data_address,
            http_port=self.http_port,
        )

    def _ready(self) -> tuple[bool, str]:
        state = self.registration.state
        return state is State.SERVING, state.value


def _missing_bytes(plan: SegmentPlan) -> int:
    """What the plan's file has still to be given, by what is allocated of it."""
    wanted = file_bytes(plan.size_bytes, plan.slab_bytes)
    try:
        return max(0, wanted - os.lstat(plan.path).st_blocks * 512)
    except FileNotFoundError:
        return wanted


class _Progress:
    """Logs how much of the segments is there, from any thread."""

    def __init__(self, total_bytes: int, log: Log, clock: Clock, interrupted: Callable[[], bool]) -> None:
        self._total_bytes = total_bytes
        self._log = log
        self._clock = clock
        self._interrupted = interrupted
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._said_ms = clock.now_ms()

    def add(self, size_bytes: int) -> None:
        """So many bytes more. Raises Interrupted."""
        if self._interrupted():
            raise Interrupted
        with self._lock:
            self._done_bytes += size_bytes
            now_ms = self._clock.now_ms()
            if now_ms - self._said_ms >= PROGRESS_MS:
                self._said_ms = now_ms
                percent = 100 * self._done_bytes // max(1, self._total_bytes)
                self._log.info("prefault", done_mib=self._done_bytes >> 20, percent=percent)


def run(config: NodeConfig) -> int:
    """Be a node client process until SIGTERM or SIGINT; answers the exit code (see __main__). Main thread only."""
    signals: list[int] = []  # that came; they interrupt nothing, they are looked at
    former = {number: signal.signal(number, lambda number, _: signals.append(number)) for number in STOP_SIGNALS}
    log = Log(config.log_level, config.log_json, SYSTEM, sys.stderr)
    daemon = NodeDaemon(config, log)
    try:
        daemon.start(interrupted=lambda: bool(signals))
        _notify("READY=1")
        while not signals and not daemon.registration.ended.wait(SIGNAL_LOOK_S):
            pass
        _notify("STOPPING=1")
        failure = daemon.failure
        daemon.stop()
    except Interrupted:
        return EXIT_STOPPED
    except (StartError, KVPoolError, OSError) as error:
        return refuse(str(error))
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    return EXIT_STOPPED if failure is None else EXIT_FAILED


def refuse(text: str) -> int:
    """Say in one line why the node client does not start; answers the exit code."""
    sys.stderr.write(f"kvpool-client: {' '.join(text.split())}\n")
    return EXIT_NOT_STARTED


def _notify(word: str) -> None:
    """Tell systemd, if it asked to be told (sd_notify). A failure changes nothing."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as told,
        ):
            told.sendto(word.encode(), "\0" + address[1:] if address.startswith("@") else address)
