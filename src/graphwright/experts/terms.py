"""Losses that train routers: diversity and number of experts, ghosts, surprise.

Each is a term of a compiled step, `compile_step(..., also=[experts.sdl()])`, and a loss for layers that `observe`
collected. Gradients reach prototypes, thresholds and slopes of routers alone. Formulas are in docs/routers.md.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from math import inf
from typing import Any, ClassVar

import numpy as np

from graphwright.array import DType, NDArray, bool_, from_numpy
from graphwright.autograd import Parameter, Tensor, Variable, as_tensor
from graphwright.errors import UsageError
from graphwright.experts.observed import (
    ObservedLayer,
    ThresholdLayer,
    TopKLayer,
    path_of,
    read_by,
    topk_layers,
)
from graphwright.experts.routed import RoutedLayer
from graphwright.experts.routers import RouterNodes, threshold_routers
from graphwright.graph import NodeId
from graphwright.nn.router import Uncalibrated
from graphwright.ops import call
from graphwright.optim import StepTerm, StepView
from graphwright.optim.optimizer import Optimizer
from graphwright.program import Program
from graphwright.program.op_graph import Ref
from graphwright.settings import Count, NotNegative, Positive, Seed, Settings


class InertExpert(UserWarning):
    """An expert gave 0 for all its tokens, and its weights would get no gradient from any of them."""


@dataclass(frozen=True)
class RouterTerm(Settings, StepTerm):
    """Base of terms that train routers.

    In a compiled step the figures are results of the step, `step.reports["<name of the term>.<name of the figure>"]`.

    Attributes:
        layers: pattern of the paths of routers, such as `layers.3.*`; all by default.
        figures: values of the last call by `<path of the router>.<name>`.
    """

    takes: ClassVar[type[ObservedLayer]] = ThresholdLayer
    layers: str = field(default="*", kw_only=True)
    figures: dict[str, Tensor] = field(default_factory=dict, kw_only=True, repr=False, compare=False)

    def loss(self, layers: Sequence[ObservedLayer]) -> Tensor:
        """Return the sum of the term over the layers whose router matches, 0-d; what it measured is in `figures`."""
        layers = [layer for layer in layers if isinstance(layer, self.takes)]
        self.figures.clear()
        losses = [self.of(layer) for layer in layers if fnmatchcase(layer.path, self.layers)]
        return sum(losses[1:], losses[0]) if losses else as_tensor(np.float32(0))

    def nodes(self, program: Program) -> Iterator[Ref]:
        """Iterate over what the term reads of each router: tokens, choice, and the result of MLPs."""
        return (ref for router in self._routers(program) for ref in read_by(router))

    def trains(self, program: Program) -> list[str]:
        """Return the keys of the routers' parameters. Warns: Uncalibrated where all thresholds are equal."""
        keys = []
        for router in self._routers(program):
            if isinstance(router, RoutedLayer):
                assert router.router is not None
                keys.append(program.key(router.router))
                continue
            thresholds = router.thresholds
            values = {float(program.weights.array(key).to_numpy("float64")) for key in thresholds}
            if len(values) == 1 < len(thresholds):
                text = "all thresholds are equal: set them by experts.calibrate(program, batch)"
                warnings.warn(f"{router.path or 'router'}: {text}", Uncalibrated, stacklevel=3)
            keys += [*router.prototypes, *thresholds, router.eta]
        return keys

    def __call__(self, view: StepView) -> Tensor | None:
        """Return the sum of the term over the routers of the program; report the figures."""
        routers = self._routers(view.program)
        loss = self.loss([TopKLayer.of_step(view, router, index) if isinstance(router, RoutedLayer)
                          else ThresholdLayer.of_step(view, router, index)
                          for index, router in enumerate(routers)])  # fmt: skip
        for name, value in self.figures.items():
            view.report(f"{self.name or type(self).__name__}.{name}", value)
        self.figures.clear()
        return loss

    def _routers(self, program: Program) -> list[RouterNodes | RoutedLayer]:
        found: dict[NodeId, RouterNodes | RoutedLayer] = {}
        for router in threshold_routers(program):
            if fnmatchcase(router.path, self.layers):
                found[router.mixture] = router
        if self.takes is not ThresholdLayer:
            found |= {r.node: r for r in topk_layers(program) if fnmatchcase(path_of(r), self.layers)}
        return [found[node] for node in sorted(found, key=program.order_labels.key)]

    def of(self, layer: Any) -> Tensor:
        """Return the loss of one layer, 0-d; it is a `takes`."""
        raise NotImplementedError(f"{type(self).__name__} does not define of(layer)")

    def note(self, layer: ObservedLayer, name: str, value: Tensor) -> None:
        """Enter a measured value into `figures`."""
        self.figures[f"{layer.path}.{name}" if layer.path else name] = value.detach()


