"""Mixtures of experts: tokens grouped by expert, and the sum of their experts' results with its gradient, in float32.

The tokens of one expert are gathered in tiles, which `products.gemm` multiplies, and the results are added to the rows
of their tokens. Tiles follow one another in the order of the experts, so the sum of a token has a fixed order.

Words of EXPERTS, EXPERTS_BACKWARD and EXPERT_PROBE: 1 tokens N, 2 width C, 3 tokens of a tile, 4 experts E, 5 kind (an
index in `KINDS`), 6 activation (an index in `ACTS`), 7 entries R of rows and of pairs, 8 entries of the weights, 9 x,
10 offsets, 11 rows, 12 pairs, 13 weights, 14 the result or the gradient of x (0: not wanted), 15 gradient of the
result, 16 gradient of the weights (0: not wanted). For EXPERT_PROBE 13 is 0 (all weights are 1), 14 is the gain of each
entry of the weights, and 16 its surprise. Words 17 to 24 are the addresses of work of one tile, [tile, C] x, g, o, then
[tile, I] a, v, s, h, t. From word 32 on, `EXPERT_CELLS` words for each expert: I, then for gate, up and down six words:
address of the matrix (0: no gate), bytes per row and per column, address of its bias (0: none), and the addresses of
the gradients of both (0: not wanted).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.formulas.experts import LIMIT, SLOPE
from graphwright.array.vm import vector as vec
from graphwright.array.vm.code import Code
from graphwright.array.vm.elementwise import F, cell, loop
from graphwright.array.vm.math import formulas, native, tanh
from graphwright.array.vm.products import gemm

KINDS = ("mlp", "gated", "oai")
ACTS = ("silu", "relu", "tanh", "sigmoid", "gelu", "gelu_tanh")
TABLE, EXPERT_CELLS = 32, 20
"""The word at which the experts begin, and the words of each."""
_MLP, _OAI = KINDS.index("mlp"), KINDS.index("oai")
_GATE, _UP, _DOWN = 1, 7, 13
_LIMIT, _SLOPE = F(LIMIT), F(SLOPE)


@loop(Code.DISPATCH)
def dispatch(row: Any) -> Any:
    """Group tokens by expert with a stable counting sort; -1 if an id is not below the number of experts.

    Words: 1 tokens, 2 columns of the choice, 3 experts, 4 the choice, 5 whether it is a mask, 6 offsets, 7 rows,
    8 pairs.
    """
    columns, experts, choice, mask = cell(row, 2), cell(row, 3), cell(row, 4), cell(row, 5)
    offsets, rows, pairs, count = cell(row, 6), cell(row, 7), cell(row, 8), cell(row, 1) * cell(row, 2)
    for e in range(experts + 1):
        vec.store_i64(offsets + 8 * e, 0)
    for i in range(count):
        e = _chosen(choice, mask, columns, i)
        if e >= experts:
            return -1
        if e >= 0:
            at = offsets + 8 * (e + 1)
            vec.store_i64(at, vec.load_i64(at) + 1)
    for e in range(experts):
        at = offsets + 8 * (e + 1)
        vec.store_i64(at, vec.load_i64(at) + vec.load_i64(at - 8))
    total = vec.load_i64(offsets + 8 * experts)
    for i in range(count):
        e = _chosen(choice, mask, columns, i)
        if e >= 0:
            at = vec.load_i64(offsets + 8 * e)
            vec.store_i64(offsets + 8 * e, at + 1)  # until its last token is placed, where the next one goes
            vec.store_i64(rows + 8 * at, i // columns)
            vec.store_i64(pairs + 8 * at, i)
    for e in range(experts, 0, -1):
        vec.store_i64(offsets + 8 * e, vec.load_i64(offsets + 8 * (e - 1)))
    vec.store_i64(offsets, 0)
    for i in range(total, count):
        vec.store_i64(rows + 8 * i, 0)
        vec.store_i64(pairs + 8 * i, 0)
    return 0


@native
def _chosen(choice: Any, mask: Any, columns: Any, i: Any) -> Any:
    """Return the expert of entry i of a choice, or a negative number."""
    if mask:
        return i % columns if vec.load_u8(choice + i) != 0 else -1
    return vec.load_i64(choice + 8 * i)


@native
def _invalid(row: Any) -> Any:
    """Return whether offsets do not ascend from 0 to at most R, or rows or pairs are out of range."""
    offsets, rows, pairs = cell(row, 10), cell(row, 11), cell(row, 12)
    last = vec.load_i64(offsets)
    if last != 0:
        return True
    for e in range(cell(row, 4)):
        end = vec.load_i64(offsets + 8 * (e + 1))
        if end < last or end > cell(row, 7):
            return True
        last = end
    for i in range(last):
        n, p = vec.load_i64(rows + 8 * i), vec.load_i64(pairs + 8 * i)
        if n < 0 or n >= cell(row, 1) or p < 0 or p >= cell(row, 8):
            return True
    return False


@native
def _acted(act: Any, x: Any) -> Any:
    if act == 0:
        return formulas.silu(x)
    if act == 1:
        return formulas.relu(x)
    if act == 2:
        return tanh(x)
    if act == 3:
        return formulas.sigmoid(x)
    if act == 4:
        return formulas.gelu(x)
    return formulas.gelu_tanh(x)


@native
def _slope(act: Any, x: Any, y: Any) -> Any:
    if act == 0:
        return formulas.silu_slope(x, y)
    if act == 1:
        return formulas.relu_slope(x, y)
    if act == 2:
        return formulas.tanh_slope(x, y)
    if act == 3:
        return formulas.sigmoid_slope(x, y)
    if act == 4:
        return formulas.gelu_slope(x, y)
    return formulas.gelu_tanh_slope(x, y)


@native
def _zero(at: Any, count: Any) -> None:
    for i in range(0, count, 16):
        vec.store_first(at + 4 * i, vec.splat(F(0.0)), vec.first(count - i))


@native
def _gathered(source: Any, rows: Any, m: Any, width: Any, to: Any) -> None:
    for i in range(m):
        at, out = source + 4 * width * vec.load_i64(rows + 8 * i), to + 4 * width * i
        for j in range(0, width, 16):
            mask = vec.first(width - j)
            vec.store_first(out + 4 * j, vec.load_first(at + 4 * j, mask), mask)


@native
def _add_at(to: Any, at: Any, width: Any, factor: Any) -> None:
    """Add `factor` times the numbers at `at` to those at `to`."""
    for j in range(0, width, 16):
        mask = vec.first(width - j)
        grown = vec.fma(vec.load_first(at + 4 * j, mask), vec.splat(factor), vec.load_first(to + 4 * j, mask))
        vec.store_first(to + 4 * j, grown, mask)


@native
def _dot(x: Any, y: Any, width: Any) -> Any:
    total = vec.splat(F(0.0))
    for j in range(0, width, 16):
        mask = vec.first(width - j)
        total = vec.fma(vec.load_first(x + 4 * j, mask), vec.load_first(y + 4 * j, mask), total)
    return vec.total(total)


@native
def _linear(x: Any, columns: Any, matrix: Any, out: Any, width: Any, m: Any, scratch: Any) -> None:
    """out [m, width] = x [m, columns]·Wᵀ + b, for the matrix whose words begin at address `matrix`."""
    gemm(
        x, 4 * columns, 4, cell(matrix, 0), cell(matrix, 2), cell(matrix, 1), out, 4 * width,
        m, width, columns, cell(matrix, 3), 0, scratch,
    )  # fmt: skip


@native
def _hidden(row: Any, expert: Any, m: Any, scratch: Any) -> None:
    """Compute a, v, s = act(a) (oai: the sigmoid) and the hidden layer h of the m gathered tokens."""
    c, kind, act, inner = cell(row, 2), cell(row, 5), cell(row, 6), vec.load_i64(expert)
    x, a, v, s, h = cell(row, 17), cell(row, 20), cell(row, 21), cell(row, 22), cell(row, 23)
    _linear(x, c, expert + 8 * _UP, v, inner, m, scratch)
    if kind == _MLP:
        a = v
    else:
        _linear(x, c, expert + 8 * _GATE, a, inner, m, scratch)
    count = m * inner
    for i in range(0, count, 16):
        mask = vec.first(count - i)
        p, q = vec.load_first(a + 4 * i, mask), vec.load_first(v + 4 * i, mask)
        if kind == _OAI:
            low, high = vec.least(p, _LIMIT), vec.most(vec.least(q, _LIMIT), -_LIMIT)
            y = formulas.sigmoid(low * _SLOPE)
            q = low * y * (high + F(1.0))
        else:
            y = _acted(act, p)
            q = y if kind == _MLP else y * q
        vec.store_first(s + 4 * i, y, mask)
        vec.store_first(h + 4 * i, q, mask)


@loop(Code.EXPERTS)
def experts(row: Any, scratch: Any) -> Any:
    """Sum the experts' results for each token; -1 if an index is out of range."""
    if _invalid(row):
        return -1
    n, c, tile, count = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4)
    x, offsets, rows, pairs, weights, out = (
        cell(row, 9), cell(row, 10), cell(row, 11), cell(row, 12), cell(row, 13), cell(row, 14)
    )  # fmt: skip
    given, made, h = cell(row, 17), cell(row, 19), cell(row, 23)
    _zero(scratch, 32)
    _zero(out, n * c)
    for e in range(count):
        expert = row + 8 * (TABLE + EXPERT_CELLS * e)
        end = vec.load_i64(offsets + 8 * (e + 1))
        for at in range(vec.load_i64(offsets + 8 * e), end, tile):
            m = min(tile, end - at)
            _gathered(x, rows + 8 * at, m, c, given)
            _hidden(row, expert, m, scratch)
            _linear(h, vec.load_i64(expert), expert + 8 * _DOWN, made, c, m, scratch)
            for i in range(m):
                token, pair = vec.load_i64(rows + 8 * (at + i)), vec.load_i64(pairs + 8 * (at + i))
                _add_at(out + 4 * c * token, made + 4 * c * i, c, vec.load_f32(weights + 4 * pair))
    return 0


