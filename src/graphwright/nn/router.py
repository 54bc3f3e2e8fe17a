"""Routers of mixtures of experts: which experts process each token, and with which weights."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from graphwright.array import bool_, from_numpy
from graphwright.autograd import Parameter, Tensor, active_recorder, autocast_to, is_grad_enabled
from graphwright.autograd.functions import wide
from graphwright.autograd.recorder import labelled
from graphwright.errors import UsageError
from graphwright.nn import initial
from graphwright.nn.layers import Linear
from graphwright.nn.module import Buffer, Module
from graphwright.ops import call

TINY_NORM = 1e-6
"""The least norm by which a token or prototype is divided."""
HIGHEST_THRESHOLD = 0.99
CLOSED = 1e-10
"""Share of a token's scores up to which a gate closes an expert; an open one above its threshold has over 1/(3κE)."""
LINEAR_BELOW = -30.0
"""Below this ln softplus(x) is x in float64 too, and softplus underflows in float32 at -104."""


class AllDead(UsageError):
    """No expert of a layer is alive."""


class Uncalibrated(UserWarning):
    """A threshold router trains with thresholds that were not set from data; `experts.calibrate` sets them."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Assignment of N tokens to E experts.

    Attributes:
        logits: router outputs [N, E], float32 or wider.
        scores: of the logits [N, E], such as their softmax.
        choice: the experts of each token: ids int64 [N, k], highest score first, ties by ascending id, -1 for none; or
            a mask bool [N, E].
        weights: factors of the results of these experts, of the shape of `choice`.
        runs: offsets [E + 1], rows and pairs of the op `dispatch`: the tokens of each expert.
        valid: bool [N], False for padding, which has no experts; None if all tokens are valid.
        margin: of a `ThresholdRouter`, as are the next two: z [N, E], cosine minus threshold, -∞ for dead experts.
        hits: bool [N, E], the experts above their threshold that no gate closes, before the fallback.
        unrouted: bool [N], True where there is no hit, so that the fallback chose an expert.
    """

    logits: Tensor
    scores: Tensor
    choice: Tensor
    weights: Tensor
    runs: tuple[Tensor, Tensor, Tensor]
    valid: Tensor | None = None
    margin: Tensor | None = None
    hits: Tensor | None = None
    unrouted: Tensor | None = None

    @property
    def counts(self) -> Tensor:
        """Tokens per expert, int64 [E]."""
        offsets = self.runs[0]
        return offsets[1:] - offsets[:-1]


class TopKRouter(Module):
    """The k experts with the highest scores of a linear map of each token; ties go to the lower id.

    Args:
        dim, experts, k: size of a token, number of experts, and of experts that process each token.
        score: `softmax` over all experts, or `sigmoid` of each.
        normalize: whether to divide the weights of a token by their sum.
    """

    def __init__(
        self, dim: int, experts: int, k: int, *, score: str = "softmax", normalize: bool = True, name: str = "",
        seed: int | None = None,
    ) -> None:  # fmt: skip
        if not 1 <= k <= experts:
            raise UsageError("invalid number of experts per token", expected=f"1 <= k <= {experts}", got=k)
        if score not in ("softmax", "sigmoid"):  # by name: the choices of published models
            raise UsageError("unknown score function of experts", expected="softmax or sigmoid", got=score)
        self.k, self.score, self.normalize = k, score, normalize
        self.weight = Linear(dim, experts, bias=False, name=name, seed=seed).weight

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Routing:
        """Route tokens x [N, dim], except those where `valid` [N] is False; all of it in float32 or wider."""
        with autocast_to(None):
            logits = call("linear", wide(x), wide(self.weight))
        scores = call(self.score, logits)
        weights, ids = scores.topk(self.k)
        if self.normalize:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        if valid is not None:
            ids = call("where", valid.unsqueeze(-1), ids, call("full_like", ids, value=-1))
        runs = call("dispatch", ids, experts=logits.shape[1])
        return Routing(logits, scores, ids, weights, runs, valid)


