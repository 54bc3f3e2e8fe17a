"""Activations of neurons on 16 cases at once, and their derivatives; the functions are those of the VM.

Importing this module loads numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.population.names import ACTIVATIONS
from graphwright.array.vm import vector as v
from graphwright.array.vm.math import erf, exp, gelu, log, native, sigmoid, silu, tanh

F = np.float32
(
    IDENTITY,
    SIGMOID49,
    SIGMOID,
    TANH,
    RELU,
    LEAKY_RELU,
    GELU,
    SILU,
    SOFTPLUS,
    SECH,
    GAUSS,
    SIN,
    ABS,
    STEP,
    SIGN,
) = range(len(ACTIVATIONS))
_ZERO, _ONE, _HALF, _SLOPE, _STEEP = F(0.0), F(1.0), F(0.5), F(0.01), F(4.9)
_HALF_PI, _INV_PI = F(1.5707963267948966), F(0.3183098861837907)
_PI_HIGH, _PI_MIDDLE, _PI_LOW = F(3.140625), F(9.670257568359375e-04), F(6.277114152908325e-07)
_SQRT_HALF, _INV_SQRT_2PI = F(0.7071067811865476), F(0.3989422804014327)


@native
def sin(x: Any) -> Any:
    """Taylor's polynomial of degree 11 after taking off multiples of π; for |x| up to some thousands."""
    n = v.rint(v.mul(x, v.splat(_INV_PI)))
    r = v.fma(n, v.splat(-_PI_HIGH), x)
    r = v.fma(n, v.splat(-_PI_MIDDLE), r)
    r = v.fma(n, v.splat(-_PI_LOW), r)
    z = v.mul(r, r)
    p = v.splat(F(-2.505210838544172e-08))
    p = v.fma(p, z, v.splat(F(2.755731922398589e-06)))
    p = v.fma(p, z, v.splat(F(-1.984126984126984e-04)))
    p = v.fma(p, z, v.splat(F(8.333333333333333e-03)))
    p = v.fma(p, z, v.splat(F(-0.16666666666666666)))
    y = v.fma(v.mul(p, z), r, r)
    odd = v.sub(n, v.mul(v.splat(F(2.0)), v.floor(v.mul(n, v.splat(_HALF)))))
    return v.select(v.lt(v.splat(_HALF), odd), v.neg(y), y)


@native
def softplus(x: Any) -> Any:
    """Max(x, 0) + ln(1 + e^-|x|)."""
    return v.add(v.maximum(x, v.splat(_ZERO)), log(v.add(v.splat(_ONE), exp(v.neg(v.absolute(x))))))


@native
def sech(x: Any) -> Any:
    """2 e^-|x| / (1 + e^-2|x|)."""
    t = exp(v.neg(v.absolute(x)))
    return v.div(v.add(t, t), v.fma(t, t, v.splat(_ONE)))


@native
def activate(kind: int, x: Any) -> Any:
    """The activation of a weighted sum."""
    if kind == SIGMOID49:
        return sigmoid(v.mul(x, v.splat(_STEEP)))
    if kind == TANH:
        return tanh(x)
    if kind == IDENTITY:
        return x
    if kind == SIGMOID:
        return sigmoid(x)
    if kind == RELU:
        return v.maximum(x, v.splat(_ZERO))
    if kind == LEAKY_RELU:
        return v.select(v.lt(x, v.splat(_ZERO)), v.mul(x, v.splat(_SLOPE)), x)
    if kind == GELU:
        return gelu(x)
    if kind == SILU:
        return silu(x)
    if kind == SOFTPLUS:
        return softplus(x)
    if kind == SECH:
        return sech(x)
    if kind == GAUSS:
        return exp(v.neg(v.mul(x, x)))
    if kind == SIN:
        return sin(x)
    if kind == ABS:
        return v.absolute(x)
    if kind == STEP:
        return v.select(v.lt(v.splat(_ZERO), x), v.splat(_ONE), v.splat(_ZERO))
    return v.select(v.lt(v.splat(_ZERO), x), v.splat(_ONE), v.select(v.lt(x, v.splat(_ZERO)), v.splat(-_ONE), x))


@native
def slope(kind: int, x: Any, y: Any) -> Any:
    """dy/dx at a weighted sum x with activation y; 0 for step and sign."""
    one, zero = v.splat(_ONE), v.splat(_ZERO)
    if kind == SIGMOID49:
        return v.mul(v.splat(_STEEP), v.mul(y, v.sub(one, y)))
    if kind == TANH:
        return v.sub(one, v.mul(y, y))
    if kind == IDENTITY:
        return one
    if kind == SIGMOID:
        return v.mul(y, v.sub(one, y))
    if kind == RELU:
        return v.select(v.lt(zero, x), one, zero)
    if kind == LEAKY_RELU:
        return v.select(v.lt(x, zero), v.splat(_SLOPE), one)
    if kind == GELU:  # Φ(x) + x φ(x)
        area = v.mul(v.splat(_HALF), v.add(one, erf(v.mul(x, v.splat(_SQRT_HALF)))))
        density = v.mul(v.splat(_INV_SQRT_2PI), exp(v.neg(v.mul(v.splat(_HALF), v.mul(x, x)))))
        return v.fma(x, density, area)
    if kind == SILU:  # σ(x)(1 + x(1 - σ(x)))
        s = sigmoid(x)
        return v.mul(s, v.fma(x, v.sub(one, s), one))
    if kind == SOFTPLUS:
        return sigmoid(x)
    if kind == SECH:
        return v.neg(v.mul(y, tanh(x)))
    if kind == GAUSS:
        return v.neg(v.mul(v.add(x, x), y))
    if kind == SIN:
        return sin(v.add(x, v.splat(_HALF_PI)))
    if kind == ABS:
        return v.select(v.lt(x, zero), v.neg(one), v.select(v.lt(zero, x), one, zero))
    return zero
