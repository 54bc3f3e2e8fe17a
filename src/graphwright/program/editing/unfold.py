"""Unfolding: splitting an op into one op per unit of an axis (a head, a neuron) and a junction, and folding it back.

`o(x) = Σ_h o_h(x_h)`: each unit reads slices of the op's operands, so no weight is copied or renamed.
If the axis is a dimension of the result, `pad_slice` pads the result of each unit with zeros before the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.errors import ShapeError, UsageError
from graphwright.ops import traits
from graphwright.program.editing.replace import redirect
from graphwright.program.editing.unfold_experts import AXIS, fold_experts, unfold_experts
from graphwright.program.op_graph import Ref, Value

if TYPE_CHECKING:
    from graphwright.array import Spec
    from graphwright.graph import NodeId
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program


class SplitAxis(NamedTuple):
    """An axis along which an op can be split, as a dimension of each operand and of the result.

    Attributes:
        operands: the dimension in each operand; None, or left out, if every unit reads the whole operand.
        result: the dimension in the result; None if the axis is summed over.
        bias: index of the bias operand if it must be added once, after the sum of the units; else None.
    """

    operands: tuple[int | None, ...]
    result: int | None
    bias: int | None = None


SPLIT_AXES: Mapping[str, Mapping[str, SplitAxis]] = {  # by name: the axes are arguments of `unfold`, named per op
    "linear": {"in": SplitAxis((-1, 1), None, bias=2), "out": SplitAxis((None, 0, 0), -1)},
    "matmul": {
        "in": SplitAxis((-1, -2), None),
        "rows": SplitAxis((-2, None), -2),
        "columns": SplitAxis((None, -1), -1),
        "heads": SplitAxis((-3, -3), -3),
    },
    "sdpa": {"heads": SplitAxis((1, 1, 1), 1)},
}
"""op -> name of an axis -> its dimensions."""


def unfold(e: Transaction, ref: Ref, axis: str, units: int | None = None) -> NodeId:
    """Split an op into one op per unit of an axis, summed by a junction; results and weights do not change.

    Cutting the edge from a unit to the junction ablates this unit. A bias is added after the sum.

    Args:
        axis: "in" (which for an o-projection means its heads) or "out" for `linear`; "in", "rows", "columns" or "heads"
            for `matmul`; "heads" for `sdpa`; "experts" for `expert_mlp`, whose units give 0 for tokens of others.
        units: number of units; by default the leading size of the `flatten` before the op or of the `unflatten` after
            it, else one unit for each index.
    Returns: the node that now has the op's name and readers. Raises: UsageError if the op has no such axis, ShapeError.
    """
    p = e.program
    node = p.node(ref)
    path, op = p.path(node), p.op(node)
    if isinstance(axis, str) and axis == AXIS and traits(op).mixture and units is None:
        return unfold_experts(e, node)
    if not isinstance(axis, str) or axis not in SPLIT_AXES.get(op, ()):
        known = ", ".join(SPLIT_AXES.get(op, ())) or f"an op of {', '.join(SPLIT_AXES)}"
        raise UsageError("the op cannot be split along this axis", where=f"{path} ({op})", expected=known, got=axis)
    out, reads, attrs, dims = e.spec(node), p.operands(node), p.attrs(node), SPLIT_AXES[op][axis]
    where = f"{path}, axis {axis}"
    sizes = _sizes(where, [p.spec(v) for v in reads], dims)
    n = _count(p, node, dims) if units is None else units
    if not _divide(sizes, n):
        expected = f"a divisor of {', '.join(map(str, sizes))}"
        raise ShapeError("cannot split the axis into this number of equal units", where=where, expected=expected, got=n)
    e.rename(node, p.free_name(f"{path}.folded"))
    slices: dict[tuple[Value, int], Value] = {}

    def put(op: str, operands: Sequence[Value], attrs: Mapping[str, Any], name: str) -> Value:
        return Value(e.add_op(op, operands, attrs, p.free_name(name)))

    def part(value: Value, dim: int | None, unit: int) -> Value:
        if dim is None:
            return value
        share = _share(p.spec(value), dim, n, unit)
        at = value, share["start"]  # several query heads may read one key head
        if at not in slices:
            slices[at] = put("slice", [value], share, f"{path}.{unit}.part")
        return slices[at]

    results = []
    for unit in range(n):
        ins = [part(value, _dim(dims, i), unit) for i, value in enumerate(reads) if i != dims.bias]
        made = put(op, ins, attrs, f"{path}.{unit}")
        if dims.result is not None:
            made = put("pad_slice", [made], _padding(out, dims, n, unit), f"{path}.{unit}.placed")
        results.append(made)
    bias = [] if dims.bias is None else reads[dims.bias :]
    total = put("junction", results, {}, f"{path}.sum" if bias else path)
    if bias:
        total = put("add", [total, *bias], {}, path)
    redirect(e, {Value(node): total})
    e.remove(node)
    return total.node


def fold(e: Transaction, ref: Ref) -> NodeId:
    """Revert `unfold`, which returned the node `ref`: merge the units into one op.

    The program then has the hash that it had before `unfold`.
    Raises: UsageError if a unit was cut or changed, or if a node outside the unfolded op reads a unit.
    """
    p = e.program
    node = p.node(ref)
    path = p.path(node)
    if (made := fold_experts(e, node)) is not None:
        return made
    for op, reads, attrs, gone in _folded(p, node):
        for old in gone:
            if old != node and (readers := set(p.consumers(old)) - set(gone)):
                what = "cannot fold: a node outside the unfolded op reads a part of it"
                raise UsageError(what, where=p.path(old), got=p.path(min(readers)))
        parts = [v.node for u in gone for v in p.operands(u) if traits(p.op(v.node)).slices]
        e.rename(node, p.free_name(f"{path}.unfolded"))
        whole = e.add_op(op, reads, attrs, p.free_name(path))
        redirect(e, {Value(node): Value(whole)})
        e.remove(gone)
        e.remove([n for n in dict.fromkeys(parts) if not p.consumers(n)])
        return whole
    what, expected = "cannot fold: the node does not sum all units of one op", "an unchanged result of e.unfold"
    raise UsageError(what, where=path, expected=expected)


def _folded(p: Program, node: NodeId) -> Iterator[tuple[str, list[Value], Mapping[str, Any], list[NodeId]]]:
    """Yield (op, operands, attributes, nodes to remove) of each op that `unfold` can split into the nodes at `node`."""
    gone, bias = [node], []
    if traits(p.op(node)).sums:
        junction, *bias = p.operands(node)
        gone.append(node := junction.node)
    results = p.operands(node) if p.is_junction(node) else []
    padded = bool(results) and all(traits(p.op(v.node)).pads for v in results)
    units = [u.node for v in results for u in (p.operands(v.node) if padded else [v])]
    gone += [*(v.node for v in results if padded), *units]
    kinds = {(p.op(u), repr(p.attrs(u)), len(p.operands(u))) for u in units}
    if len(units) != len(results) or len(kinds) != 1:
        return
    op, out = p.op(units[0]), p.spec(node)
    for axis in SPLIT_AXES.get(op, {}).values():
        if padded == (axis.result is None) or bool(bias) > (axis.bias is not None):
            continue
        if padded and any(p.attrs(v.node) != _padding(out, axis, len(units), i) for i, v in enumerate(results)):
            continue
        reads = [_whole(p, units, number, axis) for number in range(len(p.operands(units[0])))]
        whole = [v for v in reads if v is not None]
        if len(whole) == len(reads) and _divide(_sizes(p.path(node), [p.spec(v) for v in whole], axis), len(units)):
            yield op, [*whole, *bias], p.attrs(units[0]), gone


def _whole(p: Program, units: Sequence[NodeId], number: int, axis: SplitAxis) -> Value | None:
    """Return the value that all units read as operand `number`, whole or by slices of it; None if they differ."""
    reads, dim = [p.operands(u)[number] for u in units], _dim(axis, number)
    if dim is None:
        return reads[0] if len(set(reads)) == 1 else None
    if any(not traits(p.op(v.node)).slices or not p.operands(v.node) for v in reads):
        return None
    value = p.operands(reads[0].node)[0]
    shares = [_share(p.spec(value), dim, len(units), i) for i in range(len(units))]
    fits = all(p.operands(v.node) == [value] and p.attrs(v.node) == s for v, s in zip(reads, shares, strict=True))
    return value if fits else None


def _dim(axis: SplitAxis, number: int) -> int | None:
    return axis.operands[number] if number < len(axis.operands) else None


def _share(spec: Spec, dim: int, units: int, unit: int) -> dict[str, Any]:
    """Return the attributes of the `slice` op that selects a unit's part of an operand; units may share a part."""
    size = spec.shape[dim]
    assert isinstance(size, int)
    return {"axis": dim % len(spec.shape), "start": unit * size // units, "size": max(size // units, 1), "step": 1}


def _padding(out: Spec, axis: SplitAxis, units: int, unit: int) -> dict[str, Any]:
    """Return the attributes of the `pad_slice` that pads a unit's result with zeros to the size of the whole result."""
    assert axis.result is not None
    share = _share(out, axis.result, units, unit)
    return {"axis": share["axis"], "start": share["start"], "step": 1, "size": out.shape[axis.result]}


def _count(p: Program, node: NodeId, axis: SplitAxis) -> int:
    """Return the default number of units: the leading size of a `flatten` before the op or an `unflatten` after it.

    Without such an op, each index of the axis is a unit.
    """
    number, dim = next((i, d) for i, d in enumerate(axis.operands) if d is not None)
    value = p.operands(node)[number]
    if traits(p.op(value.node)).joins_axis:
        before, attrs = p.spec(p.operands(value.node)[0]), p.attrs(value.node)
        if attrs["start"] % len(before.shape) == dim % len(p.spec(value).shape):
            return _known(before, attrs["start"])
    for reader in p.consumers(node):
        if axis.result is not None and traits(p.op(reader)).splits_axis:
            rank = len(p.spec(node).shape)
            if p.attrs(reader)["axis"] % rank == axis.result % rank:
                return p.attrs(reader)["sizes"][0]
    return _known(p.spec(value), dim)


def _known(spec: Spec, dim: int) -> int:
    size = spec.shape[dim]
    return size if isinstance(size, int) else 0


def _sizes(where: str, ins: Sequence[Spec], axis: SplitAxis) -> list[int | str]:
    """Return the size of the axis in each operand that has it. Raises: ShapeError if operands lack dimensions."""
    shared = [(spec, dim) for number, spec in enumerate(ins) if (dim := _dim(axis, number)) is not None]
    if any(len(spec.shape) < 2 for spec in ins[:2]) or any(-dim > len(spec.shape) for spec, dim in shared):
        raise ShapeError("operands have too few dimensions for this axis", where=where, got=", ".join(map(repr, ins)))
    return [spec.shape[dim] for spec, dim in shared]


def _divide(sizes: Sequence[int | str], units: int) -> bool:
    """Return True if all sizes split evenly into `units` parts; several units may share an index of a smaller size."""
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    whole = type(units) is int and units > 0 and len(known) == len(sizes) and not max(known) % units
    return whole and all(size % units == 0 or units % size == 0 for size in known)
