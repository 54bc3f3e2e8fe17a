"""The methods of a search, by name. Each gets the same budget of training steps, retraining included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, TypeVar
from warnings import warn

import numpy as np

from graphwright.errors import UsageError
from graphwright.structure.additions import gains
from graphwright.structure.graph import DifferentiableGraph
from graphwright.structure.optimizer import JointOptimizer
from graphwright.structure.searching.candidates import Ops, Skips
from graphwright.structure.searching.trial import Found, Trials

if TYPE_CHECKING:
    from graphwright.autograd import Tensor
    from graphwright.program import Program
    from graphwright.structure.elements import Element
    from graphwright.structure.losses import Terms
    from graphwright.structure.searching.candidates import Places
    from graphwright.structure.searching.trial import Batch

Method = Callable[[Trials], Found]
M = TypeVar("M", bound=Method)
METHODS: dict[str, Method] = {}
_GATES, _GROW, _DRAWS, _EVOLVE, _SOFTMAX, _SOFTMAX_VALID = range(1, 7)  # purposes of random streams
_PRICE, _WITH_WEIGHTS = 0.05, 3.0
"""Of a candidate, as a share of the task's loss; one with weights, which fits more by chance, is so many times dearer.

Measured between blocks of different widths in 1200 steps: projections that were not planted end at 0.45 where those are
not dearer, at 0.16 where they are three times; planted ones at 0.33 and above. Of many each costs at most its share.
"""


def method(name: str) -> Callable[[M], M]:
    """Register a method: a function of `Trials` that returns `Found`."""

    def enter(function: M) -> M:
        METHODS[name] = function
        return function

    return enter


class Collapsed(UserWarning):
    """Most of what was chosen adds no parameters: the usual sign that a search took the easy way."""


@method("gates")
def gates(t: Trials) -> Found:
    """Independent gates on all candidates, trained with the weights under a price; then trained anew without gates.

    Half of the budget goes into the search, the first tenth of it on weights alone. A candidate is priced at a share of
    the task's loss at each step, whatever its size: one stays without which the loss would be higher by more than that;
    those with weights of their own are dearer.
    """
    p, steps = t.start.fork(), t.budget // 2
    places = t.candidates.gate(p)
    view = DifferentiableGraph(p, seed=t.seed)
    share = min(_PRICE, 1 / max(len(places), 1))
    shares = {
        place: share * (1 if t.candidates.free(t.start, name) else _WITH_WEIGHTS) for name, place in places.items()
    }
    price = _Shares(tuple(shares.get((e.gate.handle, e.index), 0.0) for e in view.elements()))
    opt = JointOptimizer(view, t.task, [price], params=t.lr, gates=0.02, warmup=max(1, steps // 10))
    t.drive(opt, steps, _GATES)
    probable = _elements(view, places)
    best: dict[object, float] = {}
    for e in probable.values():
        best[e.gate.handle] = max(best.get(e.gate.handle, 0.0), e.p)
    least = _between([e.p for e in probable.values() if e.over != "choice"])
    chosen = tuple(n for n, e in probable.items()
                   if (e.p >= least if e.over != "choice" else e.p == best[e.gate.handle]))  # fmt: skip
    free = [n for n in chosen if t.candidates.free(t.start, n)]
    possible = [n for n in probable if t.candidates.free(t.start, n)]
    if len(chosen) and len(possible) < len(probable) and len(free) > 0.8 * len(chosen):
        warn(f"{len(free)} of {len(chosen)} chosen candidates add no parameters", Collapsed, stacklevel=3)
    made = t.fit(t.structure(chosen), t.left)
    return Found(chosen, made, t.score(made))


@dataclass(frozen=True)
class _Shares:
    """Σ P, each at a share of the task's loss, which is a constant here: no unit of the loss has to be known."""

    shares: tuple[float, ...]
    name: str = "price"

    def __call__(self, terms: Terms) -> Tensor:
        """See the class."""
        assert terms.task is not None
        return (terms.open * terms.constant(self.shares)).sum() * terms.task.to(terms.open.dtype)


def _between(probabilities: list[float]) -> float:
    """The middle of the widest stretch of logits without a gate, among probabilities from a tenth to a half.

    A gate that carries a signal need not be above a half yet: weights behind it may have a part of its scale.
    """
    low, high = log(0.1 / 0.9), 0.0
    with np.errstate(divide="ignore"):
        z = np.log(probabilities) - np.log1p(-np.array(probabilities))
    ends = np.clip(np.sort([low, *z, high]), low, high)
    widest = int(np.argmax(np.diff(ends)))
    return float(1 / (1 + np.exp(-(ends[widest] + ends[widest + 1]) / 2)))


def _elements(view: DifferentiableGraph, places: Places) -> dict[str, Element]:
    """Candidate -> its element by now."""
    by_place = {(e.gate.handle, e.index): e for e in view.elements()}
    return {name: by_place[place] for name, place in places.items()}


