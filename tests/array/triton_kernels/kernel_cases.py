"""Cases of each family of Triton kernels: sizes around those of tiles, dtypes, layouts, extreme values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, product
from math import inf
from random import Random
from typing import Any

import torch
from kernel_checks import DTYPES, LAYOUTS, Case, by_cpu

from graphwright.array.formulas.experts import ACTS
from graphwright.array.triton.rows import TILES

Cases = Iterator[tuple[str, Case]]
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
FLOATS = (F32, F64, BF16, F16)
MOST = 300


def drawn(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    """Return normal numbers, the same for equal arguments."""
    made = torch.Generator().manual_seed(seed + 7 * sum(shape))
    return torch.randn(shape, generator=made, dtype=F64).to(dtype)


def widths(deep: bool) -> list[int]:
    """Return numbers of columns: 0, 1, those around the narrowest tiles, a long one, and deep around all tiles."""
    least = TILES[0].columns
    if not deep:
        return [0, 1, least - 1, least, least + 1, 3 * least + 7]
    return sorted(
        {0, 1, 9001, *(t.columns + d for t in TILES for d in (-1, 0, 1)), *(3 * t.columns + 7 for t in TILES)}
    )


def combinations(deep: bool, *lists: Any) -> Iterator[tuple[Any, ...]]:
    """Return up to MOST combinations if `deep`, else as many as the longest list has entries: each at least once."""
    if deep:
        every = list(product(*lists))
        return iter(every if len(every) <= MOST else Random(0).sample(every, MOST))
    most = max(map(len, lists))
    return (tuple(each[(i + j) % len(each)] for j, each in enumerate(lists)) for i in range(most))


def softmax(deep: bool) -> Cases:
    for op, n, dtype, layout in combinations(deep, ("softmax", "log_softmax"), widths(deep), FLOATS, LAYOUTS):
        x = drawn(3, n, dtype=dtype) if n < 500 else drawn(2, n, dtype=dtype)
        yield f"{op} {n} {dtype} {layout}", Case(op, [x], {"axis": -1}, layout)
    for op, axis, dtype in combinations(deep, ("softmax", "log_softmax"), (0, 1), FLOATS):
        yield f"{op} of axis {axis} {dtype}", Case(op, [drawn(5, 37, 7, dtype=dtype)], {"axis": axis}, "odd")
    yield "softmax of a long row", Case("softmax", [drawn(2, 8197)], {"axis": -1}, "padded")
    yield "softmax of a longer row", Case("log_softmax", [drawn(2, 9001)], {"axis": -1})
    mask = drawn(6, 40, seed=3) > 0.3
    mask[1] = False
    mask[2, 5:] = False
    x = drawn(6, 40)
    x[3] = -inf
    x[4, 7] = inf
    x[5, 2] = torch.nan
    yield "masked softmax", Case("softmax", [x, mask], {"axis": -1}, "odd", key=True)
    yield "masked softmax along rows", Case("softmax", [x, mask[:, :1]], {"axis": 0})
    yield "extreme softmax", Case("softmax", [x * 1e4], {"axis": -1})
    x = drawn(3, 9001)
    x[0] = -inf
    x[1, :5000] = -inf
    yield "long rows that begin with -inf", Case("softmax", [x, drawn(3, 9001, seed=5) > 0], {"axis": -1})


def norm(deep: bool) -> Cases:
    for n, dtype, layout, offset, first in combinations(deep, widths(deep), FLOATS, LAYOUTS, (0, 1), (1, 0, 1)):
        attrs = {"eps": 1e-5, "unit_offset": bool(offset), "cast_before_scale": bool(first)}
        ins = [drawn(2, 3, n, dtype=dtype), drawn(n, dtype=dtype)]
        yield f"rms_norm {n} {dtype} {layout} {offset} {first}", Case("rms_norm", ins, attrs, layout, wide=(F32,))
    attrs = {"eps": 1e-6, "unit_offset": False, "cast_before_scale": True}
    yield "rms_norm of a long row", Case("rms_norm", [drawn(2, 9001), drawn(9001)], attrs, "odd")
    for n, dtype, layout, scale in combinations(deep, widths(deep), FLOATS, LAYOUTS, (2, 0, 1)):
        ins = [drawn(3, n, dtype=dtype) + 3, drawn(n, dtype=dtype), drawn(n, dtype=dtype, seed=1)][: scale + 1]
        yield (
            f"layer_norm {n} {dtype} {layout} {scale}",
            Case("layer_norm", ins, {"rank": 1, "eps": 1e-5}, layout, 3e-6),
        )
    ins = [drawn(2, 3, 2, 9), drawn(3, 2, 9), drawn(3, 2, 9)]
    yield "layer_norm of three axes", Case("layer_norm", ins, {"rank": 3, "eps": 1e-5})
    yield "layer_norm of a long row", Case("layer_norm", [drawn(2, 9001), drawn(9001)], {"rank": 1, "eps": 1e-5})
    for groups, dtype, scale in combinations(deep, (1, 2, 6), FLOATS, (2, 0, 1)):
        ins = [drawn(2, 6, 5, 3, dtype=dtype), drawn(6, dtype=dtype), drawn(6, dtype=dtype, seed=1)][: scale + 1]
        attrs = {"groups": groups, "eps": 1e-5}
        yield f"group_norm {groups} {dtype} {scale}", Case("group_norm", ins, attrs, "odd")
    for op, shape, dtype, scale in combinations(
        deep, ("batch_norm", "batch_norm_train"), ((7, 3), (3, 2, 1030), (5, 4, 3, 1)), FLOATS, (2, 0, 1)
    ):
        kept = F32 if dtype in (BF16, F16) else dtype
        c = shape[1]
        ins = [drawn(*shape, dtype=dtype) + 2, drawn(c, dtype=kept), drawn(c, dtype=kept, seed=1).abs() + 0.5]
        ins += [drawn(c, dtype=dtype, seed=2), drawn(c, dtype=dtype, seed=3)][:scale]
        attrs = {"eps": 1e-5} | ({"momentum": 0.3} if op == "batch_norm_train" else {})
        yield f"{op} {shape} {dtype} {scale}", Case(op, ins, attrs, "odd")
    ins = [drawn(5, 2, 2100) * 3 + 100, drawn(2), drawn(2).abs()]
    yield (
        "batch_norm_train in parts",
        Case("batch_norm_train", ins, {"momentum": 0.1, "eps": 1e-5}, tolerance=1e-5, key=True),
    )


REDUCTIONS = ("sum", "mean", "prod", "amax", "amin", "any", "all")


def reduce(deep: bool) -> Cases:
    for op, n, dtype, layout in combinations(deep, REDUCTIONS, widths(deep)[1:], FLOATS, LAYOUTS):
        x = drawn(3, n, dtype=dtype)
        x = x.sign() * x.abs() ** 0.1 if op == "prod" else x
        yield (
            f"{op} {n} {dtype} {layout}",
            Case(op, [x], {"axes": (-1,), "keepdims": n % 2 == 1 and layout != "padded"}, layout),
        )
    for op, axes, dtype in combinations(
        deep,
        REDUCTIONS,
        (None, (), (0,), (1,), (0, 2), (1, 2), (0, 3), (0, 2, 3)),
        (F32, BF16, F64, torch.int32, torch.bool),
    ):
        x = drawn(3, 5, 4, 33) * 3
        x = x.to(dtype) if op not in ("prod", "mean") or dtype == F64 else x
        x = x.sign() * x.abs() ** 0.02 if op == "prod" else x  # of 1980 numbers, in no order infinite
        yield f"{op} over {axes} {dtype}", Case(op, [x], {"axes": axes, "keepdims": False}, "odd", tolerance=2e-6)
    for op, shape, axes in (("sum", (2, 2107), (1,)), ("mean", (2107, 3), (0,)), ("amax", (3, 40, 30), None),
                            ("any", (2100,), None), ("all", (40, 2, 35), (0, 2)), ("prod", (1100,), None)):  # fmt: skip
        x = drawn(*shape)
        x = x.sign() * x.abs() ** 0.01 if op == "prod" else x
        yield (
            f"{op} of long rows",
            Case(op, [x], {"axes": axes, "keepdims": False}, "odd", 2e-6, key=op in ("sum", "mean")),
        )
    for op in ("sum", "prod", "any", "all"):
        yield f"{op} of nothing", Case(op, [drawn(3, 0)], {"axes": (1,), "keepdims": False})
        yield f"{op} without results", Case(op, [drawn(0, 3)], {"axes": (1,), "keepdims": False})
    unknown = drawn(4, 37)
    unknown[1, 30] = torch.nan
    unknown[2, 5:] = inf
    unknown[3] = -inf
    for op in ("amax", "amin"):
        yield f"{op} with NaN", Case(op, [unknown], {"axes": (1,), "keepdims": False})
        for kind in (torch.int64, torch.int8):
            ends = torch.tensor([[torch.iinfo(kind).min, 5], [torch.iinfo(kind).max, 5]], dtype=kind)
            yield f"{op} with the ends of {kind}", Case(op, [ends], {"axes": (1,), "keepdims": False}, key=True)
    for op in ("argmax", "argmin"):
        yield f"{op} with NaN", Case(op, [unknown], {"axis": 1}, wide=())
        yield f"{op} of equal entries", Case(op, [drawn(3, 300).round()], {"axis": 1}, "odd", wide=())
        yield f"{op} along rows", Case(op, [drawn(70, 5, 40).round()], {"axis": 0}, wide=())
        yield f"{op} of a long row", Case(op, [drawn(2, 9001).round()], {"axis": 1}, "padded", wide=())
    for reverse, dtype, axis in combinations(deep, (False, True), (*FLOATS, torch.int32, torch.bool), (0, 1, 2)):
        x = (drawn(3, 37, 35) * 2).to(dtype)
        attrs = {"axis": axis, "reverse": reverse}
        yield f"cumsum {attrs} {dtype}", Case("cumsum", [x], attrs, "odd", tolerance=2e-6)
    yield "cumsum of a long row", Case("cumsum", [drawn(2, 9001)], {"axis": 1, "reverse": True}, tolerance=4e-6)


def rope(deep: bool) -> Cases:
    for half, rest, style, dtype, layout in combinations(
        deep, (1, 16, 17, 55), (0, 3, 70), ("half", "interleaved"), FLOATS, LAYOUTS
    ):
        width = 2 * half + rest
        tables = [drawn(1, 5, half, dtype=dtype), drawn(1, 5, half, dtype=dtype, seed=1)]
        x = drawn(2, 3, 5, width, dtype=dtype)
        yield f"rope {half} {rest} {style} {dtype} {layout}", Case("rope", [x, *tables], {"style": style}, layout)
    x, *tables = drawn(2, 50, 3, 32), drawn(2, 3, 16), drawn(2, 3, 16, seed=1)
    yield "rope of each sequence", Case("rope", [x, *tables], {"style": "half"})


def loss(deep: bool) -> Cases:
    for classes, dtype, smoothing, weighted in combinations(
        deep, (1, 127, 128, 129, 1025, 4103), FLOATS, (0.0, 0.1), (False, True, True)
    ):
        scores = drawn(2, 3, classes, dtype=dtype) * 3
        targets = torch.arange(6).reshape(2, 3) * 31 % classes
        targets[1, 1] = -100
        attrs = {"ignore_index": -100, "smoothing": smoothing}
        weight = [drawn(classes, dtype=dtype).abs() + 0.5] if weighted else []
        name = f"{classes} {dtype} {smoothing} {weighted}"
        yield f"cross_entropy {name}", Case("cross_entropy", [scores, targets, *weight], attrs, "odd")
        kind = F64 if dtype == F64 else F32
        lse, g = scores.to(kind).logsumexp(-1), drawn(2, 3, dtype=kind)
        ins = [scores, targets, lse, g, *weight]
        yield f"cross_entropy_backward {name}", Case("cross_entropy_backward", ins, attrs, "odd")


def embedding(deep: bool) -> Cases:
    for count, width, dtype in combinations(deep, (0, 1, 31, 32, 33, 103), (1, 255, 257), FLOATS):
        ids = (drawn(count, seed=2) * 4).round().to(torch.int64) % 11
        ins = [drawn(11, width, dtype=dtype), ids]
        yield f"embedding {count} {width} {dtype}", Case("embedding", ins, {}, "odd", exact=True)
        ins, attrs = [drawn(count, width, dtype=dtype), ids], {"rows": 11}
        yield (
            f"embedding_backward {count} {width} {dtype}",
            Case("embedding_backward", ins, attrs, "odd", key=count > 100),
        )


def attention(deep: bool) -> Cases:
    none = {"scale": 0.3, "causal": True, "window": None, "softcap": None, "optional": ()}
    keyed, extra = {"causal": False, "optional": ("key_mask",)}, ("key_mask", "q_start", "bias", "sinks")
    variants = (
        ("causal", {}), ("all keys", {"causal": False}), ("window", {"window": 7}), ("softcap", {"softcap": 0.8}),
        ("padding", keyed), ("start", {"optional": ("q_start",)}), ("bias", {"optional": ("bias",)}),
        ("unused start", {"causal": False, "optional": ("q_start",)}),
        ("mask", {"optional": ("bias",), "causal": False}), ("sinks", {"optional": ("sinks",)}),
        ("everything", {"window": 30, "softcap": 1.5, "optional": extra}),
    )  # fmt: skip
    sizes = ((1, 1), (1, 40), (33, 33), (17, 50), (40, 17), (0, 5))
    shaped = combinations(
        deep, variants, sizes, ((16, 16), (20, 7), (64, 64)), ((2, 1), (3, 3), (4, 2)), (F32, BF16, F16)
    )
    odd = combinations(
        deep, (variants[2], variants[-1]), sizes[1:3], ((72, 33), (33, 100), (130, 130)), ((4, 2),), (BF16, F16)
    )
    for (name, given), (queries, keys), (d, dv), (heads, groups), dtype in chain(shaped, odd):
        attrs = {**none, **given}
        q, k, v = (drawn(2, h, t, w, dtype=dtype, seed=10 + n) for n, (h, t, w) in enumerate((
            (heads, queries, d), (groups, keys, d), (groups, keys, dv))))  # fmt: skip
        bias = drawn(2, 1, queries, keys, dtype=dtype, seed=3)
        options = {
            "key_mask": drawn(2, keys, seed=4) > -0.5, "q_start": torch.tensor(max(keys - queries - 3, 0)),
            "bias": bias > -0.3 if name == "mask" else bias, "sinks": drawn(heads, dtype=dtype, seed=5),
        }  # fmt: skip
        more = [options[n] for n in attrs["optional"]]
        limit = 3e-6 if dtype == F32 else 2.0 ** (-8 if dtype == F16 else -6)  # probabilities are rounded
        label = f"{name} {queries}x{keys} {d},{dv} {heads}/{groups} {dtype}"
        yield f"sdpa {label}", Case("sdpa", [q, k, v, *more], attrs, "odd", limit)
        wide = [t.double() if t.dtype.is_floating_point else t for t in (q, k, v, *more)]
        out = torch.empty(2, heads, queries, dv, dtype=F64)
        by_cpu("sdpa", [out], wide, attrs)
        ins = [q, k, v, *more, out.to(dtype), drawn(2, heads, queries, dv, dtype=dtype, seed=6)]
        yield f"sdpa_backward {label}", Case("sdpa_backward", ins, attrs, "contiguous", 4 * limit)
    q, k = drawn(1, 2, 5, 16), drawn(1, 2, 40, 16)
    q[0, 0, 3, 0] = k[0, 1, 7, 2] = torch.nan
    rest = [drawn(1, 2, 40, 16), drawn(1, 2, 5, 16, seed=1), drawn(1, 2, 5, 16, seed=2)]
    for label, ins in (("query", [q, rest[0], *rest]), ("key", [drawn(1, 2, 5, 16), k, *rest])):
        case = Case("sdpa_backward", ins, {**none, "causal": False}, tolerance=1.2e-5, key=True)
        yield f"sdpa_backward of a {label} with NaN", case
    q, k = drawn(1, 1, 40, 16), drawn(1, 1, 40, 16, seed=1)  # scores near 0, of which a softcap loses no digits
    yield "sdpa with a large softcap", Case("sdpa", [q, k, k], {**none, "scale": 0.01, "softcap": 50.0}, key=True)
    q, k = drawn(2, 2, 5, 16), drawn(2, 2, 0, 16)
    yield "sdpa without keys", Case("sdpa", [q, k, k], none, zero=True)
    yield "sdpa_backward without keys", Case("sdpa_backward", [q, k, k, q, q], none, zero=True)


def optimize(deep: bool) -> Cases:
    shapes = ((3, 4), (0,), (1023,), (1024,), (1,), (5, 1025))
    for op, kind, found, flags, layout in combinations(
        deep, ("adam_step", "adamw_step", "sgd_step"), (F32, F64), ("none", "all", "each"), range(4), LAYOUTS[:2]
    ):
        maximize, rich = flags % 2 == 1, flags < 2
        attrs: dict[str, Any] = {"weight_decay": 0.1, "maximize": maximize}
        if op == "sgd_step":
            attrs |= {
                "momentum": 0.9 if rich else 0.0,
                "dampening": 0.0 if maximize else 0.3,
                "nesterov": maximize and rich,
            }
            moments = int(rich)
        else:
            attrs |= {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": rich}
            moments = 3 if rich else 2
        columns = [[drawn(*s, dtype=kind, seed=c) for s in shapes] for c in range(2 + moments)]
        columns[2:] = [[t.abs() + 0.1 for t in column] for column in columns[2:]]
        columns[1][2][500] = torch.nan  # not in the last 7: there torch's CPU kernel keeps the old largest moment
        steps = [torch.tensor(float(i % 3)) for i in range(len(shapes))]
        flag = torch.tensor([0.0, 1, 0, 1, 0, 1]) if found == "each" else torch.tensor(float(found == "all"))
        ins = [torch.tensor(0.01, dtype=F64), flag, *(t for column in columns for t in column), *steps]
        yield (
            f"{op} {kind} {found} {flags} {layout}",
            Case(op, ins, attrs, layout, kept=(0, 1, *range(-len(shapes), 0))),
        )
    for kind, bad in combinations(deep, FLOATS, (None, inf, torch.nan)):
        grads = [drawn(*s, dtype=kind) for s in shapes]
        if bad is not None:
            grads[3][1000] = bad
        ins = [torch.tensor(0.25), torch.tensor(0.0), *grads]
        yield f"unscale_check {kind} {bad}", Case("unscale_check", ins, {}, "odd", kept=(0, 1))
        zeros = [g * (i % 2) for i, g in enumerate(grads)]
        yield f"zero_check {kind} {bad}", Case("zero_check", [torch.tensor(0.0), *zeros], {}, "odd", wide=())


def index(deep: bool) -> Cases:
    for (lead, width, axis), count, dtype in combinations(
        deep, ((2, 257, -2), (1, 5, 0), (3, 1, 1)), (0, 1, 7, 40), (*FLOATS, torch.int32)
    ):
        shape = (lead, 11, width) if axis else (11, width)
        picked = (*((lead,) if axis else ()), count, width)
        ids = torch.arange(count) * 7 % 22 - 11
        x, values = ((drawn(*s, seed=n) * 3).to(dtype) for n, s in enumerate((shape, picked)))
        attrs, label = {"axis": axis}, f"{lead} {width} {axis} {count} {dtype}"
        yield f"index {label}", Case("index", [x, ids], attrs, "odd", exact=True)
        yield f"index_put {label}", Case("index_put", [x, values, ids], attrs, "odd", wide=())
        if dtype.is_floating_point:
            yield f"index_add {label}", Case("index_add", [x, values, ids], attrs, "odd")
            yield f"index_sum {label}", Case("index_sum", [values, ids], {**attrs, "shape": shape}, "odd")


def scatter(deep: bool) -> Cases:
    for axis, indices, dtype in combinations(deep, (0, 1, 2), (0, 1, 9), FLOATS):
        shape = [130 if a == axis else 3 + a for a in range(3)]
        picked = [indices if a == axis else n for a, n in enumerate(shape)]
        index = (drawn(*picked, seed=1) * 100).to(torch.int64) % shape[axis]
        x, values = drawn(*shape, dtype=dtype), drawn(*picked, dtype=dtype, seed=2)
        attrs, label = {"axis": axis}, f"{axis} {indices} {dtype}"
        yield f"gather {label}", Case("gather", [x, index], attrs, "odd", exact=True)
        yield f"scatter {label}", Case("scatter", [x, index, values], attrs, "odd", exact=True)
        yield f"scatter_add {label}", Case("scatter_add", [x, index, values], attrs, "odd")
        yield f"scatter_sum {label}", Case("scatter_sum", [values, index], {**attrs, "shape": tuple(shape)}, "odd")


def select(deep: bool) -> Cases:
    for n, k, largest, dtype, layout in combinations(
        deep, (1, 31, 33, 128, 130), (0, 1, 8), (True, False), (F32, BF16, F16), LAYOUTS
    ):
        x = (drawn(3, n, dtype=F32) * 4).round().to(dtype)
        attrs = {"k": min(k, n), "axis": -1, "largest": largest}
        layout = "odd" if layout == "padded" else layout  # results are contiguous
        yield f"topk {n} {k} {largest} {dtype}", Case("topk", [x], attrs, layout, wide=(), key=n == 130)
    zeros = torch.tensor([[-0.0, -0.0, -1.0], [0.0, -0.0, -1.0]])
    yield "topk keeps the sign of 0", Case("topk", [zeros], {"k": 2, "axis": 1, "largest": True}, exact=True, key=True)
    x = drawn(4, 40, 5)
    x[1, 30:33], x[2, 2:], x[3] = torch.nan, inf, -inf
    for axis, largest in ((1, True), (0, False), (2, True)):
        attrs = {"k": 4, "axis": axis, "largest": largest}
        yield f"topk along axis {axis}", Case("topk", [x], attrs, wide=())


def experts(deep: bool) -> Cases:
    for tokens, k, count in combinations(deep, (0, 1, 37, 1100), (1, 3), (1, 5)):
        choice = (drawn(tokens, k) * 4).round().to(torch.int64).clamp(-1, count - 1)
        yield (
            f"dispatch {tokens} {k} {count}",
            Case("dispatch", [choice], {"experts": count}, "odd", key=tokens == 1100),
        )
        yield f"dispatch of a mask {tokens} {count}", Case("dispatch", [drawn(tokens, count) > 0], {"experts": count})
    for act, kind, bias, dtype, (tokens, width) in combinations(
        deep, ACTS, ("gated", "mlp", "oai"), (False, True), (F32, BF16, F16), ((37, 20), (70, 64), (1, 5))
    ):
        k, sizes = 3, (16, 0, 70) if width == 20 else (32, 48, 64)
        choice = (drawn(tokens, k) * 2).round().to(torch.int64).clamp(-1, 2)
        ins = [choice]
        runs = [torch.empty(4, dtype=torch.int64), *(torch.empty(tokens * k, dtype=torch.int64) for _ in range(2))]
        by_cpu("dispatch", runs, ins, {"experts": 3})
        matrices = []
        for e, inner in enumerate(sizes):
            shapes = [(inner, width)] * (1 if kind == "mlp" else 2) + [(width, inner)]
            for n, shape in enumerate(shapes):
                matrices.append(drawn(*shape, dtype=dtype, seed=e + n) * width**-0.5)
                matrices += [drawn(shape[0], dtype=dtype, seed=9 + n)] if bias else []
        weights = drawn(tokens, k, seed=8)
        attrs = {"kind": kind, "act": act, "bias": bias, "algorithm": "sorted"}
        ins = [drawn(tokens, width, dtype=dtype), *runs, weights, *matrices]
        limit = {F32: 2e-6, F16: 2.0**-8, BF16: 2.0**-5}[dtype]
        yield f"expert_mlp {act} {kind} {bias} {dtype} {tokens}", Case("expert_mlp", ins, attrs, tolerance=limit)


def grouped(deep: bool) -> Cases:
    spans = ((0, 0, 3, 70, 70), (0, 65, 65, 65, 65), (0, 64, 128, 129, 140), (0, 0, 0, 0, 0))
    for (ends, width, columns), dtype in combinations(
        deep, tuple(product(spans, (1, 33), (1, 65)))[:: 1 if deep else 3], (F32, BF16, F16)
    ):
        limit = {F32: 2e-6, F16: 2.0**-9, BF16: 2.0**-7}[dtype]
        x, w = drawn(140, width, dtype=dtype), drawn(4, width, columns, dtype=dtype)
        label = f"{ends} {width} {columns} {dtype}"
        ins = [x, w, torch.tensor(ends)]
        yield f"grouped_matmul {label}", Case("grouped_matmul", ins, {}, "odd", limit)
        ins = [x, drawn(140, columns, dtype=dtype, seed=1), torch.tensor(ends)]
        yield f"grouped_outer {label}", Case("grouped_outer", ins, {}, "odd", limit)


def random(deep: bool) -> Cases:
    for n, kind, step in combinations(deep, (0, 1, 1023, 1024, 1025, 3079), (F32, BF16, F16), (0, 5)):
        key, shape = torch.tensor([-(2**62) + 12345, step]), {"shape": (n,), "stream": 0xDEADBEEF}
        attrs = {**shape, "dtype": DTYPES[kind]}
        yield f"uniform {n} {kind}", Case("uniform", [key], attrs, exact=True)
        yield f"normal {n} {kind}", Case("normal", [key], attrs)
        yield f"gumbel {n} {kind}", Case("gumbel", [key], attrs)
        stream = {"stream": 7}
        p = (drawn(n) * 0.3 + 0.5).to(kind)
        yield f"bernoulli {n} {kind}", Case("bernoulli", [p, key], stream, exact=True, wide=())
        x = drawn(n, dtype=kind)
        for share in (0.0, 0.3, 1.0):
            yield f"dropout {n} {kind} {share}", Case("dropout", [x, key], {**stream, "p": share}, "odd", wide=())
        yield f"randint {n}", Case("randint", [key], {**shape, "low": -5, "high": 100})
        x = drawn(n)
        x[3:5] = torch.tensor([inf, torch.nan])[: max(min(n - 3, 2), 0)]
        yield f"stochastic_round {n}", Case("stochastic_round", [x, key], stream, "odd", wide=())


def paged(deep: bool) -> Cases:
    table = torch.tensor([[3, 1, 6], [0, 4, 2], [-1, -1, -1]], dtype=torch.int32)
    lengths = torch.tensor([1, 20, -1], dtype=torch.int32)
    for queries, window, softcap, sinks, dtype, (heads, groups) in combinations(
        deep, (1, 7, 27), (None, 5), (None, 0.8), (False, True), (F32, BF16, F16), ((4, 2), (3, 3))
    ):
        limit = {F32: 2e-6, F16: 2.0**-8, BF16: 2.0**-6}[dtype]
        q = drawn(3, heads, queries, 20, dtype=dtype)
        k, v = (drawn(7, groups, 16, w, dtype=dtype, seed=w) for w in (20, 33))
        more = [drawn(heads, dtype=dtype)] if sinks else []
        attrs = {"scale": 0.3, "window": window, "softcap": softcap}
        label = f"{queries} {window} {softcap} {sinks} {dtype}"
        yield f"sdpa_paged {label}", Case("sdpa_paged", [q, k, v, table, lengths, *more], attrs, "odd", limit)
    for width, queries in combinations(deep, (72, 100, 130), (1, 27)):
        q, k = drawn(3, 4, queries, width, dtype=BF16), drawn(7, 2, 16, width, dtype=BF16, seed=1)
        attrs = {"scale": 0.1, "window": 5, "softcap": 0.8}
        ins = [q, k, k, table, lengths]
        yield f"sdpa_paged {queries} of heads of {width}", Case("sdpa_paged", ins, attrs, "odd", 2.0**-6)
    for dtype, kept in ((F32, BF16), (F16, F32), (BF16, F16)):  # products are in float32
        q, k = drawn(2, 4, 3, 20, dtype=dtype), drawn(7, 2, 16, 20, dtype=kept)
        ins = [q, k, k, table[:2], lengths[:2]]
        attrs = {"scale": 0.3, "window": None, "softcap": None}
        yield f"sdpa_paged of {dtype} with a cache of {kept}", Case("sdpa_paged", ins, attrs, "odd", 2e-6, key=True)
    for dtype, count in combinations(deep, FLOATS, (1, 17, 0)):
        rows = drawn(3, 2, count, 20, dtype=dtype)
        ins = [drawn(7, 2, 16, 20, dtype=dtype), rows, table, lengths]
        yield f"kv_append_paged {dtype} {count}", Case("kv_append_paged", ins, {}, "odd", exact=True)
        ins = [drawn(3, 2, 30, 20, dtype=dtype), rows, torch.tensor(11)]
        yield f"kv_append {dtype} {count}", Case("kv_append", ins, {}, "padded", exact=True)


FAMILIES: dict[str, Callable[[bool], Cases]] = {
    "attention": attention, "optimize": optimize, "grouped": grouped, "random": random, "paged": paged,
    "index": index, "scatter": scatter, "select": select, "experts": experts,
    "softmax": softmax, "norm": norm, "reduce": reduce, "rope": rope, "loss": loss, "embedding": embedding,
}  # fmt: skip
_NUMBER, _ZERO = torch.tensor(0.1, dtype=F64), torch.tensor(0.0)


def ids(*shape: int) -> torch.Tensor:
    """Return indices 0."""
    return torch.zeros(shape, dtype=torch.int64)


_SUM = {"axes": (1,), "keepdims": False}
_RMS = {"eps": 1e-5, "unit_offset": False, "cast_before_scale": True}
_ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False}
ATTEND = {"scale": 1.0, "causal": True, "window": None, "softcap": None, "optional": ()}
SHAPES: dict[str, Callable[[int], Case]] = {
    "softmax": lambda n: Case("softmax", [drawn(n, n)], {"axis": -1}),
    "rms_norm": lambda n: Case("rms_norm", [drawn(n, n), drawn(n)], _RMS),
    "layer_norm": lambda n: Case("layer_norm", [drawn(n, n), drawn(n)], {"rank": 1, "eps": 1e-5}),
    "rope": lambda n: Case("rope", [drawn(1, n, n, 128), *[drawn(1, n, 64)] * 2], {"style": "half"}),
    "sdpa": lambda n: Case("sdpa", [drawn(1, n, n, 64), *[drawn(1, 1, n, 64)] * 2], ATTEND),
    "cross_entropy": lambda n: Case("cross_entropy", [drawn(n, n), ids(n)], {"ignore_index": -1, "smoothing": 0.0}),
    "embedding": lambda n: Case("embedding", [drawn(n, n), ids(n)], {}),
    "embedding_backward": lambda n: Case("embedding_backward", [drawn(n, n), ids(n)], {"rows": n}),
    "adamw_step": lambda n: Case("adamw_step", [_NUMBER, _ZERO, *[drawn(n, n)] * 4, _ZERO], _ADAM),
    "grouped_matmul": lambda n: Case("grouped_matmul", [drawn(n, n), drawn(3, n, n), ids(4)], {}),
    "dropout": lambda n: Case("dropout", [drawn(n, n), ids(2)], {"p": 0.5, "stream": n}),
    "topk": lambda n: Case("topk", [drawn(n, n)], {"k": n % 9 + 1, "axis": 1, "largest": True}),
    "gather": lambda n: Case("gather", [drawn(n, n), ids(n)[None]], {"axis": 0}),
    "scatter_sum": lambda n: Case("scatter_sum", [drawn(n, n), ids(n, n)], {"axis": 1, "shape": (n, n)}),
    "sum": lambda n: Case("sum", [drawn(n, n)], _SUM),
    "argmax": lambda n: Case("argmax", [drawn(n, n)], {"axis": 0}),
    "batch_norm": lambda n: Case("batch_norm", [drawn(n, n), drawn(n), drawn(n)], {"eps": 1e-5}),
}
"""Name -> a case of size n: 20 neighbouring sizes share their compiled code, except for sizes divisible by 16."""
