"""A routed layer in one step: what it chose, on which tokens, and the gradient at its output.

Terms that train routers read it, whether the step is eager (`observe`) or compiled (`ObservedLayer.of_step`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from graphwright.array.formulas.experts import FIRST
from graphwright.autograd import Parameter, Tensor
from graphwright.autograd.functions import wide
from graphwright.errors import UsageError
from graphwright.experts.routers import RouterNodes
from graphwright.graph import NodeId
from graphwright.nn.module import Module
from graphwright.nn.moe import MoE
from graphwright.nn.router import Routing, ThresholdRouter, margins, unit_rows
from graphwright.ops import call
from graphwright.ops.call import as_dtype
from graphwright.optim import StepView
from graphwright.program import Value
from graphwright.program.axes.solve_axes import origin


@dataclass
class ObservedLayer:
    """A layer with a threshold router in one step. Of its tensors only the router's parameters get gradients.

    Attributes:
        path: of the router.
        index: number of the layer, which keys its random draws.
        directions: tokens divided by their norms [N, C].
        mask: bool [N, E], the experts of each token, the fallback's included; none for padding.
        alive: bool [E].
        prototypes, thresholds, eta: parameters of the router: lists of E [C] and E [], and [].
        tokens, result, gradient: what the experts read, the layer's result, and the gradient of the loss at it, all
            [N, C]; None where the experts are not MLPs, or nothing was differentiated.
        weights, options: parameters and attributes of the experts, as operands of the op `expert_mlp`.
    """

    path: str
    index: int
    directions: Tensor
    mask: Tensor
    alive: Tensor
    prototypes: Sequence[Tensor]
    thresholds: Sequence[Tensor]
    eta: Tensor
    tokens: Tensor | None = None
    result: Tensor | None = None
    gradient: Tensor | None = None
    weights: Sequence[Parameter] = ()
    options: Mapping[str, Any] | None = None

    @classmethod
    def of_step(cls, view: StepView, router: RouterNodes, index: int) -> ObservedLayer:
        """Return the layer of a router in a compiled step that provides the nodes `read_by`."""
        p = view.program
        prototypes, thresholds = ([view.parameter(k) for k in keys] for keys in (router.prototypes, router.thresholds))
        made = cls(router.path, index, view.value(router.value("directions")), view.value(router.value("mask")),
                   view.value(p.operands(router.value("margin").node)[0]), prototypes, thresholds,
                   view.parameter(router.eta))  # fmt: skip
        mixture = mlps_of(router)
        if mixture is not None:
            x, *operands = p.operands(mixture)
            made.tokens, made.result, made.gradient = view.value(x), view.value(mixture), view.gradient(mixture)
            found = [p.weights[p.key(w)] for v in operands[FIRST - 1 :] if (w := origin(p, v)) is not None]
            made.weights, made.options = [w for w in found if isinstance(w, Parameter)], dict(p.attrs(mixture))
        return made

    @property
    def unit_prototypes(self) -> Tensor:
        """The prototypes divided by their norms [E, C], float32 or wider."""
        return unit_rows(wide(call("stack", *self.prototypes)))

    @property
    def logits(self) -> Tensor:
        """κz [N, E], with the tokens constant; dead experts have one too."""
        cosine = call("linear", self.directions, self.unit_prototypes)
        return margins(cosine, call("stack", *self.thresholds)) * wide(self.eta).exp()

    @cached_property
    def routed(self) -> Tensor:
        """1.0 for tokens with experts, 0.0 for padding [N, 1]."""
        return self.number(call("any", self.mask, axes=(1,), keepdims=True))

    @property
    def count(self) -> Tensor:
        """The number of tokens with experts, at least 1, as a float."""
        return self.routed.sum().clamp(min=1.0)

    def number(self, flags: Tensor) -> Tensor:
        """Return bools as 0.0 and 1.0 in the dtype of the logits."""
        return flags.to(self.directions.dtype)

    def probe(self, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Return surprise and gain [N, E] of the op `expert_probe` for the pairs where the bool mask is true, else 0.

        Raises: UsageError unless the experts are MLPs and the step was differentiated.
        """
        if self.tokens is None or self.gradient is None or self.options is None:
            raise UsageError("this term reads the gradient at the output of experts", where=self.path,
                             expected="experts that are MLPs, in a step that was differentiated",
                             fix="call backward() inside `with experts.observe(model)` first")  # fmt: skip
        runs = call("dispatch", pairs, experts=pairs.shape[1])
        g = self.gradient.to(self.tokens.dtype)
        matrices = [as_dtype(w.detach(), self.tokens.dtype) for w in self.weights]
        found = call("expert_probe", self.tokens, g, *runs, *matrices, **self.options)
        surprise, gain = (t.reshape(*pairs.shape) for t in found)
        return surprise, gain


def mlps_of(router: RouterNodes) -> NodeId | None:
    """Return the node that runs the experts of a router if they are MLPs, whose weights are stored; None for heads."""
    p, mixture = router.program, router.mixture
    stored = all(origin(p, v) is not None for v in p.operands(mixture)[FIRST:])
    return mixture if "kind" in p.attrs(mixture) and stored else None


def read_by(router: RouterNodes) -> Iterator[Value | NodeId]:
    """Iterate over the nodes whose values and gradients `ObservedLayer.of_step` reads."""
    p = router.program
    yield from (router.value(name) for name in ("directions", "mask"))
    yield p.operands(router.value("margin").node)[0]
    if (mixture := mlps_of(router)) is not None:
        yield from (mixture, p.operands(mixture)[0])


@contextmanager
def observe(module: Module) -> Iterator[list[ObservedLayer]]:
    """Collect the threshold routers that run inside the block, in order, with the gradients at their layers' outputs.

    >>> with experts.observe(model) as layers:
    ...     loss = objective(model(x))
    ...     loss.backward()
    >>> experts.ghost().loss(layers).backward()         # adds to the gradients of routers
    """
    layers: list[ObservedLayer] = []
    names = {id(m): name for name, m in module.named_modules() if isinstance(m, ThresholdRouter)}

    def routed(router: ThresholdRouter, args: tuple[Any, ...], given: dict[str, Any], made: Routing) -> None:
        own, x = given["experts"], args[0].detach()
        found = ObservedLayer(names[id(router)], len(layers), unit_rows(wide(x)), made.choice, router.alive,
                            [e.prototype for e in own], [e.threshold for e in own], router.eta, tokens=x)  # fmt: skip
        layers.append(found)

    def mixed(layer: MoE, args: tuple[Any, ...], given: dict[str, Any], y: Tensor) -> None:
        found = next(r for r in reversed(layers) if r.path == names[id(layer.router)])
        flat = y.reshape(-1, y.shape[-1])
        found.result, found.weights = flat.detach(), [t for e in layer.experts for t in e.operands()]
        found.options = {"kind": layer.kind, "act": layer.act, "bias": layer.bias}
        if y.requires_grad:
            y.register_hook(lambda g: setattr(found, "gradient", wide(g).detach().reshape(*flat.shape)))

    handles = []
    for m in module.modules():
        if id(m) in names:
            handles.append(m.register_forward_hook(routed, with_kwargs=True))
        elif isinstance(m, MoE) and id(m.router) in names:
            handles.append(m.register_forward_hook(mixed, with_kwargs=True))
    try:
        yield layers
    finally:
        for handle in handles:
            handle.remove()
