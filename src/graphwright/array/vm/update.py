"""Updates of parameters, and matrix products as rows of code."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.vm.code import BYTES
from graphwright.array.vm.elementwise import F, cell, number
from graphwright.array.vm.gemm import gemm
from graphwright.array.vm.math import native
from graphwright.array.vm.vector import (
    div,
    first,
    fma,
    fma1,
    load,
    load_f32,
    load_f64,
    load_first,
    mul,
    splat,
    sqrt,
    store,
    store_f32,
    store_first,
    sub,
)


@native
def product(row: Any, scratch: Any) -> None:
    """A matrix product; cells 1 to 12 are the arguments of `gemm`."""
    gemm(
        cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4), cell(row, 5), cell(row, 6), cell(row, 7), cell(row, 8),
        cell(row, 9), cell(row, 10), cell(row, 11), cell(row, 12), cell(row, 13), scratch,
    )  # fmt: skip


@native
def _powers(x: Any, y: Any, n: Any) -> Any:
    """xⁿ and yⁿ of a whole n >= 0, by squaring."""
    a, b = 1.0, 1.0
    while n > 0:
        a, b = a * (x if n & 1 else 1.0), b * (y if n & 1 else 1.0)
        x, y, n = x * x, y * y, n >> 1
    return a, b


@native
def adamw(row: Any) -> None:
    """One step in place of cell 1 parameters; cells 2 lr (float64), 3 the flag under which all stays as it is, 4 to 7
    β₁, β₂, eps, decay. Then half a row each: count, param, gradient, m, v, steps made.

    Source: Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2.
    """
    if load_f32(cell(row, 3)) != 0.0:
        return
    lr, beta1, beta2, eps, decay = (
        load_f64(cell(row, 2)),
        number(row, 4),
        number(row, 5),
        number(row, 6),
        number(row, 7),
    )
    left, tiny, d1, d2, e1, e2 = F(1.0 - lr * decay), F(eps), F(beta1), F(beta2), F(1.0 - beta1), F(1.0 - beta2)
    kept, small, b1, b2, c1, c2 = splat(left), splat(tiny), splat(d1), splat(d2), splat(e1), splat(e2)
    pace, lift, known = F(0.0), F(0.0), -1.0
    for k in range(cell(row, 1)):
        one = row + BYTES + k * (BYTES // 2)
        count, p, g, m, v = cell(one, 0), cell(one, 1), cell(one, 2), cell(one, 3), cell(one, 4)
        steps = np.float64(load_f32(cell(one, 5))) + 1.0
        store_f32(cell(one, 5), F(steps))
        if steps != known:  # most often all parameters were there from the first step
            known = steps
            first_left, second_left = _powers(beta1, beta2, np.int64(steps))
            pace, lift = F(lr / (1.0 - first_left)), F(1.0 / np.sqrt(1.0 - second_left))
        if count == 1:
            slope = load_f32(g)
            one_mean = fma1(d1, load_f32(m), e1 * slope)
            one_square = fma1(d2, load_f32(v), e2 * slope * slope)
            store_f32(p, load_f32(p) * left - pace * one_mean / fma1(np.sqrt(one_square), lift, tiny))
            store_f32(m, one_mean)
            store_f32(v, one_square)
            continue
        rate, unroot, i = splat(pace), splat(lift), 0
        while i + 16 <= count:
            grad = load(g + 4 * i)
            mean = fma(b1, load(m + 4 * i), mul(c1, grad))
            square = fma(b2, load(v + 4 * i), mul(mul(c2, grad), grad))
            new = mul(load(p + 4 * i), kept)
            store(m + 4 * i, mean)
            store(v + 4 * i, square)
            store(p + 4 * i, sub(new, div(mul(rate, mean), fma(sqrt(square), unroot, small))))
            i += 16
        if i < count:
            mask = first(count - i)
            grad = load_first(g + 4 * i, mask)
            mean = fma(b1, load_first(m + 4 * i, mask), mul(c1, grad))
            square = fma(b2, load_first(v + 4 * i, mask), mul(mul(c2, grad), grad))
            new = mul(load_first(p + 4 * i, mask), kept)
            new = sub(new, div(mul(rate, mean), fma(sqrt(square), unroot, small)))
            store_first(m + 4 * i, mean, mask)
            store_first(v + 4 * i, square, mask)
            store_first(p + 4 * i, new, mask)
