"""devices/cpu.py: every way through it moves exactly the bytes of the part, whatever the layout."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool_client.devices.base import Contiguous, Rows
from kvpool_client.devices.cpu import CpuDevice, byte_rows
from kvpool_proto.geometry import slot_bytes_for

DEVICE = CpuDevice()
GUARD = 0xA5


def bytes_at(address_mod: int, rows: int, stride: int, row_bytes: int, rng: np.random.Generator) -> Any:
    """Random uint8 (rows, row_bytes), `stride` bytes a row, its first byte `address_mod` bytes into a page."""
    raw = np.full(rows * stride + 8192, GUARD, dtype=np.uint8)
    start = (address_mod - raw.ctypes.data) % 4096
    view = raw[start : start + rows * stride].reshape(rows, stride)[:, :row_bytes]
    view[...] = rng.integers(0, 256, view.shape, dtype=np.uint8)
    return view


def expected(tensors: list[npt.NDArray[np.uint8]], ids: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.concatenate([tensor[ids] for tensor in tensors], axis=1)


geometries = st.fixed_dictionaries(
    {
        "row_bytes": st.lists(st.sampled_from([1, 48, 64, 512, 576, 4096, 5120]), min_size=1, max_size=5),
        "gap": st.sampled_from([0, 16, 512, 4096]),
        "offset": st.sampled_from([0, 1, 16, 64, 512]),
        "rows": st.integers(1, 12),
        "blocks": st.integers(0, 12),
        "side_by_side": st.integers(1, 3),
        "seed": st.integers(0, 2**32 - 1),
    }
)


@settings(max_examples=150, deadline=None)
@given(geometries)
def test_rows_round_trip(geometry: dict[str, Any]) -> None:
    rng = np.random.default_rng(geometry["seed"])
    rows = geometry["rows"]
    blocks = min(geometry["blocks"], rows)
    tensors = [bytes_at(geometry["offset"], rows, size + geometry["gap"], size, rng) for size in geometry["row_bytes"]]
    part_bytes = sum(geometry["row_bytes"])
    slot_bytes = slot_bytes_for(part_bytes)
    step = geometry["side_by_side"]
    memory = np.full((max(blocks, 1) * step, slot_bytes), GUARD, dtype=np.uint8)
    slots = memory[::step][:blocks]
    ids = rng.permutation(rows)[:blocks]
    want = expected(tensors, ids)

    DEVICE.bind(Rows(tensors, ids), part_bytes, writable=False).gather(0, slots)
    assert (slots[:, :part_bytes] == want).all()
    others = np.delete(memory, np.arange(blocks) * step, axis=0)
    assert (others == GUARD).all()

    back = [bytes_at(geometry["offset"], rows, size + geometry["gap"], size, rng) for size in geometry["row_bytes"]]
    before = [tensor.copy() for tensor in back]
    whole = [tensor.base.copy() for tensor in back]
    target = rng.permutation(rows)[:blocks]
    half = blocks // 2
    buffer = DEVICE.bind(Rows(back, target), part_bytes, writable=True)
    assert buffer.blocks == blocks
    buffer.scatter(0, slots[:half])
    buffer.scatter(half, slots[half:])
    assert (expected(back, target) == want).all()
    untouched = np.setdiff1d(np.arange(rows), target)
    for tensor, old, raw in zip(back, before, whole, strict=True):
        assert (tensor[untouched] == old[untouched]).all()
        tensor[...] = old  # then nothing at all has changed beside the rows
        assert (tensor.base == raw).all()


@pytest.mark.parametrize("part_bytes", [1, 4096, 5000, 12288])
def test_contiguous_round_trip(part_bytes: int) -> None:
    rng = np.random.default_rng(part_bytes)
    source = rng.integers(0, 256, (7, part_bytes), dtype=np.uint8)
    slots = np.zeros((5, slot_bytes_for(part_bytes)), dtype=np.uint8)
    DEVICE.bind(Contiguous(source), part_bytes, writable=False).gather(2, slots)
    assert (slots[:, :part_bytes] == source[2:]).all()
    assert not slots[:, part_bytes:].any()
    back = np.zeros_like(source)
    DEVICE.bind(Contiguous(back), part_bytes, writable=True).scatter(1, slots[:3])
    assert (back[1:4] == source[2:5]).all()
    assert not back[[0, 4, 5, 6]].any()


def test_tensors_on_both_sides_of_the_slots() -> None:
    """numpy takes the span for an overlap with the slots and copies once more; the bytes are the same."""
    memory = np.zeros(64 * 4096 + 4096, dtype=np.uint8)
    memory = memory[-memory.ctypes.data % 4096 :][: 64 * 4096].reshape(64, 4096)
    memory[:16] = np.arange(16, dtype=np.uint8)[:, None]
    memory[48:] = np.arange(48, 64, dtype=np.uint8)[:, None]
    slots = memory[16:48].reshape(16, 8192)
    ids = np.arange(16)[::-1]
    DEVICE.bind(Rows([memory[:16], memory[48:]], ids), 8192, writable=False).gather(0, slots)
    assert (slots[:, 0] == ids).all()
    assert (slots[:, -1] == ids + 48).all()
    DEVICE.bind(Rows([memory[:16], memory[48:]], np.arange(16)), 8192, writable=True).scatter(0, slots)
    assert (memory[:16, 7] == ids).all()
    assert (memory[48:, 7] == ids + 48).all()


def test_torch_tensors_of_dtypes_that_numpy_lacks() -> None:
    torch = pytest.importorskip("torch")
    layers = [torch.randn(6, 2, 16, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    part_bytes = 3 * 2 * 16 * 32 * 2
    slots = np.zeros((4, slot_bytes_for(part_bytes)), dtype=np.uint8)
    DEVICE.bind(Rows(layers, torch.tensor([5, 0, 3, 1])), part_bytes, writable=False).gather(0, slots)
    back = [torch.zeros(6, 2, 16, 32, dtype=torch.bfloat16) for _ in range(3)]
    DEVICE.bind(Rows(back, [5, 0, 3, 1]), part_bytes, writable=True).scatter(0, slots)
    for layer, copy in zip(layers, back, strict=True):
        assert torch.equal(layer[[5, 0, 3, 1]], copy[[5, 0, 3, 1]])
        assert not copy[[2, 4]].any()
    halves = torch.randn(2, 6, 512)  # K of [2, rows, ...]: a view with an offset
    assert (byte_rows(halves[1], False) == halves[1].numpy().view(np.uint8)).all()
    with pytest.raises(ValueError, match="not contiguous"):
        byte_rows(halves.transpose(1, 2), False)


def test_numpy_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match="neither a numpy array nor a torch tensor"):
        byte_rows([1, 2, 3], False)
    assert byte_rows(np.zeros((2, 3), dtype=np.float16), True).shape == (2, 6)


def test_what_does_not_fit_is_refused_in_words() -> None:
    rows = np.zeros((4, 4096), dtype=np.uint8)
    frozen = rows.copy()
    frozen.flags.writeable = False
    for layout, text in (
        (Contiguous(rows[:, :100]), "100 bytes, a part has 4096"),
        (Contiguous(np.asarray(frozen)), "read-only"),
        (Contiguous(np.zeros((0, 4096), dtype=np.uint8)), "no rows"),
        (Contiguous(np.zeros((4, 8192), dtype=np.uint8)[:, ::2]), "not contiguous"),
        (Contiguous(np.array([object()])), "no rows of bytes"),
        (Rows([rows, rows], [0]), "8192 bytes, a part 4096"),
        (Rows([], [0]), "0 bytes"),
        (Rows([rows], [4]), "the tensors have 4 rows"),
        (Rows([rows], [-1]), "from -1 to -1"),
        (Rows([rows], [[0]]), "integers"),
        (Rows([rows], [0.5]), "integers"),
    ):
        with pytest.raises(ValueError, match=text):
            DEVICE.bind(layout, 4096, writable=True)


def test_other_threads_run_during_a_copy() -> None:
    """The GIL is released: a thread that has to be let in counts on while a large copy runs."""
    rows = np.ones((512, 65536), dtype=np.uint8)
    slots = np.zeros((512, 65536), dtype=np.uint8)
    buffer = DEVICE.bind(Rows([rows], np.arange(512)), 65536, writable=True)
    whole = DEVICE.bind(Contiguous(rows), 65536, writable=True)
    turns, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0)  # gives the GIL away: nothing else does with this switch interval

    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)
    other = threading.Thread(target=count)
    try:
        other.start()
        for copy in (buffer.gather, buffer.scatter, whole.gather, whole.scatter):
            before = turns[0]
            copy(0, slots)
            assert turns[0] > before, copy
    finally:
        stop.set()
        other.join()
        sys.setswitchinterval(interval)
