"""What outlives the Master: on the disk before a method returns, one owner, a plain word about all that is wrong."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kvpool_master.core.effects import Remember
from kvpool_master.core.memory import Memory
from kvpool_master.core.settings import Settings
from kvpool_master.state import EPOCH_MAX, FILE, Start, State, StateError
from kvpool_proto.namespace import NamespaceSpec

SPEC = NamespaceSpec(model="m\n", block_tokens=16, part_bytes=4096, dtype="float16", parts=2, entry="any")
OTHER = NamespaceSpec(model="other", block_tokens=16, part_bytes=4096, dtype="float16")
SETTINGS = Settings()
LONGEST_MS = SETTINGS.write_max_ms
WALL_S = 1_800_000_000.9
EPOCH = 1_800_000_000


@contextmanager
def opened(directory: Path) -> Iterator[State]:
    state = State.open(str(directory))
    try:
        yield state
    finally:
        state.close()


def begun(directory: Path, wall_s: float = WALL_S, settings: Settings = SETTINGS) -> Start:
    with opened(directory) as state:
        return state.begin(wall_s, settings)


def test_the_first_life_knows_nothing(tmp_path: Path) -> None:
    assert begun(tmp_path / "new" / "deep") == Start(EPOCH, Memory(), 0)


@pytest.mark.parametrize("wall_s", [WALL_S, WALL_S - 86_400, -5.0, 0.0])
def test_the_epoch_rises_with_each_life_though_the_clock_stands_or_is_set_back(tmp_path: Path, wall_s: float) -> None:
    begun(tmp_path)
    assert [begun(tmp_path, wall_s).epoch for _ in range(2)] == [EPOCH + 1, EPOCH + 2]
    assert begun(tmp_path, WALL_S + 50).epoch == EPOCH + 50


def test_an_epoch_that_does_not_fit_into_stamps_is_refused(tmp_path: Path) -> None:
    assert begun(tmp_path, float(EPOCH_MAX)).epoch == EPOCH_MAX
    with pytest.raises(StateError, match=str(EPOCH_MAX + 1)):
        begun(tmp_path)


def test_what_is_remembered_is_there_in_the_next_life(tmp_path: Path) -> None:
    with opened(tmp_path) as state:
        state.begin(WALL_S, SETTINGS)
        state.remember((Remember(namespace=SPEC), Remember(tombstone=(SPEC.id, 5)), Remember(node="b")))
        state.remember((Remember(tombstone=(SPEC.id, (1 << 64) - 1)), Remember(namespace=OTHER)))
        state.remember((Remember(tombstone=(SPEC.id, 1 << 63)), Remember(tombstone=(OTHER.id, 3))))
        state.remember((Remember(node="a"), Remember(node="c"), Remember(node_gone="b"), Remember(node="c")))
        state.remember((Remember(draining=("a", True)), Remember(draining=("gone", True)), Remember(quota=("t", 5))))
        state.remember((Remember(node_gone="gone"), Remember(draining=("c", True)), Remember(quota=("u", 1 << 61))))
        state.remember((Remember(draining=("c", False)), Remember(quota=("t", 6)), Remember(draining=("a", True))))
        state.remember((Remember(quota=("v", 7)), Remember(quota=("v", 0))))
        state.set_bypass(5)
    tombstones = ((SPEC.id, (1 << 64) - 1), (OTHER.id, 3))
    quotas = (("t", 6), ("u", 1 << 61))
    memory = Memory((SPEC, OTHER), tombstones, ("a", "c"), LONGEST_MS, ("a", "gone"), quotas)
    assert begun(tmp_path) == Start(EPOCH + 1, memory, 5)


SCHEMA_1 = f"""
CREATE TABLE master (one INTEGER PRIMARY KEY CHECK (one = 1), epoch INTEGER NOT NULL, grace_ms INTEGER NOT NULL,
    bypass INTEGER NOT NULL);
