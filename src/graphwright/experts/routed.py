"""The routed layers of a program: where experts are chosen, weighted and summed.

A routed layer is found by its ops: a `mixture` reads the runs of a `dispatch` and one group of operands per expert. Its
name is that of the axis of experts without the last part, such as `layers.3.mlp`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.ops import get
from graphwright.ops.axes import Atom, resolve
from graphwright.ops.experts import FIRST, Expert, experts_of
from graphwright.program.axes.solve_axes import origin
from graphwright.program.kinds import KINDS, PARAM, SOURCES
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.program.axes.axes import Axes, AxisGroup
    from graphwright.program.program import Program


class NotAMixture(UsageError):
    """A program has no routed layer, or none of this name."""


@dataclass(frozen=True, slots=True, repr=False)
class RoutedLayer:
    """One mixture of experts in a program, valid for one version of it.

    Attributes:
        program: the program.
        axis: the axis of experts; its units are the experts.
        node: the node that sums the experts of each token.
        tokens: the value that the experts read [N, C].
        choice: ids [N, k] or a mask [N, E]: the experts of each token.
        weights: the value with the factor of each chosen expert, of the shape of `choice`.
        logits: the first value [N, E] that the choice depends on; -∞ in a column removes an expert.
        router: param with one row per expert; None if each expert has its own.
        experts: for each expert its operands: values of matrices, after casts.
    """

    program: Program
    axis: AxisGroup
    node: NodeId
    tokens: Value
    choice: Value
    weights: Value
    logits: Value
    router: NodeId | None
    experts: tuple[Expert, ...]

    def __repr__(self) -> str:
        chosen = f"k = {self.k}" if self.k is not None else "any number for a token"
        return f"RoutedLayer({self.name!r}, {self.size} experts, {chosen})"

    @property
    def name(self) -> str:
        """Path of the layer: the name of its axis without the last part."""
        return self.axis.name.rpartition(".")[0] or self.axis.name

    @property
    def size(self) -> int:
        """Number of experts."""
        return self.axis.size

    def params(self, expert: int) -> list[NodeId]:
        """Return the param nodes of an expert, in the order of its operands."""
        p = self.program
        found = [origin(p, v) for v in self.experts[expert] if v is not None]
        return [n for n in found if n is not None]

    @property
    def k(self) -> int | None:
        """Experts per token; None if the router decides how many."""
        size = self.program.spec(self.choice).shape[1]
        return size if isinstance(size, int) and self.program.spec(self.choice).dtype.kind == "int" else None

    @property
    def best(self) -> NodeId | None:
        """The node that takes the k best experts; None if the router decides how many."""
        p = self.program
        between = p.reachable([self.choice]) & p.dependents([self.logits.node])
        found = [n for n in between if p.op(n) not in KINDS and "k" in p.attrs(n)]
        return max(found, key=p.order_labels.key, default=None) if self.k is not None else None


def routed_layers(p: Program) -> dict[str, RoutedLayer]:
    """Return the routed layers of a program by name, in its order. Raises: NotAMixture if it has none."""
    axes = p.axes()
    counted = {group.node: resolve(group.axis) for group in axes.solution.groups}
    found = [_layer(axes, node, counted[node]) for node in p.order_labels.sorted(p.of_traits(mixture=True))]
    if not found:
        raise NotAMixture("the program has no routed layer", where=p.name, fix="graphwright.experts.upcycle makes some")
    return {layer.name: layer for layer in found}


def routed_layer(p: Program, name: str) -> RoutedLayer:
    """Return the routed layer of a name, such as `layers.3.mlp`. Raises: NotAMixture listing the names."""
    found = routed_layers(p)
    if name not in found:
        raise NotAMixture("no routed layer has this name", where=p.name, expected=", ".join(found), got=name)
    return found[name]


def chosen_layers(p: Program, layers: str | Iterable[str]) -> list[RoutedLayer]:
    """Return the routed layers of these names; all for "all". Raises: NotAMixture."""
    if layers == "all":
        return list(routed_layers(p).values())
    return [routed_layer(p, name) for name in ([layers] if isinstance(layers, str) else layers)]


def _layer(axes: Axes, node: NodeId, axis: object) -> RoutedLayer:
    p = axes.program
    reads = p.operands(node)
    if not isinstance(axis, Atom) or axis not in axes.names:
        raise NotAMixture("the experts of this node are no axis of their own", where=p.path(node),
                          fix="a router needs a weight with one row per expert")  # fmt: skip
    dispatch = reads[1].node
    if not (p.op(dispatch) not in SOURCES and get(p.op(dispatch)).traits.routes):
        raise NotAMixture("the runs of this mixture are not those of a dispatch", where=p.path(node))
    choice = p.operands(dispatch)[0]
    group, dims = axes[axes.names[axis]], axes.solution.dims
    above = p.reachable([choice])
    moving = p.dependents(p.inputs())
    along = [v for v, d in dims.items() if v.node in above and v.node in moving and len(d) > 1 and d[-1] is axis]
    logits = min(along, key=lambda v: axes.rank[v.node], default=choice)
    rows = [m for m in group.members if m.key is not None and m.dim == 0 and p.op(m.value.node) == PARAM]
    router = rows[0].value.node if rows else None
    made = tuple(experts_of(reads[FIRST:], p.attrs(node)))
    return RoutedLayer(p, group, node, reads[0], choice, reads[4], logits, router, made)
