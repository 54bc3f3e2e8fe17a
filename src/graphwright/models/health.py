"""Finding the weight or the node behind a result that is not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphwright.array import bfloat16
from graphwright.errors import NonFinite
from graphwright.program.kinds import STORED

if TYPE_CHECKING:
    from graphwright.array import NDArray
    from graphwright.program import Program


def check_finite(p: Program, result: np.ndarray, ids: np.ndarray | None = None) -> None:
    """Raises: NonFinite if a result holds NaN or infinity.

    It names the first weight that holds one, with count and place; if all weights are fine and the `ids` [B, T]
    that were run are given, the first node whose value is not finite.
    """
    if np.isfinite(result.max(initial=0)) and np.isfinite(result.min(initial=0)):
        return
    for key, count, first in non_finite(p):
        raise NonFinite(
            "a weight is not finite, and so are the logits",
            where=key,
            got=f"{count} values, the first at {first}",
            fix=f"e.set_weight({key!r}, np.nan_to_num), or restore the file",
        )
    where = None if ids is None else first_bad_node(p, ids)
    raise NonFinite(
        "the logits are not finite, though all weights are",
        where=where,
        got=f"max {result.max()}, min {result.min()}",
        fix="an edit or the activations overflow: look at program.run(...).value(path)",
    )


def non_finite(p: Program) -> list[tuple[str, int, tuple[int, ...]]]:
    """(key, count, first index) of weights that hold NaN or infinity; reads every weight."""
    found = []
    for key in sorted({p.key(n) for kind in STORED for n in p.of_kind(kind)}):
        array = p.weights.array(key)
        if array.dtype.is_float and (count := int((bad := _bad(array)).sum())):
            found.append((key, count, tuple(int(i) for i in np.argwhere(bad)[0])))
    return found


def first_bad_node(p: Program, ids: np.ndarray) -> str | None:
    """Path of the first node in order whose value is not finite when these ids are run."""
    feeds = {"ids": ids, "positions": np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy()}
    run = p.run({p.path(n): feeds[p.path(n)] for n in p.inputs() if p.path(n) in feeds})
    bad = {value.node for value, array in run.values.items() if array.dtype.is_float and _bad(array).any()}
    return next((p.path(node) for node in p.order() if node in bad), None)


def _bad(array: NDArray) -> np.ndarray:
    if array.dtype is bfloat16:
        return (array.to_numpy(bits=True) & 0x7F80) == 0x7F80
    return ~np.isfinite(array.to_numpy())
