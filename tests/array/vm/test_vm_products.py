"""The VM's matrix product against float64, over sizes around every tile and all orders of both operands."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vm_forms import encode

import graphwright as gw
from graphwright.array import float32
from graphwright.array.vm.encode.operands import View
from graphwright.array.vm.running.segment import VmSegment

GUARD = np.float32(-77.0)


def view(a: np.ndarray) -> View:
    return View(float32, a.shape, tuple(s // 4 for s in a.strides), a.ctypes.data)


def laid(rng: np.random.Generator, rows: int, cols: int, order: str) -> np.ndarray:
    """A matrix row by row, column by column, or every second entry of a larger one."""
    if order == "C":
        return rng.normal(size=(rows, cols)).astype("f4")
    if order == "F":
        return rng.normal(size=(cols, rows)).astype("f4").T
    return rng.normal(size=(2 * rows, 2 * cols)).astype("f4")[::2, ::2]


def product(op: str, *operands: np.ndarray) -> np.ndarray:
    m, n = operands[0].shape[0], operands[1].shape[0 if op == "linear" else 1]
    memory = np.full(m * n + 32, GUARD)
    out = memory[16 : 16 + m * n].reshape(m, n)
    rows = encode(op, [view(out)], [view(a) for a in operands], {})
    assert rows is not None
    VmSegment([rows])()
    assert (memory[:16] == GUARD).all()
    assert (memory[16 + m * n :] == GUARD).all()
    return out


SIZES = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 100]))


@settings(deadline=None)
@given(
    SIZES,
    SIZES,
    st.one_of(SIZES, st.sampled_from([255, 256, 257, 513])),
    st.sampled_from("CFS"),
    st.sampled_from("CFS"),
)
def test_matmul_of_any_size_and_layout_matches_aten(m: int, n: int, k: int, a_order: str, b_order: str) -> None:
    rng = np.random.default_rng(m * 1000 + n)
    a, b = laid(rng, m, k, a_order), laid(rng, k, n, b_order)
    truth = a.astype("f8") @ b.astype("f8")
    limit = np.abs(a).astype("f8") @ np.abs(b) * (k + 1) * 2.0**-24
    assert (np.abs(product("matmul", a, b) - truth) <= limit).all()


@pytest.mark.parametrize("a_order", ["C", "F"])
@pytest.mark.parametrize("b_order", ["C", "F"])
@pytest.mark.parametrize(("m", "n", "k"), [(395, 165, 300), (27, 161, 1027), (193, 300, 19)])
def test_strided_operands_are_packed(m: int, n: int, k: int, a_order: str, b_order: str) -> None:
    rng = np.random.default_rng(k)
    a, b = laid(rng, m, k, a_order), laid(rng, k, n, b_order)
    limit = np.abs(a).astype("f8") @ np.abs(b) * (k + 1) * 2.0**-24
    assert (np.abs(product("matmul", a, b) - a.astype("f8") @ b.astype("f8")) <= limit).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (4, 8, 2), (13, 33, 300), (12, 32, 256), (7, 40, 600)])
def test_linear_adds_its_bias_once(m: int, n: int, k: int, bias: bool) -> None:
    rng = np.random.default_rng(0)
    x, w, b = (
        rng.normal(size=(m, k)).astype("f4"),
        rng.normal(size=(n, k)).astype("f4"),
        rng.normal(size=n).astype("f4"),
    )
    truth = x.astype("f8") @ w.astype("f8").T + (b if bias else 0)
    found = product("linear", x, w, *([b] if bias else []))
    np.testing.assert_allclose(found, truth, atol=1e-6 * k, rtol=1e-5)


def test_nan_and_infinity_stay_in_their_row() -> None:
    a, b = np.ones((20, 40), "f4"), np.ones((40, 35), "f4")
    a[3, 5], a[4, 6] = np.nan, np.inf
    found = product("matmul", a, b)
    assert np.isnan(found[3]).all()
    assert (found[4] == np.inf).all()
    assert (np.delete(found, [3, 4], 0) == 40).all()


def test_one_column_of_a_column_major_matrix_matches_aten() -> None:
    a, b = np.arange(12, dtype="f4").reshape(3, 4), np.asfortranarray(np.arange(4, dtype="f4").reshape(4, 1))
    assert product("matmul", a, b).tolist() == (a @ b).tolist()


@pytest.mark.parametrize("shape", [(1, 1), (19, 1), (1, 4)])
@pytest.mark.parametrize("n", [3, 19, 70])
def test_products_of_a_repeated_column_or_row(shape, n):
    """An expanded operand has a stride of 0 along k, which the loop takes for strips of another layout."""
    p = gw.trace(lambda g, y: g.expand(19, 4) @ y.transpose(0, 1), np.zeros(shape, "f4"), np.zeros((n, 4), "f4"))
    rng = np.random.default_rng(0)
    g, y = rng.normal(size=shape).astype("f4"), rng.normal(size=(n, 4)).astype("f4")
    found = p.compile(g=shape, y=y.shape, executor="vm")(g=g, y=y)["out"]
    np.testing.assert_allclose(found, np.broadcast_to(g, (19, 4)) @ y.T, rtol=1e-5, atol=1e-5)


def test_a_product_of_one_column_and_one_row_has_any_stride():
    p = gw.trace(lambda x, y: x.unsqueeze(1) @ y.unsqueeze(0), np.zeros(19, "f4"), np.zeros(70, "f4"))
    x, y = np.arange(19, dtype="f4"), np.arange(70, dtype="f4")
    np.testing.assert_array_equal(p.compile(x=(19,), y=(70,), executor="vm")(x=x, y=y)["out"], np.outer(x, y))
