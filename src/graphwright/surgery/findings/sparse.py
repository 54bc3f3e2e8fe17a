"""Rules about attention over patterns: heads without edges, queries without keys, tokens that no layers connect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from graphwright.ops import traits
from graphwright.program.editing.transaction import Transaction
from graphwright.program.patterns import pattern_at
from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding, Fix, Severity

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.patterns import Pattern
    from graphwright.program.program import Program

_MOST = 2048
"""Blocks of the largest pattern whose reach is computed: a product of boolean matrices per attention."""


def dead_head(d: Diagnosis) -> Iterator[Finding]:
    """Report heads whose plane of a pattern has no edges: they give 0."""
    p = d.program
    for node, table, pattern in _sparse(p):
        rows = _empty_rows(pattern)
        for plane in np.flatnonzero([len(found) == pattern.blocks[0] for found in rows]).tolist():
            heads = _heads(p, node, pattern, plane)
            yield Finding.of(
                p, "dead_head", Severity.WARNING, f"head {', '.join(map(str, heads))} sees no key and gives 0", node,
                table, where=f"{p.path(node)}, plane {plane}", expected="an edge of the pattern in this plane",
                got=f"plane {plane} of {pattern.planes} has none", witness={"dead": heads, "plane": plane},
                fixes=(_connect(p, table, plane, rows[plane]),),
            )  # fmt: skip


def blind_queries(d: Diagnosis) -> Iterator[Finding]:
    """Report planes of a pattern in which some query blocks have edges and others have none."""
    p = d.program
    for node, table, pattern in _sparse(p):
        for plane, rows in enumerate(_empty_rows(pattern)):
            if not 0 < len(rows) < pattern.blocks[0]:
                continue
            what = (
                f"the queries of {len(rows)} of {pattern.blocks[0]} blocks see no key, and the attention gives 0 there"
            )
            yield Finding.of(
                p, "blind_queries", Severity.WARNING, what, node, table, where=f"{p.path(node)}, plane {plane}",
                expected="an edge for each query block", got=f"query blocks {_short(rows)} have none",
                witness={"plane": plane, "blocks": rows, "heads": _heads(p, node, pattern, plane)},
                fixes=(_connect(p, table, plane, rows),),
            )  # fmt: skip


def unreachable_pairs(d: Diagnosis) -> Iterator[Finding]:
    """Report that no path through the attentions leads from some tokens to later ones.

    Paths are followed from block to block, so that each pair of blocks that is reported has no path between its tokens.
    """
    p = d.program
    needed = p.reachable([*p.outputs(), *p.assigns()])
    nodes = [n for n in p.order() if n in needed and traits(p.op(n)).attention]
    found = {node: pattern for node, _, pattern in _sparse(p)}
    patterns = [found.get(n) for n in nodes]
    square = [x for x in patterns if x is not None and x.causal and x.tokens[0] == x.tokens[1] and not x.q_start]
    if not square or len(square) < len(nodes) or any(traits(p.op(n)).routed_heads for n in needed):
        return  # a dense attention connects all tokens
    tokens, block = min(x.tokens[0] for x in square), max(x.block for x in square)
    count = -(-tokens // block)
    if count > _MOST:
        return
    reach = np.eye(count, dtype=bool)
    for pattern in square:
        reach |= (_blocks(pattern, count, block) @ reach.astype(np.float32)) > 0
    missing = np.tril(~reach)
    if not missing.any():
        return
    query = int(np.flatnonzero(missing.any(1))[-1])
    key = int(np.flatnonzero(missing[query])[0])
    share, first, last = missing.sum() / (count * (count + 1) // 2), key * block, min((query + 1) * block, tokens) - 1
    yield Finding.of(
        p, "unreachable_pairs", Severity.INFO,
        f"in {100 * share:.3g} % of the pairs of blocks the later tokens depend on none of the earlier ones",
        nodes[-1], *dict.fromkeys(p.operands(n)[traits(p.op(n)).table or 0].node for n in nodes),
        expected=f"a path through the {len(nodes)} attentions",
        got=f"none from tokens {first} to {first + block - 1} to token {last}",
        witness={"query": query, "key": key, "share": float(share)},
    )  # fmt: skip


# -- patterns of a program ---------------------------------------------------------------------------------------------
def _sparse(p: Program) -> Iterator[tuple[NodeId, NodeId, Pattern]]:
    """Yield (attention, node of its pattern's table, pattern) of each attention over a pattern."""
    for node in p.of_traits(attention=True):
        at, operands = traits(p.op(node)).table, p.operands(node)
        pattern = None if at is None or at >= len(operands) else pattern_at(p, operands[at].node)
        if at is not None and pattern is not None:
            yield node, operands[at].node, pattern


def _empty_rows(pattern: Pattern) -> list[list[int]]:
    """Return the query blocks without edges of each plane."""
    empty = pattern.empty_rows()
    return [empty[empty[:, 0] == plane, 1].tolist() for plane in range(pattern.planes)]


def _heads(p: Program, node: NodeId, pattern: Pattern, plane: int) -> list[int]:
    """Return the query heads of a plane."""
    each = int(p.spec(p.operands(node)[0]).shape[1]) // pattern.planes
    return list(range(plane * each, (plane + 1) * each))


def _blocks(pattern: Pattern, count: int, block: int) -> np.ndarray:
    """Return which query block reads which key block in any plane, float32 [count, count], in blocks of `block`."""
    made = np.zeros((count, count), np.float32)
    _, query, key = pattern.pairs().T.astype(np.int64) * pattern.block
    for q in (query, query + pattern.block - 1):  # a block may meet two of the larger ones
        for k in (key, key + pattern.block - 1):
            inside = (q // block < count) & (k // block < count)
            made[q[inside] // block, k[inside] // block] = 1
    return made


def _connect(p: Program, table: NodeId, plane: int, rows: list[int]) -> Fix:
    """Return the fix that lets query blocks see the key block of their own tokens."""
    name = p.key(table)

    def apply(e: Transaction) -> None:
        pattern = e.program.patterns[name]
        own = (np.array(rows) * pattern.block + pattern.q_start) // pattern.block
        pattern.connect_many(rows, np.minimum(own, pattern.blocks[1] - 1), plane)

    return Fix(f"let {len(rows)} query blocks of plane {plane} see their own block", apply, edges=len(rows))


def _short(rows: list[int]) -> str:
    return ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
