"""mooncake's engine inside this process: "there" is memory of ours. Copies of a peer's slots, as a reply gives them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpool_client.devices.base import Buffer
from kvpool_client.engines.mooncake import Exposure
from kvpool_client.engines.mooncake_package import COMPLETED, FAILED
from kvpool_client.headers import PARENT_ROOT
from kvpool_client.peer.copies import Grant, PeerCopy, PeerRun
from kvpool_client.runs import Row, Run
from kvpool_client.transfer import expected_headers
from kvpool_proto.capability import READ, part_table
from kvpool_proto.namespace import NamespaceSpec
from unit.transfer_world import EPOCH, HANDLE, World

SERVER = "there:16000"


@dataclass
class TransfersDouble:
    """Copies when a transfer is asked about for the first time, unless `stalled`. before(size): called then.

    wanted: sizes of the transfers so far. flying_most: how many were under way at a time.
    """

    before: Callable[[int], None] = lambda size_bytes: None
    stalled: bool = False
    refuses: bool = False
    fails: bool = False
    silent: bool = False
    cannot_register: bool = False
    calls: list[str] = field(default_factory=list[str])
    wanted: list[int] = field(default_factory=list[int])
    registered: dict[int, int] = field(default_factory=dict[int, int])
    flying: dict[int, tuple[int, int, int]] = field(default_factory=dict[int, tuple[int, int, int]])
    flying_most: int = 0

    def initialize(self, host: str, metadata: str, protocol: str, devices: str, /) -> int:
        return int(not host)

    def get_rpc_port(self) -> int:
        return 16000

    def register_memory(self, address: int, size_bytes: int, /) -> int:
        self.registered[address] = size_bytes
        return int(self.cannot_register)

    def unregister_memory(self, address: int, /) -> int:
        del self.registered[address]
        return 0

    def send_probe(self, server: str, /) -> int:
        self.calls.append("probe")
        return -int(self.silent)

    def batch_transfer_async_read(
        self, server: str, local: list[int], remote: list[int], sizes_bytes: list[int], /
    ) -> int:
        self.calls.append("read")
        if self.refuses:
            return 0
        ((here, there, size_bytes),) = zip(local, remote, sizes_bytes, strict=True)
        self.wanted.append(size_bytes)
        self.flying[len(self.wanted)] = (here, there, size_bytes)
        self.flying_most = max(self.flying_most, len(self.flying))
        return len(self.wanted)

    def transfer_check_status(self, batch: int, /) -> int:
        if self.stalled:
            return 0
        here, there, size_bytes = self.flying.pop(batch)
        if self.fails:
            return FAILED
        self.before(size_bytes)
        ctypes.memmove(here, there, size_bytes)
        return COMPLETED


def exposure_of(world: World) -> Exposure:
    return Exposure(SERVER, {HANDLE: world.owner.memory.ctypes.data})


def peer_copy(spec: NamespaceSpec, chain: bytes, runs: Sequence[Run | Row], buffer: Buffer, part: int = 0) -> PeerCopy:
    """What a worker elsewhere wants of these slots, one row of the grant's table a run."""
    table = part_table(
        part,
        segment=[HANDLE] * len(runs),
        first_slot=[run.slot for run in runs],
        blocks=[run.blocks for run in runs],
        stride=[run.stride for run in runs],
        stamp=[run.stamp for run in runs],
        part_from=[part] * len(runs),
    )
    grant = Grant("there:1", "n2", READ, EPOCH, 0, spec.id, part, table.tobytes(), b"")
    ats = [sum(run.blocks for run in runs[:index]) for index in range(len(runs))]
    wanted = [PeerRun(run.first, run.blocks, at) for run, at in zip(runs, ats, strict=True)]
    headers = expected_headers(spec, part, chain, runs, PARENT_ROOT, b"")
    headers["stamp"] = np.repeat(table["stamp"], table["blocks"])
    return PeerCopy(grant, wanted, headers, buffer, spec.part_bytes, spec.slot_bytes)
