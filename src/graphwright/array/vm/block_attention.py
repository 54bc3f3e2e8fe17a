"""Block-sparse attention, its gradient, the mass of edges and the gradient of absent gates, over a pattern's graph.

The loops read the graph's own arrays by the words of the pattern's table (`patterns.table`): the list of a query block
has the edges from its key blocks. A unit of work of the forward pass is 64 queries of a head; of the gradient, one key
head with its query heads, or a part of their queries that has gradients of keys of its own, if there are few heads. The
split depends on shapes alone.

The keys of a row's edges are taken 64 at a time (a strip). Many queries are multiplied by tiles: the keys, scaled, and
the values are packed before as tiles of 64 tokens, transposed. For few queries, as in decoding or in blocks of one
token, a strip is a list of addresses, of which 16 are multiplied at once.

Words of an instruction: 1 first unit, 2 number of units, 3 query heads, 4 key heads, 5 queries, 6 keys, 7 size of a
key, 8 size of a value, 9 address of the table, 10 planes, 11 scale, 12 softcap (0: none), 13 whether gates multiply
weights, 14 address of the gates (0: none), 15 address of the position of the first query (0: the pattern's). Three rows
follow. Four words per operand: its address and its bytes per batch element, head and position, for q, k, v, out, the
gradients of out, q, k, v, and the log-sum-exp; then from word `MORE` on: 0 packed keys (0: none), 1 packed values, 2
size of the gates, 3 parts P, 4 gradient of the log-sum-exp (0: none), 5 gradients of the gates of each unit (0: not
wanted), 6 and 7 bytes of the gradients of keys and of values of a part, 8 the result for edges or pairs, 9 pairs or
the size of the result for edges, 10 batch elements, 11 whether the largest mass is wanted, or
the gradient is that of the entropies: 4 is then their gradient and 8 the result for the log-sum-exp.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from graphwright.array.formulas.block_attention import FEW, FURTHEST
from graphwright.array.vm import vector as vec
from graphwright.array.vm.attention import add_rows, dots, operand, step_of
from graphwright.array.vm.code import TILES_END, Code
from graphwright.array.vm.elementwise import F, cell, loop, number
from graphwright.array.vm.math import exp, log, native, tanh
from graphwright.array.vm.other_products import gemm
from graphwright.array.vm.products import transpose
from graphwright.patterns import table as words

_SIDE = 64
_LINE = 4 * _SIDE
MORE = 52
"""The word, counted from the instruction on, at which the words after the operands begin."""
KT, VT, GATES, PARTS, LSE_GRAD, DGATES, PART_K, PART_V, RESULT, PAIRS, BATCH, LARGEST = range(12)
_LSE = 8  # index of the operand

# the scratch: scores and slopes of a strip, then lines of a number for each of 64 queries or keys
_SCORES = TILES_END
_SLOPES = _SCORES + _SIDE * _LINE
_SUMS = _SLOPES + _SIDE * _LINE  # 16 numbers for each query
_TOP = _SUMS + _SIDE * 64
_ALPHA, _GATE, _PULLED = _TOP + _LINE, _TOP + 2 * _LINE, _TOP + 3 * _LINE
_KEYS, _VALUES = _TOP + 4 * _LINE, _TOP + 6 * _LINE  # addresses
_PIECES = _TOP + 8 * _LINE  # 64 pieces
_PIECE = 64
_WALK = _PIECES + _SIDE * _PIECE
_KEY, _COUNT, _COLUMN, _EDGE, _KIND, _INSIDE, _SLOT = range(7)  # words of a piece

same_i32 = vec.define(
    "same_i32",
    vec.M,
    (vec.i64, vec.i64, vec.M),
    lambda b, p, x, m: b.icmp_signed(
        "==", vec.masked_load(b, p, m, vec.INTS, "v16i32", 4), vec.broadcast(b, b.trunc(x, vec.I32))
    ),
)
"""Whether each of 16 int32 at an address, under a mask, is x."""
bit_lanes = vec.define("bit_lanes", vec.M, (vec.i64,), lambda b, x: b.bitcast(b.trunc(x, vec.I16), vec.FLAGS))
"""The mask whose lane i is bit i of x."""


def _listed(builder: Any, at: Any, count: Any) -> list[Any]:
    """Return 16 addresses, of which the first `count` are stored at address `at`; the others are the first one."""
    found = []
    for r in range(vec.LANES):
        source = builder.select(builder.icmp_signed(">", count, vec.I64(r)), vec.I64(8 * r), vec.I64(0))
        stored = builder.load(vec.pointer(builder, builder.add(at, source), vec.I64))
        found.append(vec.aligned(stored, 8))
    return found


@intrinsic
def _products(typingctx: Any, x: Any, at: Any, width: Any, count: Any) -> Any:
    """Return a vector of dot products of x with the `count` rows whose addresses are stored at address `at`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, at, width, count = args
        return dots(builder, x, _listed(builder, at, count), width)

    return vec.V(vec.i64, vec.i64, vec.i64, vec.i64), codegen


