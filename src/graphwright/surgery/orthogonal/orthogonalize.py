"""Orthogonalisation of stored matrices: replace W by its orthonormal factor Q, or rewrite W exactly as Q P.

The factor P of a head can be merged into the next linear map where the merge is exact. Attention mixes positions, not
features of a value head: for V_g = P_g U_g (U orthonormal), O_h absorbs P_g for each query head h of the group g. As
queries multiply keys, K_h absorbs P_hᵀ of Q_h = P_h U_h, unless a rotary embedding, a norm or a second query head is
between.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, NoReturn, TypedDict, Unpack

import numpy as np

from graphwright.arguments import checked
from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.ops import traits
from graphwright.program.axes.units import Units
from graphwright.progress import ProgressCallback
from graphwright.report import Report, plain, table
from graphwright.settings import Settings
from graphwright.signatures import keywords
from graphwright.surgery import matrices as mx
from graphwright.surgery.calibration import CalibrationSource, calibration_of
from graphwright.surgery.errors import NotAbsorbable, check_choices
from graphwright.surgery.factorise.chain import attach
from graphwright.surgery.factorise.factors import LowRank
from graphwright.surgery.matrices import Matrix, Skipped, find_matrices, rounded, stored, values
from graphwright.surgery.measure import Drift
from graphwright.surgery.orthogonal.methods import METHODS, condition, gain, gram_error, orthonormal, second_factor
from graphwright.surgery.walks import next_reader

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.axes.axes import AxisGroup
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program
    from graphwright.program.selection import Selection


HEADS = {"heads", "kv_groups"}


class MatrixSlice(NamedTuple):
    """A slice of a matrix: rows (dim 0) or columns (dim 1), or the whole matrix if `indices` is None."""

    dim: int = 0
    indices: np.ndarray | None = None

    def of(self, w: np.ndarray) -> np.ndarray:
        """Return a copy of this slice of `w`."""
        return w.copy() if self.indices is None else np.take(w, self.indices, axis=self.dim)

    def put(self, w: np.ndarray, value: np.ndarray) -> None:
        """Write `value` into this slice of `w`."""
        index = slice(None) if self.indices is None else self.indices
        w[index if self.dim == 0 else (slice(None), index)] = value


def head_parts(p: Program, matrix: Matrix) -> list[MatrixSlice]:
    """Return one slice per head: rows of q, k and v, columns of o; empty if the matrix has no heads.

    Several query heads that share a key head have one slice each in q and o, and one slice together in k and v.
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
    """Map the key of each 2D weight to its slices that belong to the units; biases and norms are left out."""
    found: dict[str, list[MatrixSlice]] = {}
    for name, ids in units.chosen.items():
        group = p.axes()[name]
        for key in dict.fromkeys(m.key for m in group.members if m.key is not None):
            if len(p.weights.array(key).shape) == 2:
                found.setdefault(key, []).extend(_parts(group, key, ids))
    return {key: parts for key, parts in found.items() if parts}


def _parts(group: AxisGroup, key: str, ids: range | tuple[int, ...]) -> list[MatrixSlice]:
    found: dict[tuple[int, bytes], MatrixSlice] = {}
    for unit in ids:
        for dim, indices in group.slices(unit).get(key, {}).items():
            found.setdefault((dim, indices.tobytes()), MatrixSlice(dim, indices))
    return list(found.values())


def neighbour(p: Program, matrix: Matrix) -> tuple[Matrix, int]:
    """Return the linear map that can absorb the factor P of a matrix, and the dimension of its weight to multiply.

    The result is (`o`, columns = 1) for a value projection, (`k`, rows = 0) for a query projection.
    Raises: NotAbsorbable, which names the op that prevents the merge.
    """

    def refuse(between: str) -> NoReturn:
        raise NotAbsorbable("the factor P cannot be merged into the next map", where=matrix.path, between=between,
                            fix='pass fold="insert" to add P as a node')  # fmt: skip

    def rearranges(node: NodeId, port: int = 0) -> bool:
        return traits(p.op(node)).rearranges or traits(p.op(node)).casts

    def after(node: NodeId) -> tuple[NodeId, int]:
        end, port = next_reader(p, node, rearranges)
        return (end, port) if port is not None else refuse(f"several readers of {p.path(end)}")

    def read_by(node: NodeId) -> Matrix:
        return find_matrices(p, p.select(where=lambda n: n == node))[0][0]

    if len(matrix.readers) != 1 or traits(matrix.readers[0].op).contracts != "out_in":
        refuse("several readers" if len(matrix.readers) != 1 else matrix.readers[0].op)
    if len(p.operands(matrix.readers[0].node)) > 2:
        refuse("bias")
    node, port = after(matrix.readers[0].node)
    if not traits(p.op(node)).attention or port == 1:
        refuse(f"{p.op(node)} {p.path(node)}")
    if port == 2:
        end, at = after(node)
        if traits(p.op(end)).contracts != "out_in" or at != 0:
            refuse(f"{p.op(end)} {p.path(end)}")
        return read_by(end), 1
    source = p.operands(node)[1].node
    while rearranges(source):
        source = p.operands(source)[0].node
    if traits(p.op(source)).contracts != "out_in":
        refuse(f"{p.op(source)} {p.path(source)}")
    if len(p.operands(source)) > 2:
        refuse("bias")
    keys = read_by(source)
    if keys.shape[0] != matrix.shape[0]:
        refuse("several query heads on a key head")
    return keys, 0


