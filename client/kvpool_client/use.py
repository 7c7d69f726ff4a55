"""What this node's workers did with the pool, added up over all of them, for the node client's metrics.

A worker reports what it did since its last report that was answered, so its numbers outlive it. Namespaces beyond
NAMESPACES_MAX and reasons beyond REASONS_MAX are added up under the name "other".
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

from kvpool_proto import pool_pb2 as pb

NAMESPACES_MAX: Final = 256
REASONS_MAX: Final = 256
OTHER: Final = ("other", "other")

COUNTS: Final = (
    "lookups",
    "lookup_blocks",
    "hit_blocks",
    "loaded_blocks",
    "loaded_bytes",
    "load_us",
    "stored_blocks",
    "stored_bytes",
    "store_us",
    "existing_blocks",
    "verify_failures",
)
OF_BLOCKS: Final = ("lookup_blocks", "hit_blocks", "loaded_blocks", "stored_blocks")
"""Those that are told in tokens as well."""

Namespace = tuple[str, str]
"""Labels: the first eight hex digits of the id, and the model."""


class UseTotals:
    """Thread safe; totals only rise."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[Namespace, Counter[str]] = {}
        self._short: Counter[str] = Counter()

    def add(self, use: pb.LocalUse) -> None:
        """Take in one worker's report."""
        with self._lock:
            for report in use.namespaces:
                name = (report.namespace_id.hex()[:8], report.model[:256])
                if name not in self._totals and len(self._totals) >= NAMESPACES_MAX:
                    name = OTHER
                totals = self._totals.setdefault(name, Counter())
                for count in COUNTS:
                    totals[count] += getattr(report, count)
                for count in OF_BLOCKS:
                    totals[count.replace("_blocks", "_tokens")] += getattr(report, count) * report.block_tokens
                for reason, calls in report.short.items():
                    known = reason in self._short or len(self._short) < REASONS_MAX
                    self._short[reason[:128] if known else "other/other"] += calls

    def totals(self) -> dict[Namespace, Counter[str]]:
        """By namespace: COUNTS, and *_tokens for OF_BLOCKS."""
        with self._lock:
            return {name: Counter(counts) for name, counts in self._totals.items()}

    def short(self) -> dict[tuple[str, str], int]:
        """(call, reason) -> how many calls did less than they were asked for."""
        with self._lock:
            found: Counter[tuple[str, str]] = Counter()
            for key, calls in self._short.items():
                call, _, reason = key.partition("/")
                found[call, reason] += calls
            return dict(found)
