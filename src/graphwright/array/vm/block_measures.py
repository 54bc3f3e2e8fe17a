"""Measures of block-sparse attention: mass of edges, gradients of absent gates, entropy of rows.

Instructions are those of `block_attention`, whose walk over the edges these loops use.
"""

# pyright: reportPrivateUsage=false
# The two files of block-sparse attention share private functions.
from __future__ import annotations

from typing import Any

from graphwright.array.formulas.block_attention import FEW, FURTHEST
from graphwright.array.vm import vector as vec
from graphwright.array.vm.attention import operand, step_of
from graphwright.array.vm.block_attention import (
    _ALPHA,
    _COLUMN,
    _COUNT,
    _EDGE,
    _INSIDE,
    _KEY,
    _KIND,
    _LINE,
    _PIECE,
    _PIECES,
    _PULLED,
    _SCORES,
    _SIDE,
    _SLOPES,
    _SLOT,
    _SUMS,
    _TOP,
    _WALK,
    BATCH,
    KT,
    LARGEST,
    PAIRS,
    PARTS,
    RESULT,
    _bases,
    _begin,
    _capped,
    _count,
    _logs,
    _masked,
    _misfits,
    _more,
    _out_of_sight,
    _plane,
    _prepared,
    _scored,
    _shift,
    _span,
    _strip,
    _weights,
    _word,
)
from graphwright.array.vm.code import Code
from graphwright.array.vm.elementwise import F, cell, loop, number
from graphwright.array.vm.math import exp, native
from graphwright.array.vm.other_products import gemm
from graphwright.patterns import table as words

_LAST = 5
"""The word of the walk with the edge that was measured last."""


@native
def _measured(row: Any, scratch: Any, rows: Any, columns: Any) -> None:
    """Add the weights of a strip to the masses of its edges, or note the largest of a query."""
    _weights(row, scratch, rows, columns)
    result, largest = _more(row, RESULT), _more(row, LARGEST)
    for p in range(_count(scratch)):
        piece = scratch + _PIECES + _PIECE * p
        at, line = result + 4 * cell(piece, _EDGE), scratch + _SCORES + 4 * cell(piece, _COLUMN)
        n, mass, edge = cell(piece, _COUNT), vec.load_f32(at), cell(piece, _EDGE)
        again = edge == cell(scratch + _WALK, _LAST)  # an edge may have several pieces, one after another
        vec.store_i64(scratch + _WALK + 8 * _LAST, edge)
        for r in range(rows):
            part = vec.splat(F(0.0))
            for c in range(0, n, 16):
                part = part + vec.load_first(line + _LINE * r + 4 * c, vec.first(n - c))
            found = vec.total(part)
            if largest:
                sums = scratch + _PULLED + 4 * r
                found += vec.load_f32(sums) if again else F(0.0)
                vec.store_f32(sums, found)
            mass = (found if found > mass else mass) if largest else mass + found
        vec.store_f32(at, mass)


@loop(Code.BLOCK_MASS)
def block_mass(row: Any, scratch: Any) -> Any:
    """Write the masses of the edges; unit u has the query blocks u, u + units, ... of each plane."""
    if _misfits(row) or _more(row, PAIRS) < _word(row, words.EDGE_SLOTS):
        return -1
    block, shift, queries, planes = _word(row, words.BLOCK), _shift(row), cell(row, 5), cell(row, 10)
    own, share = cell(row, 3) // planes, cell(row, 3) // cell(row, 4)
    first, end = shift // block, (shift + queries + block - 1) // block
    units = _more(row, PARTS)
    for unit in range(cell(row, 1), cell(row, 1) + cell(row, 2)):
        for i in range(first + unit, end, units):
            for plane in range(planes):
                _mass_of(row, scratch, plane, i, own, share, max(i * block - shift, 0))
    return 3


