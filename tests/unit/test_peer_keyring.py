"""peer/keyring.py: which capabilities hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool_client.clock import Clock
from kvpool_client.peer.copies import Grant
from kvpool_client.peer.keyring import Keyring
from kvpool_proto.capability import READ, WRITE, Op, make_mac, part_table
from kvpool_proto.errors import BadCapability, CapabilityExpired, KVPoolError, StaleEpoch

KEY, NEXT_KEY = b"1" * 32, b"2" * 32
TABLE = part_table(3, segment=[7], first_slot=[5], blocks=[4], stride=[1], stamp=[9], part_from=[3]).tobytes()


class World:
    """A keyring that knows epoch 10; the Master's clock says 1,000,000 when ours says 50."""

    def __init__(self) -> None:
        self.now_ms = 50
        self.keyring = Keyring(Clock(now_ms=lambda: self.now_ms))
        self.keyring.learn(10, KEY, 1_000_000, 0)

    def fails(self, grant: Grant) -> type[KVPoolError] | None:
        try:
            self.keyring.check(grant)
        except KVPoolError as error:
            return type(error)
        return None


@pytest.fixture
def world() -> World:
    return World()


def grant_of(op: Op = READ, epoch: int = 10, key: bytes = KEY, valid_until_ms: int = 1_005_000) -> Grant:
    grant = Grant("a:1", "n", op, epoch, valid_until_ms, b"n" * 16, 3, TABLE, b"")
    return replace(grant, mac=make_mac(key, op, epoch, valid_until_ms, grant.namespace, grant.part, TABLE))


def test_what_the_master_signed_holds_until_its_clock_says_so(world: World) -> None:
    world.now_ms += 5_000
    assert world.fails(grant_of()) is None
    assert world.fails(grant_of(WRITE)) is None
    world.now_ms += 1
    assert world.fails(grant_of()) is CapabilityExpired
    with pytest.raises(CapabilityExpired):
        world.keyring.check_term(grant_of())


@pytest.mark.parametrize(
    "change",
    [
        {"op": WRITE},
        {"valid_until_ms": 1_005_001},
        {"namespace": b"m" * 16},
        {"part": 4},
        {"table": TABLE[:-1] + b"\1"},
        {"table": TABLE * 2},
        {"mac": b"\0" * 16},
        {"mac": b""},
    ],
)
def test_nothing_of_it_can_be_changed(world: World, change: dict[str, object]) -> None:
    assert world.fails(replace(grant_of(), **change)) is BadCapability  # type: ignore[arg-type]
    assert world.fails(grant_of(key=NEXT_KEY)) is BadCapability


def test_the_address_and_the_node_are_not_signed(world: World) -> None:
    assert world.fails(replace(grant_of(), address="", node_id="")) is None


def test_of_other_epochs_nothing_holds(world: World) -> None:
    for epoch in (9, 11):
        assert world.fails(grant_of(epoch=epoch)) is StaleEpoch
    assert Keyring(Clock()).learn(1, KEY, 0, 0) is None
    with pytest.raises(StaleEpoch):
        Keyring(Clock()).check(grant_of())


def test_the_former_key_reads_for_a_while_and_never_writes(world: World) -> None:
    world.keyring.learn(11, NEXT_KEY, 77, 1_000)
    assert world.fails(grant_of()) is None
    assert world.fails(grant_of(WRITE)) is StaleEpoch
    assert world.fails(grant_of(key=NEXT_KEY)) is BadCapability
    assert world.fails(grant_of(epoch=11, key=NEXT_KEY, valid_until_ms=80)) is None
    world.now_ms += 1_001
    assert world.fails(grant_of()) is StaleEpoch


def test_the_former_capabilities_end_by_the_former_masters_clock_too(world: World) -> None:
    world.now_ms += 4_990
    world.keyring.learn(11, NEXT_KEY, 77, 1_000)
    world.now_ms += 11
    assert world.fails(grant_of()) is CapabilityExpired


def test_one_former_epoch_is_remembered(world: World) -> None:
    world.keyring.learn(11, NEXT_KEY, 77, 1_000)
    world.keyring.learn(12, b"3" * 32, 78, 1_000)
    assert world.fails(grant_of()) is StaleEpoch
    assert world.fails(grant_of(epoch=11, key=NEXT_KEY, valid_until_ms=100)) is None


def test_the_same_epoch_again_keeps_the_former_one_and_an_older_one_changes_nothing(world: World) -> None:
    world.keyring.learn(11, NEXT_KEY, 77, 1_000)
    world.keyring.learn(11, NEXT_KEY, 78, 9_000)
    assert world.fails(grant_of()) is None
    world.keyring.learn(10, KEY, 5, 9_000)
    assert world.fails(grant_of(WRITE)) is StaleEpoch


def test_the_masters_time_is_what_it_said_last(world: World) -> None:
    world.keyring.tell_time(9, 2_000_000)
    assert world.fails(grant_of()) is None
    world.keyring.tell_time(10, 1_005_001)
    assert world.fails(grant_of()) is CapabilityExpired
    world.now_ms += 10_000
    world.keyring.tell_time(10, 1_005_000)
    assert world.fails(grant_of()) is None
