"""Where new blocks are put on: shared by puts and by what inventories bring back."""

from __future__ import annotations

from kvpool_master.core.directory import Plan, plan_put
from kvpool_master.core.forest import Forest
from kvpool_master.core.messages import Parent
from kvpool_master.core.spans import Span, Tree


def plan_alive(forest: Forest, tree: Tree, parent: Parent | bytes, chain: bytes) -> Plan:
    """Where the blocks go, now that what lay on retired nodes is known to be lost."""
    plan = plan_put(tree, parent, chain)
    while forest.retiring and any(
        region.span is not None and forest.lose_retired(region.span) for region in plan.regions
    ):
        plan = plan_put(tree, parent, chain)
    return plan


def end_of(forest: Forest, tree: Tree, after: tuple[Span, int] | None, lead: bytes) -> Span:
    """A span that ends with what the next block follows, cut or made where necessary; see directory.Plan."""
    if after is None:
        return new_span(tree.orphans, lead, 0) if lead else tree.orphans
    span, end = after
    return forest.cut(span, end) if 0 < end < span.blocks else span


def new_span(parent: Span, keys: bytes, age: int) -> Span:
    """A new span behind `parent`, without bytes yet."""
    tree = parent.tree
    span = Span(tree, parent, keys, age)
    parent.attach(span)
    tree.index_keys(keys, span)
    tree.spans += 1
    return span


def link(before: Span, orphan: Span) -> None:
    """The head of an orphan chain turns out to follow the last block of `before`."""
    orphan.tree.orphans.drop(orphan)
    before.attach(orphan)
    if before.parent is not None and orphan.front_age > before.age:
        before.touch(before.blocks, orphan.front_age)
