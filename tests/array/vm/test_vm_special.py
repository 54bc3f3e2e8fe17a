"""NaN, infinities, zeros of both signs, numbers without full precision and huge ones: the VM beside ATen, op by op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy.special import erf, expit, ndtr
from vm_forms import encode, low, unset, view, vm

from graphwright.array import NDArray, bfloat16, float32, from_numpy
from graphwright.array.vm.running.segment import VmSegment
from graphwright.ops import OPS, compute

SPECIAL = np.array(
    [0.0, 0.5, 1.0, 20.5, 88.7, 90.0, 104.0, 120.0, 1e-45, 1e-39, 1.17549435e-38, 1e19, 1e30, 3.4e38, np.inf], "f4"
)
SPECIAL = np.concatenate([SPECIAL, -SPECIAL, np.array([np.nan], "f4")])
NAMES = sorted(n for n in OPS if OPS[n].vm and (OPS[n].traits.elementwise or OPS[n].traits.nary))
ATTRS: dict[str, list[dict[str, Any]]] = {
    "cast": [{"dtype": bfloat16}, {"dtype": float32}],
    "full_like": [{"value": x} for x in (np.nan, np.inf, -np.inf, -0.0, 1e-45)],
    "gelu": [{"approximate": "none"}, {"approximate": "tanh"}],
}

Columns = Sequence[np.ndarray]
INEXACT: dict[str, tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]]] = {
    "erf": (lambda x: abs(x) < 1.2e-38, erf),
    "gelu": (lambda x: (x > 1e38) | (abs(x) < 1.2e-38), lambda x: x * ndtr(x)),
    "log1p": (lambda x: abs(x) < 1.2e-38, np.log1p),
    "sigmoid": (lambda x: _far(x), expit),
    "silu": (lambda x: _far(x), lambda x: x * expit(x)),
    "swiglu": (lambda x, y: _far(x) | ((abs(x) > 1e-41) & (abs(x) < 1.1e-38)), lambda x, y: x * expit(x) * y),
}
"""Where ATen itself is off, and what is true: it has gelu(inf) = NaN, sigmoid(-90) = 0, in bfloat16 erf and gelu of
1e-38 = 0, log1p(-1e-45) = 0, and rounds swiglu of bfloat16 twice.
"""
EITHER_ZERO = frozenset({"minimum", "maximum"})
"""Of two zeros of different signs ATen takes one or the other by their position."""


def _far(x: np.ndarray) -> np.ndarray:
    """Where e⁻ˣ is too large for a float32, and 1 / e⁻ˣ not too small."""
    return (x < -88.73) & (x > -103)


def columns(name: str) -> list[np.ndarray]:
    """All tuples of special values, an array for each operand."""
    arity = OPS[name].arity
    sides = [SPECIAL] * (arity if isinstance(arity, int) else 3)
    if name == "where":
        sides[0] = np.array([False, True])
    return [np.array(side) for side in zip(*product(*sides), strict=True)]


def operands(ins: Columns, narrow: bool = False) -> list[NDArray]:
    return [low(x) if narrow and x.dtype != np.bool_ else from_numpy(x) for x in ins]


def numbers(array: NDArray) -> np.ndarray:
    return array.to_numpy("float32")


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_special_values_match_aten(name: str, narrow: bool) -> None:
    ins = [x if len(x) > 10_000 else np.tile(x, 3) for x in columns(name)]  # each in whole vectors and in rests
    arrays = operands(ins, narrow)
    seen = [numbers(a) for a in arrays]
    for given in ATTRS.get(name, [{}]):
        attrs = OPS[name].complete(given)
        made = vm(name, arrays, attrs)
        if made is None:
            assert narrow or given == {"dtype": float32}
            continue
        found, truth = numbers(made[0]), numbers(compute(OPS[name], arrays, attrs)[0])
        if name in INEXACT:
            off, function = INEXACT[name]
            true = operands([function(*(x.astype("f8") for x in seen)).astype("f4")], narrow)
            truth = np.where(off(*seen), numbers(true[0]), truth)
        fine = np.isclose(found, truth, rtol=2**-7 if narrow else 3e-6, atol=1e-44, equal_nan=True)
        fine &= np.isnan(truth) | (np.signbit(found) == np.signbit(truth))
        if name in EITHER_ZERO:
            fine |= (seen[0] == 0) & (seen[1] == 0)
        wrong = [(*(x[i] for x in seen), found[i], truth[i]) for i in np.flatnonzero(~fine)[:5]]
        assert not wrong, "operands, the VM's result, ATen's"


@pytest.mark.parametrize("name", NAMES)
def test_scalars_have_the_bits_of_vectors(name: str) -> None:
    """A run of them is another loop for some ops."""
    arrays, attrs = operands([x[:1000] for x in columns(name)]), OPS[name].complete(ATTRS.get(name, [{}])[0])
    (whole,) = vm(name, arrays, attrs) or [None]
    assert whole is not None
    apart = unset(whole.shape, whole.dtype)
    rows = [encode(name, [view(apart[i])], [view(a[i]) for a in arrays], attrs) for i in range(whole.size)]
    VmSegment([row for row in rows if row is not None])()
    mine, other = numbers(apart), numbers(whole)
    np.testing.assert_array_equal(mine, other)
    assert (np.signbit(mine) == np.signbit(other))[~np.isnan(other)].all()
