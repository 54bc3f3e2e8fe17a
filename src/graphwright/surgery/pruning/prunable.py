"""Prunable axes: removing a unit has the effect of zeroing it, and only trained linear maps sum over the units."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import NDArray
from graphwright.errors import UsageError
from graphwright.graph import EdgeId, NodeId
from graphwright.ops import traits
from graphwright.ops.axes import Atom, Term, spread
from graphwright.program.axes.axes import KINDS, AxisGroup
from graphwright.program.axes.solve_axes import origin
from graphwright.program.axes.units import layers
from graphwright.program.editing.transaction import Transaction
from graphwright.program.kinds import INPUT, PARAM
from graphwright.program.op_graph import Value
from graphwright.program.selection import Selection
from graphwright.surgery.calibration import Stream, as_float, input_dependent
from graphwright.surgery.errors import NothingToPrune
from graphwright.surgery.matrices import finite
from graphwright.surgery.measure import loss
from graphwright.surgery.walks import flood

if TYPE_CHECKING:
    from graphwright.program.program import Program


NEURONS = ("neurons", "channels", "units")
"""Default kinds: inner units of MLPs, channels between convolutions."""
Where = str | Selection | Iterable[NodeId]


@dataclass(frozen=True, slots=True)
class Consumer:
    """A linear map (or convolution) with trained weights, whose input x has the units of an axis; it sums over them.

    Attributes:
        bias: key of the trained bias, or None.
        kernel: size of the window of a convolution; () for other maps.
        columns: indices [units, k] of the weight matrix's columns that read each unit.
    """

    node: NodeId
    x: Value
    weight: NodeId
    key: str
    bias: str | None
    op: str
    attrs: dict[str, Any]
    kernel: tuple[int, ...]
    columns: np.ndarray

    def matrix(self, p: Program, dtype: str = "float64") -> np.ndarray:
        """Return the weights, reshaped to [out, columns]."""
        w = p.weights.array(self.key).to_numpy(dtype)
        return w.T if traits(self.op).contracts == "in_out" else w.reshape(len(w), -1)

    def shaped(self, matrix: np.ndarray, like: tuple[int, ...]) -> np.ndarray:
        """Convert a matrix [out, columns] to the layout of the stored weights, whose shape is `like`."""
        return np.ascontiguousarray(matrix.T if traits(self.op).contracts == "in_out" else matrix.reshape(like))

    def rows(self, a: np.ndarray) -> np.ndarray:
        """Reshape the input `a` of this map to [rows, columns]; for a convolution, one row per window (im2col)."""
        if traits(self.op).contracts != "window":
            return a.reshape(-1, a.shape[-1])
        return _windows(a, self.kernel, self.attrs)

    def result_rows(self, y: np.ndarray) -> np.ndarray:
        """Reshape the result of this map, or its gradient, to [rows, out], in the same order as `rows`."""
        last = np.moveaxis(y, 1, -1) if traits(self.op).contracts == "window" else y
        return last.reshape(-1, last.shape[-1])

    def remaining(self, keep: np.ndarray, width: int) -> np.ndarray:
        """Return the indices below `width` of the columns that read no removed unit (False in the mask `keep`)."""
        kept = np.ones(width, bool)
        kept[self.columns[~keep].reshape(-1)] = False
        return np.flatnonzero(kept)


def _consumer(p: Program, group: AxisGroup, node: NodeId, ends: tuple[tuple[int, int], ...]) -> Consumer | None:
    op, operands, attrs = p.op(node), p.operands(node), dict(p.attrs(node))
    if not traits(op).contracts or [port for port, _ in ends] != [0, 1] or attrs.get("groups", 1) != 1:
        return None
    weight, dim = origin(p, operands[1]), ends[1][1]
    if weight is None or p.op(weight) != PARAM or (traits(op).contracts == "in_out" and len(p.spec(weight).shape) != 2):
        return None
    shape = p.spec(weight).sizes
    indices = unit_indices(group, group.axes.solution.dims[Value(weight)][dim])
    kernel = shape[2:] if traits(op).contracts == "window" else ()
    window = prod(kernel)
    columns = (indices[:, :, None] * window + np.arange(window)).reshape(len(indices), -1)
    bias = origin(p, operands[2]) if len(operands) > 2 else None
    key = p.key(bias) if bias is not None and p.op(bias) == PARAM else None
    return Consumer(node, operands[0], weight, p.key(weight), key, op, attrs, kernel, columns)


def unit_indices(group: AxisGroup, term: Term) -> np.ndarray:
    """Return the indices [units, k] of each unit's k entries along the tensor dimension that `term` describes."""
    if isinstance(term, Atom) and len(group.atoms) == 1:
        return np.arange(group.size)[:, None]
    found = []
    for unit in range(group.size):
        chosen = np.unravel_index(unit, [int(a.size) for a in group.atoms])
        marks = {a: np.where(np.arange(int(a.size)) == i, 0, -1) for a, i in zip(group.atoms, chosen, strict=True)}
        found.append(np.flatnonzero(spread(term, marks) >= 0))
    return np.stack(found)


