"""What the Master can be told: precedence, kinds of values, and a plain word about everything that is wrong."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from kvpool_master.config import ConfigError, MasterConfig, load, to_toml
from kvpool_master.core.settings import Settings

SAMPLE = Path(__file__).parents[2] / "deploy" / "config" / "master.toml"


def written(folder: Path, text: str) -> str:
    path = folder / "master.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_without_a_word_the_defaults_hold() -> None:
    assert load([], {}).config == MasterConfig()


def test_flags_go_before_environment_before_file_before_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, 'listen = "127.0.0.1:1"\nhttp = "127.0.0.1:2"\ndrain_ms = 3\n[core]\nnodes_max = 4\n')
    environ = {"KVPOOL_MASTER_LISTEN": "127.0.0.1:5", "KVPOOL_MASTER_HTTP": "127.0.0.1:6"}
    config = load(["--config", path, "--listen", "127.0.0.1:7"], environ).config
    assert (config.listen, config.http, config.drain_ms, config.core.nodes_max) == ("127.0.0.1:7", "127.0.0.1:6", 3, 4)
    assert config.tick_ms == MasterConfig().tick_ms


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    path = written(tmp_path, "drain_ms = 3")
    assert load([], {"KVPOOL_MASTER_CONFIG": path}).config.drain_ms == 3


@pytest.mark.parametrize(
    ("flag", "text", "read", "expected"),
    [
        ("--message-bytes-max", "64MiB", lambda c: c.message_bytes_max, 64 << 20),
        ("--message-bytes-max", "1.5 MB", lambda c: c.message_bytes_max, 1_500_000),
        ("--message-bytes-max", "100000", lambda c: c.message_bytes_max, 100_000),
        ("--drain-ms", "30s", lambda c: c.drain_ms, 30_000),
        ("--drain-ms", "2m", lambda c: c.drain_ms, 120_000),
        ("--drain-ms", "250", lambda c: c.drain_ms, 250),
        ("--core-lease-min-ms", "1.5s", lambda c: c.core.lease_min_ms, 1_500),
        ("--core-nodes-max", "12", lambda c: c.core.nodes_max, 12),
    ],
)
def test_sizes_and_times_may_carry_a_unit(flag: str, text: str, read: object, expected: int) -> None:
    assert callable(read)
    assert read(load([flag, text], {}).config) == expected


def test_switches_have_both_words() -> None:
    assert load(["--debug"], {}).config.debug
    assert not load(["--no-debug"], {"KVPOOL_MASTER_DEBUG": "yes"}).config.debug
    assert load([], {"KVPOOL_MASTER_LOG_JSON": "On"}).config.log_json
    assert not load([], {"KVPOOL_MASTER_CORE_EVICT_AHEAD": "false"}).config.core.evict_ahead


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["--lisen", "x"], {}, ["--lisen", "'--listen'"]),
        (["--core-lease-mx-ms=3"], {}, ["'--core-lease-max-ms'"]),
        ([], {"KVPOOL_MASTER_DRAIN": "3"}, ["KVPOOL_MASTER_DRAIN", "'KVPOOL_MASTER_DRAIN_MS'"]),
        (["--drain-ms", "soon"], {}, ["--drain-ms", "'soon'", "30s"]),
        (["--drain-ms", "0.5"], {}, ["drain_ms"]),
        (["--core-nodes-max", "5GiB"], {}, ["whole number"]),
        (["--message-bytes-max", "5s"], {}, ["64MiB"]),
        ([], {"KVPOOL_MASTER_DEBUG": "perhaps"}, ["KVPOOL_MASTER_DEBUG", "true or false"]),
        (["--listen", "somewhere"], {}, ["listen", "host:port"]),
        (["--http", "127.0.0.1:70000"], {}, ["http", "65535"]),
        (["--tick-ms", "0"], {}, ["tick_ms = 0"]),
        (["--tick-ms", "2s"], {}, ["tick_ms = 2000", "core.stall_ms = 2000"]),
        (["--state-dir", ""], {}, ["state_dir is empty"]),
        (["--message-bytes-max", "3GiB"], {}, ["message_bytes_max", "2147483647"]),
        (["--log-level", "loud"], {}, ["log_level", "debug"]),
        (["--core-lease-min-ms", "10m"], {}, ["core.", "lease_min_ms", "lease_max_ms"]),
        (["--config", "/nowhere/at/all.toml"], {}, ["/nowhere/at/all.toml", "No such file"]),
        (["--drain-ms"], {}, ["--drain-ms"]),
    ],
)
def test_what_is_wrong_is_named(argv: list[str], environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(argv, environ)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('lisen = "x"', ["unknown key 'lisen'", "'listen'"]),
        ("[core]\nnode_max = 3", ["unknown key 'core.node_max'", "'core.nodes_max'"]),
        ("[cor]\nnodes_max = 3", ["unknown key 'cor'"]),
        ('drain_ms = "soon"', ["drain_ms = 'soon'"]),
        ("drain_ms = true", ["drain_ms = True"]),
        ("drain_ms = 1.5", ["drain_ms = 1.5"]),
        ("debug = 1", ["debug = 1", "true or false"]),
        ("listen = 5", ["listen = 5", "a text"]),
        ("listen =", ["master.toml"]),
    ],
)
def test_what_is_wrong_in_the_file_is_named(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(["--config", written(tmp_path, text)], {})
    for word in words:
        assert word in str(caught.value)


def test_what_kubernetes_tells_every_pod_is_not_meant_for_us() -> None:
    service = {
        "KVPOOL_MASTER_SERVICE_HOST": "10.0.0.1",
        "KVPOOL_MASTER_SERVICE_PORT": "50051",
        "KVPOOL_MASTER_SERVICE_PORT_GRPC": "50051",
        "KVPOOL_MASTER_PORT": "tcp://10.0.0.1:50051",
        "KVPOOL_MASTER_PORT_50051_TCP": "tcp://10.0.0.1:50051",
        "KVPOOL_MASTER_PORT_50051_TCP_ADDR": "10.0.0.1",
    }
    assert load([], service).config == MasterConfig()


def test_every_setting_of_the_core_can_be_told() -> None:
    flags: list[str] = []
    for item in fields(Settings):
        flag = "--core-" + item.name.replace("_", "-")
        flags += [flag] if isinstance(item.default, bool) else [flag, str(item.default)]
    assert load(flags, {}).config.core == Settings()


def test_printed_configuration_reads_back(tmp_path: Path) -> None:
    config = load(["--drain-ms", "7s", "--debug", "--core-nodes-max", "5"], {}).config
    assert load(["--config", written(tmp_path, to_toml(config))], {}).config == config
    assert load(["--print-config"], {}).print_only


def test_the_sample_file_shows_every_key_at_its_default() -> None:
    assert load(["--config", str(SAMPLE)], {}).config == MasterConfig()
    sample, every = (tomllib.loads(text) for text in (SAMPLE.read_text(encoding="utf-8"), to_toml(MasterConfig())))
    assert sample.keys() == every.keys()
    assert sample["core"].keys() == every["core"].keys()


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["--version"], 0, "kvpool-master "),
        (["serve", "--print-config"], 0, "[core]"),
        (["--lisen", "x"], 1, "kvpool-master: unknown flag"),
        (["serv"], 1, "kvpool-master: unknown command 'serv'"),
    ],
)
def test_the_command_line_answers_in_one_word_and_one_code(words: list[str], code: int, expected: str) -> None:
    done = subprocess.run([sys.executable, "-m", "kvpool_master", *words], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert expected in (done.stdout if code == 0 else done.stderr)
    if code:
        assert done.stderr.count("\n") == 1
