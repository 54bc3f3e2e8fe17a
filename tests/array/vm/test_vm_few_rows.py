"""Products with stored weights, float32, bfloat16 and int8, and their threads; float64 is the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vm_forms import encode

from graphwright.array import bfloat16, float32, int8
from graphwright.array.vm.code import FEW, GROUP, STRIPS, WORK, ZEROS, Code
from graphwright.array.vm.encode.operands import View
from graphwright.array.vm.encode.products import SHORT
from graphwright.array.vm.encode.share import cut
from graphwright.array.vm.running import segment
from graphwright.array.vm.running.segment import VmSegment

SIZES = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 129, 300]))


def narrow(x: np.ndarray) -> np.ndarray:
    """Float32 as bits of bfloat16, cut off."""
    return (np.ascontiguousarray(x, "f4").view("u4") >> 16).astype("u2")


def wide(bits: np.ndarray) -> np.ndarray:
    return (bits.astype("u4") << 16).view("f4")


def view(a: np.ndarray) -> View:
    kind = bfloat16 if a.dtype == np.uint16 else float32
    return View(kind, a.shape, tuple(s // a.itemsize for s in a.strides), a.ctypes.data)


def linear(x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None) -> tuple[np.ndarray, Code]:
    """The VM's product, between guards that must stay, and the code it ran."""
    n = x.shape[0] * w.shape[0]
    memory = np.full(n + 32, np.float32(-77.0))
    out = memory[16 : 16 + n].reshape(x.shape[0], w.shape[0])
    rows = encode("linear", [view(out)], [view(a) for a in (x, w, b) if a is not None], {})
    assert rows is not None
    VmSegment([rows])()
    assert (memory[:16] == -77).all()
    assert (memory[16 + n :] == -77).all()
    return out, Code(rows[0][0])


@settings(deadline=None)
@given(st.integers(1, 9), SIZES, SIZES, st.sampled_from(["f32", "bf16"]), st.booleans(), st.booleans())
def test_products_match_float64(m: int, n: int, k: int, kind: str, biased: bool, spread: bool) -> None:
    rng = np.random.default_rng(m * 1000 + n + k)
    whole = np.full((m, 2 * k if spread else k), np.nan, "f4")  # memory between rows of x is not read
    x = whole[:, :k]
    x[:] = rng.normal(size=(m, k))
    memory = np.full(n * k + 64, np.nan, "f4")  # nor around w
    memory[32 : 32 + n * k] = rng.normal(size=n * k)
    bits = narrow(memory)
    w = (bits if kind == "bf16" else memory)[32 : 32 + n * k].reshape(n, k)
    values = wide(w) if kind == "bf16" else w
    b = rng.normal(size=n).astype("f4") if biased else None
    made, code = linear(x, w, b)
    assert (code is Code.PRODUCT) == (kind == "f32" and (m > FEW or (m > 2 and n > 1 and k <= SHORT)))
    start = np.zeros(n) if b is None else b.astype("f8")
    truth = x.astype("f8") @ values.astype("f8").T + start
    limit = (np.abs(x).astype("f8") @ np.abs(values.astype("f8")).T + np.abs(start)) * (k + 2) * 2.0**-24
    assert (np.abs(made - truth) <= limit).all()


def quantised(x: np.ndarray, q: np.ndarray, scales: np.ndarray, b: np.ndarray | None = None) -> tuple[np.ndarray, Code]:
    """The VM's product with q · scales, and the code it ran."""
    made = np.full((x.shape[0], q.shape[0]), np.nan, "f4")
    ins = [
        view(x),
        View(int8, q.shape, (q.shape[1], 1), q.ctypes.data),
        *(view(a) for a in (scales, b) if a is not None),
    ]
    rows = encode("linear_int8", [view(made)], ins, {"group": GROUP})
    assert rows is not None
    VmSegment([rows])()
    return made, Code(rows[0][0])


def spread(per_group: np.ndarray, k: int) -> np.ndarray:
    """A number per group, for each entry."""
    return np.repeat(per_group.astype("f8"), GROUP, axis=1)[:, :k]


