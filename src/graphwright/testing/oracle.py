"""Compare values with a reference implementation: shape, dtype, NaN positions, signs of zero, closeness."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array import NDArray, from_numpy
from graphwright.array.storage import fill
from graphwright.autograd import Tensor
from graphwright.errors import GraphwrightError


class ValueMismatch(GraphwrightError, AssertionError):
    """Two implementations disagree; `where` is the first element that differs, `expected` the reference's value."""


def as_numpy(value: Any) -> np.ndarray:
    """Convert a tensor, array or number to numpy; dtypes that numpy lacks are converted to float32, exactly."""
    data = value.data if isinstance(value, Tensor) else value
    if isinstance(data, NDArray):
        return data.to_numpy()
    return np.asarray(data)


def assert_close(ours: Any, reference: Any, *, rtol: float = 1e-6, atol: float = 0.0, what: str = "") -> None:
    """Check equal shapes, NaN and infinities at the same indices, and |ours - reference| <= atol + rtol·|reference|.

    Values that are not floating must be equal. Raises: ValueMismatch, at `what`, the name of the values.
    """
    mine, theirs = as_numpy(ours), as_numpy(reference)
    _refuse_form(mine, theirs, what, mine.dtype.kind == theirs.dtype.kind)
    if mine.dtype.kind != "f":
        off = mine != theirs
    else:
        a, b = mine.astype(np.float64), theirs.astype(np.float64)
        off = ~np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
    _refuse(off, mine, theirs, what)


def assert_bits(ours: Any, reference: Any, *, what: str = "") -> None:
    """Check equal dtype, shape and bits; any NaN equals any NaN, zeros must agree in sign.

    Raises: ValueMismatch, at `what`, the name of the values.
    """
    mine, theirs = as_numpy(ours), as_numpy(reference)
    _refuse_form(mine, theirs, what, mine.dtype == theirs.dtype)
    off = np.asarray(mine != theirs)
    if mine.dtype.kind == "f":
        off = (off | (np.signbit(mine) != np.signbit(theirs))) & ~(np.isnan(mine) & np.isnan(theirs))
    _refuse(off, mine, theirs, what)


def _refuse_form(mine: np.ndarray, theirs: np.ndarray, what: str, same_dtype: bool) -> None:
    if mine.shape != theirs.shape or not same_dtype:
        forms = [f"{x.dtype}{list(x.shape)}" for x in (theirs, mine)]
        raise ValueMismatch("the values have different shapes or dtypes", where=what, expected=forms[0], got=forms[1])


def _refuse(off: np.ndarray, mine: np.ndarray, theirs: np.ndarray, what: str) -> None:
    if off.any():
        index = tuple(int(i) for i in np.argwhere(off)[0])
        raise ValueMismatch(f"{int(off.sum())} of {off.size} values differ", where=f"{what}{list(index)}",
                            expected=theirs[index], got=mine[index])  # fmt: skip


def strided(host: np.ndarray, how: str) -> NDArray:
    """Return the values of `host` as an array with a given memory layout.

    Args:
        how: `plain`; `permuted` (axes stored in reverse order); `sliced` (every second entry of a larger block, at an
            offset); `expanded` (stride 0 along the first axis, which repeats the first row's values).
    """
    if how == "permuted":
        return from_numpy(np.array(host.T, order="C").T)
    if how == "sliced" and host.ndim:
        wide = np.zeros((*host.shape[:-1], 2 * host.shape[-1] + 1), host.dtype)
        wide[..., 1::2] = host
        return from_numpy(wide[..., 1::2])
    if how == "expanded" and host.ndim and host.shape[0] > 1:
        return from_numpy(np.broadcast_to(host[:1].copy(), host.shape))
    return from_numpy(np.array(host, order="C"))


def poisoned(array: NDArray) -> NDArray:
    """Fill the array with bytes that read as NaN in floats, to reveal elements that are never written; return it."""
    fill(array.to_numpy(bits=True).reshape(-1).view(np.uint8))
    return array
