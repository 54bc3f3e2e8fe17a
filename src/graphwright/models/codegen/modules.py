"""The modules of generated code: which nodes are calls of torch modules, and the tree in which these are stored.

A node is a call if its op has the field `torch_module` and the keys of its weights are those of one module's
parameters, such as `model.norm.weight`; so the tree is that of the class the checkpoint was made for. Other weights are
parameters of the module that their key names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from graphwright.graph import NodeId
from graphwright.models.codegen.patterns import BlockLists, block_lists, pattern_paths, why_not_static
from graphwright.models.codegen.text import sequence
from graphwright.ops import OPS, traits
from graphwright.ops.emit import TorchModule
from graphwright.program.kinds import PARAM
from graphwright.program.op_graph import Value

if TYPE_CHECKING:
    from graphwright.array import DType
    from graphwright.program.program import Program

LAYER = re.compile(r"^layers\.(\d+)\.")
VOCABULARY = "vocab_size"
"""Field of the config from which generated code reads the size of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Module:
    """A module of generated code: its class as source text, and its arguments; a text is the name of a config field."""

    name: str
    args: tuple[Any, ...] = ()


@dataclass(slots=True)
class ModuleTree:
    """The modules of generated code.

    Attributes:
        modules: path -> module, without the layers and without modules that only contain others.
        calls: node -> path of the module that it calls.
        homes: number of a layer -> path of the module that computes it.
        parameters: key -> shape of the weights that belong to none of `modules`.
        embedding: node that looks up the embeddings of the input ids; None if other nodes read the ids.
        head: node that computes the logits, if a module does.
        tied: key of the head's weight -> key of the embedding's weight, if both are one.
        patterns: key of an attention pattern -> path of the module that holds it.
        blocks: path of such a module -> its edges and masks.
    """

    modules: dict[str, Module] = field(default_factory=dict)
    calls: dict[NodeId, str] = field(default_factory=dict)
    homes: dict[int, str] = field(default_factory=dict)
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    embedding: NodeId | None = None
    head: NodeId | None = None
    tied: dict[str, str] = field(default_factory=dict)
    patterns: dict[str, str] = field(default_factory=dict)
    blocks: dict[str, BlockLists] = field(default_factory=dict)


def module_form(p: Program, node: NodeId) -> tuple[TorchModule, Module] | None:
    """Return (field of the op, module) of a node that a module can compute; else None."""
    row = OPS.get(p.op(node))
    form = row.torch_module if row is not None else None
    if row is not None and row.traits.table is not None and why_not_static(p, node):
        return None
    args = form.args([p.spec(v) for v in p.operands(node)], p.attrs(node)) if form is not None else None
    if row is None or form is None or args is None:
        return None
    if form.grouped and row.groups is not None:
        first, width = row.groups(p.attrs(node))
        sources = [_uncast(p, v).node for v in p.operands(node)[first:]]
        return form_of_groups(form, args, first, [p.key(n) if p.op(n) == PARAM else "" for n in sources], width)
    return form, Module(form.name, tuple(args))


class Widths(dict[int, int]):
    """Number of an expert -> its width, written as short source."""

    def __repr__(self) -> str:
        widths = set(self.values())
        same = len(self) > 2 and len(widths) == 1
        return f"dict.fromkeys({sequence(list(self))}, {widths.pop()})" if same else super().__repr__()


_IN_GROUP = re.compile(r"(.+)\.(\d+)\.(\w+)\.(\w+)")


def form_of_groups(
    form: TorchModule, args: Sequence[Any], first: int, keys: Sequence[str], width: int
) -> tuple[TorchModule, Module] | None:
    """Return (form with the names of the weights, module) of an op whose operands from `first` on are groups.

    None unless their keys are `<path>.<number of the group>.<name>.weight` (or `.bias`), with the same names in each
    group of `width`.
    """
    found = [_IN_GROUP.fullmatch(key) for key in keys]
    rows = [m.groups() for m in found if m is not None]
    groups = [rows[i : i + width] for i in range(0, len(rows), width)]
    numbers = [group[0][1] for group in groups]
    same = len({m[0] for m in rows}) == 1 and len({tuple(m[2:] for m in group) for group in groups}) == 1
    if len(rows) < len(found) or not same or len(set(numbers)) < len(groups):
        return None
    if any(m[1] != group[0][1] for group in groups for m in group) or numbers != sorted(numbers, key=int):
        return None
    weights = {first + i: ".".join(m[1:]) for i, m in enumerate(rows)}
    names = tuple(dict.fromkeys(m[2] for m in groups[0]))
    size, widths, *rest = args
    given = size, Widths(zip(map(int, numbers), widths, strict=True)), names, *rest
    return replace(form, weights=weights), Module(form.name, given)


