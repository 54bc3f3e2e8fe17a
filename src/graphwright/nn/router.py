"""Routers of mixtures of experts: which experts process each token, and with which weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from graphwright.array import float32
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from graphwright.nn.layers import Linear
from graphwright.nn.module import Module
from graphwright.ops import call


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
    """

    logits: Tensor
    scores: Tensor
    choice: Tensor
    weights: Tensor
    runs: tuple[Tensor, Tensor, Tensor]
    valid: Tensor | None = None

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
        """Route tokens x [N, dim], except those where `valid` [N] is False; scores are float32 or wider."""
        logits = call("linear", x, self.weight)
        logits = logits.to(float32) if logits.dtype.is_low else logits
        scores = call(self.score, logits)
        weights, ids = scores.topk(self.k)
        if self.normalize:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        if valid is not None:
            ids = call("where", valid.unsqueeze(-1), ids, call("full_like", ids, value=-1))
        runs = call("dispatch", ids, experts=logits.shape[1])
        return Routing(logits, scores, ids, weights, runs, valid)


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
