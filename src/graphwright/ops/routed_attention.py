"""Attention of heads that each token may or may not use: a head sees its own tokens only, as queries and as keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import log, sqrt
from typing import Any, Literal, NamedTuple

import numpy as np

from graphwright.array.dtype import float32, float64, int64
from graphwright.array.formulas.experts import (
    CACHED_WIDTH,
    ENTRY_WIDTH,
    FIRST_CACHED,
    FIRST_ENTRY,
    FIRST_HEAD,
    HEAD_WIDTH,
    Choice,
)
from graphwright.array.spec import Dim, Spec
from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.ops.attention import paged_check
from graphwright.ops.attributes import Attr, StaticSize
from graphwright.ops.axes import Atom, AxesUse, chain
from graphwright.ops.call import as_dtype, call
from graphwright.ops.emit import TorchModule, literal
from graphwright.ops.experts import at_pairs, token_weights
from graphwright.ops.registry import Algorithms, Cost, Row, Saves, Traits, op
from graphwright.ops.rules import Backward, equal_dim, floating, one_dtype
from graphwright.settings import NotNegative, Positive

_THETA = {"theta": Attr(Positive | None, None)}
_ATTRS = {**_THETA, "expected": Attr(NotNegative, 0.0), "algorithm": Attr(Literal["auto", "sorted", "dense"], "auto")}
SHORT = 128
"""Length up to which `dense` is as fast, if all heads are used; see `benchmarks expert_steps:heads`."""


def _chosen(ins: Sequence[Spec], heads: int, attrs: Mapping[str, Any]) -> Choice:
    """Return the algorithm for operands x, offsets, ... of so many heads."""
    if attrs["algorithm"] != "auto":
        return Choice(attrs["algorithm"], "as asked for")
    if not attrs["expected"]:
        return Choice("sorted", "the number of heads that a token uses is not known")
    share, length = attrs["expected"] / heads, ins[0].shape[1]
    dense = share >= 1 and isinstance(length, int) and length <= SHORT
    return Choice("dense" if dense else "sorted", f"a token uses {share:.0%} of the heads, of {length} tokens")


def _algorithms(first: int) -> Algorithms:
    """Return the algorithms of an op whose operand x is at `first`."""
    choose = lambda ins, attrs: _chosen(ins[first:], (len(ins) - first - FIRST_HEAD) // HEAD_WIDTH, attrs)
    return Algorithms("experts", ("sorted", "dense"), choose, expands=("dense",))


def _check(x: Spec, runs: Sequence[Spec], positions: Spec, heads: Sequence[Spec], names: str = "qkvo") -> None:
    """Check tokens, runs and positions, and the matrices of heads, of which each has one of each of the `names`."""
    floating(one_dtype(x, *heads))
    if len(x.shape) != 3:
        raise ShapeError("the tokens are not sequences", expected="x [B, T, C]", got=x)
    for name, t in zip(("offsets", "rows", "pairs"), runs, strict=True):
        if t.dtype is not int64 or len(t.shape) != 1:
            raise DTypeError(f"the {name} do not come from a dispatch", expected="int64, one axis", got=t)
    offsets, rows, pairs = runs
    equal_dim(rows.shape[0], pairs.shape[0], "R")
    if positions.dtype is not int64 or positions.shape not in (x.shape[:2], (1, x.shape[1])):
        raise ShapeError("invalid positions", expected=f"int64 [{x.shape[0]} or 1, {x.shape[1]}]", got=positions)
    if not heads or len(heads) % len(names):
        expected = f"{len(names)} operands per head at the end: {', '.join(names)}"
        raise UsageError("the operands are not those of whole heads", expected=expected, got=len(heads))
    equal_dim(offsets.shape[0], len(heads) // len(names) + 1, "E + 1")
    for number, group in enumerate(_groups(heads, len(names))):
        given = dict(zip(names, group, strict=True))
        inner, value = _width(given, q=0, k=0), _width(given, v=0, o=1)
        for name, t in given.items():
            shape = (x.shape[2], value) if name == "o" else (value if name == "v" else inner, x.shape[2])
            if t.shape != shape:
                raise ShapeError("the matrix of a head has the wrong shape", where=f"head {number}, {name}",
                                 expected=shape, got=t)  # fmt: skip
        if inner is None or inner % 2:
            raise ShapeError("the width of queries is odd", where=f"head {number}", expected="an even d", got=group[0])


def _width(given: Mapping[str, Spec], **axes: int) -> Dim | None:
    """Return the size of the first matrix that is given, along its axis; None if it lacks this axis."""
    name = next(n for n in axes if n in given)
    return given[name].shape[axes[name]] if len(given[name].shape) > axes[name] else None


def _groups(operands: Sequence[Any], width: int = HEAD_WIDTH) -> list[Sequence[Any]]:
    return [operands[i : i + width] for i in range(0, len(operands), width)]


def _drawn(rng: np.random.Generator) -> tuple[list[Any], list[list[Any]], dict[str, Any]]:
    """Draw two sequences of four tokens of width 3, and one head, or two of which the second has no tokens.

    Returns: the operands before the heads, the matrices of each head, the attributes.
    """
    batch, time, width, value, heads = 2, 4, 3, int(rng.integers(1, 4)), 1 + int(rng.random() < 0.3)
    mask = rng.random((batch * time, heads)) < 0.7
    mask[:, 1:] = False
    found = sorted((e, n, n * heads + e) for n, e in zip(*np.nonzero(mask), strict=True))
    offsets = np.cumsum([0, *mask.sum(0)])
    rows, pairs = (np.zeros(mask.size, np.int64) for _ in range(2))
    rows[: len(found)], pairs[: len(found)] = [f[1] for f in found], [f[2] for f in found]
    positions = np.arange(time)[None] + rng.integers(0, 3, (int(rng.integers(1, 3)), 1))
    shapes = (2, width), (2, width), (value, width), (width, value)
    x, weights = rng.normal(size=(batch, time, width)), rng.random((batch * time, heads))
    matrices = [[rng.normal(size=s) for s in shapes] for _ in range(heads)]
    given = [x, offsets, rows, pairs, weights, positions]
    return given, matrices, {"theta": None if rng.random() < 0.3 else 100.0}


def _sample(rng: np.random.Generator) -> tuple[list[Any], dict[str, Any]]:
    given, matrices, attrs = _drawn(rng)
    return [*given, *(m for head in matrices for m in head)], attrs


class _Head(NamedTuple):
    """One head on all tokens: its matrices, rotated q and k [B, T, d], v, shares of attention, and shares of tokens."""

    matrices: Sequence[Any]
    q: Any
    k: Any
    v: Any
    shown: Any  # [B, T, T]
    weight: Any  # [B, T, 1]


class _Dense:
    """All heads on all tokens [B, T, C], by other ops, in float32 or wider."""

    def __init__(self, ins: Sequence[Any], attrs: Mapping[str, Any]) -> None:
        x, offsets, rows, pairs, weights, self.positions = ins[:FIRST_HEAD]
        self.dtype, self.theta = x.dtype if x.dtype is float64 else float32, attrs["theta"]
        self.batch, self.time, _ = x.shape
        self.x, self.heads = as_dtype(x, self.dtype), _groups(ins[FIRST_HEAD:])
        flat, weights = call("flatten", x, start=0, end=1), as_dtype(weights, self.dtype)
        self.weights = token_weights((flat, offsets, rows, pairs, weights), len(self.heads))
        ones = call("full_like", weights, value=1.0)
        self.uses = call("gt", token_weights((flat, offsets, rows, pairs, ones), len(self.heads)), 0.5)

    def rotated(self, x: Any, back: bool = False) -> Any:
        """Rotate x [B, T, d] by positions: entries i and i + d/2 are a pair."""
        if self.theta is None:
            return x
        half = x.shape[2] // 2
        column = call("cast", call("unsqueeze", self.positions, axes=(2,)), dtype=self.dtype)
        pairs = call("slice", call("slice", x, axis=0, start=0, size=1), axis=1, start=0, size=1)
        index = call("cumsum", call("full_like", call("slice", pairs, axis=2, start=0, size=half), value=1.0), axis=2)
        angle = column * call("exp", (index - 1.0) * (-log(self.theta) / half))
        cos, sin = call("cos", angle), call("sin", angle) * (-1.0 if back else 1.0)
        a, b = (call("slice", x, axis=2, start=at, size=half) for at in (0, half))
        return call("concat", a * cos - b * sin, b * cos + a * sin, axis=2)

    def column(self, values: Any, e: int) -> Any:
        """Return column e of values [B·T, E] as [B, T, 1]."""
        return call("unflatten", call("slice", values, axis=1, start=e, size=1), axis=0, sizes=(self.batch, self.time))

    def __iter__(self) -> Iterator[_Head]:
        for e, group in enumerate(self.heads):
            matrices = [as_dtype(m, self.dtype) for m in group]
            own = self.column(self.uses, e)
            seen = call("logical_and", own, call("permute", own, axes=(0, 2, 1)))
            q, k, v = (call("linear", self.x, m) for m in matrices[:3])
            q, k = self.rotated(q), self.rotated(k)
            scores = call("matmul", q, call("permute", k, axes=(0, 2, 1))) * (1 / sqrt(q.shape[2]))
            yield _Head(matrices, q, k, v, call("softmax", scores, call("tril", seen), axis=-1),
                        self.column(self.weights, e))  # fmt: skip


def _total(terms: Sequence[Any]) -> Any:
    return call("junction", *terms)


def _emit(ins: Sequence[str], attrs: Mapping[str, Any]) -> str:
    heads = ", ".join(f"({', '.join(head)})" for head in _groups(ins[FIRST_HEAD:]))
    return f"attend_routed({', '.join(ins[:FIRST_HEAD])}, [{heads}], {literal(attrs['theta'])}, run)"


def _module_args(ins: Sequence[Spec], attrs: Mapping[str, Any]) -> Sequence[Any]:
    """Return (size of a token, sizes of keys and values of each head, base of the rotation)."""
    widths = [(k.shape[0], v.shape[0]) for _, k, v, _ in _groups(ins[FIRST_HEAD:])]
    return ins[0].shape[2], widths, attrs["theta"]


@op("routed_attention")
class RoutedAttention(Row):
    """y = Σ over heads e and their tokens n of w[n, e] · o_e softmax_j(⟨q_n, k_j⟩/√d) v_j over tokens j <= n of e.

    Operands: x [B, T, C]; offsets, rows and pairs of a `dispatch` of the B·T tokens; `weights`, read at the flat
    indices `pairs`; positions int64 [B or 1, T]; then for each head q and k [d, C], v [d', C], o [C, d']. With `theta`,
    entries i and i + d/2 of q and k are rotated by position · theta^(-2i/d). A query sees keys of its own sequence and
    head alone, itself included, so work grows with the squares of the heads' numbers of tokens. Computed in float32 or
    wider.

    Algorithms: `sorted` packs the tokens of each head; `dense`, the expansion, masks the scores of all tokens. "auto"
    is `dense` for short sequences whose tokens are `expected` (mean number, 0: unknown) to use all heads.
    """

    arity, attrs, algorithms = (FIRST_HEAD + HEAD_WIDTH, None), _ATTRS, _algorithms(0)
    saves = Saves(every=True)
    traits = Traits(amp="low", fixed=(1, 2, 3, 4, 5), contiguous=tuple(range(FIRST_HEAD)), routed_heads=True)
    emit, torch_module = _emit, TorchModule("RoutedHeads", _module_args, grouped=True, run=True)
    groups = lambda attrs: (FIRST_HEAD, HEAD_WIDTH)
    sample = _sample

    def infer(x, offsets, rows, pairs, weights, positions, *heads, **attrs):
        floating(weights)
        _check(x, (offsets, rows, pairs), positions, heads)
        return x

    def vjp(g, ins, outs, attrs, needs):
        wanted = tuple(i for i, need in enumerate(needs) if need)
        found = call("routed_attention_backward", g, *ins, **attrs, wanted=wanted)
        grads = dict(zip(wanted, found if isinstance(found, tuple) else (found,), strict=True))
        return tuple(grads.get(i) for i in range(len(ins)))

    def cost(ins, outs, attrs):
        x, heads = ins[0], _groups(ins[FIRST_HEAD:])
        mean = sum(m.size for group in heads for m in group) / len(heads)
        per_query = x.sizes[1] * (heads[0][0].sizes[0] + heads[0][2].sizes[0]) / 2
        return Cost(int(2 * ins[2].size * (mean + per_query)), sum(i.nbytes for i in ins), x.nbytes)

    def expand(ins, attrs):
        made = []
        for h in _Dense(ins, attrs):
            made.append(call("linear", call("matmul", h.shown, h.v), h.matrices[3]) * h.weight)
        return as_dtype(_total(made), ins[0].dtype)

    def axes(u: AxesUse):
        x, offsets, rows, pairs, weights, positions = u.ins[:FIRST_HEAD]
        for term in (*x[:2], *rows, *pairs, *weights, *positions):
            u.mixed(term, "reads it by index")
        heads = _groups(list(enumerate(u.ins))[FIRST_HEAD:])
        axis = Atom(len(heads))
        u.same(offsets[0], chain(Atom(1), axis))
        u.counts(axis, FIRST_HEAD, HEAD_WIDTH)
        u.kind(axis, "heads")
        u.mixed(axis, "sums over heads by their weights")
        for q, k, v, (port, o) in heads:
            for number, matrix in (q, k):
                u.frozen(matrix[0], "divides by its root, and rotates pairs of entries")
                u.same(matrix[1], x[2])
                u.summed(x[2], (0, 2), (number, 1))
            u.same(v[1][1], x[2])
            u.summed(x[2], (0, 2), (v[0], 1))
            u.same(o[0], x[2])
            u.same(o[1], v[1][0])
            u.summed(o[1], (port, 1))
        return [x]


@op("routed_attention_backward")
class RoutedAttentionBackward(Backward):
    """Gradients of `routed_attention` w.r.t. the operands `wanted`: operands g, then those of `routed_attention`.

    Queries, keys and shares of attention are computed again. A head without tokens gets zeros.
    """

    arity, algorithms = (FIRST_HEAD + HEAD_WIDTH + 1, None), _algorithms(1)
    attrs = {**_ATTRS, "wanted": Attr(tuple[StaticSize, ...])}
    vjp, traits = (
        None,
        Traits(
            backward_of="routed_attention", amp="low", fixed=(2, 3, 4, 5, 6),
            contiguous=tuple(range(FIRST_HEAD + 1)), opaque=True,
        ),
    )  # fmt: skip
    why = {"vjp": "opaque: where a gradient may be needed the expansion runs"}

    def infer(g, *ins, wanted, **attrs):
        RoutedAttention.infer(*ins)
        one_dtype(ins[0], g)
        if g.shape != ins[0].shape or any(not 0 <= i < len(ins) or not ins[i].dtype.is_float for i in wanted):
            raise ShapeError("invalid gradients of routed_attention", expected=f"g {ins[0]}", got=f"{g}, {wanted}")
        return tuple(ins[i] for i in wanted)

    def cost(ins, outs, attrs):
        forward = RoutedAttention.cost(ins[1:], ins[:1], attrs)
        return Cost(3 * forward.flops, forward.read + ins[0].nbytes, sum(o.nbytes for o in outs))

    def sample(rng):
        ins, attrs = _sample(rng)
        floats = [i for i, x in enumerate(ins) if x.dtype.kind == "f"]
        wanted = tuple(i for i in floats if rng.random() < 0.7) or (0,)
        return [rng.normal(size=ins[0].shape), *ins], {**attrs, "wanted": wanted}

    def expand(ins, attrs):
        dense = _Dense(ins[1:], attrs)
        g, found, dx, shares = as_dtype(ins[0], dense.dtype), {}, [], []

        def product(left: Any, right: Any) -> Any:
            """Return leftᵀ · right, summed over sequences."""
            left, right = (call("flatten", t, start=0, end=1) for t in (left, right))
            return call("matmul", call("permute", left, axes=(1, 0)), right)

        for e, h in enumerate(dense):
            q, k, v, o = h.matrices
            first, given, mixed = FIRST_HEAD + e * HEAD_WIDTH, g * h.weight, call("matmul", h.shown, h.v)
            shares.append(call("sum", g * call("linear", mixed, o), axes=(2,), keepdims=True))
            back = call("matmul", given, o)
            slope = call("matmul", back, call("permute", h.v, axes=(0, 2, 1)))
            slope = h.shown * (slope - call("sum", slope * h.shown, axes=(2,), keepdims=True))
            slope = slope * (1 / sqrt(h.q.shape[2]))
            slopes = [call("matmul", slope, h.k), call("matmul", call("permute", slope, axes=(0, 2, 1)), h.q)]
            dv = call("matmul", call("permute", h.shown, axes=(0, 2, 1)), back)
            grads = [*(dense.rotated(t, back=True) for t in slopes), dv]
            dx += [call("matmul", t, m) for t, m in zip(grads, (q, k, v), strict=True)]
            found |= {first + i: product(t, dense.x) for i, t in enumerate(grads)}
            found[first + 3] = product(given, mixed)
        columns = call("flatten", call("concat", *shares, axis=2), start=0, end=1)
        weights = as_dtype(ins[5], dense.dtype)
        found |= {0: _total(dx), 4: at_pairs(columns, (*ins[1:5], weights), len(shares))}
        return tuple(as_dtype(found[i], ins[1 + i].dtype) for i in attrs["wanted"])


class _Cached(Row):
    vjp, why = None, {
        "vjp": "caches are for inference",
        "axes": "only in programs with a cache, which are derived and not edited",
        "onnx": "caches belong to a running model",
        "emit": "generated code has the cache of transformers",
    }  # fmt: skip


@op("routed_entries")
class RoutedEntries(_Cached):
    """Entries of a KV cache for `routed_attention`: keys [B, 1, T, Σd + E] and values [B, 1, T, Σd'] of all E heads.

    Operands: x [B, T, C]; offsets, rows and pairs of a `dispatch` of the B·T tokens; positions int64 [B or 1, T]; then
    for each head k [d, C] and v [d', C]. A row has the rotated keys of the heads one after the other, then E numbers,
    1 for the heads that have the token; entries of the other heads are 0. Computed in float32 or wider.
    """

    arity, attrs, results = (FIRST_ENTRY + ENTRY_WIDTH, None), _THETA, ("keys", "values")
    traits = Traits(fixed=(1, 2, 3, 4), contiguous=tuple(range(FIRST_ENTRY)))
    groups = lambda attrs: (FIRST_ENTRY, ENTRY_WIDTH)

    def infer(x, offsets, rows, pairs, positions, *heads, theta):
        _check(x, (offsets, rows, pairs), positions, heads, "kv")
        keys, values = (sum(m.shape[0] for m in heads[i::ENTRY_WIDTH]) for i in range(ENTRY_WIDTH))
        start = (x.shape[0], 1, x.shape[1])
        return Spec((*start, keys + len(heads) // ENTRY_WIDTH), x.dtype), Spec((*start, values), x.dtype)

    def cost(ins, outs, attrs):
        heads = ins[FIRST_ENTRY:]
        mean = sum(m.size for m in heads) / (len(heads) // ENTRY_WIDTH)
        return Cost(int(2 * ins[2].size * mean), sum(i.nbytes for i in ins), sum(o.nbytes for o in outs))

    def sample(rng):
        (x, *runs, _, positions), matrices, attrs = _drawn(rng)
        return [x, *runs, positions, *(m for _, k, v, _ in matrices for m in (k, v))], attrs


@op("routed_attention_cached")
class RoutedAttentionCached(_Cached):
    """`routed_attention` of new tokens over the keys and values that `routed_entries` made of them and earlier ones.

    Operands: x [B, T, C]; offsets, rows and pairs of a `dispatch` of the B·T tokens; `weights`, read at the flat
    indices `pairs`; positions int64 [B or 1, T]; keys and values, each a pool [N, 1, block, D]; table int32 [B, blocks]
    and lengths int32 [B] as in `sdpa_paged`; then for each head q [d, C] and o [C, d']. Query t of sequence b is entry
    lengths[b] + t, which is in the pools already; it sees the entries of its head up to its own. A batch row without a
    sequence (length -1) gives 0.
    """

    arity, attrs = (FIRST_CACHED + CACHED_WIDTH, None), _THETA
    traits = Traits(fixed=tuple(range(1, FIRST_CACHED)), contiguous=tuple(range(FIRST_CACHED)))
    groups = lambda attrs: (FIRST_CACHED, CACHED_WIDTH)

    def infer(x, offsets, rows, pairs, weights, positions, keys, values, table, lengths, *heads, theta):
        floating(weights)
        floating(one_dtype(keys, values))
        _check(x, (offsets, rows, pairs), positions, heads, "qo")
        paged_check(x.shape[0], table, lengths)
        count = len(heads) // CACHED_WIDTH
        widths = sum(m.shape[0] for m in heads[::CACHED_WIDTH]) + count, sum(m.shape[1] for m in heads[1::CACHED_WIDTH])
        for name, pool, width in zip(("keys", "values"), (keys, values), widths, strict=True):
            if len(pool.shape) != 4 or pool.shape[1::2] != (1, width) or pool.shape != (*keys.shape[:3], width):
                raise ShapeError("entries of a cache have the wrong shape", where=name,
                                 expected=f"[N, 1, block, {width}]", got=pool)  # fmt: skip
        return x

    def cost(ins, outs, attrs):
        x, keys, values, table = ins[0], *ins[6:9]
        heads = ins[FIRST_CACHED:]
        mean = sum(m.size for m in heads) / (len(heads) // CACHED_WIDTH)
        entries = table.sizes[1] * keys.sizes[2]  # at most
        read = sum(i.nbytes for i in (*ins[:6], *heads)) + table.sizes[0] * entries * (
            keys.sizes[3] * keys.dtype.itemsize + values.sizes[3] * values.dtype.itemsize
        )
        widths = (keys.sizes[3] + values.sizes[3]) * CACHED_WIDTH / len(heads)
        return Cost(int(2 * ins[2].size * (mean + entries * widths)), read, x.nbytes)

    def sample(rng):
        """Draw blocks of two entries; the second batch row may be without a sequence."""
        (x, offsets, rows, pairs, weights, positions), matrices, attrs = _drawn(rng)
        table, lengths = np.array([[3, 1, 5, 6], [0, 4, 2, 7]], np.int32), rng.integers(0, 5, 2).astype(np.int32)
        lengths[1] = -1 if rng.random() < 0.2 else lengths[1]
        widths = [sum(head[i].shape[0] for head in matrices) for i in (1, 2)]
        keys, values = (rng.normal(size=(8, 1, 2, n)) for n in widths)
        used = (rng.random((8, 1, 2, len(matrices))) < 0.6).astype(float)
        for e, (a, b) in enumerate(pairwise(offsets)):
            for row in rows[a:b]:
                sequence, t = divmod(int(row), x.shape[1])
                page, inside = divmod(int(lengths[sequence]) + t, 2)
                used[table[sequence, page], 0, inside, e] = 1
        heads = [m for q, _, _, o in matrices for m in (q, o)]
        keys = np.concatenate([keys, used], axis=3)
        return [x, offsets, rows, pairs, weights, positions, keys, values, table, lengths, *heads], attrs
