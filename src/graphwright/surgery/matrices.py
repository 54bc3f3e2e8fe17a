"""Selection of stored weight matrices: which ones a pattern selects, which nodes read them, why others are skipped.

Invariant: processed and skipped together are all params that the pattern selects; a tied param is listed once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.array import empty, from_numpy
from graphwright.errors import DTypeError, UsageError
from graphwright.ops import OPS, traits
from graphwright.program import EmptySelection, Program, Value
from graphwright.program.kinds import PARAM
from graphwright.progress import Progress
from graphwright.report import ReportBase

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphwright.array import DType, NDArray
    from graphwright.graph import NodeId
    from graphwright.models.model import Model
    from graphwright.program import Selection, Transaction
    from graphwright.progress import Report
    from graphwright.surgery.measure import Drift

MATRIX_PORT = {name: row.traits.matrix for name, row in OPS.items() if row.traits.matrix is not None}
"""Op -> operand number of its matrix [out, in]: used as x · Wᵀ, or as a table of rows."""


class NonFiniteWeight(UsageError, ArithmeticError):
    """A weight contains NaN or infinity; `key` and `index` locate the first one."""

    def __init__(self, key: str, index: tuple[int, ...], value: float) -> None:
        super().__init__("the weight is not finite", where=f"{key}[{', '.join(map(str, index))}]", got=value,
                         fix="gw.surgery.diagnose(program)")  # fmt: skip
        self.key, self.index = key, index


class DtypeUnsupported(DTypeError):
    """An operation on floating weights got an integer weight."""


class Reader(NamedTuple):
    """A node that reads a matrix, and its op."""

    node: NodeId
    op: str


class Skipped(NamedTuple):
    """A selected param that was not changed."""

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
        readers: nodes that read it, directly or through casts; several if it is tied.
    """

    param: NodeId
    path: str
    key: str
    shape: tuple[int, int]
    dtype: DType
    readers: tuple[Reader, ...]

    @property
    def name(self) -> str:
        """The path without `.weight`: that of its linear map."""
        return self.path.removesuffix(".weight")

    @property
    def size(self) -> int:
        """Number of entries."""
        return self.shape[0] * self.shape[1]


def find_matrices(program: Program, where: str | Selection) -> tuple[list[Matrix], list[Skipped]]:
    """Matrices whose linear map or weight is selected, in topological order.

    A pattern that begins with a wildcard leaves out embedding tables and output heads: they must be named.

    Raises:
        EmptySelection: if no matrix is selected.
        DtypeUnsupported: for an integer matrix.
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
        reason = f": {skipped[0].reason}" if skipped else ""
        raise EmptySelection(
            "the selection contains no matrix of a linear map", where=where if isinstance(where, str) else repr(where),
            got=f"{selection.count} nodes, {len(skipped)} params{reason}",
            fix='program.select("**", op="linear").show() lists the linear maps',
        )  # fmt: skip
    return found, skipped


def _param(p: Program, node: NodeId) -> NodeId | None:
    """A selected param, or the matrix that a selected node reads."""
    if p.op(node) == PARAM:
        return node
    if p.op(node) not in MATRIX_PORT:
        return None
    source = p.operands(node)[MATRIX_PORT[p.op(node)]].node
    while traits(p.op(source)).casts:
        source = p.operands(source)[0].node
    return source if p.op(source) == PARAM else None


def _matrix(p: Program, node: NodeId, named: bool) -> tuple[Matrix | None, str]:
    spec, path = p.spec(node), p.path(node)
    if len(spec.shape) != 2:
        return None, f"{len(spec.shape)} dimension{'s' * (len(spec.shape) != 1)}, not a matrix"
    if not spec.dtype.is_float:
        raise DtypeUnsupported("the matrix holds integers", where=path, expected="a float dtype", got=spec.dtype.name)
    readers = tuple(_readers(p, Value(node)))
    others = sorted({r.op for r in readers} - set(MATRIX_PORT))
    if others or not readers:
        return None, f"read by {', '.join(others)}" if others else "nothing reads it"
    if not named and any(traits(r.op).lookup for r in readers):
        return None, "an embedding table: touched only when named"
    if not named and any(Value(r.node) in p.outputs() for r in readers):
        return None, "an output head: touched only when named"
    out, inner = (int(n) for n in spec.shape)
    return Matrix(node, path, p.key(node), (out, inner), spec.dtype, readers), ""


def _readers(p: Program, value: Value) -> list[Reader]:
    """Readers of a value, looking through casts; a read at another port than the matrix's is listed as `op operand`."""
    found = []
    for edge in p.out_edges(value.node):
        reader = p.graph.target(edge)
        op = p.op(reader)
        if traits(op).casts:
            found += _readers(p, Value(reader))
        else:
            found.append(Reader(reader, op if MATRIX_PORT.get(op) == p.edge_port(edge) else f"{op} operand"))
    return found


