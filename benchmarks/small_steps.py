"""Whole training steps of small networks, forward to Adam, beside torch eager, torch.compile and JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import graphwright as gw
from benchmarks.harness import Figure, add_rounds, interval, rounds
from graphwright import nn, optim

MLPS = (((2, 8, 1), 4), ((64, 128, 128, 10), 32), ((256, 512, 512, 256), 128))
LR, BETAS, EPS = 1e-2, (0.9, 0.999), 1e-8


def run() -> list[Figure]:
    return [mlp(dims, batch) for dims, batch in MLPS] + [scalars()]


def mlp(dims: Sequence[int], batch: int) -> Figure:
    rng = np.random.default_rng(0)
    weights = [((rng.normal(size=(b, a)) / np.sqrt(a)).astype("f4"), np.zeros(b, "f4")) for a, b in pairwise(dims)]
    x, t = rng.normal(size=(batch, dims[0])).astype("f4"), rng.normal(size=(batch, dims[-1])).astype("f4")
    name = "-".join(map(str, dims))
    makers = {
        "graphwright": ours,
        "torch eager, fused Adam": eager,
        "torch.compile, fused Adam": compiled,
        "JAX jit, one vector": xla,
        "JAX jit, a tree": trees,
    }
    return compare(
        f"Training step of an MLP {name}, batch {batch}",
        "f32, tanh, mean square, Adam; parameters and moments stay where they are",
        {who: make(weights, x, t) for who, make in makers.items()},
        inner=max(3, int(2e7 / (sum(a * b for a, b in pairwise(dims)) * batch + 1e5))),
    )


def compare(title: str, conditions: str, steps: dict[str, Callable[[], Any]], inner: int) -> Figure:
    losses = {who: [float(step()) for _ in range(10)][-1] for who, step in steps.items()}
    spread = max(losses.values()) - min(losses.values())
    assert spread < 1e-3 * max(1.0, max(losses.values())), losses
    figure = Figure(title, f"{conditions}; losses after 10 steps agree to {spread:.1e}")
    steps["graphwright, bound memory"] = steps["graphwright"].bound  # type: ignore[attr-defined]
    taken = rounds(steps, n=15, warm=3, inner=inner)
    add_rounds(figure, taken, "us")
    mine = np.median(taken["graphwright"])
    bound = np.median(taken["graphwright, bound memory"])
    for who in steps:
        if not who.startswith("graphwright"):
            peer = np.median(taken[who])
            low, high = interval(taken[who])
            figure.notes.append(
                f"{who}: {peer / mine:.1f} times the call, {peer / bound:.1f} times bound memory "
                f"(peer {1e6 * low:.4g} to {1e6 * high:.4g} us)"
            )
    return figure


class Ours:
    def __init__(self, step: Callable[..., Any], *arrays: np.ndarray) -> None:
        self.step, self.arrays = gw.compile(step), [gw.tensor(a) for a in arrays]
        self.bound = self.step.bind(*self.arrays)
        for memory, array in zip(self.bound.inputs.values(), arrays, strict=True):
            memory[...] = array

    def __call__(self) -> gw.Tensor:
        return self.step(*self.arrays)


def ours(weights: list, x: np.ndarray, t: np.ndarray) -> Ours:
    layers: list[nn.Module] = []
    for w, b in weights:
        layer = nn.Linear(w.shape[1], w.shape[0])
        layer.weight.assign(gw.tensor(w))
        layer.bias.assign(gw.tensor(b))  # type: ignore[union-attr]
        layers += [layer, nn.Tanh()]
    model = nn.Sequential(*layers[:-1])
    opt = optim.Adam(model.parameters(), lr=LR, betas=BETAS, eps=EPS)

    def step(x: gw.Tensor, t: gw.Tensor) -> gw.Tensor:
        opt.zero_grad()
        loss = ((model(x) - t) ** 2).mean()
        loss.backward()
        opt.step()
        return loss

    return Ours(step, x, t)


def _torch(weights: list, x: np.ndarray, t: np.ndarray) -> tuple[Any, Any, Callable[[], Any]]:
    params = [torch.nn.Parameter(torch.tensor(a)) for pair in weights for a in pair]
    opt = torch.optim.Adam(params, lr=LR, betas=BETAS, eps=EPS, fused=True)
    tx, tt = torch.tensor(x), torch.tensor(t)

    def loss_of() -> torch.Tensor:
        h = tx
        for i in range(0, len(params), 2):
            h = torch.nn.functional.linear(h, params[i], params[i + 1])
            h = torch.tanh(h) if i + 2 < len(params) else h
        return ((h - tt) ** 2).mean()

    return opt, params, loss_of


def eager(weights: list, x: np.ndarray, t: np.ndarray) -> Callable[[], Any]:
    opt, _, loss_of = _torch(weights, x, t)

    def step() -> Any:
        opt.zero_grad()
        loss = loss_of()
        loss.backward()
        opt.step()
        return loss.detach()

    return step


def compiled(weights: list, x: np.ndarray, t: np.ndarray) -> Callable[[], Any]:
    torch._dynamo.reset()
    opt, _, loss_of = _torch(weights, x, t)
    forward = torch.compile(loss_of)

    def step() -> Any:
        opt.zero_grad()
        loss = forward()
        loss.backward()
        opt.step()
        return loss.detach()

    return step


def adam(params: Any, grads: Any, m: Any, v: Any, count: Any) -> tuple:
    """One step of Adam on trees."""
    count = count + 1
    m = jax.tree.map(lambda m, g: BETAS[0] * m + (1 - BETAS[0]) * g, m, grads)
    v = jax.tree.map(lambda v, g: BETAS[1] * v + (1 - BETAS[1]) * g * g, v, grads)
    root = jnp.sqrt(1 - BETAS[1] ** count)
    rate = LR / (1 - BETAS[0] ** count)
    params = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) / root + EPS), params, m, v)
    return params, m, v, count


def flat_step(loss_of: Callable[..., Any], start: np.ndarray, *data: np.ndarray) -> Callable[[], Any]:
    """JAX at its best here: all parameters in one donated vector, so that few buffers are passed."""

    def step(params: Any, m: Any, v: Any, count: Any, *data: Any) -> tuple:
        loss, grads = jax.value_and_grad(loss_of)(params, *data)
        return (loss, *adam(params, grads, m, v, count))

    jitted = jax.jit(step, donate_argnums=(0, 1, 2, 3))
    state = [jnp.asarray(start), jnp.zeros_like(start), jnp.zeros_like(start), jnp.float32(0)]
    arrays = [jnp.asarray(a) for a in data]

    def call() -> Any:
        nonlocal state
        loss, *state = jitted(*state, *arrays)
        return loss.block_until_ready()

    return call


def trees(weights: list, x: np.ndarray, t: np.ndarray) -> Callable[[], Any]:
    """JAX as it is usually written: a tree of parameters."""

    def step(params: Any, m: Any, v: Any, count: Any, x: Any, t: Any) -> tuple:
        def loss_of(params: Any) -> Any:
            h = x
            for i, (w, b) in enumerate(params):
                h = h @ w.T + b
                h = jnp.tanh(h) if i + 1 < len(params) else h
            return ((h - t) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        return (loss, *adam(params, grads, m, v, count))

    jitted = jax.jit(step, donate_argnums=(0, 1, 2, 3))
    params = [(jnp.asarray(w), jnp.asarray(b)) for w, b in weights]
    state = [params, *(jax.tree.map(jnp.zeros_like, params) for _ in "mv"), jnp.float32(0)]
    arrays = jnp.asarray(x), jnp.asarray(t)

    def call() -> Any:
        nonlocal state
        loss, *state = jitted(*state, *arrays)
        return loss.block_until_ready()

    return call


def xla(weights: list, x: np.ndarray, t: np.ndarray) -> Callable[[], Any]:
    shapes = [a.shape for pair in weights for a in pair]
    ends = np.cumsum([int(np.prod(s)) for s in shapes])

    def loss_of(flat: Any, x: Any, t: Any) -> Any:
        parts = [p.reshape(s) for p, s in zip(jnp.split(flat, ends[:-1]), shapes, strict=True)]
        for i in range(0, len(parts), 2):
            x = x @ parts[i].T + parts[i + 1]
            x = jnp.tanh(x) if i + 2 < len(parts) else x
        return ((x - t) ** 2).mean()

    return flat_step(loss_of, np.concatenate([a.reshape(-1) for pair in weights for a in pair]), x, t)


def scalars(nodes: int = 50) -> Figure:
    """A random DAG of scalars, each a sum, product or tanh of earlier ones, all of which reach the loss."""
    rng = np.random.default_rng(0)
    picks = [
        (int(rng.integers(max(0, i - 8), i)), int(rng.integers(0, i)), int(rng.integers(3))) for i in range(2, nodes)
    ]
    start = rng.normal(size=nodes).astype("f4") * 0.5

    def evaluate(values: list[Any], weights: Any, tanh: Callable[[Any], Any]) -> Any:
        for i, (a, b, kind) in enumerate(picks, start=2):
            u, w = values[a], values[b]
            values.append((u + w, u * w, tanh(u))[kind] * weights[i])
        total = values[0]
        for value in values[1:]:
            total = total + value**2
        return total

    params = [gw.Parameter(np.float32(v), name=f"w{i}") for i, v in enumerate(start)]
    opt = optim.Adam(params, lr=LR, betas=BETAS, eps=EPS)

    def step(x: gw.Tensor) -> gw.Tensor:
        opt.zero_grad()
        loss = evaluate([x, x * params[0] + params[1]], params, lambda u: u.tanh())
        loss.backward()
        opt.step()
        return loss

    x = np.float32(0.3)
    tp = [torch.nn.Parameter(torch.tensor(v)) for v in start]
    topt = torch.optim.Adam(tp, lr=LR, betas=BETAS, eps=EPS, fused=True)

    def torch_step() -> Any:
        topt.zero_grad()
        tx = torch.tensor(x)
        loss = evaluate([tx, tx * tp[0] + tp[1]], tp, torch.tanh)
        loss.backward()
        topt.step()
        return loss.detach()

    def jax_loss(flat: Any, x: Any) -> Any:
        return evaluate([x, x * flat[0] + flat[1]], flat, jnp.tanh)

    return compare(
        f"Training step of a scalar DAG of {nodes} nodes, all of which reach the loss",
        "f32, Adam",
        {
            "graphwright": Ours(step, x),
            "torch eager, fused Adam": torch_step,
            "JAX jit, one vector": flat_step(jax_loss, start, x),
        },
        inner=50,
    )
