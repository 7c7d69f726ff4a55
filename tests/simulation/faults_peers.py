"""Planted faults of what nodes do for each other: data ports, fences, copies, drains, quotas. See faults.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from kvpool_client.lanes import Lanes, Stored
from kvpool_client.peer import serving
from kvpool_client.peer.keyring import Keyring
from kvpool_client.peer.serving import Talk
from kvpool_client.peer.writes import PeerWrites
from kvpool_master.core import extents as ex
from kvpool_master.core.copies import Copies
from kvpool_master.core.drains import Drains
from kvpool_master.core.quotas import Quotas
from kvpool_master.core.replicas import Replicas
from kvpool_master.core.writes import Writes
from simulation.doubles import Patches

EPOCH_SHIFT: Final = 32
"""Of a stamp, above it is the epoch."""

# -- data ports ----------------------------------------------------------------------------------------


def take_what_ran_out(patches: Patches) -> None:
    """Capabilities have no end, fenced stamps may be written again, and what a slot holds is not looked at."""
    patches.set(Keyring, "_check_time", lambda keyring, grant, key: None)
    begin: Callable[..., int] = PeerWrites.begin

    def begin_anyway(writes: PeerWrites, segment: Any, slots: Any, stamp: int, abort: Any = None) -> int:
        """PeerWrites.begin."""
        writes._dead.pop(stamp, None)
        return begin(writes, segment, slots, stamp, abort)

    patches.set(PeerWrites, "begin", begin_anyway)
    there: Callable[..., Any] = Talk._there
    patches.set(Talk, "_there", lambda talk, found, headers, places: there(talk, found, _older(headers), places))


def _older(headers: Any) -> Any:
    """The same headers under a stamp that nothing is newer than."""
    told = headers.copy()
    told["stamp"] = (1 << 64) - 1
    return told


def take_former_epochs(patches: Patches) -> None:
    """What a former epoch allowed is written as well, at any time, whatever the slots hold by now."""
    check_time: Callable[..., None] = Keyring._check_time
    there: Callable[..., Any] = Talk._there

    def key_of(keyring: Keyring, grant: Any) -> Any:
        """Keyring._key_of."""
        for key in keyring._keys:
            if key.epoch == grant.epoch:
                return key
        raise serving.StaleEpoch(f"a capability of epoch {grant.epoch}")

    write: Callable[..., Any] = Talk._write_registered

    def write_anyway(talk: Talk, placed: Any, *given: Any) -> Any:
        """Talk._write_registered, to which the grant's epoch rules."""
        host, talk._host = talk._host, _Host(talk._host, placed.grant.epoch)
        try:
            return write(talk, placed, *given)
        finally:
            talk._host = host

    patches.set(Keyring, "_key_of", key_of)

    def any_time(keyring: Keyring, grant: Any, key: Any) -> None:
        """Keyring._check_time."""
        if key is keyring._keys[0]:
            check_time(keyring, grant, key)

    def there_anyway(talk: Talk, found: Any, headers: Any, places: Any) -> Any:
        """Talk._there."""
        former = int(headers["stamp"][0]) >> EPOCH_SHIFT != talk._host.keyring._keys[0].epoch
        return there(talk, found, _older(headers) if former else headers, places)

    patches.set(Keyring, "_check_time", any_time)
    patches.set(Talk, "_there", there_anyway)
    patches.set(Talk, "_write_registered", write_anyway)


class _Host:
    """A node that obeys the epoch that one likes."""

    def __init__(self, host: Any, epoch: int) -> None:
        self._host = host
        self.epoch = epoch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)


def fence_nothing(patches: Patches) -> None:
    """A fence says that all has ended, and ends nothing."""
    patches.set(PeerWrites, "fence", lambda writes, stamps, timeout_s: True)


def word_for_silence(patches: Patches) -> None:
    """A writer gives its word, though a peer went silent."""
    write: Callable[..., Stored] = Lanes.write
    patches.set(Lanes, "write", lambda one, *given: replace(write(one, *given), unconfirmed=frozenset()))


def free_remote_slots(patches: Patches) -> None:
    """Slots elsewhere are treated as if only their writer's process wrote them."""
    patches.set(Writes, "_is_local", lambda one, reservation, row: True)


# -- copies --------------------------------------------------------------------------------------------


def install_failures(patches: Patches) -> None:
    """A copy counts for all of its blocks, however far it came."""
    end: Callable[..., None] = Copies._end
    patches.set(Copies, "_end", lambda copies, copy, good: end(copies, copy, copy.blocks))


def misplace_replicas(patches: Patches) -> None:
    """When spans are joined, the replicas of the second stay where the first begins."""

    def joined(replicas: Replicas, span: Any, child: Any, at: int) -> None:
        """Replicas.joined."""
        packed = replicas.of.pop(child, b"")
        if packed:
            rows = [*ex.records(replicas.of.get(span, b"")), *ex.records(packed)]
            replicas.of[span] = ex.ordered(rows)
            replicas._enlist(span, rows)

    patches.set(Replicas, "joined", joined)


def drained_at_once(patches: Patches) -> None:
    """A node is drained as soon as it is hidden."""
    patches.set(Drains, "is_drained", lambda drains, node: True)


def look_at_no_quota(patches: Patches) -> None:
    """Tenants get what they ask for, and nobody looks afterwards."""
    patches.set(Quotas, "blocks_left", lambda quotas, tree, block_bytes, blocks: blocks)
    patches.set(Quotas, "tick", lambda quotas: None)
