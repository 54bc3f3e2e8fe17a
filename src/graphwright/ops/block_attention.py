"""Block-sparse attention: softmax over the key blocks that a pattern's graph connects to each query block.

The operand `table` has the addresses of the pattern's arrays (`patterns.table`). It is the pattern's own memory, so an
edit changes the next run and no plan; a thread that runs an op holds `pattern.reading()`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, Literal

import numpy as np

from graphwright.array.dtype import float32, float64, int32, int64
from graphwright.array.formulas.block_attention import ALGORITHMS, algorithm_of, named
from graphwright.array.spec import Spec
from graphwright.array.vm.encode import block_attention as forms
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.attention import _heads
from graphwright.ops.attributes import Attr, StaticSize
from graphwright.ops.axes import AxesUse
from graphwright.ops.call import call
from graphwright.ops.emit import TorchModule
from graphwright.ops.registry import Algorithms, Cost, Row, Saves, Traits, op
from graphwright.ops.rules import Backward, equal_dim, floating, one_dtype
from graphwright.patterns import Pattern
from graphwright.patterns import table as words
from graphwright.settings import AtLeastOne, Number, Positive

_ATTRS = {
    "scale": Attr(Number),
    "softcap": Attr(Positive | None, None),
    "where": Attr(Literal["exp", "weight"], "exp"),
    "planes": Attr(AtLeastOne, 1),
    "optional": Attr(tuple[Literal["gates", "q_start", "lse_grad"], ...], ()),
    "algorithm": Attr(Literal["auto", *ALGORITHMS], "auto"),
}
_WHY = {
    "emit": "a pattern is exported as a mask",
    "onnx": "a pattern is exported as a mask",
}


def lse_spec(q: Spec) -> Spec:
    """Return the spec of the logarithms of the sums [N, H, Tq]."""
    return Spec(q.shape[:3], float64 if q.dtype is float64 else float32)


def _check(q: Spec, k: Spec, v: Spec | None, table: Spec, extra: Sequence[Spec], attrs: Mapping[str, Any]) -> None:
    floating(one_dtype(q, k, v))
    if any(len(t.shape) != 4 for t in (q, k, k if v is None else v)):
        expected = "q [N, H, Tq, d], k [N, Hk, Tk, d], v [N, Hk, Tk, dv]"
        raise ShapeError("invalid operands of attention", expected=expected, got=f"{q}, {k}, {v}")
    equal_dim(q.shape[0], k.shape[0], "batch of k")
    equal_dim(q.shape[3], k.shape[3], "head width of k")
    if v is not None:
        for axis, name in ((0, "batch"), (1, "kv heads"), (2, "length")):
            equal_dim(k.shape[axis], v.shape[axis], f"{name} of v")
    heads, groups, planes = q.shape[1], k.shape[1], attrs["planes"]
    if heads != groups and (isinstance(heads, str) or isinstance(groups, str) or groups == 0 or heads % groups):
        expected = f"a multiple of the number of key heads, {groups}"
        raise ShapeError("cannot divide the query heads evenly among the key heads", expected=expected, got=heads)
    if planes not in (1, heads, groups):
        expected = f"1, {groups} (one per key head) or {heads} (one per query head)"
        raise ShapeError("the number of planes does not fit the heads", expected=expected, got=planes)
    if table != Spec((words.WORDS,), int64):
        raise DTypeError("not the table of a pattern", expected=f"int64 [{words.WORDS}]", got=table)
    if len(extra) != len(attrs["optional"]):
        expected = f"one operand for each of {attrs['optional']}"
        raise ShapeError("wrong number of operands for `optional`", expected=expected, got=extra)
    for name, spec in named(extra, attrs).items():
        want = {"q_start": Spec((), int64), "lse_grad": lse_spec(q)}.get(name)
        if want is not None and spec != want:
            raise ShapeError(f"{name} has the wrong shape or dtype", expected=want, got=spec)
        if want is None and (len(spec.shape) != 1 or not spec.dtype.is_float):
            raise ShapeError("the gates are not a vector of numbers", expected="floating [G]", got=spec)


def _check_lse(q: Spec, lse: Spec) -> None:
    if floating(lse).shape != q.shape[:3]:
        raise ShapeError("the log-sum-exp has the wrong shape", expected=lse_spec(q), got=lse)


def _group(q: Spec, k: Spec) -> int:
    """Return the number of query heads per key head."""
    return int(q.shape[1]) // int(k.shape[1])


def _module_args(ins: Sequence[Spec], attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of the module of generated code that computes the attention."""
    args = _group(*ins[:2]), attrs["scale"]
    return args if attrs["softcap"] is None else (*args, attrs["softcap"])