def _windows(x: np.ndarray, kernel: tuple[int, ...], attrs: dict[str, Any]) -> np.ndarray:
    """Cut [N, C, spatial...] into zero-padded windows, as rows [N · positions, C · kernel] (im2col)."""
    n = len(kernel)
    settings = (attrs[name] for name in ("stride", "padding", "dilation"))
    stride, padding, dilation = ((v,) * n if isinstance(v, int) else tuple(v) for v in settings)
    wide = np.pad(x, [(0, 0), (0, 0), *((q, q) for q in padding)])
    spans = tuple(d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True))
    view = np.lib.stride_tricks.sliding_window_view(wide, spans, axis=tuple(range(2, 2 + n)))
    steps = (*(slice(None, None, s) for s in stride), *(slice(None, None, d) for d in dilation))
    order = (0, *range(2, 2 + n), 1, *range(2 + n, 2 + 2 * n))
    return view[(slice(None), slice(None), *steps)].transpose(order).reshape(-1, x.shape[1] * prod(kernel))


@dataclass(frozen=True, slots=True)
class PrunableAxis:
    """An axis that can be pruned, and the linear maps that sum over it.

    Attributes:
        start: the first node whose value has this axis; no node before it depends on the units.
    """

    group: AxisGroup
    consumers: tuple[Consumer, ...]
    start: NodeId

    @property
    def name(self) -> str:
        """Name of the axis."""
        return self.group.name

    @property
    def size(self) -> int:
        """Number of units."""
        return self.group.size


def selected_nodes(p: Program, where: Any) -> set[NodeId]:
    """Return the nodes of a pattern, a selection or an iterable of nodes, as a set."""
    if isinstance(where, Selection):
        where.names()  # raises StaleSelection
    return set(p.select(where) if isinstance(where, str) else where)


def scope_nodes(p: Program, where: Any = None) -> set[NodeId]:
    """Return the nodes that a `Ratio` counts: those of `where`; by default the numbered layers, else all nodes."""
    if where is not None:
        return selected_nodes(p, where)
    return {n for prefix in layers(p) for n in p.select(prefix)} or set(p.nodes())


def prunable(p: Program, where: Any = None, kinds: Sequence[str] = NEURONS, protect: Any = ()) -> list[PrunableAxis]:
    """Return the axes that can be pruned, in the order in which they are computed.

    Args:
        where: pattern or nodes; an axis is selected by the weights that produce it, not by weights that sum over it.
        kinds: kinds of units, see `PruneOptions`.
        protect: pattern or nodes whose axes are left out.
    Raises: NothingToPrune with a reason for up to four axes of these kinds; UsageError for an unknown kind.
    """
    if unknown := [k for k in kinds if k not in (*KINDS, "units")]:
        raise UsageError("unknown kind of units", expected=", ".join((*KINDS, "units")), got=", ".join(unknown))
    inside = selected_nodes(p, "**" if where is None else where)
    protected = selected_nodes(p, protect) if protect else set()
    found, refused = [], []
    axes, moving = p.axes(), input_dependent(p)
    for group in axes.values():
        made = {m.value.node for m in group.members if m.key is not None and p.op(m.value.node) == PARAM
                and not any(axes.summed.get((m.value.node, m.dim, a)) for a in group.atoms)}  # fmt: skip
        if not made & inside or made & protected or not set(kinds) & set(group.kinds) or group.size < 2:
            continue
        axis = prunable_axis(group, moving)
        if axis is None:
            refused.append(f"{group.name}: {refusal(group)}")
        else:
            found.append(axis)
    if not found:
        if not refused:  # axes along which a weight is read too, as that of a recurrent state is
            there = [
                g for g in axes.values() if set(kinds) & set(g.kinds) and {m.value.node for m in g.members} & inside
            ]
            refused = [f"{g.name}: {refusal(g)}" for g in there if g.frozen]
        raise NothingToPrune(f"no selected axis of kind {', '.join(kinds)} can be pruned",
                             where=where if isinstance(where, str) else p.name, fix="list axes: print(program.axes())",
                             got="; ".join(refused[:4]) or "no axis of these kinds")  # fmt: skip
    return sorted(found, key=lambda a: axes.rank[a.start])


def prunable_axis(group: AxisGroup, moving: Collection[NodeId] | None = None) -> PrunableAxis | None:
    """Return the axis and the linear maps that sum over it; None if not prunable. `moving`: input-dependent nodes."""
    if group.frozen or not group.exact:
        return None
    p, notes = group.axes.program, [note for a in group.atoms if (note := group.axes.solution.notes.get(a)) is not None]
    sums = {node: _consumer(p, group, node, ends) for note in notes for node, ends in note.summed}
    consumers = [c for c in sums.values() if c is not None]
    if not sums or len(consumers) < len(sums):
        return None
    moving = input_dependent(p) if moving is None else moving
    nodes = [m.value.node for m in group.members if m.value.node in moving]
    return PrunableAxis(group, tuple(consumers), min(nodes, key=group.axes.rank.__getitem__)) if nodes else None


