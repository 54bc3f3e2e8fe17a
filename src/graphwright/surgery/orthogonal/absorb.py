"""Merging the factor P of a head into the next linear map, where that is exact.

Attention mixes positions, not the features of a value head: for V_g = P_g U_g, O_h absorbs P_g for each query head h of
the group. Queries and keys meet in a product: for Q_h = P_h U_h, K_h absorbs P_hᵀ, unless a rotary embedding, a norm or
a second query head is in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphwright.ops import traits
from graphwright.surgery.errors import NotAbsorbable
from graphwright.surgery.matrices import find_matrices, values

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program import AxisGroup, Program, Selection, Transaction, Units
    from graphwright.surgery.matrices import Matrix

HEADS = {"heads", "kv_groups"}


class MatrixSlice(NamedTuple):
    """Rows (dim 0) or columns (dim 1) of a matrix; all of it if `indices` is None."""

    dim: int = 0
    indices: np.ndarray | None = None

    def of(self, w: np.ndarray) -> np.ndarray:
        """A copy of the slice."""
        return w.copy() if self.indices is None else np.take(w, self.indices, axis=self.dim)

    def put(self, w: np.ndarray, value: np.ndarray) -> None:
        """Write the slice into a matrix."""
        if self.indices is None:
            w[...] = value
        elif self.dim == 0:
            w[self.indices] = value
        else:
            w[:, self.indices] = value


def head_parts(p: Program, matrix: Matrix) -> list[MatrixSlice]:
    """One slice per head: rows of q, k and v, columns of o; empty if the matrix has no heads.

    Key heads that several query heads share count once.
    """
    best: list[MatrixSlice] = []
    for group in p.axes().values():
        if HEADS & set(group.kinds):
            parts = _parts(group, matrix.key, range(group.size))
            covered = sum(len(part.indices) for part in parts if part.indices is not None)
            if parts and covered == matrix.shape[parts[0].dim] and len(parts) > len(best):
                best = parts
    return best


def parts_of(p: Program, units: Units) -> dict[str, list[MatrixSlice]]:
    """Weight key -> the slices of some units in it; biases and norms have none."""
    found: dict[str, list[MatrixSlice]] = {}
    for name, ids in units.chosen.items():
        group = p.axes()[name]
        for key in dict.fromkeys(m.key for m in group.members if m.key is not None):
            if len(p.weights.array(key).shape) == 2:
                found.setdefault(key, []).extend(_parts(group, key, ids))
    return {key: parts for key, parts in found.items() if parts}


def selected_by(p: Program, keys: set[str]) -> Selection:
    """Selection of the params of some weights."""
    return p.select(op="param", where=lambda n: p.key(n) in keys)


def _parts(group: AxisGroup, key: str, ids: range | tuple[int, ...]) -> list[MatrixSlice]:
    found: dict[tuple[int, bytes], MatrixSlice] = {}
    for unit in ids:
        for dim, indices in group.slices(unit).get(key, {}).items():
            found.setdefault((dim, indices.tobytes()), MatrixSlice(dim, indices))
    return list(found.values())


class Neighbour(NamedTuple):
    """The map that absorbs P: `o` after values (side 1, columns), `k` beside queries (side 0, rows)."""

    matrix: Matrix
    side: int


def neighbour(p: Program, matrix: Matrix) -> Neighbour:
    """The map that can absorb the factor P of a matrix. Raises: NotAbsorbable naming the op in between."""
    if len(matrix.readers) != 1 or traits(matrix.readers[0].op).contracts != "out_in":
        raise _refusal(matrix, "several readers" if len(matrix.readers) != 1 else matrix.readers[0].op)
    node = matrix.readers[0].node
    if len(p.operands(node)) > 2:
        raise _refusal(matrix, "bias")
    node, port = _next_op(p, matrix, node)
    if not traits(p.op(node)).attention or port == 1:
        raise _refusal(matrix, f"{p.op(node)} {p.path(node)}")
    if port == 2:
        end, at = _next_op(p, matrix, node)
        if traits(p.op(end)).contracts != "out_in" or at != 0:
            raise _refusal(matrix, f"{p.op(end)} {p.path(end)}")
        return Neighbour(_read_by(p, end), 1)
    source = p.operands(node)[1].node
    while traits(p.op(source)).rearranges or traits(p.op(source)).casts:
        source = p.operands(source)[0].node
    if traits(p.op(source)).contracts != "out_in" or len(p.operands(source)) > 2:
        raise _refusal(
            matrix, f"{p.op(source)} {p.path(source)}" if traits(p.op(source)).contracts != "out_in" else "bias"
        )
    keys = _read_by(p, source)
    if keys.shape[0] != matrix.shape[0]:
        raise _refusal(matrix, "several query heads on a key head")
    return Neighbour(keys, 0)


def absorb(e: Transaction, matrix: Matrix, parts: list[MatrixSlice], factors: list[np.ndarray]) -> str:
    """Multiply the factor P of each slice into the neighbour; return the neighbour's path."""
    p = e.program
    other, side = neighbour(p, matrix)
    w = values(p, other.key)
    new = w.copy()
    for mine, theirs in _pairs(p, matrix, other, side):
        for part, factor in zip(parts, factors, strict=True):
            if part.indices is not None and np.array_equal(part.indices, mine):
                target = MatrixSlice(side, theirs)
                block = target.of(w)
                target.put(new, block @ factor if side == 1 else factor.T @ block)
    e.set_weight(other.key, new)
    return other.path


def _pairs(p: Program, matrix: Matrix, other: Matrix, side: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(rows of a head in the matrix, its indices in the neighbour), for each query head."""
    best: list[tuple[np.ndarray, np.ndarray]] = []
    for group in p.axes().values():
        if HEADS & set(group.kinds):
            slices = [group.slices(unit) for unit in range(group.size)]
            found = [(s[matrix.key][0], s[other.key][side]) for s in slices
                     if 0 in s.get(matrix.key, {}) and side in s.get(other.key, {})]  # fmt: skip
            if len(found) > len(best) and all(len(a) == len(b) for a, b in found):
                best = found
    return best


def _next_op(p: Program, matrix: Matrix, node: NodeId) -> tuple[NodeId, int]:
    """The next node that is not a rearrangement, and the operand number at which it reads the value."""
    while True:
        edges = p.out_edges(node)
        if len(edges) != 1:
            raise _refusal(matrix, f"several readers of {p.path(node)}")
        node = p.graph.target(edges[0])
        row = traits(p.op(node))
        if not row.rearranges and not row.casts:
            return node, p.edge_port(edges[0])


def _read_by(p: Program, node: NodeId) -> Matrix:
    found = find_matrices(p, p.select(where=lambda n: n == node))[0]
    return found[0]


def _refusal(matrix: Matrix, between: str) -> NotAbsorbable:
    return NotAbsorbable("the factor P cannot be merged into the next map", where=matrix.path, between=between,
                         fix='fold="insert" keeps it as a node')  # fmt: skip
