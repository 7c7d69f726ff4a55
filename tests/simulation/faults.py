"""Planted faults: each breaks one rule of the product, and must be caught by some seed. Only tests plant them.

A fault that the next line of defence makes harmless is planted together with that line's removal, and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from simulation import faults_recovery as recovery
from simulation import faults_running as running
from simulation.doubles import Patches
from simulation.traffic import OPERATIONS
from simulation.trouble import Profile

WRITERS: Final = ("while it is", "is bound anew while")
LEASE: Final = ("leases it", "under a lease")
WORKERS: Final[Profile] = {"stop_worker": 10, "kill_worker": 2}
LATE: Final[Profile] = {"kill_master": 1, "stop_worker": 4, "set_clock": 4}
MASTERS: Final[Profile] = {"kill_master": 6, "stop_worker": 8, "set_clock": 6}
NODES: Final[Profile] = {"kill_master": 3, "kill_node": 4, "leave_node": 2, "cut_off": 3}
LONG_QUARANTINE: Final = {"quarantine_ms": 40_000}
"""So that writers may sleep for long and must still be waited for."""
FILLING: Final = {"read": 20, "store": 60, "purge": 8}
"""So that free slots are empty ones: what a header says of a block comes back with an inventory."""
PURGES: Final = {"read": 50, "store": 44, "purge": 6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One of them. why: the rule that was broken. caught: parts of what a checker may say.

    profile, trouble_us: the trouble in which it shows soonest, and about how often. operations: what workers do.
    settings: of the core, where they matter. first: the seed to begin with, since it caught it once.
    """

    why: str
    caught: tuple[str, ...]
    plant: Callable[[Patches], object]
    profile: Profile = field(default_factory=lambda: dict(WORKERS))
    operations: dict[str, int] = field(default_factory=lambda: dict(OPERATIONS))
    trouble_us: int = 1_500_000
    settings: dict[str, int] = field(default_factory=dict)
    first: int = 1


FAULTS: Final[dict[str, Fault]] = {
    "readers-check-nothing": Fault(
        why="headers before and after the copy, and checksums, make a doubt a miss",
        caught=("WRONG BYTES",),
        plant=running.read_blindly,
        first=17,
    ),
    "readers-check-before-only": Fault(
        why="a slot may be written during the copy, when the lease ran out meanwhile",
        caught=("WRONG BYTES",),
        plant=running.no_look_afterwards,
        first=17,
    ),
    "no-quarantine": Fault(
        why="slots given up without their writer's word wait for it, its end, or the cap",
        caught=WRITERS,
        plant=running.no_quarantine,
    ),
    "leases-end-early": Fault(
        why="what is leased is neither evicted nor used again", caught=LEASE, plant=running.leases_end_early
    ),
    "hidden-slots-at-once": Fault(
        why="what is hidden is freed when the leases then alive have ended",
        caught=LEASE,
        plant=running.no_wait_for_leases,
        operations=PURGES,
    ),
    "writers-ignore-deadlines": Fault(
        why="a writer looks at its deadline before each piece",
        caught=WRITERS,
        plant=running.no_deadline,
        settings={"quarantine_ms": 1_500},
    ),
    "commits-count-twice": Fault(
        why="a commit is a running total", caught=("LOST", "NOT SOUND", *WRITERS, *LEASE), plant=running.count_twice
    ),
    "stall-not-compensated": Fault(
        why="a Master that was late expires nobody for it",
        caught=("after its last message",),
        plant=running.expire_for_a_stall,
        profile={"stop_master": 5, "stop_worker": 3},
    ),
    "slabs-bound-carelessly": Fault(
        why="a slab that is bound anew has an empty table and a new generation",
        caught=("LOST", "NOT SOUND"),
        plant=running.rebind_carelessly,
        profile=MASTERS,
        first=8,
    ),
    "workers-gone-by-silence": Fault(
        why="only the kernel's lock says that a worker is gone", caught=WRITERS, plant=running.gone_by_silence
    ),
    "no-grace": Fault(
        why="after a start nothing is used again before the former epoch's leases and reservations are over",
        caught=(*LEASE, *WRITERS),
        plant=recovery.no_grace,
        profile={"kill_master": 4, "stop_worker": 6},
        settings={"lease_min_ms": 6_000, "lease_max_ms": 6_000},
    ),
    "epoch-not-kept": Fault(
        why="each life of the Master has an epoch of its own, above all before",
        caught=("",),
        plant=recovery.epoch_of_the_wall,
        profile={"wake_in_the_past": 4, "stop_worker": 4},
    ),
    "tombstones-not-kept": Fault(
        why="a purge is for ever", caught=("purged",), plant=recovery.forget_tombstones, profile=NODES,
        operations=PURGES,
    ),
    "tombstones-not-obeyed": Fault(
        why="nodes clear what is dead; the Master does not take it in again (two lines, both removed)",
        caught=("purged",),
        plant=recovery.obey_no_tombstones,
        profile=NODES,
        operations=PURGES,
    ),
    "writers-ignore-epochs": Fault(
        why="a writer looks at the epoch once more after its marks", caught=WRITERS,
        plant=recovery.ignore_newer_epochs, profile=LATE, settings=LONG_QUARANTINE, operations=FILLING,
    ),
    "inventory-hides-writers": Fault(
        why="slots being written are reported, and wait for their writers", caught=WRITERS,
        plant=recovery.hide_writers, profile=MASTERS, settings=LONG_QUARANTINE,
    ),
    "inventory-loses-blocks": Fault(
        why="every committed block on a living node is found after a restart", caught=("LOST",),
        plant=recovery.lose_blocks, profile=NODES,
    ),
    "epochs-not-compared": Fault(
        why="nodes obey only the highest epoch seen; a Master that meets a higher one moves above it (two lines)",
        caught=("",),
        plant=recovery.compare_no_epochs,
        profile={"lose_state": 4, "set_clock": 6, "kill_master": 2},
    ),
    "files-not-adopted": Fault(
        why="a node client that starts again finds what its former life held", caught=("LOST",),
        plant=recovery.adopt_nothing, profile=NODES,
    ),
}  # fmt: skip
