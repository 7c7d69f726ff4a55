"""The session state machine: each story is a list of events and the instructions that must come back."""

from __future__ import annotations

import random

import pytest

from kvpool_client.session import Session, State
from kvpool_client.session_messages import (
    Announce,
    AnswerWorkers,
    Bind,
    Bury,
    Clearing,
    ClearSlots,
    CloseSession,
    Copy,
    CopySlots,
    Due,
    Event,
    Failed,
    Forgotten,
    Heard,
    HeartbeatOk,
    InventoryDone,
    InventoryFailed,
    LearnKey,
    Left,
    ObeyEpoch,
    OpenSession,
    Order,
    Probe,
    Refused,
    Register,
    Registered,
    ReportInventory,
    Retire,
    SetBypass,
    Stop,
    TellTime,
)

SILENCE_MS = 5_000
TAKEN_IN = Registered(epoch=10, handles=(3, 4), silence_ms=SILENCE_MS)
ORDERS = (Order(3, 0, 4096),)
CLEARINGS = (Clearing(7, 3, 4096, ((0, 2, 99),)),)
DEAD = ((b"n" * 16, 55),)
COPIES = (
    Copy(
        number=8, epoch=10, namespace=b"n" * 16, part_bytes=4096, parts=range(2), blocks=3, source=("n2", "b:1"),
        from_segment=9, from_slot=0, from_stride=2, from_stamp=5, macs=(b"m" * 16,) * 2, valid_until_ms=9,
        segment=3, slot=0, stamp=6,
    ),
)  # fmt: skip


def session(epoch: int = 0) -> Session:
    return Session(incarnation=100, backoff_max_ms=5_000, epoch=epoch)


def serving() -> Session:
    machine = session()
    machine.apply(Due(), 0)
    machine.apply(TAKEN_IN, 0)
    return machine


def test_joining_then_serving() -> None:
    machine = session()
    assert machine.wake_ms() == 0
    assert machine.apply(Due(), 0) == (Register(100),)
    assert machine.apply(TAKEN_IN, 5) == (ObeyEpoch(10), SetBypass(0), Announce((3, 4)), OpenSession())
    assert (machine.state, machine.wake_ms()) == (State.SERVING, 5 + SILENCE_MS)


def test_what_is_dead_and_the_switch_come_before_workers_do() -> None:
    machine = session(epoch=10)
    machine.apply(Due(), 0)
    taken_in = Registered(10, (3, 4), SILENCE_MS, tombstones=DEAD, bypass=5)
    assert machine.apply(taken_in, 5) == (Bury(DEAD), SetBypass(5), Announce((3, 4)), OpenSession())


def test_orders_are_carried_out_what_is_dead_first_and_the_inventory_last() -> None:
    assert serving().apply(Heard(10, ORDERS), 1) == (Bind(ORDERS),)
    everything = Heard(
        10, ORDERS, inventory=3, ask_workers=(8, 9), clearings=CLEARINGS, tombstones=DEAD, bypass=0, copies=COPIES,
        master_ms=77,
    )  # fmt: skip
    assert serving().apply(everything, 1) == (
        TellTime(10, 77),
        Bury(DEAD),
        SetBypass(0),
        ClearSlots(CLEARINGS),
        Bind(ORDERS),
        CopySlots(COPIES),
        AnswerWorkers((8, 9)),
        ReportInventory(3),
    )


def test_the_key_is_known_before_the_handles_and_never_shown() -> None:
    machine = session()
    machine.apply(Due(), 0)
    taken_in = Registered(10, (3, 4), SILENCE_MS, key=b"secret" * 5 + b"!!", master_ms=70, former_key_ms=9)
    assert machine.apply(taken_in, 5) == (
        ObeyEpoch(10),
        SetBypass(0),
        LearnKey(10, taken_in.key, 70, 9),
        Announce((3, 4)),
        OpenSession(),
    )
    machine.handles = ()
    with pytest.raises(AssertionError) as shown:
        machine.check()
    assert "Registered" in str(shown.value)
    assert "secret" not in f"{shown.value} {LearnKey(10, taken_in.key, 70, 9)}"


def test_a_connection_that_breaks_changes_nothing() -> None:
    machine = serving()
    assert machine.apply(Failed("broken", 0.0), 1_000) == (CloseSession(),)
    assert (machine.state, machine.wake_ms()) == (State.JOINING, 1_050)
    assert machine.apply(Due(), 1_050) == (Register(100),)
    assert machine.apply(TAKEN_IN, 1_060) == (SetBypass(0), Announce((3, 4)), OpenSession())


