"""Compression of matrices into factors that run as chains of products. Matrices that would grow stay dense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypedDict, Unpack

import numpy as np

from graphwright.arguments import checked
from graphwright.errors import BudgetUnreachable, UsageError
from graphwright.ops import traits
from graphwright.progress import ProgressCallback
from graphwright.report import plain
from graphwright.settings import AtLeastOne, AtLeastTwo, Count, Settings
from graphwright.signatures import keywords
from graphwright.surgery import matrices as mx
from graphwright.surgery.budgets import Bytes, Energy, Error, MatrixBudget, Params, Ratio
from graphwright.surgery.calibration import Calibration, CalibrationSource, MissingCalibration, calibration_of
from graphwright.surgery.errors import CompressionWouldGrow, NotFactorable, check_choices
from graphwright.surgery.factorise.chain import attach, flops
from graphwright.surgery.factorise.factors import Factors, as_stored, compression_ratio, parameters, reconstruct
from graphwright.surgery.factorise.methods import METHODS, Fit, LowRankFit
from graphwright.surgery.factorise.report import CompressionReport, Divergence, FitRow, chain_speed, divergence_of
from graphwright.surgery.matrices import Matrix, Skipped, input_grams, output_error, values

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program
    from graphwright.program.selection import Selection


SLACK = 1e-9
"""Relative tolerance of an error budget, for rounding of the sums that the error is computed from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressOptions(Settings):
    """Options of `compress`.

    Attributes:
        order: number of modes of tensor trains and rings.
        sweeps: number of alternating least squares sweeps after the SVDs of trains and rings.
        min_dim: matrices whose shorter side is below this number stay dense.
        min_rank: smallest rank for svd and asvd.
        max_rank: largest rank for svd and asvd.
        pad: pad with zeros each shape that does not split into `order` modes; False raises NotFactorable instead.
        importance: dict from pattern to the weight of matching layers' errors (1 by default), for size budgets.
    """

    order: AtLeastTwo = 3
    sweeps: Count = 0
    min_dim: AtLeastOne = 64
    min_rank: AtLeastOne = 1
    max_rank: AtLeastOne | None = None
    pad: bool = True
    importance: Mapping[str, float] | None = None


class CompressKeywords(TypedDict, total=False):
    """The fields of `CompressOptions` as keyword arguments."""

    order: AtLeastTwo
    sweeps: Count
    min_dim: AtLeastOne
    min_rank: AtLeastOne
    max_rank: AtLeastOne | None
    pad: bool
    importance: Mapping[str, float] | None


class _Subject:
    """A matrix to compress, with its decomposition by each method, allocated parameters and chosen factors."""

    def __init__(
        self, p: Program, m: Matrix, gram: np.ndarray | None, names: Sequence[str], options: CompressOptions
    ) -> None:
        self.matrix, self.w, self.gram = m, values(p, m.key), gram
        table = any(traits(r.op).lookup for r in m.readers)
        usable = [n for n in names if not (table and n in ("tt", "tr")) and not (n == "asvd" and gram is None)]
        if not usable:
            raise UsageError("the method cannot factor an embedding table", where=m.path, got=names[0],
                             fix='pass method="svd"')  # fmt: skip
        self.fits: dict[str, Fit] = {}
        for name in usable:
            try:
                self.fits[name] = METHODS[name](self.w, gram, options)
            except NotFactorable as error:
                error.where = m.path
                if len(usable) == 1:  # of several methods, those that need no split remain
                    raise
        plain, aware = self.fits.get("svd"), self.fits.get("asvd")
        self.spectrum = plain if isinstance(plain, LowRankFit) else LowRankFit.of(self.w)
        self.aware = aware if isinstance(aware, LowRankFit) else None if gram is None else LowRankFit.of(self.w, gram)
        self.params: int | None = None
        self.rows: list[FitRow] = []
        self.chosen: Factors | None = None