@intrinsic
def _add_weighted(typingctx: Any, out: Any, kept: Any, p: Any, at: Any, width: Any, count: Any) -> Any:
    """out = kept·out + Σ p[r]·row r, over the `count` rows whose addresses are stored at address `at`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, kept, p, at, width, count = args
        add_rows(builder, out, kept, p, _listed(builder, at, count), width)
        return ir.Constant(vec.I8.as_pointer(), None)

    return vec.void(vec.i64, vec.V, vec.V, vec.i64, vec.i64, vec.i64), codegen


@native
def _word(row: Any, index: Any) -> Any:
    """Return a word of the pattern's table."""
    return vec.load_i64(cell(row, 9) + 8 * index)


@native
def _more(row: Any, index: Any) -> Any:
    """Return a word after the operands."""
    return cell(row, MORE + index)


@native
def _shift(row: Any) -> Any:
    """Return which of the pattern's queries the operand's first one is."""
    given = cell(row, 15)
    return vec.load_i64(given) - _word(row, words.QSTART) if given else 0


@native
def _misfits(row: Any) -> Any:
    """Return whether the table is none, or the operands are longer than the pattern or have too few gates."""
    if _word(row, words.MAGIC) != words.SIGNATURE or _word(row, words.PLANES) != cell(row, 10):
        return True
    shift = _shift(row)
    if shift < 0 or shift + cell(row, 5) > _word(row, words.TQ):
        return True
    if cell(row, 15) == 0 and cell(row, 6) > _word(row, words.TK):
        return True
    return cell(row, 14) != 0 and _more(row, GATES) < _word(row, words.GATES)


@native
def _plane(row: Any, head: Any, group: Any) -> Any:
    planes = cell(row, 10)
    if planes == 1:
        return 0
    return group if planes == cell(row, 4) else head


@native
def _begin(row: Any, scratch: Any, plane: Any, i: Any) -> None:
    """Start to walk the list of query block i."""
    node = vec.load_i32(_word(row, words.ROWS) + 4 * (plane * _word(row, words.ROW_STRIDE) + i))
    left, walk = vec.load_i32(_word(row, words.IN_DEGREE) + 4 * node), scratch + _WALK
    vec.store_i64(walk, vec.load_i32(_word(row, words.IN_HEAD) + 4 * node) if left else 0)
    vec.store_i64(walk + 8, left)
    vec.store_i64(walk + 16, 0)  # entries of the bucket that are done
    vec.store_i64(walk + 24, 0)  # keys of the block that are done


@native
def _out_of_sight(row: Any, kind: Any, first: Any, last: Any, begin: Any, end: Any) -> Any:
    """Return whether the pattern's rule allows no pair of the positions first to last and keys begin to end."""
    if kind != words.RULE:
        return False
    window = _word(row, words.WINDOW)
    if _word(row, words.CAUSAL) and begin > last:
        return True
    if window and first - end + 1 >= window:
        return True
    return window != 0 and _word(row, words.SYMMETRIC) != 0 and begin - last >= window


@native
def _strip(row: Any, scratch: Any, t: Any, rows: Any, tiles: Any, closed: Any) -> Any:
    """Collect the keys of the next edges, up to 64, for queries t to t + rows; return how many columns they take.

    In `tiles`, the columns of a piece begin at a multiple of 16, and its keys are of one packed tile. Edges with gate 0
    inside the softmax are left out unless `closed`.
    """
    walk, gates, count, columns = scratch + _WALK, cell(row, 14), 0, 0
    b, left, done, at = cell(walk, 0), cell(walk, 1), cell(walk, 2), cell(walk, 3)
    block, limit = _word(row, words.BLOCK), min(_word(row, words.TK), cell(row, 6))
    items, source, index = _word(row, words.IN_ITEMS), _word(row, words.SRC), _word(row, words.INDEX)
    bucket, first = _word(row, words.BUCKET), t + _shift(row) + _word(row, words.QSTART)
    last = first + rows - 1
    while left > 0:
        edge = vec.load_i32(items + 4 * (b * bucket + done))
        start = block * vec.load_i32(index + 4 * vec.load_i32(source + 4 * edge))
        begin, end = start + at, min(start + block, limit)
        n, gate, slot = 0, F(1.0), -1
        if gates:
            slot = vec.load_i32(_word(row, words.GATE) + 4 * edge)
            if slot >= 0:
                gate = vec.load_f32(gates + 4 * slot)
        if begin < end and (closed or cell(row, 13) or gate > F(0.0) or gate != gate):
            n = min(end - begin, _SIDE - (begin & (_SIDE - 1)) if tiles else _SIDE)
            kind = int(vec.load_u8(_word(row, words.KIND) + edge))
            if not _out_of_sight(row, kind, first, last, begin, begin + n):
                width = (n + 15) & -16 if tiles else n
                if columns + width > _SIDE:
                    if tiles or columns == _SIDE:
                        break
                    width = n = _SIDE - columns
                piece = scratch + _PIECES + _PIECE * count
                vec.store_i64(piece + 8 * _KEY, begin)
                vec.store_i64(piece + 8 * _COUNT, n)
                vec.store_i64(piece + 8 * _COLUMN, columns)
                vec.store_i64(piece + 8 * _EDGE, edge)
                vec.store_i64(piece + 8 * _KIND, kind)
                vec.store_i64(piece + 8 * _INSIDE, at)
                vec.store_i64(piece + 8 * _SLOT, slot)
                if gates:
                    for c in range(columns, columns + width):
                        vec.store_f32(scratch + _GATE + 4 * c, gate)
                columns += width
                count += 1
        at += n
        if n == 0 or start + at >= end:
            left, done, at = left - 1, done + 1, 0
            if done == bucket:
                done, b = 0, vec.load_i32(_word(row, words.IN_NEXT) + 4 * b) if left > 0 else 0
    if gates:  # columns without a key have weight 0, which only a finite number leaves at 0
        for c in range(columns, (columns + 15) & -16):
            vec.store_f32(scratch + _GATE + 4 * c, F(1.0))
    vec.store_i64(walk, b)
    vec.store_i64(walk + 8, left)
    vec.store_i64(walk + 16, done)
    vec.store_i64(walk + 24, at)
    vec.store_i64(walk + 32, count)
    return columns


