"""What a program would take if axes were cut to given sizes: counted from the terms of its dimensions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

import numpy as np

from graphwright.array import Spec
from graphwright.graph import NodeId
from graphwright.ops.terms import Atom, Term, atoms, resized, resolve
from graphwright.program import Program, Value
from graphwright.program.cost import Size, counted, ones, op_flops


class Footprint:
    """Sizes of a program, or of the part below some nodes, for any numbers of units.

    Args:
        p: the program as it is now.
        nodes: which parameters and operations count; all by default.
    """

    def __init__(self, p: Program, nodes: Collection[NodeId] | None = None) -> None:
        self.p, self.axes = p, p.axes()
        self._params, self._ops = counted(p, nodes)
        self._dims = ones(p)
        self._params_of = {n: (p.spec(n).size, p.spec(n).nbytes) for n in self._params}
        self._sizes: dict[NodeId, list[tuple[str, Term | tuple[Term, ...]]]] = {}
        for node, name, term in self.axes.solution.sizes:
            self._sizes.setdefault(node, []).append((name, term))
        self._flops_of = {n: op_flops(p, n, self._dims) for n in self._ops}
        self._with: dict[Atom, list[NodeId]] = {}
        dims = self.axes.solution.dims
        for node in [*self._params, *self._ops]:
            values = [Value(node, i) for i in range(len(p.specs(node)))] + list(p.operands(node))
            for atom in {a for v in values for t in dims[v] for a in atoms(t)}:
                self._with.setdefault(atom, []).append(node)

    def of(self, kept: Mapping[str, int] | None = None, gone: Collection[NodeId] = ()) -> Size:
        """The sizes with so many units of axes kept, and some nodes gone.

        Of heads in any number per key head (an axis of several) each takes the same share of what they all take.
        """
        maps: dict[Atom, np.ndarray] = {}
        shares: dict[tuple[Atom, ...], float] = {}
        for name, count in (kept or {}).items():
            group = self.axes[name]
            if len(group.atoms) == 1:
                maps[group.atoms[0]] = np.arange(count)
            else:
                shares[group.atoms] = count / group.size
        touched = {n for a in (*maps, *(a for s in shares for a in s)) for n in self._with.get(a, ())}
        dims, params, size, flops = self.axes.solution.dims, 0.0, 0.0, 0.0
        away = set(gone)
        for node, (count, nbytes) in self._params_of.items():
            if node in away:
                continue
            left = 1.0
            if node in touched:
                terms = dims[Value(node)]
                left = prod(_number(resized(t, maps)) for t in terms) / max(count, 1) * _share(terms, shares)
            params, size = params + count * left, size + nbytes * left
        for node, count in self._flops_of.items():
            if node in away:
                continue
            terms = [t for v in self.p.operands(node) for t in dims[v]] if node in touched else []
            flops += self._flops(node, maps) * _share(terms, shares) if node in touched else count
        return Size(params, size, flops)

    def _flops(self, node: NodeId, maps: Mapping[Atom, np.ndarray]) -> float:
        p, dims = self.p, self.axes.solution.dims

        def spec(value: Value) -> Spec:
            return Spec(tuple(resized(t, maps) for t in dims[value]), p.spec(value).dtype)

        attrs = dict(p.attrs(node))
        for name, term in self._sizes.get(node, ()):
            sizes = [resized(resolve(t), maps) for t in (term if isinstance(term, tuple) else (term,))]
            attrs[name] = tuple(sizes) if isinstance(term, tuple) else sizes[0]
        return op_flops(p, node, self._dims, spec, attrs)


def _number(size: int | str) -> int:
    return size if isinstance(size, int) else 1


def _share(terms: Collection[Term], shares: Mapping[tuple[Atom, ...], float]) -> float:
    """What is left of something along these dimensions, where they hold all atoms of an axis."""
    inside = {a for t in terms for a in atoms(t)}
    return prod(left for group, left in shares.items() if set(group) <= inside)
