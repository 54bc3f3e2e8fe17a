"""Orthogonalise stored matrices: replace W by its orthonormal factor Q, or write it as Q and a stretch P exactly."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphwright.errors import UsageError
from graphwright.program import Units
from graphwright.progress import Progress
from graphwright.surgery.factorise.chain import attach
from graphwright.surgery.factorise.factors import LowRank
from graphwright.surgery.matrices import Skipped, find_matrices, rounded, stored, values
from graphwright.surgery.measure import input_grams, measured, output_error
from graphwright.surgery.orthogonal.absorb import Part, absorb, head_parts, neighbour, parts_of, selected_by
from graphwright.surgery.orthogonal.methods import METHODS, condition, gain, gram_error, orthonormal, stretch
from graphwright.surgery.orthogonal.report import OrthoReport, OrthoRow

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program import Program, Selection, Transaction
    from graphwright.progress import Report
    from graphwright.surgery.calibration import Calibration
    from graphwright.surgery.matrices import Matrix

PER = ("matrix", "head")
FOLDS = ("none", "insert", "absorb", "scale")


class _Solved(NamedTuple):
    """A matrix as Q and, per part, the stretch and the scale that it came from."""

    q: np.ndarray
    stretches: list[np.ndarray]
    scales: list[float]


def orthogonalize(
    program: Program,
    where: str | Selection | Units,
    method: str = "polar",
    *,
    per: str = "matrix",
    fold: str = "none",
    special: bool = False,
    inplace: bool = False,
    calibration: Calibration | None = None,
    dry_run: bool = False,
    keep_partial: bool = False,
    progress: Report | None = None,
) -> OrthoReport:
    """Make matrices orthonormal, in one edit that `program.undo()` takes back.

    A tall matrix (out >= in) gets orthonormal columns, a wide one orthonormal rows. Computed in float64, rounded once
    to the dtype that the weight is stored in; errors are measured behind that rounding. A tied weight counts once.

    Args:
        program: edited in place.
        where: pattern of linear maps, a selection, or units (`program.select("layers.1.attn").heads[3]`), which are
            made orthonormal head by head and leave the other heads' bytes alone.
        method: `polar`, the nearest; `qr`, the cheapest; `newton_schulz`, polar by products alone.
        per: `matrix`, or `head`: rows of each head in q, k and v, columns of each in o.
        fold: what becomes of the rest P of W = Q P (wide: P Q). `none` drops it: the function changes. `insert` adds it
            as a node: exact. `absorb` multiplies it into the next map, per head, where that is exact. `scale` keeps of
            it the mean singular value: W ≈ s Q.
        special: of square matrices the nearest rotation, det +1.
        inplace: write into the memory of the weight where nobody else holds it; a comparison on calibration data does.
        calibration: data on which drift is predicted and measured.
        dry_run: report the same, on a copy, and leave the program as it is.
        keep_partial: on Ctrl-C or lack of memory keep the matrices done so far; otherwise nothing is changed.
        progress: called per matrix.
    Raises: EmptySelection, NonFiniteWeight, DtypeUnsupported, NotAbsorbable, UsageError for no such option.
    """
    _check(method, per, fold, special, inplace)
    matrices, skipped, parts = _chosen(program, where, per)
    if fold == "absorb":
        for m in matrices:
            neighbour(program, m)
    grams = input_grams(program, matrices, calibration) if calibration is not None else {}
    found = OrthoReport(method, "head" if parts else per, fold, dry_run, skipped=skipped)
    before = None if calibration is None else program.fork()  # a fork holds the arrays: not where it is not needed
    target = program.fork() if dry_run else program
    how = f"orthogonalise {len(matrices)} matrices: {method}, fold {fold}"
    with target.edit(how, author="pass", tool="graphwright.surgery.orthogonalize") as e:
        for i, m in enumerate(matrices):
            try:
                with target.edit(m.path):
                    mine = parts.get(m.key, [Part()])
                    found.rows.append(_one(e, m, mine, method, fold, special, inplace, grams.get(m.path)))
                if progress is not None:
                    progress(Progress("orthogonalise", i + 1, len(matrices), {"error": found.rows[-1].error}))
            except (KeyboardInterrupt, MemoryError):
                if not keep_partial:
                    raise
                found.interrupted = True
                found.skipped += [Skipped(left.path, "interrupted before") for left in matrices[len(found.rows) :]]
                break
    if calibration is not None and before is not None:
        done = {m.path: program_path for m in matrices for program_path in _readers(target, m)}
        found.drift, layers = measured(before, target, calibration, list(done.values()))
        for row in found.rows:
            row.measured = layers.get(done.get(row.path, ""))
    return found


def orthogonalize_model(model: Model, where: str | Selection | Units, method: str, **options: Any) -> OrthoReport:
    """`orthogonalize` of a model's program; what `model.orthogonalize` calls."""
    return orthogonalize(model.program, where, method, **options)


