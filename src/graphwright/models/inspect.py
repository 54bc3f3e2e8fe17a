"""Inspect a model without reading weights: tree, shapes, dtypes, bytes, FLOPs and KV bytes per token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from graphwright.arguments import checked
from graphwright.array import BY_TAG, Spec, bfloat16, int64
from graphwright.graph import NodeId
from graphwright.models.generation.entries import attentions, entry_specs
from graphwright.ops import get, traits
from graphwright.program.axes.solve_axes import origin
from graphwright.program.cost import flops, ones
from graphwright.program.kinds import KINDS
from graphwright.program.patterns import visible
from graphwright.report import Report, bytes_text, flops_text
from graphwright.safetensors import Checkpoint

if TYPE_CHECKING:
    from graphwright.patterns import Pattern
    from graphwright.program.program import Program


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One weight: checkpoint key, param path, dtype, shape, bytes."""

    key: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Mixture:
    """One routed layer: path, experts, experts per token (None if the router decides), entries and bytes of experts."""

    path: str
    experts: int
    k: int | None
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class PatternRow:
    """One attention pattern: key, queries and keys, block size, planes, edges, readers, share of the pairs."""

    key: str
    tokens: tuple[int, int]
    block: int
    planes: int
    edges: int
    attentions: int
    density: float


@checked
@dataclass(frozen=True, slots=True, repr=False)
class Inspection(Report):
    """Size and cost of a model, from headers and config.

    Attributes:
        family, model: architecture and directory name; of a program that is not a model, `program` and its name.
        parameters, nbytes: numbers of entries and of bytes of all weights; tied weights count once.
        dtypes: dict from dtype to bytes of weights.
        flops_per_token: multiplications and additions for the first token; attention over a context adds to them. Of a
            program that is not a model, those of one sample.
        kv_bytes_per_token: cache bytes per token and sequence; 0 of a program that has no input `ids`.
        tied: whether head and embedding are one weight.
        nodes, edges, layers: number of nodes and edges of the program, and of layers in the config.
        inputs: dict from name to dtype and shape of each input.
        mixtures: the routed layers of the program, in order.
        active_parameters: entries of weights that one token uses: of experts those of the ones that it chooses, on
            average over experts of different widths.
        patterns: the attention patterns of the program.
    """

    family: str
    model: str
    parameters: int
    nbytes: int
    dtypes: dict[str, int]
    tensors: tuple[TensorRow, ...]
    flops_per_token: int = 0
    kv_bytes_per_token: int = 0
    tied: bool = False
    nodes: int = 0
    edges: int = 0
    layers: int = 0
    inputs: dict[str, str] = field(default_factory=dict)
    mixtures: tuple[Mixture, ...] = ()
    active_parameters: int = 0
    patterns: tuple[PatternRow, ...] = ()

    def tree(self, depth: int = 3) -> list[tuple[int, str, str, int]]:
        """Return rows (depth, name, dtype and shape, parameters) of modules; consecutive equal layers share a row."""
        root = _Module()
        for row in self.tensors:
            at = root
            for name in row.path.split("."):
                at = at.parts.setdefault(name, _Module())
                at.parameters += prod(row.shape)
            at.note = f"{row.dtype} {list(row.shape)}"
        return list(root.lines(depth))

    def _text(self) -> str:
        return self.text()

    def text(self, depth: int = 3) -> str:
        """Return the report as readable text, with the tree `depth` levels deep."""
        nbytes, kv = map(bytes_text, (self.nbytes, self.kv_bytes_per_token))
        flop, tied = flops_text(self.flops_per_token), ", head tied to the embedding"
        size = f"{self.parameters:,} parameters, {nbytes} ({', '.join(self.dtypes)})"
        graph = f"{self.nodes} nodes, {self.edges} edges"
        lines = [
            f"{self.model}: {self.family}, {self.layers} layers, {size}",
            f"{flop} per token, {kv} of KV cache per token{tied if self.tied else ''}; {graph}",
        ]
        if self.inputs and "ids" not in self.inputs:
            inputs = ", ".join(f"{name} {spec}" for name, spec in self.inputs.items())
            layers = f"{self.layers} layers, " if self.layers else ""
            costs = f"{flop} per sample of {inputs}, smallest sizes; {graph}"
            lines = [f"{self.model}: {self.family}, {layers}{size}", costs]
        if self.mixtures:
            used = ", ".join(_kinds(self.mixtures))
            each = sum(m.bytes for m in self.mixtures) / sum(m.experts for m in self.mixtures)
            active = f"{self.active_parameters:,} parameters active per token"
            lines.append(f"{len(self.mixtures)} routed layers of {used}; {active}; {bytes_text(each)} per expert")
        for row in self.patterns:
            shape = f"{row.tokens[0]} x {row.tokens[1]} tokens in blocks of {row.block}"
            planes = f", {row.planes} planes" if row.planes > 1 else ""
            used = f"{row.attentions} attention{'s' * (row.attentions != 1)}"
            share = f"{100 * row.density:.3g} % of the pairs"
            lines.append(f"pattern {row.key}: {shape}{planes}, {row.edges:,} edges, {share}, {used}")
        for level, name, note, parameters in self.tree(depth):
            share = 100 * parameters / max(self.parameters, 1)
            lines.append(f"{'  ' * level}{name:<{36 - 2 * level}}{note:<22}{parameters:>14,}{share:>7.1f} %")
        return "\n".join(lines)


