"""Gates, elementwise: z is the logit (of a scale gate, the value), t a temperature, u uniform noise in (0, 1).

The code of a kind, state or mode is its index in `KINDS`, `STATES` or `MODES`. Sources: Maddison et al. 2017
(concrete); Louizos et al. 2018 (hard concrete); Bengio et al. 2013 (straight through).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphwright.array.formulas import absolute, log, select
from graphwright.array.formulas.activations import sigmoid, sigmoid_slope

COLUMNS = ("kind", "group", "state", "slot", "generation", "element", "cost")
STATES = ("soft", "open", "closed", "frozen", "free")
MODES = ("eval", "train", "soft", "hard", "open")
LOWEST, WIDTH = -0.1, 1.2
"""γ and ζ - γ: the interval [γ, ζ] that a hard concrete gate is scaled to before it is clipped to [0, 1]."""
LN11 = 2.3978952727983707
"""-ln(-γ/ζ), where ζ = 1.1 (Louizos et al. 2018, equation 12)."""
THIN = 1e-3
"""A scale gate whose absolute value is below this is closed."""


@dataclass(frozen=True, slots=True)
class GateKind:
    """What distinguishes a kind of gate; without any of these, its value is σ(z).

    Attributes:
        start: initial logit.
        linear: the value is z itself, not a probability.
        heated: the logit is divided by the temperature in every mode, not only in training.
        noisy: training draws noise.
        rounded: the value is 0 or 1; its slope is that of the probability.
        stretched: the value is scaled to [γ, ζ] and clipped, so that it can be exactly 0 or 1.
        one_of: the elements of a gate are options, and the value is their softmax.
        group, temperature: default name of the temperature that the gates share, and its initial value.
    """

    start: float = 0.0
    linear: bool = False
    heated: bool = False
    noisy: bool = False
    rounded: bool = False
    stretched: bool = False
    one_of: bool = False
    group: str = "default"
    temperature: float = 1.0

    @property
    def folded(self) -> bool:
        """True if hardening folds the value of an open gate into weights; else an open gate becomes 1."""
        return not (self.noisy or self.rounded)


GATE_KINDS = {
    "scale": GateKind(linear=True),
    "sigmoid": GateKind(1.0, heated=True),
    "ste": GateKind(float(log(9.0)), heated=True, rounded=True),
    "bernoulli": GateKind(float(log(9.0)), heated=True, noisy=True, rounded=True),
    "concrete": GateKind(noisy=True),
    "concrete_st": GateKind(noisy=True, rounded=True),
    "hard_concrete": GateKind(2.5, noisy=True, stretched=True, group="hard_concrete", temperature=2 / 3),
    "choice": GateKind(noisy=True, one_of=True),
}
"""Maps name to kind. A hard concrete gate starts at exactly 1 in evaluation."""
KINDS = tuple(GATE_KINDS)


def by_code(fact: str) -> tuple[bool, ...]:
    """Return a fact about each kind, indexed by the code of the kind."""
    return tuple(getattr(kind, fact) for kind in GATE_KINDS.values())


def open_probability(z: Any, t: Any, heated: Any, stretched: Any) -> Any:
    """P(gate > 0): σ(z/T) if `heated` is 1, σ(z + T·ln 11) if `stretched` is 1, else σ(z)."""
    return sigmoid(z / (t * heated + (1.0 - heated)) + t * (stretched * LN11))


def soft(z: Any, t: Any) -> Any:
    """(p, dp/dz), where p = σ(z/t), for gates of kind `sigmoid`, `ste` and `bernoulli`."""
    p = sigmoid(z / t)
    return p, sigmoid_slope(z, p) / t


def logistic(z: Any, u: Any) -> Any:
    """z + ln u - ln(1 - u): the logit with logistic noise."""
    return z + log(u) - log(1.0 - u)


def gumbel(u: Any) -> Any:
    """-ln(-ln u): Gumbel noise."""
    return -log(-log(u))


def hard_concrete(s: Any, slope: Any) -> Any:
    """(h, dh/dz), where h = γ + (ζ - γ)·s clipped to [0, 1], s is the value of a concrete gate and `slope` is ds/dz."""
    wide = WIDTH * s + LOWEST
    inside = (wide > 0.0) & (wide < 1.0)
    return select(inside, wide, select(wide > 0.5, 1.0, 0.0)), select(inside, WIDTH * slope, 0.0)


def thinned(z: Any) -> Any:
    """z where |z| >= 1e-3, else 0: the value of a scale gate in mode `hard`."""
    return select(absolute(z) >= THIN, z, 0.0)
