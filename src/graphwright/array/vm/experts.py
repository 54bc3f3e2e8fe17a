"""Mixtures of experts: tokens grouped by expert, and the sum of their experts' results with its gradient, in float32.

An op is two instructions. EXPERT_RUNS, followed by a table, checks the runs of tokens and clears the results; then
workers share chunks of the pairs of a token and an expert. A worker claims the next chunk; for each of its experts it
gathers the tokens (a tile) and multiplies them, in work of its own. What chunks add to the same numbers, they add in
order: a worker waits for its turn. So the results do not depend on the number of threads. Chunks of at most `GATHERED`
pairs, and weights in bfloat16, are multiplied by the products of stored weights of `products.py`.

A worker's words: 1 rows of code back to EXPERT_RUNS, and those of `WORKERS`.
The words of EXPERT_RUNS: 1 rows of the table after it, 2 opcode of the workers. The words of the table: 0 tokens N,
1 width C, 2 pairs of a chunk, 3 experts E, 4 kind (an index in `KINDS`), 5 activation (an index in `ACTS`), 6 entries R
of rows and of pairs, 7 entries of the weights, 8 x, 9 offsets, 10 rows, 11 pairs, 12 weights (0: all are 1), 13 the
result, the gradient of x (0: not wanted) or the gain of each entry of the weights, 14 gradient of the result, 15
gradient of the weights (0: not wanted) or the surprise of each entry, 16 counters, 17 work of worker 0, 18 bytes of a
worker's work, 19 the team or 0, 20 the largest I, 21 nanoseconds of a chunk. Counters: the next chunk, the chunk whose
turn it is, and for each expert how many of its tiles are done. From word 24 on, `EXPERT_CELLS` words for each expert:
I, then for gate, up and down six words: address of the matrix (0: no gate), bytes per row and per
column, address of its bias (0: none), and the addresses of the gradients of both (0: not wanted).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.array.formulas.experts import GATHERED, KINDS, LIMIT, SLOPE
from graphwright.array.vm import vector as vec
from graphwright.array.vm.code import BYTES, EXPERT_CELLS, EXPERT_COUNTERS, EXPERT_TABLE, STRIPS, ZEROS, Code
from graphwright.array.vm.elementwise import F, cell, loop
from graphwright.array.vm.math import formulas, native, tanh
from graphwright.array.vm.other_products import gemm, many_bf16, rows_bf16, rows_f32
from graphwright.array.vm.sharing import LOOKS, fetch_add, nap, read, write

_MLP, _OAI = KINDS.index("mlp"), KINDS.index("oai")
_GATE, _UP, _DOWN = 1, 7, 13  # words of an expert where those of its matrices begin
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
def _invalid(table: Any) -> Any:
    """Return whether offsets do not ascend from 0 to at most R, or rows or pairs are out of range."""
    offsets, rows, pairs = cell(table, 9), cell(table, 10), cell(table, 11)
    last = vec.load_i64(offsets)
    if last != 0:
        return True
    for e in range(cell(table, 3)):
        end = vec.load_i64(offsets + 8 * (e + 1))
        if end < last or end > cell(table, 6):
            return True
        last = end
    for i in range(last):
        n, p = vec.load_i64(rows + 8 * i), vec.load_i64(pairs + 8 * i)
        if n < 0 or n >= cell(table, 0) or p < 0 or p >= cell(table, 7):
            return True
    return False


@loop(Code.EXPERT_RUNS)
def expert_runs(row: Any) -> Any:
    """Clear what tiles are added to and the counters, and skip the table; -1 if an index is out of range."""
    table = row + BYTES
    if _invalid(table):
        return -1
    result, marks, op = cell(table, 13), cell(table, 15), cell(row, 2)
    if result:
        _zero(result, cell(table, 7) if op == Code.EXPERT_PROBE else cell(table, 0) * cell(table, 1))
    if marks:
        _zero(marks, cell(table, 7))
    for i in range(EXPERT_COUNTERS + cell(table, 3)):
        vec.store_i64(cell(table, 16) + 8 * i, 0)
    return cell(row, 1)


@native
def _claimed(table: Any) -> Any:
    """Claim the next chunk of pairs; return (its number, its first pair, the pair after its last, whether it is the
    last one). A number of -1 means that none is left.
    """
    total, size = vec.load_i64(cell(table, 9) + 8 * cell(table, 3)), cell(table, 2)
    chunks = max((total + size - 1) // size, 1)
    i = fetch_add(cell(table, 16), 1)
    return i if i < chunks else -1, i * size, min((i + 1) * size, total), i == chunks - 1


@native
def _tile(table: Any, e: Any, begin: Any, end: Any) -> Any:
    """Return the first pair of expert e in a chunk, how many there are, and in which of its chunks this is."""
    start = vec.load_i64(cell(table, 9) + 8 * e)
    first = max(start, begin)
    m = min(vec.load_i64(cell(table, 9) + 8 * (e + 1)), end) - first
    return first, m, begin // cell(table, 2) - start // cell(table, 2)


@native
def _first_expert(table: Any, begin: Any) -> Any:
    """Return the first expert that has a pair from `begin` on, or is empty and begins there or later."""
    offsets, e = cell(table, 9), 0
    while e < cell(table, 3):
        start, stop = vec.load_i64(offsets + 8 * e), vec.load_i64(offsets + 8 * (e + 1))
        if stop > begin or (start == stop and start >= begin):
            break
        e += 1
    return e


@native
def _before_end(table: Any, e: Any, end: Any, last: Any) -> Any:
    """Return whether expert e begins before the end of a chunk; after the last chunk there are only empty ones."""
    return e < cell(table, 3) and (last or vec.load_i64(cell(table, 9) + 8 * e) < end)


@native
def _await(table: Any, at: Any, value: Any) -> None:
    """Wait until the counter at address `at` is `value`: look for a while, then sleep between looks."""
    looks, naps, team = 0, 0, cell(table, 19)
    while read(at) != value:
        if looks < LOOKS or team == 0:
            looks += 1
        else:
            naps = nap(team, naps, cell(table, 21))


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
def _linear(x: Any, columns: Any, matrix: Any, out: Any, width: Any, m: Any, few: Any, scratch: Any) -> None:
    """out [m, width] = x [m, columns]·Wᵀ + b, for the matrix whose words begin at address `matrix`.

    The bits of a row do not depend on the other rows, so that a token does not see which experts other tokens choose.
    """
    w, by_row, by_column, bias = cell(matrix, 0), cell(matrix, 1), cell(matrix, 2), cell(matrix, 3)
    stored, step = by_column == 2, 4 * columns  # bfloat16
    if stored and few and 4 * (columns + 31) <= STRIPS - ZEROS:
        for i in range(m):
            rows_bf16(w, width, columns, 0, x + i * step, step, out + 4 * width * i, 4 * width, 1, scratch)
    elif stored:
        many_bf16(w, width, columns, 0, x, step, out, 4 * width, m, scratch)
    elif few and by_column == 4 and by_row == step:
        for i in range(m):
            rows_f32(w, width, columns, 0, x + i * step, step, out + 4 * width * i, 4 * width, 1, scratch)
    else:
        gemm(x, step, 4, w, by_column, by_row, out, 4 * width, m, width, columns, 0, 0, scratch)
    for i in range(m if bias else 0):
        _add_at(out + 4 * width * i, bias, width, F(1.0))


@native
def _work(table: Any, worker: Any) -> Any:
    """Return the addresses of a worker's work: [tile, C] x, g and o, then [tile, I] a, v, s, h and t."""
    size, c, inner = cell(table, 2), cell(table, 1), cell(table, 20)
    x = cell(table, 17) + worker * cell(table, 18)
    a, step = x + 12 * size * c, 4 * size * inner
    return x, x + 4 * size * c, x + 8 * size * c, a, a + step, a + 2 * step, a + 3 * step, a + 4 * step


