"""The life of the Master, in the order in which it happens.

  start: state and epoch, core, HTTP, gRPC, ticks    stop: refuse new work, say so, end sessions, finish RPCs, close

Serving and being ready are two things: node clients and workers are served from the start, and a lookup finds what has
arrived so far; /readyz and gRPC health say ready when every known node has reported what it holds.

Rules
  - Signals are held back until the Master is up, so that one that comes early is obeyed in order, not lost.
  - Until start() returns nothing is announced; what start() opened is closed again when it fails.
  - Ports are taken exclusively: a second Master on the same port fails and says so.
  - A Master whose memory cannot be written, or that meets an epoch above its own too late, ends at once with
    EXIT_FAILED.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvpool_master.admin_service import AdminService
from kvpool_master.auth import Auth
from kvpool_master.clock import SYSTEM, Clock
from kvpool_master.config import MasterConfig, split_address, version
from kvpool_master.core.pool import Pool
from kvpool_master.http import Answer, HttpServer
from kvpool_master.inventory_stream import InventoryStream
from kvpool_master.logs import LibraryHandler, Log
from kvpool_master.metrics import MasterCollector, RpcTimes, exposition, registry_of
from kvpool_master.nodes_service import NodesService, SessionStream
from kvpool_master.rpc import Guard
from kvpool_master.service import PoolService
from kvpool_master.shell import Core, Shell
from kvpool_master.state import State, StateError
from kvpool_master.sweeper import Sweeper
from kvpool_master.tokens import Tokens
from kvpool_proto import pool_pb2 as pb
from kvpool_proto import pool_pb2_grpc as pb_grpc
from kvpool_proto.security import PLAINTEXT_WARNING, SecurityError
from kvpool_proto.tls import tls_of

if TYPE_CHECKING:
    from kvpool_master.certificates import Certificates

EXIT_OK = 0
EXIT_NOT_STARTED = 1
EXIT_FAILED = 2
"""Ended by a failure of its own after it was ready."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# These packages carry no types.
_HEALTH: Any = health
_HEALTH_GRPC: Any = health_pb2_grpc
_SERVICES = tuple(service.full_name for service in pb.DESCRIPTOR.services_by_name.values())


class StartError(Exception):
    """The Master could not start; the text is one line for a person."""


