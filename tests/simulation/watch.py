"""Looks over everybody's shoulder: hooks in the real code that tell the checkers what happens, and tear headers.

Nothing here decides anything; what it sees goes to Checkers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvpool_client import transfer
from kvpool_client.headers import WRITING, Array
from kvpool_client.owned_segment import OwnedSegment
from kvpool_client.runs import headers_of
from kvpool_client.transfer import LocalEngine, Term
from kvpool_master.core import messages as m
from kvpool_master.core.members import Members
from kvpool_master.core.pool import Pool
from kvpool_master.core.ring import Ring
from kvpool_proto.errors import KVPoolError
from simulation.watch_peers import watch_peers

if TYPE_CHECKING:
    from simulation.checkers import Checkers
    from simulation.doubles import Patches
    from simulation.hub import Hub
    from simulation.trouble import Trouble
    from simulation.wires import Wires

TORN_PERMILLE = 15
"""How often a header is seen half written."""
HALF_HEADER_BYTES = 64


def watch(patches: Patches, hub: Hub, wires: Wires, checkers: Checkers, trouble: Trouble) -> None:
    """Hook in, for as long as the patches last."""
    put_headers = _watched_put(hub, checkers, trouble)
    _watch_writers(patches, checkers, put_headers)
    watch_peers(patches, hub, wires, checkers, trouble, put_headers)
    _watch_core(patches, hub, checkers)
    bind: Callable[..., int] = OwnedSegment.bind_slab
    clear: Callable[..., int] = OwnedSegment.clear_slots

    def clear_slots(segment: OwnedSegment, slot_bytes: int, runs: Any) -> int:
        """OwnedSegment.clear_slots."""
        checkers.clearing(segment, slot_bytes, runs)
        return clear(segment, slot_bytes, runs)

    def bind_slab(segment: OwnedSegment, slab: int, slot_bytes: int) -> int:
        """OwnedSegment.bind_slab."""
        checkers.binding(segment, slab)
        return bind(segment, slab, slot_bytes)

    patches.set(OwnedSegment, "bind_slab", bind_slab)
    patches.set(OwnedSegment, "clear_slots", clear_slots)


def _watched_put(hub: Hub, checkers: Checkers, trouble: Trouble) -> Callable[..., None]:
    put: Callable[..., None] = transfer.put_headers

    def put_headers(runs: list[Any], headers: Array, slot_bytes: int) -> None:
        """transfer.put_headers, perhaps after a while, at times half first."""
        trouble.interrupt()
        if int(headers["state"][0]) == WRITING:
            trouble.before_marks()
        before = headers_of(runs, slot_bytes)
        checkers.putting(runs, headers, before, slot_bytes)
        if hub.chance(TORN_PERMILLE):
            torn = before.copy()
            raw, half = torn.view("u1").reshape(len(torn), -1), headers.view("u1").reshape(len(headers), -1)
            raw[:, :HALF_HEADER_BYTES] = half[:, :HALF_HEADER_BYTES]
            put(runs, torn, slot_bytes)
            hub.sleep(hub.rng.randrange(2_000))
            checkers.putting(runs, headers, headers_of(runs, slot_bytes), slot_bytes)
        put(runs, headers, slot_bytes)

    return put_headers


def _watch_writers(patches: Patches, checkers: Checkers, put_headers: Callable[..., None]) -> None:
    ended: Callable[..., str] = Term.ended
    write: Callable[..., Any] = LocalEngine.write

    def term_ended(term: Term, runs: Any) -> str:
        """Term.ended."""
        reason = ended(term, runs)
        checkers.looked(term, reason)
        return reason

    def engine_write(engine: LocalEngine, *given: Any) -> Any:
        """LocalEngine.write."""
        try:
            return write(engine, *given)
        finally:
            checkers.wrote()

    patches.set(transfer, "put_headers", put_headers)
    patches.set(Term, "ended", term_ended)
    patches.set(LocalEngine, "write", engine_write)


def _watch_core(patches: Patches, hub: Hub, checkers: Checkers) -> None:
    apply: Callable[..., Any] = Pool.apply
    add: Callable[..., None] = Ring.add
    suspect: Callable[..., None] = Members._suspect

    def pool_apply(pool: Pool, command: Any, now_ms: int) -> Any:
        """Pool.apply."""
        try:
            outcome = apply(pool, command, now_ms)
        except KVPoolError:
            raise
        except Exception as error:
            hub.fail(f"the core raised {error!r} at {command}")
            raise
        checkers.applied(pool, command, outcome)
        return outcome

    def ring_add(ring: Ring, span: Any, keys: bytes, reason: m.GoneReason, *given: int) -> None:
        """Ring.add."""
        checkers.gone(span.tree, keys, reason)
        add(ring, span, keys, reason, *given)

    def members_suspect(members: Members, node: Any, reason: str) -> None:
        """Members._suspect."""
        checkers.suspected(node.name, reason)
        suspect(members, node, reason)

    patches.set(Pool, "apply", pool_apply)
    patches.set(Ring, "add", ring_add)
    patches.set(Members, "_suspect", members_suspect)
