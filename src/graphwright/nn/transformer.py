"""The gated feed-forward layer and the block of a Llama-class transformer."""

from __future__ import annotations

from graphwright.autograd import Tensor
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
