"""Functions without parameters, under torch's names: activations, normalisations, attention, convolutions, losses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import inf
from operator import and_
from typing import Any

from graphwright.array import float32
from graphwright.autograd import Tensor, arange, as_tensor, cat, einsum
from graphwright.autograd import dropout as drop
from graphwright.autograd import one_hot as encoded
from graphwright.autograd.shapes import broadcast_shapes
from graphwright.errors import ShapeError, UsageError
from graphwright.nn.activations import *  # noqa: F403
from graphwright.nn.dropouts import *  # noqa: F403
from graphwright.nn.embeddings import *  # noqa: F403
from graphwright.nn.losses import *  # noqa: F403
from graphwright.nn.normalisations import *  # noqa: F403
from graphwright.nn.op_functions import *  # noqa: F403
from graphwright.nn.resampling import *  # noqa: F403
from graphwright.nn.spatial import *  # noqa: F403
from graphwright.ops import call
from graphwright.ops.rules import equal_dim


# -- weights -----------------------------------------------------------------------------------------------------------
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · wᵀ + b: [..., in] with weight [out, in] to [..., out]. Raises: ShapeError."""
    if isinstance(input, Tensor) and not input.dtype.is_float:
        made = input @ weight.T
        return made if bias is None else made + bias
    return call("linear", input, weight) if bias is None else call("linear", input, weight, bias)


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Σ_ij a[..., i]·w[o, i, j]·b[..., j] + bias[o]: [..., in1] and [..., in2] to [..., out]."""
    made = einsum("...i,oij,...j->...o", input1, weight, input2)
    return made if bias is None else made + bias


def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Encode ids as one-hot vectors along a new last axis, int64; by default of the largest id + 1 entries."""
    return encoded(tensor, None if num_classes == -1 else num_classes)


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Pad, or for negative widths crop, the last axes.

    Args:
        pad: (before, after) of the last axis, then of the one before it, ...
        mode: `constant` (with `value`, 0 by default), `reflect`, `replicate` or `circular`.
    Raises: ShapeError for an odd number of widths, or an axis too small to reflect.
    """
    if len(pad) % 2 or len(pad) > 2 * input.ndim:
        raise ShapeError("pad has a wrong number of widths", expected="two for each padded axis", got=tuple(pad))
    pairs = list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    first = input.ndim - len(pairs)
    grown = tuple((max(a, 0), max(b, 0)) for a, b in pairs)
    if mode != "circular":
        input = call("pad", input, widths=grown, mode=mode, value=0.0 if value is None else float(value))
        return _cropped(input, pairs)
    input = _cropped(input, pairs)
    for axis, (before, after) in enumerate(grown, first):
        n = input.shape[axis]
        input = cat([input.narrow(axis, n - before, before), input, input.narrow(axis, 0, after)], axis)
    return input


def _cropped(x: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    """Remove entries at the ends of the last axes, as many as the widths below 0 say."""
    for axis, (before, after) in enumerate(pairs, x.ndim - len(pairs)):
        start, end = max(-before, 0), max(-after, 0)
        x = x.narrow(axis, start, x.shape[axis] - start - end) if start or end else x
    return x


# -- attention ---------------------------------------------------------------------------------------------------------
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, bias: Tensor | None = None,
    key_mask: Tensor | None = None, causal: bool = False, window: int | None = None,
    q_start: int | Tensor | None = None, softcap: float | None = None, dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale · q kᵀ + bias over the visible keys) v; query head h reads key head h // (H / G).

    Runs as the fused op `sdpa` where that supports the options, else as primitives.

    Args:
        q: [B, H, Tq, D]; k: [B, G, Tk, D]; v: [B, G, Tk, Dv]; H a multiple of G.
        mask: bool, broadcasts to [B, H, Tq, Tk]; true where a key is visible to a query.
        bias: floating, broadcasts to [B, H, Tq, Tk], added after the softcap; -inf hides a key.
        key_mask: bool [B, Tk], false for padding.
        causal: query i sees key j iff j ≤ q_start + i. By default the last query is aligned with the last key; torch's
            `is_causal` aligns the first ones, which is the same for Tq = Tk.
        window: number of keys that a causal query sees, including its own: also j > q_start + i - window.
        q_start: index of the first query among the keys; Tk - Tq by default.
        softcap: scores s become softcap · tanh(s / softcap).
        dropout_p: dropout of the probabilities; the caller passes 0 in evaluation.
        scale: 1/√D by default.
    Returns: [B, H, Tq, Dv], dtype of q; 0, with gradient 0, for a query without visible keys. Scores of 16-bit operands
        are cast to float32 right after the product.
    Raises: ShapeError, DTypeError, UsageError for `window` or `q_start` without `causal`.
    """
    if (window is not None or q_start is not None) and not causal:
        name = "q_start" if window is None else "window"
        raise UsageError(f"{name} was given without causal=True", where="attention", got=f"causal={causal}")
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
    masks = [t for t in (mask, None if bias is None else bias > -inf) if t is not None]
    if key_mask is not None:
        masks.append(key_mask.reshape(key_mask.shape[0], 1, 1, key_mask.shape[1]))
    if causal:
        masks.append(visible(q.shape[2], k.shape[2], window, q_start))
    seen = reduce(and_, masks) if masks else None
    weights = scores.softmax(-1, mask=None if seen is None else seen.expand(*scores.shape))
    weights = drop(weights, dropout_p) if dropout_p else weights
    return _mixed(weights.to(q.dtype), v)


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`attention` in torch's form: operands [..., T, D]; all axes before the last three are a batch.

    Args:
        attn_mask: bool, true where a key is visible, or floating, added to the scores.
        is_causal: query i sees keys 0 to i.
        enable_gqa: allow fewer heads of keys than of queries.
    Raises: ShapeError; UsageError for a mask together with `is_causal`.
    """
    if attn_mask is not None and is_causal:
        raise UsageError("a mask was given together with is_causal=True", where="scaled_dot_product_attention")
    if not enable_gqa and query.ndim == 4 and query.shape[1] != key.shape[1]:
        raise ShapeError("queries and keys have different numbers of heads", expected=query.spec, got=key.spec,
                         fix="pass enable_gqa=True")  # fmt: skip
    if not query.ndim == key.ndim == value.ndim or query.ndim > 4:
        shared = broadcast_shapes(*(x.shape[:-2] for x in (query, key, value)))
        query, key, value = (x.expand(*shared, *x.shape[-2:]) for x in (query, key, value))
    shape = query.shape[:-2]
    q, k, v = (_of_batch(x) for x in (query, key, value))
    masks: dict[str, Any] = {}
    if attn_mask is not None:
        if query.ndim > 4 and any(type(n) is not int or n != 1 for n in attn_mask.shape[:-3]):
            attn_mask = attn_mask.expand(*query.shape[:-3], *attn_mask.shape[-3:])
        kind = "mask" if attn_mask.dtype.kind == "bool" else "bias"
        masks[kind] = _of_batch(attn_mask) if attn_mask.ndim > 4 else attn_mask
    start = 0 if is_causal else None
    made = attention(q, k, v, causal=is_causal, q_start=start, dropout_p=dropout_p, scale=scale, **masks)
    return made if len(shape) == 2 else made.reshape(*shape, *made.shape[2:])


def _of_batch(x: Tensor) -> Tensor:
    """Return x with four axes, of which the first joins all before the last three."""
    return x.flatten(0, x.ndim - 4) if x.ndim > 4 else x.reshape(*(1,) * (4 - x.ndim), *x.shape)


def visible(queries: int, keys: int, window: int | None = None, q_start: int | Tensor | None = None) -> Tensor:
    """Return bool [queries, keys], true where query i sees key j under a causal mask: if j ≤ q_start + i.

    With a window, also j > q_start + i - window. `q_start` is keys - queries by default.
    """
    start: Any = keys - queries if q_start is None else q_start
    ahead = arange(keys)[None] - arange(queries)[:, None] - start
    seen = ahead <= 0
    return seen if window is None else seen & (ahead > -window)


def _scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return q kᵀ [B, H, Tq, Tk], at least float32, for k [B, G, Tk, D]; query head h reads key head h // (H / G)."""
    if any(t.ndim != 4 for t in (q, k, v)):
        got = f"{q.spec}, {k.spec}, {v.spec}"
        raise ShapeError("q, k or v is not 4-d", expected="[B, H, Tq, D], [B, G, Tk, D], [B, G, Tk, Dv]", got=got)
    for at, name in ((0, "batch"), (1, "kv heads"), (2, "length")):
        equal_dim(k.shape[at], v.shape[at], f"{name} of v")
    groups = k.shape[1]
    if not groups or q.shape[1] % groups:
        expected = f"a multiple of the number of key heads, {groups}"
        raise ShapeError("cannot divide the query heads evenly among the key heads", expected=expected, got=q.shape[1])
    split = call("unflatten", q, axis=1, sizes=(groups, q.shape[1] // groups))
    scores = call("flatten", split @ k.unsqueeze(2).transpose(3, 4), start=1, end=2)
    return scores.to(float32) if scores.dtype.is_low else scores


def _mixed(weights: Tensor, v: Tensor) -> Tensor:
    split = call("unflatten", weights, axis=1, sizes=(v.shape[1], weights.shape[1] // v.shape[1]))
    return call("flatten", split @ v.unsqueeze(2), start=1, end=2)
