"""Means over units that weights make -> `sum` and a factor, so that the units can be removed.

A mean divides by the number of units that are left; multiplied by 0, units are still counted. The factor stays.
"""

from __future__ import annotations

from math import prod

from graphwright.models.importing.recover.regions import Regions
from graphwright.ops.axes import Atom, atoms
from graphwright.program.axes.solve_axes import solve
from graphwright.program.kinds import PARAM


def recover_means(s: Regions) -> None:
    """Replace means over channels and neurons, as in the norms of ConvNeXt V2, by sums times the factor 1 / n."""
    means = list(s.values("mean"))
    if not means:
        return
    solution = solve(s.p)
    stored = {a for v, dims in solution.dims.items() if s.p.op(v.node) == PARAM for d in dims for a in atoms(d)}

    def is_units(atom: Atom) -> bool:
        about = solution.notes.get(atom)
        made = about is not None and not about.ends and {"channels", "neurons", "heads"} & set(about.kinds)
        return atom in stored and bool(made)

    for root in means:
        (x,) = s.p.operands(root.node)
        shape, dims = s.shape(x), solution.dims[x]
        axes = range(len(shape)) if (given := s.attr(root, "axes")) is None else [a % len(shape) for a in given]
        sizes = [n for a in axes if isinstance(n := shape[a], int)]
        if len(sizes) == len(axes) and any(is_units(a) for axis in axes for a in atoms(dims[axis])):
            options = {"axes": given, "keepdims": s.attr(root, "keepdims")}
            total = s.add("sum", [x], f"{s.module(root)}sum", root, **options)
            factor = s.add("full_like", [total], f"{s.module(root)}full_like", root, value=1 / prod(sizes))
            new = s.add("mul", [total, factor], f"{s.module(root)}mul", root)
            if s.agree(root, new, {x: None}):
                s.replace(root, new)
            else:
                s.sweep([new.node])
