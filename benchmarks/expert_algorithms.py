"""The algorithms of `expert_mlp` over a grid of sizes, and what the planner chooses: time over that of the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np

import graphwright as gw
from benchmarks.harness import Figure, rounds
from graphwright.array import DTYPES, Spec
from graphwright.array.formulas.experts import algorithm_of

PARTS = ("grid",)
ALGORITHMS = ("sorted", "dense", "gather")
Point = tuple[str, int, int, int, int, int]


def points(
    dtypes: Sequence[str] = ("float32", "bfloat16"), tokens: Sequence[int] = (1, 32, 1024),
    widths: Sequence[tuple[int, int]] = ((256, 32), (256, 512)), experts: Sequence[int] = (2, 8, 64),
    chosen: Sequence[float] = (1, 2, 8),
) -> Iterator[Point]:  # fmt: skip
    """Yield (dtype, tokens N, width C, hidden width I, experts E, k)."""
    for dtype, n, (c, i), e, k in product(dtypes, tokens, widths, experts, chosen):
        if k <= e and n * e * c * i < 1 << 32:
            yield dtype, n, c, i, e, int(k)


def grid(**sizes: Any) -> Figure:
    """Forward and backward of the mixture alone, without a router; `auto` is what the planner chooses."""
    figure = Figure("Algorithms of a mixture of experts", "forward and backward, ms; * the planner's choice")
    losses = []
    for point in points(**sizes):
        plans = {name: _call(point, name) for name in ALGORITHMS}
        taken = {name: float(np.median(samples)) for name, samples in rounds(plans, n=5).items() if name in ALGORITHMS}
        chosen = _chosen(point)
        best = min(taken, key=lambda name: taken[name])
        losses.append(taken[chosen] / taken[best])
        dtype, n, c, i, e, k = point
        for name, ms in taken.items():
            mark = " *" if name == chosen else ""
            figure.add(f"{dtype}, {n} tokens, {c} -> {i}, {e} experts, k = {k}: {name}{mark}", 1e3 * ms, "ms")
    figure.notes.append(
        f"the choice takes {max(losses):.2f} times the best at most, {np.mean(losses):.2f} times on average"
    )
    return figure


def _program(point: Point) -> tuple[gw.Program, dict[str, Any]]:
    dtype, n, c, i, e, k = point
    rng = np.random.default_rng(0)
    b = gw.Builder("mixture")
    x, g = (b.input(name, (n, c), dtype) for name in "xg")
    w = b.input("w", (n, k), "float32")
    runs = b.dispatch(b.input("ids", (n, k), "int64"), experts=e)
    shapes = (("gate", (i, c)), ("up", (i, c)), ("down", (c, i)))

    def draw(*shape: int) -> Any:
        return gw.tensor(rng.normal(size=shape).astype("f4") / 16).to(DTYPES[dtype]).data

    matrices = [b.param(f"e{j}.{name}", draw(*shape)) for j in range(e) for name, shape in shapes]
    b.output(b.sum(b.mul(b.expert_mlp(x, *runs, w, *matrices, name="y"), g), axes=(0, 1), keepdims=False), "loss")
    ids = np.argsort(rng.random((n, e)), axis=1)[:, :k].copy()
    feeds = {"x": draw(n, c), "g": draw(n, c), "w": rng.random((n, k)).astype("f4"), "ids": ids}
    return b.build(), feeds


def _call(point: Point, algorithm: str) -> Any:
    p, feeds = _program(point)
    full = p.grad("loss", [*p.weights, "x", "w"])
    run = full.compile({name: v.shape for name, v in feeds.items()}, experts=algorithm)
    return lambda: run(feeds)


def _chosen(point: Point) -> str:
    dtype, n, c, i, e, k = point
    kind, rows = DTYPES[dtype], Spec((n * k,), DTYPES["int64"])
    matrices = [Spec(shape, kind) for _ in range(e) for shape in ((i, c), (i, c), (c, i))]
    attrs = gw.ops.OPS["expert_mlp"].complete({})
    return algorithm_of(Spec((n, c), kind), rows, matrices, attrs).algorithm
