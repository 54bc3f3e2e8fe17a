"""Update formulas of optimizers, elementwise; `ops/optimize.py` has the formulas as they are written in papers.

Factors like 1 - β are passed in: the VM rounds them to float32 once per step, the population loops keep float64.
"""

from __future__ import annotations

from typing import Any

from graphwright.array.formulas import absolute, fma, select, sqrt
from graphwright.array.formulas.activations import sign

SMALLEST_NORMAL = 1.1754943508222875e-38
"""The smallest normal float32."""
QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's iteration, chosen for the steepest slope at 0 (Jordan et al. 2024)."""


def flushed(moment: Any) -> Any:
    """Return a moment, or 0 where it is subnormal, because arithmetic on subnormals is slow."""
    return select(absolute(moment) < SMALLEST_NORMAL, 0.0, moment)


def adam_moments(grad: Any, m: Any, v: Any, beta1: Any, beta2: Any, fresh1: Any, fresh2: Any) -> Any:
    """(β1·m + (1-β1)·g, β2·v + (1-β2)·g²): the new m and v of Adam, where fresh1 = 1 - β1 and fresh2 = 1 - β2."""
    return fma(beta1, m, fresh1 * grad), fma(beta2, v, fresh2 * grad * grad)


def adam_scales(lr: Any, power1: Any, power2: Any) -> Any:
    """(lr / (1 - β1ᵗ), 1 / √(1 - β2ᵗ)): `rate` and `scale` of `adam_update`, where power1 = β1ᵗ and power2 = β2ᵗ."""
    return lr / (1.0 - power1), 1.0 / sqrt(1.0 - power2)


def adam_update(m: Any, v: Any, rate: Any, scale: Any, eps: Any) -> Any:
    """rate·m / (√v·scale + eps), which Adam subtracts from the parameter; `rate, scale = adam_scales(...)`."""
    return rate * m / fma(sqrt(v), scale, eps)


def with_decay(grad: Any, decay: Any, param: Any) -> Any:
    """g + λ·θ: the gradient with weight decay."""
    return fma(decay, param, grad)


def momentum(b: Any, grad: Any, mu: Any, fresh: Any) -> Any:
    """μ·b + fresh·g: the new momentum buffer, where fresh = 1 - dampening."""
    return fma(mu, b, fresh * grad)


def rmsprop_square(v: Any, grad: Any, alpha: Any, fresh: Any) -> Any:
    """α·v + (1-α)·g²: the running mean of squared gradients, where fresh = 1 - α."""
    return fma(alpha, v, fresh * grad * grad)


def rmsprop_centered(v: Any, mean: Any) -> Any:
    """v - a²: the variance of gradients in centered RMSprop."""
    return fma(-mean, mean, v)


def rmsprop_update(grad: Any, v: Any, eps: Any) -> Any:
    """g / (√v + eps): the step of RMSprop before it is multiplied by the learning rate."""
    return grad / (sqrt(v) + eps)


def lerp(start: Any, end: Any, weight: Any) -> Any:
    """start + weight·(end - start), computed from the nearer end, as in ATen; `weight` is one number, not an array."""
    if weight < 0.5:
        return fma(weight, end - start, start)
    return fma(weight - 1.0, end - start, end)


def lion_update(m: Any, grad: Any, lr: Any, weight: Any) -> Any:
    """lr·sign(β1·m + (1-β1)·g), which Lion subtracts from the parameter; weight = 1 - β1."""
    return lr * sign(lerp(m, grad, weight))


def muon_scale(rows: int, columns: int, adjust: str) -> float:
    """The factor of Muon's step: √max(1, rows/columns) if `adjust` is "original".

    Else it is 0.2·√max(rows, columns), which makes steps as large as those of Adam.
    """
    return max(1.0, rows / columns) ** 0.5 if adjust == "original" else max(rows, columns) ** 0.5 * 0.2
