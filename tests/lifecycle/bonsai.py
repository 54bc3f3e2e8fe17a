"""A small training that a life can have: a net with dropout on points in the plane of eight features."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import graphwright as gw
from graphwright import lifecycle as lf
from graphwright import nn, optim
from graphwright.data import DataLoader, TensorDataset

_rng = np.random.default_rng(0)
X, Y = _rng.normal(size=(64, 8)).astype("f4"), _rng.integers(0, 3, 64)


def program() -> gw.Program:
    gw.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    return gw.trace(net, gw.tensor(X[:8]))


def loss(out, y):
    return nn.functional.cross_entropy(out, y)


def step(p: gw.Program, **options: Any) -> Any:
    return gw.compile_step(p, loss, optim.AdamW(p, 1e-2), {"x": X[:8], "y": Y[:8]}, **options)


def loader(x: np.ndarray = X) -> DataLoader:
    return DataLoader(TensorDataset(x, Y), 8, shuffle=True, seed=3)


def begin(folder: Path, **options: Any) -> tuple[lf.Life, lf.Segment, DataLoader]:
    """A new life in its first segment, and the loader of its batches."""
    life = lf.birth(program(), folder, name="bonsai", **options)
    data = loader()
    return life, life.segment(step(life.program), data, objective="three classes"), data


def again(folder: Path, **options: Any) -> tuple[lf.Life, lf.Segment, DataLoader]:
    """The life in another process, as it were: resumed, with random numbers that must not matter."""
    gw.manual_seed(99)
    life = lf.open(folder, **options)
    data = loader()
    train_ = step(life.program)
    return life, life.resume(train_, data) if life.resumable else life.segment(train_, data), data


def train(run: lf.Segment, data: Iterable[Any], steps: int) -> list[float]:
    """Train until the life is `steps` old; return the losses."""
    losses: list[float] = []
    while run.age < steps:
        for batch in data:
            losses.append(run.step(batch))
            if run.age == steps:
                break
    return losses


def everything(life: lf.Life) -> dict[str, str]:
    """Name -> digest of every tensor of the last commit, moments and counts included."""
    return {name: home.digest for name, home in life.store.fold.items()}


class Reborn:
    """A controller that replaces the hidden layer's weight by a new parameter under the same path and key."""

    def __init__(self, every: int = 4) -> None:
        self.every = every

    def propose(self, view):
        if view.age % self.every:
            return [lf.Proposal("alarm", "0", "the loss rose", {"d": -3.5})] if view.age == 2 else []
        value = np.full((16, 8), view.age / 100, np.float32)

        def apply(e):
            before = e.program.node("0.weight")
            (edge,) = e.program.out_edges(before)
            e.rename(before, "old")
            e.rewire(edge, e.param("0.weight", value, key="new"))
            e.remove("old")
            e.rename("0.weight", "0.weight", key="0.weight")

        return [lf.Proposal("expert_reborn", "0.weight", "dead", {"r": 0.01}, apply)]

    def figures(self):
        return [{"pi": 0.4, "d": 1.5}]


def cared(run, data, age: int, care=None) -> None:
    care = care or Reborn()
    while run.age < age:
        for batch in data:
            run.step(batch, care)
            if run.age == age:
                return
