"""Units of an axis, more or fewer: neurons of a linear layer, channels of a convolution, whatever the axes say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphwright.errors import UsageError
from graphwright.evolve.mutations.registry import mutation

if TYPE_CHECKING:
    from graphwright.program import Program, Transaction


def widths(p: Program) -> list[str]:
    """Axes of neurons or channels that can be resized."""
    return [name for name, g in p.axes().items() if not g.frozen and len(g.atoms) == 1 and g.kind in _KINDS]


_KINDS = ("neurons", "channels", "units")


@mutation("widen", sites=widths, weight=0.12, refine=0.10)
def widen(e: Transaction, site: str, rng: np.random.Generator, units: int | None = None) -> None:
    """More units: random weights in, zero weights out. By a quarter, a half, or double if `units` is not given."""
    size = e.program.axes()[site].size
    more = units or max(1, round(size * float(rng.choice([0.25, 0.5, 1.0], p=[0.4, 0.4, 0.2]))))
    e.grow(site, more, seed=int(rng.integers(1 << 31)))


@mutation("narrow", sites=lambda p: [a for a in widths(p) if p.axes()[a].size > 2], weight=0.08, refine=0.10)
def narrow(e: Transaction, site: str, rng: np.random.Generator, units: int | None = None) -> None:
    """Fewer units: those go whose weights in and out are smallest. A quarter if `units` is not given."""
    group = e.program.axes()[site]
    less = units or max(1, group.size // 4)
    if less >= group.size:
        raise UsageError("so many units cannot go", where=site, got=less, expected=f"below {group.size}")
    weights = {key: e.program.weights.array(key).to_numpy("float64") for key in group.slices(0)}
    worth = np.ones(group.size)
    for unit in range(group.size):
        for key, places in group.slices(unit).items():
            if weights[key].ndim > 1:
                rows = weights[key]
                for dim, at in places.items():
                    rows = np.take(rows, at, dim)
                worth[unit] *= np.linalg.norm(rows)
    e.cut_units(group.units(sorted(np.argsort(worth, kind="stable")[:less].tolist())))