def inspect_program(p: Program, family: str = "program", name: str = "", dims: Any = None) -> Inspection:
    """Report size and cost of a program in its current state, i.e. with its edits; `dims` are those of a model."""
    rows = (TensorRow(p.key(n), p.path(n), p.spec(n).dtype.name, p.spec(n).sizes, p.spec(n).nbytes) for n in p.params())
    facts = {"tied": bool(getattr(dims, "tied", False)), "layers": getattr(dims, "layers", 0)}
    cached = kv_bytes_per_token(p) if "ids" in p.input_names() else 0
    facts |= {"flops_per_token": flops(p, ones(p)), "kv_bytes_per_token": cached}
    facts["mixtures"] = found = mixtures(p)
    entries = sum(p.spec(n).size for n in {p.key(n): n for n in p.params()}.values())
    idle = sum(m.parameters * (m.experts - m.k) // m.experts for m in found if m.k is not None)
    facts["active_parameters"] = entries - idle
    facts["patterns"] = tuple(_pattern_row(p, key, pattern) for key, pattern in p.patterns.items())
    facts["inputs"] = {p.path(n): str(p.spec(n)) for n in p.inputs()}
    return _inspection(family, name or p.name, tuple(rows), nodes=len(p), edges=p.graph.edge_count, **facts)


def inspect_files(checkpoint: Checkpoint, name: str, family: str) -> Inspection:
    """Report what the headers tell, without an architecture: layers and costs are unknown and reported as 0."""
    names = {tag: dtype.name for tag, dtype in BY_TAG.items()}
    rows = (TensorRow(i.key, i.key, names.get(i.tag, i.tag), tuple(i.shape), i.nbytes) for i in checkpoint.infos())
    return _inspection(family, name, tuple(rows))


def _inspection(family: str, name: str, rows: tuple[TensorRow, ...], **facts: Any) -> Inspection:
    dtypes = Counter[str]()
    for row in rows:
        dtypes[row.dtype] += row.bytes
    parameters, nbytes = sum(prod(r.shape) for r in rows), sum(r.bytes for r in rows)
    return Inspection(family, name, parameters, nbytes, dict(dtypes), rows, **facts)


def _pattern_row(p: Program, key: str, pattern: Pattern) -> PatternRow:
    readers = {n for node in p.readers(key) for n in p.consumers(node)}
    density = visible(pattern, *pattern.tokens)
    return PatternRow(key, pattern.tokens, pattern.block, pattern.planes, len(pattern), len(readers), density)


def mixtures(p: Program) -> tuple[Mixture, ...]:
    """Return the routed layers of a program, in its order."""
    found, needed = [], p.reachable(p.outputs())
    for node in (n for n in p.order() if n in needed and p.op(n) not in KINDS and get(p.op(n)).traits.mixture):
        groups: Any = get(p.op(node)).groups
        first, width = groups(p.attrs(node))
        reads = p.operands(node)
        weights = {n for v in reads[first:] if (n := origin(p, v)) is not None}
        choice = p.spec(p.operands(reads[1].node)[0])
        k = choice.shape[1] if choice.dtype is int64 and isinstance(choice.shape[1], int) else None
        sizes = [p.spec(n) for n in weights]
        count = (len(reads) - first) // width
        found.append(Mixture(p.path(node), count, k, sum(s.size for s in sizes), sum(s.nbytes for s in sizes)))
    return tuple(found)


def _kinds(found: tuple[Mixture, ...]) -> list[str]:
    """Return texts such as `8 experts, 2 per token`, each once."""
    texts = (f"{m.experts} experts, {'any number' if m.k is None else m.k} per token" for m in found)
    return list(dict.fromkeys(texts))


def kv_bytes_per_token(p: Program) -> int:
    """Return the bytes that each token adds to a sequence's KV cache, over all attention ops that outputs need."""
    specs = (spec for node in attentions(p) for spec in entry_specs(p, node))
    return sum(Spec((s.shape[1], s.shape[3]), s.dtype).nbytes for s in specs)  # without batch and length


def weight_bytes_per_token(p: Program, narrow: bool = False) -> int:
    """Return the bytes of weights that are read to decode one token; an embedding counts as one row.

    Weights are counted in the dtype that kernels read, because casts of weights run once, not per token. `narrow` tells
    whether the VM runs, which reads bfloat16 matrices in their stored dtype.
    """
    total, needed = 0, p.reachable(p.outputs())
    for node in p.params():
        read = [s.nbytes for n, s in _readers(p, node, narrow) if n in needed and not traits(p.op(n)).lookup]
        spec = p.spec(node)
        row = spec.nbytes // max(int(spec.shape[0]), 1) if node in needed and spec.shape else 0
        total += read[0] if read else row
    return total


def _readers(p: Program, node: NodeId, narrow: bool) -> list[tuple[NodeId, Spec]]:
    """Return (reader, spec that it reads) for each node that reads a param, directly or through a cast."""
    found = []
    for reader in p.consumers(node):
        if traits(p.op(reader)).casts:
            for user in p.consumers(reader):
                stored = narrow and p.spec(node).dtype is bfloat16 and get(p.op(user)).narrow is not None
                found.append((user, p.spec(node if stored else reader)))
        else:
            found.append((reader, p.spec(node)))
    return found


@dataclass(slots=True)
class _Module:
    """A node of the module tree with its children, `parts`; `note` gives dtype and shape if it is a weight."""

    note: str = ""
    parameters: int = 0
    parts: dict[str, _Module] = field(default_factory=dict)

    def lines(self, depth: int, level: int = 0) -> Iterator[tuple[int, str, str, int]]:
        names, i = list(self.parts), 0
        while i < len(names):
            first, end = self.parts[names[i]], i + 1
            while names[i].isdigit() and end < len(names) and self.parts[names[end]] == first:
                end += 1
            label = names[i] if end == i + 1 else f"{names[i]} .. {names[end - 1]} ({end - i} equal, one shown)"
            weight = next(iter(first.parts.values())).note if len(first.parts) == 1 else ""
            yield level, label, first.note or weight, (end - i) * first.parameters
            if level < depth and not weight:
                yield from first.lines(depth, level + 1)
            i = end
