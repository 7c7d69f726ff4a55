"""One world: a Master, nodes, workers, their machines and the network, from a seed; and its life in phases.

trouble: traffic goes on while things go wrong     heal: everybody is started or goes on, the network is mended
finish: every call under way has to end            quiet: everything has to come to rest; then the verdict
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from kvpool_client.session import State
from kvpool_master.core.settings import Settings
from simulation.checkers import Checkers
from simulation.clocks import MachineClock
from simulation.facts import TENANT, specs_of
from simulation.hub import MS, Hub
from simulation.kernel import Kernel
from simulation.master_process import MasterProcess
from simulation.network import Manners, Network
from simulation.node_process import NodeProcess, host_of
from simulation.operator_process import OperatorProcess
from simulation.traffic import OPERATIONS, Traffic, store_and_read
from simulation.trouble import ALL, Profile, Trouble
from simulation.verdict import Promises, leaks
from simulation.wires import Wires
from simulation.worker_process import WorkerProcess

SECOND_US: Final = 1_000 * MS
FINISH_US: Final = 60 * SECOND_US
"""How long a call may take in all, when everybody is well."""
QUIET_US: Final = 120 * SECOND_US
ALONE_PERMILLE: Final = 120
"""How often a worker has no node client."""

SETTINGS: Final = Settings(
    lease_min_ms=1_500,
    lease_max_ms=3_000,
    lease_life_max_ms=8_000,
    write_min_ms=2_000,
    write_max_ms=3_000,
    quarantine_ms=9_000,
    incomplete_grace_ms=4_000,
    remember_ms=5_000,
    reserve_share_permille=700,
    heartbeat_ms=500,
    suspect_ms=2_000,
    retire_ms=12_000,
    report_window_ms=4_000,
    report_hold_ms=3_000,
    probe_ms=800,
    stall_ms=1_000,
    spread_run_bytes=32 << 10,
    ramp_ms=5_000,
    copies_per_node_max=2,
    copy_run_bytes_max=48 << 10,
    copy_ms=6_000,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a world is made of; a seed decides where None stands. traffic_us: how long trouble lasts."""

    machines: int | None = None
    slabs: int | None = None
    workers: int | None = None
    replicas: int | None = None
    copy_hits_min: int | None = None
    quota_blocks: int | None = None
    """Of the namespace with the larger blocks; 0: none."""
    traffic_us: int = 40 * SECOND_US
    trouble_us: int = 3 * SECOND_US
    """Something goes wrong about so often."""
    profile: Profile = field(default_factory=lambda: dict(ALL))
    manners: Manners = field(default_factory=Manners)
    settings: Settings = SETTINGS
    operations: dict[str, int] = field(default_factory=lambda: dict(OPERATIONS))