def _flops(q: Spec, k: Spec, width: int) -> int:
    """Return the operations of one product over all pairs: the edges are data, so this is the most it can be."""
    return 2 * prod(q.sizes[:3]) * k.sizes[2] * width


def _axes(u: AxesUse, table: int) -> None:
    """State what the axes of q and k have in common; the table is operand `table`, optional operands begin at 4."""
    q, k = u.ins[:2]
    u.same(q[0], k[0])
    for term, what in ((q[2], "blocks of queries"), (k[2], "blocks of keys")):
        u.frozen(term, f"the pattern has {what}")
    for operand in (u.ins[table], *u.ins[4:]):
        for term in operand:
            u.frozen(term, "it is read by index")
    if u.attrs["planes"] > 1:
        for term in (q[1], k[1]):
            u.frozen(term, "the pattern has a plane for each head")


_ALGORITHMS = Algorithms("attention", ALGORITHMS, lambda ins, attrs: algorithm_of(ins[0], attrs), expands=())


@op("block_sdpa")
class BlockSdpa(Row):
    """Attention over the pairs of a pattern: (Σ_j a_ij v_j [N, H, Tq, dv], log-sum-exp [N, H, Tq]).

    a = softmax(scale·q kᵀ) for q [N, H, Tq, d], k [N, Hk, Tk, d], v [N, Hk, Tk, dv]; query head h reads key head
    h // (H / Hk). `table` is that of the pattern, int64. With a softcap c, scores s become c·tanh(s / c). `planes` is
    1, Hk or H: which plane of the pattern a head has. A query without keys gives 0 and -inf. Operands after the table
    are named by `optional`: `gates` [G], the gates of edges, which multiply the exponentials (`where` = "exp": a = g eˢ
    / Σ g eˢ, gates >= 0) or the normalised weights ("weight"); `q_start` int64, the position of the first query among
    the keys (without it the pattern's).
    """

    arity, attrs, algorithms = (4, 6), _ATTRS, _ALGORITHMS
    saves, results = Saves(inputs=(0, 1, 2, 3, 4, 5), outputs=(0, 1)), ("out", "lse")
    traits = Traits(attention=True, table=3, amp="low", fixed=(3, 4, 5), contiguous=(3,))
    torch_module = TorchModule("PatternAttention", _module_args, run=True)
    why, vm = {"onnx": _WHY["onnx"]}, forms.BLOCK_SDPA

    def infer(q, k, v, table, *extra, **attrs):
        _check(q, k, v, table, extra, attrs)
        return Spec((*q.shape[:3], v.shape[3]), q.dtype), lse_spec(q)

    def vjp(g, ins, outs, attrs, needs):
        slope, extra = g, {}
        if isinstance(g, tuple):
            slope = call("full_like", outs[0], value=0.0) if g[0] is None else g[0]
            extra = {} if g[1] is None else {"lse_grad": g[1]}
        optional = (*attrs["optional"], *extra)
        given = {**attrs, "optional": optional}
        grads = call("block_sdpa_backward", *ins, *extra.values(), *outs, slope, **given)
        found: dict[int, Any] = dict(enumerate(grads[:3]))
        if "gates" in optional:
            found[4 + optional.index("gates")] = grads[3]
        return tuple(found.get(i) for i in range(len(ins)))

    def cost(ins, outs, attrs):
        q, k, v = ins[:3]
        return Cost(_flops(q, k, q.sizes[3] + v.sizes[3]), sum(i.nbytes for i in ins), sum(o.nbytes for o in outs))

    def sample(rng):
        q, k, v, *extra, attrs = _drawn(rng)
        return [q, k, v, *extra], attrs

    def axes(u: AxesUse):
        q, _, v = u.ins[:3]
        _heads(u)
        _axes(u, 3)
        return [(*q[:3], v[3]), q[:3]]


