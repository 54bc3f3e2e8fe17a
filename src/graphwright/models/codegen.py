"""Rung 5: a program as a readable `modeling_*.py` that transformers loads with `trust_remote_code=True`.

Nodes below `layers.<i>` become one function per *distinct* block; equal blocks in a row become a loop. The code is
assembled from the op table's `emit` texts, so any structure whose ops have one can leave, skips and inserted ops included.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from keyword import iskeyword
from typing import Any

from graphwright.graph import NodeId
from graphwright.graph.analysis import topological_sort
from graphwright.models.errors import RungImpossible
from graphwright.models.modeling_text import CONFIGURATION, MODELING
from graphwright.ops.emit import EMIT, NO_EMIT
from graphwright.program import Program, Value
from graphwright.program.kinds import CONST, INPUT, STORED

_LAYER = re.compile(r"^layers\.(\d+)\.")
_PLAIN = re.compile(r"[\w.\-/]+")


@dataclass(slots=True)
class Block:
    """The nodes of one layer (or of the trunk between layers, layer None), in order.

    Attributes:
        nodes: op nodes.
        enters, leaves: values read from and given to other blocks.
        text: the function's body with the layer number as `{i}`; equal texts are one function.
        name: of the function.
    """

    layer: int | None
    nodes: list[NodeId]
    enters: list[Value] = field(default_factory=list)
    leaves: list[Value] = field(default_factory=list)
    text: str = ""
    name: str = ""


def check_emittable(p: Program) -> None:
    """Raises: RungImpossible naming the first op without source text, or a program with state."""
    needed = p.reachable(p.outputs())
    if p.writes() or p.states():
        raise RungImpossible("rung 5 cannot carry state", where=", ".join(p.path(n) for n in p.states()[:3]))
    for node in p.order():
        op = p.op(node)
        if node in needed and op not in STORED and op != INPUT and op not in EMIT:
            raise RungImpossible("rung 5 has no source text for this op", where=p.path(node), got=op, expected=NO_EMIT.get(op))


def generate(p: Program, ident: str, edits: Sequence[str]) -> dict[str, str]:
    """File name -> text of the configuration and modeling files.

    Args:
        ident: digits that make the class names unique.
        edits: what the journal says, for the docstring.
    Raises: RungImpossible.
    """
    check_emittable(p)
    writer = _Writer(p)
    shapes = "".join(f"    {p.key(n)!r}: {tuple(p.spec(n).shape)},\n" for n in p.params() if n in writer.needed)
    consts = "".join(f"    {p.path(n)!r}: {_numbers(p, n)},\n" for n in p.of_kind(CONST) if n in writer.needed)
    listed = "\n".join(f"- {_quoted(e)}" for e in edits) or "- none"
    values = {"id": ident, "shapes": shapes, "consts": consts, "functions": "\n\n".join(writer.functions()),
              "forward": writer.forward(), "edits": listed}  # fmt: skip
    return {f"modeling_{ident}.py": _fill(MODELING, values), f"configuration_{ident}.py": _fill(CONFIGURATION, values)}


def _quoted(text: str) -> str:
    """Words of a journal, which may be a stranger's, so that they end no docstring."""
    return text.replace("\\", "\\\\").replace('"', "'")


def _fill(template: str, values: Mapping[str, str]) -> str:
    return re.sub("@([a-z]+)@", lambda found: values[found[1]], template)  # in one pass: values are not templates


def _numbers(p: Program, node: NodeId) -> str:
    array = p.weights.array(p.key(node))
    flat = array.to_numpy("float32" if array.dtype.name == "bfloat16" else None)
    return f"({flat.tolist()!r}, torch.{array.dtype.name})"