def absorb(e: Transaction, matrix: Matrix, parts: list[MatrixSlice], factors: list[np.ndarray]) -> str:
    """Multiply the `factors` P of the slices `parts` into the next linear map; return the path of its weight."""
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
    """Return a pair per query head: its rows in the matrix, and its indices along dimension `side` of `other`."""
    best: list[tuple[np.ndarray, np.ndarray]] = []
    for group in p.axes().values():
        if HEADS & set(group.kinds):
            slices = [group.slices(unit) for unit in range(group.size)]
            found = [(s[matrix.key][0], s[other.key][side]) for s in slices
                     if 0 in s.get(matrix.key, {}) and side in s.get(other.key, {})]  # fmt: skip
            if len(found) > len(best) and all(len(a) == len(b) for a, b in found):
                best = found
    return best


Per = Literal["matrix", "head"]
Fold = Literal["none", "insert", "absorb", "scale"]
COLUMNS = ("path", "shape", "parts", "error", "distance", "condition", "predicted", "measured", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrthogonalizeOptions(Settings):
    """Options of `orthogonalize`.

    Attributes:
        per: unit of work: `matrix`; or `head`, each head's rows in q, k and v, and each head's columns in o.
        fold: use of the second factor P of W = Q P (wide: P Q). `none` drops P, which changes the function. `insert`
            adds P as a node (exact). `absorb` multiplies P into the next map, per head, where this is exact. `scale`
            replaces P by its mean singular value s: W ≈ s Q.
        special: replace a square matrix by the nearest rotation, which has determinant +1.
        inplace: write into the weight's memory if nothing else uses the memory; never if drift is measured.
    """

    per: Per = "matrix"
    fold: Fold = "none"
    special: bool = False
    inplace: bool = False

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.fold == "absorb" and self.per != "head":
            raise UsageError(
                "fold='absorb' works per head only", where="fold", got=f"per={self.per!r}", fix="pass per='head'"
            )
        if self.inplace and self.fold == "insert":
            raise UsageError(
                "inplace=True cannot store the two factors of fold='insert'", where="inplace", fix="pass inplace=False"
            )
        if self.special and self.fold == "absorb":
            raise UsageError("special=True needs square matrices, but slices of heads are not square", where="special",
                             fix="pass special=False")  # fmt: skip


class OrthogonalizeKeywords(TypedDict, total=False):
    """The fields of `OrthogonalizeOptions` as keyword arguments."""

    per: Per
    fold: Fold
    special: bool
    inplace: bool


@dataclass(slots=True, repr=False)
class OrthoRow(Report):
    """Figures of one orthogonalised matrix.

    Attributes:
        path, shape, dtype: path of the matrix, shape [out, in] and stored dtype.
        parts: number of slices that were orthogonalised: 1, or one per head.
        error: max |QᵀQ - I| (wide: |QQᵀ - I|) over the slices, of Q rounded to the stored dtype.
        distance: ‖W - Q‖ / ‖W‖.
        condition, condition_after: σ_max / σ_min of the worst slice, before and after.
        gain: smallest and largest ‖Qd‖ / ‖d‖ over random directions d.
        scale: mean singular value, the factor of `fold="scale"`.
        predicted: relative drift of this layer's output on its unchanged calibration inputs; None without calibration.
        measured: drift of this layer's output in the edited program, whose earlier layers may have changed too.
        seconds: duration in seconds.
    """

    path: str
    shape: tuple[int, int]
    dtype: str
    parts: int
    error: float
    distance: float
    condition: float
    condition_after: float
    gain: tuple[float, float]
    scale: float
    predicted: float | None
    seconds: float
    measured: Drift | None = None


@dataclass(slots=True, kw_only=True, repr=False)
class OrthoReport(mx.MatrixReport):
    """Report on one call of `orthogonalize`: one row per matrix; other fields as in `MatrixReport`.

    Attributes:
        method: argument of the call.
        mean_error, max_error: mean and largest `error` of the rows.
    """

    method: str
    rows: list[OrthoRow] = field(default_factory=list)
    FIGURES: ClassVar = ("mean_error", "max_error")

    @property
    def mean_error(self) -> float:
        """Mean of `error` over the rows; 0 if there are no rows."""
        return float(np.mean([r.error for r in self.rows])) if self.rows else 0.0

    @property
    def max_error(self) -> float:
        """Largest `error` of the rows; 0 if there are no rows."""
        return max((r.error for r in self.rows), default=0.0)

    def _text(self) -> str:
        rows = [{**r.to_json(), "measured": r.measured and r.measured.relative} for r in self.rows]
        return self.text(
            f"orthogonalize: {self.method} per {self.options['per']}, fold {self.options['fold']}",
            table(rows, COLUMNS),
            f"{mx.matrix_count(self.rows)}, mean error {self.mean_error:.3g}, largest {self.max_error:.3g}",
        )


class _Solved(NamedTuple):
    """A matrix `q` with orthonormal slices, and per slice the factor P and the mean singular value."""

    q: np.ndarray
    factors: list[np.ndarray]
    scales: list[float]


@checked
@keywords(OrthogonalizeOptions)
def orthogonalize(
    program: Program | Model, where: str | Selection | Units, method: str = "polar", *,
    calibration: CalibrationSource | None = None, dry_run: bool = False, keep_partial: bool = False,
    progress: ProgressCallback | None = None, **options: Unpack[OrthogonalizeKeywords],
) -> OrthoReport:  # fmt: skip
    """Replace matrices by their orthonormal factors, in one edit that `program.undo()` reverts.

    A tall matrix (out >= in) gets orthonormal columns, a wide matrix orthonormal rows. Factors are computed in float64
    and rounded once to the stored dtype; errors are measured after rounding. A tied weight is processed once.

    Args:
        program: edited in place.
        where: pattern of linear maps, a selection, or units (`program.select("layers.1.attn").heads[3]`), which are
            processed head by head; the bytes of other heads stay the same.
        method: `polar`, the nearest factor; `qr`, the cheapest; `newton_schulz`, `polar` by matrix products only.
        calibration: data, or a text, texts or ids, on which drift is predicted and measured.
        dry_run: edit a copy and return its report, not a plan as `prune` does; leave the program unchanged.
        keep_partial: on Ctrl-C or lack of memory keep the finished matrices; otherwise nothing changes.
        progress: called with `Progress` per matrix.
        options: see `OrthogonalizeOptions`.
    Raises: EmptySelection, NonFiniteWeight, DtypeUnsupported, NotAbsorbable; UsageError for invalid options.
    """
    given, p = OrthogonalizeOptions(**options), mx.program_of(program)
    check_choices({"method": method}, {"method": METHODS})
    matrices, skipped, parts = _chosen(p, where, given.per)
    if given.fold == "absorb":
        for m in matrices:
            neighbour(p, m)
    calibration = calibration_of(program, calibration)
    grams = mx.input_grams(p, matrices, calibration) if calibration is not None else {}
    given = replace(given, per="head") if parts else given
    found = OrthoReport(method=method, dry_run=dry_run, options=plain(given), skipped=skipped)

    def edit(e: Transaction, m: Matrix) -> dict[str, float]:
        row = _orthogonalize(e, m, parts.get(m.key, [MatrixSlice()]), method, given, grams.get(m.path))
        found.rows.append(row)
        return {"error": row.error}

    why = f"orthogonalise {len(matrices)} matrices: {method}, fold {given.fold}"
    drifts = mx.edit_matrices(p, matrices, edit, found, name="orthogonalize", why=why, calibration=calibration,
                           keep_partial=keep_partial, progress=progress, layers=True)  # fmt: skip
    for row in found.rows:
        row.measured = drifts.get(row.path)
    return found


def _chosen(
    p: Program, where: str | Selection | Units, per: str
) -> tuple[list[Matrix], list[Skipped], dict[str, list[MatrixSlice]]]:
    """Return the matrices, the skipped params, and a dict from weight key to slices (empty if `per` is `matrix`)."""
    if isinstance(where, Units):
        if where.program is not p:
            raise UsageError("the units belong to a different program", where=p.name, got=repr(where))
        parts = parts_of(p, where)
        matrices, skipped = find_matrices(p, p.select(op="param", where=lambda n: p.key(n) in parts))
        return matrices, skipped, {m.key: parts[m.key] for m in matrices}
    matrices, skipped = find_matrices(p, where)
    if per == "matrix":
        return matrices, skipped, {}
    parts = {m.key: head_parts(p, m) for m in matrices}
    skipped += [Skipped(m.path, "no heads") for m in matrices if not parts[m.key]]
    matrices = [m for m in matrices if parts[m.key]]
    if not matrices:
        raise UsageError("no selected matrix has heads", where=str(where), got=skipped[-1].path,
                         fix='pass per="matrix"')  # fmt: skip
    return matrices, skipped, parts


def _solve(w: np.ndarray, parts: list[MatrixSlice], method: str, special: bool) -> _Solved:
    q, factors, scales = w.copy(), [], []
    for part in parts:
        block = part.of(w)
        made = orthonormal(block, method, special)
        part.put(q, made)
        factors.append(second_factor(block, made))
        scales.append(float(np.vdot(made, block)) / min(block.shape))
    return _Solved(q, factors, scales)


def _orthogonalize(
    e: Transaction, m: Matrix, parts: list[MatrixSlice], method: str, options: OrthogonalizeOptions,
    gram: np.ndarray | None,
) -> OrthoRow:  # fmt: skip
    started, fold = perf_counter(), options.fold
    w = values(e.program, m.key)
    solved = _solve(w, parts, method, options.special)
    q = rounded(solved.q, m.dtype)
    new = q
    if fold == "insert":
        factors = _low_rank(m, parts, solved)
        attach(e, m, factors)
        new = rounded(factors.outer, m.dtype) @ rounded(factors.inner, m.dtype)
    else:
        if fold == "scale":
            scaled = solved.q.copy()
            for part, s in zip(parts, solved.scales, strict=True):
                part.put(scaled, s * part.of(solved.q))
            new = rounded(scaled, m.dtype)
            for part, s in zip(parts, solved.scales, strict=True):
                part.put(q, part.of(new) / s if s else part.of(q))
        elif fold == "absorb":
            absorb(e, m, parts, solved.factors)
        e.set_weight(m.key, stored(new, m.dtype), inplace=options.inplace)
    blocks = [(part.of(w), part.of(q)) for part in parts]
    gains = [gain(made) for _, made in blocks]
    exact = fold == "absorb"  # the next layer compensates, so the layer's own output says nothing
    return OrthoRow(
        path=m.path, shape=m.shape, dtype=m.dtype.name, parts=len(parts),
        error=max(gram_error(made) for _, made in blocks),
        distance=float(np.linalg.norm(w - q) / np.linalg.norm(w)) if w.any() else inf,
        condition=max(condition(block) for block, _ in blocks),
        condition_after=max(condition(made) for _, made in blocks),
        gain=(min(low for low, _ in gains), max(high for _, high in gains)), scale=float(np.mean(solved.scales)),
        predicted=None if gram is None or exact else mx.output_error(w, new, gram), seconds=perf_counter() - started,
    )  # fmt: skip


def _low_rank(m: Matrix, parts: list[MatrixSlice], solved: _Solved) -> LowRank:
    """Return W = Q P or W = P Q as a `LowRank`; the factors P of heads form a block diagonal matrix."""
    shapes = [part.of(solved.q).shape for part in parts]
    before = all(rows >= columns for rows, columns in shapes)
    if parts[0].indices is None:
        p = solved.factors[0]
        return LowRank(solved.q, p) if before else LowRank(p, solved.q)
    if any((part.dim == 1) != before or (rows < columns) != (part.dim == 0)
           for part, (rows, columns) in zip(parts, shapes, strict=True)):  # fmt: skip
        raise UsageError("the heads are too wide to insert their factors P as one matrix", where=m.path,
                         got=f"heads of shape {list(shapes[0])}", expected="heads narrower than the other dimension",
                         fix='pass per="matrix"')  # fmt: skip
    p = np.eye(m.shape[parts[0].dim])
    for part, block in zip(parts, solved.factors, strict=True):
        assert part.indices is not None
        p[np.ix_(part.indices, part.indices)] = block
    return LowRank(solved.q, p) if parts[0].dim == 1 else LowRank(p, solved.q)
