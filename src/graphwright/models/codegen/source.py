"""Modeling code: a program as a readable `modeling_*.py` that transformers loads with `trust_remote_code=True`.

Nodes with paths `layers.<i>.*` become one class per distinct block; equal consecutive blocks become a loop. A node that
a torch module computes calls it (`modules.py`); for others, the field `emit` of an op's definition gives the source
text, so any structure of such ops can be exported, also with skip connections. Names, keys and texts of a program are
sanitised before they enter the source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import float32
from graphwright.graph import NodeId
from graphwright.graph.analysis import topological_sort
from graphwright.models.codegen import templates
from graphwright.models.codegen import text as pieces
from graphwright.models.codegen.blocks import CodeBlock, blocks_of
from graphwright.models.codegen.modules import LAYER, VOCABULARY, containers, module_form, module_tree
from graphwright.models.codegen.names import Names, attributes, check_keys
from graphwright.models.codegen.patterns import why_not_static
from graphwright.models.codegen.statements import Statements, consts_of, op_text
from graphwright.models.errors import ExportLevelImpossible
from graphwright.models.generation.text import IDS, MASK
from graphwright.ops import OPS, traits
from graphwright.ops.emit import Source
from graphwright.program.kinds import CONST, INPUT, STORED
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.program.program import Program

INPUTS = {"ids": ("B", "T"), "positions": ("B", "T")}
"""Inputs that transformers feeds, with the names of their sizes."""


@dataclass(frozen=True, slots=True)
class CodeFiles:
    """Generated code.

    Attributes:
        files: name of a file -> text.
        config: fields of the config that the code reads, with their values.
        tensors: arrays that the code reads beside the program's weights, by key: the blocks of patterns.
    """

    files: dict[str, str]
    config: dict[str, Any]
    tensors: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class BlockClass:
    """A generated class of layers: name, rest of the `def` line of `forward`, body, numbers of layers, docstring."""

    name: str
    head: str
    body: str
    layers: list[int]
    about: str


def emittable(p: Program, language_model: bool = True, buffers: Container[str] = ()) -> Program:
    """Return the program, or a copy in which ops without source text are replaced by their expansions.

    `language_model` tells that transformers feeds ids and positions, and generates with a cache. `buffers` are paths of
    constants that are not written as source. Raises: ExportLevelImpossible naming an op, state, input or key that
    generated code cannot express.
    """
    twin = p
    while bare := [n for n in twin.nodes() if (row := OPS.get(twin.op(n))) and not row.emit and not row.torch_module
                   and "emit" not in row.why]:  # fmt: skip
        twin = p.fork() if twin is p else twin
        twin.expand(bare)
    _check_emittable(twin, language_model, buffers)
    return twin


def _check_emittable(p: Program, language_model: bool, buffers: Container[str]) -> None:
    needed = p.reachable([_result(p)] if language_model else p.outputs())
    if held := p.assigns():
        what = "the program changes state, which generated code cannot express"
        raise ExportLevelImpossible(what, where=", ".join(p.path(n) for n in held[:3]))
    for node in (n for n in p.order() if n in needed):
        op = p.op(node)
        if op == INPUT:
            if language_model and INPUTS.get(p.path(node)) != p.spec(node).shape:
                what, expected = "the program has an input that transformers does not feed", "ids or positions [B, T]"
                raise ExportLevelImpossible(what, where=p.path(node), expected=expected, got=p.spec(node))
        elif op in STORED or (module_form(p, node) is not None and (language_model or not _runs(op))):
            continue
        elif OPS[op].torch_module is not None and traits(op).table is not None:
            what = "this attention over a pattern cannot be written as a mask"
            raise ExportLevelImpossible(what, where=p.path(node), got=why_not_static(p, node))
        elif (language_model and traits(op).attention) or op_text(p, node, _names_of(p, node)) is None:
            got = f"{op} ({OPS[op].why.get('emit', 'only causal attention without masks has one')})"
            raise ExportLevelImpossible("this op has no source text for generated code", where=p.path(node), got=got)
    check_keys({p.key(n): p.path(n) for n in p.params() if n in needed})
    pieces.const_table({path: a for path, a in consts_of(p, needed).items() if path not in buffers})


def _names_of(p: Program, node: NodeId) -> list[str]:
    return [f"x{i}" for i in range(len(p.operands(node)))]


def _runs(op: str) -> bool:
    """Return True for an op whose module reads the masks and the cache of a language model's forward pass."""
    form = OPS[op].torch_module
    return form is not None and form.run


