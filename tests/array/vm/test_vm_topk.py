"""The k largest entries of rows by the VM: the order of a stable sort, with NaN as the largest number."""

from __future__ import annotations

import numpy as np
import pytest
from vm_forms import encode, view, vm

from graphwright.array import from_numpy
from graphwright.array.vm.code import Code
from graphwright.array.vm.encode.share import cut


def expected(x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """By a stable sort; ties, 0 and -0 among them, keep their order."""
    key = np.where(np.isnan(x), np.inf, x)
    order = np.stack([np.array(sorted(range(len(row)), key=lambda i: (not nan[i], -row[i])))
                      for row, nan in zip(key, np.isnan(x), strict=True)])[:, :k]  # fmt: skip
    return np.take_along_axis(x, order, 1), order


@pytest.mark.parametrize("k", [1, 2, 8, 33])
@pytest.mark.parametrize("columns", [1, 7, 16, 33, 200])
def test_rows_with_ties_and_nan_have_the_order_of_a_stable_sort(columns: int, k: int) -> None:
    rng, k = np.random.default_rng(columns), min(k, columns)
    for levels in (2, 5, 10_000):
        x = (rng.integers(-levels, levels, (40, columns)) / 4).astype("f4")
        x[rng.random(x.shape) < 0.1] = np.nan
        x[rng.random(x.shape) < 0.1] = -0.0
        x[rng.random(x.shape) < 0.05] = np.inf
        x[rng.random(x.shape) < 0.05] = -np.inf
        found = vm("topk", [from_numpy(x)], {"k": k, "axis": -1, "largest": True})
        assert found is not None
        for got, wanted in zip(found, expected(x, k), strict=True):
            np.testing.assert_array_equal(got.to_numpy(), wanted)


def test_rows_far_apart_and_several_axes() -> None:
    wide = np.random.default_rng(0).normal(size=(3, 4, 50)).astype("f4")
    array = from_numpy(wide)[:, :, :20]
    found = vm("topk", [array], {"k": 3, "axis": 2, "largest": True})
    assert found is not None
    values, ids = expected(wide[:, :, :20].reshape(12, 20), 3)
    np.testing.assert_array_equal(found[0].to_numpy().reshape(12, 3), values)
    np.testing.assert_array_equal(found[1].to_numpy().reshape(12, 3), ids)


@pytest.mark.parametrize("attrs", [{"k": 2, "axis": 0, "largest": True}, {"k": 2, "axis": 1, "largest": False}])
def test_other_axes_and_the_least_entries_are_left_to_aten(attrs: dict[str, object]) -> None:
    x = from_numpy(np.zeros((4, 4), "f4"))
    outs = [from_numpy(np.zeros((4, 2) if attrs["axis"] else (2, 4), t)) for t in ("f4", "i8")]
    assert encode("topk", [view(o) for o in outs], [view(x)], attrs) is None


def test_long_rows_are_shared_by_threads() -> None:
    rows, outs = view(from_numpy(np.zeros((4096, 256), "f4"))), [np.zeros((4096, 4), t) for t in ("f4", "i8")]
    made = encode("topk", [view(from_numpy(o)) for o in outs], [rows], {"k": 4, "axis": -1, "largest": True})
    assert made is not None
    assert cut(made).parts[0][0][0] == Code.SHARED
