"""One process of the demo: loads the model, plays the scenes, and tells of it in lines of JSON on stdout.

Rules
  - Its HBM is empty at the start. With a Master named it uses the pool, without one it does not; else nothing differs.
  - Lines: {"kind": "step", ...} while it works, {"kind": "answer", ...} per request, {"kind": "end", ...} at last.
  - It ends when stdin ends, so that it never outlives the demo.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engine import Engine, Hbm
from model import MODEL_NAME
from scenes import FULL, QUICK, SCENES, Sizes, Writer
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from kvpool_client.connectors.transformers import fingerprint, namespace_of, shape_of
from kvpool_client.sdk import KVPool, Namespace
from kvpool_proto.security import PLAINTEXT

BLOCK_TOKENS = 128


def say(kind: str, **fields: Any) -> None:
    """One line to the demo."""
    sys.stdout.write(json.dumps({"kind": kind, **fields}) + "\n")
    sys.stdout.flush()


def _step(where: dict[str, str], done: int, total: int) -> None:
    say("step", **where, done=done, total=total)


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(3)


def play(engine: Engine, writer: Writer, tokenizer: Any, sizes: Sizes) -> None:
    """All requests of all scenes, one after another."""
    for scene in SCENES:
        requests = scene(writer, sizes)
        request = next(requests)
        try:
            while True:
                where = {"scene": request.scene, "name": request.name}

                answer = engine.answer(request.prompt, sizes.answer, partial(_step, where))
                text: str = tokenizer.decode(answer.tokens, skip_special_tokens=True)
                say("answer", **where, text=text, **asdict(answer))
                request = requests.send(text)
        except StopIteration:
            continue


def main() -> int:
    """Exit code 0 when all requests were answered."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--master", help="without it the pool is off")
    parser.add_argument("--node-socket")
    flags = parser.parse_args()
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    sizes = QUICK if flags.quick else FULL
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(flags.model)
    model = AutoModelForCausalLM.from_pretrained(flags.model, dtype=torch.float32).eval()
    shape = shape_of(model.config, BLOCK_TOKENS, torch.float32)
    spec = namespace_of(shape, model=MODEL_NAME, revision=fingerprint(flags.model))
    hbm = Hbm(shape, sizes.hbm_tokens // BLOCK_TOKENS)
    with ExitStack() as stack:
        namespace: Namespace | None = None
        if flags.master:
            pool = stack.enter_context(
                KVPool.connect(master=flags.master, node_socket=flags.node_socket, security=PLAINTEXT)
            )
            namespace = pool.namespace(spec)
        play(Engine(model, shape, spec, hbm, namespace), Writer(tokenizer), tokenizer, sizes)
    say("end", evicted_blocks=hbm.evicted_blocks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
