"""Settings of evolution: NEAT on neurons, the hybrid that trains candidates by gradients, and layers.

All settings are frozen dataclasses. They check their values, and saved runs store them as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, cast

from graphwright.array.population.names import ACTIVATIONS
from graphwright.errors import UsageError
from graphwright.settings import AtLeastOne, Count, NotNegative, Range, Settings, Share

OPTIMIZERS = ("adam", "sgd")
OBJECTIVES = ("metric", "loss", "params", "flops")
STRUCTURAL = (
    "grow", "split_link", "add_link", "toggle_link", "remove_link", "remove_delay_link", "set_activation",
)  # fmt: skip
"""Structural mutations of NEAT, in the order in which they are tried."""


@dataclass(frozen=True, slots=True)
class Train(Settings):
    """Gradient steps before the scoring of a genome: Adam on all training cases as one batch.

    Attributes:
        steps: steps per genome; lr: learning rate; clip: bound on the gradient norm of a genome, 0 for none.
    """

    steps: Count = 60
    lr: NotNegative = 0.05
    clip: NotNegative = 1.0


class SavedSettings(Settings):
    """Settings of a run, which a saved run stores as JSON."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """All settings by name."""
        return {"kind": type(self).__name__, **asdict(cast(Any, self))}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Any:
        """Inverse of `to_json`."""
        values = dict(data)
        if "activation" in values and len(names := tuple(values["activation"])):
            values["activation"] = names[0] if len(names) == 1 else names
        if values.get("train") is not None:
            values["train"] = Train(**values["train"])
        if (pareto := values.get("pareto")) is not None:
            values["pareto"] = Pareto(tuple(pareto["objectives"]), pareto["archive"])
        return {"NEAT": NEAT, "Hybrid": Hybrid, "Layers": Layers}[values.pop("kind")](**values)


@dataclass(frozen=True, slots=True)
class NEAT(SavedSettings):
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

    population: Annotated[int, Range(2, whole=True)] = 150
    grow: Share = 0.0
    split_link: Share = 0.03
    add_link: Share = 0.05
    toggle_link: Share = 0.0
    remove_link: Share = 0.0
    remove_delay_link: Share = 0.0
    set_activation: Share = 0.0
    weights: Share = 0.8
    perturb: Share = 0.9
    power: NotNegative = 2.5
    new_link: NotNegative = 2.5
    fine: Share = 0.15
    fine_power: NotNegative = 0.1
    most: NotNegative = 8.0
    delays: Share = 0.0
    tries: Count = 20
    crossover: bool = True
    species: bool = True
    growth: bool = True
    mutate_only: Share = 0.25
    interspecies: Share = 0.001
    reclose: Share = 0.75
    threshold: NotNegative = 3.0
    target_species: AtLeastOne | None = None
    c1: NotNegative = 1.0
    c2: NotNegative = 1.0
    c3: NotNegative = 0.4
    c4: NotNegative = 0.0
    survival: Share = 0.2
    tournament: AtLeastOne = 1
    champions: Count = 5
    stagnation: Count = 30
    silence: Count = 20
    start: Literal["minimal", "random"] = "minimal"
    burst: Count = 0
    activation: str | tuple[str, ...] = "sigmoid49"
    output: str = "sigmoid49"
    train: Train | None = None
    inherit: Literal["lamarck", "baldwin", "none"] = "lamarck"
    max_nodes: Count = 1 << 20
    max_links: Count = 1 << 20

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if unknown := [name for name in (*self.hidden, self.output) if name not in ACTIVATIONS]:
            raise UsageError(
                "unknown activation", where=type(self).__name__, expected=", ".join(ACTIVATIONS), got=unknown[0]
            )
        if not self.hidden:
            raise self.out_of_range("activation", "at least one activation")

    @property
    def hidden(self) -> tuple[str, ...]:
        """The activations of hidden nodes."""
        return (self.activation,) if isinstance(self.activation, str) else tuple(self.activation)

    @property
    def unchanging(self) -> bool:
        """Whether children always equal a parent."""
        active = [name for name in STRUCTURAL if self.growth or name not in ("grow", "split_link", "add_link")]
        return self.train is None and not (self.crossover or self.weights or any(getattr(self, n) for n in active))

    @classmethod
    def paper2002(cls, **changes: Any) -> NEAT:
        """The settings of the paper where the defaults differ: full steps, stagnation after 15 generations."""
        return replace(cls(fine=0.0, stagnation=15), **changes)

    def to_json(self) -> dict[str, Any]:
        """All settings by name."""
        return {"kind": type(self).__name__, **asdict(self), "activation": list(self.hidden)}


@dataclass(frozen=True, slots=True)
class Hybrid(NEAT):
    """NEAT with few genomes, each grown without changing its function and then trained; the best of three breeds."""

    population: Annotated[int, Range(2, whole=True)] = 16
    grow: Share = 0.4
    split_link: Share = 0.3
    add_link: Share = 0.7
    weights: Share = 1.0
    perturb: Share = 1.0
    power: NotNegative = 0.1
    fine: Share = 0.0
    new_link: NotNegative = 0.0
    most: NotNegative = 1e6
    crossover: bool = False
    species: bool = False
    survival: Share = 1.0
    tournament: AtLeastOne = 3
    champions: Count = 0
    activation: str | tuple[str, ...] = "tanh"
    output: str = "identity"
    train: Train | None = field(default_factory=Train)


@dataclass(frozen=True, slots=True)
class Pareto(Settings):
    """Survival by several objectives with NSGA-II.

    Attributes:
        objectives: some of "metric" (maximised), "loss", "params" and "flops" (minimised).
        archive: largest number of non-dominated candidates to store.
    """

    objectives: tuple[str, ...] = ("metric", "params")
    archive: AtLeastOne = 64

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if set(self.objectives) - set(OBJECTIVES) or not self.objectives:
            raise self.out_of_range("objectives", f"some of {', '.join(OBJECTIVES)}")


@dataclass(frozen=True, slots=True)
class Layers(SavedSettings):
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

    population: AtLeastOne = 6
    steps: Count = 200
    batch: AtLeastOne = 64
    clip: NotNegative = 1.0
    lr: Annotated[float, Range(1e-12)] = 1e-2
    optimizer: Literal["adam", "sgd"] = "adam"
    pareto: Pareto | None = None
    crossover: Share = 0.2
    rates: Mapping[str, float] = field(default_factory=dict)
    explore: Share = 0.4
    stagnation: Count = 20
    inherit: Literal["lamarck", "baldwin"] = "lamarck"
    max_params: Count = 1_000_000
    max_flops: Count = 1 << 40
    max_width: Count = 4096

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if not isinstance(self.rates, Mapping) or not all(rate in Range(0) for rate in self.rates.values()):
            raise self.out_of_range("rates", "a mapping from names of mutations to numbers >= 0")
