"""Repeated blocks: modules of equal structure whatever their names, and the residual sums around their branches."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphwright.graph import NodeId
from graphwright.ops import OPS, traits
from graphwright.program.kinds import CONST, PARAM
from graphwright.program.op_graph import Value
from graphwright.surgery.findings.wiring import BLOCK_NUMBER, template
from graphwright.surgery.walks import depends, flood

if TYPE_CHECKING:
    from graphwright.program.program import Program

_FAR = 400
"""Largest number of nodes of a branch that is searched for its start."""


def is_sum(p: Program, node: NodeId) -> bool:
    """Return whether a node is a junction or adds two values of equal spec."""
    row = traits(p.op(node))
    return row.nary or (row.sums and all(p.specs(v.node)[v.port] == p.spec(node) for v in p.operands(node)))


def passes_sum(p: Program, node: NodeId) -> bool:
    """Return whether a node is a sum, a cast, or a product with a scalar param, constant or gate."""
    row = traits(p.op(node))
    scales = (p.specs(v.node)[v.port].size == 1 for v in p.operands(node) if _is_factor(p, v))
    return row.convert or row.sums or row.nary or (row.multiplies and any(scales))


def _is_factor(p: Program, value: Value) -> bool:
    return p.op(value.node) in (PARAM, CONST) or traits(p.op(value.node)).gates


def unscaled(p: Program, node: NodeId) -> NodeId:
    """Return the node whose result a chain of casts and products with scalars ends in."""
    while passes_sum(p, node) and not is_sum(p, node):
        before = [v.node for v in p.operands(node) if not _is_factor(p, v)]
        if len(before) != 1:
            break
        node = before[0]
    return node


def around(p: Program, total: NodeId) -> tuple[NodeId, NodeId] | None:
    """Return (source, first node of a branch) if a sum reads `source` directly and through the branch, or None."""
    operands, key = p.producers(total), p.order_labels.key
    for source in (n for n in operands if p.graph.out_degree(n) > 1):
        order = dict.fromkeys(n for n in operands if n != source)
        waiting = [*order]
        for node in waiting:  # grows during iteration: a walk back from the ends of the branch to its source
            if len(waiting) > _FAR:
                break
            before = [n for n in p.producers(node) if n not in order and key(n) >= key(source)]
            if source in before:
                return source, node
            order.update(dict.fromkeys(before))
            waiting += before
    return None


def repeated_blocks(p: Program) -> list[list[str]]:
    """Return groups of two or more paths of modules that have ops of equal names and kinds, sums left out.

    Each module contains a nonlinear op and a map with a weight. Modules of one group have equal parents, apart from
    numbers in their paths.
    """
    members: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for node in p.nodes():
        path, op = p.path(node), p.op(node)
        if op in OPS and not traits(op).nary and not traits(op).sums:
            for dot in re.finditer(r"\.", path):
                members[path[: dot.start()]].append((path[dot.start() :], op))
    groups: defaultdict[object, list[str]] = defaultdict(list)
    for module, ops in members.items():
        rows = [traits(op) for _, op in ops]
        nonlinear = any(row.activation or row.normalises or row.attention for row in rows)
        if nonlinear and any(row.contracts or row.attention for row in rows):
            groups[template(module.rpartition(".")[0], BLOCK_NUMBER)[0], tuple(sorted(ops))].append(module)
    return [modules for modules in groups.values() if len(modules) > 1]


@dataclass(frozen=True, slots=True)
class Unbypassed:
    """A branch of a block whose input does not bypass it, unlike in other blocks of equal structure.

    Attributes:
        entry, end: the values that the branch starts from and ends in; of equal spec.
        junction: the junction that sums nothing but ends of branches of the block, or None.
        sibling: the sum with the bypass in another block.
        bypassed, others: number of the other blocks with a bypass, and of all other blocks.
    """

    entry: Value
    end: Value
    junction: NodeId | None
    sibling: NodeId
    bypassed: int
    others: int


def unbypassed(p: Program, share: float) -> Iterator[Unbypassed]:
    """Yield the branches without a bypass in groups where at least `share` of the other blocks have one."""
    paths = {p.path(n): n for n in p.nodes()}
    group_of = {module: modules for modules in repeated_blocks(p) for module in modules}
    for (first, port, *names), bypassed in _bypassed(p, group_of).items():
        sibling, (total, ends) = next(iter(bypassed.items()))
        others = len(group_of[first]) - 1
        for module in group_of[first] if len(bypassed) >= share * others else ():
            start, end = (paths.get(module + name) for name in names)
            if module in bypassed or start is None or end is None:
                continue
            entry = next((p.edge_value(e) for e in p.in_edges(start) if p.edge_port(e) == port), None)
            if entry is None or p.specs(entry.node)[entry.port] != p.spec(end):
                continue
            branches = {paths.get(module + p.path(n).removeprefix(sibling)) for n in ends}
            after = flood([end], lambda n, end=end: _towards_sums(p, n) if n == end or not is_sum(p, n) else ())
            near = [n for n in after[1:] if is_sum(p, n)]
            branches.update(n for n in after if n not in near)
            if not any(_bypasses(p, entry.node, n, end, branches) for n in near):
                junction = next((n for n in near if p.is_junction(n) and branches.issuperset(p.producers(n))), None)
                yield Unbypassed(entry, Value(end), junction, total, len(bypassed), others)


def _bypassed(
    p: Program, group_of: Mapping[str, Sequence[str]]
) -> dict[tuple[str, int, str, str], dict[str, tuple[NodeId, list[NodeId]]]]:
    """Map branches of repeated blocks to (sum with the bypass, ends of all branches of the sum) by path of the block.

    A branch is (first block of the group, port at which the branch reads its input, path of its first node, path of its
    last node); these paths follow that of the block.
    """
    found: defaultdict[tuple[str, int, str, str], dict[str, tuple[NodeId, list[NodeId]]]] = defaultdict(dict)
    for total in sorted((*p.of_traits(nary=True), *p.of_traits(sums=True)), key=p.order_labels.key):
        ends = around(p, total) if is_sum(p, total) else None
        if ends is None:
            continue
        source, start = ends
        port = next(p.edge_port(e) for e in p.in_edges(start) if p.graph.source(e) == source)
        last = [unscaled(p, n) for n in p.producers(total) if n != source]
        for end in last:
            for dot in re.finditer(r"\.", p.path(start)):
                module, name = p.path(start)[: dot.start()], p.path(start)[dot.start() :]
                if module in group_of and p.path(end).startswith(f"{module}."):
                    found[group_of[module][0], port, name, p.path(end).removeprefix(module)][module] = total, last
    return found


def _towards_sums(p: Program, node: NodeId) -> list[NodeId]:
    """Return the readers of a node that are sums, or that change its values without another input, as a norm does."""
    return [n for n in p.consumers(node) if is_sum(p, n) or passes_sum(p, n) or _changes(p, node, n)]


def _changes(p: Program, node: NodeId, reader: NodeId) -> bool:
    """Return whether a reader keeps the spec of a node and mixes its values with those of weights alone."""
    row, others = traits(p.op(reader)), (v for v in p.operands(reader) if v.node != node)
    stored = (
        _is_factor(p, v) or (p.operands(v.node) and all(_is_factor(p, u) for u in p.operands(v.node))) for v in others
    )
    return not row.contracts and not row.attention and p.specs(reader)[0] == p.specs(node)[0] and all(stored)


def _bypasses(p: Program, entry: NodeId, total: NodeId, end: NodeId, branches: set[NodeId | None]) -> bool:
    """Return whether a sum with the end of a branch reads its input, or a value before or beside the branch."""
    beside = [n for n in p.producers(total) if n not in branches]
    return any(depends(p, end, n) for n in beside) or entry in p.reachable(beside, beyond={end})
