"""Delay links, which carry the value of the previous step: by a state, or by a shift along the axis of steps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.evolve.mutations.layers import output_sum, readers_of_before, remove_layer, weight_of
from graphwright.evolve.mutations.links import links, new_link, open_link, remove_link, target, values_like
from graphwright.evolve.mutations.registry import free_part, in_cell, mutation, over_time
from graphwright.ops import traits
from graphwright.program.kinds import ASSIGN, STORED

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program import Program, Transaction


_NEURON = r"n\d+"  # the head of n5.out and n0.x0: a genome names a state by its neuron alone


def delayed(p: Program) -> list[NodeId]:
    """The links from a state, and the matrices that read the previous step."""
    held = [n for n in links(p) if p.op(p.operands(n)[0].node) == "state"]
    return held + readers_of_before(p)


@mutation("add_delay_link", sites=over_time, weight=0.08, refine=0.06, adds=True)
def add_delay_link(
    e: Transaction, site: Any, rng: np.random.Generator, source: Any = None, weight: float = 0.0,
    block: str | None = None,
) -> None:  # fmt: skip
    """Add a link that carries the value of the previous step, 0 before the first one.

    At a linear layer over [batch, steps, units] it is a matrix, `weight` in all entries, from an earlier value of any
    width: a part of its own, as with `add_skip`. At a junction, where each run of the program is one step, it is one
    weight on a state; each value has at most one state, and may depend on the junction.
    """
    p = e.program
    node = p.node(site)
    if p.is_junction(node):
        _from_state(e, node, rng, source, weight)
    elif node in over_time(p):
        _along_time(e, node, rng, source, weight, block or free_part(p))
    else:
        raise UsageError("a delay link cannot end here", where=p.path(node), got=p.op(node),
                         expected="a junction, or a linear layer on [batch, steps, units]")  # fmt: skip


@mutation("remove_delay_link", sites=delayed, weight=0.04)
def remove_delay_link(e: Transaction, site: Any, rng: np.random.Generator) -> None:
    """Remove a delay link; a state or neuron is removed with its last link."""
    p = e.program
    node = p.node(site)
    if node not in delayed(p):
        raise UsageError("this is not a delay link", where=p.path(node), got=p.op(node),
                         expected=", ".join(map(p.path, delayed(p))) or "one that `add_delay_link` added")  # fmt: skip
    if traits(p.op(node)).multiplies:
        remove_link(e, node, rng)
    else:
        remove_layer(e, node, rng)


def _from_state(e: Transaction, total: NodeId, rng: np.random.Generator, source: Any, weight: float) -> None:
    p = e.program
    if p.spec(total).symbolic:
        raise UsageError("a state needs a fixed batch size", where=p.path(total),
                         expected="no symbolic sizes", got=p.spec(total),
                         fix="a program of a fixed batch: founder(genome, batch=1), or retrace with one")  # fmt: skip
    if source is None:
        linked = {_source(p, n) for n in delayed(p) if traits(p.op(n)).multiplies and target(p, n) == total}
        taken = {*links(p), *linked}
        values = [n for n in values_like(p, total) if n not in taken]
        if not values:
            raise UsageError("all values of this shape have a delay link", where=p.path(total), got=p.spec(total))
        source = values[int(rng.integers(len(values)))]
    value = p.value(source)
    path = p.path(value.node)
    head = path.partition(".")[0]
    name = f"{head if re.fullmatch(_NEURON, head) else path}.before1"
    if p.select(name).count:
        held = p.node(name)
    else:
        held = e.state(name, np.zeros([int(d) for d in e.spec(value).shape], e.spec(value).dtype.numpy))
        e.assign(held, value)
    open_link(e, new_link(e, p.value(held), total, weight), total)


def _source(p: Program, link: NodeId) -> NodeId:
    """The node with the value that a delay link carries."""
    held = p.operands(link)[0].node
    (write,) = (w for w in p.consumers(held) if p.op(w) == ASSIGN)
    return p.operands(write)[1].node


def _along_time(
    e: Transaction, node: NodeId, rng: np.random.Generator, source: Any, weight: float, base: str
) -> None:  # fmt: skip
    p = e.program
    lead, steps = p.spec(node).shape[:2], int(p.spec(node).shape[1])
    if steps < 2:
        raise UsageError(
            "the sequence has one step", where=p.path(node), expected="two steps or more", got=p.spec(node)
        )
    total, old = output_sum(e, node), weight_of(p, node)
    if source is None:
        before = p.reachable([node]) - {node}
        values = [n for n in p.order() if n in before and p.op(n) not in STORED and not in_cell(p, n)]
        values = [n for n in values if len(p.specs(n)[0].shape) == 3 and p.specs(n)[0].shape[:2] == lead]
        if not values:
            raise UsageError("no earlier value over time", where=p.path(node), expected=f"a value {lead} + units")
        source = values[int(rng.integers(len(values)))]
    first = e.add("slice", source, name=f"{base}.first", axis=1, start=0, size=1)
    nothing = e.add("full_like", first, name=f"{base}.nothing", value=0.0)
    past = e.add("slice", source, name=f"{base}.past", axis=1, start=0, size=steps - 1)
    held = e.add("concat", nothing, past, name=f"{base}.before", axis=1)
    matrix = np.full((old.shape[0], int(e.spec(source).shape[2])), weight, old.dtype)
    e.connect(e.add("linear", held, e.param(f"{base}.to.weight", matrix), name=f"{base}.to"), total)
