"""Functions of 16 float32 at once, within 2 units in the last place; NaN, infinities, zeros, subnormals as in IEEE 754.

The coefficients come from `scripts/fit_polynomials.py`; `tests/array/vm/test_math.py` holds the error bounds.
Activations are the formulas of `array.formulas.activations` on these functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.formulas import activations, optimizers, specialise
from graphwright.array.vm import vector as vec
from graphwright.array.vm.vector import fma, select
from graphwright.native import inner

native: Any = inner(error_model="numpy")
F = np.float32
_LOG2E, _LN2_HIGH, _LN2_LOW = F(1.4426950408889634), F(0.693145751953125), F(1.4286068203094172e-06)
_SQRT2, _TINY, _2_24 = F(1.4142135623730951), F(1.1754943508222875e-38), F(16777216.0)
_2_PI = F(0.6366197466850281)
_PI_2, _PI_2_NEXT, _PI_2_LAST = F(1.5707963705062866), F(-4.371138828673793e-08), F(-1.7151245100058819e-15)
_INF, _NAN = F(np.inf), F(np.nan)


def _polynomial(*coefficients: float) -> Any:
    """Return a function that evaluates a polynomial by Horner's rule; the coefficient of the highest power is first."""
    *others, last = coefficients
    if len(others) == 1:
        leading = others[0]
        return native(lambda x: fma(leading, x, last))
    higher = _polynomial(*others)
    return native(lambda x: fma(higher(x), x, last))


_EXP = _polynomial(0.0013950599823147058, 0.008368954062461853, 0.04166620597243309, 0.166665181517601, 0.5)
_LOG = _polynomial(
    0.06915368139743805, -0.11789807677268982, 0.11872976273298264, -0.1238434836268425, 0.14218658208847046,
    -0.16669251024723053, 0.20002226531505585, -0.24999986588954926, 0.3333331048488617,
)  # fmt: skip
_TANH = _polynomial(
    -0.005720812361687422, 0.020653799176216125, -0.05374442785978317, 0.13331501185894012, -0.3333328366279602
)
_ERF_NEAR = _polynomial(
    8.327486284542829e-05, -0.0008133215014822781, 0.0052002607844769955, -0.026859119534492493, 0.11283691227436066,
    -0.37612634897232056, 0.12837916612625122,
)  # fmt: skip
_ERF_FAR = _polynomial(
    -4.5645825252904615e-07, -1.5212793186947238e-05, 0.00040201417868956923, -0.004070940427482128,
    0.024930315092206, -0.10805603861808777, -0.633509635925293, -0.12944865226745605, 0.00016308124759234488,
)  # fmt: skip


@native
def exp(x: Any) -> Any:
    """eˣ = 2ⁿ·eʳ, where x = n·ln 2 + r and |r| <= ln 2 / 2."""
    bound = vec.least(vec.most(x, -104.0), 89.0)
    n = vec.rint(bound * _LOG2E)
    r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, bound))
    return vec.scaled(fma(r * r, _EXP(r), r) + 1.0, n)


@native
def log(x: Any) -> Any:
    """ln x = ln m + e·ln 2, where x = m·2ᵉ and √½ <= m <= √2."""
    small = x < _TINY
    normal = select(small, x * _2_24, x)
    m, e = vec.mantissa(normal), vec.exponent(normal)
    e = select(small, e - 24.0, e)
    high = m > _SQRT2
    m = select(high, m * 0.5, m)
    e = select(high, e + 1.0, e)
    f = m - 1.0
    square = f * f
    tail = fma(square * f, _LOG(f), fma(square, -0.5, e * _LN2_LOW))
    y = fma(e, _LN2_HIGH, f + tail)
    y = select(x <= 0.0, -_INF, y)
    y = select(x < 0.0, _NAN, y)
    return select(x >= _INF, x, select(x != x, x, y))