@op("block_sdpa_backward")
class BlockSdpaBackward(Backward):
    """Gradients dq, dk, dv and, with gates, dgates of `block_sdpa`.

    Operands: those of `block_sdpa`, with `lse_grad` [N, H, Tq] among the optional ones if the log-sum-exp has a
    gradient; then its results out and lse, and the gradient of out.
    """

    arity, attrs, algorithms = (7, 10), _ATTRS, _ALGORITHMS
    traits = Traits(backward_of="block_sdpa", table=3, fixed=(3, -2), contiguous=(3, -3, -2, -1), opaque=True)
    vjp, why = None, {"vjp": "second derivatives through a pattern are not supported"}
    results, vm = ("dq", "dk", "dv", "dgates"), forms.BLOCK_SDPA_BACKWARD

    def infer(q, k, v, table, *rest, **attrs):
        *extra, out, lse, g = rest
        _check(q, k, v, table, extra, attrs)
        want = Spec((*q.shape[:3], v.shape[3]), q.dtype)
        _check_lse(q, lse)
        if out != want or g != want:
            raise ShapeError("the result or its gradient has the wrong spec", expected=want, got=f"{out}, {g}")
        gates = named(extra, attrs).get("gates")
        return (q, k, v) if gates is None else (q, k, v, gates)

    def cost(ins, outs, attrs):
        q, k, v = ins[:3]
        flops = _flops(q, k, 3 * q.sizes[3] + 2 * v.sizes[3])
        return Cost(flops, sum(i.nbytes for i in ins), sum(o.nbytes for o in outs))

    def sample(rng):
        q, k, v, *extra, attrs = _drawn(rng, gates=True)
        results = _dense(q, k, v, attrs)[:2]
        return [q, k, v, *extra, *results, rng.normal(size=(2, 4, 5, 2))], attrs


class _Measure(Row):
    """An op that measures a pattern; without a gradient."""

    vjp, why = None, {**_WHY, "vjp": "it decides about edges", "axes": "it is not part of a model"}


@op("block_mass")
class BlockMass(_Measure):
    """Attention mass of each edge slot [edges], float32: operands q, k, table and lse of `block_sdpa`, gates, q_start.

    The mass of a query on an edge is the sum of its softmax weights over the edge's keys. `reduce` = "sum": the mean
    over batch, heads of the plane and queries that see a key, so that the edges of a row add up to 1; "max": the
    largest. A free slot has 0. `edges` is at least the pattern's number of slots.
    """

    arity, vm = (4, 6), forms.BLOCK_MASS
    attrs = {**_ATTRS, "edges": Attr(StaticSize), "reduce": Attr(Literal["sum", "max"], "sum")}
    traits = Traits(table=2, fixed=(2, 3, 4, 5), contiguous=(2, 3))

    def infer(q, k, table, lse, *extra, edges, reduce, **attrs):
        _check(q, k, None, table, extra, attrs)
        _check_lse(q, lse)
        return Spec((edges,), float32)

    def cost(ins, outs, attrs):
        return Cost(_flops(ins[0], ins[1], ins[0].sizes[3]), sum(i.nbytes for i in ins), outs[0].nbytes)

    def sample(rng):
        q, k, v, table, *extra, attrs = _drawn(rng)
        _, lse, _ = _dense(q, k, v, attrs)
        reduce = "sum" if rng.random() < 0.5 else "max"
        edges = int(table[words.EDGE_SLOTS])
        return [q, k, table, lse, *extra], {**attrs, "edges": edges, "reduce": reduce}


