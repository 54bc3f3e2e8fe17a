"""Mutations of sizes: kernel size and stride of a convolution, units of an axis.

The order in which mutations are registered affects which one a seed draws, so keep the order of these functions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.evolve.mutations.registry import mutation
from graphwright.graph import NodeId
from graphwright.program import Program, Transaction


def convolutions(p: Program) -> list[NodeId]:
    """Return the convolutions without dilation whose weight no other node reads."""
    found = [n for n in p.of_traits(contracts="window") if set(_pair(p, n, "dilation")) == {1}]
    return [n for n in found if len(p.consumers(p.operands(n)[1].node)) == 1]


@mutation("kernel", sites=convolutions, weight=0.10, refine=0.06)
def kernel(e: Transaction, site: Any, rng: np.random.Generator, size: int | None = None) -> None:
    """Change the kernel size of a convolution; the padding changes so that the result keeps its size.

    A larger kernel is padded with zeros and computes the same result; a smaller kernel loses its outer weights.
    """
    p = e.program
    node = p.node(site)
    weight = p.operands(node)[1].node
    old = p.weights.array(p.key(weight)).to_numpy()
    sizes = old.shape[2:]
    wanted = size or int(rng.choice([s for s in (1, 3, 5, 7) if s != sizes[0]]))
    grown = [wanted - s for s in sizes]
    padding = [a + g // 2 for a, g in zip(_pair(p, node, "padding"), grown, strict=True)]
    if any(g % 2 for g in grown) or min(padding) < 0:
        raise UsageError("a kernel of this size would change the size of the result", where=p.path(node),
                         expected=f"{sizes} plus or minus an even number, padding >= 0", got=wanted)  # fmt: skip
    around = [(0, 0), (0, 0), *((max(g, 0) // 2,) * 2 for g in grown)]
    inside = (slice(None), slice(None), *(slice(-g // 2, g // 2) if g < 0 else slice(None) for g in grown))
    e.set_weight(weight, np.ascontiguousarray(np.pad(old, around)[inside]))
    e.set_attr(node, padding=tuple(padding))


@mutation("stride", sites=convolutions, weight=0.10, refine=0.06)
def stride(e: Transaction, site: Any, rng: np.random.Generator, step: int | None = None) -> None:
    """Change the stride of a convolution. This fails if a reader rejects the new size; a global pooling accepts it."""
    node = e.program.node(site)
    now = _pair(e.program, node, "stride")[0]
    e.set_attr(node, stride=step or int(rng.choice([s for s in (1, 2, 3) if s != now])))


def _pair(p: Program, node: NodeId, name: str) -> tuple[int, ...]:
    value = p.attrs(node)[name]
    rank = len(p.spec(p.operands(node)[1].node).shape) - 2
    return tuple(value) if isinstance(value, tuple | list) else (value,) * rank


def widths(p: Program) -> list[str]:
    """Return the names of the axes of neurons, channels or units that can be resized."""
    kinds = ("neurons", "channels", "units")
    return [name for name, g in p.axes().items() if not g.frozen and len(g.atoms) == 1 and g.kind in kinds]


@mutation("widen", sites=widths, weight=0.12, refine=0.10)
def widen(e: Transaction, site: str, rng: np.random.Generator, units: int | None = None) -> None:
    """Add `units` units (by default 25, 50 or 100 % of the axis) with random incoming and zero outgoing weights."""
    size = e.program.axes()[site].size
    more = units or max(1, round(size * float(rng.choice([0.25, 0.5, 1.0], p=[0.4, 0.4, 0.2]))))
    e.grow(site, more, seed=int(rng.integers(1 << 31)))


@mutation("narrow", sites=lambda p: [a for a in widths(p) if p.axes()[a].size > 2], weight=0.08, refine=0.10)
def narrow(e: Transaction, site: str, rng: np.random.Generator, units: int | None = None) -> None:
    """Remove the `units` units of an axis that have the smallest weights; by default 25 % of them.

    Units are compared by the product of the norms of their incoming and outgoing weights.
    """
    group = e.program.axes()[site]
    less = units or max(1, group.size // 4)
    if less >= group.size:
        raise UsageError("cannot remove all units of an axis", where=site, got=less, expected=f"below {group.size}")
    weights = {key: e.program.weights.array(key).to_numpy("float64") for key in group.slices(0)}
    norms = np.ones(group.size)
    for unit in range(group.size):
        for key, slices in group.slices(unit).items():
            if weights[key].ndim > 1:
                rows = weights[key]
                for dim, index in slices.items():
                    rows = np.take(rows, index, dim)
                norms[unit] *= np.linalg.norm(rows)
    e.cut_units(group.units(sorted(np.argsort(norms, kind="stable")[:less].tolist())))
