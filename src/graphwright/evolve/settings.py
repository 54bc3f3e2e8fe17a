"""Settings of evolution: `NEAT` for neurons, `Hybrid` for neurons trained by gradients, and `Layers`.

All settings are frozen dataclasses. They check their values, and saved runs store them as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, cast

from graphwright.array.population.names import ACTIVATIONS
from graphwright.errors import UsageError
from graphwright.settings import AtLeastOne, Count, NotNegative, Range, Settings, Share

OPTIMIZERS = ("adam", "sgd")
OBJECTIVES = ("metric", "loss", "params", "flops")
STRUCTURAL = ("grow", "split_link", "add_link", "toggle_link", "remove_link", "remove_delay_link", "set_activation")
"""Structural mutations of NEAT, in the order in which they are tried."""


@dataclass(frozen=True, slots=True)
class Train(Settings):
    """Training of a genome before it is scored: steps of Adam on all training cases as one batch.

    Attributes:
        steps: steps per genome; lr: learning rate; clip: maximum gradient norm of a genome, 0 for no maximum.
    """

    steps: Count = 60
    lr: NotNegative = 0.05
    clip: NotNegative = 1.0


class SavedSettings(Settings):
    """Base class of the settings of a run, which a saved run stores as JSON."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict of all settings by name."""
        return {"kind": type(self).__name__, **asdict(cast(Any, self))}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Any:
        """Create settings from the result of `to_json`."""
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

    The structural mutations of a child are tried in the order of `STRUCTURAL`, each with its probability, until one is
    drawn and possible. A child gets at most one structural mutation, and if it gets one, its weights do not change.
    A link is a connection of the paper: open if enabled, closed if disabled.

    Attributes:
        population: number of genomes in a generation.
        grow: probability of adding a neuron that reads all inputs and has outgoing weights 0.
        split_link, add_link, toggle_link, remove_link, remove_delay_link, set_activation: probabilities of mutations of
            one gene.
        weights: probability that all weights of a child change.
        perturb, power: fraction of weights that change by U(±power); the others are redrawn from N(0, power²).
        fine, fine_power: fraction of children whose weight changes are scaled by `fine_power`.
        new_link: standard deviation of the weight of an added link; 0 preserves the function.
        most: maximum absolute weight.
        delays: fraction of added links that carry the value of the previous step.
        tries: attempts to find a site for a mutation.
        crossover, species, growth: False disables crossover, species, or mutations that add neurons and links.
        mutate_only, interspecies, reclose: probabilities that a child has one parent; that its parents belong to two
            species; and that a link that is closed in a parent is closed in the child.
        threshold: maximum distance δ within a species; it changes by 0.3 per generation towards `target_species`.
        c1, c2, c3, c4: coefficients of excess genes, disjoint genes, weight and attribute differences in δ.
        survival: fraction of a species, the best ones, that can be parents; tournament: number of them that are drawn
            for each parent, of which the best becomes the parent.
        champions: species larger than this copy their best genome unchanged; 0 copies only the best of all.
        stagnation: generations without improvement after which a species stops breeding; silence: generations without
            any improvement after which only two species breed.
        start: "minimal" links inputs and bias to the outputs; "random" also makes `burst` structural mutations in each
            founder, even if `growth` is False.
        activation, output: activation of hidden nodes (one, or several to choose from), and of outputs.
        train: gradient steps before scoring, or None.
        inherit: weights that a child inherits: "lamarck" those after training, "baldwin" those before training, "none"
            new random ones.
        max_nodes, max_links: maximum size of a genome.
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
        """The activations that hidden nodes may have."""
        return (self.activation,) if isinstance(self.activation, str) else tuple(self.activation)

    @property
    def unchanging(self) -> bool:
        """True if mutation, crossover and training are all disabled, so that children equal their parents."""
        active = [name for name in STRUCTURAL if self.growth or name not in ("grow", "split_link", "add_link")]
        return self.train is None and not (self.crossover or self.weights or any(getattr(self, n) for n in active))

    @classmethod
    def paper2002(cls) -> NEAT:
        """Return the settings of the 2002 paper, which differ from the defaults in `fine=0` and `stagnation=15`."""
        return cls(fine=0.0, stagnation=15)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-serialisable dict of all settings by name."""
        return {"kind": type(self).__name__, **asdict(self), "activation": list(self.hidden)}


@dataclass(frozen=True, slots=True)
class Hybrid(NEAT):
    """NEAT with few genomes that are trained by gradients, function-preserving growth, and tournaments of three."""

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
class Islands(Settings):
    """Populations that evolve apart, each of the size `NEAT.population`, with migration in a ring.

    Attributes:
        count: number of islands.
        every: generations between two migrations.
        migrants: number of genomes, the fittest of an island, whose copies replace the least fit of the next island.
    """

    count: Annotated[int, Range(2, whole=True)] = 2
    every: AtLeastOne = 10
    migrants: Count = 1


@dataclass(frozen=True, slots=True)
class Pareto(Settings):
    """Selection of survivors by several objectives with NSGA-II.

    Attributes:
        objectives: one or more of "metric" (maximised), "loss", "params" and "flops" (minimised).
        archive: maximum number of non-dominated candidates to store.
    """

    objectives: tuple[str, ...] = ("metric", "params")
    archive: AtLeastOne = 64

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if set(self.objectives) - set(OBJECTIVES) or not self.objectives:
            raise self.out_of_range("objectives", f"one or more of {', '.join(OBJECTIVES)}")


@dataclass(frozen=True, slots=True)
class Layers(SavedSettings):
    """Settings of the evolution of layers.

    Attributes:
        population: number of survivors, and of children per generation.
        steps, batch, clip: training steps per candidate, batch size, and maximum gradient norm of a step.
        lr, optimizer: learning rate and optimizer of the first candidate; mutations change them later.
        pareto: survivors are selected by these objectives; None for the metric, then by fewer parameters.
        crossover: fraction of children with two parents.
        rates: dict from mutations to weights that replace both weights in `MUTATIONS`; 0 disables a mutation. Each
            child gets one possible mutation; `learning_rate`, `optimizer` and `loss` are mutations, too.
        explore: fraction of `max_generations` or `max_evaluations`, whichever is reached first, in which mutations are
            drawn by their weight `explore`; later they are drawn by their weight `refine`.
        stagnation: generations without improvement after which only structural mutations are made, until the next
            improvement.
        inherit: weights that a child inherits: "lamarck" those after training, "baldwin" those before training.
        max_params, max_flops, max_width: limits of a candidate; flops are for one case.
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
