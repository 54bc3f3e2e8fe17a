"""Results written with non-temporal stores, against ATen: whole vectors, remainders, rows, unaligned addresses."""

from __future__ import annotations

import numpy as np
import pytest
from vm_forms import encode

from graphwright.array import from_numpy
from graphwright.array.vm.code import PAST
from graphwright.array.vm.encode.operands import CACHED, View
from graphwright.array.vm.running.segment import VmSegment
from graphwright.ops import OPS, compute

ROWS, COLS = 1030, CACHED // 4 // 1024 + 5
OPERANDS = {"add": 2, "silu": 1, "where": 3, "rms_norm": 1, "full_like": 1}


def aligned(shape: tuple[int, ...], off: int) -> np.ndarray:
    """NaNs that begin `off` bytes after a multiple of 64."""
    size = int(np.prod(shape))
    memory = np.full(size + 32, np.nan, "f4")
    start = (-memory.ctypes.data % 64 + off) // 4
    return memory[start : start + size].reshape(shape)


def view(a: np.ndarray) -> View:
    return View(from_numpy(a).dtype, a.shape, tuple(s // a.itemsize for s in a.strides), a.ctypes.data)


@pytest.mark.parametrize("off", [0, 4])
@pytest.mark.parametrize("name", OPERANDS)
def test_streamed_results_match_aten(name: str, off: int) -> None:
    rng = np.random.default_rng(0)
    shape = (ROWS, COLS) if name == "rms_norm" else (ROWS * COLS,)
    ins = [rng.normal(size=shape).astype("f4") for _ in range(OPERANDS[name])]
    attrs = {"value": 0.5} if name == "full_like" else {}
    if name == "where":
        ins[0] = ins[0] > 0
    if name == "rms_norm":
        ins.append(rng.normal(size=COLS).astype("f4"))
        attrs = {"eps": 1e-6, "unit_offset": False, "cast_before_scale": False}
    out = aligned(shape, off)
    rows = encode(name, [view(out)], [view(a) for a in ins], attrs)
    assert rows is not None
    assert rows[0][5] == PAST
    VmSegment([rows])()
    (truth,) = compute(OPS[name], [from_numpy(a) for a in ins], attrs)
    np.testing.assert_allclose(out, truth.to_numpy(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("off", [0, 4])
def test_streamed_loss_gradients_match_aten(off: int) -> None:
    rng = np.random.default_rng(0)
    scores, grad = rng.normal(size=(ROWS, COLS)).astype("f4"), rng.normal(size=ROWS).astype("f4")
    targets = rng.integers(0, COLS, ROWS)
    targets[3] = -100
    attrs = {"ignore_index": -100, "smoothing": 0.0}
    _, lse = (a.to_numpy() for a in compute(OPS["cross_entropy"], [from_numpy(scores), from_numpy(targets)], attrs))
    ins, out = [scores, targets, np.ascontiguousarray(lse), grad], aligned(scores.shape, off)
    rows = encode("cross_entropy_backward", [view(out)], [view(a) for a in ins], attrs)
    assert rows is not None
    VmSegment([rows])()
    (truth,) = compute(OPS["cross_entropy_backward"], [from_numpy(a) for a in ins], attrs)
    np.testing.assert_allclose(out, truth.to_numpy(), rtol=2e-5, atol=1e-6)
