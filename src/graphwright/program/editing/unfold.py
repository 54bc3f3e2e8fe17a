"""Unfolding: an op written as one op per unit of an axis (a head, a neuron) into a junction, and folded back.

`o(x) = sum over h of o_h(x_h)`: each unit reads slices of the very values the op read, so no weight is copied, every
checkpoint key stays, and cutting the edge of unit h leaves that unit out. Units along an axis of the result are put in
their place among zeros by `pad_slice`, so that they are summed too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from graphwright.errors import ShapeError, UsageError
from graphwright.ops import get, traits
from graphwright.program.editing.replace import stand_in
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.array import Spec
    from graphwright.graph import NodeId
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program


class Axis(NamedTuple):
    """Where an axis of an op runs.

    Attributes:
        operands: its dimension in each operand; None, or left out, where every unit reads all of it.
        result: its dimension in the result; None if the units' results are summed.
        bias: place of the operand that is added to that sum.
    """

    operands: tuple[int | None, ...]
    result: int | None
    bias: int | None = None


AXES: Mapping[str, Mapping[str, Axis]] = {
    "linear": {"in": Axis((-1, 1), None, bias=2), "out": Axis((None, 0, 0), -1)},
    "matmul": {
        "in": Axis((-1, -2), None),
        "rows": Axis((-2, None), -2),
        "columns": Axis((None, -1), -1),
        "heads": Axis((-3, -3), -3),
    },
    "sdpa": {"heads": Axis((1, 1, 1), 1)},
}
"""op -> name of an axis -> where it runs."""


def unfold(e: Transaction, node: NodeId, name: str, units: int | None) -> NodeId:
    """Put one op per unit in the place of `node`, inside an open edit; see `Transaction.unfold`."""
    p, path, op = e.program, e.program.path(node), e.program.op(node)
    if not isinstance(name, str) or name not in AXES.get(op, ()):
        known = ", ".join(AXES.get(op, ())) or f"a {', '.join(AXES)}"
        raise UsageError("the op does not split along this axis", where=f"{path} ({op})", expected=known, got=name)
    out, reads, attrs, axis = e.spec(node), p.operands(node), p.attrs(node), AXES[op][name]
    where = f"{path}, axis {name}"
    sizes = _sizes(where, [p.spec(v) for v in reads], axis)
    n = _count(p, node, axis) if units is None else units
    if not _divide(sizes, n):
        raise ShapeError(
            "the axis does not split into so many units",
            where=where,
            expected=f"a divisor of {', '.join(map(str, sizes))}",
            got=n,
        )
    e.rename(node, p.free_name(f"{path}.folded"))
    cuts: dict[tuple[Value, int], Value] = {}

    def part(value: Value, dim: int | None, unit: int) -> Value:
        if dim is None:
            return value
        cut = _share(p.spec(value), dim, n, unit)
        at = value, cut["start"]  # a key head serves several query heads
        if at not in cuts:
            cuts[at] = put(e, "slice", [value], cut, f"{path}.{unit}.part")
        return cuts[at]

    results = []
    for unit in range(n):
        ins = [part(value, _dim(axis, i), unit) for i, value in enumerate(reads) if i != axis.bias]
        made = put(e, op, ins, attrs, f"{path}.{unit}")
        if axis.result is not None:
            made = put(e, "pad_slice", [made], _place(out, axis, n, unit), f"{path}.{unit}.placed")
        results.append(made)
    bias = [] if axis.bias is None else reads[axis.bias :]
    total = put(e, "junction", results, {}, f"{path}.sum" if bias else path)
    if bias:
        total = put(e, "add", [total, *bias], {}, path)
    stand_in(e, {Value(node): total})
    e.remove(node)
    return total.node


def fold(e: Transaction, node: NodeId) -> NodeId:
    """Put the op back whose units a junction sums, inside an open edit; see `Transaction.fold`."""
    p, path = e.program, e.program.path(node)
    for op, reads, attrs, gone in _folded(p, node):
        for going in gone:
            if going != node and (beyond := set(p.consumers(going)) - set(gone)):
                raise UsageError("a unit is read elsewhere too", where=p.path(going), got=p.path(min(beyond)))
        parts = [v.node for u in gone for v in p.operands(u) if traits(p.op(v.node)).slices]
        e.rename(node, p.free_name(f"{path}.unfolded"))
        whole = put(e, op, reads, attrs, path)
        stand_in(e, {Value(node): whole})
        e.remove(gone)
        e.remove([n for n in dict.fromkeys(parts) if not p.consumers(n)])
        return whole.node
    raise UsageError(
        "these are not all units of one op", where=path, expected="what e.unfold made, no edge cut and no part changed"
    )


def _folded(p: Program, node: NodeId) -> Iterator[tuple[str, list[Value], Mapping[str, Any], list[NodeId]]]:
    """Ops that unfold to what ends in `node`: name, operands, attributes; and the nodes that go, last ones first."""
    gone, bias = [node], []
    if traits(p.op(node)).sums:
        junction, *bias = p.operands(node)
        gone.append(node := junction.node)
    results = p.operands(node) if p.is_junction(node) else []
    placed = bool(results) and all(traits(p.op(v.node)).pads for v in results)
    units = [u.node for v in results for u in (p.operands(v.node) if placed else [v])]
    gone += [*(v.node for v in results if placed), *units]
    rows = {(p.op(u), repr(p.attrs(u)), len(p.operands(u))) for u in units}
    if len(units) != len(results) or len(rows) != 1:
        return
    op, out = p.op(units[0]), p.spec(node)
    for axis in AXES.get(op, {}).values():
        if placed == (axis.result is None) or bool(bias) > (axis.bias is not None):
            continue
        if placed and any(p.attrs(v.node) != _place(out, axis, len(units), i) for i, v in enumerate(results)):
            continue
        reads = [_whole(p, units, place, axis) for place in range(len(p.operands(units[0])))]
        whole = [v for v in reads if v is not None]
        if len(whole) == len(reads) and _divide(_sizes(p.path(node), [p.spec(v) for v in whole], axis), len(units)):
            yield op, [*whole, *bias], p.attrs(units[0]), gone


def _whole(p: Program, units: Sequence[NodeId], place: int, axis: Axis) -> Value | None:
    """The value whose shares the units read at one place; None if they do not."""
    reads, dim = [p.operands(u)[place] for u in units], _dim(axis, place)
    if dim is None:
        return reads[0] if len(set(reads)) == 1 else None
    if any(not traits(p.op(v.node)).slices or not p.operands(v.node) for v in reads):
        return None
    value = p.operands(reads[0].node)[0]
    shares = [_share(p.spec(value), dim, len(units), i) for i in range(len(units))]
    fits = all(p.operands(v.node) == [value] and p.attrs(v.node) == s for v, s in zip(reads, shares, strict=True))
    return value if fits else None


def _dim(axis: Axis, place: int) -> int | None:
    return axis.operands[place] if place < len(axis.operands) else None


def _share(spec: Spec, dim: int, units: int, unit: int) -> dict[str, Any]:
    """The slice of an operand that a unit reads; one entry may serve several units, as a key head does."""
    size = spec.shape[dim]
    assert isinstance(size, int)
    return {"axis": dim % len(spec.shape), "start": unit * size // units, "size": max(size // units, 1), "step": 1}


def _place(out: Spec, axis: Axis, units: int, unit: int) -> dict[str, Any]:
    """Where in the result a unit's own lies."""
    assert axis.result is not None
    share = _share(out, axis.result, units, unit)
    return {"axis": share["axis"], "start": share["start"], "step": 1, "size": out.shape[axis.result]}


