"""Hugging Face transformers: blocks out of a `DynamicCache`, into one, and through the pool.

Rules
  - A block's part is [layer 0 K, layer 0 V, layer 1 K, ...]; each piece is [kv_heads, block_tokens, head_dim].
  - Copies go piece by piece for a whole run of blocks, never block by block.
  - Only models whose layers all keep full attention as plain K and V are taken; every other cache layout, and a
    transformers whose cache is not the one known here, is refused in words at set-up.
  - After set-up nothing here raises for the pool's sake: a miss is an empty cache, and the caller computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvpool_client.connectors.plan import plan_load, plan_store
from kvpool_client.devices.base import Contiguous
from kvpool_proto.geometry import kv_part_bytes
from kvpool_proto.keys import SCHEME, chain_of
from kvpool_proto.namespace import NamespaceSpec

if TYPE_CHECKING:
    from kvpool_client.sdk import KVPool, Namespace, StoreResult

KNOWN_MAJOR: Final = 5
LAYOUT: Final = "transformers/DynamicCache: by layer K, V; heads, tokens, dim"
_SAMPLES_PER_FILE: Final = 64
_SAMPLE_BYTES: Final = 4096


class UnsupportedCache(RuntimeError):
    """This transformers, or this model, keeps its cache in a way that the connector does not know."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The shape of one block of a model's KV. head_dim in elements; dtype of K and V."""

    layers: int
    kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: torch.dtype

    @property
    def pieces(self) -> int:
        """K and V of every layer."""
        return 2 * self.layers

    @property
    def dtype_name(self) -> str:
        """As geometry.py spells it, for example "float32"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def part_bytes(self) -> int:
        """Bytes of a block."""
        return kv_part_bytes(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_tokens=self.block_tokens,
            dtype=self.dtype_name,
        )

    def paged(self, rows: int) -> torch.Tensor:
        """Room for `rows` blocks as an engine keeps them: [pieces, rows, kv_heads, block_tokens, head_dim]."""
        shape = (self.pieces, rows, self.kv_heads, self.block_tokens, self.head_dim)
        return torch.empty(shape, dtype=self.dtype)

    def as_pages(self, parts: torch.Tensor) -> torch.Tensor:
        """The same memory as `paged`, seen in bytes of whole parts: `parts` is uint8 [rows, part_bytes], contiguous."""
        rows = parts.view(self.dtype).view(-1, self.pieces, self.kv_heads, self.block_tokens, self.head_dim)
        return rows.transpose(0, 1)


def check_transformers(version: str = transformers.__version__) -> None:
    """Raise UnsupportedCache, with the version in the text, unless the cache is laid out as this file expects."""
    if int(version.split(".", 1)[0]) != KNOWN_MAJOR:
        raise UnsupportedCache(f"transformers {version} is installed; this connector knows version {KNOWN_MAJOR}")
    probe = torch.arange(24.0).view(1, 2, 3, 4)
    cache: Any = DynamicCache()
    cache.update(probe, -probe, 0)
    layer: Any = cache.layers[0]
    if type(layer) is not DynamicLayer or not torch.equal(torch.cat(_pieces(cache)), torch.cat([probe, -probe])):
        raise UnsupportedCache(f"transformers {version} lays out DynamicCache in a way this connector does not know")


def shape_of(config: Any, block_tokens: int, dtype: torch.dtype) -> BlockShape:
    """The block shape of a model; config: its PreTrainedConfig.

    Raises UnsupportedCache unless every layer keeps plain, full K and V.
    """
    check_transformers()
    layers: list[Any] = DynamicCache(config=config).layers
    others = {type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer}
    if others or not layers:
        kinds = ", ".join(sorted(others)) or "no layers"
        raise UnsupportedCache(f"{config.model_type}: the cache has {kinds}; only full attention is taken")
    text = config.get_text_config(decoder=True)
    heads = int(text.num_attention_heads)
    return BlockShape(
        layers=len(layers),
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        block_tokens=block_tokens,
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        dtype=dtype,
    )


def fingerprint(folder: Path) -> str:
    """A digest (32 hex digits) of a model folder: name and size of every file, and bytes sampled all over the weights.

    Files of up to 256 KiB count in full. A sample tells revisions apart; it is no proof against a forger.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"kvpool-weights")
    for path in sorted(folder.iterdir()):
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        step = max(size // _SAMPLES_PER_FILE, _SAMPLE_BYTES)
        with path.open("rb") as file:
            for offset in range(0, size, step):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def namespace_of(shape: BlockShape, *, model: str, revision: str, tenant: str = "default") -> NamespaceSpec:
    """The namespace of a model's KV. revision: the weights' fingerprint; it also seeds the keys."""
    return NamespaceSpec(
        tenant=tenant,
        model=model,
        revision=revision,
        dtype=shape.dtype_name,
        block_tokens=shape.block_tokens,
        part_bytes=shape.part_bytes,
        layout=LAYOUT,
        hash_scheme=SCHEME,
        hash_seed=revision,
    )


def keys_of(spec: NamespaceSpec, tokens: Sequence[int]) -> bytes:
    """The chain of the whole blocks of `tokens` in that namespace."""
    return chain_of(tokens, spec.block_tokens, spec.key_bytes, spec.hash_seed)


def copy_blocks(
    cache: DynamicCache, shape: BlockShape, first_block: int, pages: torch.Tensor, rows: torch.Tensor
) -> None:
    """Copy blocks first_block, first_block + 1, ... of a cache of one sequence into pages[:, rows].

    pages: [pieces, rows, kv_heads, block_tokens, head_dim]; rows: int64, one per block. Raises ValueError when the
    cache holds fewer tokens than that, or more than one sequence.
    """
    start = first_block * shape.block_tokens
    end = start + len(rows) * shape.block_tokens
    pieces = _pieces(cache)
    sequences, tokens = (pieces[0].shape[0], pieces[0].shape[2]) if pieces else (1, 0)
    if sequences != 1 or tokens < end:
        raise ValueError(f"a cache of {sequences} sequences and {tokens} tokens: 1 and at least {end}")
    for page, piece in zip(pages, pieces, strict=True):
        blocks: torch.Tensor = piece[0, :, start:end].view(
            shape.kv_heads, len(rows), shape.block_tokens, shape.head_dim
        )
        page[rows] = blocks.transpose(0, 1)


def _pieces(cache: DynamicCache) -> list[torch.Tensor]:
    """K and V of all layers, each [sequences, kv_heads, tokens, head_dim]; none before the first token."""
    layers: list[Any] = cache.layers
    return [half for layer in layers if layer.is_initialized for half in (layer.keys, layer.values)]


def build_cache(config: Any, shape: BlockShape, pages: torch.Tensor, rows: torch.Tensor) -> DynamicCache:
    """A new cache whose leading tokens are the blocks pages[:, rows], in that order. Copies: pages may change later.

    config: the model's; pages and rows as for copy_blocks.
    """
    cache = DynamicCache(config=config)
    if len(rows) == 0:
        return cache
    layers: list[Any] = cache.layers
    for layer, keys, values in zip(layers, pages[0::2], pages[1::2], strict=True):
        # Set rather than handed to update(), which would copy everything once more.
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = _joined(keys, rows), _joined(values, rows)
    return cache


def _joined(page: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[rows, kv_heads, block_tokens, head_dim] as one sequence, [1, kv_heads, tokens, head_dim]: a single gather."""
    return page.transpose(0, 1)[:, rows].flatten(1, 2).unsqueeze(0)


@dataclass(frozen=True, slots=True)
class LoadedPrefix:
    """A cache that holds the first `tokens` tokens of a prompt; reason: why it holds no more (the SDK's words)."""

    cache: DynamicCache
    tokens: int
    reason: str


class TransformersConnector:
    """Loads and stores the prefix of a prompt for an engine that keeps no blocks of its own between requests.

    An engine that does (see deploy/demo/engine.py) uses the functions above and its own pages. Calls of one object
    may come from several threads.
    """

    def __init__(
        self,
        pool: KVPool,
        config: Any,
        *,
        model: str,
        revision: str,
        dtype: torch.dtype,
        block_tokens: int = 128,
        tenant: str = "default",
    ) -> None:
        """model, revision, tenant: see namespace_of. Raises UnsupportedCache, and BadNamespaceSpec from the SDK."""
        self.config = config
        self.shape = shape_of(config, block_tokens, dtype)
        self.spec = namespace_of(self.shape, model=model, revision=revision, tenant=tenant)
        self._namespace: Namespace = pool.namespace(self.spec)

    def load(self, tokens: Sequence[int]) -> LoadedPrefix:
        """The longest stored prefix of a prompt, at least one token short of it. Never raises for the pool's sake."""
        run = plan_load(len(tokens), self.shape.block_tokens, 0)
        if run.blocks == 0:
            return LoadedPrefix(DynamicCache(config=self.config), 0, "")
        chain = keys_of(self.spec, tokens)[: run.end * self.spec.key_bytes]
        with self._namespace.lookup(chain) as hit:
            if hit.blocks == 0:
                return LoadedPrefix(DynamicCache(config=self.config), 0, hit.reason)
            parts = torch.empty((hit.blocks, self.shape.part_bytes), dtype=torch.uint8)
            loaded = self._namespace.load(hit, Contiguous(parts))
        cache = build_cache(self.config, self.shape, self.shape.as_pages(parts), torch.arange(loaded.blocks))
        return LoadedPrefix(cache, loaded.blocks * self.shape.block_tokens, loaded.reason or hit.reason)

    def store(self, tokens: Sequence[int], cache: DynamicCache, stored_tokens: int = 0) -> StoreResult | None:
        """Store the whole blocks of a prompt; None if `stored_tokens`, what load() answered, are all of them.

        tokens: those whose KV the cache holds, in order. All blocks are handed in, since chains start at the root; the
        SDK writes those that the pool lacks, also such as went since load().
        """
        run = plan_store(len(tokens), self.shape.block_tokens, stored_tokens // self.shape.block_tokens)
        if run.blocks == 0:
            return None
        parts = torch.empty((run.end, self.shape.part_bytes), dtype=torch.uint8)
        copy_blocks(cache, self.shape, 0, self.shape.as_pages(parts), torch.arange(run.end))
        return self._namespace.store(keys_of(self.spec, tokens), Contiguous(parts))
