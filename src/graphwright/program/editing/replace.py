"""Replacing part of a program by another, and taking a part out as a program of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.autograd import Parameter, Variable
from graphwright.errors import UsageError
from graphwright.ops import OPS, call
from graphwright.program.errors import BoundaryMismatch, NotConvex
from graphwright.program.kinds import INPUT, PARAM, SOURCES, STORED, WRITE
from graphwright.program.op_graph import Value
from graphwright.program.program import Program
from graphwright.program.readers import lead
from graphwright.program.validate import refuse_broken
from graphwright.program.weights import as_array

if TYPE_CHECKING:
    from graphwright.array import DType, Spec
    from graphwright.graph import NodeId
    from graphwright.ops import Op
    from graphwright.program.editing.transaction import Transaction


def boundary(p: Program, nodes: Sequence[NodeId]) -> tuple[list[Value], list[Value]]:
    """Values that enter a selection from outside and values that leave it, each once, in topological order.

    Raises: NotConvex naming a path that leaves the selection and comes back.
    """
    inside = set(nodes)
    order = sorted(inside, key=p.order_labels.key)
    outputs = set(p.outputs())
    enters = dict.fromkeys(v for n in order for v in p.operands(n) if v.node not in inside)
    leaves = dict.fromkeys(
        value
        for n in order
        for port in range(len(p.specs(n)))
        for value in [Value(n, port)]
        if value in outputs or any(m not in inside for m in p.consumers(value))
    )
    # a tied weight may be read anywhere: nothing flows back into it
    after = {m for n in order if p.op(n) not in SOURCES for m in p.graph.successors(n)} - inside
    stack, seen = list(after), set(after)
    while stack:
        here = stack.pop()
        for m in p.graph.successors(here):
            if m in inside:
                raise NotConvex(
                    "a path leaves the selection and comes back",
                    where=p.path(here),
                    got=p.path(m),
                    fix="selection.between(selection) closes it",
                )
            if m not in seen:
                seen.add(m)
                stack.append(m)
    return list(enters), list(leaves)


def _pairs(
    inner: Mapping[str, Any], outer: Sequence[Value], match: Mapping[str, Any] | None, p: Program, side: str, spec: Any
) -> dict[str, Value]:
    """Name of the subprogram's input or output -> value of the host, by `match` or in order; specs must agree."""
    if match is not None and set(inner) <= set(match):
        pairs = {name: p.value(match[name]) for name in inner}
    elif len(inner) == len(outer):
        pairs = dict(zip(inner, outer, strict=True))
    else:
        raise BoundaryMismatch(
            f"the {side} do not fit",
            expected=[f"{p.path(v)} {p.spec(v)}" for v in outer],
            got=[f"{n} {s}" for n, s in inner.items()],
            fix="match={name: node, ...}",
        )
    wrong = [f"{n}: {inner[n]} against {p.path(v)} {spec(v)}" for n, v in pairs.items() if inner[n] != spec(v)]
    if wrong:
        raise BoundaryMismatch(f"the {side} differ in spec", got="; ".join(wrong))
    return pairs


def replace(
    e: Transaction, nodes: Sequence[NodeId], sub: Program, match: Mapping[str, Any] | None
) -> dict[str, NodeId]:
    """Put `sub` where `nodes` are, inside an open edit.

    Inputs of `sub` take the values that entered the selection, its outputs go where the selection's went: by `match`
    (name -> node or value of the host), else in order. Weights of `sub` come along as new params, unless it was taken
    out of this program by `extract`: then the params are the same.
    Returns: name in `sub` -> new node. Raises: NotConvex, BoundaryMismatch with both sides.
    """
    p = e.program
    if not isinstance(sub, Program):
        raise BoundaryMismatch("only a program can stand in a selection's place", got=repr(sub)[:80])
    enters, leaves = boundary(p, nodes)
    inputs = {sub.path(n): sub.spec(n) for n in sub.inputs()}
    outputs = dict(zip(sub.output_names(), (sub.spec(v) for v in sub.outputs()), strict=True))
    if len(inputs) != len(enters):  # what `extract` gave has the params inside
        enters = [v for v in enters if p.op(v.node) not in STORED]
    feed = _pairs(inputs, enters, match, p, "inputs", p.spec)
    result = _pairs(outputs, leaves, match, p, "outputs", p.spec)
    old_names = {p.path(n): n for n in nodes}
    for name, node in old_names.items():  # make room for nodes of the same names
        if name in {sub.path(n) for n in sub.nodes()}:
            e.rename(node, p.free_name(f"{name}.replaced"))
    values: dict[Value, Value] = {Value(sub.node(name)): value for name, value in feed.items()}
    made: dict[str, NodeId] = {}
    for node in sub.order():
        if sub.op(node) == INPUT:
            continue
        if (same := _same_weight(p, sub, node, old_names.values())) is not None:
            values[Value(node)] = Value(same)
            continue
        made[sub.path(node)] = fresh = _copy(e, sub, node, values)
        for port in range(len(sub.specs(node))):
            values[Value(node, port)] = Value(fresh, port)
    stand_in(e, {old: values[sub.output(name)] for name, old in result.items()}, old_names.values())
    e.remove([n for n in sorted(old_names.values(), key=p.order_labels.key, reverse=True)])
    return made


