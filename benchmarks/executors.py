"""Where the VM stops to gain: the same plan on ATen and on the VM, by op and size; limits of `planning/executor.py`."""

from __future__ import annotations

import numpy as np

import graphwright as gw
from benchmarks.harness import Figure, rounds
from graphwright.plan import Executable

SIZES = (64, 1024, 16_384, 65_536, 262_144, 1_048_576)
FEW = (1, 2, 4, 8)
SIDES = (16, 64, 128, 256, 512)


def run() -> list[Figure]:
    figure = Figure("ATen beside the VM, one op a plan", "f32, all threads for ATen, one for the VM; bound calls")
    for op in ("add", "tanh", "gelu"):
        crossing = [n for n in SIZES if measure(figure, op, *elementwise(op, n), f"{n:,} elements") > 1]
        figure.notes.append(f"{op}: the VM is ahead up to {max(crossing, default=0):,} elements of those measured")
    crossing = [n for n in SIDES if measure(figure, "linear", *product(n), f"{n} x {n} x {n}") > 1]
    figure.notes.append(f"linear: the VM is ahead up to {max(crossing, default=0)} on a side of those measured")
    for m in FEW:
        ahead = [n for n in (64, 256, 1024, 2048) if measure(figure, "linear", *product(n, m), f"{m} x {n} x {n}") > 1]
        figure.notes.append(
            f"linear of {m} rows: the VM is ahead at {', '.join(map(str, ahead)) or 'none'} of those measured"
        )
    return [figure]


def elementwise(op: str, n: int) -> tuple[gw.Program, dict[str, np.ndarray]]:
    b = gw.Builder(op)
    x = b.input("x", (n,))
    b.output(b.op(op, x, x) if op == "add" else b.op(op, x), "y")
    return b.build(), {"x": np.random.default_rng(0).normal(size=n).astype("f4")}


def product(n: int, m: int = 0) -> tuple[gw.Program, dict[str, np.ndarray]]:
    """M rows (n by default) times an n x n matrix."""
    b, rng, shapes = gw.Builder("linear"), np.random.default_rng(0), {"x": (m or n, n), "w": (n, n)}
    b.output(b.linear(*(b.input(name, shape) for name, shape in shapes.items())), "y")
    return b.build(), {name: rng.normal(size=shape).astype("f4") for name, shape in shapes.items()}


def measure(figure: Figure, op: str, p: gw.Program, feeds: dict[str, np.ndarray], what: str) -> float:
    """ATen's time over the VM's; adds both rows."""
    spaces = {}
    for executor in ("aten", "vm"):
        spaces[executor] = Executable(p.compile({name: a.shape for name, a in feeds.items()}, executor=executor))
        spaces[executor].run(feeds)
    size = max(a.size for a in feeds.values())
    taken = rounds({name: space.execute for name, space in spaces.items()}, n=9, inner=max(3, 400_000 // (size + 2000)))
    medians = {name: 1e6 * float(np.median(taken[name])) for name in spaces}
    for name, value in medians.items():
        figure.add(f"{op}, {what}: {name}", value, "us")
    return medians["aten"] / medians["vm"]
