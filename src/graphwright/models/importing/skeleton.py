"""A program without its weights, as data: what an import of a model class has found, stored to be built again.

A skeleton is `skeleton.json`, {"checksum": sha256 of the JSON of the body, "body": {...}}, beside the tensors of the
program that are in no checkpoint, `constants.safetensors`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphwright.array import BY_TAG, CPU, DType, NDArray, Spec, Storage
from graphwright.errors import GraphwrightError
from graphwright.files import JsonError, StrPath, atomic_directory, parse_json, read_file
from graphwright.program.files import forms
from graphwright.program.hashing import encode_attrs
from graphwright.program.kinds import CONST, INPUT, PARAM, STATE
from graphwright.safetensors import Checkpoint, TensorData, write_checkpoint

if TYPE_CHECKING:
    from graphwright.program.builder import Builder
    from graphwright.program.op_graph import Value
    from graphwright.program.program import Program

SCHEMA = 1
FILE, STEM = "skeleton.json", "constants"
_TAGS = {kind: tag for tag, kind in BY_TAG.items()}


@dataclass(frozen=True, slots=True)
class Node:
    """One node: its path, op or kind, operands as pairs (index of a node, result), attributes, spec of a source."""

    path: str
    op: str
    operands: tuple[tuple[int, int], ...]
    attrs: Mapping[str, Any]
    spec: Spec | None


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Nodes in topological order, outputs by name, constants by key, and facts of the model class.

    Attributes:
        stored: keys of the params and of those constants that a checkpoint has.
    """

    nodes: tuple[Node, ...]
    outputs: Mapping[str, tuple[int, int]]
    constants: Mapping[str, NDArray]
    stored: Mapping[str, Spec]
    facts: Mapping[str, Any]

    def build(self, b: Builder, params: Mapping[str, Value], compute: DType) -> None:
        """Add the nodes to a builder; params and stored constants are given by key, and cast where it is needed."""
        made: list[Any] = []
        for node in self.nodes:
            if node.op == INPUT:
                assert node.spec is not None
                made.append((b.input(node.path, node.spec.shape, node.spec.dtype),))
            elif node.op in (PARAM, CONST, STATE):
                made.append((self._stored(b, node, params),))
            else:
                operands = [made[i][port] for i, port in node.operands]
                found = b.op(node.op, *operands, name=node.path, **node.attrs)
                made.append(found if isinstance(found, tuple) else (found,))
        for name, (i, port) in self.outputs.items():
            b.output(made[i][port], name)

    def _stored(self, b: Builder, node: Node, params: Mapping[str, Value]) -> Value:
        key = node.attrs["key"]
        if key in self.constants:
            return b.const(node.path, self.constants[key])
        assert node.spec is not None
        value = params[key]
        if b.spec(value).dtype is node.spec.dtype:
            return value
        return b.cast(value, dtype=node.spec.dtype, name=f"{node.path}.cast")


def skeleton_of(p: Program, constants: Mapping[str, NDArray], facts: Mapping[str, Any]) -> Skeleton:
    """Return the skeleton of a program; `constants` are its arrays, by key, that no checkpoint has."""
    order = p.order()
    index = {node: i for i, node in enumerate(order)}
    nodes, stored = list[Node](), dict[str, Spec]()
    for node in order:
        op, source = p.op(node), not p.operands(node) and len(p.specs(node)) == 1
        operands = tuple((index[v.node], v.port) for v in p.operands(node))
        nodes.append(Node(p.path(node), op, operands, dict(p.attrs(node)), p.spec(node) if source else None))
        if op in (PARAM, CONST, STATE) and p.key(node) not in constants:
            stored[p.key(node)] = p.spec(node)
    outputs = {name: (index[v.node], v.port) for name, v in zip(p.output_names(), p.outputs(), strict=True)}
    return Skeleton(tuple(nodes), outputs, dict(constants), stored, dict(facts))


def save_skeleton(s: Skeleton, directory: StrPath) -> None:
    """Write a skeleton to a directory, which is replaced."""
    rows = [[n.path, n.op, [list(o) for o in n.operands], encode_attrs(n.attrs), n.spec and n.spec.to_json()]
            for n in s.nodes]  # fmt: skip
    body = {"schema": SCHEMA, "nodes": rows, "outputs": {name: list(at) for name, at in s.outputs.items()},
            "stored": {key: spec.to_json() for key, spec in s.stored.items()}, "facts": dict(s.facts)}  # fmt: skip
    text = json.dumps(body, separators=(",", ":"))
    whole = json.dumps({"checksum": sha256(text.encode()).hexdigest(), "body": text})
    Path(directory).parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(directory, True) as folder:
        items = [TensorData(key, _TAGS[a.dtype], a.shape, a.tobytes()) for key, a in s.constants.items()]
        write_checkpoint(folder, items, stem=STEM)
        (folder / FILE).write_text(whole, encoding="utf-8")


def load_skeleton(directory: Path) -> Skeleton | None:
    """Read a skeleton; None for a missing or damaged one, or one of another schema."""
    try:
        whole = parse_json(read_file(directory / FILE), nesting=4)
        text = whole["body"]
        if sha256(text.encode()).hexdigest() != whole["checksum"]:
            return None
        body = parse_json(text.encode(), nesting=64)
        if body["schema"] != SCHEMA:
            return None
        files = Checkpoint(directory, stem=STEM)
        constants = {key: _constant(files, key) for key in files}
        nodes = tuple(_node(row) for row in body["nodes"])
        outputs = {name: (int(i), int(port)) for name, (i, port) in body["outputs"].items()}
        stored = {key: forms.spec(spec) for key, spec in body["stored"].items()}
        return Skeleton(nodes, outputs, constants, stored, body["facts"])
    except (JsonError, GraphwrightError, OSError, LookupError, TypeError, ValueError, AttributeError):
        return None


def _node(row: Sequence[Any]) -> Node:
    path, op, operands, attrs, spec = row
    pairs = tuple((int(i), int(port)) for i, port in operands)
    return Node(path, op, pairs, forms.attrs(attrs), None if spec is None else forms.spec(spec))


def _constant(files: Checkpoint, key: str) -> NDArray:
    info, file = files.info(key), files.file_of(key)
    storage = Storage.mapped(lambda: file.bytes(key), info.nbytes, CPU, file.check_mapped)
    return NDArray(storage, BY_TAG[info.tag], tuple(info.shape))
