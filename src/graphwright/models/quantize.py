"""Weight-only quantisation as an edit: matrices become int8 with a scale per group, read by `linear_int8` ops.

Each weight changes by at most half a step: max |w| of its group / 254. Activations are float32; in products of few rows
the VM rounds them to 16 bits, by at most max |x| of their group / 65534 (`array/vm/products.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphwright.arguments import checked
from graphwright.array.vm.code import GROUP
from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.ops import traits
from graphwright.program.axes.solve_axes import origin
from graphwright.program.editing.journal import Entry
from graphwright.program.editing.replace import remove_unread, take_over
from graphwright.program.editing.transaction import Transaction
from graphwright.program.kinds import PARAM

if TYPE_CHECKING:
    from graphwright.models.model import Model

KINDS = ("int8",)


@checked
def quantize(model: Model, kind: str = "int8", where: str = "**") -> Entry:
    """Store the matrices of linear ops as int8, with a float32 scale per 64 entries of a row.

    This is one edit, which `program.undo()` reverts; the journal retains the original weights. An embedding table is
    not quantised, even if a head is tied to it.

    Args:
        kind: `int8`, symmetric: w = q · scale, scale = max |w| / 127 of the group.
        where: path pattern of the linear nodes.
    Returns: the journal entry. Raises: UsageError for an unknown kind, activations that are not float32, or a
        pattern that matches no linear op with a stored matrix.
    """
    if kind not in KINDS:
        raise UsageError("unknown kind of quantisation", where="kind", expected=", ".join(KINDS), got=kind)
    if model.compute != "float32":
        raise UsageError("cannot quantise a model whose activations are not float32", where="compute",
                         got=model.compute, fix='gw.open(..., compute="float32")')  # fmt: skip
    p = model.program
    linear = p.select(where, where=lambda n: traits(p.op(n)).contracts == "out_in")
    read = {node: origin(p, p.operands(node)[1]) for node in linear}
    found = {node: matrix for node, matrix in read.items() if matrix is not None and p.op(matrix) == PARAM}
    if not found:
        fix = "model.inspect() lists the stored matrices"
        raise UsageError("the pattern matches no linear op with a stored matrix", where=where, fix=fix)
    with p.edit(f"quantise {len(found)} matrices to {kind}") as e:
        made: dict[NodeId, tuple[NodeId, NodeId]] = {}
        for node, matrix in found.items():
            if matrix not in made:
                made[matrix] = _params(e, matrix)
            _replace(e, node, made[matrix])
    return p.journal[-1]


def quantised(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise a matrix w, float32 [out, in]; return int8 [out, in] and float32 scales [out, groups]."""
    rows, columns = w.shape
    groups = -(-columns // GROUP)
    padded = np.zeros((rows, groups * GROUP), np.float32)
    padded[:, :columns] = w
    parts = padded.reshape(rows, groups, GROUP)
    scales = np.abs(parts).max(axis=2) / np.float32(127)
    steps = np.where(scales > 0, scales, 1)[:, :, None]
    q = np.rint(parts / steps).astype(np.int8).reshape(rows, -1)[:, :columns]
    return np.ascontiguousarray(q), scales


def _params(e: Transaction, matrix: NodeId) -> tuple[NodeId, NodeId]:
    p = e.program
    w = p.weights.array(p.key(matrix)).to_numpy("float32")
    if not np.isfinite(w).all():
        raise UsageError("a matrix has values that are not finite, so it cannot be quantised", where=p.path(matrix))
    (q, scales), path, key = quantised(w), p.path(matrix), p.key(matrix)
    made = e.param(f"{path}.int8", q, key=f"{key}.int8", trainable=False)
    return made, e.param(f"{path}.scales", scales, key=f"{key}.scales", trainable=False)


def _replace(e: Transaction, node: NodeId, matrix: tuple[NodeId, NodeId]) -> None:
    """Replace a linear op by one with the same name that reads `matrix`, int8 weights and their scales."""
    p = e.program
    path, (x, wide, *bias) = p.path(node), p.operands(node)
    made = e.add("linear_int8", x, *matrix, *bias, name=p.free_name(f"{path}.int8"), group=GROUP)
    take_over(e, node, made)
    remove_unread(e, wide)
