"""Layers as units: numbered modules with a residual path around them, which a cut leaves in their place.

A layer is what lies below one number in a path, `layers.3`. Whether it can go is decided by structure: each value that
leaves it must be a value that entered it plus what the layer adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from graphwright.graph import EdgeId, NodeId
from graphwright.ops import get
from graphwright.program.editing.replace import boundary, stand_in
from graphwright.program.errors import EmptyAxis, FrozenAxis
from graphwright.program.kinds import KINDS, STORED
from graphwright.program.program import Program, Value
from graphwright.program.selection import StaleSelection

if TYPE_CHECKING:
    from graphwright.program.editing.transaction import Transaction


def layers(p: Program, nodes: Iterable[NodeId] | None = None) -> dict[str, list[int]]:
    """Path of a list of modules -> the numbers in it, rising; only those that some of the nodes lie in, if given."""
    found: dict[str, set[int]] = {}
    for node in p.nodes() if nodes is None else nodes:
        head = _numbered(p.path(node))
        if head is not None:
            found.setdefault(head[0], set()).add(head[1])
    return {prefix: sorted(numbers) for prefix, numbers in sorted(found.items())}


def _numbered(path: str) -> tuple[str, int] | None:
    """`layers.3.attn.q` is below ("layers", 3)."""
    segments = path.split(".")
    at = next((i for i, s in enumerate(segments) if i and s.isascii() and s.isdigit()), None)
    return None if at is None else (".".join(segments[:at]), int(segments[at]))


def remove_layers(e: Transaction, prefix: str, ids: Sequence[int], count: int) -> None:
    """Take layers out inside an open edit, by their places among those there are.

    Raises: StaleSelection if there are others by now; EmptyAxis for all of them; FrozenAxis for one that no residual
    path leads around.
    """
    numbers = _there(e.program, prefix, count)
    if len(ids) == count:
        raise EmptyAxis("the last layer stays", where=prefix, got=f"all {count}")
    for number in [numbers[i] for i in ids]:
        _remove(e, _nodes(e.program, prefix, number), f"{prefix}.{number}")


def _there(p: Program, prefix: str, count: int) -> list[int]:
    """The numbers of a list of layers. Raises: StaleSelection if they are not as many as there were."""
    numbers = layers(p).get(prefix, [])
    if len(numbers) != count:
        what = (
            "there are other layers by now"
            if numbers
            else "there is no such axis, and there are no such layers, by now"
        )
        raise StaleSelection(what, where=prefix, expected=count, got=len(numbers))
    return numbers


def _nodes(p: Program, prefix: str, number: int) -> list[NodeId]:
    return [n for n in p.nodes() if _numbered(p.path(n)) == (prefix, number)]


def branches(p: Program, prefix: str, ids: Sequence[int], count: int) -> list[tuple[int, list[EdgeId]]]:
    """Per layer its number and the edges by which it adds to its residual path: without them it does nothing.

    Raises: StaleSelection; FrozenAxis for a layer that no residual path leads around.
    """
    numbers, found = _there(p, prefix, count), []
    for number in [numbers[i] for i in ids]:
        inside = {n for n in _nodes(p, prefix, number) if p.op(n) not in STORED}
        _, leaves = boundary(p, sorted(inside, key=p.order_labels.key))
        edges: dict[EdgeId, None] = {}
        for value in leaves:
            before = _entering(p, value, inside)
            if before is None:
                raise FrozenAxis("no residual path leads around the layer", where=f"{prefix}.{number}",
                                 got=p.path(value))  # fmt: skip
            _onto(p, value, before, inside, edges)
        found.append((number, list(edges)))
    return found


def _onto(p: Program, value: Value, before: Value, inside: set[NodeId], edges: dict[EdgeId, None]) -> bool:
    """Whether a value is on the residual path; collects the edges into it from elsewhere."""
    if value == before:
        return True
    op = p.op(value.node)
    if value.node not in inside or op in KINDS or not (p.is_junction(value.node) or get(op).traits.sums):
        return False
    on = {edge: _onto(p, p.edge_value(edge), before, inside, edges) for edge in p.in_edges(value.node)}
    if any(on.values()):
        edges |= dict.fromkeys(edge for edge, there in on.items() if not there)
    return any(on.values())


def _remove(e: Transaction, nodes: list[NodeId], where: str) -> None:
    p = e.program
    ops, weights = ([n for n in nodes if (p.op(n) in STORED) == kind] for kind in (False, True))
    inside = set(ops)
    _, leaves = boundary(p, ops)
    around = {value: _entering(p, value, inside) for value in leaves}
    lost = [v for v, before in around.items() if before is None]
    if lost or not around:
        path = ", ".join(p.path(v) for v in lost)
        raise FrozenAxis("no residual path leads around the layer", where=where, got=path or "nothing leaves it")
    stand_in(e, {value: before for value, before in around.items() if before is not None}, ops)
    e.remove(sorted(ops, key=p.order_labels.key, reverse=True))
    e.remove([n for n in weights if not p.graph.out_degree(n)])


def _entering(p: Program, value: Value, inside: set[NodeId]) -> Value | None:
    """The one value from outside that reaches this one through sums alone; None if there is none, or several."""
    stack, found = [value], set()
    while stack:
        here = stack.pop()
        if here.node not in inside:
            found |= {here} if p.spec(here) == p.spec(value) and p.op(here.node) not in STORED else set()
        elif p.op(here.node) not in KINDS and (p.is_junction(here.node) or get(p.op(here.node)).traits.sums):
            stack += p.operands(here.node)
    return found.pop() if len(found) == 1 else None