@dataclass(frozen=True)
class sdl(RouterTerm):
    """Sparse-diversity loss: diversity·‖offdiagonal P̂P̂ᵀ‖_F / √(E(E-1)) + count·((k̃ - k*)/k*)², over alive experts.

    P̂ has the prototypes divided by their norms; k̃ = mean over tokens of Σ σ(κz), a soft count, which is larger than the
    number k of hits. With one expert alive it is 0. Figures: `soft_count`, `k`.

    Attributes:
        target: k*.
        diversity, count: weights of the two parts.
    """

    target: Positive = 3.0
    diversity: NotNegative = 0.01
    count: NotNegative = 0.01

    def of(self, layer: ThresholdLayer) -> Tensor:
        alive, p = layer.number(layer.alive), layer.unit_prototypes
        number = alive.sum()
        pairs = alive.unsqueeze(-1) * alive * as_tensor(_off_diagonal(p.shape[0], p.dtype))
        cosines = (call("linear", p, p) * pairs).reshape(-1).norm() / (number * (number - 1.0)).clamp(min=1.0).sqrt()
        soft = (layer.logits.sigmoid() * alive * layer.routed).sum() / layer.count
        self.note(layer, "soft_count", soft)
        self.note(layer, "k", layer.number(layer.mask).sum() / layer.count)
        loss = self.diversity * cosines + self.count * ((soft - self.target) / self.target).square()
        return call("where", call("gt", number, 1.0), loss, 0.0)


@cache
def _off_diagonal(count: int, kind: DType) -> NDArray:
    """1 - identity [count, count]; one array for all traces, so that a step keeps its constant after an edit."""
    return from_numpy(1 - np.eye(count, dtype=kind.numpy))


@dataclass(frozen=True)
class _Probing(RouterTerm):
    """A term that also evaluates `r` random experts per token that are alive and not chosen: ghosts."""

    r: Count = field(default=1, kw_only=True)
    seed: Seed = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        key = Variable(np.array([self.seed, 0], np.int64), name=f"{type(self).__name__}.key")
        object.__setattr__(self, "_key", key)

    def variables(self) -> dict[str, Variable]:
        """Return seed and step of the random draws."""
        return {"key": self._key}  # pyright: ignore[reportAttributeAccessIssue]  # set in __post_init__

    def loss(self, layers: Sequence[ObservedLayer]) -> Tensor:
        total = super().loss(layers)
        key = self.variables()["key"]
        key.assign(key + as_tensor(np.array([0, 1])))
        return total

    def ghosts(self, layer: ObservedLayer) -> Tensor:
        """Draw the ghosts of each token, bool [N, E], keyed by (seed, step, layer, token)."""
        tokens, experts = layer.mask.shape
        if self.r >= experts:
            raise UsageError("too many ghosts per token", where=layer.path, expected=f"r < {experts}", got=self.r)
        free = call("logical_and", layer.alive, call("logical_not", layer.mask))
        free = call("logical_and", free, call("gt", layer.routed, 0.0))
        if not self.r:
            return call("logical_and", free, call("logical_not", free))
        key = self.variables()["key"]
        noise = call("uniform", key, stream=layer.index, shape=(tokens, experts))
        _, ids = call("where", free, noise, -1.0).topk(self.r)
        return call("logical_and", free, call("any", call("one_hot", ids, classes=experts), axes=(1,), keepdims=False))