def stand_in(e: Transaction, moved: Mapping[Value, Value], going: Collection[NodeId] = ()) -> None:
    """Let what reads a value read another, outputs too; nodes that go read on."""
    p = e.program
    for old, new in moved.items():
        for edge in p.out_edges(old.node):
            if p.edge_value(edge) == old and p.graph.target(edge) not in going:
                e.rewire(edge, new)
    if any(v in moved for v in p.outputs()):
        e.set_outputs(**{n: moved.get(v, v) for n, v in zip(p.output_names(), p.outputs(), strict=True)})


def _same_weight(p: Program, sub: Program, node: NodeId, going: Collection[NodeId]) -> NodeId | None:
    """The host's node for the very weight that a node of `sub` stands for, if it stays."""
    if sub.op(node) not in STORED or (key := sub.key(node)) not in p.weights:
        return None
    if p.weights.array(key) is not sub.weights.array(key):
        return None
    return next((n for n in p.of_kind(sub.op(node)) if p.key(n) == key and n not in going), None)


def _copy(e: Transaction, sub: Program, node: NodeId, values: Mapping[Value, Value]) -> NodeId:
    """One node of another program, with its edges, into the open edit."""
    p, op, attrs = e.program, sub.op(node), dict(sub.attrs(node))
    name = p.free_name(sub.path(node))
    if op in STORED:
        key, variable = attrs["key"], sub.weights[attrs["key"]]
        if key in p.weights and p.weights.array(key) is variable.data:
            return e._node(op, attrs, name, sub.specs(node))
        variable.shared = True  # both programs hold the array until one of them writes
        kind = Parameter if op == PARAM else Variable
        attrs["key"] = key if key not in p.weights else name
        twin = kind(sub.weights.array(key), variable.requires_grad, attrs["key"])
        twin.shared = True
        return e._node(op, attrs, name, sub.specs(node), twin)
    fresh = e._node(op, attrs, name, sub.specs(node))
    for port, operand in zip([sub.edge_port(x) for x in sub.in_edges(node)], sub.operands(node), strict=True):
        e._edge(values[operand], fresh, port)
    return fresh


def take_over(e: Transaction, old: NodeId, new: NodeId) -> None:
    """Let a new node have the readers, the outputs and the name of an old one, which goes."""
    path = e.program.path(old)
    lead(e, Value(old), Value(new))
    e.remove(old)
    e.rename(new, path)


def remove_unread(e: Transaction, value: Value) -> None:
    """Remove a value that nothing reads, and what it alone was made of along first operands: a cast, then a matrix."""
    p = e.program
    while not p.out_edges(value.node) and value not in p.outputs():
        before = p.operands(value.node)
        e.remove(value.node)
        if not before:
            return
        value = before[0]


def extract(p: Program, nodes: Sequence[NodeId]) -> Program:
    """A selection as a program: what entered it are inputs, what left it outputs, named by the nodes' paths.

    Params that only the selection reads may be in it or not; those it reads come along. Arrays are shared.
    Raises: NotConvex; InvalidProgram if `p` was left broken.
    """
    refuse_broken(p)
    enters, leaves = boundary(p, nodes)
    enters = [v for v in enters if p.op(v.node) not in STORED]
    inside = set(nodes) | {v.node for n in nodes for v in p.operands(n) if p.op(v.node) in STORED}
    sub = Program(f"{p.name} (part)")
    values: dict[Value, Value] = {}
    for value in enters:
        values[value] = Value(sub.add_source(INPUT, sub.free_name(p.path(value)), p.spec(value), {}))
    for node in sorted(inside, key=p.order_labels.key):
        op, name = p.op(node), sub.free_name(p.path(node))
        if op in SOURCES:
            if op in STORED:
                variable = p.weights[p.key(node)]
                variable.shared = True
                twin = (Parameter if op == PARAM else Variable)(
                    p.weights.array(p.key(node)), variable.requires_grad, p.key(node)
                )
                twin.shared = True
                sub.weights.add(p.key(node), twin)
            values[Value(node)] = Value(sub.add_source(op, name, p.spec(node), p.attrs(node)))
        elif op == WRITE:
            target, value = (values[v] for v in p.operands(node))
            sub.add_write(target, value, name)
        else:
            fresh = sub.insert_node(op, p.attrs(node), name, p.specs(node))
            for edge, operand in zip(p.in_edges(node), p.operands(node), strict=True):
                sub.insert_edge(values[operand], fresh, p.edge_port(edge))
            for port in range(len(p.specs(node))):
                values[Value(node, port)] = Value(fresh, port)
    sub.set_outputs({sub.path(values[v]) + (f".{v.port}" if v.port else ""): values[v] for v in leaves})
    return sub


