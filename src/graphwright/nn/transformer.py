"""Attention with rotary or sinusoidal positions, SwiGLU, and the block of a transformer."""

from __future__ import annotations

from math import log

import numpy as np

from graphwright.array import from_numpy
from graphwright.autograd import Tensor, arange
from graphwright.errors import UsageError
from graphwright.nn.functional import attention
from graphwright.nn.layers import Linear, RMSNorm
from graphwright.nn.module import Buffer, Module
from graphwright.ops import call
from graphwright.ops.attention import ROPE_STYLES


class RotaryEmbedding(Module):
    """Cosines and sines of pos · theta^(-2i/dim) for the pairs of a head (Su et al. 2021).

    The frequencies are a buffer that is not saved.

    Args:
        dim: number of leading entries of a head to rotate, even; later entries are unchanged.
        theta: base of the frequencies.
        style: entries of pair i: `half`: (i, i + dim/2); `interleaved`: (2i, 2i + 1).
    """

    def __init__(self, dim: int, theta: float = 10000.0, style: str = "half") -> None:
        if dim % 2 or dim < 2 or style not in ROPE_STYLES:
            expected = f"dim even and >= 2, style {' or '.join(ROPE_STYLES)}"
            raise UsageError("invalid dim or style of a rotary embedding", expected=expected, got=f"{dim}, {style}")
        self.style = style
        frequencies = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
        self.inv_freq = Buffer(from_numpy(frequencies.astype(np.float32)), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Map positions int64 [B or 1, T] to cos and sin, float32 [B or 1, T, dim / 2]."""
        return call("rope_table", positions, self.inv_freq, scale=1.0)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate heads [B, H, T, D] by the cos and sin that `forward` returned."""
        return call("rope", x, cos, sin, style=self.style)


class SinusoidalEmbedding(Module):
    """sin and cos of pos · 10000^(-2i/dim), interleaved: int64 [...] to [..., dim] (Vaswani et al. 2017, 3.5)."""

    def __init__(self, dim: int) -> None:
        if dim % 2 or dim < 2:
            raise UsageError("invalid dim of a sinusoidal embedding", expected="an even number >= 2", got=dim)
        frequencies = np.exp(-log(10000.0) * np.arange(0, dim, 2, dtype=np.float64) / dim)
        self.frequencies = Buffer(from_numpy(frequencies.astype(np.float32)), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        """Return the embedding [..., dim] of positions int64 [...]."""
        shape = positions.shape
        angle = positions.to(self.frequencies.dtype).reshape(*shape, 1) * self.frequencies
        half = len(self.frequencies)
        pairs = call("concat", *(t.reshape(*shape, half, 1) for t in (angle.sin(), angle.cos())), axis=-1)
        return pairs.reshape(*shape, 2 * half)


class MultiHeadAttention(Module):
    """Multi-head attention: softmax(scale · q kᵀ) v per head, between linear projections.

    Args:
        dim: size of input and output.
        heads: number of query heads; head h reads key head h // (heads / kv_heads).
        kv_heads: number of key and value heads; `heads` by default.
        head_dim: dim / heads by default.
        bias: whether the four projections have biases.
        causal: query i of Tq sees only keys up to i + Tk - Tq.
        window: with `causal`, number of visible keys, including the query's own.
        softcap: scores s become softcap · tanh(s / softcap).
        rope: rotates queries and keys by their positions.
    """

    def __init__(
        self, dim: int, heads: int, kv_heads: int | None = None, *, head_dim: int | None = None, bias: bool = False,
        causal: bool = True, window: int | None = None, softcap: float | None = None,
        rope: RotaryEmbedding | None = None, name: str = "", seed: int | None = None,
    ) -> None:  # fmt: skip
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        if self.kv_heads < 1 or heads < 1 or heads % self.kv_heads:
            expected, got = "kv_heads >= 1, and heads a multiple of it", f"heads {heads}, kv_heads {self.kv_heads}"
            raise UsageError("invalid numbers of heads", expected=expected, got=got)
        self.head_dim = dim // heads if head_dim is None else head_dim
        if head_dim is None and dim % heads:
            raise UsageError("dim is not a multiple of heads", expected=f"a multiple of {heads}, or head_dim", got=dim)
        if window is not None and not causal:
            raise UsageError("window was given without causal=True", expected="window None, or causal", got=window)
        self.causal, self.window, self.softcap = causal, window, softcap
        wide, narrow = heads * self.head_dim, self.kv_heads * self.head_dim

        def linear(inner: int, outer: int, label: str) -> Linear:
            return Linear(inner, outer, bias, name=name and f"{name}{label}.", seed=seed)

        self.q, self.k, self.v = linear(dim, wide, "q"), linear(dim, narrow, "k"), linear(dim, narrow, "v")
        self.out = linear(wide, dim, "out")
        self.rope = rope

    def forward(
        self, x: Tensor, context: Tensor | None = None, *, positions: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend from x to a context.

        Args:
            x: [B, Tq, dim], source of the queries.
            context: [B, Tk, dim], source of keys and values; x by default.
            positions: int64 [B or 1, Tk] of the context, for rope; x has the last Tq of these. 0 to Tk - 1 by default.
            key_mask: bool [B, Tk], false for padding. A query without visible keys gets zeros from attention.
        Returns: [B, Tq, dim].
        """
        source = x if context is None else context
        q = self._split(self.q(x), self.heads)
        k, v = self._split(self.k(source), self.kv_heads), self._split(self.v(source), self.kv_heads)
        if self.rope is not None:
            if positions is None:
                positions = arange(source.shape[1])[None]
            cos, sin = self.rope(positions)
            k, first = self.rope.rotate(k, cos, sin), source.shape[1] - x.shape[1]
            if first:
                cos, sin = (call("slice", t, axis=1, start=first, size=x.shape[1]) for t in (cos, sin))
            q = self.rope.rotate(q, cos, sin)
        mixed = attention(q, k, v, key_mask=key_mask, causal=self.causal, window=self.window, softcap=self.softcap)
        return self.out(call("flatten", mixed.permute(0, 2, 1, 3), start=2, end=3))

    def _split(self, t: Tensor, heads: int) -> Tensor:
        return call("unflatten", t, axis=2, sizes=(heads, self.head_dim)).permute(0, 2, 1, 3)


class SwiGLU(Module):
    """down(silu(gate x) ⊙ up x) without biases (Shazeer 2020)."""

    def __init__(self, dim: int, hidden: int, *, name: str = "", seed: int | None = None) -> None:
        def linear(inner: int, outer: int, label: str) -> Linear:
            return Linear(inner, outer, bias=False, name=name and f"{name}{label}.", seed=seed)

        self.gate, self.up = linear(dim, hidden, "gate"), linear(dim, hidden, "up")
        self.down = linear(hidden, dim, "down")

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward network to x [..., dim]; the shape is kept."""
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
        """Apply the block to x [B, T, dim]; the shape is kept. For positions and key_mask see `MultiHeadAttention`."""
        x = call("junction", x, self.attention(self.attention_norm(x), positions=positions, key_mask=key_mask))
        return call("junction", x, self.feed_forward(self.feed_forward_norm(x)))