@native
def _hidden(table: Any, expert: Any, m: Any, work: Any, scratch: Any) -> None:
    """Compute a, v, s = act(a) (oai: the sigmoid) and the hidden layer h of the m gathered tokens."""
    c, kind, act, inner = cell(table, 1), cell(table, 4), cell(table, 5), vec.load_i64(expert)
    x, _, _, a, v, s, h, _ = work
    few = cell(table, 2) <= GATHERED
    _linear(x, c, expert + 8 * _UP, v, inner, m, few, scratch)
    if kind == _MLP:
        a = v
    else:
        _linear(x, c, expert + 8 * _GATE, a, inner, m, few, scratch)
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


@native
def _table(row: Any) -> Any:
    """Return the address of the table that a worker's instruction refers to."""
    return row + BYTES * (1 - cell(row, 1))


@loop(Code.EXPERTS)
def experts(row: Any, scratch: Any) -> None:
    """Add the results of each chunk to the rows of its tokens."""
    table = _table(row)
    c, x, out, weights = cell(table, 1), cell(table, 8), cell(table, 13), cell(table, 12)
    rows, pairs, turn = cell(table, 10), cell(table, 11), cell(table, 16) + 8
    work = _work(table, cell(row, 2))
    given, made, h = work[0], work[2], work[6]
    _zero(scratch, 32)
    while True:
        number, begin, end, last = _claimed(table)
        if number < 0:
            return
        e = _first_expert(table, begin)
        while _before_end(table, e, end, last):
            expert, (first, m, _) = table + 8 * (EXPERT_TABLE + EXPERT_CELLS * e), _tile(table, e, begin, end)
            if m > 0:
                _gathered(x, rows + 8 * first, m, c, given)
                _hidden(table, expert, m, work, scratch)
                to = made + 4 * c * (first - begin)
                _linear(h, cell(expert, 0), expert + 8 * _DOWN, to, c, m, cell(table, 2) <= GATHERED, scratch)
            e += 1
        _await(table, turn, number)
        for i in range(begin, end):
            share = vec.load_f32(weights + 4 * vec.load_i64(pairs + 8 * i))
            _add_at(out + 4 * c * vec.load_i64(rows + 8 * i), made + 4 * c * (i - begin), c, share)
        write(turn, number + 1)


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
def _hidden_slopes(table: Any, inner: Any, pairs: Any, m: Any, work: Any) -> None:
    """From the gradient t of h for weight 1, compute that of a (in t; none for mlp) and of v (in h; for mlp in t)."""
    kind, act, weights = cell(table, 4), cell(table, 5), cell(table, 12)
    _, _, _, a, v, s, h, t = work
    if kind == _MLP:
        a = v
    for i in range(m):
        share = vec.splat(vec.load_f32(weights + 4 * vec.load_i64(pairs + 8 * i)) if weights else F(1.0))
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
def _before(y: Any, high: Any, matrix: Any, out: Any, wide: Any, m: Any, init: Any, scratch: Any) -> None:
    """out [m, wide] = init + y [m, high]·W, for the matrix whose words begin at address `matrix`."""
    gemm(
        y, 4 * high, 4, cell(matrix, 0), cell(matrix, 1), cell(matrix, 2), out, 4 * wide,
        m, wide, high, init, 4 * wide if init else 0, scratch,
    )  # fmt: skip


