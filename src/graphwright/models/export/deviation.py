"""What of a program is not as its family's template has it: the reason why a rung can or cannot carry it.

Nodes are matched by path, and those that were renamed by what they are: op, attributes and matched operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphwright.array import NDArray, Storage, dtype
from graphwright.array.device import CPU
from graphwright.autograd import Parameter
from graphwright.graph import NodeId
from graphwright.program import Builder, Program
from graphwright.program.hashing import encode_attrs
from graphwright.program.kinds import CONST, STORED

if TYPE_CHECKING:
    from graphwright.models.model import Model


@dataclass(frozen=True, slots=True)
class Deviation:
    """One difference from the template.

    Attributes:
        path: of the node.
        kind: `added`, `removed`, `rewired`, `op`, `attrs`, `size` or `dtype`.
        detail: in words.
        rungs: those that can carry it.
    """

    path: str
    kind: str
    detail: str
    rungs: tuple[int, ...] = (5,)


def template(model: Model) -> Program:
    """The program that the family's template gives for the model's config; its weights have specs and no bytes."""
    b = Builder("template")
    params = {}
    program = model.program
    stored = {program.key(n): program.spec(n).dtype for n in program.params()}
    shapes = {path: shape for path, _, shape, _ in model.arch.weights(model.dims)}
    for path, key in model.keys.items():
        array = NDArray(Storage.mapped(_no_bytes, 0, CPU), stored.get(key, dtype("float32")), shapes[path])
        params[path] = b.param(path, Parameter(array, True, key), key=key)
    model.arch.build(b, model.dims, params, dtype(model.compute))
    return b.build()


def _no_bytes() -> memoryview:
    raise AssertionError("a template has no weights")


def deviations(model: Model) -> list[Deviation]:
    """Every node that differs from the template, by path; a node that was only renamed does not."""
    ours, theirs = model.program, template(model)
    pairs = _matched(ours, theirs)
    mine = {node: other for other, node in pairs.items()}
    alive = ours.reachable(ours.outputs())
    found = [Deviation(theirs.path(n), "removed", f"{theirs.op(n)} is gone") for n in theirs.nodes() if n not in pairs]
    for node in ours.nodes():
        if node not in mine:
            if node in alive or ours.graph.out_degree(node):
                found.append(Deviation(ours.path(node), "added", f"{ours.op(node)} is not in the family's block"))
            continue
        found += _differences(ours, node, theirs, mine[node], mine)
    results = [(n, mine.get(v.node), v.port) for n, v in zip(ours.output_names(), ours.outputs(), strict=True)]
    wanted = [(n, v.node, v.port) for n, v in zip(theirs.output_names(), theirs.outputs(), strict=True)]
    if results != wanted:
        found.append(Deviation("outputs", "rewired", "another node is the output"))
    return sorted(found, key=lambda d: (d.path, d.kind))


def _matched(ours: Program, theirs: Program) -> dict[NodeId, NodeId]:
    """Node of the template -> node of the program: by path or key, else by what it is, along the order of reading."""
    by_path = {ours.path(n): n for n in ours.nodes()}
    by_key = {ours.key(n): n for kind in STORED for n in ours.of_kind(kind)}
    pairs: dict[NodeId, NodeId] = {}
    known = {theirs.path(n) for n in theirs.nodes()}
    for other in theirs.order():
        node = by_key.get(theirs.key(other)) if theirs.op(other) in STORED else by_path.get(theirs.path(other))
        if node is None:
            reads = [pairs.get(v.node) for v in theirs.operands(other)]
            near = ours.consumers(reads[0]) if reads and reads[0] is not None else ()
            strangers = (n for n in near if ours.path(n) not in known and n not in pairs.values())
            node = next((n for n in strangers if _same(ours, n, theirs, other, pairs)), None)
        if node is not None:
            pairs[other] = node
    return pairs


def _same(ours: Program, node: NodeId, theirs: Program, other: NodeId, pairs: dict[NodeId, NodeId]) -> bool:
    reads = [(v.node, v.port) for v in ours.operands(node)]
    wanted = [(pairs.get(v.node), v.port) for v in theirs.operands(other)]
    return ours.op(node) == theirs.op(other) and ours.attrs(node) == theirs.attrs(other) and reads == wanted


def _differences(
    ours: Program, node: NodeId, theirs: Program, other: NodeId, mine: dict[NodeId, NodeId]
) -> Iterator[Deviation]:
    path = ours.path(node)
    if ours.op(node) != theirs.op(other):
        yield Deviation(path, "op", f"{ours.op(node)} instead of {theirs.op(other)}")
    elif ours.op(node) in STORED:
        here, there = ours.spec(node), theirs.spec(other)
        if here.shape != there.shape:
            yield Deviation(path, "size", f"{here} instead of {there}")
        elif here != there:
            yield Deviation(path, "dtype", f"{here} instead of {there}")
        elif ours.op(node) == CONST and ours.weights.digest(ours.key(node)) != theirs.weights.digest(theirs.key(other)):
            yield Deviation(path, "attrs", "other numbers than the config gives")
    else:
        here, there = encode_attrs(ours.attrs(node)), encode_attrs(theirs.attrs(other))
        changed = [f"{k} {here.get(k)} instead of {there.get(k)}" for k in there | here if here.get(k) != there.get(k)]
        if changed:
            yield Deviation(path, "attrs", ", ".join(changed))
    reads = [(mine.get(v.node), v.port) for v in ours.operands(node)]
    if reads != [(v.node, v.port) for v in theirs.operands(other)]:
        here, there = (", ".join(p.path(v) for v in p.operands(n)) for p, n in ((ours, node), (theirs, other)))
        yield Deviation(path, "rewired", f"reads {here or 'nothing'} instead of {there}")
