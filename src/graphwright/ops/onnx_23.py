"""Ops that ONNX has whole from opset 23 on: norms, rotations and attention as one node where it means the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from graphwright.array.dtype import float32
from graphwright.array.spec import Spec
from graphwright.ops.onnx import ONNX, OPSET, Row
from graphwright.ops.onnx_use import Use

OPSETS = (OPSET, 23)
"""Those that are written; the first by default."""


class Whole(NamedTuple):
    """A node of opset 23: whether it means what a use of the op does (specs of operands, attributes), and its row."""

    same: Callable[[Sequence[Spec], Mapping[str, Any]], bool]
    row: Row


def row_of(op: str, ins: Sequence[Spec], attrs: Mapping[str, Any], opset: int = OPSET) -> Row | None:
    """The row by which a use of an op is written; None where it is written as the simpler ones it is made of."""
    whole = WHOLE.get(op) if opset >= 23 else None
    return whole.row if whole is not None and whole.same(ins, attrs) else ONNX.get(op)


def _rms_norm(u: Use) -> str:
    x, w = u.names
    scale = u("Add", w, u.scalar(1.0)) if u.attrs["unit_offset"] else w
    return u("RMSNormalization", x, scale, axis=-1, epsilon=u.attrs["eps"])


def _rope(u: Use) -> str:
    turned, width = 2 * int(u.ins[1].shape[-1]), int(u.ins[0].shape[-1])
    part = {"rotary_embedding_dim": turned} if turned < width else {}
    return u("RotaryEmbedding", *u.names, interleaved=int(u.attrs["style"] == "interleaved"), **part)


def _attention(u: Use) -> str:
    a, (q, k) = u.attrs, u.ins[:2]
    plain = a["window"] is None and not a["optional"] and q.shape[2] == k.shape[2]
    if plain or not a["causal"]:
        return u("Attention", *u.names[:3], is_causal=int(a["causal"]), scale=a["scale"])
    return u("Attention", *u.names[:3], _visible(u), scale=a["scale"])


def _visible(u: Use) -> str:
    """Which keys a query reads, bool [Tq, Tk]: `is_causal` lays the first query beside the first key, not behind it."""
    sizes = [u("Squeeze", u("Shape", name, start=2, end=3), u.ints(0)) for name in u.names[:2]]
    rows, keys = (u("Range", u.ints_scalar(0), size, u.ints_scalar(1)) for size in sizes)
    start = u.names[3] if u.attrs["optional"] else u("Sub", sizes[1], sizes[0])
    queries = u("Unsqueeze", u("Add", rows, start), u.ints(1))
    seen = u("LessOrEqual", keys, queries)
    if u.attrs["window"] is None:
        return seen
    return u("And", seen, u("Less", u("Sub", queries, u.ints_scalar(u.attrs["window"])), keys))


def _in_float32(ins: Sequence[Spec], attrs: Mapping[str, Any]) -> bool:
    """Of other dtypes the nodes round at other places."""
    return all(spec.dtype is float32 for spec in ins)


WHOLE = {
    "rms_norm": Whole(_in_float32, _rms_norm),
    "rope": Whole(_in_float32, _rope),
    # a query that sees no key gives 0 here and no number there; only padding makes such ones
    "sdpa": Whole(lambda ins, a: _in_float32(ins[:3], a) and "key_mask" not in a["optional"], _attention),
}