def _uncast(p: Program, value: Value) -> Value:
    while traits(p.op(value.node)).casts:
        value = p.operands(value.node)[0]
    return value


def module_tree(
    p: Program, order: Sequence[NodeId], layers: Mapping[int, Sequence[NodeId]], result: Value | None, compute: DType,
    apart: Set[NodeId] = frozenset(),
) -> ModuleTree:  # fmt: skip
    """Find the modules of a program.

    Args:
        order: the nodes that are written, without weights and inputs.
        layers: number of a layer -> its nodes.
        result: the logits of a language model; None for other tasks, whose head and embedding are modules like others.
        compute: dtype of activations; a module may hold a weight that is cast to it.
        apart: nodes that no module computes.
    """
    keys = {
        key: p.spec(n).sizes for n in p.reachable(Value(m) for m in order) if p.op(n) == PARAM for key in [p.key(n)]
    }
    starts = {number: _starts(p, number, nodes) for number, nodes in layers.items()}
    common = Counter(s for found in starts.values() for s in found)
    usual = common.most_common(1)[0][0] if common else "layers"
    tree = ModuleTree(homes={n: f"{found[0] if found else usual}.{n}" for n, found in starts.items()})
    claims: dict[str, list[tuple[NodeId, Module, Set[str]]]] = {}
    for node in order:
        if node not in apart and (found := _claim(p, node, compute)) is not None:
            claims.setdefault(found[0], []).append((node, *found[1:]))
    taken = set(tree.homes.values())
    for path, nodes in claims.items():
        _, first, names = nodes[0]
        below = {k[len(path) + 1 :] for k in keys if k.startswith(f"{path}.")}
        if path in taken or not names <= below or not below - names <= beside_groups(below - names, names):
            continue
        tree.modules[path] = first
        tree.calls |= {node: path for node, module, _ in nodes if module == first}
    held = {f"{path}.{name}" for path in tree.modules for name in claims[path][0][2]}
    tree.parameters = {key: shape for key, shape in keys.items() if key not in held}
    if result is not None:
        _set_head(p, tree, claims, result, keys)
        _set_embedding(p, tree, order)
    inside = {n: tree.homes[number] for number, nodes in layers.items() for n in nodes}
    for node in order:
        if node not in apart and (form := module_form(p, node)) is not None and not form[0].weights:
            path = _unweighted(p, tree, node, inside.get(node, ""), keys)
            tree.modules[path], tree.calls[node] = form[1], path
    layer_of = {n: number for number, nodes in layers.items() for n in nodes}
    needed = p.reachable(Value(n) for n in order)
    tree.patterns = pattern_paths(p, needed, layer_of, tree.homes, [*tree.modules, *keys, *tree.homes.values()])
    for key, path in tree.patterns.items():
        tree.blocks[path] = block_lists(p.patterns[key])
        tree.modules[path] = Module("BlockPattern", tree.blocks[path].sizes)
    return tree


def beside_groups(others: Set[str], names: Set[str]) -> Set[str]:
    """Return those of the names of `others` that a group of a module holds beside its linear layers, such as `3.bias`.

    `names` are the parameters of the module.
    """
    numbers = {name.partition(".")[0] for name in names if name.count(".") == 2}
    return {name for name in others if name.count(".") == 1 and name.partition(".")[0] in numbers}


def _starts(p: Program, number: int, nodes: Sequence[NodeId]) -> list[str]:
    """Return the prefixes of the keys of a layer's weights before `.<number>.`, the most frequent first."""
    found: Counter[str] = Counter()
    for key in (p.key(m) for n in nodes for m in p.reachable(p.operands(n), beyond=set(nodes)) if p.op(m) == PARAM):
        start, at, _ = key.partition(f".{number}.")
        found.update([start] if at else [])
    return [start for start, _ in found.most_common()]


