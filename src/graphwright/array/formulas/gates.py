"""Gates, elementwise: z is the logit (of a scale gate, the value), t a temperature, u uniform noise in (0, 1).

The code of a kind, state or mode is its index in `KINDS`, `STATES` or `MODES`. Sources: Maddison et al. 2017
(concrete); Louizos et al. 2018 (hard concrete); Bengio et al. 2013 (straight through).
"""

from __future__ import annotations

from typing import Any

from graphwright.array.formulas import absolute, log, select
from graphwright.array.formulas.activations import sigmoid, sigmoid_slope

COLUMNS = ("kind", "group", "state", "slot", "generation", "element", "cost")
KINDS = ("scale", "sigmoid", "ste", "bernoulli", "concrete", "concrete_st", "hard_concrete", "choice")
STATES = ("soft", "open", "closed", "frozen", "free")
MODES = ("eval", "train", "soft", "hard", "open")
LOWEST, WIDTH = -0.1, 1.2
"""γ and ζ - γ: the interval [γ, ζ] that a hard concrete gate is scaled to before it is clipped to [0, 1]."""
LN11 = 2.3978952727983707
"""-ln(-γ/ζ), where ζ = 1.1 (Louizos et al. 2018, equation 12)."""
THIN = 1e-3
"""A scale gate whose absolute value is below this is closed."""


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
