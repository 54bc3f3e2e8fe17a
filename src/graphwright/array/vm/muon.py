"""Muon's step as a row of code, for matrices that fit the scratch: momentum with singular values drawn towards 1."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.vm.code import BYTES, TILES_END
from graphwright.array.vm.elementwise import F, cell, number
from graphwright.array.vm.gemm import gemm
from graphwright.array.vm.math import native
from graphwright.array.vm.update import MAXIMIZE, NESTEROV, counted, skipped
from graphwright.array.vm.vector import load_f32, load_f64, store_f32

_A, _B, _C = F(3.4445), F(-4.7750), F(2.0315)
"""Coefficients of the iteration, chosen for the steepest slope at 0 (Jordan et al. 2024)."""


@native
def _scaled(target: Any, source: Any, count: Any, factor: Any) -> None:
    for i in range(count):
        store_f32(target + 4 * i, load_f32(source + 4 * i) * factor)


@native
def muon(row: Any, scratch: Any) -> None:
    """Numbers: momentum, eps, decay, iterations; flags as of `update`. Half a row: .., moment, rows, columns, scale.

    A high matrix is worked on lying down. Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural
    networks".
    """
    if skipped(row):
        return
    lr, momentum, eps = load_f64(cell(row, 2)), number(row, 4), F(number(row, 5))
    kept, turns, fresh = F(1.0 - lr * number(row, 6)), np.int64(number(row, 7)), F(1.0 - number(row, 4))
    climbs, ahead, mu = cell(row, 9) & MAXIMIZE, cell(row, 9) & NESTEROV, F(momentum)
    for k in range(cell(row, 1)):
        one = row + BYTES + k * (BYTES // 2)
        p, g, m, height, width = cell(one, 1), cell(one, 2), cell(one, 4), cell(one, 5), cell(one, 6)
        counted(one)
        short, long, lies = min(height, width), max(height, width), height <= width
        x = scratch + TILES_END
        y = x + 4 * short * long
        square = y + 4 * short * long
        fourth = square + 4 * short * short
        whole = 0.0
        for r in range(height):
            for c in range(width):
                at = 4 * (r * width + c)
                grad = load_f32(g + at)
                if climbs:
                    grad = -grad
                mean = load_f32(m + at) + fresh * (grad - load_f32(m + at))
                store_f32(m + at, mean)
                if ahead:
                    mean = grad + mu * (mean - grad)
                store_f32(x + (at if lies else 4 * (c * height + r)), mean)
                whole += np.float64(mean) * np.float64(mean)
        _scaled(x, x, short * long, F(1.0) / max(F(np.sqrt(whole)), eps))
        for _ in range(turns):
            gemm(x, 4 * long, 4, x, 4, 4 * long, square, 4 * short, short, short, long, 0, 0, scratch)
            gemm(square, 4 * short, 4, square, 4 * short, 4, fourth, 4 * short, short, short, short, 0, 0, scratch)
            for i in range(short * short):
                at = 4 * i
                store_f32(fourth + at, _C * load_f32(fourth + at) + _B * load_f32(square + at))
            _scaled(y, x, short * long, _A)
            gemm(fourth, 4 * short, 4, x, 4 * long, 4, y, 4 * long, short, long, short, y, 4 * long, scratch)
            x, y = y, x
        rate = F(lr * number(one, 7))
        for r in range(height):
            for c in range(width):
                at = 4 * (r * width + c)
                step = load_f32(x + (at if lies else 4 * (c * height + r)))
                store_f32(p + at, load_f32(p + at) * kept - rate * step)
