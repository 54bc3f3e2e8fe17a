"""Block-sparse attention: softmax over the key blocks that a pattern's graph connects to each query block.

The operand `table` has the addresses of the pattern's arrays (`patterns.table`). It is the pattern's own memory, so an
edit changes the next run and no plan; whoever runs an op holds `pattern.reading()`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, Literal

import numpy as np

from graphwright.array.dtype import float32, float64, int64
from graphwright.array.formulas.block_attention import ALGORITHMS, algorithm_of, named
from graphwright.array.spec import Spec
from graphwright.errors import DTypeError, ShapeError
from graphwright.ops.attention import _heads
from graphwright.ops.attributes import Attr
from graphwright.ops.axes import AxesUse
from graphwright.ops.call import call
from graphwright.ops.registry import Algorithms, Cost, Row, Saves, Traits, op
from graphwright.ops.rules import Backward, equal_dim, floating, one_dtype
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
    if any(len(t.shape) != 4 for t in (q, k, v or k)):
        expected = "q [N, H, Tq, d], k [N, Hk, Tk, d], v [N, Hk, Tk, dv]"
        raise ShapeError("invalid operands of attention", expected=expected, got=f"{q}, {k}, {v}")
    equal_dim(q.shape[0], k.shape[0], "batch of k")
    equal_dim(q.shape[3], k.shape[3], "head width of k")
    for axis, name in ((0, "batch"), (1, "kv heads"), (2, "length")) if v is not None else ():
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


def _flops(q: Spec, k: Spec, width: int) -> int:
    """Return the operations of one product over all pairs: the edges are data, so this is the most it can be."""
    return 2 * prod(q.sizes[:3]) * k.sizes[2] * width


def _axes(u: AxesUse, q: Any, k: Any) -> None:
    _heads(u)
    u.same(q[0], k[0])
    for term, what in ((q[2], "blocks of queries"), (k[2], "blocks of keys")):
        u.frozen(term, f"the pattern has {what}")
    if u.attrs["planes"] > 1:
        for term in (q[1], k[1]):
            u.frozen(term, "the pattern has a plane for each head")


_ALGORITHMS = Algorithms("attention", ALGORITHMS, lambda ins, attrs: algorithm_of(ins[0], attrs), expands=())


@op("block_sdpa")
class BlockSdpa(Row):
    """Attention over the pairs of a pattern: (Σ_j a_ij v_j [N, H, Tq, dv], log-sum-exp [N, H, Tq]), a = softmax(scale·qk).

    q [N, H, Tq, d], k [N, Hk, Tk, d], v [N, Hk, Tk, dv], `table` int64 of the pattern; query head h reads key head
    h // (H / Hk). With a softcap c, scores s become c·tanh(s / c). `planes` is 1, Hk or H: which plane of the pattern a
    head has. A query without keys gives 0 and -inf. Operands after the table are named by `optional`: `gates` [G], the
    gates of edges, which multiply the exponentials (`where` = "exp": a = g eˢ / Σ g eˢ, gates >= 0) or the normalised
    weights ("weight"); `q_start` int64, the position of the first query among the keys (without it the pattern's).
    """

    arity, attrs, algorithms = (4, 6), _ATTRS, _ALGORITHMS
    saves, results = Saves(inputs=(0, 1, 2, 3, 4, 5), outputs=(0, 1)), ("out", "lse")
    traits, why = Traits(attention=True, table=3, amp="low", fixed=(3, 4, 5), contiguous=(3,)), _WHY

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
        found = dict(zip((0, 1, 2), grads, strict=False))
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
        q, k, v = u.ins[:3]
        _axes(u, q, k)
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
    results = ("dq", "dk", "dv", "dgates")

    def infer(q, k, v, table, *rest, **attrs):
        *extra, out, lse, g = rest
        _check(q, k, v, table, extra, attrs)
        want = Spec((*q.shape[:3], v.shape[3]), q.dtype)
        if out != want or g != want or lse != lse_spec(q):
            got = f"{out}, {lse}, {g}"
            raise ShapeError(
                "the results or the gradient have the wrong spec", expected=f"{want}, {lse_spec(q)}", got=got
            )
        gates = named(extra, attrs).get("gates")
        return (q, k, v) if gates is None else (q, k, v, gates)

    def cost(ins, outs, attrs):
        q, k, v = ins[:3]
        flops = _flops(q, k, 3 * q.sizes[3] + 2 * v.sizes[3])
        return Cost(flops, sum(i.nbytes for i in ins), sum(o.nbytes for o in outs))

    def sample(rng):
        q, k, v, *extra, attrs = _drawn(rng, gates=True)
        out = call("block_sdpa", *(_array(t) for t in (q, k, v, *extra)), **attrs)
        results = (np.asarray(t) for t in out)
        return [q, k, v, *extra, *results, rng.normal(size=(2, 4, 5, 2))], attrs


def _array(x: Any) -> Any:
    from graphwright.array import from_numpy

    return from_numpy(np.asarray(x))


def _drawn(rng: np.random.Generator, gates: bool | None = None) -> list[Any]:
    """Draw q, k and v of 5 queries and 5 keys, the table of a pattern of blocks of 2, optional operands; attributes."""
    planes = (1, 2, 4)[rng.integers(3)]
    q, k, v = (rng.normal(size=(2, h, 5, d)) for h, d in ((4, 3), (2, 3), (2, 2)))
    attrs: dict[str, Any] = {"scale": 0.6, "planes": planes, "softcap": 1.5 if rng.random() < 0.3 else None}
    extra = []
    if gates if gates is not None else rng.random() < 0.5:
        attrs["optional"], attrs["where"] = ("gates",), "exp" if rng.random() < 0.5 else "weight"
        extra.append(rng.uniform(0.5, 1.5, 3))
    return [q, k, v, _sampled(planes).copy(), *extra, attrs]


@cache
def _sampled(planes: int) -> np.ndarray:
    """Return the table of a causal pattern whose pair of blocks (1, 0) is not connected in odd planes."""
    from graphwright.patterns import Pattern

    pattern = _PATTERNS[planes] = Pattern(tokens=(5, 5), block=2, planes=planes)
    for plane in range(planes):
        for query in range(3):
            for key in range(query + 1):
                if (query, key) != (1, 0) or plane % 2 == 0:
                    pattern.connect(query, key, plane=plane)
    return pattern.table


_PATTERNS: dict[int, Any] = {}
"""Patterns of samples, which own the memory that their tables refer to."""