@native
def _mass_of(row: Any, scratch: Any, plane: Any, i: Any, own: Any, share: Any, start: Any) -> None:
    """Write the masses of the edges of one query block."""
    seen, block, shift = 0, _word(row, words.BLOCK), _shift(row)
    stop = min((i + 1) * block - shift, cell(row, 5))
    for batch in range(_more(row, BATCH)):
        for head in range(plane * own, (plane + 1) * own):
            group = head // share
            k = operand(row, 1, batch, group)
            for t in range(start, stop, _SIDE):
                rows = min(_SIDE, stop - t)
                tiles, q = _more(row, KT) != 0 and rows > FEW, operand(row, 0, batch, head) + t * step_of(row, 0)
                seen += _bases(row, scratch, batch, head, t, rows)
                _begin(row, scratch, plane, i)
                vec.store_i64(scratch + _WALK + 8 * _LAST, -1)
                while True:
                    columns = _strip(row, scratch, t, rows, tiles, False)
                    if columns == 0:
                        break
                    _scored(row, scratch, q, k, k, batch, group, t, rows, columns, tiles)
                    _measured(row, scratch, rows, columns)
    if _more(row, LARGEST) == 0 and seen > 1:
        node = vec.load_i32(_word(row, words.ROWS) + 4 * (plane * _word(row, words.ROW_STRIDE) + i))
        left, bucket = vec.load_i32(_word(row, words.IN_DEGREE) + 4 * node), _word(row, words.BUCKET)
        b = vec.load_i32(_word(row, words.IN_HEAD) + 4 * node) if left else 0
        while left > 0:
            for e in range(min(left, bucket)):
                edge = vec.load_i32(_word(row, words.IN_ITEMS) + 4 * (b * bucket + e))
                at = _more(row, RESULT) + 4 * edge
                vec.store_f32(at, vec.load_f32(at) / F(seen))
            left -= bucket
            b = vec.load_i32(_word(row, words.IN_NEXT) + 4 * b) if left > 0 else 0


@native
def _only_piece(row: Any, scratch: Any, j: Any, at: Any, n: Any) -> None:
    """Make a strip of the keys of block j from `at` on, as the pattern's rule allows them."""
    piece = scratch + _PIECES
    vec.store_i64(piece + 8 * _KEY, j * _word(row, words.BLOCK) + at)
    vec.store_i64(piece + 8 * _COUNT, n)
    vec.store_i64(piece + 8 * _COLUMN, 0)
    vec.store_i64(piece + 8 * _EDGE, -1)
    vec.store_i64(piece + 8 * _KIND, words.RULE)
    vec.store_i64(piece + 8 * _INSIDE, at)
    vec.store_i64(piece + 8 * _SLOT, -1)
    vec.store_i64(scratch + _WALK + 32, 1)


@native
def _pulled_by(row: Any, scratch: Any, rows: Any, columns: Any) -> Any:
    """Return the sum over a strip of e^(s - lse) (g·v - Σ g·out)."""
    cap, total = F(number(row, 12)), vec.splat(F(0.0))
    for r in range(rows):
        line, slopes = scratch + _SCORES + _LINE * r, scratch + _SLOPES + _LINE * r
        base, less = vec.load_f32(scratch + _TOP + 4 * r), vec.load_f32(scratch + _ALPHA + 4 * r)
        for c in range(0, columns, 16):
            s, mask = vec.load(line + 4 * c), vec.first(columns - c)
            e = exp(vec.least((_capped(s, cap) if cap > F(0.0) else s) - base, F(FURTHEST)))
            total = total + vec.select(mask, e * (vec.load(slopes + 4 * c) - less), 0.0)
    return vec.total(total)


