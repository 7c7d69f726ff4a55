"""Blocks out of a DynamicCache and into one: a small random model, a namespace in memory, bits compared."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
)

from kvpool_client.connectors.plan import prefill_chunks  # noqa: E402
from kvpool_client.connectors.transformers import (  # noqa: E402
    TransformersConnector,
    UnsupportedCache,
    build_cache,
    check_transformers,
    copy_blocks,
    fingerprint,
    keys_of,
    namespace_of,
    shape_of,
)
from kvpool_client.devices.base import Layout, Rows  # noqa: E402
from kvpool_client.devices.cpu import CpuDevice  # noqa: E402
from kvpool_proto.geometry import slot_bytes_for  # noqa: E402
from unit.sdk_double import PoolDouble  # noqa: E402

BLOCK_TOKENS = 4
PROMPT = [(7 * i + i * i) % 90 + 3 for i in range(22)]


def tiny_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(5)
    return LlamaForCausalLM(tiny_config()).eval()


class MemoryNamespace:
    """Namespace of the SDK, in a dict: key -> slot. Copies with the real device."""

    def __init__(self, part_bytes: int, key_bytes: int) -> None:
        self.slots: dict[bytes, np.ndarray[Any, Any]] = {}
        self.load_at_most = 1 << 30
        self._part_bytes = part_bytes
        self._key_bytes = key_bytes

    def _keys(self, chain: bytes) -> list[bytes]:
        return [chain[i : i + self._key_bytes] for i in range(0, len(chain), self._key_bytes)]

    def lookup(self, chain: bytes, skip: int = 0) -> Any:
        keys = self._keys(chain)[skip:]
        hit = next((i for i, key in enumerate(keys) if key not in self.slots), len(keys))
        return _Hit(keys[:hit], "" if hit == len(keys) else "unknown_key")

    def load(self, hit: Any, destination: Layout) -> Any:
        good = hit.keys[: self.load_at_most]
        if good:
            buffer = CpuDevice().bind(destination, self._part_bytes, writable=True)
            buffer.scatter(0, np.stack([self.slots[key] for key in good]))
        return SimpleNamespace(blocks=len(good), reason="" if len(good) == hit.blocks else "verify_failed")

    def store(self, chain: bytes, source: Layout) -> Any:
        keys = self._keys(chain)
        slots = np.zeros((len(keys), slot_bytes_for(self._part_bytes)), dtype=np.uint8)
        CpuDevice().bind(source, self._part_bytes, writable=False).gather(0, slots)
        new = [i for i, key in enumerate(keys) if key not in self.slots]
        self.slots |= {keys[i]: slots[i] for i in new}
        return SimpleNamespace(stored_blocks=len(new))


class _Hit:
    def __init__(self, keys: list[bytes], reason: str) -> None:
        self.keys, self.reason, self.blocks = keys, reason, len(keys)

    def __enter__(self) -> _Hit:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class MemoryPool:
    """KVPool of the SDK with one namespace in memory."""

    def __init__(self) -> None:
        self.opened: MemoryNamespace | None = None

    def namespace(self, spec: Any) -> MemoryNamespace:
        spec.check()
        self.opened = self.opened or MemoryNamespace(spec.part_bytes, spec.key_bytes)
        return self.opened


def connector(pool: Any, revision: str = "r1") -> TransformersConnector:
    return TransformersConnector(
        pool,
        tiny_config(),
        model="tiny",
        revision=revision,
        dtype=torch.float32,
        block_tokens=BLOCK_TOKENS,
    )


@torch.inference_mode()
def prefill(model: Any, tokens: Sequence[int], cache: DynamicCache, first: int = 0) -> Any:
    """The logits of the last token, in chunks of a block."""
    logits = None
    for start, end in prefill_chunks(first, len(tokens), BLOCK_TOKENS):
        ids = torch.tensor([tokens[start:end]])
        logits = model(input_ids=ids, cache=cache, use_cache=True).logits[0, -1]
    return logits


def test_a_part_is_the_pieces_layer_by_layer(model: Any) -> None:
    shape = shape_of(model.config, BLOCK_TOKENS, torch.float32)
    assert (shape.layers, shape.kv_heads, shape.head_dim, shape.pieces) == (3, 2, 16, 6)
    cache = DynamicCache(config=model.config)
    prefill(model, PROMPT, cache)
    parts = torch.zeros((2, shape.part_bytes), dtype=torch.uint8)
    copy_blocks(cache, shape, 3, shape.as_pages(parts), torch.arange(2))
    for block in range(2):
        tokens = slice((3 + block) * BLOCK_TOKENS, (4 + block) * BLOCK_TOKENS)
        pieces = [half[0, :, tokens].numpy().tobytes() for layer in cache.layers for half in (layer.keys, layer.values)]
        assert parts[block].numpy().tobytes() == b"".join(pieces)


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [6, 2, 5, 0, 3], [4]])
def test_a_resumed_prompt_has_the_logits_of_a_cold_one(model: Any, rows: list[int]) -> None:
    shape = shape_of(model.config, BLOCK_TOKENS, torch.float32)
    cold = DynamicCache(config=model.config)
    expected = prefill(model, PROMPT, cold)
    pages = shape.paged(7)
    copy_blocks(cold, shape, 0, pages, torch.tensor(rows))
    resumed = build_cache(model.config, shape, pages, torch.tensor(rows))
    pages.zero_()  # the cache has its own copy
    assert resumed.get_seq_length() == len(rows) * BLOCK_TOKENS
    assert torch.equal(prefill(model, PROMPT, resumed, len(rows) * BLOCK_TOKENS), expected)
    for layer, other in zip(resumed.layers, cold.layers, strict=True):
        assert torch.equal(layer.keys, other.keys)
        assert torch.equal(layer.values, other.values)


def test_wrong_blocks_change_the_logits(model: Any) -> None:
    """The comparison above can fail."""
    shape = shape_of(model.config, BLOCK_TOKENS, torch.float32)
    cold = DynamicCache(config=model.config)
    expected = prefill(model, PROMPT, cold)
    pages = shape.paged(5)
    copy_blocks(cold, shape, 0, pages, torch.arange(5))
    swapped = build_cache(model.config, shape, pages, torch.tensor([1, 0, 2, 3, 4]))
    assert not torch.equal(prefill(model, PROMPT, swapped, 20), expected)


def test_store_and_load_through_a_namespace(model: Any) -> None:
    pool = MemoryPool()
    user = connector(pool)
    assert user.load(PROMPT).tokens == 0
    cold = DynamicCache(config=model.config)
    expected = prefill(model, PROMPT, cold)
    stored = user.store(PROMPT, cold)
    assert stored is not None
    assert stored.stored_blocks == 5
    loaded = connector(pool).load(PROMPT)
    assert (loaded.tokens, loaded.reason) == (20, "")
    assert torch.equal(prefill(model, PROMPT, loaded.cache, 20), expected)


def test_a_hit_leaves_a_token_to_compute(model: Any) -> None:
    pool = MemoryPool()
    user = connector(pool)
    cache = DynamicCache(config=model.config)
    prefill(model, PROMPT, cache)
    user.store(PROMPT, cache)
    assert user.load(PROMPT[:20]).tokens == 16
    assert user.load(PROMPT[:4]).tokens == 0
    assert user.load(PROMPT[:1]).tokens == 0


def test_the_next_turn_stores_what_is_new_through_the_real_sdk(model: Any, tmp_path: Path) -> None:
    double = PoolDouble(tmp_path)
    try:
        with double.connect() as pool:
            user = connector(pool)
            first = DynamicCache(config=model.config)
            prefill(model, PROMPT[:9], first)
            assert user.store(PROMPT[:9], first).stored_blocks == 2
            loaded = user.load(PROMPT)
            assert (loaded.tokens, loaded.reason) == (8, "unknown_key")
            expected = prefill(model, PROMPT, loaded.cache, 8)
            stored = user.store(PROMPT, loaded.cache, loaded.tokens)
            assert (stored.stored_blocks, stored.existing_blocks, stored.reason) == (3, 2, "")
            assert user.store(PROMPT, loaded.cache, stored_tokens=20) is None
            again = user.load(PROMPT)
            assert again.tokens == 20
            assert torch.equal(prefill(model, PROMPT, again.cache, 20), expected)
    finally:
        double.stop()


def test_a_pool_that_is_away_or_switched_off_is_a_miss(model: Any, tmp_path: Path) -> None:
    double = PoolDouble(tmp_path)
    try:
        with double.connect() as pool:
            user = connector(pool)
            assert pool.flush(20_000)  # attached
            cold = DynamicCache(config=model.config)
            expected = prefill(model, PROMPT, cold)
            for away, back, reason in (
                (lambda: double.node.set_bypass(7), lambda: double.node.set_bypass(0), "bypassed"),
                (double.stop_master, lambda: double.start_master(double.epoch + 1), "unreachable"),
            ):
                away()
                loaded = user.load(PROMPT)
                assert (loaded.tokens, loaded.reason, user.store(PROMPT, cold).reason) == (0, reason, reason)
                assert torch.equal(prefill(model, PROMPT, loaded.cache), expected)
                back()
            end_s = time.perf_counter() + 20
            while user.load(PROMPT).reason == "unreachable":
                assert time.perf_counter() < end_s
                double.now_ms += 200
            assert user.store(PROMPT, cold).stored_blocks == 5
            assert user.load(PROMPT).tokens == 20
    finally:
        double.stop()


def test_a_prefix_that_went_meanwhile_is_stored_again(model: Any) -> None:
    pool = MemoryPool()
    user = connector(pool)
    cache = DynamicCache(config=model.config)
    prefill(model, PROMPT, cache)
    user.store(PROMPT[:9], cache)
    assert pool.opened is not None
    pool.opened.slots.clear()
    assert user.store(PROMPT, cache, stored_tokens=8).stored_blocks == 5


def test_a_load_that_breaks_off_gives_its_good_head(model: Any) -> None:
    pool = MemoryPool()
    user = connector(pool)
    cold = DynamicCache(config=model.config)
    expected = prefill(model, PROMPT, cold)
    user.store(PROMPT, cold)
    assert pool.opened is not None
    for good in (0, 2):
        pool.opened.load_at_most = good
        loaded = user.load(PROMPT)
        assert (loaded.tokens, loaded.reason) == (good * BLOCK_TOKENS, "verify_failed")
        assert torch.equal(prefill(model, PROMPT, loaded.cache, loaded.tokens), expected)


def test_pages_and_parts_hold_the_same_bytes(model: Any) -> None:
    """What an engine's paged rows store is what a contiguous buffer loads."""
    shape = shape_of(model.config, BLOCK_TOKENS, torch.float32)
    namespace = MemoryNamespace(shape.part_bytes, 16)
    cache = DynamicCache(config=model.config)
    prefill(model, PROMPT, cache)
    pages, rows = shape.paged(8), torch.tensor([5, 1, 7])
    copy_blocks(cache, shape, 1, pages, rows)
    namespace.store(bytes(range(48)), Rows([page.flatten(1) for page in pages], rows))
    parts = torch.empty((3, shape.part_bytes), dtype=torch.uint8)
    copy_blocks(cache, shape, 1, shape.as_pages(parts), torch.arange(3))
    for slot, part in zip(namespace.slots.values(), parts, strict=True):
        assert slot[: shape.part_bytes].tobytes() == part.numpy().tobytes()