def _check(method: str, per: str, fold: str, special: bool, inplace: bool) -> None:
    for name, given, known in (("method", method, tuple(METHODS)), ("per", per, PER),
                               ("fold", fold, FOLDS)):  # fmt: skip
        if given not in known:
            raise UsageError("no such option", where=name, expected=", ".join(known), got=given)
    if fold == "absorb" and per != "head":
        raise UsageError("stretches are absorbed head by head", where="fold='absorb'", fix="per='head'")
    if inplace and fold == "insert":
        raise UsageError("two factors do not fit into the memory of one", where="inplace", fix="fold='none'")
    if special and fold == "absorb":
        raise UsageError("a head's rows are no square matrix", where="special", fix="per='matrix'")


def _chosen(
    p: Program, where: str | Selection | Units, per: str
) -> tuple[list[Matrix], list[Skipped], dict[str, list[Part]]]:
    """Matrices, what is left alone, and per key the parts where it is not the whole."""
    if isinstance(where, Units):
        if where.program is not p:
            raise UsageError("the units are of another program", got=repr(where))
        parts = parts_of(p, where)
        matrices, skipped = find_matrices(p, selected_by(p, set(parts)))
        return matrices, skipped, {m.key: parts[m.key] for m in matrices}
    matrices, skipped = find_matrices(p, where)
    if per == "matrix":
        return matrices, skipped, {}
    parts = {m.key: head_parts(p, m) for m in matrices}
    headless = [m for m in matrices if not parts[m.key]]
    skipped += [Skipped(m.path, "no heads") for m in headless]
    matrices = [m for m in matrices if parts[m.key]]
    if not matrices:
        raise UsageError("none of the matrices has heads", where=str(where), got=skipped[0].path, fix='per="matrix"')
    return matrices, skipped, parts


def _solve(w: np.ndarray, parts: list[Part], method: str, special: bool) -> _Solved:
    q, stretches, scales = w.copy(), [], []
    for part in parts:
        block = part.of(w)
        made = orthonormal(block, method, special)
        part.put(q, made)
        stretches.append(stretch(block, made))
        scales.append(float(np.vdot(made, block)) / min(block.shape))
    return _Solved(q, stretches, scales)


def _one(
    e: Transaction,
    m: Matrix,
    parts: list[Part],
    method: str,
    fold: str,
    special: bool,
    inplace: bool,
    gram: np.ndarray | None,
) -> OrthoRow:
    started = perf_counter()
    w = values(e.program, m.key)
    solved = _solve(w, parts, method, special)
    q = rounded(solved.q, m.dtype)
    new = q
    if fold == "insert":
        factors = _factors(m, parts, solved)
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
            absorb(e, m, parts, solved.stretches)
        e.set_weight(m.key, stored(new, m.dtype), inplace=inplace)
    blocks = [(part.of(w), part.of(q)) for part in parts]
    gains = [gain(made) for _, made in blocks]
    exact = fold == "absorb"  # the next layer makes up for it, so the layer's own output is no measure of it
    return OrthoRow(
        m.path,
        m.shape,
        m.dtype.name,
        len(parts),
        max(gram_error(made) for _, made in blocks),
        float(np.linalg.norm(w - q) / np.linalg.norm(w)) if w.any() else float("inf"),
        max(condition(block) for block, _ in blocks),
        max(condition(made) for _, made in blocks),
        (min(low for low, _ in gains), max(high for _, high in gains)),
        float(np.mean(solved.scales)),
        None if gram is None or exact else output_error(w, new, gram),
        perf_counter() - started,
    )


def _factors(m: Matrix, parts: list[Part], solved: _Solved) -> LowRank:
    """W = outer · inner with Q as one of them; the stretches of heads stand on one block diagonal."""
    tall = [part.of(solved.q).shape for part in parts]
    before = all(rows >= columns for rows, columns in tall)
    if parts[0].places is None:
        p = solved.stretches[0]
        return LowRank(solved.q, p) if before else LowRank(p, solved.q)
    if any((part.dim == 1) != before or (rows < columns) != (part.dim == 0)
           for part, (rows, columns) in zip(parts, tall, strict=True)):  # fmt: skip
        raise UsageError("heads wider than their input share no stretch", where=m.path, got=tall[0], fix='per="matrix"')
    p = np.eye(m.shape[parts[0].dim])
    for part, block in zip(parts, solved.stretches, strict=True):
        assert part.places is not None
        p[np.ix_(part.places, part.places)] = block
    return LowRank(solved.q, p) if parts[0].dim == 1 else LowRank(p, solved.q)


def _readers(p: Program, m: Matrix) -> list[str]:
    """Path of the first map that reads a matrix, if it is still there under that name."""
    return [m.name] if m.uses and p.free_name(m.name) != m.name else []
