"""What less memory costs: budgets beside blocks of √n layers and the best of all blocks, in operations and time."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np

import graphwright as gw
from benchmarks.harness import Figure, rounds
from graphwright.ops import get
from graphwright.plan import BudgetImpossible, Executable

LAYERS, WIDTH, BATCH = 9, 128, 512


def run() -> list[Figure]:
    figure = Figure(
        f"Gradient of {LAYERS} layers within a budget",
        f"f32, {BATCH} x {WIDTH}, tanh; bytes of the arena and operations, both over those of the plan that keeps all",
    )
    p = tower()
    x = np.random.default_rng(1).normal(size=(BATCH, WIDTH)).astype("f4")
    plain = planned(p)
    every = [(q.arena_bytes, operations(q)) for q in (marked(p, cuts) for cuts in product((0, 1), repeat=LAYERS - 1))]
    root = marked(p, [int(k % 3 == 2) for k in range(LAYERS - 1)])
    spaces = {"all kept": Executable(plain), "blocks of √n": Executable(root)}
    for share in (0.8, 0.6, 0.5, 0.4):
        budget = int(share * plain.arena_bytes)
        best = min((flops for arena, flops in every if arena <= budget), default=None)
        try:
            plan = planned(p, remat=budget)
        except BudgetImpossible as error:
            figure.notes.append(f"{share:.0%}: not found, {error.best / plain.arena_bytes:.0%} at best")
            continue
        spaces[f"{share:.0%}"] = Executable(plan)
        figure.add(f"{share:.0%}: budget", operations(plan) / operations(plain), "x operations")
        if best is not None:
            figure.add(
                f"{share:.0%}: best of {len(every)} ways to cut blocks", best / operations(plain), "x operations"
            )
    figure.add(f"√n, {root.arena_bytes / plain.arena_bytes:.0%}", operations(root) / operations(plain), "x operations")
    truth = spaces["all kept"].run({"x": x})["grad.x"].tobytes()
    assert all(space.run({"x": x})["grad.x"].tobytes() == truth for space in spaces.values())
    taken = rounds({name: space.execute for name, space in spaces.items()}, n=15, inner=3)
    for name, samples in taken.items():
        figure.add(name, 1e3 * float(np.median(samples)), "ms")
    return [figure]


def tower() -> gw.Program:
    rng = np.random.default_rng(0)
    b = gw.Builder("tower")
    h = b.input("x", ("B", WIDTH))
    for k in range(LAYERS):
        w = b.param(f"w{k}", (rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5).astype("f4"))
        h = b.tanh(b.linear(h, w, name=f"l{k}"), name=f"h{k}")
    b.output(b.mean(h, axes=(0, 1), name="loss"), "loss")
    return b.build()


def planned(p: gw.Program, remat: int | None = None) -> gw.Plan:
    return p.grad("loss", ["x"], {"B": BATCH}).compile(x=(BATCH, WIDTH), remat=remat)


def marked(p: gw.Program, cuts: list[int] | tuple[int, ...]) -> gw.Plan:
    """With a block ending after each layer that is cut."""
    ends = [0, *(k + 1 for k, cut in enumerate(cuts) if cut), LAYERS]
    p.checkpoint(None)
    for start, stop in pairwise(ends):
        p.checkpoint([p.node(f"{name}{k}") for k in range(start, stop) for name in "lh"])
    plan = planned(p)
    p.checkpoint(None)
    return plan


def operations(plan: gw.Plan) -> int:
    specs = [tuple([plan.slots[s].spec for s in side] for side in (i.ins, i.outs)) for i in plan.instrs]
    return sum(get(i.op).cost(ins, outs, i.attrs).flops for i, (ins, outs) in zip(plan.instrs, specs, strict=True))
