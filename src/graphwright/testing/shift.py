"""A planted shift: clusters of points, each labelled by a map of its own; at some step all of them are replaced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from graphwright import experts as ex
from graphwright import nn
from graphwright.autograd import Tensor, manual_seed
from graphwright.nn import functional
from graphwright.ops import call
from graphwright.optim import Adam, StepTerm, StepView, compile_step
from graphwright.program import Program, trace
from graphwright.program.editing.proposal import Proposal
from graphwright.testing.oracle import as_numpy

CLASSES = 6
RADIUS, DEVIATION = 4.0, 0.5


class Net(nn.Module):
    """logits = head(x + mixture(x)), with a threshold router and experts down(gelu(up x)) without biases."""

    def __init__(self, dim: int, experts: int, hidden: int, k0: float = 2.0, null: bool = False) -> None:
        router = nn.ThresholdRouter(dim, experts, k0, null=null)
        self.mlp = nn.MoE(dim, hidden, experts, kind="mlp", act="gelu", router=router)
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return `logits` [n, 6] of points [n, dim]."""
        return {"logits": self.head(x + self.mlp(x))}


@dataclass(frozen=True, slots=True)
class World:
    """Centres of clusters [n, dim] of norm 4, and their maps [n, 6, dim] ~ N(0, 4/dim)."""

    centres: np.ndarray
    maps: np.ndarray

    @classmethod
    def drawn(cls, rng: np.random.Generator, clusters: int, dim: int) -> World:
        """Draw the directions of the centres and the maps."""
        centres = rng.normal(size=(clusters, dim))
        centres = RADIUS * centres / np.linalg.norm(centres, axis=1, keepdims=True)
        return cls(centres, rng.normal(0, (4 / dim) ** 0.5, (clusters, CLASSES, dim)))

    def draw(self, rng: np.random.Generator, size: int) -> dict[str, np.ndarray]:
        """Return points x [size, dim], and their classes: the argmax of the cluster's map of the offset."""
        clusters, dim = self.centres.shape
        which = rng.integers(0, clusters, size)
        offset = rng.normal(0, DEVIATION, (size, dim))
        targets = np.einsum("nkd,nd->nk", self.maps[which], offset).argmax(axis=1)
        return {"x": (self.centres[which] + offset).astype(np.float32), "targets": targets}


class Stream:
    """Batches of the present world."""

    def __init__(self, seed: int, batch: int = 128, dim: int = 32, clusters: int = 8) -> None:
        self.rng, self.batch, self.dim, self.clusters = np.random.default_rng(seed), batch, dim, clusters
        self.shift()

    def shift(self) -> None:
        """Replace all clusters and maps."""
        self.world = World.drawn(self.rng, self.clusters, self.dim)

    def draw(self) -> dict[str, np.ndarray]:
        """Return one batch: x [batch, dim] and targets [batch]."""
        return self.world.draw(self.rng, self.batch)


class Accuracy(StepTerm):
    """Share of right classes of a batch, before its update."""

    def __call__(self, view: StepView) -> None:
        """Report `accuracy`."""
        right = call("eq", view.named("logits").argmax(axis=-1), view.named("targets"))
        view.report("accuracy", right.to("float32").mean())


def objective(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return functional.cross_entropy(logits, targets, dim=-1)


class Run:
    """One training on a stream, by lazy Adam with the sparse-diversity loss, with a controller or without.

    Runs of one seed have equal weights and batches, whatever the controller does.

    Args:
        care: the controller; without one, its signals are measured all the same.
        null, ghost: whether the router has a null share, and is trained by ghosts too.
        alive: the number of experts that are alive at first; all by default.
    """

    def __init__(
        self, seed: int, care: ex.Regeneration | None = None, *, null: bool = False, ghost: bool = False,
        experts: int = 24, alive: int | None = None, hidden: int = 16, batch: int = 128, dim: int = 32,
    ) -> None:  # fmt: skip
        manual_seed(seed)
        self.stream, self.care = Stream(seed, batch, dim), care
        x = self.stream.draw()["x"]
        net = Net(dim, experts, hidden, null=null)
        self.program: Program = trace(net, x)
        if alive is not None:
            with self.program.edit("free slots") as e:
                e.set_weight(ex.threshold_routers(self.program)[0].alive, np.arange(experts) < alive)
        ex.calibrate(self.program, {"x": x}, k0=2)
        also: list[Any] = [ex.sdl(2.0, 0.01, 0.01), Accuracy()]
        also += [ex.ghost()] if ghost else []
        self.watch = care if care is not None else ex.Regeneration(upkeep=0)
        also.append(self.watch.signals())
        optimizer = Adam(self.program, lr=3e-3, lazy=True)
        self.train = compile_step(self.program, objective, optimizer, self.stream.draw(), also=also)
        self.accuracy: list[float] = []
        self.changes: list[tuple[int, Proposal]] = []

    def step(self) -> None:
        """Train on one batch, let the controller act, and note the accuracy on that batch before it."""
        batch = self.stream.draw()
        self.train(batch)
        self.accuracy.append(self.train.reports["accuracy"].item())
        if self.care is not None:
            self.changes += [(len(self.accuracy) - c.steps_ago, c) for c in self.care.apply(self.program)]

    def count(self, event: str) -> int:
        """Return the number of changes of a kind, such as expert_reborn."""
        return sum(change.event == event for _, change in self.changes)

    def measured(self, world: World, batches: int = 16) -> float:
        """Return the present accuracy on new points of a world."""
        rng, right = np.random.default_rng(0), []
        for _ in range(batches):
            batch = world.draw(rng, self.stream.batch)
            logits = as_numpy(self.program.run({"x": batch["x"]})["logits"])
            right.append((logits.argmax(axis=-1) == batch["targets"]).mean())
        return float(np.mean(right))
