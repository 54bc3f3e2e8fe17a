"""Mixtures of experts: tokens grouped by expert, and for each token the weighted sum of its experts' results.

A choice of experts has one of two forms: the ids of the k experts of each token [N, k], or a mask of tokens and experts
[N, E]. `dispatch` turns either into runs, for each expert the rows of its tokens; `expert_mlp` computes on runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from graphwright.array.dtype import bool_, float32, int64
from graphwright.array.formulas.experts import (
    ALGORITHMS,
    FIRST,
    IN_VM,
    LIMIT,
    SLOPE,
    Expert,
    algorithm_of,
    experts_of,
    group_width,
)
from graphwright.array.sizes import product as size_product
from graphwright.array.spec import Spec
from graphwright.array.vm.encode import experts as forms
from graphwright.errors import DTypeError, ShapeError, UsageError
from graphwright.ops.attributes import Attr, StaticSize
from graphwright.ops.axes import Atom, AxesUse, OrNone, chain, product
from graphwright.ops.call import as_dtype, call
from graphwright.ops.emit import Source, TorchModule
from graphwright.ops.registry import Algorithms, Cost, Row, Saves, Traits, get, op
from graphwright.ops.rules import Backward, equal_dim, floating, one_dtype

ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("silu", "relu", "tanh", "sigmoid")},
    "gelu": ("gelu", {"approximate": "none"}),
    "gelu_tanh": ("gelu", {"approximate": "tanh"}),
}
"""Value of the attribute `act` -> op and attributes of the activation."""


@op("dispatch")
class Dispatch(Row):
    """Tokens grouped by expert: (offsets [E + 1], rows [R], pairs [R]), all int64; R = N·k or N·E.

    `choice` is int64 [N, k], the experts of each token, or bool [N, E]. The run of expert e, its tokens in ascending
    order, is rows[offsets[e] : offsets[e + 1]]; `pairs` has the flat index in `choice` of each token and expert. After
    the last run all entries are 0. A token with an id of -1 has no expert there.
    """

    arity, attrs, vjp, results = 1, {"experts": Attr(StaticSize)}, None, ("offsets", "rows", "pairs")
    traits = Traits(contiguous=(0,), fixed=(0,), routes=True)
    why, emit, vm = {"vjp": "the results are integers"}, "dispatch({0}, {experts})", forms.DISPATCH
    cost = lambda ins, outs, attrs: Cost(4 * ins[0].size, 2 * ins[0].nbytes, sum(o.nbytes for o in outs))

    def infer(choice, experts):
        if len(choice.shape) != 2 or choice.dtype not in (int64, bool_):
            raise ShapeError("invalid choice of experts", expected="ids int64 [N, k] or a mask bool [N, E]", got=choice)
        if choice.dtype is bool_:
            equal_dim(choice.shape[1], experts, "E")
        if experts < 1:
            raise UsageError("a mixture has at least one expert", expected="experts >= 1", got=experts)
        pairs = Spec((size_product(choice.shape),), int64)
        return Spec((experts + 1,), int64), pairs, pairs

    def sample(rng):
        ids = np.argsort(rng.random((6, 4)), axis=1)[:, :2]
        ids[rng.random((6, 2)) < 0.2] = -1
        return [ids if rng.random() < 0.5 else rng.random((6, 4)) < 0.4], {"experts": 4}

    def expand(ins, attrs):
        choice, experts = ins[0], attrs["experts"]
        flat, columns = call("flatten", choice, start=0, end=1), choice.shape[1]
        absent = call("full_like", call("cast", flat, dtype=int64), value=experts)
        if choice.dtype is bool_:
            index = call("cumsum", call("full_like", absent, value=1), axis=0) - 1
            expert = call("where", flat, call("remainder", index, columns), absent)
        else:
            expert = call("where", call("lt", flat, 0), absent, flat)
        ordered, order = call("sort", expert, axis=0)
        inside = call("cast", call("lt", ordered, experts), dtype=int64)
        counts = call("bincount", expert, length=experts + 1)
        ends = call("slice", call("cumsum", counts, axis=0), axis=0, start=0, size=experts)
        offsets = call("concat", call("slice", ends, axis=0, start=0, size=1) * 0, ends, axis=0)
        return offsets, call("floor_divide", order, columns) * inside, order * inside

    def axes(u: AxesUse):
        choice, experts = u.ins[0], Atom(u.attrs["experts"])
        u.sizes["experts"] = experts
        if u.dtypes[0] is bool_:
            u.same(choice[1], experts)
        elif (found := u.ranges[0]) is not None:
            u.same(experts, found.axis if isinstance(found, OrNone) else found)
        else:
            u.frozen(experts, "reads it by index")
        for term in (*choice, experts):
            u.mixed(term, "groups tokens by expert")
        pairs = product(*choice)
        u.result_ranges[1], u.result_ranges[2] = choice[0], pairs
        return [(chain(Atom(1), experts),), (pairs,), (pairs,)]


def _narrow(ins: Sequence[Spec], attrs: Mapping[str, Any]) -> list[int]:
    """Return the matrices, if the VM's code reads them."""
    in_vm = algorithm_of(ins[0], ins[2], ins[FIRST:], attrs).algorithm in IN_VM
    return [i for i in range(FIRST, len(ins)) if len(ins[i].shape) == 2] if in_vm else []