@native
def _zero_gradients(expert: Any, c: Any) -> None:
    """Fill the gradients of an expert without tokens."""
    inner = cell(expert, 0)
    for start in (_GATE, _UP, _DOWN):
        matrix, high = expert + 8 * start, c if start == _DOWN else inner
        if cell(matrix, 4):
            _zero(cell(matrix, 4), inner * c)
        if cell(matrix, 5):
            _zero(cell(matrix, 5), high)


@loop(Code.EXPERTS_BACKWARD)
def experts_backward(row: Any, scratch: Any) -> None:
    """Compute the gradients of all operands that are wanted."""
    table = _table(row)
    c, rows, dx, counters = cell(table, 1), cell(table, 10), cell(table, 13), cell(table, 16)
    work = _work(table, cell(row, 2))
    _zero(scratch, 32)
    while True:
        number, begin, end, last = _claimed(table)
        if number < 0:
            return
        e = stop = _first_expert(table, begin)
        while _before_end(table, stop, end, last):
            stop += 1
        while stop > e:  # the last one first: the next chunk, which may have the rest of its tokens, waits for it
            stop -= 1
            first, m, at = _tile(table, stop, begin, end)
            if m > 0:
                _tile_backward(table, stop, first, m, at, work, work[2] + 4 * c * (first - begin), scratch)
            else:
                _zero_gradients(table + 8 * (EXPERT_TABLE + EXPERT_CELLS * stop), c)
        _await(table, counters + 8, number)
        if dx:
            for i in range(begin, end):
                _add_at(dx + 4 * c * vec.load_i64(rows + 8 * i), work[2] + 4 * c * (i - begin), c, F(1.0))
        write(counters + 8, number + 1)


