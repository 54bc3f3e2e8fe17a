"""The parallel executor beside its own sequential run: four branches of products side by side, BLAS on one thread."""

from __future__ import annotations

import numpy as np

import graphwright as gw
from benchmarks.harness import Figure, rounds
from graphwright.array.cpu import set_num_threads
from graphwright.plan import Executable, ParallelExecutable

SIDES = (32, 128, 512, 1024)
BRANCHES, DEPTH = 4, 4


def run() -> list[Figure]:
    set_num_threads(1)
    figure = Figure(
        f"{BRANCHES} branches of {DEPTH} products on 2 threads",
        "f32, BLAS on one thread; beside the same plan in order, which A/A measures once more",
    )
    for side in SIDES:
        feeds, plan = branches(side)
        spaces = {"in order": Executable(plan), "2 threads": ParallelExecutable(plan, threads=2)}
        results = {name: space.run(feeds)["y"].tobytes() for name, space in spaces.items()}
        assert len(set(results.values())) == 1  # bit for bit
        taken = rounds({name: s.execute for name, s in spaces.items()}, n=15, inner=max(1, 2 * 10**8 // side**3 // 16))
        medians = {name: 1e6 * float(np.median(taken[name])) for name in taken}
        for name, value in medians.items():
            figure.add(f"{side} x {side}: {name}", value, "us")
        figure.notes.append(f"{side} x {side}: {medians['in order'] / medians['2 threads']:.2f}x the run in order")
    figure.notes.append("matrix products release the GIL; small ops do not gain")
    return [figure]


def branches(side: int) -> tuple[dict[str, np.ndarray], gw.Plan]:
    rng = np.random.default_rng(0)
    b = gw.Builder("branches")
    x = b.input("x", (side, side))
    ends = []
    for k in range(BRANCHES):
        h = x
        for d in range(DEPTH):
            h = b.matmul(h, b.param(f"w{k}.{d}", (rng.normal(size=(side, side)) / side**0.5).astype("f4")))
        ends.append(h)
    b.output(b.junction(*ends), "y")
    feeds = {"x": rng.normal(size=(side, side)).astype("f4")}
    return feeds, b.build().compile(x=(side, side), layout="naive")
