"""Mixture of experts: each token goes to the k experts that its router scores highest (Shazeer et al. 2017).

Tokens are sorted by expert, so that each expert is one run of rows in a grouped product; every step is a visible op.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphwright.array import float32, int64
from graphwright.autograd import Parameter, Tensor, zeros
from graphwright.errors import UsageError
from graphwright.nn import init
from graphwright.nn.linear import Linear
from graphwright.nn.module import Module
from graphwright.ops import call


@dataclass(frozen=True, slots=True)
class Routing:
    """Where N tokens go.

    Attributes:
        logits: of the router, [N, E] float32 or wider.
        scores: softmax or sigmoid of them.
        ids: experts of each token, int64 [N, k], the highest score first; of ties the lower id.
        weights: what their results count, [N, k].
        counts: tokens per expert, int64 [E].
    """

    logits: Tensor
    scores: Tensor
    ids: Tensor
    weights: Tensor
    counts: Tensor


class MoE(Module):
    """Σ over k experts of weight · down(silu(gate x) ⊙ up x): [..., dim] to the same.

    Args:
        dim, hidden: of each expert.
        experts, k: how many there are, and how many each token goes to.
        normalize: divide the weights of a token by their sum.
        score: `softmax` over all experts, or `sigmoid` of each.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        k: int,
        *,
        normalize: bool = True,
        score: str = "softmax",
        name: str = "",
        seed: int | None = None,
    ) -> None:
        if not 1 <= k <= experts or score not in ("softmax", "sigmoid"):
            raise UsageError(
                "experts do not fit",
                expected="1 <= k <= experts, softmax or sigmoid",
                got=f"k {k} of {experts}, {score}",
            )
        self.experts, self.k, self.normalize, self.score = experts, k, normalize, score
        self.router = Linear(dim, experts, bias=False, name=name and f"{name}router.", seed=seed)

        def drawn(label: str, inner: int, outer: int) -> Parameter:
            key = name and f"{name}{label}"
            return Parameter(init.uniform((experts, inner, outer), key, bound=inner**-0.5, seed=seed))

        self.gate, self.up = drawn("gate", dim, hidden), drawn("up", dim, hidden)
        self.down = drawn("down", hidden, dim)

    def route(self, x: Tensor) -> Routing:
        """Scores and experts of tokens [N, dim]; scores are float32 or wider whatever the dtype of x."""
        logits = self.router(x)
        logits = logits.to(float32) if logits.dtype.is_low else logits
        scores = logits.softmax() if self.score == "softmax" else logits.sigmoid()
        weights, ids = scores.topk(self.k)
        if self.normalize:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        counts = call("bincount", ids.reshape(-1), length=self.experts)
        return Routing(logits, scores, ids, weights, counts)

    def forward(self, x: Tensor) -> Tensor:
        """Each token through its experts."""
        return self.mix(x, self.route(x.reshape(-1, x.shape[-1])))

    def mix(self, x: Tensor, routing: Routing) -> Tensor:
        """Each token [..., dim] through the experts that a routing of them names."""
        tokens = x.reshape(-1, x.shape[-1])
        order = routing.ids.reshape(-1).argsort()  # stable: tokens of an expert keep their order
        rows = order // self.k
        offsets = call("concat", zeros(1, dtype=int64), routing.counts.cumsum(0), axis=0)
        given = call("embedding", tokens, rows)
        inner = call("swiglu", *(call("grouped_matmul", given, w, offsets) for w in (self.gate, self.up)))
        made = call("grouped_matmul", inner, self.down, offsets)
        weights = call("embedding", routing.weights.reshape(-1, 1), order)
        total = zeros(*tokens.shape, dtype=weights.dtype)
        return call("index_add", total, made * weights, rows, axis=0).to(x.dtype).reshape(x.shape)


def balance_loss(routing: Routing) -> Tensor:
    """E · Σ f_e · P_e: 1 where experts are used alike, E where one takes all (Fedus, Zoph and Shazeer 2022, eq. 4).

    f_e is the share of all choices that fell on expert e, a constant; P_e the mean of its scores.
    """
    tokens, experts = routing.scores.shape
    share = routing.counts.to(routing.scores.dtype) / float(routing.ids.shape[-1] * tokens)
    return (share * routing.scores.mean(axis=0)).sum() * float(experts)


def z_loss(routing: Routing) -> Tensor:
    """Mean of logsumexp(logits)²: keeps logits small (Zoph et al. 2022, eq. 5)."""
    lse = routing.logits.logsumexp(-1)
    return (lse * lse).mean()
