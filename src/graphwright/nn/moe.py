"""Mixture of experts: MLPs of which each token uses some, each with parameters of its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from graphwright.autograd import Parameter, Tensor
from graphwright.errors import UsageError
from graphwright.nn.layers import Linear
from graphwright.nn.module import Module
from graphwright.nn.router import Routing, TopKRouter
from graphwright.ops import call

KINDS = ("gated", "mlp")
"""Kinds of experts: down(act(gate x) ⊙ up x), and down(act(up x))."""


class Expert(Module):
    """The matrices of one expert: gate (for the kind `gated`) and up [hidden, dim], down [dim, hidden].

    `routing` are parameters that the router has in each expert, by name: those of a `ThresholdRouter` are `prototype`
    [dim] and `threshold` [].
    """

    prototype: Parameter
    threshold: Parameter

    def __init__(
        self, dim: int, hidden: int, *, kind: str = "gated", bias: bool = False,
        routing: Mapping[str, Parameter] = MappingProxyType({}), name: str = "", seed: int | None = None,
    ) -> None:  # fmt: skip
        for label, own in routing.items():
            self.register_parameter(label, own)

        def linear(label: str, inner: int, outer: int) -> Linear:
            return Linear(inner, outer, bias=bias, name=name and f"{name}{label}.", seed=seed)

        if kind == "gated":
            self.gate = linear("gate", dim, hidden)
        self.up, self.down = linear("up", dim, hidden), linear("down", hidden, dim)

    def operands(self) -> list[Parameter]:
        """Return the matrices, each followed by its bias if it has one, in the order of the op `expert_mlp`."""
        return [p for name, p in self.named_parameters() if "." in name]


class MoE(Module):
    """Mixture of experts: Σ over the experts of a token of weight · down(act(gate x) ⊙ up x).

    Args:
        dim, hidden: sizes of each expert.
        experts, k: number of experts, and of experts that process each token.
        normalize: whether to divide the weights of a token by their sum.
        score: `softmax` over all experts, or `sigmoid` of each.
        kind: `gated`, or `mlp` for experts down(act(up x)).
        act: silu, gelu, gelu_tanh, relu, tanh or sigmoid.
        bias: whether experts have biases.
        router: module that maps tokens [N, dim] to a `Routing`, instead of a `TopKRouter` with these options. If it has
            `expert_parameters`, as `ThresholdRouter`, each expert gets these, and it is called with `experts`.
    """

    def __init__(
        self, dim: int, hidden: int, experts: int, k: int = 2, *, normalize: bool = True, score: str = "softmax",
        kind: str = "gated", act: str = "silu", bias: bool = False, router: Module | None = None, name: str = "",
        seed: int | None = None,
    ) -> None:  # fmt: skip
        if kind not in KINDS:
            raise UsageError("unknown kind of experts", expected=" or ".join(KINDS), got=kind)
        if router is None:
            label = name and f"{name}router."
            router = TopKRouter(dim, experts, k, score=score, normalize=normalize, name=label, seed=seed)
        self.kind, self.act, self.bias = kind, act, bias
        self.router: Any = router
        owned: Any = getattr(router, "expert_parameters", None)
        made = (name and f"{name}experts.{e}." for e in range(experts))

        def expert(label: str) -> Expert:
            own = {} if owned is None else owned(label, seed)
            return Expert(dim, hidden, kind=kind, bias=bias, routing=own, name=label, seed=seed)

        self.experts = [expert(label) for label in made]

    def route(self, x: Tensor, valid: Tensor | None = None) -> Routing:
        """Assign tokens [N, dim] to experts; where `valid` [N] is False, to none."""
        given = (x,) if valid is None else (x, valid)
        owns = {"experts": self.experts} if hasattr(self.router, "expert_parameters") else {}
        return self.router(*given, **owns)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Route x [..., dim] and return the weighted results of the experts; the shape is kept.

        `valid` [...], bool, is False for padding, which gets zeros.
        """
        flat = None if valid is None else valid.reshape(-1)
        return self.mix(x, self.route(x.reshape(-1, x.shape[-1]), flat))

    def mix(self, x: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sum of the results of its experts for each token of x [..., dim]."""
        operands = [t for e in self.experts for t in e.operands()]
        options = {"kind": self.kind, "act": self.act, "bias": self.bias}
        tokens = x.reshape(-1, x.shape[-1])
        return call("expert_mlp", tokens, *routing.runs, routing.weights, *operands, **options).reshape(x.shape)
