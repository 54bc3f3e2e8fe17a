"""Steps of optimizers as instructions; the formulas are those of `array.formulas.optimizers`.

Words of an instruction: 1 number of parameters, 2 address of lr (float64), 3 address of float32 flags that, if not 0,
skip a parameter, 4 to 8 hyperparameters, 9 options as bits, 10 bytes from a parameter's flag to the next: 0 or 4. Then
half a row (8 words) for each parameter: its number of elements, and the addresses of the parameter, gradient, step
count and moments. Everything is updated in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.formulas.optimizers import QUINTIC
from graphwright.array.vm import vector as vec
from graphwright.array.vm.code import BYTES, TILES_END, Code
from graphwright.array.vm.elementwise import F, cell, loop, number
from graphwright.array.vm.math import native, updates
from graphwright.array.vm.other_products import gemm

MAXIMIZE, AMSGRAD, NESTEROV, CENTERED = 1, 2, 2, 2
"""Values of the flags in word 9; the meaning of 2 depends on the optimizer."""
_A, _B, _C = map(F, QUINTIC)


@native
def _powers(x: Any, y: Any, n: Any) -> Any:
    """(xⁿ, yⁿ) for an integer n >= 0, by squaring."""
    a, b = 1.0, 1.0
    while n > 0:
        a, b = a * (x if n & 1 else 1.0), b * (y if n & 1 else 1.0)
        x, y, n = x * x, y * y, n >> 1
    return a, b


@native
def _skipped(row: Any, k: Any) -> Any:
    """Return whether the flag of parameter k says that it is not updated."""
    return vec.load_f32(cell(row, 3) + k * cell(row, 10)) != 0.0


@native
def _lines(row: Any) -> Any:
    """Return how many rows of code the parameter list after the instruction takes; each row holds two parameters."""
    return (cell(row, 1) + 1) // 2


@native
def _sign(row: Any) -> Any:
    """Return the factor of gradients: -1 if the instruction maximizes, else 1."""
    return F(-1.0) if cell(row, 9) & MAXIMIZE else F(1.0)


@native
def _counted(one: Any) -> Any:
    """Increment a parameter's step count and return it."""
    steps = np.float64(vec.load_f32(cell(one, 3))) + 1.0
    vec.store_f32(cell(one, 3), F(steps))
    return steps


@native
def _gradient(way: Any, grad: Any, decay: Any, param: Any) -> Any:
    """Return way·grad, plus decay·param if decay is not 0; `way` is 1 or -1, see `_sign`."""
    grad = way * grad
    return updates.with_decay(grad, decay, param) if decay != 0.0 else grad


