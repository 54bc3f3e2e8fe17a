"""Which axes can be pruned: exact ones that end in products with trained matrices, in the order of the computation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.ops import traits
from graphwright.ops.axes import Atom, spread
from graphwright.program import Value
from graphwright.program.axes.axes import KINDS
from graphwright.program.axes.solve_axes import origin
from graphwright.program.axes.units import layers
from graphwright.program.kinds import PARAM
from graphwright.program.selection import Selection
from graphwright.surgery.calibration import host, moving
from graphwright.surgery.errors import NothingToPrune
from graphwright.surgery.matrices import finite

if TYPE_CHECKING:
    from graphwright.array import NDArray
    from graphwright.ops.axes import Term
    from graphwright.program import Program
    from graphwright.program.axes.axes import AxisGroup


@dataclass(frozen=True, slots=True)
class Consumer:
    """One product with a trained matrix that sums over all units of an axis.

    Attributes:
        node, x: the product, and the value it reads.
        weight, key: the trained matrix.
        bias: key of the trained bias, if there is one.
        op, attrs: which product.
        columns: [units, k] columns of each unit.
    """

    node: NodeId
    x: Value
    weight: NodeId
    key: str
    bias: str | None
    op: str
    attrs: dict[str, Any]
    columns: np.ndarray

    def matrix(self, p: Program, dtype: str = "float64") -> np.ndarray:
        """The weights as [out, columns]."""
        w = p.weights.array(self.key).to_numpy(dtype)
        return w.T if traits(self.op).contracts == "in_out" else w.reshape(len(w), -1)

    def stored(self, p: Program) -> np.ndarray:
        """The weights as [out, columns], float32 (float64 where they are stored so): no copy of most."""
        return self.matrix(p, "float64" if p.spec(self.weight).dtype.name == "float64" else "float32")

    def shaped(self, matrix: np.ndarray, like: tuple[int, ...]) -> np.ndarray:
        """A matrix [out, columns] in the form in which weights of this product are stored."""
        return np.ascontiguousarray(matrix.T if traits(self.op).contracts == "in_out" else matrix.reshape(like))

    def rows(self, p: Program, x: NDArray) -> np.ndarray:
        """What the product multiplies the matrix with: [rows, columns], float32 (float64 where it was computed so)."""
        a = host(x)
        if traits(self.op).contracts != "window":
            return a.reshape(-1, a.shape[-1])
        return _windows(a, p.weights.array(self.key).shape[2:], self.attrs)

    def kept(self, keep: np.ndarray, width: int) -> np.ndarray:
        """Columns that stay if the units of a mask [units] do; columns that belong to no unit stay."""
        stays = np.ones(width, bool)
        stays[self.columns[~keep].reshape(-1)] = False
        return np.flatnonzero(stays)


def consumers(group: AxisGroup) -> list[Consumer] | None:
    """All sums that an axis ends in, or None where one of them is no product with a trained matrix."""
    p, found = group.axes.program, {}
    for atom in group.atoms:
        said = group.axes.solution.notes.get(atom)
        for node, ends in said.summed if said is not None else ():
            made = _consumer(p, group, node, ends)
            if made is None:
                return None
            found[node] = made
    return list(found.values()) or None


def _consumer(p: Program, group: AxisGroup, node: NodeId, ends: tuple[tuple[int, int], ...]) -> Consumer | None:
    op, operands, attrs = p.op(node), p.operands(node), dict(p.attrs(node))
    if not traits(op).contracts or [port for port, _ in ends] != [0, 1] or attrs.get("groups", 1) != 1:
        return None
    weight, dim = origin(p, operands[1]), ends[1][1]
    if weight is None or p.op(weight) != PARAM or (traits(op).contracts == "in_out" and len(p.spec(weight).shape) != 2):
        return None
    shape = p.spec(weight).sizes
    places = unit_places(group, group.axes.solution.dims[Value(weight)][dim])
    window = prod(shape[2:]) if traits(op).contracts == "window" else 1
    columns = (places[:, :, None] * window + np.arange(window)).reshape(len(places), -1)
    bias = origin(p, operands[2]) if len(operands) > 2 else None
    key = p.key(bias) if bias is not None and p.op(bias) == PARAM else None
    return Consumer(node, operands[0], weight, p.key(weight), key, op, attrs, columns)


def unit_places(group: AxisGroup, term: Term) -> np.ndarray:
    """[units, k]: the places of each unit along a dimension."""
    if isinstance(term, Atom) and len(group.atoms) == 1:
        return np.arange(group.size)[:, None]
    found = []
    for unit in range(group.size):
        chosen = np.unravel_index(unit, [int(a.size) for a in group.atoms])
        marks = {a: np.where(np.arange(int(a.size)) == i, 0, -1) for a, i in zip(group.atoms, chosen, strict=True)}
        found.append(np.flatnonzero(spread(term, marks) >= 0))
    return np.stack(found)


def _windows(x: np.ndarray, kernel: tuple[int, ...], attrs: dict[str, Any]) -> np.ndarray:
    """Windows of [N, C, spatial...] as rows [N · places, C · kernel], zeros outside."""
    n = len(kernel)
    stride, padding, dilation = (
        (v,) * n if isinstance(v := attrs[name], int) else tuple(v) for name in ("stride", "padding", "dilation")
    )
    wide = np.pad(x, [(0, 0), (0, 0), *((q, q) for q in padding)])
    spans = tuple(d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))
    view = np.lib.stride_tricks.sliding_window_view(wide, spans, axis=tuple(range(2, 2 + n)))
    view = view[
        (slice(None), slice(None), *(slice(None, None, s) for s in stride), *(slice(None, None, d) for d in dilation))
    ]
    order = (0, *range(2, 2 + n), 1, *range(2 + n, 2 + 2 * n))
    return view.transpose(order).reshape(-1, x.shape[1] * prod(kernel))


NEURONS = ("neurons", "channels", "units")
"""Kinds that are pruned if none is named: inner units of MLPs, channels between convolutions."""
Where = str | Selection | Iterable[NodeId]


@dataclass(frozen=True, slots=True)
class Prunable:
    """An axis that can be pruned.

    Attributes:
        group: the axis.
        consumers: the products it ends in.
        start: the first node that computes anything along it; before it nothing depends on which units there are.
    """

    group: AxisGroup
    consumers: tuple[Consumer, ...]
    start: NodeId

    @property
    def name(self) -> str:
        """Of the axis."""
        return self.group.name

    @property
    def size(self) -> int:
        """Units."""
        return self.group.size


def chosen(p: Program, where: Any) -> set[NodeId]:
    """Nodes of a pattern, a selection or several nodes."""
    if isinstance(where, str):
        return set(p.select(where))
    if isinstance(where, Selection):
        where.names()  # raises StaleSelection
        return set(where)
    return set(where)


def scope(p: Program, where: Any = None) -> set[NodeId]:
    """Nodes whose parameters a share is of: those chosen; by default the numbered layers, or all if there are none."""
    if where is not None:
        return chosen(p, where)
    return {n for prefix in layers(p) for n in p.select(prefix)} or set(p.nodes())


def prunable(p: Program, where: Any = None, kinds: Sequence[str] = NEURONS, protect: Any = ()) -> list[Prunable]:
    """Axes to prune, in the order in which they are computed.

    Args:
        where: pattern or nodes; an axis belongs to them if one of its weights does that not only sums over it.
        kinds: of units: `neurons`, `channels`, `head_dim` (widths of values), `kv_groups` (a key head with all that
            reads it), `queries` (the same query head of each key head), `heads` (any query head).
        protect: pattern or nodes whose axes stay.
    Raises: NothingToPrune naming why each axis of these kinds is none; UsageError for a kind that there is not.
    """
    if unknown := [k for k in kinds if k not in (*KINDS, "units")]:
        raise UsageError("no such kind of units", expected=", ".join((*KINDS, "units")), got=", ".join(unknown))
    inside = chosen(p, "**" if where is None else where)
    kept = chosen(p, protect) if protect else set()
    found, refused = [], []
    axes, moved = p.axes(), moving(p)
    for group in axes.values():
        made = {m.value.node for m in group.members if m.key is not None and p.op(m.value.node) == PARAM
                and not any(axes.summed.get((m.value.node, m.dim, a)) for a in group.atoms)}  # fmt: skip
        if not made & inside or made & kept or not set(kinds) & set(group.kinds) or group.size < 2:
            continue
        axis = of_group(group, moved)
        if axis is None:
            why = (*group.frozen, *group.mixed, "a sum over it is no product with a trained matrix")[0]
            refused.append(f"{group.name}: {why}")
        else:
            found.append(axis)
    if not found:
        raise NothingToPrune(
            f"no axis of {', '.join(kinds)} can be pruned here",
            where=where if isinstance(where, str) else p.name,
            got="; ".join(refused[:4]) or "none of these kinds",
            fix="print(program.axes())",
        )
    return sorted(found, key=lambda a: axes.rank[a.start])


def of_group(group: AxisGroup, moved: Collection[NodeId] | None = None) -> Prunable | None:
    """One axis; None if it cannot be pruned: it is frozen, not exact, or ends in other things than trained products."""
    ends = consumers(group) if not group.frozen and group.exact else None
    if ends is None:
        return None
    moved = moving(group.axes.program) if moved is None else moved
    nodes = [m.value.node for m in group.members if m.value.node in moved]
    return Prunable(group, tuple(ends), min(nodes, key=group.axes.rank.__getitem__))


def check_finite(p: Program, axes: Iterable[Prunable]) -> None:
    """Raises: NonFiniteWeight for a weight along one of the axes."""
    for key in dict.fromkeys(m.key for a in axes for m in a.group.members if m.key is not None):
        array = p.weights.array(key)
        if array.dtype.is_float:
            finite(array.to_numpy("float64" if array.dtype.name == "float64" else "float32"), key)
