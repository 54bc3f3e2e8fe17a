"""Statements of generated source, and the grouping of nodes into blocks."""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphwright.models.codegen.text import WIDTH, attributes, line
from graphwright.ops import OPS, get, traits
from graphwright.ops.emit import appends, is_primary, sizes
from graphwright.program import Value
from graphwright.program.kinds import CONST, STORED

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.models.codegen.text import Names
    from graphwright.program import Program

LAYER = re.compile(r"^layers\.(\d+)\.")


@dataclass(slots=True)
class CodeBlock:
    """The nodes of one layer, or of the trunk between layers (layer None), in order.

    Attributes:
        nodes: op nodes.
        enters, leaves: values read from other blocks, and values that other blocks read.
    """

    layer: int | None
    nodes: list[NodeId]
    enters: list[Value] = field(default_factory=list)
    leaves: list[Value] = field(default_factory=list)


def blocks_of(p: Program, order: Sequence[NodeId], inline: Callable[[NodeId], bool]) -> list[CodeBlock]:
    """Group nodes, given in topological order, into blocks; `inline` nodes are written where they are read."""
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
        if streams:  # the latest one is the layer's main input, the others are skips
            main = max(streams, key=lambda v: place[v.node])
            b.enters.sort(key=lambda v: v != main)
        results = (Value(n, port) for n in b.nodes for port in range(len(p.specs(n))))
        b.leaves = [v for v in results if v in outputs or any(m in within and m not in inside for m in p.consumers(v))]
    return found


def _as_made(p: Program, nodes: Sequence[NodeId], reads: Mapping[NodeId, list[NodeId]]) -> list[NodeId]:
    """Topological order of a block's nodes, by creation where free."""
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
    """Assign a node without layer to the layer of all its readers."""
    found = dict(home)
    for n in reversed(order):
        if found[n] is None:
            readers = {found[m] for m in p.consumers(n) if m in found}
            if len(readers) == 1:
                found[n] = readers.pop()
    return found


def _grouped(
    order: Sequence[NodeId], home: Mapping[NodeId, int | None], reads: Mapping[NodeId, list[NodeId]]
) -> list[CodeBlock] | None:
    """Groups in topological order, by first node where free; None if groups depend on each other."""
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
    blocks: list[CodeBlock] = []
    done = 0
    while ready:
        _, g = heapq.heappop(ready)
        done += 1
        layer = home[members[g][0]]
        if layer is None and blocks and blocks[-1].layer is None:
            blocks[-1].nodes += members[g]
        else:
            blocks.append(CodeBlock(layer, list(members[g])))
        for reader in readers.get(g, ()):
            waits[reader].discard(g)
            if not waits[reader]:
                heapq.heappush(ready, (first[reader], reader))
    return blocks if done == len(members) else None


FREQUENCIES = frozenset(name for name, row in OPS.items() if row.traits.float32_constants)


