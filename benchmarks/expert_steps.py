"""Training steps of a mixture: after an edit of one expert, with few experts touched, and heads that tokens choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

import graphwright as gw
from benchmarks.harness import Figure, add_rounds, rounds
from graphwright import experts as ex
from graphwright import nn
from graphwright.autograd import Tensor
from graphwright.nn import functional
from graphwright.optim import AdamW

PARTS = ("edits", "lazy", "heads")
DIM, HIDDEN, EXPERTS, K, TOKENS = 128, 64, 64, 2, 512


class Net(nn.Module):
    """x + mixture(x)."""

    def __init__(self) -> None:
        self.mlp = nn.MoE(DIM, HIDDEN, EXPERTS, K, seed=0)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": x + self.mlp(x)}


class Peer(torch.nn.Module):
    """The same with a `ModuleList` of experts, in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = torch.nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(K)
        total = x
        for e, expert in enumerate(self.experts):
            rows, at = torch.where(chosen == e)
            if len(rows):
                total = total.index_add(0, rows, expert(x[rows]) * weights[rows, at, None])
        return total

    def cut(self, e: int) -> None:
        """Remove an expert and its row of the gate."""
        del self.experts[e]
        kept = torch.nn.Linear(DIM, len(self.experts), bias=False)
        kept.weight.data = torch.cat([self.gate.weight.data[:e], self.gate.weight.data[e + 1 :]])
        self.gate = kept

    def add(self) -> None:
        """Append a new expert and a row of the gate."""
        self.experts.append(Expert())
        grown = torch.nn.Linear(DIM, len(self.experts), bias=False)
        grown.weight.data[:-1] = self.gate.weight.data
        self.gate = grown


class Expert(torch.nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((DIM, HIDDEN), (DIM, HIDDEN), (HIDDEN, DIM))
        self.gate, self.up, self.down = (torch.nn.Linear(*shape, bias=False) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def _loss(out: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(out, target)


def _data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(TOKENS, DIM)).astype("f4") for name in ("x", "target")}


def _ours(lazy: bool = False) -> tuple[gw.Program, Any, dict[str, np.ndarray]]:
    data = _data()
    program = gw.trace(Net(), data["x"])
    return program, gw.compile_step(program, _loss, AdamW(program, lr=1e-4, lazy=lazy), data), data


def edits(repeats: int = 7) -> Figure:
    """From the beginning of an edit of one of 64 experts to the end of the next training step."""
    figure = Figure(
        "Edit of one expert to the end of the next step",
        f"{EXPERTS} experts {DIM} -> {HIDDEN} -> {DIM}, k = {K}, {TOKENS} tokens, AdamW; torch: ModuleList, eager",
    )
    program, train, data = _ours()
    (layer,) = ex.routed_layers(program)
    train(data)
    does: dict[str, Callable[[Any], object]] = {
        "remove": lambda e: e.cut_units(program.axes()[layer + ".experts"].units([5])),
        "add": lambda e: ex.add(e, layer, birth="open"),
        "clone": lambda e: ex.clone(e, layer, 3),
    }
    plain = _timed(lambda: train(data), repeats)
    figure.add("graphwright: a step without an edit", 1e3 * plain, "ms", "moments of all experts kept in every row")
    for name, do in does.items():
        taken = []
        for _ in range(repeats):
            started = perf_counter()
            with program.edit(name) as e:
                do(e)
            train(data)
            taken.append(perf_counter() - started)
            program.undo()
            train(data)
        figure.add(f"graphwright: {name}", 1e3 * float(np.median(taken)), "ms")
    x, target = (torch.from_numpy(data[name]) for name in ("x", "target"))
    peer = Peer()

    def step(optimizer: torch.optim.Optimizer, run: Callable[..., torch.Tensor]) -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(run(x), target).backward()
        optimizer.step()

    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-4)
    step(optimizer, peer)
    figure.add("torch: a step without an edit", 1e3 * _timed(lambda: step(optimizer, peer), repeats), "ms")
    for name, change in (("remove", lambda: peer.cut(5)), ("add", peer.add)):
        taken = []
        for _ in range(repeats):
            started = perf_counter()
            change()
            step(torch.optim.AdamW(peer.parameters(), lr=1e-4), peer)
            taken.append(perf_counter() - started)
        figure.add(f"torch: {name}, new optimizer", 1e3 * float(np.median(taken)), "ms", "moments of all experts lost")
    return figure