def test_pauses_grow_to_the_limit_and_jitter_halves_them_at_most() -> None:
    machine = session()
    pauses: list[int] = []
    for attempt in range(8):
        machine.apply(Due(), 0)
        machine.apply(Failed("away", 1.0 if attempt < 7 else 0.0), 0)
        pauses.append(machine.wake_ms() or 0)
    assert pauses == [100, 200, 400, 800, 1_600, 3_200, 5_000, 2_500]


def test_only_a_session_that_lasted_makes_pauses_short_again() -> None:
    machine = session()
    for attempt in range(4):
        machine.apply(Due(), 0)
        machine.apply(TAKEN_IN, 0)
        machine.apply(Failed("broken", 1.0), SILENCE_MS - 1)
        assert machine.wake_ms() == SILENCE_MS - 1 + (100 << attempt)
    machine.apply(Due(), 0)
    machine.apply(TAKEN_IN, 0)
    machine.apply(Failed("broken", 1.0), SILENCE_MS)
    assert machine.wake_ms() == SILENCE_MS + 100


def test_a_silent_master_is_asked_once_per_silence() -> None:
    machine = serving()
    assert machine.apply(Due(), SILENCE_MS) == (Probe(),)
    assert machine.wake_ms() is None
    assert machine.apply(HeartbeatOk(), SILENCE_MS + 10) == ()
    assert machine.wake_ms() == 2 * SILENCE_MS + 10
    assert machine.apply(Heard(10), 3_000) == ()
    assert machine.wake_ms() == 3_000 + SILENCE_MS
    assert machine.apply(Failed("silent", 0.0), 0) == (CloseSession(),)
    assert machine.state is State.JOINING


@pytest.mark.parametrize("event", [Heard(10, retired=True), Forgotten()])
def test_sent_away_means_register_again_at_once_with_the_same_incarnation(event: Event) -> None:
    machine = serving()
    assert machine.apply(event, 1) == (CloseSession(), Register(100))
    assert (machine.state, machine.wake_ms()) == (State.JOINING, None)
    assert machine.apply(Heard(10, ORDERS), 2) == ()
    assert machine.apply(Registered(10, (5, 6), SILENCE_MS), 4) == (SetBypass(0), Announce((5, 6)), OpenSession())
    assert machine.handles == (5, 6)


def test_a_master_that_sends_us_away_again_and_again_is_not_hammered() -> None:
    machine = serving()
    machine.apply(Forgotten(), 1)
    machine.apply(TAKEN_IN, 2)
    assert machine.apply(Heard(10, retired=True), 3) == (CloseSession(),)
    assert machine.wake_ms() == 3 + 200
    machine.apply(Due(), 203)
    machine.apply(TAKEN_IN, 204)
    assert machine.apply(Forgotten(), 205) == (CloseSession(),)
    assert machine.wake_ms() == 205 + 400


def test_another_life_of_the_master_is_obeyed_and_nothing_is_cleared() -> None:
    machine = serving()
    machine.apply(Failed("broken", 0.0), 0)
    machine.apply(Due(), 100)
    assert machine.apply(Registered(11, (3, 4), SILENCE_MS), 100) == (
        ObeyEpoch(11),
        SetBypass(0),
        Announce((3, 4)),
        OpenSession(),
    )


def test_a_higher_epoch_on_the_session_is_obeyed_but_its_orders_wait_for_a_registration() -> None:
    machine = serving()
    assert machine.apply(Heard(11, ORDERS, inventory=1), 1) == (ObeyEpoch(11), CloseSession(), Register(100))
    assert machine.inventory == 0


def test_a_lower_epoch_is_not_obeyed() -> None:
    machine = serving()
    former = Heard(
        9, ORDERS, retired=True, inventory=4, ask_workers=(1,), clearings=CLEARINGS, tombstones=DEAD, bypass=7,
        copies=COPIES, master_ms=77,
    )  # fmt: skip
    assert machine.apply(former, 1) == ()
    assert machine.state is State.SERVING
    machine.apply(Failed("broken", 0.0), 0)
    machine.apply(Due(), 100)
    assert machine.apply(Registered(9, (3, 4), SILENCE_MS, DEAD, 7, b"k" * 32, 77), 100) == ()
    assert (machine.state, machine.epoch) == (State.JOINING, 10)
    assert machine.wake_ms() is not None


def test_what_a_former_life_obeyed_is_obeyed_still() -> None:
    machine = session(epoch=10)
    machine.apply(Due(), 0)
    assert machine.apply(Registered(9, (3, 4), SILENCE_MS), 1) == ()
    assert machine.wake_ms() == 1 + 100
    machine.apply(Due(), 101)
    assert ObeyEpoch(11) in machine.apply(Registered(11, (3, 4), SILENCE_MS), 102)


# -- inventories ---------------------------------------------------------------------------------------


