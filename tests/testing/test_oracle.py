"""The value harness tells apart what must be told apart."""

from __future__ import annotations

import numpy as np
import pytest

from graphwright.array import bfloat16, empty, float16, float32, float64
from graphwright.testing.oracle import ValueMismatch, as_numpy, assert_bits, assert_close, poisoned, strided

NAN = float("nan")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ([1.0, 2.0], [1.0, 2.1]),
        ([1.0], [1.0, 1.0]),
        ([NAN], [1.0]),
        ([1.0], [NAN]),
        ([np.inf], [-np.inf]),
        ([np.inf], [1e30]),
        ([1, 2], [1, 3]),
        ([1], [1.0]),
    ],
)
def test_assert_close_refuses_different_values(ours: list, theirs: list) -> None:
    with pytest.raises(ValueMismatch):
        assert_close(np.array(ours), np.array(theirs))


def test_assert_close_accepts_nan_and_infinity_at_equal_indices() -> None:
    assert_close(np.array([NAN, np.inf, 1.0]), np.array([NAN, np.inf, 1.0 + 1e-9]))


@pytest.mark.parametrize(("ours", "theirs"), [([0.0], [-0.0]), ([1.0], [np.nextafter(1, 2)]), ([NAN], [0.0])])
def test_assert_bits_refuses_different_bits(ours: list, theirs: list) -> None:
    with pytest.raises(ValueMismatch):
        assert_bits(np.array(ours), np.array(theirs))
    with pytest.raises(ValueMismatch):
        assert_bits(np.zeros(2), np.zeros(2, np.float32))
    assert_bits(np.array([NAN, -0.0]), np.array([NAN, -0.0]))


@pytest.mark.parametrize("how", ["plain", "permuted", "sliced"])
def test_strided_arrays_have_the_given_values(how: str) -> None:
    host = np.arange(12.0).reshape(3, 4)
    array = strided(host, how)
    assert np.array_equal(array.to_numpy(), host)
    assert array.contiguous == (how == "plain")


def test_expanded_arrays_repeat_their_first_row() -> None:
    array = strided(np.arange(6.0).reshape(3, 2), "expanded")
    assert array.strides[0] == 0
    assert array.to_numpy().tolist() == [[0, 1]] * 3


@pytest.mark.parametrize("kind", [float64, float32, float16, bfloat16])
def test_the_poison_value_is_nan_in_every_float_dtype(kind) -> None:
    assert np.isnan(as_numpy(poisoned(empty((3, 5), kind)))).all()
