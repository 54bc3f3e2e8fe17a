"""Attention of each query over a list of key blocks of its own, and the op that makes such lists from scores."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import numpy as np

from graphwright.array.dtype import float32, float64, int32, int64
from graphwright.array.formulas.selected import FORCED, MARGIN, STEEPEST
from graphwright.array.spec import Spec
from graphwright.array.vm.encode import selected_attention as forms
from graphwright.errors import ShapeError
from graphwright.ops.attention import _heads
from graphwright.ops.attributes import Attr, StaticSize
from graphwright.ops.axes import AxesUse, size
from graphwright.ops.call import as_dtype, call
from graphwright.ops.linear import transposed
from graphwright.ops.registry import Attrs, Cost, Row, Saves, Traits, op
from graphwright.ops.rules import Backward, equal_dim, floating, one_dtype
from graphwright.settings import AtLeastOne, Count, Number


@op("select_blocks")
class SelectBlocks(Row):
    """Key blocks of each row, int32 [N, G, R, 3 + most + ghosts]: forced ones, chosen ones, ghosts; -1 for none.

    Operands: `scores` [N, G, R, J] of the J key blocks; `thresholds`, which broadcast to [N, G, R, 1]; `own` int64 [R],
    the block that contains the query of a row; with `ghosts` also `noise` [N, G, R, J]. The candidates of a row are the
    blocks 1 to own - 2. Columns 0 to 2 hold block 0 and, where they are other blocks, own - 1 and own. The next `most`
    columns hold the candidates with a score >= threshold - 1e-6, in ascending order; if there are more, the `most` best
    of them, on ties those of lower index. The last columns hold ghosts: the other candidates with the largest noise.
    """

    arity, attrs, vjp = (3, 4), {"most": Attr(StaticSize), "ghosts": Attr(Count, 0)}, None
    traits = Traits(amp="keep", fixed=(0, 1, 2, 3), contiguous=(0,))
    why = {
        "vjp": "the results are integers",
        "emit": "a choice of blocks has no counterpart in a model file",
        "onnx": "a choice of blocks has no counterpart in ONNX",
    }

    def infer(scores, thresholds, own, *noise, most, ghosts):
        floating(one_dtype(scores, thresholds))
        if len(scores.shape) != 4:
            raise ShapeError("the scores of blocks have the wrong shape", expected="[N, G, R, J]", got=scores)
        rows = scores.shape[2]
        allowed = [(1, n) if n != 1 else (1,) for n in scores.shape[:3]]
        if (
            len(thresholds.shape) != 4
            or thresholds.shape[3] != 1
            or any(have not in may for have, may in zip(thresholds.shape[:3], allowed, strict=True))
        ):
            raise ShapeError("the thresholds do not broadcast to the rows of scores",
                             expected=(*scores.shape[:3], 1), got=thresholds)  # fmt: skip
        if own != Spec((rows,), int64):
            raise ShapeError("invalid own blocks", expected=Spec((rows,), int64), got=own)
        if len(noise) != (ghosts > 0) or any(n.shape != scores.shape or not n.dtype.is_float for n in noise):
            expected = f"an operand {list(scores.shape)}, floating" if ghosts else "no fourth operand"
            raise ShapeError("invalid noise of ghost blocks", expected=expected, got=noise)
        return Spec((*scores.shape[:3], FORCED + most + ghosts), int32)

    def cost(ins, outs, attrs):
        return Cost(4 * ins[0].size, sum(i.nbytes for i in ins), outs[0].nbytes)

    def sample(rng):
        scores, own = rng.normal(size=(2, 2, 6, 7)), np.arange(6) + rng.integers(0, 2)
        most, ghosts = int(rng.integers(0, 4)), int(rng.integers(0, 3))
        thresholds = rng.normal(size=(1, 2, 1, 1)) - 0.5
        noise = [rng.random(size=scores.shape)] if ghosts else []
        return [scores, thresholds, own, *noise], {"most": most, "ghosts": ghosts}

    def expand(ins, attrs):
        scores, thresholds, own = ins[:3]
        blocks, own = call("iota", scores, axis=3), call("unsqueeze", own, axes=(1,))
        candidate = call("logical_and", call("ge", blocks, 1), call("le", blocks, own - 2))
        above = call("logical_and", call("ge", scores, thresholds - MARGIN), candidate)
        rows = call("cast", call("full_like", call("slice", scores, axis=3, start=0, size=1), value=0), dtype=int64)
        absent = rows - 1
        near = call("where", call("gt", own, 1), own - 1, -1), call("where", call("gt", own, 0), own, -1)
        columns = [rows, *(absent + (t + 1) for t in near)]
        if attrs["most"]:
            columns.append(_best(scores, above, attrs["most"], ordered=True))
        if attrs["ghosts"]:
            others = call("logical_and", candidate, call("logical_not", above))
            columns.append(_best(ins[3], others, attrs["ghosts"], ordered=False))
        return call("cast", call("concat", *columns, axis=3), dtype=int32)

    def axes(u: AxesUse):
        scores, thresholds, own = u.ins[:3]
        for axis in range(3):
            if size(thresholds[axis]) == size(scores[axis]):
                u.same(thresholds[axis], scores[axis])
        for a, b in (pair for noise in u.ins[3:] for pair in zip(noise, scores, strict=True)):
            u.same(a, b)
        u.same(own[0], scores[2])
        u.frozen(scores[3], "chooses blocks by index")
        return [(*scores[:3], u.fresh(u.shapes[0][3]))]


def _best(scores: Any, mask: Any, most: int, ordered: bool) -> Any:
    """Return the indices [..., most] of the largest scores where the mask is true, -1 for none; on ties the lowest."""
    count = scores.shape[3]
    values, ids = call("topk", call("where", mask, scores, -np.inf), k=min(most, count), axis=3)
    ids = call("where", call("gt", values, -np.inf), ids, count if ordered else -1)
    if ordered:
        ids, _ = call("sort", ids, axis=3)
        ids = call("where", call("lt", ids, count), ids, -1)
    return ids if most <= count else call("pad", ids, widths=((0, most - count),), value=-1)


_OPTIONAL = tuple[Literal["q_start"], ...]
_ATTRS = {
    "scale": Attr(Number),
    "block": Attr(AtLeastOne),
    "tile": Attr(AtLeastOne, 1),
    "optional": Attr(_OPTIONAL, ()),
}


def _check(
    q: Spec, k: Spec, v: Spec, blocks: Spec, gates: Spec, *start: Spec, tile: int,
    optional: Sequence[str], **attrs: Any,
) -> None:  # fmt: skip
    floating(one_dtype(q, k, v))
    floating(gates)
    if any(len(t.shape) != 4 for t in (q, k, v)):
        expected = "q [N, H, T, d], k [N, G, S, d], v [N, G, S, dv]"
        raise ShapeError("invalid operands of attention", expected=expected, got=f"{q}, {k}, {v}")
    equal_dim(q.shape[0], k.shape[0], "N of k")
    equal_dim(q.shape[3], k.shape[3], "d of k")
    for axis, name in enumerate(("N", "G", "S")):
        equal_dim(k.shape[axis], v.shape[axis], f"{name} of v")
    heads, groups, length = q.shape[1], k.shape[1], q.shape[2]
    if heads != groups and (not isinstance(heads, int) or not isinstance(groups, int) or heads % max(groups, 1)):
        what = "cannot divide the query heads evenly among the key heads"
        raise ShapeError(what, expected=f"a multiple of {groups}", got=heads)
    rows = length if tile == 1 else -(-length // tile) if isinstance(length, int) else blocks.shape[2:3]
    wanted = (*k.shape[:2], rows)
    if blocks.dtype is not int32 or len(blocks.shape) != 4 or blocks.shape[:3] != wanted:
        expected = f"int32 {[*wanted, 'K']}"
        raise ShapeError("the lists of blocks do not fit the queries", expected=expected, got=blocks)
    if gates.shape != blocks.shape:
        raise ShapeError("the gates do not have the shape of the lists", expected=blocks.shape, got=gates)
    if len(start) != len(optional) or any(s != Spec((), int64) for s in start):
        raise ShapeError("invalid q_start", expected="an int64 scalar for `optional=('q_start',)`", got=start)


def _flops(q: Spec, v: Spec, blocks: Spec, block: int) -> int:
    return 2 * prod(q.sizes[:3]) * blocks.sizes[3] * block * (q.sizes[3] + v.sizes[3])


class _Dense:
    """Scores of all pairs of queries and keys, [N, G, H / G, T, S], and which of them the lists name."""

    def __init__(self, ins: Sequence[Any], attrs: Attrs) -> None:
        q, k, v, self.blocks, gates, *start = ins
        low = q.dtype is not float64 and float32
        self.groups, self.length, self.keys = k.shape[1], q.shape[2], k.shape[2]
        self.block, self.tile = attrs["block"], attrs["tile"]
        self.count = -(-self.keys // self.block)
        q, k, v, gates = (as_dtype(t, low or float64) for t in (q, k, v, gates))
        self.q = call("unflatten", q, axis=1, sizes=(self.groups, q.shape[1] // self.groups))
        self.k, self.v = (call("unsqueeze", t, axes=(2,)) for t in (k, v))
        self.scale = attrs["scale"]
        self.scores = call("matmul", self.q, transposed(self.k)) * self.scale
        listed = call("where", call("ge", self.blocks, 0), call("cast", self.blocks, dtype=int64), self.count)
        marks = call("cast", call("one_hot", listed, classes=self.count + 1), dtype=gates.dtype)
        self.marks = call("slice", marks, axis=4, start=0, size=self.count)  # [N, G, R, K, J]
        query, key = call("iota", q, axis=2), call("iota", k, axis=2)
        query = query + (start[0] if start else self.keys - self.length)
        self.causal = call("le", key, call("unsqueeze", query, axes=(1,)))
        self.gates = self.spread(call("sum", self.marks * call("unsqueeze", gates, axes=(4,)), axes=(3,)))
        open_ = call("logical_and", call("gt", self.gates, 0.0), self.causal)
        most = call("amax", call("where", open_, self.scores, -np.inf), axes=(4,), keepdims=True)
        self.most = call("stop_gradient", call("where", call("gt", most, -np.inf), most, 0.0))
        shifted = call("clamp", self.scores - self.most, low=None, high=STEEPEST)
        self.powers = call("exp", call("where", self.causal, shifted, -np.inf))
        self.terms = self.powers * self.gates
        total = call("sum", self.terms, axes=(4,), keepdims=True)
        self.total = call("where", call("gt", total, 0.0), total, 1.0)
        self.sees = call("cast", call("gt", total, 0.0), dtype=total.dtype)

    def spread(self, t: Any) -> Any:
        """Return values of rows and blocks [N, G, R, J] as values of queries and keys [N, G, 1, T, S]."""
        for axis, times in ((2, self.tile), (3, self.block)):
            if times > 1:
                index = call("floor_divide", call("iota", self.q if axis == 2 else self.k, axis=3), times)
                t = call("index", t, index, axis=axis)
        return call("unsqueeze", t, axes=(2,))


@op("sdpa_selected")
class SdpaSelected(Row):
    """softmax over the keys of the listed blocks, times v: q [N, H, T, d], k and v [N, G, S, d or dv] -> [N, H, T, dv].

    `blocks` int32 [N, G, R, K] has a list for each row of queries, without duplicates, of blocks of `block` keys, -1
    for none; query t reads row t // `tile`, so R = T / `tile`, rounded up. Query head h reads key head and list
    h // (H / G). `gates` [N, G, R, K], >= 0, multiply exponentials: a_j = g e^s_j / Σ g e^s. A block with gate 0 has no
    effect on the result, but its gate gets its gradient. Query t, at position q_start + t, sees keys up to its
    position. Operand `q_start` (int64) is named by `optional`; S - T without it. A query that sees no key gives 0.
    """

    arity, attrs, saves = (5, 6), _ATTRS, Saves(inputs=(0, 1, 2, 3, 4, 5), outputs=(0,))
    traits, vm = Traits(attention=True, amp="low", fixed=(3, 4, 5), contiguous=(3, 4)), forms.SDPA_SELECTED
    why = {
        "emit": "attention over chosen blocks has no counterpart in a model file",
        "onnx": "attention over chosen blocks has no counterpart in ONNX",
    }

    def infer(q, k, v, blocks, gates, *start, **attrs):
        _check(q, k, v, blocks, gates, *start, **attrs)
        return Spec((*q.shape[:3], v.shape[3]), q.dtype)

    def vjp(g, ins, outs, attrs, needs):
        dq, dk, dv, dgates = call("sdpa_selected_backward", *ins, outs[0], g, **attrs)
        return dq, dk, dv, None, dgates

    def cost(ins, outs, attrs):
        return Cost(_flops(ins[0], ins[2], ins[3], attrs["block"]), sum(i.nbytes for i in ins), outs[0].nbytes)

    def expand(ins, attrs):
        t = _Dense(ins, attrs)
        made = call("matmul", t.terms, t.v) / t.total
        return as_dtype(call("flatten", made, start=1, end=2), ins[0].dtype)

    def sample(rng):
        block, tile = 2, int(rng.integers(1, 3))
        q, k, v = (rng.normal(size=(2, h, n, d)) for h, n, d in ((4, 5, 3), (2, 7, 3), (2, 7, 2)))
        rows, count = -(-5 // tile), 4
        lists = 1 + np.argsort(rng.random((2, 2, rows, count - 1)), axis=3).astype(np.int32)
        lists[rng.random(lists.shape) < 0.2] = -1
        lists[..., 0] = 0
        gates = rng.uniform(0.5, 1.5, lists.shape)
        gates[..., 2] *= rng.random() < 0.5
        return [q, k, v, lists, gates], {"scale": 0.5, "block": block, "tile": tile}

    def axes(u: AxesUse):
        q, k, v, blocks, gates = u.ins[:5]
        _heads(u)
        u.same(q[0], k[0])
        for axis in range(4):
            u.same(blocks[axis], gates[axis])
            if axis < 2:
                u.same(blocks[axis], k[axis])
        for term in (k[2], blocks[2], blocks[3]):
            u.mixed(term, "reads keys by index")
        return [(*q[:3], v[3])]


@op("sdpa_selected_backward")
class SdpaSelectedBackward(Backward):
    """Gradients dq, dk, dv and dgates of `sdpa_selected` from its operands, its result and g.

    Probabilities are recomputed. The gradient of a gate is Σ e^(s - LSE) (g·v_j - D) with D = g·out, over the pairs of
    its block and the query heads of its group, exact at gate 0 too; there the exponent is limited to 60.
    """

    arity, attrs = (7, 8), _ATTRS
    traits = Traits(backward_of="sdpa_selected", contiguous=(3, 4, -2, -1), opaque=True)
    vjp, why = None, {"vjp": "second derivatives are those of its expansion, which replaces it where they are needed"}
    results, vm = ("dq", "dk", "dv", "dgates"), forms.SDPA_SELECTED

    def infer(*ins, **attrs):
        *given, out, g = ins
        want = SdpaSelected.infer(*given, **attrs)
        if out != want or g != want:
            raise ShapeError("the result or its gradient has the wrong spec", expected=want, got=f"{out}, {g}")
        return (*ins[:3], ins[4])

    def cost(ins, outs, attrs):
        flops = 5 * _flops(ins[0], ins[2], ins[3], attrs["block"]) // 2
        return Cost(flops, sum(i.nbytes for i in ins), sum(o.nbytes for o in outs))

    def sample(rng):
        ins, attrs = SdpaSelected.sample(rng)
        return [*ins, rng.normal(size=(2, 4, 5, 2)), rng.normal(size=(2, 4, 5, 2))], attrs

    def expand(ins, attrs):
        *given, out, g = ins
        t = _Dense(given, attrs)
        wide = t.scores.dtype
        out, g = (call("unflatten", as_dtype(x, wide), axis=1, sizes=t.q.shape[1:3]) for x in (out, g))
        slope = call("matmul", g, transposed(t.v)) - call("sum", g * out, axes=(4,), keepdims=True)
        p = t.terms / t.total
        ds = p * slope * t.scale
        dq = call("flatten", call("matmul", ds, t.k), start=1, end=2)
        dk, dv = (call("sum", call("matmul", transposed(a), b), axes=(2,)) for a, b in ((ds, t.q), (p, g)))
        each = call("sum", t.powers / t.total * t.sees * slope, axes=(2,))  # [N, G, T, S]
        for axis, times, count in ((2, t.tile, given[3].shape[2]), (3, t.block, t.count)):
            widths = ((0, count * times - each.shape[axis]),) + ((0, 0),) * (3 - axis)
            each = call("unflatten", call("pad", each, widths=widths), axis=axis, sizes=(count, times))
            each = call("sum", each, axes=(axis + 1,))
        dgates = call("sum", t.marks * call("unsqueeze", each, axes=(3,)), axes=(4,))
        kinds = (*(i.dtype for i in given[:3]), given[4].dtype)
        return tuple(as_dtype(x, kind) for x, kind in zip((dq, dk, dv, dgates), kinds, strict=True))
