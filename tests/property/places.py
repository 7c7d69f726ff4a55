"""Extents as places, one a block and part: what runs say, written out."""

from __future__ import annotations

from kvpool_master.core.extents import extents

Place = tuple[int, int]
"""(segment handle, slot)."""


def spread(packed: bytes) -> dict[tuple[int, int], tuple[Place, int]]:
    """Extents as (block of the chain, part) -> (place, stamp). An overlap is an error."""
    found: dict[tuple[int, int], tuple[Place, int]] = {}
    for run in extents(packed):
        for block in range(run.blocks):
            for part in range(run.part_from, run.part_to):
                slot = run.first_slot + block * run.stride + part - run.part_from
                at = (run.offset + block, part)
                assert at not in found, f"block {at[0]}, part {at[1]} twice in the extents"
                found[at] = ((run.segment, slot), run.stamp)
    assert len({place for place, _ in found.values()}) == len(found), "a slot twice in the extents"
    return found
