"""Steps of optimizers, and matrix products, as rows of code.

A step: cell 1 the number of parameters, 2 the address of lr (float64), 3 that of a flag under which all stays as it is,
from 4 on numbers, 9 flags as bits, the first of which says that the gradient is climbed. Then half a row for each:
count, parameter, gradient, steps made, and moments. All is done in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.vm.code import BYTES
from graphwright.array.vm.elementwise import F, cell, number
from graphwright.array.vm.gemm import gemm
from graphwright.array.vm.math import native, sign
from graphwright.array.vm.vector import (
    absolute,
    add,
    div,
    first,
    fma,
    fma1,
    load,
    load_f32,
    load_f64,
    load_first,
    lt,
    maximum,
    mul,
    neg,
    select,
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


TINY = F(1.1754943508222875e-38)
"""The smallest normal number."""
MAXIMIZE, AMSGRAD, NESTEROV, CENTERED = 1, 2, 2, 2
"""Bits of cell 9; the second means what the optimizer has."""


@native
def skipped(row: Any) -> Any:
    """True if the gradients held an infinity."""
    return load_f32(cell(row, 3)) != 0.0


@native
def sign_of(row: Any) -> Any:
    """What gradients are multiplied by."""
    return splat(F(-1.0) if cell(row, 9) & MAXIMIZE else F(1.0))


@native
def counted(one: Any) -> Any:
    """Steps that a parameter has made with this one."""
    steps = np.float64(load_f32(cell(one, 3))) + 1.0
    store_f32(cell(one, 3), F(steps))
    return steps


@native
def _moment(x: Any) -> Any:
    """A moment, 0 below the normal numbers: one that fades would slow down every step to come."""
    return select(lt(absolute(x), splat(TINY)), splat(F(0.0)), x)


@native
def _slope(way: Any, grad: Any, decay: Any, param: Any, decays: Any) -> Any:
    """The gradient with the decay in it."""
    grad = mul(way, grad)
    return fma(decay, param, grad) if decays else grad


@native
def adam(row: Any, decoupled: Any) -> None:
    """Numbers: β₁, β₂, eps, decay, which acts on the parameter itself if `decoupled`. Moments: m, v, largest v or 0.

    Source: Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization",
    algorithm 2; Reddi, Kale and Kumar 2018, algorithm 2.
    """
    if skipped(row):
        return
    lr, beta1, beta2, eps, decay = (
        load_f64(cell(row, 2)),
        number(row, 4),
        number(row, 5),
        number(row, 6),
        number(row, 7),
    )
    way, blend, blends = sign_of(row), splat(F(decay)), decay != 0.0 and not decoupled
    left = F(1.0 - lr * decay) if decoupled else F(1.0)
    tiny, d1, d2, e1, e2 = F(eps), F(beta1), F(beta2), F(1.0 - beta1), F(1.0 - beta2)
    kept, small, b1, b2, c1, c2 = splat(left), splat(tiny), splat(d1), splat(d2), splat(e1), splat(e2)
    pace, lift, known = F(0.0), F(0.0), -1.0
    plain = cell(row, 9) == 0 and not blends
    for k in range(cell(row, 1)):
        one = row + BYTES + k * (BYTES // 2)
        count, p, g, m, v, top = cell(one, 0), cell(one, 1), cell(one, 2), cell(one, 4), cell(one, 5), cell(one, 6)
        steps = counted(one)
        if steps != known:  # most often all parameters were there from the first step
            known = steps
            first_left, second_left = _powers(beta1, beta2, np.int64(steps))
            pace, lift = F(lr / (1.0 - first_left)), F(1.0 / np.sqrt(1.0 - second_left))
        if count == 1 and plain:
            slope = load_f32(g)
            one_mean = fma1(d1, load_f32(m), e1 * slope)
            one_square = fma1(d2, load_f32(v), e2 * slope * slope)
            store_f32(p, load_f32(p) * left - pace * one_mean / fma1(np.sqrt(one_square), lift, tiny))
            store_f32(m, F(0.0) if abs(one_mean) < TINY else one_mean)
            store_f32(v, F(0.0) if one_square < TINY else one_square)
            continue
        rate, unroot, i = splat(pace), splat(lift), 0
        while plain and i + 16 <= count:
            grad = load(g + 4 * i)
            mean = fma(b1, load(m + 4 * i), mul(c1, grad))
            square = fma(b2, load(v + 4 * i), mul(mul(c2, grad), grad))
            new = mul(load(p + 4 * i), kept)
            store(m + 4 * i, _moment(mean))
            store(v + 4 * i, _moment(square))
            store(p + 4 * i, sub(new, div(mul(rate, mean), fma(sqrt(square), unroot, small))))
            i += 16
        while i < count:
            mask = first(count - i)
            param = load_first(p + 4 * i, mask)
            grad = _slope(way, load_first(g + 4 * i, mask), blend, param, blends)
            mean = fma(b1, load_first(m + 4 * i, mask), mul(c1, grad))
            square = fma(b2, load_first(v + 4 * i, mask), mul(mul(c2, grad), grad))
            store_first(m + 4 * i, _moment(mean), mask)
            store_first(v + 4 * i, _moment(square), mask)
            if top:
                square = maximum(load_first(top + 4 * i, mask), square)
                store_first(top + 4 * i, square, mask)
            new = sub(mul(param, kept), div(mul(rate, mean), fma(sqrt(square), unroot, small)))
            store_first(p + 4 * i, new, mask)
            i += 16


@native
def sgd(row: Any) -> None:
    """Numbers: momentum, dampening, decay. Moments: b, or 0; in the first step it is the gradient.

    Source: Sutskever et al. 2013, section 2, as torch has it.
    """
    if skipped(row):
        return
    lr, momentum, decay = load_f64(cell(row, 2)), number(row, 4), number(row, 6)
    way, blend, blends, rate, mu = sign_of(row), splat(F(decay)), decay != 0.0, splat(F(lr)), splat(F(momentum))
    for k in range(cell(row, 1)):
        one = row + BYTES + k * (BYTES // 2)
        count, p, g, b = cell(one, 0), cell(one, 1), cell(one, 2), cell(one, 4)
        new, taken = counted(one) == 1.0, splat(F(1.0 - number(row, 5)))
        for i in range(0, count, 16):
            mask = first(count - i)
            param = load_first(p + 4 * i, mask)
            step = _slope(way, load_first(g + 4 * i, mask), blend, param, blends)
            if b:
                held = step if new else fma(mu, load_first(b + 4 * i, mask), mul(taken, step))
                store_first(b + 4 * i, _moment(held), mask)
                step = fma(mu, held, step) if cell(row, 9) & NESTEROV else held
            store_first(p + 4 * i, sub(param, mul(rate, step)), mask)


@native
def rmsprop(row: Any) -> None:
    """Numbers: α, eps, decay, momentum. Moments: v, then b or 0, then the mean of gradients or 0.

    Source: Graves 2013, "Generating Sequences With Recurrent Neural Networks", equations 38 to 45.
    """
    if skipped(row):
        return
    lr, alpha, decay = load_f64(cell(row, 2)), number(row, 4), number(row, 6)
    way, blend, blends, rate, small = (
        sign_of(row),
        splat(F(decay)),
        decay != 0.0,
        splat(F(lr)),
        splat(F(number(row, 5))),
    )
    old, fresh, mu = splat(F(alpha)), splat(F(1.0 - alpha)), splat(F(number(row, 7)))
    for k in range(cell(row, 1)):
        one = row + BYTES + k * (BYTES // 2)
        count, p, g, v, b, a = cell(one, 0), cell(one, 1), cell(one, 2), cell(one, 4), cell(one, 5), cell(one, 6)
        counted(one)
        for i in range(0, count, 16):
            mask = first(count - i)
            param = load_first(p + 4 * i, mask)
            grad = _slope(way, load_first(g + 4 * i, mask), blend, param, blends)
            square = fma(old, load_first(v + 4 * i, mask), mul(mul(fresh, grad), grad))
            store_first(v + 4 * i, _moment(square), mask)
            if a:
                mean = load_first(a + 4 * i, mask)
                mean = fma(fresh, sub(grad, mean), mean)
                store_first(a + 4 * i, _moment(mean), mask)
                square = fma(neg(mean), mean, square)
            step = div(grad, add(sqrt(square), small))
            if b:
                step = fma(mu, load_first(b + 4 * i, mask), step)
                store_first(b + 4 * i, _moment(step), mask)
            store_first(p + 4 * i, sub(param, mul(rate, step)), mask)


@native
def _towards(start: Any, end: Any, share: Any) -> Any:
    """A share of the way from one value to another, as ATen's lerp rounds it: from the nearer end."""
    if share < 0.5:
        return fma(splat(F(share)), sub(end, start), start)
    return fma(splat(F(share - 1.0)), sub(end, start), end)


