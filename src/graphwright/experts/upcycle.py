"""Dense MLPs as mixtures of experts, and back (sparse upcycling, Komatsuzaki et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from graphwright.array import float32
from graphwright.autograd import Parameter, Tensor, zeros
from graphwright.errors import UsageError
from graphwright.experts.dense import DenseMlp, dense_mlps
from graphwright.experts.edits import merge, set_k
from graphwright.experts.routed import NotAMixture, routed_layer
from graphwright.experts.selection import TooFewExperts
from graphwright.experts.usage import Usage
from graphwright.nn.module import Module
from graphwright.nn.router import ThresholdRouter
from graphwright.ops import traits
from graphwright.ops.experts import ACTIVATIONS, Expert
from graphwright.program.axes.solve_axes import origin
from graphwright.program.builder import trace
from graphwright.program.editing.replace import paste, redirect, remove_unread
from graphwright.program.op_graph import Value
from graphwright.program.weights import as_array, shared_variable
from graphwright.surgery.errors import check_choices
from graphwright.surgery.matrices import program_of

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program

AnyModel = TypeVar("AnyModel", bound="Model | Program")
TOOL = "graphwright.experts"
ROUTERS = ("topk", "threshold")


def upcycle(
    model: AnyModel, experts: int, k: int = 2, *, layers: str | Iterable[str] = "all", router: str = "topk",
    std: float = 0.02, seed: int = 0,
) -> AnyModel:  # fmt: skip
    """Replace MLPs by mixtures of experts that are their copies, in one edit; return the model.

    The weights of a token are divided by their sum, so results do not change. The copies share the MLP's memory until
    they are trained.

    Args:
        model: a model or program.
        experts, k: number of experts, and of experts that each token uses.
        layers: names of the MLPs, such as `layers.0.mlp`; by default all.
        router: `topk`, or `threshold` for routers as `nn.ThresholdRouter`, where k is the mean number of experts that
            `calibrate` aims at.
        std: standard deviation of the weights of a `topk` router.
        seed: seed of the router's weights.
    Raises: TooFewExperts if k is out of range; NotAMixture listing the MLPs, if one of `layers` is none.
    """
    p = program_of(model)
    check_choices({"router": router}, {"router": ROUTERS})
    if type(experts) is not int or type(k) is not int or not 1 <= k <= experts:
        raise TooFewExperts("invalid number of experts per token", expected=f"1 <= k <= {experts}", got=k)
    found = dense_mlps(p)
    names = list(found) if layers == "all" else [layers] if isinstance(layers, str) else list(layers)
    if not names or not set(names) <= found.keys():
        raise NotAMixture("no MLP has this name", where=p.name, expected=", ".join(found) or "a program with MLPs",
                          got=", ".join(n for n in names if n not in found) or "none")  # fmt: skip
    with p.edit(f"upcycle {len(names)} MLPs to {experts} experts", author="pass", tool=TOOL) as e:
        for i, name in enumerate(names):
            width = int(p.spec(found[name].x).shape[-1])
            rows = np.random.default_rng([seed, i]).normal(0.0, std, (experts, width))
            above = router == "threshold"
            route = partial(_by_thresholds, k0=k, seed=seed) if above else partial(_by_scores, k=k, rows=rows)
            _route(e, found[name], experts, route)
    return model


_Routed = tuple[Value, Sequence[Value]]
"""Weights [N, k] or [N, E], and the results of the `dispatch`."""


def _route(e: Transaction, mlp: DenseMlp, experts: int, route: Callable[..., _Routed]) -> None:
    """Replace an MLP by a routed layer, whose nodes are named as those of opened mixtures."""
    p, name, spec = e.program, mlp.name, e.spec(mlp.x)
    tokens = mlp.x
    if len(spec.shape) != 2:
        tokens = _put(e, name, "flatten", [tokens], "tokens", start=0, end=len(spec.shape) - 2)
    weights, runs = route(e, mlp, tokens, experts)
    operands = [v for i in range(experts) for v in _copy(e, mlp, i)]
    made = _put(e, name, "expert_mlp", [tokens, *runs, weights, *operands], "experts", **mlp.attrs)
    if len(spec.shape) != 2:
        made = _put(e, name, "unflatten", [made], "mixed", axis=0, sizes=spec.shape[:-1])
    redirect(e, {mlp.result: made})
    e.remove(mlp.nodes)
    for value in mlp.expert:
        if value is not None and value.node in p.graph:
            remove_unread(e, value)


def _put(e: Transaction, module: str, op: str, operands: Sequence[Value], label: str, **attrs: Any) -> Value:
    return Value(e.add_op(op, operands, attrs, e.program.free_name(f"{module}.{label}")))


def _by_scores(e: Transaction, mlp: DenseMlp, tokens: Value, experts: int, *, k: int, rows: np.ndarray) -> _Routed:
    """Add a router that takes the k best of a softmax; `rows` [E, C] are its weights."""
    p, name, weight = e.program, mlp.name, mlp.expert.up
    put = partial(_put, e, name)
    stored = origin(p, weight)
    assert stored is not None
    kind = p.spec(stored).dtype
    key = p.weights.free_key(_sibling(p.key(stored), "gate"))
    router = Value(_param(e, f"{name}.router.weight", key, as_array(rows, kind), stored))
    if p.spec(weight).dtype is not kind:
        router = put("cast", [router], "router.weight.cast", dtype=p.spec(weight).dtype)
    logits = put("linear", [tokens, router], "router")
    if p.spec(tokens).dtype.is_low:
        logits = put("cast", [logits], "logits", dtype=float32)
    scores = put("softmax", [logits], "scores", axis=-1)
    chosen = put("topk", [scores], "chosen", k=k, axis=-1)
    total = put("sum", [chosen], "total", axes=(1,), keepdims=True)
    weights = put("div", [chosen, total], "weights")
    runs = put("dispatch", [Value(chosen.node, 1)], "dispatch", experts=experts).node
    return weights, [Value(runs, i) for i in range(3)]


class _Thresholds(Module):
    """A threshold router with what it has in each expert, without the experts."""

    def __init__(self, dim: int, experts: int, k0: float, name: str, seed: int) -> None:
        self.router = ThresholdRouter(dim, experts, k0)
        self.experts = [Module() for _ in range(experts)]
        for i, expert in enumerate(self.experts):
            for label, own in self.router.expert_parameters(f"{name}.experts.{i}.", seed).items():
                expert.register_parameter(label, own)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = self.router(x, experts=self.experts)
        return {"weights": found.weights, **dict(zip(("offsets", "rows", "pairs"), found.runs, strict=True))}


def _by_thresholds(e: Transaction, mlp: DenseMlp, tokens: Value, experts: int, *, k0: float, seed: int) -> _Routed:
    """Add a threshold router, whose parameters are those of the experts."""
    p, spec = e.program, e.spec(tokens)
    dim = int(spec.shape[-1])
    module = _Thresholds(dim, experts, k0, mlp.name, seed)
    example = zeros((2, dim), dtype=spec.dtype)
    made = trace(module if spec.dtype.is_low else module.to(spec.dtype), example, sizes={"x": ("N", dim)})
    stored = origin(p, mlp.expert.up)
    assert stored is not None
    key = ".".join(p.key(stored).split(".")[:-2])
    found = paste(e, made, {"x": tokens}, f"{mlp.name}.", key and f"{key}.")
    return found["weights"], [found[n] for n in ("offsets", "rows", "pairs")]


def _copy(e: Transaction, mlp: DenseMlp, number: int) -> list[Value]:
    """Add the matrices of one expert, which share the memory of the MLP's; return the operands."""
    p, made = e.program, []
    for field, value in zip(Expert._fields, mlp.expert, strict=True):
        if value is None:
            continue
        node = origin(p, value)
        assert node is not None
        module, _, part = field.partition("_")
        path = p.free_name(f"{mlp.name}.experts.{number}.{module}.{part or 'weight'}")
        parts = p.key(node).split(".")
        key = p.weights.free_key(".".join([*parts[:-2], "experts", str(number), *parts[-2:]]))
        variable = shared_variable(p.weights[p.key(node)], Parameter, p.weights[p.key(node)].name)
        copy = Value(e.add_node(p.op(node), {"key": key, "trainable": True}, path, p.specs(node), variable, after=node))
        if value.node != node:
            copy = Value(e.add_op(p.op(value.node), [copy], p.attrs(value.node), p.free_name(f"{path}.cast")))
        made.append(copy)
    return made


