"""Settings of evolution: NEAT on neurons, the hybrid that trains candidates by gradients, and layers.

All settings are frozen dataclasses. They check their values, and saved runs store them as JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import Any, Literal

from graphwright.array.population.names import ACTIVATIONS
from graphwright.errors import UsageError

UNLIMITED = 1 << 20
OPTIMIZERS = ("adam", "sgd")
OBJECTIVES = ("metric", "loss", "params", "flops")
STRUCTURAL = (
    "grow", "split_link", "add_link", "toggle_link", "remove_link", "remove_delay_link", "set_activation",
)  # fmt: skip
"""Structural mutations of NEAT, in the order in which they are tried."""
_SHARES = (*STRUCTURAL, "weights", "perturb", "fine", "delays", "mutate_only", "interspecies", "reclose", "survival")


def _invalid(settings: Any, name: str, expected: str) -> UsageError:
    return UsageError("a setting is out of range", where=f"{type(settings).__name__}, {name}", expected=expected,
                      got=repr(getattr(settings, name)))  # fmt: skip


def _at_least(settings: Any, names: Iterable[str], low: float, whole: bool = False) -> None:
    """Check that settings are finite numbers >= low, and integers if `whole`. Raises: UsageError."""
    for name in names:
        value = getattr(settings, name)
        number = float(value) if isinstance(value, Real) else float("nan")
        if not low <= number < float("inf") or (whole and not number.is_integer()):
            raise _invalid(settings, name, f"a {'whole ' if whole else ''}number >= {low}")


def _shares(settings: Any, names: Iterable[str]) -> None:
    """Check that settings are numbers from 0 to 1. Raises: UsageError."""
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, Real) or not 0.0 <= float(value) <= 1.0:
            raise _invalid(settings, name, "a number from 0 to 1")


def _one_of(settings: Any, **choices: Sequence[str]) -> None:
    """Check that settings are among several words. Raises: UsageError."""
    for name, among in choices.items():
        if getattr(settings, name) not in among:
            raise _invalid(settings, name, ", ".join(among))


@dataclass(frozen=True, slots=True)
class Train:
    """Gradient steps before the scoring of a genome: Adam on all training cases as one batch.

    Attributes:
        steps: steps per genome; lr: learning rate; clip: bound on the gradient norm of a genome, 0 for none.
    """

    steps: int = 60
    lr: float = 0.05
    clip: float = 1.0

    def __post_init__(self) -> None:
        _at_least(self, ("steps",), 0, whole=True)
        _at_least(self, ("lr", "clip"), 0)


@dataclass(frozen=True, slots=True)
class NEAT:
    """Settings of NEAT: Stanley and Miikkulainen 2002, "Evolving Neural Networks through Augmenting Topologies".

    The structural mutations of a child are tried in the order of their settings, each with its probability. The first
    one that is drawn and possible is the only one, and then the weights do not change.

    Attributes:
        population: genomes of a generation.
        grow: probability of a neuron from all inputs with outgoing weights 0.
        split_link, add_link, toggle_link, remove_link, remove_delay_link, set_activation: probabilities of changes of
            one gene.
        weights: probability that all weights of a child change.
        perturb, power: share of weights that change by U(±power); the others are redrawn from N(0, power²).
        fine, fine_power: share of children whose changes are scaled by `fine_power`.
        new_link: standard deviation of the weight of an added link; 0 preserves the function.
        most: bound on absolute weights.
        delays: share of added links that carry the value of the previous step.
        tries: attempts to find a site for a mutation.
        crossover, species, growth: False disables it.
        mutate_only, interspecies, reclose: probabilities that a child has one parent, that its parents are of two
            species, and that a link that is closed in a parent stays closed.
        threshold: largest distance δ within a species; `target_species` moves it by 0.3 a generation.
        c1, c2, c3, c4: weights of excess, disjoint, weight and attribute differences in δ.
        survival: best share of a species that breeds; tournament: a parent is the best of so many of these.
        champions: species larger than this copy their best genome unchanged; 0 copies only the best of all.
        stagnation: generations without gain until a species stops breeding; silence: until only two species breed.
        start: "minimal" connects inputs and bias to the outputs; "random" also makes `burst` structural mutations of
            each founder, whatever `growth`.
        activation, output: activation of hidden nodes (or several to choose from) and of outputs.
        train: gradient steps before scoring; None for none.
        inherit: weights that a child inherits: "lamarck" after training, "baldwin" before training, "none" new ones.
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
                    "unknown activation", where=type(self).__name__, expected=", ".join(ACTIVATIONS), got=name
                )
        if not self.hidden:
            raise _invalid(self, "activation", "at least one activation")
        _shares(self, _SHARES)
        _at_least(self, ("population",), 2, whole=True)
        _at_least(self, ("tournament", *(["target_species"] if self.target_species is not None else [])), 1, whole=True)
        counts = ("tries", "champions", "stagnation", "silence", "burst", "max_nodes", "max_links")
        _at_least(self, counts, 0, whole=True)
        _at_least(self, ("power", "fine_power", "new_link", "most", "threshold", "c1", "c2", "c3", "c4"), 0)
        _one_of(self, start=("minimal", "random"), inherit=("lamarck", "baldwin", "none"))
        if not isinstance(self.train, Train | None):
            raise _invalid(self, "train", "Train(...) or None")

    @property
    def hidden(self) -> tuple[str, ...]:
        """The activations of hidden nodes."""
        return (self.activation,) if isinstance(self.activation, str) else tuple(self.activation)

    @property
    def unchanging(self) -> bool:
        """Whether children always equal a parent."""
        growing = ("grow", "split_link", "add_link")
        active = [name for name in STRUCTURAL if self.growth or name not in growing]
        return self.train is None and not (self.crossover or self.weights or any(getattr(self, n) for n in active))

    @classmethod
    def paper2002(cls, **changes: Any) -> NEAT:
        """The settings of the paper where the defaults differ: full steps, stagnation after 15 generations."""
        return replace(cls(fine=0.0, stagnation=15), **changes)

    def to_json(self) -> dict[str, Any]:
        """All settings by name."""
        return {"kind": type(self).__name__, **asdict(self), "activation": list(self.hidden)}

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
    """NEAT with few genomes, each grown without changing its function and then trained; the best of three breeds."""

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


