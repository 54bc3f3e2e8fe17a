"""Inspect a model without reading weights: tree, shapes, dtypes, bytes, FLOPs and KV bytes per token."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

from graphwright.array import BY_TAG, Spec, bfloat16
from graphwright.graph import NodeId
from graphwright.models.architectures.config import Config
from graphwright.ops import get, traits
from graphwright.program import Program
from graphwright.program.cost import flops
from graphwright.safetensors import Checkpoint


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One weight: checkpoint key, param path, dtype, shape, bytes."""

    key: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Inspection:
    """Facts from headers and config.

    Attributes:
        family, model: architecture and directory name.
        parameters, nbytes: of all weights; tied weights count once.
        dtypes: dtype -> bytes.
        tensors: one row per weight.
        flops_per_token: multiplications and additions for the first token; attention over a context adds to them.
        kv_bytes_per_token: cache bytes per token and sequence.
        tied: whether head and embedding are one weight.
        nodes, edges, layers: of the program.
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

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        facts = {name: getattr(self, name) for name in self.__slots__ if name != "tensors"}
        facts["tensors"] = [
            {"key": t.key, "path": t.path, "dtype": t.dtype, "shape": list(t.shape), "bytes": t.nbytes}
            for t in self.tensors
        ]
        return facts

    def tree(self, depth: int = 3) -> list[tuple[int, str, str, int]]:
        """(depth, name, note, parameters) per module; equal layers in a row share one line."""
        return _tree(self.tensors, depth)

    def __repr__(self) -> str:
        return self.text()

    def text(self, depth: int = 3) -> str:
        """Text for people, with the tree `depth` levels deep."""
        lines = [
            f"{self.model}: {self.family}, {self.layers} layers, {self.parameters:,} parameters, {_size(self.nbytes)} "
            f"({', '.join(self.dtypes)})",
            f"{_count(self.flops_per_token)}FLOP per token, {_size(self.kv_bytes_per_token)} of KV cache per token"
            f"{', head tied to the embedding' if self.tied else ''}; {self.nodes} nodes, {self.edges} edges",
        ]
        for level, name, note, parameters in self.tree(depth):
            share = 100 * parameters / max(self.parameters, 1)
            lines.append(f"{'  ' * level}{name:<{36 - 2 * level}}{note:<22}{parameters:>14,}{share:>7.1f} %")
        return "\n".join(lines)


def inspect_program(p: Program, family: str, config: Config, dims: Any) -> Inspection:
    """Inspect a program in its current state, with its edits."""
    rows = (TensorRow(p.key(n), p.path(n), p.spec(n).dtype.name, p.spec(n).sizes, p.spec(n).nbytes) for n in p.params())
    return _inspection(
        family,
        config,
        tuple(rows),
        flops_per_token=flops(p, {"B": 1, "T": 1}),
        kv_bytes_per_token=kv_bytes_per_token(p),
        tied=bool(getattr(dims, "tied", False)),
        nodes=len(p),
        edges=p.graph.edge_count,
        layers=getattr(dims, "layers", 0),
    )


def inspect_files(checkpoint: Checkpoint, config: Config, family: str) -> Inspection:
    """Inspect headers alone, without an architecture: layers and costs are unknown, and reported as 0."""
    rows = (TensorRow(i.key, i.key, _dtype_name(i.tag), tuple(i.shape), i.nbytes) for i in checkpoint.infos())
    return _inspection(family, config, tuple(rows))


def _inspection(family: str, config: Config, rows: tuple[TensorRow, ...], **facts: Any) -> Inspection:
    dtypes = Counter[str]()
    for row in rows:
        dtypes[row.dtype] += row.nbytes
    sizes = {"parameters": sum(prod(r.shape) for r in rows), "nbytes": sum(r.nbytes for r in rows)}
    return Inspection(family, config.path.parent.name, **sizes, dtypes=dict(dtypes), tensors=rows, **facts)


def kv_bytes_per_token(p: Program) -> int:
    """Bytes that the KV cache grows by per token and sequence, over all attentions that outputs need."""
    total, needed = 0, p.reachable(p.outputs())
    for node in (n for n in p.of_kind("sdpa") if n in needed):
        for v in p.operands(node)[1:3]:
            spec = p.spec(v)
            total += Spec((spec.shape[1], spec.shape[3]), spec.dtype).nbytes  # without batch and length
    return total


def weight_bytes_per_token(p: Program, narrow: bool = False) -> int:
    """Bytes of weights that decoding one token reads; an embedding counts one row.

    Counted in the dtype that kernels read, because casts of weights run once, not per token.

    Args:
        narrow: whether the VM runs, which reads bfloat16 matrices in their stored dtype.
    """
    total = 0
    needed = p.reachable(p.outputs())
    for node in p.params():
        for reader, spec in _readers(p, node, narrow):
            if reader in needed and not traits(p.op(reader)).lookup:
                total += spec.nbytes
                break
        else:
            spec = p.spec(node)
            total += spec.nbytes // max(int(spec.shape[0]), 1) if node in needed and spec.shape else 0
    return total


def _readers(p: Program, node: NodeId, narrow: bool) -> list[tuple[NodeId, Spec]]:
    """Nodes that use a param, directly or through a cast, with the spec that they read."""
    found = []
    for reader in p.consumers(node):
        if traits(p.op(reader)).casts:
            for user in p.consumers(reader):
                stored = narrow and p.spec(node).dtype is bfloat16 and bool(get(p.op(user)).traits.narrow)
                found.append((user, p.spec(node if stored else reader)))
        else:
            found.append((reader, p.spec(node)))
    return found


def _dtype_name(tag: str) -> str:
    return BY_TAG[tag].name if tag in BY_TAG else tag


def _tree(tensors: tuple[TensorRow, ...], depth: int) -> list[tuple[int, str, str, int]]:
    children: dict[tuple[str, ...], dict[str, None]] = {}
    totals: dict[tuple[str, ...], int] = {}
    notes: dict[tuple[str, ...], str] = {}
    for row in tensors:
        parts = tuple(row.path.split("."))
        for i in range(len(parts)):
            children.setdefault(parts[:i], {})[parts[i]] = None
            totals[parts[: i + 1]] = totals.get(parts[: i + 1], 0) + prod(row.shape)
        notes[parts] = f"{row.dtype} {list(row.shape)}"
    signature: dict[tuple[str, ...], Any] = {}

    def sign(at: tuple[str, ...]) -> Any:
        if at not in signature:
            signature[at] = (notes.get(at), tuple((c, sign((*at, c))) for c in children.get(at, ())))
        return signature[at]

    lines: list[tuple[int, str, str, int]] = []

    def walk(at: tuple[str, ...], level: int) -> None:
        names = list(children.get(at, ()))
        i = 0
        while i < len(names):
            here = (*at, names[i])
            run = i + 1
            while names[i].isdigit() and run < len(names) and sign((*at, names[run])) == sign(here):
                run += 1
            label = names[i] if run == i + 1 else f"{names[i]} .. {names[run - 1]} ({run} equal, one shown)"
            only = list(children.get(here, ()))
            note = notes.get(here) or (notes.get((*here, only[0]), "") if len(only) == 1 else "")
            lines.append((level, label, note, sum(totals[(*at, n)] for n in names[i:run])))
            if level + 1 < depth + 1 and not (len(only) == 1 and (*here, only[0]) in notes) and only:
                walk(here, level + 1)
            i = run

    walk((), 0)
    return lines


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return ""


def _count(n: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if n < 1000 or unit == "T":
            return f"{n:.2f} {unit}"
        n /= 1000
    return ""