def _sibling(key: str, name: str) -> str:
    """Return the key of another weight of a module's parent: `a.mlp.gate.weight` for `a.mlp.up_proj.weight`."""
    return ".".join([*key.split(".")[:-2], name, "weight"])


def _param(e: Transaction, name: str, key: str, array: Any, after: Any) -> Any:
    variable = Parameter(array, True, key)
    attrs = {"key": key, "trainable": True}
    return e.add_node("param", attrs, e.program.free_name(name), (array.spec,), variable, after=after)


def to_mlp(e: Transaction, layer: str, *, by: Usage | None = None) -> None:
    """Replace a routed layer by an MLP, for which its experts are merged into one as `merge` does.

    Exact if all experts are equal, or if there is one, for routers whose weights then are 1.

    Args: as in `merge`. Raises: NotAMixture; UsageError for experts of different widths, or of the kind `oai`.
    """
    p = e.program
    found = routed_layer(p, layer)
    if p.attrs(found.node)["kind"] == "oai":
        raise UsageError(
            "experts of this kind are no MLPs of other ops", where=layer, expected="gated or mlp", got="oai"
        )
    if found.size > 1:
        set_k(e, layer, 1)
        merge(e, layer, range(found.size), by=by)
        found = routed_layer(p, layer)
    (expert,), attrs, result, x = found.experts, p.attrs(found.node), Value(found.node), found.tokens
    readers = p.consumers(found.node)
    if traits(p.op(x.node)).joins_axis and len(readers) == 1 and traits(p.op(readers[0])).splits_axis:
        x, result = p.operands(x.node)[0], Value(readers[0])  # no need to join axes for an MLP
    op, options = ACTIVATIONS[attrs["act"]]

    def put(op: str, operands: Sequence[Value], label: str, **options: Any) -> Value:
        return Value(e.add_op(op, operands, options, p.free_name(f"{layer}.{label}")))

    def product(x: Value, label: str, w: Value, b: Value | None) -> Value:
        for value, part in ((w, "weight"), (b, "bias")):
            node = None if value is None else origin(p, value)
            if node is not None and value is not None:
                parts = p.key(node).split(".")
                at = max((i for i, text in enumerate(parts) if text.isdecimal()), default=None)
                key = ".".join([*parts[: at - 1], *parts[at + 1 :]]) if at else p.key(node)
                e.rename(node, p.free_name(f"{layer}.{label}.{part}"), key=p.weights.free_key(key))
                if value.node != node:
                    e.rename(value.node, p.free_name(f"{layer}.{label}.{part}.cast"))
        return put("linear", [x, w] if b is None else [x, w, b], label)

    hidden = None if expert.gate is None else put(op, [product(x, "gate", *expert[:2])], "act", **options)
    up = product(x, "up", *expert[2:4])
    inner = put(op, [up], "act", **options) if hidden is None else put("mul", [hidden, up], "mul")
    redirect(e, {result: product(inner, "down", *expert[4:])})
    remove_unread(e, result)


