"""Triton kernels of block-sparse attention: forward, gradients of rows and of columns, and mass of edges.

A kernel walks the chain of buckets of its query block (rows) or key block (columns) in the pattern's own arrays, whose
addresses it reads from the pattern's table; on a GPU these are the arrays of a `PatternMirror`. Only edges of kind RULE
and MASKED and the short last block are masked. Each program writes memory that no other program writes, in an order
given by the lists, so that equal lists give equal bits.

A block may be larger than the tiles whose products fit into registers: a program has TILE_Q queries of a block (or
TILE_K keys), and takes the keys (the queries) of an edge in parts of as many.
"""

from __future__ import annotations

import triton
import triton.language as tl

from graphwright.array.formulas.block_attention import FURTHEST
from graphwright.array.triton.rows import along_two, multiple, tanh
from graphwright.patterns import table as words

ROWS, COLS, SRC, DST = (tl.constexpr(w) for w in (words.ROWS, words.COLS, words.SRC, words.DST))
IN_HEAD, OUT_HEAD = tl.constexpr(words.IN_HEAD), tl.constexpr(words.OUT_HEAD)
INDEX, KIND, GATE, BITS = (tl.constexpr(w) for w in (words.INDEX, words.KIND, words.GATE, words.BITS))
POOL, NQ, NK, PLANES = (tl.constexpr(w) for w in (words.POOL, words.NQ, words.NK, words.PLANES))
TQ, TK, QSTART = (tl.constexpr(w) for w in (words.TQ, words.TK, words.QSTART))
CAUSAL, WINDOW = tl.constexpr(words.CAUSAL), tl.constexpr(words.WINDOW)
SYMMETRIC, SEG_Q, SEG_K = (tl.constexpr(w) for w in (words.SYMMETRIC, words.SEG_Q, words.SEG_K))
ROW_STRIDE, COL_STRIDE = tl.constexpr(words.ROW_STRIDE), tl.constexpr(words.COL_STRIDE)
RULE, MASKED = tl.constexpr(words.RULE), tl.constexpr(words.MASKED)
MOST = tl.constexpr(FURTHEST)
LOWEST = tl.constexpr(float("-inf"))
HIGHEST = tl.constexpr(float("inf"))


@triton.jit
def _ints(table, word):
    """Return the int32 array whose address is in a word of the table."""
    return tl.load(table + word).to(tl.pointer_type(tl.int32))


@triton.jit
def _word(table, word):
    """Return a number of the table, as int32."""
    return tl.load(table + word).to(tl.int32)


