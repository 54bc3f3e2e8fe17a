"""A candidate of layer evolution: a network, the record of its birth, and the genes that say how it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from graphwright.array import Spec, from_numpy
from graphwright.evolve.settings import OPTIMIZERS
from graphwright.program import Entry, Program

RATES = tuple(10.0 ** (-5 + i / 3) for i in range(13))
"""The learning rates that training genes choose from, 1e-5 to 1e-1."""
_INITIAL_RATES = {"adam": (6, 9), "sgd": (8, 12)}  # indices of the first and last rate after a change of optimizer
GENES = {"learning_rate": (0.05, 0.15), "optimizer": (0.02, 0.08), "loss": (0.02, 0.02)}
"""Weights (early, late in a run) with which the change of a training gene is drawn, relative to layer mutations."""


@dataclass(frozen=True, slots=True)
class TrainingGenes:
    """The genes that say how a candidate is trained.

    Attributes:
        rate: index of the learning rate among 13 rates from 1e-5 to 1e-1; optimizer: "adam" or "sgd".
        loss: name of the loss that training minimises, such as "mse"; "heads" for the sum over the heads of a task.
    """

    rate: int
    optimizer: str
    loss: str

    @classmethod
    def of(cls, lr: float, optimizer: str, loss: str) -> TrainingGenes:
        """Create genes with the learning rate, of the 13 possible ones, that is nearest to `lr` on a log scale."""
        return cls(int(np.argmin([abs(np.log(v / lr)) for v in RATES])), optimizer, loss)

    @property
    def lr(self) -> float:
        """The learning rate."""
        return RATES[self.rate]

    def changed(self, gene: str, losses: Sequence[str], rng: np.random.Generator) -> TrainingGenes:
        """Return a copy of the genes in which `gene` ("learning_rate", "optimizer" or "loss") is mutated.

        The learning rate moves by one (with probability 0.8) or two of the 13 rates. If the optimizer changes, the
        rate is also clipped to the usual range of the new optimizer. The loss becomes the next entry of `losses`.
        """
        if gene == "learning_rate":
            step = int(rng.choice([-2, -1, 1, 2], p=[0.1, 0.4, 0.4, 0.1]))
            return replace(self, rate=min(max(self.rate + step, 0), len(RATES) - 1))
        if gene == "optimizer":
            other = next(o for o in OPTIMIZERS if o != self.optimizer)
            low, high = _INITIAL_RATES[other]
            return replace(self, optimizer=other, rate=min(max(self.rate, low), high))
        return replace(self, loss=losses[(losses.index(self.loss) + 1) % len(losses)])

    def to_json(self) -> dict[str, Any]:
        """Return all genes by name, and the learning rate."""
        return {"rate": self.rate, "lr": self.lr, "optimizer": self.optimizer, "loss": self.loss}

    def __str__(self) -> str:
        return f"{self.optimizer} {self.lr:.2g}, {self.loss}"


Moments = dict[str, np.ndarray]
"""State of an optimizer, such as its moments, by name."""


@dataclass(frozen=True, slots=True)
class CandidateBirth:
    """The birth and the scores of a candidate.

    Attributes:
        number: index in order of birth; generation: generation of the run.
        fitter_parent, other_parent: numbers of its parents, or None; a manual edit has the edited candidate as parent.
        mutation, site: name of the mutation, and the node or axis that it changed; block: name of the block of nodes
            that it added; "" for a missing name.
        training: the genes with which the candidate was trained.
        metric, loss: scores on the validation cases; metric is None if the candidate failed, and `failure` says why.
        params: number of weights; flops: floating-point operations for one case.
        author: "evolution" or "human"; why, edits: the reason and the journal edits of a manual edit.
    """

    number: int
    generation: int
    fitter_parent: int | None
    other_parent: int | None
    mutation: str
    site: str
    block: str
    training: TrainingGenes
    metric: float | None
    loss: float
    params: int
    flops: int
    failure: str = ""
    author: str = "evolution"
    why: str = ""
    edits: tuple[dict[str, Any], ...] = ()

    @property
    def what(self) -> str:
        """A text that describes the change by which the candidate was created."""
        if self.author == "human":
            return f"manual edit, {self.why}"
        site = f" at {self.site}" if self.site else ""
        crossed = f", crossed with {self.other_parent}" if self.other_parent is not None else ""
        return f"{self.mutation or 'start'}{site}{crossed}"

    def value(self, objective: str) -> float:
        """Return the value of an objective, negated if lower is better; -inf for a failed candidate."""
        if self.metric is None:
            return float("-inf")
        if objective == "metric":
            return self.metric
        return -float({"loss": self.loss, "params": self.params, "flops": self.flops}[objective])

    def __str__(self) -> str:
        score = self.failure or f"{self.metric:.4g}"
        return f"{self.number}: {self.what}; {self.training}; {score}"


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A network of the population.

    Attributes:
        birth: record of its birth and scores.
        program: the network as it was scored; its journal contains the mutations.
        moments: state of its optimizer after training.
        untrained, untrained_moments: program and optimizer state before training, if children inherit these; else None.
    """

    birth: CandidateBirth
    program: Program
    moments: Moments
    untrained: Program | None = None
    untrained_moments: Moments = field(default_factory=dict)

    @property
    def heritage(self) -> tuple[Program, Moments]:
        """The program and optimizer state that children inherit: from before training if stored, else from after it."""
        return (self.program, self.moments) if self.untrained is None else (self.untrained, self.untrained_moments)

    @property
    def number(self) -> int:
        """The index in order of birth."""
        return self.birth.number

    @property
    def metric(self) -> float:
        """The metric on the validation cases."""
        assert self.birth.metric is not None  # failed candidates do not enter the population
        return self.birth.metric

    def __repr__(self) -> str:
        return f"Candidate({self.birth})"


def entry(birth: CandidateBirth) -> tuple[Entry, dict[str, Any]]:
    """Return the journal entry of a manual edit, and the payloads that `replay` needs to apply it.

    The payloads are a dict from the digest of each weight that the edit added to an array of zeros.
    """
    added: dict[str, Any] = {}

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            if "blake2b" in value and "spec" in value:
                spec = Spec.from_json(value["spec"])
                added[value["blake2b"]] = from_numpy(np.zeros(spec.sizes, spec.dtype.numpy))
            value = [*value.values()]
        for inner in value if isinstance(value, list | tuple) else ():
            collect(inner)

    collect(birth.edits)
    facts = {"seq": 0, "time": "", "why": birth.why, "author": birth.author, "tool": None, "line": None,
             "base_version": 0, "edits": list(birth.edits), "before": "", "after": "", "undoes": None, "redoes": None,
             "warnings": [], "prev": "", "hash": ""}  # fmt: skip
    return Entry.from_json(facts), added
