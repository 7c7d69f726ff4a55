"""What must be equal for KV to be exchangeable, and its id.

The id is the 16-byte BLAKE2b digest of the canonical spec: the fields below but `entry` and `replicas`, as JSON with
sorted names, no spaces, ASCII. A mismatch in any field is another namespace, never a partial match.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal

from kvpool_proto.errors import BadNamespaceSpec
from kvpool_proto.geometry import slot_bytes_for
from kvpool_proto.keys import KEY_BYTES_MAX, KEY_BYTES_MIN

NAMESPACE_ID_BYTES = 16
PARTS_MAX = 1024
BLOCK_TOKENS_MAX = 1 << 16
PART_BYTES_MAX = 1 << 32
REPLICAS_MAX = 3
TEXT_CHARS_MAX = 1024
"""Longest text field of a spec."""

Entry = Literal["root", "any"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceSpec:
    """One kind of exchangeable KV. All sizes are per block of `block_tokens` tokens.

    layout: backend, ND or NZ, pieces per layer, their order; compared, never interpreted.
    entry: "root" if every chain starts at the root, "any" if chains may start anywhere (costs an index).
    replicas: copies wanted, each on a node of its own, as far as there are nodes and room.
    """

    model: str
    block_tokens: int
    part_bytes: int
    dtype: str
    tenant: str = "default"
    revision: str = ""
    quantisation: str = ""
    parts: int = 1
    layout: str = ""
    key_bytes: int = 16
    hash_scheme: str = ""
    hash_seed: str = ""
    entry: Entry = "root"
    replicas: int = 1

    def check(self) -> None:
        """Raise BadNamespaceSpec, naming the field, unless the spec can be registered."""
        for name, low, high in (
            ("block_tokens", 1, BLOCK_TOKENS_MAX),
            ("parts", 1, PARTS_MAX),
            ("part_bytes", 1, PART_BYTES_MAX),
            ("key_bytes", KEY_BYTES_MIN, KEY_BYTES_MAX),
            ("replicas", 1, REPLICAS_MAX),
        ):
            if not low <= getattr(self, name) <= high:
                raise BadNamespaceSpec(f"{name} = {getattr(self, name)}: {low} to {high}")
        for name, value in asdict(self).items():
            if isinstance(value, str) and len(value) > TEXT_CHARS_MAX:
                raise BadNamespaceSpec(f"{name} has {len(value)} characters: at most {TEXT_CHARS_MAX}")
        for name in ("model", "dtype", "tenant"):
            if not getattr(self, name):
                raise BadNamespaceSpec(f"{name} is empty")
        if self.entry not in ("root", "any"):
            raise BadNamespaceSpec(f"entry = {self.entry!r}: root or any")

    @property
    def id(self) -> bytes:
        """The 16-byte id."""
        fields = asdict(self)
        del fields["entry"], fields["replicas"]
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.blake2b(canonical.encode(), digest_size=NAMESPACE_ID_BYTES, person=b"kvpool-ns").digest()

    @property
    def slot_bytes(self) -> int:
        """Room for one part of one block."""
        return slot_bytes_for(self.part_bytes)
