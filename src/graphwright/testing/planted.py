"""Search problems with a known ("planted") solution: the edges that carry signal, or the skips of a teacher."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from graphwright.autograd import Tensor
from graphwright.program import Builder, Program

TOKENS, WIDTH, PLANTED = 8, 16, 12


class Edges:
    """A task: y_i = Σ M x_j over the planted edges j -> i, + 0.05 noise. The student computes W Σ x_j over all edges.

    `program` has inputs x, y [batch, 8, 16] of dtype `kind` and the output `loss`, the mean squared error; `planted`
    names the edges that carry signal, e.g. `x0 -> y1`.
    """

    def __init__(self, seed: int, kind: str = "float32") -> None:
        self.rng = np.random.default_rng(seed)
        self.kind = kind
        pairs = [(i, j) for i in range(TOKENS) for j in range(TOKENS) if i != j]
        chosen = self.rng.choice(len(pairs), PLANTED, replace=False)
        self.pairs = [pairs[k] for k in sorted(chosen)]
        self.m = self.rng.normal(size=(WIDTH, WIDTH)) / 4
        b = Builder("edges")
        x, y = (b.input(n, ("B", TOKENS, WIDTH), kind) for n in "xy")
        w = b.param("w", (self.rng.normal(size=(WIDTH, WIDTH)) / 4).astype(kind))
        tokens = [b.slice(x, axis=1, start=j, size=1, step=1, name=f"x{j}") for j in range(TOKENS)]
        sums = [b.junction(*(tokens[j] for j in range(TOKENS) if j != i), name=f"y{i}") for i in range(TOKENS)]
        gap = b.sub(b.linear(b.concat(*sums, axis=1, name="mixed"), w, name="student"), y, name="gap")
        b.output(b.mean(b.mul(gap, gap, name="square"), axes=(0, 1, 2), name="mse"), name="loss")
        self.program: Program = b.build()
        self.planted = {f"x{j} -> y{i}" for i, j in self.pairs}

    def edges(self) -> list:
        """Return the 56 edges between different tokens."""
        return [e for i in range(TOKENS) for e in self.program.in_edges(f"y{i}")]

    def gate(self, kind: str, init: Any = None) -> None:
        """Add a gate of this kind to each of the 56 edges."""
        with self.program.edit("gates on all edges") as e:
            e.gate(self.edges(), kind, init=init)

    def batch(self, size: int = 64, seed: int | None = None) -> dict[str, np.ndarray]:
        """Return fresh inputs and noisy outputs."""
        rng = self.rng if seed is None else np.random.default_rng(seed)
        x = rng.normal(size=(size, TOKENS, WIDTH))
        y = 0.05 * rng.normal(size=x.shape)
        for i, j in self.pairs:
            y[:, i] += x[:, j] @ self.m.T
        return {"x": x.astype(self.kind), "y": y.astype(self.kind)}

    def found(self, open_names: set[str]) -> tuple[float, float]:
        """Return (share of planted edges named in `open_names`, share of the other edges that are not named there)."""
        others = 56 - PLANTED
        return len(open_names & self.planted) / PLANTED, 1 - len(open_names - self.planted) / others


class Sources:
    """A task: y = scale·(Σ M_j x_j over planted sources j, + 0.1 noise). The student computes Σ W_j x_j over all j.

    `program` has inputs x [batch, sources, 6], y [batch, 4] and the output `loss`, the mean squared error; `planted`
    names the edges that carry signal. `correlated` is the correlation of each entry between two sources.
    """

    def __init__(
        self, seed: int, sources: int = 8, planted: int = 3, scale: float = 1.0, correlated: float = 0.0
    ) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.scale, self.correlated = scale, correlated
        chosen = sorted(rng.choice(sources, planted, replace=False).tolist())
        self.maps = {j: rng.normal(size=(4, 6)) / np.sqrt(6) for j in chosen}
        self.count, b = sources, Builder("sources")
        x, y = b.input("x", ("B", sources, 6)), b.input("y", ("B", 4))
        made = []
        for j in range(sources):
            w = b.param(f"w{j}", (rng.normal(size=(4, 6)) / np.sqrt(6)).astype("f4"))
            made.append(b.linear(b.slice(x, axis=1, start=j, size=1, step=1, name=f"x{j}"), w, name=f"s{j}"))
        gap = b.sub(b.sum(b.junction(*made, name="total"), axes=(1,), name="flat"), y, name="gap")
        b.output(b.mean(b.mul(gap, gap, name="square"), axes=(0, 1), name="mse"), name="loss")
        self.program: Program = b.build()
        self.planted = {f"s{j} -> total" for j in chosen}

    def batch(self, size: int = 64) -> dict[str, np.ndarray]:
        """Return fresh inputs and noisy outputs."""
        x = self.rng.normal(size=(size, self.count, 6))
        if self.correlated:
            common = self.rng.normal(size=(size, 1, 6))
            x = np.sqrt(1 - self.correlated) * x + np.sqrt(self.correlated) * common
        y = 0.1 * self.rng.normal(size=(size, 4))
        for j, m in self.maps.items():
            y += x[:, j] @ m.T
        return {"x": x.astype("f4"), "y": (self.scale * y).astype("f4")}


CHAIN, BLOCKS = 12, 6
BLOCK_NAMES = ("x", *(f"h{j}" for j in range(1, BLOCKS + 1)))


def chain(seed: int, teacher: bool = False, widths: tuple[int, ...] = (CHAIN,) * (BLOCKS + 1)) -> Program:
    """Build h_j = tanh(W_j h_(j-1) + b_j) with h_0 = x and outputs y_j = h_j; h_j has `widths[j]` entries.

    W_j is random; for a `teacher`, it is 1.2 times an orthogonal matrix, and b_j is not 0.
    """
    rng, b = np.random.default_rng(seed), Builder("chain")
    h = b.input("x", ("B", widths[0]))
    for j, (inner, outer) in enumerate(pairwise(widths), 1):
        w = rng.uniform(-1, 1, (outer, inner)) / np.sqrt(inner)
        bias = np.zeros(outer)
        if teacher:
            w, bias = 1.2 * _orthogonal(rng.normal(size=(outer, inner))), 0.1 * rng.normal(size=outer)
        weight, shift = b.param(f"b{j}.w", w.astype("f4")), b.param(f"b{j}.bias", bias.astype("f4"))
        h = b.tanh(b.linear(h, weight, shift, name=f"b{j}"), name=f"h{j}")
        b.output(h, f"y{j}")
    return b.build()


def _orthogonal(drawn: np.ndarray) -> np.ndarray:
    """Orthonormalise the rows or columns of a matrix, whichever are fewer."""
    return np.linalg.qr(drawn)[0] if drawn.shape[0] >= drawn.shape[1] else np.linalg.qr(drawn.T)[0].T


class SkipTeacher:
    """A teacher: `program` is a chain of six blocks with the skip connections `planted`.

    Args:
        candidates: the possible skips between `x` and the blocks `h1` to `h6`, made by `structure.skips`.
        count: number of planted skips.
        last: show only the last block to students; then other sets of skips may be as good as the planted one.
    """

    def __init__(self, seed: int, candidates: Any, count: int = 3, last: bool = False) -> None:
        self.program = chain(1000 + seed, True)
        rng = np.random.default_rng(seed)
        self.planted: set[str] = set(rng.choice(candidates.names(self.program), count, replace=False).tolist())
        self.shown = (BLOCKS,) if last else tuple(range(1, BLOCKS + 1))
        candidates.build(self.program, self.planted)
        self._plans: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_plans": {}}  # plans cannot be sent to workers

    def batch(self, rng: np.random.Generator, n: int = 128) -> dict[str, np.ndarray]:
        """Return `n` fresh inputs `x`, and as `t1`, `t2`, ... the outputs of the teacher's shown blocks."""
        x = rng.normal(size=(n, CHAIN)).astype("f4")
        if n not in self._plans:
            self._plans[n] = self.program.compile(x=x.shape)
        found = self._plans[n]({"x": x})
        return {"x": x, **{f"t{j}": found[f"y{j}"].to_numpy() for j in self.shown}}

    def task(self, outputs: dict[str, Tensor], feeds: dict[str, Tensor]) -> Tensor:
        """Return the mean squared error of a student's outputs y_j from the teacher's t_j in `feeds`, a batch."""
        gaps = [((outputs[f"y{j}"] - feeds[f"t{j}"]) ** 2).mean() for j in self.shown]
        return sum(gaps[1:], start=gaps[0]) * (1 / len(gaps))
