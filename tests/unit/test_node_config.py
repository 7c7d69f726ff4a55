"""The node client's configuration and its preflight."""

from __future__ import annotations

import io
from dataclasses import fields, replace
from pathlib import Path

import pytest

from kvpool_client.__main__ import main
from kvpool_client.clock import Clock, new_incarnation
from kvpool_client.config import NodeConfig, describe, load_config
from kvpool_client.logs import LINES_MAX, WINDOW_MS, Log
from kvpool_client.preflight import (
    Room,
    cgroup_free_bytes,
    check_room,
    huge_page_bytes,
    measure_room,
    memory_available_bytes,
)
from kvpool_client.start_error import StartError
from kvpool_proto.errors import BadSegment

MIB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "node.toml"


def test_flags_beat_environment_beats_file_beats_default(file: Path) -> None:
    file.write_text('slab_bytes = "1MiB"\nsegment_bytes = 4194304\nnode_id = "file"\nlog_json = true\n')
    environ = {"KVPOOL_CLIENT_CONFIG": str(file), "KVPOOL_CLIENT_NODE_ID": "env", "KVPOOL_CLIENT_SEGMENT_BYTES": "8MiB"}
    config = load_config(["--segment-bytes", "16MiB"], environ)
    assert (config.segment_bytes, config.slab_bytes, config.node_id) == (16 * MIB, MIB, "env")
    assert config.log_json
    assert config.http == "127.0.0.1:9501"


def test_the_flag_names_the_file_first(file: Path) -> None:
    file.write_text('node_id = "one"')
    assert load_config(["--config", str(file)], {"KVPOOL_CLIENT_CONFIG": "/nowhere"}).node_id == "one"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("segment-bytes", "64MiB", 64 * MIB),
        ("segment-bytes", "134217728", 128 * MIB),
        ("backoff-max-ms", "2s", 2_000),
        ("backoff-max-ms", "1min", 60_000),
        ("socket-mode", "0666", 0o666),
        ("numa-node", "1", (1,)),
        ("huge-pages", "try", "try"),
        ("log-json", "false", False),
    ],
)
def test_values_are_read(name: str, text: str, value: object) -> None:
    assert getattr(load_config([f"--{name}", text], {}), name.replace("-", "_")) == value


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--segment-size", "1"], "unknown argument --segment-size; did you mean --segments?"),
        (["--slab-byte=1"], "unknown argument --slab-byte=1; did you mean --slab-bytes?"),
        (["--slab-bytes", "many"], "slab_bytes = 'many': a whole number, or one with b, kib"),
        (["--slab-bytes", "-5"], "slab"),
        (["--workers-max", "0"], "workers_max = 0: 1 to"),
        (["--workers-max", "5s"], "workers_max = '5s': a whole number"),
        (["--node-id", "a/b"], "node_id = 'a/b'"),
        (["--http", "9501"], "http = '9501': host:port"),
        (["--huge-pages", "maybe"], "one of off, try, on"),
        (["--log-level", "loud"], "one of debug, info"),
        (["--numa-node", "0,1,2"], "numa_node"),
        (["--numa-node", "x"], "numa_node"),
        (["--socket-mode", "8"], "socket_mode = '8'"),
        (["--log-json", "perhaps"], "log_json = 'perhaps': true or false"),
        (["--config", "/nowhere.toml"], "/nowhere.toml: No such file"),
    ],
)
def test_mistakes_are_named(argv: list[str], says: str) -> None:
    with pytest.raises(StartError) as refused:
        load_config(argv, {})
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_unknown_names_elsewhere(file: Path) -> None:
    with pytest.raises(StartError, match="did you mean KVPOOL_CLIENT_SOCKET_PATH"):
        load_config([], {"KVPOOL_CLIENT_SOCKET_PAHT": "x", "OTHER": "y"})
    file.write_text("segmentbytes = 1")
    with pytest.raises(StartError, match=r"unknown setting segmentbytes; did you mean segment_bytes\?"):
        load_config(["--config", str(file)], {})
    file.write_text("slab_bytes = [")
    with pytest.raises(StartError, match=r"node\.toml"):
        load_config(["--config", str(file)], {})


def test_what_kubernetes_says_is_not_for_us() -> None:
    said = {"KVPOOL_CLIENT_SERVICE_HOST": "10.0.0.1", "KVPOOL_CLIENT_PORT_9501_TCP_ADDR": "10.0.0.1"}
    assert load_config([], said) == load_config([], {})


@pytest.mark.parametrize("argv", [["--segment-bytes", "0"], ["--segment-bytes", "100MiB"], ["--segments", "3"]])
def test_bad_geometry_is_a_bad_segment(argv: list[str]) -> None:
    with pytest.raises(BadSegment):
        load_config(argv, {})


def test_plans_divide_the_memory() -> None:
    config = replace(NodeConfig(), segments=2, numa_node=(0, 1), node_id="n")
    config.check()
    assert [(plan.index, plan.size_bytes, plan.numa_node) for plan in config.plans()] == [
        (0, 512 * MIB, 0),
        (1, 512 * MIB, 1),
    ]
    assert config.plans()[1].path == Path("/dev/shm/kvpool-n-1.seg")
    assert [plan.numa_node for plan in replace(config, numa_node=(-1,)).plans()] == [-1, -1]


def test_the_description_reads_back(file: Path) -> None:
    config = load_config(["--numa-node", "0,1", "--segments", "2", "--log-json", "--socket-mode", "0600"], {})
    file.write_text(describe(config))
    assert load_config(["--config", str(file)], {}) == config


