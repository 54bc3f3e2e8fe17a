"""Activations and their slopes: `NAME(x)` and `NAME_slope(x, y)` = dy/dx at x, where y = NAME(x).

A slope function uses only the arguments in its formula; None may be passed for the other one.
"""

from __future__ import annotations

from typing import Any

from graphwright.array.formulas import absolute, cosine, erf, exp, fma, log1p, maximum, select, sine, tanh

SQRT_HALF = 0.7071067811865476
INV_SQRT_2PI = 0.3989422804014327
SQRT_2_PI = 0.7978845608028654
CUBIC = 0.044715
"""Factor of x³ in the tanh form of GELU (Hendrycks and Gimpel 2016)."""
STEEPNESS = 4.9
"""Factor of x in NEAT's sigmoid (Stanley and Miikkulainen 2002)."""
LEAK = 0.01


def identity(x: Any) -> Any:
    """x, unchanged."""
    return x


def identity_slope(x: Any, y: Any) -> Any:
    """1, the derivative of the identity; NaN where x is NaN."""
    return select(x == x, 1.0, x)


def sigmoid(x: Any) -> Any:
    """σ(x) = 1 / (1 + e⁻ˣ), computed from e^-|x| so that nothing overflows."""
    e = exp(-absolute(x))
    return select(x < 0.0, e, 1.0) / (1.0 + e)


def sigmoid_slope(x: Any, y: Any) -> Any:
    """y·(1 - y), the derivative of y = σ(x)."""
    return y * (1.0 - y)


def sigmoid49(x: Any) -> Any:
    """σ(4.9·x), the sigmoid of NEAT."""
    return sigmoid(x * STEEPNESS)


def sigmoid49_slope(x: Any, y: Any) -> Any:
    """4.9·y·(1 - y), the derivative of y = σ(4.9·x)."""
    return STEEPNESS * (y * (1.0 - y))


def tanh_slope(x: Any, y: Any) -> Any:
    """1 - y², the derivative of y = tanh x."""
    return 1.0 - y * y


def relu(x: Any) -> Any:
    """max(x, 0); NaN and -0 are returned unchanged."""
    return select(x < 0.0, 0.0, x)


def relu_slope(x: Any, y: Any) -> Any:
    """1 if x > 0 else 0, the derivative of ReLU."""
    return select(x > 0.0, 1.0, 0.0)


def leaky_relu(x: Any) -> Any:
    """x if x > 0 else 0.01·x."""
    return select(x > 0.0, x, x * LEAK)


def leaky_relu_slope(x: Any, y: Any) -> Any:
    """1 if x > 0 else 0.01, the derivative of leaky ReLU."""
    return select(x > 0.0, 1.0, LEAK)


def gelu(x: Any) -> Any:
    """x·Φ(x), where Φ is the distribution function of N(0, 1), computed with the error function."""
    return x * 0.5 * (1.0 + erf(x * SQRT_HALF))


def gelu_slope(x: Any, y: Any) -> Any:
    """Φ(x) + x·φ(x), the derivative of GELU; φ is the density of N(0, 1), Φ its distribution function."""
    area = 0.5 * (1.0 + erf(x * SQRT_HALF))
    density = INV_SQRT_2PI * exp(x * x * -0.5)
    return fma(x, density, area)


def gelu_tanh(x: Any) -> Any:
    """x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³))), the tanh approximation of GELU."""
    return x * 0.5 * (1.0 + tanh(SQRT_2_PI * fma(x * x * x, CUBIC, x)))


def gelu_tanh_slope(x: Any, y: Any) -> Any:
    """(1 + t)/2 + x/2·(1 - t²)·√(2/π)·(1 + 0.134145·x²), the derivative of `gelu_tanh`; t is its tanh."""
    t = tanh(SQRT_2_PI * fma(x * x * x, CUBIC, x))
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * SQRT_2_PI * (1.0 + 3.0 * CUBIC * (x * x))


def silu(x: Any) -> Any:
    """x·σ(x)."""
    return x * sigmoid(x)


def silu_slope(x: Any, y: Any) -> Any:
    """σ(x)·(1 + x·(1 - σ(x))), the derivative of SiLU."""
    return silu_slope_of(x, sigmoid(x))


def silu_slope_of(x: Any, s: Any) -> Any:
    """s·(1 + x·(1 - s)), the derivative of SiLU at x, given s = σ(x)."""
    return s * fma(x, 1.0 - s, 1.0)


def softplus(x: Any) -> Any:
    """ln(1 + eˣ) = max(x, 0) + ln(1 + e^-|x|)."""
    return maximum(x, 0.0) + softplus_tail(x)


def softplus_tail(x: Any) -> Any:
    """ln(1 + e^-|x|)."""
    return log1p(exp(-absolute(x)))


def softplus_slope(x: Any, y: Any) -> Any:
    """σ(x), the derivative of softplus."""
    return sigmoid(x)


def bce_with_logits(x: Any, wanted: Any) -> Any:
    """max(x, 0) - x·wanted + ln(1 + e^-|x|), the binary cross entropy of σ(x).

    The sum has this order, because its first two terms can cancel exactly.
    """
    return maximum(x, 0.0) - x * wanted + softplus_tail(x)


def bce_with_logits_slope(x: Any, wanted: Any) -> Any:
    """σ(x) - wanted, the derivative of `bce_with_logits`."""
    return sigmoid(x) - wanted


def sech(x: Any) -> Any:
    """1 / cosh x = 2·e^-|x| / (1 + e^-2|x|)."""
    e = exp(-absolute(x))
    return (e + e) / fma(e, e, 1.0)


def sech_slope(x: Any, y: Any) -> Any:
    """-y·tanh x, the derivative of y = sech x."""
    return -(y * tanh(x))


def gauss(x: Any) -> Any:
    """e^(-x²)."""
    return exp(-(x * x))


def gauss_slope(x: Any, y: Any) -> Any:
    """-2·x·y, the derivative of y = e^(-x²)."""
    return -((x + x) * y)


def sin(x: Any) -> Any:
    """sin x."""
    return sine(x)


def sin_slope(x: Any, y: Any) -> Any:
    """cos x, the derivative of sin x."""
    return cosine(x)


def abs(x: Any) -> Any:
    """|x|."""
    return absolute(x)


def abs_slope(x: Any, y: Any) -> Any:
    """The sign of x (-1, 0 or 1), the derivative of |x|."""
    return select(x < 0.0, -1.0, select(x > 0.0, 1.0, 0.0))


def step(x: Any) -> Any:
    """1 if x > 0 else 0."""
    return select(x > 0.0, 1.0, 0.0)


def step_slope(x: Any, y: Any) -> Any:
    """0, the derivative of `step` and `sign`; NaN where y is NaN."""
    return 0.0 * y


def sign(x: Any) -> Any:
    """The sign of x: -1, 0 or 1; 0 where x is NaN."""
    return select(x > 0.0, 1.0, select(x < 0.0, -1.0, 0.0))


sign_slope = step_slope