def assemble(models: Sequence[Model], k: int = 2, *, average: bool = False, seed: int = 0) -> Model:
    """Make a mixture whose experts are the MLPs of several dense models of one base (Sukhbaatar et al. 2024).

    Args:
        models: models of equal structure; they are not changed.
        k: experts per token.
        average: whether the other weights are the mean of all models, instead of those of the first.
        seed: seed of the router's weights.
    Returns: a copy of the first model. Raises: UsageError for fewer than two models, or different structures.
    """
    if len(models) < 2 or len({m.structure_hash() for m in models}) > 1:
        raise UsageError("experts are assembled from two models or more, of equal structure", got=len(models))
    made = models[0].with_program(models[0].program.fork())
    p, found = made.program, dense_mlps(models[0].program)
    inside = {origin(p, v) for mlp in found.values() for v in mlp.expert if v is not None}
    with p.edit(f"assemble {len(models)} models", author="pass", tool=TOOL) as e:
        if average:
            for node in (n for n in p.params() if n not in inside):
                arrays = [m.program.weights.array(p.key(node)).to_numpy("float64") for m in models]
                e.set_weight(node, np.mean(arrays, axis=0))
        upcycle(p, len(models), k, seed=seed)
        for name, mlp in found.items():
            base = models[0].program
            keys = [base.key(n) for v in mlp.expert if v is not None and (n := origin(base, v)) is not None]
            layer = routed_layer(p, name)
            for i, other in enumerate(models[1:], 1):
                for node, key in zip(layer.params(i), keys, strict=True):
                    e.set_weight(node, other.program.weights.array(key))
    return made
