"""Time to plan programs of 1 000, 5 000 and 20 000 nodes, from nothing and after a one-node edit."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import numpy as np

from benchmarks.harness import Figure, interval
from graphwright.array import Spec, float32
from graphwright.plan import make_plan
from graphwright.program import Builder, Program


def layered(nodes: int) -> Program:
    """Blocks of twelve nodes shaped like a residual MLP with norm and gate."""
    b = Builder("layered")
    w = b.param("w", np.zeros((8, 8), np.float32))
    g = b.param("g", np.ones(8, np.float32))
    x = b.input("x", ("B", 8))
    for i in range(max(nodes // 12, 1)):
        s = b.scope(f"layers.{i}")
        h = s.rms_norm(x, g, name="norm")
        gate = s.silu(s.linear(h, w, name="gate"), name="act")
        up = s.linear(h, w, name="up")
        m = s.linear(s.mul(gate, up, name="mul"), w, name="down")
        y = s.junction(x, m, name="mid")
        t = s.tanh(s.linear(y, w, name="side"), name="tanh")
        split = s.unflatten(t, axis=1, sizes=(2, 4), name="split")
        x = s.junction(y, s.flatten(split, start=1, end=2, name="join"), name="out")
    b.output(x, "y")
    return b.build()


def run() -> list[Figure]:
    figure = Figure(
        "Planning",
        "residual blocks of 12 nodes, batch 4, full plan: order, rewrites, slots, liveness, layout; 9 rounds",
    )
    sizes = (1_000, 5_000, 20_000)
    for n in sizes:
        p = layered(n)
        specs = {"x": Spec((4, 8), float32)}
        make_plan(p, specs)
        plans, edits = [], []
        for k in range(9):
            started = perf_counter()
            plan = make_plan(p, specs)
            plans.append((perf_counter() - started) * 1e3)
            edge = p.in_edges(f"layers.{k}.out")[1]
            started = perf_counter()
            with p.edit("insert") as e:
                e.insert(edge, "relu")
            edits.append((perf_counter() - started) * 1e3)
        low, high = interval(plans)
        figure.add(
            f"{len(p):,} nodes: plan",
            median(plans),
            "ms",
            f"arena / lower bound {plan.arena_bytes / plan.lower_bound:.3f}",
            low,
            high,
        )
        low, high = interval(edits)
        figure.add(f"{len(p):,} nodes: commit of one inserted node", median(edits), "ms", "", low, high)
    return [figure]