@op("block_gate_gradient")
class BlockGateGradient(_Measure):
    """Gradients [n] of the gates of absent edges at 0: Σ e^(s - lse) (g·v - Σ g·out) over the pairs of each edge.

    Operands: q, k, v, the results out and lse of `block_sdpa`, the gradient of out, `pairs` int32 [n, 3] (plane, query
    block, key block), the table. An edge would have the pairs that the pattern's rule allows; batch elements and the
    heads of the plane are summed. The exponent is at most 60.
    """

    arity, attrs, vm = (8, 9), _ATTRS, forms.BLOCK_GATE_GRADIENT
    traits = Traits(table=7, fixed=(4, 6, 7, 8), contiguous=(3, 4, 5, 6, 7))

    def infer(q, k, v, out, lse, g, pairs, table, *extra, **attrs):
        _check(q, k, v, table, extra, attrs)
        _check_lse(q, lse)
        want = Spec((*q.shape[:3], v.shape[3]), q.dtype)
        if out != want or g != want:
            raise ShapeError("the result or its gradient has the wrong spec", expected=want, got=f"{out}, {g}")
        if pairs.dtype is not int32 or len(pairs.shape) != 2 or pairs.shape[1] != 3:
            raise DTypeError("not pairs of blocks", expected="int32 [n, 3]: plane, query, key", got=pairs)
        return Spec(pairs.shape[:1], lse.dtype)

    def cost(ins, outs, attrs):
        q, k, v, *_ = ins
        return Cost(_flops(q, k, q.sizes[3] + v.sizes[3]), sum(i.nbytes for i in ins), outs[0].nbytes)

    def sample(rng):
        q, k, v, table, *_, attrs = _drawn(rng, gates=False)
        found = _dense(q, k, v, attrs)[:2]
        pairs = np.stack([rng.integers(0, n, 6) for n in (attrs["planes"], 3, 3)], axis=1).astype(np.int32)
        return [q, k, v, *found, rng.normal(size=found[0].shape), pairs, table], attrs


@op("block_entropy")
class BlockEntropy(Row):
    """Entropy H = -Σ a ln a of each query's weights a = g e^(s - lse) [N, H, Tq].

    Operands: q, k and table of `block_sdpa`, its result lse, gates, q_start. A query that sees nothing has 0. lse is an
    operand like the others: only with the gradient that it passes on to `block_sdpa` is that of q and k the whole one.
    """

    arity, attrs, vm = (4, 6), _ATTRS, forms.BLOCK_ENTROPY
    saves = Saves(inputs=(0, 1, 2, 3, 4, 5), outputs=(0,))
    traits = Traits(table=2, fixed=(2, 3, 4, 5), contiguous=(2, 3))
    why = _WHY

    def infer(q, k, table, lse, *extra, **attrs):
        _check(q, k, None, table, extra, attrs)
        _check_lse(q, lse)
        return lse

    def vjp(g, ins, outs, attrs, needs):
        grads = call("block_entropy_backward", *ins, outs[0], g, **attrs)
        found = {0: grads[0], 1: grads[1], 3: grads[2]}
        if "gates" in attrs["optional"]:
            found[4 + attrs["optional"].index("gates")] = grads[3]
        return tuple(found.get(i) for i in range(len(ins)))

    def cost(ins, outs, attrs):
        return Cost(_flops(ins[0], ins[1], ins[0].sizes[3]), sum(i.nbytes for i in ins), outs[0].nbytes)

    def sample(rng):
        q, k, v, table, *extra, attrs = _drawn(rng)
        _, lse, _ = _dense(q, k, v, attrs)
        return [q, k, table, lse, *extra], attrs

    def axes(u: AxesUse):
        q, k = u.ins[:2]
        for term in (*q[1:], *k[1:]):
            u.frozen(term, "takes the entropy over keys")
        for axis in range(3):
            u.same(u.ins[3][axis], q[axis])
        _axes(u, 2)
        return [q[:3]]


