"""Time to plan programs of 1 000, 5 000 and 20 000 nodes, from nothing and after a one-node edit."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import numpy as np

from benchmarks.harness import Figure, interval
from graphwright.array import Spec, float32
from graphwright.plan import make_plan
from graphwright.plan.planning import native
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
    native.part.wait()
    first = Figure(
        "Planning",
        "residual blocks of 12 nodes, batch 4, the first plan: rewrites, slots, order, liveness, layout; 9 rounds",
    )
    again = Figure(
        "Planning after an edit",
        "one node inserted in the same program: what `program.compile` takes after the commit; 25 rounds",
    )
    sizes = (1_000, 5_000, 20_000)
    for n in sizes:
        p = layered(n)
        specs, feed = {"x": Spec((4, 8), float32)}, {"x": np.ones((4, 8), np.float32)}
        make_plan(p, specs)
        plans = []
        for _ in range(9):
            plan = None  # the one before is given back outside of the time
            started = perf_counter()
            plan = make_plan(p, specs)
            plans.append((perf_counter() - started) * 1e3)
        low, high = interval(plans)
        note = f"arena / lower bound {plan.arena_bytes / plan.lower_bound:.3f}"
        first.add(f"{len(p):,} nodes: plan", median(plans), "ms", note, low, high)
        for executor in ("aten", "vm"):
            _edits(again, p, specs, feed, executor)
    return [first, again, _random()]


def _edits(figure: Figure, p: Program, specs: dict[str, Spec], feed: dict[str, np.ndarray], executor: str) -> None:
    """What 25 edits of one node take."""
    p.compile(specs, executor=executor)(feed)
    edits, patches, bound = [], [], []
    for k in range(25):
        edge = p.in_edges(f"layers.{k}.out")[1]
        started = perf_counter()
        with p.edit("insert") as e:
            e.insert(edge, "relu")
        edited = perf_counter()
        plan = p.compile(specs, executor=executor)
        patched = perf_counter()
        plan.executable().kernels.refresh()
        done = perf_counter()
        assert plan.patched.kind == "patched"
        plan(feed)
        edits.append((edited - started) * 1e3)
        patches.append((patched - edited) * 1e3)
        bound.append((done - patched) * 1e3)
    size = f"{len(p):,} nodes, {'the VM' if executor == 'vm' else 'ATen'}"
    for what, taken, note in (
        ("commit", edits, ""),
        ("plan", patches, f"{plan.patched.nodes} nodes visited"),
        ("calls bound", bound, ""),
    ):
        low, high = interval(taken)
        figure.add(f"{size}: {what}", median(taken), "ms", note, low, high)


def _random() -> Figure:
    """Arenas of random graphs, whose lifetimes overlap at will."""
    figure = Figure("Arena of random graphs", "tensors of 64 to 4 096 bytes, operands among the last 40 results")
    for n in (1_000, 5_000, 20_000):
        rng = np.random.default_rng(n)
        b = Builder("random")
        pool = [b.input("x", (16,))]
        for _ in range(n):
            x, y = (pool[-1 - int(rng.integers(0, min(40, len(pool))))] for _ in range(2))
            if rng.random() < 0.3:
                size = int(2 ** rng.integers(4, 11))
                wide = b.expand(b.sum(x, axes=(0,), keepdims=True), shape=(size,))
                pool.append(b.exp(wide))
            elif b.spec(x).shape == b.spec(y).shape:
                pool.append(b.add(x, y))
            else:
                pool.append(b.tanh(x))
        live = pool[-40:]
        total = b.sum(live[0], axes=(0,))
        for value in live[1:]:
            total = b.add(total, b.sum(value, axes=(0,)))
        b.output(total, "y")
        plan = make_plan(b.build(), {"x": Spec((16,), float32)})
        share = plan.arena_bytes / plan.lower_bound
        figure.add(f"{n:,} nodes: arena / lower bound", share, "x", f"{len(plan.instrs):,} instructions")
    return figure
