"""Steps of optimizers as rows of code; the formulas are those of `array.formulas.optimizers`.

A step's row: cell 1 the number of parameters, 2 the address of lr (float64), 3 the address of a float32 flag that
skips the step, from 4 on numbers, 9 flags as bits. Then half a row for each parameter: count, parameter, gradient,
steps made, and moments. Everything is updated in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.formulas.optimizers import QUINTIC
from graphwright.array.vm.code import BYTES, TILES_END, Code
from graphwright.array.vm.elementwise import F, cell, number
from graphwright.array.vm.gemm import gemm
from graphwright.array.vm.math import native, updates
from graphwright.array.vm.vector import (
    first,
    load,
    load_f32,
    load_f64,
    load_first,
    maximum,
    store,
    store_f32,
    store_first,
)

MAXIMIZE, AMSGRAD, NESTEROV, CENTERED = 1, 2, 2, 2
"""Bits of cell 9; the meaning of bit 1 depends on the optimizer."""
_A, _B, _C = map(F, QUINTIC)


@native
def _powers(x: Any, y: Any, n: Any) -> Any:
    """(xⁿ, yⁿ) for whole n >= 0, by squaring."""
    a, b = 1.0, 1.0
    while n > 0:
        a, b = a * (x if n & 1 else 1.0), b * (y if n & 1 else 1.0)
        x, y, n = x * x, y * y, n >> 1
    return a, b


@native
def _skipped(row: Any) -> Any:
    """True if the gradients held an infinity or NaN."""
    return load_f32(cell(row, 3)) != 0.0


@native
def _sign(row: Any) -> Any:
    """The factor of gradients: -1 to maximize."""
    return F(-1.0) if cell(row, 9) & MAXIMIZE else F(1.0)


@native
def _counted(one: Any) -> Any:
    """Increment a parameter's step count and return it."""
    steps = np.float64(load_f32(cell(one, 3))) + 1.0
    store_f32(cell(one, 3), F(steps))
    return steps


@native
def _gradient(way: Any, grad: Any, decay: Any, param: Any) -> Any:
    """The signed gradient, with weight decay added where there is any."""
    grad = way * grad
    return updates.with_decay(grad, decay, param) if decay != 0.0 else grad


