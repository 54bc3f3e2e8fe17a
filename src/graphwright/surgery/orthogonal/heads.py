"""Which rows or columns of a matrix belong to which head, from the axis solver."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from graphwright.program import AxisGroup, Program, Selection, Units
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