def _claim(p: Program, node: NodeId, compute: DType) -> tuple[str, Module, Set[str]] | None:
    """Return (path, module, names of its parameters) if one module holds all weights of a node; else None."""
    form = module_form(p, node)
    if form is None or not form[0].weights:
        return None
    paths, names = set[str](), set[str]()
    for operand, name in zip(_weights(p, node, form[0]), form[0].weights.values(), strict=False):
        while traits(p.op(operand.node)).casts and p.spec(operand).dtype is compute:
            operand = p.operands(operand.node)[0]
        key = p.key(operand.node) if p.op(operand.node) == PARAM else ""
        if not key.endswith(f".{name}"):
            return None
        paths.add(key.removesuffix(f".{name}"))
        names.add(name)
    return (paths.pop(), form[1], names) if len(paths) == 1 else None


def _weights(p: Program, node: NodeId, form: TorchModule) -> Iterator[Value]:
    operands = p.operands(node)
    return (operands[i] for i in form.weights if i < len(operands))


def _set_head(
    p: Program, tree: ModuleTree, claims: Mapping[str, list[tuple[NodeId, Module, Set[str]]]], result: Value,
    keys: Mapping[str, Any],
) -> None:  # fmt: skip
    """Set the head, a module that only computes the logits; if its weight is the embedding's, it gets a new path."""
    node = result.node
    if p.consumers(node) or LAYER.match(p.path(node)):
        return
    if (path := tree.calls.get(node)) is not None:
        tree.head = node if sum(other == path for other in tree.calls.values()) == 1 else None
        return
    for path, nodes in claims.items():
        module = next((m for n, m, names in nodes if n == node and names == {"weight"}), None)
        if module is None or path not in tree.modules:
            continue
        free = ("lm_head", *(f"lm_head_{i}" for i in range(2, 99)))
        name = next(n for n in free if not any(k == n or k.startswith(f"{n}.") for k in keys))
        tree.modules[name], tree.calls[node], tree.head = module, name, node
        tree.tied = {f"{name}.weight": f"{path}.weight"}


def _set_embedding(p: Program, tree: ModuleTree, order: Sequence[NodeId]) -> None:
    """Set the embedding: the only node that reads the input ids; its module and the head's read the config's size."""
    ids = next((n for n in p.inputs() if p.path(n) == "ids"), None)
    within = set(order)
    readers = [n for n in p.consumers(ids) if n in within] if ids is not None else []
    if len(readers) != 1 or not traits(p.op(readers[0])).lookup or readers[0] not in tree.calls:
        return
    tree.embedding = readers[0]
    path = tree.calls[readers[0]]
    rows, width = tree.modules[path].args
    tree.modules[path] = Module(tree.modules[path].name, (VOCABULARY, width))
    if tree.head is not None:
        path = tree.calls[tree.head]
        if tree.modules[path].args[1] == rows:
            width, _, *rest = tree.modules[path].args
            tree.modules[path] = Module(tree.modules[path].name, (width, VOCABULARY, *rest))


def _unweighted(p: Program, tree: ModuleTree, node: NodeId, home: str, keys: Mapping[str, Any]) -> str:
    """Return the path for the module of a node without weights, such as an attention.

    It is the module that contains the one which reads the node's result, such as `self_attn`, if that only contains
    others; else a new one.
    """
    reader = next((tree.calls[n] for n in _downstream(p, node) if n in tree.calls), "")
    parent = reader.rpartition(".")[0]
    if home and parent.startswith(f"{home}.") and parent not in tree.modules:
        return parent
    count, start = 1, f"{home}.attention" if home else "attention"
    path = start
    while path in tree.modules or any(k == path or k.startswith(f"{path}.") for k in keys):
        count, path = count + 1, f"{start}_{count + 1}"
    return path


def _downstream(p: Program, node: NodeId) -> Iterator[NodeId]:
    """Yield the readers of a node and their readers, breadth first."""
    queue, known = [node], {node}
    for here in queue:
        for reader in p.consumers(here):
            if reader not in known:
                known.add(reader)
                queue.append(reader)
                yield reader


def containers(paths: Sequence[str], holders: Set[str]) -> dict[str, str]:
    """Return path -> class of the modules that contain the modules `paths`, and of `holders`, which have parameters."""
    children: dict[str, dict[str, None]] = {}
    for path in (*paths, *holders):
        while path:
            parent, _, name = path.rpartition(".")
            children.setdefault(parent, {})[name] = None
            path = parent
    found = {}
    for path, names in ({h: {} for h in holders} | children).items():
        if path and path not in paths:
            numbered = bool(names) and path not in holders and all(n.isdecimal() for n in names)
            listed = numbered and sorted(names, key=int) == [str(i) for i in range(len(names))]
            found[path] = "nn.ModuleList" if listed else "nn.ModuleDict" if numbered else "nn.Module"
    return found
