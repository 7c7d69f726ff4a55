"""The end of every run: all is let go, and then every slot of every node must be free, and usable, again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpool_master.core.messages import (
    Abort,
    Commit,
    Parent,
    Purge,
    Reason,
    Release,
    Reserve,
    Reserved,
    SetQuota,
    Undrain,
)
from kvpool_proto.geometry import slots_per_slab
from property.strategies import SLAB_BYTES

if TYPE_CHECKING:
    from property.test_core_machine import CoreMachine

TRIES_MAX = 20


def finish(machine: CoreMachine) -> None:
    """Release, abort, purge, wait for every deadline: nothing may be left. Then fill the pool to the last slot."""
    with machine.judge.telling():
        _let_go(machine)
        if machine.fills and machine.judge.model.settings.reserve_share_permille == 1000:
            _fill(machine)


def _let_go(machine: CoreMachine) -> None:
    judge = machine.judge
    if judge.model.leases:
        machine.send(Release(tuple(judge.model.leases)))
    for reservation in list(judge.model.reservations.values()):
        if not reservation.ended:
            machine.send(Abort(reservation.request.reservation, writer=True, share=reservation.share))
    for kind in machine.kinds:
        machine.send(Purge(kind.spec.id))
    machine.prompt = machine.clears = True
    for tenant in list(judge.model.quotas):
        machine.send(SetQuota(tenant, 0))
    for name in sorted(judge.model.draining):
        machine.send(Undrain(name))
    machine.advance(judge.model.settings.quarantine_ms + 1_000, alive=True, tick=True)
    for _ in range(2):
        judge.settle()
        machine.after()
    while judge.binds:
        machine.bind(0)
    snapshot = judge.snapshot
    assert (snapshot.leases, snapshot.reservations) == (0, 0)
    for space in snapshot.namespaces:
        assert (space.blocks, space.bytes, space.spans) == (0, 0, 0), f"left behind: {space}"
    for node in snapshot.nodes:
        for segment in node.segments:
            assert segment.used_bytes == segment.quarantined_bytes == segment.deferred_bytes == 0, f"leak: {segment}"


def _fill(machine: CoreMachine) -> None:
    """Store single blocks until each slot of each slab is taken, without one eviction."""
    judge, kind = machine.judge, machine.kinds[0]
    slot_bytes = judge.model.slot_bytes(kind.spec.id)
    per_slab = slots_per_slab(SLAB_BYTES, slot_bytes)
    segments = judge.model.segments.values()
    # The parts of a block that may go anywhere stay together in one segment.
    room = sum(len(segment.slabs) * per_slab // kind.spec.parts for segment in segments)
    judge.model.seen.clear()  # all of it was seen to be gone; the rest is quicker so
    stored = tries = 0
    while stored < room:
        key = machine.fresh_id()
        chain = stored.to_bytes(kind.spec.key_bytes, "big")
        answer = machine.send(Reserve(kind.spec.id, key, Parent.ROOT, chain, 0, kind.spec.parts))
        assert isinstance(answer, Reserved)
        if answer.answered:
            machine.send(Commit(key, 0, kind.spec.parts, 1, final=True))
            stored, tries = stored + 1, 0
        else:
            tries += 1
            assert answer.reason is Reason.SLAB_PENDING, f"{answer.reason!r} after {stored} of {room} blocks"
            assert tries < TRIES_MAX, f"slabs stay pending after {stored} of {room} blocks"
    blocks = {space.id: space.blocks for space in judge.snapshot.namespaces}
    assert blocks[kind.spec.id] == room, f"evicted although there was room for {room}"