def _count(p: Program, node: NodeId, axis: Axis) -> int:
    """As many units as there were before a `flatten` made the axis, or will be after an `unflatten`; else its size."""
    place, dim = next((i, d) for i, d in enumerate(axis.operands) if d is not None)
    value = p.operands(node)[place]
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


def _sizes(where: str, ins: Sequence[Spec], axis: Axis) -> list[int | str]:
    """Sizes of the axis in the operands that have it. Raises: ShapeError."""
    shared = [(spec, dim) for place, spec in enumerate(ins) if (dim := _dim(axis, place)) is not None]
    if any(len(spec.shape) < 2 for spec in ins[:2]) or any(-dim > len(spec.shape) for spec, dim in shared):
        raise ShapeError("the operands have no such axis", where=where, got=", ".join(map(repr, ins)))
    return [spec.shape[dim] for spec, dim in shared]


def _divide(sizes: Sequence[int | str], units: int) -> bool:
    """Whether the operands can be shared out evenly; one entry of a shorter one may serve several units."""
    known = [size for size in sizes if isinstance(size, int) and size > 0]
    whole = type(units) is int and units > 0 and len(known) == len(sizes) and not max(known) % units
    return whole and all(size % units == 0 or units % size == 0 for size in known)


def put(e: Transaction, op: str, reads: Sequence[Value], attrs: Mapping[str, Any], name: str) -> Value:
    """A new node whose operands have their specs already."""
    p, row = e.program, get(op)
    full, label = row.complete(attrs, name), p.free_name(name)
    latest = max((v.node for v in reads), key=p.order_labels.key)
    node = e._node(op, full, label, row.specs([p.spec(v) for v in reads], full, label), after=latest)
    for port, value in enumerate(reads):
        e._edge(value, node, port)
    return Value(node)
