"""Mutations of single links and neurons on any Program. A link is a value times a scalar weight, added at a junction.

A closed link still has its nodes and its weight, but no edge into the junction. A neuron is a junction `n<k>.sum` and
an activation `n<k>.out` with links `n<k>.l<i>`, so a program of such neurons can be read as a genome.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.evolve.mutations import registry
from graphwright.evolve.mutations.layers import output_sum, readers_of_before, remove_layer, weight_of
from graphwright.evolve.mutations.registry import cut_readers, mutation, over_time
from graphwright.graph import NodeId
from graphwright.ops import traits
from graphwright.program import Program, Transaction
from graphwright.program.kinds import STORED

_NAME = re.compile(r"^(.*)\.l(\d+)$")


def links(p: Program) -> list[NodeId]:
    """Return the `mul` nodes of links: open links, which a junction reads, and closed links, which no node reads."""
    return [n for n in p.of_traits(multiplies=True) if _NAME.match(p.path(n)) and not p.spec(p.operands(n)[1]).shape]


def open_links(p: Program) -> list[NodeId]:
    """Return the open links: those that a junction reads."""
    return [n for n in links(p) if p.consumers(n)]


def junctions(p: Program) -> list[NodeId]:
    """Return all junctions."""
    return [n for n in p.nodes() if p.is_junction(n)]


@mutation("split_link", sites=open_links, weight=0.03)
def split_link(e: Transaction, site: Any, rng: np.random.Generator, activation: str = "tanh") -> None:
    """Close a link and add a neuron between its ends, with incoming weight 1 and the link's weight as outgoing weight.

    If the link has a delay, the new neuron reads the delayed value.
    """
    p = e.program
    link = _link(p, site)
    total, weight = target(p, link), p.weights.array(p.key(p.operands(link)[1].node)).to_numpy()
    source = p.operands(link)[0]
    cut_readers(e, link)
    base = f"n{_free_neuron(p)}"
    # the junction gets its spec from an edge, which is then removed
    inner = e.add("junction", source, name=f"{base}.sum")
    e.cut(p.in_edges(inner)[0])
    out = e.add(activation, inner, name=f"{base}.out")
    open_link(e, new_link(e, source, inner, 1.0), inner)
    open_link(e, new_link(e, out, total, float(weight)), total)


@mutation("add_link", sites=junctions, weight=0.05)
def add_link(e: Transaction, site: Any, rng: np.random.Generator, source: Any = None, weight: float = 0.0) -> None:
    """Add a link from an earlier value of the same shape into a junction; weight 0 does not change the function."""
    p = e.program
    total = p.node(site)
    if not p.is_junction(total):
        raise UsageError("a link cannot end at this node", where=p.path(total), expected="a junction", got=p.op(total))
    if source is None:
        there = links(p)
        linked = {p.operands(n)[0].node for n in there if target(p, n) == total}
        taken = {*there, *linked, *p.producers(total), *p.dependents([total])}
        source = _free_value(p, total, taken, rng, "all earlier values of this shape are linked to the junction")
    open_link(e, new_link(e, p.value(source), total, float(weight)), total)


@mutation("toggle_link", sites=links, weight=0.0)
def toggle_link(e: Transaction, site: Any, rng: np.random.Generator) -> None:
    """Cut an open link from its junction, or connect a closed link to its junction again."""
    link = _link(e.program, site)
    if e.program.consumers(link):
        cut_readers(e, link)
    else:
        open_link(e, link, target(e.program, link))


@mutation("remove_link", sites=links, weight=0.0)
def remove_link(e: Transaction, site: Any, rng: np.random.Generator) -> None:
    """Remove a link, its state if nothing else reads it, and a neuron at either end that has no other links."""
    p = e.program
    link = _link(p, site)
    total, weight, source = target(p, link), p.operands(link)[1].node, p.operands(link)[0].node
    cut_readers(e, link)
    e.remove([link, *([] if len(p.consumers(weight)) > 1 else [weight])])
    source = registry.remove_unread_states(e, source)
    for base in {p.path(n).partition(".")[0]: None for n in (total, source)}:
        _drop_lone(e, base)


# -- parts -------------------------------------------------------------------------------------------------------------
def _drop_lone(e: Transaction, base: str) -> None:
    """Remove the neuron `base`, named `n<k>`, if it has no links and is no output."""
    p = e.program
    if p.select(f"{base}.sum").count and p.is_junction(p.node(f"{base}.sum")):
        own = [n for n in p.nodes() if p.path(n).startswith(f"{base}.")]
        ends = {v.node for v in p.outputs()}
        if not any(_NAME.match(p.path(n)) or n in ends or not set(p.consumers(n)) <= set(own) for n in own):
            e.remove(own)


def _free_value(p: Program, like: NodeId, taken: set[NodeId], rng: np.random.Generator, problem: str) -> NodeId:
    """Draw an input or op with the spec of `like` that is not in `taken`. Raises: UsageError(problem) if none fits."""
    spec = (p.spec(like),)
    values = [n for n in p.order() if p.op(n) not in STORED and p.specs(n)[:1] == spec and n not in taken]
    if not values:
        raise UsageError(problem, where=p.path(like), got=p.spec(like))
    return values[int(rng.integers(len(values)))]


def _link(p: Program, site: Any) -> NodeId:
    node = p.node(site)
    if node not in links(p):
        problem = "this node is not a link, which is a value times a scalar weight"
        raise UsageError(problem, where=p.path(node), got=p.op(node))
    return node


def target(p: Program, link: NodeId) -> NodeId:
    """Return the junction that a link enters; for a closed link, the one that it entered before it was cut."""
    if readers := p.consumers(link):
        return readers[0]
    found = _NAME.match(p.path(link))
    assert found is not None
    for name in (f"{found[1]}.sum", found[1]):
        if p.select(name).count:
            return p.node(name)
    expected = f"{found[1]}.sum or {found[1]}"
    raise UsageError("the junction of a closed link no longer exists", where=p.path(link), expected=expected)


def new_link(e: Transaction, source: Any, total: NodeId, weight: float) -> NodeId:
    """Add a closed link with this weight from `source` to the junction `total`; `open_link` connects it."""
    p = e.program
    used = [int(found[2]) for n in p.of_traits(multiplies=True) if (found := _NAME.match(p.path(n)))]
    name = f"{p.path(total).removesuffix('.sum')}.l{max(used, default=-1) + 1}"
    return e.add("mul", source, e.param(f"{name}.weight", np.asarray(weight, p.spec(source).dtype.numpy)), name=name)


def open_link(e: Transaction, link: NodeId, total: NodeId) -> None:
    """Connect a link to its junction; in a neuron the port is the link's number, which fixes the order of the sum."""
    found = _NAME.match(e.program.path(link))
    assert found is not None
    e.connect(link, total, port=int(found[2]) if e.program.path(total).endswith(".sum") else None)