@checked
@keywords(CompressOptions)
def compress(
    program: Program | Model, where: str | Selection, method: str = "best", budget: MatrixBudget | None = None, *,
    calibration: CalibrationSource | None = None, dry_run: bool = False, keep_partial: bool = False,
    progress: ProgressCallback | None = None, **options: Unpack[CompressKeywords],
) -> CompressionReport:  # fmt: skip
    """Replace matrices by factors with fewer parameters, in one edit that `program.undo()` reverts.

    Args:
        program: edited in place.
        where: pattern of linear maps, or a selection. A pattern `*...` skips embeddings and output heads.
        method: `svd`; `asvd`, which minimises the error of the outputs and needs calibration; `tt` and `tr`, tensor
            train and ring; `best`: per matrix, the method of fewest parameters (for a size budget: of least error).
        budget: `Error(e)` or `Energy(share)` of each matrix; or `Ratio`, `Params` or `Bytes` of all selected matrices
            together; each unit of rank goes where it saves most error per parameter. `Energy(0.99)` by default.
        calibration: data, or a text, texts or ids, on which output errors and drift are measured.
        dry_run: compress a copy and return its report, not a plan as `prune` does; leave the program unchanged.
        keep_partial: on Ctrl-C or lack of memory keep the finished matrices; otherwise nothing changes.
        progress: called with `Progress` per matrix.
        options: see `CompressOptions`.
    Raises: EmptySelection, NonFiniteWeight, DtypeUnsupported, BudgetUnreachable, MissingCalibration, NotFactorable;
        CompressionWouldGrow if a single matrix is selected and its factors are not smaller.
    """
    given, p = CompressOptions(**options), mx.program_of(program)
    wanted = Energy() if budget is None else budget
    calibration = calibration_of(program, calibration)
    names = _methods(method, calibration)
    if not isinstance(wanted, MatrixBudget):
        raise UsageError("compress does not support this kind of budget", where="budget",
                         expected="Error, Energy, Ratio, Params or Bytes", got=wanted)  # fmt: skip
    matrices, skipped = mx.find_matrices(p, where)
    total = sum(m.size for m in matrices)
    found = CompressionReport(method=method, budget=repr(wanted), dry_run=dry_run, options=plain(given),
                              skipped=skipped, before=total, after=total)  # fmt: skip
    skipped += [Skipped(m.path, f"a side below min_dim={given.min_dim}")
                for m in matrices if min(m.shape) < given.min_dim]  # fmt: skip
    matrices = [m for m in matrices if min(m.shape) >= given.min_dim]
    grams = input_grams(p, matrices, calibration) if calibration is not None else {}
    subjects = {m.path: _Subject(p, m, grams.get(m.path), names, given) for m in matrices}
    if isinstance(wanted, Ratio | Params | Bytes):
        _allocate(list(subjects.values()), wanted, total, method, given, p)
    divergence = None if calibration is None else divergence_of(p, calibration)

    def edit(e: Transaction, matrix: Matrix) -> dict[str, float]:
        subject = subjects[matrix.path]
        _decide(subject, wanted, divergence)
        found.rows += subject.rows
        _apply(e, subject, found, alone=total == matrix.size)
        return {"ratio": found.ratio}

    why = f"compress {len(matrices)} matrices: {method} within {wanted}"
    mx.edit_matrices(p, matrices, edit, found, name="compress", why=why, calibration=calibration,
                     keep_partial=keep_partial, progress=progress)  # fmt: skip
    return found


def _methods(method: str, calibration: Calibration | None) -> list[str]:
    check_choices({"method": method}, {"method": ("best", *METHODS)})
    if method == "asvd" and calibration is None:
        raise MissingCalibration("asvd needs calibration data", where="calibration",
                                 fix="pass calibration=Calibration(tokens), or method='svd'")  # fmt: skip
    return [m for m in METHODS if m != "asvd" or calibration is not None] if method == "best" else [method]


def _allocate(
    subjects: list[_Subject], budget: Ratio | Params | Bytes, whole: int, method: str, options: CompressOptions,
    p: Program,
) -> None:  # fmt: skip
    """Allocate parameters to each matrix. Raises: BudgetUnreachable if even rank `min_rank` exceeds the budget."""
    most = _most_params(budget, subjects, whole)
    untouched = whole - sum(s.matrix.size for s in subjects)
    shapes = [s.matrix.shape for s in subjects]
    least = options.min_rank * sum(map(sum, shapes)) + untouched
    if least > most:
        raise BudgetUnreachable(f"factors of rank {options.min_rank} have more parameters than the budget",
                                asked=most, best=least, fix="raise the budget")  # fmt: skip
    importance = options.importance or {}
    chosen = {pattern: set(p.select(pattern)) for pattern in importance}
    spectra, weights = [], []
    for s in subjects:
        sigma = (s.aware if s.aware is not None and method in ("asvd", "best") else s.spectrum).s
        weight = prod(importance[pattern] for pattern, nodes in chosen.items() if s.matrix.param in nodes)
        weights.append(weight / max(float(np.sum(sigma**2)), np.finfo(float).tiny))
        spectra.append(sigma)
    ranks = allocate(spectra, shapes, most - untouched, weights, options.min_rank, options.max_rank)
    for s, rank in zip(subjects, ranks, strict=True):
        s.params = s.matrix.size if rank is None else rank * sum(s.matrix.shape)


