"""How a population evolves: NEAT of 2002, and the hybrid that trains each candidate by gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, Literal

from graphwright.array.population.names import ACTIVATIONS
from graphwright.errors import UsageError

UNLIMITED = 1 << 20


def check(settings: Any, least: Mapping[str, float], whole: bool = False) -> None:
    """Settings are finite numbers, or whole ones, from a least value on. Raises: UsageError."""
    for name, low in least.items():
        value = getattr(settings, name)
        number = float(value) if isinstance(value, Real) else float("nan")
        if not low <= number < float("inf") or (whole and not number.is_integer()):
            raise UsageError("a setting out of range", where=f"{type(settings).__name__}, {name}", got=repr(value),
                             expected=f"a {'whole ' if whole else ''}number from {low} on")  # fmt: skip


def shares(settings: Any, names: Iterable[str]) -> None:
    """Settings are numbers from 0 to 1. Raises: UsageError."""
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, Real) or not 0.0 <= float(value) <= 1.0:
            raise UsageError("not a probability", where=f"{type(settings).__name__}, {name}", expected="0 to 1",
                             got=repr(value))  # fmt: skip


def one_of(settings: Any, **choices: Sequence[str]) -> None:
    """Settings are one of several words. Raises: UsageError."""
    for name, among in choices.items():
        if getattr(settings, name) not in among:
            raise UsageError("a setting out of range", where=f"{type(settings).__name__}, {name}",
                             expected=", ".join(among), got=repr(getattr(settings, name)))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Train:
    """Gradient steps inside the evaluation: Adam on all training cases as one batch.

    Attributes:
        steps: per candidate; lr: of Adam; clip: bound on a candidate's gradient norm, 0 for none.
    """

    steps: int = 60
    lr: float = 0.05
    clip: float = 1.0

    def __post_init__(self) -> None:
        check(self, {"steps": 0}, whole=True)
        check(self, {"lr": 0, "clip": 0})


@dataclass(frozen=True, slots=True)
class NEAT:
    """Rates and rules of Stanley and Miikkulainen 2002, "Evolving Neural Networks through Augmenting Topologies".

    Probabilities of a child's structural mutations are tried in the order in which they stand here; the first that hits
    and can be made is the only one, and then the weights stay.

    Attributes:
        population: genomes of a generation.
        grow: a unit from all inputs, with outgoing weights 0.
        split_link, add_link, toggle_link, remove_link, remove_delay_link, set_activation: one gene each.
        weights: all weights of a child move.
        perturb, power: share of weights that move by U(±power); the others are drawn from N(0, power²).
        fine, fine_power: share of children whose steps are `fine_power` of that.
        new_link: standard deviation of an added link; 0 keeps the function.
        most: bound on absolute weights.
        delays: share of added links that carry the value of the step before.
        crossover, species, growth: False switches it off.
        mutate_only, interspecies, reclose: children of one parent; parents of two species; a link closed in a parent
            stays closed.
        threshold: of the distance δ of a species; `target_species` moves it by 0.3 a generation.
        c1, c2, c3, c4: weights of excess, disjoint, weight and attribute differences in δ.
        survival: best share of a species that breeds; tournament: of these, a parent is the best of so many.
        champions: species larger than this copy their best unchanged; 0 copies the best of all alone.
        stagnation: generations without gain until a species breeds no more; silence: until only two species breed.
        start: "minimal" is inputs and bias to outputs; "random" makes `burst` structural mutations of each founder
            besides, whatever `growth`.
        activation, output: of hidden nodes (one, or several to choose from) and of outputs.
        train: gradient steps; None for none.
        inherit: weights of a child: "lamarck" trained ones, "baldwin" those before training, "none" new ones.
        max_nodes, max_links: limits of a genome.
    """

    population: int = 150
    grow: float = 0.0
    split_link: float = 0.03
    add_link: float = 0.05
    toggle_link: float = 0.0
    remove_link: float = 0.0
    remove_delay_link: float = 0.0
    set_activation: float = 0.0
    weights: float = 0.8
    perturb: float = 0.9
    power: float = 2.5
    new_link: float = 2.5
    fine: float = 0.15
    fine_power: float = 0.1
    most: float = 8.0
    delays: float = 0.0
    tries: int = 20
    crossover: bool = True
    species: bool = True
    growth: bool = True
    mutate_only: float = 0.25
    interspecies: float = 0.001
    reclose: float = 0.75
    threshold: float = 3.0
    target_species: int | None = None
    c1: float = 1.0
    c2: float = 1.0
    c3: float = 0.4
    c4: float = 0.0
    survival: float = 0.2
    tournament: int = 1
    champions: int = 5
    stagnation: int = 30
    silence: int = 20
    start: Literal["minimal", "random"] = "minimal"
    burst: int = 0
    activation: str | tuple[str, ...] = "sigmoid49"
    output: str = "sigmoid49"
    train: Train | None = None
    inherit: Literal["lamarck", "baldwin", "none"] = "lamarck"
    max_nodes: int = UNLIMITED
    max_links: int = UNLIMITED

    def __post_init__(self) -> None:
        for name in (*self.hidden, self.output):
            if name not in ACTIVATIONS:
                raise UsageError(
                    "no such activation", where=type(self).__name__, expected=", ".join(ACTIVATIONS), got=name
                )
        shares(self, _SHARES)
        if not self.hidden:
            raise UsageError("hidden nodes have an activation", where="activation", got=self.activation)
        check(self, _COUNTS if self.target_species is None else {**_COUNTS, "target_species": 1}, whole=True)
        check(self, _SIZES)
        one_of(self, start=("minimal", "random"), inherit=("lamarck", "baldwin", "none"))
        if not isinstance(self.train, Train | None):
            raise UsageError("a setting out of range", where=f"{type(self).__name__}, train", got=repr(self.train),
                             expected="Train(...) or None")  # fmt: skip

    @property
    def hidden(self) -> tuple[str, ...]:
        """Activations of hidden nodes."""
        return (self.activation,) if isinstance(self.activation, str) else tuple(self.activation)

    @property
    def still(self) -> bool:
        """Whether children are always what a parent was."""
        grown = ("grow", "split_link", "add_link")
        moved = [name for name in STRUCTURAL if self.growth or name not in grown]
        return self.train is None and not (self.crossover or self.weights or any(getattr(self, n) for n in moved))

    @classmethod
    def paper2002(cls, **changes: Any) -> NEAT:
        """As in the paper where the defaults, found since then, are not: full steps, stagnation after 15."""
        return replace(cls(fine=0.0, stagnation=15), **changes)

    def to_json(self) -> dict[str, Any]:
        """All settings, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["activation"] = list(self.hidden)
        if self.train is not None:
            values["train"] = {f.name: getattr(self.train, f.name) for f in fields(Train)}
        return {"kind": type(self).__name__, **values}

    @staticmethod
    def from_json(data: dict[str, Any]) -> NEAT:
        """Inverse of `to_json`."""
        names = tuple(data["activation"])
        values = {**data, "activation": names[0] if len(names) == 1 else names}
        kind = {"NEAT": NEAT, "Hybrid": Hybrid}[values.pop("kind")]
        values["train"] = None if values["train"] is None else Train(**values["train"])
        return kind(**values)


