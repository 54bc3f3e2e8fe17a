"""Eager code beside torch eager: one small op, training steps of two small networks, a batch beside a loop."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

import graphwright as gw
from benchmarks.harness import Figure, add_rounds, rounds
from graphwright import nn, optim

SIZES = tuple(1 << k for k in range(6, 23, 2))
SHOWN = (64, 4096, 65536, 1 << 20)
CLOSE = 1.1
"""The ratio that counts as equal."""


def run() -> list[Figure]:
    return [small_op(), training("MLP 64-128-128-10", mlp), training("CNN of 8x8 digits", cnn), batches()]


def small_op() -> Figure:
    figure = Figure("One addition, eager", "f32, one thread; with the tape and without")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for taped in (False, True):
            close = None
            for n in SIZES:
                a = np.ones(n, np.float32)
                x, tx = gw.tensor(a, requires_grad=taped), torch.tensor(a).requires_grad_(taped)
                what = f"{n:,} elements, {'taped' if taped else 'no gradient'}"
                taken = rounds(
                    {f"graphwright: {what}": lambda x=x: x + x, f"torch: {what}": lambda t=tx: t + t},
                    n=9,
                    inner=max(20, 200_000 // (n // 64 + 100)),
                )
                ours, theirs = (float(np.median(t)) for t in list(taken.values())[:2])
                close = None if ours >= CLOSE * theirs else close or n
                if n in SHOWN:
                    add_rounds(figure, {who: t for who, t in taken.items() if who != "A/A"}, "us")
                    figure.notes.append(f"{what}: {ours / theirs:.1f} times torch")
            least = "no size measured" if close is None else f"{close:,} elements"
            figure.notes.append(f"{'taped' if taped else 'no gradient'}: below {CLOSE} times torch from {least} on")
    finally:
        torch.set_num_threads(threads)
    return figure


def mlp(xp: Any) -> Any:
    dims = (64, 128, 128, 10)
    layers = [m for a, b in pairwise(dims) for m in (xp.Linear(a, b), xp.ReLU())]
    return xp.Sequential(*layers[:-1])


def cnn(xp: Any) -> Any:
    return xp.Sequential(
        xp.Conv2d(1, 16, 3, padding=1), xp.ReLU(), xp.MaxPool2d(2),
        xp.Conv2d(16, 32, 3, padding=1), xp.ReLU(), xp.MaxPool2d(2), xp.Flatten(), xp.Linear(128, 10),
    )  # fmt: skip


def training(name: str, make: Callable[[Any], Any], batch: int = 64) -> Figure:
    rng = np.random.default_rng(0)
    shape = (batch, 64) if make is mlp else (batch, 1, 8, 8)
    x, t = rng.normal(size=shape).astype("f4"), rng.integers(0, 10, batch)
    ours, theirs = make(nn), make(torch.nn)
    ours.load_state_dict({k: v.numpy() for k, v in theirs.state_dict().items()})
    opt, topt = optim.AdamW(ours, lr=1e-3), torch.optim.AdamW(theirs.parameters(), lr=1e-3, fused=True)
    gx, gt, tx, tt = gw.tensor(x), gw.tensor(t), torch.tensor(x), torch.tensor(t)

    def step(x: gw.Tensor, t: gw.Tensor) -> gw.Tensor:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(ours(x), t)
        loss.backward()
        opt.step()
        return loss

    def torch_step() -> torch.Tensor:
        topt.zero_grad()
        loss = torch.nn.functional.cross_entropy(theirs(tx), tt)
        loss.backward()
        topt.step()
        return loss.detach()

    first = [float(step(gx, gt)), float(torch_step())]
    assert abs(first[0] - first[1]) < 1e-4, first
    compiled = gw.compile(step)
    calls = {
        "graphwright, eager": lambda: step(gx, gt),
        "torch eager": torch_step,
        "graphwright, the same step compiled": lambda: compiled(gx, gt),
    }
    taken = rounds(calls, n=11, inner=10)
    figure = Figure(f"Training step of a {name}, batch {batch}", "f32, cross entropy, AdamW; first losses agree")
    add_rounds(figure, taken, "us")
    eager, torchs, fast = (float(np.median(taken[who])) for who in calls)
    figure.notes.append(f"eager takes {eager / torchs:.1f} times torch's time, compiled {fast / torchs:.2f} times")
    return figure


def batches(batch: int = 64) -> Figure:
    rng = np.random.default_rng(0)
    model = mlp(nn)
    x = gw.tensor(rng.normal(size=(batch, 64)).astype("f4"))
    rows = [gw.tensor(r) for r in np.split(x.numpy().copy(), batch)]
    with gw.no_grad():
        taken = rounds({"one batch": lambda: model(x), "a loop over its rows": lambda: [model(r) for r in rows]}, n=11)
    figure = Figure(f"Forward of an MLP, {batch} rows", "f32, eager, no gradient")
    add_rounds(figure, {who: t for who, t in taken.items() if who != "A/A"}, "us")
    one, loop = (float(np.median(taken[who])) for who in ("one batch", "a loop over its rows"))
    figure.notes.append(f"the batch is {loop / one:.1f} times faster")
    return figure
