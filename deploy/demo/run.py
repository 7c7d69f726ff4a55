"""The demo: a real model through the pool, with real processes. Run as `make demo`.

  1 chat, two users in turn          } engine process A; the pool is empty at the start
  2 few-shot with a fixed head       }
  3 the same two again                 engine process B, fresh: its HBM is empty, so the prefix comes from the pool

Every request is compared with the same request in a fresh process of the same engine, with the same HBM, that plays
the same scenes in the same order without a pool. That run is made once: without a pool, A and B do the same work.

Exit codes: 0 all is well; 1 greedy tokens differ, or the fresh process had no hit in the pool, or something broke;
130 or 143 stopped by a signal.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc
from model import MODEL_NAME, OFFLINE, ModelError, Progress, prepare
from processes import STOP_SIGNALS, ChildFailed, daemon, worker
from report import HEAD, Row, Screen, bar, totals
from scenes import FULL, QUICK

from kvpool_proto import pool_pb2 as pb
from kvpool_proto import pool_pb2_grpc as pb_grpc
from kvpool_proto.geometry import file_bytes

HERE: Final = Path(__file__).resolve().parent
CACHE: Final = HERE.parents[1] / ".cache" / "kvpool-demo"
SHM: Final = Path("/dev/shm")
SLAB_BYTES: Final = 64 << 20
SEGMENT_BYTES: Final = {True: 4 * SLAB_BYTES, False: 10 * SLAB_BYTES}
"""By --quick. All blocks of the scenes fit, so that nothing is evicted from the pool."""
AIM: Final = 10.0
RPC_DEADLINE_S: Final = 5.0
ENGINE_ENVIRONMENT: Final = OFFLINE | {"OMP_WAIT_POLICY": "passive"}
"""By default torch's threads spin while they wait for each other: where another process wants a core too, a prefill
then takes 12 times as long (measured: 24 s against 2 s for 512 tokens)."""

Answers = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Pool:
    """Where the running pool is."""

    master: str
    node_socket: Path


def main() -> int:
    """Play; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="prompts of a quarter of the length")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the model is kept")
    parser.add_argument("--segment-dir", type=Path, default=SHM, help="where the pool's memory is mapped")
    flags = parser.parse_args()
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)
    screen = Screen()
    try:
        model = prepare(flags.cache, Progress(screen.say, screen.tick))
        return _play(screen, model, flags)
    except (ModelError, ChildFailed, grpc.RpcError) as error:
        screen.say(f"FAILED: {error}")
        return 1
    except SystemExit:
        screen.say("stopped; everything is cleaned up")
        raise


def _stop(number: int, _frame: object) -> NoReturn:
    # One is enough: a second signal would break off the cleaning up.
    for other in STOP_SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _play(screen: Screen, model: Path, flags: argparse.Namespace) -> int:
    start = time.monotonic()
    with running_pool(screen, flags) as pool:
        _explain(screen, flags)
        reference = _run_worker(screen, "without the pool", model, flags.quick, None)
        screen.say("Scenes 1 and 2: engine process A; HBM and pool are empty at the start")
        first = _run_worker(screen, "process A", model, flags.quick, pool, reference)
        screen.say()
        screen.say("Scene 3: the same again in a fresh engine process B; HBM is empty, the pool is not")
        second = _run_worker(screen, "process B", model, flags.quick, pool, reference)
        stored = _stored(pool.master)
    rows_a, rows_b = _rows(first, reference), _rows(second, reference)
    screen.say()
    screen.say("Totals")
    for line in totals("process A", rows_a) + totals("process B", rows_b):
        screen.say(line)
    longest = max(rows_b, key=lambda row: (row.pool, row.prompt))
    screen.say(
        f"  longest pool hit: {longest.pool:,} of {longest.prompt:,} tokens; first token after {longest.ttft_s:.2f} s"
        f" against {longest.reference_ttft_s:.2f} s"
    )
    screen.say(f"  {longest.faster:.1f} times sooner; the aim is {AIM:.0f} times at 4,000 tokens")
    screen.say()
    for line in stored:
        screen.say(line)
    screen.say()
    screen.say("What the model said")
    for row in rows_a:
        screen.say(row.answer())
    screen.say()
    return _verdict(screen, rows_a, rows_b, time.monotonic() - start)


def _explain(screen: Screen, flags: argparse.Namespace) -> None:
    sizes = QUICK if flags.quick else FULL
    screen.say(f"Model     {MODEL_NAME}, float32, on {len(os.sched_getaffinity(0))} cores; blocks of 128 tokens")
    screen.say(
        f'"HBM"     a store of {sizes.hbm_tokens // 128} blocks ({sizes.hbm_tokens:,} tokens) in each engine process'
    )
    screen.say("Compared  with the same requests, in the same order, by the same engine with the same HBM in a fresh")
    screen.say("          process, the pool off; that run is made once and stands beside A and B. A row with nothing")
    screen.say("          from the pool did the same work in both: what its times differ by is this machine's noise")
    screen.say(f"Takes     {'1 to 3' if flags.quick else '3 to 8'} minutes on 2 cores")
    screen.say()


def _verdict(screen: Screen, rows_a: list[Row], rows_b: list[Row], seconds: float) -> int:
    different = [row for row in rows_a + rows_b if not row.same_tokens]
    hits = sum(row.pool for row in rows_b)
    if different:
        screen.say(f"FAILED: {len(different)} answers differ from those without the pool")
    if not hits:
        screen.say("FAILED: the fresh process had no hit in the pool")
    if different or not hits:
        return 1
    count = len(rows_a) + len(rows_b)
    screen.say(f"OK: all {count} answers are, token by token, those without the pool; {seconds:.0f} s in all")
    return 0


