"""The session state machine: each story is a list of events and the instructions that must come back."""

from __future__ import annotations

import random

import pytest

from kvpool_client.session import (
    Announce,
    Bind,
    Clear,
    Cleared,
    CloseSession,
    Due,
    Event,
    Failed,
    Forgotten,
    Heard,
    HeartbeatOk,
    Left,
    ObeyEpoch,
    OpenSession,
    Order,
    Probe,
    Refused,
    Register,
    Registered,
    Retire,
    Session,
    State,
    Stop,
)

SILENCE_MS = 5_000
TAKEN_IN = Registered(epoch=10, handles=(3, 4), silence_ms=SILENCE_MS)
ORDERS = (Order(3, 0, 4096),)


def session() -> Session:
    return Session(incarnation=100, backoff_max_ms=5_000)


def serving() -> Session:
    machine = session()
    machine.apply(Due(), 0)
    machine.apply(TAKEN_IN, 0)
    return machine


def test_joining_then_serving() -> None:
    machine = session()
    assert machine.wake_ms() == 0
    assert machine.apply(Due(), 0) == (Register(100),)
    assert machine.apply(TAKEN_IN, 5) == (ObeyEpoch(10), Announce((3, 4)), OpenSession())
    assert (machine.state, machine.wake_ms()) == (State.SERVING, 5 + SILENCE_MS)


def test_orders_are_carried_out() -> None:
    assert serving().apply(Heard(10, ORDERS), 1) == (Bind(ORDERS),)


def test_a_connection_that_breaks_keeps_the_contents() -> None:
    machine = serving()
    assert machine.apply(Failed("broken", 0.0), 1_000) == (CloseSession(),)
    assert (machine.state, machine.wake_ms()) == (State.JOINING, 1_050)
    assert machine.apply(Due(), 1_050) == (Register(100),)
    assert machine.apply(TAKEN_IN, 1_060) == (Announce((3, 4)), OpenSession())


def test_pauses_grow_to_the_limit_and_jitter_halves_them_at_most() -> None:
    machine = session()
    pauses: list[int] = []
    for attempt in range(8):
        machine.apply(Due(), 0)
        machine.apply(Failed("away", 1.0 if attempt < 7 else 0.0), 0)
        pauses.append(machine.wake_ms() or 0)
    assert pauses == [100, 200, 400, 800, 1_600, 3_200, 5_000, 2_500]
    machine.apply(Due(), 0)
    machine.apply(TAKEN_IN, 0)
    machine.apply(Failed("away", 1.0), 0)
    assert machine.wake_ms() == 100


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
def test_forgotten_means_clear_and_start_again(event: Event) -> None:
    machine = serving()
    assert machine.apply(event, 1) == (CloseSession(), Clear())
    assert machine.state is State.FENCED
    assert machine.apply(Heard(10, ORDERS), 2) == ()
    assert machine.apply(Cleared(101), 3) == (Retire(100), Register(101))
    assert machine.apply(Left(), 3) == ()
    assert machine.apply(Registered(10, (5, 6), SILENCE_MS), 4) == (Announce((5, 6)), OpenSession())


def test_other_handles_mean_forgotten() -> None:
    machine = serving()
    machine.apply(Failed("broken", 0.0), 0)
    machine.apply(Due(), 100)
    assert machine.apply(Registered(10, (5, 6), SILENCE_MS), 100) == (Clear(),)
    assert machine.state is State.FENCED


def test_another_life_of_the_master_means_forgotten_even_with_the_same_handles() -> None:
    machine = serving()
    machine.apply(Failed("broken", 0.0), 0)
    machine.apply(Due(), 100)
    assert machine.apply(Registered(11, (3, 4), SILENCE_MS), 100) == (ObeyEpoch(11), Clear())
    assert machine.apply(Cleared(101), 101) == (Retire(100), Register(101))


def test_a_higher_epoch_on_the_session_fences_before_its_orders() -> None:
    assert serving().apply(Heard(11, ORDERS), 1) == (ObeyEpoch(11), CloseSession(), Clear())


def test_a_lower_epoch_is_not_obeyed() -> None:
    machine = serving()
    assert machine.apply(Heard(9, ORDERS, retired=True), 1) == ()
    assert machine.state is State.SERVING
    machine.apply(Failed("broken", 0.0), 0)
    machine.apply(Due(), 100)
    assert machine.apply(Registered(9, (3, 4), SILENCE_MS), 100) == ()
    assert (machine.state, machine.epoch) == (State.JOINING, 10)
    assert machine.wake_ms() is not None


@pytest.mark.parametrize("machine", [session(), serving()])
def test_superseded_ends_it(machine: Session) -> None:
    assert machine.apply(Refused("newer"), 0) == (CloseSession(),)
    assert (machine.state, machine.why, machine.wake_ms()) == (State.STOPPED, "newer", None)
    assert machine.apply(Stop(), 0) == ()


@pytest.mark.parametrize("machine", [session(), serving()])
def test_stopping_retires_first(machine: Session) -> None:
    assert machine.apply(Stop(), 0) == (CloseSession(), Retire(100))
    assert machine.state is State.DRAINING
    assert machine.apply(Heard(10, ORDERS), 0) == ()
    assert machine.apply(Left(), 0) == ()
    assert machine.state is State.STOPPED


def test_stopping_while_fenced() -> None:
    machine = serving()
    machine.apply(Forgotten(), 0)
    assert machine.apply(Stop(), 0) == (CloseSession(), Retire(100))
    assert machine.apply(Cleared(101), 0) == ()
    machine.apply(Left(), 0)
    assert machine.state is State.STOPPED


@pytest.mark.parametrize("seed", range(200))
def test_any_order_of_events_keeps_the_rules(seed: int) -> None:
    """Epochs never fall, orders are carried out only while serving, a failure is always followed by another try."""
    dice = random.Random(seed)
    machine = session()
    incarnation, epoch = 100, 0
    for now_ms in range(60):
        incarnation += 1
        event = dice.choice(
            [
                Due(),
                Registered(dice.randint(1, 3), (dice.randint(1, 2),), SILENCE_MS),
                Heard(dice.randint(1, 3), ORDERS, retired=dice.random() < 0.2),
                HeartbeatOk(),
                Failed("any", dice.random()),
                Forgotten(),
                Left(),
                Cleared(incarnation),
            ]
        )
        before = machine.state
        instructions = machine.apply(event, now_ms)
        machine.check()
        assert machine.epoch >= epoch
        epoch = machine.epoch
        if any(isinstance(instruction, Bind) for instruction in instructions):
            assert before is State.SERVING
            assert machine.state is State.SERVING
        assert machine.state not in (State.DRAINING, State.STOPPED)
        if isinstance(event, Failed) and machine.state is State.JOINING:
            assert machine.wake_ms() is not None
