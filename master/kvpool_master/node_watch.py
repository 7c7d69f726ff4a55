"""Logs once what becomes of nodes: suspect and why, draining, drained, up again, gone."""

from __future__ import annotations

from collections.abc import Iterable

from kvpool_master.core.liveness import Node
from kvpool_master.logs import Log

WATCH_MS = 1_000
"""Time between two looks: what comes and goes between them is not seen."""


class NodeWatch:
    """Remembers how every node was when it was looked at last."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._states: dict[str, str] = {}
        self._due_ms = 0

    def look(self, nodes: Iterable[Node], now_ms: int) -> None:
        """Compare, every WATCH_MS. A node that is new and up is not worth a word: its registration was."""
        if now_ms < self._due_ms:
            return
        self._due_ms = now_ms + WATCH_MS
        former, self._states = self._states, {}
        for node in nodes:
            state = self._states[node.name] = node.state(now_ms)
            was = former.pop(node.name, state if node.up and not node.draining else "")
            if state != was:
                write = self._log.info if node.up else self._log.warning
                write("node_state", node=node.name, state=state, why=node.reason)
        for name, state in former.items():
            self._log.warning("node_gone", node=name, was=state)
