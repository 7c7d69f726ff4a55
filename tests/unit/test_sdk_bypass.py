"""The bypass switch: by the environment, and live through the superblock."""

from __future__ import annotations

import pytest

from kvpool_client import Contiguous, KVPool, Namespace
from kvpool_client.bypass import BYPASS_LOADS, BYPASS_LOOKUPS, BYPASS_STORES
from unit.sdk_double import PoolDouble
from unit.sdk_world import chain_of, data_of, empty, spec_of

CHAIN, DATA = chain_of(4), data_of(4)


def test_what_is_off_asks_nobody_and_is_on_again_at_once(
    pool_double: PoolDouble, sdk_pool: KVPool, sdk_space: Namespace
) -> None:
    sdk_space.store(CHAIN, Contiguous(DATA))
    hit = sdk_space.lookup(CHAIN)
    pool_double.node.set_bypass(BYPASS_LOOKUPS | BYPASS_LOADS | BYPASS_STORES)
    asked = len(pool_double.calls)
    assert (sdk_space.lookup(CHAIN).blocks, sdk_space.lookup(CHAIN).reason) == (0, "bypassed")
    target = empty(4)
    loaded = sdk_space.load(hit, Contiguous(target))
    assert (loaded.blocks, loaded.reason, target.any()) == (0, "bypassed", False)
    assert sdk_space.store(chain_of(4, 2), Contiguous(DATA)).reason == "bypassed"
    assert len(pool_double.calls) == asked
    assert sdk_space.peek(CHAIN).blocks == 4
    hit.release()
    assert sdk_pool.flush(20_000)
    assert pool_double.core.snapshot(pool_double.now_ms).leases == 0
    stats = sdk_pool.stats()
    assert (dict(stats.lookups_short), dict(stats.loads_short), dict(stats.stores_short)) == (
        {"bypassed": 2},
        {"bypassed": 1},
        {"bypassed": 1},
    )
    pool_double.node.set_bypass(0)
    with sdk_space.lookup(CHAIN) as again:
        assert sdk_space.load(again, Contiguous(target)).blocks == 4
    assert sdk_space.store(chain_of(4, 2), Contiguous(DATA)).stored_blocks == 4
    sdk_pool.close()
    assert pool_double.node.use.short() == {
        ("lookup", "bypassed"): 2,
        ("load", "bypassed"): 1,
        ("store", "bypassed"): 1,
    }


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (BYPASS_LOOKUPS, ("bypassed", "", "")),
        (BYPASS_LOADS, ("", "bypassed", "")),
        (BYPASS_STORES, ("", "", "bypassed")),
    ],
)
def test_each_call_has_its_own_switch(
    pool_double: PoolDouble, sdk_space: Namespace, bits: int, reasons: tuple[str, str, str]
) -> None:
    sdk_space.store(CHAIN, Contiguous(DATA))
    hit = sdk_space.lookup(CHAIN)
    pool_double.node.set_bypass(bits)
    found = sdk_space.lookup(CHAIN).reason, sdk_space.load(hit, Contiguous(empty(4))).reason
    assert (*found, sdk_space.store(chain_of(4, 2), Contiguous(DATA)).reason) == reasons


def test_the_environment_is_one_switch_and_the_node_client_another(
    pool_double: PoolDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_BYPASS", "stores")
    with pool_double.connect() as pool:
        monkeypatch.delenv("KVPOOL_BYPASS")  # it is read once
        space = pool.namespace(spec_of())
        assert space.store(CHAIN, Contiguous(DATA)).reason == "bypassed"
        assert space.lookup(CHAIN).reason == "unknown_key"
        pool.flush(20_000)  # attached now
        pool_double.node.set_bypass(BYPASS_LOOKUPS)
        assert space.lookup(CHAIN).reason == "bypassed"
        assert space.store(CHAIN, Contiguous(DATA)).reason == "bypassed"


def test_unknown_words_are_refused_at_connect(pool_double: PoolDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_BYPASS", "everything")
    with pytest.raises(ValueError, match="lookups, loads, stores, all"):
        pool_double.connect()


def test_mistakes_in_keys_are_raised_whatever_is_off(pool_double: PoolDouble, sdk_space: Namespace) -> None:
    sdk_space.store(CHAIN, Contiguous(DATA))
    pool_double.node.set_bypass(BYPASS_LOOKUPS | BYPASS_STORES)
    with pytest.raises(ValueError, match="skip = 5"):
        sdk_space.lookup(CHAIN, 5)
    with pytest.raises(ValueError, match="entry"):
        sdk_space.store(CHAIN, Contiguous(DATA), parent=b"k" * 12)
