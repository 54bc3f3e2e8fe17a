"""Selection of stored weight matrices by a pattern, with the nodes that read them, and the edit of matrices one by one.

Invariant: each param that the pattern selects is listed exactly once, either as a matrix or as skipped with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.array import DType, NDArray, empty, from_numpy
from graphwright.errors import DTypeError, UsageError, check_type
from graphwright.graph import NodeId
from graphwright.ops import traits
from graphwright.program.axes.units import Units
from graphwright.program.errors import EmptySelection
from graphwright.program.kinds import PARAM
from graphwright.program.op_graph import OpGraph, Value
from graphwright.program.selection import Selection
from graphwright.progress import Progress, ProgressCallback
from graphwright.report import Report
from graphwright.surgery.calibration import Calibration
from graphwright.surgery.measure import Drift, measure_drift

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program


class NonFiniteWeight(UsageError, ArithmeticError):
    """A weight contains NaN or infinity; `key` and `index` locate the first one."""

    def __init__(self, key: str, index: tuple[int, ...], value: float) -> None:
        super().__init__("the weight is not finite", where=f"{key}[{', '.join(map(str, index))}]", got=value,
                         fix="find all such weights by gw.surgery.diagnose(program)")  # fmt: skip
        self.key, self.index = key, index


class DtypeUnsupported(DTypeError):
    """An operation that needs floating-point weights got an integer weight."""


class Reader(NamedTuple):
    """A node that reads a matrix, and the name of its op."""

    node: NodeId
    op: str


class Skipped(NamedTuple):
    """A selected param that was not changed, and the reason."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix: a param of shape [out, in].

    Attributes:
        param: handle of the param node.
        path, key: the param's name in the program, and in the checkpoint.
        shape: (out, in).
        dtype: the stored dtype.
        readers: nodes that read the matrix, directly or through casts; several if the weight is tied.
    """

    param: NodeId
    path: str
    key: str
    shape: tuple[int, int]
    dtype: DType
    readers: tuple[Reader, ...]

    @property
    def name(self) -> str:
        """Path of the linear map: the path of the param without `.weight`."""
        return self.path.removesuffix(".weight")

    @property
    def size(self) -> int:
        """Number of entries."""
        return self.shape[0] * self.shape[1]


def find_matrices(program: Program, where: str | Selection) -> tuple[list[Matrix], list[Skipped]]:
    """Return the selected matrices in topological order, and the selected params that are skipped.

    A matrix is selected by its param or by a linear map that reads it. A pattern that begins with a wildcard skips
    embedding tables and output heads; other patterns, such as their paths, select them.

    Raises:
        EmptySelection: if no matrix is selected.
        DtypeUnsupported: if a selected matrix holds integers.
    """
    kinds = (str, Selection, Units)
    check_type("where", where, kinds, "a pattern, a Selection or Units", 'where="**" for all matrices')
    selection = selection_of(program, where)
    chosen = dict.fromkeys(_param(program, node) for node in selection)
    named = not isinstance(where, str) or not where.startswith("*")
    checked = [_matrix(program, node, named) for node in chosen if node is not None]
    found = [m for m in checked if isinstance(m, Matrix)]
    skipped = [s for s in checked if isinstance(s, Skipped)]
    if not found:
        reason = f"; {skipped[0].path} was skipped: {skipped[0].reason}" if skipped else ""
        raise EmptySelection("the selection contains no matrix of a linear map",
                             where=where if isinstance(where, str) else repr(where),
                             got=f"{selection.count} nodes{reason}",
                             fix='list the linear maps by program.select("**", op="linear").show()')  # fmt: skip
    return found, skipped


def _param(p: Program, node: NodeId) -> NodeId | None:
    """Return the node if it is a param, else the param that the node reads as its matrix, or None."""
    if p.op(node) == PARAM:
        return node
    port = traits(p.op(node)).matrix
    if port is None:
        return None
    source = p.operands(node)[port].node
    while traits(p.op(source)).casts:
        source = p.operands(source)[0].node
    return source if p.op(source) == PARAM else None


def _matrix(p: Program, node: NodeId, named: bool) -> Matrix | Skipped:
    spec, path = p.spec(node), p.path(node)
    if len(spec.shape) != 2:
        return Skipped(path, f"{len(spec.shape)} dimension{'s' * (len(spec.shape) != 1)}, not a matrix")
    if not spec.dtype.is_float:
        raise DtypeUnsupported("the matrix holds integers", where=path, expected="a float dtype", got=spec.dtype.name)
    readers = tuple(_readers(p, Value(node)))
    others = sorted({r.op for r in readers if traits(r.op).matrix is None})
    if others or not readers:
        return Skipped(path, f"read by {', '.join(others)}" if others else "nothing reads it")
    if not named and any(traits(r.op).lookup for r in readers):
        return Skipped(path, "an embedding table: touched only when named")
    if not named and any(Value(r.node) in p.outputs() for r in readers):
        return Skipped(path, "an output head: touched only when named")
    out, inner = (int(n) for n in spec.shape)
    return Matrix(node, path, p.key(node), (out, inner), spec.dtype, readers)


def _readers(p: Program, value: Value) -> list[Reader]:
    """Return the readers of a value, through casts; op is "<op> operand" for readers that do not use it as a matrix."""
    found = []
    for edge in p.out_edges(value.node):
        reader = p.graph.target(edge)
        op = p.op(reader)
        if traits(op).casts:
            found += _readers(p, Value(reader))
        else:
            found.append(Reader(reader, op if traits(op).matrix == p.edge_port(edge) else f"{op} operand"))
    return found


def selection_of(p: Program, where: str | Selection) -> Selection:
    """Return the selection of a pattern; a selection is returned unchanged."""
    return p.select(where) if isinstance(where, str) else where


def named(p: Program, *endings: str) -> list[str]:
    """Return the paths of params that end in one of `endings`, without that ending, in order of creation."""
    paths = [p.path(n) for n in p.of_kind(PARAM)]
    return [path.removesuffix(end) for path in paths for end in endings if path.endswith(end)]


def values(program: Program, key: str) -> np.ndarray:
    """Return a weight in float64. Raises: NonFiniteWeight if it contains NaN or infinity."""
    return finite(program.weights.array(key).to_numpy("float64"), key)


def finite(array: np.ndarray, key: str = "w") -> np.ndarray:
    """Return `array` unchanged. Raises: NonFiniteWeight with the index of the first entry that is NaN or infinite."""
    if not (fine := np.isfinite(array)).all():
        index = tuple(int(i) for i in np.unravel_index(int(np.argmin(fine)), fine.shape))
        raise NonFiniteWeight(key, index, float(array[index]))
    return array


def stored(array: np.ndarray, dtype: DType) -> NDArray:
    """Round an array once to the dtype in which it is stored."""
    given = from_numpy(np.ascontiguousarray(array))
    return given if given.dtype is dtype else empty(given.shape, dtype).copy_from(given)


def rounded(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Round a float64 array to `dtype`, and return the result in float64."""
    return stored(array, dtype).to_numpy("float64")