class MasterServer:
    """A Master on the running loop. After start(), grpc_port and http_port are the ports that were taken.

    It holds its state directory from the constructor, which raises StartError, until stop().
    """

    def __init__(
        self,
        config: MasterConfig,
        *,
        log: Log | None = None,
        clock: Clock = SYSTEM,
        make_core: Callable[..., Core] = Pool,
    ) -> None:
        self.config = config
        self.log = log or Log(config.log_level, config.log_json, clock, sys.stderr)
        self._certificates, tokens = _secured(config, clock, self.log)
        self.shell = _shell(config, clock, self.log, make_core)
        self.auth = Auth(
            self._certificates,
            tokens,
            tenant_of=self.shell.tenant_of,
            namespace_of=self.shell.namespace_of,
            clock=clock,
            log=self.log,
        )
        self.grpc_port = 0
        self.http_port = 0
        self._serving = False
        self.rpc_times = RpcTimes()
        self._sweeper = Sweeper(self.shell)
        self._http = HttpServer(self._routes(), self.log)
        self._health: Any = _HEALTH.aio.HealthServicer()
        self._grpc: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Take both ports and serve. Raises StartError; nothing is left open then."""
        try:
            await self._start_http()
            await self._start_grpc()
        except StartError:
            await self.stop()
            raise
        self._tasks = [asyncio.create_task(self._sweeper.run()), asyncio.create_task(self._announce_readiness())]
        self._serving = True

    async def stop(self) -> None:
        """Refuse new leases and reservations, end sessions, let running RPCs finish within drain_ms, close.

        A Master that has failed lets nothing finish.
        """
        self.shell.stopping = True
        self._serving = False
        await self._health.enter_graceful_shutdown()
        self.shell.sessions.end_all()
        if self._grpc is not None:
            await self._grpc.stop(0 if self.shell.failure else self.config.drain_ms / 1000)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.stop()
        self.shell.close()

    async def _start_http(self) -> None:
        host, port = split_address("http", self.config.http)
        try:
            self.http_port = await self._http.start(host, port)
        except OSError as error:
            raise StartError(f"http = {self.config.http}: {error.strerror or error}") from error

    async def _start_grpc(self) -> None:
        server = grpc.aio.server(
            options=_options(self.config.message_bytes_max), maximum_concurrent_rpcs=self.config.rpcs_max
        )
        guard = Guard(self.shell.clock, self.log, self.rpc_times, self.auth)
        services = pb.DESCRIPTOR.services_by_name
        pool = guard.service(services["Pool"], PoolService(self.shell))
        admin = guard.service(services["Admin"], AdminService(self.shell, version()))
        nodes = guard.service(services["Nodes"], NodesService(self.shell))
        nodes.Session = SessionStream(self.shell, guard).serve
        nodes.Inventory = InventoryStream(self.shell, guard).serve
        pb_grpc.add_PoolServicer_to_server(pool, server)
        pb_grpc.add_AdminServicer_to_server(admin, server)
        pb_grpc.add_NodesServicer_to_server(nodes, server)
        _HEALTH_GRPC.add_HealthServicer_to_server(self._health, server)
        if not self.config.tokens_file:  # it asks for none
            reflection.enable_server_reflection((*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        try:
            if self._certificates is None:
                self.grpc_port = server.add_insecure_port(self.config.listen)
            else:
                self.grpc_port = server.add_secure_port(self.config.listen, self._certificates.credentials())
        except RuntimeError as error:
            raise StartError(f"listen = {self.config.listen}: in use, or not an address of this machine") from error
        self._grpc = server
        await self._say(health_pb2.HealthCheckResponse.NOT_SERVING)
        await server.start()

    async def _announce_readiness(self) -> None:
        await self.shell.ready.wait()
        await self._say(health_pb2.HealthCheckResponse.SERVING)

    async def _say(self, status: Any) -> None:
        for name in ("", *_SERVICES):
            await self._health.set(name, status)

    def _routes(self) -> dict[str, Callable[[], Answer]]:
        registry = registry_of(
            MasterCollector(
                snapshot=self.shell.snapshot,
                rpc_times=self.rpc_times,
                late=self._sweeper.late,
                failed_ticks=lambda: self.shell.failed_ticks,
                sessions=lambda: self.shell.sessions.open_sessions,
                state_writes=self.shell.state_writes,
                bypass=lambda: self.shell.bypass,
                capabilities=lambda: self.shell.grants.made,
                refused=self.auth.refused,
                version=version(),
            )
        )
        return {
            "/metrics": lambda: Answer(200, exposition(registry), METRICS_TYPE),
            "/healthz": lambda: Answer(200, b"alive\n"),
            "/readyz": self._readiness,
        }

    def _readiness(self) -> Answer:
        if not self._serving:
            return Answer(503, b"not serving\n")
        if not self.shell.ready.is_set():
            return Answer(503, f"recovering: {self.shell.snapshot().recovery}\n".encode())
        return Answer(200, b"ready\n")


def _secured(config: MasterConfig, clock: Clock, log: Log) -> tuple[Certificates | None, Tokens | None]:
    """What callers are known by. Raises StartError."""

    def warn(text: str) -> None:
        """What is wrong with new files."""
        log.error("security", text=text)

    try:
        tls = tls_of(config.security, warn, clock.now_ms)
        if tls is None:
            if config.tokens_file:
                raise SecurityError("tokens_file together with plaintext: tokens travel only over TLS; drop one")
            return None, None
        from kvpool_master.certificates import Certificates  # cryptography takes a while, and plain text none of it

        tokens = Tokens(config.tokens_file, clock, warn) if config.tokens_file else None
        return Certificates(tls, clock), tokens
    except SecurityError as error:
        raise StartError(str(error)) from error
    except ImportError as error:
        raise StartError(f"TLS needs a package ({error}): pip install 'kvpool[daemon]'") from error


def _shell(config: MasterConfig, clock: Clock, log: Log, make_core: Callable[..., Core]) -> Shell:
    """A shell that holds the state directory. Raises StartError."""
    try:
        state = State.open(config.state_dir)
        try:
            return Shell(config, clock, log, state, make_core)
        except BaseException:
            state.close()
            raise
    except StateError as error:
        raise StartError(str(error)) from error


def run(config: MasterConfig) -> int:
    """Serve until SIGTERM, SIGINT or a failure; the exit code. Startup errors are one line on stderr."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    log = Log(config.log_level, config.log_json, SYSTEM, sys.stderr)
    logging.basicConfig(handlers=[LibraryHandler(log)], level=logging.WARNING, force=True)
    try:
        import uvloop
    except ImportError as error:
        return refuse(f"uvloop is missing ({error}): pip install 'kvpool[daemon]'")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(config, log))
    except StartError as error:
        return refuse(str(error))
    except Exception as error:
        log.error("failed", error=repr(error), traceback="".join(traceback.format_exception(error)))
        return EXIT_FAILED


def refuse(text: str) -> int:
    """Say in one line why the Master does not start; the exit code."""
    sys.stderr.write(f"kvpool-master: {' '.join(text.split())}\n")
    return EXIT_NOT_STARTED


async def _serve(config: MasterConfig, log: Log) -> int:
    loop = asyncio.get_running_loop()
    server = MasterServer(config, log=log)
    ended = server.shell.ended
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, ended.set)
    await server.start()
    spare_the_directory()
    if config.plaintext:
        log.warning("plaintext", text=PLAINTEXT_WARNING)
    elif not config.tokens_file:
        log.warning("no_tokens", text="no tokens_file: every peer with a certificate of tls_ca may do everything")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    log.info(
        "ready",
        version=version(),
        epoch=server.shell.epoch,
        grpc_port=server.grpc_port,
        http_port=server.http_port,
        listen=config.listen,
        http=config.http,
    )
    notify_service_manager("READY=1")
    await ended.wait()
    notify_service_manager("STOPPING=1")
    if server.shell.failure:
        await server.stop()
        return EXIT_FAILED
    log.info("stopping", drain_ms=config.drain_ms)
    await server.stop()
    log.info("stopped")
    return EXIT_OK


def spare_the_directory() -> None:
    """Keep Python's cycle collector from walking the whole directory: 200 ms at 2 million blocks, all RPCs waiting.

    The core breaks its cycles when something goes, so reference counts free it. What is young is still collected.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 1 << 30)


def notify_service_manager(state: str) -> None:
    """Tell systemd, if it started us (sd_notify(3)): one datagram. A failure changes nothing."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        try:
            sock.connect(address)
            sock.send(state.encode())
        except OSError:
            pass


def _options(message_bytes_max: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", message_bytes_max),
        ("grpc.so_reuseport", 0),
        # A node whose machine died leaves a stream that nothing closes: ask now and then whether it is there.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]
