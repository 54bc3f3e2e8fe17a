"""A stream of planted tasks: clusters of points, each labelled by a map of its own, which may be replaced at a step."""

from __future__ import annotations

from typing import Any

import numpy as np

import graphwright as gw
from graphwright import experts as ex
from graphwright import nn
from graphwright.autograd import Tensor
from graphwright.nn import functional
from graphwright.ops import call
from graphwright.optim import Adam, StepTerm, StepView
from graphwright.program.program import Program

CLASSES = 6


class Net(nn.Module):
    """logits = head(x + mixture(x))."""

    def __init__(self, dim: int, experts: int, hidden: int, k0: float = 2.0, null: bool = False) -> None:
        router = nn.ThresholdRouter(dim, experts, k0, null=null)
        self.mlp = nn.MoE(dim, hidden, experts, kind="mlp", act="gelu", router=router)
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(x + self.mlp(x))}


class Stream:
    """Batches of a world: clusters of radius 4 and deviation 0.5, and maps [classes, dim] ~ N(0, 4/dim)."""

    def __init__(self, seed: int, batch: int = 128, dim: int = 32, clusters: int = 8) -> None:
        self.rng, self.batch, self.dim, self.clusters = np.random.default_rng(seed), batch, dim, clusters
        self.shift()

    def shift(self) -> None:
        """Replace all clusters and maps."""
        centres = self.rng.normal(size=(self.clusters, self.dim))
        self.centres = 4 * centres / np.linalg.norm(centres, axis=1, keepdims=True)
        self.maps = self.rng.normal(0, (4 / self.dim) ** 0.5, (self.clusters, CLASSES, self.dim))

    def draw(self) -> dict[str, np.ndarray]:
        """Return one batch: x [batch, dim] and targets [batch]."""
        which = self.rng.integers(0, self.clusters, self.batch)
        offset = self.rng.normal(0, 0.5, (self.batch, self.dim))
        targets = np.einsum("nkd,nd->nk", self.maps[which], offset).argmax(axis=1)
        return {"x": (self.centres[which] + offset).astype(np.float32), "targets": targets}


class Accuracy(StepTerm):
    """Share of right classes of a batch, before its update."""

    def __call__(self, view: StepView) -> None:
        right = call("eq", view.named("logits").argmax(axis=-1), view.named("targets"))
        view.report("accuracy", right.to("float32").mean())


def objective(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits, targets, dim=-1)


class Run:
    """One training on a stream, with a controller or without."""

    def __init__(
        self, seed: int, care: ex.Regeneration | None = None, *, null: bool = False, ghost: bool = False,
        experts: int = 24, alive: int | None = None, hidden: int = 16, batch: int = 128, dim: int = 32,
    ) -> None:  # fmt: skip
        gw.manual_seed(seed)
        self.stream, self.care = Stream(seed, batch, dim), care
        x = self.stream.draw()["x"]
        net = Net(dim, experts, hidden, null=null)
        self.program: Program = gw.trace(net, x)
        if alive is not None:
            with self.program.edit("free slots") as e:
                e.set_weight(ex.threshold_routers(self.program)[0].alive, np.arange(experts) < alive)
        ex.calibrate(self.program, {"x": x}, k0=2)
        also: list[Any] = [ex.sdl(2.0, 0.01, 0.01), Accuracy()]
        also += [ex.ghost()] if ghost else []
        self.watch = care if care is not None else ex.Regeneration(upkeep=0)
        also.append(self.watch.signals())
        optimizer = Adam(self.program, lr=3e-3, lazy=True)
        self.train = gw.compile_step(self.program, objective, optimizer, self.stream.draw(), also=also)
        self.accuracy: list[float] = []
        self.changes: list[tuple[int, ex.Change]] = []

    def step(self) -> None:
        """Train on one batch, let the controller act, and note the accuracy on that batch before it."""
        batch = self.stream.draw()
        self.train(batch)
        self.accuracy.append(self.train.reports["accuracy"].item())
        if self.care is not None:
            self.changes += [(len(self.accuracy), c) for c in self.care.apply(self.program)]