def test_a_cache_that_is_too_short_is_refused(model: Any) -> None:
    shape = shape_of(model.config, BLOCK_TOKENS, torch.float32)
    cache = DynamicCache(config=model.config)
    prefill(model, PROMPT[:7], cache)
    with pytest.raises(ValueError, match="7 tokens"):
        copy_blocks(cache, shape, 0, shape.paged(2), torch.arange(2))
    with pytest.raises(ValueError, match="0 tokens"):
        copy_blocks(DynamicCache(config=model.config), shape, 0, shape.paged(1), torch.arange(1))


def test_unknown_caches_are_refused_in_words() -> None:
    check_transformers()
    with pytest.raises(UnsupportedCache, match=r"transformers 4\.57\.1 is installed"):
        check_transformers("4.57.1")
    sliding = MistralConfig(num_hidden_layers=2, sliding_window=8)
    with pytest.raises(UnsupportedCache, match="DynamicSlidingWindowLayer"):
        shape_of(sliding, BLOCK_TOKENS, torch.float32)


def test_what_tells_kv_apart_tells_namespaces_apart(model: Any) -> None:
    shape = shape_of(model.config, BLOCK_TOKENS, torch.float32)
    spec = namespace_of(shape, model="tiny", revision="r1")
    spec.check()
    assert spec.part_bytes == shape.part_bytes == 2 * 3 * 2 * 16 * 4 * BLOCK_TOKENS
    half = shape_of(model.config, BLOCK_TOKENS, torch.bfloat16)
    others = [
        namespace_of(shape, model="tiny", revision="r2"),
        namespace_of(shape, model="tiny", revision="r1", tenant="b"),
        namespace_of(half, model="tiny", revision="r1"),
    ]
    assert len({spec.id, *(other.id for other in others)}) == 4
    assert keys_of(spec, PROMPT) != keys_of(others[0], PROMPT)


def test_fingerprint_sees_names_sizes_and_sampled_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = bytearray(np.random.default_rng(1).bytes(1 << 20))
    (tmp_path / "model.safetensors").write_bytes(weights)
    first = fingerprint(tmp_path)
    assert first == fingerprint(tmp_path)
    weights[-(1 << 20) // 64] ^= 1  # where the last sample starts
    (tmp_path / "model.safetensors").write_bytes(weights)
    second = fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    third = fingerprint(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "other.json")
    assert len({first, second, third, fingerprint(tmp_path)}) == 4