def _algorithms(first: int, rows: int) -> Algorithms:
    """Return the algorithms of an op whose operands are x (at `first`), ..., rows (at `rows`), ..., matrices."""
    matrices = first + FIRST
    choose = lambda ins, attrs: algorithm_of(ins[first], ins[rows], ins[matrices:], attrs)
    return Algorithms("experts", ALGORITHMS, choose, expands=("reference",))


_ATTRS = {
    "kind": Attr(Literal["gated", "mlp", "oai"], "gated"),
    "act": Attr(Literal["silu", "relu", "tanh", "sigmoid", "gelu", "gelu_tanh"], "silu"),
    "bias": Attr(bool, False),
    "algorithm": Attr(Literal["auto", *ALGORITHMS], "auto"),
}


def _act(name: str, x: Any) -> Any:
    row, attrs = ACTIVATIONS[name]
    return call(row, x, **attrs)


def _act_vjp(name: str, g: Any, x: Any, y: Any) -> Any:
    row, attrs = ACTIVATIONS[name]
    vjp: Any = get(row).vjp
    return vjp(g, (x,), (y,), attrs, (True,))[0]


class ExpertRun(NamedTuple):
    """One expert on some tokens: its inputs to the nonlinearity (`a` of the gate or alone, `v`), and what it gave."""

    a: Any
    v: Any
    inner: Any
    out: Any


def _linear(x: Any, w: Any, b: Any) -> Any:
    return call("linear", x, w) if b is None else call("linear", x, w, b)


def run_expert(x: Any, expert: Expert, attrs: Mapping[str, Any]) -> ExpertRun:
    """Compute one expert on x [N, C] by other ops."""
    a = v = _linear(x, expert.up, expert.up_bias)
    if attrs["kind"] != "mlp":
        a = _linear(x, expert.gate, expert.gate_bias)
    if attrs["kind"] == "mlp":
        inner = _act(attrs["act"], a)
    elif attrs["kind"] == "gated":
        inner = _act(attrs["act"], a) * v
    else:
        low = call("clamp", a, low=None, high=LIMIT)
        inner = (call("clamp", v, low=-LIMIT, high=LIMIT) + 1.0) * (low * call("sigmoid", low * SLOPE))
    return ExpertRun(a, v, inner, _linear(inner, expert.down, expert.down_bias))


