"""Compress stored matrices into factors that run as a chain of products; what does not get smaller stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import BudgetUnreachable, UsageError
from graphwright.ops import traits
from graphwright.progress import Progress
from graphwright.surgery.budgets import Bytes, Energy, Error, Params, Ratio
from graphwright.surgery.calibration import MissingCalibration
from graphwright.surgery.errors import CompressionWouldGrow
from graphwright.surgery.factorise.allocate import allocate
from graphwright.surgery.factorise.chain import attach, flops
from graphwright.surgery.factorise.factors import compression_ratio, parameters, reconstruct
from graphwright.surgery.factorise.methods import METHODS, LowRankFit
from graphwright.surgery.factorise.report import Alone, CompressionReport, FitRow, as_stored, milliseconds
from graphwright.surgery.matrices import Skipped, find_matrices, values
from graphwright.surgery.measure import input_grams, measured, output_error

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program import Program, Selection, Transaction
    from graphwright.progress import Report
    from graphwright.surgery.calibration import Calibration
    from graphwright.surgery.factorise.factors import Factors
    from graphwright.surgery.factorise.methods import Fit
    from graphwright.surgery.matrices import Matrix

Budget = Error | Energy | Ratio | Params | Bytes
SLACK = 1e-9
"""By which a relative error may pass its budget through rounding of the sums it is computed from."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the methods are told: see `compress`."""

    order: int = 3
    sweeps: int = 0
    pad: bool = True
    min_rank: int = 1
    max_rank: int | None = None


@dataclass(slots=True)
class _Subject:
    """A matrix, and what was found for it."""

    matrix: Matrix
    w: np.ndarray
    gram: np.ndarray | None
    fits: dict[str, Fit]
    spectrum: LowRankFit
    aware: LowRankFit | None
    params: int | None = None
    rows: list[FitRow] = field(default_factory=list)
    chosen: Factors | None = None


def compress(
    program: Program,
    where: str | Selection,
    method: str = "best",
    budget: Budget | None = None,
    *,
    order: int = 3,
    sweeps: int = 0,
    min_dim: int = 64,
    min_rank: int = 1,
    max_rank: int | None = None,
    pad: bool = True,
    importance: Mapping[str, float] | None = None,
    calibration: Calibration | None = None,
    dry_run: bool = False,
    keep_partial: bool = False,
    progress: Report | None = None,
) -> CompressionReport:
    """Replace matrices by factors with fewer parameters, in one edit that `program.undo()` takes back.

    Args:
        program: edited in place.
        where: pattern of linear maps, or a selection. Embeddings and heads are touched only when named.
        method: `svd`; `asvd`, which minimises the error of the outputs and needs calibration; `tt` and `tr`, tensor
            train and ring; `best`, the one with the fewest parameters (or, for a size budget, the least error).
        budget: `Error(e)` or `Energy(share)` of each matrix; `Ratio`, `Params` or `Bytes` of all selected together,
            shared out rank by rank where a parameter saves most error. `Energy(0.99)` by default.
        order: modes of trains and rings.
        sweeps: of alternating least squares behind the SVDs of trains and rings.
        min_dim: matrices with a smaller side are left alone.
        min_rank, max_rank: of svd and asvd.
        pad: pad shapes that do not split into `order` modes; False refuses them.
        importance: pattern -> weight of a layer's error, 1 by default, where a size budget is shared out.
        calibration: data on which errors of outputs and drift are measured.
        dry_run: report the same, on a copy, and leave the program as it is.
        keep_partial: on Ctrl-C or lack of memory keep the matrices done so far; otherwise nothing is changed.
        progress: called per matrix.
    Raises: EmptySelection, NonFiniteWeight, DtypeUnsupported, BudgetUnreachable, MissingCalibration, NotFactorable;
        CompressionWouldGrow if one matrix is selected and its factors are not smaller (of several it stays dense).
    """
    wanted = Energy() if budget is None else budget
    options = Options(order, sweeps, pad, min_rank, max_rank)
    names = _methods(method, calibration)
    if not isinstance(wanted, Budget):
        raise UsageError("not a budget of this operation", where="budget",
                         expected="Error, Energy, Ratio, Params or Bytes", got=wanted)  # fmt: skip
    matrices, skipped = find_matrices(program, where)
    found = CompressionReport(method, repr(wanted), dry_run, skipped=skipped)
    found.before = found.after = sum(m.size for m in matrices)
    small = [m for m in matrices if min(m.shape) < min_dim]
    skipped += [Skipped(m.path, f"a side below min_dim={min_dim}") for m in small]
    matrices = [m for m in matrices if min(m.shape) >= min_dim]
    grams = input_grams(program, matrices, calibration) if calibration is not None else {}
    subjects = [_subject(program, m, grams.get(m.path), names, options) for m in matrices]
    if isinstance(wanted, Ratio | Params | Bytes):
        _share_out(subjects, wanted, found.before, method, importance or {}, options, program)
    before, target = program.fork(), program.fork() if dry_run else program
    alone = None if calibration is None else Alone(before, calibration)
    why = f"compress {len(matrices)} matrices: {method} within {wanted}"
    with target.edit(why, author="pass", tool="graphwright.surgery.compress") as e:
        for i, subject in enumerate(subjects):
            try:
                _decide(subject, wanted, alone)
                found.rows += subject.rows
                _apply(e, subject, found, single=found.before == matrices[0].size)
                if progress is not None:
                    progress(Progress("compress", i + 1, len(subjects), {"ratio": found.ratio}))
            except (KeyboardInterrupt, MemoryError):
                if not keep_partial:
                    raise
                found.interrupted = True
                skipped += [Skipped(s.matrix.path, "interrupted before") for s in subjects if not s.rows]
                break
    if calibration is not None:
        found.drift = measured(before, target, calibration)[0]
    return found


