"""The demo: run whole with the real model (marker `demo`), and its verdict and "HBM" by themselves."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DEMO = Path(__file__).parents[2] / "deploy" / "demo"
MODULES = ("run", "report", "engine", "scenes", "model", "processes")
ROW = re.compile(r"^  (chat|few-shot): .{14,}?((?: +[\d,]+){4}) +([\d.]+) s +([\d.]+) s +([\d.]+) x$", re.MULTILINE)
NEEDED = ("torch", "transformers", "gguf", "accelerate")

torch = pytest.importorskip("torch")


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a module of the demo, which is a folder of scripts, and forgets it afterwards."""
    monkeypatch.syspath_prepend(str(DEMO))
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


@contextlib.contextmanager
def running_demo(*flags: str) -> Iterator[subprocess.Popen[str]]:
    for name in NEEDED:
        pytest.importorskip(name)
    mark = f"DEMO_TEST_MARK={uuid.uuid4()}"
    process = subprocess.Popen(
        [sys.executable, str(DEMO / "run.py"), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | dict([mark.split("=")]),
    )
    try:
        yield process
        assert process.poll() is not None
        assert processes_with(mark) == []
    finally:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


def processes_with(mark: str) -> list[str]:
    """Command lines of the processes that have `mark` in their environment."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_text(errors="replace"):
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
    return found


def files_of(pid: int, directory: Path = Path("/dev/shm")) -> list[str]:
    """What a demo's node client keeps in a directory."""
    return [path.name for path in directory.glob(f"*demo-{pid}*")]


@pytest.mark.demo
@pytest.mark.timeout(900)
def test_all_three_scenes_with_the_real_model() -> None:
    with running_demo("--quick") as process:
        output, errors = process.communicate(timeout=800)
    assert process.returncode == 0, output + errors
    assert "OK: all 16 answers are, token by token, those without the pool" in output
    rows = [[int(cell.replace(",", "")) for cell in found[1].split()] for found in ROW.findall(output)]
    assert len(rows) == 16, output
    for prompt, hbm, pool, computed in rows:
        assert prompt == hbm + pool + computed
        assert computed > 0
    first, second = rows[:8], rows[8:]
    assert [row[0] for row in first] == [row[0] for row in second], "the same prompts"
    assert first[0][1:3] == [0, 0], "nothing is there at the start"
    assert sum(row[2] for row in first) > 0, "HBM is too small on purpose: evicted blocks come back from the pool"
    assert second[0][1] == 0, "a fresh process holds nothing"
    assert sum(row[3] for row in second) < sum(row[3] for row in first) / 3
    assert sum(row[2] for row in second) > sum(row[0] for row in second) / 3
    assert re.search(r"segment 0 of node demo-\d+ \(up\): \d+ of 268 MB used", output)
    assert "leases open: 0; reservations open: 0" in output
    assert files_of(process.pid) == []


@pytest.mark.demo
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing_behind(number: int, code: int, tmp_path: Path) -> None:
    with running_demo("--quick", "--segment-dir", str(tmp_path)) as process:
        assert process.stdout is not None
        port = next(int(found[1]) for line in process.stdout if (found := re.search(r"Master on [\d.]+:(\d+)", line)))
        assert files_of(process.pid, tmp_path), "the segment is where it was asked to be"
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == code, output + errors
    assert "stopped; everything is cleaned up" in output
    assert files_of(process.pid, tmp_path) == []
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "the Master is gone"


def row(demo: Any, *, pool: int = 128, same_tokens: bool = True) -> Any:
    return demo("report").Row(
        scene="chat", name="harbour, turn 1", prompt=300, hbm=0, pool=pool, ttft_s=0.5, reference_ttft_s=5.0,
        pool_s=0.1, pool_bytes=5898240, same_tokens=same_tokens, text="Yes.",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({}, 0, "OK: all 2 answers"),
        ({"pool": 0}, 1, "no hit in the pool"),
        ({"same_tokens": False}, 1, "1 answers differ"),
    ],
)
def test_verdict(demo: Any, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], code: int, says: str) -> None:
    run, screen = demo("run"), demo("report").Screen()
    assert run._verdict(screen, [row(demo)], [row(demo, **fields)], 1.0) == code
    assert says in capsys.readouterr().out


def test_a_row_is_what_the_whole_demo_is_checked_for(demo: Any) -> None:
    line = row(demo).line()
    assert ROW.fullmatch(line), line
    assert "TOKENS DIFFER" in row(demo, same_tokens=False).line()
    assert len(line) <= demo("report").WIDTH


def hbm(demo: Any, blocks: int) -> Any:
    return demo("engine").Hbm(shape(demo), blocks)


def shape(demo: Any) -> Any:
    return demo("kvpool_client.connectors.transformers").BlockShape(1, 1, 4, 2, torch.float32)


def fill(store: Any, *names: str) -> list[int]:
    """A request for these blocks: what is held, then the rest taken and put."""
    keys = [name.encode() for name in names]
    rows = store.leading(keys)
    taken = store.take(len(keys) - len(rows))
    store.put(keys[len(rows) :], taken)
    return rows + taken


def test_hbm_evicts_the_least_recent_tail_first(demo: Any) -> None:
    store = hbm(demo, 4)
    fill(store, "a0", "a1", "a2")
    fill(store, "b0", "b1")
    assert len(store.leading([b"a0", b"a1", b"a2"])) == 2, "the tail went, the head stayed"
    assert store.evicted_blocks == 1
    fill(store, "c0", "c1")
    assert len(store.leading([b"b0", b"b1"])) == 0
    assert len(store.leading([b"a0", b"a1"])) == 2, "used since"


def test_hbm_never_gives_a_row_to_two_blocks(demo: Any) -> None:
    store = hbm(demo, 4)
    fill(store, "a0", "a1", "a2", "a3")
    fill(store, "b0", "b1")  # a3 and a2 are gone
    fill(store, "a0", "a1", "a2", "a3")  # b0 and b1 are gone
    fill(store, "b0")
    rows = fill(store, "a0", "a1", "a2", "a3")
    assert sorted(rows) == [0, 1, 2, 3]


def test_a_key_behind_a_gap_is_put_once(demo: Any) -> None:
    store = hbm(demo, 3)
    store.put([b"a1"], store.take(1))  # a0 is missing
    rows = fill(store, "a0", "a1")
    assert store.leading([b"a0", b"a1"]) == rows
    assert sorted(rows + store.take(1)) == [0, 1, 2], "the older copy's row is free again"


def test_a_signal_that_comes_while_a_child_is_made_waits(demo: Any) -> None:
    held, seen = demo("processes")._signals_held, []
    before = signal.signal(signal.SIGHUP, lambda *_: seen.append("after"))
    try:
        with held():
            signal.raise_signal(signal.SIGHUP)
            seen.append("made")
        assert seen == ["made", "after"]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_settings_of_the_user_do_not_reach_the_daemons(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_MASTER_LISTEN", "127.0.0.1:1")
    kept = demo("processes")._without_settings(os.environ)
    assert "PATH" in kept
    assert not [name for name in kept if name.startswith("KVPOOL_")]
