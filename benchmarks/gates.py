"""What gates cost: a training step with gates on all heads and neurons beside one without, and torch with masks."""

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

BATCH, WINDOW = 8, 128
SIZES = (64, 128, 128, 10)


def run() -> list[Figure]:
    return [bundled(), perceptron()]


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
    figure.says.append(f"{count} gates cost {100 * (ratio - 1):.1f} % of a step (median of paired rounds)")
    return figure


def stepping(p: gw.Program, given: tuple) -> Callable[[], object]:
    """The compiled step on fixed arguments."""
    opt = AdamW(p, 1e-4, weight_decay=0.0)

    @gw.compile
    def step(ids: gw.Tensor, positions: gw.Tensor, targets: gw.Tensor) -> gw.Tensor:
        opt.zero_grad()
        loss = functional.cross_entropy(p(ids=ids, positions=positions).float(), targets)
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