def _free_neuron(p: Program) -> int:
    heads = (p.path(n).partition(".")[0] for n in p.nodes())
    return max((int(h[1:]) for h in heads if h[0] == "n" and h[1:].isdigit()), default=-1) + 1


def delayed(p: Program) -> list[NodeId]:
    """Return the delay links: links from a state, and linear layers that read the previous step of a sequence."""
    held = [n for n in links(p) if p.op(p.operands(n)[0].node) == "state"]
    return held + readers_of_before(p)


@mutation("add_delay_link", sites=over_time, weight=0.08, refine=0.06, adds=True)
def add_delay_link(
    e: Transaction, site: Any, rng: np.random.Generator, source: Any = None, weight: float = 0.0,
    block: str | None = None,
) -> None:  # fmt: skip
    """Add a link that carries the value of the previous step, 0 before the first one.

    If `site` is a linear layer on [batch, steps, units], the link is a linear layer with `weight` in all entries of its
    matrix, in a block of its own. It reads an earlier value of any width, shifted by one step.
    If `site` is a junction, each run of the program is one step, and the link is one weight times a state. All links
    from one value share one state. The value may depend on the junction.
    """
    p = e.program
    node = p.node(site)
    if p.is_junction(node):
        _from_state(e, node, rng, source, weight)
    elif node in over_time(p):
        _along_time(e, node, rng, source, weight, block or registry.free_part(p))
    else:
        raise UsageError("a delay link cannot end at this node", where=p.path(node), got=p.op(node),
                         expected="a junction, or a linear layer on [batch, steps, units]")  # fmt: skip