@native
def _count(scratch: Any) -> Any:
    """Return the number of pieces of the strip."""
    return cell(scratch + _WALK, 4)


@native
def _of(scratch: Any, p: Any) -> Any:
    """Return (first key, number of keys, first column) of piece p."""
    piece = scratch + _PIECES + _PIECE * p
    return cell(piece, _KEY), cell(piece, _COUNT), cell(piece, _COLUMN)


@native
def _ends(row: Any, position: Any, key: Any) -> Any:
    """Return (first, end) of the keys, counted from `key`, that causality and window allow for a query's position."""
    window, low, high = _word(row, words.WINDOW), -(1 << 30), 1 << 30
    if window:
        low = position - window + 1 - key
        if _word(row, words.SYMMETRIC):
            high = position + window - key
    if _word(row, words.CAUSAL):
        high = min(high, position + 1 - key)
    return low, high


@native
def _bits(row: Any, edge: Any, query: Any, inside: Any) -> Any:
    """Return 16 bits of an edge's mask: for row `query` of its block, the keys from `inside` on."""
    each = (_word(row, words.BLOCK) + 63) >> 6
    line = vec.load_i32(_word(row, words.BITS) + 4 * edge) * _word(row, words.BLOCK) + query
    at, lower = _word(row, words.POOL) + 8 * (line * each + (inside >> 6)), inside & 63
    found = vec.load_i64(at) >> lower
    if lower > 48 and (inside >> 6) + 1 < each:
        found = (found & ((1 << (64 - lower)) - 1)) | (vec.load_i64(at + 8) << (64 - lower))
    return found


@native
def _seen(row: Any, piece: Any, token: Any, v: Any) -> Any:
    """Return the mask of 16 keys of a piece, from 16·v on: true where the query, one of the pattern's, sees the key."""
    kind, key, n = cell(piece, _KIND), cell(piece, _KEY), cell(piece, _COUNT)
    mask = vec.first(n - 16 * v)
    if kind == words.RULE:
        low, high = _ends(row, token + _word(row, words.QSTART), key + 16 * v)
        mask = mask & vec.first(high) & vec.outside(low)
        if _word(row, words.SEG_Q):
            own = vec.load_i32(_word(row, words.SEG_Q) + 4 * token)
            mask = mask & same_i32(_word(row, words.SEG_K) + 4 * (key + 16 * v), own, mask)
    elif kind == words.MASKED:
        query = token % _word(row, words.BLOCK)
        mask = mask & bit_lanes(_bits(row, cell(piece, _EDGE), query, cell(piece, _INSIDE) + 16 * v))
    return mask


@native
def _whole(row: Any, piece: Any, token: Any, rows: Any) -> Any:
    """Return whether queries token to token + rows see all keys of a piece."""
    kind, key, n = cell(piece, _KIND), cell(piece, _KEY), cell(piece, _COUNT)
    if kind == words.FULL:
        return True
    if kind == words.MASKED or _word(row, words.SEG_Q):
        return False
    first = token + _word(row, words.QSTART)
    _, high = _ends(row, first, key)
    low, _ = _ends(row, first + rows - 1, key)
    return low <= 0 and n <= high


@native
def _masked(row: Any, scratch: Any, t: Any, rows: Any) -> None:
    """Set the scores of pairs that are not allowed to -inf, and those of columns without a key, in a strip of tiles."""
    low, token = vec.splat(F(-np.inf)), t + _shift(row)
    for p in range(_count(scratch)):
        piece = scratch + _PIECES + _PIECE * p
        n, at = cell(piece, _COUNT), scratch + _SCORES + 4 * cell(piece, _COLUMN)
        if _whole(row, piece, token, rows):
            if n & 15:
                mask, v = vec.first(n & 15), n >> 4
                for r in range(rows):
                    line = at + _LINE * r + 64 * v
                    vec.store(line, vec.select(mask, vec.load(line), low))
        else:
            for r in range(rows):
                for v in range((n + 15) >> 4):
                    line = at + _LINE * r + 64 * v
                    vec.store(line, vec.select(_seen(row, piece, token + r, v), vec.load(line), low))


