"""A small inference engine with a prefix cache: one request at a time, greedy decoding, KV in blocks.

Rules
  - "HBM" is a bounded store of blocks in this process: paged rows, found by prefix key, least recently used first out.
    Of a prompt the tail goes before the head, and never the blocks of the request that runs.
  - A prompt's blocks come from HBM first; the pool is asked only for what follows; the rest is computed.
  - Prefill runs in chunks of one block, cut at block borders, wherever it starts: other chunks would change the last
    bits of the logits. Only blocks computed as such chunks are kept: never a partial one, nor one filled by decoding.
  - So every logit has the same bits whichever way a block came, and greedy tokens are the same.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvpool_client.connectors.plan import BlockRun, plan_load, prefill_chunks, reusable_blocks, whole_blocks
from kvpool_client.connectors.transformers import BlockShape, build_cache, copy_blocks, keys_of
from kvpool_client.devices.base import Rows
from kvpool_client.sdk import Namespace
from kvpool_proto.namespace import NamespaceSpec

OnChunk = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's outcome.

    ttft_s: from the prompt's arrival to its first new token, everything included; pool_s: the part of it that lookup
    and load took. pool_reason: why the pool gave no more.
    """

    tokens: tuple[int, ...]
    prompt_tokens: int
    hbm_tokens: int
    pool_tokens: int
    ttft_s: float
    pool_s: float
    pool_bytes: int
    stored_blocks: int
    pool_reason: str


@dataclass(frozen=True, slots=True)
class _Loaded:
    """HBM rows that the pool filled, in the order of the prompt; seconds for it; why there are no more."""

    rows: list[int]
    seconds: float
    reason: str


