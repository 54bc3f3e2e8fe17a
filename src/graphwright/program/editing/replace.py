"""Replacing a subgraph by a program, extracting a subgraph as a program, and expanding fused ops into primitive ops."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.autograd import Parameter, Variable
from graphwright.errors import UsageError
from graphwright.ops import OPS
from graphwright.ops.expansion import Arithmetic
from graphwright.program.errors import BoundaryMismatch, NotConvex
from graphwright.program.kinds import ASSIGN, INPUT, PARAM, SOURCES, STORED
from graphwright.program.op_graph import OpGraph, Ref, Value
from graphwright.program.patterns import adopt_all
from graphwright.program.primitives import add_assign, add_source, insert_edge, insert_node, set_outputs
from graphwright.program.validate import refuse_broken
from graphwright.program.weights import add_weight, as_array, shared_variable

if TYPE_CHECKING:
    from graphwright.array import DType, Spec
    from graphwright.graph import EdgeId, NodeId
    from graphwright.ops import Op
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program
    from graphwright.program.selection import Selection


def boundary(p: Program, nodes: Sequence[NodeId]) -> tuple[list[Value], list[Value]]:
    """Return (values that a set of nodes reads from outside the set, its results that are outputs or read outside).

    Both lists follow the topological order of the nodes. Raises: NotConvex if a path leaves the set and comes back.
    """
    inside = set(nodes)
    order = sorted(inside, key=p.order_labels.key)
    outputs = set(p.outputs())
    enters = dict.fromkeys(v for n in order for v in p.operands(n) if v.node not in inside)
    results = [Value(n, port) for n in order for port in range(len(p.specs(n)))]
    leaves = [v for v in results if v in outputs or any(m not in inside for m in p.consumers(v))]
    # a tied weight may be read anywhere: it has no operands through which a path could come back
    after = {m for n in order if p.op(n) not in SOURCES for m in p.graph.successors(n)} - inside
    stack, seen = list(after), set(after)
    while stack:
        here = stack.pop()
        for m in p.graph.successors(here):
            if m in inside:
                fix, got = "add the nodes on such paths: selection.between(selection)", f"an edge to {p.path(m)}"
                raise NotConvex("a path leaves the selection and comes back", where=p.path(here), got=got, fix=fix)
            if m not in seen:
                seen.add(m)
                stack.append(m)
    return list(enters), leaves


def _pairs(
    inner: Mapping[str, Spec], outer: Sequence[Value], match: Mapping[str, Any] | None, p: Program, side: str
) -> dict[str, Value]:
    """Return a dict from each input or output (`side`) of a subprogram to a value of `p`, by `match` or in order.

    `inner`: specs by name; `outer`: values of `p`. Raises: BoundaryMismatch if the numbers or the specs differ.
    """
    if match is not None and set(inner) <= set(match):
        pairs = {name: p.value(match[name]) for name in inner}
    elif len(inner) == len(outer):
        pairs = dict(zip(inner, outer, strict=True))
    else:
        fix = "pass match={name: node, ...}"
        expected = [f"{p.path(v)} {p.spec(v)}" for v in outer]
        got = [f"{n} {s}" for n, s in inner.items()]
        raise BoundaryMismatch(f"the subprogram has {len(inner)} {side}, the selection {len(outer)}", expected=expected,
                               got=got, fix=fix)  # fmt: skip
    wrong = [f"{n}: {inner[n]} against {p.path(v)} {p.spec(v)}" for n, v in pairs.items() if inner[n] != p.spec(v)]
    if wrong:
        raise BoundaryMismatch(f"the specs of the subprogram's {side} do not match the selection", got="; ".join(wrong))
    return pairs


def replace(
    e: Transaction, selection: Selection | Sequence[Ref], subprogram: Program, match: Mapping[str, Ref] | None = None
) -> dict[str, NodeId]:
    """Replace a selection of nodes by another program.

    The subprogram reads the values that the selection read, and readers of the selection's results read its outputs.
    Its weights are added as new weights, except those that `extract` took from this program: these are shared.

    Args:
        match: dict from each input and output name to a node or value of this program; by default paired in order.
    Returns: dict from path in the subprogram to new node. Raises: NotConvex; BoundaryMismatch listing both sides.
    """
    p, sub = e.program, subprogram
    nodes = list(dict.fromkeys(p.nodes_of(selection)))
    if not isinstance(sub, OpGraph):
        raise BoundaryMismatch("the replacement is not a program", expected="a Program", got=repr(sub)[:80])
    enters, leaves = boundary(p, nodes)
    inputs = {sub.path(n): sub.spec(n) for n in sub.inputs()}
    outputs = dict(zip(sub.output_names(), (sub.spec(v) for v in sub.outputs()), strict=True))
    if len(inputs) != len(enters):  # an extracted program contains the params
        enters = [v for v in enters if p.op(v.node) not in STORED]
    feed = _pairs(inputs, enters, match, p, "inputs")
    result = _pairs(outputs, leaves, match, p, "outputs")
    used = {sub.path(n) for n in sub.nodes()}
    for node in nodes:  # free the names that the subprogram uses
        if p.path(node) in used:
            e.rename(node, p.free_name(f"{p.path(node)}.replaced"))
    values: dict[Value, Value] = {Value(sub.node(name)): value for name, value in feed.items()}
    made: dict[str, NodeId] = {}
    for node in sub.order():
        if sub.op(node) == INPUT:
            continue
        if (same := _same_weight(p, sub, node, nodes)) is not None:
            values[Value(node)] = Value(same)
            continue
        made[sub.path(node)] = fresh = _copy(e, sub, node, values)
        for port in range(len(sub.specs(node))):
            values[Value(node, port)] = Value(fresh, port)
    redirect(e, {old: values[sub.output(name)] for name, old in result.items()}, skip=nodes)
    e.remove(sorted(nodes, key=p.order_labels.key, reverse=True))
    return made


def paste(e: Transaction, sub: Program, feeds: Mapping[str, Value], path: str, key: str) -> dict[str, Value]:
    """Add the nodes of another program, which reads `feeds` by input name; return its outputs by name.

    Names of nodes begin with `path`, keys of weights with `key`; specs are inferred from the operands.
    """
    p = e.program
    values: dict[Value, Value] = {Value(sub.node(name)): value for name, value in feeds.items()}
    for node in (n for n in sub.order() if sub.op(n) != INPUT):
        op, attrs, name = sub.op(node), dict(sub.attrs(node)), p.free_name(path + sub.path(node))
        if op in STORED:
            attrs["key"] = p.weights.free_key(key + sub.key(node))
            variable = _second_variable(sub.weights[sub.key(node)], op, attrs["key"])
            made = e.add_node(op, attrs, name, sub.specs(node), variable)
        else:
            made = e.add_op(op, [values[v] for v in sub.operands(node)], attrs, name)
        values |= {Value(node, port): Value(made, port) for port in range(len(sub.specs(node)))}
    return {name: values[v] for name, v in zip(sub.output_names(), sub.outputs(), strict=True)}


def redirect(
    e: Transaction, moved: Mapping[Value, Value], *, edges: Iterable[EdgeId] | None = None,
    skip: Collection[NodeId] = (), outputs: bool = True,
) -> None:  # fmt: skip
    """Rewire the readers of values to other values. The node of a new value is not rewired and may read the old value.

    Args:
        moved: dict from old value to new value.
        edges: the edges to rewire; by default all edges that carry an old value.
        skip: readers that are not rewired.
        outputs: also replace the values among the program's outputs.
    """
    p = e.program
    for old, new in moved.items():
        for edge in p.out_edges(old.node) if edges is None else edges:
            if (edges is not None or p.edge_value(edge) == old) and p.graph.target(edge) not in (new.node, *skip):
                e.rewire(edge, new)
    if outputs and any(v in moved for v in p.outputs()):
        e.set_outputs(**{n: moved.get(v, v) for n, v in zip(p.output_names(), p.outputs(), strict=True)})


def _same_weight(p: Program, sub: Program, node: NodeId, removed: Collection[NodeId]) -> NodeId | None:
    """Return a node of `p`, not in `removed`, with the same key and array as `node` of `sub`; None if `p` has none."""
    if sub.op(node) not in STORED or not p.weights.has_key(key := sub.key(node)):
        return None
    if p.weights.array(key) is not sub.weights.array(key):
        return None
    return next((n for n in p.of_kind(sub.op(node)) if p.key(n) == key and n not in removed), None)


def _copy(e: Transaction, sub: Program, node: NodeId, values: Mapping[Value, Value]) -> NodeId:
    """Copy a node of another program and its input edges into the open edit; `values` maps old operands to new ones."""
    p, op, attrs = e.program, sub.op(node), dict(sub.attrs(node))
    name = p.free_name(sub.path(node))
    if op in STORED:
        key, variable = attrs["key"], sub.weights[attrs["key"]]
        if p.weights.has_key(key) and p.weights.array(key) is variable.data:
            return e.add_node(op, attrs, name, sub.specs(node))
        attrs["key"] = p.weights.free_key(name if p.weights.has_key(key) else key)
        return e.add_node(op, attrs, name, sub.specs(node), _second_variable(variable, op, attrs["key"]))
    fresh = e.add_node(op, attrs, name, sub.specs(node))
    for port, operand in zip([sub.edge_port(x) for x in sub.in_edges(node)], sub.operands(node), strict=True):
        e.add_edge(values[operand], fresh, port)
    return fresh


def _second_variable(variable: Variable, op: str, name: str) -> Variable:
    return shared_variable(variable, Parameter if op == PARAM else Variable, name)


def take_over(e: Transaction, old: NodeId, new: NodeId) -> None:
    """Replace the node `old` by `new`, which takes over its readers, program outputs and name. Remove `old`."""
    path = e.program.path(old)
    redirect(e, {Value(old): Value(new)})
    e.remove(old)
    e.rename(new, path)


def remove_unread(e: Transaction, value: Value) -> None:
    """Remove the node of a value if it has no readers, then likewise the nodes of its operands, and so on."""
    p = e.program
    if not p.out_edges(value.node) and value not in p.outputs():
        before = {v.node: v for v in p.operands(value.node)}
        e.remove(value.node)
        for operand in before.values():
            remove_unread(e, operand)


def extract(p: Program, selection: Selection | Sequence[Ref]) -> Program:
    """Copy a selection into a new program. Values that it reads become inputs; its results with readers become outputs.

    Inputs and outputs are named by node paths. Weights that the selection reads are included; their arrays are shared.
    Raises: NotConvex; InvalidProgram if an earlier edit left `p` broken.
    """
    nodes = p.nodes_of(selection)
    refuse_broken(p)
    enters, leaves = boundary(p, nodes)
    enters = [v for v in enters if p.op(v.node) not in STORED]
    inside = set(nodes) | {v.node for n in nodes for v in p.operands(n) if p.op(v.node) in STORED}
    sub = p.empty(f"{p.name} (part)")
    values: dict[Value, Value] = {}
    for value in enters:
        values[value] = Value(add_source(sub, INPUT, sub.free_name(p.path(value)), p.spec(value), {}))
    for node in sorted(inside, key=p.order_labels.key):
        op, name = p.op(node), sub.free_name(p.path(node))
        if op in SOURCES:
            if op in STORED:
                add_weight(sub.weights, p.key(node), _second_variable(p.weights[p.key(node)], op, p.key(node)))
            values[Value(node)] = Value(add_source(sub, op, name, p.spec(node), p.attrs(node)))
        elif op == ASSIGN:
            target, value = (values[v] for v in p.operands(node))
            add_assign(sub, target, value, name)
        else:
            fresh = insert_node(sub, op, p.attrs(node), name, p.specs(node))
            for edge, operand in zip(p.in_edges(node), p.operands(node), strict=True):
                insert_edge(sub, values[operand], fresh, p.edge_port(edge))
            for port in range(len(p.specs(node))):
                values[Value(node, port)] = Value(fresh, port)
    set_outputs(sub, {sub.path(values[v]): values[v] for v in leaves})
    adopt_all(sub)
    return sub


# -- fused ops ---------------------------------------------------------------------------------------------------------
def expand(p: Program, nodes: Iterable[NodeId], why: str = "expand fused ops") -> list[NodeId]:
    """Replace each fused op among `nodes` by primitive ops, in one edit; other nodes are left as they are.

    The node of the first result gets the path of the fused op, other nodes get paths below it: `layers.0.act.sigmoid`.
    Returns: the new nodes, including consts. Raises: UsageError if none of `nodes` is a fused op.
    """
    fused = [n for n in p.nodes_of(nodes) if (row := OPS.get(p.op(n))) is not None and row.expand is not None]
    if not fused:
        raise UsageError("no fused op is among these nodes", fix="select fused ops: those with gw.ops.OPS[op].expand")
    with p.edit(why) as e:
        made = [node for old in fused for node in _expand(e, old)]
    return made


def _expand(e: Transaction, old: NodeId) -> list[NodeId]:
    p = e.program
    path, row, attrs = p.path(old), OPS[p.op(old)], p.attrs(old)
    expansion = _Expansion(e, path)
    results = expansion.run(row, [_Term(expansion, v, p.spec(v)) for v in p.operands(old)], attrs)
    redirect(e, {Value(old, port): term.value for port, term in enumerate(results)})
    e.remove(old)
    first = results[0].value.node
    needed = {first, *(v.node for v in p.outputs())}
    for node in reversed(expansion.made):  # the code of an unread result is dead
        if not p.out_edges(node) and node not in needed:
            e.remove(node)
    if first in expansion.made:
        e.rename(first, path)
    return [node for node in expansion.made if node in p.graph]


class _Expansion:
    """Adds the nodes of the expansion of one fused op to an open edit, with paths below the path of the fused op."""

    def __init__(self, e: Transaction, path: str) -> None:
        self.e, self.path = e, path
        self.made: list[NodeId] = []
        self._numbers: dict[tuple[str, DType], Value] = {}

    def run(self, row: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> list[_Term]:
        """Apply an op to operands (`_Term` or numbers): expand a fused op, else add a node. Return the results."""
        if row.expand is not None:
            results = row.expand(operands, attrs)
            return list(results) if isinstance(results, tuple) else [results]
        p, fixed = self.e.program, row.traits.fixed
        kind = next(t.spec.dtype for i, t in enumerate(operands) if isinstance(t, _Term) and i not in fixed)
        values = [t.value if isinstance(t, _Term) else self.number(t, kind) for t in operands]
        node = self.e.add(row.name, *values, name=p.free_name(f"{self.path}.{row.name}"), **attrs)
        self.made.append(node)
        return [_Term(self, Value(node, port), spec) for port, spec in enumerate(p.specs(node))]

    def number(self, value: float, kind: DType) -> Value:
        """Return the value of a const node that holds a number. Equal numbers of the same dtype share a node."""
        if (repr(value), kind) not in self._numbers:
            name = self.e.program.free_name(f"{self.path}.const")
            self.made.append(self.e.const(name, as_array(np.asarray(value), kind)))
            self._numbers[repr(value), kind] = Value(self.made[-1])
        return self._numbers[repr(value), kind]


class _Term(Arithmetic):
    """A value in place of a tensor, for `Op.expand`: arithmetic on it adds nodes to the open edit."""

    def __init__(self, expansion: _Expansion, value: Value, spec: Spec) -> None:
        self.expansion, self.value, self.spec, self.shape, self.dtype = expansion, value, spec, spec.shape, spec.dtype

    @staticmethod
    def __gw_op__(row: Op, operands: Sequence[Any], attrs: Mapping[str, Any], outs: Any = None) -> Any:
        expansion = next(t.expansion for t in operands if isinstance(t, _Term))
        results = expansion.run(row, operands, attrs)
        return results[0] if len(results) == 1 else tuple(results)
