"""Gates in front of a product whose weight is trained multiply the weight: x·diag(g)·wᵀ = x·(w·diag(g))ᵀ.

A weight has fewer rows than a batch has tokens, and its gradient is made anyway, so that the gradient of the gates is a
sum over its rows. Where weights are not trained, that gradient would be one product more: gates stay where they stand.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod

from graphwright.autograd import Tensor, grad_enabled
from graphwright.graph import NodeId
from graphwright.ops import call
from graphwright.program.axes.solve_axes import origin
from graphwright.program.gates.gates import gates
from graphwright.program.program import Program, Value

LINEAR, MERGES = "linear", frozenset({"reshape", "flatten"})


def foldable(p: Program, kept: Collection[Value]) -> dict[NodeId, NodeId]:
    """Site -> the one product that reads it, as its x, behind nothing but reshapes that nobody else looks at.

    Args:
        kept: values that are asked for.
    """
    if not grad_enabled():
        return {}
    found = {}
    for site in (s for gate in gates(p).values() if gate.over == "units" for s in gate.sites if p.op(s) == "mul"):
        value = Value(site)
        while value not in kept and len(edges := p.out_edges(value.node)) == 1:
            reader = p.graph.target(edges[0])
            if p.op(reader) == LINEAR and p.operands(reader)[0] == value:
                found[site] = reader
            if p.op(reader) not in MERGES:
                break
            value = Value(reader)
    return found


def worth(p: Program, site: NodeId, product: NodeId, values: Mapping[Value, Tensor]) -> bool:
    """Whether the weight is trained, has fewer rows than x, and its columns are the last dimensions of x in order."""
    weight = origin(p, p.operands(product)[1])
    x, g = (values[v] for v in p.operands(site))
    if weight is None or not p.weights[p.key(weight)].requires_grad:
        return False
    rows, columns = p.weights[p.key(weight)].shape
    lead = _lead(x.shape, columns)
    return lead is not None and len(g.shape) <= len(x.shape) - lead and prod(x.shape[:lead]) > rows


def fold(x: tuple[int, ...], g: Tensor, weight: Tensor) -> Tensor:
    """The weight [out, in] with its columns multiplied by gates that stood over x, float [out, in]."""
    rows, columns = weight.shape
    lead = _lead(x, columns)
    assert lead is not None
    wide = call("reshape", weight, shape=(rows, *x[lead:]))
    return call("reshape", wide * g, shape=(rows, columns))


def _lead(shape: tuple[int, ...], columns: int) -> int | None:
    """How many dimensions stand before those that make up so many columns."""
    for lead in range(len(shape) - 1, -1, -1):
        if prod(shape[lead:]) >= columns:
            return lead if prod(shape[lead:]) == columns else None
    return None