def expand(p: Program, nodes: Iterable[NodeId], why: str) -> list[NodeId]:
    """Replace each fused op among `nodes` by primitives, in one edit; other nodes are left as they are.

    The node that gives the first result takes the old path, the others stand under it: `layers.0.mlp.act.sigmoid`.
    Returns: the new nodes, consts included. Raises: UsageError if no op among them is fused.
    """
    fused = [n for n in nodes if (row := OPS.get(p.op(n))) is not None and row.expand is not None]
    if not fused:
        raise UsageError("no fused op is among these nodes", fix="op rows with an `expand` cell: gw.ops.OPS")
    with p.edit(why) as e:
        made = [node for old in fused for node in _dissolve(e, old)]
    return made


def _dissolve(e: Transaction, old: NodeId) -> list[NodeId]:
    p = e.program
    path, row, attrs = p.path(old), OPS[p.op(old)], p.attrs(old)
    place = _Place(e, path)
    results = place.run(row, [_Term(place, v, p.spec(v)) for v in p.operands(old)], attrs)
    values = {Value(old, port): term.value for port, term in enumerate(results)}
    for edge in p.out_edges(old):
        e.rewire(edge, values[p.edge_value(edge)])
    if any(v in values for v in p.outputs()):
        e.set_outputs(**{n: values.get(v, v) for n, v in zip(p.output_names(), p.outputs(), strict=True)})
    e.remove(old)
    outputs = {v.node for v in p.outputs()}
    kept = []
    for node in reversed(place.made):  # a result that nobody reads leaves nodes without a reader
        if p.out_edges(node) or node in outputs or node == results[0].value.node:
            kept.append(node)
        else:
            e.remove(node)
    if results[0].value.node in place.made:
        e.rename(results[0].value.node, path)
    return kept[::-1]


class _Place:
    """Where expansions are written: an open edit, and the path of the node that goes."""

    def __init__(self, e: Transaction, path: str) -> None:
        self.e, self.path = e, path
        self.made: list[NodeId] = []
        self._numbers: dict[tuple[str, DType], Value] = {}

    def run(self, row: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> list[_Term]:
        """The results of an op on terms: of its expansion, or of a node of its own if it is a primitive."""
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
        """A const of one number, once per dtype."""
        known = self._numbers.get((repr(value), kind))
        if known is None:
            name = self.e.program.free_name(f"{self.path}.const")
            node = self.e.const(name, as_array(np.asarray(value), kind))
            self.made.append(node)
            known = self._numbers[repr(value), kind] = Value(node)
        return known


class _Term:
    """A value of the program, as the code of an expansion reads it: arithmetic adds nodes."""

    __slots__ = ("place", "spec", "value")

    def __init__(self, place: _Place, value: Value, spec: Spec) -> None:
        self.place, self.value, self.spec = place, value, spec

    @staticmethod
    def __gw_op__(row: Op, operands: Sequence[Any], attrs: Mapping[str, Any], outs: Any = None) -> Any:
        place = next(t.place for t in operands if isinstance(t, _Term))
        results = place.run(row, operands, attrs)
        return results[0] if len(results) == 1 else tuple(results)

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> DType:
        return self.spec.dtype

    def __add__(self, other: Any) -> Any:
        return call("add", self, other)

    def __radd__(self, other: Any) -> Any:
        return call("add", other, self)

    def __sub__(self, other: Any) -> Any:
        return call("sub", self, other)

    def __rsub__(self, other: Any) -> Any:
        return call("sub", other, self)

    def __mul__(self, other: Any) -> Any:
        return call("mul", self, other)

    def __rmul__(self, other: Any) -> Any:
        return call("mul", other, self)

    def __truediv__(self, other: Any) -> Any:
        return call("div", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return call("div", other, self)

    def __neg__(self) -> Any:
        return call("neg", self)
