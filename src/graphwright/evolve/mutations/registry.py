"""The table of mutations: where each may be made, how, and how often it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program import Program

Site = Any
"""A node, or the name of an axis."""
Mutation = Callable[..., Any]
"""m(e, site, rng, **attributes) on an open edit; raises UsageError where it cannot be made."""
M = TypeVar("M", bound=Mutation)


@dataclass(frozen=True, slots=True)
class Kind:
    """A mutation as evolution draws it.

    Attributes:
        name: of the mutation; sites: where it may be made; apply: the mutation.
        explore, refine: how often it is drawn, early and late in a run, beside the others that can be made; 0 is never.
        adds: it adds a part, whose nodes are named `b<number>....`; `block=` says which number.
        structural: it changes the structure; others are not drawn while a run gains nothing.
    """

    name: str
    sites: Callable[[Program], Sequence[Site]]
    apply: Mutation
    explore: float
    refine: float
    adds: bool = False
    structural: bool = True


MUTATIONS: dict[str, Kind] = {}


def mutation(
    name: str,
    *,
    sites: Callable[[Program], Sequence[Site]],
    weight: float,
    refine: float | None = None,
    adds: bool = False,
    structural: bool = True,
) -> Callable[[M], M]:
    """Register a mutation: `m(e, site, rng)` on a site that `sites(program)` lists.

    Args:
        weight: how often it is drawn, beside those of the others that can be made; `refine`, later in a run.
        adds: it takes `block=`, the name of the part it adds.
        structural: it changes the structure; False for one that is not drawn while a run gains nothing.
    """

    def enter(function: M) -> M:
        MUTATIONS[name] = Kind(name, sites, function, weight, weight if refine is None else refine, adds, structural)
        return function

    return enter


def parts(p: Program) -> set[str]:
    """Names of the parts that mutations added."""
    heads = (p.path(n).partition(".")[0] for n in p.nodes())
    return {head for head in heads if head[0] == "b" and head[1:].isdigit()}


CELLS = ("rnn", "gru", "lstm", "cfc")
"""Kinds of recurrent cells; `cfc` reads the time from `elapsed`, if that is there. Nodes are `b<number>.<kind>....`."""


def in_cell(p: Program, node: NodeId) -> bool:
    """Whether a node is a step of a cell, which has to stay like the other steps."""
    names = p.path(node).split(".")
    return len(names) > 2 and names[1] in CELLS and names[0] in parts(p)


def free_part(p: Program) -> str:
    """The name of a part that is not there yet."""
    return f"b{max((int(head[1:]) for head in parts(p)), default=0) + 1}"


def where(p: Program, site: Site) -> str:
    """A site, as text."""
    return site if isinstance(site, str) else p.path(site)


def linears(p: Program) -> list[NodeId]:
    """Linear layers whose weight nobody else reads."""
    return [n for n in p.of_kind("linear") if all(len(p.consumers(v.node)) == 1 for v in p.operands(n)[1:])]


def over_time(p: Program) -> list[NodeId]:
    """Linear layers that read sequences of a fixed size."""
    specs = {n: p.spec(p.operands(n)[0]) for n in linears(p)}
    return [n for n, spec in specs.items() if len(spec.shape) == 3 and not spec.symbolic]
