"""Mutations of whole layers. Growth starts with zero outgoing weights and does not change the network's function."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from graphwright.errors import UsageError
from graphwright.evolve.mutations import registry
from graphwright.evolve.mutations.registry import in_cell, linears, mutation, parts
from graphwright.graph import NodeId
from graphwright.program import Program, Transaction, Value
from graphwright.program.editing.replace import redirect, take_over

ACTIVATIONS = ("relu", "tanh", "gelu", "silu", "sigmoid", "leaky_relu")  # by name: a menu, in the order of draws
ATTRIBUTES: dict[str, tuple[str, tuple[float, ...]]] = {  # by name: a menu, with values that suit each op
    "dropout": ("p", (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)),
    "leaky_relu": ("slope", (0.001, 0.01, 0.05, 0.1, 0.2)),
}
"""Op -> an attribute that does not affect shapes, and the values it may take."""


def branches(p: Program) -> list[NodeId]:
    """Return the last linear layer, named `b<number>.to`, of each block that a mutation added."""
    linear = p.of_traits(contracts="out_in")
    return [n for n in linear if p.path(n).partition(".")[0] in parts(p) and p.path(n).endswith(".to")]


def skips(p: Program) -> list[NodeId]:
    """Return the linear layers that `add_skip` added: added blocks that consist of one layer without bias."""
    sizes = Counter(p.path(n).partition(".")[0] for n in p.nodes())
    return [n for n in branches(p) if sizes[p.path(n).partition(".")[0]] == 2]


def readers_of_before(p: Program) -> list[NodeId]:
    """Return the linear layers that `add_delay_link` added; they read values of the previous step."""
    return [n for n in branches(p) if p.select(f"{p.path(n).removesuffix('.to')}.before").count]


def layers_added(p: Program) -> list[NodeId]:
    """Return the last linear layer of each block that a mutation added, except skips and delay links."""
    others = {*skips(p), *readers_of_before(p)}
    return [n for n in branches(p) if n not in others]


def activations(p: Program) -> list[NodeId]:
    """Return the activation nodes that are not inside a cell."""
    return [n for op in ACTIVATIONS for n in p.of_kind(op) if not in_cell(p, n)]


@mutation("insert_layer", sites=linears, weight=0.20, refine=0.06, adds=True)
def insert_layer(
    e: Transaction, site: Any, rng: np.random.Generator, width: int | None = None, activation: str | None = None,
    block: str | None = None,
) -> None:  # fmt: skip
    """Add W₂ f(W₁ x + b₁) to the result of a linear layer with input x, where W₂ = 0."""
    p = e.program
    node = p.node(site)
    total = output_sum(e, node)
    old = weight_of(p, node)
    (out, inner), kind = old.shape, old.dtype
    units = width or int(rng.choice([8, 16, 32]))
    base = block or registry.free_part(p)
    bound = 1 / np.sqrt(inner)
    w1 = e.param(f"{base}.from.weight", rng.uniform(-bound, bound, (units, inner)).astype(kind))
    b1 = e.param(f"{base}.from.bias", rng.uniform(-bound, bound, units).astype(kind))
    w2 = e.param(f"{base}.to.weight", np.zeros((out, units), kind))
    h = e.add("linear", p.operands(node)[0], w1, b1, name=f"{base}.from")
    a = e.add(activation or str(rng.choice(ACTIVATIONS[:4])), h, name=f"{base}.act")
    e.connect(e.add("linear", a, w2, name=f"{base}.to"), total)


@mutation("insert_node", sites=linears, weight=0.10, refine=0.08, adds=True)
def insert_node(
    e: Transaction, site: Any, rng: np.random.Generator, activation: str | None = None, block: str | None = None
) -> None:
    """Add one neuron in parallel to a linear layer, from all its inputs to all its outputs."""
    insert_layer(e, site, rng, 1, activation, block)


@mutation("remove_layer", sites=layers_added, weight=0.08)
def remove_layer(e: Transaction, site: Any, rng: np.random.Generator) -> None:
    """Remove the last linear layer of an added block, and all nodes that nothing else needs."""
    p = e.program
    node = p.node(site)
    if others := [p.path(n) for n in p.consumers(node) if not p.is_junction(n)]:
        raise UsageError("cannot remove this layer: nodes other than junctions read it", where=p.path(node),
                         expected="junctions", got=", ".join(others))  # fmt: skip
    roots = [*p.outputs(), *p.assigns()]
    before = p.reachable(roots)
    registry.cut_readers(e, node)
    kept = p.reachable(roots)
    e.remove([n for n in before - kept if p.op(n) != "input"])


@mutation("add_skip", sites=linears, weight=0.06, refine=0.04, adds=True)
def add_skip(e: Transaction, site: Any, rng: np.random.Generator, source: Any = None, block: str | None = None) -> None:
    """Add a linear layer with weight 0 from an earlier value [batch, ..., units] to the output of a linear layer."""
    p = e.program
    node = p.node(site)
    total = output_sum(e, node)
    lead = p.spec(node).shape[:-1]
    values = registry.earlier_values(p, node, lambda shape: shape[:-1] == lead)
    if source is None and not values:
        raise UsageError("no node before this layer has results of a suitable shape", where=p.path(node),
                         expected=f"[{', '.join(map(str, lead))}, any size]")  # fmt: skip
    src = p.node(source) if source is not None else values[int(rng.integers(len(values)))]
    base, old = block or registry.free_part(p), weight_of(p, node)
    w = e.param(f"{base}.to.weight", np.zeros((old.shape[0], int(p.spec(src).shape[-1])), old.dtype))
    e.connect(e.add("linear", src, w, name=f"{base}.to"), total)


@mutation("remove_skip", sites=skips, weight=0.04)
def remove_skip(e: Transaction, site: Any, rng: np.random.Generator) -> None:
    """Remove a linear layer that `add_skip` added."""
    remove_layer(e, site, rng)


@mutation("replace_activation", sites=activations, weight=0.04, refine=0.08)
def replace_activation(e: Transaction, site: Any, rng: np.random.Generator, activation: str | None = None) -> None:
    """Replace an activation by a different one. This changes the function of the network."""
    p = e.program
    node = p.node(site)
    others = [a for a in ACTIVATIONS if a != p.op(node)]
    name = p.free_name(f"{p.path(node)}_after")
    take_over(e, node, e.add(activation or str(rng.choice(others)), p.operands(node)[0], name=name))


@mutation("layer_attr", sites=lambda p: [n for op in ATTRIBUTES for n in p.of_kind(op)], weight=0.05)
def layer_attr(e: Transaction, site: Any, rng: np.random.Generator, value: float | None = None) -> None:
    """Change an attribute of a layer: the rate of a dropout, or the slope of a leaky ReLU."""
    p = e.program
    node = p.node(site)
    if p.op(node) not in ATTRIBUTES:
        raise UsageError("this op has no attribute that layer_attr changes", where=p.path(node), got=p.op(node),
                         expected=", ".join(ATTRIBUTES))  # fmt: skip
    name, values = ATTRIBUTES[p.op(node)]
    others = [v for v in values if v != p.attrs(node).get(name)]
    e.set_attr(node, **{name: float(rng.choice(others)) if value is None else value})


# -- parts -------------------------------------------------------------------------------------------------------------
def output_sum(e: Transaction, node: NodeId) -> NodeId:
    """Return the junction after a linear layer: its only reader, or a new junction inserted before all its readers."""
    p = e.program
    readers = p.consumers(node)
    is_output = any(value.node == node for value in p.outputs())
    if len(readers) == 1 and p.is_junction(readers[0]) and not is_output:
        return readers[0]
    total = e.add("junction", node, name=p.free_name(f"{p.path(node)}_total"))
    redirect(e, {Value(node): Value(total)})
    return total


def weight_of(p: Program, node: NodeId) -> np.ndarray:
    """Return the weight matrix of a linear layer, [out, in]."""
    return p.weights.array(p.key(p.operands(node)[1].node)).to_numpy()
