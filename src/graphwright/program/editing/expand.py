"""Dissolving fused ops: in the place of a node, the primitives that its row's `expand` is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import DType, Spec
from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.ops import OPS, Op, call
from graphwright.program.program import Program, Value
from graphwright.program.weights import as_array

if TYPE_CHECKING:
    from graphwright.program.editing.transaction import Transaction


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
