"""How many bytes a tenant may hold.

Rules
  - A tenant holds the slots of its namespaces' extents, replicas included; what waits to be freed counts no more.
  - At its quota it evicts its own oldest leaves, as a full segment would, also where other tenants' are older. What
    leases and writers hold stays; what finds no room is answered short, never accepted and dropped.
  - One that is above its quota (a new, lower one; an inventory) shrinks in bounded steps.
  - Tenants with a quota have a heap of their leaves of their own (eviction.py); the others pay nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvpool_master.core.eviction import Pass, Quota, keep_blocks
from kvpool_master.core.forest import Forest
from kvpool_master.core.settings import Settings
from kvpool_master.core.spans import Span, Tree
from kvpool_proto.errors import BadRequest, LimitReached
from kvpool_proto.namespace import TEXT_CHARS_MAX


class Quotas:
    """All quotas. trees: of the open namespaces, those of a tenant."""

    def __init__(
        self,
        settings: Settings,
        forest: Forest,
        trees: Callable[[str], Iterable[Tree]],
        known: Iterable[tuple[str, int]],
    ) -> None:
        self._settings = settings
        self._forest = forest
        self._trees = trees
        self.limits: dict[str, Quota] = {tenant: Quota(limit) for tenant, limit in known}

    def opened(self, tree: Tree) -> None:
        """A tree is new: it belongs to its tenant."""
        tree.quota = self.limits.get(tree.tenant)

    def set(self, tenant: str, limit_bytes: int) -> None:
        """Limit a tenant, 0: no more. Takes time linear in the tenant's spans. Raises BadRequest, LimitReached."""
        if not 0 < len(tenant) <= TEXT_CHARS_MAX or not 0 <= limit_bytes < 1 << 62:
            raise BadRequest(
                f"tenant has {len(tenant)} characters, quota_bytes = {limit_bytes}: a name, and at least 0"
            )
        quota = self.limits.get(tenant)
        if not limit_bytes:
            self.limits.pop(tenant, None)
        elif quota is not None:
            quota.limit_bytes = limit_bytes
            return
        elif len(self.limits) >= self._settings.quotas_max:
            raise LimitReached(f"quotas_max = {self._settings.quotas_max} tenants have a quota")
        else:
            self.limits[tenant] = Quota(limit_bytes)
        for tree in self._trees(tenant):
            self.opened(tree)
            if tree.quota is not None:
                tree.quota.fill(span for span in _spans(tree) if span.queued)

    def used(self, tenant: str) -> int:
        """What a tenant holds."""
        return sum(tree.bytes + tree.replica_bytes for tree in self._trees(tenant))

    def blocks_left(self, tree: Tree, block_bytes: int, blocks: int) -> int:
        """How many of `blocks` blocks the tenant may still store, after evicting what is its own and old."""
        quota = tree.quota
        if quota is None:
            return blocks
        left = quota.limit_bytes - self.used(tree.tenant)
        if left < blocks * block_bytes:
            self._shrink(quota, blocks * block_bytes - left, self._settings.evict_inline_spans_max)
            left = quota.limit_bytes - self.used(tree.tenant)
        return min(blocks, max(0, left) // block_bytes)

    def tick(self) -> None:
        """Shrink who is above the quota, a step."""
        for tenant, quota in self.limits.items():
            over = self.used(tenant) - quota.limit_bytes
            if over > 0:
                self._shrink(quota, over, self._settings.evict_step_spans_max)

    def _shrink(self, quota: Quota, wanted_bytes: int, spans_max: int) -> None:
        leaves = Pass(quota.leaves)
        for _ in range(spans_max):
            if wanted_bytes <= 0:
                break
            span = leaves.next_leaf()
            if span is None:
                break
            block_bytes = span.tree.parts * span.tree.slot_bytes
            keep = keep_blocks(span, -(-wanted_bytes // block_bytes))
            wanted_bytes -= (span.blocks - keep) * block_bytes
            self._forest.trim(span, keep)
        leaves.end()


def _spans(tree: Tree) -> Iterable[Span]:
    stack = [*tree.root.kids(), *tree.orphans.kids()]
    while stack:
        span = stack.pop()
        yield span
        stack += span.kids()
