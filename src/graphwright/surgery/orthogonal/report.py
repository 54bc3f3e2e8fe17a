"""What orthogonalising did: how orthogonal each matrix is as stored, how far it moved, what the model makes of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.surgery.table import table

if TYPE_CHECKING:
    from graphwright.surgery.matrices import Skipped
    from graphwright.surgery.measure import Drift


@dataclass(slots=True)
class OrthoRow:
    """One matrix.

    Attributes:
        path, shape, dtype: which.
        parts: matrices made orthonormal: 1, or one per head.
        error: max |QᵀQ - I| (wide: |QQᵀ - I|) of Q as stored, over the parts.
        distance: ‖W - Q‖ / ‖W‖.
        condition, condition_after: σ_max / σ_min of the worst part.
        gain: smallest and largest ‖Qd‖ / ‖d‖ over random directions.
        scale: mean singular value, by which `fold="scale"` multiplies.
        predicted: relative drift of this layer's output, alone, on its calibration inputs; None without them.
        measured: of its output in the edited program.
        seconds: taken.
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


@dataclass(slots=True)
class OrthoReport:
    """All matrices of one call.

    Attributes:
        method, per, fold: as asked for.
        rows, skipped: together what was selected.
        drift: of the model's first output on calibration data; None without them.
        dry_run: the program is unchanged.
        interrupted: Ctrl-C or lack of memory ended it early, and what was done was kept.
    """

    method: str
    per: str
    fold: str
    dry_run: bool
    rows: list[OrthoRow] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    drift: Drift | None = None
    interrupted: bool = False

    @property
    def mean_error(self) -> float:
        """Over processed matrices."""
        return float(np.mean([r.error for r in self.rows])) if self.rows else 0.0

    @property
    def max_error(self) -> float:
        """Over processed matrices."""
        return max((r.error for r in self.rows), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """Plain values; an infinite condition number is the text `inf`."""
        facts = asdict(self)
        facts["skipped"] = [s._asdict() for s in self.skipped]
        for row in facts["rows"]:
            for name in ("condition", "condition_after"):
                row[name] = row[name] if np.isfinite(row[name]) else "inf"
        return {**facts, "mean_error": self.mean_error, "max_error": self.max_error}

    def __str__(self) -> str:
        columns = ["path", "shape", "parts", "error", "distance", "condition", "predicted", "measured", "seconds"]
        rows = [{**asdict(r), "measured": r.measured and r.measured.relative} for r in self.rows]
        lines = [
            f"orthogonalize: {self.method} per {self.per}, fold {self.fold}" + (", dry run" if self.dry_run else ""),
            table(rows, columns),
            f"{len(self.rows)} matrices, error {self.mean_error:.3g} in the mean, {self.max_error:.3g} at most",
            *(f"skipped {s.path}: {s.reason}" for s in self.skipped),
        ]
        if self.drift is not None:
            lines.append(f"logits {self.drift}")
        if self.interrupted:
            lines.append("interrupted: what was done so far is kept")
        return "\n".join(lines)
