"""Merging the stretch of a head into the linear map behind it, where nothing in between would notice.

Attention mixes positions and leaves the places of a value head alone: V_g = P_g U_g lets O_h take P_g for each query
head h of the group. Queries meet keys in a product: Q_h = P_h U_h lets K_h take P_hᵀ, unless a rotation, a norm or
a second query head stands in between.
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


class Part(NamedTuple):
    """Rows (dim 0) or columns (dim 1) of a matrix; all of it where `places` is None."""

    dim: int = 0
    places: np.ndarray | None = None

    def of(self, w: np.ndarray) -> np.ndarray:
        """Those of a matrix, as a copy."""
        return w.copy() if self.places is None else np.take(w, self.places, axis=self.dim)

    def put(self, w: np.ndarray, value: np.ndarray) -> None:
        """Write them into a matrix."""
        if self.places is None:
            w[...] = value
        elif self.dim == 0:
            w[self.places] = value
        else:
            w[:, self.places] = value


def head_parts(p: Program, matrix: Matrix) -> list[Part]:
    """A part per head: rows of q, k and v, columns of o; none where the matrix has no heads.

    Key heads that several query heads share count once.
    """
    best: list[Part] = []
    for group in p.axes().values():
        if HEADS & set(group.kinds):
            parts = _parts(group, matrix.key, range(group.size))
            apart = sum(len(part.places) for part in parts if part.places is not None)
            if parts and apart == matrix.shape[parts[0].dim] and len(parts) > len(best):
                best = parts
    return best


def parts_of(p: Program, units: Units) -> dict[str, list[Part]]:
    """Weight key -> the parts that units have in it; biases and norms have none."""
    found: dict[str, list[Part]] = {}
    for name, ids in units.chosen.items():
        group = p.axes()[name]
        for key in dict.fromkeys(m.key for m in group.members if m.key is not None):
            if len(p.weights.array(key).shape) == 2:
                found.setdefault(key, []).extend(_parts(group, key, ids))
    return {key: parts for key, parts in found.items() if parts}


def selected_by(p: Program, keys: set[str]) -> Selection:
    """The params of some weights."""
    return p.select(op="param", where=lambda n: p.key(n) in keys)


def _parts(group: AxisGroup, key: str, ids: range | tuple[int, ...]) -> list[Part]:
    found: dict[tuple[int, bytes], Part] = {}
    for unit in ids:
        for dim, places in group.slices(unit).get(key, {}).items():
            found.setdefault((dim, places.tobytes()), Part(dim, places))
    return list(found.values())


class Neighbour(NamedTuple):
    """The map that takes a stretch: `o` behind values (side 1, columns), `k` beside queries (side 0, rows)."""

    matrix: Matrix
    side: int


def neighbour(p: Program, matrix: Matrix) -> Neighbour:
    """Who can take the stretch of a matrix. Raises: NotAbsorbable naming the op in between."""
    if len(matrix.uses) != 1 or traits(matrix.uses[0].op).contracts != "out_in":
        raise _refusal(matrix, "several readers" if len(matrix.uses) != 1 else matrix.uses[0].op)
    node = matrix.uses[0].node
    if len(p.operands(node)) > 2:
        raise _refusal(matrix, "bias")
    node, port = _behind(p, matrix, node)
    if not traits(p.op(node)).attention or port == 1:
        raise _refusal(matrix, f"{p.op(node)} {p.path(node)}")
    if port == 2:
        end, at = _behind(p, matrix, node)
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


def absorb(e: Transaction, matrix: Matrix, parts: list[Part], stretches: list[np.ndarray]) -> str:
    """Multiply the stretch of each part into the neighbour; returns the neighbour's path."""
    p = e.program
    other, side = neighbour(p, matrix)
    w = values(p, other.key)
    new = w.copy()
    for mine, theirs in _pairs(p, matrix, other, side):
        for part, stretch in zip(parts, stretches, strict=True):
            if part.places is not None and np.array_equal(part.places, mine):
                place = Part(side, theirs)
                block = place.of(w)
                place.put(new, block @ stretch if side == 1 else stretch.T @ block)
    e.set_weight(other.key, new)
    return other.path


def _pairs(p: Program, matrix: Matrix, other: Matrix, side: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(rows of a head in the matrix, its places in the neighbour), for each query head."""
    best: list[tuple[np.ndarray, np.ndarray]] = []
    for group in p.axes().values():
        if HEADS & set(group.kinds):
            slices = [group.slices(unit) for unit in range(group.size)]
            found = [(s[matrix.key][0], s[other.key][side]) for s in slices
                     if 0 in s.get(matrix.key, {}) and side in s.get(other.key, {})]  # fmt: skip
            if len(found) > len(best) and all(len(a) == len(b) for a, b in found):
                best = found
    return best


def _behind(p: Program, matrix: Matrix, node: NodeId) -> tuple[NodeId, int]:
    """The next node that is no mere rearrangement, and the port at which it is entered."""
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
    return NotAbsorbable(
        "its stretch cannot be merged into a neighbour",
        where=matrix.path,
        between=between,
        fix='fold="insert" keeps it as a node of its own',
    )