def refusal(group: AxisGroup) -> str:
    """Return the reason why an axis cannot be pruned, as text."""
    return (*group.frozen, *group.mixed, "an op other than a trained linear map sums over it")[0]


def check_finite(p: Program, axes: Iterable[PrunableAxis]) -> None:
    """Check all weights that have one of the given axes. Raises: NonFiniteWeight for NaN or infinity."""
    for key in dict.fromkeys(m.key for a in axes for m in a.group.members if m.key is not None):
        array = p.weights.array(key)
        if array.dtype.is_float:
            finite(as_float(array), key)


SHORTLIST = 8
"""Number of branches whose loss is measured in each round; the others change the residual stream more."""


@dataclass(frozen=True, slots=True)
class ResidualBranch:
    """A branch into a junction, named by the source and target of its last edge.

    Attributes:
        kind: `attention` if the branch contains attention, else `mlp`.
        edge: the last edge of the branch, into the junction.
        nodes: nodes that no output needs once the edge is cut.
        start: the first of `nodes` that depends on an input.
    """

    name: str
    kind: str
    edge: EdgeId
    nodes: frozenset[NodeId]
    start: NodeId


def residual_branches(p: Program, inside: Collection[NodeId] | None = None) -> list[ResidualBranch]:
    """Return, in topological order, the branches with trained weights and only nodes of `inside` (None: any nodes)."""
    needed, moving, found = p.reachable(p.outputs()), input_dependent(p), []
    rank = {n: i for i, n in enumerate(p.order())}
    for edge in (e for n in p.junctions() if n in needed and p.graph.in_degree(n) > 1 for e in p.in_edges(n)):
        nodes = _only_through(p, edge, needed)
        computed = [n for n in nodes if n in moving]
        if computed and any(p.op(n) == PARAM for n in nodes) and (inside is None or nodes <= set(inside)):
            kind = "attention" if any(traits(p.op(n)).attention for n in nodes) else "mlp"
            start = min(computed, key=rank.__getitem__)
            found.append(ResidualBranch(p.path(edge), kind, edge, frozenset(nodes), start))
    return found


def remove_branch(e: Transaction, branch: ResidualBranch) -> None:
    """Cut a branch off its junction and remove its nodes."""
    e.cut(branch.edge)
    e.remove(sorted(branch.nodes, key=e.program.order_labels.key, reverse=True))


def cheapest(
    p: Program, candidates: Sequence[ResidualBranch], stream: Stream, reference: Sequence[np.ndarray] | None = None
) -> tuple[ResidualBranch, float]:
    """Return the branch whose removal leaves the smallest loss on the data of `stream`, and that loss.

    The loss is nats per token, or the drift from the outputs `reference`. Of more than 8 candidates, only the 8 that
    rotate the residual stream least (1 - mean cos(before, after)) are measured.
    """
    walk = stream.of(p)
    if len(candidates) > SHORTLIST:
        angles = rotation(p, candidates, stream.of(p))
        candidates = sorted(candidates, key=lambda b: angles[b])[:SHORTLIST]
    best: tuple[ResidualBranch, float] | None = None
    for branch in sorted(candidates, key=lambda b: p.order_labels.key(b.start)):
        walk.advance(branch.start)
        without = p.fork()
        with without.edit("measure without it", author="pass", tool="prune") as e:
            e.cut(branch.edge)
        found = stream.of(without)
        found.live = walk.live
        value = loss(found, reference)
        if best is None or value < best[1]:
            best = branch, value
    assert best is not None
    return best


def rotation(p: Program, candidates: Sequence[ResidualBranch], stream: Stream) -> dict[ResidualBranch, float]:
    """Map each branch to 1 - mean cosine, over `stream`, of its junction's value with and without the branch."""
    found: dict[ResidualBranch, float] = {}
    for branch in sorted(candidates, key=lambda b: p.order_labels.key(b.start)):
        stream.advance(branch.start)
        whole, part = Value(p.graph.target(branch.edge)), p.edge_value(branch.edge)
        total = rows = 0.0
        for cosines, count in stream.each(_cosines, [whole, part]):
            total, rows = total + cosines, rows + count
        found[branch] = 1 - total / max(rows, 1)
    return found


def _cosines(feeds: Mapping[str, np.ndarray], found: Sequence[NDArray]) -> tuple[float, int]:
    """Return Σ cos(value, value without a summand) over the rows of a chunk, and their number."""
    after, added = (a.reshape(-1, a.shape[-1]) for a in (array.to_numpy("float32") for array in found))
    before = after - added
    norms = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
    return float(((before * after).sum(axis=1) / np.maximum(norms, 1e-30)).sum()), len(before)


def _only_through(p: Program, edge: EdgeId, needed: Collection[NodeId]) -> set[NodeId]:
    """Return the nodes, among the `needed` ones, that reach an output only through the given edge."""
    others = flood(
        (v.node for v in p.outputs()), lambda n: [p.graph.source(e) for e in p.graph.in_edges(n) if e != edge]
    )
    return {n for n in set(needed).difference(others) if p.op(n) != INPUT}
