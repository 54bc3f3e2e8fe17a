"""Nodes of derived programs, rewired to other operands."""

from __future__ import annotations

import random

from graphwright.program import Builder
from graphwright.program.derived.mirror import rewire
from graphwright.program.op_graph import Value


def test_rewired_operands_keep_the_edges_of_equal_ones_at_both_ends() -> None:
    rng, b = random.Random(0), Builder()
    x = b.input("x", (3,))
    values = [b.tanh(x, name=f"t{i}") for i in range(9)]
    b.output(b.junction(*values[:4], name="sum"), "out")
    p = b.build()
    node, found = p.node("sum"), [p.value(v) for v in values]
    for _ in range(200):
        before, edges = p.operands(node), p.in_edges(node)
        wanted: list[Value] = [*before]
        at = rng.randint(0, len(wanted))
        wanted[at : at + rng.randint(0, 3)] = rng.sample(found, rng.randint(0, 3))
        wanted = wanted[:12] or found[:1]
        rewire(p, node, wanted)
        assert p.operands(node) == wanted
        now = p.in_edges(node)
        assert [p.edge_port(e) for e in now] == [*range(len(wanted))]
        same = [i for i in range(min(len(before), len(wanted))) if before[: i + 1] == wanted[: i + 1]]
        assert all(edges[i] == now[i] for i in same)
        if len(before) != len(wanted):
            rest = min(len(before), len(wanted)) - len(same)
            equal = [i for i in range(1, rest + 1) if before[-i:] == wanted[-i:]]
            assert all(edges[-i] == now[-i] for i in equal)