class _Writer:
    """Names values, groups nodes into blocks, writes functions and the forward pass."""

    def __init__(self, p: Program) -> None:
        self.p = p
        self.needed = p.reachable(p.outputs())
        self.order = [n for n in _by_creation(p, self.needed) if not self._inline(n) and p.op(n) != INPUT]
        self.blocks = self._blocks()
        names: dict[str, str] = {}
        for block in self.blocks:
            if block.layer is not None:
                block.text = self._body(block)
                block.name = names.setdefault(block.text, f"block_{chr(97 + len(names)) if len(names) < 26 else len(names)}")

    def _inline(self, node: NodeId) -> bool:
        """True for weights, and for casts of them: they are written where they are read."""
        p = self.p
        return p.op(node) in STORED or (p.op(node) == "cast" and p.op(p.operands(node)[0].node) in STORED)

    # -- grouping -----------------------------------------------------------------------------------------------------------
    def _blocks(self) -> list[Block]:
        """Blocks in an order in which each comes after what it reads; without layers if the layers are entangled."""
        found = self._grouped(lambda n: (m := _LAYER.match(self.p.path(n))) and int(m[1]))
        return found if found is not None else self._grouped(lambda n: None) or []

    def _grouped(self, layer_of: Any) -> list[Block] | None:
        home = {n: layer_of(n) for n in self.order}
        blocks: list[Block] = []
        open_layers: dict[int, Block] = {}
        for n in self.order:
            layer = home[n]
            if layer is None:
                if not blocks or blocks[-1].layer is not None:
                    blocks.append(Block(None, []))
                blocks[-1].nodes.append(n)
                continue
            if layer not in open_layers:
                open_layers[layer] = Block(layer, [])
                blocks.append(open_layers[layer])
            open_layers[layer].nodes.append(n)
        place = {n: i for i, b in enumerate(blocks) for n in b.nodes}
        for n in self.order:
            for v in self.p.operands(n):
                if v.node in place and place[v.node] > place[n]:
                    return None  # two layers feed each other
        for b in blocks:
            inside = set(b.nodes)
            b.enters = list(dict.fromkeys(v for n in b.nodes for v in self.p.operands(n)
                                          if v.node not in inside and not self._inline(v.node)))  # fmt: skip
            outputs = set(self.p.outputs())
            b.leaves = [v for n in b.nodes for port in range(len(self.p.specs(n))) for v in [Value(n, port)]
                        if v in outputs or any(m not in inside and m in self.needed for m in self.p.consumers(v))]  # fmt: skip
        return blocks

    # -- names --------------------------------------------------------------------------------------------------------------
    def _local(self, value: Value) -> str:
        """Name of a value made inside its block: the path below the layer."""
        path = _LAYER.sub("", self.p.path(value.node))
        name = re.sub(r"\W", "_", path) + (f"_{value.port}" if len(self.p.specs(value.node)) > 1 else "")
        return f"{name}_" if iskeyword(name) or name[0].isdigit() else name

    def _global(self, value: Value) -> str:
        """Name of a value in the forward pass."""
        if self.p.op(value.node) == INPUT:
            return re.sub(r"\W", "_", self.p.path(value.node))
        path = self.p.path(value.node).replace("layers.", "layer_")
        return re.sub(r"\W", "_", path) + (f"_{value.port}" if len(self.p.specs(value.node)) > 1 else "")

    def _parameters(self, block: Block) -> list[str]:
        """Names of a block's arguments, by role: x for the main input, own names for tables, skips for the rest."""
        names, count = [], 0
        for value in block.enters:
            path = self.p.path(value.node)
            if _LAYER.match(path) or not names:
                count += 1
                names.append("x" if count == 1 else "skip" if count == 2 else f"skip_{count - 1}")
            else:
                names.append(self._global(value))
        return names

    def _weight(self, node: NodeId, layer: int | None) -> str:
        if self.p.op(node) not in STORED:
            return EMIT[self.p.op(node)]([self._weight(self.p.operands(node)[0].node, layer)], self.p.attrs(node))
        if self.p.op(node) == CONST:
            return f"run.const({self.p.path(node)!r})"
        key = self.p.key(node)
        if layer is not None and f".{layer}." in key and _PLAIN.fullmatch(key):
            return f'w[f"{key.replace(f".{layer}.", ".{i}.", 1)}"]'
        return f"w[{key!r}]"

    # -- text -----------------------------------------------------------------------------------------------------------------
    def _lines(self, nodes: Sequence[NodeId], name_of: Any, layer: int | None) -> list[str]:
        lines = []
        for n in nodes:
            operands = [self._weight(v.node, layer) if self._inline(v.node) else name_of(v) for v in self.p.operands(n)]
            op = self.p.op(n)
            if op == "junction" and not operands:
                shape = ", ".join(f"x.shape[{i}]" if isinstance(d, str) else str(d) for i, d in enumerate(self.p.spec(n).shape))
                text = f"x.new_zeros({shape})"
            else:
                text = EMIT[op](operands, self.p.attrs(n))
            targets = ", ".join(name_of(Value(n, port)) for port in range(len(self.p.specs(n))))
            lines.append(f"    {targets} = {text}")
        return lines

    def _body(self, block: Block) -> str:
        names = dict(zip(block.enters, self._parameters(block), strict=True))

        def name_of(value: Value) -> str:
            return names[value] if value in names else self._local(value)

        lines = self._lines(block.nodes, name_of, block.layer)
        head = f"(w, i, {', '.join(names.values())}, run):"
        return "\n".join([head, *lines, f"    return {', '.join(self._local(v) for v in block.leaves)}"])

    def functions(self) -> list[str]:
        """One function per distinct block."""
        seen: dict[str, list[int]] = {}
        for b in self.blocks:
            if b.layer is not None:
                seen.setdefault(b.name, []).append(b.layer)
        texts = {b.name: b.text for b in self.blocks if b.layer is not None}
        made = []
        for name, layers in seen.items():
            head, _, body = texts[name].partition("\n")
            made.append(f'def {name}{head}\n    """Layers {_ranges(layers)}."""\n{body}')
        return made

    def forward(self) -> str:
        """The body of the forward pass."""
        lines: list[str] = []
        at = 0
        while at < len(self.blocks):
            b = self.blocks[at]
            if b.layer is None:
                lines += [line.replace("    ", "        ", 1) for line in self._lines(b.nodes, self._global, None)]
                at += 1
                continue
            end = self._run_of_equals(at)
            if end - at > 1:
                lines += self._loop(at, end)
            else:
                given = ", ".join(self._global(v) for v in b.enters)
                lines.append(f"        {', '.join(self._global(v) for v in b.leaves)} = {b.name}(w, {b.layer}, {given}, run)")
            at = end
        lines.append(f"        return {self._global(self.p.outputs()[0])}")
        return "\n".join(lines)

    def _run_of_equals(self, at: int) -> int:
        """End of the stretch of blocks that are one function applied to its own result, nothing inside read elsewhere."""
        end = at + 1
        first = self.blocks[at]
        while end < len(self.blocks):
            before, b = self.blocks[end - 1], self.blocks[end]
            chained = (b.layer is not None and before.layer is not None and b.name == first.name and b.layer == before.layer + 1
                       and len(before.leaves) == 1 and b.enters[0] == before.leaves[0] and b.enters[1:] == first.enters[1:]
                       and all(m in set(b.nodes) for m in self.p.consumers(before.leaves[0]) if m in self.needed)
                       and before.leaves[0] not in self.p.outputs())  # fmt: skip
            if not chained:
                break
            end += 1
        return end

    def _loop(self, at: int, end: int) -> list[str]:
        first, last = self.blocks[at], self.blocks[end - 1]
        rest = "".join(f", {self._global(v)}" for v in first.enters[1:])
        return [f"        x = {self._global(first.enters[0])}",
                f"        for i in range({first.layer}, {(last.layer or 0) + 1}):",
                f"            x = {first.name}(w, i, x{rest}, run)",
                f"        {self._global(last.leaves[0])} = x"]  # fmt: skip


def _by_creation(p: Program, nodes: Container[NodeId]) -> list[NodeId]:
    """Nodes after what they read, otherwise as they were made: an edit must not shuffle the text around it."""
    return [n for n in topological_sort(p.graph, key=p.seq) if n in nodes]


def _ranges(layers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]} to {p[-1]}" for p in parts)
