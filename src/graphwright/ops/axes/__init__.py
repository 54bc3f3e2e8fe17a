"""The axes table: how the dimensions of an op's operands and results hang together. One row per op, or why it has none.

A row takes one `Use` and gives the dimensions of the results as terms (`ops.terms`). On the way it joins terms, says
where a dimension ends (`summed` where zeros leave no trace, `mixed` where they do, `frozen` where its size is bound),
and which attributes are sizes. Dimensions couple by these rules alone, never by equal size or by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from graphwright.ops.axes import attention, gates, norms, places, products, reduce, views
from graphwright.ops.axes.use import Correction, Dims, Note, Rule, Use, broadcast
from graphwright.ops.registry import Op

__all__ = ["AXES", "Correction", "Dims", "Note", "Rule", "Use", "axes_row"]

_BACKWARD = "a gradient is taken anew from the edited program"
_UPDATE = "a step of training is taken down anew from the edited program"
_PLACE = "the place of an entry matters: "

AXES: Mapping[str, Rule | str] = {
    **dict.fromkeys(("cast", "copy", "recall", "stop_gradient", "scale_gradient", "assert_finite"), views.identity),
    "junction": views.junction,
    "reshape": views.reshape,
    "unflatten": views.unflatten,
    "flatten": views.flatten,
    "permute": views.permute,
    "expand": views.expand,
    "squeeze": views.squeeze,
    "unsqueeze": views.unsqueeze,
    "slice": views.slice_,
    "pad_slice": views.pad_slice,
    "concat": views.concat,
    "tile": views.tile,
    "repeat_interleave": views.repeat,
    "diagonal": views.diagonal,
    "last": views.last,
    "size": views.size_,
    "iota": views.iota,
    "flip": views.bound(f"{_PLACE}it reads from the end", attr="axes"),
    "roll": views.bound(f"{_PLACE}it moves entries along it", attr="axes"),
    "tril": views.bound(f"{_PLACE}it keeps a triangle", every=2),
    "triu": views.bound(f"{_PLACE}it keeps a triangle", every=2),
    "pad": views.trailing("makes it longer"),
    "pad_backward": _BACKWARD,
    "sum": reduce.sum_,
    "prod": reduce.reduced("multiplies over it"),
    "mean": reduce.reduced("divides by its size"),
    "amax": reduce.reduced("takes the largest over it"),
    "amin": reduce.reduced("takes the smallest over it"),
    "any": reduce.sum_,
    "all": reduce.reduced("asks for every place of it"),
    "logsumexp": reduce.reduced("sums exponentials over it"),
    "argmax": reduce.arg,
    "argmin": reduce.arg,
    "cumsum": reduce.along("sums up to each place of it"),
    "softmax": reduce.along("takes a softmax over it"),
    "log_softmax": reduce.along("takes a softmax over it"),
    "sort": reduce.ordered,
    "topk": reduce.ordered,
    "linear": products.linear,
    "linear_int8": products.linear_int8,
    "matmul": products.matmul,
    "solve": products.solve,
    "grouped_matmul": products.grouped_matmul,
    "grouped_outer": _BACKWARD,
    "conv": products.conv,
    "conv_transpose": products.conv_transpose,
    "conv_weight": _BACKWARD,
    "unfold": products.unfold,
    "fold": products.fold,
    "max_pool": views.trailing("slides a window over it"),
    "avg_pool": views.trailing("slides a window over it"),
    "avg_pool_backward": _BACKWARD,
    "adaptive_avg_pool": views.trailing("shares it out over windows"),
    "adaptive_avg_pool_backward": _BACKWARD,
    "interpolate": views.trailing("resamples it"),
    "interpolate_backward": _BACKWARD,
    "rms_norm": norms.rms_norm,
    "layer_norm": norms.layer_norm,
    "group_norm": norms.group_norm,
    "batch_norm": norms.batch_norm,
    "batch_norm_train": norms.batch_norm,
    "rope_table": attention.rope_table,
    "rope_dynamic": attention.rope_dynamic,
    "rope_longer": attention.rope_longer,
    "rope": attention.rope,
    "sdpa": attention.sdpa,
    "sdpa_backward": _BACKWARD,
    "kv_append": attention.kv_append,
    "kv_append_paged": attention.kv_append_paged,
    "sdpa_paged": attention.sdpa_paged,
    "choose": places.choose,
    "embedding": places.embedding,
    "embedding_backward": _BACKWARD,
    "index": places.index,
    "index_sum": _BACKWARD,
    "index_put": places.index_update,
    "index_add": places.index_update,
    "index_fill": places.index_update,
    "nonzero": f"{_PLACE}its values are places",
    "gather": places.gather,
    "scatter_sum": _BACKWARD,
    "scatter": places.scatter,
    "scatter_add": places.scatter,
    "one_hot": places.one_hot,
    "bincount": places.bincount,
    **dict.fromkeys(("uniform", "normal", "gumbel", "randint"), places.drawn),
    **dict.fromkeys(("bernoulli", "dropout"), places.masked),
    "multinomial": places.multinomial,
    "gate": gates.gate,
    "gate_grad": _BACKWARD,
    "cross_entropy": places.cross_entropy,
    "cross_entropy_backward": _BACKWARD,
    **dict.fromkeys(("adam_step", "adamw_step", "sgd_step", "rmsprop_step", "lion_step", "muon_step"), _UPDATE),
    **dict.fromkeys(("ema_step", "unscale_check", "stochastic_round"), _UPDATE),
}
"""op -> its row, or why it has none. Elementwise ops need no line: their trait says all there is to say."""


def axes_row(op: Op) -> Rule | str:
    """The axes row of an op: its own cell, its line in the table, or what the elementwise trait says."""
    if op.axes is not None:
        return op.axes
    found = AXES.get(op.name)
    if found is not None:
        return found
    return broadcast if op.traits.elementwise else "its row says nothing of axes"
