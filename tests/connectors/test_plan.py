"""Which blocks are reused, asked for and stored: the rules of connectors/plan.py at every small size."""

from __future__ import annotations

import itertools

import pytest

from kvpool_client.connectors.plan import (
    BlockRun,
    plan_load,
    plan_store,
    prefill_chunks,
    reusable_blocks,
    whole_blocks,
)

BLOCK_SIZES = range(1, 9)
TOKENS = range(41)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (7, 0), (8, 1), (9, 1), (16, 2)])
def test_whole_blocks(tokens: int, blocks: int) -> None:
    assert whole_blocks(tokens, 8) == blocks


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (8, 0), (9, 1), (16, 1), (17, 2)])
def test_a_whole_prompt_is_never_reused(tokens: int, blocks: int) -> None:
    assert reusable_blocks(tokens, 8) == blocks


@pytest.mark.parametrize("block_tokens", BLOCK_SIZES)
def test_load_follows_what_hbm_holds_and_leaves_a_token(block_tokens: int) -> None:
    for tokens, held in itertools.product(TOKENS, range(12)):
        run = plan_load(tokens, block_tokens, held)
        assert run.first == min(held, reusable_blocks(tokens, block_tokens))
        assert run.end * block_tokens < max(tokens, 1)
        assert run.blocks == 0 or (run.end + 1) * block_tokens >= tokens, "as much as may be reused"


@pytest.mark.parametrize("block_tokens", BLOCK_SIZES)
def test_store_offers_every_whole_block_once(block_tokens: int) -> None:
    for tokens, stored in itertools.product(TOKENS, range(12)):
        run = plan_store(tokens, block_tokens, stored)
        assert run.end == tokens // block_tokens
        assert run.first == min(stored, run.end)


@pytest.mark.parametrize("block_tokens", BLOCK_SIZES)
def test_a_resumed_prefill_runs_the_chunks_of_a_cold_one(block_tokens: int) -> None:
    for tokens in TOKENS[1:]:
        cold = prefill_chunks(0, tokens, block_tokens)
        assert [token for start, end in cold for token in range(start, end)] == list(range(tokens))
        for blocks in range(reusable_blocks(tokens, block_tokens) + 1):
            assert prefill_chunks(blocks * block_tokens, tokens, block_tokens) == cold[blocks:]


def test_a_prefill_that_starts_inside_a_chunk_returns_to_the_grid() -> None:
    assert prefill_chunks(3, 20, 8) == [(3, 8), (8, 16), (16, 20)]


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="block_tokens = 0"):
        whole_blocks(1, 0)
    with pytest.raises(ValueError, match="held_blocks = -1"):
        plan_load(10, 4, -1)
    with pytest.raises(ValueError, match="stored_blocks = -1"):
        plan_store(10, 4, -1)
    for first, tokens, chunk in ((4, 4, 2), (-1, 4, 2), (0, 4, 0)):
        with pytest.raises(ValueError, match="first_token"):
            prefill_chunks(first, tokens, chunk)


def test_a_run_knows_its_end() -> None:
    assert BlockRun(3, 4).end == 7
