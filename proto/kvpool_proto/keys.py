"""Tokens and a seed to chained keys, for callers whose engine has no prefix hash of its own.

key[0] = H(seed, tokens of block 0), key[i] = H(key[i-1], tokens of block i): equal keys mean equal prefixes.
H is BLAKE2b (RFC 7693), a cryptographic hash from the standard library, so that keys neither collide by
accident nor can be made to collide by whoever writes the prompt. Engines with a hash of their own (vLLM,
MindIE, SGLang) hand in that one instead.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

KEY_BYTES_MIN = 8
KEY_BYTES_MAX = 32
SCHEME = "kvpool-blake2b-u32"


def check_key_bytes(key_bytes: int) -> None:
    """Raise ValueError unless keys may be that long."""
    if not KEY_BYTES_MIN <= key_bytes <= KEY_BYTES_MAX:
        raise ValueError(f"key_bytes = {key_bytes}: {KEY_BYTES_MIN} to {KEY_BYTES_MAX}")


def chain_of(tokens: Sequence[int], block_tokens: int, key_bytes: int = 16, seed: str = "") -> bytes:
    """The packed keys of the whole blocks of `tokens`; a tail shorter than a block has none.

    tokens: ids of 0 to 2^32 - 1. Returns len(tokens) // block_tokens * key_bytes bytes, first block first.
    Raises ValueError for a bad size and OverflowError for a token id out of range.
    """
    check_key_bytes(key_bytes)
    if block_tokens < 1:
        raise ValueError(f"block_tokens = {block_tokens}: at least 1")
    packed = memoryview(array("I", tokens)).cast("B")
    step = block_tokens * 4
    key = hashlib.blake2b(seed.encode(), digest_size=key_bytes, person=b"kvpool-seed").digest()
    keys: list[bytes] = []
    for start in range(0, len(tokens) // block_tokens * step, step):
        digest = hashlib.blake2b(key, digest_size=key_bytes, person=b"kvpool-block")
        digest.update(packed[start : start + step])
        key = digest.digest()
        keys.append(key)
    return b"".join(keys)