@loop(Code.BLOCK_GATE_GRADIENT)
def block_gate_gradient(row: Any, scratch: Any) -> Any:
    """Write the gradients at 0 of the gates of pairs of blocks; -1 if there is no such pair."""
    if _misfits(row):
        return -1
    block, shift, queries, planes = _word(row, words.BLOCK), _shift(row), cell(row, 5), cell(row, 10)
    own, share, wide = cell(row, 3) // planes, cell(row, 3) // cell(row, 4), cell(row, 8)
    for unit in range(cell(row, 1), cell(row, 1) + cell(row, 2)):
        pair = _more(row, PAIRS) + 12 * unit
        plane, i, j = vec.load_i32(pair), vec.load_i32(pair + 4), vec.load_i32(pair + 8)
        if plane < 0 or plane >= planes or i < 0 or i >= _word(row, words.NQ) or j < 0 or j >= _word(row, words.NK):
            return -1
        start, stop = max(i * block - shift, 0), min((i + 1) * block - shift, queries)
        end, total = min(min((j + 1) * block, _word(row, words.TK)), cell(row, 6)) - j * block, F(0.0)
        for batch in range(_more(row, BATCH)):
            for head in range(plane * own, (plane + 1) * own):
                group, t = head // share, start
                k, v = operand(row, 1, batch, group), operand(row, 2, batch, group)
                while t < stop:
                    rows = min(_SIDE, stop - t)
                    _prepared(row, scratch, batch, head, t, rows)
                    q, g = operand(row, 0, batch, head) + t * step_of(row, 0), operand(row, 4, batch, head)
                    g += t * step_of(row, 4)
                    for at in range(0, end, _SIDE):
                        n = min(_SIDE, end - at)
                        first = t + shift + _word(row, words.QSTART)
                        key = j * block + at
                        if not _out_of_sight(row, words.RULE, first, first + rows - 1, key, key + n):
                            _only_piece(row, scratch, j, at, n)
                            gemm(
                                q, step_of(row, 0), 4, k + key * step_of(row, 1), 4, step_of(row, 1),
                                scratch + _SCORES, _LINE, rows, n, cell(row, 7), 0, 0, scratch,
                            )  # fmt: skip
                            gemm(
                                g, step_of(row, 4), 4, v + key * step_of(row, 2), 4, step_of(row, 2),
                                scratch + _SLOPES, _LINE, rows, n, wide, 0, 0, scratch,
                            )  # fmt: skip
                            _times(scratch, rows, n, F(number(row, 11)))
                            _masked(row, scratch, t, rows)
                            total += _pulled_by(row, scratch, rows, n)
                    t += rows
        vec.store_f32(_more(row, RESULT) + 4 * unit, total)
    return 3


@native
def _times(scratch: Any, rows: Any, columns: Any, scale: Any) -> None:
    """Multiply the scores by a number."""
    wide = vec.splat(scale)
    for r in range(rows):
        for c in range(0, 4 * columns, 64):
            at = scratch + _SCORES + _LINE * r + c
            vec.store(at, vec.load(at) * wide)


@loop(Code.BLOCK_ENTROPY)
def block_entropy(row: Any, scratch: Any) -> Any:
    """Write the entropies of the softmax weights of queries, in units as those of attention."""
    if _misfits(row):
        return -1
    heads, queries, shift = cell(row, 3), cell(row, 5), _shift(row)
    spans, share = (queries + _SIDE - 1) // _SIDE, heads // cell(row, 4)
    for unit in range(cell(row, 1), cell(row, 1) + cell(row, 2)):
        item, t = unit // spans, _SIDE * (unit % spans)
        batch, head, end = item // heads, item % heads, min(t + _SIDE, queries)
        while t < end:
            i, rows = _span(row, t, end, shift)
            _entropy_rows(row, scratch, batch, head, head // share, t, i, rows)
            t += rows
    return 3


@native
def _entropy_rows(row: Any, scratch: Any, batch: Any, head: Any, group: Any, t: Any, i: Any, rows: Any) -> None:
    """Write the entropies of `rows` queries of query block i, from query t on."""
    tiles, k = _more(row, KT) != 0 and rows > FEW, operand(row, 1, batch, group)
    q, result = operand(row, 0, batch, head) + t * step_of(row, 0), _more(row, RESULT)
    _bases(row, scratch, batch, head, t, rows)
    for r in range(rows):
        vec.store(scratch + _SUMS + 64 * r, vec.splat(F(0.0)))
    _begin(row, scratch, _plane(row, head, group), i)
    while True:
        columns = _strip(row, scratch, t, rows, tiles, False)
        if columns == 0:
            break
        _scored(row, scratch, q, k, k, batch, group, t, rows, columns, tiles)
        for r in range(rows):
            line, base = scratch + _SCORES + _LINE * r, vec.load_f32(scratch + _TOP + 4 * r)
            part = vec.load(scratch + _SUMS + 64 * r)
            for c in range(0, 4 * columns, 64):
                _, logs = _logs(row, scratch, vec.load(line + c), base, c)
                part = part - exp(logs) * logs
            vec.store(scratch + _SUMS + 64 * r, part)
    for r in range(rows):
        at = result + 4 * ((batch * cell(row, 3) + head) * cell(row, 5) + t + r)
        vec.store_f32(at, vec.total(vec.load(scratch + _SUMS + 64 * r)))
