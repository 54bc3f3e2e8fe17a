"""Kinds of gates in numbers: open probability, decision probability, initial logits, and the probabilities as a tensor.

`graphwright.ops.gate` computes values and slopes; losses and policies use these functions of the same logits.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING
from warnings import warn

import numpy as np

from graphwright.array import from_numpy
from graphwright.array.formulas.activations import sigmoid
from graphwright.array.formulas.gates import KINDS, LN11
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from graphwright.ops import call
from graphwright.program import DeadGate
from graphwright.program.gates import LOGITS, TEMPERATURE
from graphwright.structure.errors import ClippedStart

if TYPE_CHECKING:
    from graphwright.autograd import Tensor
    from graphwright.program import Program
    from graphwright.structure.elements import Element

BY_TEMPERATURE = frozenset({"sigmoid", "ste", "bernoulli"})
"""Kinds whose probability is σ(z/T) rather than σ(z)."""
LEAST, MOST = 0.01, 0.99


def decision(kind: str, z: np.ndarray) -> np.ndarray:
    """Decision probability, by which gates are cut: p at T = 1; softmax for a choice; min(|z|, 1) for a scale.

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
    """Probability that a gate is not 0, for penalties; |z| for a scale."""
    z = np.asarray(z, np.float64)
    if kind == "scale":
        return np.abs(z)
    if kind in BY_TEMPERATURE:
        return sigmoid(z / temperature)
    return sigmoid(z + temperature * LN11) if kind == "hard_concrete" else decision(kind, z)


def init_for(p0: float, kind: str, temperature: float = 1.0) -> float:
    """The logit at which a gate is open with probability p0.

    p0 outside [0.01, 0.99] is clipped with a warning. Raises: DeadGate for 0 and 1, where the gradient is 0;
    UsageError for an unknown kind, p0 outside (0, 1), or a temperature that is not positive.
    """
    if kind not in KINDS or kind == "choice":
        raise UsageError("unknown kind of gate", expected=", ".join(k for k in KINDS if k != "choice"), got=kind)
    if p0 in (0, 1):
        raise DeadGate("a gate that starts at 0 or 1 has no gradient", got=p0, fix="p0 from 0.01 to 0.99")
    if not 0 < p0 < 1:
        raise UsageError("p0 is out of range", expected="0 < p0 < 1", got=p0)
    if not temperature > 0:
        raise UsageError("the temperature is out of range", expected="a number > 0", got=temperature)
    if not LEAST <= p0 <= MOST:
        warn(f"p0 = {p0} was clipped to [{LEAST}, {MOST}]: closer to 0 or 1 a gate hardly learns", ClippedStart, 2)
        p0 = min(max(p0, LEAST), MOST)
    if kind == "scale":
        return p0
    z = log(p0 / (1 - p0))
    if kind == "hard_concrete":
        return z - temperature * LN11
    return temperature * z if kind in BY_TEMPERATURE else z


def softmax(z: Tensor) -> Tensor:
    """Softmax over a vector."""
    e = (z - z.detach().amax(0, keepdims=True)).exp()
    return e / e.sum()


def probabilities(p: Program, among: list[Element]) -> Tensor:
    """P per element [n], differentiable with respect to the logits; constant 1 or 0 for elements held open or closed.

    The formulas are those of `open_probability`.
    """
    logits: Tensor = p.weights[LOGITS]
    kind = logits.dtype.numpy

    def constant(values: list[float]) -> Tensor:
        return Tensor(from_numpy(np.asarray(values, kind)))

    def indices(values: list[int]) -> Tensor:
        return Tensor(from_numpy(np.asarray(values, np.int64)))

    z = call("index", logits, indices([e.offset for e in among]), axis=0)
    warm = call("index", p.weights[TEMPERATURE], indices([int(e.gate.rows[0, 1]) for e in among]), axis=0)
    heated = constant([float(e.gate.kind in BY_TEMPERATURE) for e in among])
    shifted = constant([LN11 if e.gate.kind == "hard_concrete" else 0.0 for e in among])
    found = (z / (heated * warm + (1 - heated)) + shifted * warm).sigmoid()
    if any(e.gate.kind == "scale" for e in among):
        scale = _mask([e.gate.kind == "scale" for e in among])
        found = call("where", scale, call("abs", z), found)
    starts = [i for i, e in enumerate(among) if e.gate.kind == "choice" and e.index == 0]
    if starts:
        found = _with_choices(found, z, among, starts)
    held = [e.state in ("open", "closed") for e in among]
    if any(held):
        fixed = constant([float(e.state == "open") for e in among])
        found = call("where", _mask(held), fixed, found)
    if any(e.state == "frozen" for e in among):
        found = call("where", _mask([e.state == "frozen" for e in among]), found.detach(), found)
    return found


def _mask(values: list[bool]) -> Tensor:
    return Tensor(from_numpy(np.asarray(values)))


def _with_choices(found: Tensor, z: Tensor, among: list[Element], starts: list[int]) -> Tensor:
    """Replace each choice's part by a softmax over its options that are not closed."""
    parts, at = [], 0
    for start in starts:
        options = among[start : start + among[start].gate.length]
        there = [i for i, e in enumerate(options) if e.state != "closed"]
        soft = softmax(z[np.asarray([start + i for i in there])])
        parts += [found[at:start]] if start > at else []
        for i in range(len(options)):
            parts.append(soft[there.index(i) : there.index(i) + 1] if i in there else found[start : start + 1] * 0.0)
        at = start + len(options)
    parts += [found[at:]] if at < len(among) else []
    return call("concat", *parts, axis=0)
