"""What a Master must know of its former lives; the shell keeps it (effects.Remember) and hands it in at the start."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool_proto.namespace import NamespaceSpec


@dataclass(frozen=True, slots=True)
class Memory:
    """tombstones: (namespace, newest dead stamp). nodes: names of those that were members. draining: of these, those
    that an operator drains. quotas: (tenant, bytes).

    grace_ms: how long after the start a lease or a reservation of the former epoch may still be alive; None: no
    former epoch is known. Then a node that has seen another epoch than ours gets the longest times of our settings.
    """

    namespaces: tuple[NamespaceSpec, ...] = ()
    tombstones: tuple[tuple[bytes, int], ...] = ()
    nodes: tuple[str, ...] = ()
    grace_ms: int | None = None
    draining: tuple[str, ...] = ()
    quotas: tuple[tuple[str, int], ...] = ()


NO_MEMORY = Memory()