@native
def lion(row: Any) -> None:
    """Numbers: β₁, β₂, decay. Moment: m.

    Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2.
    """
    if skipped(row):
        return
    lr, early, late = load_f64(cell(row, 2)), 1.0 - number(row, 4), 1.0 - number(row, 5)
    way, kept, rate = sign_of(row), splat(F(1.0 - lr * number(row, 6))), splat(F(lr))
    for k in range(cell(row, 1)):
        one = row + BYTES + k * (BYTES // 2)
        count, p, g, m = cell(one, 0), cell(one, 1), cell(one, 2), cell(one, 4)
        counted(one)
        for i in range(0, count, 16):
            mask = first(count - i)
            grad, mean = mul(way, load_first(g + 4 * i, mask)), load_first(m + 4 * i, mask)
            step = mul(rate, sign(_towards(mean, grad, early)))
            store_first(p + 4 * i, sub(mul(load_first(p + 4 * i, mask), kept), step), mask)
            store_first(m + 4 * i, _moment(_towards(mean, grad, late)), mask)


@native
def average(row: Any) -> None:
    """Targets drawn towards sources: cells 1 how many, 2 where τ (float64) lies; half a row: count, target, source."""
    share = load_f64(cell(row, 2))
    for k in range(cell(row, 1)):
        one = row + BYTES + k * (BYTES // 2)
        count, target, source = cell(one, 0), cell(one, 1), cell(one, 2)
        for i in range(0, count, 16):
            mask = first(count - i)
            new = _towards(load_first(target + 4 * i, mask), load_first(source + 4 * i, mask), share)
            store_first(target + 4 * i, new, mask)
