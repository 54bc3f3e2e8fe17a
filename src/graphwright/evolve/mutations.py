"""Mutations of networks of layers: plain functions on an open edit, to be used in one's own edits as well.

Growth starts from zero outgoing weights, so what the network computes stays; the new part learns, since gradients reach
those zeros at once. What one mutation adds is named `b<number>....`, so it is drawn as one cluster and removed as one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from graphwright.errors import UsageError
from graphwright.program.kinds import STORED

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program import Program, Transaction

ACTIVATIONS = ("relu", "tanh", "gelu", "silu", "sigmoid", "leaky_relu")
Mutation = Callable[..., None]
"""m(e, site, rng, **attributes) on an open edit; raises UsageError where it cannot be made."""
M = TypeVar("M", bound=Mutation)


@dataclass(frozen=True, slots=True)
class Kind:
    """A mutation as evolution draws it: where it may be made, how, and how often (exploring, refining)."""

    name: str
    sites: Callable[[Program], list[NodeId]]
    apply: Mutation
    explore: float
    refine: float


MUTATIONS: dict[str, Kind] = {}


def mutation(
    name: str, *, sites: Callable[[Program], list[NodeId]], weight: float, refine: float | None = None
) -> Callable[[M], M]:
    """Register a mutation: `m(e, site, rng)` on a site that `sites(program)` lists.

    Args:
        weight: how often it is drawn, beside those of the others that can be made; `refine`, later in a run.
    """

    def enter(function: M) -> M:
        MUTATIONS[name] = Kind(name, sites, function, weight, weight if refine is None else refine)
        return function

    return enter


# -- where -------------------------------------------------------------------------------------------------------------
def linears(p: Program) -> list[NodeId]:
    """Linear layers whose weight nobody else reads."""
    return [n for n in p.of_kind("linear") if all(len(p.consumers(v.node)) == 1 for v in p.operands(n)[1:])]


def hidden(p: Program) -> list[NodeId]:
    """Linear layers whose units can be counted anew: through activations alone, linear layers read them."""
    return [n for n in linears(p) if _readers(p, n)]


def branches(p: Program) -> list[NodeId]:
    """The last node of each part that a mutation added."""
    return [n for n in p.nodes() if p.path(n).startswith("b") and p.path(n).endswith(".to") and p.op(n) == "linear"]


def activations(p: Program) -> list[NodeId]:
    """Activations."""
    return [n for op in ACTIVATIONS for n in p.of_kind(op)]


def _readers(p: Program, node: NodeId) -> list[NodeId]:
    """Linear layers that read the units of one through activations; none if something else does."""
    found: list[NodeId] = []
    outputs = {v.node for v in p.outputs()}
    todo = [node]
    while todo:
        here = todo.pop()
        if here in outputs:
            return []
        for reader in p.consumers(here):
            if p.op(reader) in ACTIVATIONS:
                todo.append(reader)
            elif p.op(reader) == "linear" and p.operands(reader)[0].node == here and reader in linears(p):
                found.append(reader)
            else:
                return []
    return found


# -- what --------------------------------------------------------------------------------------------------------------
@mutation("widen", sites=hidden, weight=0.12, refine=0.10)
def widen(e: Transaction, site: Any, rng: np.random.Generator, units: int | None = None) -> None:
    """More units: random weights in, zero weights out. By a quarter, a half, or double if `units` is not given."""
    p = e.program
    node = p.node(site)
    readers = _readers(p, node)
    if not readers:
        raise UsageError("the units of this node are not its readers' alone", where=p.path(node))
    old = _weight(p, node)
    more = units or max(1, round(old.shape[0] * float(rng.choice([0.25, 0.5, 1.0], p=[0.4, 0.4, 0.2]))))
    bound = 1 / np.sqrt(old.shape[1])
    _set(e, node, 1, np.concatenate([old, rng.uniform(-bound, bound, (more, old.shape[1]))]))
    if len(p.operands(node)) == 3:
        _set(e, node, 2, np.concatenate([_weight(p, node, 2), np.zeros(more)]))
    for reader in readers:
        w = _weight(p, reader)
        _set(e, reader, 1, np.concatenate([w, np.zeros((w.shape[0], more))], 1))


@mutation("narrow", sites=lambda p: [n for n in hidden(p) if _weight(p, n).shape[0] > 2], weight=0.08, refine=0.10)
def narrow(e: Transaction, site: Any, rng: np.random.Generator, units: int | None = None) -> None:
    """Fewer units: those go whose weights in and out are smallest. A quarter if `units` is not given."""
    p = e.program
    node = p.node(site)
    old, readers = _weight(p, node), _readers(p, node)
    less = units or max(1, old.shape[0] // 4)
    if not readers or less >= old.shape[0]:
        raise UsageError("so many units cannot go", where=p.path(node), got=less, expected=f"below {old.shape[0]}")
    out = sum(np.linalg.norm(_weight(p, r), axis=0) for r in readers)
    keep = np.sort(np.argsort(-np.linalg.norm(old, axis=1) * out, kind="stable")[: old.shape[0] - less])
    _set(e, node, 1, old[keep])
    if len(p.operands(node)) == 3:
        _set(e, node, 2, _weight(p, node, 2)[keep])
    for reader in readers:
        _set(e, reader, 1, _weight(p, reader)[:, keep])


@mutation("insert_layer", sites=linears, weight=0.30, refine=0.14)
def insert_layer(
    e: Transaction, site: Any, rng: np.random.Generator, width: int | None = None, activation: str | None = None
) -> None:
    """Beside a linear layer another way from its input to its output, through a hidden layer: W₂ f(W₁ x), W₂ = 0."""
    p = e.program
    node = p.node(site)
    total = _total(e, node)
    out, inner = _weight(p, node).shape
    units = width or int(rng.choice([8, 16, 32]))
    base = _block(p)
    bound = 1 / np.sqrt(inner)
    w1 = e.param(f"{base}.from.weight", rng.uniform(-bound, bound, (units, inner)).astype(np.float32))
    b1 = e.param(f"{base}.from.bias", rng.uniform(-bound, bound, units).astype(np.float32))
    w2 = e.param(f"{base}.to.weight", np.zeros((out, units), np.float32))
    h = e.add("linear", p.operands(node)[0], w1, b1, name=f"{base}.from")
    a = e.add(activation or str(rng.choice(ACTIVATIONS[:4])), h, name=f"{base}.act")
    e.connect(e.add("linear", a, w2, name=f"{base}.to"), total)


@mutation("remove_layer", sites=branches, weight=0.08)
def remove_layer(e: Transaction, site: Any, rng: np.random.Generator) -> None:
    """Take out what a mutation added, and what only that needed."""
    p = e.program
    node = p.node(site)
    roots = [*p.outputs(), *p.writes()]
    before = p.reachable(roots)
    for edge in p.out_edges(node):
        e.cut(edge)
    kept = p.reachable(roots)
    e.remove([n for n in before - kept if p.op(n) != "input"])


@mutation("add_skip", sites=linears, weight=0.06, refine=0.04)
def add_skip(e: Transaction, site: Any, rng: np.random.Generator, source: Any = None) -> None:
    """A matrix of zeros from an earlier value [batch, units] to what a linear layer gives."""
    p = e.program
    node = p.node(site)
    total = _total(e, node)
    before = p.reachable([node]) - {node}
    values = [n for n in p.order() if n in before and p.op(n) not in STORED and len(p.spec(n).shape) == 2]
    src = p.node(source) if source is not None else values[int(rng.integers(len(values)))]
    base = _block(p)
    width = int(p.spec(src).shape[1])
    w = e.param(f"{base}.to.weight", np.zeros((_weight(p, node).shape[0], width), np.float32))
    e.connect(e.add("linear", src, w, name=f"{base}.to"), total)


@mutation("replace_activation", sites=activations, weight=0.04, refine=0.08)
def replace_activation(e: Transaction, site: Any, rng: np.random.Generator, activation: str | None = None) -> None:
    """Another activation at the same place. This changes what the network computes."""
    p = e.program
    node = p.node(site)
    others = [a for a in ACTIVATIONS if a != p.op(node)]
    name, readers = p.path(node), p.out_edges(node)
    outputs = dict(zip(p.output_names(), p.outputs(), strict=True))
    e.rename(node, p.free_name(f"{name}_before"))
    new = e.add(activation or str(rng.choice(others)), p.operands(node)[0], name=name)
    for edge in readers:
        e.rewire(edge, new)
    if any(v.node == node for v in outputs.values()):
        e.set_outputs(**{k: new if v.node == node else v for k, v in outputs.items()})
    e.remove(node)


# -- parts -------------------------------------------------------------------------------------------------------------
def _weight(p: Program, node: NodeId, port: int = 1) -> np.ndarray:
    return p.weights.array(p.key(p.operands(node)[port].node)).to_numpy()


def _set(e: Transaction, node: NodeId, port: int, value: np.ndarray) -> None:
    e.set_weight(e.program.operands(node)[port].node, value.astype(np.float32))


def _block(p: Program) -> str:
    """The name of a part that is not there yet."""
    heads = (p.path(n).partition(".")[0] for n in p.nodes())
    used = [int(head[1:]) for head in heads if head[0] == "b" and head[1:].isdigit()]
    return f"b{max(used, default=0) + 1}"


def _total(e: Transaction, node: NodeId) -> NodeId:
    """The junction behind a linear layer: the one that alone reads it, or a new one in its place."""
    p = e.program
    readers = p.consumers(node)
    outputs = dict(zip(p.output_names(), p.outputs(), strict=True))
    is_output = any(v.node == node for v in outputs.values())
    if len(readers) == 1 and p.is_junction(readers[0]) and not is_output:
        return readers[0]
    edges = p.out_edges(node)
    total = e.add("junction", node, name=p.free_name(f"{p.path(node)}_total"))
    for edge in edges:
        e.rewire(edge, total)
    if is_output:
        e.set_outputs(**{k: total if v.node == node else v for k, v in outputs.items()})
    return total
