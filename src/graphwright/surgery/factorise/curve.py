"""What a matrix would cost by each method, at a range of sizes, without changing anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphwright.errors import UsageError
from graphwright.surgery.calibration import MissingCalibration
from graphwright.surgery.factorise.compress import Options
from graphwright.surgery.factorise.factors import compression_ratio, reconstruct
from graphwright.surgery.factorise.methods import METHODS
from graphwright.surgery.matrices import find_matrices, values
from graphwright.surgery.measure import input_grams, output_error

if TYPE_CHECKING:
    from graphwright.program import Program
    from graphwright.surgery.calibration import Calibration


class Point(NamedTuple):
    """One size of one matrix.

    Attributes:
        ratio: parameters before / after.
        error: relative; of the outputs for `asvd`, else of the weights.
    """

    ratio: float
    error: float


def curve(
    program: Program,
    where: str,
    methods: Sequence[str] = ("svd",),
    points: int = 8,
    *,
    order: int = 3,
    calibration: Calibration | None = None,
) -> dict[str, list[Point]]:
    """Ratio and error of one matrix at `points` sizes, ratios rising; per method.

    The large decomposition, of the matrix or of its first unfolding, is made once per method. Trains and rings have the
    ratios that their ranks allow; points that they do not reach are left out.

    Args:
        program: not changed.
        where: pattern that selects one matrix.
        methods: of `svd`, `asvd`, `tt`, `tr`.
        points: sizes between the matrix's own and rank 1.
        order: modes of trains and rings.
        calibration: data, for `asvd`.
    Raises: UsageError for several matrices or no such method; MissingCalibration.
    """
    found, _ = find_matrices(program, where)
    if len(found) != 1 or not set(methods) <= set(METHODS):
        raise UsageError("a curve is of one matrix, by known methods", where=where, expected=", ".join(METHODS),
                         got=f"{len(found)} matrices, {', '.join(methods)}")  # fmt: skip
    if "asvd" in methods and calibration is None:
        raise MissingCalibration("asvd weighs errors by the inputs of a layer", where="calibration")
    matrix = found[0]
    w = values(program, matrix.key)
    gram = input_grams(program, found, calibration).get(matrix.path) if calibration is not None else None
    sizes = np.geomspace(matrix.size, sum(matrix.shape), points).astype(int)
    norm = float(np.linalg.norm(w)) or 1.0
    made: dict[str, list[Point]] = {}
    for name in methods:
        fit = METHODS[name](w, gram, Options(order=order))
        seen: dict[float, Point] = {}
        for size in sizes:
            factors = fit.within_params(int(size))
            if factors is None:
                continue
            new = reconstruct(factors)
            error = output_error(w, new, gram) if name == "asvd" and gram is not None else 0.0
            error = error if name == "asvd" else float(np.linalg.norm(new - w)) / norm
            point = Point(compression_ratio(factors), error)
            seen.setdefault(point.ratio, point)
        made[name] = _monotone(list(seen.values()))
    return made


def _monotone(points: list[Point]) -> list[Point]:
    """Rising ratios, without points that are no smaller than a better one."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda q: (q.ratio, q.error)):
        while kept and kept[-1].error >= point.error:
            kept.pop()
        kept.append(point)
    return kept
