"""Mutations of single links and neurons on any Program. A link is a value times one weight, added to a junction.

A closed link keeps its nodes and its weight, but has no edge into the junction. A neuron is a junction `n<k>.sum` and
an activation `n<k>.out` with links `n<k>.l<i>`, so a program of such neurons can be read as a genome.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.evolve.mutations.registry import mutation, remove_unread_states
from graphwright.program.kinds import STORED

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program import Program, Transaction

_NAME = re.compile(r"^(.*)\.l(\d+)$")


def links(p: Program) -> list[NodeId]:
    """All links, open and closed."""
    return [n for n in p.of_kind("mul") if _NAME.match(p.path(n)) and not p.spec(p.operands(n)[1]).shape]


def open_links(p: Program) -> list[NodeId]:
    """The links that a junction reads."""
    return [n for n in links(p) if p.consumers(n)]


def junctions(p: Program) -> list[NodeId]:
    """All junctions."""
    return [n for n in p.nodes() if p.is_junction(n)]


@mutation("split_link", sites=open_links, weight=0.03)
def split_link(e: Transaction, site: Any, rng: np.random.Generator, activation: str = "tanh") -> None:
    """Split a link by a neuron with incoming weight 1 and outgoing weight of the link, which is closed.

    If the link has a delay, the neuron reads the delayed value.
    """
    p = e.program
    link = _link(p, site)
    total, weight = target(p, link), p.weights.array(p.key(p.operands(link)[1].node)).to_numpy()
    source = p.operands(link)[0]
    _close(e, link)
    base = f"n{_free_neuron(p)}"
    # an edge that is removed again gives the junction its spec
    inner = e.add("junction", source, name=f"{base}.sum")
    e.cut(p.in_edges(inner)[0])
    out = e.add(activation, inner, name=f"{base}.out")
    open_link(e, new_link(e, source, inner, 1.0), inner)
    open_link(e, new_link(e, out, total, float(weight)), total)


@mutation("add_link", sites=junctions, weight=0.05)
def add_link(e: Transaction, site: Any, rng: np.random.Generator, source: Any = None, weight: float = 0.0) -> None:
    """Add a link from an earlier value of the same shape into a junction; with weight 0 the function stays."""
    p = e.program
    total = p.node(site)
    if not p.is_junction(total):
        raise UsageError("a link must end at a junction", where=p.path(total), got=p.op(total))
    if source is None:
        there = links(p)
        linked = {p.operands(n)[0].node for n in there if target(p, n) == total}
        taken = {*there, *linked, *p.producers(total), *_after(p, total)}
        values = [n for n in values_like(p, total) if n not in taken]
        if not values:
            raise UsageError("all earlier values of this shape have a link", where=p.path(total), got=p.spec(total))
        source = values[int(rng.integers(len(values)))]
    open_link(e, new_link(e, p.value(source), total, float(weight)), total)


@mutation("toggle_link", sites=links, weight=0.0)
def toggle_link(e: Transaction, site: Any, rng: np.random.Generator) -> None:
    """Close an open link, or open a closed one."""
    link = _link(e.program, site)
    if e.program.consumers(link):
        _close(e, link)
    else:
        open_link(e, link, target(e.program, link))


@mutation("remove_link", sites=links, weight=0.0)
def remove_link(e: Transaction, site: Any, rng: np.random.Generator) -> None:
    """Remove a link, with a state without readers and a neuron without other links."""
    p = e.program
    link = _link(p, site)
    total, weight, source = target(p, link), p.operands(link)[1].node, p.operands(link)[0].node
    _close(e, link)
    e.remove([link, *([] if len(p.consumers(weight)) > 1 else [weight])])
    source = remove_unread_states(e, source)
    for base in {_neuron(p, n): None for n in (total, source)}:
        if base is not None:
            _drop_lone(e, base)


# -- parts -------------------------------------------------------------------------------------------------------------
def _neuron(p: Program, node: NodeId) -> str | None:
    """The neuron of a node, `n<k>`; None outside of neurons."""
    base = p.path(node).partition(".")[0]
    total = p.select(f"{base}.sum")
    return base if total.count and p.is_junction(p.node(f"{base}.sum")) else None


def _drop_lone(e: Transaction, base: str) -> None:
    """Remove a neuron that has no links and is no output."""
    p = e.program
    own = [n for n in p.nodes() if p.path(n).startswith(f"{base}.")]
    ends = {v.node for v in p.outputs()}
    if not any(_NAME.match(p.path(n)) or n in ends or not set(p.consumers(n)) <= set(own) for n in own):
        e.remove(own)


def values_like(p: Program, like: NodeId) -> list[NodeId]:
    """The computed values with the spec of a node."""
    return [n for n in p.order() if p.op(n) not in STORED and p.specs(n)[:1] == (p.spec(like),)]


def _after(p: Program, node: NodeId) -> set[NodeId]:
    """The node and all its descendants."""
    seen, todo = {node}, [node]
    while todo:
        for reader in p.consumers(todo.pop()):
            if reader not in seen:
                seen.add(reader)
                todo.append(reader)
    return seen


def _link(p: Program, site: Any) -> NodeId:
    node = p.node(site)
    if node not in links(p):
        raise UsageError(
            "this is not a link, a value times one weight into a junction", where=p.path(node), got=p.op(node)
        )
    return node


def target(p: Program, link: NodeId) -> NodeId:
    """The junction of a link, also of a closed one."""
    readers = p.consumers(link)
    if readers:
        return readers[0]
    found = _NAME.match(p.path(link))
    assert found is not None
    for name in (f"{found[1]}.sum", found[1]):
        if p.select(name).count:
            return p.node(name)
    raise UsageError(
        "the junction of a closed link no longer exists", where=p.path(link), expected=f"{found[1]} or .sum"
    )


def new_link(e: Transaction, source: Any, total: NodeId, weight: float) -> NodeId:
    """Add a closed link."""
    p = e.program
    used = [int(found[2]) for n in p.of_kind("mul") if (found := _NAME.match(p.path(n)))]
    name = f"{p.path(total).removesuffix('.sum')}.l{max(used, default=-1) + 1}"
    return e.add("mul", source, e.param(f"{name}.weight", np.asarray(weight, p.spec(source).dtype.numpy)), name=name)


def open_link(e: Transaction, link: NodeId, total: NodeId) -> None:
    """Open a link. Its port at a neuron is its number, which fixes the order of sums."""
    found = _NAME.match(e.program.path(link))
    assert found is not None
    e.connect(link, total, port=int(found[2]) if e.program.path(total).endswith(".sum") else None)


def _close(e: Transaction, link: NodeId) -> None:
    for edge in e.program.out_edges(link):
        e.cut(edge)


def _free_neuron(p: Program) -> int:
    heads = (p.path(n).partition(".")[0] for n in p.nodes())
    return max((int(h[1:]) for h in heads if h[0] == "n" and h[1:].isdigit()), default=-1) + 1
