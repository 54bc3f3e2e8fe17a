"""Duplicating a module, such as a block of a model: the copy, with weights of its own, follows the original."""

from __future__ import annotations

from itertools import count, takewhile
from typing import TYPE_CHECKING

from graphwright.program.axes.units import entering
from graphwright.program.editing.replace import boundary, redirect
from graphwright.program.errors import BoundaryMismatch, UnknownNode
from graphwright.program.kinds import INPUT, STORED
from graphwright.program.op_graph import Value
from graphwright.program.weights import shared_variable

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program.editing.transaction import Transaction


def duplicate(e: Transaction, module: str) -> str:
    """Insert a copy of a module after it: the copy reads the module's result, and the result's readers read the copy.

    The copy has weights of its own, with equal values. What else the module reads, such as tables of positions, the
    copy reads too. A copy of module `layers.3` is `layers.4`: modules from 4 up to the next free number get the
    following number, in names and in checkpoint keys. A copy of a module without a number gets a name like `mlp_2`.

    Args:
        module: path of the module, whose nodes have names that start with `<module>.`.
    Returns: path of the copy. Raises: UnknownNode; NotConvex if a path leaves the module and comes back;
        BoundaryMismatch if no result of the module can be read in place of a value that it reads.
    Source: repeating blocks as depth up-scaling, Kim et al. 2023, "SOLAR 10.7B".
    """
    p = e.program
    if not isinstance(module, str) or not (nodes := p.with_prefix(f"{module}.")):
        fix = "list(program.select()) shows all names; a module is the part of a name before a dot"
        raise UnknownNode("no module has this path", where=str(module), fix=fix)
    nodes.sort(key=p.order_labels.key)
    stream, result = _stream(e, nodes, module)
    target = _free_path(e, module)
    values, keys = {stream: result}, dict[str, str]()
    copies = [_copy(e, n, f"{target}{p.path(n)[len(module) :]}", values, keys, module, target, result.node)
              for n in nodes if p.op(n) != INPUT]  # fmt: skip
    redirect(e, {result: values[result]}, skip={*nodes, *copies})
    return target


def _stream(e: Transaction, nodes: list[NodeId], module: str) -> tuple[Value, Value]:
    """Return (value that a module reads, result of the module with the same spec): its ends on the residual stream.

    Without a residual path they are the only such pair. Raises: BoundaryMismatch, NotConvex.
    """
    p = e.program
    enters, leaves = (tuple(v for v in side if p.op(v.node) not in STORED) for side in boundary(p, nodes))
    inside = set(nodes)
    for value in reversed(leaves):
        spec = e.spec(value)
        before = entering(p, value, inside)
        equal = [v for v in enters if e.spec(v) == spec] if before is None else [before]
        if len(equal) == 1:
            return equal[0], value
    sides = [", ".join(f"{p.path(v)} {p.spec(v)}" for v in side) or "nothing" for side in (enters, leaves)]
    raise BoundaryMismatch("the module cannot follow itself: no result has the spec of one value that it reads",
                           where=module, expected=sides[0], got=sides[1])  # fmt: skip


def _copy(
    e: Transaction, node: NodeId, name: str, values: dict[Value, Value], keys: dict[str, str], module: str,
    target: str, after: NodeId,
) -> NodeId:  # fmt: skip
    """Copy one node under a new name, with its input edges, and enter its results into `values`: old -> new value.

    `keys` maps the keys of copied weights to new ones; the node is inserted after `after` in the topological order.
    """
    p, op, attrs, variable = e.program, e.program.op(node), dict(e.program.attrs(node)), None
    if op in STORED:
        attrs.pop("axes", None)  # names of axes are unique
        key = attrs["key"]
        if key not in keys:
            keys[key] = p.weights.free_key(renumbered(key, module, target) or name)
            # the name of a variable is its key in the file, from which an export copies the bytes
            variable = shared_variable(p.weights[key], type(p.weights[key]), p.weights[key].name)
        attrs["key"] = keys[key]
    operands = [(p.edge_port(edge), values.get(v := p.edge_value(edge), v)) for edge in p.in_edges(node)]
    latest = max([after, *(v.node for _, v in operands)], key=p.order_labels.key)
    made = e.add_node(op, attrs, name, p.specs(node), variable, after=latest)
    for port, value in operands:
        e.add_edge(value, made, port)
    values.update((Value(node, port), Value(made, port)) for port in range(len(p.specs(node))))
    return made


def _free_path(e: Transaction, module: str) -> str:
    """Return the path for a copy of a module; if it ends in a number, move the following modules up by one."""
    p, (prefix, dot, last) = e.program, module.rpartition(".")
    if not (dot and last.isascii() and last.isdigit()):
        return next(path for path in (f"{module}_{i}" for i in count(2)) if not p.with_prefix(f"{path}."))
    first = int(last) + 1
    taken = takewhile(lambda i: p.with_prefix(f"{prefix}.{i}."), count(first))
    for number in reversed(list(taken)):
        _move(e, f"{prefix}.{number}", f"{prefix}.{number + 1}")
    return f"{prefix}.{first}"


def _move(e: Transaction, old: str, new: str) -> None:
    """Rename the nodes of a module, and the keys of weights that no other module reads."""
    p = e.program
    nodes = sorted(p.with_prefix(f"{old}."), key=p.seq)
    for node in nodes:
        key = renumbered(p.key(node), old, new) if p.op(node) in STORED else None
        own = key is not None and not p.weights.has_key(key) and set(p.readers(p.key(node))) <= set(nodes)
        e.rename(node, f"{new}{p.path(node)[len(old) :]}", key=key if own else None)


def renumbered(key: str, old: str, new: str) -> str | None:
    """Return a checkpoint key with the last segment of path `old` replaced by that of `new`, at its first occurrence.

    Return None if the key does not contain the segment: `("model.layers.3.norm.weight", "layers.3", "layers.4")`
    gives `model.layers.4.norm.weight`.
    """
    (before, after), parts = (path.rpartition(".")[2] for path in (old, new)), key.split(".")
    if before not in parts:
        return None
    at = parts.index(before)
    return ".".join([*parts[:at], after, *parts[at + 1 :]])
