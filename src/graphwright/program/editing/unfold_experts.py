"""Unfolding a mixture of experts: one node per expert, summed by a junction, and folding it back.

The node of an expert computes on its own run of tokens and gives 0 elsewhere. It can be cut, gated or replaced by any
subprogram that maps the same values; the weights of the other experts do not change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphwright.array.dtype import bool_
from graphwright.errors import UsageError
from graphwright.ops import get, traits
from graphwright.program.editing.replace import redirect
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program

AXIS = "experts"


def unfold_experts(e: Transaction, node: NodeId) -> NodeId:
    """Replace a mixture by one mixture per expert, named `<path>.<number>`, and a junction that sums them."""
    p = e.program
    path, op, attrs = p.path(node), p.op(node), p.attrs(node)
    reads = p.operands(node)
    first, width = _groups(p, node)
    dispatch = reads[1].node
    if not traits(p.op(dispatch)).routes:
        raise UsageError("the runs of this mixture are not those of a dispatch", where=path, got=p.op(dispatch))
    choice, weights, label = p.operands(dispatch)[0], reads[4], p.path(dispatch)
    e.rename(node, p.free_name(f"{path}.folded"))

    def put(op: str, operands: list[Value], options: dict[str, Any], name: str) -> Value:
        return Value(e.add_op(op, operands, options, p.free_name(name)))

    results = []
    for unit in range((len(reads) - first) // width):
        name, share = f"{path}.{unit}", weights
        if p.spec(choice).dtype is bool_:
            part = {"axis": 1, "start": unit, "size": 1, "step": 1}
            mine, share = put("slice", [choice], part, f"{name}.mask"), put("slice", [weights], part, f"{name}.weight")
        else:
            number = put("full_like", [choice], {"value": unit}, f"{name}.number")
            chosen = put("eq", [choice, number], {}, f"{name}.chosen")
            zero = put("full_like", [choice], {"value": 0}, f"{name}.zero")
            none = put("full_like", [choice], {"value": -1}, f"{name}.none")
            mine = put("where", [chosen, zero, none], {}, f"{name}.ids")
        runs = put(p.op(dispatch), [mine], {"experts": 1}, f"{label}.{unit}").node
        group = reads[first + unit * width :][:width]
        results.append(put(op, [reads[0], *(Value(runs, i) for i in range(3)), share, *group], dict(attrs), name))
    total = put("junction", results, {}, path)
    redirect(e, {Value(node): total})
    e.remove(node)
    if not p.consumers(dispatch):
        e.remove(dispatch)
    return total.node


def fold_experts(e: Transaction, node: NodeId) -> NodeId | None:
    """Revert `unfold_experts`: return the mixture that replaces the junction `node`, or None if it is no such sum."""
    p = e.program
    units = [v.node for v in p.operands(node)] if p.is_junction(node) else []
    if not units or not all(traits(p.op(u)).mixture for u in units):
        return None
    path, (first, width) = p.path(node), _groups(p, units[0])
    parts = [_part(p, u) for u in units]
    if any(part is None or part != parts[0] for part in parts) or len({repr(p.attrs(u)) for u in units}) > 1:
        return None
    assert parts[0] is not None
    choice, weights, x, dispatch = parts[0]
    operands = [v for u in units for v in p.operands(u)[first : first + width]]
    above = [p.reachable([u], beyond={choice.node, weights.node, x.node, *(v.node for v in operands)}) for u in units]
    gone = {node, *units} | {n for found in above for n in found} - {choice.node, weights.node, x.node}
    gone -= {v.node for v in operands}
    for old in gone - {node}:
        if readers := set(p.consumers(old)) - gone:
            what = "cannot fold: a node outside the unfolded op reads a part of it"
            raise UsageError(what, where=p.path(old), got=p.path(min(readers)))
    attrs, label = dict(p.attrs(units[0])), p.path(p.operands(units[0])[1].node).rpartition(".")[0]
    e.rename(node, p.free_name(f"{path}.unfolded"))
    runs = e.add_op(dispatch, [choice], {"experts": len(units)}, p.free_name(label))
    reads = [x, *(Value(runs, i) for i in range(3)), weights, *operands]
    whole = e.add_op(p.op(units[0]), reads, attrs, p.free_name(path))
    redirect(e, {Value(node): Value(whole)})
    e.remove(sorted(gone, key=p.order_labels.key, reverse=True))
    return whole


def _groups(p: Program, node: NodeId) -> tuple[int, int]:
    groups: Any = get(p.op(node)).groups
    return groups(p.attrs(node))


def _part(p: Program, unit: NodeId) -> tuple[Value, Value, Value, str] | None:
    """Return (choice, weights, tokens, op of the dispatch) of the node of one expert, as `unfold_experts` makes it."""
    reads = p.operands(unit)
    dispatch = reads[1].node
    if not traits(p.op(dispatch)).routes or p.attrs(dispatch)["experts"] != 1:
        return None
    mine, weights = p.operands(dispatch)[0], reads[4]
    if traits(p.op(mine.node)).slices:
        return p.operands(mine.node)[0], p.operands(weights.node)[0], reads[0], p.op(dispatch)
    if len(p.operands(mine.node)) != 3:
        return None
    chosen = p.operands(mine.node)[0].node
    return p.operands(chosen)[0], weights, reads[0], p.op(dispatch)
