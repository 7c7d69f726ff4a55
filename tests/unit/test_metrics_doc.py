"""docs/metrics.md lists exactly what the daemons export, with the same words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvpool_client.metrics import METRICS as OF_THE_NODE_CLIENT
from kvpool_master.metrics import METRICS as OF_THE_MASTER

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(kvpool_\w+)` \| (.+) \|$", re.MULTILINE)


@pytest.mark.parametrize(
    ("prefix", "metrics"), [("kvpool_master_", OF_THE_MASTER), ("kvpool_client_", OF_THE_NODE_CLIENT)]
)
def test_the_page_lists_every_metric_with_its_use(prefix: str, metrics: dict[str, str]) -> None:
    listed = {name: use for name, use in ROW.findall(PAGE.read_text()) if name.startswith(prefix)}
    assert listed == metrics
    assert list(listed) == list(metrics), "in the same order"


def test_units_stand_last() -> None:
    for name in [*OF_THE_MASTER, *OF_THE_NODE_CLIENT]:
        assert re.search(
            r"_(total|bytes|seconds|blocks|spans|live|slabs|bound|info|epoch|nodes|sessions|state)$", name
        ) or (name in ("kvpool_client_workers_attached", "kvpool_client_local_connections")), name