@loop(Code.ADAM, Code.ADAMW)
def adam(row: Any) -> Any:
    """Update parameters by Adam or AdamW.

    Hyperparameters: β₁, β₂, eps, weight decay (ADAMW: decoupled). Moments: m, v, largest v so far (address 0: unused).
    Source: Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization",
    algorithm 2; Reddi, Kale and Kumar 2018, algorithm 2.
    """
    decoupled = cell(row, 0) == Code.ADAMW
    lr, beta1, beta2, decay = vec.load_f64(cell(row, 2)), number(row, 4), number(row, 5), number(row, 7)
    b1, b2, c1, c2, eps = F(beta1), F(beta2), F(1.0 - beta1), F(1.0 - beta2), F(number(row, 6))
    keep, blend, way = F(1.0 - lr * decay) if decoupled else F(1.0), 0.0 if decoupled else decay, _sign(row)
    plain, known, rate, scale = cell(row, 9) == 0 and blend == 0.0, -1.0, F(0.0), F(0.0)
    for k in range(cell(row, 1)):
        if _skipped(row, k):
            continue
        one = row + BYTES + k * (BYTES // 2)
        count, p, g, m, v, top = cell(one, 0), cell(one, 1), cell(one, 2), cell(one, 4), cell(one, 5), cell(one, 6)
        steps = _counted(one)
        if steps != known:  # most often all parameters have made the same number of steps
            known = steps
            power1, power2 = _powers(beta1, beta2, np.int64(steps))
            rate64, scale64 = updates.adam_scales(lr, power1, power2)
            rate, scale = F(rate64), F(scale64)
        if count == 1 and plain:
            mean, square = updates.adam_moments(vec.load_f32(g), vec.load_f32(m), vec.load_f32(v), b1, b2, c1, c2)
            vec.store_f32(p, vec.load_f32(p) * keep - updates.adam_update(mean, square, rate, scale, eps))
            vec.store_f32(m, updates.flushed(mean))
            vec.store_f32(v, updates.flushed(square))
            continue
        i = 0
        while plain and i + 16 <= count:
            grad, mean, square = vec.load(g + 4 * i), vec.load(m + 4 * i), vec.load(v + 4 * i)
            mean, square = updates.adam_moments(grad, mean, square, b1, b2, c1, c2)
            kept = vec.load(p + 4 * i) * keep
            vec.store(m + 4 * i, updates.flushed(mean))
            vec.store(v + 4 * i, updates.flushed(square))
            vec.store(p + 4 * i, kept - updates.adam_update(mean, square, rate, scale, eps))
            i += 16
        while i < count:
            mask = vec.first(count - i)
            param = vec.load_first(p + 4 * i, mask)
            grad = _gradient(way, vec.load_first(g + 4 * i, mask), blend, param)
            mean, square = updates.adam_moments(
                grad, vec.load_first(m + 4 * i, mask), vec.load_first(v + 4 * i, mask), b1, b2, c1, c2
            )
            vec.store_first(m + 4 * i, updates.flushed(mean), mask)
            vec.store_first(v + 4 * i, updates.flushed(square), mask)
            if top:
                square = vec.maximum(vec.load_first(top + 4 * i, mask), square)
                vec.store_first(top + 4 * i, square, mask)
            vec.store_first(p + 4 * i, param * keep - updates.adam_update(mean, square, rate, scale, eps), mask)
            i += 16
    return _lines(row)


@loop(Code.SGD)
def sgd(row: Any) -> Any:
    """Update parameters by SGD.

    Hyperparameters: momentum, dampening, weight decay. Moment: buffer b (address 0: unused), first set to the gradient.
    Source: Sutskever et al. 2013, section 2, as PyTorch implements it.
    """
    lr, mu, fresh, decay = vec.load_f64(cell(row, 2)), number(row, 4), 1.0 - number(row, 5), number(row, 6)
    way, nesterov = _sign(row), cell(row, 9) & NESTEROV
    for k in range(cell(row, 1)):
        if _skipped(row, k):
            continue
        one = row + BYTES + k * (BYTES // 2)
        count, p, g, b, new = cell(one, 0), cell(one, 1), cell(one, 2), cell(one, 4), _counted(one) == 1.0
        for i in range(0, count, 16):
            mask = vec.first(count - i)
            param = vec.load_first(p + 4 * i, mask)
            step = _gradient(way, vec.load_first(g + 4 * i, mask), decay, param)
            if b:
                held = step if new else updates.momentum(vec.load_first(b + 4 * i, mask), step, mu, fresh)
                vec.store_first(b + 4 * i, updates.flushed(held), mask)
                step = updates.momentum(held, step, mu, 1.0) if nesterov else held
            vec.store_first(p + 4 * i, param - lr * step, mask)
    return _lines(row)


@loop(Code.RMSPROP)
def rmsprop(row: Any) -> Any:
    """Update parameters by RMSprop.

    Hyperparameters: α, eps, weight decay, momentum. Moments: v, buffer b, mean of gradients (address 0: unused).
    Source: Graves 2013, "Generating Sequences With Recurrent Neural Networks", equations 38 to 45.
    """
    lr, way = vec.load_f64(cell(row, 2)), _sign(row)
    alpha, eps, decay, mu = number(row, 4), number(row, 5), number(row, 6), number(row, 7)
    for k in range(cell(row, 1)):
        if _skipped(row, k):
            continue
        one = row + BYTES + k * (BYTES // 2)
        count, p, g, v, b, a = cell(one, 0), cell(one, 1), cell(one, 2), cell(one, 4), cell(one, 5), cell(one, 6)
        _counted(one)
        for i in range(0, count, 16):
            mask = vec.first(count - i)
            param = vec.load_first(p + 4 * i, mask)
            grad = _gradient(way, vec.load_first(g + 4 * i, mask), decay, param)
            square = updates.rmsprop_square(vec.load_first(v + 4 * i, mask), grad, alpha, 1.0 - alpha)
            vec.store_first(v + 4 * i, updates.flushed(square), mask)
            if a:
                mean = updates.lerp(vec.load_first(a + 4 * i, mask), grad, 1.0 - alpha)
                vec.store_first(a + 4 * i, updates.flushed(mean), mask)
                square = updates.rmsprop_centered(square, mean)
            step = updates.rmsprop_update(grad, square, eps)
            if b:
                step = updates.momentum(vec.load_first(b + 4 * i, mask), step, mu, 1.0)
                vec.store_first(b + 4 * i, updates.flushed(step), mask)
            vec.store_first(p + 4 * i, param - lr * step, mask)
    return _lines(row)


@loop(Code.LION)
def lion(row: Any) -> Any:
    """Update parameters by Lion.

    Hyperparameters: β₁, β₂, weight decay. Moment: m.
    Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2.
    """
    lr, early, late = vec.load_f64(cell(row, 2)), 1.0 - number(row, 4), 1.0 - number(row, 5)
    way, keep = _sign(row), 1.0 - lr * number(row, 6)
    for k in range(cell(row, 1)):
        if _skipped(row, k):
            continue
        one = row + BYTES + k * (BYTES // 2)
        count, p, g, m = cell(one, 0), cell(one, 1), cell(one, 2), cell(one, 4)
        _counted(one)
        for i in range(0, count, 16):
            mask = vec.first(count - i)
            grad, mean = way * vec.load_first(g + 4 * i, mask), vec.load_first(m + 4 * i, mask)
            new = vec.load_first(p + 4 * i, mask) * keep - updates.lion_update(mean, grad, lr, early)
            vec.store_first(p + 4 * i, new, mask)
            vec.store_first(m + 4 * i, updates.flushed(updates.lerp(mean, grad, late)), mask)
    return _lines(row)


@loop(Code.AVERAGE)
def average(row: Any) -> Any:
    """target += τ·(source - target), for several arrays.

    Instruction words: 1 number of arrays, 2 address of τ; then half a row per array: its size, target, source.
    """
    share = vec.load_f64(cell(row, 2))
    for k in range(cell(row, 1)):
        one = row + BYTES + k * (BYTES // 2)
        count, target, source = cell(one, 0), cell(one, 1), cell(one, 2)
        for i in range(0, count, 16):
            mask = vec.first(count - i)
            new = updates.lerp(vec.load_first(target + 4 * i, mask), vec.load_first(source + 4 * i, mask), share)
            vec.store_first(target + 4 * i, new, mask)
    return _lines(row)


@native
def _multiplied(target: Any, source: Any, count: Any, factor: Any) -> None:
    for i in range(count):
        vec.store_f32(target + 4 * i, vec.load_f32(source + 4 * i) * factor)


@loop(Code.ZERO_CHECK)
def zero_check(row: Any) -> Any:
    """The flag of each gradient: the larger of found_inf and whether the gradient is zero everywhere.

    Instruction words: 1 number of gradients, 2 address of the flags (float32), 3 address of found_inf; then half a row
    per gradient: its size and address.
    """
    out, found = cell(row, 2), vec.load_f32(cell(row, 3))
    for k in range(cell(row, 1)):
        one = row + BYTES + k * (BYTES // 2)
        count, g, i = cell(one, 0), cell(one, 1), 0
        while i < count and vec.largest(vec.absolute(vec.load_first(g + 4 * i, vec.first(count - i)))) == 0.0:
            i += 16
        vec.store_f32(out + 4 * k, max(found, F(1.0) if i >= count else F(0.0)))
    return _lines(row)


@loop(Code.MUON)
def muon(row: Any, scratch: Any) -> Any:
    """Update parameters by Muon.

    Hyperparameters: momentum, eps, weight decay, iterations. Half rows end with the moment, rows, columns and scale.
    Each matrix must fit the scratch; one with more rows than columns is orthogonalised as its transpose.
    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".
    """
    lr, turns = vec.load_f64(cell(row, 2)), np.int64(number(row, 7))
    eps, fresh = F(number(row, 5)), F(1.0 - number(row, 4))
    keep, way, ahead, mu = F(1.0 - lr * number(row, 6)), _sign(row), cell(row, 9) & NESTEROV, F(number(row, 4))
    for k in range(cell(row, 1)):
        if _skipped(row, k):
            continue
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
                grad = way * vec.load_f32(g + at)
                mean = F(updates.lerp(vec.load_f32(m + at), grad, fresh))
                vec.store_f32(m + at, mean)
                if ahead:
                    mean = F(updates.lerp(grad, mean, mu))
                vec.store_f32(x + (at if flat else 4 * (c * height + r)), mean)
                whole += np.float64(mean) * np.float64(mean)
        _multiplied(x, x, short * long, F(1.0) / max(F(np.sqrt(whole)), eps))
        for _ in range(turns):
            gemm(x, 4 * long, 4, x, 4, 4 * long, square, 4 * short, short, short, long, 0, 0, scratch)
            gemm(square, 4 * short, 4, square, 4 * short, 4, fourth, 4 * short, short, short, short, 0, 0, scratch)
            for i in range(short * short):
                at = 4 * i
                vec.store_f32(fourth + at, _C * vec.load_f32(fourth + at) + _B * vec.load_f32(square + at))
            _multiplied(y, x, short * long, _A)
            gemm(fourth, 4 * short, 4, x, 4 * long, 4, y, 4 * long, short, long, short, y, 4 * long, scratch)
            x, y = y, x
        rate = F(lr * number(one, 7))
        for r in range(height):
            for c in range(width):
                at = 4 * (r * width + c)
                step = vec.load_f32(x + (at if flat else 4 * (c * height + r)))
                vec.store_f32(p + at, vec.load_f32(p + at) * keep - rate * step)
    return _lines(row)
