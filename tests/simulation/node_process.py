"""A node client's process: the real NodeDaemon, with its real session, registration, node and segment files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kvpool_client.config import NodeConfig
from kvpool_client.daemon import NodeDaemon
from kvpool_client.logs import Log
from kvpool_client.start_error import StartError
from kvpool_proto.errors import KVPoolError
from simulation.clocks import MachineClock
from simulation.hub import Hub, Process

SLAB_BYTES: Final = 64 << 10
LOOK_S: Final = 0.1


class NodeProcess:
    """One life of a node client, from its start to its end."""

    def __init__(self, hub: Hub, name: str, clock: MachineClock, directory: Path, slabs: int, log: Any) -> None:
        self.hub = hub
        self.name = name
        self.process = Process(hub, name, name)
        self.daemon: NodeDaemon | None = None
        self._config = NodeConfig(
            master="127.0.0.1:50051",
            node_id=name,
            segment_dir=str(directory),
            segment_bytes=slabs * SLAB_BYTES,
            slab_bytes=SLAB_BYTES,
            prefault_threads=1,
            socket_path=socket_path(name),
            data_listen=f"{host_of(name)}:9502",
            data_connections_max=24,
            data_io_timeout_ms=1_500,
            copy_bytes_max=64 << 10,
            plaintext=True,
            workers_max=32,
            rpc_timeout_ms=1_000,
            backoff_max_ms=1_000,
            ready_wait_ms=200,
        )
        self._clock = clock
        self._log = Log("info", False, replace(clock.of_client(), now_ms=clock.now_ms), log)
        self._stopping = False
        self.process.spawn(self._run, "main")

    @property
    def segments(self) -> list[Any]:
        """Its segments, once they are open."""
        return [] if self.daemon is None else self.daemon._segments

    def stop_cleanly(self, *, discard: bool) -> None:
        """SIGTERM, under a configuration that keeps the file or not."""
        if discard:
            self._config = replace(self._config, discard=True)
            if self.daemon is not None:
                self.daemon._config = self._config
        self._stopping = True

    def _run(self) -> None:
        daemon = self.daemon = NodeDaemon(self._config, self._log, self._clock.of_client())
        try:
            daemon.start()
        except (StartError, KVPoolError, OSError) as error:
            self.hub.note(f"does not start: {error}")
            self.process.end("not started")
            return
        while not self._stopping and not daemon.registration.ended.is_set():
            self.hub.sleep(int(LOOK_S * 1e6))
        failure = daemon.failure
        daemon.stop()
        self.process.end(f"failed: {failure}" if failure else "stopped")


def socket_path(node: str) -> str:
    """Where a node client listens."""
    return f"/simulated/{node}.sock"


def host_of(machine: str) -> str:
    """Where peers reach a machine."""
    return f"10.0.0.{int(machine[1:]) + 1}"