@dataclass(frozen=True)
class ghost(_Probing):
    """The gradient that the scores of `r` random experts, which were not chosen, would get at weight 0.

    A = -⟨g, f(x) - y⟩ is the gain of such an expert, Â = A / RMS(A of the chosen pairs) within ±3, a constant. The loss
    is -weight · mean over tokens of Σ Â·σ(κz) over ghosts; the layer's result stays as it is. It keeps useless experts
    out and sharpens choices. Where a router takes the k best, its score is in place of σ(κz), and A = -⟨g, f(x)⟩ if
    weights are not divided by their sum.

    Attributes:
        weight: of the loss.
        r: ghosts per token, less than the number of experts.
        seed: of the draws.
    """

    takes: ClassVar[type[ObservedLayer]] = ObservedLayer
    weight: NotNegative = 0.1

    def of(self, layer: ObservedLayer) -> Tensor:
        ghosts = self.ghosts(layer)
        _, gain = layer.probe(call("logical_or", layer.mask, ghosts))
        assert layer.gradient is not None
        assert layer.result is not None
        advantage = gain
        if layer.normalized:
            advantage = gain + (layer.gradient * layer.result.to(gain.dtype)).sum(axis=1, keepdims=True)
        chosen, share = layer.number(layer.mask), layer.number(ghosts)
        rms = ((advantage * chosen).square().sum() / chosen.sum().clamp(min=1.0)).sqrt()
        scale = call("where", call("gt", rms, 0.0), rms, inf)
        pull = (advantage / scale).clamp(-3.0, 3.0) * share
        return (pull.detach() * layer.scores).sum() / layer.count * -self.weight


@dataclass(frozen=True)
class surprise(_Probing):
    """A measurement: surprise S and gain u of the op `expert_probe`, for chosen pairs and `r` ghosts per token.

    Figures: `surprise`, `gain` [N, E], `evaluated` bool [N, E]: the pairs that have them. Its loss is 0. In an eager
    step an expert whose pairs all give 0 is reported as `InertExpert`.
    """

    takes: ClassVar[type[ObservedLayer]] = ObservedLayer
    r: Count = field(default=0, kw_only=True)

    def trains(self, program: Program) -> list[str]:
        """Return nothing: it measures."""
        return []

    def __call__(self, view: StepView) -> None:
        """Report the figures."""
        super().__call__(view)

    def of(self, layer: ObservedLayer) -> Tensor:
        pairs = call("logical_or", layer.mask, self.ghosts(layer))
        found = dict(zip(("surprise", "gain"), layer.probe(pairs), strict=True))
        for name, value in {**found, "evaluated": pairs}.items():
            self.note(layer, name, value)
        if not pairs.symbolic:
            self._warn(layer, pairs.numpy(), *(t.numpy() for t in found.values()))
        return as_tensor(np.float32(0))

    def _warn(self, layer: ObservedLayer, pairs: np.ndarray, amount: np.ndarray, gain: np.ndarray) -> None:
        assert layer.gradient is not None
        felt: np.ndarray = pairs & layer.gradient.numpy().any(axis=1, keepdims=True)
        moves = (amount != 0) | (gain != 0)
        inert = felt.any(axis=0) & ~(moves & felt).any(axis=0)
        for e in np.flatnonzero(inert).tolist():
            text = f"expert {e} gives 0 for all of its {int(felt[:, e].sum())} tokens and learns nothing"
            warnings.warn(f"{layer.path or 'router'}: {text}", InertExpert, stacklevel=4)