def _most_params(budget: Ratio | Params | Bytes, subjects: list[_Subject], whole: int) -> int:
    if isinstance(budget, Params):
        return int(budget.most)
    if isinstance(budget, Bytes):
        return int(budget.most // max((s.matrix.dtype.itemsize for s in subjects), default=1))
    if budget.of == "flops":
        raise UsageError("compress does not support a budget of floating point operations", where="budget", got=budget,
                         expected="a budget of parameters or bytes", fix=f"pass Ratio({budget.share})")  # fmt: skip
    return int((1 - budget.share) * whole)


def allocate(
    spectra: Sequence[np.ndarray], shapes: Sequence[tuple[int, int]], budget: int,
    importance: Sequence[float] | None = None, min_rank: int = 1, max_rank: int | None = None,
) -> list[int | None]:  # fmt: skip
    """Return the rank per layer that minimises the dropped Σ w σ² within `budget` parameters, None for a dense layer.

    Each unit of rank of an [m, n] layer costs m + n parameters and saves w σ². Units that save most per parameter are
    taken first, in descending order of σ within a layer. A layer whose factors would not be smaller stays dense.

    Args:
        spectra: singular values σ per layer, in descending order.
        shapes: (m, n) per layer.
        budget: number of parameters of all layers together.
        importance: weight w per layer; 1 by default.
        min_rank, max_rank: limits of the rank of each layer.
    """
    costs, sizes = [m + n for m, n in shapes], [m * n for m, n in shapes]
    gains = [(-(1.0 if importance is None else importance[i]) * float(sigma) ** 2 / costs[i], i, r)
             for i, spectrum in enumerate(spectra) for r, sigma in enumerate(np.asarray(spectrum)[:max_rank])
             if r >= min_rank]  # fmt: skip
    gains.sort()
    dense: set[int] = set()
    while True:
        ranks: list[int | None] = [None if i in dense else min_rank for i in range(len(spectra))]
        left = budget - sum(sizes[i] if r is None else r * costs[i] for i, r in enumerate(ranks))
        closed = set(dense)
        for _, i, r in gains:
            if i in closed or costs[i] > left:
                closed.add(i)  # later ranks save less, and ranks are taken without gaps
            else:
                ranks[i], left = r + 1, left - costs[i]
        grown = [i for i, r in enumerate(ranks) if r is not None and r * costs[i] >= sizes[i]]
        if not grown:
            return ranks
        dense.add(grown[0])


def _decide(s: _Subject, budget: MatrixBudget, divergence: Divergence | None) -> None:
    """Factor a matrix by each method and choose the best result. Raises: BudgetUnreachable if none is within budget."""
    if s.params == s.matrix.size:
        return  # the budget has room for the dense matrix
    limit = (1 - budget.share) ** 0.5 if isinstance(budget, Energy) else None
    if isinstance(budget, Error):
        limit = budget.most
    candidates: list[tuple[Factors, FitRow, float]] = []
    for name, fit in s.fits.items():
        factors = fit.within_params(s.params) if s.params is not None else fit.within_error(limit or 0.0)
        if factors is not None:
            row = _row(s, name, as_stored(factors, s.matrix.dtype), divergence)
            lost = row.output_error if name == "asvd" and row.output_error is not None else row.weight_error
            candidates.append((factors, row, lost))
    s.rows = [row for _, row, _ in candidates]
    rounding = {2: 2.0**-7, 4: 2.0**-22}.get(s.matrix.dtype.itemsize, 1e-13)  # relative error of storing the factors
    within = [c for c in candidates if limit is None or c[2] <= limit * (1 + SLACK) + rounding]
    if s.params is not None and not within:
        raise BudgetUnreachable("the smallest factors have more parameters than this matrix's share of the budget",
                                asked=s.params, where=s.matrix.path, fix="raise the budget, or pass method='svd'",
                                best=min(parameters(fit.within_error(1.0)) for fit in s.fits.values()))  # fmt: skip
    if not within:
        raise BudgetUnreachable("no factors of this matrix meet the error budget", asked=limit or 0.0,
                                best=min(lost for _, _, lost in candidates), where=s.matrix.path,
                                fix="allow a larger error or max_rank")  # fmt: skip
    s.chosen, row, _ = min(within, key=lambda c: c[1].error if limit is None else c[1].parameters)
    row.chosen = True


def _row(s: _Subject, name: str, factors: Factors, divergence: Divergence | None) -> FitRow:
    m, count = s.matrix, parameters(factors)
    rank, (weight_error, output) = count // sum(m.shape), _errors(s.w, factors, s.gram)
    return FitRow(path=m.path, shape=m.shape, method=name, ranks=factors.ranks, parameters=count,
                  ratio=compression_ratio(factors), weight_error=weight_error, output_error=output,
                  svd_error=s.spectrum.error(rank) if rank else None,
                  asvd_error=s.aware.error(rank) if rank and s.aware is not None else None,
                  kl=None if divergence is None else divergence(m, factors), speed=chain_speed(factors),
                  flops_share=flops(factors) / (2 * m.size))  # fmt: skip


def _errors(w: np.ndarray, factors: Factors, gram: np.ndarray | None) -> tuple[float, float | None]:
    """Return the relative error of a matrix, and of its outputs if the Gram matrix of its inputs is known."""
    new, norm = reconstruct(factors), float(np.linalg.norm(w))
    lost = float(np.linalg.norm(new - w)) / norm if norm else 0.0
    return lost, None if gram is None else output_error(w, new, gram)


def _apply(e: Transaction, s: _Subject, found: CompressionReport, *, alone: bool) -> None:
    """Insert the chosen factors. Skip factors that are not smaller; if `alone`, raise CompressionWouldGrow instead."""
    row = next((row for row in s.rows if row.chosen), None)
    if row is None or s.chosen is None:
        found.skipped.append(Skipped(s.matrix.path, "kept dense: the budget has room for it"))
    elif row.ratio <= 1:
        if alone:
            raise CompressionWouldGrow(row.ratio, s.matrix.path)
        found.skipped.append(Skipped(s.matrix.path, f"kept dense: {row.method} has a ratio of {row.ratio:.3g}"))
    else:
        attach(e, s.matrix, s.chosen)
        row.applied = True
        found.after += row.parameters - s.matrix.size


# -- without changing anything -----------------------------------------------------------------------------------------
class CurvePoint(NamedTuple):
    """Ratio of parameters before / after, and relative error: of the outputs for `asvd`, else of the weights."""

    ratio: float
    error: float


def curve(
    program: Program, where: str, methods: Sequence[str] = ("svd",), points: int = 8, *, order: int = 3,
    calibration: Calibration | None = None,
) -> dict[str, list[CurvePoint]]:  # fmt: skip
    """Map each method to points (compression ratio, error) of one matrix at up to `points` sizes, by ascending ratio.

    The SVD of the matrix (for trains and rings: of its first unfolding) is computed once per method. Sizes that trains
    and rings cannot reach are left out, and so are points that a higher ratio beats in error.

    Args:
        program: program that holds the matrix; it is not changed.
        where: pattern that selects one matrix.
        methods: some of `svd`, `asvd`, `tt`, `tr`.
        points: number of sizes, from the size of the matrix down to the size of factors of rank 1.
        order: number of modes of trains and rings.
        calibration: data on which `asvd` measures errors.
    Raises: UsageError for several matrices or an unknown method; MissingCalibration for `asvd` without data.
    """
    found, _ = mx.find_matrices(program, where)
    if len(found) != 1:
        raise UsageError("the pattern selects several matrices", where=where, expected="exactly one matrix",
                         got=f"{len(found)} matrices")  # fmt: skip
    for name in methods:
        check_choices({"method": name}, {"method": METHODS})
        _methods(name, calibration)
    matrix, w = found[0], values(program, found[0].key)
    gram = input_grams(program, found, calibration).get(matrix.path) if calibration is not None else None
    sizes = np.geomspace(matrix.size, sum(matrix.shape), points).astype(int)
    made: dict[str, list[CurvePoint]] = {}
    for name in methods:
        fit = METHODS[name](w, gram, CompressOptions(order=order))
        seen: dict[float, CurvePoint] = {}
        for factors in filter(None, (fit.within_params(int(size)) for size in sizes)):
            lost, output = _errors(w, factors, gram)
            error = output if name == "asvd" and output is not None else lost
            seen.setdefault(ratio := compression_ratio(factors), CurvePoint(ratio, error))
        made[name] = _pareto(list(seen.values()))
    return made


def _pareto(points: list[CurvePoint]) -> list[CurvePoint]:
    """Return the points by ascending ratio; drop each point whose error is not below that of every higher ratio."""
    best: list[CurvePoint] = []
    for point in sorted(points):
        while best and best[-1].error >= point.error:
            best.pop()
        best.append(point)
    return best
