"""Modeling code: a program as a readable `modeling_*.py` that transformers loads with `trust_remote_code=True`.

Nodes with paths `layers.<i>.*` become one class per distinct block; equal consecutive blocks become a loop. A node that
a torch module computes calls it (`modules.py`); for others, the field `emit` of an op's definition gives the source
text, so any structure of such ops can be exported, also with skip connections. Names, keys and texts of a program are
sanitised before they enter the source.
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
from graphwright.models.codegen.modules import LAYER, VOCABULARY, containers, module_form, module_tree
from graphwright.models.errors import ExportLevelImpossible
from graphwright.ops import OPS, get, traits
from graphwright.ops.emit import appends, is_primary, sizes
from graphwright.program.kinds import CONST, INPUT, STORED
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.array import DType
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


class Statements:
    """Writes Python statements for the `needed` nodes of a program.

    The dtype `compute` of the program's activations stands for the dtype in which transformers loads the model:
    weights have it, and values are cast to it. Other dtypes are those that the program names.
    """

    def __init__(self, p: Program, needed: Container[NodeId], compute: DType) -> None:
        self.p, self.compute = p, compute
        self.within = {n for n in p.nodes() if n in needed}
        self.calls: Mapping[NodeId, str] = {}

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
            const = p.op(p.operands(node)[0].node) == CONST
            return self._expression(node, [inner], layer, base) if const or not self._computes(node) else inner
        if p.op(node) == CONST:
            return f"run.const({json.dumps(p.path(node))}{'' if self._exact(node) else ', run.dtype'})"
        return self._attribute(p.key(node), base, layer, "parameter")

    def _computes(self, node: NodeId) -> bool:
        return self.p.spec(node).dtype is self.compute

    def _exact(self, node: NodeId) -> bool:
        """Return True if the value keeps its dtype when transformers loads the model in a different one."""
        exact = (traits(self.p.op(n)).float32_constants for n in self.p.consumers(node))
        return not self._computes(node) or all(exact)

    def _attribute(self, key: str, base: Callable[[str], str], layer: int | None, kind: str) -> str:
        """Return the expression of a parameter or submodule (`kind`), read from its layer if possible, else the model.

        `base` maps the name of a module, such as `model.layers.{i}` or "" for the model, to the variable that holds it.
        """
        start, found, rest = key.partition(f".{layer}.")
        if layer is not None and found and (text := pieces.attributes(base(f"{start}.{{i}}"), rest.split("."))):
            return text
        root = base("")
        return pieces.attributes(root, key.split(".")) or f'{root}.get_{kind}("{key}")'

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
            text = self._expression(n, texts, layer, base)
            value = Value(n)
            if appended and len(f"{indent}{self.wanted(value, layer is not None)} = {text}") > pieces.WIDTH:
                text = self._expression(n, [name_pending(operands[0]), *texts[1:]], layer, base)
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
        if traits(p.op(node)).casts and self._computes(node):
            return f"{texts[0]}.to(run.dtype)"
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
class CodeFiles:
    """Generated files: name -> text, and the fields of the config that the code reads, with their values."""

    files: dict[str, str]
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BlockClass:
    """A generated class of layers: name, rest of the `def` line of `forward`, body, numbers of layers, docstring."""

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
    while bare := [n for n in twin.nodes() if (row := OPS.get(twin.op(n))) and not row.emit and not row.torch_module
                   and "emit" not in row.why]:  # fmt: skip
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
        elif op in STORED or module_form(p, node) is not None:
            continue
        elif _text(p, node, [f"x{i}" for i in range(len(p.operands(node)))]) is None:
            got = f"{op} ({OPS[op].why.get('emit', 'only causal attention without masks has one')})"
            raise ExportLevelImpossible("this op has no source text for generated code", where=p.path(node), got=got)
    pieces.check_keys({p.key(n): p.path(n) for n in p.params() if n in needed})
    pieces.const_table({p.path(n): p.weights.array(p.key(n)) for n in p.of_kind(CONST) if n in needed})


def _result(p: Program) -> Value:
    return p.output("logits") if "logits" in p.output_names() else p.outputs()[0]


def generate(p: Program, ident: str, edits: Sequence[str]) -> CodeFiles:
    """Return the configuration and modeling files of a program. Raises: ExportLevelImpossible.

    `ident` is a string of hex digits that makes file names unique; `edits` describe the edits, for the docstring.
    """
    p = emittable(p)
    writer = _ModuleWriter(p)
    tree, blocks, features = writer.tree, writer.blocks_text(), writer.features()
    code = "\n\n\n".join([*blocks, features])
    used = {m.name for m in tree.modules.values()}
    helpers = [text for name, text in pieces.CLASSES.items() if name in used]
    while more := [text for name, text in pieces.HELPERS.items() if text not in helpers
                   and re.search(rf"(?<![\w.]){name}\(", "\n".join([*helpers, code]))]:  # fmt: skip
        helpers = [*more, *helpers]
    ordered = [text for text in (*pieces.HELPERS.values(), *pieces.CLASSES.values()) if text in helpers]
    consts = {p.path(n): p.weights.array(p.key(n)) for n in p.of_kind(CONST) if n in writer.needed}
    windows = {m.args[2] if len(m.args) > 2 else None for m in tree.modules.values() if m.name == "Attention"}
    embedding = tree.modules[tree.calls[tree.embedding]].args if tree.embedding is not None else ()
    values = {
        "id": ident,
        "edits": pieces.docstring_lines(edits) or "- none",
        "modules": pieces.module_table(writer.table()),
        "parameters": pieces.shape_table(tree.parameters),
        "consts": pieces.const_table(consts),
        "helpers": "\n\n\n".join(ordered),
        "blocks": "\n\n\n".join(blocks),
        "features": features,
        **pieces.masks(windows),
        "interface": "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS\n" if windows else "",
        "cached": "" if windows else "        use_cache, past_key_values = False, None  # there is no attention\n",
        "static": repr("int(" not in code),
        "no_split": repr(sorted(f.name for f in writer.made.values())),
        **writer.ends(),
    }
    templates = {"modeling": pieces.MODELING, "configuration": pieces.CONFIGURATION}
    config: dict[str, Any] = {"tie_word_embeddings": bool(tree.tied)}
    if embedding and tree.embedding is not None:
        config[VOCABULARY] = p.spec(p.operands(tree.embedding)[0]).shape[0]
    return CodeFiles({f"{name}_{ident}.py": _fill(text, values) for name, text in templates.items()}, config)


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Replace each `@name@` by its value, but not an `@name@` within a value; collapse runs of blank lines."""
    text = re.sub(r"@(\w+)@", lambda m: values[m[1]], template)
    return re.sub(r"\n{4,}", "\n\n\n", text)