@native
def _tile_backward(table: Any, e: Any, first: Any, m: Any, at: Any, work: Any, made: Any, scratch: Any) -> None:
    """Add a tile's gradients to those of the matrices, and store those of its weights and, at `made`, of its tokens."""
    c, kind, x, weights = cell(table, 1), cell(table, 4), cell(table, 8), cell(table, 12)
    dx, g, shares = cell(table, 13), cell(table, 14), cell(table, 15)
    rows, pairs = cell(table, 10) + 8 * first, cell(table, 11) + 8 * first
    given, back, _, _, _, _, h, t = work
    expert = table + 8 * (EXPERT_TABLE + EXPERT_CELLS * e)
    gate, up, down, inner = expert + 8 * _GATE, expert + 8 * _UP, expert + 8 * _DOWN, cell(expert, 0)
    dv, turn = t if kind == _MLP else h, cell(table, 16) + 8 * (EXPERT_COUNTERS + e)
    _gathered(x, rows, m, c, given)
    _gathered(g, rows, m, c, back)
    _hidden(table, expert, m, work, scratch)
    _before(back, c, down, t, inner, m, 0, scratch)
    for i in range(m):
        pair, line = vec.load_i64(pairs + 8 * i), back + 4 * c * i
        if shares:
            slope = _dot(h + 4 * inner * i, t + 4 * inner * i, inner)
            if cell(down, 3):
                slope += _dot(line, cell(down, 3), c)
            vec.store_f32(shares + 4 * pair, slope)
        share = vec.splat(vec.load_f32(weights + 4 * pair))
        for j in range(0, c, 16):
            mask = vec.first(c - j)
            vec.store_first(line + 4 * j, vec.load_first(line + 4 * j, mask) * share, mask)
    _await(table, turn, at)
    _gradients(down, back, c, h, inner, m, at == 0, scratch)
    _hidden_slopes(table, inner, pairs, m, work)
    _gradients(up, dv, inner, given, c, m, at == 0, scratch)
    if kind != _MLP:
        _gradients(gate, t, inner, given, c, m, at == 0, scratch)
    write(turn, at + 1)
    if dx:
        _before(dv, inner, up, made, c, m, 0, scratch)
        if kind != _MLP:
            _before(t, inner, gate, made, c, m, made, scratch)


@loop(Code.EXPERT_PROBE)
def expert_probe(row: Any, scratch: Any) -> None:
    """Compute the gain and the surprise of each pair."""
    table = _table(row)
    work = _work(table, cell(row, 2))
    _zero(scratch, 32)
    while True:
        number, begin, end, last = _claimed(table)
        if number < 0:
            return
        e = _first_expert(table, begin)
        while _before_end(table, e, end, last):
            first, m, _ = _tile(table, e, begin, end)
            if m > 0:
                _probe_tile(table, e, first, m, work, scratch)
            e += 1


@native
def _probe_tile(table: Any, e: Any, first: Any, m: Any, work: Any, scratch: Any) -> None:
    c, kind, x, gain = cell(table, 1), cell(table, 4), cell(table, 8), cell(table, 13)
    g, surprise = cell(table, 14), cell(table, 15)
    rows, pairs = cell(table, 10) + 8 * first, cell(table, 11) + 8 * first
    given, back, made, _, _, _, h, t = work
    expert = table + 8 * (EXPERT_TABLE + EXPERT_CELLS * e)
    down, inner = expert + 8 * _DOWN, cell(expert, 0)
    one = F(1.0) if cell(down, 3) else F(0.0)
    _gathered(x, rows, m, c, given)
    _gathered(g, rows, m, c, back)
    _hidden(table, expert, m, work, scratch)
    _linear(h, inner, down, made, c, m, cell(table, 2) <= GATHERED, scratch)
    _before(back, c, down, t, inner, m, 0, scratch)
    for i in range(m):
        pair, line, hidden = vec.load_i64(pairs + 8 * i), back + 4 * c * i, h + 4 * inner * i
        vec.store_f32(gain + 4 * pair, -_dot(made + 4 * c * i, line, c))
        square = _dot(line, line, c) * (_dot(hidden, hidden, inner) + one)
        vec.store_f32(surprise + 4 * pair, square)
    _hidden_slopes(table, inner, pairs, m, work)
    for i in range(m):
        to, token = surprise + 4 * vec.load_i64(pairs + 8 * i), given + 4 * c * i
        dv, da = h + 4 * inner * i, t + 4 * inner * i
        slopes = _dot(da, da, inner)
        if kind != _MLP:
            slopes += _dot(dv, dv, inner)
        second = (_dot(token, token, c) + one) * slopes
        vec.store_f32(to, F(np.sqrt(vec.load_f32(to) + second)))
