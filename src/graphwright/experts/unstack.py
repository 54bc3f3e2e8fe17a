"""Stacked experts as separate ones: grouped products with weights [E, in, out] become one mixture of E experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import int64
from graphwright.errors import UsageError
from graphwright.experts.dense import activation_of
from graphwright.graph import NodeId
from graphwright.ops import traits
from graphwright.program.axes.solve_axes import origin
from graphwright.program.editing.replace import redirect, remove_unread
from graphwright.program.kinds import KINDS, PARAM
from graphwright.program.op_graph import Ref, Value

if TYPE_CHECKING:
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program


def unstack(e: Transaction, ref: Ref) -> NodeId:
    """Give each expert of a stack its own matrices, so that experts can be cut, cloned and frozen; return the mixture.

    Args:
        e: the open edit.
        ref: the last grouped product of the experts, which reads act(gate) ⊙ up, or act(up); all of them read stored
            weights [E, in, out] and the same offsets. It keeps its name and readers.
    Raises: UsageError if the nodes before it are of another form.
    """
    p, node = e.program, e.program.node(ref)
    path = p.path(node)
    inner, down, offsets = _grouped(p, Value(node), path)
    products, act, gone = _inner(p, inner, path)
    x = products[0][0]
    if any(given != x or runs != offsets for given, _, runs in products):
        raise UsageError("the products of these experts read different tokens or groups", where=path)
    stacks = [*(w for _, w, _ in products), down]
    count = int(p.spec(down).shape[0])
    e.rename(node, p.free_name(f"{path}.stacked"))

    def put(op: str, operands: list[Value], label: str, **attrs: Any) -> Value:
        return Value(e.add_op(op, operands, attrs, p.free_name(f"{path}.{label}")))

    one = put("slice", [x], "column", axis=1, start=0, size=1, step=1)
    ones = put("full_like", [one], "ones", value=1.0)
    numbers = put("cast", [put("reshape", [ones], "flat", shape=(p.spec(x).shape[0],))], "numbers", dtype=int64)
    rows = put("cumsum", [numbers], "counted", axis=0)
    rows = put("sub", [rows, numbers], "rows")
    names = ("up", "down") if len(stacks) == 2 else ("gate", "up", "down")
    module = path.rpartition(".")[0]
    operands = []
    for i in range(count):
        for name, stack in zip(names, stacks, strict=True):
            stored = origin(p, stack)
            assert stored is not None
            matrix = np.ascontiguousarray(p.weights.array(p.key(stored)).to_numpy("float64")[i].T)
            label = f"{module}.experts.{i}.{name}.weight" if module else f"experts.{i}.{name}.weight"
            operands.append(Value(e.param(p.free_name(label), matrix.astype(p.spec(stored).dtype.numpy))))
    kind = "mlp" if len(stacks) == 2 else "gated"
    made = e.add_op(
        "expert_mlp", [x, offsets, rows, rows, ones, *operands], {"kind": kind, "act": act}, p.free_name(path)
    )
    redirect(e, {Value(node): Value(made)})
    remove_unread(e, Value(node))
    for other in gone:
        if other in p.graph and not p.consumers(other):
            remove_unread(e, Value(other))
    return made


_Grouped = tuple[Value, Value, Value]


def _grouped(p: Program, value: Value, where: str) -> _Grouped:
    """Return (input, stacked weight, offsets) of a grouped product with a stored weight. Raises: UsageError."""
    node = value.node
    fits = p.op(node) not in KINDS and traits(p.op(node)).contracts == "" and traits(p.op(node)).fixed == (2,)
    if not fits or traits(p.op(node)).backward_of or len(p.operands(node)) != 3:
        what = "this is no product of groups of rows with stacked weights"
        raise UsageError(what, where=where, got=f"{p.path(value)} ({p.op(node)})", expected="grouped_matmul")
    x, w, offsets = p.operands(node)
    stored = origin(p, w)
    if stored is None or p.op(stored) != PARAM:
        raise UsageError("the weights of a grouped product are computed, not stored", where=p.path(node))
    return x, w, offsets


def _inner(p: Program, value: Value, where: str) -> tuple[list[_Grouped], str, list[NodeId]]:
    """Return (products of gate and up or of up alone, activation, nodes between) of the hidden layer."""
    node = value.node
    t = traits(p.op(node))
    if t.annihilated and t.applies:  # act(a) · b as one op
        return [_grouped(p, v, where) for v in p.operands(node)], t.applies, [node]
    if t.multiplies:
        for acted, other in (p.operands(node), p.operands(node)[::-1]):
            if (name := activation_of(p, acted.node)) is not None:
                below = p.operands(acted.node)[0]
                return [_grouped(p, below, where), _grouped(p, other, where)], name, [node, acted.node]
    if (name := activation_of(p, node)) is not None:
        return [_grouped(p, p.operands(node)[0], where)], name, [node]
    what = "the input of the last product is no hidden layer"
    raise UsageError(what, where=where, got=f"{p.path(value)} ({p.op(node)})", expected="act(gate) ⊙ up, or act(up)")