@dataclass(frozen=True, slots=True)
class Hybrid(NEAT):
    """Few candidates, each grown without changing its function and then trained; the best of three breeds."""

    population: int = 16
    grow: float = 0.4
    split_link: float = 0.3
    add_link: float = 0.7
    weights: float = 1.0
    perturb: float = 1.0
    power: float = 0.1
    fine: float = 0.0
    new_link: float = 0.0
    most: float = 1e6
    crossover: bool = False
    species: bool = False
    survival: float = 1.0
    tournament: int = 3
    champions: int = 0
    activation: str | tuple[str, ...] = "tanh"
    output: str = "identity"
    train: Train | None = field(default_factory=Train)


STRUCTURAL = (
    "grow", "split_link", "add_link", "toggle_link", "remove_link", "remove_delay_link", "set_activation",
)  # fmt: skip
_SHARES = (*STRUCTURAL, "weights", "perturb", "fine", "delays", "mutate_only", "interspecies", "reclose", "survival")
_COUNTS = {
    "population": 2, "tries": 0, "tournament": 1, "champions": 0, "stagnation": 0, "silence": 0, "burst": 0,
    "max_nodes": 0, "max_links": 0,
}  # fmt: skip
_SIZES: dict[str, int] = dict.fromkeys(
    ("power", "fine_power", "new_link", "most", "threshold", "c1", "c2", "c3", "c4"), 0
)
"""Least values of settings."""
