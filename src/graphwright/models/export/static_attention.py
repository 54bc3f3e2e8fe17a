"""Attention over patterns as an export writes it: with a window where the pattern is one, and without gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from graphwright.models.codegen.patterns import pattern_of, sparse_attentions, why_not_static
from graphwright.models.export.affine_map import constant, constants
from graphwright.patterns.positional import causal_rule
from graphwright.patterns.rules import extensible
from graphwright.program.editing.replace import remove_unread, take_over

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.models.model import Model
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.op_graph import Value
    from graphwright.program.program import Program

LONGEST = 32768
"""Number of tokens up to which a pattern that grows by its rule is exported; files refuse longer texts."""


def with_static_attention(model: Model) -> Model:
    """Return the model, or a copy that computes the same function with static patterns, up to its longest text."""
    longest = min(int(getattr(model.config_dims, "positions", 0)), LONGEST)
    made = static_program(model.program, longest)
    return model if made is model.program else model.with_program(made)


def static_program(p: Program, longest: int = 0) -> Program:
    """Return the program, or a copy that computes the same function with static patterns.

    Gates that are all 0 or 1 become edges that are cut or stay. A pattern that is causal attention, with a window or
    without, becomes an `sdpa`. Others that grow by their rule get the edges of `longest` tokens.
    """
    if not sparse_attentions(p):
        return p
    twin = p.fork()
    with twin.edit("write patterns as masks", author="pass", keep_undo=False) as e:
        by_pattern: dict[int, list[NodeId]] = {}
        for node in sparse_attentions(twin):
            by_pattern.setdefault(id(pattern_of(twin, node)), []).append(node)
        for nodes in by_pattern.values():
            _bake_gates(e, nodes)
        for node in sparse_attentions(twin):
            _as_window(e, node)
    for pattern in {id(found): found for n in sparse_attentions(twin) if (found := pattern_of(twin, n))}.values():
        if pattern.rule is not None and extensible(pattern.rule) and pattern.tokens[0] < longest:
            pattern.extend(longest)
    return twin


# -- gates -------------------------------------------------------------------------------------------------------------
def _bake_gates(e: Transaction, nodes: Sequence[NodeId]) -> None:
    """Cut the edges whose gates are 0, and drop the gates, if all are constants 0 or 1; `nodes` read one pattern."""
    p, pattern = e.program, pattern_of(e.program, nodes[0])
    sources = {_gates_of(p, node) for node in nodes}
    source = sources.pop()
    if pattern is None or source is None or sources or source.node not in constants(p):
        return
    values, slots = constant(p, source), np.asarray(pattern.edges["gate"])
    gates = np.where(slots < 0, 1.0, values[slots])
    shut = gates == 0
    weighted = any(p.attrs(node)["where"] == "weight" for node in nodes)
    if not (shut | (gates == 1)).all() or (weighted and shut.any()):  # weights are not normalised again
        return
    pattern.cut(pattern.edges()[shut])
    for node in nodes:
        attrs, operands = p.attrs(node), [v for v in p.operands(node) if v != source]
        optional = tuple(name for name in attrs["optional"] if name != "gates")
        _replace(e, node, p.op(node), operands, {**attrs, "optional": optional})
    remove_unread(e, source)


def _gates_of(p: Program, node: NodeId) -> Value | None:
    """Return the operand of an attention that has the gates of edges; None without gates."""
    optional, operands = p.attrs(node)["optional"], p.operands(node)
    return operands[optional.index("gates") - len(optional)] if "gates" in optional else None


# -- windows -----------------------------------------------------------------------------------------------------------
def _as_window(e: Transaction, node: NodeId) -> None:
    """Replace an attention over a pattern by a dense one with the same window, if the pattern is one."""
    p, pattern = e.program, pattern_of(e.program, node)
    if why_not_static(p, node):
        return
    if pattern is None or (rule := causal_rule(pattern)) is None:
        return
    table = p.operands(node)[3]
    given = {"scale": p.attrs(node)["scale"], "softcap": p.attrs(node)["softcap"], "window": rule.window}
    _replace(e, node, "sdpa", list(p.operands(node)[:3]), given)
    remove_unread(e, table)


def _replace(e: Transaction, node: NodeId, op: str, operands: list[Value], attrs: dict[str, object]) -> None:
    p = e.program
    take_over(e, node, e.add_op(op, operands, attrs, p.free_name(f"{p.path(node)}.static")))