def input_grams(program: Program, matrices: Iterable[Matrix], calibration: Calibration) -> dict[str, np.ndarray]:
    """Map each matrix path to the Gram matrix G = Σ x xᵀ / N of the inputs x of its linear maps, float64 [in, in].

    Maps that read the same value share its statistics. Matrices that no linear map reads are left out.
    """
    sources: dict[str, list[Value]] = {}
    for m in matrices:
        sources[m.path] = [program.operands(r.node)[0] for r in m.readers if traits(r.op).contracts == "out_in"]
    wanted = list(dict.fromkeys(v for found in sources.values() for v in found))
    sums: dict[Value, np.ndarray] = {}
    counts: dict[Value, int] = {}
    for chunk in calibration.stream(program).each(_second_moments, wanted):
        for value, found in zip(wanted, chunk, strict=True):
            if found is None:
                raise UsageError("the inputs of a linear map contain NaN or infinity", where=program.path(value))
            sums[value] = sums.get(value, 0.0) + found[0]
            counts[value] = counts.get(value, 0) + found[1]
    return {path: np.sum([sums[v] for v in found], axis=0) / sum(counts[v] for v in found)
            for path, found in sources.items() if found}  # fmt: skip


def _second_moments(feeds: Mapping[str, np.ndarray], found: Sequence[NDArray]) -> list[tuple[np.ndarray, int] | None]:
    """Return Σ x xᵀ over the rows x of each array, float64, and their number; None if one is not finite."""
    rows = [array.to_numpy("float64").reshape(-1, array.shape[-1]) for array in found]
    return [(x.T @ x, len(x)) if np.isfinite(x).all() else None for x in rows]