@settings(deadline=None)
@given(st.integers(1, 9), SIZES, SIZES, st.booleans())
def test_int8_products_match_float64(m: int, n: int, k: int, biased: bool) -> None:
    rng = np.random.default_rng(m * 1000 + n + k)
    groups = -(-k // GROUP)
    x, scales, b = (rng.normal(size=s).astype("f4") for s in ((m, k), (n, groups), n))
    x[:, : k // 3] *= 1000  # groups of x have steps of their own
    memory = rng.integers(-127, 128, n * k + 128).astype("i1")
    q = memory[64 : 64 + n * k].reshape(n, k)
    made, code = quantised(x, q, scales, b if biased else None)
    assert code is (Code.ROWS_I8 if m <= FEW else Code.PANELS_I8)
    w, start = q.astype("f8") * spread(scales, k), b.astype("f8") if biased else np.zeros(n)
    limit = (np.abs(x).astype("f8") @ np.abs(w).T + np.abs(start)) * (k + 4) * 2.0**-24
    if code is Code.ROWS_I8:  # x is rounded, to half a step of 1 / 32767 of its group
        padded = np.pad(np.abs(x), ((0, 0), (0, groups * GROUP - k))).reshape(m, groups, GROUP)
        limit += spread(padded.max(axis=2), k) / 65534 * 1.001 @ np.abs(w).T
    assert (np.abs(made - (x.astype("f8") @ w.T + start)) <= limit).all()


def test_int8_products_are_exact_if_x_fits_16_bits() -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-32767, 32768, (2, 130)).astype("f4")
    x[:, ::GROUP] = 32767
    q = rng.integers(-127, 128, (5, 130)).astype("i1")
    made, _ = quantised(x, q, np.ones((5, 3), "f4"))
    whole = x.astype("i8") @ q.astype("i8").T
    assert (np.abs(made - whole) <= np.abs(x) @ np.abs(q.astype("f4")).T * 2.0**-22).all()
    for value in (0.0, 1e-38):  # a group of nearly nothing
        x[:, GROUP : 2 * GROUP] = value
        few, _ = quantised(x, q, np.ones((5, 3), "f4"))
        rest = np.delete(x, np.s_[GROUP : 2 * GROUP], axis=1).astype("i8")
        assert np.allclose(few, rest @ np.delete(q, np.s_[GROUP : 2 * GROUP], axis=1).astype("i8").T, rtol=1e-5, atol=9)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_nonfinite_rows_give_nonfinite_results(value: float) -> None:
    rng = np.random.default_rng(0)
    x, q = rng.normal(size=(3, 150)).astype("f4"), rng.integers(-127, 128, (5, 150)).astype("i1")
    x[1, 149] = value
    made, code = quantised(x, q, np.ones((5, 3), "f4"))
    assert code is Code.ROWS_I8
    assert not np.isfinite(made[1]).any()
    assert np.isfinite(made[[0, 2]]).all()


@pytest.mark.parametrize("kind", ["bf16", "i8"])
def test_rows_too_long_for_the_scratch_are_packed(kind: str) -> None:
    each = WORK[{"bf16": 2, "i8": 1}[kind]]
    k = (STRIPS - ZEROS) // each * GROUP
    rng = np.random.default_rng(0)
    for terms, fits in ((k, True), (k + 1, False)):
        x, q = rng.normal(size=(1, terms)).astype("f4"), rng.integers(-127, 128, (3, terms)).astype("i1")
        if kind == "i8":
            made, code = quantised(x, q, np.ones((3, -(-terms // GROUP)), "f4"))
            assert code is (Code.ROWS_I8 if fits else Code.PANELS_I8)
        else:
            made, code = linear(x, narrow(q.astype("f4")))
            assert code is (Code.ROWS_BF16 if fits else Code.PANELS_BF16)
        np.testing.assert_allclose(made, x.astype("f8") @ q.astype("f8").T, atol=0.5)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_nonfinite_rows_do_not_affect_others(value: float) -> None:
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(7, 70)).astype("f4"), np.abs(rng.normal(size=(3, 70))).astype("f4")
    clean, _ = linear(x, narrow(w))
    w[3, 69] = value
    for weights in (w, narrow(w)):
        made, _ = linear(x, weights)
        assert not np.isfinite(made[:, 3]).any()
        assert np.isfinite(np.delete(made, 3, axis=1)).all()
    assert np.array_equal(np.delete(linear(x, narrow(w))[0], 3, axis=1), np.delete(clean, 3, axis=1))


@pytest.mark.parametrize("m", [1, 3, 40])
@pytest.mark.parametrize("kind", ["f32", "bf16", "i8"])
def test_bits_do_not_depend_on_threads(m: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(m)
    k, n = 520, 8200
    x, b = rng.normal(size=(m, k)).astype("f4"), rng.normal(size=n).astype("f4")
    w = rng.normal(size=(n, k)).astype("f4")
    scales = rng.normal(size=(n, -(-k // GROUP))).astype("f4")
    made = np.zeros((m, n), "f4")
    if kind == "i8":
        w = rng.integers(-127, 128, (n, k)).astype("i1")
        ins = [view(x), View(int8, w.shape, (k, 1), w.ctypes.data), view(scales), view(b)]
        rows = encode("linear_int8", [view(made)], ins, {"group": GROUP})
    else:
        w = narrow(w) if kind == "bf16" else w
        rows = encode("linear", [view(made)], [view(a) for a in (x, w, b)], {})
    assert rows is not None
    assert cut(rows).parts[0][0][:2] >= [Code.SHARED, 2]
    results = []
    for threads in (1, 3, 3, 3):  # more than some machines have cores
        monkeypatch.setattr(segment, "get_num_threads", lambda n=threads: n)
        made[:] = np.nan
        VmSegment([rows])()
        results.append(made.copy())
    assert all(np.array_equal(results[0], other) for other in results[1:])
    wide_w = w.astype("f8") * np.repeat(scales.astype("f8"), GROUP, axis=1)[:, :k] if kind == "i8" else w
    truth = x.astype("f8") @ (wide(w) if kind == "bf16" else wide_w).astype("f8").T + b
    np.testing.assert_allclose(results[0], truth, rtol=1e-3, atol=0.5 if kind == "i8" else 0.05)  # values of some 1e3


@pytest.mark.parametrize("kind", ["f32", "bf16", "i8"])
@pytest.mark.parametrize("k", [70, 256, 530])
def test_interleaved_rows_have_the_bits_of_single_rows(kind: str, k: int) -> None:
    rng = np.random.default_rng(k)
    x, w = rng.normal(size=(1, k)).astype("f4"), rng.normal(size=(11, k)).astype("f4")
    q, scales = rng.integers(-127, 128, (11, k)).astype("i1"), rng.normal(size=(11, -(-k // GROUP))).astype("f4")

    def product(at: slice) -> np.ndarray:
        if kind == "i8":
            return quantised(x, np.ascontiguousarray(q[at]), np.ascontiguousarray(scales[at]))[0]
        return linear(x, narrow(w[at]) if kind == "bf16" else np.ascontiguousarray(w[at]))[0]

    alone = np.concatenate([product(slice(r, r + 1)) for r in range(11)], axis=1)
    assert np.array_equal(product(slice(None)), alone)
