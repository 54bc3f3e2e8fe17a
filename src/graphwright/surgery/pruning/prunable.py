"""Which axes can be pruned: exact ones that end in products with trained matrices, in the order of the computation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.program import Program
from graphwright.program.axes.axes import KINDS, AxisGroup
from graphwright.program.axes.layers import layers
from graphwright.program.kinds import PARAM
from graphwright.program.selection import Selection
from graphwright.surgery.calibration import moving
from graphwright.surgery.matrices import finite
from graphwright.surgery.pruning.consumers import Consumer, consumers
from graphwright.surgery.pruning.errors import NothingToPrune

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
