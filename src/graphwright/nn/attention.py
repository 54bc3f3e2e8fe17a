"""Attention with grouped key heads, rotary positions, sliding windows and capped scores."""

from __future__ import annotations

from math import log

import numpy as np

from graphwright.array import from_numpy
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from graphwright.nn.attend import attention
from graphwright.nn.linear import Linear
from graphwright.nn.module import Buffer, Module
from graphwright.ops import call
from graphwright.ops.attention import ROPE_STYLES


class RotaryEmbedding(Module):
    """Cosines and sines of pos · theta^(-2i/dim) for the pairs of a head (Su et al. 2021).

    The table of frequencies is a buffer that no state holds.

    Args:
        dim: entries of a head that are turned, even; those behind them stay.
        theta: base of the frequencies.
        style: which entries make pair i: `half`: (i, i + dim/2); `interleaved`: (2i, 2i + 1).
    """

    def __init__(self, dim: int, theta: float = 10000.0, style: str = "half") -> None:
        if dim % 2 or dim < 2 or style not in ROPE_STYLES:
            expected = f"an even dim; {' or '.join(ROPE_STYLES)}"
            raise UsageError("pairs of entries are turned", expected=expected, got=f"{dim}, {style}")
        self.style = style
        frequencies = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
        self.inv_freq = Buffer(from_numpy(frequencies.astype(np.float32)), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions int64 [B or 1, T] to cos and sin, float32 [B or 1, T, dim / 2]."""
        return call("rope_table", positions, self.inv_freq, scale=1.0)

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Heads [B, H, T, D] turned by what `forward` gave."""
        return call("rope", x, cos, sin, style=self.style)


class SinusoidalEmbedding(Module):
    """Positions int64 [...] to [..., dim]: sin and cos of pos · 10000^(-2i/dim) in turn (Vaswani et al. 2017, 3.5)."""

    def __init__(self, dim: int) -> None:
        if dim % 2 or dim < 2:
            raise UsageError("sines and cosines come in pairs", expected="an even dim", got=dim)
        frequencies = np.exp(-log(10000.0) * np.arange(0, dim, 2, dtype=np.float64) / dim)
        self.frequencies = Buffer(from_numpy(frequencies.astype(np.float32)), persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        """See the class."""
        shape = positions.shape
        angle = positions.to(self.frequencies.dtype).reshape(*shape, 1) * self.frequencies
        half = len(self.frequencies)
        pairs = call("concat", *(t.reshape(*shape, half, 1) for t in (angle.sin(), angle.cos())), axis=-1)
        return pairs.reshape(*shape, 2 * half)


class MultiHeadAttention(Module):
    """Heads of softmax(scale · q kᵀ) v between two linear maps.

    Args:
        dim: of input and output.
        heads: of queries; each reads key head h // (heads / kv_heads).
        kv_heads: of keys and values; `heads` by default.
        head_dim: dim / heads by default.
        bias: of the four linear maps.
        causal: query i of Tq sees keys up to i + Tk - Tq only.
        window: and of those the last so many, its own included.
        softcap: scores s become softcap · tanh(s / softcap).
        rope: turns queries and keys by their positions.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        bias: bool = False,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        rope: RotaryEmbedding | None = None,
        name: str = "",
        seed: int | None = None,
    ) -> None:
        self.heads, self.kv_heads = heads, heads if kv_heads is None else kv_heads
        self.head_dim = dim // heads if head_dim is None else head_dim
        if heads % self.kv_heads or (head_dim is None and dim % heads) or (window is not None and not causal):
            raise UsageError(
                "heads do not fit",
                expected="heads a multiple of kv_heads, dim of heads; a window needs causal",
                got=f"dim {dim}, heads {heads}, kv_heads {self.kv_heads}, window {window}",
            )
        self.causal, self.window, self.softcap = causal, window, softcap
        wide, narrow = heads * self.head_dim, self.kv_heads * self.head_dim

        def linear(inner: int, outer: int, label: str) -> Linear:
            return Linear(inner, outer, bias, name=name and f"{name}{label}.", seed=seed)

        self.q, self.k, self.v = linear(dim, wide, "q"), linear(dim, narrow, "k"), linear(dim, narrow, "v")
        self.out = linear(wide, dim, "out")
        self.rope = rope

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: [B, Tq, dim], what asks.
            context: [B, Tk, dim], what is looked at; x by default.
            positions: int64 [B or 1, Tk] of the context, with rope; the last Tq are those of x. 0 to Tk - 1 by default.
            key_mask: bool [B, Tk], false for padding. A query that sees no key gives 0 before the last map.
        Returns: [B, Tq, dim].
        """
        source = x if context is None else context
        q = self._split(self.q(x), self.heads)
        k, v = self._split(self.k(source), self.kv_heads), self._split(self.v(source), self.kv_heads)
        if self.rope is not None:
            if positions is None:
                positions = Tensor(from_numpy(np.arange(source.shape[1])[None]))
            cos, sin = self.rope(positions)
            k, first = self.rope.turn(k, cos, sin), source.shape[1] - x.shape[1]
            if first:
                cos, sin = (call("slice", t, axis=1, start=first, size=x.shape[1]) for t in (cos, sin))
            q = self.rope.turn(q, cos, sin)
        mixed = attention(q, k, v, key_mask=key_mask, causal=self.causal, window=self.window, softcap=self.softcap)
        return self.out(call("flatten", mixed.permute(0, 2, 1, 3), start=2, end=3))

    def _split(self, t: Tensor, heads: int) -> Tensor:
        return call("unflatten", t, axis=2, sizes=(heads, self.head_dim)).permute(0, 2, 1, 3)
