"""Health of a model: weights and values that are not finite, and files that contradict the config."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from graphwright.array import NDArray, bfloat16
from graphwright.errors import NonFinite
from graphwright.models.loading import EMBEDDING, TIED_HEAD
from graphwright.program import AssemblyReport, Mismatch, Program
from graphwright.program.kinds import STORED

if TYPE_CHECKING:
    from graphwright.models.model import Model


def check_finite(p: Program, result: np.ndarray, ids: np.ndarray | None = None) -> None:
    """Raises: NonFinite if a result has NaN or infinity.

    The error names the first weight that has one, with count and index; if all weights are finite and the `ids` [B, T]
    of the run are given, the first node whose value is not finite.
    """
    if np.isfinite(result.max(initial=0)) and np.isfinite(result.min(initial=0)):
        return
    for key, count, first in non_finite(p):
        raise NonFinite("the logits are not finite, because a weight is not", where=key,
                        got=f"{count} values, the first at {first}",
                        fix=f"e.set_weight({key!r}, np.nan_to_num), or restore the file")  # fmt: skip
    where = None if ids is None else first_bad_node(p, ids)
    raise NonFinite("the logits are not finite, but all weights are", where=where,
                    got=f"max {result.max()}, min {result.min()}",
                    fix="an edit or an activation overflows: program.run(...).value(path) shows it")  # fmt: skip


def non_finite(p: Program) -> list[tuple[str, int, tuple[int, ...]]]:
    """(key, count, first index) of weights with NaN or infinity; reads every weight."""
    found = []
    for key in sorted({p.key(n) for kind in STORED for n in p.of_kind(kind)}):
        array = p.weights.array(key)
        if array.dtype.is_float and (count := int((bad := _bad(array)).sum())):
            found.append((key, count, tuple(int(i) for i in np.argwhere(bad)[0])))
    return found


def first_bad_node(p: Program, ids: np.ndarray) -> str | None:
    """Run ids, and return the path of the first node whose value is not finite."""
    feeds = {"ids": ids, "positions": np.broadcast_to(np.arange(ids.shape[1]), ids.shape).copy()}
    run = p.run({p.path(n): feeds[p.path(n)] for n in p.inputs() if p.path(n) in feeds})
    bad = {value.node for value, array in run.values.items() if array.dtype.is_float and _bad(array).any()}
    return next((p.path(node) for node in p.order() if node in bad), None)


def _bad(array: NDArray) -> np.ndarray:
    if array.dtype is bfloat16:
        return (array.to_numpy(bits=True) & 0x7F80) == 0x7F80
    return ~np.isfinite(array.to_numpy())


def validate(model: Model) -> AssemblyReport:
    """`program.validate()`, and `tied_mismatch`; reads the embedding if the file also has a head."""
    report = model.program.validate()
    return replace(report, mismatches=(*report.mismatches, *_tied_mismatch(model)))


def _tied_mismatch(model: Model) -> list[Mismatch]:
    """Find a file that has a head unlike the embedding, although the config ties them. Graphwright uses the embedding.

    transformers 5 does not tie in this case (`PreTrainedModel.tie_weights`), so its logits differ.
    """
    source, embedding = model.checkpoint, model.keys.get(EMBEDDING)
    if source is None or embedding is None or not getattr(model.dims, "tied", False):
        return []
    found = []
    for head in (k for k in source if k.endswith(TIED_HEAD) and k not in model.keys.values()):
        tensors = [(source.info(k).tag, source.info(k).shape, source.bytes(k)) for k in (embedding, head)]
        if tensors[0][:2] != tensors[1][:2]:
            got = f"{tensors[1][0]}{list(tensors[1][1])} against {tensors[0][0]}{list(tensors[0][1])}"
        elif np.array_equal(np.asarray(tensors[0][2]), np.asarray(tensors[1][2])):
            continue
        else:
            rows = [np.asarray(data).reshape(shape[0], -1) for _, shape, data in tensors]
            differing = (rows[0] != rows[1]).any(axis=1)
            got = f"{int(differing.sum())} rows differ, the first is {int(differing.argmax())}"
        what = "the config ties head and embedding, but the file has two: transformers uses both, Graphwright only one"
        found.append(Mismatch("tied_mismatch", head, what, expected=f"the bits of {embedding}", got=got))
    return found