class _ModuleWriter:
    """Writes the source of a program: a class for each distinct layer, and the forward pass."""

    def __init__(self, p: Program) -> None:
        self.p = p
        self.result = _result(p)
        self.needed = p.reachable([self.result])
        compute = p.spec(self.result).dtype
        self.text = Statements(p, self.needed, compute)
        inline = self.text.inline
        made = topological_sort(p.graph, key=p.seq)  # by creation, so that an edit does not reorder the text around it
        order = [n for n in made if n in self.needed and not inline(n) and p.op(n) != INPUT]
        layers = {b.layer: b.nodes for b in blocks_of(p, order, inline) if b.layer is not None}
        self.tree = module_tree(p, order, layers, self.result, compute)
        self.text.calls = self.tree.calls
        self._known: dict[Value, str] = {Value(n): p.path(n) for n in p.inputs()}
        given = self._embedded()
        self.blocks = blocks_of(p, [n for n in order if n not in given and n != self.tree.head], inline)
        self._names = pieces.Names({"x", "ids", "embeds", "positions"})
        self.made: dict[tuple[str, str], BlockClass] = {}
        self.block: dict[int, BlockClass] = {}
        leaf = self._features()
        for b in self.blocks:
            if leaf.node in b.nodes and leaf not in b.leaves:
                b.leaves.append(leaf)
            for value in b.leaves if b.layer is not None else (Value(n, i) for n in b.nodes for i in self._ports(n)):
                self._known[value] = self._names.take(self.text.wanted(value))
        for b in self.blocks:
            if b.layer is not None:
                self._add(b, b.layer)

    def _embedded(self) -> list[NodeId]:
        """Name the embeddings of the input ids, also after casts to the dtype of the model; return these nodes."""
        p, node, found = self.p, self.tree.embedding, []
        while node is not None:
            self._known[Value(node)] = "embeds"
            found.append(node)
            readers = [n for n in p.consumers(node) if n in self.needed]
            casts = [n for n in readers if traits(p.op(n)).casts and p.spec(n).dtype is self.text.compute]
            node = casts[0] if len(readers) == 1 and casts else None
        return found

    def _features(self) -> Value:
        """Return the value that the method `features` returns: what the head reads, or the logits without a head."""
        head = self.tree.head
        if head is None:
            return self.result
        form = module_form(self.p, head)
        assert form is not None
        return next(v for i, v in enumerate(self.p.operands(head)) if i not in form[0].weights)

    def _ports(self, node: NodeId) -> range:
        return range(len(self.p.specs(node)))

    # -- text ---------------------------------------------------------------------------------------------------------
    def _add(self, b: CodeBlock, layer: int) -> None:
        """Add the class that computes the block `b` of a layer, or reuse an existing class with the same text."""
        names = pieces.Names({"x"})
        given = self._arguments(b, names)
        home = self.tree.homes[layer].removesuffix(f".{layer}") + ".{i}"
        prefixes: dict[str, str] = {home: "self"}

        def base(prefix: str) -> str:
            if prefix and prefix not in prefixes:
                prefixes[prefix] = names.take("layer")
            return prefixes.get(prefix, "run.model")

        known = dict(zip(b.enters, given, strict=True))
        lines = self.text.write(b.nodes, known, names, base, layer, " " * 8, b.leaves)
        others = {prefix.replace("{i}", "{self.number}"): name for prefix, name in prefixes.items() if prefix != home}
        heads = [f'        {name} = run.model.get_submodule(f"{prefix}")' for prefix, name in others.items()]
        body = "\n".join([*heads, *lines, f"        return {', '.join(known[v] for v in b.leaves)}"])
        head = f"(self, {', '.join([*given, 'run'])}):"
        found = self.made.get((head, body))
        if found is None:
            name = f"Block{chr(65 + len(self.made)) if len(self.made) < 26 else len(self.made)}"
            parts = dict.fromkeys(LAYER.sub("", self.p.path(n)).split(".")[0] for n in b.nodes)
            about = re.sub(r"[^A-Za-z0-9_, ]", "_", ", ".join(list(parts)[:10]))
            found = self.made[head, body] = BlockClass(name, head, body, [], about)
        found.layers.append(layer)
        self.block[layer] = found

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

    def blocks_text(self) -> list[str]:
        made = []
        for f in self.made.values():
            about = f"Layer{'s' if len(f.layers) > 1 else ''} {pieces.ranges(sorted(f.layers))}: {f.about}"
            head = f'class {f.name}(Layer):\n    """{about[: pieces.WIDTH - 12]}."""'
            made.append(f"{head}\n\n    def forward{f.head}\n{f.body}")
        return made

    def table(self) -> dict[str, tuple[str, tuple[Any, ...]]]:
        """Return path -> (class, arguments) of every module, parents before children."""
        homes = {self.tree.homes[layer]: (self.block[layer].name, ()) for layer in self.block}
        rows = {path: (m.name, m.args) for path, m in self.tree.modules.items()} | homes
        paths = [*self.tree.parameters, *rows]
        holders = {key.rpartition(".")[0] for key in self.tree.parameters}
        rows |= {path: (name, ()) for path, name in containers(list(rows), holders).items()}
        first = {path: i for i, path in enumerate(paths)}
        return dict(sorted(rows.items(), key=lambda row: (row[0].count("."), first.get(row[0], -1))))

    def ends(self) -> dict[str, str]:
        """Return the parts of the template that read the embedding and the head, by name."""
        tree, calls = self.tree, self.tree.calls

        def attribute(node: NodeId) -> str:
            path = calls[node]
            return pieces.attributes("self", path.split(".")) or f'self.get_submodule("{path}")'

        head, embedding = tree.head, tree.embedding
        methods = "".join(
            pieces.accessors(name, attribute(node), calls[node])
            for name, node in (("input", embedding), ("output", head)) if node is not None
        )  # fmt: skip
        return {
            "tied": f"    _tied_weights_keys = {json.dumps(tree.tied)}  # noqa: RUF012\n" if tree.tied else "",
            "accessors": methods,
            "embed": f"{attribute(embedding)}(input_ids)" if embedding is not None else "input_ids",
            "head": f"{attribute(head)}(x[:, kept])" if head is not None else "x[:, kept]",
            "last": "        if run.hidden is not None:\n            run.hidden.append(x)\n"
            if head is not None
            else "",
            "given": "embeds" if embedding is not None else "ids",
            "refused": "" if embedding is not None else pieces.NO_EMBEDS,
        }

    def features(self) -> str:
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
                given = "".join(f"{self._known[v]}, " for v in b.enters)
                call = f"{self._layer(b.layer, str(b.layer))}({given}run)"
                lines.append(pieces.line(indent, ", ".join(self._known[v] for v in b.leaves), call))
            at = end
        lines.append(f"{indent}return {self._known[self._features()]}")
        return "\n".join(lines)

    def _layer(self, layer: int, number: str) -> str:
        """Return the expression of the module of a layer; `number` is the text of the layer's number."""
        start = self.tree.homes[layer].removesuffix(f".{layer}")
        listed = {path: name for path, (name, _) in self.table().items()}.get(start) == "nn.ModuleList"
        text = pieces.attributes("self", start.split("."))
        if text and listed:
            return f"{text}[{number}]"
        prefix = "" if number.isdecimal() else "f"
        return f'self.get_submodule({prefix}"{start}.{number if number.isdecimal() else f"{{{number}}}"}")'

    def _run_of_equals(self, at: int) -> int:
        """Return the end of the run of equal blocks, from index `at` on, that one loop `x = f(x)` can compute."""
        end, first = at + 1, self.blocks[at]
        start = lambda b: self.tree.homes[b.layer].removesuffix(f".{b.layer}")  # noqa: E731
        while end < len(self.blocks):
            before, b = self.blocks[end - 1], self.blocks[end]
            chained = (
                b.layer is not None
                and self.block[b.layer] is self.block[first.layer or 0]
                and start(b) == start(first)
                and len(before.leaves) == 1
                and [before.leaves[0], *first.enters[1:]] == b.enters
                and all(m in set(b.nodes) for m in self.p.consumers(before.leaves[0]) if m in self.needed)
                and before.leaves[0] != self._features()
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
            pieces.line(f"{indent}    ", "x", f"{self._layer(layers[0], 'i')}(x{rest}, run)"),
            pieces.line(indent, self._known[last.leaves[0]], "x"),
        ]