@dataclass(frozen=True, slots=True)
class Pareto:
    """Survival by several objectives with NSGA-II.

    Attributes:
        objectives: some of "metric" (maximised), "loss", "params" and "flops" (minimised).
        archive: largest number of non-dominated candidates to store.
    """

    objectives: tuple[str, ...] = ("metric", "params")
    archive: int = 64

    def __post_init__(self) -> None:
        if set(self.objectives) - set(OBJECTIVES) or not self.objectives:
            raise _invalid(self, "objectives", f"some of {', '.join(OBJECTIVES)}")
        _at_least(self, ("archive",), 1, whole=True)


@dataclass(frozen=True, slots=True)
class Layers:
    """Settings of the evolution of layers.

    Attributes:
        population: members that survive; each generation has as many children.
        steps, batch, clip: training steps per candidate, batch size, and bound on the gradient norm of a step.
        lr, optimizer: of the first candidate; later they are genes.
        pareto: survival by several objectives; without it by the metric, and with equal metric by fewer parameters.
        crossover: share of children with two parents.
        rates: weights of mutations by name, which replace both weights of the table; 0 disables one. A child gets one
            mutation, drawn by weight among the possible ones, which include changes of `learning_rate`, `optimizer`
            and `loss`.
        explore: share of the generations (or of the candidates, whichever is further) in which mutations are drawn by
            their first weight; afterwards by the second.
        stagnation: generations without gain after which only structure changes, until the next gain.
        inherit: weights that a child inherits: "lamarck" after training, "baldwin" before training.
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
        _shares(self, ("crossover", "explore"))
        _at_least(self, ("population", "batch"), 1, whole=True)
        _at_least(self, ("steps", "stagnation", "max_params", "max_flops", "max_width"), 0, whole=True)
        _at_least(self, ("lr",), 1e-12)
        _at_least(self, ("clip",), 0)
        _one_of(self, optimizer=OPTIMIZERS, inherit=("lamarck", "baldwin"))
        if not isinstance(self.pareto, Pareto | None):
            raise _invalid(self, "pareto", "Pareto(...) or None")
        rates = self.rates.values() if isinstance(self.rates, Mapping) else [self.rates]
        if not all(isinstance(v, Real) and 0 <= float(v) < float("inf") for v in rates) or not isinstance(
            self.rates, Mapping
        ):
            raise _invalid(self, "rates", "a mapping from names of mutations to numbers >= 0")

    def to_json(self) -> dict[str, Any]:
        """All settings by name."""
        return {"kind": "Layers", **asdict(self)}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Layers:
        """Inverse of `to_json`."""
        values = {k: v for k, v in data.items() if k != "kind"}
        if (pareto := values["pareto"]) is not None:
            values["pareto"] = Pareto(tuple(pareto["objectives"]), pareto["archive"])
        return Layers(**values)
