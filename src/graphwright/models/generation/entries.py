"""What an attention adds to a KV cache for each token, and what these entries depend on; for heads of both kinds.

The entries are two arrays [B, G, T, D]: the keys and values of an `sdpa`, or the results of `routed_entries`, whose
rows have the keys or values of all routed heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphwright.array import Spec
from graphwright.array.formulas.experts import FIRST_HEAD, HEAD_WIDTH
from graphwright.errors import UsageError
from graphwright.graph import NodeId
from graphwright.ops import get, traits
from graphwright.program.op_graph import Value
from graphwright.program.patterns import pattern_at

if TYPE_CHECKING:
    from graphwright.program.program import Program

RUNS = slice(1, 4)
"""Operands of a routed attention that come from an op that routes: offsets, rows and pairs."""


def attentions(p: Program) -> list[NodeId]:
    """Return the nodes of a program that have keys and values, in creation order, if outputs or states need them."""
    needed = p.reachable([*p.outputs(), *p.assigns()])
    return [n for n in p.nodes() if n in needed and (traits(p.op(n)).attention or traits(p.op(n)).routed_heads)]


def sources(p: Program, node: NodeId) -> list[Value]:
    """Return the values from which the entries of an attention are computed."""
    operands = p.operands(node)
    return list(operands[1:3]) if traits(p.op(node)).attention else entry_operands(operands)


def entry_operands(operands: list[Value] | tuple[Value, ...]) -> list[Value]:
    """Return the operands of `routed_entries`, from those of a `routed_attention`: without queries and weights."""
    positions, heads = operands[FIRST_HEAD - 1], operands[FIRST_HEAD:]
    return [operands[0], *operands[RUNS], positions, *(v for i, v in enumerate(heads) if i % HEAD_WIDTH in (1, 2))]


def query_operands(operands: list[Value] | tuple[Value, ...]) -> tuple[list[Value], list[Value]]:
    """Return the operands of `routed_attention_cached` before and after those of the cache."""
    heads = operands[FIRST_HEAD:]
    return list(operands[:FIRST_HEAD]), [v for i, v in enumerate(heads) if i % HEAD_WIDTH in (0, 3)]


def entry_specs(p: Program, node: NodeId) -> tuple[Spec, Spec]:
    """Return the specs [B, G, T, D] of the two arrays that the tokens of a run add to a cache."""
    keys, *rest = (p.spec(v) for v in sources(p, node))
    if traits(p.op(node)).attention:
        return keys, rest[0]
    made = get("routed_entries").specs([keys, *rest], {"theta": p.attrs(node)["theta"]}, p.path(node))
    return made[0], made[1]


def check_cacheable(p: Program, node: NodeId) -> None:
    """Raise UsageError if the keys of an attention cannot be cached, because they do not depend on the past alone."""
    if traits(p.op(node)).routed_heads:
        return
    attrs = p.attrs(node)
    if (table := traits(p.op(node)).table) is not None:
        pattern = pattern_at(p, p.operands(node)[table].node)
        if pattern is None or not pattern.causal or "q_start" in attrs["optional"]:
            raise UsageError("this attention cannot be cached: its pattern is not causal, or it has a start of its own",
                             where=p.path(node), expected="a causal pattern, no operand q_start",
                             got=f"{pattern}, optional={attrs['optional']}",
                             fix="use model.logits, which needs no cache")  # fmt: skip
        return
    if not attrs["causal"] or set(attrs["optional"]) - {"sinks"}:
        raise UsageError("this attention cannot be cached: it is not causal, or has extra operands such as a mask",
                         where=p.path(node), expected="causal=True, no operands after v but sinks",
                         got=f"causal={attrs['causal']}, optional={attrs['optional']}",
                         fix="use model.logits, which needs no cache")  # fmt: skip


def check_positions(p: Program) -> None:
    """Raise UsageError if a program numbers the tokens of a run itself, since a run of a cache begins later than 0."""
    if "ids" not in p.input_names():
        return
    length, needed = p.spec(p.value("ids")).shape[-1:], p.reachable([*p.outputs(), *p.assigns()])
    for node in p.nodes():
        spec = p.spec(node) if node in needed and traits(p.op(node)).valueless else None
        if spec is not None and spec.dtype.kind == "int" and spec.shape == length:
            raise UsageError("this program cannot be cached: it counts positions itself, from 0 in each run",
                             where=p.path(node), expected="an input `positions` that attention reads",
                             got=f"inputs {', '.join(p.input_names())}",
                             fix="trace the model with positions as an input, or use model.logits")  # fmt: skip
