"""The emit table: an op as torch source text, for exported modeling code. One row per op, or why there is none.

A row takes the operands' source texts and the attributes and gives one expression; ops with several results give a
tuple. Operand texts are names, attributes, calls or subscripts, so no row needs parentheses. `run` is the forward pass
that the text stands in: it knows the named sizes. A row gives None for a use of its op that exported code cannot have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isinf, isnan
from typing import Any

Emit = Callable[[Sequence[str], Mapping[str, Any]], str | None]


def number(value: Any) -> str:
    """A number as source text; Python has no literal for infinities and NaN."""
    if isinstance(value, float) and (isnan(value) or isinf(value)):
        return "torch.nan" if isnan(value) else f"{'-' if value < 0 else ''}torch.inf"
    return repr(value)


def sizes(shape: Sequence[Any]) -> str:
    """Sizes as source text, named ones as facts of the run."""
    return ", ".join(f"run.{d}" if isinstance(d, str) else str(d) for d in shape)


def _call(name: str) -> Emit:
    return lambda i, a: f"{name}({', '.join(i)})"


def _infix(sign: str) -> Emit:
    return lambda i, a: f"{i[0]} {sign} {i[1]}"


def _reduce(name: str) -> Emit:
    def row(i: Sequence[str], a: Mapping[str, Any]) -> str:
        if not a["axes"]:  # torch would take all axes
            return f"{i[0]}.clone()"
        axes = a["axes"][0] if len(a["axes"]) == 1 else tuple(a["axes"])
        return f"{i[0]}.{name}({axes}{', keepdim=True' if a['keepdims'] else ''})"

    return row


def _product(i: Sequence[str], a: Mapping[str, Any]) -> str:
    """Torch multiplies along one axis at a time; from the last on, so that the others keep their places."""
    last = sorted(a["axes"], reverse=True)
    text = "".join(f".prod({axis}{', keepdim=True' if a['keepdims'] else ''})" for axis in last)
    return i[0] + (text or ".clone()")


def _cumsum(i: Sequence[str], a: Mapping[str, Any]) -> str:
    text = f".cumsum({a['axis']})"
    return f"{i[0]}.flip({a['axis']}){text}.flip({a['axis']})" if a["reverse"] else i[0] + text


def _softmax(i: Sequence[str], a: Mapping[str, Any]) -> str:
    if len(i) == 1:
        return f"{i[0]}.softmax({a['axis']})"
    return f"{i[0]}.masked_fill(~{i[1]}, -torch.inf).softmax({a['axis']}).where({i[1]}, 0.0)"


def _rms_norm(i: Sequence[str], a: Mapping[str, Any]) -> str:
    x, w = i
    offset = " + 1.0" if a["unit_offset"] else ""
    if a["cast_before_scale"]:
        return f"rms_norm({x}, {w}{offset}, {a['eps']!r})"
    return f"rms_norm({x}.float(), {w}.float(){offset}, {a['eps']!r}).to({x}.dtype)"


def _norm(name: str, x: str, over: object, scale: Sequence[str], a: Mapping[str, Any]) -> str:
    named = ", ".join(f"{key}={text}" for key, text in zip(("weight", "bias"), scale, strict=False))
    return f"{name}({x}, {over}, {named}{', ' if named else ''}eps={a['eps']!r})"


def _sorted(x: str, axis: int, descending: bool) -> str:
    return f"torch.sort({x}, dim={axis}, descending={descending}, stable=True)"


def _topk(i: Sequence[str], a: Mapping[str, Any]) -> str:
    """Torch's own leaves the order of ties open."""
    return f"tuple(t.narrow({a['axis']}, 0, {a['k']}) for t in {_sorted(i[0], a['axis'], a['largest'])})"


def _slice(i: Sequence[str], a: Mapping[str, Any]) -> str:
    axis, step = a["axis"], a["step"]
    part = f"{a['start'] or ''}:{a['start'] + a['size'] * step}" + (f":{step}" if step != 1 else "")
    return f"{i[0]}[{':, ' * axis}{part}]" if axis >= 0 else f"{i[0]}[..., {part}{', :' * (-axis - 1)}]"


def _split(parts: Sequence[int]) -> str:
    """Sizes of a split axis, the first left to torch: so blocks that differ in their number of heads read the same."""
    return f"({sizes((-1, *parts[1:]))}{',' if len(parts) == 1 else ''})"


