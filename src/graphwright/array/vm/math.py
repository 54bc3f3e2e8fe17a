"""Functions of 16 float32 at once, within 2 units in the last place; NaN, infinities, zeros and subnormals as IEEE 754.

The coefficients come from `scripts/fit_polynomials.py`. `tests/array/vm/test_vm_math.py` states and proves the bounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.vm.vector import (
    absolute,
    add,
    copysign,
    div,
    exponent,
    floor,
    fma,
    le,
    least,
    lt,
    mantissa,
    most,
    mul,
    ne,
    neg,
    rint,
    scaled,
    select,
    splat,
    sqrt,
    sub,
)
from graphwright.native import njit

native: Any = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
F = np.float32
_LOG2E, _LN2_HIGH, _LN2_LOW = F(1.4426950408889634), F(0.693145751953125), F(1.4286068203094172e-06)
_SQRT2, _TINY, _2_24 = F(1.4142135623730951), F(1.1754943508222875e-38), F(16777216.0)
_SQRT_HALF = F(0.7071067811865476)
_2_SQRTPI = F(0.7978845608028654)  # √(2/π)
_2_PI = F(0.6366197466850281)
_PI_2, _PI_2_NEXT, _PI_2_LAST = F(1.5707963705062866), F(-4.371138828673793e-08), F(-1.7151245100058819e-15)
_INF, _NAN = F(np.inf), F(np.nan)


@native
def exp(x: Any) -> Any:
    """eˣ: x = n ln 2 + r, |r| <= ln 2 / 2."""
    bound = least(most(x, splat(F(-104.0))), splat(F(89.0)))
    n = rint(mul(bound, splat(_LOG2E)))
    r = fma(n, splat(-_LN2_LOW), fma(n, splat(-_LN2_HIGH), bound))
    p = splat(F(0.0013950599823147058))
    p = fma(p, r, splat(F(0.008368954062461853)))
    p = fma(p, r, splat(F(0.04166620597243309)))
    p = fma(p, r, splat(F(0.166665181517601)))
    p = fma(p, r, splat(F(0.5)))
    return scaled(add(fma(mul(r, r), p, r), splat(F(1.0))), n)


@native
def log(x: Any) -> Any:
    """Ln x: x = m 2ᵉ with √½ <= m <= √2."""
    small = lt(x, splat(_TINY))
    scaled = select(small, mul(x, splat(_2_24)), x)
    m, e = mantissa(scaled), exponent(scaled)
    e = select(small, sub(e, splat(F(24.0))), e)
    high = lt(splat(_SQRT2), m)
    m = select(high, mul(m, splat(F(0.5))), m)
    e = select(high, add(e, splat(F(1.0))), e)
    f = sub(m, splat(F(1.0)))
    p = splat(F(0.06915368139743805))
    p = fma(p, f, splat(F(-0.11789807677268982)))
    p = fma(p, f, splat(F(0.11872976273298264)))
    p = fma(p, f, splat(F(-0.1238434836268425)))
    p = fma(p, f, splat(F(0.14218658208847046)))
    p = fma(p, f, splat(F(-0.16669251024723053)))
    p = fma(p, f, splat(F(0.20002226531505585)))
    p = fma(p, f, splat(F(-0.24999986588954926)))
    p = fma(p, f, splat(F(0.3333331048488617)))
    square = mul(f, f)
    tail = fma(mul(square, f), p, fma(square, splat(F(-0.5)), mul(e, splat(_LN2_LOW))))
    y = fma(e, splat(_LN2_HIGH), add(f, tail))
    y = select(le(x, splat(F(0.0))), splat(-_INF), y)
    y = select(lt(x, splat(F(0.0))), splat(_NAN), y)
    return select(le(splat(_INF), x), x, select(ne(x, x), x, y))


@native
def tanh(x: Any) -> Any:
    """An odd polynomial up to 0.6, 1 - 2 / (e²ˣ + 1) beyond."""
    size = absolute(x)
    z = mul(x, x)
    p = splat(F(-0.005720812361687422))
    p = fma(p, z, splat(F(0.020653799176216125)))
    p = fma(p, z, splat(F(-0.05374442785978317)))
    p = fma(p, z, splat(F(0.13331501185894012)))
    p = fma(p, z, splat(F(-0.3333328366279602)))
    near = copysign(fma(mul(z, x), p, x), x)  # of -0 the product is +0
    grown = exp(add(size, size))
    far = copysign(sub(splat(F(1.0)), div(splat(F(2.0)), add(grown, splat(F(1.0))))), x)
    return select(lt(size, splat(F(0.62))), near, select(ne(x, x), x, far))


@native
def sigmoid(x: Any) -> Any:
    """1 / (1 + e⁻ˣ), from e^-|x|: no overflow on either side."""
    t = exp(neg(absolute(x)))
    one = splat(F(1.0))
    return div(select(lt(x, splat(F(0.0))), t, one), add(one, t))


@native
def erf(x: Any) -> Any:
    """X (1 + p(x²)) near 0, 1 - e^q(|x|) beyond."""
    size = absolute(x)
    z = mul(x, x)
    p = splat(F(8.327486284542829e-05))
    p = fma(p, z, splat(F(-0.0008133215014822781)))
    p = fma(p, z, splat(F(0.0052002607844769955)))
    p = fma(p, z, splat(F(-0.026859119534492493)))
    p = fma(p, z, splat(F(0.11283691227436066)))
    p = fma(p, z, splat(F(-0.37612634897232056)))
    p = fma(p, z, splat(F(0.12837916612625122)))
    near = fma(p, x, x)
    bound = least(size, splat(F(4.0)))
    q = splat(F(-4.5645825252904615e-07))
    q = fma(q, bound, splat(F(-1.5212793186947238e-05)))
    q = fma(q, bound, splat(F(0.00040201417868956923)))
    q = fma(q, bound, splat(F(-0.004070940427482128)))
    q = fma(q, bound, splat(F(0.024930315092206)))
    q = fma(q, bound, splat(F(-0.10805603861808777)))
    q = fma(q, bound, splat(F(-0.633509635925293)))
    q = fma(q, bound, splat(F(-0.12944865226745605)))
    q = fma(q, bound, splat(F(0.00016308124759234488)))
    far = copysign(sub(splat(F(1.0)), exp(sub(q, bound))), x)
    return select(lt(size, splat(F(0.925))), near, select(ne(x, x), x, far))


@native
def silu(x: Any) -> Any:
    """X · σ(x)."""
    return mul(x, sigmoid(x))


@native
def gelu(x: Any) -> Any:
    """X · Φ(x) by erf."""
    return mul(mul(x, splat(F(0.5))), add(splat(F(1.0)), erf(mul(x, splat(_SQRT_HALF)))))


@native
def gelu_tanh(x: Any) -> Any:
    """x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³))), Hendrycks and Gimpel 2016."""
    inner = mul(splat(_2_SQRTPI), fma(mul(mul(x, x), x), splat(F(0.044715)), x))
    return mul(mul(x, splat(F(0.5))), add(splat(F(1.0)), tanh(inner)))


@native
def rsqrt(x: Any) -> Any:
    """1 / √x."""
    return div(splat(F(1.0)), sqrt(x))


@native
def sign(x: Any) -> Any:
    """-1, 0 or 1; +0 of either zero and of NaN, as ATen has it."""
    zero, one = splat(F(0.0)), splat(F(1.0))
    return select(lt(zero, x), one, select(lt(x, zero), neg(one), zero))


@native
def cos_sin(x: Any) -> Any:
    """(cos x, sin x): x = k π/2 + r with π/2 in three parts (Cody and Waite 1980).

    Within the bound up to |x| = 10⁶; of far larger angles k is off by more than r can make good.
    """
    k = rint(mul(x, splat(_2_PI)))
    r = fma(k, splat(-_PI_2_LAST), fma(k, splat(-_PI_2_NEXT), fma(k, splat(-_PI_2), x)))
    z = mul(r, r)
    p = fma(splat(F(-0.00019516654720064253)), z, splat(F(0.008332173340022564)))
    sine = fma(mul(z, r), fma(p, z, splat(F(-0.16666655242443085))), r)
    p = fma(splat(F(2.4437727915938012e-05)), z, splat(F(-0.001388736185617745)))
    cosine = fma(mul(z, z), fma(p, z, splat(F(0.04166664555668831))), fma(z, splat(F(-0.5)), splat(F(1.0))))
    half = floor(mul(k, splat(F(0.5))))
    quarter = fma(half, splat(F(-2.0)), k)  # 1 after an odd number of quarter turns
    over = fma(floor(mul(half, splat(F(0.5)))), splat(F(-2.0)), half)  # 1 in the second half of a turn
    swapped, below = lt(splat(F(0.0)), quarter), fma(over, splat(F(-2.0)), splat(F(1.0)))
    left = mul(below, fma(quarter, splat(F(-2.0)), splat(F(1.0))))
    return mul(left, select(swapped, sine, cosine)), mul(below, select(swapped, cosine, sine))
