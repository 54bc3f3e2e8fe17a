"""The MLPs of a program, found by their ops: down(act(gate x) ⊙ up x), or down(act(up x))."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.graph import NodeId
from graphwright.ops import get, traits
from graphwright.ops.experts import ACTIVATIONS, Expert
from graphwright.program.axes.solve_axes import origin
from graphwright.program.kinds import KINDS, PARAM
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.program.program import Program


class DenseMlp(NamedTuple):
    """An MLP of a program.

    Attributes:
        name: module of its matrices, such as `layers.3.mlp`.
        x: its input [..., C].
        result: its result, that of the `down` product.
        expert: its matrices and biases, as values after casts.
        attrs: attributes of the `expert_mlp` that computes the same.
        nodes: the nodes that compute it, the last one first.
    """

    name: str
    x: Value
    result: Value
    expert: Expert
    attrs: dict[str, Any]
    nodes: tuple[NodeId, ...]


def dense_mlps(p: Program) -> dict[str, DenseMlp]:
    """Return the MLPs of a program by name, in its order."""
    return {found.name: found for found in _found(p)}


def _found(p: Program) -> Iterator[DenseMlp]:
    for node in p.order():
        if (down := _product(p, Value(node))) is not None and (inner := _inner(p, down[0])) is not None:
            gate, up, act, nodes = inner
            products = [u for u in (gate, up) if u is not None]
            if len({u[0] for u in products}) == 1:
                biased = {u[2] is not None for u in (*products, down)}
                parts = [t for u in (gate, up, down) for t in ((None, None) if u is None else u[1:])]
                paths = [p.path(w) for u in (*products, down) if (w := origin(p, u[1])) is not None]
                attrs = {"kind": "mlp" if gate is None else "gated", "act": act, "bias": biased == {True}}
                columns = zip(*(path.split(".")[:-2] for path in paths), strict=False)
                module = [c[0] for c in takewhile(lambda c: len(set(c)) == 1, columns)]
                name = ".".join(module) or p.path(node).rpartition(".")[0]
                if len(biased) == 1 and name:
                    yield DenseMlp(name, up[0], Value(node), Expert(*parts), attrs, (node, *nodes))


_Product = tuple[Value, Value, Value | None]


def _product(p: Program, value: Value) -> _Product | None:
    """Return (input, matrix, bias or None) of a product with a stored matrix [out, in]; None for another value."""
    node = value.node
    if p.op(node) in KINDS or traits(p.op(node)).contracts != "out_in" or traits(p.op(node)).fixed:
        return None
    x, w, *bias = p.operands(node)
    found = origin(p, w)
    return (x, w, bias[0] if bias else None) if found is not None and p.op(found) == PARAM else None


def _inner(p: Program, value: Value) -> tuple[_Product | None, _Product, str, list[NodeId]] | None:
    """Return (product of the gate or None, that of up, activation, nodes) of the hidden layer of an MLP, else None."""
    node = value.node
    if p.op(node) in KINDS or len(p.consumers(node)) != 1:
        return None
    t = traits(p.op(node))
    if t.annihilated and t.applies:  # act(a) · b as one op
        gate, up = (_product(p, v) for v in p.operands(node))
        single = all(len(p.consumers(v.node)) == 1 for v in p.operands(node))
        nodes = [node, *(v.node for v in p.operands(node))]
        return None if gate is None or up is None or not single else (gate, up, t.applies, nodes)
    if t.multiplies:
        for acted, other in (p.operands(node), p.operands(node)[::-1]):
            alone, up = _inner(p, acted), _product(p, other)
            if alone is not None and alone[0] is None and up is not None and len(p.consumers(other.node)) == 1:
                return alone[1], up, alone[2], [node, *alone[3], other.node]
        return None
    act = activation_of(p, node)
    if act is None:
        return None
    (below,) = p.operands(node)
    product = _product(p, below)
    alone = product is not None and len(p.consumers(below.node)) == 1
    return (None, product, act, [node, below.node]) if alone and product is not None else None


def activation_of(p: Program, node: NodeId) -> str | None:
    """Return the value of `act` whose op and attributes a node has, or None."""
    found = (name for name, (op, attrs) in ACTIVATIONS.items()
             if op == p.op(node) and get(op).complete(attrs) == dict(p.attrs(node)))  # fmt: skip
    return next(found, None)
