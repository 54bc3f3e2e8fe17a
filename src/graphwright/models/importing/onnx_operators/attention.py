"""Attention and rotary embeddings, as one op each."""

from __future__ import annotations

from functools import reduce
from math import inf
from operator import and_
from typing import Any

from graphwright.array import float32
from graphwright.autograd import Tensor, arange, cat, top, zeros
from graphwright.models.importing.onnx_operators.table import dtype_of, operator
from graphwright.nn import functional
from graphwright.ops import call


def _heads(x: Tensor, heads: int) -> Tensor:
    """Return [B, T, heads·D] as [B, heads, T, D]."""
    return x if x.ndim == 4 else x.unflatten(2, (heads, -1)).transpose(1, 2)


@operator("Attention")
def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, past_key: Tensor | None = None,
    past_value: Tensor | None = None, lengths: Tensor | None = None, *, is_causal: int = 0, kv_num_heads: int = 0,
    left_window_size: int = -1, right_window_size: int = -1, q_num_heads: int = 0, qk_matmul_output_mode: int = 0,
    scale: float | None = None, softcap: float = 0.0, softmax_precision: int = 0, outputs: int,
) -> Any:  # fmt: skip
    """Scaled dot-product attention; query head h reads key head h // (heads / key heads).

    With a cache, new keys follow those of the cache. The other results are the keys and values, and the scores.
    """
    flat = q.ndim == 3
    q, k, v = _heads(q, q_num_heads), _heads(k, kv_num_heads), _heads(v, kv_num_heads)
    start: Any = 0
    if past_key is not None and past_value is not None:
        start = past_key.shape[2]
        k, v = cat([past_key, k], 2), cat([past_value, v], 2)
    given: dict[str, Any] = {}
    if mask is not None:
        given["mask" if mask.dtype.kind == "bool" else "bias"] = _widened(mask, k)
    if lengths is not None:
        ends = lengths.reshape(-1, 1, 1, 1)
        seen = arange(k.shape[2]) < ends
        if is_causal:
            seen = seen & (arange(k.shape[2]) <= arange(q.shape[2]).unsqueeze(1) + (ends - q.shape[2]))
        given["mask"] = seen if "mask" not in given else given["mask"] & seen
    if left_window_size >= 0 or right_window_size >= 0:
        first = start if lengths is None else lengths.reshape(-1, 1, 1, 1) - q.shape[2]
        ahead = arange(k.shape[2]) - (arange(q.shape[2]).unsqueeze(1) + first)
        near = [ahead >= -left_window_size] if left_window_size >= 0 else []
        near += [ahead <= right_window_size] if right_window_size >= 0 else []
        given["mask"] = reduce(and_, near, *([given["mask"]] if "mask" in given else []))
    causal = bool(is_causal) and lengths is None
    cap, factor = softcap or None, q.shape[-1] ** -0.5 if scale is None else scale
    made = functional.attention(q, k, v, causal=causal, q_start=start if causal else None, softcap=cap, scale=factor,
                                **given)  # fmt: skip
    made = made.transpose(1, 2).flatten(2) if flat else made
    if outputs < 2:
        return made
    if outputs < 4:
        return (made, k, v)[:outputs]
    scores = _shown(q, k, given, causal, start, cap, factor, qk_matmul_output_mode, softmax_precision)
    return made, k, v, scores


def _widened(mask: Tensor, k: Tensor) -> Tensor:
    """Return a mask with as many entries as there are keys; keys that it lacks are hidden."""
    short, keys = mask.spec.shape[-1], k.spec.shape[2]
    if short == keys or isinstance(short, str) or isinstance(keys, str) or short == 1:
        return mask
    if mask.dtype.kind == "bool":
        return cat([mask, zeros(*mask.shape[:-1], keys - short, dtype=mask.dtype)], -1)
    return functional.pad(mask, (0, keys - short), "constant", -inf)


def _shown(
    q: Tensor, k: Tensor, given: dict[str, Any], causal: bool, start: Any, cap: float | None, factor: float, mode: int,
    precision: int,
) -> Tensor:  # fmt: skip
    """Return the scores at a stage: 0 products, 1 after the softcap, 2 with masks, 3 probabilities."""
    keys = k if k.shape[1] == q.shape[1] else call("repeat_interleave", k, repeats=q.shape[1] // k.shape[1], axis=1)
    scores = top.matmul(q * factor, keys.transpose(2, 3))
    if mode >= 1 and cap is not None:
        scores = top.tanh(scores / cap) * cap
    if mode < 2:
        return scores
    if "bias" in given:
        scores = scores + given["bias"]
    hidden = [~given["mask"]] if "mask" in given else []
    if causal:
        hidden.append(~functional.visible(q.shape[2], k.shape[2], None, start))
    for part in hidden:
        scores = top.masked_fill(scores, part, -inf)
    if mode == 2:
        return scores
    fine = dtype_of(precision) if precision else float32 if q.dtype.is_low else q.dtype
    seen = scores > -inf
    return functional.softmax(scores.to(fine), -1, mask=seen).to(q.dtype)


@operator("RotaryEmbedding")
def rotary_embedding(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, *, interleaved: int = 0, num_heads: int = 0,
    rotary_embedding_dim: int = 0,
) -> Tensor:  # fmt: skip
    """Rotate pairs of entries of each head by angles that depend on the position."""
    if positions is not None:
        cos, sin = (call("index", table, positions.to("int64"), axis=0) for table in (cos, sin))
    heads = _heads(x, num_heads)
    made = call("rope", heads, cos, sin, style="interleaved" if interleaved else "half")
    return made if x.ndim == 4 else made.transpose(1, 2).flatten(2)