def test_the_newest_inventory_counts() -> None:
    machine = serving()
    assert machine.apply(Heard(10, inventory=4), 1) == (ReportInventory(4),)
    assert machine.apply(Heard(10, inventory=4), 2) == ()
    assert machine.apply(Heard(10, inventory=3), 3) == ()
    assert machine.apply(Heard(10, inventory=5), 4) == (ReportInventory(5),)
    assert machine.apply(InventoryFailed(4, "superseded", 0.5), 5) == ()
    assert machine.apply(InventoryDone(4), 6) == ()
    assert machine.inventory == 5
    assert machine.apply(InventoryDone(5), 7) == ()
    assert (machine.state, machine.inventory) == (State.SERVING, 0)
    assert machine.apply(Heard(10, inventory=5), 8) == (ReportInventory(5),)


def test_an_inventory_that_fails_ends_the_session() -> None:
    machine = serving()
    machine.apply(Heard(10, inventory=4), 1)
    assert machine.apply(InventoryFailed(4, "broken", 0.0), 10) == (CloseSession(),)
    assert (machine.state, machine.wake_ms(), machine.inventory) == (State.JOINING, 60, 0)
    assert "inventory 4" in machine.why
    machine.apply(Due(), 60)
    assert OpenSession() in machine.apply(TAKEN_IN, 61)
    assert machine.apply(Heard(10, inventory=4), 62) == (ReportInventory(4),)


@pytest.mark.parametrize("event", [Failed("broken", 0.0), Forgotten(), Stop(False), Refused("newer")])
def test_an_inventory_ends_with_its_session(event: Event) -> None:
    machine = serving()
    machine.apply(Heard(10, inventory=4), 1)
    assert CloseSession() in machine.apply(event, 2)
    assert machine.inventory == 0
    assert machine.apply(InventoryFailed(4, "cancelled", 0.0), 3) == ()


# -- the end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [session(), serving()])
def test_superseded_ends_it(machine: Session) -> None:
    assert machine.apply(Refused("newer"), 0) == (CloseSession(),)
    assert (machine.state, machine.why, machine.wake_ms()) == (State.STOPPED, "newer", None)
    assert machine.apply(Stop(True), 0) == ()


@pytest.mark.parametrize("machine", [session(), serving()])
def test_stopping_ends_the_session_and_no_more(machine: Session) -> None:
    assert machine.apply(Stop(False), 0) == (CloseSession(),)
    assert (machine.state, machine.wake_ms()) == (State.STOPPED, None)
    assert machine.apply(TAKEN_IN, 0) == ()


@pytest.mark.parametrize("machine", [session(), serving()])
def test_discarding_retires_first(machine: Session) -> None:
    assert machine.apply(Stop(True), 0) == (CloseSession(), Retire(100))
    assert machine.state is State.DRAINING
    assert machine.apply(Heard(10, ORDERS), 0) == ()
    assert machine.apply(Left(), 0) == ()
    assert machine.state is State.STOPPED


@pytest.mark.parametrize("seed", range(200))
def test_any_order_of_events_keeps_the_rules(seed: int) -> None:
    """Epochs never fall, only the highest is followed, and there is always something that is waited for."""
    dice = random.Random(seed)
    machine = session()
    epoch = 0
    registering = reporting = False
    for now_ms in range(80):
        heard = Heard(dice.randint(1, 3), ORDERS, dice.random() < 0.2, dice.randint(0, 3), bypass=1, copies=COPIES)
        event = dice.choice(
            [
                Due(),
                Registered(dice.randint(1, 3), (dice.randint(1, 2),), SILENCE_MS),
                heard,
                heard,
                HeartbeatOk(),
                Failed("any", dice.random()),
                Forgotten(),
                InventoryDone(dice.randint(1, 3)),
                InventoryFailed(dice.randint(1, 3), "any", dice.random()),
                Left(),
            ]
        )
        before = machine.state
        instructions = machine.apply(event, now_ms)
        machine.check()
        assert machine.epoch >= epoch
        assert (machine.epoch > epoch) == (ObeyEpoch(machine.epoch) in instructions)
        epoch = machine.epoch
        kinds = [type(instruction) for instruction in instructions]
        if {Bind, CopySlots, ReportInventory} & {*kinds}:
            assert isinstance(event, Heard)
            assert event.epoch == epoch
            assert before is machine.state is State.SERVING
        if before is State.SERVING and machine.state is State.JOINING:
            assert CloseSession in kinds
            reporting = False
        reporting = (reporting or ReportInventory in kinds) and machine.inventory != 0
        assert reporting == (machine.inventory != 0)
        registering = Register in kinds or (registering and machine.state is State.JOINING and not kinds)
        if machine.state is State.JOINING:
            assert registering or machine.wake_ms() is not None
        assert machine.state in (State.JOINING, State.SERVING)
