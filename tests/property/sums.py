"""Compares the snapshot's sums with the naive pool, and judges quotas: who may hold how much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvpool_master.core.messages import Command, Outcome, QuotaSet, Remember, SetQuota, SlotsCopied
from kvpool_master.core.snapshot import Snapshot
from kvpool_proto.errors import KVPoolError
from property import placing, reading, writing
from property.records import Cell, Keep

if TYPE_CHECKING:
    from property.judge import Judge

Answer = Outcome | KVPoolError


@dataclass(slots=True)
class Counted:
    """What a snapshot said."""

    moved_blocks: int = 0
    replicated_blocks: int = 0
    tenants: dict[str, int] = field(default_factory=dict[str, int])
    copies: dict[str, int] = field(default_factory=dict[str, int])

    def note(self, snapshot: Snapshot) -> None:
        """Remember it."""
        self.moved_blocks = snapshot.counters.moved_blocks
        self.replicated_blocks = snapshot.counters.replicated_blocks
        self.tenants = {one.tenant: one.bytes for one in snapshot.tenants}
        self.copies = copy_bytes(snapshot)


def copy_bytes(snapshot: Snapshot) -> dict[str, int]:
    """By tenant, the bytes of copies beside those that count."""
    found = {one.tenant: one.bytes for one in snapshot.tenants}
    for space in snapshot.namespaces:
        found[space.spec.tenant] -= space.bytes
    return found


# -- copies: they may go at any time; when none has, that is certain --------------------------------------


def _copies(judge: Judge, tenant: str) -> list[Cell]:
    specs = judge.model.specs
    blocks = [block for block in judge.model.blocks.values() if specs[block.ref[0]].tenant == tenant]
    return [copy for block in blocks for copy in block.copies]


def doubt_copies(judge: Judge) -> bool:
    """After a command, before it is judged: copies may have been given up. Returns whether some have."""
    shed = False
    for tenant, held in copy_bytes(judge.snapshot).items():
        copies = _copies(judge, tenant)
        if judge.retiring or held < sum(copy.slot_bytes for copy in copies):
            for copy in copies:
                copy.sure = False
        shed |= held < judge.before.copies.get(tenant, 0)
    return shed


def _sure_copies(judge: Judge) -> None:
    """A command was judged: if as many copies are left as there can be, they are all there; if none, none."""
    for tenant, held in copy_bytes(judge.snapshot).items():
        copies = _copies(judge, tenant)
        most = sum(copy.slot_bytes for copy in copies)
        assert judge.retiring or 0 <= held <= most, f"{held} bytes of copies, at most {most} are known"
        for copy in copies:
            if not held:
                judge.model.detach(copy, Keep.LOOSE)
            elif held == most and not judge.retiring:
                copy.sure = True


# -- sums ------------------------------------------------------------------------------------------------


def check(judge: Judge, command: Command) -> None:
    """All sums, after a command was judged."""
    _sure_copies(judge)
    check_slots(judge)
    _check_quotas(judge, command)


def check_slots(judge: Judge) -> None:
    """Slots, blocks, leases and reservations."""
    model, now_ms, snapshot = judge.model, judge.now_ms, judge.snapshot
    for node in snapshot.nodes:
        for segment in node.segments:
            cells = [cell for cell in model.held.values() if cell.place[0] == segment.handle]
            sure = sum(cell.slot_bytes for cell in cells if model.surely_held(cell, now_ms))
            most = sum(cell.slot_bytes for cell in cells)
            assert sure <= segment.used_bytes <= most, f"{segment} but held {sure}..{most} bytes"
            open_bytes = sum(cell.slot_bytes for cell in cells if cell.keep in (Keep.WRITING, Keep.COPYING))
            assert segment.reserved_bytes <= open_bytes, f"{segment} but reserved {open_bytes}"
            share = segment.size_bytes * model.settings.reserve_share_permille // 1000
            assert segment.reserved_bytes + segment.quarantined_bytes <= share, f"{segment}: more than {share} reserved"
        if node.state == "drained":
            _check_drained(judge, node.node)
    if not judge.unsettled:
        for space in snapshot.namespaces:
            blocks = [block for block in model.blocks.values() if block.ref[0] == space.id and block.stored()]
            sure = sum(judge.sure(block) for block in blocks)
            assert sure <= space.blocks <= len(blocks), f"{space} but stored {sure}..{len(blocks)}"
    for what, count, most, sure in (
        ("leases", snapshot.leases, len(model.leases), reading.sure_leases(model, now_ms)),
        ("reservations", snapshot.reservations, *writing.open_reservations(model, now_ms)),
        ("copies", snapshot.copies_open, len(judge.copies), len(judge.copies)),
    ):
        assert sure <= count <= most, f"{count} {what}, expected {sure}..{most}"


def _check_drained(judge: Judge, name: str) -> None:
    """A drained node may stop: nobody reads or writes there, or will."""
    model = judge.model
    (node,) = [node for node in judge.snapshot.nodes if node.node == name]
    for segment in node.segments:
        # What is deferred may be of blocks removed since: they were hidden before.
        assert segment.reserved_bytes == segment.quarantined_bytes == 0, f"{name} is drained, but {segment}"
    for lease in model.leases.values():
        here = [cell for cell in lease.hit if model.holds(cell) and cell.place[0] in model.nodes[name].handles]
        over = judge.now_ms >= lease.deadline_ms or lease.doubtful
        assert over or not here, f"{name} is drained, but {here[0]} is read"
    assert all(order.effect.node != name for order in judge.copies.values())


# -- quotas ----------------------------------------------------------------------------------------------


def _check_quotas(judge: Judge, command: Command) -> None:
    """Nobody comes above a quota but by copies, or by a new quota."""
    for tenant in judge.snapshot.tenants:
        quota = judge.model.quotas.get(tenant.tenant, 0)
        assert tenant.quota_bytes == quota, f"{tenant}: {quota} was set"
        if not quota or tenant.bytes <= quota:
            continue
        before = judge.before.tenants.get(tenant.tenant, 0)
        may_grow = isinstance(command, SlotsCopied)
        assert may_grow or tenant.bytes <= before, f"{tenant} held {before} before"


def check_granted(judge: Judge, namespace: bytes) -> None:
    """Something was granted: within the quota."""
    tenant = judge.model.specs[namespace].tenant
    quota = judge.model.quotas.get(tenant, 0)
    assert not quota or judge.tenant_bytes(tenant) <= quota, f"granted to {tenant} above its quota of {quota}"


def check_shrinking(judge: Judge) -> None:
    """A Tick has made those smaller that are above their quota, if anything of theirs could go."""
    for tenant in judge.snapshot.tenants:
        if 0 < tenant.quota_bytes < tenant.bytes and judge.before.tenants.get(tenant.tenant, 0) <= tenant.bytes:
            spaces = {ident for ident, spec in judge.model.specs.items() if spec.tenant == tenant.tenant}
            placing.check_nothing_to_evict(judge, [], spaces, None)


def _quota(judge: Judge, command: SetQuota, answer: Answer) -> None:
    assert isinstance(answer, QuotaSet), answer
    assert answer.effects == (Remember(quota=(command.tenant, command.bytes)),)
    if command.bytes:
        judge.model.quotas[command.tenant] = command.bytes
    else:
        judge.model.quotas.pop(command.tenant, None)
    assert answer.bytes == judge.tenant_bytes(command.tenant)
    judge.sweep()


JUDGES: dict[type, Callable[[Judge, Any, Any], None]] = {
    SetQuota: _quota,
}