@triton.jit
def _plane(table, head, heads, groups):
    """Return the plane of a query head."""
    planes = _word(table, PLANES)
    each = tl.where(planes == heads, head, head // (heads // groups))
    return tl.where(planes == 1, 0, each)


@triton.jit
def product(a, b, WIDE: tl.constexpr):
    """Return a·b in float32, of float32 operands to about 1e-6; WIDE widens 16-bit ones for the interpreter."""
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _tile(base, stride, tokens, count, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load rows `tokens` of an array of `count` rows [., WIDTH] as a tile [tokens, PADDED], 0 outside."""
    columns = tl.arange(0, PADDED)
    at = base + tokens[:, None].to(tl.int64) * stride + columns[None, :]
    inside = (tokens[:, None] >= 0) & (tokens[:, None] < count) & (columns[None, :] < WIDTH)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _put(base, stride, tokens, count, values, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Store the counterpart of `_tile`, in the dtype of `base`."""
    columns = tl.arange(0, PADDED)
    at = base + tokens[:, None].to(tl.int64) * stride + columns[None, :]
    inside = (tokens[:, None] >= 0) & (tokens[:, None] < count) & (columns[None, :] < WIDTH)
    tl.store(at, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _allowed(s, table, edge, rows, columns, BLOCK: tl.constexpr):
    """Mask scores s [queries, keys] of an edge. `rows` and `columns` are tokens of the pattern."""
    kind = tl.load(tl.load(table + KIND).to(tl.pointer_type(tl.uint8)) + edge).to(tl.int32)
    if kind == RULE:
        away = rows[:, None] + _word(table, QSTART) - columns[None, :]
        allowed = (_word(table, CAUSAL) == 0) | (away >= 0)
        window = _word(table, WINDOW)
        reach = tl.where(_word(table, SYMMETRIC) != 0, tl.abs(away), away)
        allowed = allowed & ((window == 0) | (reach < window))
        if tl.load(table + SEG_Q) != 0:
            of_row = tl.load(_ints(table, SEG_Q) + rows, mask=rows < _word(table, TQ), other=-1)
            of_column = tl.load(_ints(table, SEG_K) + columns, mask=columns < _word(table, TK), other=-2)
            allowed = allowed & (of_row[:, None] == of_column[None, :])
        s = tl.where(allowed, s, LOWEST)
    if kind == MASKED:
        EACH: tl.constexpr = (BLOCK + 63) // 64
        row = tl.load(_ints(table, BITS) + edge).to(tl.int64) * BLOCK + rows % BLOCK
        pool = tl.load(table + POOL).to(tl.pointer_type(tl.int64)) + row * EACH
        inner = columns % BLOCK
        word = tl.load(pool)[:, None]
        if EACH == 2:
            word = tl.where(inner[None, :] < 64, word, tl.load(pool + 1)[:, None])
        s = tl.where(((word >> (inner % 64).to(tl.int64)[None, :]) & 1) != 0, s, LOWEST)
    return s


@triton.jit
def _scores(q, k, table, edge, rows, columns, keys, scale, softcap,
            SOFTCAP: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """Return scores [queries, keys], -inf where not allowed, and their slope with respect to q·k."""
    s = product(q, tl.trans(k), WIDE) * scale
    slope = tl.full(s.shape, 1.0, tl.float32) * scale
    if SOFTCAP:
        part = tanh(s / softcap)
        s = part * softcap
        slope = (1.0 - part * part) * scale
    s = _allowed(s, table, edge, rows, columns, BLOCK)
    if tl.max(columns, 0) >= keys:
        s = tl.where(columns[None, :] < keys, s, LOWEST)
    return s, slope


@triton.jit
def _gate(table, edge, gates, GATES: tl.constexpr):
    """Return the gate of an edge; 1 for none."""
    value = 1.0
    if GATES:
        slot = tl.load(_ints(table, GATE) + edge)
        value = tl.load(gates + slot, mask=slot >= 0, other=1.0).to(tl.float32)
    return value


@triton.jit
def _raised(s, base, gate, GATES: tl.constexpr, INSIDE: tl.constexpr):
    """Return e^(s - log-sum-exp); only a pair whose gate is 0 can exceed the sum, its exponent is limited."""
    power = s - tl.where(base > LOWEST, base, HIGHEST)[:, None]
    if GATES and INSIDE:
        power = tl.where(gate > 0, power, tl.minimum(power, MOST))
    return tl.exp(power)


@triton.jit
def _shift(table, start, START: tl.constexpr):
    """Return the pattern's number of the first query."""
    value = 0
    if START:
        value = tl.load(start).to(tl.int32) - _word(table, QSTART)
    return value


@triton.jit
def _row(table, block, head, heads, groups):
    """Return (first bucket, number of edges) of a query block's list; none for a block that the pattern lacks."""
    at = _plane(table, head, heads, groups) * _word(table, ROW_STRIDE) + block
    there = block < _word(table, NQ)
    node = tl.load(_ints(table, ROWS) + at, mask=there, other=0)
    left = tl.load(_ints(table, IN_HEAD + 1) + node, mask=there, other=0)
    bucket = tl.load(_ints(table, IN_HEAD) + node, mask=left > 0, other=0)
    return bucket, left


@triton.jit
def _edge(table, bucket, step, PARTS: tl.constexpr, FIRST: tl.constexpr):
    """Return (bucket, edge) of part `step` of a list in buckets of 16; FIRST: the word of the lists' heads.

    `bucket` is that of the step before; an edge has PARTS steps.
    """
    if (step > 0) & (step % (16 * PARTS) == 0):
        bucket = tl.load(_ints(table, FIRST + 2) + bucket)
    return bucket, tl.load(_ints(table, FIRST + 3) + bucket * 16 + step // PARTS % 16)


@triton.jit
def _tokens(table, edge, part, END: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return the tokens of a part of a block at one end of an edge; END: the word of the edges' ends."""
    block = tl.load(_ints(table, INDEX) + tl.load(_ints(table, END) + edge))
    return block * BLOCK + part * TILE + tl.arange(0, TILE)


@triton.jit
def _row_tiles(queries, BLOCK: tl.constexpr, TILE_Q: tl.constexpr, START: tl.constexpr):
    """Return the number of tiles of a query head: of its blocks, one more if the first may begin within one."""
    return (tl.cdiv(queries, BLOCK) + (1 if START else 0)) * (BLOCK // TILE_Q)


@triton.jit
def _of_rows(queries, shift, BLOCK: tl.constexpr, TILE_Q: tl.constexpr, START: tl.constexpr):
    """Return the query block of a program, its queries (tokens of the pattern), its pair of N and H, and its part.

    The part numbers [pair, tile of a block]: no other program has the edges of this block in the same part.
    """
    PARTS: tl.constexpr = BLOCK // TILE_Q
    tile, pair = along_two(_row_tiles(queries, BLOCK, TILE_Q, START))
    pair = pair.to(tl.int64)
    rows = shift // BLOCK * BLOCK + tile * TILE_Q + tl.arange(0, TILE_Q)
    return shift // BLOCK + tile // PARTS, rows, pair, pair * PARTS + tile % PARTS


@triton.jit
def forward(
    q, k, v, table, gates, start, out, lse, queries, keys, heads, groups, scale, softcap,
    q_n, q_h, q_t, k_n, k_h, k_t, v_n, v_h, v_t,
    BLOCK: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, D_PADDED: tl.constexpr, DV_PADDED: tl.constexpr,
    GATES: tl.constexpr, INSIDE: tl.constexpr, START: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute out [N, H, Tq, DV] and lse [N, H, Tq], both row-major; a program per (query tile, N·H)."""
    q_n, q_h, q_t = multiple(q_n, ALIGNED), multiple(q_h, ALIGNED), multiple(q_t, ALIGNED)
    k_n, k_h, k_t = multiple(k_n, ALIGNED), multiple(k_h, ALIGNED), multiple(k_t, ALIGNED)
    v_n, v_h, v_t = multiple(v_n, ALIGNED), multiple(v_h, ALIGNED), multiple(v_t, ALIGNED)
    shift = _shift(table, start, START)
    block, rows, pair, _part = _of_rows(queries, shift, BLOCK, TILE_Q, START)
    n, head = pair // heads, (pair % heads).to(tl.int32)
    group = head // (heads // groups)
    tokens = rows - shift
    keys = tl.minimum(keys, _word(table, TK))
    q_tile = _tile(q + n * q_n + head * q_h, q_t, tokens, queries, D, D_PADDED)
    k_base, v_base = k + n * k_n + group * k_h, v + n * v_n + group * v_h
    top = tl.full([TILE_Q], LOWEST, tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    mixed = tl.zeros([TILE_Q, DV_PADDED], tl.float32)
    bucket, left = _row(table, block, head, heads, groups)
    PARTS: tl.constexpr = BLOCK // TILE_K
    for step in range(0, left * PARTS):
        bucket, edge = _edge(table, bucket, step, PARTS, IN_HEAD)
        columns = _tokens(table, edge, step % PARTS, SRC, BLOCK, TILE_K)
        gate = _gate(table, edge, gates, GATES)
        k_tile = _tile(k_base, k_t, columns, keys, D, D_PADDED)
        s, _ = _scores(q_tile, k_tile, table, edge, rows, columns, keys, scale, softcap,
                       SOFTCAP, BLOCK, WIDE)  # fmt: skip
        if GATES and INSIDE:
            s = tl.where(gate > 0, s, LOWEST)
        highest = tl.maximum(top, tl.max(s, 1))
        base = tl.where(highest > LOWEST, highest, 0.0)
        e = tl.exp(s - base[:, None])
        if GATES and INSIDE:
            e = e * tl.maximum(gate, 0.0)
        kept = tl.exp(top - base)
        total = total * kept + tl.sum(e, 1)
        if GATES and not INSIDE:
            e = e * gate
        v_tile = _tile(v_base, v_t, columns, keys, DV, DV_PADDED)
        mixed = mixed * kept[:, None] + product(e.to(v_tile.dtype), v_tile, WIDE)
        top = highest
    whole = tl.where(total > 0, total, 1.0)
    sums = tl.where(total > 0, top + tl.log(whole), LOWEST)
    _put(out + pair * queries * DV, DV, tokens, queries, mixed / whole[:, None], DV, DV_PADDED)
    tl.store(lse + pair * queries + tokens, sums, mask=(tokens >= 0) & (tokens < queries))


@triton.jit
def backward_rows(
    q, k, v, table, gates, start, out, lse, lse_grad, grad, dq, less, edge_grads, queries, keys, heads, groups, slots,
    scale, softcap, q_n, q_h, q_t, k_n, k_h, k_t, v_n, v_h, v_t,
    BLOCK: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, D_PADDED: tl.constexpr, DV_PADDED: tl.constexpr,
    GATES: tl.constexpr, INSIDE: tl.constexpr, START: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr,
    LSE_GRAD: tl.constexpr,
):  # fmt: skip
    """Compute dq and `less` [N, H, Tq] = Σ grad·out - lse_grad, and with gates `edge_grads`.

    edge_grads is [N·H·tiles of a block, slots]; out, grad and dq are row-major; a program per (query tile, N·H).
    """
    q_n, q_h, q_t = multiple(q_n, ALIGNED), multiple(q_h, ALIGNED), multiple(q_t, ALIGNED)
    k_n, k_h, k_t = multiple(k_n, ALIGNED), multiple(k_h, ALIGNED), multiple(k_t, ALIGNED)
    v_n, v_h, v_t = multiple(v_n, ALIGNED), multiple(v_h, ALIGNED), multiple(v_t, ALIGNED)
    shift = _shift(table, start, START)
    block, rows, pair, part = _of_rows(queries, shift, BLOCK, TILE_Q, START)
    n, head = pair // heads, (pair % heads).to(tl.int32)
    group = head // (heads // groups)
    tokens = rows - shift
    present = (tokens >= 0) & (tokens < queries)
    keys = tl.minimum(keys, _word(table, TK))
    q_tile = _tile(q + n * q_n + head * q_h, q_t, tokens, queries, D, D_PADDED)
    g_tile = _tile(grad + pair * queries * DV, DV, tokens, queries, DV, DV_PADDED)
    o_tile = _tile(out + pair * queries * DV, DV, tokens, queries, DV, DV_PADDED)
    subtracted = tl.sum(g_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    if LSE_GRAD:
        subtracted -= tl.load(lse_grad + pair * queries + tokens, mask=present, other=0.0)
    tl.store(less + pair * queries + tokens, subtracted, mask=present)
    base = tl.load(lse + pair * queries + tokens, mask=present, other=LOWEST)
    k_base, v_base = k + n * k_n + group * k_h, v + n * v_n + group * v_h
    total = tl.zeros([TILE_Q, D_PADDED], tl.float32)
    of_edge = tl.zeros([TILE_Q], tl.float32)
    bucket, left = _row(table, block, head, heads, groups)
    PARTS: tl.constexpr = BLOCK // TILE_K
    for step in range(0, left * PARTS):
        bucket, edge = _edge(table, bucket, step, PARTS, IN_HEAD)
        columns = _tokens(table, edge, step % PARTS, SRC, BLOCK, TILE_K)
        gate = _gate(table, edge, gates, GATES)
        k_tile = _tile(k_base, k_t, columns, keys, D, D_PADDED)
        s, slope = _scores(q_tile, k_tile, table, edge, rows, columns, keys, scale, softcap,
                           SOFTCAP, BLOCK, WIDE)  # fmt: skip
        e = _raised(s, base, gate, GATES, INSIDE)
        v_tile = _tile(v_base, v_t, columns, keys, DV, DV_PADDED)
        dp = product(g_tile, tl.trans(v_tile), WIDE)
        if GATES:
            if INSIDE:
                each = e * (dp - subtracted[:, None])
                e = e * tl.maximum(gate, 0.0)
            else:
                each = e * dp
                dp = dp * gate
            of_edge = tl.where(step % PARTS == 0, 0.0, of_edge) + tl.sum(each, 1)
            tl.store(edge_grads + part * slots + edge, tl.sum(of_edge, 0))  # the last part of the edge has its sum
        ds = e * (dp - subtracted[:, None]) * slope
        total += product(ds.to(k_tile.dtype), k_tile, WIDE)
    _put(dq + pair * queries * D, D, tokens, queries, total, D, D_PADDED)


@triton.jit
def backward_columns(
    q, k, v, table, gates, start, lse, less, grad, dk, dv, queries, keys, heads, groups, scale, softcap,
    q_n, q_h, q_t, k_n, k_h, k_t, v_n, v_h, v_t,
    BLOCK: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, D_PADDED: tl.constexpr, DV_PADDED: tl.constexpr,
    GATES: tl.constexpr, INSIDE: tl.constexpr, START: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv, row-major, of which a program has a tile of keys of one key head: (key tile, N·Hk).

    The query heads of the group add up in order. `less` is that of `backward_rows`.
    """
    q_n, q_h, q_t = multiple(q_n, ALIGNED), multiple(q_h, ALIGNED), multiple(q_t, ALIGNED)
    k_n, k_h, k_t = multiple(k_n, ALIGNED), multiple(k_h, ALIGNED), multiple(k_t, ALIGNED)
    v_n, v_h, v_t = multiple(v_n, ALIGNED), multiple(v_h, ALIGNED), multiple(v_t, ALIGNED)
    tile, pair = along_two(tl.cdiv(keys, TILE_K))
    own, pair = tile // (BLOCK // TILE_K), pair.to(tl.int64)
    n, group = pair // groups, (pair % groups).to(tl.int32)
    share = heads // groups
    shift = _shift(table, start, START)
    columns = tile * TILE_K + tl.arange(0, TILE_K)
    known = tl.minimum(keys, _word(table, TK))
    k_tile = _tile(k + n * k_n + group * k_h, k_t, columns, known, D, D_PADDED)
    v_tile = _tile(v + n * v_n + group * v_h, v_t, columns, known, DV, DV_PADDED)
    k_total = tl.zeros([TILE_K, D_PADDED], tl.float32)
    v_total = tl.zeros([TILE_K, DV_PADDED], tl.float32)
    PARTS: tl.constexpr = BLOCK // TILE_Q
    for inner in range(0, share):
        head = group * share + inner
        whole = n * heads + head
        plane = _plane(table, head, heads, groups)
        there = own < _word(table, NK)
        node = tl.load(_ints(table, COLS) + plane * _word(table, COL_STRIDE) + own, mask=there, other=0)
        left = tl.load(_ints(table, OUT_HEAD + 1) + node, mask=there, other=0)
        bucket = tl.load(_ints(table, OUT_HEAD) + node, mask=left > 0, other=0)
        for step in range(0, left * PARTS):
            bucket, edge = _edge(table, bucket, step, PARTS, OUT_HEAD)
            rows = _tokens(table, edge, step % PARTS, DST, BLOCK, TILE_Q)
            tokens = rows - shift
            present = (tokens >= 0) & (tokens < queries)
            gate = _gate(table, edge, gates, GATES)
            q_tile = _tile(q + n * q_n + head * q_h, q_t, tokens, queries, D, D_PADDED)
            s, slope = _scores(q_tile, k_tile, table, edge, rows, columns, known, scale, softcap,
                               SOFTCAP, BLOCK, WIDE)  # fmt: skip
            base = tl.load(lse + whole * queries + tokens, mask=present, other=LOWEST)
            subtracted = tl.load(less + whole * queries + tokens, mask=present, other=0.0)
            e = _raised(s, base, gate, GATES, INSIDE)
            g_tile = _tile(grad + whole * queries * DV, DV, tokens, queries, DV, DV_PADDED)
            dp = product(g_tile, tl.trans(v_tile), WIDE)
            shown = e
            if GATES:
                if INSIDE:
                    e = e * tl.maximum(gate, 0.0)
                    shown = e
                else:
                    shown = e * gate
                    dp = dp * gate
            v_total += product(tl.trans(shown).to(g_tile.dtype), g_tile, WIDE)
            ds = e * (dp - subtracted[:, None]) * slope
            k_total += product(tl.trans(ds).to(q_tile.dtype), q_tile, WIDE)
    _put(dk + pair * keys * D, D, columns, keys, k_total, D, D_PADDED)
    _put(dv + pair * keys * DV, DV, columns, keys, v_total, DV, DV_PADDED)


@triton.jit
def edge_mass(
    q, k, table, gates, start, lse, mass, queries, keys, heads, groups, slots, scale, softcap,
    q_n, q_h, q_t, k_n, k_h, k_t,
    BLOCK: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, ALIGNED: tl.constexpr,
    D: tl.constexpr, D_PADDED: tl.constexpr, GATES: tl.constexpr, INSIDE: tl.constexpr,
    START: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Compute `mass` [2, N·H·tiles of a block, slots] of the edges of rows: the sum (or the largest) over queries of
    their softmax weights, and the number of queries of the tile that see a key; a program per (query tile, N·H).
    """
    q_n, q_h, q_t = multiple(q_n, ALIGNED), multiple(q_h, ALIGNED), multiple(q_t, ALIGNED)
    k_n, k_h, k_t = multiple(k_n, ALIGNED), multiple(k_h, ALIGNED), multiple(k_t, ALIGNED)
    shift = _shift(table, start, START)
    block, rows, pair, part = _of_rows(queries, shift, BLOCK, TILE_Q, START)
    n, head = pair // heads, (pair % heads).to(tl.int32)
    group = head // (heads // groups)
    tokens = rows - shift
    present = (tokens >= 0) & (tokens < queries)
    keys = tl.minimum(keys, _word(table, TK))
    q_tile = _tile(q + n * q_n + head * q_h, q_t, tokens, queries, D, D_PADDED)
    base = tl.load(lse + pair * queries + tokens, mask=present, other=LOWEST)
    seen = tl.sum((base > LOWEST).to(tl.float32), 0)
    k_base = k + n * k_n + group * k_h
    parts = tl.num_programs(0) // _row_tiles(queries, BLOCK, TILE_Q, START) * (BLOCK // TILE_Q)
    of_edge = tl.zeros([TILE_Q], tl.float32)
    bucket, left = _row(table, block, head, heads, groups)
    PARTS: tl.constexpr = BLOCK // TILE_K
    for step in range(0, left * PARTS):
        bucket, edge = _edge(table, bucket, step, PARTS, IN_HEAD)
        columns = _tokens(table, edge, step % PARTS, SRC, BLOCK, TILE_K)
        gate = _gate(table, edge, gates, GATES)
        k_tile = _tile(k_base, k_t, columns, keys, D, D_PADDED)
        s, _ = _scores(q_tile, k_tile, table, edge, rows, columns, keys, scale, softcap,
                       SOFTCAP, BLOCK, WIDE)  # fmt: skip
        e = _raised(s, base, gate, GATES, INSIDE)
        if GATES and INSIDE:
            e = e * tl.maximum(gate, 0.0)
        of_edge = tl.where(step % PARTS == 0, 0.0, of_edge) + tl.sum(e, 1)
        found = tl.max(of_edge, 0) if LARGEST else tl.sum(of_edge, 0)
        tl.store(mass + part * slots + edge, found)  # the last part of the edge has its sum
        tl.store(mass + (parts + part) * slots + edge, seen)


@triton.jit
def gate_gradients(table, edge_grads, dgates, parts, slots, edges, gates, GATES: tl.constexpr, EDGES: tl.constexpr):
    """Compute dgates [gates] from `edge_grads` [parts, slots]: a program per GATES gates adds all edges in order.

    Edges without a list have 0 in `edge_grads`.
    """
    own = tl.program_id(0) * GATES + tl.arange(0, GATES)
    total = tl.zeros([GATES], tl.float32)
    for first in range(0, edges, EDGES):
        at = first + tl.arange(0, EDGES)
        slot = tl.load(_ints(table, GATE) + at, mask=at < edges, other=-1)
        sums = tl.zeros([EDGES], tl.float32)
        grads = edge_grads + at
        for _ in range(0, parts):
            sums += tl.load(grads, mask=at < edges, other=0.0)
            grads += slots
        total += tl.sum(tl.where(slot[None, :] == own[:, None], sums[None, :], 0.0), 1)
    tl.store(dgates + own, total.to(dgates.dtype.element_ty), mask=own < gates)