class Statements:
    """Writes the nodes that the result of a program needs.

    Attributes:
        within: nodes to write.
        pinned: dtypes that weights are cast to; a weight in one of them keeps its dtype.
    """

    def __init__(self, p: Program, needed: Container[NodeId]) -> None:
        self.p = p
        self.within = {n for n in p.nodes() if n in needed}
        self.pinned = {p.spec(n).dtype for n in self.within if traits(p.op(n)).casts and self.inline(n)}

    def inline(self, node: NodeId) -> bool:
        """True for weights and casts of weights, which are written where they are read."""
        p = self.p
        return p.op(node) in STORED or (traits(p.op(node)).casts and p.op(p.operands(node)[0].node) in STORED)

    def wanted(self, value: Value, inside: bool = False) -> str:
        """Preferred name of a value: its path, without the layer inside a layer's function."""
        op, path = self.p.op(value.node), self.p.path(value)
        if op in OPS and OPS[op].results:
            return OPS[op].results[value.port]
        base = LAYER.sub("", path) if inside else path.replace("layers.", "layer_", 1)
        return base + (f"_{value.port}" if len(self.p.specs(value.node)) > 1 else "")

    def _weight(self, node: NodeId, base: Callable[[str], str], layer: int | None) -> str:
        """Text that reads a weight: an attribute of its layer (`base` names it) or of the model."""
        p = self.p
        if p.op(node) not in STORED:
            return _text(p, node, [self._weight(p.operands(node)[0].node, base, layer)])
        if p.op(node) == CONST:
            return f"run.const({json.dumps(p.path(node))}{'' if self._exact(node) else ', run.dtype'})"
        suffix = f".to(torch.{p.spec(node).dtype.name})" if p.spec(node).dtype in self.pinned else ""
        return self._place(p.key(node), base, layer) + suffix

    def _exact(self, node: NodeId) -> bool:
        """True if the value keeps its dtype when the model is loaded in another dtype."""
        readers = {self.p.op(n) for n in self.p.consumers(node)}
        return bool(self.pinned) or not self.p.spec(node).dtype.is_float or readers <= FREQUENCIES

    def _place(self, key: str, base: Callable[[str], str], layer: int | None) -> str:
        """Attribute of a block's or the model's module that holds a weight."""
        start, found, rest = key.partition(f".{layer}.")
        if layer is not None and found and (text := attributes(base(f"{start}.{{i}}"), rest.split("."))):
            return text
        root = base("")
        return attributes(root, key.split(".")) or f'{root}.get_parameter("{key}")'

    def write(
        self,
        nodes: Sequence[NodeId],
        known: dict[Value, str],
        names: Names,
        base: Callable[[str], str],
        layer: int | None,
        indent: str,
        leaves: Container[Value],
    ) -> list[str]:
        """Write statements of nodes in order; a value with one reader that appends to its text gets no name.

        Args:
            nodes: of one block.
            known: names of values; new names are added.
            names: source of new names.
            base: prefix of a key, "" for the model -> name of the module that holds it.
            layer: number of the block, or None.
            indent: of each statement.
            leaves: values that others read.
        """
        p, lines = self.p, []
        here = set(nodes)
        pending: dict[Value, str] = {}

        def give_name(value: Value) -> str:
            if value not in known:
                known[value] = names.take(self.wanted(value, inside=layer is not None))
            return known[value]

        def name_pending(value: Value) -> str:
            if value in pending:
                lines.append(line(indent, give_name(value), pending.pop(value)))
            return known[value]

        for n in nodes:
            operands = p.operands(n)
            appended = bool(operands) and operands[0] in pending
            texts = [
                self._weight(v.node, base, layer)
                if self.inline(v.node)
                else pending[v]
                if appended and v == operands[0]
                else name_pending(v)
                for v in operands
            ]
            text = self._expression(n, texts)
            value = Value(n)
            if appended and len(f"{indent}{self.wanted(value, layer is not None)} = {text}") > WIDTH:
                text = self._expression(n, [name_pending(operands[0]), *texts[1:]])
            elif appended:
                del pending[operands[0]]
            if self._appendable(n, text, here) and value not in leaves:
                pending[value] = text
                continue
            results = [Value(n, i) for i in range(len(p.specs(n)))]
            read = [v in leaves or any(m in self.within for m in p.consumers(v)) for v in results]
            targets = [give_name(v) if used else "_" for v, used in zip(results, read, strict=True)]
            lines.append(line(indent, ", ".join(targets), text))
        return lines

    def _appendable(self, node: NodeId, text: str, nodes: Container[NodeId]) -> bool:
        """True if the text of the only reader starts with the text of this node."""
        p = self.p
        edges = [e for e in p.out_edges(node) if p.graph.target(e) in self.within]
        if len(edges) != 1 or len(p.specs(node)) > 1 or not is_primary(text):
            return False
        reader = p.graph.target(edges[0])
        if reader not in nodes:
            return False
        emit = get(p.op(reader)).emit
        return emit is not None and appends(emit, len(p.operands(reader)), p.attrs(reader))

    def _expression(self, node: NodeId, texts: Sequence[str]) -> str:
        p = self.p
        if p.is_junction(node) and not texts:
            spec = p.spec(node)
            dtype = f"torch.{spec.dtype.name}" if self._exact(node) else "run.dtype"
            return f"run.zeros(({sizes(spec.shape)}{',' if len(spec.shape) == 1 else ''}), {dtype})"
        return _text(p, node, texts)


def _text(p: Program, node: NodeId, operands: Sequence[str]) -> str:
    emit = get(p.op(node)).emit
    text = None if emit is None else emit(operands, p.attrs(node))
    assert text is not None, "check_emittable runs first"
    return text