@native
def tanh(x: Any) -> Any:
    """tanh x: an odd polynomial up to |x| = 0.62, ±(1 - 2 / (e^2|x| + 1)) beyond."""
    size = vec.absolute(x)
    z = x * x
    near = vec.copysign(fma(z * x, _TANH(z), x), x)  # the product of -0 is +0
    far = vec.copysign(1.0 - 2.0 / (exp(size + size) + 1.0), x)
    return select(size < 0.62, near, select(x != x, x, far))


@native
def expm1(x: Any) -> Any:
    """eˣ - 1 = 2ⁿ·(eʳ - 1) + (2ⁿ - 1), where x = n·ln 2 + r, so that no digits are lost near 0."""
    bound = vec.least(vec.most(x, -104.0), 17.0)
    n = vec.rint(bound * _LOG2E)
    r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, bound))
    power = vec.scaled(vec.splat(F(1.0)), n)
    near = vec.copysign(fma(fma(r * r, _EXP(r), r), power, power - 1.0), x)
    return select(x > 17.0, exp(x), select(x != x, x, near))


@native
def log1p(x: Any) -> Any:
    """ln(1 + x) = ln u + (x - (u - 1)) / u, where u is 1 + x rounded; the quotient is the rounding error's effect."""
    u = 1.0 + x
    y = log(u) + (x - (u - 1.0)) / u
    return select(x > -1.0, select(x < _2_24, vec.copysign(y, x), log(u)), log(u))


@native
def erf(x: Any) -> Any:
    """erf x: x·(1 + p(x²)) near 0, ±(1 - e^q(|x|)) beyond, where p and q are polynomials."""
    size = vec.absolute(x)
    z = x * x
    near = fma(_ERF_NEAR(z), x, x)
    bound = vec.least(size, 4.0)
    far = vec.copysign(1.0 - exp(_ERF_FAR(bound) - bound), x)
    return select(size < 0.925, near, select(x != x, x, far))


@native
def rsqrt(x: Any) -> Any:
    """1 / √x."""
    return 1.0 / vec.sqrt(x)


@native
def cos_sin(x: Any) -> Any:
    """(cos x, sin x), from x = k·π/2 + r, with π/2 as a sum of three float32 (Cody and Waite 1980).

    The error bound holds up to |x| = 10⁶. For much larger angles k itself is inexact.
    """
    k = vec.rint(x * _2_PI)
    r = fma(k, -_PI_2_LAST, fma(k, -_PI_2_NEXT, fma(k, -_PI_2, x)))
    z = r * r
    p = fma(-0.00019516654720064253, z, 0.008332173340022564)
    sine = fma(z * r, fma(p, z, -0.16666655242443085), r)
    p = fma(2.4437727915938012e-05, z, -0.001388736185617745)
    cosine = fma(z * z, fma(p, z, 0.04166664555668831), fma(z, -0.5, 1.0))
    half = vec.floor(k * 0.5)
    quarter = fma(half, -2.0, k)  # 1 after an odd number of quarter turns
    over = fma(vec.floor(half * 0.5), -2.0, half)  # 1 in the second half of a turn
    swapped, below = quarter > 0.0, fma(over, -2.0, 1.0)
    left = below * fma(quarter, -2.0, 1.0)
    return left * select(swapped, sine, cosine), select(x == 0.0, x, below * select(swapped, cosine, sine))


_PRIMITIVES = {
    "absolute": vec.absolute, "erf": erf, "exp": exp, "fma": fma, "log1p": log1p,
    "maximum": vec.maximum, "select": select, "sqrt": vec.sqrt, "tanh": tanh,
    "cosine": native(lambda x: cos_sin(x)[0]), "sine": native(lambda x: cos_sin(x)[1]),
}  # fmt: skip
formulas: Any = specialise(activations, _PRIMITIVES, native)
"""`array.formulas.activations` for vectors."""
updates: Any = specialise(optimizers, {**_PRIMITIVES, "sign": formulas.sign}, native)
"""`array.formulas.optimizers` for vectors, float32 and float64."""