def compress_model(
    model: Model, where: str | Selection, method: str, budget: Budget | None, **options: Any
) -> CompressionReport:
    """`compress` of a model's program; what `model.compress` calls."""
    return compress(model.program, where, method, budget, **options)


def _methods(method: str, calibration: Calibration | None) -> list[str]:
    if method not in ("best", *METHODS):
        raise UsageError("no such method", where="method", expected=", ".join(("best", *METHODS)), got=method)
    if method == "asvd" and calibration is None:
        raise MissingCalibration("asvd weighs errors by the inputs of a layer", where="calibration",
                                 fix="calibration=Calibration(tokens), or method='svd'")  # fmt: skip
    return [m for m in METHODS if m != "asvd" or calibration is not None] if method == "best" else [method]


def _subject(p: Program, m: Matrix, gram: np.ndarray | None, names: list[str], options: Options) -> _Subject:
    w = values(p, m.key)
    table = any(traits(use.op).lookup for use in m.uses)
    usable = [n for n in names if not (table and n in ("tt", "tr")) and not (n == "asvd" and gram is None)]
    if not usable:
        raise UsageError("an embedding table is looked up in: only low-rank factors replace it", where=m.path,
                         got=names[0], fix='method="svd"')  # fmt: skip
    fits = {name: METHODS[name](w, gram, options) for name in usable}
    aware = LowRankFit.of(w, gram) if gram is not None else None
    return _Subject(m, w, gram, fits, LowRankFit.of(w), aware)


def _share_out(
    subjects: list[_Subject],
    budget: Ratio | Params | Bytes,
    whole: int,
    method: str,
    importance: Mapping[str, float],
    options: Options,
    p: Program,
) -> None:
    """Give each matrix its number of parameters. Raises: BudgetUnreachable if rank `min_rank` of all is too much."""
    most = _most_params(budget, subjects, whole)
    kept = whole - sum(s.matrix.size for s in subjects)
    least = sum(options.min_rank * sum(s.matrix.shape) for s in subjects) + kept
    if least > most:
        raise BudgetUnreachable("not even the smallest ranks fit", asked=most, best=least, fix="a larger budget")
    chosen = {pattern: set(p.select(pattern)) for pattern in importance}
    spectra, weights = [], []
    for s in subjects:
        sigma = (s.aware if s.aware is not None and method in ("asvd", "best") else s.spectrum).s
        weight = prod(importance[pattern] for pattern, nodes in chosen.items() if s.matrix.param in nodes)
        weights.append(weight / max(float(np.sum(sigma**2)), np.finfo(float).tiny))
        spectra.append(sigma)
    shapes = [s.matrix.shape for s in subjects]
    ranks = allocate(spectra, shapes, most - kept, weights, options.min_rank, options.max_rank)
    for s, rank in zip(subjects, ranks, strict=True):
        s.params = s.matrix.size if rank is None else rank * sum(s.matrix.shape)


