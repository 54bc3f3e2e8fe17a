"""Statements of generated code: the Python expression of each node, and which expressions are chained."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING

from graphwright.graph import NodeId
from graphwright.models.codegen import text as pieces
from graphwright.models.codegen.modules import LAYER, module_form
from graphwright.models.codegen.names import Names, attributes
from graphwright.models.codegen.routing import in_precision, routing_nodes
from graphwright.ops import OPS, get, traits
from graphwright.ops.emit import appends, is_primary, sizes
from graphwright.program.kinds import CONST, PATTERN, STATE, STORED
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.array import DType, NDArray
    from graphwright.program.program import Program

FIXED = frozenset({CONST, STATE})
"""Kinds of node that are constants in generated code: no program with assignments is generated."""


def representatives(p: Program, needed: Container[NodeId]) -> dict[NodeId, NodeId]:
    """Map each constant to the one that stands for it: the first of equal numbers, else itself."""
    found, first = {}, dict[tuple[str, bytes], NodeId]()
    for node in (n for kind in (CONST, STATE) for n in p.of_kind(kind) if n in needed):
        array = p.weights.array(p.key(node))
        found[node] = node if array.shape else first.setdefault((array.dtype.name, array.tobytes()), node)
    return found


def consts_of(p: Program, needed: Container[NodeId]) -> dict[str, NDArray]:
    """Return the constants of generated code by the path of their node."""
    return {p.path(n): p.weights.array(p.key(n)) for n in dict.fromkeys(representatives(p, needed).values())}


class Statements:
    """Writes Python statements for the `needed` nodes of a program.

    The dtype `compute` of the program's activations stands for the dtype in which transformers loads the model:
    weights have it, and values are cast to it. Other dtypes are those that the program names.
    """

    def __init__(self, p: Program, needed: Container[NodeId], compute: DType) -> None:
        self.p, self.compute = p, compute
        self.within = {n for n in p.nodes() if n in needed}
        self.routing = set[NodeId]() if compute.is_low else {n for n in routing_nodes(p) if not self.inline(n)}
        self.calls: Mapping[NodeId, str] = {}
        self.patterns: Mapping[str, str] = {}
        self.buffers: Mapping[str, str] = {}  # path -> key of the constants that are in the files
        self.consts = representatives(p, needed)

    def inline(self, node: NodeId) -> bool:
        """Return True for weights and casts of weights: each reader repeats their expression, so they need no name."""
        p = self.p
        return p.op(node) in STORED or (traits(p.op(node)).casts and p.op(p.operands(node)[0].node) in STORED)

    def wanted(self, value: Value, inside: bool = False) -> str:
        """Return the preferred name of a value, made from its path; with `inside`, the path without `layers.<i>.`."""
        op, path = self.p.op(value.node), self.p.path(value.node)
        if op in OPS and OPS[op].results:
            return OPS[op].results[value.port]
        base = LAYER.sub("", path) if inside else path.replace("layers.", "layer_", 1)
        return base + (f"_{value.port}" if len(self.p.specs(value.node)) > 1 else "")

    def _weight(self, node: NodeId, base: Callable[[str], str], layer: int | None) -> str:
        """Return the expression of a weight or a cast of one; `base` maps a prefix of keys to a module's variable."""
        p = self.p
        if p.op(node) not in STORED:
            inner = self._weight(p.operands(node)[0].node, base, layer)
            const = p.op(p.operands(node)[0].node) in FIXED
            return self._expression(node, [inner], layer, base) if const or not self._computes(node) else inner
        if (key := self.buffers.get(p.path(node))) is not None:
            return self._attribute(key, base, layer, "buffer")
        if p.op(node) in FIXED:
            path, start = p.path(self.consts[node]), f"layers.{layer}."
            name = json.dumps(path.replace(start, "layers.{self.number}.", 1) if path.startswith(start) else path)
            name = f"f{name}" if path.startswith(start) else name
            return f"run.const({name}{'' if self._exact(node) else ', run.dtype'})"
        if p.op(node) == PATTERN:
            return self._attribute(self.patterns[p.key(node)], base, layer, "submodule")
        return self._attribute(p.key(node), base, layer, "parameter")

    def _computes(self, node: NodeId) -> bool:
        return self.p.spec(node).dtype is self.compute

    def _exact(self, node: NodeId) -> bool:
        """Return True if the value keeps its dtype when transformers loads the model in a different one."""
        readers = self.p.consumers(node)
        exact = (traits(self.p.op(n)).float32_constants or n in self.routing for n in readers)
        return not self._computes(node) or all(exact)

    def _attribute(self, key: str, base: Callable[[str], str], layer: int | None, kind: str) -> str:
        """Return the expression of a parameter or submodule (`kind`), read from its layer if possible, else the model.

        `base` maps the name of a module, such as `model.layers.{i}` or "" for the model, to the variable that holds it.
        """
        start, found, rest = key.partition(f".{layer}.")
        inside = layer is not None and bool(found)
        root, name = (base(f"{start}.{{i}}"), rest) if inside else (base(""), key)
        return attributes(root, name.split(".")) or f'{root}.get_{kind}("{name}")'

    def write(
        self, nodes: Sequence[NodeId], known: dict[Value, str], names: Names, base: Callable[[str], str],
        layer: int | None, indent: str, leaves: Container[Value],
    ) -> list[str]:  # fmt: skip
        """Return statements for the nodes in order; a value with one reader may get no name, like `a(x)` in `a(x).b()`.

        `known` maps values to their names; new ones are added. `base` maps a prefix of keys, "" for the model, to the
        variable that holds the module of this name. `leaves` are values that other blocks read.
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
                lines.append(pieces.line(indent, give_name(value), pending.pop(value)))
            return known[value]

        for n in nodes:
            operands = p.operands(n)
            appended = bool(operands) and operands[0] in pending
            kept = {operands[0]} if appended else set()
            texts = [self._weight(v.node, base, layer) if self.inline(v.node)
                     else pending[v] if v in kept else name_pending(v) for v in operands]  # fmt: skip
            texts = [in_precision(p, self.routing, n, v, text) for v, text in zip(operands, texts, strict=True)]
            text = self._expression(n, texts, layer, base)
            value = Value(n)
            if appended and len(f"{indent}{self.wanted(value, layer is not None)} = {text}") > pieces.WIDTH:
                first = in_precision(p, self.routing, n, operands[0], name_pending(operands[0]))
                text = self._expression(n, [first, *texts[1:]], layer, base)
            elif appended:
                del pending[operands[0]]
            if self._appendable(n, text, here) and value not in leaves:
                pending[value] = text
                continue
            results = [Value(n, i) for i in range(len(p.specs(n)))]
            read = [v in leaves or any(m in self.within for m in p.consumers(v)) for v in results]
            targets = [give_name(v) if used else "_" for v, used in zip(results, read, strict=True)]
            lines.append(pieces.line(indent, ", ".join(targets), text))
        return lines

    def _appendable(self, node: NodeId, text: str, nodes: Container[NodeId]) -> bool:
        """Return True if the node's only reader, one of `nodes`, appends a method call or subscript to its `text`."""
        p = self.p
        edges = [e for e in p.out_edges(node) if p.graph.target(e) in self.within]
        if len(edges) != 1 or len(p.specs(node)) > 1 or not is_primary(text):
            return False
        reader = p.graph.target(edges[0])
        if reader not in nodes or reader in self.calls:
            return False
        emit = get(p.op(reader)).emit
        return emit is not None and appends(emit, len(p.operands(reader)), p.attrs(reader))

    def _expression(self, node: NodeId, texts: Sequence[str], layer: int | None, base: Callable[[str], str]) -> str:
        p = self.p
        if (path := self.calls.get(node)) is not None and (form := module_form(p, node)) is not None:
            passed = [text for i, text in enumerate(texts) if i not in form[0].weights]
            given = ", ".join([*passed, "run"] if form[0].run else passed)
            return f"{self._attribute(path, base, layer, 'submodule')}({given})"
        if traits(p.op(node)).casts and self._computes(node) and node not in self.routing:
            return f"{texts[0]}.to(run.dtype)"
        if p.is_junction(node) and not texts:
            spec = p.spec(node)
            dtype = f"torch.{spec.dtype.name}" if self._exact(node) else "run.dtype"
            return f"run.zeros(({sizes(spec.shape)}{',' if len(spec.shape) == 1 else ''}), {dtype})"
        text = op_text(p, node, texts)
        assert text is not None, "emittable runs first"
        return text


def op_text(p: Program, node: NodeId, operands: Sequence[str]) -> str | None:
    """Return the expression of a node's op for operand expressions; None if the op cannot be written as source."""
    emit = OPS[p.op(node)].emit
    return None if emit is None else emit(operands, p.attrs(node))