def values(program: Program, key: str) -> np.ndarray:
    """A weight in float64. Raises: NonFiniteWeight."""
    return finite(program.weights.array(key).to_numpy("float64"), key)


def finite(array: np.ndarray, key: str = "w") -> np.ndarray:
    """`array` itself. Raises: NonFiniteWeight naming its first entry that is not finite."""
    if not (fine := np.isfinite(array)).all():
        index = tuple(int(i) for i in np.unravel_index(int(np.argmin(fine)), fine.shape))
        raise NonFiniteWeight(key, index, float(array[index]))
    return array


def stored(array: np.ndarray, dtype: DType) -> NDArray:
    """An array rounded once to the dtype it is stored in."""
    given = from_numpy(np.ascontiguousarray(array))
    return given if given.dtype is dtype else empty(given.shape, dtype).copy_from(given)


def rounded(array: np.ndarray, dtype: DType) -> np.ndarray:
    """A float64 array after rounding to `dtype`, in float64."""
    return stored(array, dtype).to_numpy("float64")


# -- editing matrix by matrix ------------------------------------------------------------------------------------------
@dataclass(slots=True, kw_only=True, repr=False)
class MatrixReport(ReportBase):
    """Base of reports on an edit of several matrices.

    Attributes:
        dry_run: the program was not changed.
        options: of the call, as JSON.
        rows: one per matrix (and method); each has a `path`.
        skipped: matrices that were not changed, with the reason.
        drift: of the program's first output on the calibration data; None without them.
        interrupted: Ctrl-C or lack of memory ended the edit early; finished matrices stay edited.
    """

    dry_run: bool
    options: dict[str, Any]
    rows: list[Any] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    drift: Drift | None = None
    interrupted: bool = False

    def text(self, title: str, *lines: str) -> str:
        """A title, lines, and the facts that all such reports have."""
        ends = [f"skipped {s.path}: {s.reason}" for s in self.skipped]
        ends += [f"logits {self.drift}"] if self.drift is not None else []
        ends += ["interrupted: finished matrices stay edited"] if self.interrupted else []
        return "\n".join([title + (", dry run" if self.dry_run else ""), *lines, *ends])


def program_of(program: Program | Model) -> Program:
    """The program of a model, or the program itself."""
    return program if isinstance(program, Program) else program.program


def edit_matrices(
    program: Program,
    matrices: Sequence[Matrix],
    edit: Callable[[Transaction, Matrix], dict[str, float]],
    found: MatrixReport,
    *,
    name: str,
    why: str,
    keep_partial: bool,
    report: Report | None,
) -> Program:
    """Edit matrices one by one in a single journal entry.

    Args:
        program: edited in place, or on a fork if `found.dry_run`.
        edit: edits one matrix, appends its rows to `found`, and returns numbers for the progress.
        found: `interrupted` and `skipped` are set where Ctrl-C or lack of memory ends the loop.
        name: of the operation, for the journal and the progress.
        keep_partial: after an interruption keep the finished matrices; otherwise nothing changes.
    Returns: the edited program.
    """
    target = program.fork() if found.dry_run else program
    with target.edit(why, author="pass", tool=f"graphwright.surgery.{name}") as e:
        for i, matrix in enumerate(matrices):
            try:
                with target.edit(matrix.path):
                    facts = edit(e, matrix)
                if report is not None:
                    report(Progress(name, i + 1, len(matrices), facts))
            except (KeyboardInterrupt, MemoryError):
                if not keep_partial:
                    raise
                found.interrupted = True
                done = {row.path for row in found.rows} | {s.path for s in found.skipped}
                found.skipped += [Skipped(m.path, "interrupted before") for m in matrices if m.path not in done]
                break
    return target