def _result(p: Program) -> Value:
    return p.output("logits") if "logits" in p.output_names() else p.outputs()[0]


def generate_task(p: Program, ident: str, edits: Sequence[str], buffers: Mapping[str, str]) -> CodeFiles:
    """Return the configuration and modeling files of a program of another task than predicting tokens.

    Its class returns all outputs of the program by name. `buffers` maps the path of each constant that the files have
    to its key; `ident` and `edits` are those of `generate`. Raises: ExportLevelImpossible.
    """
    p = emittable(p, False, buffers)
    writer = _ModuleWriter(p, language_model=False, buffers=buffers)
    blocks, features = writer.blocks_text(), writer.features()
    helpers = _helpers(writer, "\n\n\n".join([*blocks, features]))
    inputs = [p.path(n) for n in p.inputs() if n in writer.needed]
    held = {
        buffers[p.path(n)]: p.spec(n).sizes for n in p.of_kind(CONST) if n in writer.needed and p.path(n) in buffers
    }
    consts = {path: a for path, a in consts_of(p, writer.needed).items() if path not in buffers}
    values = {
        "id": ident,
        "edits": pieces.docstring_lines(edits) or "- none",
        "modules": pieces.module_table(writer.table),
        "parameters": pieces.shape_table(writer.tree.parameters),
        "buffers": pieces.shape_table(held),
        "consts": pieces.const_table(consts),
        "helpers": "\n\n\n".join(helpers),
        "blocks": "\n\n\n".join(blocks),
        "features": features,
        "names": ", ".join(inputs),
        "first": inputs[0],
        "arguments": ", ".join(f"{name}=None" for name in inputs),
        **_given(p, inputs),
    }
    sources = {"modeling": templates.TASK_MODELING, "configuration": templates.CONFIGURATION}
    return CodeFiles(
        {f"{name}_{ident}.py": _fill(text, values) for name, text in sources.items()},
        {"tie_word_embeddings": False},
        {},
    )


def _given(p: Program, inputs: Sequence[str]) -> dict[str, str]:
    """Return the statements that set the named sizes, and those that check and convert the inputs."""
    sizes: dict[str, str] = {}
    lines = []
    for name in inputs:
        spec = p.spec(name)
        for axis, size in enumerate(spec.shape):
            if isinstance(size, str) and size.isidentifier():
                sizes.setdefault(size, f"        self.{size} = {name}.shape[{axis}]\n")
        if name == MASK and IDS in inputs:
            lines += [f"        if {name} is None:\n            {name} = torch.ones_like({IDS})\n"]
        else:
            why = json.dumps(f"this model needs {name}")
            lines += [f"        if {name} is None:\n            raise ValueError({why})\n"]
        if spec.dtype.is_float:
            lines += [f"        {name} = {name}.to(self.dtype)\n"]
    return {"sizes": "".join(sizes.values()), "defaults": "".join(lines)}


def _helpers(writer: _ModuleWriter, code: str) -> list[str]:
    """Return the functions and classes that the code of a program calls, in the order in which they need each other."""
    tree = writer.tree
    used = {m.name for m in tree.modules.values()}
    found = [text for name, text in templates.CLASSES.items() if name in used]
    passed = {str(a) for m in tree.modules.values() for a in m.args if isinstance(a, Source)}
    while more := [text for name, text in templates.HELPERS.items() if text not in found
                   and (name in passed or re.search(rf"(?<![\w.]){name}\(", "\n".join([*found, code])))]:  # fmt: skip
        found = [*more, *found]
    return [text for text in (*templates.HELPERS.values(), *templates.CLASSES.values()) if text in found]


