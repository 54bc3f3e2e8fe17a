"""Padding for attention over patterns: the scores of keys that a mask hides get a large negative number.

Rows of a pattern are counted from the first token of a text, so padding is moved after the tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from graphwright.array import float16, float32
from graphwright.errors import UsageError
from graphwright.ops import traits

if TYPE_CHECKING:
    from graphwright.array import DType
    from graphwright.program.op_graph import OpGraph, Value
    from graphwright.program.program import Program

_LARGE = 1e6
"""Difference of scores by which a hidden key is below all others; its weight is then exactly 0."""
_LARGEST = {float16: 6e4}


class Add(Protocol):
    """A function that adds a node: its op, operands, the last segment of its path, and attributes."""

    def __call__(self, op: str, operands: list[Value], label: str, **attrs: Any) -> Value:
        """Add the node; return its first result."""
        ...


def tokens_first(p: Program, mask: np.ndarray) -> np.ndarray | None:
    """Return indices int64 [B, T] that move the tokens of each row before its padding; None if nothing has to move.

    Only attention over a pattern depends on it: its rows and columns are counted from the start of the array.

    Args:
        p: the program that will run.
        mask: bool [B, T], false for padding.
    """
    sparse = any(traits(p.op(n)).table is not None for n in p.of_traits(attention=True))
    if not sparse or not (mask[:, 1:] > mask[:, :-1]).any():
        return None
    return np.argsort(~mask, axis=1, kind="stable")


def hide_keys(
    p: OpGraph, add: Add, q: Value, k: Value, mask: Value, scale: float, softcap: float | None = None
) -> tuple[Value, Value]:
    """Return queries and keys with one more entry per head, whose product hides the keys where a mask is false.

    A query that sees a key that is not hidden gives no weight to hidden keys, exactly. Queries that see only hidden
    keys, such as padding itself, get an average of their values.

    Args:
        p: the program to which nodes are added.
        add: function that adds a node.
        q, k: [B, H, Tq, d] and [B, Hk, Tk, d].
        mask: bool [B, Tk], false for hidden keys.
        scale: factor of the scores.
        softcap: bound of the scores, which has to be None.
    Raises: UsageError for scores with a bound, below which no score can be.
    """
    if softcap is not None:
        raise UsageError("padding needs scores without a bound", where=p.path(k), got=f"softcap {softcap}",
                         expected="softcap None", fix="run texts of one length, without a mask")  # fmt: skip
    kind: DType = p.spec(k).dtype
    low = -min(_LARGE / scale, _LARGEST.get(kind, float("inf")))
    seen = add("cast", [mask], "seen", dtype=float32)
    bias = add("mul", [add("sub", [seen, add("full_like", [seen], "ones", value=1.0)], "hidden"),
                       add("full_like", [seen], "large", value=-low)], "bias")  # fmt: skip
    bias = add(
        "unsqueeze", [bias if kind is float32 else add("cast", [bias], "rounded", dtype=kind)], "rows", axes=(1, 3)
    )
    first = add("slice", [k], "first", axis=3, start=0, size=1)
    column = add("add", [add("full_like", [first], "zeros", value=0.0), bias], "column")
    one = add("full_like", [add("slice", [q], "entry", axis=3, start=0, size=1)], "one", value=1.0)
    return add("concat", [q, one], "queries", axis=3), add("concat", [k, column], "keys", axis=3)