@mutation("remove_delay_link", sites=delayed, weight=0.04)
def remove_delay_link(e: Transaction, site: Any, rng: np.random.Generator) -> None:
    """Remove a delay link, its state if nothing else reads it, and a neuron at either end that has no other links."""
    p = e.program
    node = p.node(site)
    if node not in delayed(p):
        raise UsageError("this node is not a delay link", where=p.path(node), got=p.op(node),
                         expected=", ".join(map(p.path, delayed(p))) or "a link from `add_delay_link`")  # fmt: skip
    if traits(p.op(node)).multiplies:
        remove_link(e, node, rng)
    else:
        remove_layer(e, node, rng)


def _from_state(e: Transaction, total: NodeId, rng: np.random.Generator, source: Any, weight: float) -> None:
    p = e.program
    if p.spec(total).symbolic:
        raise UsageError("cannot add a state: its batch size is not fixed", where=p.path(total),
                         expected="no named sizes", got=p.spec(total),
                         fix="founder(genome, batch=1), or trace with a fixed batch size")  # fmt: skip
    if source is None:
        linked = {_source(p, n) for n in delayed(p) if traits(p.op(n)).multiplies and target(p, n) == total}
        problem = "all values of this shape have a delay link to the junction"
        source = _free_value(p, total, {*links(p), *linked}, rng, problem)
    value = p.value(source)
    path = p.path(value.node)
    head = path.partition(".")[0]
    base = head if re.fullmatch(r"n\d+", head) else path  # a genome names the state of n5.out n5.before1
    open_link(e, new_link(e, registry.state_of(e, f"{base}.before1", value), total, weight), total)


def _source(p: Program, link: NodeId) -> NodeId:
    """Return the node whose result is stored in the state that a delay link reads."""
    held = p.operands(link)[0].node
    (write,) = p.assigns(held)
    return p.operands(write)[1].node


def _along_time(e: Transaction, node: NodeId, rng: np.random.Generator, source: Any, weight: float, base: str) -> None:
    p = e.program
    lead, steps = p.spec(node).shape[:2], int(p.spec(node).shape[1])
    if steps < 2:
        raise UsageError("the sequence is too short for a delay link", where=p.path(node),
                         expected="[batch, steps >= 2, units]", got=p.spec(node))  # fmt: skip
    total, old = output_sum(e, node), weight_of(p, node)
    if source is None:
        values = registry.earlier_values(p, node, lambda shape: len(shape) == 3 and shape[:2] == lead)
        if not values:
            raise UsageError("no node before this layer has results of equal batch size and steps",
                             where=p.path(node), expected=f"[{lead[0]}, {lead[1]}, any size]")  # fmt: skip
        source = values[int(rng.integers(len(values)))]
    first = e.add("slice", source, name=f"{base}.first", axis=1, start=0, size=1)
    nothing = e.add("full_like", first, name=f"{base}.nothing", value=0.0)
    past = e.add("slice", source, name=f"{base}.past", axis=1, start=0, size=steps - 1)
    held = e.add("concat", nothing, past, name=f"{base}.before", axis=1)
    matrix = np.full((old.shape[0], int(e.spec(source).shape[2])), weight, old.dtype)
    e.connect(e.add("linear", held, e.param(f"{base}.to.weight", matrix), name=f"{base}.to"), total)