@dataclass(frozen=True)
class surprise_min(_Probing):
    """Send each token to the expert that it would disturb least: S̃ - β·ũ is smallest among chosen experts and ghosts.

    S̃ and ũ are surprise and gain minus their mean over the candidates of the token, divided by the RMS of these
    differences over the batch. With q = S̃ - β·ũ and softmaxes over the candidates the loss is weight · mean over tokens
    of (w_ce · CE(softmax κz, argmin q) + w_kl · KL(softmax -q ‖ softmax κz)). Only small weights are useful: an expert
    whose weights are 0 is never surprised, and noisy targets close the router.

    Attributes:
        w_ce, w_kl: weights of the two parts.
        beta: β >= 0, how much the gain counts.
        weight: of the loss.
    """

    w_ce: NotNegative = 1.0
    w_kl: NotNegative = 0.0
    beta: NotNegative = 1.0
    weight: NotNegative = 1e-3

    def of(self, layer: ThresholdLayer) -> Tensor:
        pairs = call("logical_or", layer.mask, self.ghosts(layer))
        amount, gain = layer.probe(pairs)
        marks, logits = layer.number(pairs), layer.logits
        q = _standardised(amount, marks) - self.beta * _standardised(gain, marks)
        q = call("where", pairs, q, inf).detach()
        least = call("one_hot", call("argmin", q, axis=-1), classes=q.shape[1]).to(bool_)
        seen = call("where", pairs, logits, -inf)
        log_share = call("where", pairs, logits - seen.logsumexp(-1, keepdims=True), 0.0)
        loss = (log_share * layer.number(least)).sum() * -self.w_ce
        if self.w_kl:
            wanted = call("softmax", call("where", pairs, -q, 0.0), pairs, axis=-1)
            known = call("where", call("gt", wanted, 0.0), wanted, 1.0).log()
            loss = loss + self.w_kl * (wanted * (known - log_share)).sum()
        return loss * self.weight / layer.count


def _standardised(v: Tensor, marks: Tensor) -> Tensor:
    """Subtract from v [N, E] its mean over each token's marked entries; divide by the RMS of that over the batch.

    Per token two candidates would always give ±1.
    """
    mean = (v * marks).sum(axis=1, keepdims=True) / marks.sum(axis=1, keepdims=True).clamp(min=1.0)
    centred = (v - mean) * marks
    rms = (centred.square().sum() / marks.sum().clamp(min=1.0)).sqrt()
    return centred / call("where", call("gt", rms, 0.0), rms, 1.0)


@dataclass(frozen=True)
class long_surprise(RouterTerm):
    """Prefer experts that learned little of late: weight · mean over tokens of Σ (cost_e - 1)·σ(κz_e).

    cost_e is the mean root of the second moments of Adam over the expert's matrices, divided by its mean over experts.

    Attributes:
        optimizer: an Adam, which has second moments `v`.
        weight: of the loss.
    """

    optimizer: Optimizer = field(kw_only=True, repr=False)
    weight: NotNegative = 1e-3

    def of(self, layer: ThresholdLayer) -> Tensor:
        count = len(layer.prototypes)
        width = len(layer.weights) // count
        costs = [self._cost(layer.weights[e * width : (e + 1) * width]) for e in range(count)]
        cost = call("stack", *costs)
        mean = (cost * layer.number(layer.alive)).sum() / layer.number(layer.alive).sum()
        cost = cost / call("where", call("gt", mean, 0.0), mean, 1.0)
        self.note(layer, "cost", cost)
        pull = (cost - 1.0).detach() * layer.number(layer.alive) * layer.routed
        return (pull * layer.logits.sigmoid()).sum() / layer.count * self.weight

    def _cost(self, weights: Iterable[Parameter]) -> Tensor:
        moments = [self.optimizer.state_of(w).moments["v"] for w in weights]
        total = call("junction", *(v.sqrt().sum() for v in moments))
        return total / float(sum(v.numel() for v in moments))
