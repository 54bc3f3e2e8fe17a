"""The VM's attention of one query and cache rows, beside torch; what must not be read is NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vm_forms import encode

from graphwright.array import float32, int64
from graphwright.array.vm.code import Code
from graphwright.array.vm.encode.operands import View
from graphwright.array.vm.running.segment import BadIndex, VmSegment


def view(a: np.ndarray) -> View:
    kind = int64 if a.dtype == np.int64 else float32
    return View(kind, a.shape, tuple(s // a.itemsize for s in a.strides), a.ctypes.data)


def run(op: str, out: np.ndarray, ins: list[np.ndarray], **attrs: object) -> np.ndarray:
    rows = encode(op, [view(out)], [view(a) for a in ins], attrs)
    assert rows is not None
    VmSegment([rows])()
    return out


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, start: int, scale: float, window: int | None) -> np.ndarray:
    group = q.shape[1] // k.shape[1]
    tensors = [torch.tensor(t).double() for t in (q, np.repeat(k, group, 1), np.repeat(v, group, 1))]
    i, j = start + torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    seen = (j <= i) & (j > i - (window or 1 << 30))
    return torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=seen, scale=scale).numpy()


@settings(deadline=None)
@given(
    st.integers(1, 3), st.sampled_from([(4, 1), (4, 2), (6, 2), (3, 3)]),
    st.sampled_from([1, 2, 15, 16, 17, 33, 48, 70]), st.sampled_from([1, 8, 16, 20, 64]), st.sampled_from([3, 16, 40]),
    st.sampled_from([None, 1, 5, 16, 100]), st.integers(0, 9),
)  # fmt: skip
def test_sdpa_equals_torch_and_reads_no_row_past_the_length(
    batch: int,
    heads: tuple[int, int],
    length: int,
    width: int,
    depth: int,
    window: int | None,
    spare: int,
) -> None:
    rng = np.random.default_rng(length * 100 + width)
    h, g = heads
    q = rng.normal(size=(batch, h, 1, width)).astype("f4")
    k, v = (np.full((batch, g, length + spare, d), np.nan, "f4") for d in (width, depth))
    k[:, :, :length], v[:, :, :length] = (
        rng.normal(size=(batch, g, length, width)),
        rng.normal(size=(batch, g, length, depth)),
    )
    start = np.array(length - 1)
    made = run(
        "sdpa", np.full((batch, h, 1, depth), np.nan, "f4"), [q, k, v, start],
        scale=0.3, causal=True, window=window, optional=("q_start",),
    )  # fmt: skip
    truth = dense(q, k[:, :, :length], v[:, :, :length], int(start), 0.3, window)
    np.testing.assert_allclose(made, truth, rtol=1e-5, atol=1e-5)


def test_many_queries_use_the_general_kernel() -> None:
    for queries, code in ((1, Code.ATTEND_CACHED), (2, Code.ATTEND)):
        q = np.zeros((1, 2, queries, 4), "f4")
        rows = encode("sdpa", [view(q)], [view(q)] * 3, {"scale": 1.0, "causal": True, "window": None, "optional": ()})
        assert rows is not None
        assert rows[0][0] == code


@pytest.mark.parametrize("length", [0, 3, 5])
def test_append_writes_nothing_if_the_cache_is_full(length: int) -> None:
    rng = np.random.default_rng(0)
    cache = rng.normal(size=(2, 3, 6, 5)).astype("f4")
    rows = rng.normal(size=(2, 2, 3, 5)).astype("f4").transpose(0, 2, 1, 3)
    before = cache.copy()
    if length + 2 > 6:
        with pytest.raises(BadIndex):
            run("kv_append", cache, [cache, rows, np.array(length)])
    else:
        run("kv_append", cache, [cache, rows, np.array(length)])
        before[:, :, length : length + 2] = rows
    assert np.array_equal(cache, before)