def _timed(call: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        started = perf_counter()
        call()
        taken.append(perf_counter() - started)
    return float(np.median(taken))


def lazy(touched: Sequence[int] = (4, 16, 64)) -> Figure:
    """Steps of AdamW with a lazy optimizer, when tokens choose only some of the experts."""
    figure = Figure(
        "Training step, few experts touched",
        f"{EXPERTS} experts {DIM} -> {HIDDEN} -> {DIM}, k = {K}, {TOKENS} tokens, AdamW",
    )
    for count in touched:
        calls: dict[str, Callable[[], object]] = {}
        for name, how in (("lazy", True), ("not lazy", False)):
            program, train, data = _ours(how)
            _prefer(program, count)
            calls[f"{count} of {EXPERTS} experts: {name}"] = lambda train=train, data=data: train(data)
        peer = Peer()
        with torch.no_grad():
            peer.gate.weight[:] = torch.from_numpy(_rows(count))
        x, target = (torch.from_numpy(_data()[name]) for name in ("x", "target"))
        optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-4)

        def step(peer: Peer = peer, optimizer: Any = optimizer, x: Any = x, target: Any = target) -> None:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(peer(x), target).backward()
            optimizer.step()

        calls[f"{count} of {EXPERTS} experts: torch, grad=None"] = step
        taken = rounds(calls, n=9)
        add_rounds(figure, {name: samples for name, samples in taken.items() if name != "A/A"})
    return figure


def _rows(count: int) -> np.ndarray:
    """Return rows of a router by which tokens choose among the first `count` experts, as these have large rows."""
    rows = np.random.default_rng(1).normal(size=(EXPERTS, DIM)).astype("f4") / DIM**0.5
    rows[max(count, K) :] = 1e-6 * rows[max(count, K) :]
    if count < EXPERTS:  # both signs of each row, so that one of the two is always above 0
        half = max(count, K) // 2
        rows[half : 2 * half] = -rows[:half]
    return rows


def _prefer(program: gw.Program, count: int) -> None:
    with program.edit("tokens choose few experts") as e:
        e.set_weight("mlp.router.weight", _rows(count))


def heads(lengths: Sequence[int] = (128, 512, 2048), shares: Sequence[float] = (1 / 16, 1 / 8, 1 / 4, 1 / 2)) -> Figure:
    """Forward of heads that tokens choose, beside `sdpa` with as many heads that all tokens use."""
    dim, count, size = 256, 16, 32
    figure = Figure("Heads that tokens choose", f"{count} heads of {size}, width {dim}, one sequence, f32, forward")
    for length in lengths:
        x = np.random.default_rng(0).normal(size=(1, length, dim)).astype("f4")
        calls: dict[str, Callable[[], object]] = {}
        for share in shares:
            layer = ex.DynSMHA(dim, count, size, share * count, shared=0, seed=0)
            program = gw.trace(layer, x)
            name = program.path(program.inputs()[0])
            ex.calibrate(program, {name: x}, k0=share * count)
            for algorithm in ("sorted", "dense"):
                run, given = program.compile({name: x}, experts=algorithm), {name: x}
                calls[f"{length} tokens, share {share:g}, {algorithm}"] = lambda run=run, given=given: run(given)
        dense = gw.compile(nn.MultiHeadAttention(dim, count, head_dim=size, seed=0).forward)
        peer, inputs = Dense(dim, count, size), torch.from_numpy(x)
        calls[f"{length} tokens, all heads in one layer"] = lambda dense=dense, x=x: dense(x)
        calls[f"{length} tokens, torch sdpa"] = lambda peer=peer, inputs=inputs: peer(inputs)
        taken = rounds(calls, n=7)
        add_rounds(figure, {name: samples for name, samples in taken.items() if name != "A/A"})
    return figure


class Dense(torch.nn.Module):
    """Attention of torch."""

    def __init__(self, dim: int, heads: int, size: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = torch.nn.Linear(dim, 3 * heads * size, bias=False), torch.nn.Linear(heads * size, dim)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))
