"""The gated feed-forward layer and the block of a Llama-class transformer."""

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
        """[..., dim] to the same."""
        return self.down(call("swiglu", self.gate(x), self.up(x)))


class TransformerBlock(Module):
    """x + attention(norm x), then x + feed_forward(norm x), each norm in front (pre-norm); the sums are junctions.

    Args:
        attention: any module of [B, T, dim] to the same.
        feed_forward: any module of [B, T, dim] to the same; a MoE as well.
        dim, eps: of the two RMSNorms.
    """

    def __init__(self, attention: MultiHeadAttention, feed_forward: Module, dim: int, eps: float = 1e-6) -> None:
        self.attention_norm, self.attention = RMSNorm(dim, eps), attention
        self.feed_forward_norm, self.feed_forward = RMSNorm(dim, eps), feed_forward

    def forward(self, x: Tensor, *, positions: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        """[B, T, dim] to the same; positions and key_mask as `MultiHeadAttention` takes them."""
        x = call("junction", x, self.attention(self.attention_norm(x), positions=positions, key_mask=key_mask))
        return call("junction", x, self.feed_forward(self.feed_forward_norm(x)))


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
