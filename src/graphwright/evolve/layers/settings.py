"""How layers evolve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from numbers import Real
from typing import Any

from graphwright.errors import UsageError
from graphwright.evolve.layers.member import OPTIMIZERS
from graphwright.evolve.settings import check, one_of, shares

OBJECTIVES = ("metric", "loss", "params", "flops")


@dataclass(frozen=True, slots=True)
class Pareto:
    """Survival by several objectives, NSGA-II.

    Attributes:
        objectives: of "metric" (up), "loss", "params", "flops" (down); archive: members kept that no other dominates.
    """

    objectives: tuple[str, ...] = ("metric", "params")
    archive: int = 64

    def __post_init__(self) -> None:
        unknown = set(self.objectives) - set(OBJECTIVES)
        if unknown or not self.objectives or self.archive < 1:
            raise UsageError("no such objectives", where="Pareto", expected=", ".join(OBJECTIVES),
                             got=f"{', '.join(self.objectives)}; archive {self.archive}")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layers:
    """Evolution of whole layers.

    Attributes:
        population: members that survive; as many children are made in each generation.
        steps, batch, clip: of training per candidate; the norm of a step's gradient is at most `clip`.
        lr, optimizer: at the start; from then on they are genes.
        pareto: survive by several objectives; else by the metric, of equals those with fewer parameters.
        crossover: share of children that have two parents.
        rates: how often a mutation is drawn, by name, in place of its two weights in the table; 0 is never. A child
            gets one mutation, drawn by weight among those that can be made; changes of `learning_rate`, `optimizer`
            and `loss` are some of them.
        explore: share of the generations (or of the candidates, whichever is further) in which mutations are drawn by
            their first weight; then by the second.
        stagnation: generations without gain after which only structure changes, until the next gain.
        inherit: weights of a child: "lamarck" trained ones, "baldwin" those before training.
        max_params, max_flops, max_width: limits of a candidate; flops are those of one case.
    """

    population: int = 6
    steps: int = 200
    batch: int = 64
    clip: float = 1.0
    lr: float = 1e-2
    optimizer: str = "adam"
    pareto: Pareto | None = None
    crossover: float = 0.2
    rates: Mapping[str, float] = field(default_factory=dict)
    explore: float = 0.4
    stagnation: int = 20
    inherit: str = "lamarck"
    max_params: int = 1_000_000
    max_flops: int = 1 << 40
    max_width: int = 4096

    def __post_init__(self) -> None:
        shares(self, ("crossover", "explore"))
        check(self, {"population": 1, "steps": 0, "batch": 1, "stagnation": 0, "max_params": 0, "max_flops": 0,
                     "max_width": 0}, whole=True)  # fmt: skip
        check(self, {"lr": 1e-12, "clip": 0})
        one_of(self, optimizer=OPTIMIZERS, inherit=("lamarck", "baldwin"))
        if not isinstance(self.pareto, Pareto | None):
            raise UsageError("a setting out of range", where="Layers, pareto", expected="Pareto(...) or None",
                             got=repr(self.pareto))  # fmt: skip
        rates = self.rates if isinstance(self.rates, Mapping) else {"rates": self.rates}
        odd = {n: v for n, v in rates.items() if not isinstance(v, Real) or not 0 <= float(v) < float("inf")}
        if odd or rates is not self.rates:
            raise UsageError("a rate is a number from 0 on, by name", where="Layers, rates", got=odd or self.rates)

    def to_json(self) -> dict[str, Any]:
        """All settings, by name."""
        return {"kind": "Layers", **asdict(self)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Layers:
        """Inverse of `to_json`."""
        values = {k: v for k, v in data.items() if k != "kind"}
        if values["pareto"] is not None:
            pareto = values["pareto"]
            values["pareto"] = Pareto(tuple(pareto["objectives"]), pareto["archive"])
        return Layers(**values)
