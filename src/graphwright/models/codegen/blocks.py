"""Blocks of a program: its nodes grouped by layer, in an order in which each block comes after what it reads.

Nodes below `layers.<i>` are one block, what lies between layers is trunk. Layers that feed each other cannot be blocks:
then strays are taken into the layer that reads them, and if that does not help everything is trunk.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from graphwright.graph import NodeId
from graphwright.program import Program, Value

LAYER = re.compile(r"^layers\.(\d+)\.")


@dataclass(slots=True)
class Block:
    """The nodes of one layer (or of the trunk between layers, layer None), in order.

    Attributes:
        nodes: op nodes.
        enters, leaves: values read from and given to other blocks.
    """

    layer: int | None
    nodes: list[NodeId]
    enters: list[Value] = field(default_factory=list)
    leaves: list[Value] = field(default_factory=list)


def blocks_of(p: Program, order: Sequence[NodeId], inline: Callable[[NodeId], bool]) -> list[Block]:
    """Blocks of the nodes in `order`, which is topological; `inline` ones are written where they are read."""
    within = set(order)
    home = {n: int(m[1]) if (m := LAYER.match(p.path(n))) else None for n in order}
    reads = {n: [v.node for v in p.operands(n) if v.node in within] for n in order}
    for choice in (home, _adopted(p, order, home), dict.fromkeys(order)):
        found = _grouped(order, choice, reads)
        if found is not None:
            break
    else:
        raise AssertionError("a topological order is one block")
    outputs = set(p.outputs())
    place = {n: i for i, n in enumerate(n for b in found for n in b.nodes)} | {n: -1 for n in p.inputs()}
    for b in found:
        inside = set(b.nodes)
        if b.layer is not None:
            b.nodes = _as_made(p, b.nodes, reads)
        entering = (v for n in b.nodes for v in p.operands(n) if v.node not in inside and not inline(v.node))
        b.enters = list(dict.fromkeys(entering))
        streams = [v for v in b.enters if LAYER.match(p.path(v))]
        if streams:  # the one that comes last is what the layer works on, the others skip to it
            main = max(streams, key=lambda v: place[v.node])
            b.enters.sort(key=lambda v: v != main)
        results = (Value(n, port) for n in b.nodes for port in range(len(p.specs(n))))
        b.leaves = [v for v in results if v in outputs or any(m in within and m not in inside for m in p.consumers(v))]
    return found


def _as_made(p: Program, nodes: Sequence[NodeId], reads: Mapping[NodeId, list[NodeId]]) -> list[NodeId]:
    """Nodes of a block after what they read in it, otherwise as they were made."""
    inside = set(nodes)
    waits = {n: {m for m in reads[n] if m in inside} for n in nodes}
    ready = [(p.seq(n), n) for n in nodes if not waits[n]]
    heapq.heapify(ready)
    found = []
    while ready:
        _, n = heapq.heappop(ready)
        found.append(n)
        for m in p.consumers(n):
            if m in inside and n in waits[m]:
                waits[m].discard(n)
                if not waits[m]:
                    heapq.heappush(ready, (p.seq(m), m))
    return found


def _adopted(p: Program, order: Sequence[NodeId], home: Mapping[NodeId, int | None]) -> dict[NodeId, int | None]:
    """Homes where a node without layer has the one that all its readers have."""
    found = dict(home)
    for n in reversed(order):
        if found[n] is None:
            readers = {found[m] for m in p.consumers(n) if m in found}
            if len(readers) == 1:
                found[n] = readers.pop()
    return found


def _grouped(
    order: Sequence[NodeId], home: Mapping[NodeId, int | None], reads: Mapping[NodeId, list[NodeId]]
) -> list[Block] | None:
    """Groups in topological order, the one whose first node comes first first; None if they feed each other."""
    group: dict[NodeId, object] = {n: n if home[n] is None else home[n] for n in order}
    members: dict[object, list[NodeId]] = {}
    for n in order:
        members.setdefault(group[n], []).append(n)
    first = {g: i for i, g in enumerate(members)}
    waits = {g: {group[m] for n in nodes for m in reads[n]} - {g} for g, nodes in members.items()}
    readers: dict[object, list[object]] = {}
    for g, before in waits.items():
        for other in before:
            readers.setdefault(other, []).append(g)
    ready = [(first[g], g) for g, before in waits.items() if not before]
    heapq.heapify(ready)
    blocks: list[Block] = []
    done = 0
    while ready:
        _, g = heapq.heappop(ready)
        done += 1
        layer = home[members[g][0]]
        if layer is None and blocks and blocks[-1].layer is None:
            blocks[-1].nodes += members[g]
        else:
            blocks.append(Block(layer, list(members[g])))
        for reader in readers.get(g, ()):
            waits[reader].discard(g)
            if not waits[reader]:
                heapq.heappush(ready, (first[reader], reader))
    return blocks if done == len(members) else None
