"""What gates cost and find: steps with gates, without, and of torch with masks; planted edges; speed after hardening.

What learned pruning is worth beside recipes is in `benchmarks.learned`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise

import numpy as np
import torch

import graphwright as gw
from benchmarks.harness import Figure, add_rounds, rounds
from graphwright import structure as st
from graphwright.nn import functional
from graphwright.optim import AdamW
from graphwright.plan.describe import Timing
from graphwright.program.cost import flops as program_flops
from graphwright.testing.planted import Edges, Sources

BATCH, WINDOW = 8, 128
SIZES = (64, 128, 128, 10)

PARTS = ("bundled", "perceptron", "planted", "sources", "hardened")


def bundled() -> Figure:
    """Forward, backward and AdamW of the bundled model; gated: also the gradient and step of 2 072 logits."""
    figure = Figure(
        "Training step with gates on every head and neuron",
        f"bundled model, f32, {BATCH} x {WINDOW} bytes, compiled step with AdamW; gates are hard_concrete, in training",
    )
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 256, (BATCH, WINDOW + 1))
    positions = np.ascontiguousarray(np.broadcast_to(np.arange(WINDOW), (BATCH, WINDOW)))
    given = ids[:, :-1].copy(), positions, ids[:, 1:].copy()
    calls, count, stack = {}, 0, ExitStack()
    for name in ("no gates", "gated"):
        p = gw.open("bundled", dtype="float32").program
        if name == "gated":
            p.select("layers.*.attn").heads.gate()
            p.select("layers.*.mlp").neurons.gate()
            stack.enter_context(st.DifferentiableGraph(p).using("train"))
            count = p.gates().count
        calls[name] = stepping(p, given)
    with stack:
        taken = rounds(calls)
    add_rounds(figure, taken)
    ratio = np.median(np.asarray(taken["gated"]) / np.asarray(taken["no gates"]))
    figure.notes.append(f"{count} gates cost {100 * (ratio - 1):.1f} % of a step (median of paired rounds)")
    return figure


def stepping(p: gw.Program, given: tuple) -> Callable[[], object]:
    """The compiled step on fixed arguments."""
    opt = AdamW(p, 1e-4, weight_decay=0.0)

    @gw.compile
    def step(ids: gw.Tensor, positions: gw.Tensor, targets: gw.Tensor) -> gw.Tensor:
        opt.zero_grad()
        loss = functional.cross_entropy(p(ids=ids, positions=positions)["logits"].float(), targets, dim=-1)
        loss.backward()
        opt.step()
        return loss

    return lambda: step(*given)


def perceptron(batch: int = 64) -> Figure:
    """A joint step of an MLP with gated neurons: ours, ours without gates, and torch with sigmoid masks."""
    figure = Figure(
        "Joint step of an MLP with gated neurons",
        f"{'-'.join(map(str, SIZES))}, f32, batch {batch}, Adam on weights and logits, sigmoid gates, sparsity 0.1",
    )
    rng = np.random.default_rng(0)
    weights = [(rng.normal(size=(n, m)) / m**0.5).astype("f4") for m, n in pairwise(SIZES)]
    x, y = rng.normal(size=(batch, SIZES[0])).astype("f4"), rng.normal(size=(batch, SIZES[-1])).astype("f4")
    calls, views = {}, {}
    for name in ("gated", "no gates"):
        p = mlp(weights)
        if name == "gated":
            for axis in [a for a in p.axes().values() if not a.frozen]:
                axis.units().gate("sigmoid")
        view = views[name] = st.DifferentiableGraph(p)
        penalties = [st.sparsity(0.1, weighted=False)] if name == "gated" else []
        opt = st.JointOptimizer(view, "loss", penalties, params=1e-3, gates=0.02)
        calls[name] = lambda opt=opt: opt.step({"x": x, "y": y})
    twin = masks(weights, x, y)
    for _ in range(3):
        assert abs(calls["gated"]().loss - twin()) < 1e-4
    calls["torch with masks"] = twin
    add_rounds(figure, rounds(calls, inner=10))
    return figure


def mlp(weights: list[np.ndarray]) -> gw.Program:
    b = gw.Builder("mlp")
    h, y = b.input("x", ("B", SIZES[0])), b.input("y", ("B", SIZES[-1]))
    for k, w in enumerate(weights):
        h = b.linear(h, b.param(f"w{k}", w), name=f"fc{k}")
        h = b.tanh(h, name=f"h{k}") if k < len(weights) - 1 else h
    gap = b.sub(h, y, name="gap")
    b.output(b.mean(b.mul(gap, gap), axes=(0, 1), name="mse"), "loss")
    return b.build()


def masks(weights: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> Callable[[], float]:
    """The same in torch: sigmoid masks on the hidden layers, one fused Adam."""
    ws = [torch.tensor(w, requires_grad=True) for w in weights]
    zs = [torch.ones(n, requires_grad=True) for n in SIZES[1:-1]]
    groups = [{"params": ws, "lr": 1e-3}, {"params": zs, "lr": 0.02}]
    adam, given, wanted = torch.optim.Adam(groups, fused=True), torch.tensor(x), torch.tensor(y)

    def step() -> float:
        h = given
        for k, w in enumerate(ws):
            h = h @ w.T
            h = torch.tanh(h) * torch.sigmoid(zs[k]) if k < len(zs) else h
        loss = ((h - wanted) ** 2).mean() + 0.1 * torch.sigmoid(torch.cat(zs)).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        return loss.item()

    return step


def planted(seeds: int = 5, steps: int = 300) -> Figure:
    """Which of 56 edges carry signal is known; hard concrete gates, sparsity 0.1, cut at 1/2."""
    figure = Figure(
        "Planted edges kept and others cut",
        f"12 of 56 edges carry signal, {steps} steps, gates at 0.1, weights at 0.01; loss on 512 fresh samples",
    )
    for seed in range(seeds):
        problem = Edges(seed)
        problem.gate("hard_concrete")
        view = st.DifferentiableGraph(problem.program, seed=seed)
        opt = st.JointOptimizer(view, "loss", [st.sparsity(0.1)], params=0.01, gates=0.1, steps=steps)
        for _ in range(steps):
            opt.step(problem.batch())
        done = view.discretize(0.5, probe=problem.batch(512))
        kept, cut = problem.found({e.name for e in done.elements} - set(done.cut))
        assert done.loss_after is not None
        assert done.loss_before is not None
        note = f"{100 * cut:.0f} % of the others cut; loss after {done.loss_after / done.loss_before:.3f} of before"
        figure.add(f"seed {seed}", 100 * kept, "% of planted kept", note)
    return figure


SOURCES = {
    "3 of 8": {},
    "5 of 20": {"sources": 20, "planted": 5},
    "10 of 40": {"sources": 40, "planted": 10},
    "3 of 8, correlated 0.5": {"correlated": 0.5},
    "3 of 8, targets 0.3": {"scale": 0.3},
}
RELAXED = {
    "hard_concrete": ("hard_concrete", None, None),
    "sigmoid": ("sigmoid", None, None),
    "sigmoid, T falls": ("sigmoid", None, 0.1),
    "concrete": ("concrete", None, None),
    "concrete, T falls": ("concrete", None, 0.1),
    "ste": ("ste", 0.9, None),
}


def sources(seeds: int = 5, steps: int = 300) -> Figure:
    """Sources with weights of their own, trained with the gates: seeds in which the planted ones are found."""
    figure = Figure(
        "Planted sources found, by kind of gate",
        f"{steps} steps, sparsity 0.1, gates at 0.1, weights at 0.01; seeds with 95 % of planted edges kept, 90 % of "
        "the others cut, and a loss after the cut of at most 1.05 of before",
    )
    for kind, (name, p0, end) in RELAXED.items():
        right = {title: sum(_finds(Sources(seed, **options), seed, name, p0, end, steps) for seed in range(seeds))
                 for title, options in SOURCES.items()}  # fmt: skip
        figure.add(kind, sum(right.values()), f"of {seeds * len(SOURCES)}",
                   "; ".join(f"{title}: {n}" for title, n in right.items()))  # fmt: skip
    return figure


def _finds(problem: Sources, seed: int, kind: str, p0: float | None, end: float | None, steps: int) -> bool:
    p = problem.program
    with p.edit("gates on all edges") as e:
        e.gate(list(p.in_edges("total")), kind, init=None if p0 is None else st.init_for(p0, kind))
    view = st.DifferentiableGraph(
        p, seed=seed, schedule=None if end is None else st.TemperatureSchedule(1.0, end, steps)
    )
    opt = st.JointOptimizer(view, "loss", [st.sparsity(0.1)], params=0.01, gates=0.1, steps=steps)
    for _ in range(steps):
        opt.step(problem.batch())
    done = view.discretize(0.5, probe=problem.batch(512))
    there = {e.name for e in done.elements} - set(done.cut)
    others = len(done.elements) - len(problem.planted)
    assert done.loss_after is not None
    assert done.loss_before is not None
    return (
        len(there & problem.planted) >= 0.95 * len(problem.planted)
        and len(there - problem.planted) <= 0.1 * others
        and done.loss_after <= 1.05 * done.loss_before
    )


def hardened(targets: tuple[float, ...] = (0.7, 0.5), steps: int = 60) -> Figure:
    """A forward pass of the bundled model before and after learned gates on heads and neurons were hardened."""
    figure = Figure(
        "Speed after hardening",
        f"bundled model, f32, {BATCH} x {WINDOW} bytes, compiled forward; gates learned in {steps} steps",
    )
    ids = np.random.default_rng(0).integers(0, 256, (BATCH, WINDOW))
    feeds = {"ids": ids, "positions": np.ascontiguousarray(np.broadcast_to(np.arange(WINDOW), ids.shape))}
    calls, flops, plans = {}, {}, {}
    for target in (1.0, *targets):
        name = f"{target:.0%} of heads and neurons"
        model = gw.open("bundled", dtype="float32")
        if target < 1:
            st.learn(model, target=target, steps=steps, gates=0.2, batch=4, window=64)
        flops[name] = program_flops(model.program, {"B": BATCH, "T": WINDOW})
        plan = plans[name] = model.program.compile(ids=ids.shape, positions=ids.shape)
        calls[name] = lambda plan=plan: plan(feeds)
    taken = rounds(calls)
    add_rounds(figure, taken)
    whole = next(iter(flops))
    for name in list(flops)[1:]:
        gone = 1 - flops[name] / flops[whole]
        saved = 1 - np.median(np.asarray(taken[name]) / np.asarray(taken[whole]))
        figure.notes.append(
            f"{name}: {gone:.0%} fewer operations, {saved:.0%} less time, {saved / gone:.2f} of the share"
        )
    timings = plans[whole].profile(feeds).timings
    products = [t for t in timings if t.op == "linear"]
    share = [sum(f(t) for t in products) / sum(f(t) for t in timings) for f in (_flops, _seconds)]
    figure.notes.append(
        f"linear maps, which cutting makes smaller: {share[0]:.0%} of the operations, {share[1]:.0%} of the time"
    )
    return figure


def _flops(t: Timing) -> float:
    return float(t.cost.flops)


def _seconds(t: Timing) -> float:
    return t.seconds