class World:
    """Made for one seed, used once. directory: a fresh one on tmpfs."""

    def __init__(
        self, hub: Hub, network: Network, wires: Wires, kernel: Kernel, directory: Path, plan: Plan, log: Any
    ) -> None:
        self.hub = hub
        self.network = network
        self.wires = wires
        self.kernel = kernel
        rng = hub.rng
        hits_min = rng.choice((0, 0, 3)) if plan.copy_hits_min is None else plan.copy_hits_min
        self.settings = replace(plan.settings, copy_hits_min=hits_min)
        self.specs = specs_of(plan.replicas or rng.choice((1, 1, 2)))
        self.state_dir = directory / "state"
        self.enough = False
        self.wake_wall_s: float | None = None
        """What the Master's wall clock says at its next start."""
        count = plan.machines or rng.choice((2, 2, 3, 3, 4))
        self.machines = [f"n{number}" for number in range(count)]
        wires.machines.update({host_of(name): name for name in self.machines})
        self.clocks = {name: MachineClock(hub) for name in ("master", *self.machines)}
        self.checkers = Checkers(self)
        self.promises = Promises(self)
        self.master: MasterProcess | None = None
        self.nodes: dict[str, NodeProcess] = {}
        self.workers: list[WorkerProcess] = []
        self.traffic: list[Traffic] = []
        self._segments_dir = directory / "segments"
        self._segments_dir.mkdir()
        self._slabs = plan.slabs or rng.choice((3, 3, 5, 9))
        self.plan = plan
        self._log = log
        self._born = 0
        self.trouble = Trouble(self, plan.profile)
        self.operator = OperatorProcess(self)
        self._start_master()
        for name in self.machines:
            self._start_node(name)
        for _ in range(plan.workers or rng.choice((2, 3, 4))):
            self._start_worker(rng.choice(self.machines))
        blocks = rng.choice((0, 0, 12)) if plan.quota_blocks is None else plan.quota_blocks
        wide = self.specs[-1]
        quota_bytes = blocks * wide.parts * wide.slot_bytes
        for at_s in (3, 20) if blocks else ():  # a Master may have lost its memory meanwhile
            hub.at(at_s * SECOND_US, lambda: self.operator.set_quota(TENANT, quota_bytes))

    # -- its life

    def live(self) -> None:
        """All phases. Raises SimulationFailure."""
        hub = self.hub
        self.trouble.start(self.plan.trouble_us)
        hub.run(self.plan.traffic_us)
        self.heal()
        self._must(self._finished, FINISH_US, lambda: f"calls do not end: {self._unfinished()}")
        fresh = self._fresh_workers()
        self._must(self._quiet, QUIET_US, lambda: f"it does not come to rest: {self._unrest()}")
        self.promises.kept()
        self.promises.sound()
        self.core.check_invariants()
        self._works(fresh)

    def heal(self) -> None:
        """Everybody is well again; traffic is asked to end."""
        self.hub.note("heal")
        self.trouble.calm()
        self.enough = True
        for machine in list(self.network.cut):
            self.network.mend(machine)
        for way in sorted(self.wires.cut):
            self.wires.mend_way(*way)
        for name in self.machines:
            self.operator.undrain(name, lambda: self.core is not None and not self.core.members.draining)
        self.network.manners = Manners(lost=0, reply_lost=0, twice=0, slow=5, very_slow=0)
        for process in self.hub.processes:
            process.go_on()

    def _must(self, done: Callable[[], bool], within_us: int, why_not: Callable[[], str]) -> None:
        hub = self.hub
        end_us = hub.now_us + within_us
        while not done():
            if hub.now_us >= end_us:
                hub.fail(why_not())
            hub.run(hub.now_us + SECOND_US // 2)

    def _fresh_workers(self) -> list[WorkerProcess]:
        """A new worker on every machine, which opens all namespaces: a Master may have lost its memory of them."""
        workers = [self._new_worker(machine) for machine in self.machines]
        known: set[str] = set()
        for worker in workers:

            def open_all(worker: WorkerProcess = worker) -> None:
                """Its main thread."""
                worker.connect()
                for space in worker.spaces:
                    while space.peek(bytes(space.spec.key_bytes)).reason != "unknown_key":
                        self.hub.sleep(SECOND_US // 5)
                known.add(worker.machine)

            worker.process.spawn(open_all, "check")
        self._must(lambda: len(known) == len(workers), QUIET_US, lambda: f"only {known} can ask the Master")
        return workers

    def _works(self, workers: list[WorkerProcess]) -> None:
        """They can store and read back."""
        outcomes: dict[str, str] = {}
        for worker in workers:

            def use(worker: WorkerProcess = worker) -> None:
                """Its main thread."""
                outcomes[worker.machine] = store_and_read(worker, 40, SECOND_US // 2, self.hub.rng)

            worker.process.spawn(use, "check")
        self._must(lambda: len(outcomes) == len(workers), QUIET_US, lambda: f"the last checks hang: {outcomes}")
        if any(outcomes.values()):
            self.hub.fail(f"the pool does not work any more: {outcomes}")
            self.hub.run(self.hub.now_us + 1)

    # -- who is there

    @property
    def core(self) -> Any:
        """The Master's core; None while there is none."""
        return None if self.master is None else self.master.core

    def live_workers(self) -> list[WorkerProcess]:
        """Workers that run or are stopped."""
        return [worker for worker in self.workers if worker.process.alive]

    def segment_path(self, node: str, index: int) -> Path:
        """Where a segment's file is."""
        return self._segments_dir / f"kvpool-{node}-{index}.seg"

    def inode_of(self, path: Path) -> int:
        """The inode of the file that is there now."""
        return os.stat(path).st_ino

    def segment(self, handle: int) -> Any:
        """A segment by its handle of this epoch, as its node client has it."""
        found = self.core.space.segments[handle]
        return next(one for one in self.nodes[found.node].segments if one.plan.index == found.index)

    def discard(self, name: str) -> None:
        """Let a node client stop and remove its file."""
        path = self.segment_path(name, 0)
        if path.exists() and self.nodes[name].process.alive:
            self.checkers.losses.discarded(self.inode_of(path))
            self.nodes[name].stop_cleanly(discard=True)

    def lose(self, name: str) -> None:
        """Let a node client and its file be gone at once."""
        path = self.segment_path(name, 0)
        self.nodes[name].process.end("its machine broke down")
        if path.exists():
            self.checkers.losses.discarded(self.inode_of(path))
            path.unlink()

    # -- starting, and starting again

    def _again_us(self) -> int:
        longest = 300 * MS if self.enough else self.hub.rng.choice((300 * MS, 2 * SECOND_US, 8 * SECOND_US))
        return self.hub.rng.randrange(50 * MS, longest)

    def _start_master(self) -> None:
        self.state_dir.mkdir(exist_ok=True)
        if self.wake_wall_s is not None:
            self.clocks["master"].wall_step_s += self.wake_wall_s - self.clocks["master"].wall_s()
            self.wake_wall_s = None
        master = self.master = MasterProcess(
            self.network, self.clocks["master"], self.settings, self.state_dir, self._log
        )
        master.process.on_end.append(lambda: self._ended_master(master))

    def _ended_master(self, master: MasterProcess) -> None:
        if self.master is master:
            self.master = None
            self.hub.at(self._again_us(), self._start_master)

    def _start_node(self, name: str) -> None:
        node = self.nodes[name] = NodeProcess(
            self.hub, name, self.clocks[name], self._segments_dir, self._slabs, self._log
        )
        node.process.on_end.append(lambda: self.hub.at(self._again_us(), lambda: self._start_node(name)))

    def _new_worker(self, machine: str, *, alone: bool = False) -> WorkerProcess:
        self._born += 1
        return WorkerProcess(self, f"{machine}.w{self._born}", machine, self.specs, alone=alone)

    def _start_worker(self, machine: str) -> None:
        worker = self._new_worker(machine, alone=self.hub.chance(ALONE_PERMILLE))
        self.workers.append(worker)
        for number in range(self.hub.rng.choice((1, 2))):
            traffic = Traffic(self, worker, number)
            self.traffic.append(traffic)
            worker.process.spawn(traffic.run, f"t{number}")

        def again() -> None:
            """Another worker takes its place, while there is traffic."""
            if not self.enough:
                self._start_worker(machine)

        worker.process.on_end.append(lambda: self.hub.at(self._again_us(), again))

    # -- is it quiet?

    def _finished(self) -> bool:
        return not self._unfinished()

    def _unfinished(self) -> str:
        busy = [one for one in self.traffic if not one.finished and one._worker.process.alive]
        return ", ".join(f"{one._worker.process.name} is {one.doing}" for one in busy)

    def _quiet(self) -> bool:
        return not self._unrest()

    def _unrest(self) -> str:
        if self.core is None or not self.master or not self.master.listening:
            return "there is no Master"
        away = [name for name, node in self.nodes.items() if not _serves(node)]
        if away:
            return f"not serving: {away}"
        down = [name for name in self.machines if not getattr(self.core.liveness.nodes.get(name), "up", False)]
        if down:
            return f"not up: {down}"
        snapshot = self.core.snapshot(self.clocks["master"].now_ms())
        return leaks(self) if snapshot.ready else f"not ready: {snapshot.recovery}"


def _serves(node: NodeProcess) -> bool:
    daemon = node.daemon
    return bool(
        node.process.alive
        and daemon is not None
        and hasattr(daemon, "registration")
        and daemon.registration.state is State.SERVING
    )
