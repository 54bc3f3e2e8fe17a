"""Scaled dot-product attention with all that may change a score: the fused op where that suffices, else primitives."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np

from graphwright.array import float32, from_numpy
from graphwright.autograd import Tensor, as_tensor, dropout
from graphwright.errors import ShapeError, UsageError
from graphwright.ops import call
from graphwright.ops.rules import equal_dim


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    q_start: int | Tensor | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ + bias over the keys that are seen) v; query head h reads key head h // (H / G).

    Args:
        q: [B, H, Tq, D]; k: [B, G, Tk, D]; v: [B, G, Tk, Dv]; H a multiple of G.
        mask: bool, broadcasts to [B, H, Tq, Tk]; true where a query sees a key.
        bias: floating, broadcasts to [B, H, Tq, Tk], added after the cap; -inf hides a key.
        key_mask: bool [B, Tk], false for padding.
        causal: query i sees key j iff j ≤ q_start + i: the last query stands at the last key (torch's `is_causal` lets
            the first stand at the first, which is the same for Tq = Tk).
        window: with `causal`, and j > q_start + i - window: so many keys, the query's own included.
        q_start: place of the first query among the keys; Tk - Tq by default.
        softcap: scores s become softcap · tanh(s / softcap).
        dropout_p: of the probabilities; the caller says whether it trains.
        scale: 1/√D by default.
    Returns: [B, H, Tq, Dv], dtype of q; 0, with gradient 0, for a query that sees no key. Scores of 16-bit operands are
        float32 from the product on.
    Raises: ShapeError, DTypeError, UsageError for a window without `causal`.
    """
    if (window is not None or q_start is not None) and not causal:
        raise UsageError("places count with causal=True alone", got=f"window {window}, q_start {q_start}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if mask is None and bias is None and softcap is None and not dropout_p:
        start = None if q_start is None else as_tensor(q_start)
        extra = {name: t for name, t in (("key_mask", key_mask), ("q_start", start)) if t is not None}
        return call("sdpa", q, k, v, *extra.values(), scale=scale, causal=causal, window=window, optional=tuple(extra))
    scores = _scores(q, k, v) * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    seen = [t for t in (mask, None if bias is None else bias > -inf) if t is not None]
    if key_mask is not None:
        seen.append(key_mask.reshape(key_mask.shape[0], 1, 1, key_mask.shape[1]))
    if causal:
        seen.append(visible(q.shape[2], k.shape[2], window, q_start))
    together = None
    for one in seen:
        together = one if together is None else together & one
    weights = scores.softmax(-1) if together is None else scores.softmax(-1, mask=together.expand(*scores.shape))
    weights = dropout(weights, dropout_p) if dropout_p else weights
    return _mixed(weights.to(q.dtype), v)


def visible(queries: int, keys: int, window: int | None = None, q_start: int | Tensor | None = None) -> Tensor:
    """Bool [queries, keys]: which keys a causal query sees; see `attention`."""
    start: Any = keys - queries if q_start is None else q_start
    ahead = Tensor(from_numpy(np.arange(keys)[None] - np.arange(queries)[:, None])) - start
    seen = ahead <= 0
    return seen if window is None else seen & (ahead > -window)


def _scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Q kᵀ [B, H, Tq, Tk], key heads shared by groups of query heads."""
    if any(t.ndim != 4 for t in (q, k, v)):
        raise ShapeError(
            "takes q [B, H, Tq, D], k [B, G, Tk, D], v [B, G, Tk, Dv]", got=f"{q.spec}, {k.spec}, {v.spec}"
        )
    for at, name in ((0, "batch"), (1, "kv heads"), (2, "length")):
        equal_dim(k.shape[at], v.shape[at], f"{name} of v")
    groups = k.shape[1]
    if not groups or q.shape[1] % groups:
        raise ShapeError("query heads must be a multiple of key heads", expected=f"k·{groups}", got=q.shape[1])
    split = call("unflatten", q, axis=1, sizes=(groups, q.shape[1] // groups))
    scores = call("flatten", split @ k.unsqueeze(2).transpose(3, 4), start=1, end=2)
    return scores.to(float32) if scores.dtype.is_low else scores


def _mixed(weights: Tensor, v: Tensor) -> Tensor:
    split = call("unflatten", weights, axis=1, sizes=(v.shape[1], weights.shape[1] // v.shape[1]))
    return call("flatten", split @ v.unsqueeze(2), start=1, end=2)