class Hbm:
    """A bounded number of blocks by key. Not thread-safe."""

    def __init__(self, shape: BlockShape, blocks: int) -> None:
        self.pages = shape.paged(blocks)
        self.blocks = blocks
        self.evicted_blocks = 0
        self._rows: OrderedDict[bytes, int] = OrderedDict()
        self._free = list(range(blocks))

    def leading(self, keys: Sequence[bytes]) -> list[int]:
        """The rows of the longest leading run of `keys` that is held, now the most recently used."""
        held: list[int] = []
        for key in keys:
            if key not in self._rows:
                break
            held.append(self._rows[key])
        for key in reversed(keys[: len(held)]):
            self._rows.move_to_end(key)
        return held

    def take(self, blocks: int) -> list[int]:
        """Rows to fill, evicting what was used longest ago. The caller puts them, or gives them back."""
        while len(self._free) < blocks:
            self._free.append(self._rows.popitem(last=False)[1])
            self.evicted_blocks += 1
        return [self._free.pop() for _ in range(blocks)]

    def put(self, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """The rows, just filled, hold these consecutive blocks of a prompt from now on."""
        for key, row in zip(reversed(keys), reversed(rows), strict=True):
            # A key may still be held behind a gap that eviction left.
            if (older := self._rows.pop(key, None)) is not None:
                self._free.append(older)
            self._rows[key] = row

    def give_back(self, rows: Sequence[int]) -> None:
        """The rows were not filled."""
        self._free.extend(rows)


class Engine:
    """Answers prompts with one model, its HBM and, unless `pool` is None, the pool."""

    def __init__(self, model: Any, shape: BlockShape, spec: NamespaceSpec, hbm: Hbm, pool: Namespace | None) -> None:
        self._model = model
        self._shape = shape
        self._spec = spec
        self._hbm = hbm
        self._pool = pool

    @torch.inference_mode()
    def answer(self, prompt: Sequence[int], new_tokens: int, on_chunk: OnChunk) -> Answer:
        """Decode up to `new_tokens` tokens. on_chunk(done, prompt tokens) is called after each chunk of the prefill.

        Raises ValueError for a prompt whose blocks exceed HBM.
        """
        start = time.perf_counter()
        block_tokens = self._shape.block_tokens
        blocks = whole_blocks(len(prompt), block_tokens)
        if blocks > self._hbm.blocks or not prompt:
            raise ValueError(f"a prompt of {len(prompt)} tokens: 1 to {self._hbm.blocks * block_tokens}")
        chain = keys_of(self._spec, prompt)
        keys = self._split(chain)
        rows = self._hbm.leading(keys[: reusable_blocks(len(prompt), block_tokens)])
        held = len(rows)
        loaded = self._load(chain, keys, plan_load(len(prompt), block_tokens, held))
        rows += loaded.rows
        reused = len(rows)
        cache = build_cache(self._model.config, self._shape, self._hbm.pages, torch.tensor(rows, dtype=torch.int64))
        first = self._prefill(prompt, reused * block_tokens, cache, on_chunk)
        ttft_s = time.perf_counter() - start
        tokens = self._decode(first, new_tokens, cache)
        rows += self._keep(cache, keys, reused)
        return Answer(
            tokens=tokens,
            prompt_tokens=len(prompt),
            hbm_tokens=held * block_tokens,
            pool_tokens=len(loaded.rows) * block_tokens,
            ttft_s=ttft_s,
            pool_s=loaded.seconds,
            pool_bytes=len(loaded.rows) * self._shape.part_bytes,
            stored_blocks=self._store(chain, rows),
            pool_reason=loaded.reason,
        )

    def _split(self, chain: bytes) -> list[bytes]:
        step = self._spec.key_bytes
        return [chain[at : at + step] for at in range(0, len(chain), step)]

    def _load(self, chain: bytes, keys: list[bytes], run: BlockRun) -> _Loaded:
        """Ask the pool for a run of blocks, and load what it has into HBM."""
        if self._pool is None or run.blocks == 0:
            return _Loaded([], 0.0, "")
        start = time.perf_counter()
        with self._pool.lookup(chain[: run.end * self._spec.key_bytes], skip=run.first) as hit:
            if hit.blocks == 0:
                return _Loaded([], time.perf_counter() - start, hit.reason)
            rows = self._hbm.take(hit.blocks)
            result = self._pool.load(hit, self._as_rows(rows))
        good, rest = rows[: result.blocks], rows[result.blocks :]
        self._hbm.put(keys[run.first : run.first + result.blocks], good)
        self._hbm.give_back(rest)
        return _Loaded(good, time.perf_counter() - start, result.reason or hit.reason)

    def _as_rows(self, rows: Sequence[int]) -> Rows:
        return Rows([page.flatten(1) for page in self._hbm.pages], torch.tensor(rows, dtype=torch.int64))

    def _prefill(self, prompt: Sequence[int], first_token: int, cache: Any, on_chunk: OnChunk) -> int:
        """Compute the prompt's KV from `first_token` on; the first new token."""
        ids = torch.tensor([prompt], dtype=torch.int64)
        logits = None
        for start, end in prefill_chunks(first_token, len(prompt), self._shape.block_tokens):
            output = self._model(input_ids=ids[:, start:end], cache=cache, use_cache=True, logits_to_keep=1)
            logits = output.logits
            on_chunk(end, len(prompt))
        assert logits is not None
        return int(logits[0, -1].argmax())

    def _decode(self, first: int, new_tokens: int, cache: Any) -> tuple[int, ...]:
        tokens = [first]
        while len(tokens) < new_tokens and tokens[-1] != self._model.config.eos_token_id:
            step = torch.tensor([tokens[-1:]], dtype=torch.int64)
            output = self._model(input_ids=step, cache=cache, use_cache=True, logits_to_keep=1)
            tokens.append(int(output.logits[0, -1].argmax()))
        return tuple(tokens)

    def _keep(self, cache: Any, keys: list[bytes], reused: int) -> list[int]:
        """Put the prompt's whole blocks behind the reused ones into HBM; their rows."""
        rows = self._hbm.take(len(keys) - reused)
        copy_blocks(cache, self._shape, reused, self._hbm.pages, torch.tensor(rows, dtype=torch.int64))
        self._hbm.put(keys[reused:], rows)
        return rows

    def _store(self, chain: bytes, rows: list[int]) -> int:
        """Offer all of the prompt's blocks to the pool; it takes those that it lacks. How many it took."""
        if self._pool is None or not rows:
            return 0
        return self._pool.store(chain, self._as_rows(rows)).stored_blocks
