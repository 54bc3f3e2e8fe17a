"""Random programs of sums with gates on some of their edges."""

from __future__ import annotations

import numpy as np

import graphwright as gw
from graphwright.program import Program

WIDTH = 3


def random_dag(seed: int, nodes: int = 6, kind: str = "float64") -> Program:
    """Blocks `tanh(junction · W)` that read random earlier ones, twice at times; output `loss`, a mean of squares."""
    rng = np.random.default_rng(seed)
    b = gw.Builder(f"dag {seed}")
    values = [b.input("x", (4, WIDTH), kind)]
    for k in range(nodes):
        reads = [values[int(i)] for i in rng.integers(0, len(values), rng.integers(1, 4))]
        total = b.junction(*reads, name=f"n{k}.sum")
        w = b.param(f"n{k}.w", rng.normal(size=(WIDTH, WIDTH)).astype(kind))
        values.append(b.tanh(b.linear(total, w, name=f"n{k}.fc"), name=f"n{k}.act"))
    last = b.junction(*values[-2:], name="out.sum")
    b.output(last, name="y")
    b.output(b.mean(b.mul(last, last, name="out.square"), axes=(0, 1), name="out.loss"), name="loss")
    return b.build()


def junction_edges(p: Program) -> list:
    return [e for j in p.junctions() for e in p.in_edges(j)]


def central(p: Program, key: str, feeds: dict, h: float = 1e-6) -> np.ndarray:
    """Central differences of the output `loss` by a float64 weight."""
    data = p.weights[key].data.to_numpy()
    found = np.zeros(data.shape)
    for place in np.ndindex(*data.shape):
        before = data[place]
        sides = []
        for at in (before + h, before - h):
            data[place] = at
            sides.append(p.run(feeds, keep="outputs")["loss"].item())
        data[place] = before
        found[place] = (sides[0] - sides[1]) / (2 * h)
    return found
