"""The contract by itself: errors, keys, namespaces, geometry, and that enums mean the same on both sides."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from kvpool_master.core.messages import GoneReason, Reason, RunState
from kvpool_proto import pool_pb2 as pb
from kvpool_proto.convert import spec_from_message, spec_to_message
from kvpool_proto.errors import (
    BY_REASON,
    BadNamespaceSpec,
    BadSegment,
    KVPoolError,
    MessageTooLarge,
    SlotTooLarge,
    Unreachable,
)
from kvpool_proto.geometry import (
    check_segment,
    file_bytes,
    kv_part_bytes,
    mla_part_bytes,
    slab_bytes_for,
    slabs_offset,
    slot_bytes_for,
    slot_table_bytes,
    slots_per_slab,
)
from kvpool_proto.keys import chain_of
from kvpool_proto.namespace import NamespaceSpec
from kvpool_proto.status import CODES, from_rpc_error, trailing_metadata

SPEC = NamespaceSpec(model="m", block_tokens=128, part_bytes=2_949_120, dtype="bfloat16")
README = Path(__file__).parents[2] / "proto" / "README.md"


@pytest.mark.parametrize("error", BY_REASON.values())
def test_every_error_travels_with_its_reason(error: type[KVPoolError]) -> None:
    assert error.code in CODES
    rpc_error = SimpleNamespace(
        trailing_metadata=lambda: trailing_metadata(error("what happened")),
        code=lambda: CODES[error.code],
        details=lambda: "",
    )
    back = from_rpc_error(rpc_error)
    assert (type(back), str(back)) == (error, "what happened")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.UNAVAILABLE, Unreachable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Unreachable),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, MessageTooLarge),
    ],
)
def test_an_error_without_our_reason_is_grpcs_own(code: grpc.StatusCode, error: type[KVPoolError]) -> None:
    rpc_error = SimpleNamespace(trailing_metadata=lambda: None, code=lambda: code, details=lambda: "said gRPC")
    assert type(from_rpc_error(rpc_error)) is error


def test_the_readme_has_the_table_of_errors() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (\w+) \| (.+) \|$", README.read_text(), re.MULTILINE)
    assert rows == [(error.__name__, error.reason, error.code, error.action) for error in BY_REASON.values()]


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [(Reason, pb.Reason, "REASON_"), (GoneReason, pb.GoneReason, "GONE_"), (RunState, pb.RunState, "RUN_")],
)
def test_the_cores_enums_are_the_contracts(ours: type[Reason], theirs: object, prefix: str) -> None:
    items = {name.removeprefix(prefix): number for name, number in theirs.items()}  # type: ignore[attr-defined]
    items.pop("UNSPECIFIED", None)
    assert {one.name: one.value for one in ours} == items


def test_keys_are_chained_and_a_tail_has_none() -> None:
    tokens = list(range(1000))
    chain = chain_of(tokens, 128)
    assert len(chain) == 7 * 16
    assert chain_of(tokens[:512], 128) == chain[: 4 * 16]
    assert chain_of([1, *tokens[1:]], 128)[-16:] != chain[-16:]
    assert chain_of(tokens, 128, seed="other")[:16] != chain[:16]
    assert len(chain_of(tokens, 128, key_bytes=32)) == 7 * 32
    with pytest.raises(ValueError, match="key_bytes"):
        chain_of(tokens, 128, key_bytes=7)
    with pytest.raises(ValueError, match="block_tokens"):
        chain_of(tokens, 0)
    with pytest.raises(OverflowError):
        chain_of([1 << 32], 1)


def test_a_namespace_id_depends_on_every_field_but_those_of_storage() -> None:
    other = {
        "model": "n", "block_tokens": 64, "part_bytes": 1, "dtype": "int8", "tenant": "t", "revision": "r",
        "quantisation": "q", "parts": 2, "layout": "l", "key_bytes": 32, "hash_scheme": "s", "hash_seed": "0",
    }  # fmt: skip
    assert set(other) | {"entry", "replicas"} == set(asdict(SPEC))
    ids = {replace(SPEC, **{name: value}).id for name, value in other.items()}  # type: ignore[arg-type]
    assert len(ids | {SPEC.id}) == len(other) + 1
    assert replace(SPEC, entry="any").id == SPEC.id
    assert SPEC.id.hex() == "5d2995440b4b7349716b287f90c6428b", "ids must not change between versions"


def test_a_spec_travels() -> None:
    assert spec_from_message(spec_to_message(SPEC)) == SPEC
    with pytest.raises(BadNamespaceSpec, match="entry"):
        spec_from_message(pb.NamespaceSpec(model="m"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_tokens": 0}, {"parts": 0}, {"parts": 1025}, {"part_bytes": 0}, {"key_bytes": 7}, {"key_bytes": 33},
        {"model": ""}, {"dtype": ""}, {"tenant": ""}, {"layout": "x" * 1025}, {"entry": "some"},
    ],
)  # fmt: skip
def test_a_bad_spec_names_its_field(wrong: dict[str, object]) -> None:
    with pytest.raises(BadNamespaceSpec, match=next(iter(wrong))):
        replace(SPEC, **wrong).check()  # type: ignore[arg-type]


def test_sizes() -> None:
    assert kv_part_bytes(layers=30, kv_heads=3, head_dim=64, block_tokens=128, dtype="bfloat16") == 2_949_120
    assert mla_part_bytes(layer_dims=[576] * 61, block_tokens=128, dtype="bfloat16") == 8_994_816
    assert slot_bytes_for(1) == slot_bytes_for(4096) == 4096
    for slot_bytes in (4096, 8192, 2_949_120):
        for slots in (1, 31, 32, 33, 1000):
            slab = slab_bytes_for(slots, slot_bytes)
            assert slots_per_slab(slab, slot_bytes) == slots
            assert slot_table_bytes(slots) + slots * slot_bytes <= slab
    with pytest.raises(SlotTooLarge):
        slots_per_slab(1 << 20, 1 << 20)
    assert file_bytes(4 << 20, 1 << 20) == slabs_offset(4) + (4 << 20)
    assert check_segment(4 << 20, 1 << 20) == 4
    for size, slab in (
        (0, 1 << 20),
        (1 << 20, 4096),
        ((1 << 20) + 4096, 1 << 20),
        (1 << 62, 1 << 20),
        (1 << 20, 65_537),
    ):
        with pytest.raises(BadSegment):
            check_segment(size, slab)
