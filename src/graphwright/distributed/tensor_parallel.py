"""Tensor parallelism as an edit: each rank keeps some heads and neurons, and sums over ranks join the branches.

The axes that the solver finds say which rows and columns belong together: projections into the divided units lose
columns, the projection out of them loses rows, and its result, now a part of the sum, is summed over the ranks (Shoeybi
et al. 2019). Ranks may have different numbers of units. Undo gathers the units.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphwright.array.world import divide_ranks, joined, world
from graphwright.errors import UsageError, check_type
from graphwright.graph import NodeId
from graphwright.ops import get, traits
from graphwright.ops.axes import Atom, atoms, resolve
from graphwright.program.axes.divide import Share, divided, is_divided, obstacle
from graphwright.program.editing.replace import redirect
from graphwright.program.op_graph import Value
from graphwright.report import Report

if TYPE_CHECKING:
    from graphwright.program import Program, Selection
    from graphwright.program.axes.axes import Axes, AxisGroup
    from graphwright.program.editing.transaction import Transaction

_KINDS = ("heads", "kv_groups", "neurons", "queries", "experts", "channels", "channel_groups", "units")
"""Kinds of units that are divided, the most wanted first."""


@dataclass(frozen=True)
class Division(Report):
    """What `tensor_parallel` divided.

    Attributes:
        ranks: number of ranks that have a copy of the model together.
        copies: number of copies in the run.
        axes: name of each divided axis -> units of each rank.
        sums: paths of the nodes that sum over the ranks.
        whole: why other axes of the selection stay whole on every rank.
    """

    ranks: int
    copies: int
    axes: dict[str, tuple[int, ...]]
    sums: tuple[str, ...]
    whole: tuple[str, ...] = ()

    def _text(self) -> str:
        if self.ranks == 1:
            return "one rank: nothing is divided"
        more = f", {self.copies} copies" if self.copies > 1 else ""
        width = max(map(len, self.axes), default=0)
        lines = [f"{name:<{width}}  {' + '.join(map(str, units))}" for name, units in self.axes.items()]
        lines += [f"whole on every rank: {why}" for why in self.whole]
        return "\n".join([f"{len(self.axes)} axes divided among {self.ranks} ranks{more}", *(f"  {x}" for x in lines)])


def shares_of(units: int, ranks: int) -> tuple[int, ...]:
    """Return the numbers of units of each rank: equal, or one more on the first ranks."""
    return tuple(units // ranks + (r < units % ranks) for r in range(ranks))


def tensor_parallel(e: Transaction, selection: Selection, ranks: int | None = None) -> Division:
    """Divide the heads and neurons of selected layers among ranks; every rank of the run makes the same edit.

    An axis is divided if its units are independent of each other (heads of attention, or queries of a group if there
    are fewer groups than ranks, neurons of a feed-forward layer, channels between two products) and if the selection
    contains the products that sum over them. Results are those of the whole program up to the order of sums.

    Args:
        e: an edit of the program.
        selection: nodes; `p.select("layers.*")`.
        ranks: number of ranks that a copy of the model is divided among, by default all ranks of the run. With fewer,
            neighbouring ranks have a copy together, and each copy is fed its own batches. For 1 nothing is divided.
    The ranks compare `ranks`, the structure and the weights; of weights that are still in a file, the first entries.

    Raises: WrongWorld if `ranks` does not divide the number of ranks of the run, or if the run divides models
        otherwise already; ProgramsDiffer if the ranks of a copy have different programs; UsageError if no axis can be
        divided, or if the program is divided already; CollectivesDiffer, RankLost.
    """
    p = e.program
    check_type("tensor_parallel, ranks", 1 if ranks is None else ranks, int, "a number of ranks, or None")
    if is_divided(p):
        raise UsageError("the program is divided already", where="tensor_parallel", expected="a whole program",
                         fix="p.undo(), and select all layers in one division")  # fmt: skip
    wanted = joined("tensor_parallel").ranks if ranks is None else ranks
    if (group := world().group) is not None:
        group.compare("a division", calls=[f"tensor_parallel with ranks={wanted}"], label="tensor_parallel")
    count = divide_ranks(wanted).parts
    if count == 1:
        return Division(1, world().copies, {}, ())
    _compare_programs(p)
    found = p.axes()
    groups, whole = _divisible(found, set(selection.nodes), count)
    if not groups:
        got = "; ".join(whole[:3]) or "no axis whose units are independent of each other"
        raise UsageError("no axis of the selection can be divided", where="tensor_parallel", got=got,
                         expected=f"heads or neurons, at least {count} of them",
                         fix="select whole layers, or use fewer ranks")  # fmt: skip
    shares = {group.name: shares_of(group.size, count) for group in groups}
    structure = p.structure_hash()
    sums = [_join(e, node, count) for node in dict.fromkeys(n for group in groups for n in _sums(found, group))]
    e.do(divided(p, [Share(*item) for item in shares.items()], structure))  # last, so that undo begins by gathering
    return Division(count, world().copies, shares, tuple(map(p.path, sums)), tuple(whole))


def _compare_programs(p: Program) -> None:
    """Compare structure and weights with the other ranks of the copy. Raises: ProgramsDiffer, RankLost."""
    group, weights, keys = world().model, p.weights, p.weight_keys()
    if group is None:
        return
    unread = [key for key in keys if weights.unread(key)]
    anywhere = {key for row in group.exchange(json.dumps(unread), "comparison of weights") for key in json.loads(row)}
    weights.note_digests(key for key in keys if key not in anywhere and weights.known_reference(key) is None)
    values = [f"weight {key} {weights.sample(key) if key in anywhere else weights.reference(key)}" for key in keys]
    group.compare(
        "the weights of a division", programs=[f"structure {p.structure_hash()}", *values], label="tensor_parallel"
    )


def _sums(found: Axes, group: AxisGroup) -> list[NodeId]:
    """Return the nodes that sum over the units of an axis."""
    notes = found.solution.notes
    return list(dict.fromkeys(node for a in group.atoms if a in notes for node, _ in notes[a].summed))


def _weights(group: AxisGroup) -> set[str]:
    """Return the keys of the weights along an axis."""
    return {member.key for member in group.members if member.key is not None}


def _divisible(found: Axes, inside: set[NodeId], ranks: int) -> tuple[list[AxisGroup], list[str]]:
    """Return the axes to divide, which sum in different nodes, and why others that are wanted cannot be."""
    reasons, joined = dict[NodeId, str](), set[NodeId]()
    chosen: list[AxisGroup] = []
    busy = {atom for row in (*found.solution.lookups, *found.solution.groups) for atom in atoms(resolve(row.axis))}
    for together, wrong in _candidates(found):
        sums = {node for group in together for node in _sums(found, group)}
        if not inside >= sums or joined & sums:
            continue
        others = [atom for group in (*chosen, *together) for atom in group.atoms]
        if why := wrong or next(filter(None, (_whole(found, group, busy, others, ranks) for group in together)), ""):
            if any(len(_weights(group)) > 1 for group in together):  # an axis of one weight is not reported
                reasons |= {node: why for node in sums if node not in reasons}
            continue
        chosen += together
        joined |= sums
    return chosen, list(dict.fromkeys(text for node, text in reasons.items() if node not in joined))


def _whole(found: Axes, group: AxisGroup, busy: set[Atom], others: Sequence[Atom], ranks: int) -> str:
    """Return the name of an axis and why its units cannot be on several ranks; "" if they can.

    Args:
        busy: atoms that tables of indices or groups of operands count.
        others: atoms that are divided, too.
    """
    why = next(iter((*group.ends, *group.frozen, *group.mixed)), "")
    why = why or ("a table or an op counts its units by their index" if busy & {*group.atoms} else "")
    why = why or obstacle(found, group.atoms[0], others)
    why = why or (f"{group.size} units for {ranks} ranks" if group.size < ranks else "")
    return why and f"{group.name}: {why}"


def _candidates(found: Axes) -> Iterator[tuple[list[AxisGroup], str]]:
    """Yield axes whose units are summed, with those that must be divided with them, and why they cannot be, or "".

    Those with the fewest sums for a weight come first, then the most wanted kinds. All experts of a mixture are divided
    by their neurons, or none is, since its result is one sum of all of them.
    """
    p = found.program
    mixtures: dict[NodeId, list[AxisGroup]] = {}
    single = [group for group in found.values() if len(group.atoms) == 1 and _sums(found, group)]
    wanted = [group for kind in _KINDS for group in single if group.kind == kind]
    for group in sorted(wanted, key=lambda g: len(_sums(found, g)) / max(len(_weights(g)), 1)):
        sums = found.solution.notes[group.atoms[0]].summed
        inside = {node for node, _ in sums if traits(p.op(node)).mixture}
        if others := [node for node, ends in sums if not _sums_parts(p, node, ends)]:
            yield [group], f"{group.name}: {p.path(others[0])} ({p.op(others[0])}) is more than a sum over its units"
        elif not inside:
            yield [group], ""
        elif {node for node, _ in sums} == inside and len(inside) == 1:
            mixtures.setdefault(inside.pop(), []).append(group)
    for node, groups in mixtures.items():
        first, width = _experts(p, node)
        parts = {(port - first) // width for g in groups for at, ends in found.solution.notes[g.atoms[0]].summed
                 for port, _ in ends if at == node}  # fmt: skip
        if parts == {(p.edge_port(x) - first) // width for x in p.in_edges(node) if p.edge_port(x) >= first}:
            yield groups, ""


def _experts(p: Program, node: NodeId) -> tuple[int, int]:
    """Return the first operand of a mixture that belongs to an expert, and the number of operands of an expert."""
    groups = get(p.op(node)).groups
    assert groups is not None, "experts are groups of operands"
    return groups(p.attrs(node))


def _sums_parts(p: Program, node: NodeId, ends: Sequence[tuple[int, int]]) -> bool:
    """Return whether a node that sums over units is a sum of parts, one of each unit, to which at most a bias is added.

    Args:
        ends: the summed dimensions, pairs (operand, dimension).
    """
    row, summed = traits(p.op(node)), {port for port, _ in ends}
    if row.mixture:  # over operands of experts alone, not over tokens, without a bias
        return not p.attrs(node)["bias"] and min(summed) >= _experts(p, node)[0]
    if row.contracts:
        return {p.edge_port(x) for x in p.in_edges(node)} <= {0, 1, row.addend}
    return not summed.isdisjoint(row.linear_in)


def _join(e: Transaction, node: NodeId, ranks: int) -> NodeId:
    """Sum the result of a product over the ranks, before its bias is added; return the node that sums."""
    p, out = e.program, Value(node)
    addend = traits(p.op(node)).addend
    bias = next((x for x in p.in_edges(node) if p.edge_port(x) == addend), None) if addend is not None else None
    path = p.path(node)
    total = e.add("all_reduce", node, name=p.free_name(f"{path}.sum"), ranks=ranks, group="model")
    last = total
    if bias is not None:
        value = p.edge_value(bias)
        e.cut(bias)
        if traits(p.op(node)).channels_first:
            shape = (p.spec(value).shape[0], *(1 for _ in p.spec(node).shape[2:]))
            value = Value(e.add("reshape", value, name=p.free_name(f"{path}.bias_of_channels"), shape=shape))
        last = e.add("add", total, value, name=p.free_name(f"{path}.biased"))
    redirect(e, {out: Value(last)}, skip=(total,))
    return total
