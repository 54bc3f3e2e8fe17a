"""Blocks of generated code: which nodes are written together, and what they read and return."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from graphwright.graph import NodeId
from graphwright.models.codegen.modules import LAYER
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.program.program import Program

T = TypeVar("T")


@dataclass(slots=True)
class CodeBlock:
    """Nodes written as one piece of source, in topological order: a layer, or nodes between layers (`layer` is None).

    `enters` are values that it reads from other blocks; `leaves` are its values that other blocks read or that are
    outputs of the program.
    """

    layer: int | None
    nodes: list[NodeId]
    enters: list[Value] = field(default_factory=list)
    leaves: list[Value] = field(default_factory=list)


def blocks_of(p: Program, order: Sequence[NodeId], inline: Callable[[NodeId], bool]) -> list[CodeBlock]:
    """Group the nodes of a topological `order` into blocks; a node is written within its readers if `inline(node)`."""
    within = set(order)
    layer_of = {n: int(m[1]) if (m := LAYER.match(p.path(n))) else None for n in order}
    reads = {n: [v.node for v in p.operands(n) if v.node in within] for n in order}
    choices = (layer_of, _adopted(p, order, layer_of), dict.fromkeys(order))  # the last one has one group per node
    found = next(blocks for choice in choices if (blocks := _grouped(order, choice, reads)) is not None)
    outputs = set(p.outputs())
    number = {n: i for i, n in enumerate(n for b in found for n in b.nodes)} | {n: -1 for n in p.inputs()}
    for b in found:
        inside = set(b.nodes)
        if b.layer is not None:
            b.nodes = _ordered({n: [m for m in reads[n] if m in inside] for n in b.nodes}, p.seq)
        entering = (v for n in b.nodes for v in p.operands(n) if v.node not in inside and not inline(v.node))
        b.enters = list(dict.fromkeys(entering))
        streams = [v for v in b.enters if LAYER.match(p.path(v))]
        if streams:  # the latest one is the layer's main input, the others are skips
            main = max(streams, key=lambda v: number[v.node])
            b.enters.sort(key=lambda v: v != main)
        results = (Value(n, port) for n in b.nodes for port in range(len(p.specs(n))))
        b.leaves = [v for v in results if v in outputs or any(m in within and m not in inside for m in p.consumers(v))]
    return found


def _ordered(before: Mapping[T, Collection[T]], key: Callable[[T], int]) -> list[T]:
    """Sort items topologically; among items whose dependencies are done, the smallest key comes first.

    `before` maps each item to the items that it depends on. Items in a cycle, or depending on one, are left out.
    """
    waits = {item: set(others) for item, others in before.items()}
    after: dict[T, list[T]] = {}
    for item, others in waits.items():
        for other in others:
            after.setdefault(other, []).append(item)
    ready = [(key(item), item) for item, others in waits.items() if not others]
    heapq.heapify(ready)
    found = []
    while ready:
        item = heapq.heappop(ready)[1]
        found.append(item)
        for reader in after.get(item, ()):
            waits[reader].discard(item)
            if not waits[reader]:
                heapq.heappush(ready, (key(reader), reader))
    return found


def _adopted(p: Program, order: Sequence[NodeId], layer_of: Mapping[NodeId, int | None]) -> dict[NodeId, int | None]:
    """Return `layer_of` (node -> layer or None) with a layer also for nodes whose readers are all in that layer."""
    found = dict(layer_of)
    for n in reversed(order):
        if found[n] is None:
            readers = {found[m] for m in p.consumers(n) if m in found}
            if len(readers) == 1:
                found[n] = readers.pop()
    return found


def _grouped(
    order: Sequence[NodeId], layer_of: Mapping[NodeId, int | None], reads: Mapping[NodeId, list[NodeId]]
) -> list[CodeBlock] | None:
    """Return blocks in topological order, or None if two groups of nodes depend on each other.

    `layer_of` maps a node to its layer or None, `reads` to the nodes that it reads. The nodes of a layer form one
    group, and every other node a group of its own. Consecutive groups outside of layers share a block.
    """
    group: dict[NodeId, Any] = {n: n if layer_of[n] is None else layer_of[n] for n in order}
    members: dict[Any, list[NodeId]] = {}
    for n in order:
        members.setdefault(group[n], []).append(n)
    first = {g: i for i, g in enumerate(members)}
    before = {g: {group[m] for n in nodes for m in reads[n]} - {g} for g, nodes in members.items()}
    found = _ordered(before, first.__getitem__)
    blocks: list[CodeBlock] = []
    for g in found:
        layer = layer_of[members[g][0]]
        if layer is None and blocks and blocks[-1].layer is None:
            blocks[-1].nodes += members[g]
        else:
            blocks.append(CodeBlock(layer, list(members[g])))
    return blocks if len(found) == len(members) else None
