"""Every limit and time of the core, with its default. Units stand in the names."""

from __future__ import annotations

from dataclasses import dataclass, fields

SETTING_MAX = 1 << 62
_MAY_BE_ZERO = (
    "quarantine_ms",
    "incomplete_grace_ms",
    "bind_ahead_permille",
    "recovery_ms",
    "unclaimed_ms",
    "orphan_grace_ms",
    "ramp_ms",
    "copy_hits_min",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Limits and times that the core obeys; read once."""

    # chains and tables
    chain_blocks_max: int = 65_536
    """Longest chain of one request: 1 M tokens at 16 tokens a block."""
    namespaces_max: int = 1024
    nodes_max: int = 1024
    segments_per_node_max: int = 64
    leases_max: int = 100_000
    reservations_max: int = 20_000
    remembered_ids_max: int = 20_000
    """Aborts and releases that overtook their request."""
    remember_ms: int = 60_000

    # leases: time for the bytes at a slow rate, between a least and a most; renewals up to a maximum life
    lease_min_ms: int = 5_000
    lease_max_ms: int = 60_000
    lease_life_max_ms: int = 300_000
    lease_bytes_per_ms: int = 200_000
    """200 MB/s: slower readers renew."""

    # reservations
    write_min_ms: int = 10_000
    write_max_ms: int = 120_000
    write_bytes_per_ms: int = 200_000
    reserve_share_permille: int = 500
    """Open and quarantined reservations hold at most this share of a segment."""
    quarantine_ms: int = 600_000
    """Slots given up without their writer's word come back at the latest so long after their reservation's end."""
    incomplete_grace_ms: int = 30_000
    """Blocks that lack a part and have no writer are dropped after this; where room is short they go like others."""

    # eviction, in permille of a segment's slab bytes
    watermark_high_permille: int = 950
    watermark_low_permille: int = 900
    evict_ahead: bool = True
    """False: evict only when a reservation needs a slot (replay)."""
    evict_step_spans_max: int = 64
    """Leaf spans that one Tick may evict from a segment."""
    evict_inline_spans_max: int = 256
    """Leaf spans that one reservation may evict."""
    gone_ring_blocks_max: int = 65_536
    """How many blocks the ring of the gone remembers."""

    # placement
    spread_run_bytes: int = 768 << 20
    """A writer whose own node takes no more, or who has none, writes runs of about this size, each to a node chosen."""
    ramp_ms: int = 60_000
    """A node that joins empty gets its full share of others' writes so long after."""

    # copies between nodes: replicas, moves of a drain
    copies_per_node_max: int = 4
    """Copies that one node carries out at a time."""
    copy_run_bytes_max: int = 64 << 20
    copy_ms: int = 60_000
    """A copy that is not confirmed for so long is given up."""
    copy_hits_min: int = 0
    """Runs hit so often from one other node are copied there; 0: never."""

    # rights
    quotas_max: int = 1024
    """Tenants with a quota."""

    # space
    bind_ahead_permille: int = 500
    """Free slots of a size that is in use are kept bound up to this share of a segment."""

    # background work of one Tick
    tick_spans_max: int = 500
    """Spans of purged namespaces, of inventories and of draining nodes handled in one Tick."""
    retire_spans_max: int = 200
    """Spans of retired nodes taken apart in one Tick: some 30 us each, during which nobody is answered."""

    # recovery
    inventories_max: int = 4
    """Nodes that report their inventory at a time."""
    inventory_ms: int = 30_000
    """A node whose inventory makes no progress for so long has to register again."""
    recovery_ms: int = 60_000
    """How long after a start nodes known from former lives are awaited before the pool counts as ready."""
    unclaimed_ms: int = 600_000
    """How long an inventory's blocks wait for somebody to open their namespace."""
    orphan_grace_ms: int = 600_000
    """How long recovered blocks that cannot be reached from the root wait for their ancestors."""

    # liveness
    heartbeat_ms: int = 1_000
    suspect_ms: int = 5_000
    retire_ms: int = 60_000
    report_window_ms: int = 10_000
    """Reports of two hosts within this time make a node suspect."""
    report_hold_ms: int = 10_000
    """How long a node that was reported stays suspect after the last report, although it sends heartbeats."""
    probe_ms: int = 2_000
    """A node that was reported and does not answer on its session for so long is suspect."""
    stall_ms: int = 2_000
    """A Tick later than this moves all liveness deadlines by the delay."""

    def check(self) -> None:
        """Raise ValueError, naming the setting, unless the settings make sense together."""
        for field in fields(self):
            value = getattr(self, field.name)
            low = 0 if field.name in _MAY_BE_ZERO else 1
            if field.name != "evict_ahead" and not low <= value <= SETTING_MAX:
                raise ValueError(f"{field.name} = {value}: at least {low}")
            if field.name.endswith("_permille") and value > 1000:
                raise ValueError(f"{field.name} = {value}: at most 1000")
        for low_name, high_name in (
            ("watermark_low_permille", "watermark_high_permille"),
            ("lease_min_ms", "lease_max_ms"),
            ("lease_max_ms", "lease_life_max_ms"),
            ("write_min_ms", "write_max_ms"),
            ("heartbeat_ms", "suspect_ms"),
            ("suspect_ms", "retire_ms"),
        ):
            if getattr(self, low_name) > getattr(self, high_name):
                raise ValueError(f"{low_name} must not be above {high_name}")
