"""The probabilities of all gates as one tensor that follows the logits, for penalties inside a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphwright.array import from_numpy
from graphwright.autograd import Tensor
from graphwright.ops import call
from graphwright.program.gates import LOGITS, TEMPERATURE
from graphwright.structure.relaxation import BY_TEMPERATURE, LN11, softmax

if TYPE_CHECKING:
    from graphwright.program import Program
    from graphwright.structure.elements import Element


def probabilities(p: Program, among: list[Element]) -> Tensor:
    """P per element, floating [n], differentiable by the logits; of those held open or closed 1 and 0, constant.

    The formulas are those of `relaxation.open_probability`; what depends on the element alone is a constant.
    """
    logits: Tensor = p.weights[LOGITS]
    kind = logits.dtype.numpy

    def constant(values: list[float]) -> Tensor:
        return Tensor(from_numpy(np.asarray(values, kind)))

    def places(values: list[int]) -> Tensor:
        return Tensor(from_numpy(np.asarray(values, np.int64)))

    z = call("index", logits, places([e.place for e in among]), axis=0)
    warm = call("index", p.weights[TEMPERATURE], places([int(e.gate.rows[0, 1]) for e in among]), axis=0)
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
    """Each choice's part replaced by a softmax over its options that are not closed."""
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
