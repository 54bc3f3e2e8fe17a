"""The VM's functions against float64, in units of the last place, over all magnitudes; and IEEE's special values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy import special

from graphwright.array.vm.code import Code
from graphwright.array.vm.encode.operands import bits, row_of
from graphwright.array.vm.running.segment import VmSegment

Function = Callable[[np.ndarray], np.ndarray]
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38, -3e38, 1, -1], np.float32)


def run(code: Code, x: np.ndarray) -> np.ndarray:
    """f(x) by the machine."""
    x = np.ascontiguousarray(x, np.float32)
    out = np.full_like(x, np.nan)
    row = [int(code), 1, x.size, out.ctypes.data, 0, 1, x.ctypes.data, 0, 1, *[0] * 7]
    VmSegment([[row]])()
    return out


def everywhere() -> np.ndarray:
    """All magnitudes of both signs, and a dense middle."""
    sizes = np.geomspace(1e-38, 3e38, 200_000)
    return np.concatenate([sizes, -sizes, np.linspace(-105, 90, 400_000), np.linspace(-2, 2, 200_000)]).astype("f4")


BOUNDS: dict[Code, tuple[Function, float]] = {
    Code.EXP: (np.exp, 1.5),
    Code.LOG: (np.log, 1.0),
    Code.SQRT: (np.sqrt, 0.5),
    Code.RSQRT: (lambda x: 1 / np.sqrt(x), 1.5),
    Code.RECIPROCAL: (lambda x: 1 / x, 0.5),
    Code.TANH: (np.tanh, 1.5),
    Code.SIGMOID: (special.expit, 2.5),
    Code.ERF: (special.erf, 1.5),
}
"""Function and largest error in units of the last place, where the result is a normal number."""

ABSOLUTE: dict[Code, tuple[Function, float]] = {
    Code.SILU: (lambda x: x * special.expit(x), 3e-7),
    Code.GELU: (lambda x: x * special.ndtr(x), 3e-7),
    Code.GELU_TANH: (lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))), 3e-7),
}
"""Function and largest error relative to max(1, |x|): their tails are products with what rounds to 0."""


@pytest.mark.parametrize("code", BOUNDS)
def test_functions_are_within_their_error_bound(code: Code) -> None:
    function, bound = BOUNDS[code]
    x = everywhere()
    with np.errstate(all="ignore"):
        truth = function(x.astype(np.float64))
        kept = (np.abs(truth) >= np.finfo("f4").tiny) & (np.abs(truth) <= np.finfo("f4").max)
    assert kept.sum() > 300_000
    unit = np.spacing(np.abs(truth[kept]).astype(np.float32)).astype(np.float64)
    assert (np.abs(run(code, x)[kept] - truth[kept]) / unit).max() <= bound + 1e-6


@pytest.mark.parametrize("code", ABSOLUTE)
def test_activations_are_within_their_error_bound(code: Code) -> None:
    function, bound = ABSOLUTE[code]
    x = everywhere()
    x = x[np.abs(x) < 1e6]
    error = np.abs(run(code, x) - function(x.astype(np.float64)))
    assert (error / np.maximum(np.abs(x), 1)).max() <= bound


EXACT: dict[Code, Function] = {
    **{code: function for code, (function, _) in BOUNDS.items()},
    Code.NEG: np.negative,
    Code.ABS: np.abs,
    Code.FLOOR: np.floor,
    Code.COPY: lambda x: x,
}


@pytest.mark.parametrize("code", EXACT)
def test_special_values_follow_ieee_754(code: Code) -> None:
    with np.errstate(all="ignore"):
        truth = EXACT[code](SPECIAL.astype(np.float64)).astype(np.float32)
    found = run(code, SPECIAL)
    np.testing.assert_allclose(found, truth, rtol=3e-7, atol=1e-44)
    assert (np.signbit(found) == np.signbit(truth))[~np.isnan(truth)].all()


def test_exp_overflows_and_underflows() -> None:
    x = np.array([88.72, 88.73, 1e4, -87.3, -103.0, -104.5, -1e4], np.float32)
    with np.errstate(all="ignore"):
        truth = np.exp(x.astype(np.float64)).astype(np.float32)
    np.testing.assert_allclose(run(Code.EXP, x), truth, rtol=2e-7, atol=2e-45)


@pytest.mark.parametrize(("most", "bound"), [(300, 1.6), (2**17, 1.6), (10**6, 2.0)])
def test_angles_of_far_positions_are_within_their_error_bound(most: int, bound: float) -> None:
    rng = np.random.default_rng(most)
    positions = np.concatenate([np.arange(300), -np.arange(40), rng.integers(0, most + 1, 500)])
    frequencies = np.concatenate([10000.0 ** -(np.arange(64) / 64), rng.uniform(0, 1, 130), [1, np.pi / 4]]).astype(
        "f4"
    )
    found = np.full((2, positions.size, frequencies.size), np.nan, np.float32)
    addresses = [x.ctypes.data for x in (found[0], found[1], positions, frequencies)]
    VmSegment([[row_of(Code.ROPE_TABLE, positions.size, frequencies.size, *addresses, bits(1.0))]])()
    angles = (positions.astype("f4")[:, None] * frequencies).astype(np.float64)
    for mine, truth in zip(found, (np.cos(angles), np.sin(angles)), strict=True):
        assert (np.abs(mine - truth) / np.spacing(np.abs(truth).astype("f4"))).max() <= bound