class ThresholdRouter(Module):
    """Every expert whose cosine with a token is above the expert's threshold: any number of experts for each token.

    With p the expert's prototype [dim] and ϑ its threshold, a 0-d parameter: c = ⟨x/‖x‖, p/‖p‖⟩, z = c - tanh ϑ, and
    the expert is a hit where z > 0. A token without hits is unrouted: the fallback is its expert with the largest z,
    the lowest id on ties. The weights of the chosen experts are s/Σs with s = ln(1 + e^(κz)), κ = e^η. All of this is
    computed in float32 or wider. No gradient flows through the choice.

    Prototype and threshold belong to the expert: `MoE` creates them by `expert_parameters` and passes its experts.
    Thresholds begin where independent Gaussian tokens would use k0 experts; `experts.calibrate` sets them from data.

    Source: top-any gating of DynMoE (Guo et al. 2024, arXiv 2405.14297), with other weights.

    Args:
        dim, experts: size of a token, number of experts.
        k0: mean number of experts per token that calibration aims at, in (0, experts].
        kappa: initial κ > 0, the slope of the weights.
        null: divide by ln 2 + Σs, so that the score of a token's only expert has an effect and a gradient.
        ste: let gradients pass the choice as if it were σ(κz) (straight-through).
        live: number of experts that are alive at first, by default all.

    Attributes:
        alive: buffer, bool [experts]; a dead expert has z = -∞ and no tokens.
    """

    def __init__(
        self, dim: int, experts: int, k0: float, kappa: float = 10.0, *, null: bool = False, ste: bool = False,
        live: int | None = None,
    ) -> None:  # fmt: skip
        live = experts if live is None else live
        if not 0 < live <= experts:
            raise UsageError("invalid number of live experts", expected=f"1 to {experts}", got=live)
        if not 0 < k0 <= live:
            raise UsageError("invalid mean number of experts per token", expected=f"0 < k0 <= {live}", got=k0)
        if not kappa > 0:
            raise UsageError("invalid slope of the weights", expected="kappa > 0", got=kappa)
        self.dim, self.k0, self.null, self.ste = dim, k0, null, ste
        self.eta = Parameter(initial.full((), log(kappa)))
        self.alive = Buffer(from_numpy(np.arange(experts) < live))
        share = NormalDist().inv_cdf(1 - k0 / live) / sqrt(dim) if k0 < live else -1.0
        self.start = float(np.float32(np.arctanh(np.clip(share, -HIGHEST_THRESHOLD, HIGHEST_THRESHOLD))))
        self._calibrated = False

    def expert_parameters(self, name: str = "", seed: int | None = None) -> dict[str, Parameter]:
        """Return the parameters that the router has in each expert: `prototype` [dim] and `threshold` []."""
        drawn = initial.normal((self.dim,), name and f"{name}prototype", std=1 / sqrt(self.dim), seed=seed)
        return {"prototype": Parameter(drawn), "threshold": Parameter(initial.full((), self.start))}

    def forward(self, x: Tensor, valid: Tensor | None = None, *, experts: Sequence[Any]) -> Routing:
        """Route tokens x [N, dim], except those where `valid` [N] is False; `experts` have the router's parameters.

        Raises: AllDead. Warns: Uncalibrated, once, where gradients are recorded in training.
        """
        self._check(experts)
        with autocast_to(None):
            cosine = labelled(self.cosines(x, experts), "cosine")
            thresholds = labelled(call("stack", *(e.threshold for e in experts)), "thresholds")
            return self._routing(margins(cosine, thresholds), valid)

    def cosines(self, x: Tensor, experts: Sequence[Any]) -> Tensor:
        """Return the cosines [N, E] of tokens x [N, dim] with the prototypes, in float32 or wider."""
        prototypes = wide(labelled(call("stack", *(e.prototype for e in experts)), "prototypes"))
        return call("linear", labelled(unit_rows(wide(x)), "directions"), unit_rows(prototypes))

    def _routing(self, z: Tensor, valid: Tensor | None) -> Routing:
        """Choose and weigh experts by z [N, E]. Gates, added to a program, multiply the shares of each softmax.

        An expert whose gate is 0 is no hit, but stays in the mask, at weight 0, of tokens with a hit: its gate gets a
        gradient.
        """
        logits = labelled(z * self.eta.exp(), "logits")
        score = labelled(_log_softplus(logits), "score")
        margin = labelled(call("where", self.alive, z.detach(), -np.inf), "margin")
        scores = labelled(call("softmax", score, self.alive, axis=-1), "scores")
        above = call("gt", margin, 0.0)
        above = above if valid is None else call("logical_and", above, valid.unsqueeze(-1))
        hits = labelled(call("logical_and", above, call("gt", scores, CLOSED)), "hits")
        none = call("logical_not", call("any", hits, axes=(1,), keepdims=False))
        unrouted = labelled(none if valid is None else call("logical_and", none, valid), "unrouted")
        best = call("one_hot", call("argmax", scores, axis=-1), classes=z.shape[1]).to(bool_)
        mask = labelled(call("where", unrouted.unsqueeze(-1), best, above), "mask")
        weights = call("softmax", score, mask, axis=-1)
        if self.null or self.ste:
            chosen = call("where", mask, score, -np.inf).logsumexp(-1, keepdims=True)
            share = call("sigmoid", chosen - log(log(2))) if self.null else None
            weights = weights if share is None else weights * share
            if self.ste:
                total = chosen if share is None else chosen - share.log()
                slope = logits.sigmoid() * (score - total).exp().detach()
                slope = slope - weights.detach() * slope.sum(axis=-1, keepdims=True)
                weights = weights + (slope - slope.detach())
        weights = labelled(weights, "weights")
        runs = call("dispatch", mask, experts=z.shape[1])
        return Routing(logits, scores, mask, weights, runs, valid, margin, hits, unrouted)

    def _check(self, experts: Sequence[Any]) -> None:
        count = self.alive.shape[0]
        if len(experts) != count or any(not hasattr(e, "prototype") for e in experts):
            raise UsageError("the experts are not the router's", expected=f"{count} with its parameters",
                             got=f"{len(experts)} experts", fix="nn.MoE(..., router=router) creates them")  # fmt: skip
        if not self.alive.data.to_numpy().any():
            raise AllDead("no expert is alive", where=self.alive.name, expected="at least one", got=f"{count} dead")
        recorder = active_recorder.get()
        if recorder is not None and recorder.stops:  # a program, which may be calibrated before it trains
            return
        if not self._calibrated and is_grad_enabled() and self.trains:
            self._calibrated = True
            if all(float(e.threshold.data.to_numpy()) == self.start for e in experts):
                text = "the router trains with its initial thresholds: set them by experts.calibrate(model, batch)"
                warnings.warn(text, Uncalibrated, stacklevel=4)


