"""A routed layer in one step: what it chose, on which tokens, and the gradient at its output.

Terms that train routers read it, whether the step is eager (`observe`) or compiled (`ObservedLayer.of_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from graphwright.array.formulas.experts import FIRST
from graphwright.autograd import Parameter, Tensor, as_tensor
from graphwright.autograd.functions import wide
from graphwright.errors import UsageError
from graphwright.experts.routed import RoutedLayer, routed_layers
from graphwright.experts.routers import RouterNodes
from graphwright.graph import NodeId
from graphwright.models.export.template_match import uncast
from graphwright.nn.module import Module
from graphwright.nn.moe import MoE
from graphwright.nn.router import Routing, ThresholdRouter, TopKRouter, margins, unit_rows
from graphwright.ops import call, traits
from graphwright.ops.call import as_dtype
from graphwright.optim import StepView
from graphwright.program import Program, Value
from graphwright.program.axes.solve_axes import origin


@dataclass(kw_only=True)
class ObservedLayer:
    """A routed layer in one step. Of its tensors only the router's parameters get gradients.

    Attributes:
        path: of the router.
        index: number of the layer, which keys its random draws.
        mask: bool [N, E], the experts of each token, the fallback's included; none for padding.
        alive: bool [E].
        tokens, result, gradient: what the experts read, the layer's result, and the gradient of the loss at it, all
            [N, C]; None where the experts are not MLPs, or nothing was differentiated.
        weights, options: parameters and attributes of the experts, as operands of the op `expert_mlp`.
    """

    path: str
    index: int
    mask: Tensor
    alive: Tensor
    tokens: Tensor | None = None
    result: Tensor | None = None
    gradient: Tensor | None = None
    weights: Sequence[Parameter] = ()
    options: Mapping[str, Any] | None = None

    @property
    def scores(self) -> Tensor:
        """The score of each expert for each token [N, E], from which its weight is made; float32 or wider."""
        raise NotImplementedError(f"{type(self).__name__} does not define scores")

    @property
    def normalized(self) -> bool:
        """Whether the weights of a token are divided by their sum."""
        return True

    @cached_property
    def routed(self) -> Tensor:
        """1.0 for tokens with experts, 0.0 for padding [N, 1]."""
        return self.number(call("any", self.mask, axes=(1,), keepdims=True))

    @property
    def count(self) -> Tensor:
        """The number of tokens with experts, at least 1, as a float."""
        return self.routed.sum().clamp(min=1.0)

    def number(self, flags: Tensor) -> Tensor:
        """Return bools as 0.0 and 1.0 in the dtype of the scores."""
        raise NotImplementedError(f"{type(self).__name__} does not define number(flags)")

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

    def read_mixture(self, view: StepView, mixture: NodeId) -> None:
        """Read tokens, result, gradient and weights of the node that runs the experts, in a compiled step."""
        p = view.program
        x, *operands = p.operands(mixture)
        self.tokens, self.result, self.gradient = view.value(x), view.value(mixture), view.gradient(mixture)
        found = [p.weights[p.key(w)] for v in operands[FIRST - 1 :] if (w := origin(p, v)) is not None]
        self.weights, self.options = [w for w in found if isinstance(w, Parameter)], dict(p.attrs(mixture))


@dataclass(kw_only=True)
class ThresholdLayer(ObservedLayer):
    """A layer with a threshold router in one step.

    Attributes:
        directions: tokens divided by their norms [N, C].
        prototypes, thresholds, eta: parameters of the router: lists of E [C] and E [], and [].
    """

    directions: Tensor
    prototypes: Sequence[Tensor]
    thresholds: Sequence[Tensor]
    eta: Tensor

    @classmethod
    def of_step(cls, view: StepView, router: RouterNodes, index: int) -> ThresholdLayer:
        """Return the layer of a router in a compiled step that provides the nodes `read_by`."""
        p = view.program
        prototypes, thresholds = ([view.parameter(k) for k in keys] for keys in (router.prototypes, router.thresholds))
        made = cls(path=router.path, index=index, directions=view.value(router.value("directions")),
                   mask=view.value(router.value("mask")), alive=view.value(p.operands(router.value("margin").node)[0]),
                   prototypes=prototypes, thresholds=thresholds, eta=view.parameter(router.eta))  # fmt: skip
        mixture = mlps_of(router)
        if mixture is not None:
            made.read_mixture(view, mixture)
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

    @property
    def scores(self) -> Tensor:
        """σ(κz) [N, E], a soft choice."""
        return self.logits.sigmoid()

    def number(self, flags: Tensor) -> Tensor:
        """Return bools as 0.0 and 1.0 in the dtype of the logits."""
        return flags.to(self.directions.dtype)


@dataclass(kw_only=True)
class TopKLayer(ObservedLayer):
    """A layer whose router takes the k experts with the highest scores, in one step.

    Attributes:
        read: tokens as the router reads them [N, C].
        rows: its weights [E, C].
        score: maps logits [N, E] to scores.
        divided: whether the weights of a token are divided by their sum.
    """

    read: Tensor
    rows: Tensor
    score: Callable[[Tensor], Tensor]
    divided: bool

    @classmethod
    def of_step(cls, view: StepView, layer: RoutedLayer, index: int) -> TopKLayer:
        """Return a layer in a compiled step that provides the nodes `read_by`. Raises: UsageError."""
        p, mask = view.program, _mask(view.value(layer.choice), layer.size)
        assert layer.router is not None
        assert layer.best is not None
        node, divided = _score_of(layer), uncast(p, layer.weights) != Value(layer.best)
        op, attrs = p.op(node), p.attrs(node)
        read = view.value(p.operands(layer.logits.node)[0])
        made = cls(path=path_of(layer), index=index, mask=mask, alive=_all(layer.size), read=read,
                   rows=view.parameter(p.key(layer.router)), score=lambda z: call(op, z, **attrs),
                   divided=divided)  # fmt: skip
        made.read_mixture(view, layer.node)
        return made

    @property
    def scores(self) -> Tensor:
        """Scores of the router [N, E], with the tokens constant."""
        return self.score(call("linear", wide(self.read), wide(self.rows)))

    @property
    def normalized(self) -> bool:
        """Whether the weights of a token are divided by their sum."""
        return self.divided

    def number(self, flags: Tensor) -> Tensor:
        """Return bools as 0.0 and 1.0 in the dtype of the scores."""
        return flags.to(wide(self.read).dtype)


def topk_layers(p: Program) -> list[RoutedLayer]:
    """Return the routed layers whose router has a matrix and takes the k best experts, in order; [] without any."""
    if not p.of_traits(mixture=True):
        return []
    return [layer for layer in routed_layers(p).values() if layer.router is not None and layer.best is not None]


def path_of(layer: RoutedLayer) -> str:
    """Return the path of the router of a layer with a router matrix."""
    assert layer.router is not None
    return layer.program.path(layer.router).rpartition(".")[0]


def _score_of(layer: RoutedLayer) -> NodeId:
    """Return the node that makes scores of the logits alone. Raises: UsageError if a router has other steps."""
    p = layer.program
    assert layer.best is not None
    scores = p.operands(layer.best)[0]
    reads = p.operands(scores.node)
    linear = traits(p.op(layer.logits.node)).contracts == "out_in" and len(p.operands(layer.logits.node)) == 2
    if len(reads) != 1 or uncast(p, reads[0]) != layer.logits or not linear:
        raise UsageError("the scores of this router are not a function of one linear map of its tokens",
                         where=path_of(layer), expected="topk of a score of logits", got=p.op(scores.node))  # fmt: skip
    return scores.node


def _mask(ids: Tensor, experts: int) -> Tensor:
    """Return ids [N, k], -1 for none, as a mask [N, E]."""
    chosen = call("eq", ids.unsqueeze(-1), as_tensor(np.arange(experts)))
    return call("any", chosen, axes=(1,), keepdims=False)


def _all(experts: int) -> Tensor:
    return as_tensor(np.ones(experts, bool))


def mlps_of(router: RouterNodes) -> NodeId | None:
    """Return the node that runs the experts of a router if they are MLPs, whose weights are stored; None for heads."""
    p, mixture = router.program, router.mixture
    stored = all(origin(p, v) is not None for v in p.operands(mixture)[FIRST:])
    return mixture if "kind" in p.attrs(mixture) and stored else None


def read_by(router: RouterNodes | RoutedLayer) -> Iterator[Value | NodeId]:
    """Iterate over the nodes whose values and gradients a layer of a compiled step reads."""
    if isinstance(router, RoutedLayer):
        _score_of(router)
        yield from (router.choice, router.node, router.tokens, router.program.operands(router.logits.node)[0])
        return
    p = router.program
    yield from (router.value(name) for name in ("directions", "mask"))
    yield p.operands(router.value("margin").node)[0]
    if (mixture := mlps_of(router)) is not None:
        yield from (mixture, p.operands(mixture)[0])


@contextmanager
def observe(module: Module) -> Iterator[list[ObservedLayer]]:
    """Collect the routed layers that run inside the block, in order, with the gradients at their outputs.

    >>> with experts.observe(model) as layers:
    ...     loss = objective(model(x))
    ...     loss.backward()
    >>> experts.ghost().loss(layers).backward()         # adds to the gradients of routers
    """
    layers: list[ObservedLayer] = []
    names = {id(m): name for name, m in module.named_modules() if isinstance(m, ThresholdRouter | TopKRouter)}

    def routed(
        router: ThresholdRouter | TopKRouter, args: tuple[Any, ...], given: dict[str, Any], made: Routing
    ) -> None:
        x, here = args[0].detach(), {"path": names[id(router)], "index": len(layers)}
        if isinstance(router, TopKRouter):
            experts, score = made.logits.shape[1], router.score
            layers.append(TopKLayer(**here, mask=_mask(made.choice, experts), alive=_all(experts), tokens=x,
                                    read=x, rows=router.weight, score=lambda z: call(score, z),
                                    divided=router.normalize))  # fmt: skip
            return
        own = given["experts"]
        layers.append(ThresholdLayer(**here, mask=made.choice, alive=router.alive, tokens=x,
                                     directions=unit_rows(wide(x)), prototypes=[e.prototype for e in own],
                                     thresholds=[e.threshold for e in own], eta=router.eta))  # fmt: skip

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
