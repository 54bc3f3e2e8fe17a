"""The ONNX table: an op as nodes of ONNX opset 20, as plain data. One row per op, or why there is none.

A row takes the `Use` of its op and writes nodes with `u(type, *names, **attributes)`, which gives the name of the
result (or names of several); it gives back the name of each result of the op. Ops that are made of simpler ones
(`expand`) need no row: those are exported. Sizes may be named: then they are looked up when the model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from graphwright.ops.onnx_use import Use, numpy_dtype

OPSET = 20

Row = Callable[[Use], "str | tuple[str, ...] | None"]
"""None for a use of the op that ONNX does not have."""


def _same(kind: str) -> Row:
    return lambda u: u(kind, *u.names)


def _reduce(kind: str) -> Row:
    def row(u: Use) -> str:
        if not u.attrs["axes"]:
            return u("Identity", *u.names)
        return u(kind, u.names[0], u.ints(*u.attrs["axes"]), keepdims=int(u.attrs["keepdims"]))

    return row


def _truth(kind: str) -> Row:
    """Any and all: the largest and the smallest of 0 and 1."""

    def row(u: Use) -> str:
        flags = u("Cast", u("Cast", u.names[0], to=9), to=6)
        if not u.attrs["axes"]:
            return u("Cast", flags, to=9)
        return u("Cast", u(kind, flags, u.ints(*u.attrs["axes"]), keepdims=int(u.attrs["keepdims"])), to=9)

    return row


def _logical(kind: str) -> Row:
    return lambda u: u(kind, *(u("Cast", n, to=9) for n in u.names))


def _div(u: Use) -> str:
    return u("Div", *(u.cast(n, u.outs[0].dtype) for n in u.names))


def _floor_divide(u: Use) -> str:
    x, y = u.names
    if u.ins[0].dtype.is_float:
        return u("Floor", u("Div", x, y))
    return u("Div", u("Sub", x, u("Mod", x, y)), y)  # Div of integers cuts, Mod has the divisor's sign


def _remainder(u: Use) -> str:
    x, y = u.names
    if not u.ins[0].dtype.is_float:
        return u("Mod", x, y)
    return u("Sub", x, u("Mul", u("Floor", u("Div", x, y)), y))


def _clamp(u: Use) -> str:
    low, high = (u.scalar(v) if v is not None else "" for v in (u.attrs["low"], u.attrs["high"]))
    return u("Clip", u.names[0], low, high)


def _silu(u: Use, x: str) -> str:
    return u("Mul", x, u("Sigmoid", x))


def _junction(u: Use) -> str:
    if not u.names:
        return u("Expand", u.scalar(0, u.outs[0]), u.shape(u.outs[0].shape))
    if not u.outs[0].dtype.is_float:  # Sum is for floats
        total = u.names[0]
        for name in u.names[1:]:
            total = u("Add", total, name)
        return total
    return u("Sum", *u.names)


def _unflatten(u: Use) -> str:
    return u("Reshape", u.names[0], u.shape(u.outs[0].shape))


def _slice(u: Use, axis: int, start: int, size: int, step: int = 1) -> str:
    place = u.ints(axis)
    return u("Slice", u.names[0], u.ints(start), u.ints(start + size * step), place, u.ints(step))


def _linear(u: Use) -> str:
    y = u("MatMul", u.names[0], u("Transpose", u.names[1], perm=[1, 0]))
    return u("Add", y, u.names[2]) if len(u.names) > 2 else y


def _rms_norm(u: Use) -> str:
    x, w = u.names
    size = len(u.ins[0].shape) - 1
    unit = u("Div", x, u("Sqrt", u("Add", u("ReduceMean", u("Mul", x, x), u.ints(size), keepdims=1),
                                    u.scalar(u.attrs["eps"]))))  # fmt: skip
    return u("Mul", unit, u("Add", w, u.scalar(1.0)) if u.attrs["unit_offset"] else w)


def _layer_norm(u: Use) -> str:
    rank, shape = u.attrs["rank"], u.ins[0].shape
    ones = np.ones(tuple(int(d) for d in shape[-rank:]), numpy_dtype(u.ins[0].dtype))
    scale = u.names[1:] or (u.nodes.constant(ones),)
    return u("LayerNormalization", u.names[0], *scale, axis=-rank, epsilon=u.attrs["eps"])


def _batch_norm(u: Use) -> str:
    x, mean, var, *scale = u.names
    zero, one = (u.nodes.constant(np.full(u.ins[1].sizes, v, numpy_dtype(u.ins[0].dtype))) for v in (0, 1))
    w, b = [*scale, *[one, zero][len(scale) :]]
    mean, var = (u.cast(n, u.ins[0].dtype) for n in (mean, var))
    return u("BatchNormalization", x, w, b, mean, var, epsilon=u.attrs["eps"])


def _softmax(u: Use) -> str:
    if len(u.names) == 1:
        return u("Softmax", u.names[0], axis=u.attrs["axis"])
    x, mask = u.names
    low = u.scalar(float(np.finfo(numpy_dtype(u.ins[0].dtype)).min) / 2)  # -∞ in a row without a key would give NaN
    return u("Where", mask, u("Softmax", u("Where", mask, x, low), axis=u.attrs["axis"]), u.scalar(0.0))


def _sort(u: Use, axis: int, k: str, largest: bool) -> tuple[str, ...]:
    return u.several(2, "TopK", u.names[0], k, axis=axis, largest=int(largest), sorted=1)


def _sorted(u: Use) -> tuple[str, ...]:
    axis = u.axis(u.attrs["axis"])
    return _sort(u, axis, u.shape(u.ins[0].shape[axis : axis + 1]), u.attrs["descending"])


def _each(value: int | Sequence[int], rank: int) -> list[int]:
    return [value] * rank if isinstance(value, int) else list(value)


def _conv(kind: str) -> Row:
    def row(u: Use) -> str:
        rank = len(u.ins[1].shape) - 2
        given = {k: _each(u.attrs[k], rank) for k in ("stride", "padding", "dilation")}
        more = {"output_padding": _each(u.attrs["output_padding"], rank)} if "output_padding" in u.attrs else {}
        return u(kind, *u.names, strides=given["stride"], pads=given["padding"] * 2, dilations=given["dilation"],
                 group=u.attrs["groups"], **more)  # fmt: skip

    return row


def _planes(u: Use, rank: int) -> tuple[str, bool]:
    """The operand as [N, C, ...], and whether it had another rank."""
    shape = u.ins[0].shape
    if len(shape) == rank + 2:
        return u.names[0], False
    lead = -1 if any(isinstance(d, str) for d in shape[:-rank]) else int(np.prod([int(d) for d in shape[:-rank]]))
    return u("Reshape", u.names[0], u.ints(1, lead, *(int(d) for d in shape[-rank:]))), True


def _pool(kind: str, *extra: str) -> Row:
    def row(u: Use) -> str:
        rank = len(u.attrs["kernel"])
        x, folded = _planes(u, rank)
        stride = u.attrs["stride"] if u.attrs["stride"] is not None else u.attrs["kernel"]
        more = {name: int(u.attrs[name]) for name in extra if name != "dilation"}
        more |= {"dilations": _each(u.attrs["dilation"], rank)} if "dilation" in extra else {}
        y = u(kind, x, kernel_shape=list(u.attrs["kernel"]), strides=_each(stride, rank),
              pads=_each(u.attrs["padding"], rank) * 2, **more)  # fmt: skip
        return u("Reshape", y, u.shape(u.outs[0].shape)) if folded else y

    return row


def _max_pool(u: Use) -> tuple[str, ...]:
    """Values; places are counted by ONNX along all axes, and here along the spatial ones."""
    values = _pool("MaxPool", "dilation")(u)
    assert isinstance(values, str)
    return (values,)


def _adaptive(u: Use) -> str | None:
    sizes, spatial = u.attrs["sizes"], u.ins[0].shape[-len(u.attrs["sizes"]) :]
    if any(isinstance(n, str) or n % m for n, m in zip(spatial, sizes, strict=True)):
        return None
    kernel = [int(n) // m for n, m in zip(spatial, sizes, strict=True)]
    x, folded = _planes(u, len(sizes))
    y = u("AveragePool", x, kernel_shape=kernel, strides=kernel)
    return u("Reshape", y, u.shape(u.outs[0].shape)) if folded else y


def _interpolate(u: Use) -> str:
    rank, linear = len(u.attrs["sizes"]), u.attrs["mode"] == "linear"
    x, folded = _planes(u, rank)
    way = "align_corners" if u.attrs["align_corners"] else "half_pixel" if linear else "asymmetric"
    options = {"mode": "linear"} if linear else {"mode": "nearest", "nearest_mode": "floor"}
    axes = list(range(2, 2 + rank))
    y = u("Resize", x, "", "", u.ints(*u.attrs["sizes"]), axes=axes, coordinate_transformation_mode=way, **options)
    return u("Reshape", y, u.shape(u.outs[0].shape)) if folded else y


def _rope_dynamic(u: Use) -> str:
    """θ' = θ·(s·L/M - (s - 1))^(d/(d-2)), f_i = θ'^(-2i/d); L = M gives θ."""
    a, half = u.attrs, int(u.ins[1].shape[0])
    kind = u.ins[1].dtype
    number = lambda v: u.scalar(v, u.ins[1])  # noqa: E731  # of the dtype of the frequencies
    length = u.cast(u("Add", u("ReduceMax", u.names[0], keepdims=0), u.ints_scalar(1)), kind)
    stretch = u("Sub", u("Mul", length, number(a["factor"] / a["original"])), number(a["factor"] - 1))
    theta = u("Mul", u("Pow", stretch, number(2 * half / (2 * half - 2))), number(a["theta"]))
    powers = u.nodes.constant((-np.arange(half) / half).astype(numpy_dtype(kind)))
    return u("Where", u("Greater", length, number(a["original"])), u("Pow", theta, powers), u.names[1])


def _rope_longer(u: Use) -> str:
    last = u("ReduceMax", u.names[0], keepdims=0)
    return u("Where", u("GreaterOrEqual", last, u.ints_scalar(u.attrs["original"])), u.names[2], u.names[1])


def _rope(u: Use) -> str | None:
    if u.attrs["style"] != "half":
        return None
    x, cos, sin = u.names
    half, width = int(u.ins[1].shape[-1]), int(u.ins[0].shape[-1])
    cos, sin = (u("Unsqueeze", t, u.ints(1)) for t in (cos, sin))
    sizes = [half, half, width - 2 * half] if width > 2 * half else [half, half]
    a, b, *rest = u.several(len(sizes), "Split", x, u.ints(*sizes), axis=-1)
    first = u("Sub", u("Mul", a, cos), u("Mul", b, sin))
    second = u("Add", u("Mul", b, cos), u("Mul", a, sin))
    return u("Concat", first, second, *rest, axis=-1)


def _full_like(u: Use) -> str:
    return u("Expand", u.scalar(u.attrs["value"]), u("Shape", u.names[0]))


def _size(u: Use, axis: int) -> str:
    axis = u.axis(axis)
    return u("Squeeze", u("Shape", u.names[0], start=axis, end=axis + 1), u.ints(0))


def _iota(u: Use) -> str:
    return u("Range", u.ints_scalar(0), _size(u, u.attrs["axis"]), u.ints_scalar(1))


def _flip(u: Use) -> str:
    axes = [u.axis(a) for a in u.attrs["axes"]]
    n = len(axes)
    return u("Slice", u.names[0], u.ints(*[-1] * n), u.ints(*[-(2**62)] * n), u.ints(*axes), u.ints(*[-1] * n))


def _roll(u: Use) -> str | None:
    x = u.names[0]
    for shift, axis in zip(u.attrs["shifts"], u.attrs["axes"], strict=True):
        at = u.axis(axis)
        size = u.ins[0].shape[at]
        if isinstance(size, str):
            return None
        k = -shift % size if size else 0
        parts = ((k, 2**62), (0, k))
        x = u("Concat", *(u("Slice", x, u.ints(a), u.ints(b), u.ints(at)) for a, b in parts), axis=at)
    return x


def _repeat_interleave(u: Use) -> str:
    axis, rank = u.axis(u.attrs["axis"]), len(u.ins[0].shape)
    apart = u("Unsqueeze", u.names[0], u.ints(axis + 1))
    many = u("Tile", apart, u.ints(*(u.attrs["repeats"] if i == axis + 1 else 1 for i in range(rank + 1))))
    return u("Reshape", many, u.shape(u.outs[0].shape))


def _tile(u: Use) -> str:
    """Missing repeats and missing axes are at the front."""
    rank, repeats = len(u.ins[0].shape), u.attrs["repeats"]
    x = u.names[0]
    if len(repeats) > rank:
        x = u("Unsqueeze", x, u.ints(*range(len(repeats) - rank)))
    return u("Tile", x, u.ints(*[1] * (rank - len(repeats)), *repeats))


_PAD_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def _pad(u: Use) -> str:
    rank, widths = len(u.ins[0].shape), u.attrs["widths"]
    axes = list(range(rank - len(widths), rank))
    pads = u.ints(*(w[0] for w in widths), *(w[1] for w in widths))
    value = u.scalar(u.attrs["value"]) if u.attrs["mode"] == "constant" else ""
    return u("Pad", u.names[0], pads, value, u.ints(*axes), mode=_PAD_MODES[u.attrs["mode"]])


def _triangle(upper: int) -> Row:
    return lambda u: u("Trilu", u.names[0], u.ints_scalar(u.attrs["diagonal"]), upper=upper)


def _index(u: Use) -> str | None:
    return u("Gather", *u.names, axis=u.attrs["axis"]) if len(u.names) == 2 else None


def _one_hot(u: Use) -> str:
    values = u.nodes.constant(np.array([0, 1], numpy_dtype(u.outs[0].dtype)))
    return u("OneHot", u.names[0], u.ints_scalar(u.attrs["classes"]), values, axis=-1)


def _bincount(u: Use) -> str:
    flat = u("Reshape", u.names[0], u.ints(-1))
    hot = u("OneHot", flat, u.ints_scalar(u.attrs["length"]), u.ints(0, 1), axis=-1)
    return u("ReduceSum", hot, u.ints(0), keepdims=0)


_PLAIN = {
    **{"abs": "Abs", "sign": "Sign", "floor": "Floor", "ceil": "Ceil", "round": "Round", "exp": "Exp", "log": "Log"},
    **{"sqrt": "Sqrt", "reciprocal": "Reciprocal", "sin": "Sin", "cos": "Cos", "tanh": "Tanh", "erf": "Erf"},
    **{"sigmoid": "Sigmoid", "pow": "Pow", "minimum": "Min", "maximum": "Max", "where": "Where", "add": "Add"},
    **{"sub": "Sub", "mul": "Mul", "matmul": "MatMul", "eq": "Equal", "lt": "Less", "le": "LessOrEqual"},
    **{"gt": "Greater", "ge": "GreaterOrEqual", "neg": "Neg", "isnan": "IsNaN", "relu": "Relu"},
    **{"softplus": "Softplus"},
    **dict.fromkeys(("copy", "recall", "stop_gradient", "scale_gradient", "assert_finite"), "Identity"),
}
"""Ops that ONNX has, with the operands as its only arguments."""

ONNX: dict[str, Row] = {
    **{name: _same(kind) for name, kind in _PLAIN.items()},
    "expm1": lambda u: u("Sub", u("Exp", u.names[0]), u.scalar(1.0)),
    "log1p": lambda u: u("Log", u("Add", u.names[0], u.scalar(1.0))),
    "rsqrt": lambda u: u("Reciprocal", u("Sqrt", u.names[0])),
    "div": _div,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "ne": lambda u: u("Not", u("Equal", *u.names)),
    "isinf": lambda u: u("IsInf", u.names[0]),
    "isfinite": lambda u: u("Not", u("Or", u("IsNaN", u.names[0]), u("IsInf", u.names[0]))),
    "logical_and": _logical("And"),
    "logical_or": _logical("Or"),
    "logical_xor": _logical("Xor"),
    "logical_not": _logical("Not"),
    "step": lambda u: u.cast(u("Greater", u.names[0], u.scalar(0)), u.outs[0].dtype),
    "clamp": _clamp,
    "silu": lambda u: _silu(u, u.names[0]),
    "swiglu": lambda u: u("Mul", _silu(u, u.names[0]), u.names[1]),
    "leaky_relu": lambda u: u("LeakyRelu", u.names[0], alpha=u.attrs["slope"]),
    "elu": lambda u: u("Elu", u.names[0], alpha=u.attrs["alpha"]),
    "gelu": lambda u: u("Gelu", u.names[0], approximate=u.attrs["approximate"]),
    "logsigmoid": lambda u: u("Neg", u("Softplus", u("Neg", u.names[0]))),
    "sech": lambda u: u("Reciprocal", u("Cosh", u.names[0])),
    "cast": lambda u: u.cast(u.names[0], u.outs[0].dtype),
    "full_like": _full_like,
    "junction": _junction,
    "sum": _reduce("ReduceSum"),
    "mean": _reduce("ReduceMean"),
    "amax": _reduce("ReduceMax"),
    "amin": _reduce("ReduceMin"),
    "prod": _reduce("ReduceProd"),
    "logsumexp": _reduce("ReduceLogSumExp"),
    "any": _truth("ReduceMax"),
    "all": _truth("ReduceMin"),
    "argmax": lambda u: u("ArgMax", u.names[0], axis=u.attrs["axis"], keepdims=0),
    "argmin": lambda u: u("ArgMin", u.names[0], axis=u.attrs["axis"], keepdims=0),
    "cumsum": lambda u: u("CumSum", u.names[0], u.ints_scalar(u.attrs["axis"]), reverse=int(u.attrs["reverse"])),
    "reshape": _unflatten,
    "unflatten": _unflatten,
    "flatten": _unflatten,
    "permute": lambda u: u("Transpose", u.names[0], perm=[u.axis(a) for a in u.attrs["axes"]]),
    "expand": lambda u: u("Expand", u.names[0], u.shape(u.outs[0].shape)),
    "slice": lambda u: _slice(u, u.axis(u.attrs["axis"]), u.attrs["start"], u.attrs["size"], u.attrs["step"]),
    "last": lambda u: u("Slice", u.names[0], u.ints(-1), u.ints(2**62), u.ints(u.axis(u.attrs["axis"]))),
    "size": lambda u: _size(u, u.attrs["axis"]),
    "concat": lambda u: u("Concat", *u.names, axis=u.attrs["axis"]),
    "squeeze": lambda u: u("Squeeze", u.names[0], u.ints(*u.attrs["axes"])),
    "unsqueeze": lambda u: u("Reshape", u.names[0], u.shape(u.outs[0].shape)),
    "linear": _linear,
    "embedding": lambda u: u("Gather", *u.names, axis=0),
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "batch_norm": _batch_norm,
    "softmax": _softmax,
    "log_softmax": lambda u: u("LogSoftmax", u.names[0], axis=u.attrs["axis"]),
    "sort": _sorted,
    "topk": lambda u: _sort(u, u.axis(u.attrs["axis"]), u.ints(u.attrs["k"]), u.attrs["largest"]),
    "rope_dynamic": _rope_dynamic,
    "rope_longer": _rope_longer,
    "rope": _rope,
    "conv": _conv("Conv"),
    "conv_transpose": _conv("ConvTranspose"),
    "max_pool": _max_pool,
    "avg_pool": _pool("AveragePool", "count_include_pad"),
    "adaptive_avg_pool": _adaptive,
    "interpolate": _interpolate,
    "scatter": lambda u: u("ScatterElements", *u.names, axis=u.attrs["axis"]),
    "scatter_add": lambda u: u("ScatterElements", *u.names, axis=u.attrs["axis"], reduction="add"),
    "gather": lambda u: u("GatherElements", *u.names, axis=u.attrs["axis"]),
    "index": _index,
    "one_hot": _one_hot,
    "bincount": _bincount,
    "flip": _flip,
    "roll": _roll,
    "tile": _tile,
    "repeat_interleave": _repeat_interleave,
    "pad": _pad,
    "tril": _triangle(0),
    "triu": _triangle(1),
    "iota": _iota,
}

_BACKWARD = (
    "pad_slice embedding_backward sdpa_backward cross_entropy_backward conv_weight scatter_sum avg_pool_backward "
    "adaptive_avg_pool_backward interpolate_backward pad_backward index_sum grouped_outer"
)
_UPDATES = (
    "adam_step adamw_step sgd_step lion_step muon_step rmsprop_step ema_step unscale_check batch_norm_train "
    "kv_append kv_append_paged"
)
_RANDOM = "uniform normal gumbel randint bernoulli multinomial dropout stochastic_round"

NO_ONNX: dict[str, str] = {
    **dict.fromkeys(_BACKWARD.split(), "backward ops are not part of an exported model"),
    **dict.fromkeys(_UPDATES.split(), "an exported graph carries no state from run to run"),
    **dict.fromkeys(_RANDOM.split(), "exported models draw no random numbers"),
    **dict.fromkeys(("bce", "bce_with_logits", "cross_entropy"), "losses are not part of an exported model"),
    **dict.fromkeys(("index_put", "index_add", "index_fill"), "writes at several indices at once have no node"),
    **dict.fromkeys(("unfold", "fold"), "a convolution is the op to export"),
    "gate": "gates are hardened or folded before an export",
    "gate_grad": "backward ops are not part of an exported model",
    "solve": "opset 20 has no linear solve: bake the form first",
    "nonzero": "its count would be a size known only when it runs",
    "diagonal": "opset 20 has no view along two axes",
    "sdpa_paged": "pages belong to the cache of a running model",
    "choose": "what runs the graph draws from its logits",
    "linear_int8": "exported weights are floating: undo the quantising before",
    "grouped_matmul": "opset 20 has no product by groups",
}
"""Ops without a row that are not made of simpler ones either."""