def test_the_sample_file_names_every_setting_with_its_default(file: Path) -> None:
    sample = (Path(__file__).parents[2] / "deploy/config/node.toml").read_text()
    file.write_text(sample)
    assert load_config(["--config", str(file)], {}) == NodeConfig()
    settings = [line[1:] for line in sample.splitlines() if line.startswith("#") and not line.startswith("# ")]
    assert len(settings) == len(fields(NodeConfig))
    file.write_text("\n".join(settings))
    assert load_config(["--config", str(file)], {}) == replace(NodeConfig(), node_id="node-1")


def test_the_command_line_answers_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fly"]) == 1
    assert capsys.readouterr().err == "kvpool-client: unknown command 'fly': serve, sweep\n"
    assert main(["sweep", "--segment-dir", "/nowhere"]) == 1
    assert capsys.readouterr().err == "kvpool-client: segment_dir = /nowhere: No such file or directory\n"
    assert main(["sweep", "--all"]) == 1
    assert "unrecognized arguments: --all" in capsys.readouterr().err
    assert main(["serve", "--slab-byte", "1"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["--version"]) == 0
    assert main(["--print-config", "--node-id", "x"]) == 0
    assert 'node_id = "x"' in capsys.readouterr().out


# -- preflight -----------------------------------------------------------------------------------------

ROOM = Room("/dev/shm", 1000 * MIB, 900 * MIB, 800 * MIB, 700 * MIB)


@pytest.mark.parametrize(
    ("needed_mib", "says"),
    [
        (701, "the segments need 701 MiB of memory, but the cgroup's limit leaves only 700 MiB: lower segment_bytes"),
        (801, "only 800 MiB available (MemAvailable): lower segment_bytes"),
        (901, "/dev/shm has only 900 MiB free: lower segment_bytes"),
        (1001, "/dev/shm has only 1,000 MiB in all: lower segment_bytes, make it larger (docker: --shm-size"),
    ],
)
def test_a_lack_of_room_is_said_plainly(needed_mib: int, says: str) -> None:
    with pytest.raises(StartError) as refused:
        check_room(needed_mib * MIB, ROOM)
    assert says in str(refused.value)


def test_what_fits_is_not_refused() -> None:
    check_room(700 * MIB, ROOM)
    check_room(900 * MIB, replace(ROOM, memory_available_bytes=None, cgroup_free_bytes=None))
    check_room(1 << 50, Room("/dev/shm", None, None))


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_the_tightest_cgroup_counts(tmp_path: Path) -> None:
    assert cgroup_free_bytes(tmp_path) is None
    v2 = tmp_path / "two"
    write(
        v2,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/b/memory.current": "5\n",
            "sys/fs/cgroup/a/memory.max": "1000\n",
            "sys/fs/cgroup/a/memory.current": "600\n",
            "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 50\n",
        },
    )
    assert cgroup_free_bytes(v2) == 450
    v1 = tmp_path / "one"
    write(
        v1,
        {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/abc\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "1000\n",  # in a container only the top is seen
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1200\n",
        },
    )
    assert cgroup_free_bytes(v1) == 0


def test_huge_pages_are_counted(tmp_path: Path) -> None:
    assert huge_page_bytes(tmp_path, 2 * MIB) == (None, None)
    folder = "sys/kernel/mm/hugepages/hugepages-2048kB"
    write(tmp_path, {f"{folder}/nr_hugepages": "8\n", f"{folder}/free_hugepages": "3\n"})
    assert huge_page_bytes(tmp_path, 2 * MIB) == (16 * MIB, 6 * MIB)


def test_available_memory_is_read(tmp_path: Path) -> None:
    assert memory_available_bytes(tmp_path) is None
    write(tmp_path, {"proc/meminfo": "MemTotal: 10 kB\nMemAvailable:   3 kB\n"})
    assert memory_available_bytes(tmp_path) == 3072


def test_measuring_a_folder(tmp_path: Path) -> None:
    room = measure_room(tmp_path)
    assert 0 < (room.file_system_free_bytes or 0) <= (room.file_system_size_bytes or 0)
    with pytest.raises(StartError, match="segment_dir"):
        measure_room(tmp_path / "nowhere")


# -- log and clock -------------------------------------------------------------------------------------


def test_a_flood_of_one_event_is_counted() -> None:
    now = [0]
    stream = io.StringIO()
    log = Log("info", False, Clock(now_ms=lambda: now[0], wall_s=lambda: 0.0), stream)
    log.debug("below")
    for i in range(LINES_MAX + 7):
        log.warning("flood", number=i)
    log.info("other", text='two words "quoted"', raw=b"\x01\xff", line="a\nb")
    now[0] = WINDOW_MS
    log.warning("flood")
    lines = stream.getvalue().splitlines()
    assert len(lines) == LINES_MAX + 2
    assert lines[-2] == ('1970-01-01T00:00:00.000+00:00 info other text="two words \\"quoted\\"" raw=01ff line="a\\nb"')
    assert lines[-1].endswith("warning flood held_back=7")


def test_json_lines_and_a_stream_that_is_gone() -> None:
    stream = io.StringIO()
    log = Log("debug", True, Clock(now_ms=lambda: 0, wall_s=lambda: 0.0), stream)
    log.debug("event", key=b"\x02", count=3)
    assert stream.getvalue() == (
        '{"ts": "1970-01-01T00:00:00.000+00:00", "level": "debug", "event": "event", "key": "02", "count": 3}\n'
    )
    stream.close()
    log.error("nobody_reads_this")


def test_incarnations_rise_even_if_the_wall_clock_does_not() -> None:
    clock = Clock(wall_s=lambda: 5.0)
    assert new_incarnation(clock) == 5000
    assert new_incarnation(clock, 7000) == 7001
