"""Lazy lists are swept at every chance here: what a sweep must not drop would else show in large pools only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvpool_master.core import eviction, segments


@pytest.fixture(autouse=True, scope="package")
def no_slack() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (segments, eviction):
            patch.setattr(module, "LIST_SLACK", 0)
            patch.setattr(module, "LIST_GROWTH", 1)
        yield
