"""Which blocks of a prompt an engine reuses, asks the pool for and stores. Arithmetic only: no I/O, no engine.

Rules
  - Only whole blocks are reused or stored; a prompt's last, partial block never is.
  - At least one token of a prompt is left to compute: the logits of the first new token come from it.
  - HBM wins over the pool: the pool is asked only for what follows the blocks that HBM holds.
  - A run counts only in one piece with what lies before it: blocks behind a gap are useless to an engine.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks [first, first + blocks) of a prompt."""

    first: int
    blocks: int

    @property
    def end(self) -> int:
        """The first block behind the run."""
        return self.first + self.blocks


def whole_blocks(tokens: int, block_tokens: int) -> int:
    """How many blocks `tokens` leading tokens fill.

    Raises ValueError unless tokens >= 0 and block_tokens >= 1.
    """
    if tokens < 0 or block_tokens < 1:
        raise ValueError(f"tokens = {tokens}, block_tokens = {block_tokens}: at least 0 and 1")
    return tokens // block_tokens


def reusable_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """How many leading blocks of a prompt may come from a cache, so that a token is left to compute."""
    return whole_blocks(max(prompt_tokens - 1, 0), block_tokens)


def plan_load(prompt_tokens: int, block_tokens: int, held_blocks: int) -> BlockRun:
    """What to ask the pool for when HBM holds the first `held_blocks` blocks; empty when nothing is left to ask for.

    held_blocks may exceed what is reusable: an engine can hold all blocks of a prompt. Raises ValueError if negative.
    """
    if held_blocks < 0:
        raise ValueError(f"held_blocks = {held_blocks}: at least 0")
    reusable = reusable_blocks(prompt_tokens, block_tokens)
    first = min(held_blocks, reusable)
    return BlockRun(first, reusable - first)


def plan_store(computed_tokens: int, block_tokens: int, stored_blocks: int) -> BlockRun:
    """What to offer the pool when `computed_tokens` leading tokens have KV and the pool holds `stored_blocks` blocks.

    Empty when there is nothing new. Raises ValueError if stored_blocks is negative.
    """
    if stored_blocks < 0:
        raise ValueError(f"stored_blocks = {stored_blocks}: at least 0")
    whole = whole_blocks(computed_tokens, block_tokens)
    first = min(stored_blocks, whole)
    return BlockRun(first, whole - first)


def prefill_chunks(first_token: int, prompt_tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """The (start, end) token ranges to prefill, cut at multiples of `chunk_tokens` wherever the prefill starts.

    A prefill that resumes behind reused blocks then runs the very chunks that a cold one would have run, so that its
    logits have the same bits. Raises ValueError unless 0 <= first_token < prompt_tokens and chunk_tokens >= 1.
    """
    if not 0 <= first_token < prompt_tokens or chunk_tokens < 1:
        raise ValueError(f"first_token = {first_token} of {prompt_tokens}, chunk_tokens = {chunk_tokens}")
    borders = range((first_token // chunk_tokens + 1) * chunk_tokens, prompt_tokens, chunk_tokens)
    cuts = [first_token, *borders, prompt_tokens]
    return list(itertools.pairwise(cuts))