@native
def _adam(row: Any, decoupled: Any) -> None:
    """Numbers: β₁, β₂, eps, decay (applied to the parameter if `decoupled`). Moments: m, v, and largest v or 0.

    Source: Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization",
    algorithm 2; Reddi, Kale and Kumar 2018, algorithm 2.
    """
    if _skipped(row):
        return
    lr, beta1, beta2, decay = load_f64(cell(row, 2)), number(row, 4), number(row, 5), number(row, 7)
    b1, b2, c1, c2, eps = F(beta1), F(beta2), F(1.0 - beta1), F(1.0 - beta2), F(number(row, 6))
    keep, blend, way = F(1.0 - lr * decay) if decoupled else F(1.0), 0.0 if decoupled else decay, _sign(row)
    plain, known, rate, scale = cell(row, 9) == 0 and blend == 0.0, -1.0, F(0.0), F(0.0)
    for k in range(cell(row, 1)):
        one = row + BYTES + k * (BYTES // 2)
        count, p, g, m, v, top = cell(one, 0), cell(one, 1), cell(one, 2), cell(one, 4), cell(one, 5), cell(one, 6)
        steps = _counted(one)
        if steps != known:  # most often all parameters have made the same number of steps
            known = steps
            power1, power2 = _powers(beta1, beta2, np.int64(steps))
            rate64, scale64 = updates.adam_scales(lr, power1, power2)
            rate, scale = F(rate64), F(scale64)
        if count == 1 and plain:
            mean, square = updates.adam_moments(load_f32(g), load_f32(m), load_f32(v), b1, b2, c1, c2)
            store_f32(p, load_f32(p) * keep - updates.adam_update(mean, square, rate, scale, eps))
            store_f32(m, updates.flushed(mean))
            store_f32(v, updates.flushed(square))
            continue
        i = 0
        while plain and i + 16 <= count:
            mean, square = updates.adam_moments(load(g + 4 * i), load(m + 4 * i), load(v + 4 * i), b1, b2, c1, c2)
            kept = load(p + 4 * i) * keep
            store(m + 4 * i, updates.flushed(mean))
            store(v + 4 * i, updates.flushed(square))
            store(p + 4 * i, kept - updates.adam_update(mean, square, rate, scale, eps))
            i += 16
        while i < count:
            mask = first(count - i)
            param = load_first(p + 4 * i, mask)
            grad = _gradient(way, load_first(g + 4 * i, mask), blend, param)
            mean, square = updates.adam_moments(
                grad, load_first(m + 4 * i, mask), load_first(v + 4 * i, mask), b1, b2, c1, c2
            )
            store_first(m + 4 * i, updates.flushed(mean), mask)
            store_first(v + 4 * i, updates.flushed(square), mask)
            if top:
                square = maximum(load_first(top + 4 * i, mask), square)
                store_first(top + 4 * i, square, mask)
            store_first(p + 4 * i, param * keep - updates.adam_update(mean, square, rate, scale, eps), mask)
            i += 16


@native
def _sgd(row: Any) -> None:
    """Numbers: momentum, dampening, decay. Moments: b or 0; the first step sets b to the gradient.

    Source: Sutskever et al. 2013, section 2, as PyTorch implements it.
    """
    if _skipped(row):
        return
    lr, mu, fresh, decay = load_f64(cell(row, 2)), number(row, 4), 1.0 - number(row, 5), number(row, 6)
    way, nesterov = _sign(row), cell(row, 9) & NESTEROV
    for k in range(cell(row, 1)):
        one = row + BYTES + k * (BYTES // 2)
        count, p, g, b, new = cell(one, 0), cell(one, 1), cell(one, 2), cell(one, 4), _counted(one) == 1.0
        for i in range(0, count, 16):
            mask = first(count - i)
            param = load_first(p + 4 * i, mask)
            step = _gradient(way, load_first(g + 4 * i, mask), decay, param)
            if b:
                held = step if new else updates.momentum(load_first(b + 4 * i, mask), step, mu, fresh)
                store_first(b + 4 * i, updates.flushed(held), mask)
                step = updates.momentum(held, step, mu, 1.0) if nesterov else held
            store_first(p + 4 * i, param - lr * step, mask)


@native
def _rmsprop(row: Any) -> None:
    """Numbers: α, eps, decay, momentum. Moments: v, then b or 0, then the mean of gradients or 0.

    Source: Graves 2013, "Generating Sequences With Recurrent Neural Networks", equations 38 to 45.
    """
    if _skipped(row):
        return
    lr, alpha, eps, decay, mu = load_f64(cell(row, 2)), number(row, 4), number(row, 5), number(row, 6), number(row, 7)
    way = _sign(row)
    for k in range(cell(row, 1)):
        one = row + BYTES + k * (BYTES // 2)
        count, p, g, v, b, a = cell(one, 0), cell(one, 1), cell(one, 2), cell(one, 4), cell(one, 5), cell(one, 6)
        _counted(one)
        for i in range(0, count, 16):
            mask = first(count - i)
            param = load_first(p + 4 * i, mask)
            grad = _gradient(way, load_first(g + 4 * i, mask), decay, param)
            square = updates.rmsprop_square(load_first(v + 4 * i, mask), grad, alpha, 1.0 - alpha)
            store_first(v + 4 * i, updates.flushed(square), mask)
            if a:
                mean = updates.rmsprop_mean(load_first(a + 4 * i, mask), grad, 1.0 - alpha)
                store_first(a + 4 * i, updates.flushed(mean), mask)
                square = updates.rmsprop_centered(square, mean)
            step = updates.rmsprop_update(grad, square, eps)
            if b:
                step = updates.momentum(load_first(b + 4 * i, mask), step, mu, 1.0)
                store_first(b + 4 * i, updates.flushed(step), mask)
            store_first(p + 4 * i, param - lr * step, mask)


@native
def _lion(row: Any) -> None:
    """Numbers: β₁, β₂, decay. Moment: m.

    Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2.
    """
    if _skipped(row):
        return
    lr, early, late = load_f64(cell(row, 2)), 1.0 - number(row, 4), 1.0 - number(row, 5)
    way, keep = _sign(row), 1.0 - lr * number(row, 6)
    for k in range(cell(row, 1)):
        one = row + BYTES + k * (BYTES // 2)
        count, p, g, m = cell(one, 0), cell(one, 1), cell(one, 2), cell(one, 4)
        _counted(one)
        for i in range(0, count, 16):
            mask = first(count - i)
            grad, mean = way * load_first(g + 4 * i, mask), load_first(m + 4 * i, mask)
            new = load_first(p + 4 * i, mask) * keep - updates.lion_update(mean, grad, lr, early)
            store_first(p + 4 * i, new, mask)
            store_first(m + 4 * i, updates.flushed(updates.lerp(mean, grad, late)), mask)


@native
def _average(row: Any) -> None:
    """Move targets towards sources: cells 1 how many, 2 the address of τ; half a row each: count, target, source."""
    share = load_f64(cell(row, 2))
    for k in range(cell(row, 1)):
        one = row + BYTES + k * (BYTES // 2)
        count, target, source = cell(one, 0), cell(one, 1), cell(one, 2)
        for i in range(0, count, 16):
            mask = first(count - i)
            new = updates.lerp(load_first(target + 4 * i, mask), load_first(source + 4 * i, mask), share)
            store_first(target + 4 * i, new, mask)


@native
def _multiplied(target: Any, source: Any, count: Any, factor: Any) -> None:
    for i in range(count):
        store_f32(target + 4 * i, load_f32(source + 4 * i) * factor)


@native
def _muon(row: Any, scratch: Any) -> None:
    """Numbers: momentum, eps, decay, iterations. Half a row: as above, then moment, rows, columns, scale.

    For matrices that fit the scratch; one with more rows than columns is orthogonalised as its transpose.
    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".
    """
    if _skipped(row):
        return
    lr, eps, turns, fresh = load_f64(cell(row, 2)), F(number(row, 5)), np.int64(number(row, 7)), F(1.0 - number(row, 4))
    keep, way, ahead, mu = F(1.0 - lr * number(row, 6)), _sign(row), cell(row, 9) & NESTEROV, F(number(row, 4))
    for k in range(cell(row, 1)):
        one = row + BYTES + k * (BYTES // 2)
        p, g, m, height, width = cell(one, 1), cell(one, 2), cell(one, 4), cell(one, 5), cell(one, 6)
        _counted(one)
        short, long, flat = min(height, width), max(height, width), height <= width
        x = scratch + TILES_END
        y = x + 4 * short * long
        square = y + 4 * short * long
        fourth = square + 4 * short * short
        whole = 0.0
        for r in range(height):
            for c in range(width):
                at = 4 * (r * width + c)
                grad = way * load_f32(g + at)
                mean = load_f32(m + at) + fresh * (grad - load_f32(m + at))
                store_f32(m + at, mean)
                if ahead:
                    mean = grad + mu * (mean - grad)
                store_f32(x + (at if flat else 4 * (c * height + r)), mean)
                whole += np.float64(mean) * np.float64(mean)
        _multiplied(x, x, short * long, F(1.0) / max(F(np.sqrt(whole)), eps))
        for _ in range(turns):
            gemm(x, 4 * long, 4, x, 4, 4 * long, square, 4 * short, short, short, long, 0, 0, scratch)
            gemm(square, 4 * short, 4, square, 4 * short, 4, fourth, 4 * short, short, short, short, 0, 0, scratch)
            for i in range(short * short):
                at = 4 * i
                store_f32(fourth + at, _C * load_f32(fourth + at) + _B * load_f32(square + at))
            _multiplied(y, x, short * long, _A)
            gemm(fourth, 4 * short, 4, x, 4 * long, 4, y, 4 * long, short, long, short, y, 4 * long, scratch)
            x, y = y, x
        rate = F(lr * number(one, 7))
        for r in range(height):
            for c in range(width):
                at = 4 * (r * width + c)
                step = load_f32(x + (at if flat else 4 * (c * height + r)))
                store_f32(p + at, load_f32(p + at) * keep - rate * step)


@native
def step(row: Any, op: Any, scratch: Any) -> None:
    """Run the optimizer step of a row by its code."""
    if op == Code.ADAM or op == Code.ADAMW:
        _adam(row, op == Code.ADAMW)
    elif op == Code.SGD:
        _sgd(row)
    elif op == Code.RMSPROP:
        _rmsprop(row)
    elif op == Code.LION:
        _lion(row)
    elif op == Code.MUON:
        _muon(row, scratch)
    else:
        _average(row)
