"""The polynomials of `array/vm/math.py`: least squares at Chebyshev nodes in float64, rounded to float32.

python scripts/fit_polynomials.py      # prints each with the largest relative error of the rounded one
"""

from __future__ import annotations

from collections.abc import Callable
from math import cos, erf, erfc, expm1, log, log1p, pi, sin, sqrt, tanh

import numpy as np

Function = Callable[[float], float]


def fit(function: Function, low: float, high: float, degree: int, weight: Function) -> tuple[np.ndarray, float]:
    """Coefficients, highest power first, of p(x) ≈ function(x), errors weighed; and the largest weighed error."""
    nodes = (low + high) / 2 + (high - low) / 2 * np.cos(np.pi * (np.arange(4000) + 0.5) / 4000)
    values, weights = (np.array([f(x) for x in nodes]) for f in (function, weight))
    powers = np.vander(nodes, degree + 1)
    scale = np.abs(powers).max(axis=0)
    w = weights.copy()
    found = np.zeros(degree + 1)
    for _ in range(60):  # Lawson's reweighting: from least squares towards the least maximum
        found = np.linalg.lstsq(powers / scale * w[:, None], values * w, rcond=None)[0] / scale
        error = np.abs(powers @ found - values) * weights
        w *= np.sqrt(error / error.max() + 1e-3)
        w *= weights.sum() / w.sum()
    rounded = found.astype(np.float32)
    return rounded, float((np.abs(powers @ rounded.astype(np.float64) - values) * weights).max())


def _safe(function: Function, at_zero: float) -> Function:
    return lambda x: at_zero if abs(x) < 1e-4 else function(x)


HALF = log(2) / 2 * 1.001
EIGHTH = (pi / 4 * 1.001) ** 2
FITS: dict[str, tuple[Function, float, float, int, Function]] = {
    "(eˣ - 1 - x) / x², |x| <= ln 2 / 2": (
        lambda x: 0.5 + x / 6 + x * x / 24 if abs(x) < 1e-3 else (expm1(x) - x) / (x * x),
        -HALF,
        HALF,
        4,
        lambda x: x * x,
    ),
    "(ln(1 + x) - x + x²/2) / x³, √½ <= 1 + x <= √2": (
        lambda x: 1 / 3 - x / 4 + x * x / 5 if abs(x) < 1e-3 else (log1p(x) - x + x * x / 2) / x**3,
        sqrt(0.5) - 1,
        sqrt(2) - 1,
        8,
        lambda x: x * x,
    ),
    "(tanh √z / √z - 1) / z, z <= 0.39": (
        lambda z: -1 / 3 + 2 * z / 15 if z < 1e-4 else (tanh(sqrt(z)) / sqrt(z) - 1) / z,
        0.0,
        0.39,
        4,
        lambda z: z,
    ),
    "erf √z / √z - 1, z <= 0.87": (
        lambda z: 2 / sqrt(np.pi) * (1 - z / 3) - 1 if z < 1e-6 else erf(sqrt(z)) / sqrt(z) - 1,
        0.0,
        0.87,
        6,
        lambda z: 1.0,
    ),
    "(sin √z / √z - 1) / z, √z <= π/4": (
        lambda z: -1 / 6 + z / 120 - z * z / 5040 if z < 1e-3 else (sin(sqrt(z)) / sqrt(z) - 1) / z,
        0.0,
        EIGHTH,
        2,
        lambda z: z,
    ),
    "(cos √z - 1 + z/2) / z², √z <= π/4": (
        lambda z: 1 / 24 - z / 720 + z * z / 40320 if z < 1e-2 else (cos(sqrt(z)) - 1 + z / 2) / (z * z),
        0.0,
        EIGHTH,
        2,
        lambda z: z * z,
    ),
    "ln erfc x + x, 0.92 <= x <= 4": (lambda x: log(erfc(x)) + x, 0.92, 4.0, 8, erfc),
}


def main() -> None:
    """Print them."""
    for name, (function, low, high, degree, weight) in FITS.items():
        coefficients, error = fit(function, low, high, degree, weight)
        print(f"{name}: error {error:.2e}\n    {', '.join(f'{float(c)!r}' for c in coefficients)}")


if __name__ == "__main__":
    main()
