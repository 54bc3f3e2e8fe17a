"""Modeling code: a program as a readable `modeling_*.py` that transformers loads with `trust_remote_code=True`.

Nodes with paths `layers.<i>.*` become one function per distinct block; equal consecutive blocks become a loop. The
field `emit` of an op's definition gives its source text, so any structure of such ops can be exported, also with skip
connections. Names, keys and texts of a program are sanitised before they enter the source.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from graphwright.graph import NodeId
from graphwright.graph.analysis import topological_sort
from graphwright.models.codegen import text as pieces
from graphwright.models.errors import ExportLevelImpossible
from graphwright.ops import OPS, get, traits
from graphwright.ops.emit import appends, is_primary, sizes
from graphwright.program.kinds import CONST, INPUT, STORED
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.program.program import Program

T = TypeVar("T")
LAYER = re.compile(r"^layers\.(\d+)\.")


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


class Statements:
    """Writes Python statements for the `needed` nodes of a program.

    If the program casts some weights, e.g. to float32, weights stored in float32 are read through `.to(torch.float32)`,
    so that they have this dtype even if transformers loads the model in a different one.
    """

    def __init__(self, p: Program, needed: Container[NodeId]) -> None:
        self.p = p
        self.within = {n for n in p.nodes() if n in needed}
        self.pinned = {p.spec(n).dtype for n in self.within if traits(p.op(n)).casts and self.inline(n)}

    def inline(self, node: NodeId) -> bool:
        """Return True for weights and casts of weights: each reader repeats their expression, so they need no name."""
        p = self.p
        return p.op(node) in STORED or (traits(p.op(node)).casts and p.op(p.operands(node)[0].node) in STORED)

    def wanted(self, value: Value, inside: bool = False) -> str:
        """Return the preferred name of a value, made from its path; with `inside`, the path without `layers.<i>.`."""
        op, path = self.p.op(value.node), self.p.path(value)
        if op in OPS and OPS[op].results:
            return OPS[op].results[value.port]
        base = LAYER.sub("", path) if inside else path.replace("layers.", "layer_", 1)
        return base + (f"_{value.port}" if len(self.p.specs(value.node)) > 1 else "")

    def _weight(self, node: NodeId, base: Callable[[str], str], layer: int | None) -> str:
        """Return the expression of a weight or a cast of one; `base` maps a prefix of keys to a module's variable."""
        p = self.p
        if p.op(node) not in STORED:
            return self._expression(node, [self._weight(p.operands(node)[0].node, base, layer)])
        if p.op(node) == CONST:
            return f"run.const({json.dumps(p.path(node))}{'' if self._exact(node) else ', run.dtype'})"
        suffix = f".to(torch.{p.spec(node).dtype.name})" if p.spec(node).dtype in self.pinned else ""
        return self._attribute(p.key(node), base, layer) + suffix

    def _exact(self, node: NodeId) -> bool:
        """Return True if the value keeps its dtype when transformers loads the model in a different one."""
        exact = (traits(self.p.op(n)).float32_constants for n in self.p.consumers(node))
        return bool(self.pinned) or not self.p.spec(node).dtype.is_float or all(exact)

    def _attribute(self, key: str, base: Callable[[str], str], layer: int | None) -> str:
        """Return the expression of a weight, read from the module of its layer if possible, else from the model.

        `base` maps the name of a module, such as `model.layers.{i}` or "" for the model, to the variable that holds it.
        """
        start, found, rest = key.partition(f".{layer}.")
        if layer is not None and found and (text := pieces.attributes(base(f"{start}.{{i}}"), rest.split("."))):
            return text
        root = base("")
        return pieces.attributes(root, key.split(".")) or f'{root}.get_parameter("{key}")'

    def write(
        self, nodes: Sequence[NodeId], known: dict[Value, str], names: pieces.Names, base: Callable[[str], str],
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
            text = self._expression(n, texts)
            value = Value(n)
            if appended and len(f"{indent}{self.wanted(value, layer is not None)} = {text}") > pieces.WIDTH:
                text = self._expression(n, [name_pending(operands[0]), *texts[1:]])
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
        text = _text(p, node, texts)
        assert text is not None, "emittable runs first"
        return text


def _text(p: Program, node: NodeId, operands: Sequence[str]) -> str | None:
    """Return the expression of a node's op for operand expressions; None if the op cannot be written as source."""
    emit = OPS[p.op(node)].emit
    return None if emit is None else emit(operands, p.attrs(node))


INPUTS = {"ids": ("B", "T"), "positions": ("B", "T")}
"""Inputs that transformers feeds, with the names of their sizes."""


@dataclass(frozen=True, slots=True)
class BlockFunction:
    """A generated function: name, rest of the `def` line, body, layers that call it, text for its docstring."""

    name: str
    head: str
    body: str
    layers: list[int]
    about: str


def emittable(p: Program) -> Program:
    """Return the program, or a copy in which ops without source text are replaced by their expansions.

    Raises: ExportLevelImpossible naming an op, state, input or key that generated code cannot express.
    """
    twin = p
    while bare := [n for n in twin.nodes() if (row := OPS.get(twin.op(n))) and not row.emit and "emit" not in row.why]:
        twin = p.fork() if twin is p else twin
        twin.expand(bare)
    _check_emittable(twin)
    return twin


def _check_emittable(p: Program) -> None:
    needed = p.reachable([_result(p)])
    if held := [*p.states(), *p.assigns()]:
        what = "the program has state, which generated code cannot express"
        raise ExportLevelImpossible(what, where=", ".join(p.path(n) for n in held[:3]))
    for node in (n for n in p.order() if n in needed):
        op = p.op(node)
        if op == INPUT:
            if INPUTS.get(p.path(node)) != p.spec(node).shape:
                what, expected = "the program has an input that transformers does not feed", "ids or positions [B, T]"
                raise ExportLevelImpossible(what, where=p.path(node), expected=expected, got=p.spec(node))
        elif op not in STORED and _text(p, node, [f"x{i}" for i in range(len(p.operands(node)))]) is None:
            got = f"{op} ({OPS[op].why.get('emit', 'only causal attention without masks has one')})"
            raise ExportLevelImpossible("this op has no source text for generated code", where=p.path(node), got=got)
    pieces.check_keys({p.key(n): p.path(n) for n in p.params() if n in needed})
    pieces.const_table({p.path(n): p.weights.array(p.key(n)) for n in p.of_kind(CONST) if n in needed})


def _result(p: Program) -> Value:
    return p.output("logits") if "logits" in p.output_names() else p.outputs()[0]


def generate(p: Program, ident: str, edits: Sequence[str]) -> dict[str, str]:
    """Return the configuration and modeling files as a dict from file name to text. Raises: ExportLevelImpossible.

    `ident` is a string of hex digits that makes file names unique; `edits` describe the edits, for the docstring.
    """
    p = emittable(p)
    writer = _ModuleWriter(p)
    functions, forward = writer.functions(), writer.forward()
    code = "\n\n\n".join([*functions, forward])
    helpers = [text for name, text in pieces.HELPERS.items() if re.search(rf"(?<![\w.]){name}\(", code)]
    shapes = {p.key(n): p.spec(n).sizes for n in p.params() if n in writer.needed}
    consts = {p.path(n): p.weights.array(p.key(n)) for n in p.of_kind(CONST) if n in writer.needed}
    cached = any(traits(p.op(n)).attention for n in writer.order)
    values = {
        "id": ident,
        "edits": pieces.docstring_lines(edits) or "- none",
        "shapes": pieces.shape_table(shapes),
        "consts": pieces.const_table(consts),
        "helpers": "\n\n\n".join(helpers),
        "functions": "\n\n\n".join(functions),
        "forward": forward,
        "cached": "" if cached else "        use_cache = False  # there is no attention\n",
    }
    templates = {"modeling": pieces.MODELING, "configuration": pieces.CONFIGURATION}
    return {f"{name}_{ident}.py": _fill(text, values) for name, text in templates.items()}


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Replace each `@name@` by its value, but not an `@name@` within a value; collapse runs of blank lines."""
    text = re.sub(r"@(\w+)@", lambda m: values[m[1]], template)
    return re.sub(r"\n{4,}", "\n\n\n", text)


class _ModuleWriter:
    """Writes the source of a program: a function for each distinct layer, and the forward pass."""

    def __init__(self, p: Program) -> None:
        self.p = p
        self.needed = p.reachable([_result(p)])
        self.text = Statements(p, self.needed)
        inline = self.text.inline
        made = topological_sort(p.graph, key=p.seq)  # by creation, so that an edit does not reorder the text around it
        self.order = [n for n in made if n in self.needed and not inline(n) and p.op(n) != INPUT]
        self.blocks = blocks_of(p, self.order, inline)
        self._names = pieces.Names({"x", "ids", "positions", *(f"block_{c}" for c in "abcdefghijklmnopqrstuvwxyz")})
        self._known: dict[Value, str] = {Value(n): p.path(n) for n in p.inputs()}
        self.made: dict[tuple[str, str], BlockFunction] = {}
        self.function: dict[int, BlockFunction] = {}
        for b in self.blocks:
            for value in b.leaves if b.layer is not None else (Value(n, i) for n in b.nodes for i in self._ports(n)):
                self._known[value] = self._names.take(self.text.wanted(value))
        for b in self.blocks:
            if b.layer is not None:
                self._add(b, b.layer)

    def _ports(self, node: NodeId) -> range:
        return range(len(self.p.specs(node)))

    # -- text ---------------------------------------------------------------------------------------------------------
    def _add(self, b: CodeBlock, layer: int) -> None:
        """Add the function that computes the block `b` of a layer, or reuse an existing function with the same text."""
        names = pieces.Names({"x"})
        given = self._arguments(b, names)
        prefixes: dict[str, str] = {}

        def base(prefix: str) -> str:
            if prefix and prefix not in prefixes:
                prefixes[prefix] = names.take("layer")
            return prefixes.get(prefix, "model")

        known = dict(zip(b.enters, given, strict=True))
        lines = self.text.write(b.nodes, known, names, base, layer, "    ", b.leaves)
        heads = [f'    {name} = model.get_submodule(f"{prefix}")' for prefix, name in prefixes.items()]
        body = "\n".join([*heads, *lines, f"    return {', '.join(known[v] for v in b.leaves)}"])
        head = f"(model, i, {', '.join([*given, 'run'])}):"
        found = self.made.get((head, body))
        if found is None:
            name = f"block_{chr(97 + len(self.made)) if len(self.made) < 26 else len(self.made)}"
            parts = dict.fromkeys(LAYER.sub("", self.p.path(n)).split(".")[0] for n in b.nodes)
            about = re.sub(r"[^A-Za-z0-9_, ]", "_", ", ".join(list(parts)[:10]))
            found = self.made[head, body] = BlockFunction(name, head, body, [], about)
        found.layers.append(layer)
        self.function[layer] = found

    def _arguments(self, b: CodeBlock, names: pieces.Names) -> list[str]:
        """Return names for a block's inputs: `x` for the first, `skip` for other results of layers, else own names."""
        found, main = [], True
        for value in b.enters:
            if main or LAYER.match(self.p.path(value)):
                found.append("x" if main else names.take("skip"))
                main = False
            else:
                found.append(names.take(self._known[value]))
        return found

    def functions(self) -> list[str]:
        made = []
        for f in self.made.values():
            about = f"Layer{'s' if len(f.layers) > 1 else ''} {pieces.ranges(sorted(f.layers))}: {f.about}"
            made.append(f'def {f.name}{f.head}\n    """{about[: pieces.WIDTH - 12]}."""\n{f.body}')
        return made

    def forward(self) -> str:
        lines: list[str] = []
        indent, at = " " * 8, 0
        while at < len(self.blocks):
            b = self.blocks[at]
            if b.layer is None:
                lines += self.text.write(b.nodes, self._known, self._names, lambda _: "self", None, indent, b.leaves)
                at += 1
                continue
            end = self._run_of_equals(at)
            if end - at > 1:
                lines += self._loop(indent, at, end)
            else:
                given = "".join(f", {self._known[v]}" for v in b.enters)
                call = f"{self.function[b.layer].name}(self, {b.layer}{given}, run)"
                lines.append(pieces.line(indent, ", ".join(self._known[v] for v in b.leaves), call))
            at = end
        lines.append(f"{indent}return {self._known[_result(self.p)]}")
        return "\n".join(lines)

    def _run_of_equals(self, at: int) -> int:
        """Return the end of the run of equal blocks, from index `at` on, that one loop `x = f(x)` can compute."""
        end, first = at + 1, self.blocks[at]
        while end < len(self.blocks):
            before, b = self.blocks[end - 1], self.blocks[end]
            chained = (
                b.layer is not None
                and self.function[b.layer] is self.function[first.layer or 0]
                and len(before.leaves) == 1
                and [before.leaves[0], *first.enters[1:]] == b.enters
                and all(m in set(b.nodes) for m in self.p.consumers(before.leaves[0]) if m in self.needed)
                and before.leaves[0] != _result(self.p)
            )
            if not chained:
                break
            end += 1
        return end

    def _loop(self, indent: str, at: int, end: int) -> list[str]:
        first, last = self.blocks[at], self.blocks[end - 1]
        layers = [b.layer or 0 for b in self.blocks[at:end]]
        rest = "".join(f", {self._known[v]}" for v in first.enters[1:])
        return [
            pieces.line(indent, "x", self._known[first.enters[0]]),
            f"{indent}for i in {pieces.sequence(layers)}:",
            pieces.line(f"{indent}    ", "x", f"{self.function[layers[0]].name}(self, i, x{rest}, run)"),
            pieces.line(indent, self._known[last.leaves[0]], "x"),
        ]
