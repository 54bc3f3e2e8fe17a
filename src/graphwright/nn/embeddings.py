"""Look-ups of rows of a table under torch's names."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.autograd import Tensor, as_tensor, no_grad, where
from graphwright.autograd.create import device_of
from graphwright.errors import ShapeError, UsageError
from graphwright.ops import call

__all__ = ["embedding", "embedding_bag"]


def embedding(
    input: Any, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None, norm_type: float = 2.0,
    scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """Look up rows of a table [num, dim]: ids, the input [...], to rows [..., dim].

    Args:
        padding_idx: row that gets no gradient.
        max_norm: scale the rows looked up whose `norm_type`-norm exceeds this down to it, in place.
        scale_grad_by_freq: divide the gradient of a row by how often it is looked up.
        sparse: ignored, gradients are dense.
    Raises: IndexOutOfRange; UsageError if `padding_idx` is not a row.
    """
    ids = as_tensor(input)
    if max_norm is not None:
        with no_grad():
            used = call("bincount", ids.reshape(-1), length=weight.shape[0]).reshape(-1, 1) > 0
            weight.copy_(where(used, weight.renorm(norm_type, 0, max_norm), weight))
    rows = call("embedding", weight, ids)
    if scale_grad_by_freq:
        counts = call("bincount", ids.reshape(-1), length=weight.shape[0])
        share = rows / counts.to(rows.dtype).gather(0, ids.reshape(-1)).reshape(*ids.shape, 1)
        rows = rows.detach() + (share - share.detach())
    if padding_idx is None:
        return rows
    if not -weight.shape[0] <= padding_idx < weight.shape[0]:
        expected = f"an index of one of {weight.shape[0]} rows"
        raise UsageError("padding_idx is out of range", where="embedding", expected=expected, got=padding_idx)
    padding = (ids == padding_idx % weight.shape[0]).reshape(*ids.shape, 1)
    return call("where", padding, call("stop_gradient", rows), rows)


def embedding_bag(
    input: Any, weight: Tensor, offsets: Any = None, max_norm: float | None = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:  # fmt: skip
    """Look up bags of rows of a table and reduce each bag: ids [B, n], or [n] with offsets [B], to [B, dim].

    Args:
        offsets: index of the first id of each bag, known outside traces.
        mode: `sum`, `mean` or `max`; an empty bag gives 0.
        per_sample_weights: factors in the shape of the ids, for `sum`.
        include_last_offset: whether the last offset is the end of the last bag, which is that of the ids otherwise.
        padding_idx: id that takes no part in its bag.
    Raises: ShapeError, UsageError, IndexOutOfRange.
    """
    ids = as_tensor(input)
    if mode not in ("sum", "mean", "max"):
        raise UsageError("unknown mode", where="embedding_bag", expected="sum, mean or max", got=mode)
    if per_sample_weights is not None and (mode != "sum" or per_sample_weights.shape != ids.shape):
        expected = f"mode sum, and weights {ids.shape}"
        raise UsageError("cannot weigh the samples", where="embedding_bag", expected=expected, got=mode)
    if (ids.ndim, offsets is None) not in ((2, True), (1, False)):
        expected = "ids [B, n], or ids [n] with offsets [B]"
        raise ShapeError("invalid operands of embedding_bag", expected=expected, got=ids.spec)
    if offsets is None:
        cuts = np.arange(ids.shape[0] + 1) * ids.shape[1]
    else:
        cuts = as_tensor(offsets).numpy().astype(np.int64)
        cuts = cuts if include_last_offset else np.append(cuts, ids.shape[0])
    sizes, end = np.diff(cuts), ids.numel()
    if len(sizes) and (cuts[0] != 0 or (sizes < 0).any() or cuts[-1] > end):
        expected = f"ascending, from 0, at most {end}"
        raise ShapeError("invalid offsets", where="embedding_bag", expected=expected, got=cuts.tolist())
    count, flat = len(sizes), ids.reshape(-1)
    if offsets is not None and count:
        flat = flat.narrow(0, 0, int(cuts[-1]))
        per_sample_weights = None if per_sample_weights is None else per_sample_weights.narrow(0, 0, int(cuts[-1]))
    bags = as_tensor(np.repeat(np.arange(count), sizes), device=device_of(flat))
    rows = embedding(flat, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)
    kept = flat != (-1 if padding_idx is None else padding_idx % weight.shape[0])
    none = as_tensor(np.zeros((count, weight.shape[1])), rows.dtype, device_of(rows))
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1, 1)
    if mode == "max":
        rows = where(kept.unsqueeze(1), rows, float("-inf"))
        best = none.index_reduce(0, bags, rows, "amax", include_self=False)
        return where(best == float("-inf"), 0.0, best)
    total = none.index_add(0, bags, where(kept.unsqueeze(1), rows, 0.0))
    if mode == "sum":
        return total
    counts = none.narrow(1, 0, 1).reshape(-1).index_add(0, bags, kept.to(rows.dtype))
    return total / counts.clamp(min=1.0).unsqueeze(1)
