"""One seed: makes its world, lets it live, takes it apart. The same seed does the same, event for event.

Hash order of strings decides the order of some sets; so a process that replays has PYTHONHASHSEED=0 (__main__.py).
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from simulation.doubles import Patches, installed
from simulation.hub import Hub
from simulation.kernel import Kernel
from simulation.network import Network
from simulation.watch import watch
from simulation.wires import Wires
from simulation.world import Plan, World

TMPFS: Final = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a seed came to. digest: of all its events; seen: how often what happened."""

    seed: int
    digest: int
    steps: int
    virtual_s: float
    real_s: float
    seen: Counter[str]


BUGS: Final = frozenset(
    ("copy_failed", "peer_connection_failed", "registration_failed", "rpc_failed", "tick_failed", "http_failed")
)
"""Events of logs that tell of an exception where none may be."""


class _Lines:
    """Where logs go: into the trace, when somebody reads it. What tells of a bug fails the seed."""

    def __init__(self, hub: Hub, verbose: bool) -> None:
        self._hub = hub
        self._verbose = verbose

    def write(self, text: str) -> None:
        """One line."""
        if BUGS & set(text.split(" ", 3)[1:3]):
            self._hub.fail(f"a log says: {text.strip()}")
        if self._verbose and text.strip():
            self._hub.note(text.strip().split(" ", 1)[-1])

    def flush(self) -> None:
        """Nothing is held back."""


def simulate(
    seed: int,
    plan: Plan,
    *,
    fault: Callable[[Patches], object] | None = None,
    options: str = "",
    verbose: bool = False,
) -> Outcome:
    """Live through one seed. fault: planted before all else. options: for the command that replays it.

    Raises SimulationFailure.
    """
    began_s = time.perf_counter()
    hub = Hub(seed, options=options, verbose=verbose)
    network = Network(hub, plan.manners)
    wires = Wires(hub, network)
    servers: dict[str, object] = {}
    kernel = Kernel(hub)
    directory = Path(tempfile.mkdtemp(prefix="kvpool-simulation-", dir=TMPFS))
    frozen = gc.isenabled()
    gc.disable()
    try:
        with installed(hub, network, wires, servers, kernel) as patches:  # type: ignore[arg-type]
            if fault is not None:
                fault(patches)
            world = World(hub, network, wires, kernel, directory, plan, _Lines(hub, verbose))  # type: ignore[arg-type]
            watch(patches, hub, wires, world.checkers, world.trouble)
            try:
                world.live()
            finally:
                hub.teardown()
        seen = world.checkers.seen.counts
        return Outcome(seed, hub.digest, hub.steps, hub.now_us / 1e6, time.perf_counter() - began_s, seen)
    finally:
        if frozen:
            gc.enable()
        shutil.rmtree(directory)
