"""The table of mutations: their sites, their functions, and the weights with which they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from graphwright.files import blake2b_128
from graphwright.graph import NodeId
from graphwright.program import Program, Transaction
from graphwright.program.kinds import STATE, STORED

Site = Any
"""A node, or the name of an axis."""
Mutation = Callable[..., Any]
"""`m(e, site, rng, **attributes)` changes the program of an open edit `e`; it raises UsageError if it is impossible."""
M = TypeVar("M", bound=Mutation)


@dataclass(frozen=True, slots=True)
class MutationKind:
    """A mutation in the table.

    Attributes:
        name: name of the mutation; sites: function that returns the nodes or axes of a program to which it applies.
        apply: function that makes the mutation at one of these sites.
        explore, refine: weights with which it is drawn early and late in a run; 0 means never.
        adds: True if it adds a block of nodes named `<block>.<name>`; it then takes the argument `block`.
        structural: True if it changes the structure; other mutations are not drawn while a run stagnates.
    """

    name: str
    sites: Callable[[Program], Sequence[Site]]
    apply: Mutation
    explore: float
    refine: float
    adds: bool = False
    structural: bool = True


MUTATIONS: dict[str, MutationKind] = {}


def mutation(
    name: str, *, sites: Callable[[Program], Sequence[Site]], weight: float, refine: float | None = None,
    adds: bool = False, structural: bool = True,
) -> Callable[[M], M]:  # fmt: skip
    """Register the decorated function as a mutation: `m(e, site, rng)` on a site that `sites(program)` returns.

    Args:
        name: name of the mutation; sites: function that returns the nodes or axes of a program to which it applies.
        weight: weight with which it is drawn early in a run; `refine`: the weight late in a run, by default the same.
        adds: whether it adds a block of nodes, whose name it gets as the argument `block`.
        structural: whether it changes the structure; other mutations are not drawn while a run stagnates.
    """

    def enter(function: M) -> M:
        late = weight if refine is None else refine
        MUTATIONS[name] = MutationKind(name, sites, function, weight, late, adds, structural)
        return function

    return enter


def parts(p: Program) -> set[str]:
    """Return the names `b<number>` of the blocks that mutations added."""
    heads = (p.path(n).partition(".")[0] for n in p.nodes())
    return {head for head in heads if head[0] == "b" and head[1:].isdigit()}


def name_parts(e: Transaction, before: Collection[NodeId], named: Callable[[str, set[str]], str]) -> None:
    """Rename the blocks `b<number>` that an edit added.

    Args:
        before: nodes that existed before the edit.
        named: returns the new name of a block, given a digest of its structure and the names in use.
    """
    p = e.program
    inside = {part: [n for n in p.nodes() if p.path(n).partition(".")[0] == part] for part in sorted(parts(p))}
    made = [part for part, nodes in inside.items() if not any(n in before for n in nodes)]
    taken, given = set(inside) - set(made), dict[str, str]()
    for part in made:
        given[part] = named(_structure(p, part, inside[part]), taken)
        taken.add(given[part])
    changed = [part for part in made if given[part] != part]
    for ending in (":", ""):  # temporary names avoid collisions
        for part in changed:
            for n in inside[part]:
                path = f"{given[part]}{ending}.{p.path(n).partition('.')[2]}"
                e.rename(n, path, key=path if p.op(n) in STORED else None)


def _structure(p: Program, part: str, nodes: list[NodeId]) -> str:
    """Return a digest of the structure of block `part`: the op, producers and consumers of each of its nodes."""

    def name(n: NodeId) -> str:
        return p.path(n).removeprefix(part)

    lines = [f"{name(n)} {p.op(n)} {[*map(name, p.producers(n))]} {sorted(map(name, p.consumers(n)))}" for n in nodes]
    return blake2b_128("\n".join(sorted(lines)).encode())


CELLS = ("rnn", "gru", "lstm", "cfc")
"""Kinds of recurrent cells; their nodes are named `b<number>.<kind>....`."""


def in_cell(p: Program, node: NodeId) -> bool:
    """Return True if a node is inside an unrolled cell, whose steps must all stay equal."""
    names = p.path(node).split(".")
    return len(names) > 2 and names[1] in CELLS and names[0] in parts(p)


def earlier_values(p: Program, node: NodeId, fits: Callable[[tuple[Any, ...]], bool]) -> list[NodeId]:
    """Return the inputs and ops upstream of `node` whose result shape satisfies `fits`, except nodes inside cells."""
    before = p.reachable([node]) - {node}
    values = (n for n in p.order() if n in before and p.op(n) not in STORED and not in_cell(p, n))
    return [n for n in values if fits(p.specs(n)[0].shape)]


def free_part(p: Program) -> str:
    """Return an unused name for a block: `b` and the highest number so far plus 1."""
    return f"b{max((int(head[1:]) for head in parts(p)), default=0) + 1}"


def linears(p: Program) -> list[NodeId]:
    """Return the linear layers whose weight and bias no other node reads."""
    return [n for n in p.of_traits(contracts="out_in") if all(len(p.consumers(v.node)) == 1 for v in p.operands(n)[1:])]


def over_time(p: Program) -> list[NodeId]:
    """Return the layers of `linears` whose input is a sequence [batch, steps, units] of fixed size."""
    specs = {n: p.spec(p.operands(n)[0]) for n in linears(p)}
    return [n for n, spec in specs.items() if len(spec.shape) == 3 and not spec.symbolic]


def cut_readers(e: Transaction, node: NodeId) -> None:
    """Cut all edges that leave a node."""
    for edge in e.program.out_edges(node):
        e.cut(edge)


def state_of(e: Transaction, name: str, value: Any) -> NodeId:
    """Return the state `name`, which holds the previous step's `value` (0 before the first step); add it if missing."""
    if e.program.select(name).count:
        return e.program.node(name)
    spec = e.spec(value)
    state = e.state(name, np.zeros([int(d) for d in spec.shape], spec.dtype.numpy))
    e.assign(state, value)
    return state


def remove_unread_states(e: Transaction, node: NodeId) -> NodeId:
    """Remove the state `node` if only its assign node reads it; if it stored another state's value, repeat with that.

    Returns: the node whose value the last removed state stored, or `node` if nothing was removed.
    """
    p = e.program
    while p.op(node) == STATE and p.assigns(node) == p.consumers(node):
        (write,) = p.assigns(node)
        state, node = node, p.operands(write)[1].node
        e.remove([write, state])
    return node