def _conv(i: Sequence[str], a: Mapping[str, Any]) -> str:
    rest = _all_axes(a["output_padding"]) if "output_padding" in a else [0]
    slide = ", ".join(str(_all_axes(a[k])) for k in ("stride", "padding", "dilation"))
    bias = i[2] if len(i) > 2 else None
    return f"torch.convolution({i[0]}, {i[1]}, {bias}, {slide}, {'output_padding' in a}, {rest}, {a['groups']})"


def _all_axes(value: int | Sequence[int]) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def _pool(name: str, *given: str) -> Emit:
    """A function of torch named for the rank, with the attributes that it calls by the same names."""

    def row(i: Sequence[str], a: Mapping[str, Any]) -> str:
        rank = len(a[given[0]])
        rest = "".join(f", {k}={a[k]!r}" for k in given[1:])
        more = ", return_indices=True" if name.startswith("max") else ""
        return f"F.{name}{rank}d({i[0]}, {tuple(a[given[0]])}{rest}{more})"

    return row


def _index(i: Sequence[str], a: Mapping[str, Any]) -> str:
    axis, ids = a["axis"], list(i[1:])
    index = [":"] * axis + ids if axis >= 0 else ["...", *ids, *[":"] * (-axis - len(ids))]
    return f"{i[0]}[{', '.join(index)}]"


def _unsqueeze(i: Sequence[str], a: Mapping[str, Any]) -> str:
    """One axis after the other, from the front to the end: each finds its place among those there already."""
    front, back = sorted(n for n in a["axes"] if n >= 0), sorted((n for n in a["axes"] if n < 0), reverse=True)
    return i[0] + "".join(f".unsqueeze({n})" for n in (*front, *back))


def _pad(i: Sequence[str], a: Mapping[str, Any]) -> str:
    widths = [n for pair in reversed(a["widths"]) for n in pair]
    value = f", value={number(a['value'])}" if a["mode"] == "constant" else ""
    return f"F.pad({i[0]}, {widths}, mode={a['mode']!r}{value})"


def _interpolate(i: Sequence[str], a: Mapping[str, Any]) -> str:
    mode = "bilinear" if a["mode"] == "linear" and len(a["sizes"]) == 2 else a["mode"]
    corners = ", align_corners=True" if a["align_corners"] else ""
    return f"F.interpolate({i[0]}, {tuple(a['sizes'])}, mode={mode!r}{corners})"


def _attend(i: Sequence[str], a: Mapping[str, Any]) -> str | None:
    if a["optional"] or not a["causal"]:  # masks and starts are facts of a run, and the cache holds the past only
        return None
    window = "" if a["window"] is None else f", window={a['window']}"
    return f"attend({', '.join(i)}, run, {number(a['scale'])}{window})"


_TORCH = (
    "abs sign floor ceil round exp expm1 log log1p sqrt rsqrt reciprocal sin cos tanh erf sigmoid pow remainder "
    "floor_divide minimum maximum where logical_and logical_or logical_xor logical_not isnan isinf isfinite"
)
"""Ops that torch has under the same name, with the operands as its only arguments."""