@native
def _few_masked(row: Any, scratch: Any, t: Any, rows: Any, columns: Any) -> None:
    """The same for a strip of addresses, whose pieces follow one another."""
    low, token = vec.splat(F(-np.inf)), t + _shift(row)
    for p in range(_count(scratch)):
        piece = scratch + _PIECES + _PIECE * p
        if not _whole(row, piece, token, rows):
            n = cell(piece, _COUNT)
            for r in range(rows):
                line = scratch + _SCORES + _LINE * r + 4 * cell(piece, _COLUMN)
                for v in range((n + 15) >> 4):
                    mask = vec.first(n - 16 * v)
                    scores = vec.select(_seen(row, piece, token + r, v), vec.load_first(line + 64 * v, mask), low)
                    vec.store_first(line + 64 * v, scores, mask)
    if columns & 15:
        for r in range(rows):
            line = scratch + _SCORES + _LINE * r + 4 * (columns & -16)
            vec.store(line, vec.select(vec.first(columns & 15), vec.load(line), low))


@native
def _tile(row: Any, packed: Any, width: Any, batch: Any, group: Any, key: Any) -> Any:
    """Return the address of a token in packed tiles [width, 64]."""
    tiles = (cell(row, 6) + _SIDE - 1) // _SIDE
    return packed + _LINE * width * ((batch * cell(row, 4) + group) * tiles + (key >> 6)) + 4 * (key & (_SIDE - 1))


@native
def _tile_products(
    row: Any, scratch: Any, x: Any, step: Any, width: Any, packed: Any, batch: Any, group: Any, rows: Any, to: Any,
) -> None:  # fmt: skip
    """Multiply rows of x by the packed tokens of the strip."""
    for p in range(_count(scratch)):
        key, n, column = _of(scratch, p)
        tile = _tile(row, packed, width, batch, group, key)
        gemm(x, step, 4, tile, _LINE, 4, to + 4 * column, _LINE, rows, n, width, 0, 0, scratch)


@native
def _addresses(row: Any, scratch: Any, k: Any, v: Any) -> None:
    """Write the addresses of the keys and values of the strip."""
    sk, sv = step_of(row, 1), step_of(row, 2)
    for p in range(_count(scratch)):
        key, n, column = _of(scratch, p)
        for c in range(n):
            vec.store_i64(scratch + _KEYS + 8 * (column + c), k + (key + c) * sk)
            vec.store_i64(scratch + _VALUES + 8 * (column + c), v + (key + c) * sv)


@native
def _few_products(
    scratch: Any, x: Any, step: Any, width: Any, at: Any, rows: Any, columns: Any, factor: Any, to: Any
) -> None:
    """Multiply rows of x by the tokens whose addresses are at `at`, times a factor."""
    wide = vec.splat(factor)
    for r in range(rows):
        for c in range(0, columns, 16):
            count = min(columns - c, 16)
            found = _products(x + r * step, at + 8 * c, width, count)  # pyright: ignore[reportCallIssue]
            vec.store(to + _LINE * r + 4 * c, found * wide)


@native
def _scored(
    row: Any, scratch: Any, q: Any, k: Any, v: Any, batch: Any, group: Any, t: Any, rows: Any, columns: Any, tiles: Any
) -> None:
    """Write the scores of a strip: scaled and masked, before the softcap."""
    to, sq, deep = scratch + _SCORES, step_of(row, 0), cell(row, 7)
    if tiles:
        _tile_products(row, scratch, q, sq, deep, _more(row, KT), batch, group, rows, to)
        _masked(row, scratch, t, rows)
    else:
        _addresses(row, scratch, k, v)
        _few_products(scratch, q, sq, deep, scratch + _KEYS, rows, columns, F(number(row, 11)), to)
        _few_masked(row, scratch, t, rows, columns)


@native
def _capped(x: Any, cap: Any) -> Any:
    """Return cap·tanh(x / cap); -inf, a pair that is not allowed, remains."""
    return vec.select(x > F(-np.inf), tanh(x / cap) * cap, x)


