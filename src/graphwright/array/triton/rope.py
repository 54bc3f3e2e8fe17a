"""Rotary position embedding. Its gradient is the same op with the negative angle."""

from __future__ import annotations

import triton.language as tl

from graphwright.array.backend import Attrs
from graphwright.array.cpu.kernel import Tensors
from graphwright.array.triton.kernel import Launch, compiled, kernel, one_float
from graphwright.array.triton.rows import all_aligned, multiple, narrow, wide

PAIRS = (16, 32, 64, 128, 256)
"""Pairs of entries of a tile."""
TILE = 1024
"""Pairs of a program."""


@compiled
def rotate(
    x, cos, sin, out, rows: tl.int32, heads: tl.int32, length: tl.int32, half: tl.int32, rest: tl.int32,
    x_b: tl.int64, x_h: tl.int64, x_t: tl.int64, out_b: tl.int64, out_h: tl.int64, out_t: tl.int64,
    cos_b: tl.int64, cos_t: tl.int64, sin_b: tl.int64, sin_t: tl.int64,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, APART: tl.constexpr, REST: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rotate pairs (a, b) to (a·cos - b·sin, b·cos + a·sin) in ROWS vectors of x [B, H, T, D]; copy `rest` entries.

    The pair i is (x[i], x[i + half]) if APART, else (x[2i], x[2i + 1]).
    """
    half, x_b, x_h, x_t = (
        multiple(half, ALIGNED),
        multiple(x_b, ALIGNED),
        multiple(x_h, ALIGNED),
        multiple(x_t, ALIGNED),
    )
    out_b, out_h, out_t = multiple(out_b, ALIGNED), multiple(out_h, ALIGNED), multiple(out_t, ALIGNED)
    cos_b, cos_t = multiple(cos_b, ALIGNED), multiple(cos_t, ALIGNED)
    sin_b, sin_t = multiple(sin_b, ALIGNED), multiple(sin_t, ALIGNED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = (row < rows)[:, None]
    t, head = (row % length).to(tl.int64)[:, None], ((row // length) % heads).to(tl.int64)[:, None]
    b = (row // (length * heads)).to(tl.int64)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    inside = present & (pair < half)
    x_at, out_at = x + b * x_b + head * x_h + t * x_t, out + b * out_b + head * out_h + t * out_t
    if APART:
        first, second = pair, pair + half
    else:
        first, second = 2 * pair, 2 * pair + 1
    c = wide(tl.load(cos + b * cos_b + t * cos_t + pair, mask=inside, other=0.0))
    s = wide(tl.load(sin + b * sin_b + t * sin_t + pair, mask=inside, other=0.0))
    a = wide(tl.load(x_at + first, mask=inside, other=0.0))
    z = wide(tl.load(x_at + second, mask=inside, other=0.0))
    tl.store(out_at + first, narrow(a * c - z * s, out), mask=inside)
    tl.store(out_at + second, narrow(z * c + a * s, out), mask=inside)
    if REST:
        for start in range(0, rest, PAIRS):
            at = start + pair
            kept = present & (at < rest)
            tl.store(out_at + 2 * half + at, tl.load(x_at + 2 * half + at, mask=kept, other=0.0), mask=kept)


def _takes(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    if any(t.stride(-1) != 1 and t.shape[-1] > 1 for t in (*ins, *outs)):
        return "the entries of a vector are not contiguous"
    if ins[1].shape[-1] > PAIRS[-1]:
        return f"more than {PAIRS[-1]} pairs"
    return one_float([*ins, *outs])


@kernel("rope", takes=_takes)
def rope(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> Launch:
    (x, cos, sin), out = ins, outs[0]
    batch, heads, length, width = x.shape
    half, rows = cos.shape[-1], batch * heads * length
    pairs = next(p for p in PAIRS if half <= p)
    each = TILE // pairs
    tables = (s for t in (cos, sin) for s in (0 if t.shape[0] == 1 else t.stride(0), t.stride(1)))
    steps = (*x.stride()[:3], *out.stride()[:3], *tables)
    args = (x, cos, sin, out, rows, heads, length, half, width - 2 * half, *steps)
    constants = {"ROWS": each, "PAIRS": pairs, "APART": attrs["style"] == "half", "REST": width > 2 * half,
                 "ALIGNED": all_aligned(half, *steps)}  # fmt: skip
    return Launch(rotate, (-(-rows // each),), args, constants)
