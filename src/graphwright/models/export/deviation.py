"""Differences between a program and its family's template, node by node.

Nodes are paired by path; renamed nodes by op, attributes and paired operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphwright.models.export.affine_map import AffineMap
from graphwright.models.export.template_match import TRUNK, attr_changes
from graphwright.ops import traits
from graphwright.program.kinds import CONST, STORED

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.models.export.template_match import TemplateMatch
    from graphwright.program import Program

KINDS = ("size", "removed", "added", "rewired", "gate", "factor", "dtype", "attrs", "op")
AXES = {"mlp": "neurons", "heads": "heads", "kv_heads": "kv_groups", "hidden": "channels", "layers": "layers"}
"""Dimension of a family -> name of its units."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """One difference from the template.

    Attributes:
        path: of the node.
        kind: one of `KINDS`: a weight of another size or dtype; a node removed or added; a node with other operands; a
            node that scales a branch (`gate`) or is one of several that replace a matrix (`factor`); other attributes;
            another op.
        detail: the difference in words.
        levels: numbers of the export levels that can carry it. A level can carry a program if it can carry all its
            deviations.
        axis, field: units and the config field that counts them, if a size differs.
        branch: number of the template branch, if it is known.
        dimension: name of the dimension that differs.
        matched: whether the template matcher explains the node.
    """

    path: str
    kind: str
    detail: str
    levels: tuple[int, ...] = ()
    axis: str = ""
    field: str = ""
    branch: int | None = None
    dimension: str = ""
    matched: bool = False


def find_deviations(match: TemplateMatch) -> list[Deviation]:
    """All differences of a matched program from its template, sorted by path."""
    ours, theirs = match.program, match.template
    explained = match.explained()
    maps = {n: m.kind for _, part in match.matched() for m in part.maps for n in (*m.nodes, *m.constants())}
    found = [_classified(match, explained, maps, *d) for d in _differences(ours, theirs)]
    return sorted(found, key=lambda d: (d.path, d.kind))


def _classified(
    match: TemplateMatch, explained: dict[NodeId, int], maps: dict[NodeId, str], d: Deviation,
    node: NodeId | None, other: NodeId | None,
) -> Deviation:  # fmt: skip
    """Add branch, dimension and final kind to the difference of a node of the program, of the template, or of both."""
    t = match.template
    path = t.path(other) if other is not None else ""
    branch = explained.get(node) if node is not None else None
    if other is not None:
        at = (i for i, b in enumerate(match.branches) if other == b.junction.node or path.startswith(f"{b.name}."))
        branch = next(at, None)
    if node is not None:
        matched, kind = node in explained, maps.get(node, d.kind)
    else:
        matched = branch not in match.mismatched
        part = match.parts[branch] if branch is not None else None
        kind = "factor" if part is not None and isinstance(part.weights.get(path), AffineMap) else d.kind
    dimension = _dimension(match, path, branch) if kind == "size" else ""
    axis, field = AXES.get(dimension, ""), match.arch.fields.get(dimension, "")
    detail = f"{d.detail} ({axis}, {field})" if field else d.detail
    return replace(d, kind=kind, axis=axis, field=field, detail=detail, branch=branch, dimension=dimension,
                   matched=matched)  # fmt: skip


def _dimension(match: TemplateMatch, path: str, branch: int | None) -> str:
    """Dimension that differs in a weight of the template, or in a split into heads."""
    here = match.sizes.get(TRUNK if branch is None else branch, {})
    base = path.removesuffix("_split") + ".weight" if path.endswith("_split") else path
    names = [n for term in match.terms.get(base, ()) for n in term.split("*")]
    return next((n for n in names if here.get(n, getattr(match.dims, n)) != getattr(match.dims, n)), "")


Difference = tuple[Deviation, "NodeId | None", "NodeId | None"]
"""A deviation with its node of the program and of the template."""


def _differences(ours: Program, theirs: Program) -> Iterator[Difference]:
    pairs = _paired(ours, theirs)
    mine = {node: other for other, node in pairs.items()}
    alive = ours.reachable(ours.outputs())
    for n in theirs.nodes():
        if n not in pairs:
            yield Deviation(theirs.path(n), "removed", f"{theirs.op(n)} is gone"), None, n
    for node in ours.nodes():
        if node not in mine:
            if node in alive or ours.graph.out_degree(node):
                yield Deviation(ours.path(node), "added", f"{ours.op(node)} is not in the family's block"), node, None
            continue
        for d in _node_differences(ours, node, theirs, mine[node], mine):
            yield d, node, mine[node]
    results = [(n, mine.get(v.node), v.port) for n, v in zip(ours.output_names(), ours.outputs(), strict=True)]
    wanted = [(n, v.node, v.port) for n, v in zip(theirs.output_names(), theirs.outputs(), strict=True)]
    if results != wanted:
        d = Deviation("outputs", "rewired", "another node is the output")
        yield d, ours.outputs()[0].node, theirs.outputs()[0].node


def _paired(ours: Program, theirs: Program) -> dict[NodeId, NodeId]:
    """Node of the template -> node of the program."""
    by_path = {ours.path(n): n for n in ours.nodes()}
    by_key = {ours.key(n): n for kind in STORED for n in ours.of_kind(kind)}
    pairs: dict[NodeId, NodeId] = {}
    known = {theirs.path(n) for n in theirs.nodes()}
    for other in theirs.order():
        node = by_key.get(theirs.key(other)) if theirs.op(other) in STORED else by_path.get(theirs.path(other))
        if node is None:
            reads = [pairs.get(v.node) for v in theirs.operands(other)]
            near = ours.consumers(reads[0]) if reads and reads[0] is not None else ()
            renamed = (n for n in near if ours.path(n) not in known and n not in pairs.values())
            node = next((n for n in renamed if _same(ours, n, theirs, other, pairs)), None)
        if node is not None:
            pairs[other] = node
    return pairs


def _same(ours: Program, node: NodeId, theirs: Program, other: NodeId, pairs: dict[NodeId, NodeId]) -> bool:
    reads = [(v.node, v.port) for v in ours.operands(node)]
    wanted = [(pairs.get(v.node), v.port) for v in theirs.operands(other)]
    return ours.op(node) == theirs.op(other) and ours.attrs(node) == theirs.attrs(other) and reads == wanted


def _node_differences(
    ours: Program, node: NodeId, theirs: Program, other: NodeId, mine: dict[NodeId, NodeId]
) -> Iterator[Deviation]:
    path = ours.path(node)
    if ours.op(node) != theirs.op(other):
        yield Deviation(path, "op", f"{ours.op(node)} instead of {theirs.op(other)}")
    elif ours.op(node) in STORED:
        here, there = ours.spec(node), theirs.spec(other)
        if here != there:
            yield Deviation(path, "size" if here.shape != there.shape else "dtype", f"{here} instead of {there}")
        elif ours.op(node) == CONST and ours.weights.digest(ours.key(node)) != theirs.weights.digest(theirs.key(other)):
            yield Deviation(path, "attrs", "other numbers than the config gives")
    elif changes := attr_changes(here := ours.attrs(node), there := theirs.attrs(other)):
        split = traits(ours.op(node)).splits_axis and here.keys() == there.keys() and here["axis"] == there["axis"]
        yield Deviation(path, "size" if split else "attrs", ", ".join(changes))
    reads = [(mine.get(v.node), v.port) for v in ours.operands(node)]
    if reads != [(v.node, v.port) for v in theirs.operands(other)]:
        here, there = (", ".join(p.path(v) for v in p.operands(n)) for p, n in ((ours, node), (theirs, other)))
        yield Deviation(path, "rewired", f"reads {here or 'nothing'} instead of {there}")