@method("softmax")
def softmax(t: Trials) -> Found:
    """Candidates of one place share a softmax with "none", as in DARTS (Liu et al. 2019, first order).

    Weights are trained on one batch, logits on another one, which counts as two steps. A skip stays if it outweighs
    "none", of several ops the heaviest one; then all is trained anew.
    """
    c = t.candidates
    if not isinstance(c, Skips | Ops):
        raise UsageError("a softmax is between options", got=type(c).__name__, expected="skips(...) or ops(...)")
    p = t.start.fork()
    places = c.compete(p)
    view = DifferentiableGraph(p, seed=t.seed)
    opt = JointOptimizer(view, t.task, params=t.lr, gates=0.02, mode="bilevel", noise=False)
    t.drive(opt, t.budget // 4, _SOFTMAX, _SOFTMAX_VALID)
    least: dict[object, float] = {}
    for e in view.elements():
        there = [x.p for x in view.elements() if x.gate.handle == e.gate.handle]
        least[e.gate.handle] = there[-1] if isinstance(c, Skips) else sorted(there)[-2]
    chosen = tuple(n for n, e in _elements(view, places).items() if e.p > least[e.gate.handle])
    made = t.fit(t.structure(chosen), t.left)
    return Found(chosen, made, t.score(made))


@method("random")
def random(t: Trials) -> Found:
    """Structures drawn at random, each trained for a quarter of the budget; the best by validation."""
    names, rng, best = t.candidates.names(t.start), t.rng(_DRAWS), None
    steps = max(1, t.budget // 4)
    while t.left >= steps or best is None:
        chosen = drawn(t, names, rng)
        made = t.fit(t.structure(chosen), steps)
        found = Found(chosen, made, t.score(made))
        if best is None or found.loss < best.loss:
            best = found
    return best


def drawn(t: Trials, names: list[str], rng: np.random.Generator) -> tuple[str, ...]:
    """A structure at random: of places with options one each, of all else every one with a share drawn first."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition(": ")[0] if ": " in name else name, []).append(name)
    share = rng.random()
    return tuple(
        options[int(rng.integers(len(options)))] if len(options) > 1 else options[0]
        for options in groups.values()
        if len(options) > 1 or rng.random() < share
    )


@method("grow")
def grow(t: Trials, trial: int | None = None, most: int = 3, first: int = 3) -> Found:
    """Begin without candidates; rank absent edges by what they would gain, try the best and none, keep what is better.

    A quarter of the budget is for training the result anew. A high rank is a proposal only: an addition is accepted
    after a trial of the price of the trial without it.

    Args:
        trial: steps of one trial; by default so that `most` rounds fit. most: additions; first: tried in a round.
    """
    c = t.candidates
    if not isinstance(c, Skips):
        raise UsageError("growing adds edges", got=type(c).__name__, expected="candidates made by skips(...)")
    base = t.start.fork()
    c.open(base)
    retrain = t.budget // 4
    trial = trial or (t.budget - retrain) // (1 + most * (first + 1))
    chosen: tuple[str, ...] = ()
    here = t.fit(base, trial, _GROW)
    while len(chosen) < most and t.left >= retrain + (first + 1) * trial:
        rng = t.rng(_GROW + 10 + len(chosen))
        ranked = _ranked(t, here, c, chosen, t.train(rng))[:first]
        tries: list[tuple[float, tuple[str, ...], Program]] = []
        for extra in [(), *((name,) for name in ranked)]:
            made = here.fork()
            c.build(made, extra)
            made = t.fit(made, trial, _GROW + 20 + len(chosen))
            tries.append((t.score(made), extra, made))
        _, extra, better = min(tries, key=lambda row: row[0])
        if not extra:
            break
        chosen, here = (*chosen, *extra), better
    made = t.fit(t.structure(chosen), t.left)
    return Found(chosen, made, t.score(made))


def _ranked(t: Trials, p: Program, c: Skips, chosen: tuple[str, ...], batch: Batch) -> list[str]:
    """Candidates that are not there, those that would gain most first."""
    ends = {}
    for name in c.names(p):
        source, junction = c.ends(p, name)
        if name not in chosen and junction is not None:
            ends[f"{p.path(source)} -> {p.path(junction)}"] = name
    view = DifferentiableGraph(p, seed=t.seed)
    found = gains(view, t.task, batch)
    return [ends[edge] for edge, gain in found if edge in ends and gain > 0]


@method("evolve")
def evolve(t: Trials) -> Found:
    """Structures that change by one candidate at a time; children go on with their mother's weights.

    Half of the budget: a generation of four, each child trained for a share, the best four of both generations live on.
    """
    names, rng = t.candidates.names(t.start), t.rng(_EVOLVE)
    size, steps = 4, max(1, t.budget // 40)
    alive: list[Found] = []
    for _ in range(size):
        chosen = drawn(t, names, rng)
        made = t.fit(t.structure(chosen), steps)
        alive.append(Found(chosen, made, t.score(made)))
    while t.left >= t.budget // 2 + steps:
        fitter_parent = alive[int(rng.integers(len(alive), size=2).min())]
        chosen = toggled(names, fitter_parent.chosen, rng)
        made = t.structure(chosen)
        _inherit(made, fitter_parent.program)
        made = t.fit(made, min(steps, t.left))
        alive = sorted([*alive, Found(chosen, made, t.score(made))], key=lambda f: f.loss)[:size]
    best = min(alive, key=lambda f: f.loss)
    made = t.fit(t.structure(best.chosen), t.left)
    return Found(best.chosen, made, t.score(made))


def toggled(names: list[str], chosen: tuple[str, ...], rng: np.random.Generator) -> tuple[str, ...]:
    """One candidate more or less; of a place with options another one."""
    name = names[int(rng.integers(len(names)))]
    if ": " in name:
        place = name.partition(": ")[0]
        return tuple(n if n.partition(": ")[0] != place else name for n in chosen)
    kept = [n for n in chosen if n != name]
    return tuple(kept if len(kept) < len(chosen) else [*kept, name])


def _inherit(child: Program, fitter_parent: Program) -> None:
    """Weights of one shape under one key."""
    theirs = fitter_parent.variables()
    for key, variable in child.variables().items():
        if key in theirs and theirs[key].shape == variable.shape:
            variable.assign(theirs[key])
