"""The stored matrices that an operation is pointed at: where they lie, who reads them, and why some are left alone.

Invariant: processed and skipped together are all params that the pattern selects; a tied one is listed once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphwright.array import empty, from_numpy
from graphwright.errors import DTypeError, UsageError
from graphwright.ops import OPS, traits
from graphwright.program import EmptySelection, Value
from graphwright.program.kinds import PARAM

if TYPE_CHECKING:
    from graphwright.array import DType, NDArray
    from graphwright.graph import NodeId
    from graphwright.program import Program, Selection

PAIRS = {name: row.traits.matrix for name, row in OPS.items() if row.traits.matrix is not None}
"""Op -> the port at which it reads a matrix [out, in]: as x · Wᵀ, or as a table of which it picks rows."""


class NonFiniteWeight(UsageError, ArithmeticError):
    """A weight holds NaN or infinity; `key` and `index` say where first."""

    def __init__(self, key: str, index: tuple[int, ...], value: float) -> None:
        place = ", ".join(map(str, index))
        super().__init__("the weight is not finite", where=f"{key}[{place}]", got=value,
                         fix="gw.surgery.diagnose(program)")  # fmt: skip
        self.key, self.index = key, index


class DtypeUnsupported(DTypeError):
    """A weight of whole numbers where an operation takes floats."""


class Use(NamedTuple):
    """A node that reads a matrix, and the op that it is."""

    node: NodeId
    op: str


class Skipped(NamedTuple):
    """A selected param that was left alone."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Matrix:
    """A param [out, in].

    Attributes:
        param: its node.
        path, key: names in the program and in the checkpoint.
        shape: (out, in).
        dtype: as stored.
        uses: who reads it, casts looked through; several where it is tied.
    """

    param: NodeId
    path: str
    key: str
    shape: tuple[int, int]
    dtype: DType
    uses: tuple[Use, ...]

    @property
    def name(self) -> str:
        """The path without `.weight`: the linear map it is of."""
        return self.path.removesuffix(".weight")

    @property
    def size(self) -> int:
        """Number of entries."""
        return self.shape[0] * self.shape[1]


def find_matrices(program: Program, where: str | Selection) -> tuple[list[Matrix], list[Skipped]]:
    """Matrices that a pattern of linear maps, or of their weights, selects, in topological order.

    Embedding tables and output heads are left out where the pattern begins with a wildcard: they are touched only when
    named.

    Raises:
        EmptySelection: if there is no matrix among what is selected.
        DtypeUnsupported: for a matrix of whole numbers.
    """
    selection = program.select(where) if isinstance(where, str) else where
    chosen = dict.fromkeys(_param(program, node) for node in selection)
    named = not isinstance(where, str) or not where.startswith("*")
    found: list[Matrix] = []
    skipped: list[Skipped] = []
    for node in (n for n in chosen if n is not None):
        matrix, reason = _matrix(program, node, named)
        if matrix is None:
            skipped.append(Skipped(program.path(node), reason))
        else:
            found.append(matrix)
    if not found:
        raise EmptySelection(
            "no matrix of a linear map is selected",
            where=str(where) if isinstance(where, str) else repr(where),
            got=f"{selection.count} nodes, {len(skipped)} params" + (f": {skipped[0].reason}" if skipped else ""),
            fix='program.select("**", op="linear").show() lists the linear maps',
        )
    return found, skipped


def _param(p: Program, node: NodeId) -> NodeId | None:
    """A selected param, or the one that a selected node reads as its matrix."""
    if p.op(node) == PARAM:
        return node
    if p.op(node) not in PAIRS:
        return None
    source = p.operands(node)[PAIRS[p.op(node)]].node
    while traits(p.op(source)).casts:
        source = p.operands(source)[0].node
    return source if p.op(source) == PARAM else None


def _matrix(p: Program, node: NodeId, named: bool) -> tuple[Matrix | None, str]:
    spec, path = p.spec(node), p.path(node)
    if len(spec.shape) != 2:
        return None, f"{len(spec.shape)} dimension{'s' * (len(spec.shape) != 1)}, no matrix"
    if not spec.dtype.is_float:
        raise DtypeUnsupported("a matrix of whole numbers", where=path, expected="a float dtype", got=spec.dtype.name)
    uses = tuple(_uses(p, Value(node)))
    others = sorted({u.op for u in uses} - set(PAIRS))
    if others or not uses:
        return None, f"read by {', '.join(others)}" if others else "nothing reads it"
    if not named and any(traits(u.op).lookup for u in uses):
        return None, "an embedding table: touched only when named"
    if not named and any(Value(u.node) in p.outputs() for u in uses):
        return None, "an output head: touched only when named"
    out, inner = (int(n) for n in spec.shape)
    return Matrix(node, path, p.key(node), (out, inner), spec.dtype, uses), ""


def _uses(p: Program, value: Value) -> list[Use]:
    """Who reads a value as a matrix, behind casts; a read at another port counts as by `op operand`."""
    found = []
    for edge in p.out_edges(value.node):
        reader = p.graph.target(edge)
        op = p.op(reader)
        if traits(op).casts:
            found += _uses(p, Value(reader))
        else:
            found.append(Use(reader, op if PAIRS.get(op) == p.edge_port(edge) else f"{op} operand"))
    return found


def values(program: Program, key: str) -> np.ndarray:
    """A weight in float64. Raises: NonFiniteWeight naming the first entry that is not finite."""
    return finite(program.weights.array(key).to_numpy("float64"), key)


def finite(array: np.ndarray, key: str = "w") -> np.ndarray:
    """An array of numbers. Raises: NonFiniteWeight naming its first entry that is not finite."""
    if not (fine := np.isfinite(array)).all():
        index = tuple(int(i) for i in np.unravel_index(int(np.argmin(fine)), fine.shape))
        raise NonFiniteWeight(key, index, float(array[index]))
    return array


def stored(array: np.ndarray, dtype: DType) -> NDArray:
    """An array as it is stored: rounded once to `dtype`."""
    given = from_numpy(np.ascontiguousarray(array))
    return given if given.dtype is dtype else empty(given.shape, dtype).copy_from(given)


def rounded(array: np.ndarray, dtype: DType) -> np.ndarray:
    """What is left of a float64 array after it was stored as `dtype`, in float64."""
    return stored(array, dtype).to_numpy("float64")
