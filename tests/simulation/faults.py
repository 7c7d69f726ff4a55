"""Planted faults: each breaks one rule of the product, and must be caught by some seed. Only tests plant them.

A fault that the next line of defence makes harmless is planted together with that line's removal, and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from simulation import faults_peers as peers
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
PEERS: Final[Profile] = {"cut_peers": 12, "stop_worker": 6, "kill_worker": 4, "stall_port": 6}
KILLED: Final[Profile] = {"cut_peers": 12, "kill_worker": 10, "stall_port": 6}
STORES: Final = {"read": 15, "store": 80, "remove": 5}
CUT_MASTERS: Final[Profile] = {"kill_master": 4, "cut_peers": 12, "stall_port": 8}
DRAINS: Final[Profile] = {"drain_node": 8, "stop_worker": 4, "cut_peers": 2}
SMALL: Final = {"machines": 2, "slabs": 3, "replicas": 1, "copy_hits_min": 0}
"""So that what is free is soon used again."""
LONG_QUARANTINE: Final = {"quarantine_ms": 40_000}
"""So that writers may sleep for long and must still be waited for."""
FILLING: Final = {"read": 20, "store": 60, "purge": 8}
"""So that free slots are empty ones: what a header says of a block comes back with an inventory."""
PURGES: Final = {"read": 50, "store": 44, "purge": 6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One of them. why: the rule that was broken. caught: parts of what a checker may say.

    profile, trouble_us: the trouble in which it shows soonest, and about how often. operations: what workers do.
    settings: of the core, where they matter; world: of the plan. first: the seed to begin with: it caught it once.
    """

    why: str
    caught: tuple[str, ...]
    plant: Callable[[Patches], object]
    profile: Profile = field(default_factory=lambda: dict(WORKERS))
    operations: dict[str, int] = field(default_factory=lambda: dict(OPERATIONS))
    trouble_us: int = 1_500_000
    settings: dict[str, int] = field(default_factory=dict)
    world: dict[str, int] = field(default_factory=dict)
    first: int = 1


FAULTS: Final[dict[str, Fault]] = {
    "readers-check-nothing": Fault(
        why="headers before and after the copy, and checksums, make a doubt a miss",
        caught=("WRONG BYTES",),
        plant=running.read_blindly,
        trouble_us=600_000,
        world=SMALL,
        first=10,
    ),
    "readers-check-before-only": Fault(
        why="a slot may be written during the copy, when the lease ran out meanwhile",
        caught=("WRONG BYTES",),
        plant=running.no_look_afterwards,
        trouble_us=600_000,
        world=SMALL,
        first=10,
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
        operations={"read": 25, "store": 60, "remove": 15},
        trouble_us=800_000,
        settings={"bind_ahead_permille": 0},
        world=SMALL,
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
        why="each life of the Master has an epoch of its own, above all before (two lines, both removed)",
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
        first=8,
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
    "ports-take-what-ran-out": Fault(
        why="a data port looks at a capability's time, fenced stamps, what slots hold (three lines, all removed)",
        caught=(*WRITERS, *LEASE), plant=peers.take_what_ran_out, profile=PEERS,
    ),
    "ports-take-former-epochs": Fault(
        why="only the ruling epoch's capabilities write (and end in time, and slots are looked at: all removed)",
        caught=(*WRITERS, *LEASE), plant=peers.take_former_epochs, profile=CUT_MASTERS,
        trouble_us=900_000,
        operations=STORES,
        world=SMALL,
        first=7,
    ),
    "fences-end-nothing": Fault(
        why="slots are cleared when nothing is written in them any more", caught=("is cleared while", *WRITERS),
        plant=peers.fence_nothing, profile=PEERS,
    ),
    "word-for-silence": Fault(
        why="a writer gives its word for what peers have confirmed only", caught=WRITERS,
        plant=peers.word_for_silence, profile=PEERS,
        first=7,
    ),
    "remote-slots-freed-at-once": Fault(
        why="slots on another node than their writer's come back when their node has fenced them", caught=WRITERS,
        plant=peers.free_remote_slots,
        profile=KILLED, trouble_us=500_000, operations=STORES, world=SMALL,
    ),
    "failed-copies-count": Fault(
        why="a copy counts for the blocks that its node has answered for", caught=("LOST", "NOT SOUND"),
        plant=peers.install_failures, profile=DRAINS | PEERS, world={"replicas": 2},
    ),
    "replicas-misplaced": Fault(
        why="replicas follow their blocks", caught=("NOT SOUND", "invariants"), plant=peers.misplace_replicas,
        operations={"read": 30, "store": 60, "remove": 10},
        world={"replicas": 2, "slabs": 9},
    ),
    "drained-at-once": Fault(
        why="a node is drained when nobody reads or writes on it any more", caught=("is drained",),
        plant=peers.drained_at_once, profile=DRAINS,
    ),
    "quotas-not-looked-at": Fault(
        why="a tenant holds no more than its quota", caught=("above its quota",), plant=peers.look_at_no_quota,
        world={"quota_blocks": 12},
        first=3,
    ),
}  # fmt: skip
