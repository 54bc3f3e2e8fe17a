"""Kinds of gates in numbers: the probability that one is open, the one it is decided by, and where to begin.

`graphwright.ops.gate` computes values and slopes; here is what losses and policies ask of the same logits.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING
from warnings import warn

import numpy as np

from graphwright.array.formulas.activations import sigmoid
from graphwright.array.formulas.gates import KINDS, LN11
from graphwright.errors import UsageError
from graphwright.program import DeadGate
from graphwright.structure.errors import ClippedStart

if TYPE_CHECKING:
    from graphwright.autograd import Tensor

BY_TEMPERATURE = frozenset({"sigmoid", "ste", "bernoulli"})
"""Kinds whose probability is σ(z/T); that of the others is σ(z)."""
LEAST, MOST = 0.01, 0.99


def decision(kind: str, z: np.ndarray) -> np.ndarray:
    """By which gates are cut: p at T = 1; of a choice its softmax; of a scale min(|z|, 1).

    Args:
        z: the logits of one gate, float [n].
    """
    z = np.asarray(z, np.float64)
    if kind == "scale":
        return np.minimum(np.abs(z), 1.0)
    if kind == "choice":
        e = np.exp(z - z.max())
        return e / e.sum()
    return sigmoid(z)


def open_probability(kind: str, z: np.ndarray, temperature: float | np.ndarray) -> np.ndarray:
    """That a gate is not 0, as penalties count it; of a scale |z|."""
    z = np.asarray(z, np.float64)
    if kind == "scale":
        return np.abs(z)
    if kind in BY_TEMPERATURE:
        return sigmoid(z / temperature)
    return sigmoid(z + temperature * LN11) if kind == "hard_concrete" else decision(kind, z)


def init_for(p0: float, kind: str, temperature: float = 1.0) -> float:
    """The logit at which a gate is open with probability p0.

    p0 outside [0.01, 0.99] is moved there with a warning. Raises: DeadGate for 0 and 1, whose gradient is 0;
    UsageError for another kind, a number outside (0, 1), or a temperature that is not positive.
    """
    if kind not in KINDS or kind == "choice":
        raise UsageError(f"no start for kind {kind!r}: expected one of {', '.join(k for k in KINDS if k != 'choice')}")
    if p0 in (0, 1):
        raise DeadGate("a gate that begins at 0 or 1 has no gradient", got=p0, fix="p0 from 0.01 to 0.99")
    if not 0 < p0 < 1:
        raise UsageError(f"p0 is {p0}: expected a number in (0, 1)")
    if not temperature > 0:
        raise UsageError(f"the temperature is {temperature}: expected a number above 0")
    if not LEAST <= p0 <= MOST:
        warn(f"p0 = {p0} was moved into [{LEAST}, {MOST}]: nearer to 0 or 1 a gate hardly learns", ClippedStart, 2)
        p0 = min(max(p0, LEAST), MOST)
    if kind == "scale":
        return p0
    z = log(p0 / (1 - p0))
    if kind == "hard_concrete":
        return z - temperature * LN11
    return temperature * z if kind in BY_TEMPERATURE else z


def softmax(z: Tensor) -> Tensor:
    """Over a vector."""
    e = (z - z.detach().amax(0, keepdims=True)).exp()
    return e / e.sum()