@native
def _softened(row: Any, scratch: Any, rows: Any, columns: Any) -> None:
    """Turn the scores of a strip into g·e^(s - maximum), with running maxima and sums; note what older sums lose."""
    gates, inside, cap = cell(row, 14), cell(row, 13) == 0, F(number(row, 12))
    for r in range(rows):
        line, old = scratch + _SCORES + _LINE * r, vec.load_f32(scratch + _TOP + 4 * r)
        if cap > F(0.0):
            for c in range(0, 4 * columns, 64):
                vec.store(line + c, _capped(vec.load(line + c), cap))
        best = vec.load(line)
        for c in range(64, 4 * columns, 64):
            best = vec.most(best, vec.load(line + c))
        found = vec.top(best)
        new = found if found > old else old
        base, alpha = vec.splat(new if new > F(-np.inf) else F(0.0)), F(1.0)
        if new != old:
            alpha = vec.only(exp(vec.splat(old - new)))
        part = vec.load(scratch + _SUMS + 64 * r) * vec.splat(alpha)
        if gates == 0:
            for c in range(0, 4 * columns, 64):
                e = exp(vec.load(line + c) - base)
                vec.store(line + c, e)
                part = part + e
        else:
            for c in range(0, 4 * columns, 64):
                e = exp(vec.load(line + c) - base)
                shown = e * vec.load(scratch + _GATE + c)
                vec.store(line + c, shown)
                part = part + (shown if inside else e)
        vec.store(scratch + _SUMS + 64 * r, part)
        vec.store_f32(scratch + _TOP + 4 * r, new)
        vec.store_f32(scratch + _ALPHA + 4 * r, alpha)


@native
def _scaled(at: Any, step: Any, rows: Any, size: Any, factors: Any) -> None:
    """Multiply each of `rows` rows of `size` numbers by the factor of that row."""
    for r in range(rows):
        factor = vec.load_f32(factors + 4 * r)
        if factor != F(1.0):
            wide = vec.splat(factor)
            for d in range(0, size, 16):
                mask, position = vec.first(size - d), at + r * step + 4 * d
                vec.store_first(position, vec.load_first(position, mask) * wide, mask)


@native
def _cleared(at: Any, step: Any, rows: Any, size: Any) -> None:
    for r in range(rows):
        for d in range(0, size, 16):
            vec.store_first(at + r * step + 4 * d, vec.splat(F(0.0)), vec.first(size - d))


@native
def _add_row(to: Any, x: Any, factor: Any, size: Any) -> None:
    """Add `factor` times the numbers at `x` to those at `to`."""
    wide = vec.splat(factor)
    for d in range(0, size, 16):
        mask = vec.first(size - d)
        grown = vec.fma(vec.load_first(x + 4 * d, mask), wide, vec.load_first(to + 4 * d, mask))
        vec.store_first(to + 4 * d, grown, mask)


@native
def _mixed(scratch: Any, at: Any, rows: Any, columns: Any, out: Any, step: Any, width: Any, weights: Any) -> None:
    """To each row of out, times a factor, add the tokens whose addresses are at `at`, times the row's weights."""
    for r in range(rows):
        line, kept = weights + _LINE * r, vec.splat(vec.load_f32(scratch + _ALPHA + 4 * r))
        for c in range(0, columns, 16):
            p, count = vec.load(line + 4 * c), min(columns - c, 16)
            _add_weighted(out + r * step, kept, p, at + 8 * c, width, count)  # pyright: ignore[reportCallIssue]
            kept = vec.splat(F(1.0))


@native
def _attend_rows(
    row: Any, scratch: Any, batch: Any, head: Any, group: Any, t: Any, i: Any, rows: Any, tiles: Any
) -> None:
    """Attend from `rows` queries of query block i, from query t on."""
    wide, sv, so = cell(row, 8), step_of(row, 2), step_of(row, 3)
    q, k = operand(row, 0, batch, head) + t * step_of(row, 0), operand(row, 1, batch, group)
    v, out = operand(row, 2, batch, group), operand(row, 3, batch, head) + t * so
    for r in range(rows):
        vec.store_f32(scratch + _TOP + 4 * r, F(-np.inf))
        vec.store(scratch + _SUMS + 64 * r, vec.splat(F(0.0)))
    _begin(row, scratch, _plane(row, head, group), i)
    fresh = True
    while True:
        columns = _strip(row, scratch, t, rows, tiles, False)
        if columns == 0:
            break
        _scored(row, scratch, q, k, v, batch, group, t, rows, columns, tiles)
        _softened(row, scratch, rows, columns)
        if tiles:
            if not fresh:
                _scaled(out, so, rows, wide, scratch + _ALPHA)
            for p in range(_count(scratch)):
                key, n, column = _of(scratch, p)
                init, step = (0, 0) if fresh else (out, so)
                weights = scratch + _SCORES + 4 * column
                gemm(weights, _LINE, 4, v + key * sv, sv, 4, out, so, rows, wide, n, init, step, scratch)
                fresh = False
        else:
            if fresh:
                _cleared(out, so, rows, wide)
                fresh = False
            _mixed(scratch, scratch + _VALUES, rows, columns, out, so, wide, scratch + _SCORES)
    if fresh:
        _cleared(out, so, rows, wide)
    for r in range(rows):
        whole = vec.total(vec.load(scratch + _SUMS + 64 * r))
        vec.store_f32(scratch + _GATE + 4 * r, whole)
        vec.store_f32(scratch + _ALPHA + 4 * r, F(1.0) / whole if whole > F(0.0) or whole != whole else F(0.0))
    _scaled(out, so, rows, wide, scratch + _ALPHA)
    lse = operand(row, _LSE, batch, head) + 4 * t
    for r in range(0, rows, 16):
        total = log(vec.load(scratch + _GATE + 4 * r)) + vec.load(scratch + _TOP + 4 * r)
        vec.store_first(lse + 4 * r, total, vec.first(rows - r))


