"""Edits of experts: add, clone, split, merge, freeze, and how many of them a token uses.

Each takes an open edit `e`, as the methods of a transaction do, so that several make one journal entry. Experts are cut
by `e.cut_units` and reordered by `e.permute`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import NDArray
from graphwright.array.dtype import bool_
from graphwright.errors import UsageError
from graphwright.experts.routed import RoutedLayer, chosen_layers, routed_layer
from graphwright.experts.selection import TooFewExperts, check_left, least
from graphwright.experts.usage import Usage
from graphwright.graph import NodeId
from graphwright.ops import get
from graphwright.ops.axes import resolve
from graphwright.ops.experts import Expert
from graphwright.program.axes.resize import resize_units
from graphwright.program.axes.solve_axes import origin
from graphwright.program.kinds import PARAM, STORED
from graphwright.program.op_graph import Value
from graphwright.program.weights import as_array, shared_variable
from graphwright.surgery.errors import check_choices

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphwright.program.editing.transaction import Transaction

BIRTHS = ("gate", "open", "closed")


def _expert_in(layer: RoutedLayer, i: int) -> int:
    if isinstance(i, bool) or not isinstance(i, int | np.integer) or not -layer.size <= i < layer.size:
        raise UsageError("no expert has this number", where=layer.name, expected=f"0 to {layer.size - 1}", got=i)
    return int(i) % layer.size


def add(e: Transaction, layer: str, like: int | None = None, *, birth: str = "gate", seed: int = 0) -> int:
    """Add an expert to a routed layer; return its number, the last.

    Args:
        e: the open edit.
        layer: name of the layer, such as `layers.3.mlp`.
        like: number of the expert whose weights and router row are copied; by default all are drawn with the standard
            deviations of those of the present experts.
        birth: "gate": its gate is 0, so that results do not change; gates of the kind `scale` are put on all
            experts of the layer. A threshold router runs the expert at weight 0, so that its gate opens by gradient.
            A top-k router does not choose it until its gate is set: its results do not depend on the gate near 0,
            except that weights which are not normalised are shares of a sum with this expert. "open": it takes tokens
            at once, which changes results. "closed": not alive, for routers that know dead experts.
        seed: seed of the random numbers.
    Raises: NotAMixture; UsageError, for "closed" if the router has no `alive`.
    """
    check_choices({"birth": birth}, {"birth": BIRTHS})
    p, found = e.program, routed_layer(e.program, layer)
    copied = None if like is None else _expert_in(found, like)
    rng, alive = np.random.default_rng([seed, found.size]), _alive(found)
    if birth == "closed" and alive is None:
        raise UsageError("the router of this layer knows no dead experts", where=layer, expected="gate or open",
                         got=birth)  # fmt: skip

    def row(key: str, array: NDArray, maps: Mapping[int, np.ndarray]) -> np.ndarray:
        old = array.to_numpy("float64" if array.dtype.is_float else None)
        made = np.zeros([len(maps[d]) if d in maps else n for d, n in enumerate(old.shape)], old.dtype)
        if old.dtype == np.bool_:
            made[...] = birth != "closed"
        elif copied is not None:
            made[...] = np.take(old, [copied], axis=next(iter(maps)))
        else:
            made[...] = rng.normal(0.0, old.std() or 1.0, made.shape)
        return made

    number = _free_number(found)

    def operands(node: NodeId, unit: int) -> list[Value]:
        return [_new_operand(e, found, v, copied, number, rng) for v in _group(found, node, copied or 0)]

    resize_units(e, p.axes(), {found.axis.name: [*range(found.size), -1]}, new=row, operands=operands)
    if birth == "gate":
        units = e.program.axes()[found.axis.name].units()
        e.gate(units, "scale", init=[1.0] * found.size + [0.0])
    return found.size


def clone(e: Transaction, layer: str, i: int, *, birth: str = "open") -> int:
    """Add a copy of expert `i`, router row included; return its number.

    A copy competes with the original for the k experts of a token: results change for k > 1, and for weights that are
    not divided by their sum.
    """
    return add(e, layer, i, birth=birth)


def split(
    e: Transaction, layer: str, i: int, *, tokens: np.ndarray | None = None, distance: float = 1e-3, seed: int = 0
) -> int:
    """Replace an expert by two copies whose router rows are r ± δ, ‖δ‖ = distance · ‖r‖; return the second's number.

    δ is the direction from one centre to the other of a division of the expert's tokens by 2-means, so each copy gets a
    part of them. With one expert per token and weights divided by their sum, results change only for tokens that
    choose another expert by less than |δ·x|.

    Args:
        e, layer, i: as in `add`.
        tokens: the expert's tokens [n, C], from `expert_tokens`; by default δ is random.
        distance: relative size of δ.
        seed: seed of the random numbers.
    """
    found = routed_layer(e.program, layer)
    first = _expert_in(found, i)
    if found.router is None:
        raise UsageError("the router of this layer has no matrix", where=layer, fix="use add, and set the prototypes")
    rng = np.random.default_rng(seed)
    rows = e.program.weights.array(e.program.key(found.router)).to_numpy("float64")
    axis = rng.normal(size=rows.shape[1]) if tokens is None else _parting(np.asarray(tokens, np.float64), rng)
    delta = axis / np.linalg.norm(axis) * (np.linalg.norm(rows[first]) * distance)
    second = add(e, layer, first, birth="open")

    def apart(matrix: np.ndarray) -> np.ndarray:
        wide = matrix.astype(np.float64)
        wide[first], wide[second] = rows[first] + delta, rows[first] - delta
        return wide

    e.set_weight(found.router, apart)
    return second


def merge(
    e: Transaction, layer: str, ids: Sequence[int], *, by: Usage | None = None,
    share: Sequence[float] | np.ndarray | None = None, align: bool = True,
) -> int:  # fmt: skip
    """Merge experts into the first of `ids` and cut the others; return the number of the merged expert.

    Weights and router rows are averaged, by the numbers of tokens in `by` or by `share`, one number per expert; else
    equally. With `align`, the neurons of each expert are first matched to those of the first: by the assignment with
    the largest sum of inner products of their weights (Singh and Jaggi 2020; Li et al. 2024, M-SMoE).

    Raises: UsageError for fewer than two experts, or experts of different widths; TooFewExperts; StaleSelection if an
        expert was added after `by` was measured.
    """
    p, found = e.program, routed_layer(e.program, layer)
    chosen = list(dict.fromkeys(_expert_in(found, i) for i in ids))
    if len(chosen) < 2:
        raise UsageError("a merge needs two experts or more", where=layer, got=list(ids))
    widths = {found.program.spec(found.experts[i].up).shape for i in chosen}
    if len(widths) > 1:
        raise UsageError("experts of different widths cannot be merged", where=layer, expected="one width",
                         got=[w[0] for w in widths])  # fmt: skip
    check_left(found, found.size - len(chosen) + 1)
    counts = np.ones(len(chosen)) if share is None else np.asarray(share)
    if by is not None:
        counts = by[layer].now(found)[chosen]
    part = (counts + 1e-9) / (counts + 1e-9).sum()
    groups = [[_matrix(found, v) for v in found.experts[i]] for i in chosen]
    if align:
        groups = [groups[0], *(_aligned(group, groups[0]) for group in groups[1:])]
    for v, column in zip(found.experts[chosen[0]], zip(*groups, strict=True), strict=True):
        if v is not None:
            e.set_weight(_stored(found, v), sum(s * array for s, array in zip(part, column, strict=True)))
    for node in _others(found):
        for column in zip(*(_group(found, node, i) for i in chosen), strict=True):
            arrays = [_matrix(found, v) for v in column]
            e.set_weight(_stored(found, column[0]), sum(s * a for s, a in zip(part, arrays, strict=True)))
    for key, dim in _rows(found):

        def mixed(matrix: np.ndarray, dim: int = dim) -> np.ndarray:
            wide = np.moveaxis(matrix.astype(np.float64), dim, 0).copy()
            wide[chosen[0]] = np.tensordot(part, wide[chosen], axes=1)
            return np.moveaxis(wide, 0, dim)

        e.set_weight(key, mixed)
    gone = sorted(chosen[1:])
    e.cut_units(p.axes()[found.axis.name].units(gone))
    return chosen[0] - sum(i < chosen[0] for i in gone)


def freeze(e: Transaction, layer: str, ids: Iterable[int], frozen: bool = True) -> None:
    """Take the weights of experts out of training, or with `frozen=False` back into it."""
    found = routed_layer(e.program, layer)
    for i in ids:
        for node in found.params(_expert_in(found, i)):
            e.set_attr(node, trainable=not frozen)


def set_k(e: Transaction, layers: str | Iterable[str], k: int) -> None:
    """Set how many experts each token uses, in layers whose router takes the k best. Raises: TooFewExperts."""
    for found in chosen_layers(e.program, layers):
        node = found.best
        if node is None:
            raise UsageError("the router decides how many experts a token uses", where=found.name)
        if type(k) is not int or not 1 <= k <= found.size:
            raise TooFewExperts("a token cannot use this many experts", where=found.name,
                                expected=f"1 to {found.size}", got=k)  # fmt: skip
        e.set_attr(node, k=k)


def level(e: Transaction, n: int, by: Usage, *, figure: str = "share") -> None:
    """Cut experts so that every routed layer has `n`: those with the least figure of a usage. Raises: TooFewExperts."""
    for found in chosen_layers(e.program, "all"):
        if found.size < n:
            raise TooFewExperts("a layer has fewer experts", where=found.name, expected=n, got=found.size)
        if found.size > n:
            scored = {found.name: by.scores(figure)[found.name]}
            e.cut_units(least(e.program, scored, found.size - n))


# -- parts of a layer --------------------------------------------------------------------------------------------------
def _stored(layer: RoutedLayer, value: Value) -> NodeId:
    node = origin(layer.program, value)
    if node is None:
        raise UsageError("an operand of an expert is computed, not a weight", where=layer.program.path(value))
    return node


def _matrix(layer: RoutedLayer, value: Value | None) -> np.ndarray | None:
    p = layer.program
    return None if value is None else p.weights.array(p.key(_stored(layer, value))).to_numpy("float64")


def _group(layer: RoutedLayer, node: NodeId, expert: int) -> list[Value]:
    """Return the operands of one expert at a node that counts experts by operands."""
    p = layer.program
    groups: Any = get(p.op(node)).groups
    first, width = groups(p.attrs(node))
    return p.operands(node)[first + expert * width :][:width]


def _others(layer: RoutedLayer) -> list[NodeId]:
    """Return the other nodes that count the experts of a layer by operands, such as the prototypes of a router."""
    axes = layer.axis.axes
    return [g.node for g in axes.solution.groups if (resolve(g.axis),) == layer.axis.atoms and g.node != layer.node]


def _rows(layer: RoutedLayer) -> list[tuple[str, int]]:
    """Return (key, dimension) of the floating params with an entry per expert: matrix and bias of a router."""
    p = layer.program
    found = [m for m in layer.axis.members if m.key is not None and p.op(m.value.node) == PARAM]
    return [(m.key, m.dim) for m in found if m.key is not None and p.spec(m.value.node).dtype.is_float]


def _alive(layer: RoutedLayer) -> NodeId | None:
    """Return the stored mask that tells which experts are alive, of routers that know dead ones."""
    p = layer.program
    found = (m.value.node for m in layer.axis.members if p.op(m.value.node) in STORED)
    return next((n for n in found if p.spec(n).dtype is bool_), None)


def _number(path: str) -> int | None:
    """Return the last component of a path that is a number: that of the expert in `experts.7.gate.weight`."""
    return next((int(part) for part in reversed(path.split(".")) if part.isdecimal()), None)


def _renumbered(path: str, number: int) -> str:
    parts = path.split(".")
    at = next((i for i in reversed(range(len(parts))) if parts[i].isdecimal()), None)
    return f"{path}.{number}" if at is None else ".".join([*parts[:at], str(number), *parts[at + 1 :]])


def _free_number(layer: RoutedLayer) -> int:
    p = layer.program
    found = (_number(p.path(n)) for i in range(layer.size) for n in layer.params(i))
    return 1 + max((n for n in found if n is not None), default=layer.size - 1)


def _new_operand(
    e: Transaction, layer: RoutedLayer, value: Value, copied: int | None, number: int, rng: np.random.Generator
) -> Value:
    """Add a weight like that of an operand, and the casts between them; return the new operand."""
    p, node = e.program, value.node
    name = p.free_name(_renumbered(p.path(node), number))
    if p.op(node) not in STORED:  # a cast
        inner = _new_operand(e, layer, p.operands(node)[0], copied, number, rng)
        return Value(e.add_op(p.op(node), [inner], p.attrs(node), name))
    key = p.weights.free_key(_renumbered(p.key(node), number))
    variable = p.weights[p.key(node)]
    if copied is not None:
        made = shared_variable(variable, type(variable), key)
    else:
        old = variable.data.to_numpy("float64")
        made = type(variable)(as_array(rng.normal(0.0, old.std() or 0.02, old.shape), variable.dtype), True, key)
    attrs = {**{k: v for k, v in p.attrs(node).items() if k != "axes"}, "key": key}
    return Value(e.add_node(p.op(node), attrs, name, p.specs(node), made, after=node))


# -- arithmetic --------------------------------------------------------------------------------------------------------
_EXACT = 2048
"""Neurons up to which the assignment is optimal; above it is greedy."""


def _aligned(group: list[Any], reference: list[Any]) -> list[Any]:
    """Permute the neurons of an expert to match those of another one."""
    from scipy.optimize import linear_sum_assignment

    mine, other = Expert(*group), Expert(*reference)
    similar = mine.up @ other.up.T + mine.down.T @ other.down
    if mine.gate is not None:
        similar = similar + mine.gate @ other.gate.T
    if len(similar) <= _EXACT:
        rows, columns = linear_sum_assignment(similar, maximize=True)
        order = rows[np.argsort(columns)]
    else:
        order, free = np.empty(len(similar), np.int64), np.ones(len(similar), bool)
        for column in np.argsort(-similar.max(axis=0)):
            best = int(np.argmax(np.where(free, similar[:, column], -np.inf)))
            order[column], free[best] = best, False
    moved = mine._replace(up=mine.up[order], down=mine.down[:, order])
    rows = {n: getattr(mine, n)[order] for n in ("gate", "gate_bias", "up_bias") if getattr(mine, n) is not None}
    return [*moved._replace(**rows)]


def _parting(tokens: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the difference of the centres of a division of rows [n, C] into two by 2-means (Lloyd 1982)."""
    if len(tokens) < 2:
        return rng.normal(size=tokens.shape[1])
    centre = tokens.mean(axis=0)
    first = tokens[np.argmax(((tokens - centre) ** 2).sum(axis=1))]
    second = tokens[np.argmax(((tokens - first) ** 2).sum(axis=1))]
    for _ in range(20):
        near = ((tokens - first) ** 2).sum(axis=1) <= ((tokens - second) ** 2).sum(axis=1)
        if near.all() or not near.any():
            break
        first, second = tokens[near].mean(axis=0), tokens[~near].mean(axis=0)
    return first - second if (first != second).any() else rng.normal(size=tokens.shape[1])