CREATE TABLE namespaces (id BLOB PRIMARY KEY, spec TEXT NOT NULL);
CREATE TABLE tombstones (namespace BLOB PRIMARY KEY, stamp BLOB NOT NULL);
CREATE TABLE nodes (name TEXT PRIMARY KEY);
PRAGMA application_id = {0x6B76706D};
PRAGMA user_version = 1;
INSERT INTO master VALUES (1, {EPOCH}, 77, 3);
INSERT INTO nodes VALUES ('a');
"""
"""A file as it was made before nodes drained and tenants had quotas."""


def test_a_file_of_the_former_schema_is_brought_to_ours_once(tmp_path: Path) -> None:
    spec = asdict(SPEC)
    del spec["replicas"]
    with sqlite3.connect(tmp_path / FILE) as db:
        db.executescript(SCHEMA_1)
        db.execute("INSERT INTO namespaces VALUES (?, ?)", (SPEC.id, json.dumps(spec)))
        db.execute("INSERT INTO tombstones VALUES (?, ?)", (SPEC.id, (9).to_bytes(8, "big")))
    db.close()
    memory = Memory((SPEC,), ((SPEC.id, 9),), ("a",), 77)
    with opened(tmp_path) as state:
        assert state.begin(WALL_S, SETTINGS) == Start(EPOCH + 1, memory, 3)
        state.remember((Remember(draining=("a", True)), Remember(quota=("t", 5))))
    assert begun(tmp_path).memory == replace(memory, grace_ms=LONGEST_MS, draining=("a",), quotas=(("t", 5),))


def test_a_node_that_comes_again_is_not_written_again_unless_it_was_gone(tmp_path: Path) -> None:
    statements: list[str] = []
    with opened(tmp_path) as state:
        state.begin(WALL_S, SETTINGS)
        state.remember((Remember(node="a"),))
    with opened(tmp_path) as state:
        state._connection.set_trace_callback(statements.append)
        state.remember((Remember(node="a"),))
        assert statements == []
        state.remember((Remember(node_gone="a"), Remember(node="a")))
        state.remember((Remember(node_gone="a"),))
        state.remember((Remember(node="a"),))
        assert statements.count("COMMIT") == 3
    assert begun(tmp_path).memory.nodes == ("a",)


def test_the_grace_is_the_longest_of_the_lives_that_ended_hard(tmp_path: Path) -> None:
    patient = Settings(lease_max_ms=900_000, lease_life_max_ms=900_000)
    assert begun(tmp_path, settings=patient).memory.grace_ms is None
    assert begun(tmp_path).memory.grace_ms == 900_000
    # The life between was too short for the first one's leases to end.
    assert begun(tmp_path).memory.grace_ms == 900_000


def test_a_clean_stop_says_what_is_left(tmp_path: Path) -> None:
    with opened(tmp_path) as state:
        state.begin(WALL_S, SETTINGS)
        state.end(0)
    assert begun(tmp_path).memory.grace_ms == 0
    assert begun(tmp_path).memory.grace_ms == LONGEST_MS


def test_an_epoch_can_be_raised_and_stays_so(tmp_path: Path) -> None:
    with opened(tmp_path) as state:
        state.begin(WALL_S, SETTINGS)
        state.remember((Remember(node="a"),))
        assert state.raise_epoch(EPOCH + 9) == Start(EPOCH + 10, Memory(nodes=("a",), grace_ms=LONGEST_MS), 0)
        assert state.raise_epoch(3).epoch == EPOCH + 11
        with pytest.raises(StateError, match=str(EPOCH_MAX + 1)):
            state.raise_epoch(EPOCH_MAX)
    assert begun(tmp_path).epoch == EPOCH + 12


def test_a_second_master_is_refused_until_the_first_has_gone(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(StateError, match=f"^state_dir = {tmp_path}: another Master uses {FILE}$"):
        State.open(str(tmp_path))
    begun(tmp_path)


CHILD = """
import os, signal, sys
from kvpool_master.core.effects import Remember
from kvpool_master.core.settings import Settings
from kvpool_master.state import State
state = State.open(sys.argv[1])
start = state.begin(float(sys.argv[2]), Settings())
state.remember((Remember(tombstone=(b"n" * 16, start.epoch << 32)),))
print(start.epoch, flush=True)
signal.pause()
"""


def test_what_a_killed_master_wrote_is_there_and_a_stopped_one_keeps_its_directory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(WALL_S)]
    for life in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert int(child.stdout.readline()) == EPOCH + life
            child.send_signal(signal.SIGSTOP)
            with pytest.raises(StateError, match="another Master"):
                State.open(str(tmp_path))
            child.kill()
    start = begun(tmp_path)
    assert (start.epoch, start.memory.tombstones) == (EPOCH + 2, ((b"n" * 16, (EPOCH + 1) << 32),))


def test_a_write_that_fails_changes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as state:
        state.begin(WALL_S, SETTINGS)
        pages = state._connection.execute("PRAGMA page_count").fetchone()[0]
        state._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StateError, match="full"):
            state.remember([Remember(node=f"{number}" * 100) for number in range(1_000)])
        state.set_bypass(1)
    start = begun(tmp_path)
    assert (start.memory.nodes, start.bypass) == ((), 1)


@pytest.mark.parametrize("damage", ["not a database", "of another program", "a newer schema", "a spec", "pages"])
def test_a_file_that_is_not_ours_or_not_sound_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    with opened(tmp_path) as state:
        state.begin(WALL_S, SETTINGS)
        state.remember([Remember(namespace=SPEC), *(Remember(node=f"{number:0200}") for number in range(200))])
    file = tmp_path / FILE
    if damage == "not a database":
        file.write_bytes(os.urandom(10_000))
    elif damage == "pages":
        whole = file.read_bytes()
        file.write_bytes(whole[:4096] + bytes(len(whole) - 4096))
    else:
        statement = {
            "of another program": "PRAGMA application_id = 5",
            "a newer schema": "PRAGMA user_version = 99",
            "a spec": "UPDATE namespaces SET spec = '{\"model\": 3'",
        }[damage]
        db = sqlite3.connect(file, isolation_level=None)
        db.execute(statement)
        db.close()
    with pytest.raises(StateError, match=f"^state_dir = {tmp_path}: {FILE}.*") as caught:
        State.open(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["file", "kernel", "sealed"])
def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path, place: str) -> None:
    directories = {"file": tmp_path / "file", "kernel": Path("/proc/kvpool"), "sealed": tmp_path / "sealed"}
    (tmp_path / "file").write_text("")
    (tmp_path / "sealed").mkdir(mode=0o500)
    if place == "sealed" and os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    with pytest.raises(StateError, match=f"^state_dir = {directories[place]}: ") as caught:
        State.open(str(directories[place]))
    assert "\n" not in str(caught.value)
