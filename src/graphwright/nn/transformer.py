"""SwiGLU feed-forward, mixture of experts, and the pre-norm block of a Llama-class transformer."""

from __future__ import annotations

from dataclasses import dataclass

from graphwright.array import float32, int64
from graphwright.autograd import Parameter, Tensor, zeros
from graphwright.errors import UsageError
from graphwright.nn import init
from graphwright.nn.attention import MultiHeadAttention
from graphwright.nn.linear import Linear
from graphwright.nn.module import Module
from graphwright.nn.norm import RMSNorm
from graphwright.ops import call


class SwiGLU(Module):
    """down(silu(gate x) ⊙ up x) without biases (Shazeer 2020)."""

    def __init__(self, dim: int, hidden: int, *, name: str = "", seed: int | None = None) -> None:
        def linear(inner: int, outer: int, label: str) -> Linear:
            return Linear(inner, outer, bias=False, name=name and f"{name}{label}.", seed=seed)

        self.gate, self.up = linear(dim, hidden, "gate"), linear(dim, hidden, "up")
        self.down = linear(hidden, dim, "down")

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to the same shape."""
        return self.down(call("swiglu", self.gate(x), self.up(x)))


class TransformerBlock(Module):
    """Pre-norm block: x + attention(norm x), then x + feed_forward(norm x); the sums are junctions.

    Args:
        attention: maps [B, T, dim] to the same shape.
        feed_forward: any module that maps [B, T, dim] to the same shape, e.g. MoE.
        dim, eps: arguments of the two RMSNorms.
    """

    def __init__(self, attention: MultiHeadAttention, feed_forward: Module, dim: int, eps: float = 1e-6) -> None:
        self.attention_norm, self.attention = RMSNorm(dim, eps), attention
        self.feed_forward_norm, self.feed_forward = RMSNorm(dim, eps), feed_forward

    def forward(self, x: Tensor, *, positions: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        """[B, T, dim] to the same shape; for positions and key_mask see `MultiHeadAttention`."""
        x = call("junction", x, self.attention(self.attention_norm(x), positions=positions, key_mask=key_mask))
        return call("junction", x, self.feed_forward(self.feed_forward_norm(x)))


@dataclass(frozen=True, slots=True)
class Routing:
    """Assignment of N tokens to experts.

    Attributes:
        logits: router outputs [N, E], float32 or wider.
        scores: softmax or sigmoid of the logits.
        ids: experts of each token, int64 [N, k], highest score first; of ties the lower id.
        weights: factors of the experts' results, [N, k].
        counts: tokens per expert, int64 [E].
    """

    logits: Tensor
    scores: Tensor
    ids: Tensor
    weights: Tensor
    counts: Tensor


class MoE(Module):
    """Mixture of experts: Σ over k experts of weight · down(silu(gate x) ⊙ up x).

    Args:
        dim, hidden: sizes of each expert.
        experts, k: number of experts, and of experts per token.
        normalize: whether to divide the weights of a token by their sum.
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
                "invalid expert counts or score",
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
        """Assign tokens [N, dim] to experts; scores are float32 or wider for any dtype of x."""
        logits = self.router(x)
        logits = logits.to(float32) if logits.dtype.is_low else logits
        scores = logits.softmax() if self.score == "softmax" else logits.sigmoid()
        weights, ids = scores.topk(self.k)
        if self.normalize:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        counts = call("bincount", ids.reshape(-1), length=self.experts)
        return Routing(logits, scores, ids, weights, counts)

    def forward(self, x: Tensor) -> Tensor:
        """[..., dim] to the same shape."""
        return self.mix(x, self.route(x.reshape(-1, x.shape[-1])))

    def mix(self, x: Tensor, routing: Routing) -> Tensor:
        """Run each token [..., dim] through its experts."""
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
    """E · Σ f_e · P_e: 1 if experts are used equally, E if one gets all tokens (Fedus, Zoph and Shazeer 2022, eq. 4).

    f_e is the fraction of all assignments to expert e, a constant; P_e is the mean of its scores.
    """
    tokens, experts = routing.scores.shape
    share = routing.counts.to(routing.scores.dtype) / float(routing.ids.shape[-1] * tokens)
    return (share * routing.scores.mean(axis=0)).sum() * float(experts)


def z_loss(routing: Routing) -> Tensor:
    """Mean of logsumexp(logits)², which penalises large logits (Zoph et al. 2022, eq. 5)."""
    lse = routing.logits.logsumexp(-1)
    return (lse * lse).mean()
