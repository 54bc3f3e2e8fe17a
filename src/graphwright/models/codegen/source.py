"""Modeling code: a program as a readable `modeling_*.py` that transformers loads with `trust_remote_code=True`.

Nodes below `layers.<i>` become one function per distinct block; equal consecutive blocks become a loop. The `emit` text
of each op gives its source, so any structure of such ops can be exported, including skips and inserted ops. Names, keys
and texts of a program are sanitised before they enter the source.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphwright.graph.analysis import topological_sort
from graphwright.models.codegen.fixed import CONFIGURATION, HELPERS, MODELING
from graphwright.models.codegen.statements import LAYER, Statements, blocks_of
from graphwright.models.codegen.text import (
    WIDTH,
    Names,
    check_keys,
    const_table,
    docstring_lines,
    line,
    ranges,
    shape_table,
)
from graphwright.models.errors import ExportLevelImpossible
from graphwright.ops import OPS, traits
from graphwright.program import Value
from graphwright.program.kinds import CONST, INPUT, STORED

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.models.codegen.statements import CodeBlock
    from graphwright.program import Program

INPUTS = {"ids": ("B", "T"), "positions": ("B", "T")}
"""Inputs that transformers feeds, with the names of their sizes."""


@dataclass(frozen=True, slots=True)
class BlockFunction:
    """One distinct block as a function: name, rest of the header, body, layers that call it, and its modules."""

    name: str
    head: str
    body: str
    layers: list[int]
    about: str


def check_emittable(p: Program) -> None:
    """Raises: ExportLevelImpossible naming an op, state, input or key that generated code cannot express."""
    needed = p.reachable([_result(p)])
    if p.assigns() or p.states():
        held = [*p.states(), *p.assigns()]
        raise ExportLevelImpossible("generated code cannot carry state", where=", ".join(p.path(n) for n in held[:3]))
    for node in p.order():
        if node not in needed:
            continue
        op = p.op(node)
        if op == INPUT and INPUTS.get(p.path(node)) != p.spec(node).shape:
            raise ExportLevelImpossible(
                "generated code has no such input: transformers feeds only ids and positions [B, T]",
                where=p.path(node),
                got=p.spec(node),
            )
        if op not in STORED and op != INPUT and _text(p, node) is None:
            raise ExportLevelImpossible("this op has no source text for generated code", where=p.path(node), got=op,
                                        expected=OPS[op].why.get("emit", "causal attention without masks"))  # fmt: skip
    check_keys({p.key(n): p.path(n) for n in p.params() if n in needed})
    const_table({p.path(n): p.weights.array(p.key(n)) for n in p.of_kind(CONST) if n in needed})


def _result(p: Program) -> Value:
    return p.output("logits") if "logits" in p.output_names() else p.outputs()[0]


def _text(p: Program, node: NodeId) -> str | None:
    emit = OPS[p.op(node)].emit
    return None if emit is None else emit([f"x{i}" for i in range(len(p.operands(node)))], p.attrs(node))


def _expanded(p: Program) -> Program:
    """The program, or a copy in which ops without source text are replaced by their expansions."""
    twin = p
    while bare := [n for n in twin.nodes() if (row := OPS.get(twin.op(n))) and not row.emit and "emit" not in row.why]:
        twin = p.fork() if twin is p else twin
        twin.expand(bare)
    return twin


def generate(p: Program, ident: str, edits: Sequence[str]) -> dict[str, str]:
    """Generate the configuration and modeling files: file name -> text.

    Args:
        p: the program.
        ident: digits that make the class names unique.
        edits: journal entries, for the docstring.
    Raises: ExportLevelImpossible.
    """
    p = _expanded(p)
    check_emittable(p)
    writer = _ModuleWriter(p)
    functions, forward = writer.functions(), writer.forward()
    code = "\n\n\n".join([*functions, forward])
    helpers = [text for name, text in HELPERS.items() if re.search(rf"(?<![\w.]){name}\(", code)]
    shapes = {p.key(n): p.spec(n).sizes for n in p.params() if n in writer.needed}
    consts = {p.path(n): p.weights.array(p.key(n)) for n in p.of_kind(CONST) if n in writer.needed}
    cached = any(traits(p.op(n)).attention for n in writer.order)
    uncached = "" if cached else "        use_cache = False  # there is no attention\n"
    values = {
        "id": ident,
        "edits": docstring_lines(edits) or "- none",
        "shapes": shape_table(shapes),
        "consts": const_table(consts),
        "helpers": "\n\n\n".join(helpers),
        "functions": "\n\n\n".join(functions),
        "forward": forward,
        "cached": uncached,
    }
    return {f"modeling_{ident}.py": _fill(MODELING, values), f"configuration_{ident}.py": _fill(CONFIGURATION, values)}


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Fill all `@name@` marks in one pass, so that marks inside values stay; remove gaps of empty values."""
    text = re.sub(r"@(\w+)@", lambda m: values[m[1]], template)
    return re.sub(r"\n{4,}", "\n\n\n", text)


class _ModuleWriter:
    """Names values, groups nodes into blocks, and writes functions and the forward pass."""

    def __init__(self, p: Program) -> None:
        self.p = p
        self.needed = p.reachable([_result(p)])
        self.text = Statements(p, self.needed)
        inline = self.text.inline
        self.order = [n for n in _by_creation(p, self.needed) if not inline(n) and p.op(n) != INPUT]
        self.blocks = blocks_of(p, self.order, inline)
        self._names = Names({"x", "ids", "positions", *(f"block_{c}" for c in "abcdefghijklmnopqrstuvwxyz")})
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
        """Write a block as a function, or reuse the function with the same text."""
        names = Names({"x"})
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

    def _arguments(self, b: CodeBlock, names: Names) -> list[str]:
        """Argument names of a block: x for the main input, `skip` for other layers, else the value's name."""
        found, main = [], True
        for value in b.enters:
            if main or LAYER.match(self.p.path(value)):
                found.append("x" if main else names.take("skip"))
                main = False
            else:
                found.append(names.take(self._known[value]))
        return found

    def functions(self) -> list[str]:
        """One function per distinct block."""
        made = []
        for f in self.made.values():
            about = f"Layer{'s' if len(f.layers) > 1 else ''} {ranges(sorted(f.layers))}: {f.about}"
            made.append(f'def {f.name}{f.head}\n    """{about[: WIDTH - 12]}."""\n{f.body}')
        return made

    def forward(self) -> str:
        """The body of the forward pass."""
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
                lines.append(line(indent, ", ".join(self._known[v] for v in b.leaves), call))
            at = end
        lines.append(f"{indent}return {self._known[_result(self.p)]}")
        return "\n".join(lines)

    def _run_of_equals(self, at: int) -> int:
        """End of a run of blocks that call one function on its own result, which nothing else reads."""
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
        even = layers == list(range(layers[0], layers[-1] + 1))
        which = f"range({layers[0]}, {layers[-1] + 1})" if even and layers[0] else f"range({len(layers)})"
        rest = "".join(f", {self._known[v]}" for v in first.enters[1:])
        return [
            line(indent, "x", self._known[first.enters[0]]),
            f"{indent}for i in {which if even else tuple(layers)}:",
            line(f"{indent}    ", "x", f"{self.function[layers[0]].name}(self, i, x{rest}, run)"),
            line(indent, self._known[last.leaves[0]], "x"),
        ]


def _by_creation(p: Program, nodes: Container[NodeId]) -> list[NodeId]:
    """Topological order by creation, so that an edit does not reorder the text around it."""
    return [n for n in topological_sort(p.graph, key=p.seq) if n in nodes]
