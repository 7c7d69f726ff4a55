"""bypass.py: what the environment turns off."""

from __future__ import annotations

import pytest

from kvpool_client.bypass import BYPASS_LOADS, BYPASS_LOOKUPS, BYPASS_STORES, from_environment


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        ("", 0),
        ("lookups", BYPASS_LOOKUPS),
        ("loads, Stores,", BYPASS_LOADS | BYPASS_STORES),
        ("all", BYPASS_LOOKUPS | BYPASS_LOADS | BYPASS_STORES),
    ],
)
def test_words_of_the_environment(value: str, bits: int) -> None:
    assert from_environment({"KVPOOL_BYPASS": value}) == bits


def test_nothing_is_said() -> None:
    assert from_environment({}) == 0


def test_unknown_words_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'load' is none of lookups, loads, stores, all"):
        from_environment({"KVPOOL_BYPASS": "stores,load"})
