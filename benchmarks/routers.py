"""What losses that train routers are worth: the same toy and seeds with none and with each of them.

The data are 8 Gaussian clusters (centres of norm 4, sd 0.5) in 32 dimensions; the label is the argmax of the cluster's
own 6 x 32 map, N(0, 4/32), of the offset from the centre. logits = head(x + DynMoE(x)) with 8 experts of width 16
(gelu), k0 = 2; expert 0 is inert at first: its weights are 0. Adam 3e-3, batches of 128, 500 steps; figures are means
over the last 100.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import graphwright as gw
from benchmarks.harness import Figure
from graphwright import experts as ex
from graphwright import nn
from graphwright.autograd import Tensor, no_grad
from graphwright.nn import functional
from graphwright.ops import call
from graphwright.optim import Adam, StepTerm, StepView
from graphwright.program.op_graph import Ref

SEEDS, STEPS, LAST, BATCH = 12, 500, 100, 128
CLUSTERS, DIM, CLASSES, EXPERTS, HIDDEN, K0 = 8, 32, 6, 8, 16, 2.0

PARTS = ("losses", "null_share")

Terms = Callable[[Adam], Sequence[StepTerm]]


class Toy(nn.Module):
    """head(x + DynMoE(x))."""

    def __init__(self, seed: int, null: bool = False) -> None:
        self.moe = ex.DynMoE(DIM, HIDDEN, EXPERTS, K0, null=null, kind="mlp", act="gelu", name="moe.", seed=seed)
        self.head = nn.Linear(DIM, CLASSES, name="head.", seed=seed)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.moe(x))


def batches(seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(CLUSTERS, DIM))
    centres *= 4 / np.linalg.norm(centres, axis=1, keepdims=True)
    maps = rng.normal(size=(CLUSTERS, CLASSES, DIM)) * np.sqrt(4 / DIM)
    while True:
        c, offset = rng.integers(0, CLUSTERS, BATCH), rng.normal(size=(BATCH, DIM)) * 0.5
        yield (centres[c] + offset).astype("f4"), np.einsum("nij,nj->ni", maps[c], offset).argmax(1)


class Watch(StepTerm):
    """Reports the logits, the choice and the unrouted tokens of a step."""

    def nodes(self, program: gw.Program) -> list[Ref]:
        return [program.output("out"), "moe.router.mask", "moe.router.unrouted"]

    def __call__(self, view: StepView) -> None:
        for name, ref in zip(("logits", "mask", "unrouted"), self.nodes(view.program), strict=True):
            view.report(name, view.value(ref))


@dataclass
class Run:
    """Means over the last steps: accuracy, share of expert 0 in all choices, unrouted tokens, experts per token."""

    accuracy: float
    inert: float
    unrouted: float
    k: float


def loss(out: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(out, target)


def trained(seed: int, terms: Terms, *, null: bool = False, inert: bool = True, steps: int = STEPS) -> Run:
    """Train the toy in a compiled step."""
    data, m = batches(seed), Toy(seed, null)
    m.moe.router.eval()
    with no_grad():
        ex.calibrate(m, gw.tensor(np.concatenate([next(data)[0] for _ in range(16)])), K0)
    for p in m.moe.experts[0].operands() if inert else ():
        p.assign(call("full_like", p, value=0.0))
    x, target = next(data)
    program, opt = gw.trace(m, gw.tensor(x)), Adam(m.parameters(), lr=3e-3)
    step = gw.compile_step(program, loss, opt, {"x": x, "target": target}, also=[*terms(opt), Watch()])
    rows = []
    for number in range(steps):
        x, target = next(data)
        step(x=x, target=target)
        if number >= steps - LAST:
            logits, mask, unrouted = (step.reports[name].numpy() for name in ("logits", "mask", "unrouted"))
            right = (logits.argmax(1) == target).mean()
            rows.append((right, mask[:, 0].sum() / mask.sum(), unrouted.mean(), mask.sum(1).mean()))
    return Run(*np.mean(rows, 0).tolist())


def count(opt: Adam) -> list[StepTerm]:
    return [ex.sdl(target=K0, diversity=0.0, count=0.01)]


class Balance(ex.RouterTerm):
    """0.01 · E · Σ f_e · P_e of the router's scores, as the balance loss of a switch transformer."""

    def of(self, layer: ex.RoutedLayer) -> Tensor:
        scores = call("softmax", layer.logits, axis=-1)
        share = layer.number(layer.mask).sum(axis=0) / layer.number(layer.mask).sum()
        return (share.detach() * scores.mean(axis=0)).sum() * float(0.01 * EXPERTS)


LOSSES: Mapping[str, Terms] = {
    "none": lambda opt: [],
    "count alone": count,
    "balance 0.01": lambda opt: [*count(opt), Balance()],
    "sdl": lambda opt: [ex.sdl(target=K0)],
    "ghost 0.1": lambda opt: [*count(opt), ex.ghost()],
    "surprise_min 1e-3": lambda opt: [*count(opt), ex.surprise_min()],
    "surprise_min 1, beta 0": lambda opt: [*count(opt), ex.surprise_min(weight=1.0, beta=0.0)],
    "surprise_min 1, beta 1": lambda opt: [*count(opt), ex.surprise_min(weight=1.0)],
    "long_surprise 1e-3": lambda opt: [*count(opt), ex.long_surprise(optimizer=opt)],
}
"""Name -> terms of the step. All but `none` and `sdl` have the count of sdl, weight 0.01."""


def table(figure: Figure, variants: Mapping[str, Callable[[int], Run]], seeds: int = SEEDS) -> Figure:
    for name, run in variants.items():
        runs = [run(seed) for seed in range(seeds)]
        mean = {label: float(np.mean([getattr(r, label) for r in runs])) for label in ("inert", "unrouted", "k")}
        accuracy = [r.accuracy for r in runs]
        note = f"expert 0 {mean['inert']:.3f}, unrouted {mean['unrouted']:.3f}, {mean['k']:.2f} experts per token"
        figure.add(name, float(np.mean(accuracy)), "accuracy", note, seeds=accuracy)
        print(name, f"{np.mean(accuracy):.3f}", note, file=sys.stderr, flush=True)
    return figure


def losses() -> Figure:
    """One row per loss, the losers too."""
    figure = Figure("Losses that train routers, expert 0 inert at first", f"8 clusters, 8 experts, {SEEDS} seeds")
    variants = {name: lambda seed, terms=terms: trained(seed, terms) for name, terms in LOSSES.items()}
    return table(figure, variants)


def null_share() -> Figure:
    """All experts live: with and without the null share and ghosts."""
    figure = Figure("Null share and ghosts, all experts live", f"8 clusters, 8 experts, {SEEDS} seeds")
    variants = {
        f"{name}{', null share' if null else ''}": lambda seed, terms=LOSSES[name], null=null: trained(
            seed, terms, null=null, inert=False
        )
        for name in ("count alone", "ghost 0.1")
        for null in (False, True)
    }
    return table(figure, variants)
