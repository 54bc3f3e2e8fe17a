"""What a page tells of a weight's values: mean, spread and largest entry, of those that are in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from graphwright.program.program import Program

MOST = 1 << 24
"""Entries of the largest weight that is looked at: a tenth of a second."""


def statistics(program: Program) -> dict[str, str]:
    """Checkpoint key -> a line. Weights that lie untouched in a file are not read for it."""
    found = {}
    for key, variable in program.weights.items():
        array = variable.data
        if array.storage.touched and 0 < array.size <= MOST and array.dtype.is_float:
            values = array.to_numpy("float64").ravel()
            finite = values[np.isfinite(values)]
            line = f"{len(values) - len(finite)} not finite" if len(finite) < len(values) else ""
            if len(finite):
                numbers = f"mean {finite.mean():.3g}, std {finite.std():.3g}, largest {np.abs(finite).max():.3g}"
                line = f"{numbers}, {line}" if line else numbers
            found[key] = line
    return found