def output_error(w: np.ndarray, new: np.ndarray, gram: np.ndarray) -> float:
    """Return the relative error of y = x · Wᵀ: √(tr D G Dᵀ / tr W G Wᵀ), D = new - W, G = Gram matrix of x."""
    d = new - w
    lost, whole = float(np.vdot(d @ gram, d)), float(np.vdot(w @ gram, w))
    return (max(lost, 0.0) / whole) ** 0.5 if whole > 0 else 0.0 if lost <= 0 else inf


# -- editing matrix by matrix ------------------------------------------------------------------------------------------
def matrix_count(rows: Sized) -> str:
    """Return the number of rows with its noun: `1 matrix`, `2 matrices`."""
    return f"{len(rows):,} {'matrix' if len(rows) == 1 else 'matrices'}"


@dataclass(slots=True, kw_only=True, repr=False)
class MatrixReport(Report):
    """Base class of reports on an edit of several matrices.

    Attributes:
        dry_run: whether the edit ran on a copy only.
        options: options of the call, as JSON.
        rows: one report row per matrix (and method); each row has a `path`.
        skipped: matrices that were not changed, with the reason.
        drift: drift of the program's first output on the calibration data; None without calibration data.
        interrupted: whether Ctrl-C or lack of memory ended the edit early; finished matrices stay edited.
    """

    dry_run: bool
    options: dict[str, Any]
    rows: list[Any] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    drift: Drift | None = None
    interrupted: bool = False

    def text(self, title: str, *lines: str) -> str:
        """Format a title and some lines, followed by the skipped matrices, the drift and a note on interruption."""
        ends = [f"skipped {s.path}: {s.reason}" for s in self.skipped]
        ends += [f"logits {self.drift}"] if self.drift is not None else []
        ends += ["interrupted: finished matrices are kept"] if self.interrupted else []
        return "\n".join([title + (", dry run" if self.dry_run else ""), *lines, *ends])


def program_of(program: Program | Model) -> Program:
    """Return the program of a model; a program is returned unchanged."""
    return program if isinstance(program, OpGraph) else program.program


def edit_matrices(
    program: Program, matrices: Sequence[Matrix], edit: Callable[[Transaction, Matrix], dict[str, float]],
    found: MatrixReport, *, name: str, why: str, calibration: Calibration | None, keep_partial: bool,
    progress: ProgressCallback | None, layers: bool = False,
) -> dict[str, Drift]:  # fmt: skip
    """Edit matrices one by one in a single journal entry, and measure the drift of the outputs.

    Args:
        program: edited in place, or on a fork if `found.dry_run`.
        edit: function that edits one matrix, appends rows to `found`, and returns figures for `Progress`.
        found: report in which `drift`, and after an interruption `interrupted` and `skipped`, are filled in.
        name: name of the operation, for the journal and for `Progress`.
        calibration: data on which drift is measured.
        keep_partial: on Ctrl-C or lack of memory keep the finished matrices; otherwise nothing changes.
        layers: also measure the drift of each matrix's linear map.
    Returns: dict from matrix path to the drift of its linear map; empty unless `layers` is True.
    """
    before = None if calibration is None else program.fork()  # a fork holds the arrays, which prevents edits in place
    target = program.fork() if found.dry_run else program
    with target.edit(why, author="pass", tool=f"graphwright.surgery.{name}") as e:
        for i, matrix in enumerate(matrices):
            try:
                with target.edit(matrix.path):
                    facts = edit(e, matrix)
                if progress is not None:
                    progress(Progress(name, i + 1, len(matrices), facts))
            except (KeyboardInterrupt, MemoryError):
                if not keep_partial:
                    raise
                found.interrupted = True
                done = {row.path for row in found.rows} | {s.path for s in found.skipped}
                found.skipped += [Skipped(m.path, "interrupted before") for m in matrices if m.path not in done]
                break
    if calibration is None or before is None:
        return {}
    maps = {m.path: m.name for m in matrices if layers and m.readers and target.free_name(m.name) != m.name}
    found.drift, drifts = measure_drift(before, target, calibration, list(maps.values()))
    return {path: drifts[name] for path, name in maps.items()}