def generate(p: Program, ident: str, edits: Sequence[str], *, cached: bool = True) -> CodeFiles:
    """Return the configuration and modeling files of a language model. Raises: ExportLevelImpossible.

    `ident` is a string of hex digits that makes file names unique; `edits` describe the edits, for the docstring.
    `cached` is False if tokens depend on earlier ones by other ops than attention: texts then run whole.
    """
    p = emittable(p)
    writer = _ModuleWriter(p)
    tree, blocks, features = writer.tree, writer.blocks_text(), writer.features()
    code = "\n\n\n".join([*blocks, features])
    ordered = _helpers(writer, code)
    attentions = [m.args for m in tree.modules.values() if m.name == "Attention"]
    windows = {args[2] if len(args) > 2 else None for args in attentions}
    embedding = tree.modules[tree.calls[tree.embedding]].args if tree.embedding is not None else ()
    routed = any(traits(p.op(n)).routed_heads for n in writer.needed)
    sparse = any(m.name == "PatternAttention" for m in tree.modules.values())
    values = {
        "id": ident,
        "edits": pieces.docstring_lines(edits) or "- none",
        "modules": pieces.module_table(writer.table),
        "parameters": pieces.shape_table(tree.parameters),
        "consts": pieces.const_table(consts_of(p, writer.needed)),
        "helpers": "\n\n\n".join(ordered),
        "blocks": "\n\n\n".join(blocks),
        "features": features,
        **templates.masks(windows),
        **templates.parts_of_run(routed, sparse),
        "interface": "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS\n" if windows else "",
        "cached": templates.no_cache("tokens mix by other operations than attention")
        if not cached
        else ""
        if windows or routed or sparse
        else templates.no_cache("there is no attention"),
        "whole": "" if cached else templates.WHOLE_TEXTS,
        "static": repr("int(" not in code and not any(f in "\n".join([*ordered, code]) for f in templates.RUNS)),
        "uncapped": repr(all(len(args) < 4 for args in attentions)),  # torch's attention has no softcap or sinks
        "no_split": repr(sorted(f.name for f in writer.made.values())),
        **writer.ends(),
    }
    sources = {"modeling": templates.MODELING, "configuration": templates.CONFIGURATION}
    config: dict[str, Any] = {"tie_word_embeddings": bool(tree.tied)}
    if embedding and tree.embedding is not None:
        config[VOCABULARY] = p.spec(p.operands(tree.embedding)[0]).shape[0]
    tensors = {key: array for path, lists in tree.blocks.items() for key, array in lists.arrays(path).items()}
    return CodeFiles({f"{name}_{ident}.py": _fill(text, values) for name, text in sources.items()}, config, tensors)


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Replace each `@name@` by its value, but not an `@name@` within a value; collapse runs of blank lines."""
    text = re.sub(r"@(\w+)@", lambda m: values[m[1]], template)
    return re.sub(r"\n{4,}", "\n\n\n", text)


class _ModuleWriter:
    """Writes the source of a program: a class for each distinct layer, and the forward pass."""

    def __init__(self, p: Program, language_model: bool = True, buffers: Mapping[str, str] | None = None) -> None:
        self.p = p
        self.result = _result(p) if language_model else None
        results = list(p.outputs()) if self.result is None else [self.result]
        self.needed = p.reachable(results)
        compute = next((p.spec(v).dtype for v in results if p.spec(v).dtype.is_float), float32)
        self.text = Statements(p, self.needed, compute)
        self.text.buffers = buffers or {}
        inline = self.text.inline
        made = topological_sort(p.graph, key=p.seq)  # by creation, so that an edit does not reorder the text around it
        order = [n for n in made if n in self.needed and not inline(n) and p.op(n) != INPUT]
        layers = {b.layer: b.nodes for b in blocks_of(p, order, inline) if b.layer is not None}
        apart = self.text.routing | {n for n in order if not language_model and _runs(p.op(n))}
        self.tree = module_tree(p, order, layers, self.result, compute, apart=apart)
        self.text.calls, self.text.patterns = self.tree.calls, self.tree.patterns
        self._known: dict[Value, str] = {Value(n): p.path(n) for n in p.inputs()}
        given = self._embedded()
        self.blocks = blocks_of(p, [n for n in order if n not in given and n != self.tree.head], inline)
        self._names = Names({"x", "ids", "embeds", "positions", *(p.path(n) for n in p.inputs())})
        self.made: dict[tuple[str, str], BlockClass] = {}
        self.block: dict[int, BlockClass] = {}
        self.leaves = results if self.result is None else [self._features(self.result)]
        for b in self.blocks:
            b.leaves += [leaf for leaf in self.leaves if leaf.node in b.nodes and leaf not in b.leaves]
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

    def _features(self, result: Value) -> Value:
        """Return the value that the method `features` returns: what the head reads, or the logits without a head."""
        head = self.tree.head
        if head is None:
            return result
        form = module_form(self.p, head)
        assert form is not None
        return next(v for i, v in enumerate(self.p.operands(head)) if i not in form[0].weights)

    def _ports(self, node: NodeId) -> range:
        return range(len(self.p.specs(node)))

    # -- text ---------------------------------------------------------------------------------------------------------
    def _add(self, b: CodeBlock, layer: int) -> None:
        """Add the class that computes the block `b` of a layer, or reuse an existing class with the same text."""
        names = Names({"x"})
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

    def _arguments(self, b: CodeBlock, names: Names) -> list[str]:
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

    @cached_property
    def table(self) -> dict[str, tuple[str, tuple[Any, ...]]]:
        """Path -> (class, arguments) of every module, parents before children."""
        homes = {self.tree.homes[layer]: (self.block[layer].name, ()) for layer in self.block}
        rows = {path: (m.name, m.args) for path, m in self.tree.modules.items()} | homes
        paths = [*self.tree.parameters, *rows]
        holders = {key.rpartition(".")[0] for key in self.tree.parameters}
        grouped = {path for n, path in self.tree.calls.items() if (f := module_form(self.p, n)) and f[0].grouped}
        holders = {h for h in holders if h.rpartition(".")[0] not in grouped}  # these make their groups
        rows |= {path: (name, ()) for path, name in containers(list(rows), holders).items()}
        first = {path: i for i, path in enumerate(paths)}
        return dict(sorted(rows.items(), key=lambda row: (row[0].count("."), first.get(row[0], -1))))

    def ends(self) -> dict[str, str]:
        """Return the parts of the template that read the embedding and the head, by name."""
        tree, calls = self.tree, self.tree.calls

        def attribute(node: NodeId) -> str:
            path = calls[node]
            return attributes("self", path.split(".")) or f'self.get_submodule("{path}")'

        head, embedding = tree.head, tree.embedding
        methods = "".join(
            templates.accessors(name, attribute(node), calls[node])
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
            "refused": "" if embedding is not None else templates.NO_EMBEDS,
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
        if self.result is not None:
            return "\n".join([*lines, f"{indent}return {self._known[self.leaves[0]]}"])
        named = zip(self.p.output_names(), self.leaves, strict=True)
        given = [f"{json.dumps(name)}: {self._known[leaf]}" for name, leaf in named]
        lines.append(f"{indent}return {{{', '.join(given)}}}")
        return "\n".join(lines)

    def _layer(self, layer: int, number: str) -> str:
        """Return the expression of the module of a layer; `number` is the text of the layer's number."""
        start = self.tree.homes[layer].removesuffix(f".{layer}")
        listed = {path: name for path, (name, _) in self.table.items()}.get(start) == "nn.ModuleList"
        text = attributes("self", start.split("."))
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
                and before.leaves[0] not in self.leaves
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