@op("block_entropy_backward")
class BlockEntropyBackward(Backward):
    """Gradients dq, dk, dlse and, with gates, dgates of `block_entropy`: -g·a (ln a + 1) for each score.

    Operands: those of `block_entropy`, its result H and the gradient g of it. The gradient of a gate of 0 is 0.
    """

    arity, attrs, results = (6, 8), _ATTRS, ("dq", "dk", "dlse", "dgates")
    vm = forms.BLOCK_ENTROPY_BACKWARD
    traits = Traits(backward_of="block_entropy", table=2, fixed=(2, 3), contiguous=(2, 3, -2, -1), opaque=True)
    vjp, why = None, {"vjp": "second derivatives through a pattern are not supported"}

    def infer(q, k, table, lse, *rest, **attrs):
        *extra, entropy, g = rest
        _check(q, k, None, table, extra, attrs)
        _check_lse(q, lse)
        if entropy != lse or g != lse:
            raise ShapeError("the entropy or its gradient has the wrong spec", expected=lse, got=f"{entropy}, {g}")
        gates = named(extra, attrs).get("gates")
        return (q, k, lse) if gates is None else (q, k, lse, gates)

    def cost(ins, outs, attrs):
        return Cost(
            _flops(ins[0], ins[1], 3 * ins[0].sizes[3]), sum(i.nbytes for i in ins), sum(o.nbytes for o in outs)
        )

    def sample(rng):
        q, k, v, table, *extra, attrs = _drawn(rng, gates=True)
        _, lse, entropy = _dense(q, k, v, attrs)
        return [q, k, table, lse, *extra, entropy, rng.normal(size=lse.shape)], attrs


def _dense(q: Any, k: Any, v: Any, attrs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return out, log-sum-exp and entropy of drawn operands, as if all gates were 1."""
    k, v = (np.repeat(t, q.shape[1] // t.shape[1], 1) for t in (k, v))
    s, cap, planes = attrs["scale"] * q @ k.swapaxes(2, 3), attrs["softcap"], attrs["planes"]
    s = s if cap is None else cap * np.tanh(s / cap)
    mask = np.repeat(SAMPLED[planes].to_dense(), q.shape[1] // planes, 0)
    lse = np.logaddexp.reduce(np.where(mask, s, -np.inf), -1)
    a = np.where(mask, np.exp(s - lse[..., None]), 0.0)
    return a @ v, lse, -(a * np.log(np.where(a > 0, a, 1.0))).sum(-1)


def _drawn(rng: np.random.Generator, gates: bool | None = None) -> list[Any]:
    """Draw q, k and v of 5 queries and 5 keys, the table of a pattern of blocks of 2, optional operands; attributes."""
    planes = (1, 2, 4)[rng.integers(3)]
    q, k, v = (rng.normal(size=(2, h, 5, d)) for h, d in ((4, 3), (2, 3), (2, 2)))
    attrs: dict[str, Any] = {"scale": 0.6, "planes": planes, "softcap": 1.5 if rng.random() < 0.3 else None}
    extra: dict[str, Any] = {"q_start": np.int64(0)} if gates is not False and rng.random() < 0.5 else {}
    if gates if gates is not None else rng.random() < 0.5:
        attrs["where"] = "exp" if rng.random() < 0.5 else "weight"
        extra["gates"] = rng.uniform(0.5, 1.5, 3)
    attrs["optional"] = tuple(extra)
    return [q, k, v, _sampled(planes).copy(), *extra.values(), attrs]


@cache
def _sampled(planes: int) -> np.ndarray:
    """Return the table of a causal pattern of 3 x 3 blocks, some of which are not connected; three gates."""
    pattern = SAMPLED[planes] = Pattern(tokens=(5, 5), block=2, planes=planes)
    edges = [pattern.connect(i, j, p) for p in range(planes) for i, j in _CONNECTED if (i, j) != (1, 1) or p % 2 == 0]
    with pattern.edit("gates") as edit:
        edit.set(edges, gate=np.arange(len(edges)) % 4 - 1)
    return pattern.table


_CONNECTED = ((0, 0), (1, 0), (1, 1), (2, 0), (2, 2))
SAMPLED: dict[int, Pattern] = {}
"""Number of planes -> the pattern of samples, which owns the memory that its table refers to."""
