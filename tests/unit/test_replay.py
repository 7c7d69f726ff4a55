"""Replay: the core's hit rates against an independent leaf-first LRU and the published table; bad input."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from kvpool_master.replay import main, parse_capacities
from kvpool_master.replay_trace import KEY_BYTES, Trace, TraceError, read_trace
from unit.leaf_lru import POINTS_MAX, TABLE, TRACES, hit_rate

CORE_CASES = [
    ("mooncake_conversation", "5%"),
    ("mooncake_synthetic", "1%"),
    ("mooncake_synthetic", "5%"),
    ("mooncake_synthetic", "20%"),
    ("lmcache_agents_128", "10%"),
    ("lmcache_agents_128", "20%"),
    ("lmcache_agents_128", "50%"),
]
"""What is quick enough for every run of the tests; the bench does the whole table."""


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return {name: read_trace(TRACES / f"{name}.jsonl.zst") for name in TABLE}


def requests_of(trace: Trace) -> list[tuple[int, list[int]]]:
    return [(request.at_ms, np.frombuffer(request.chain, ">u8").tolist()) for request in trace.requests]


def test_the_traces_are_those_of_their_readme(traces: dict[str, Trace]) -> None:
    figures = {name: (len(trace.requests), trace.accesses, trace.distinct) for name, trace in traces.items()}
    assert figures == {
        "mooncake_conversation": (12_031, 288_500, 182_790),
        "mooncake_synthetic": (3_993, 121_877, 43_924),
        "lmcache_agents_128": (1_315, 30_333, 3_078),
    }


@pytest.mark.parametrize("name", TABLE)
def test_independent_simulation_gives_the_table(name: str, traces: dict[str, Trace]) -> None:
    trace = traces[name]
    requests = requests_of(trace)
    for capacity in parse_capacities(",".join(TABLE[name]), trace.distinct):
        percent = 100 * hit_rate(requests, capacity.blocks)
        assert percent == pytest.approx(TABLE[name][capacity.text], abs=0.06), capacity


@pytest.mark.parametrize(("name", "capacity"), CORE_CASES)
def test_core_agrees_with_the_table(name: str, capacity: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(TRACES / f"{name}.jsonl.zst"), "--capacity", capacity, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert 100 * result["hit_rate"] == pytest.approx(TABLE[name][capacity], abs=POINTS_MAX)


def write_trace(path: Path, chains: list[list[int]]) -> Path:
    path.write_text("".join(json.dumps({"timestamp": i, "hash_ids": c}) + "\n" for i, c in enumerate(chains)))
    return path


def results_of(path: Path, capacity: str, capsys: pytest.CaptureFixture[str]) -> dict[str, int]:
    assert main([str(path), "--capacity", capacity, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    return result


def test_capacity_is_exact_to_the_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Two chains of three blocks in turn: six blocks hold both, five lose one tail block per turn.
    path = write_trace(tmp_path / "turns.jsonl", [[1, 2, 3], [11, 12, 13]] * 3)
    assert results_of(path, "6", capsys)["hit_blocks"] == 4 * 3
    five = results_of(path, "5", capsys)
    assert (five["hit_blocks"], five["capacity_blocks"]) == (4 * 2, 5)
    assert five["evicted_blocks"] == 5
    assert results_of(path, "100%", capsys)["capacity_blocks"] == 6


def test_single_block_and_the_head_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "head.jsonl", [[1, 2, 3], [1, 2, 3]])
    result = results_of(path, "1", capsys)
    assert (result["hit_blocks"], result["short_stores"], result["evicted_blocks"]) == (1, 2, 0)


def test_table_and_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "plain.jsonl", [[1, 2], [1, 2]])
    assert main([str(path), "--capacity", "50%,2"]) == 0
    shown = capsys.readouterr()
    assert "2 requests, 4 block accesses, 2 distinct blocks" in shown.out
    assert [line.split()[:3] for line in shown.out.splitlines()[2:]] == [["50%", "1", "25.00%"], ["2", "2", "50.00%"]]
    assert "capacity 50%: 100 % of 2 requests" in shown.err


def test_time_never_runs_backwards(tmp_path: Path) -> None:
    path = tmp_path / "back.jsonl"
    path.write_text('{"timestamp": 9, "hash_ids": [1]}\n\n{"timestamp": 4.5, "hash_ids": [1]}\n')
    trace = read_trace(path)
    assert [request.at_ms for request in trace.requests] == [9, 9]
    assert trace.requests[0].chain == (1).to_bytes(KEY_BYTES, "big")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: Expecting property name"),
        ("[1]", "line 2: list indices"),
        ('{"hash_ids": [1]}', "line 2: no timestamp"),
        ('{"timestamp": 1}', "line 2: no hash_ids"),
        ('{"timestamp": -1, "hash_ids": [1]}', "line 2: timestamp is below 0"),
        ('{"timestamp": 1, "hash_ids": 7}', "line 2: timestamp is below 0 or hash_ids is no list"),
        ('{"timestamp": 1, "hash_ids": [1, "a"]}', "line 2: hash_ids are not all whole numbers"),
        ('{"timestamp": 1, "hash_ids": [-1]}', "line 2: hash_ids are not all whole numbers"),
        ('{"timestamp": 1, "hash_ids": [1.5]}', "line 2: hash_ids are not all whole numbers"),
        ('{"timestamp": 1, "hash_ids": [18446744073709551616]}', "line 2: hash_ids are not all whole numbers"),
        ('{"timestamp": 1, "hash_ids": [[1], [2, 3]]}', "line 2: "),
    ],
)
def test_bad_line_is_named(line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 0, "hash_ids": [1]}\n' + line + "\n")
    assert main([str(path)]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith(f"kvpool-master replay: {path}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("capacity", ["0", "0%", "-1", "x", "%", "1/0%", "0.1%", "", "1%,"])
def test_bad_capacity_is_named(capacity: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "ok.jsonl", [[1]])
    assert main([str(path), f"--capacity={capacity}"]) == 1
    assert capsys.readouterr().err.startswith("kvpool-master replay: capacity ")


def test_capacity_that_no_segment_can_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "ok.jsonl", [[1]])
    assert main([str(path), "--capacity", str(1 << 40)]) == 1
    assert "size_bytes" in capsys.readouterr().err


def test_unreadable_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "noise.jsonl.zst").write_bytes(b"no zstd frame")
    (tmp_path / "noise.jsonl").write_bytes(b"\xff\xfe")
    (tmp_path / "empty.jsonl").write_text('{"timestamp": 0, "hash_ids": []}\n')
    for name, words in (
        ("gone.jsonl", "No such file"),
        ("noise.jsonl.zst", "zstd"),
        ("noise.jsonl", "not UTF-8"),
        ("empty.jsonl", "no request with a block"),
    ):
        assert main([str(tmp_path / name)]) == 1
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


def test_without_zstandard_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(TraceError, match=r"kvpool\[replay\]"):
        read_trace(TRACES / "lmcache_agents_128.jsonl.zst")


def test_progress_on_a_terminal_stays_on_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    path = write_trace(tmp_path / "many.jsonl", [[i] for i in range(200)])
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main([str(path), "--capacity", "1"]) == 0
    assert terminal.getvalue().count("\r") == 99
    assert terminal.getvalue().count("\n") == 1