@native
def _gradients(
    matrix: Any, slopes: Any, high: Any, x: Any, wide: Any, m: Any, first: Any, scratch: Any
) -> None:  # fmt: skip
    """Add slopesᵀ [high, m]·x [m, wide] to a matrix's gradient, and the column sums of slopes to its bias's.

    The first tile replaces the gradients.
    """
    to, bias = cell(matrix, 4), cell(matrix, 5)
    if to:
        gemm(
            slopes, 4, 4 * high, x, 4 * wide, 4, to, 4 * wide,
            high, wide, m, 0 if first else to, 0 if first else 4 * wide, scratch,
        )  # fmt: skip
    if bias:
        if first:
            _zero(bias, high)
        for i in range(m):
            _add_at(bias, slopes + 4 * high * i, high, F(1.0))


@native
def _hidden_slopes(row: Any, inner: Any, at: Any, m: Any) -> None:
    """From the gradient t of h for weight 1, compute that of a (in t; none for mlp) and of v (in h; for mlp in t)."""
    kind, act, pairs, weights = cell(row, 5), cell(row, 6), cell(row, 12), cell(row, 13)
    a, v, s, h, t = cell(row, 20), cell(row, 21), cell(row, 22), cell(row, 23), cell(row, 24)
    if kind == _MLP:
        a = v
    for i in range(m):
        share = vec.splat(vec.load_f32(weights + 4 * vec.load_i64(pairs + 8 * (at + i))) if weights else F(1.0))
        for j in range(inner * i, inner * (i + 1), 16):
            mask = vec.first(inner * (i + 1) - j)
            p, q = vec.load_first(a + 4 * j, mask), vec.load_first(v + 4 * j, mask)
            y, g = vec.load_first(s + 4 * j, mask), vec.load_first(t + 4 * j, mask) * share
            if kind == _MLP:
                g = g * _slope(act, p, y)
            elif kind == _OAI:
                low, high = vec.least(p, _LIMIT), vec.most(vec.least(q, _LIMIT), -_LIMIT)
                inside = vec.select(vec.absolute(q) <= _LIMIT, g, F(0.0))
                vec.store_first(h + 4 * j, inside * low * y, mask)
                slope = (high + F(1.0)) * (y + low * y * (F(1.0) - y) * _SLOPE)
                g = vec.select(p <= _LIMIT, g, F(0.0)) * slope
            else:
                vec.store_first(h + 4 * j, g * y, mask)
                g = g * q * _slope(act, p, y)
            vec.store_first(t + 4 * j, g, mask)


