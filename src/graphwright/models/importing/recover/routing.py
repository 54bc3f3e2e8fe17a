"""Tokens sorted by their experts, and counts of them -> `dispatch`, so that the experts are an axis of the router."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from graphwright.array import int64
from graphwright.models.importing.recover.regions import IN_ORDER, Draw, Regions
from graphwright.program.op_graph import Value

KIND = "dispatch"


def recover_routing(s: Regions) -> None:
    """Replace what groups the rows of grouped products by expert.

    Code sorts the ids of the experts of all tokens and compares them with constants to count them. An edit of experts
    would not change the constants.
    """
    for root in s.values("grouped_matmul"):
        _, weight, offsets = s.p.operands(root.node)
        ordered, experts = _sort_above(s, offsets), s.shape(weight)[0]
        if ordered is None or not isinstance(experts, int):
            continue
        why = _replace(s, ordered, experts)
        if why:
            s.leave(KIND, root, why)


def _sort_above(s: Regions, value: Value) -> Value | None:
    """Return the nearest sort of one axis from which a value is made; None without one, or beyond a `dispatch`."""
    stack, seen = [value], {value}
    while stack:
        at = stack.pop(0)
        if s.is_op(at, "sort") and len(s.shape(at)) == 1:
            return Value(at.node)
        for operand in [] if s.is_op(at, KIND) else s.p.operands(at.node):
            if operand not in seen:
                seen.add(operand)
                stack.append(operand)
    return None


def _replace(s: Regions, ordered: Value, experts: int) -> str:
    """Let readers of sorted ids, and of what is made of them, read a `dispatch`; return why not, or ""."""
    flat = s.p.operands(ordered.node)[0]
    ids = next((v for v in s.above(flat, *IN_ORDER) if len(s.shape(v)) == 2 and s.p.spec(v).dtype is int64), None)
    if ids is None:
        return "the ids of experts are no matrix of tokens and choices"
    path, draws = s.module(ordered), {ids: _ids(experts)}
    made = s.add(KIND, [ids], f"{path}dispatch", ordered, experts=experts)
    pairs = Value(made.node, 2)
    expert = s.add("index", [flat, pairs], f"{path}dispatch.expert", made, axis=0)
    pending = [*_uses(s, ordered, made, draws), (ordered, expert), (Value(ordered.node, 1), pairs)]
    if not all(s.agree(old, new, draws) for old, new in pending):
        s.sweep([expert.node])
        return "a dispatch groups the tokens in another way"
    for old, new in pending:
        s.redirect(old, new)
    s.sweep([expert.node, *(old.node for old, _ in pending)])
    s.found(KIND, made)
    return ""


def _uses(s: Regions, ordered: Value, made: Value, draws: Mapping[Value, Draw | None]) -> Iterator[tuple[Value, Value]]:
    """Yield (value, result of the dispatch that replaces it): offsets of grouped products, and rows of tokens."""
    for offsets in dict.fromkeys(s.p.operands(root.node)[2] for root in s.values("grouped_matmul")):
        if _sort_above(s, offsets) == ordered:
            yield offsets, made
    tokens = Value(made.node, 1)
    for node in s.readers(Value(ordered.node, 1)):
        if s.p.spec(Value(node)) == s.p.spec(tokens) and s.agree(Value(node), tokens, draws):
            yield Value(node), tokens


@cache
def _ids(experts: int) -> Draw:
    """Return a function that draws ids of experts."""
    return lambda rng, spec: rng.integers(0, experts, spec.sizes)
