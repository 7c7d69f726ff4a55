"""Looks over the shoulders of data ports, copies and drains; see watch.py. Nothing here decides anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvpool_client import copying, lanes
from kvpool_client.headers import COMMITTED, WRITING, Array, Barrier
from kvpool_client.lanes import Lanes, Loaded
from kvpool_client.peer import serving
from kvpool_client.peer.serving import Talk
from kvpool_client.runs import Run, headers_of
from kvpool_client.session_messages import Copy
from kvpool_master.core.members import Members

if TYPE_CHECKING:
    from simulation.checkers import Checkers
    from simulation.doubles import Patches
    from simulation.hub import Hub
    from simulation.trouble import Trouble
    from simulation.wires import Wires

NO_DEADLINE_MS: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class NodesTerm:
    """Of a write that a node client carries out: it has no end. Whoever gives its slots away has it ended first."""

    epoch: int
    deadline_ms: int = NO_DEADLINE_MS


def watch_peers(
    patches: Patches, hub: Hub, wires: Wires, checkers: Checkers, trouble: Trouble, put_headers: Callable[..., None]
) -> None:
    """Hook in, for as long as the patches last. put_headers: the watched one."""
    wires.before_copy = checkers.copying
    wires.after_copy = trouble.interrupt
    patches.set(serving, "put_headers", put_headers)
    _watch_port(patches, hub, checkers)
    _watch_copies(patches, hub, checkers, trouble)
    forget: Callable[..., None] = Members._forget

    def members_forget(members: Members, node: Any) -> None:
        """Members._forget."""
        checkers.forgetting(node)
        forget(members, node)

    def failed(text: str, **given: Any) -> None:
        """Lanes swallow what an engine raises beyond the errors that there are."""
        error = given.get("exc_info")
        hub.fail(f"{text}: {error!r}")

    read: Callable[..., Loaded] = Lanes.read

    def lanes_read(one: Lanes, *given: Any) -> Loaded:
        """Lanes.read."""
        loaded = read(one, *given)
        checkers.seen.add("blocks loaded from other nodes", loaded.far_blocks)
        return loaded

    patches.set(Lanes, "read", lanes_read)
    patches.set(Members, "_forget", members_forget)
    patches.set(lanes._LOG, "error", failed)


def _watch_port(patches: Patches, hub: Hub, checkers: Checkers) -> None:
    write: Callable[..., Any] = Talk._write_registered

    def write_registered(talk: Talk, placed: Any, *given: Any) -> Any:
        """Talk._write_registered."""
        checkers.seen.add("peer writes")
        checkers.looked(NodesTerm(placed.grant.epoch), "")
        try:
            return write(talk, placed, *given)
        finally:
            checkers.wrote()

    patches.set(Talk, "_write_registered", write_registered)


def _watch_copies(patches: Patches, hub: Hub, checkers: Checkers, trouble: Trouble) -> None:
    put: Callable[..., None] = copying._Run.put

    class WatchedBarrier(Barrier):
        """A copy's: by now what was to be written is; first the marks."""

        def __call__(self) -> None:
            assert hub.thread is not None
            marks = hub.thread.facts.pop("marks", None)
            if marks is not None:
                checkers.putting(*marks)
            checkers.copying()
            trouble.interrupt()
            super().__call__()

    def run_put(run: Any, part: int, first: int, headers: Array, rows: Any) -> None:
        """_Run.put."""
        assert hub.thread is not None
        order: Copy = run.order
        width = len(order.parts)
        slot = order.slot + first * width + part - order.parts.start
        runs = [Run(0, len(headers), run._segment, slot, width, order.stamp)]
        ours = headers.copy()
        ours["stamp"], ours["state"] = order.stamp, WRITING
        checkers.looked(NodesTerm(order.epoch), "")
        hub.thread.facts["marks"] = (runs, ours, headers_of(runs, run.slot_bytes), run.slot_bytes)
        try:
            put(run, part, first, headers, rows)
            committed = ours.copy()
            committed["state"] = COMMITTED
            checkers.putting(runs, committed, headers_of(runs, run.slot_bytes), run.slot_bytes)
            checkers.seen.add("blocks copied by nodes", len(headers))
        finally:
            hub.thread.facts.pop("marks", None)
            checkers.wrote()

    patches.set(copying._Run, "put", run_put)
    patches.set(copying, "Barrier", WatchedBarrier)