# -- the pool ---------------------------------------------------------------------------------------------


@contextmanager
def running_pool(screen: Screen, flags: argparse.Namespace) -> Iterator[Pool]:
    """A Master and a node client of our own, on free ports. Leaves nothing behind. Raises ChildFailed."""
    size = SEGMENT_BYTES[flags.quick]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-demo-")))
        directory = _segment_dir(screen, flags, size, stack)
        node_id = f"demo-{os.getpid()}"
        stack.callback(_remove_segments, directory, node_id)
        loopback = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--plaintext", "--log-json"]
        loopback += ["--state-dir", str(scratch / "master")]
        screen.tick("starting the Master")
        ready = stack.enter_context(daemon("the Master", ["kvpool_master", "serve", *loopback]))
        master = f"127.0.0.1:{ready['grpc_port']}"
        node_socket = scratch / "node.sock"
        settings = {
            "--master": master,
            "--node-id": node_id,
            "--segment-dir": str(directory),
            "--segment-bytes": str(size),
            "--slab-bytes": str(SLAB_BYTES),
            "--socket-path": str(node_socket),
            "--http": "127.0.0.1:0",
            "--data-listen": "127.0.0.1:0",
        }
        words = [word for pair in settings.items() for word in pair] + ["--discard", "--plaintext"]
        screen.tick("starting the node client")
        stack.enter_context(daemon("the node client", ["kvpool_client", "serve", *words, "--log-json"]))
        screen.say(f"Pool      Master on {master}; node client with {size >> 20} MiB in {directory}")
        yield Pool(master, node_socket)


def _segment_dir(screen: Screen, flags: argparse.Namespace, size: int, stack: ExitStack) -> Path:
    wanted: Path = flags.segment_dir
    needed = file_bytes(size, SLAB_BYTES)
    free = shutil.disk_usage(wanted).free if wanted.is_dir() else 0
    if free >= needed:
        return wanted
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="segment-", dir=flags.cache))
    screen.say(f"{wanted} has {free >> 20} MiB free, the demo needs {needed >> 20} MiB: using the folder {folder}")
    return Path(folder)


def _remove_segments(directory: Path, node_id: str) -> None:
    """Does nothing after a clean stop; a node client that had to be killed leaves its file."""
    for path in directory.glob(f"kvpool-{node_id}-*"):
        path.unlink(missing_ok=True)


def _stored(master: str) -> list[str]:
    with grpc.insecure_channel(master) as channel:
        status = pb_grpc.AdminStub(channel).Status(pb.StatusRequest(), timeout=RPC_DEADLINE_S)
    spaces = [
        f"  namespace {space.namespace_id.hex()[:8]} ({space.spec.model}, {space.spec.dtype}, blocks of"
        f" {space.spec.block_tokens} tokens): {space.blocks} blocks in {space.spans} spans,"
        f" {space.stored_bytes / 1e6:,.0f} MB"
        for space in status.namespaces
    ]
    segments = [
        f"  segment {segment.index} of node {node.node_id} ({node.state}):"
        f" {segment.used_bytes / 1e6:,.0f} of {segment.size_bytes / 1e6:,.0f} MB used,"
        f" {segment.slabs_bound} of {segment.slabs} slabs bound"
        for node in status.nodes
        for segment in node.segments
    ]
    ends = f"  leases open: {status.leases}; reservations open: {status.reservations}"
    return ["Stored in the pool", *spaces, *segments, ends]


# -- the engine processes ---------------------------------------------------------------------------------


def _run_worker(
    screen: Screen, name: str, model: Path, quick: bool, pool: Pool | None, reference: Answers | None = None
) -> Answers:
    """Play all scenes in one fresh process; its answers; with a reference, a row for each is printed."""
    command = [str(HERE / "worker.py"), "--model", str(model)]
    command += ["--quick"] if quick else []
    command += ["--master", pool.master, "--node-socket", str(pool.node_socket)] if pool else []
    if reference is not None:
        screen.say(HEAD)
    answers: Answers = []
    screen.tick(f"{name}: loading the model")
    with worker(name, command, ENGINE_ENVIRONMENT) as lines:
        for line in lines:
            if line["kind"] == "step":
                place = f"{name}: request {len(answers) + 1}, {line['scene']}, {line['name']}"
                screen.tick(f"{place}  {bar(line['done'], line['total'])} {line['done']:,}/{line['total']:,} tokens")
            elif line["kind"] == "answer":
                answers.append(line)
                if reference is not None:
                    screen.say(_row(line, reference[len(answers) - 1]).line())
    return answers


def _row(answer: dict[str, Any], reference: dict[str, Any]) -> Row:
    return Row(
        scene=answer["scene"],
        name=answer["name"],
        prompt=answer["prompt_tokens"],
        hbm=answer["hbm_tokens"],
        pool=answer["pool_tokens"],
        ttft_s=answer["ttft_s"],
        reference_ttft_s=reference["ttft_s"],
        pool_s=answer["pool_s"],
        pool_bytes=answer["pool_bytes"],
        same_tokens=answer["tokens"] == reference["tokens"],
        text=answer["text"],
    )


def _rows(answers: Answers, reference: Answers) -> list[Row]:
    return [_row(answer, other) for answer, other in zip(answers, reference, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
