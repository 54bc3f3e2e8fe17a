"""Rotary embedding and scaled dot-product attention with grouped heads, causal window and padding."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Any, Literal, NamedTuple

import numpy as np

from graphwright.array.dtype import bool_, float32, float64, int32, int64
from graphwright.array.sizes import Dim
from graphwright.array.spec import Spec
from graphwright.array.vm.encode import attention as attention_forms
from graphwright.array.vm.encode import rows as row_forms
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.attributes import Attr
from graphwright.ops.axes import Atom, AxesUse, Product, chain, product, resolve, size
from graphwright.ops.call import as_dtype, call
from graphwright.ops.emit import TorchModule
from graphwright.ops.linear import transposed
from graphwright.ops.onnx import OnnxUse, WholeNode, all_float32, numpy_dtype
from graphwright.ops.registry import Attrs, Cost, Row, Saves, Traits, op
from graphwright.ops.rules import Backward, Update, equal_dim, one_dtype
from graphwright.settings import AtLeastOne, Number, Positive


def _heads(u: AxesUse) -> None:
    """State which axes of the operands q, k and v are resized together.

    Query heads are key heads × repeats; q and k have one head size; k and v (also as pools of pages) share axes 0 to 2.
    """
    q, k, v = u.ins[:3]
    heads, groups = size(q[1]), size(k[1])
    repeats = Atom(int(heads) // int(groups)) if isinstance(heads, int) and isinstance(groups, int) else Atom(1)
    for axis in (0, 1, 2):
        u.same(k[axis], v[axis])
    u.same(q[1], product(k[1], repeats))
    u.kind(q[1], "heads")
    u.kind(k[1], "kv_groups")
    if isinstance(batch := resolve(q[0]), Product):  # heads too may be joined with it, where windows are axis 1
        for factor in batch.factors:
            u.kind(factor, "heads")
    if size(repeats) != 1:
        u.kind(repeats, "queries")
    u.same(q[3], k[3])
    u.summed(q[3], (0, 3), (1, 3))
    u.kind(q[3], "head_dim")
    u.kind(v[3], "head_dim")
    u.mixed(q[2], "masks keys by position")


@op("rope_table")
class RopeTable(Row):
    """scale·cos(pθ) and scale·sin(pθ), each [B, T, d/2], for int64 positions p [B, T] and frequencies θ [d/2].

    The results have the dtype of the frequencies, float32 or float64, even in a 16-bit model, because angles of large
    positions need that precision.
    """

    arity, attrs, traits, vm = 2, {"scale": Attr(Number, 1.0)}, Traits(float32_constants=True), row_forms.ROPE_TABLE
    vjp, why = None, {"vjp": "positions are integers and frequencies are not trained"}
    emit, results = "rope_table({all}, {scale}, run)", ("cos", "sin")
    sample = lambda rng: ([rng.integers(0, 50, (2, 5)), rng.random(3).astype("float32")], {"scale": 1.5})
    axes = lambda u: [(*u.ins[0], u.ins[1][0])] * 2

    def infer(positions, frequencies, scale):
        table = Spec((*positions.shape, _frequencies(positions, frequencies).shape[0]), frequencies.dtype)
        return table, table

    def expand(ins, attrs):
        positions, frequencies = ins
        angle = call("unsqueeze", call("cast", positions, dtype=frequencies.dtype), axes=(-1,)) * frequencies
        tables = call("cos", angle), call("sin", angle)
        return tables if attrs["scale"] == 1.0 else tuple(t * attrs["scale"] for t in tables)


def _frequencies(positions: Spec, *tables: Spec) -> Spec:
    one_dtype(*tables)
    if positions.dtype is not int64 or any(t.dtype not in (float32, float64) or len(t.shape) != 1 for t in tables):
        expected = "int64 positions, float32 or float64 frequencies [d/2]"
        raise DTypeError("invalid operands of a rotary op", expected=expected, got=f"{positions}, {tables}")
    return tables[0]


class _Frequencies(Row):
    vjp, why = None, {"vjp": "frequencies are not trained"}
    traits = Traits(float32_constants=True, looks_ahead=True)


@op("rope_dynamic")
class RopeDynamic(_Frequencies):
    """Dynamic NTK scaling: rotary frequencies θ'^(-2i/d) [d/2] with base θ' = θ·(s·L/M - (s - 1))^(d/(d-2)).

    θ is `theta`, s is `factor`, M is `original`, the length that the model was trained on, L is the largest position
    + 1, and d is the number of rotated entries of a head. If L ≤ M, the result is operand 1, the given frequencies.
    """

    arity, attrs = 2, {"theta": Attr(Positive), "factor": Attr(Positive), "original": Attr(AtLeastOne)}
    emit = "rope_dynamic({0}, {1}, {theta}, {factor}, {original})"
    infer = lambda positions, frequencies, theta, factor, original: _frequencies(positions, frequencies)

    def sample(rng):
        base = (10000.0 ** (-np.arange(0, 8, 2) / 8)).astype("float32")
        return [rng.integers(0, 50, (2, 5)), base], {"theta": 10000.0, "factor": 4.0, "original": 20}

    def axes(u: AxesUse):
        u.frozen(u.ins[1][0], "uses its size in the formula")
        for term in u.ins[0]:
            u.mixed(term, "takes the maximum over it")
        return [u.ins[1]]

    def onnx(u: OnnxUse):
        a, half, kind = u.attrs, int(u.ins[1].shape[0]), u.ins[1].dtype
        number = lambda v: u.scalar(v, u.ins[1])  # of the dtype of the frequencies
        length = u.cast(u("Add", u("ReduceMax", u.names[0], keepdims=0), u.ints_scalar(1)), kind)
        scaled = u("Sub", u("Mul", length, number(a["factor"] / a["original"])), number(a["factor"] - 1))
        theta = u("Mul", u("Pow", scaled, number(2 * half / (2 * half - 2))), number(a["theta"]))
        powers = u.nodes.constant((-np.arange(half) / half).astype(numpy_dtype(kind)))
        return u("Where", u("Greater", length, number(a["original"])), u("Pow", theta, powers), u.names[1])


@op("rope_longer")
class RopeLonger(_Frequencies):
    """Operand `long` if a position is ≥ `original`, else operand `short`: frequency tables [d/2] (LongRoPE)."""

    arity, attrs, emit = 3, {"original": Attr(AtLeastOne)}, "{2} if int({0}.max()) + 1 > {original} else {1}"
    infer = lambda positions, short, long, original: _frequencies(positions, short, long)

    def sample(rng):
        positions, tables = rng.integers(0, 50, (2, 5)), rng.random((2, 4)).astype("float32")
        return [positions, *tables], {"original": 20}

    def axes(u: AxesUse):
        u.same(u.ins[1][0], u.ins[2][0])
        return [u.ins[1]]

    def onnx(u: OnnxUse):
        last = u("ReduceMax", u.names[0], keepdims=0)
        return u("Where", u("GreaterOrEqual", last, u.ints_scalar(u.attrs["original"])), u.names[2], u.names[1])


ROPE_STYLES = ("half", "interleaved")


def _rope_node(u: OnnxUse) -> str:
    rotated, width = 2 * int(u.ins[1].shape[-1]), int(u.ins[0].shape[-1])
    part = {"rotary_embedding_dim": rotated} if rotated < width else {}
    return u("RotaryEmbedding", *u.names, interleaved=int(u.attrs["style"] == "interleaved"), **part)


@op("rope")
class Rope(Row):
    """(a, b) -> (a·cos - b·sin, b·cos + a·sin) for pairs of entries of x [B, H, T, D]: rotary position embedding.

    cos and sin are [B, T, d/2] with d ≤ D; entries after d are copied. Pair i is (x[i], x[i + d/2]) in style `half` and
    (x[2i], x[2i + 1]) in style `interleaved`. The gradient is the rotation by the negative angle (Su et al. 2021,
    eq. 34).
    """

    arity, attrs, saves = 3, {"style": Attr(Literal[ROPE_STYLES], "half")}, Saves(inputs=(1, 2))
    traits = Traits(amp="f32", scales_rows=True)
    vm, onnx_23 = row_forms.ROPE, WholeNode(all_float32, _rope_node)
    vjp = lambda g, ins, outs, attrs, needs: (call("rope", g, ins[1], -ins[2], **attrs), None, None)
    cost = lambda ins, outs, attrs: Cost(3 * outs[0].size, sum(i.nbytes for i in ins), outs[0].nbytes)
    emit = lambda i, a: f"{('rope' if a['style'] == 'half' else 'rope_pairs')}({', '.join(i)})"

    def infer(x, cos, sin, style):
        one_dtype(x, cos, sin)
        if len(x.shape) != 4 or 2 * cos.shape[-1] > x.shape[-1] or cos.shape != sin.shape:
            expected = "x [B, H, T, D], cos and sin [B, T, d/2] with d <= D"
            raise ShapeError("invalid operands of rope", expected=expected, got=f"{x}, {cos}, {sin}")
        if len(cos.shape) != 3 or cos.shape[1] != x.shape[2] or cos.shape[0] not in (1, x.shape[0]):
            want = f"[{x.shape[0]} or 1, {x.shape[2]}, d/2]"
            raise ShapeError("cos and sin do not match the batch size and length of x", expected=want, got=cos)
        return x

    def expand(ins, attrs):
        x, half = ins[0], ins[1].shape[-1]
        cos, sin = (call("unsqueeze", t, axes=(1,)) for t in ins[1:])
        rest = call("slice", x, axis=-1, start=2 * half, size=x.shape[-1] - 2 * half)
        if attrs["style"] == "half":
            a, b = (call("slice", x, axis=-1, start=start, size=half) for start in (0, half))
            return call("concat", a * cos - b * sin, b * cos + a * sin, rest, axis=-1)
        a, b = (call("slice", x, axis=-1, start=start, size=half, step=2) for start in (0, 1))
        rotated = (call("unsqueeze", t, axes=(-1,)) for t in (a * cos - b * sin, b * cos + a * sin))
        return call("concat", call("flatten", call("concat", *rotated, axis=-1), start=-2, end=-1), rest, axis=-1)

    def sample(rng):
        angle, style = rng.uniform(-3, 3, (2, 4, 2)), ROPE_STYLES[rng.integers(2)]
        return [rng.normal(size=(2, 3, 4, 5)), np.cos(angle), np.sin(angle)], {"style": style}

    def axes(u: AxesUse):
        x, *tables = u.ins
        half = tables[0][2]
        u.same(x[3], chain(half, half))
        u.kind(x[3], "head_dim")
        for table in tables:
            u.same(table[2], half)
            for axis, table_axis in ((0, 0), (2, 1)):
                if size(x[axis]) == size(table[table_axis]):
                    u.same(x[axis], table[table_axis])
        return [x]

    def onnx(u: OnnxUse):
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


def _check(q: Spec, k: Spec, v: Spec, extra: tuple[Spec, ...], optional: tuple[str, ...]) -> None:
    one_dtype(q, k, v)
    if any(len(t.shape) != 4 for t in (q, k, v)):
        expected = "q [B, H, Tq, D], k [B, G, Tk, D], v [B, G, Tk, Dv]"
        raise ShapeError("invalid operands of attention", expected=expected, got=f"{q}, {k}, {v}")
    equal_dim(q.shape[0], k.shape[0], "batch of k")
    equal_dim(q.shape[3], k.shape[3], "head_dim of k")
    for axis, name in ((0, "batch"), (1, "kv heads"), (2, "length")):
        equal_dim(k.shape[axis], v.shape[axis], f"{name} of v")
    heads, groups = q.shape[1], k.shape[1]
    if heads != groups and (isinstance(heads, str) or isinstance(groups, str) or groups == 0 or heads % groups):
        expected = f"a multiple of the number of key heads, {groups}"
        raise ShapeError("cannot divide the query heads evenly among the key heads", expected=expected, got=heads)
    if len(extra) != len(optional):
        expected = f"one operand for each of {optional}"
        raise ShapeError("wrong number of operands after v for `optional`", expected=expected, got=extra)
    for name, spec in zip(optional, extra, strict=True):
        if name == "bias":
            _check_bias(spec, (*q.shape[:3], k.shape[2]))
            continue
        if name == "sinks":
            _check_sinks(spec, q.shape[1])
            continue
        want = {"key_mask": Spec((k.shape[0], k.shape[2]), bool_), "q_start": Spec((), int64)}[name]
        if spec != want:
            raise ShapeError(f"{name} has the wrong shape or dtype", expected=want, got=spec)


def _check_bias(bias: Spec, scores: tuple[Dim, ...]) -> None:
    fits = len(bias.shape) == 4 and all(n in (1, full) for n, full in zip(bias.shape, scores, strict=True))
    if not fits or not (bias.dtype is bool_ or bias.dtype.is_float):
        expected = f"floating or bool, {list(scores)} or 1 in place of any of these sizes"
        raise ShapeError("bias has the wrong shape or dtype", expected=expected, got=bias)


def _check_sinks(sinks: Spec, heads: Dim) -> None:
    if sinks.shape != (heads,) or not sinks.dtype.is_float:
        raise ShapeError("sinks have the wrong shape or dtype", expected=f"floating [{heads}]", got=sinks)


def _flops(q: Spec, k: Spec, v: Spec) -> int:
    return 2 * prod(q.sizes[:3]) * k.sizes[2] * (q.sizes[3] + v.sizes[3])


_WINDOW = Attr(AtLeastOne | None, None)
_ATTRS = {
    "scale": Attr(Number),
    "causal": Attr(bool, True),
    "window": _WINDOW,
    "optional": Attr(tuple[Literal["key_mask", "q_start", "bias", "sinks"], ...], ()),
    "softcap": Attr(Positive | None, None, added=True),
}


def _attention_node(u: OnnxUse) -> str:
    a, (q, k) = u.attrs, u.ins[:2]
    plain = a["window"] is None and not a["optional"] and q.shape[2] == k.shape[2]
    if plain or not a["causal"]:
        return u("Attention", *u.names[:3], is_causal=int(a["causal"]), scale=a["scale"])
    return u("Attention", *u.names[:3], _onnx_mask(u), scale=a["scale"])


def _onnx_mask(u: OnnxUse) -> str:
    """Add nodes that compute the mask of visible keys, bool [Tq, Tk], and return its name.

    ONNX's `is_causal` aligns the first query with the first key instead of the last query with the last key.
    """
    sizes = [u("Squeeze", u("Shape", name, start=2, end=3), u.ints(0)) for name in u.names[:2]]
    rows, keys = (u("Range", u.ints_scalar(0), size, u.ints_scalar(1)) for size in sizes)
    start = u.names[3] if u.attrs["optional"] else u("Sub", sizes[1], sizes[0])
    queries = u("Unsqueeze", u("Add", rows, start), u.ints(1))
    seen = u("LessOrEqual", keys, queries)
    if u.attrs["window"] is None:
        return seen
    return u("And", seen, u("Less", u("Sub", queries, u.ints_scalar(u.attrs["window"])), keys))


def _without_padding(ins: Sequence[Spec], attrs: Attrs) -> bool:
    # a query that sees no key gives 0 here and NaN there; only padding and biases make such queries
    masked = {"key_mask", "bias", "sinks"} & set(attrs["optional"])  # the node has no sinks
    return all_float32(ins[:3], attrs) and not masked and attrs["softcap"] is None


def _attention_arguments(
    ins: Sequence[Spec], scale: float, causal: bool, window: int | None, optional: Sequence[str], softcap: float | None
) -> tuple | None:
    """Return (query heads per key head, scale, window, softcap), the last two if they are set; None with masks.

    With sinks all four are there, as with a softcap: torch's attention has neither.
    """
    if set(optional) - {"sinks"} or not causal:  # masks and starts are known at run time, and caches hold the past only
        return None
    groups = int(ins[0].shape[1]) // int(ins[1].shape[1])
    if softcap is not None or optional:
        return groups, scale, window, softcap
    return (groups, scale) if window is None else (groups, scale, window)


@op("sdpa")
class Sdpa(Row):
    """softmax(scale · q kᵀ over visible keys) v: q [B, H, Tq, D], k [B, G, Tk, D], v [B, G, Tk, Dv] -> [B, H, Tq, Dv].

    Query head h reads key head h // (H / G). Operands after v are named by `optional`: `key_mask` [B, Tk] bool (false =
    padding), `q_start` int64 (the index of the first query among the keys; Tk - Tq without it), `bias` [B, H, Tq, Tk]
    or 1 for any of these sizes: floating, added to the scores, -inf hides a key, or bool, false hides a key. If
    `causal`, query i sees key j iff j ≤ q_start + i, with a window w also j > q_start + i - w: w keys, the query's own
    included. A query that sees no key gives 0. With a softcap c, scores s become c·tanh(s / c) before a bias is added,
    in the dtype of q. `sinks` [H], floating, has a score of each head that takes part in the softmax as that of a key
    with the value 0 (Xiao et al. 2023, gpt-oss).
    """

    arity, attrs, saves = (3, 7), _ATTRS, Saves(inputs=(0, 1, 2, 3, 4, 5, 6), outputs=(0,))
    traits = Traits(attention=True, contiguous=(0,), amp="low", fixed=(3, 4, 5, 6))
    torch_module = TorchModule("Attention", lambda ins, a: _attention_arguments(ins, **a), run=True)
    emit = lambda i, a: f"sdpa({', '.join([*i[:3], *_attention_options(i[3:], a)])})"
    vm, onnx_23 = attention_forms.SDPA, WholeNode(_without_padding, _attention_node)
    cost = lambda ins, outs, attrs: Cost(_flops(*ins[:3]), sum(i.nbytes for i in ins), outs[0].nbytes)

    def infer(q, k, v, *extra, scale, causal, window, optional, softcap):
        _check(q, k, v, extra, optional)
        return Spec((*q.shape[:3], v.shape[3]), q.dtype)

    def vjp(g, ins, outs, attrs, needs):
        grads = call("sdpa_backward", *ins, outs[0], g, **attrs)
        wanted = {name: at for at, name in enumerate(attrs["optional"], 3)
                  if name in ("bias", "sinks") and needs[at] and ins[at].dtype.is_float}  # fmt: skip
        if not wanted:
            return grads
        extra, found = [None] * len(attrs["optional"]), _score_slopes(ins, outs[0], g, attrs)
        for name, at in wanted.items():
            made = _reduced(found.scores, ins[at].shape) if name == "bias" else found.sinks
            extra[at - 3] = as_dtype(made, ins[at].dtype)
        return (*grads, *extra)

    def expand(ins, attrs):
        q, k, v = ins[:3]
        groups, low = k.shape[1], q.dtype
        q = call("unflatten", q, axis=1, sizes=(groups, q.shape[1] // groups))
        k, v = (call("unsqueeze", t, axes=(2,)) for t in (k, v))
        scores = _capped(call("matmul", q, transposed(k)) * attrs["scale"], attrs)
        weights = as_dtype(_probabilities(as_dtype(scores, float32 if low.is_low else low), ins, attrs)[0], low)
        return call("flatten", call("matmul", weights, v), start=1, end=2)

    def sample(rng):
        q, k, v = (rng.normal(size=(2, h, 4, d)) for h, d in ((4, 3), (2, 3), (2, 5)))
        window, softcap = (some if rng.random() < 0.5 else None for some in (3, 0.8))
        return [q, k, v], {"scale": 0.5, "window": window, "softcap": softcap}

    def axes(u: AxesUse):
        q, k, v, *extra = u.ins
        _heads(u)
        u.same(q[0], k[0])
        u.mixed(k[2], "takes a softmax over it")
        for name, dims in zip(u.attrs["optional"], extra, strict=True):
            if name == "key_mask":
                u.same(dims[0], k[0])
                u.same(dims[1], k[2])
            if name == "bias":
                for term, score in zip(dims, (*q[:3], k[2]), strict=True):
                    if size(term) != 1:
                        u.same(term, score)
            if name == "sinks":
                u.same(dims[0], q[1])
        return [(*q[:3], v[3])]


def _attention_options(extra, attrs):
    """Return the keyword arguments of the function `sdpa` of generated code: those that are not its defaults."""
    given = {"scale": attrs["scale"]} | {n: attrs[n] for n in ("causal", "window", "softcap") if attrs[n]}
    operands = dict(zip(attrs["optional"], extra, strict=True))
    return [f"{name}={value!r}" for name, value in given.items()] + [f"{n}={text}" for n, text in operands.items()]


def _capped(scores, attrs):
    """Return the scores after the softcap, if there is one."""
    cap = attrs["softcap"]
    return scores if cap is None else call("tanh", scores / cap) * cap


def _probabilities(scores, ins, attrs):
    """Return the softmax of scores [B, G, H / G, Tq, Tk] of `sdpa`, whose operands are `ins`, and that of the sinks."""
    extra, mask = dict(zip(attrs["optional"], ins[3:], strict=True)), _visible(ins, attrs)
    shared = scores.shape[1:3]
    if "bias" in extra:
        bias = extra["bias"]
        bias = call("unflatten", bias, axis=1, sizes=(1, 1) if bias.shape[1] == 1 else shared)
        seen = bias
        if bias.dtype is not bool_:
            bias = as_dtype(bias, scores.dtype)
            scores, seen = scores + bias, call("gt", bias, call("full_like", bias, value=-inf))
        mask = (call("logical_and", mask[0], seen) if mask else seen,)
    if "sinks" not in extra:
        return call("softmax", scores, *mask), None
    keys = scores.shape[4]
    blank = call("sum", call("full_like", scores, value=0.0), axes=(4,), keepdims=True)
    sinks = blank + call("reshape", as_dtype(extra["sinks"], scores.dtype), shape=(1, *shared, 1, 1))
    if mask:
        seen = mask[0] if mask[0].shape[-1] == keys else call("expand", mask[0], shape=(*mask[0].shape[:-1], keys))
        every = call("full_like", call("any", seen, axes=(-1,), keepdims=True), value=True)
        mask = (call("concat", seen, every, axis=-1),)
    p = call("softmax", call("concat", scores, sinks, axis=-1), *mask)
    return tuple(call("slice", p, axis=-1, start=start, size=n) for start, n in ((0, keys), (keys, 1)))


class _Slopes(NamedTuple):
    """Gradients of the scores after the softcap and of the sinks [H], the probabilities of the keys, these scores.

    All but the sinks are [B, G, H / G, Tq, Tk].
    """

    scores: Any
    sinks: Any
    p: Any
    capped: Any


def _score_slopes(ins, out, g, attrs):
    """Return gradients of the scores from the operands of `sdpa`, its result and the gradient of that.

    They are computed in float32 or wider.
    """
    low = ins[0].dtype
    q, k, v, out, g = (as_dtype(t, float32 if low.is_low else low) for t in (*ins[:3], out, g))
    shared = (k.shape[1], q.shape[1] // k.shape[1])
    q, out, g = (call("unflatten", t, axis=1, sizes=shared) for t in (q, out, g))
    k, v = (call("unsqueeze", t, axes=(2,)) for t in (k, v))
    scores = _capped(call("matmul", q, transposed(k)) * attrs["scale"], attrs)
    p, sunk = _probabilities(scores, ins, attrs)
    inner = call("sum", g * out, axes=(4,), keepdims=True)
    sinks = None if sunk is None else call("flatten", -call("sum", sunk * inner, axes=(0, 3, 4)), start=0, end=1)
    return _Slopes(p * (call("matmul", g, transposed(v)) - inner), sinks, p, scores)


def _reduced(slopes, shape):
    """Sum gradients of scores [B, G, H / G, Tq, Tk] over the axes that a bias [B, H, Tq, Tk] does not have."""
    slopes = call("flatten", slopes, start=1, end=2)
    axes = tuple(axis for axis, n in enumerate(shape) if n == 1 and slopes.shape[axis] != 1)
    return call("sum", slopes, axes=axes, keepdims=True) if axes else slopes


def _visible(ins, attrs):
    """Return (mask,) with the bool mask of the keys that each query sees, or () if each query sees every key.

    The operands are those of `sdpa`; the mask broadcasts to [B, G, H / G, Tq, Tk].
    """
    q, k = ins[:2]
    extra, mask = dict(zip(attrs["optional"], ins[3:], strict=True)), None
    if attrs["causal"]:
        start = extra.get("q_start", call("size", k, axis=2) - call("size", q, axis=2))
        query = call("unsqueeze", call("iota", q, axis=2) + start, axes=(1,))
        key = call("iota", k, axis=2)
        mask = call("le", key, query)
        if attrs["window"] is not None:
            mask = call("logical_and", mask, call("lt", query - attrs["window"], key))
    if "key_mask" in extra:
        seen = call("unsqueeze", extra["key_mask"], axes=(1, 2, 3))
        mask = seen if mask is None else call("logical_and", mask, seen)
    return () if mask is None else (mask,)


@op("sdpa_backward")
class SdpaBackward(Backward):
    """Gradients dq, dk, dv of `sdpa` from its operands, its result and g; the probabilities are recomputed."""

    arity, attrs, traits = (5, 9), _ATTRS, Traits(backward_of="sdpa", contiguous=(0, -2, -1), opaque=True)
    vjp, why = None, {"vjp": "second derivatives are those of its expansion, which replaces it where they are needed"}
    vm, results = attention_forms.SDPA, ("dq", "dk", "dv")

    def infer(q, k, v, *rest, scale, causal, window, optional, softcap):
        *extra, out, grad = rest
        _check(q, k, v, tuple(extra), optional)
        want = Spec((*q.shape[:3], v.shape[3]), q.dtype)
        if out != want or grad != want:
            raise ShapeError("the result or its gradient has the wrong spec", expected=want, got=f"{out}, {grad}")
        return q, k, v

    def expand(ins, attrs):
        low, shared = ins[0].dtype, (ins[1].shape[1], ins[0].shape[1] // ins[1].shape[1])
        ds, _, p, scores = _score_slopes(ins[:-2], ins[-2], ins[-1], attrs)
        ds = ds * attrs["scale"]
        if attrs["softcap"] is not None:
            bent = scores / attrs["softcap"]
            ds = ds * (1.0 - bent * bent)
        q, k, g = (as_dtype(t, p.dtype) for t in (*ins[:2], ins[-1]))
        q, g = (call("unflatten", t, axis=1, sizes=shared) for t in (q, g))
        k = call("unsqueeze", k, axes=(2,))
        dq = call("flatten", call("matmul", ds, k), start=1, end=2)
        dk, dv = (call("sum", call("matmul", transposed(a), b), axes=(2,)) for a, b in ((ds, q), (p, g)))
        return tuple(as_dtype(t, low) for t in (dq, dk, dv))

    def cost(ins, outs, attrs):
        return Cost(5 * _flops(*ins[:3]) // 2, sum(i.nbytes for i in ins), sum(o.nbytes for o in outs))

    def sample(rng):
        (q, k, v), attrs = Sdpa.sample(rng)
        return [q, k, v, rng.normal(size=(2, 4, 4, 5)), rng.normal(size=(2, 4, 4, 5))], attrs


def paged_check(batch: object, table: Spec, lengths: Spec) -> None:
    """Check the table of blocks [B, blocks] and the lengths [B] of a paged cache. Raises: DTypeError, ShapeError."""
    if table.dtype is not int32 or lengths.dtype is not int32 or len(table.shape) != 2:
        expected = "int32 [B, blocks] and int32 [B]"
        raise DTypeError("invalid block table or lengths", expected=expected, got=f"{table}, {lengths}")
    if lengths.shape != table.shape[:1] or table.shape[0] != batch:
        expected = f"{batch} rows, one per sequence"
        raise ShapeError("block table or lengths have a wrong batch size", expected=expected, got=f"{table}, {lengths}")


def _floats(*ins: Spec) -> None:
    if not all(i.dtype.is_float for i in ins):
        raise DTypeError("an operand is not floating", expected="floating dtypes", got=", ".join(map(repr, ins)))


def _draw(rng):
    table = np.array([[3, 1, -1], [0, 4, 2], [-1, -1, -1]], np.int32)
    return table, np.array([rng.integers(0, 3), rng.integers(0, 5), -1], np.int32)


class _KvAppend(Update):
    why = {"emit": "transformers brings its own cache"}
    cost = lambda ins, outs, attrs: Cost(0, ins[1].nbytes, ins[1].nbytes)


@op("kv_append_paged")
class KvAppendPaged(_KvAppend):
    """pool[table[b, p // block], :, p % block] ← rows[b, :, t] with p = lengths[b] + t: write to a paged KV cache.

    `pool` [N, G, block, D] has N blocks; row b of `table` [B, blocks] lists those of sequence b, which has lengths[b]
    entries so far (-1: row b is without a sequence). `rows` [B, G, T, D] are the new entries.
    """

    arity, vm = 4, attention_forms.KV_APPEND_PAGED
    traits = Traits(inplace=((0, 0),), fixed=(2, 3), contiguous=(2, 3))
    sample = lambda rng: ([rng.normal(size=(5, 2, 2, 3)), rng.normal(size=(3, 2, 2, 3)), *_draw(rng)], {})

    def infer(pool, rows, table, lengths):
        _floats(pool, rows)
        if len(pool.shape) != 4 or len(rows.shape) != 4:
            expected = "a pool [N, G, block, D] and entries [B, G, T, D]"
            raise ShapeError("invalid operands of kv_append_paged", expected=expected, got=f"{pool}, {rows}")
        paged_check(rows.shape[0], table, lengths)
        if (pool.shape[1], pool.shape[3]) != (rows.shape[1], rows.shape[3]):
            raise ShapeError("pool and new entries differ in number of heads or head size", expected=pool, got=rows)
        return pool

    def axes(u: AxesUse):
        pool, rows, table, lengths = u.ins
        u.same(pool[1], rows[1])
        u.same(pool[3], rows[3])
        u.same(rows[0], table[0])
        u.same(rows[0], lengths[0])
        for term in (pool[0], pool[2], rows[0], rows[2], table[1]):
            u.frozen(term, "reads entries through a block table")
        return [pool]


@op("sdpa_paged")
class SdpaPaged(Row):
    """softmax(scale·q kᵀ over visible keys) v for q [B, H, T, D] and paged k and v, each a pool [N, G, block, D].

    Position p of sequence b is entry p % block of block table[b, p // block]. Query t of sequence b has position
    lengths[b] + t; its key and value are already in the pools. A query attends to the entries up to its position, with
    a window w to the last w of them. Query head h reads key head h // (H / G). A batch row without a sequence (length
    -1) gives 0. With a softcap c, scores s become c·tanh(s / c). An operand after the lengths, if there is one, is the
    `sinks` [H] of `sdpa`.
    """

    arity, vjp = (5, 6), None
    attrs = {"scale": Attr(Number), "window": _WINDOW, "softcap": Attr(Positive | None, None)}
    why = {
        "vjp": "reads loop-carried state; gradients do not cross steps",
        "onnx": "pages belong to the cache of a running model",
        "emit": "transformers brings its own cache",
    }
    traits, vm = Traits(contiguous=(0, 3, 4), fixed=(3, 4, 5)), attention_forms.SDPA_PAGED

    def infer(q, k, v, table, lengths, *sinks, scale, window, softcap):
        one_dtype(k, v)
        _floats(q, k)
        if any(len(t.shape) != 4 for t in (q, k, v)):
            expected = "q [B, H, T, D] and pools [N, G, block, D]"
            raise ShapeError("invalid operands of paged attention", expected=expected, got=f"{q}, {k}, {v}")
        paged_check(q.shape[0], table, lengths)
        equal_dim(q.shape[3], k.shape[3], "head_dim of k")
        for axis, name in ((0, "blocks"), (1, "kv heads"), (2, "block")):
            equal_dim(k.shape[axis], v.shape[axis], f"{name} of v")
        if q.shape[1] % k.shape[1]:
            what, expected = "cannot divide the query heads evenly among the key heads", f"a multiple of {k.shape[1]}"
            raise ShapeError(what, expected=expected, got=q.shape[1])
        for spec in sinks:
            _check_sinks(spec, q.shape[1])
        return Spec((*q.shape[:3], v.shape[3]), q.dtype)

    def cost(ins, outs, attrs):
        q, k, v, table = ins[:4]
        keys = table.sizes[1] * k.sizes[2]  # at most
        read = q.nbytes + keys * table.sizes[0] * k.sizes[1] * (k.sizes[3] + v.sizes[3]) * k.dtype.itemsize
        return Cost(2 * prod(q.sizes[:3]) * keys * (q.sizes[3] + v.sizes[3]), read, outs[0].nbytes)

    def sample(rng):
        q, (k, v) = rng.normal(size=(3, 4, 2, 3)), (rng.normal(size=(5, 2, 2, d)) for d in (3, 5))
        window, softcap = (some if rng.random() < 0.5 else None for some in (3, 0.8))
        sinks = [rng.normal(size=4)] if rng.random() < 0.5 else []
        return [q, k, v, *_draw(rng), *sinks], {"scale": 0.5, "window": window, "softcap": softcap}

    def axes(u: AxesUse):
        q, k, v, table, lengths, *sinks = u.ins
        _heads(u)
        for dims in sinks:
            u.same(dims[0], q[1])
        u.same(q[0], table[0])
        u.same(q[0], lengths[0])
        for term in (k[0], k[2], table[1]):
            u.frozen(term, "reads entries through a block table")
        return [(*q[:3], v[3])]


@op("kv_append")
class KvAppend(_KvAppend):
    """cache[:, :, start : start + T] ← rows: entries [B, G, T, D] written into a KV cache [B, G, M, D], start int64."""

    arity, traits, vm = 3, Traits(inplace=((0, 0),), fixed=(2,)), attention_forms.KV_APPEND
    sample = lambda rng: ([rng.normal(size=(2, 2, 6, 3)), rng.normal(size=(2, 2, 2, 3)), np.int64(3)], {})

    def infer(cache, rows, start):
        if cache.dtype is not rows.dtype:
            raise DTypeError("cache and new entries have different dtypes", expected=cache.dtype.name, got=rows)
        if start != Spec((), int64):
            raise DTypeError("start is not an int64 scalar", expected="0-d int64", got=start)
        if (*cache.shape[:2], cache.shape[3]) != (*rows.shape[:2], rows.shape[3]):
            raise ShapeError("cache and new entries differ in batch, heads or head size", expected=cache, got=rows)
        return cache

    def axes(u: AxesUse):
        cache, rows, _ = u.ins
        for axis in (0, 1, 3):
            u.same(cache[axis], rows[axis])
        for term in (cache[2], rows[2]):
            u.frozen(term, "writes entries by position")
        return [cache]
