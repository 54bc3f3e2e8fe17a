"""One step of a pattern that moves: its lightest edges are cut, and the absent edges that would help most are added."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from graphwright.arguments import checked
from graphwright.attention import gates as trained
from graphwright.attention.attend import Setup, Where, attended
from graphwright.attention.mass import collect_mass
from graphwright.attention.propose import ranked
from graphwright.attention.prune import normalised, prunable
from graphwright.autograd import as_tensor, no_grad
from graphwright.graph import EdgeArray
from graphwright.patterns import Pattern
from graphwright.report import Report
from graphwright.settings import Count, Number, Positive

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, repr=False)
class PatternStep(Report):
    """What one `step` changed.

    Attributes:
        number: of the step, from 1.
        cut, added: int32 [n, 3]: plane, query block and key block of the edges.
        weights: normalised weight of each edge that was cut.
        gradients: gradient of the gate of each edge that was added, at gate 0.
        edges: number of edges after the step.
    """

    number: int
    cut: npt.NDArray[np.int32]
    added: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float64]
    gradients: npt.NDArray[np.float64]
    edges: int
    HIDDEN: ClassVar = ("cut", "added", "weights", "gradients")

    def _text(self) -> str:
        return f"step {self.number}: {len(self.cut)} edges cut, {len(self.added)} added, {self.edges} in all"


@checked
def step(
    pattern: Pattern, q: Any, k: Any, v: Any, grad_out: Any, prune: Count = 1, grow: Count | None = None, *,
    candidates: Any = "all", protect: Count = 2, cooldown: Count = 5, keep_min: Count = 1, keep_own: bool = False,
    scale: Number | None = None, softcap: Positive | None = None, gates: Any = None, where: Where = "exp",
) -> PatternStep:  # fmt: skip
    """Cut the lightest edges and add the absent ones with the most negative gradients, in one edit by `gate`.

    The masses of this run are first averaged into `score`. If a program has gates on the edges, new edges get a gate
    that is as open as those of its kind are at first; its moments in a `JointOptimizer` begin at zero.

    Args:
        q, k, v, grad_out, candidates: as in `propose`.
        prune, grow: numbers of edges to cut and to add; `grow` is by default `prune`, and then the number of edges does
            not change: if too few may be cut or added, fewer are.
        protect: number of steps during which an added edge is not cut.
        cooldown: number of steps during which an edge that was cut is not added again.
        keep_min, keep_own: as in `prune`.
        gates: values of the gates; by default the present ones of the program that owns the pattern.
        others: as in `attend`.
    Raises: the errors of `attend` and `propose`; then the pattern is unchanged.
    """
    q, k, v, slope = (as_tensor(x) for x in (q, k, v, grad_out))
    owned = trained.gate_of(pattern)
    if gates is None and owned is not None:
        gates, where = trained.values(owned[0], owned[2]), owned[0].attrs(owned[2].handle)["where"]
    held = None if gates is None else as_tensor(gates)
    setup = Setup.of(q, k, v, pattern, scale, softcap, held, where)
    with no_grad():
        out, lse = attended(setup, q, k, v, held)
    collect_mass(setup, q, k, lse, held)
    number = pattern.steps + 1
    cooling = [pair for pair, last in pattern.cooling.items() if number - last <= cooldown]
    banned = np.array(cooling, np.int32).reshape(-1, 3)
    best = ranked(
        setup, (q, k, v, out, lse, slope.to(q.dtype)), held, candidates, prune if grow is None else grow, banned
    )
    with _edit(pattern, f"step {number}"):
        edges, pairs = pattern.edges(), pattern.pairs()
        weights, row = normalised(pattern, pairs)
        birth = np.asarray(pattern.edges["birth"])
        free = prunable(pattern, pairs, weights, row, keep_min=keep_min, keep_own=keep_own)
        free &= (birth == 0) | (number - birth > protect)
        chosen = np.flatnonzero(free)
        chosen = chosen[np.argsort(weights[chosen], kind="stable")]
        count = min(prune, len(chosen), *([len(best)] if grow is None else []))
        light, added = chosen[:count], best.pairs[: count if grow is None else grow]
        pattern.steps = number
        _move(pattern, EdgeArray(np.asarray(edges)[light]), added)
        pattern.cooling = {pair: last for pair, last in pattern.cooling.items() if number - last < cooldown}
        pattern.cooling |= {(p, i, j): number for p, i, j in pairs[light].tolist()}
    return PatternStep(number, pairs[light], added, weights[light], best.gradients[: len(added)], len(pattern))


def _move(pattern: Pattern, gone: EdgeArray, added: npt.NDArray[np.int32]) -> None:
    pattern.cut(gone)
    plane, query, key = added.T
    made = pattern.connect_many(query, key, plane)
    if (owned := trained.gate_of(pattern)) is not None:
        trained.follow(*owned, pattern, made)


@contextmanager
def _edit(pattern: Pattern, why: str) -> Generator[None]:
    """Open an edit of the pattern, or of its program if there are gates that follow the edges."""
    owned = trained.gate_of(pattern)
    if owned is None:
        with pattern.edit(why, "gate"):
            yield
        return
    with owned[0].edit(f"{why} of {owned[1]}", author="gate"), pattern.edit(why, "gate"):
        yield