def _most_params(budget: Ratio | Params | Bytes, subjects: list[_Subject], whole: int) -> int:
    if isinstance(budget, Params):
        return int(budget.most)
    if isinstance(budget, Bytes):
        return int(budget.most // max((s.matrix.dtype.itemsize for s in subjects), default=1))
    if budget.of == "flops":
        raise UsageError("a share of operations is no budget of factors", where="budget", fix="Ratio(share)")
    return int((1 - budget.share) * whole)


def _decide(s: _Subject, budget: Budget, alone: Alone | None) -> None:
    """A row per method, and the best one within the budget. Raises: BudgetUnreachable."""
    if s.params == s.matrix.size:
        return  # the budget has room for all of it
    candidates: list[tuple[Factors, FitRow, float]] = []
    for name, fit in s.fits.items():
        factors = _fit(fit, s, budget)
        if factors is not None:
            row = _row(s, name, as_stored(factors, s.matrix), alone)
            lost = row.output_error if name == "asvd" and row.output_error is not None else row.weight_error
            candidates.append((factors, row, lost))
    s.rows = [row for _, row, _ in candidates]
    limit = _limit(budget)
    within = candidates if limit is None else [c for c in candidates if c[2] <= limit * (1 + SLACK) + _rounding(s)]
    if not within:
        raise BudgetUnreachable(
            "no method meets the budget", asked=limit or 0.0, where=s.matrix.path,
            best=min((lost for _, _, lost in candidates), default=1.0), fix="a larger error, or a larger max_rank",
        )  # fmt: skip
    best = min(within, key=lambda c: c[1].error if limit is None else c[1].parameters)
    best[1].chosen, s.chosen = True, best[0]


def _fit(fit: Fit, s: _Subject, budget: Budget) -> Factors | None:
    if s.params is not None:
        return fit.within_params(s.params)
    limit = _limit(budget)
    assert limit is not None
    return fit.within_error(limit)


def _limit(budget: Budget) -> float | None:
    """The relative error that a quality budget allows; None for a size budget."""
    if isinstance(budget, Energy):
        return (1 - budget.share) ** 0.5
    return budget.most if isinstance(budget, Error) else None


def _rounding(s: _Subject) -> float:
    """Relative error that storing factors brings by itself."""
    return {2: 2.0**-7, 4: 2.0**-22}.get(s.matrix.dtype.itemsize, 1e-13)


def _row(s: _Subject, name: str, factors: Factors, alone: Alone | None) -> FitRow:
    m, count = s.matrix, parameters(factors)
    new = reconstruct(factors)
    norm, rank = float(np.linalg.norm(s.w)), count // sum(m.shape)
    dense_ms, ms = milliseconds(factors)
    return FitRow(
        path=m.path,
        shape=m.shape,
        method=name,
        ranks=factors.ranks,
        parameters=count,
        ratio=compression_ratio(factors),
        weight_error=float(np.linalg.norm(new - s.w)) / norm if norm else 0.0,
        output_error=None if s.gram is None else output_error(s.w, new, s.gram),
        svd_error=s.spectrum.error(rank) if rank else None,
        asvd_error=s.aware.error(rank) if rank and s.aware is not None else None,
        kl=None if alone is None else alone.divergence(m, factors),
        dense_ms=dense_ms,
        ms=ms,
        flops_share=flops(factors) / (2 * m.size),
    )  # fmt: skip


def _apply(e: Transaction, s: _Subject, found: CompressionReport, *, single: bool) -> None:
    """Put the chosen factors in, if they are smaller. Raises: CompressionWouldGrow for a matrix that is alone."""
    row = next((row for row in s.rows if row.chosen), None)
    if row is None or s.chosen is None:
        found.skipped.append(Skipped(s.matrix.path, "kept dense: the budget has room for it"))
    elif row.ratio <= 1:
        if single:
            raise CompressionWouldGrow(row.ratio, s.matrix.path)
        found.skipped.append(Skipped(s.matrix.path, f"kept dense: {row.method} has a ratio of {row.ratio:.3g}"))
    else:
        with e.program.edit(s.matrix.path):
            attach(e, s.matrix, s.chosen)
        row.applied = True
        found.after += row.parameters - s.matrix.size