@native
def _span(row: Any, t: Any, end: Any, shift: Any) -> Any:
    """Return (query block, number of queries) of the queries from t on that are of one block, before `end`."""
    block = _word(row, words.BLOCK)
    i = (t + shift) // block
    return i, min(end, (i + 1) * block - shift) - t


@loop(Code.BLOCK_ATTEND)
def block_attend(row: Any, scratch: Any) -> Any:
    """Compute the results and the log-sum-exp; -1 if the table does not fit the operands."""
    if _misfits(row):
        return -1
    heads, queries, shift = cell(row, 3), cell(row, 5), _shift(row)
    spans, share = (queries + _SIDE - 1) // _SIDE, heads // cell(row, 4)
    for unit in range(cell(row, 1), cell(row, 1) + cell(row, 2)):
        item, t = unit // spans, _SIDE * (unit % spans)
        batch, head, end = item // heads, item % heads, min(t + _SIDE, queries)
        while t < end:
            i, rows = _span(row, t, end, shift)
            tiles = _more(row, KT) != 0 and rows > FEW
            _attend_rows(row, scratch, batch, head, head // share, t, i, rows, tiles)
            t += rows
    return 3


@loop(Code.BLOCK_PACK)
def block_pack(row: Any) -> None:
    """Pack tokens: tiles [width, 64], transposed and scaled, 0 after the last token.

    Words: 1 first tile, 2 number of tiles, 3 heads, 4 tokens, 5 width, 6 source, its bytes per batch element (7), head
    (8) and token (9), 10 result, 11 scale.
    """
    heads, tokens, width, step = cell(row, 3), cell(row, 4), cell(row, 5), cell(row, 9)
    tiles, scale = (tokens + _SIDE - 1) // _SIDE, F(number(row, 11))
    wide = vec.splat(scale)
    for unit in range(cell(row, 1), cell(row, 1) + cell(row, 2)):
        item, first = unit // tiles, _SIDE * (unit % tiles)
        source = cell(row, 6) + item // heads * cell(row, 7) + item % heads * cell(row, 8) + first * step
        to, count = cell(row, 10) + _LINE * width * unit, min(_SIDE, tokens - first)
        for d in range(0, width, 16):
            for j in range(0, _SIDE, 16):
                if width - d >= 16:
                    transpose(source + j * step + 4 * d, step, to + _LINE * d + 4 * j, _LINE, count - j, 16)
                else:
                    for e in range(d, width):
                        mask = vec.first(count - j)
                        vec.store(to + _LINE * e + 4 * j, vec.pick_first(source + j * step + 4 * e, step, mask))
        if scale != F(1.0):
            for d in range(width):
                for c in range(0, _LINE, 64):
                    at = to + _LINE * d + c
                    vec.store(at, vec.load(at) * wide)


@native
def _bases(row: Any, scratch: Any, batch: Any, head: Any, t: Any, rows: Any) -> Any:
    """Note the log-sum-exp of each query, inf if it sees nothing; return how many see a key."""
    lse, count = operand(row, _LSE, batch, head) + 4 * t, 0
    for r in range(rows):
        base = vec.load_f32(lse + 4 * r)
        seen = base != F(-np.inf)
        vec.store_f32(scratch + _TOP + 4 * r, base if seen else F(np.inf))
        count += 1 if seen else 0
    return count


@native
def _prepared(row: Any, scratch: Any, batch: Any, head: Any, t: Any, rows: Any) -> None:
    """Note for each query Σ g·out, less the gradient of the log-sum-exp, and that itself: inf if it sees nothing."""
    wide, sg, so = cell(row, 8), step_of(row, 4), step_of(row, 3)
    g, out = operand(row, 4, batch, head) + t * sg, operand(row, 3, batch, head) + t * so
    given = _more(row, LSE_GRAD)
    _bases(row, scratch, batch, head, t, rows)
    for r in range(rows):
        part = vec.splat(F(0.0))
        for d in range(0, wide, 16):
            mask = vec.first(wide - d)
            part = vec.fma(vec.load_first(g + r * sg + 4 * d, mask), vec.load_first(out + r * so + 4 * d, mask), part)
        less = vec.total(part)
        if given:
            less -= vec.load_f32(given + 4 * ((batch * cell(row, 3) + head) * cell(row, 5) + t + r))
        vec.store_f32(scratch + _ALPHA + 4 * r, less)


@native
def _weights(row: Any, scratch: Any, rows: Any, columns: Any) -> None:
    """Turn the scores of a strip into softmax weights, gates inside the softmax included, given the log-sum-exps."""
    gates, cap = cell(row, 14) and cell(row, 13) == 0, F(number(row, 12))
    for r in range(rows):
        line, base = scratch + _SCORES + _LINE * r, vec.splat(vec.load_f32(scratch + _TOP + 4 * r))
        for c in range(0, 4 * columns, 64):
            s = vec.load(line + c)
            e = exp((_capped(s, cap) if cap > F(0.0) else s) - base)
            vec.store(line + c, e * vec.load(scratch + _GATE + c) if gates else e)


@native
def _pulled_back(row: Any, scratch: Any, rows: Any, columns: Any, pulled: Any) -> None:
    """From scores and slopes g·v of a strip, compute the weights of values and the slopes of the products q·k.

    With `pulled`, add up the gradients of the gates of each column.
    """
    gates, inside, cap, scale = cell(row, 14), cell(row, 13) == 0, F(number(row, 12)), F(number(row, 11))
    for r in range(rows):
        line, slopes = scratch + _SCORES + _LINE * r, scratch + _SLOPES + _LINE * r
        base, less = vec.load_f32(scratch + _TOP + 4 * r), vec.splat(vec.load_f32(scratch + _ALPHA + 4 * r))
        if gates == 0 and cap == F(0.0) and not pulled:
            for c in range(0, 4 * columns, 64):
                p = exp(vec.load(line + c) - base)
                vec.store(line + c, p)
                vec.store(slopes + c, p * (vec.load(slopes + c) - less) * scale)
        else:
            for c in range(0, 4 * columns, 64):
                s, bend = vec.load(line + c), vec.splat(scale)
                if cap > F(0.0):
                    y = tanh(s / cap)
                    s, bend = vec.select(s > F(-np.inf), y * cap, s), (1.0 - y * y) * scale
                slope = vec.load(slopes + c)
                s = s - base
                g = vec.load(scratch + _GATE + c) if gates else vec.splat(F(1.0))
                if gates and inside:
                    s = vec.select(g > F(0.0), s, vec.least(s, F(FURTHEST)))
                e = exp(s)
                if inside:
                    shown = e * g
                    change = slope - less
                    ds, own = shown * change, e * change
                else:
                    shown, own = e * g, e * slope
                    ds = e * (slope * g - less)
                vec.store(line + c, shown)
                vec.store(slopes + c, ds * bend)
                if pulled:
                    at = scratch + _PULLED + c
                    vec.store(at, vec.load(at) + own)


@native
def _logs(row: Any, scratch: Any, s: Any, base: Any, c: Any) -> Any:
    """Return (s after the softcap, ln of the softmax weights, -1e30 where they are 0) of 16 scores at column c / 4."""
    cap = F(number(row, 12))
    if cap > F(0.0):
        s = _capped(s, cap)
    found = s - base
    if cell(row, 14) and cell(row, 13) == 0:
        g = vec.load(scratch + _GATE + c)
        found = vec.select(g > F(0.0), found + log(g), F(-np.inf))
    return s, vec.most(found, F(-1e30))


@native
def _entropy_pulled_back(row: Any, scratch: Any, rows: Any, columns: Any, pulled: Any) -> None:
    """The same for entropies: from scores and the gradients g of entropies, -g·a (ln a + 1) as slopes."""
    cap, scale, inside = F(number(row, 12)), F(number(row, 11)), cell(row, 14) and cell(row, 13) == 0
    for r in range(rows):
        line, slopes = scratch + _SCORES + _LINE * r, scratch + _SLOPES + _LINE * r
        base, up = vec.load_f32(scratch + _TOP + 4 * r), vec.load_f32(scratch + _ALPHA + 4 * r)
        part = vec.load(scratch + _SUMS + 64 * r)
        for c in range(0, 4 * columns, 64):
            s, logs = _logs(row, scratch, vec.load(line + c), base, c)
            change = (logs + F(1.0)) * (-up)
            ds, bend = exp(logs) * change, vec.splat(scale)
            if cap > F(0.0):
                y = vec.most(s, -cap) / cap
                bend = (1.0 - y * y) * scale
            part = part + ds
            vec.store(slopes + c, ds * bend)
            if pulled and inside:
                at, g = scratch + _PULLED + c, vec.load(scratch + _GATE + c)
                vec.store(at, vec.load(at) + vec.select(g > F(0.0), ds / g, 0.0))
        vec.store(scratch + _SUMS + 64 * r, part)


@native
def _collected(scratch: Any, result: Any) -> None:
    """Add the gradients of the gates of the strip's columns to those of their slots."""
    for p in range(_count(scratch)):
        piece = scratch + _PIECES + _PIECE * p
        slot, total = cell(piece, _SLOT), F(0.0)
        if slot >= 0:
            for c in range(cell(piece, _COLUMN), cell(piece, _COLUMN) + cell(piece, _COUNT)):
                total += vec.load_f32(scratch + _PULLED + 4 * c)
            vec.store_f32(result + 4 * slot, vec.load_f32(result + 4 * slot) + total)


@native
def _pull_back_rows(
    row: Any, scratch: Any, batch: Any, head: Any, group: Any, t: Any, i: Any, rows: Any, part: Any, dgates: Any
) -> None:
    """Write the gradients of `rows` queries of block i, and add to those of the keys and values of a part."""
    deep, wide, tiles = cell(row, 7), cell(row, 8), _more(row, KT) != 0 and rows > FEW
    sq, sk, sg = step_of(row, 0), step_of(row, 1), step_of(row, 4)
    tq, tk, tv = step_of(row, 5), step_of(row, 6), step_of(row, 7)
    q, g, dq = (operand(row, 0, batch, head) + t * sq, operand(row, 4, batch, head) + t * sg,
                operand(row, 5, batch, head) + t * tq)  # fmt: skip
    k, v = operand(row, 1, batch, group), operand(row, 2, batch, group)
    dk = operand(row, 6, batch, group) + part * _more(row, PART_K)
    dv = operand(row, 7, batch, group) + part * _more(row, PART_V)
    pulled, scores, slopes = dgates != 0, scratch + _SCORES, scratch + _SLOPES
    entropy, offset = _more(row, LARGEST), 4 * ((batch * cell(row, 3) + head) * cell(row, 5) + t)
    if entropy:
        _bases(row, scratch, batch, head, t, rows)
        for r in range(rows):
            vec.store_f32(scratch + _ALPHA + 4 * r, vec.load_f32(_more(row, LSE_GRAD) + offset + 4 * r))
            vec.store(scratch + _SUMS + 64 * r, vec.splat(F(0.0)))
    else:
        _prepared(row, scratch, batch, head, t, rows)
    _begin(row, scratch, _plane(row, head, group), i)
    fresh = True
    while True:
        columns = _strip(row, scratch, t, rows, tiles, pulled)
        if columns == 0:
            break
        _scored(row, scratch, q, k, v, batch, group, t, rows, columns, tiles)
        if entropy == 0 and tiles:
            _tile_products(row, scratch, g, sg, wide, _more(row, VT), batch, group, rows, slopes)
        elif entropy == 0:
            _few_products(scratch, g, sg, wide, scratch + _VALUES, rows, columns, F(1.0), slopes)
        if pulled:
            _cleared(scratch + _PULLED, _LINE, 1, _SIDE)
        if entropy:
            _entropy_pulled_back(row, scratch, rows, columns, pulled)
        else:
            _pulled_back(row, scratch, rows, columns, pulled)
        if pulled:
            _collected(scratch, dgates)
        if fresh and not tiles:
            _cleared(dq, tq, rows, deep)
        for p in range(_count(scratch)):
            key, n, column = _of(scratch, p)
            own, slope, to_k, to_v = scores + 4 * column, slopes + 4 * column, dk + key * tk, dv + key * tv
            if tiles:
                init, step = (0, 0) if fresh else (dq, tq)
                if wide:
                    gemm(own, 4, _LINE, g, sg, 4, to_v, tv, n, wide, rows, to_v, tv, scratch)
                gemm(slope, _LINE, 4, k + key * sk, sk, 4, dq, tq, rows, deep, n, init, step, scratch)
                gemm(slope, 4, _LINE, q, sq, 4, to_k, tk, n, deep, rows, to_k, tk, scratch)
                fresh = False
            else:
                for c in range(n):
                    for r in range(rows):
                        at, share = _LINE * r + 4 * c, vec.load_f32(slope + _LINE * r + 4 * c)
                        _add_row(to_v + c * tv, g + r * sg, vec.load_f32(own + at), wide)
                        _add_row(to_k + c * tk, q + r * sq, share, deep)
                        _add_row(dq + r * tq, k + (key + c) * sk, share, deep)
        fresh = False
    if fresh:
        _cleared(dq, tq, rows, deep)
    for r in range(rows if entropy else 0):
        vec.store_f32(_more(row, RESULT) + offset + 4 * r, -vec.total(vec.load(scratch + _SUMS + 64 * r)))


@loop(Code.BLOCK_ATTEND_BACKWARD)
def block_attend_backward(row: Any, scratch: Any) -> Any:
    """Compute the gradients of q, and those of k, v and gates of each part; -1 if the table does not fit."""
    if _misfits(row):
        return -1
    groups, queries, keys, shift = cell(row, 4), cell(row, 5), cell(row, 6), _shift(row)
    spans, share, parts = (queries + _SIDE - 1) // _SIDE, cell(row, 3) // groups, _more(row, PARTS)
    for unit in range(cell(row, 1), cell(row, 1) + cell(row, 2)):
        item, part = unit // parts, unit % parts
        batch, group, dgates = item // groups, item % groups, _more(row, DGATES)
        _cleared(operand(row, 6, batch, group) + part * _more(row, PART_K), step_of(row, 6), keys, cell(row, 7))
        _cleared(operand(row, 7, batch, group) + part * _more(row, PART_V), step_of(row, 7), keys, cell(row, 8))
        if dgates:
            dgates += 4 * unit * _more(row, GATES)
            _cleared(dgates, 0, 1, _more(row, GATES))
        for span in range(part, share * spans, parts):
            head, t = group * share + span // spans, _SIDE * (span % spans)
            end = min(t + _SIDE, queries)
            while t < end:
                i, rows = _span(row, t, end, shift)
                _pull_back_rows(row, scratch, batch, head, group, t, i, rows, part, dgates)
                t += rows
    return 3