@native
def _zero_gradients(expert: Any, inner: Any, c: Any) -> None:
    """Fill the gradients of an expert without tokens."""
    for start in (_GATE, _UP, _DOWN):
        matrix, high = expert + 8 * start, c if start == _DOWN else inner
        if cell(matrix, 4):
            _zero(cell(matrix, 4), inner * c)
        if cell(matrix, 5):
            _zero(cell(matrix, 5), high)


@loop(Code.EXPERTS_BACKWARD)
def experts_backward(row: Any, scratch: Any) -> Any:
    """Compute the gradients of all operands that are wanted; -1 if an index is out of range."""
    if _invalid(row):
        return -1
    n, c, tile, count, kind = cell(row, 1), cell(row, 2), cell(row, 3), cell(row, 4), cell(row, 5)
    x, offsets, rows, pairs, weights = cell(row, 9), cell(row, 10), cell(row, 11), cell(row, 12), cell(row, 13)
    dx, g, shares = cell(row, 14), cell(row, 15), cell(row, 16)
    given, back, made, h, t = cell(row, 17), cell(row, 18), cell(row, 19), cell(row, 23), cell(row, 24)
    _zero(scratch, 32)
    if dx:
        _zero(dx, n * c)
    if shares:
        _zero(shares, cell(row, 8))
    for e in range(count):
        expert = row + 8 * (TABLE + EXPERT_CELLS * e)
        gate, up, down, inner = expert + 8 * _GATE, expert + 8 * _UP, expert + 8 * _DOWN, vec.load_i64(expert)
        start, end = vec.load_i64(offsets + 8 * e), vec.load_i64(offsets + 8 * (e + 1))
        if start == end:
            _zero_gradients(expert, inner, c)
        for at in range(start, end, tile):
            m = min(tile, end - at)
            _gathered(x, rows + 8 * at, m, c, given)
            _gathered(g, rows + 8 * at, m, c, back)
            _hidden(row, expert, m, scratch)
            gemm(
                back, 4 * c, 4, cell(down, 0), cell(down, 1), cell(down, 2), t, 4 * inner,
                m, inner, c, 0, 0, scratch,
            )  # fmt: skip
            for i in range(m):
                pair, line = vec.load_i64(pairs + 8 * (at + i)), back + 4 * c * i
                if shares:
                    slope = _dot(h + 4 * inner * i, t + 4 * inner * i, inner)
                    if cell(down, 3):
                        slope += _dot(line, cell(down, 3), c)
                    vec.store_f32(shares + 4 * pair, slope)
                share = vec.splat(vec.load_f32(weights + 4 * pair))
                for j in range(0, c, 16):
                    mask = vec.first(c - j)
                    vec.store_first(line + 4 * j, vec.load_first(line + 4 * j, mask) * share, mask)
            _gradients(down, back, c, h, inner, m, at == start, scratch)
            _hidden_slopes(row, inner, at, m)
            dv = t if kind == _MLP else h
            _gradients(up, dv, inner, given, c, m, at == start, scratch)
            if dx:
                gemm(
                    dv, 4 * inner, 4, cell(up, 0), cell(up, 1), cell(up, 2), made, 4 * c, m, c, inner, 0, 0, scratch
                )  # fmt: skip
            if kind != _MLP:
                _gradients(gate, t, inner, given, c, m, at == start, scratch)
                if dx:
                    gemm(
                        t, 4 * inner, 4, cell(gate, 0), cell(gate, 1), cell(gate, 2), made, 4 * c,
                        m, c, inner, made, 4 * c, scratch,
                    )  # fmt: skip
            if dx:
                for i in range(m):
                    _add_at(dx + 4 * c * vec.load_i64(rows + 8 * (at + i)), made + 4 * c * i, c, F(1.0))
    return 0