def _back(t: Any, run: ExpertRun, attrs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the gradients of `a` (None for `mlp`) and `v` of a run, from the gradient of `inner`."""
    if attrs["kind"] == "mlp":
        return None, _act_vjp(attrs["act"], t, run.a, run.inner)
    if attrs["kind"] == "gated":
        acted = _act(attrs["act"], run.a)
        return _act_vjp(attrs["act"], t * run.v, run.a, acted), t * acted
    low, high = call("clamp", run.a, low=None, high=LIMIT), call("clamp", run.v, low=-LIMIT, high=LIMIT)
    s = call("sigmoid", low * SLOPE)
    inside = call("cast", call("le", run.a, LIMIT), dtype=run.a.dtype)
    da = t * (high + 1.0) * (s + low * s * (1.0 - s) * SLOPE) * inside
    bound = call("logical_and", call("ge", run.v, -LIMIT), call("le", run.v, LIMIT))
    return da, t * (low * s) * call("cast", bound, dtype=run.v.dtype)


def pair_marks(ins: Sequence[Any], experts: int) -> Any:
    """Return the expert of each pair, one-hot [R, E] in the dtype of the weights; 0 after the last run."""
    _, offsets, rows, _, weights = ins[:FIRST]
    index = call("cumsum", call("full_like", rows, value=1), axis=0) - 1
    starts = call("slice", offsets, axis=0, start=1, size=experts)
    later = call("ge", call("unsqueeze", index, axes=(1,)), call("unsqueeze", starts, axes=(0,)))
    expert = call("sum", call("cast", later, dtype=int64), axes=(1,), keepdims=False)
    known = call("clamp", expert, low=0, high=experts - 1)
    inside = call("cast", call("lt", expert, experts), dtype=weights.dtype)
    marks = call("cast", call("one_hot", known, classes=experts), dtype=weights.dtype)
    return marks * call("unsqueeze", inside, axes=(1,))


def token_weights(ins: Sequence[Any], experts: int) -> Any:
    """Return the weight of each expert for each token [N, E], 0 where it was not chosen."""
    x, _, rows, pairs, weights = ins[:FIRST]
    values = call("embedding", _column(weights), pairs) * pair_marks(ins, experts)
    blank = call("cast", call("full_like", call("slice", x, axis=1, start=0, size=1), value=0.0), dtype=weights.dtype)
    zeros = blank + call("full_like", call("slice", values, axis=0, start=0, size=1), value=0.0)
    index = call("unsqueeze", rows, axes=(1,)) + call("cast", call("full_like", values, value=0.0), dtype=int64)
    return call("scatter_add", zeros, index, values, axis=0)


def at_pairs(values: Any, ins: Sequence[Any], experts: int) -> Any:
    """Return values [N, E] of tokens and experts at the flat indices of their pairs, in the shape of the weights."""
    _, _, rows, pairs, weights = ins[:FIRST]
    each = call("embedding", values, rows) * pair_marks(ins, experts)
    flat, zeros = call("sum", each, axes=(1,), keepdims=True), call("full_like", _column(weights), value=0.0)
    summed = call("scatter_add", zeros, call("unsqueeze", pairs, axes=(1,)), flat, axis=0)
    return call("reshape", summed, shape=weights.shape)


def _column(weights: Any) -> Any:
    return call("reshape", weights, shape=(size_product(weights.shape), 1))


def _check(x: Spec, offsets: Spec, rows: Spec, pairs: Spec, weights: Spec, *matrices: Spec, **attrs: Any) -> None:
    floating(one_dtype(x, *matrices))
    floating(weights)
    if len(x.shape) != 2:
        raise ShapeError("the tokens are not a matrix", expected="x [N, C]", got=x)
    for name, t in (("offsets", offsets), ("rows", rows), ("pairs", pairs)):
        if t.dtype is not int64 or len(t.shape) != 1:
            raise DTypeError(f"the {name} do not come from a dispatch", expected="int64, one axis", got=t)
    equal_dim(rows.shape[0], pairs.shape[0], "R")
    width = group_width(attrs)
    if not matrices or len(matrices) % width:
        expected = f"{width} operands per expert from operand {FIRST} on"
        raise UsageError("the operands are not those of whole experts", expected=expected, got=len(matrices))
    equal_dim(offsets.shape[0], len(matrices) // width + 1, "E + 1")
    for number, e in enumerate(experts_of(matrices, attrs)):
        inner, outer = e.up.shape[0] if e.up.shape else None, x.shape[1]
        wanted = {"gate": (inner, outer), "up": (inner, outer), "down": (outer, inner)}
        for name, shape in wanted.items():
            w, b = getattr(e, name), getattr(e, f"{name}_bias")
            if w is not None and w.shape != shape:
                raise ShapeError("the matrix of an expert has the wrong shape", where=f"expert {number}, {name}",
                                 expected=shape, got=w)  # fmt: skip
            if b is not None and b.shape != shape[:1]:
                raise ShapeError("the bias of an expert has the wrong shape", where=f"expert {number}, {name}",
                                 expected=shape[:1], got=b)  # fmt: skip


def _sample(rng: np.random.Generator) -> tuple[list[Any], dict[str, Any]]:
    """Draw five tokens of width 3, and up to three experts of widths 2 and 4, of which the second has no tokens."""
    kind, bias, count = (("gated", False, 2), ("mlp", False, 3), ("gated", True, 1), ("oai", True, 1))[rng.integers(4)]
    act = list(ACTIVATIONS)[rng.integers(len(ACTIVATIONS))] if kind != "oai" else "silu"
    attrs = {"kind": kind, "act": "silu" if act == "relu" else act, "bias": bias}  # differences step over its kink
    rows, pairs = np.array([0, 2, 4, 0, 1, 2, 3, 0, 0, 0]), np.array([0, 4, 9, 1, 3, 5, 7, 0, 0, 0])
    offsets = np.array([0, 3, 3, 7])[: count + 1]
    matrices = []
    for inner in (2, 4, 2)[:count]:
        shapes = [(inner, 3)] * (1 if kind == "mlp" else 2) + [(3, inner)]
        matrices += [rng.normal(size=s) for shape in shapes for s in ((shape, shape[:1]) if bias else (shape,))]
    return [rng.normal(size=(5, 3)), offsets, rows, pairs, rng.normal(size=(5, 2)), *matrices], attrs


_TORCH = {
    **{"silu": "F.silu", "relu": "F.relu", "tanh": "torch.tanh", "sigmoid": "torch.sigmoid"},
    **{"gelu": "F.gelu", "gelu_tanh": "gelu_tanh"},
}


def _torch_act(attrs: Mapping[str, Any]) -> Source | None:
    """Return the activation in torch source; None for the clamped form of gpt-oss, which has no other."""
    return None if attrs["kind"] == "oai" else Source(_TORCH[attrs["act"]])


def _emit(ins: Sequence[str], attrs: Mapping[str, Any]) -> str:
    step = 2 if attrs["bias"] else 1
    linears = [f"({', '.join(ins[i : i + step])},)" if step == 1 else f"({', '.join(ins[i : i + step])})"
               for i in range(FIRST, len(ins), step)]  # fmt: skip
    each = group_width(attrs) // step
    experts = ", ".join(f"({', '.join(linears[i : i + each])})" for i in range(0, len(linears), each))
    return f"mix_experts({', '.join(ins[:FIRST])}, [{experts}], {_torch_act(attrs)})"


def _module_args(ins: Sequence[Spec], attrs: Mapping[str, Any]) -> Sequence[Any]:
    """Return (size of a token, width of each expert, activation, whether there are biases)."""
    widths = [e.up.shape[0] for e in experts_of(ins[FIRST:], attrs)]
    return ins[0].shape[1], widths, _torch_act(attrs), attrs["bias"]


@op("expert_mlp")
class ExpertMlp(Row):
    """y[n] = Σ over the pairs (n, e) of weights[pair] · f_e(x[n]), experts ascending: x [N, C] -> [N, C].

    Operands: x; offsets, rows and pairs of a `dispatch`; `weights`, read at the flat indices `pairs`; then for each
    expert gate [I, C], up [I, C] and down [C, I], each followed by its bias if `bias` is set. I may differ. f(x) =
    down(act(gate x) ⊙ up x) for `gated`, down(act(up x)) without a gate for `mlp`, and for `oai` (gpt-oss) down((1 +
    clamp(up x, ±7)) ⊙ g σ(1.702 g)) with g = min(gate x, 7). The sum is in float32 or wider.

    Algorithms: `sorted` multiplies the tokens of each expert, gathered; `gather` few of them at a time, without packing
    a matrix; `dense` all tokens by all experts; `reference` is the expansion. "auto": see `algorithm_of`.
    """

    arity, attrs = (FIRST + 2, None), _ATTRS
    saves = Saves(every=True)
    traits = Traits(amp="low", fixed=(1, 2, 3, 4), contiguous=(0, 1, 2, 3, 4), mixture=True)
    emit, torch_module, vm = _emit, TorchModule("Experts", _module_args, grouped=True), forms.EXPERTS
    groups, narrow, algorithms = lambda attrs: (FIRST, group_width(attrs)), _narrow, _algorithms(0, 2)
    sample = _sample

    def infer(x, offsets, rows, pairs, weights, *matrices, kind, bias, **attrs):
        _check(x, offsets, rows, pairs, weights, *matrices, kind=kind, bias=bias)
        return x

    def vjp(g, ins, outs, attrs, needs):
        wanted = tuple(i for i, need in enumerate(needs) if need)
        found = call("expert_mlp_backward", g, *ins, **attrs, wanted=wanted)
        grads = dict(zip(wanted, found if isinstance(found, tuple) else (found,), strict=True))
        return tuple(grads.get(i) for i in range(len(ins)))

    def cost(ins, outs, attrs):
        x, experts = ins[0], experts_of(ins[FIRST:], attrs)
        mean = sum(m.size for m in ins[FIRST:]) / len(experts)
        return Cost(int(2 * ins[2].size * mean), sum(i.nbytes for i in ins), x.nbytes)

    def expand(ins, attrs):
        x, experts = ins[0], experts_of(ins[FIRST:], attrs)
        weights = token_weights(ins, len(experts))
        total = None
        for number, e in enumerate(experts):
            share = call("slice", weights, axis=1, start=number, size=1)
            made = call("cast", run_expert(x, e, attrs).out, dtype=weights.dtype) * share
            total = made if total is None else total + made
        return call("cast", total, dtype=x.dtype)

    def axes(u: AxesUse):
        x, offsets, rows, pairs, weights = u.ins[:FIRST]
        for term in (x[0], *rows, *pairs, *weights):
            u.mixed(term, "reads it by index")
        experts = Atom(len(experts_of(u.ins[FIRST:], u.attrs)))
        u.same(offsets[0], chain(Atom(1), experts))
        u.counts(experts, FIRST, group_width(u.attrs))
        u.kind(experts, "experts")
        u.mixed(experts, "sums over experts by their weights")
        for e in experts_of(list(enumerate(u.ins))[FIRST:], u.attrs):
            (down, (outer, inner)), bias = e.down, e.down_bias
            u.same(x[1], outer)
            u.kind(inner, "neurons")
            u.summed(inner, (down, 1))
            for made, shift in ((e.gate, e.gate_bias), (e.up, e.up_bias)):
                if made is not None:
                    u.same(made[1][0], inner)
                    u.same(made[1][1], x[1])
                    u.summed(x[1], (0, 1), (made[0], 1))
                if shift is not None:
                    u.same(shift[1][0], inner)
            if bias is not None:
                u.same(bias[1][0], outer)
        return [x]


@op("expert_mlp_backward")
class ExpertMlpBackward(Backward):
    """Gradients of `expert_mlp` w.r.t. the operands `wanted`, in their order: operands g, then those of `expert_mlp`.

    Inner activations are computed again. A matrix of an expert without tokens gets zeros.
    """

    arity, algorithms = (FIRST + 3, None), _algorithms(1, 3)
    attrs = {**_ATTRS, "wanted": Attr(tuple[StaticSize, ...])}
    vjp, traits = (
        None,
        Traits(backward_of="expert_mlp", amp="low", fixed=(2, 3, 4, 5), contiguous=(0, 1, 2, 3, 4, 5), opaque=True),
    )
    why, vm = {"vjp": "opaque: where a gradient may be needed the expansion runs"}, forms.EXPERTS_BACKWARD

    def infer(g, *ins, wanted, **attrs):
        _check(*ins, **attrs)
        one_dtype(ins[0], g)
        if g.shape != ins[0].shape or any(not 0 <= i < len(ins) or not ins[i].dtype.is_float for i in wanted):
            raise ShapeError("invalid gradients of expert_mlp", expected=f"g {ins[0]}", got=f"g {g}, wanted {wanted}")
        return tuple(ins[i] for i in wanted)

    def cost(ins, outs, attrs):
        forward = ExpertMlp.cost(ins[1:], ins[:1], attrs)
        return Cost(3 * forward.flops, forward.read + ins[0].nbytes, sum(o.nbytes for o in outs))

    def sample(rng):
        ins, attrs = _sample(rng)
        floats = [i for i, x in enumerate(ins) if x.dtype.kind == "f"]
        wanted = tuple(i for i in floats if rng.random() < 0.7) or (0,)
        return [rng.normal(size=(5, 3)), *ins], {**attrs, "wanted": wanted}

    def expand(ins, attrs):
        g, x, experts = ins[0], ins[1], experts_of(ins[FIRST + 1 :], attrs)
        weights = token_weights(ins[1:], len(experts))
        found: dict[int, Any] = {}
        width, shares = group_width(attrs), []

        def matrix(number: int, name: str, left: Any, right: Any) -> None:
            """Set the gradients of a matrix and its bias: leftᵀ · right, and the column sums of left."""
            names = [n for n in Expert._fields if getattr(experts[number], n) is not None]
            index = FIRST + number * width + names.index(name)
            found[index] = call("matmul", call("permute", left, axes=(1, 0)), right)
            if attrs["bias"]:
                found[index + 1] = call("sum", left, axes=(0,), keepdims=False)

        for number, e in enumerate(experts):
            run = run_expert(x, e, attrs)
            share = call("slice", weights, axis=1, start=number, size=1)
            shares.append(call("sum", call("cast", g * run.out, dtype=weights.dtype), axes=(1,), keepdims=True))
            given = call("cast", call("cast", g, dtype=weights.dtype) * share, dtype=x.dtype)
            matrix(number, "down", given, run.inner)
            da, dv = _back(call("matmul", given, e.down), run, attrs)
            matrix(number, "up", dv, x)
            dx = call("matmul", dv, e.up)
            if da is not None:
                matrix(number, "gate", da, x)
                dx = dx + call("matmul", da, e.gate)
            found[0] = dx if number == 0 else found[0] + dx
        found[4] = at_pairs(call("concat", *shares, axis=1), ins[1:], len(experts))
        return tuple(found[i] for i in attrs["wanted"])


PROBED = FIRST
"""Index of the first operand of `expert_probe` that belongs to an expert."""


def _wide(x: Any) -> Any:
    return as_dtype(x, float32) if x.dtype.is_low else x


def _square(x: Any) -> Any:
    """Return the squared norms of the rows of x, [N, 1], in float32 or wider."""
    return call("sum", _wide(x) * _wide(x), axes=(1,), keepdims=True)


@op("expert_probe")
class ExpertProbe(Row):
    """What each pair of a token and an expert would teach the expert, and would gain, at weight 1; 0 for other pairs.

    Operands: x [N, C]; g [N, C], the gradient of the loss at the layer's output; offsets [E + 1], rows and pairs [R] of
    a `dispatch`; then the experts' matrices as in `expert_mlp`. Results [R], at the flat index of the pair in the
    choice, float32 or wider: `surprise`, the norm of the gradient that the expert's weights would get from the token,
    and `gain` = -⟨g, f(x)⟩. Each weight's gradient is an outer product: with h the hidden layer, a and v the inputs of
    the nonlinearity, b = 1 with biases and 0 without, surprise² = ‖g‖²(‖h‖² + b) + (‖x‖² + b)(‖da‖² + ‖dv‖²).
    """

    arity, attrs, vjp, results = (PROBED + 2, None), _ATTRS, None, ("surprise", "gain")
    algorithms = _algorithms(0, 3)
    traits = Traits(amp="promote", fixed=(2, 3, 4), contiguous=(0, 1, 2, 3, 4))
    why = {"vjp": "a measurement of gradients", "emit": "exported models are not trained there"}
    why |= {"onnx": "exported models are not trained there"}
    groups, vm = lambda attrs: (PROBED, group_width(attrs)), forms.EXPERT_PROBE

    def infer(x, g, offsets, rows, pairs, *matrices, kind, bias, **attrs):
        _check(x, offsets, rows, pairs, x, *matrices, kind=kind, bias=bias)
        one_dtype(x, g)
        if g.shape != x.shape:
            raise ShapeError("the gradient does not have the shape of the tokens", expected=x, got=g)
        found = Spec(rows.shape, float32 if x.dtype.is_low else x.dtype)
        return found, found

    def cost(ins, outs, attrs):
        mean = sum(m.size for m in ins[PROBED:]) / len(experts_of(ins[PROBED:], attrs))
        return Cost(int(4 * ins[3].size * mean), sum(i.nbytes for i in ins), sum(o.nbytes for o in outs))

    def sample(rng):
        (x, offsets, rows, pairs, _, *matrices), attrs = _sample(rng)
        return [x, rng.normal(size=x.shape), offsets, rows, pairs, *matrices], attrs

    def expand(ins, attrs):
        (x, g, offsets, rows, pairs), experts = ins[:PROBED], experts_of(ins[PROBED:], attrs)
        one, found, bias = _square(x), ([], []), 1.0 if attrs["bias"] else 0.0
        for e in experts:
            run = run_expert(x, e, attrs)
            da, dv = _back(call("matmul", g, e.down), run, attrs)
            slopes = _square(dv) if da is None else _square(da) + _square(dv)
            found[0].append(call("sqrt", _square(g) * (_square(run.inner) + bias) + (one + bias) * slopes))
            found[1].append(-call("sum", _wide(g) * _wide(run.out), axes=(1,), keepdims=True))
        blank = call("cast", call("full_like", rows, value=0), dtype=one.dtype)
        runs = (x, offsets, rows, pairs, blank)
        return tuple(at_pairs(call("concat", *columns, axis=1), runs, len(experts)) for columns in found)

    def axes(u: AxesUse):
        (x, g, offsets, rows, pairs) = u.ins[:PROBED]
        for a, b in zip(x, g, strict=True):
            u.same(a, b)
        for term in (x[0], *rows, *pairs):
            u.mixed(term, "reads it by index")
        experts = Atom(len(experts_of(u.ins[PROBED:], u.attrs)))
        u.same(offsets[0], chain(Atom(1), experts))
        u.counts(experts, PROBED, group_width(u.attrs))
        u.mixed(experts, "measures each expert")
        u.mixed(x[1], "takes norms over it")
        for e in experts_of(u.ins[PROBED:], u.attrs):
            u.same(x[1], e.down[0])
            u.mixed(e.down[1], "takes norms over it")
            for made, shift in ((e.gate, e.gate_bias), (e.up, e.up_bias)):
                if made is not None:
                    u.same(made[0], e.down[1])
                    u.same(made[1], x[1])
                if shift is not None:
                    u.same(shift[0], e.down[1])
            if e.down_bias is not None:
                u.same(e.down_bias[0], x[1])
        return [rows, rows]