def margins(cosine: Tensor, thresholds: Tensor) -> Tensor:
    """Return z [N, E] from cosines [N, E], of which NaN counts as -1, and the parameters ϑ [E]."""
    return call("where", call("isnan", cosine), -1.0, cosine) - wide(thresholds).tanh()


def unit_rows(x: Tensor) -> Tensor:
    """Return x [N, C] with each row divided by its norm, or by `TINY_NORM` if that is larger."""
    square = (x * x).sum(axis=-1, keepdims=True)
    return x * call("rsqrt", square.clamp(min=TINY_NORM**2))


def _log_softplus(x: Tensor) -> Tensor:
    """Return ln ln(1 + eˣ), which is x for very negative x."""
    curved = call("softplus", x.clamp(min=LINEAR_BELOW)).log()
    return call("where", call("lt", x, LINEAR_BELOW), x, curved)


def balance_loss(routing: Routing | Sequence[Routing], *, like: Literal["switch", "transformers"] = "switch") -> Tensor:
    """E · Σ f_e · P_e: 1 for equal use of experts, E if one gets all tokens (Fedus, Zoph and Shazeer 2022, eq. 4).

    f_e is the fraction of all assignments to expert e, a constant; P_e is the mean of its scores. Several layers are
    pooled. The loss of transformers (`load_balancing_loss_func`) counts assignments per token: it is k times as large.
    """
    layers = [routing] if isinstance(routing, Routing) else list(routing)
    if like not in ("switch", "transformers"):
        raise UsageError("unknown form of the balance loss", expected="switch or transformers", got=like)
    kind, experts = layers[0].scores.dtype, layers[0].scores.shape[1]
    counts = sum((r.counts.to(kind) for r in layers[1:]), layers[0].counts.to(kind))
    sums, tokens = [], []
    for r in layers:
        marks = None if r.valid is None else r.valid.to(kind).unsqueeze(-1)
        sums.append((r.scores if marks is None else r.scores * marks).sum(axis=0))
        tokens.append(float(r.scores.shape[0]) if marks is None else marks.sum())
    number = sum(tokens[1:], tokens[0])
    share = counts / (counts.sum() if like == "switch" else number)
    return (share * (sum(sums[1:], sums[0]) / number)).sum() * float(experts)


def z_loss(routing: Routing) -> Tensor:
    """Mean of logsumexp(logits)², which penalises large logits (Zoph et al. 2022, eq. 5)."""
    lse = routing.logits.logsumexp(-1)
    if routing.valid is None:
        return (lse * lse).mean()
    marks = routing.valid.to(lse.dtype)
    return (lse * lse * marks).sum() / marks.sum()