@loop(Code.EXPERT_PROBE)
def expert_probe(row: Any, scratch: Any) -> Any:
    """Compute the gain and the surprise of each pair; -1 if an index is out of range."""
    if _invalid(row):
        return -1
    c, tile, count, kind = cell(row, 2), cell(row, 3), cell(row, 4), cell(row, 5)
    x, offsets, rows, pairs, gain = cell(row, 9), cell(row, 10), cell(row, 11), cell(row, 12), cell(row, 14)
    g, surprise = cell(row, 15), cell(row, 16)
    given, back, made, h, t = cell(row, 17), cell(row, 18), cell(row, 19), cell(row, 23), cell(row, 24)
    _zero(scratch, 32)
    _zero(gain, cell(row, 8))
    _zero(surprise, cell(row, 8))
    for e in range(count):
        expert = row + 8 * (TABLE + EXPERT_CELLS * e)
        down, inner, end = expert + 8 * _DOWN, vec.load_i64(expert), vec.load_i64(offsets + 8 * (e + 1))
        one = F(1.0) if cell(down, 3) else F(0.0)
        for at in range(vec.load_i64(offsets + 8 * e), end, tile):
            m = min(tile, end - at)
            _gathered(x, rows + 8 * at, m, c, given)
            _gathered(g, rows + 8 * at, m, c, back)
            _hidden(row, expert, m, scratch)
            _linear(h, inner, down, made, c, m, scratch)
            gemm(
                back, 4 * c, 4, cell(down, 0), cell(down, 1), cell(down, 2), t, 4 * inner,
                m, inner, c, 0, 0, scratch,
            )  # fmt: skip
            for i in range(m):
                pair, line, hidden = vec.load_i64(pairs + 8 * (at + i)), back + 4 * c * i, h + 4 * inner * i
                vec.store_f32(gain + 4 * pair, -_dot(made + 4 * c * i, line, c))
                first = _dot(line, line, c) * (_dot(hidden, hidden, inner) + one)
                vec.store_f32(surprise + 4 * pair, first)
            _hidden_slopes(row, inner, at, m)
            for i in range(m):
                to, token = surprise + 4 * vec.load_i64(pairs + 8 * (at + i)), given + 4 * c * i
                dv, da = h + 4 * inner * i, t + 4 * inner * i
                slopes = _dot(da, da, inner)
                if kind != _MLP:
                    slopes += _dot(dv, dv, inner)
                second = (_dot(token, token, c) + one) * slopes
                vec.store_f32(to, F(np.sqrt(vec.load_f32(to) + second)))
    return 0