_INFIX = {
    **{"add": "+", "sub": "-", "mul": "*", "div": "/", "matmul": "@"},
    **{"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
}

EMIT: dict[str, Emit] = {
    **{name: _call(f"torch.{name}") for name in _TORCH.split()},
    **{name: _infix(sign) for name, sign in _INFIX.items()},
    "neg": lambda i, a: f"-{i[0]}",
    "step": lambda i, a: f"({i[0]} > 0).to({i[0]}.dtype)",
    "clamp": lambda i, a: f"{i[0]}.clamp({number(a['low'])}, {number(a['high'])})",
    "silu": _call("F.silu"),
    "swiglu": lambda i, a: f"F.silu({i[0]}) * {i[1]}",
    "relu": _call("F.relu"),
    "leaky_relu": lambda i, a: f"F.leaky_relu({i[0]}, {number(a['slope'])})",
    "elu": lambda i, a: f"F.elu({i[0]}, {number(a['alpha'])})",
    "gelu": lambda i, a: f"F.gelu({i[0]}, approximate={a['approximate']!r})",
    "softplus": lambda i, a: f"F.softplus({i[0]}, threshold=80)",
    "logsigmoid": _call("F.logsigmoid"),
    "sech": lambda i, a: f"torch.cosh({i[0]}).reciprocal()",
    "cast": lambda i, a: f"{i[0]}.to(torch.{a['dtype'].name})",
    "copy": lambda i, a: f"{i[0]}.clone()",
    "recall": lambda i, a: i[0],
    "stop_gradient": lambda i, a: f"{i[0]}.detach()",
    "scale_gradient": lambda i, a: i[0],
    "assert_finite": lambda i, a: i[0],
    "full_like": lambda i, a: f"torch.full_like({i[0]}, {number(a['value'])})",
    "junction": lambda i, a: " + ".join(i),
    "sum": _reduce("sum"),
    "mean": _reduce("mean"),
    "amax": _reduce("amax"),
    "amin": _reduce("amin"),
    "prod": _product,
    "any": _reduce("any"),
    "all": _reduce("all"),
    "logsumexp": _reduce("logsumexp"),
    "argmax": lambda i, a: f"{i[0]}.argmax({a['axis']})",
    "argmin": lambda i, a: f"{i[0]}.argmin({a['axis']})",
    "cumsum": _cumsum,
    "reshape": lambda i, a: f"{i[0]}.reshape({sizes(a['shape'])})",
    "unflatten": lambda i, a: f"{i[0]}.unflatten({a['axis']}, {_split(a['sizes'])})",
    "flatten": lambda i, a: f"{i[0]}.flatten({a['start']}, {a['end']})",
    "permute": lambda i, a: f"{i[0]}.permute({sizes(a['axes'])})",
    "expand": lambda i, a: f"{i[0]}.expand({sizes(a['shape'])})",
    "slice": _slice,
    "last": lambda i, a: f"{i[0]}.narrow({a['axis']}, -1, 1)",
    "concat": lambda i, a: f"torch.cat(({', '.join(i)}{',' if len(i) == 1 else ''}), {a['axis']})",
    "linear": _call("F.linear"),
    "embedding": lambda i, a: f"F.embedding({i[1]}, {i[0]})",
    "rms_norm": _rms_norm,
    "layer_norm": lambda i, a: _norm("F.layer_norm", i[0], f"{i[0]}.shape[-{a['rank']}:]", i[1:], a),
    "group_norm": lambda i, a: _norm("F.group_norm", i[0], a["groups"], i[1:], a),
    "batch_norm": lambda i, a: _norm("F.batch_norm", ", ".join(i[:2]), i[2], i[3:], a),
    "solve": lambda i, a: f"torch.linalg.solve({i[0]}, {i[1]})",
    "sort": lambda i, a: _sorted(i[0], a["axis"], a["descending"]),
    "topk": _topk,
    "softmax": _softmax,
    "log_softmax": lambda i, a: f"{i[0]}.log_softmax({a['axis']})",
    "rope_table": lambda i, a: f"rope_table({', '.join(i)}, {number(a['scale'])})",
    "rope_dynamic": lambda i, a: f"rope_dynamic({i[0]}, {i[1]}, {a['theta']!r}, {a['factor']!r}, {a['original']!r})",
    "rope_longer": lambda i, a: f"{i[2]} if int({i[0]}.max()) + 1 > {a['original']!r} else {i[1]}",
    "rope": lambda i, a: f"{'rope' if a['style'] == 'half' else 'rope_pairs'}({', '.join(i)})",
    "sdpa": _attend,
    "conv": _conv,
    "conv_transpose": _conv,
    "max_pool": _pool("max_pool", "kernel", "stride", "padding", "dilation"),
    "avg_pool": _pool("avg_pool", "kernel", "stride", "padding", "count_include_pad"),
    "adaptive_avg_pool": _pool("adaptive_avg_pool", "sizes"),
    "interpolate": _interpolate,
    "scatter": lambda i, a: f"{i[0]}.scatter({a['axis']}, {i[1]}, {i[2]})",
    "scatter_add": lambda i, a: f"{i[0]}.scatter_add({a['axis']}, {i[1]}, {i[2]})",
    "index": _index,
    "one_hot": lambda i, a: f"F.one_hot({i[0]}, {a['classes']})",
    "bincount": lambda i, a: f"torch.bincount({i[0]}.flatten(), minlength={a['length']})",
    "nonzero": lambda i, a: f"torch.nonzero_static({i[0]}, size={a['size']}, fill_value={a['fill']})",
    "squeeze": lambda i, a: f"{i[0]}.squeeze({tuple(a['axes'])})",
    "unsqueeze": _unsqueeze,
    "diagonal": lambda i, a: f"{i[0]}.diagonal({a['offset']}, {sizes(a['axes'])})",
    "flip": lambda i, a: f"{i[0]}.flip({tuple(a['axes'])})",
    "roll": lambda i, a: f"{i[0]}.roll({tuple(a['shifts'])}, {tuple(a['axes'])})",
    "tile": lambda i, a: f"{i[0]}.tile({tuple(a['repeats'])})",
    "repeat_interleave": lambda i, a: f"{i[0]}.repeat_interleave({a['repeats']}, {a['axis']})",
    "pad": _pad,
    "tril": lambda i, a: f"{i[0]}.tril({a['diagonal']})",
    "triu": lambda i, a: f"{i[0]}.triu({a['diagonal']})",
    "iota": lambda i, a: f"torch.arange({i[0]}.shape[{a['axis']}])",
    "gather": lambda i, a: f"{i[0]}.gather({a['axis']}, {i[1]})",
}

NO_EMIT: dict[str, str] = {
    "batch_norm_train": "statistics of a batch are not part of an exported model",
    "size": "a size is a number of the run",
    "pad_slice": "backward ops are not part of an exported model",
    "embedding_backward": "backward ops are not part of an exported model",
    **dict.fromkeys(
        (
            "conv_weight",
            "scatter_sum",
            "avg_pool_backward",
            "adaptive_avg_pool_backward",
            "interpolate_backward",
            "pad_backward",
            "index_sum",
        ),
        "backward ops are not part of an exported model",
    ),
    **dict.fromkeys(("index_put", "index_add", "index_fill"), "torch writes at an index in a statement of its own"),
    **dict.fromkeys(
        ("uniform", "normal", "gumbel", "randint", "bernoulli", "multinomial", "dropout", "stochastic_round"),
        "exported models draw no random numbers: they are not trained there",
    ),
    **dict.fromkeys(("unfold", "fold"), "torch has them for planes only; a convolution is the op to export"),
    "sdpa_backward": "backward ops are not part of an exported model",
    "bce": "losses are not part of an exported model",
    "bce_with_logits": "losses are not part of an exported model",
    "cross_entropy": "losses are not part of an exported model",
    "cross_entropy_backward": "backward ops are not part of an exported model",
    "kv_append": "transformers brings its own cache",
    "kv_append_paged": "transformers brings its own cache",
    "sdpa_paged": "transformers brings its own cache",
    "choose": "transformers brings its own generation",
    "linear_int8": "exported weights are floating: quantise what was exported, or undo before",
    "grouped_matmul": "no family with experts is exported yet",
    "grouped_outer": "backward ops are not part of an exported model",
    "gate": "gates are hardened or folded before an export",
    "gate_grad": "backward ops are not part of an exported model",
    "adam_step": "updates are not part of an exported model",
    "adamw_step": "updates are not part of an exported model",
    "sgd_step": "updates are not part of an exported model",
    "lion_step": "updates are not part of an exported model",
    "muon_step": "updates are not part of an exported model",
    "rmsprop_step": "updates are not part of an exported model",
    "ema_step": "updates are not part of an exported model",
    "unscale_check": "updates are not part of an exported model",
}

OPERATORS = frozenset({*_INFIX, "neg", "swiglu", "junction", "rope_longer"})
"""Ops whose text is no primary: nothing can be appended to it."""

POSTFIX = frozenset(
    {
        "cast",
        "clamp",
        "copy",
        "sum",
        "mean",
        "prod",
        "amax",
        "amin",
        "any",
        "all",
        "logsumexp",
        "argmax",
        "argmin",
        "cumsum",
        "reshape",
        "unflatten",
        "flatten",
        "permute",
        "expand",
        "slice",
        "last",
        "softmax",
        "log_softmax",
        "stop_gradient",
        "squeeze",
        "unsqueeze",
        "diagonal",
        "flip",
        "roll",
        "tile",
        "repeat_interleave",
        "tril",
        "triu",
    }
)
"""Ops whose text is appended to that of their only operand."""

RESULTS = {
    "sort": ("values", "indices"),
    "topk": ("values", "indices"),
    "rope_table": ("cos", "sin"),
    "max_pool": ("largest", "place"),
}
"""Names of the results of ops that have several."""
